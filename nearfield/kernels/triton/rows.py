"""What a backward pass knows of some rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton.language as tl
from torch import Tensor

from nearfield.kernels.triton.common import cdiv, padded
from nearfield.kernels.triton.launch import Kernel


@dataclass(frozen=True)
class Rows:
    """Rows `[entries, count, ...]` with what the forward pass left of them."""

    queries: Tensor
    visible: Tensor
    grads: Tensor
    """of the output"""
    lse: Tensor
    """natural logarithm; +inf where a row sees nothing, so that its weights are 0"""
    delta: Tensor
    """the output times its gradient"""

    @property
    def count(self) -> int:
        return self.queries.shape[1]

    def part(self, entries: slice, rows: slice) -> Rows:
        return Rows(*(x[entries, rows] for x in (self.queries, self.visible, self.grads, self.lse, self.delta)))


@Kernel
def _delta(
    output, grads, found, rows, value_dim, output_entry, output_row, grad_entry, grad_row, BM: tl.constexpr, BV: tl.constexpr
):
    entry = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.arange(0, BV)
    mask = (row < rows)[:, None] & (column < value_dim)[None, :]
    one = tl.load(output + entry * output_entry + row[:, None] * output_row + column[None, :], mask=mask, other=0.0)
    two = tl.load(grads + entry * grad_entry + row[:, None] * grad_row + column[None, :], mask=mask, other=0.0)
    tl.store(found + entry * rows + row, tl.sum(one.to(tl.float32) * two.to(tl.float32), 1), mask=row < rows)


def rows_of(queries: Tensor, visible: Tensor, output: Tensor, lse: Tensor, grads: Tensor) -> Rows:
    entries, rows, value_dim = output.shape
    delta = torch.empty(entries, rows, device=output.device)
    _delta[(cdiv(rows, 64), entries)](
        output,
        grads,
        delta,
        rows,
        value_dim,
        *output.stride()[:2],
        *grads.stride()[:2],
        BM=64,
        BV=padded(value_dim),
        num_warps=4,
    )
    return Rows(queries, visible, grads, lse.masked_fill(lse == -torch.inf, torch.inf), delta)
