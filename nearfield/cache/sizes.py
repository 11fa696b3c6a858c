"""The sizes of a store: where segments end, how many cells each is given, and how many of all cells a step opens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nearfield.methods.cells import Cells

SEGMENT, WINDOW, CELL_SIZE = 1024, 16, 16
CONSTANT = 8
"""After so many segments they grow."""
FEWEST_PROBES = 20


@dataclass(frozen=True)
class StoreSizes:
    """Segments are numbered from 0, and nothing that is closed is grouped again.

    Segments and cells grow with the number of keys before them, both as its square root, so that a step that scores all cells
    and reads the running segment takes time of that order: n keys are in 11 sqrt(n) cells, and the running segment has as many
    keys.
    """

    segment: int | None
    """keys per segment; None: 1,024 up to 8,192 keys, then 11 sqrt(n), with 64 cells each"""
    cell_size: int | None
    """keys per cell; None: 16 up to 8,192 keys, then sqrt(n / 32)"""
    window: int
    """how many keys before the running segment are read one by one"""
    sinks: int

    @staticmethod
    def of(method: Cells) -> StoreSizes:
        window = min(WINDOW, method.segment or SEGMENT) if method.window is None else method.window
        return StoreSizes(method.segment, method.cell_size, window, method.sinks)

    def start(self, segment: int) -> int:
        """The first key of a segment."""
        if self.segment is not None:
            return segment * self.segment
        # Growth as the square root makes n a square: 32 (number + 8)^2, which has the value and the slope of the line at 8.
        return SEGMENT * segment if segment <= CONSTANT else SEGMENT * (segment + CONSTANT) ** 2 // (4 * CONSTANT)

    def complete(self, keys: int) -> int:
        """How many segments the first `keys` keys complete."""
        if self.segment is not None:
            return keys // self.segment
        grown = math.isqrt(4 * CONSTANT * keys // SEGMENT) - CONSTANT
        return keys // SEGMENT if keys < CONSTANT * SEGMENT else grown

    def closed_before(self, position: int) -> int:
        """How many segments a query at this position sees through cells."""
        return self.complete(max(0, position - self.window))

    def length(self, segment: int) -> int:
        return self.start(segment + 1) - self.start(segment)

    def cells(self, segment: int) -> int:
        """How many cells a segment is given."""
        size = self.cell_size or max(CELL_SIZE, CELL_SIZE * math.sqrt(self.start(segment + 1) / (CONSTANT * SEGMENT)))
        return max(1, round(self.length(segment) / size))

    def cells_before(self, segment: int) -> int:
        """How many cells all segments before this one have."""
        return sum(self.cells(number) for number in range(segment))

    def most_open(self, segments: int) -> int:
        """How many keys at most are in no closed segment while so many are; as few different numbers as possible."""
        most = self.window + self.length(segments)
        return most if self.segment is not None else 1 << (most - 1).bit_length()


def default_probes(closed: int, cells: int) -> int:
    """As many as it takes to open 3.5 sqrt(n) of n keys: 1,267 of 131k, 3,584 of a million; at least 20, which is 320 of 8k."""
    return max(FEWEST_PROBES, round(3.5 * math.sqrt(closed) * cells / max(1, closed)))
