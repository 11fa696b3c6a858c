"""Attention of some rows to what a store holds: near keys one by one, the others through the moments of their cells."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.cache.held import Held
from nearfield.cache.tables import members, route
from nearfield.kernels.cells_head import Partial
from nearfield.kernels.reference import weighted_softmax


def by_head(query: Tensor, heads: int, scale: float) -> Tensor:
    """Queries `[batch, query heads, rows, dim]` times scale, in the dtype of arithmetic: `[batch * heads, group * rows, dim]`."""
    compute = torch.promote_types(query.dtype, torch.float32)
    return query.to(compute).mul(scale).reshape(len(query) * heads, -1, query.shape[3])


def attend(held: Held, queries: Tensor, first: int, rows: int, probes: int) -> Tensor:
    """Output `[batch * heads, group * rows, value_dim]` of rows at the positions from `first` on.

    They see exactly the closed segments through cells, and the keys after those up to their own.
    """
    heads, each, _ = queries.shape
    near = slice(held.closed, first + rows)
    logits = queries @ held.keys.part(near).flatten(0, 1).to(queries.dtype).transpose(1, 2)
    hidden = held.hidden(near, first, rows, each // rows)
    parts = [logits if hidden is None else logits.masked_fill_(hidden, -torch.inf)]
    tables = [held.values.part(near).flatten(0, 1).to(queries.dtype)]
    if not held.segments:
        weight, _ = weighted_softmax(parts[0], None)
        return weight @ tables[0]

    place = held.sinks.repeat_interleave(held.heads, 0)
    keys, values = held.gather(place.clamp(min=0), queries.dtype)
    parts.append((queries @ keys.transpose(1, 2)).masked_fill_((place < 0)[:, None], -torch.inf))
    tables.append(values)
    routed = route(held.tables, queries, probes)
    place, missing = members(held.tables, routed.opened, each)
    keys, values = (x.view(heads * each, place.shape[1], x.shape[2]) for x in held.gather(place.view(heads, -1), queries.dtype))
    opened = torch.bmm(queries.reshape(heads * each, 1, -1), keys.transpose(1, 2)).view(heads, each, -1)
    parts.append(opened.masked_fill_(missing.view_as(opened), -torch.inf))

    weight, lse = weighted_softmax(torch.cat(parts, 2), None)
    own, sinks, inside = weight.split([part.shape[2] for part in parts], 2)
    output = (own @ tables[0]).baddbmm_(sinks, tables[1])
    output += torch.bmm(inside.reshape(heads * each, 1, -1), values).view_as(output)
    total = Partial(heads * each, output[0])
    total.add(slice(None), routed.numerator, routed.top, routed.mass)
    total.add(slice(None), output.flatten(0, 1), lse.view(-1))
    return total.finish()[0].view_as(output)
