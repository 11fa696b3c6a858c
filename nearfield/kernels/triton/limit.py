"""A limit to the size of cells on a GPU: see `partition.limit`. Costs two sweeps over the keys, and nobody waits for it."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nearfield.kernels.triton.common import cdiv
from nearfield.kernels.triton.launch import Kernel
from nearfield.kernels.triton.layout import Layout
from nearfield.partition.limit import MOST_TIMES_THE_MEAN

KEYS = 1024


@Kernel
def _sizes(cell_of, sizes, per_entry, cells, cell_entry, BP: tl.constexpr):
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    cell = tl.load(cell_of + entry * cell_entry + lane, mask=lane < per_entry, other=-1)
    tl.atomic_add(sizes + entry * cells + cell, 1, mask=cell >= 0, sem="relaxed")


@Kernel
def _hosts(sizes, parts, begins, host, span_cell, span_edges, cells, times, BC: tl.constexpr):
    """For each cell of a span that is too large, how many parts it is cut into, and small cells that take them in."""
    span, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, last = tl.load(span_cell + span), tl.load(span_cell + span + 1)
    keys = tl.load(span_edges + 2 * span + 1) - tl.load(span_edges + 2 * span)
    mean = (keys + last - first - 1) // (last - first)
    sizes += entry * cells
    parts += entry * cells
    begins += entry * cells
    host += entry * cells
    largest = 0
    for start in range(first, last, BC):
        cell = start + tl.arange(0, BC)
        largest = tl.maximum(largest, tl.max(tl.load(sizes + cell, mask=cell < last, other=0), 0))
    if largest > times * mean:
        # Of n keys in m cells no more than m / 8 parts are cut off, and at least as many cells are no larger than the mean.
        free = first
        given = first
        for cell in range(first, last):
            size = tl.load(sizes + cell)
            wanted = tl.where(size > times * mean, (size - 1) // (times * mean), 0)
            begin = given
            while (given < begin + wanted) & (free < last):
                if tl.load(sizes + free) <= mean:
                    tl.store(host + given, free)
                    given += 1
                free += 1
            tl.store(parts + cell, given - begin)
            tl.store(begins + cell, begin)


@Kernel
def _move(cell_of, parts, begins, host, per_entry, length, cells, cell_entry, BP: tl.constexpr):
    """Keys of a cell that is cut to its parts, by positions: as if at random, for equal keys may come at equal distances."""
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    here = cell_of + entry * cell_entry + lane
    cell = tl.load(here, mask=lane < per_entry, other=-1)
    there = cell >= 0
    count = tl.load(parts + entry * cells + cell, mask=there, other=0)
    mixed = (lane % length * 2654435761 >> 16) & 65535
    part = (mixed % (count + 1)).to(tl.int32)
    moved = there & (part > 0)
    begin = tl.load(begins + entry * cells + cell, mask=moved, other=0)
    tl.store(here, tl.load(host + entry * cells + begin + part - 1, mask=moved, other=0), mask=moved)


def limit_sizes(cell_of: Tensor, layout: Layout) -> None:
    """Cut cells of `cell_of` `[entries, heights, n]` with more than eight times the mean number of keys.

    Unlike on a CPU, the small cells that take in a part keep their own keys.
    """
    entries, heights, length = cell_of.shape
    if not layout.cells:
        return
    device, total = cell_of.device, (entries, layout.cells)
    sizes, parts = (torch.zeros(total, dtype=torch.int32, device=device) for _ in range(2))
    begins, host = (torch.empty(total, dtype=torch.int32, device=device) for _ in range(2))
    grid = (cdiv(heights * length, KEYS), entries)
    shape = (heights * length, layout.cells, cell_of.stride(0))
    _sizes[grid](cell_of, sizes, *shape, BP=KEYS, num_warps=4)
    _hosts[(len(layout.spans.all), entries)](
        sizes,
        parts,
        begins,
        host,
        layout.span_cell,
        layout.span_edges,
        layout.cells,
        MOST_TIMES_THE_MEAN,
        BC=256,
        num_warps=1,
    )
    _move[grid](cell_of, parts, begins, host, heights * length, length, *shape[1:], BP=KEYS, num_warps=4)
