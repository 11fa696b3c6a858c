"""What the cells engine is told and what it decides, as plain numbers and tensors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from torch import Tensor

from nearfield.partition.cells import MOST_VARIANCE

ROUTE_SPREADS = 1.5
"""A cell's routing score is q.mu_c plus so many standard deviations of its logits: what its best keys may reach."""


MOST_SPREAD = 1e8
"""Beyond this u_c is cut off, so that (1 + u_c / 4)^2 stays far from overflow."""

MOST_SQUARE = MOST_VARIANCE
"""Squares of queries are cut off here: inf times 0 would be NaN, and a NaN score would win."""


class CellSettings(NamedTuple):
    """The sizes of one call."""

    group: int
    """query heads per key-value head"""
    segment: int
    """causal: keys per segment; 0: no causal mask, all keys are one segment"""
    window: int
    """causal: closed segments just before its own that a row sees key by key"""
    sinks: int
    """first keys, near for every row"""
    cell_size: int
    branching: int
    """fine cells per coarse one; 0: one level"""
    probes: int
    """(fine) cells opened per row"""
    unfold: int
    """coarse cells unfolded per row; 0 where there is one level"""
    samples: int
    """far keys drawn per row"""
    heights: int = 1
    """causal: of how many different lengths spans may be"""

    def per_segment(self, length: int) -> tuple[int, int]:
        """Fine and coarse cells of a segment of `length` keys (no coarse ones where there is one level)."""
        fine = max(1, round(length / self.cell_size))
        if not self.branching:
            return fine, 0
        # A coarse cell has at most twice its share of fine ones; those that would have more are split.
        return fine, -(-fine // self.branching) - (-fine // (2 * self.branching))


@dataclass(frozen=True)
class CellPlan:
    """What one head decided before any attention arithmetic. Cells are numbered span by span, see `Spans`."""

    cell_of: Tensor
    """`[heights, n]`: the (fine) cell of each key in its span of each height; -1: none (a sink, or not in such a span)"""
    coarse_of: Tensor
    """`[heights, n]`: its coarse cells, where there are two levels; else `[heights, 0]`"""
    opened: Tensor
    """`[rows, probes]`: (fine) cells whose keys are near; -1: nothing"""
    unfolded: Tensor
    """`[rows, unfold]`: coarse cells that are replaced by their fine ones; no columns where there is one level"""
    drawn: Tensor
    """`[rows, samples]`: positions of drawn keys; -1: nothing"""
    log_factor: Tensor
    """`[rows, samples]`: log of F / (l g_c), what one drawn key counts for"""


class Span(NamedTuple):
    """Consecutive closed segments, 2^height of them, whose keys are grouped into cells together."""

    number: int
    """in the order in which cells are numbered"""
    height: int
    first: int
    """its first segment"""

    @property
    def segments(self) -> int:
        return 1 << self.height


class Spans:
    """The spans of a number of closed segments: what a row sees of the past, in as few parts as there are bits.

    s closed segments are seen as one span for each bit of s, the longest first: 13 segments are 8, 4 and 1. So most cells have
    members from far and wide, and a segment that has just been closed is in a short span by itself. Spans have 2^height segments;
    those of the largest height follow each other without gaps. A shorter one that follows another one of its length is never seen
    by itself (both together are a longer one), so it is not made. A key lies in at most one span of each height.

    Cells are numbered height by height and span by span, in proportion to the length of a span.
    """

    def __init__(self, segments: int, heights: int) -> None:
        self.all: list[Span] = []
        self.tallest = heights - 1
        self._base = []
        for height in range(min(heights, segments.bit_length())):
            self._base.append(len(self.all))
            stride = self._stride(height)
            for first in range(0, segments - (1 << height) + 1, stride):
                self.all.append(Span(len(self.all), height, first))

    def _stride(self, height: int) -> int:
        """From the first segment of a span to that of the next one of its height."""
        return 1 << height if height == self.tallest else 2 << height

    def seen(self, segments: int) -> list[Span]:
        """The spans that make up the first `segments` segments, from the first to the last."""
        found, done = [], 0
        for height in reversed(range(len(self._base))):
            while segments - done >= 1 << height:
                found.append(self.all[self._base[height] + done // self._stride(height)])
                done += 1 << height
        return found

    def edges(self, per_segment: int) -> list[int]:
        """The first cell of each span where a segment has `per_segment` of them; one more at the end."""
        return [0, *accumulate(span.segments * per_segment for span in self.all)]


class Piece(NamedTuple):
    """Consecutive query positions that see the same cells."""

    start: int
    stop: int
    closed: int
    """keys before this one are seen through cells"""
    segments: int
    """how many segments they make"""

    @property
    def length(self) -> int:
        return self.stop - self.start


def closed_keys(visible: Tensor, settings: CellSettings) -> Tensor:
    """How many keys a row that sees the first `visible` ones sees through cells: its completed segments, less the window."""
    if not settings.segment:
        return visible
    own = (visible - 1).div(settings.segment, rounding_mode="floor")
    return (own - settings.window).clamp(min=0) * settings.segment


def pieces(visible: Tensor, settings: CellSettings) -> list[Piece]:
    """The positions `[length]` of a head, cut where the set of closed keys changes."""
    if len(visible) == 0:
        return []
    closed, counts = closed_keys(visible, settings).unique_consecutive(return_counts=True)
    found, start = [], 0
    for keys, count in zip(closed.tolist(), counts.tolist(), strict=True):
        segments = keys // settings.segment if settings.segment else int(keys > 0)
        found.append(Piece(start, start + count, keys, segments))
        start += count
    return found


def row_blocks_of(found: list[Piece], rows: int) -> Iterator[list[Piece]]:
    """The pieces in groups of at most `rows` positions (at least one); long pieces are cut."""
    block: list[Piece] = []
    room = rows
    for piece in found:
        start = piece.start
        while start < piece.stop:
            stop = min(piece.stop, start + room)
            block.append(piece._replace(start=start, stop=stop))
            room -= stop - start
            start = stop
            if room == 0:
                yield block
                block, room = [], rows
    if block:
        yield block
