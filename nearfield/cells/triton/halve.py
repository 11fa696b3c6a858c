"""`cells.partition.halve` on a GPU: one program for each cell."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nearfield.cells.partition.halve import LLOYD_STEPS, POWER_STEPS
from nearfield.cells.triton.cluster import members_of
from nearfield.cells.triton.forward import one_span_layout
from nearfield.cells.triton.memory import entry_parts
from nearfield.kernels import backends
from nearfield.kernels.launch import Kernel, dense, padded, strides

MEMBERS = 64
"""Keys that a program reads at a time."""


@Kernel
def _halve(
    keys,
    order,
    starts,
    found,
    cells,
    dim,
    length,
    key_entry,
    key_row,
    POWER: tl.constexpr,
    LLOYD: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    cell = tl.program_id(0).to(tl.int64)
    entry, own_cell = cell // cells, (cell % cells).to(tl.int32)
    first, last = tl.load(starts + cell), tl.load(starts + cell + 1)
    lane, column = tl.arange(0, BM), tl.arange(0, BD)
    wide = column < dim
    keys += entry * key_entry
    found += entry * length
    size = (last - first).to(tl.float32)
    # Deviations from one of the members, so that a common offset costs no precision.
    one = tl.load(order + first, mask=last > first, other=0).to(tl.int64)
    shift = tl.load(keys + one * key_row + column, mask=wide, other=0.0).to(tl.float32)
    total = tl.zeros([BM, BD], tl.float32)
    square = tl.zeros([BM, BD], tl.float32)
    for start in range(first, last, BM):
        there = start + lane < last
        place = tl.load(order + start + lane, mask=there, other=0).to(tl.int64)
        key = tl.load(keys + place[:, None] * key_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
        off = tl.where(there[:, None], key.to(tl.float32) - shift[None, :], 0.0)
        total += off
        square += off * off
    mean = tl.sum(total, 0) / tl.maximum(size, 1.0)
    spread = tl.where(wide, tl.sum(square, 0) - size * mean * mean, -1.0)
    mean += shift
    way = tl.where(column == tl.argmax(spread, 0), 1.0, 0.0)
    limit = 0.0 * size
    # The last pass is the result.
    for step in range(POWER + LLOYD + 1):
        sums = tl.zeros([BM, BD], tl.float32)
        counts = tl.zeros([BM], tl.float32)
        for start in range(first, last, BM):
            there = start + lane < last
            place = tl.load(order + start + lane, mask=there, other=0).to(tl.int64)
            key = tl.load(keys + place[:, None] * key_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
            off = tl.where(there[:, None] & wide[None, :], key.to(tl.float32) - mean[None, :], 0.0)
            along = tl.sum(off * way[None, :], 1)
            second = (along > limit) & there
            factor = tl.where(step < POWER, along, second.to(tl.float32))
            sums += off * factor[:, None]
            counts += second.to(tl.float32)
            tl.store(found + place, 2 * own_cell + second.to(tl.int32), mask=there & (step == POWER + LLOYD))
        all_sums, count = tl.sum(sums, 0), tl.sum(counts, 0)
        norm2 = tl.sum(all_sums * all_sums, 0)
        both = tl.where((count > 0.0) & (count < size), 1.0, 0.0)
        first_share = both / tl.maximum(size - count, 1.0)
        second_share = both / tl.maximum(count, 1.0)
        unit = 1.0 / tl.maximum(tl.sqrt(norm2), 1e-12)
        way = all_sums * tl.where(step < POWER, unit, first_share + second_share)
        limit = tl.where(step < POWER, 0.0, 0.5 * norm2 * (second_share * second_share - first_share * first_share))


def halve(keys: Tensor, cell_of: Tensor, cells: int) -> Tensor:
    """See `cells.partition.halve.halve`; `cell_of` `[heads, n]` is int32."""
    heads, length, dim = keys.shape
    keys, layout = dense(keys), one_span_layout(length, cells, keys.device)
    found = torch.full_like(cell_of, -1)
    with backends.device_guard(keys.device):
        for some in entry_parts(heads):
            own, result = keys[some], found[some]
            order, starts = members_of(cell_of[some, None].contiguous(), None, layout)
            _halve[((some.stop - some.start) * cells,)](
                keys=own,
                order=order,
                starts=starts,
                found=result,
                cells=cells,
                dim=dim,
                length=length,
                **strides(key=own),
                POWER=POWER_STEPS,
                LLOYD=LLOYD_STEPS,
                BM=MEMBERS,
                BD=padded(dim),
                num_warps=4 if dim <= 64 else 8,
            )
    return found
