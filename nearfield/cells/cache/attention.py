"""Attention to a cache, in PyTorch: exact for the open end, the first keys and the opened cells, by moments for all others.

In shapes, `heads` counts the key heads of all batch entries, and `group` the query heads that share one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.cells.cache.heavy import Watch
from nearfield.cells.cache.segments import CacheTables, FlatTables
from nearfield.cells.cache.state import CacheState
from nearfield.cells.far_field import MOST_SPREAD, best_columns, log_boost, score, squares
from nearfield.cells.torch.tiles import products
from nearfield.kernels.reference import weighted_softmax

RECENT = 64
"""Where the heads of a group choose cells, this many of the latest keys stand for the whole open end."""


class Opening(NamedTuple):
    """Which cells a group of queries opens: the best ones, as far as they matter."""

    most: int
    """at most so many"""
    lowest: float = -math.inf
    """of these, the ones in which a query may have a share of its weights above e^lowest in one key"""

    def takes_all(self, cells: int) -> bool:
        """Whether all of so many cells are opened."""
        return self.most >= cells and self.lowest == -math.inf


@dataclass(frozen=True)
class Routed:
    """The cells that some rows open, and the weight of all others."""

    opened: Tensor
    """`[heads * rows, probes]`: cells, the same for all queries of a group"""
    taken: Tensor | None
    """like `opened`: False for those that stay closed after all; None: all are opened"""
    far_logits: Tensor
    """`[heads, group * rows, cells]`: log-masses of cells; -inf for opened and for empty ones"""


class Read(NamedTuple):
    """Keys that rows read one by one."""

    logits: Tensor
    """`[heads, group * rows, keys]`; -inf where a row does not see a key"""
    values: Tensor
    """`[heads, keys, value_dim]`, or of each row its own, `[heads * rows, keys, value_dim]`"""


def scaled_queries(query: Tensor, heads: int, scale: float) -> Tensor:
    """Queries `[batch, query heads, rows, dim]` times scale, in the dtype of arithmetic: `[batch * heads, group * rows, dim]`."""
    compute = torch.promote_types(query.dtype, torch.float32)
    return query.to(compute).mul(scale).reshape(len(query) * heads, -1, query.shape[3])


def cached_attention(
    state: CacheState,
    queries: Tensor,
    first: int,
    rows: int,
    opening: Opening,
    watch: Watch | None = None,
) -> Tensor:
    """Output `[batch * heads, group * rows, value_dim]` of `scaled_queries` of rows at the positions from `first` on.

    They see all closed segments through cells, and the keys of the open end up to their own. `watch` counts heavy keys.
    """
    heads, group_rows, _ = queries.shape
    near = slice(state.closed, first + rows)
    open_end = read_open_end(state, queries, near, state.hidden_mask(near, first, rows, group_rows // rows))
    if not state.closed:
        return torch.bmm(_softmax(state, [open_end.logits])[0], open_end.values)
    sinks = read_sinks(state, queries)
    near_lse = None
    if group_rows > rows or opening.lowest > -math.inf:
        near_lse = torch.logaddexp(_recent(open_end.logits, near, first, rows).logsumexp(2), sinks.logits.logsumexp(2))
    routed = route(state.tables, queries, rows, opening.most, near_lse, opening.lowest)
    place, missing = opened_places(state.tables.flat, routed.opened, heads, routed.taken)
    inside = read_opened(state, queries, rows, place, missing)
    reads = open_end, sinks, inside
    weights = _softmax(state, [*(read.logits for read in reads), routed.far_logits])
    if watch is not None:
        watch.add(state, place, to_rows(weights[2], rows))
    return weighted_sum(state.tables.flat, queries, rows, reads, weights)


def read_open_end(state: CacheState, queries: Tensor, near: slice, hidden: Tensor | None) -> Read:
    """The keys at these places, which are in no closed segment; `hidden` is True where a row does not see one."""
    keys, values = (x.view(near).flatten(0, 1).to(queries.dtype) for x in (state.keys, state.values))
    logits = torch.bmm(queries, keys.transpose(1, 2))
    return Read(logits if hidden is None else logits.masked_fill_(hidden, -torch.inf), values)


def read_sinks(state: CacheState, queries: Tensor) -> Read:
    """The first keys, as far as they are in closed segments."""
    keys, values, absent = state.sink_rows(queries.dtype)
    logits = torch.bmm(queries, keys.transpose(1, 2))
    return Read(logits if absent is None else logits.masked_fill_(absent, -torch.inf), values)


def read_opened(state: CacheState, queries: Tensor, rows: int, place: Tensor, missing: Tensor) -> Read:
    """The keys of opened cells, where `opened_places` says that they are."""
    heads = len(queries)
    found = state.gather(place.view(heads, -1), queries.dtype)
    open_keys, open_values = (x.view(heads * rows, place.shape[1], x.shape[2]) for x in found)
    logits = torch.bmm(to_rows(queries, rows), open_keys.transpose(1, 2)).masked_fill_(missing[:, None], -torch.inf)
    return Read(from_rows(logits, heads), open_values)


def weighted_sum(
    flat: FlatTables, queries: Tensor, rows: int, reads: tuple[Read, Read, Read], weights: tuple[Tensor, ...]
) -> Tensor:
    """The output, with the weights of the open end, of the first keys, of opened cells, and of all others."""
    open_end, sinks, inside = reads
    output = far_output(flat, queries, weights[3]).baddbmm_(weights[0], open_end.values).baddbmm_(weights[1], sinks.values)
    return output.add_(from_rows(torch.bmm(to_rows(weights[2], rows), inside.values), len(queries)))


def route(
    tables: CacheTables, queries: Tensor, rows: int, probes: int, near_lse: Tensor | None, lowest: float = -math.inf
) -> Routed:
    """Score all cells for `scaled_queries` `[heads, group * rows, dim]`, and open the best ones for each group.

    The queries of a group share keys, so all of them read the cells that one of them opens. What counts is how large a share of
    its weights a query may have in a cell: its score, less the log-normaliser of all that it sees. The largest share in the group
    decides. `near_lse` `[heads, group * rows]` is the part of the normaliser that comes from keys that are read anyway: the first
    and the latest ones. A group of one query needs no normaliser: None.

    `lowest`: of these cells, those stay closed in which no query may have a larger share of its weights than e^lowest in one key.
    This takes a normaliser.
    """
    heads, group_rows, _ = queries.shape
    scores, log_masses = score_cells(tables.flat, queries)
    normaliser = None if near_lse is None else torch.logaddexp(log_masses.logsumexp(2), near_lse)
    best, opened = best_columns(best_shares(scores, normaliser, rows), probes)
    cells = _of_queries(opened, heads, group_rows)
    if lowest == -math.inf:
        return Routed(opened, None, log_masses.scatter_(2, cells, -torch.inf))
    taken = best > lowest
    left = log_masses.gather(2, cells).masked_fill_(_of_queries(taken, heads, group_rows), -torch.inf)
    return Routed(opened, taken, log_masses.scatter_(2, cells, left))


def _of_queries(x: Tensor, heads: int, group_rows: int) -> Tensor:
    """`[heads * rows, any]` -> `[heads, group * rows, any]`: what is said of a group, for each query."""
    rows = len(x) // max(1, heads)
    return x.view(heads, 1, rows, -1).expand(-1, group_rows // max(1, rows), -1, -1).reshape(heads, group_rows, -1)


def score_cells(flat: FlatTables, queries: Tensor) -> tuple[Tensor, Tensor]:
    """What each query may find in each cell, and the log-masses of cells: `[heads, group * rows, cells]` each."""
    first = products(queries, flat.centroid.to(queries.dtype), flat.log_exists[:, None])
    spread = torch.bmm(squares(queries), flat.variance.to(queries.dtype).transpose(1, 2))
    scores = score(first, spread.clamp_(max=flat.most_spread))
    return scores, first.add_(log_boost(spread.clamp_(max=MOST_SPREAD))).add_(flat.log_size)


def best_shares(scores: Tensor, normaliser: Tensor | None, rows: int) -> Tensor:
    """`[heads * rows, cells]`: the largest score in a group, less the log-normaliser of the query `[heads, group * rows]`; see
    `route`. Overwrites `scores`."""
    heads = len(scores)
    if normaliser is not None:
        scores -= normaliser[..., None]
        # A query that is not finite has no say in what others read.
        scores = scores.nan_to_num_(-torch.inf, torch.inf, -torch.inf).view(heads, -1, rows, scores.shape[2]).amax(1)
    return scores.view(heads * rows, -1)


def opened_places(flat: FlatTables, opened: Tensor, heads: int, taken: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The places of all keys in the opened cells, `[heads * rows, most]`, and True where a row has fewer of them than that.

    `taken`, like `opened`: False for those that are not opened after all; None: all are.
    """
    cells = opened.view(heads, -1)
    size, start = (x.gather(1, cells).view_as(opened).long() for x in (flat.size, flat.start))
    if taken is not None:
        size.masked_fill_(~taken, 0)
    stop = size.cumsum(1)
    total = stop[:, -1:]
    most = int(total.max()) if total.numel() else 0
    slot = torch.arange(most, device=opened.device).expand(len(opened), -1).contiguous()
    which = torch.searchsorted(stop, slot, right=True).clamp_(max=max(0, opened.shape[1] - 1))
    missing = slot >= total
    place = start.sub_(stop).add_(size).gather(1, which).add_(slot)
    return place.masked_fill_(missing, 0), missing


def far_output(flat: FlatTables, queries: Tensor, weight: Tensor) -> Tensor:
    """What cells add to the output `[heads, group * rows, value_dim]`, with weights `[heads, group * rows, cells]`."""
    tilt = torch.bmm(queries, flat.covariance.transpose(1, 2)).mul_(weight.sum(2, keepdim=True))
    return tilt.baddbmm_(weight, flat.value.to(queries.dtype))


def _recent(logits: Tensor, near: slice, first: int, rows: int) -> Tensor:
    """Logits of the open end `[heads, group * rows, keys]`; all but those of the latest keys of a row are left out or -inf."""
    if rows == 1:
        return logits[..., -RECENT:]
    return recent_only(logits, torch.arange(near.start, near.stop, device=logits.device), first, rows)


def recent_only(logits: Tensor, positions: Tensor, first: int, rows: int) -> Tensor:
    """Logits of keys at these positions, with -inf for all but the latest of each row."""
    own = torch.arange(first, first + rows, device=logits.device)[:, None]
    is_old = positions <= own - RECENT
    return logits.masked_fill(is_old.repeat(logits.shape[1] // rows, 1), -torch.inf)


def to_rows(x: Tensor, rows: int) -> Tensor:
    """`[heads, group * rows, any]` -> `[heads * rows, group, any]`."""
    if rows == 1:
        return x
    return x.unflatten(1, (x.shape[1] // rows, rows)).transpose(1, 2).flatten(0, 1)


def from_rows(x: Tensor, heads: int) -> Tensor:
    """`[heads * rows, group, any]` -> `[heads, group * rows, any]`."""
    if len(x) == heads:
        return x
    return x.unflatten(0, (heads, len(x) // heads)).transpose(1, 2).flatten(1, 2)


def _softmax(state: CacheState, parts: list[Tensor]) -> tuple[Tensor, ...]:
    """The weights of logits `[heads, group * rows, any]` that share one softmax; zero in rows that see no key (padding)."""
    logits = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    weight = torch.softmax(logits, 2) if state.key_padding is None else weighted_softmax(logits, None)[0]
    return weight.split([part.shape[2] for part in parts], 2)
