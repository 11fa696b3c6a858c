"""The cells of all closed segments, side by side, and the attention of some rows to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.cells.cache.segments import CellTables
from nearfield.cells.cache.state import CacheState
from nearfield.cells.far_field import MOST_SPREAD, best_columns, log_boost, score, squares
from nearfield.cells.torch.tiles import products
from nearfield.kernels.reference import weighted_softmax

RECENT = 64
"""So many of the latest keys stand for the running segment where the shares of cells in all weights are compared."""


@dataclass(frozen=True)
class Routed:
    """What some rows open, and what they see of all other cells."""

    opened: Tensor
    """`[heads * rows, probes]`: cells, the same for all queries of a group"""
    logits: Tensor
    """`[heads, group * rows, cells]`: of the masses of cells; -inf for those that are opened, and for empty ones"""


def route(tables: CellTables, queries: Tensor, rows: int, probes: int, near: Tensor) -> Routed:
    """Scores all cells for queries (times scale) `[heads, group * rows, dim]`, and opens the best ones for each group.

    A group shares keys, and what one of its queries opens all of them read. What counts is how large a share of its weights a
    query may have in a cell: its score, less the log-normaliser of all that it sees, of which `near` `[heads, group * rows]` is
    that of keys it reads anyway, the first and the latest ones. The best share in the group decides.
    """
    heads, every, _ = queries.shape
    centroid, variance = (x.heads.to(queries.dtype) for x in (tables.centroid, tables.variance))
    first = products(queries, centroid, tables.log_exists.heads[:, None])
    spread = products(squares(queries), variance).clamp_(max=MOST_SPREAD)
    scores = score(first, spread)
    logits = first.add_(log_boost(spread)).add_(tables.size.heads.log()[:, None])  # of the masses
    if every > rows:
        scores -= torch.logaddexp(logits.logsumexp(2), near)[..., None]
        scores = scores.view(heads, -1, rows, scores.shape[2]).amax(1)
    _, opened = best_columns(scores.view(heads * rows, -1), probes)
    taken = opened.view(heads, 1, rows, -1).expand(-1, every // rows, -1, -1)
    return Routed(opened, logits.scatter_(2, taken.reshape(heads, every, -1), -torch.inf))


def sum_up(tables: CellTables, queries: Tensor, weight: Tensor) -> Tensor:
    """The values of closed cells with these weights `[heads, rows, cells]`: `[heads, rows, value_dim]`."""
    covariance = tables.cross.flatten(0, 1) / tables.pooled.clamp(min=1).view(-1, 1, 1)
    tilt = products(queries, covariance).mul_(weight.sum(2, keepdim=True))
    return tilt.baddbmm_(weight, tables.value.heads.to(queries.dtype))


def members(tables: CellTables, opened: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The places of all keys of the opened cells `[heads * rows, most]`, and where a row has fewer of them than that."""
    by_head = opened.view(heads, -1)
    size, start = (x.heads.gather(1, by_head).view_as(opened).long() for x in (tables.size, tables.start))
    stop = size.cumsum(1)
    total = stop[:, -1:]
    most = int(total.max()) if total.numel() else 0
    slot = torch.arange(most, device=opened.device).expand(len(opened), -1).contiguous()
    which = torch.searchsorted(stop, slot, right=True).clamp_(max=max(0, opened.shape[1] - 1))
    missing = slot >= total
    place = start.sub_(stop).add_(size).gather(1, which).add_(slot)
    return place.masked_fill_(missing, 0), missing


def by_head(query: Tensor, heads: int, scale: float) -> Tensor:
    """Queries `[batch, query heads, rows, dim]` times scale, in the dtype of arithmetic: `[batch * heads, group * rows, dim]`."""
    compute = torch.promote_types(query.dtype, torch.float32)
    return query.to(compute).mul(scale).reshape(len(query) * heads, -1, query.shape[3])


def cached_attention(state: CacheState, queries: Tensor, first: int, rows: int, probes: int) -> Tensor:
    """Output `[batch * heads, group * rows, value_dim]` of rows at the positions from `first` on.

    They see exactly the closed segments through cells, and the keys after those up to their own.
    """
    heads, every, _ = queries.shape
    near = slice(state.closed, first + rows)
    keys, values = (x.part(near).flatten(0, 1).to(queries.dtype) for x in (state.keys, state.values))
    logits = queries @ keys.transpose(1, 2)
    hidden = state.hidden(near, first, rows, every // rows)
    parts = [logits if hidden is None else logits.masked_fill_(hidden, -torch.inf)]
    if not state.segments:
        return _softmax(state, parts)[0] @ values

    first_keys, first_values, absent = state.first_rows(queries.dtype)
    logits = queries @ first_keys.transpose(1, 2)
    parts.append(logits if absent is None else logits.masked_fill_(absent, -torch.inf))
    read_anyway = parts[0][..., 0]  # of no use where each query chooses for itself
    if every > rows:
        read_anyway = torch.logaddexp(_recent(parts[0], near, first, rows).logsumexp(2), parts[1].logsumexp(2))
    routed = route(state.tables, queries, rows, probes, read_anyway)
    place, missing = members(state.tables, routed.opened, heads)
    found = state.gather(place.view(heads, -1), queries.dtype)
    open_keys, open_values = (x.view(heads * rows, place.shape[1], x.shape[2]) for x in found)
    asked = _by_row(queries, rows)
    logits = (asked @ open_keys.transpose(1, 2)).masked_fill_(missing[:, None], -torch.inf)
    parts.append(_by_query(logits, heads))
    parts.append(routed.logits)

    own, sinks, inside, far = _softmax(state, parts)
    output = sum_up(state.tables, queries, far).baddbmm_(own, values).baddbmm_(sinks, first_values)
    return output.add_(_by_query(_by_row(inside, rows) @ open_values, heads))


def _recent(logits: Tensor, near: slice, first: int, rows: int) -> Tensor:
    """Of near keys `[heads, group * rows, keys]`, those of the latest ones of each row; -inf for the others."""
    if rows == 1:
        return logits[..., -RECENT:]
    own = torch.arange(first, first + rows, device=logits.device)[:, None]
    is_old = torch.arange(near.start, near.stop, device=logits.device) <= own - RECENT
    return logits.masked_fill(is_old.repeat(logits.shape[1] // rows, 1), -torch.inf)


def _by_row(x: Tensor, rows: int) -> Tensor:
    """`[heads, group * rows, any]` as `[heads * rows, group, any]`."""
    return x.unflatten(1, (x.shape[1] // rows, rows)).transpose(1, 2).flatten(0, 1)


def _by_query(x: Tensor, heads: int) -> Tensor:
    """And back."""
    return x.unflatten(0, (heads, len(x) // heads)).transpose(1, 2).flatten(1, 2)


def _softmax(state: CacheState, parts: list[Tensor]) -> tuple[Tensor, ...]:
    """Weights of the parts `[heads, rows, any]` of one softmax; zero for a row that sees nothing, as padding does."""
    logits = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    weight = torch.softmax(logits, 2) if state.counts is None else weighted_softmax(logits, None)[0]
    return weight.split([part.shape[2] for part in parts], 2)
