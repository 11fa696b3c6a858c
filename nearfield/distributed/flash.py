"""Exact attention of this rank's rows by torch's fused kernel: the keys before a piece, and those that stand beside its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield import _compat
from nearfield.cells.torch.dense import is_extreme
from nearfield.distributed.ways import Again, Begun, Facts, Found, Grads, Part
from nearfield.merge import merge


class _Block(NamedTuple):
    """Some rows and keys that are attended to by one call: all of them, or under a causal mask that begins at the first key."""

    rows: slice
    keys: slice
    is_causal: bool
    member: slice
    """which query heads: one of each group"""


@dataclass(frozen=True)
class Flash:
    """`Exact`. The kernel of the backward pass takes the log-normaliser of all that a row has seen, so keys may come in parts.

    What the kernel does not know (padding, windows, caps, sinks, gradients of log-normalisers, numbers that are not finite or
    very large, other devices than CPUs) goes by calls.
    """

    facts: Facts
    keeps_lse = True
    shared = 0

    def begin(self, key: Tensor, padding: Tensor | None, kept: tuple[Tensor, ...] = ()) -> Begun:
        return Begun()

    def forward(self, part: Part, trained: bool) -> Found:
        if not self._serves(part):
            return self._by_calls.forward(part, trained)
        output = part.query.new_empty(*part.query.shape[:3], part.value.shape[3])
        lse = output.new_empty(output.shape[:3], dtype=torch.promote_types(output.dtype, torch.float32))
        for blocks in self._blocks(part):
            found = []
            for x in blocks:
                query, key, value = part.query[:, x.member, x.rows], part.key[:, :, x.keys], part.value[:, :, x.keys]
                found.append(_compat.cpu_flash(query, key, value, 0.0, x.is_causal, scale=self.facts.scale)[:2])
            own, own_lse = found[0] if len(found) == 1 else merge(*zip(*found, strict=True))
            output[:, blocks[0].member, blocks[0].rows] = own
            lse[:, blocks[0].member, blocks[0].rows] = own_lse
        return Found(output, lse)

    def backward(
        self, part: Part, output: Tensor, lse: Tensor | None, kept: tuple[Tensor, ...], grad: Tensor, lse_grad: Tensor | None
    ) -> Grads:
        assert lse is not None
        if lse_grad is not None or not self._serves(part) or is_extreme(lse):
            return self._by_calls.backward(part, output, lse, kept, grad, lse_grad)
        query_grad, key_grad, value_grad = (torch.zeros_like(x) for x in part[:3])
        for blocks in self._blocks(part):
            for x in blocks:
                of_rows = slice(None), x.member, x.rows
                inputs = part.query[of_rows], part.key[:, :, x.keys], part.value[:, :, x.keys]
                results = output[of_rows], lse[of_rows]
                scale = self.facts.scale
                found = _compat.cpu_flash_backward(grad[of_rows], *inputs, *results, 0.0, x.is_causal, scale=scale)
                query_grad[of_rows] += found[0]
                key_grad[:, :, x.keys] += found[1]
                value_grad[:, :, x.keys] += found[2]
        return Grads(query_grad, key_grad, value_grad, None)

    @property
    def _by_calls(self) -> Again:
        return Again(self.facts)

    def _blocks(self, part: Part) -> Iterator[list[_Block]]:
        """For each piece and each member of a group, what it sees before its first row, and beside its rows."""
        group = part.query.shape[1] // part.key.shape[1]
        for member in (slice(first, None, group) for first in range(group)):
            for work in self.facts.work:
                if work.offset is None:
                    yield [_Block(work.rows, work.keys, False, member)]
                    continue
                before = [_Block(work.rows, slice(0, work.offset), False, member)] if work.offset else []
                yield [*before, _Block(work.rows, slice(work.offset, work.keys.stop), True, member)]

    def _serves(self, part: Part) -> bool:
        facts, inputs = self.facts, part[:3]
        dims = {x.shape[3] for x in inputs}
        if part.sink is not None or part.padding is not None or facts.window is not None or facts.softcap or facts.scale <= 0:
            return False
        if not part.query.is_cpu or len(dims) > 1 or facts.backend == "reference":
            return False
        for work in facts.work:
            count, keys = work.rows.stop - work.rows.start, work.keys.stop
            if keys == 0 or (work.offset is not None and not (work.offset >= 0 and work.offset + count == keys)):
                return False
        # A NaN would spread, so somebody has to take it out first.
        sums = [x.sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in inputs]
        return bool(torch.stack(sums).isfinite().all())
