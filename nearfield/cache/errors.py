"""The error of a step: the same rows with exact attention over all stored keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.cache.held import Held
from nearfield.kernels.reference import weighted_softmax


@dataclass(frozen=True)
class StepError:
    """How far the rows of one call were from exact attention. `[batch, heads, rows]` each."""

    first: int
    """the position of the first row"""
    relative: Tensor
    """||estimate - exact|| / ||exact||"""
    additive: Tensor
    """||estimate - exact||, in units of the rms norm of the values"""

    def __str__(self) -> str:
        return (
            f"rows from {self.first} on: relative error {float(self.relative.mean()):.3g} on average, at most "
            f"{float(self.relative.max()):.3g}"
        )


def step_error(held: Held, queries: Tensor, output: Tensor, first: int) -> StepError:
    """The error of `output` `[batch, query heads, rows, dim]` for queries (times scale) `[batch * heads, group * rows, dim]`."""
    batch, query_heads, rows, _ = output.shape
    group = query_heads // held.heads
    keys, values = (held.in_order(x).flatten(0, 1) for x in (held.keys, held.values))
    hidden = held.hidden(slice(0, held.length), first, rows, group)
    exact = _exact(queries, keys, values, hidden).view_as(output)
    norm = _value_norm(values, None if held.counts is None else held.counts.repeat_interleave(held.heads, 0))
    norm = norm.view(batch, held.heads, 1).repeat_interleave(group, 1)
    off = (output.to(exact.dtype) - exact).norm(dim=-1)
    return StepError(first, off / exact.norm(dim=-1).clamp(min=torch.finfo(off.dtype).tiny), off / norm)


def _exact(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """Exact attention, head by head: there may be many keys."""
    found = []
    for head, query in enumerate(queries):
        logits = query @ keys[head].to(query.dtype).T
        if hidden is not None:
            logits.masked_fill_(hidden[head if len(hidden) > 1 else 0], -torch.inf)
        found.append(weighted_softmax(logits, None)[0] @ values[head].to(query.dtype))
    return torch.stack(found)


def _value_norm(values: Tensor, counts: Tensor | None) -> Tensor:
    """Root mean square norm of the values `[heads, keys, dim]` that count, `[heads]`."""
    square = torch.linalg.vector_norm(values, dim=-1, dtype=torch.promote_types(values.dtype, torch.float32)).square()
    mean = square.mean(1) if counts is None else square.masked_fill(~counts, 0.0).sum(1) / counts.sum(1).clamp(min=1)
    return mean.sqrt().clamp(min=torch.finfo(mean.dtype).tiny)
