"""The parts of a row on a GPU, merged by their normalisers."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from nearfield.kernels.triton.common import cdiv, padded
from nearfield.kernels.triton.launch import Kernel


@Kernel
def _merge(
    parts,
    part_lse,
    opened,
    output,
    lse,
    rows,
    value_dim,
    opened_entry,
    output_entry,
    output_row,
    lse_entry,
    SLOTS: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
):
    entry = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    there = row < rows
    column = tl.arange(0, BV)
    wide = column < value_dim
    place = (entry * rows + row) * SLOTS
    opened += entry * opened_entry + row * SLOTS
    output += entry * output_entry + row[:, None] * output_row + column[None, :]
    lse += entry * lse_entry + row
    # What was not opened is there already.
    closed = tl.load(lse, mask=there, other=-float("inf"))
    top = closed
    for slot in range(SLOTS):
        real = tl.load(opened + slot, mask=there, other=-1) >= 0
        top = tl.maximum(top, tl.load(part_lse + place + slot, mask=real, other=-float("inf")))
    base = tl.where(top > -float("inf"), top, 0.0)
    mass = tl.exp2(closed - base)
    value = tl.load(output, mask=there[:, None] & wide[None, :], other=0.0)
    total = mass[:, None] * value.to(tl.float32)
    for slot in range(SLOTS):
        real = tl.load(opened + slot, mask=there, other=-1) >= 0
        weight = tl.exp2(tl.load(part_lse + place + slot, mask=real, other=-float("inf")) - base)
        part = tl.load(
            parts + (place + slot)[:, None] * value_dim + column[None, :], mask=real[:, None] & wide[None, :], other=0.0
        )
        mass += weight
        total += weight[:, None] * part.to(tl.float32)
    blind = mass <= 0.0
    result = tl.where(blind[:, None], 0.0, total / tl.where(blind, 1.0, mass)[:, None])
    tl.store(output, result.to(output.dtype.element_ty), mask=there[:, None] & wide[None, :])
    ended = (base + tl.log2(tl.where(blind, 1.0, mass))) * 0.6931471805599453
    tl.store(lse, tl.where(blind, -float("inf"), ended), mask=there)


def merge(parts: Tensor, part_lse: Tensor, opened: Tensor, output: Tensor, lse: Tensor) -> None:
    """Add to `output` and `lse` (base 2, natural afterwards) all parts `[entries, rows, slots, value_dim]` that have a cell."""
    entries, rows, slots, value_dim = parts.shape
    _merge[(cdiv(rows, 32), entries)](
        parts,
        part_lse,
        opened,
        output,
        lse,
        rows,
        value_dim,
        opened.stride(0),
        *output.stride()[:2],
        lse.stride(0),
        SLOTS=slots,
        BM=32,
        BV=padded(value_dim),
        num_warps=4,
    )
