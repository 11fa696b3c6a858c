"""How much memory a pass may take on a GPU beyond inputs and output, and how work is cut to fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

LEAST_BYTES = 4 << 20

PAIRS_SHARE = 1 / 12
"""How much of the budget (row, cell) pairs may take while they are grouped."""

LEAST_SHARE = 0.09
"""Partial results get at least this share of inputs and output: with too few rows at a time, tiles are half empty."""

LEAST_ROWS = 1024
"""At least this many rows are computed together, even if they do not fit."""

MOST_ENTRIES = 32768
"""The second axis of a grid takes no more."""


def entry_parts(entries: int) -> Iterator[slice]:
    """All entries, in as few parts as fit on a grid."""
    for first in range(0, entries, MOST_ENTRIES):
        yield slice(first, min(first + MOST_ENTRIES, entries))


class MemoryBudget(NamedTuple):
    """Bytes for intermediate results."""

    parts: int
    """partial results: the output of each opened cell by itself"""
    pairs: int
    """(row, cell) pairs, grouped"""


def memory_budget(inputs: tuple[Tensor, ...], held: tuple[Tensor, ...], beyond: float) -> MemoryBudget:
    """Together with what is held already: the share `beyond` of inputs and output (see `MemoryPolicy`), or a little more."""
    total, ours = (sum(x.numel() * x.element_size() for x in tensors) for tensors in (inputs, held))
    pairs = int(PAIRS_SHARE * beyond * total)
    return MemoryBudget(max(LEAST_BYTES, int(LEAST_SHARE * total), int(beyond * total) - pairs - ours), pairs)


def parts_of(entries: int, rows: int, per_row: int, available: int) -> Iterator[tuple[slice, slice]]:
    """Entries and their rows in parts of `available` bytes. All rows of an entry where possible, so that tiles are full."""
    some = max(1, min(entries, available // max(1, per_row * rows)))
    step = rows if some > 1 else max(LEAST_ROWS, available // per_row // LEAST_ROWS * LEAST_ROWS)
    for first in range(0, entries, some):
        for start in range(0, rows, step):
            yield slice(first, min(first + some, entries)), slice(start, min(start + step, rows))


def pieces_of(part: slice, size: int) -> Iterator[slice]:
    """A range, cut at the multiples of `size`."""
    for start in range(part.start - part.start % size, part.stop, size):
        yield slice(max(start, part.start), min(start + size, part.stop))


class Slab(NamedTuple):
    """Rows whose pairs are grouped together: all rows of some entries, or some rows of one."""

    entries: slice
    rows: slice
    parts: list[slice]
    """its entries, in parts whose partial results fit at a time"""


def slabs_of(entries: int, rows: int, slots: int, per_row: int, budget: MemoryBudget) -> Iterator[Slab]:
    """All rows of all entries, with `slots` pairs and partial results of `per_row` bytes each."""
    parts = list(parts_of(entries, rows, per_row, budget.parts))
    for some, part in parts:
        if part != slice(0, rows):
            yield Slab(some, part, [slice(0, 1)])
    whole = [some for some, part in parts if part == slice(0, rows)]
    together = max(1, budget.pairs // max(1, 4 * rows * slots * (whole[0].stop if whole else 1)))
    for start in range(0, len(whole), together):
        own = whole[start : start + together]
        first = own[0].start
        yield Slab(slice(first, own[-1].stop), slice(0, rows), [slice(x.start - first, x.stop - first) for x in own])
