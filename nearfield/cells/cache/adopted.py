"""Cells that a prompt's own attention has made become those of the cache: keys are grouped once."""

from __future__ import annotations

import math
from typing import NamedTuple

from torch import Tensor

from nearfield.cells.cache.segments import halved
from nearfield.cells.sizes import CacheSizes
from nearfield.cells.trial import Prepared

LEAST_KEYS = 32_768
"""Fewer are grouped in no time, and better all at once: where keys that are alike are strewn over a text, each span has its own
cells of them, and a query would have to open them all."""

LEAST_SHARE = 8
"""A span is taken over if it has at least one part in so many of all keys. The others are grouped again, together: their cells
would be looser than those of one segment, and there are few of these keys."""


class KnownCells(NamedTuple):
    """A segment whose keys were grouped already."""

    end: int
    """where it ends"""
    cell_of: Tensor
    """`[heads, segment]`: the cell of each key, counted from the first one of the segment; -1: none"""
    cells: int
    """how many there are"""
    halvings: int = 0
    """how often to cut each in two, so that they are about as small as those of a cache"""

    def halved(self, keys: Tensor) -> KnownCells:
        """With cells that are small enough, for the keys `[heads, segment, dim]`."""
        cell_of, cells = self.cell_of, self.cells
        for _ in range(self.halvings):
            cell_of, cells = halved(keys, cell_of, cells), 2 * cells
        return KnownCells(self.end, cell_of, cells)


def takes_over(sizes: CacheSizes, length: int) -> bool:
    """Whether a cache of these sizes could use the cells of a call with so many keys: segments have no given length."""
    return sizes.segment is None and length >= LEAST_KEYS


def known_segments(prepared: Prepared, sizes: CacheSizes, length: int) -> list[KnownCells]:
    """The longest spans of a causal call as the first segments of a cache that holds the `length` keys of the call.

    Rows see their past as spans, of which the first ones are the longest. Those of the last row, as far as a cache would have
    closed them by now, are segments that it could have closed itself, with larger cells. None where keys are few, or the cells
    of the call are not what the cache would make: another partition, other sinks, or segments of a length that somebody chose.
    """
    own = prepared.recipe.sizes
    if own.sinks != sizes.sinks or not own.segment or prepared.recipe.partition != "KMeans" or not takes_over(sizes, length):
        return []
    found: list[KnownCells] = []
    closed = sizes.next_end(0, length)
    spans, per_segment = prepared.spans[0], prepared.cells_per_segment
    edges = spans.edges(per_segment)
    for span in spans.seen(min(spans.segments, closed // own.segment)):
        start, end = span.first * own.segment, (span.first + span.segments) * own.segment
        if LEAST_SHARE * (end - start) < closed:
            break
        cells = span.segments * per_segment
        wanted = sizes.cells(start, end)
        cell_of = (prepared.given.cell_of[:, span.level, start:end] - edges[span.number]).clamp_(min=-1)
        most = math.floor(math.log2((end - start) / cells))  # no more cells than keys
        found.append(KnownCells(end, cell_of, cells, max(0, min(most, round(math.log2(wanted / cells))))))
    return found
