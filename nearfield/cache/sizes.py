"""The sizes of a store: when a segment is closed and where it ends, how many cells it is given, and how many a step opens."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nearfield.methods.cells import Cells

SEGMENT, WINDOW, CELL_SIZE = 1024, 16, 16
CONSTANT = 8
"""After so many segments they grow."""
ROUND = 16
"""A segment of all keys there are ends at a multiple of this."""
FEWEST_PROBES = 20
RECENT = 64
"""So many of the latest keys stand for the running segment where the shares of cells in all weights are compared."""


@dataclass(frozen=True)
class StoreSizes:
    """A segment begins where the last one ends, and nothing that is closed is grouped again.

    Cells of a large segment are better, for keys that belong together are strewn over the whole text. So a segment takes in all
    keys that are there when it is closed: a prompt is one. Token by token, segments and cells grow with the number of keys before
    them, both as its square root, so that a step that scores all cells and reads the running segment takes time of that order:
    n keys are in 11 sqrt(n) cells at most, and the running segment has as many keys.
    """

    segment: int | None
    """keys per segment; None: all that are there, at least 1,024, from 8,192 keys on 11 sqrt(n)"""
    cell_size: int | None
    """keys per cell; None: 16 up to 8,192 keys, then sqrt(n / 32)"""
    window: int
    """how many keys before the running segment are read one by one"""
    sinks: int

    @staticmethod
    def of(method: Cells) -> StoreSizes:
        window = min(WINDOW, method.segment or SEGMENT) if method.window is None else method.window
        return StoreSizes(method.segment, method.cell_size, window, method.sinks)

    def length(self, start: int) -> int:
        """How many keys the segment that begins at key `start` has at least."""
        if self.segment is not None:
            return self.segment
        if start < CONSTANT * SEGMENT:
            return SEGMENT
        # Growth as the square root makes n a square: 32 m^2, and the next one is 32 (m + 1)^2.
        unit = SEGMENT // (4 * CONSTANT)
        return unit * (2 * math.isqrt(start // unit) + 1)

    def next_close(self, start: int) -> int:
        """The first position whose query finds the segment that begins at key `start` closed."""
        return start + self.length(start) + self.window

    def next_end(self, start: int, position: int) -> int:
        """Where the segment that begins at key `start` ends for a query at this position; `start`: it is not complete yet."""
        if position < self.next_close(start):
            return start
        least = start + self.length(start)
        return least if self.segment is not None else max(least, (position - self.window) // ROUND * ROUND)

    def cells(self, start: int, end: int) -> int:
        """How many cells a segment is given."""
        size = self.cell_size or max(CELL_SIZE, CELL_SIZE * math.sqrt(end / (CONSTANT * SEGMENT)))
        return max(1, round((end - start) / size))

    def most_open(self, closed: int) -> int:
        """How many keys at most are in no closed segment for a query, its own with them."""
        return self.window + self.length(closed)


def default_probes(closed: int, cells: int) -> int:
    """As many as it takes to open 3.5 sqrt(n) of n keys: 1,267 of 131k, 3,584 of a million; at least 20, which is 320 of 8k."""
    return max(FEWEST_PROBES, round(3.5 * math.sqrt(closed) * cells / max(1, closed)))
