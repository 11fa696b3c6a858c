"""Numbers of cells, sorted: always in the same order."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from nearfield.kernels.triton.common import cdiv
from nearfield.kernels.triton.launch import Kernel
from nearfield.kernels.triton.layout import Layout


class Narrow(NamedTuple):
    """How numbers from 0 to `last` are kept while they are sorted: with as few digits as it takes."""

    last: int

    @property
    def shift(self) -> int:
        """is taken off"""
        return 1 << 15 if self.last < 1 << 16 else 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.int16 if self.shift else torch.int32


@Kernel
def _number(cell_of, where, found, per_entry, cells, last, shift, cell_entry, CHOSEN: tl.constexpr, BP: tl.constexpr):
    """Cells counted on over the entries; `last` for none. CHOSEN: only those at `where`."""
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    there = lane < per_entry
    place = lane
    if CHOSEN:
        place = tl.load(where + lane, mask=there, other=0).to(tl.int64)
    cell = tl.load(cell_of + entry * cell_entry + place, mask=there, other=-1)
    number = tl.where(cell >= 0, cell + entry.to(tl.int32) * cells, last) - shift
    tl.store(found + entry * per_entry + lane, number.to(found.dtype.element_ty), mask=there)


@Kernel
def _members(places, where, numbers, position, cell, total, per_entry, length, shift, BP: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    there = lane < total
    place = tl.load(where + tl.load(places + lane, mask=there, other=0) % per_entry, mask=there, other=0)
    tl.store(position + lane, place % length, mask=there)
    tl.store(cell + lane, tl.load(numbers + lane, mask=there, other=0).to(tl.int32) + shift, mask=there)


def sorted_numbers(numbers: Tensor, layout: Layout, entries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Narrow numbers in order, where each of them was, and where each number (up to one past the last cell) begins."""
    found, places = numbers.view(-1).sort(stable=True)
    return found, places, torch.searchsorted(found, layout.numbers(entries), out_int32=True)


def narrowed(cell_of: Tensor, layout: Layout, where: Tensor | None = None) -> Tensor:
    """Cells `[entries, ...]`, -1 for none, as `sorted_numbers` wants them. `where`: which of those of an entry; None: all."""
    entries = cell_of.shape[0]
    per_entry = cell_of[0].numel() if where is None else where.shape[0]
    kept = Narrow(entries * layout.cells)
    found = torch.empty(entries, per_entry, dtype=kept.dtype, device=cell_of.device)
    if per_entry:
        _number[(cdiv(per_entry, 1024), entries)](
            cell_of,
            where,
            found,
            per_entry,
            layout.cells,
            kept.last,
            kept.shift,
            cell_of.stride(0),
            CHOSEN=where is not None,
            BP=1024,
            num_warps=4,
        )
    return found


def members_of(cell_of: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of keys cell by cell, their cells, and where each cell begins, of `cell_of` `[entries, heights, n]`."""
    entries, _, length = cell_of.shape
    where = layout.members
    numbers, places, starts = sorted_numbers(narrowed(cell_of, layout, where), layout, entries)
    total = entries * where.shape[0]
    position, cell = (torch.empty(total, dtype=torch.int32, device=cell_of.device) for _ in range(2))
    shift = Narrow(entries * layout.cells).shift
    if total:
        _members[(cdiv(total, 1024),)](
            places, where, numbers, position, cell, total, where.shape[0], length, shift, BP=1024, num_warps=4
        )
    return position, cell, starts
