"""(row, cell) pairs grouped by cell on a GPU, by counting. No number of it is known to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels.triton.common import cdiv
from nearfield.kernels.triton.launch import Kernel
from nearfield.kernels.triton.layout import Layout
from nearfield.kernels.triton.sort import narrowed, sorted_numbers
from nearfield.kernels.triton.tables import Tables

ENTRIES_OF_A_BLOCK = 8
"""Numbers per block in `Groups.blocks`; a power of two, so that they are loaded together."""
PAIRS = 1024


@dataclass(frozen=True)
class Groups:
    """The (row, slot) pairs of some rows, cell by cell, in blocks. A pair is numbered (entry * rows + row) * slots + slot."""

    pair: Tensor
    """`[rows * slots]`: pairs in the order of their cells"""
    first: Tensor
    """`[entries * cells + 1]`: where the pairs of each cell begin"""
    edges: Tensor
    """`[entries * cells + 1]`: the first block of each cell"""
    blocks: Tensor
    """`[most, 8]`: cell, first pair, where they end, first key of the cell in `Tables.order`, where they end. Those not needed
    are empty."""
    size: int
    """of a block"""

    def most(self, entries: int, rows: int, slots: int, cells: int) -> int:
        """Blocks that the pairs of some entries take at most."""
        return cdiv(entries * rows * slots, self.size) + entries * cells


@triton.jit
def block_at(blocks, edges, first_cell):
    """The blocks from a cell on, one for each program: cell, first pair, where they end, first key, where they end."""
    at = blocks + (tl.load(edges + first_cell) + tl.program_id(0)).to(tl.int64) * 8
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@Kernel
def _count(opened, counts, per_entry, cells, opened_entry, BP: tl.constexpr):
    """How many pairs there are of each cell."""
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    cell = tl.load(opened + entry * opened_entry + lane, mask=lane < per_entry, other=-1)
    tl.atomic_add(counts + entry * cells + cell, 1, mask=cell >= 0, sem="relaxed")


@Kernel
def _scan(counts, first, edges, total, size, BC: tl.constexpr):
    """Running sums of the counts, and of the blocks of `size` that they take; `counts` becomes where the next pair goes."""
    pairs = 0
    blocks = 0
    for start in range(0, total, BC):
        cell = start + tl.arange(0, BC)
        own = tl.load(counts + cell, mask=cell < total, other=0)
        need = (own + size - 1) // size
        ends = tl.cumsum(own, 0)
        block_ends = tl.cumsum(need, 0)
        tl.store(first + cell, pairs + ends - own, mask=cell < total)
        tl.store(counts + cell, pairs + ends - own, mask=cell < total)
        tl.store(edges + cell, blocks + block_ends - need, mask=cell < total)
        pairs += tl.sum(own, 0)
        blocks += tl.sum(need, 0)
    tl.store(first + total, pairs)
    tl.store(edges + total, blocks)


@Kernel
def _scatter(opened, places, pair, per_entry, cells, opened_entry, BP: tl.constexpr):
    """Every pair to the next place of its cell."""
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    cell = tl.load(opened + entry * opened_entry + lane, mask=lane < per_entry, other=-1)
    place = tl.atomic_add(places + entry * cells + cell, 1, mask=cell >= 0, sem="relaxed")
    tl.store(pair + place, (entry * per_entry + lane).to(tl.int32), mask=cell >= 0)


@Kernel
def _blocks(first, edges, starts, blocks, most, total, size, STEPS: tl.constexpr, BB: tl.constexpr):
    """What each block is about: the cell by bisection, and its ranges."""
    block = tl.program_id(0) * BB + tl.arange(0, BB)
    there = block < most
    low = tl.zeros([BB], tl.int32)
    high = tl.zeros([BB], tl.int32) + total
    for _ in range(STEPS):
        middle = (low + high) // 2
        above = tl.load(edges + middle + 1, mask=middle < total, other=2147483647) > block
        high = tl.where(above, middle, high)
        low = tl.where(above, low, tl.minimum(middle + 1, total))
    cell = tl.minimum(low, total - 1)
    begin = tl.load(first + cell) + (block - tl.load(edges + cell)) * size
    end = tl.minimum(tl.load(first + cell + 1), begin + size)
    real = low < total
    at = blocks + block.to(tl.int64) * 8
    tl.store(at, cell, mask=there)
    tl.store(at + 1, tl.where(real, begin, 0), mask=there)
    tl.store(at + 2, tl.where(real, end, 0), mask=there)
    tl.store(at + 3, tl.load(starts + cell), mask=there)
    tl.store(at + 4, tl.load(starts + cell + 1), mask=there)


def group(opened: Tensor, tables: Tables, size: int, counts: Tensor | None = None, stable: Layout | None = None) -> Groups:
    """Group the pairs of `opened` `[entries, rows, slots]` by cell, in blocks of at most `size`.

    `counts`: how many there are of each cell, where that is known; it is spoilt. The order of pairs inside a cell is not the same
    in every run, unless a layout to sort by is given (`stable`); each row is by itself, so that it does not matter where nothing
    is summed over rows.
    """
    entries, rows, slots = opened.shape
    device, cells = opened.device, tables.cells
    total, per_entry = entries * cells, rows * slots
    assert opened.stride(1) == slots
    assert opened.numel() < 2**31
    first, edges = (torch.empty(total + 1, dtype=torch.int32, device=device) for _ in range(2))
    grid = (cdiv(per_entry, PAIRS), entries)
    if counts is None:
        counts = torch.zeros(total, dtype=torch.int32, device=device)
        if total:
            _count[grid](opened, counts, per_entry, cells, opened.stride(0), BP=PAIRS, num_warps=4)
    _scan[(1,)](counts, first, edges, total, size, BC=1024, num_warps=4)
    most = cdiv(opened.numel(), size) + total
    blocks = torch.empty(most, ENTRIES_OF_A_BLOCK, dtype=torch.int32, device=device)
    if stable is not None:
        pair = sorted_numbers(narrowed(opened, stable), stable, entries)[1].int()
    else:
        pair = torch.empty(opened.numel(), dtype=torch.int32, device=device)
        if total:
            _scatter[grid](opened, counts, pair, per_entry, cells, opened.stride(0), BP=PAIRS, num_warps=4)
    if total:
        _blocks[(cdiv(most, 256),)](
            first, edges, tables.starts, blocks, most, total, size, STEPS=total.bit_length() + 1, BB=256, num_warps=4
        )
    else:
        blocks.zero_()
    return Groups(pair, first, edges, blocks, size)
