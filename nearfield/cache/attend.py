"""Attention of some rows to what a store holds: near keys one by one, the others through the moments of their cells."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.cache.held import Held
from nearfield.cache.sizes import RECENT
from nearfield.cache.tables import members, route, sum_up
from nearfield.kernels.reference import weighted_softmax


def by_head(query: Tensor, heads: int, scale: float) -> Tensor:
    """Queries `[batch, query heads, rows, dim]` times scale, in the dtype of arithmetic: `[batch * heads, group * rows, dim]`."""
    compute = torch.promote_types(query.dtype, torch.float32)
    return query.to(compute).mul(scale).reshape(len(query) * heads, -1, query.shape[3])


def attend(held: Held, queries: Tensor, first: int, rows: int, probes: int) -> Tensor:
    """Output `[batch * heads, group * rows, value_dim]` of rows at the positions from `first` on.

    They see exactly the closed segments through cells, and the keys after those up to their own.
    """
    heads, every, _ = queries.shape
    near = slice(held.closed, first + rows)
    keys, values = (x.part(near).flatten(0, 1).to(queries.dtype) for x in (held.keys, held.values))
    logits = queries @ keys.transpose(1, 2)
    hidden = held.hidden(near, first, rows, every // rows)
    parts = [logits if hidden is None else logits.masked_fill_(hidden, -torch.inf)]
    if not held.segments:
        return _softmax(held, parts)[0] @ values

    first_keys, first_values, absent = held.first_rows(queries.dtype)
    logits = queries @ first_keys.transpose(1, 2)
    parts.append(logits if absent is None else logits.masked_fill_(absent, -torch.inf))
    read_anyway = parts[0][..., 0]  # of no use where each query chooses for itself
    if every > rows:
        read_anyway = torch.logaddexp(_recent(parts[0], near, first, rows).logsumexp(2), parts[1].logsumexp(2))
    routed = route(held.tables, queries, rows, probes, read_anyway)
    place, missing = members(held.tables, routed.opened, heads)
    found = held.gather(place.view(heads, -1), queries.dtype)
    open_keys, open_values = (x.view(heads * rows, place.shape[1], x.shape[2]) for x in found)
    asked = _by_row(queries, rows)
    logits = (asked @ open_keys.transpose(1, 2)).masked_fill_(missing[:, None], -torch.inf)
    parts.append(_by_query(logits, heads))
    parts.append(routed.logits)

    own, sinks, inside, far = _softmax(held, parts)
    output = sum_up(held.tables, queries, far).baddbmm_(own, values).baddbmm_(sinks, first_values)
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


def _softmax(held: Held, parts: list[Tensor]) -> tuple[Tensor, ...]:
    """Weights of the parts `[heads, rows, any]` of one softmax; zero for a row that sees nothing, as padding does."""
    logits = parts[0] if len(parts) == 1 else torch.cat(parts, 2)
    weight = torch.softmax(logits, 2) if held.counts is None else weighted_softmax(logits, None)[0]
    return weight.split([part.shape[2] for part in parts], 2)
