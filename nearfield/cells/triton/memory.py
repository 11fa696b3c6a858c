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


def pieces_of(part: slice, size: int) -> Iterator[slice]:
    """A range, cut at the multiples of `size`."""
    for start in range(part.start - part.start % size, part.stop, size):
        yield slice(max(start, part.start), min(start + size, part.stop))


class Units(NamedTuple):
    """Rows in units, numbered entry by entry: all rows of an entry or, if their partial results do not fit, parts of them."""

    entries: int
    rows: int
    """per entry"""
    size: int
    """rows per unit; the last one of an entry may have fewer"""
    together: int
    """units whose partial results fit at a time; 1 where entries are cut"""

    @property
    def per_entry(self) -> int:
        return -(-self.rows // self.size)

    @property
    def total(self) -> int:
        return self.entries * self.per_entry

    def parts(self) -> list[slice]:
        """All units, in parts that fit at a time."""
        return [slice(first, min(first + self.together, self.total)) for first in range(0, self.total, self.together)]

    def slices(self, some: slice) -> tuple[slice, slice]:
        """Which entries, and which of their rows, the units of a part are."""
        if self.per_entry == 1:
            return some, slice(0, self.rows)
        entry, start = some.start // self.per_entry, some.start % self.per_entry * self.size
        return slice(entry, entry + 1), slice(start, min(start + self.size, self.rows))


def units_of(entries: int, rows: int, per_row: int, available: int) -> Units:
    """Units for `available` bytes, at `per_row` bytes each row. All rows of an entry where possible, so that tiles are full."""
    whole = available // max(1, per_row * rows)
    if whole:
        return Units(entries, rows, max(1, rows), max(1, min(entries, whole)))
    parts = -(-rows // max(LEAST_ROWS, available // per_row // LEAST_ROWS * LEAST_ROWS))
    return Units(entries, rows, min(rows, -(-rows // (parts * LEAST_ROWS)) * LEAST_ROWS), 1)


def slabs_of(units: Units, per_unit: int, available: int) -> list[list[slice]]:
    """Parts of units; those in one list have their pairs grouped together, in `available` bytes at `per_unit` bytes each unit."""
    step = max(1, min(available // max(1, per_unit), MOST_ENTRIES) // units.together)
    parts = units.parts()
    return [parts[start : start + step] for start in range(0, len(parts), step)]
