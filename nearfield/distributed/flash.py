"""Exact attention of this rank's rows by torch's fused kernels: on a CPU, the keys before a piece, and those beside its rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield import _compat
from nearfield.cells.torch.dense import is_extreme
from nearfield.distributed.ways import Again, Begun, Facts, Found, Grads, Part
from nearfield.exact import as_flash_reads, fits_flash
from nearfield.merge import merge


class _Block(NamedTuple):
    """Some rows and keys that are attended to by one call: all of them, or under a causal mask.

    It begins at the first key on a CPU, and on a GPU it ends at the last one.
    """

    rows: slice
    keys: slice
    is_causal: bool
    member: slice
    """which query heads: one of each group, on a GPU all"""


@dataclass(frozen=True)
class Flash:
    """`Exact`. The kernel of the backward pass takes the log-normaliser of all that a row has seen, so keys may come in parts.

    What the kernels do not know (padding, windows, caps, sinks, gradients of log-normalisers; on a CPU numbers that are not
    finite or very large; on a GPU more than 16 bits) goes by calls. On a GPU numbers are not looked at, which would be to wait
    for it: there they are left to the kernel, as in one process.
    """

    facts: Facts
    keeps_lse = True
    shared = 0

    def begin(self, query: Tensor, key: Tensor, padding: Tensor | None, kept: tuple[Tensor, ...] = ()) -> Begun:
        return Begun()

    def forward(self, part: Part, trained: bool) -> Found:
        if not self._serves(part):
            return self._by_calls.forward(part, trained)
        output = part.query.new_empty(*part.query.shape[:3], part.value.shape[3])
        lse = output.new_empty(output.shape[:3], dtype=self._compute(part))
        for blocks in self._blocks(part):
            found = [self._attend(part, x) for x in blocks]
            own, own_lse = found[0] if len(found) == 1 else merge(*zip(*found, strict=True))
            output[:, blocks[0].member, blocks[0].rows] = own
            lse[:, blocks[0].member, blocks[0].rows] = own_lse
        return Found(output, lse)

    def backward(
        self, part: Part, output: Tensor, lse: Tensor | None, kept: tuple[Tensor, ...], grad: Tensor, lse_grad: Tensor | None
    ) -> Grads:
        assert lse is not None
        if lse_grad is not None or not self._serves(part, trained=True) or (not _is_on_gpu(part) and is_extreme(lse)):
            return self._by_calls.backward(part, output, lse, kept, grad, lse_grad)
        query_grad, key_grad, value_grad = (torch.zeros_like(x, dtype=self._compute(part)) for x in part[:3])
        for blocks in self._blocks(part):
            for x in blocks:
                of_rows = slice(None), x.member, x.rows
                found = self._differentiate(part, x, output[of_rows], lse[of_rows], grad[of_rows])
                query_grad[of_rows] += found[0]
                key_grad[:, :, x.keys] += found[1]
                value_grad[:, :, x.keys] += found[2]
        dtype = part.query.dtype
        return Grads(query_grad.to(dtype), key_grad.to(dtype), value_grad.to(dtype), None)

    def _attend(self, part: Part, block: _Block) -> tuple[Tensor, Tensor]:
        inputs = self._inputs(part, block)
        if _is_on_gpu(part):
            found = _compat.gpu_flash(*inputs, 0.0, block.is_causal, False, scale=self.facts.scale)
        else:
            found = _compat.cpu_flash(*inputs, 0.0, block.is_causal, scale=self.facts.scale)
        return found[0], found[1]

    def _differentiate(
        self, part: Part, block: _Block, output: Tensor, lse: Tensor, grad: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = self._inputs(part, block)
        if _is_on_gpu(part):
            return _compat.gpu_flash_backward(grad, *inputs, output, lse, block.is_causal, self.facts.scale)
        return _compat.cpu_flash_backward(grad, *inputs, output, lse, 0.0, block.is_causal, scale=self.facts.scale)

    def _inputs(self, part: Part, block: _Block) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = part.query[:, block.member, block.rows], part.key[:, :, block.keys], part.value[:, :, block.keys]
        if _is_on_gpu(part):
            return as_flash_reads(query), as_flash_reads(key), as_flash_reads(value)
        return query, key, value

    @property
    def _by_calls(self) -> Again:
        return Again(self.facts)

    def _compute(self, part: Part) -> torch.dtype:
        return torch.promote_types(part.query.dtype, torch.float32)

    def _blocks(self, part: Part) -> Iterator[list[_Block]]:
        """For each piece and each member of a group, what it sees before its first row, and beside its rows."""
        if _is_on_gpu(part):
            # The kernel knows groups, and the last row of a piece sees the last of its keys.
            for work in self.facts.work:
                yield [_Block(work.rows, work.keys, work.offset is not None, slice(None))]
            return
        group = part.query.shape[1] // part.key.shape[1]
        for member in (slice(first, None, group) for first in range(group)):
            for work in self.facts.work:
                if work.offset is None:
                    yield [_Block(work.rows, work.keys, False, member)]
                    continue
                before = [_Block(work.rows, slice(0, work.offset), False, member)] if work.offset else []
                yield [*before, _Block(work.rows, slice(work.offset, work.keys.stop), True, member)]

    def _serves(self, part: Part, trained: bool = False) -> bool:
        """`trained`: whether the backward pass is by the kernel."""
        facts, inputs = self.facts, part[:3]
        if part.sink is not None or part.padding is not None or facts.window is not None or facts.softcap or facts.scale <= 0:
            return False
        if facts.backend == "reference":
            return False
        for work in facts.work:
            count, keys = work.rows.stop - work.rows.start, work.keys.stop
            if keys == 0 or (work.offset is not None and not (work.offset >= 0 and work.offset + count == keys)):
                return False
        if _is_on_gpu(part):
            return fits_flash(*inputs, trained=trained)
        if not part.query.is_cpu or len({x.shape[3] for x in inputs}) > 1:
            return False
        # A NaN would spread, so somebody has to take it out first.
        sums = [x.sum(dtype=torch.promote_types(x.dtype, torch.float32)) for x in inputs]
        return bool(torch.stack(sums).isfinite().all())


def _is_on_gpu(part: Part) -> bool:
    return part.query.is_cuda
