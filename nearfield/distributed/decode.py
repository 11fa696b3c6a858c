"""A step over keys of all ranks: each attends to its own, and the results are merged by their log-normalisers.

In shapes, `heads` counts the key heads of all batch entries, and `group` the query heads that share one.

A step of R ranks exchanges, per key head and row, and each number with every other rank:

    scores        P numbers: the best of the own cells. All ranks sort what all of them offer, so that each knows which of its
                  cells are among the P best of all
    outputs       group (value_dim + 1) numbers: outputs and their log-normalisers

Query heads that share keys open cells together, those in which one of them may have the largest share of its weights. For that
each needs its log-normaliser over the keys of all ranks. A step of one row, which waits for messages and not for their size,
sends it along: group numbers, and not the P best cells but the P best ones of each query, with the scores of all queries, which
are group^2 P numbers. The P best of all are among them. Several rows exchange normalisers first.

and, once after a segment was closed, value_dim dim + 1 numbers per key head: the covariance of values and keys is that of all
cells. A step that opens all cells, and one with `balance="local"`, exchanges outputs alone.

The outputs are gathered and merged by each rank, always in the order of ranks, and not summed by all-reduce, which would have to
know the largest normaliser first, and promises no two ranks the same bits. Then they would draw different tokens one day.
Gathered, a rank sends (R - 1) (value_dim + 1) numbers; summed in a ring 2 (R - 1) / R times as many as one has: the same for two
ranks, half as much for four. At a few thousand bytes, either takes as long as a message takes to arrive.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.cells.cache.attention import (
    Opening,
    best_shares,
    cached_attention,
    opened_places,
    read_open_end,
    read_opened,
    read_sinks,
    recent_only,
    score_cells,
    weighted_sum,
)
from nearfield.cells.cache.steps import ExactRows, exact_attention
from nearfield.cells.far_field import best_columns
from nearfield.distributed.group import Ranks
from nearfield.distributed.share import OpenEnd, Share
from nearfield.kernels.reference import weighted_softmax

BALANCES = ("global", "local")


def attend_together(ranks: Ranks, share: Share, queries: Tensor, first: int, rows: int, probes: int, balance: str) -> Tensor:
    """Output `[heads, group * rows, value_dim]` of `scaled_queries` of rows at the positions from `first` on, as
    `cached_attention` has it of keys on one machine. All ranks get the same bits."""
    if ranks.size == 1:
        return cached_attention(share.own, queries, first, rows, Opening(probes))
    opens_all = probes >= share.cells
    if share.closed and not opens_all and share.covariance is None:
        share.covariance = shared_covariance(ranks, share)
    return merged(ranks, *attend_to_own(ranks, share, queries, first, rows, None if opens_all else probes, balance))


def attend_to_own(
    ranks: Ranks, share: Share, queries: Tensor, first: int, rows: int, probes: int | None, balance: str
) -> tuple[Tensor, Tensor]:
    """Output and log-normaliser over the own keys. `probes`: cells that all ranks open together; None: all of them."""
    heads, group_rows, _ = queries.shape
    own, near = share.own, share.open_end(first, rows, group_rows // rows)
    open_end = read_open_end(own, queries, near.places, near.hidden)
    if not own.closed:
        if share.closed and probes is not None:
            nothing = queries.new_empty(heads, group_rows, 0)
            choose(ranks, nothing, [_latest(open_end.logits, near, first, rows)], rows, probes, balance)
        weight, lse = weighted_softmax(open_end.logits, None)
        return torch.bmm(weight, open_end.values), lse
    sinks = read_sinks(own, queries)
    flat = share.flat
    scores, log_masses = score_cells(flat, queries)
    if probes is None:
        opened = torch.arange(len(own.tables), device=queries.device).repeat(heads * rows, 1)
        taken = torch.ones_like(opened, dtype=torch.bool)
    else:
        seen = [_latest(open_end.logits, near, first, rows), sinks.logits, log_masses]
        opened, taken = choose(ranks, scores, seen, rows, probes, balance)
    place, missing = opened_places(flat, opened, heads, taken)
    inside = read_opened(own, queries, rows, place, missing)
    # A cell may be there more than once, and is then taken at most once.
    is_open = torch.zeros(heads * rows, scores.shape[2], dtype=torch.uint8, device=queries.device)
    is_open = is_open.scatter_add_(1, opened, taken.to(torch.uint8)).bool()
    is_open = is_open.view(heads, 1, rows, -1).expand(-1, group_rows // rows, -1, -1).reshape(log_masses.shape)
    logits = [open_end.logits, sinks.logits, inside.logits, log_masses.masked_fill_(is_open, -torch.inf)]
    joined = torch.cat(logits, 2)
    # Of a row that sees no key here, the output is no number, and does not count in `merged`.
    weights = joined.softmax(2).split([part.shape[2] for part in logits], 2)
    return weighted_sum(flat, queries, rows, (open_end, sinks, inside), weights), joined.logsumexp(2)


def _latest(logits: Tensor, near: OpenEnd, first: int, rows: int) -> Tensor:
    """Logits of the open end that count where cells are chosen."""
    if near.positions is None:
        return logits[..., logits.shape[2] - near.recent :]
    return recent_only(logits, near.positions, first, rows)


def choose(ranks: Ranks, scores: Tensor, seen: list[Tensor], rows: int, probes: int, balance: str) -> tuple[Tensor, Tensor]:
    """Own cells `[heads * rows, any]` that may be opened, and which of them are: the own ones among the `probes` best of all.

    `scores` `[heads, group * rows, cells]`, which is overwritten; `seen` `[heads, group * rows, any]`: the logits of what each
    query sees of the own keys. With `balance="local"` each rank opens its own best ones, as many as the others, and asks nobody.
    """
    heads, group_rows, cells = scores.shape
    normaliser = None
    if group_rows > rows:
        normaliser = torch.cat(seen, 2).logsumexp(2)
        if balance == "global" and rows == 1:
            return choose_at_once(ranks, scores, normaliser, probes)
        if balance == "global":
            normaliser = ranks.gather("normalisers", normaliser).logsumexp(0)
    scores = best_shares(scores, normaliser, rows) if cells else scores.new_empty(heads * rows, 0)
    if balance == "local":
        best, opened = best_columns(scores, min(cells, -(-probes // ranks.size)))
        return opened, best > -torch.inf
    best, opened = best_columns(scores, min(cells, probes))
    offered = torch.nn.functional.pad(best, (0, probes - best.shape[1]), value=-torch.inf)
    return opened, among_best(ranks.gather("scores", offered), probes)[ranks.rank, :, : best.shape[1]]


def choose_at_once(ranks: Ranks, scores: Tensor, normaliser: Tensor, probes: int) -> tuple[Tensor, Tensor]:
    """`choose` for a group of queries in one row, in one exchange: `scores` `[heads, group, cells]`, and the `normaliser`
    `[heads, group]` over the own keys."""
    heads, group, cells = scores.shape
    opened = torch.zeros(heads, 0, dtype=torch.int64, device=scores.device)
    if cells:
        opened = best_columns(scores.flatten(0, 1), min(cells, probes))[1].view(heads, -1).sort(1)[0]
    own = scores.gather(2, opened[:, None].expand(-1, group, -1))
    # A cell that several queries offer counts once.
    own[..., 1:].masked_fill_((opened[:, 1:] == opened[:, :-1])[:, None], -torch.inf)
    if missing := group * probes - opened.shape[1]:
        own = torch.nn.functional.pad(own, (0, missing), value=-torch.inf)
        opened = torch.nn.functional.pad(opened, (0, missing))
    found = ranks.gather("scores", torch.cat([normaliser[..., None], own], 2))
    shares = (found[..., 1:] - found[..., :1].logsumexp(0)).amax(2)
    best, place = _best_of_all(shares, probes)
    place -= ranks.rank * shares.shape[2]
    taken = (best > -torch.inf) & (place >= 0) & (place < shares.shape[2])
    return opened.gather(1, place.clamp_(0, shares.shape[2] - 1)), taken


def among_best(offered: Tensor, probes: int) -> Tensor:
    """`[ranks, rows, any]`: which of these scores are among the `probes` best of a row. Of equal ones those of lower ranks."""
    count, rows, each = offered.shape
    taken = torch.zeros(rows, count * each, dtype=torch.bool, device=offered.device)
    taken.scatter_(1, _best_of_all(offered, probes)[1], True)
    return taken.view(rows, count, each).transpose(0, 1) & (offered > -torch.inf)


def _best_of_all(offered: Tensor, probes: int) -> tuple[Tensor, Tensor]:
    """The best scores of each row, and their places among those of all ranks, one rank after the other."""
    every = offered.transpose(0, 1).reshape(offered.shape[1], -1)
    best, place = every.sort(dim=1, descending=True, stable=True)
    return best[:, :probes], place[:, :probes]


def merged(ranks: Ranks, output: Tensor, lse: Tensor) -> Tensor:
    """The output over the keys of all ranks, from that over the own ones."""
    found = ranks.gather("outputs", torch.cat([output, lse[..., None]], -1))
    output, lse = found[..., :-1], found[..., -1:]
    # As `nearfield.merge`, in fewer operations. A row that sees no key of a rank gets zeros there.
    share = lse.clamp(min=torch.finfo(lse.dtype).min).softmax(0)
    return (share * output.masked_fill(lse == -torch.inf, 0.0)).sum(0)


def shared_covariance(ranks: Ranks, share: Share) -> Tensor:
    """The covariance of values and keys around the means of all cells, `[heads, value_dim, dim]`."""
    tables = share.own.tables
    own = torch.cat([tables.cross.flatten(2), tables.pooled[..., None]], 2)
    total = ranks.gather("covariances", own).sum(0).flatten(0, 1)
    return (total[:, :-1] / total[:, -1:].clamp(min=1)).view(-1, *tables.cross.shape[2:])


def exact_together(ranks: Ranks, share: Share, queries: Tensor, like: Tensor, first: int) -> ExactRows:
    """Exact attention of the same rows to the keys of all ranks, in the shape of `like` `[batch, query heads, rows, dim]`."""
    _, query_heads, rows, _ = like.shape
    own, heads = share.own, share.heads
    positions = share.deal.positions(share.rank, slice(0, share.length), like.device)
    keys, values = (own.in_order(x) for x in (own.keys, own.values))
    hidden = own.hidden_mask(slice(0, own.length), first, rows, query_heads // heads, positions)
    output = merged(ranks, *exact_attention(queries, keys.flatten(0, 1), values.flatten(0, 1), hidden)).view_as(like)
    real = own.length if own.key_padding is None else own.key_padding.sum(1)[:, None, None]
    square = values.to(queries.dtype).square().sum((2, 3))[..., None]  # padding is stored as zero
    total = ranks.gather("norms", torch.cat([square, torch.zeros_like(square) + real], 2)).sum(0)
    norm = (total[..., :1] / total[..., 1:].clamp(min=1)).sqrt().clamp(min=torch.finfo(total.dtype).tiny)
    return ExactRows(first, output, norm.repeat_interleave(query_heads // heads, 1))
