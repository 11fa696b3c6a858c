"""Spans of segments: which cells a causal row sees, and which rows see the same cells."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.cells.sizes import CellSizes


class Span(NamedTuple):
    """2^level consecutive closed segments whose keys are grouped into cells together."""

    number: int
    """its place in the order in which cells are numbered"""
    level: int
    first: int
    """its first segment"""

    @property
    def segments(self) -> int:
        return 1 << self.level


class Spans:
    """The spans of a number of closed segments: the parts in which rows see the past.

    s closed segments are seen as one span for each set bit of s, the longest first: 13 segments are 8, 4 and 1. So most cells
    have members from the whole past, and a segment that has just been closed is a short span by itself. Spans have 2^level
    segments. Those of the largest level follow each other without gaps. A shorter one that would directly follow another of its
    length is never seen, because the two are seen as one longer span; so it is not made. A key is in at most one span of each
    level. There are as many spans as segments.

    Cells are numbered level by level and span by span. A span has cells in proportion to its length.
    """

    def __init__(self, segments: int, levels: int) -> None:
        self.all: list[Span] = []
        self.segments = segments
        self.tallest = levels - 1
        self._base = []
        for level in range(min(levels, segments.bit_length())):
            self._base.append(len(self.all))
            stride = self._stride(level)
            for first in range(0, segments - (1 << level) + 1, stride):
                self.all.append(Span(len(self.all), level, first))

    def _stride(self, level: int) -> int:
        """How many segments lie between the starts of consecutive spans of a level."""
        return 1 << level if level == self.tallest else 2 << level

    def seen(self, segments: int) -> list[Span]:
        """The spans that make up the first `segments` segments, from the first to the last."""
        found, done = [], 0
        for level in reversed(range(len(self._base))):
            while segments - done >= 1 << level:
                found.append(self.all[self._base[level] + done // self._stride(level)])
                done += 1 << level
        return found

    def edges(self, per_segment: int) -> list[int]:
        """The first cell of each span if a segment has `per_segment` of them, and the total number of cells at the end."""
        return [0, *accumulate(span.segments * per_segment for span in self.all)]


class Piece(NamedTuple):
    """Consecutive query positions that see the same cells."""

    start: int
    stop: int
    closed: int
    """how many keys are seen through cells"""
    segments: int
    """how many segments these make"""

    @property
    def length(self) -> int:
        return self.stop - self.start


def closed_keys(visible: Tensor, sizes: CellSizes, members: int = 1) -> Tensor:
    """How many keys a row sees through cells if it sees the first `visible`: segments before its own, minus the window.

    The rows of a block see as many as its first row, which sees the fewest keys. `visible` `[..., members * length]`: of all
    positions, for so many members of the group; where each row opens cells by itself, of any rows.
    """
    if not sizes.segment:
        return visible
    if sizes.share > 1:
        length = visible.shape[-1] // members
        first = torch.arange(length, device=visible.device) // sizes.share * sizes.share
        visible = visible.unflatten(-1, (members, length))[..., first].flatten(-2)
    own = (visible - 1).div(sizes.segment, rounding_mode="floor")
    return (own - sizes.window).clamp(min=0) * sizes.segment


def blocks_of_rows(rows: int, sizes: CellSizes, device: torch.device, order: Tensor | None = None) -> Tensor:
    """`[rows]`: the number of the block of each row of a group.

    `order` `[..., rows]`: see `CellPlan`; then the same for each. Without one, or where it is empty: rows in their own order.
    """
    number = torch.arange(rows, device=device)
    if sizes.share == 1:
        return number
    length = rows // sizes.group
    member, place = number // max(1, length), number % max(1, length)
    block = member * -(-length // sizes.share) + place // sizes.share
    if order is None or order.shape[-1] != rows:
        return block
    return torch.empty_like(order, dtype=block.dtype).scatter_(-1, member * length + order, block.expand(order.shape))


def pieces(visible: Tensor, sizes: CellSizes) -> list[Piece]:
    """The positions of a head, which see the first `visible` `[length]` keys, cut where the number of closed keys changes."""
    if len(visible) == 0:
        return []
    closed, counts = closed_keys(visible, sizes).unique_consecutive(return_counts=True)
    found, start = [], 0
    for keys, count in zip(closed.tolist(), counts.tolist(), strict=True):
        segments = keys // sizes.segment if sizes.segment else int(keys > 0)
        found.append(Piece(start, start + count, keys, segments))
        start += count
    return found


def row_blocks_of(found: list[Piece], rows: int) -> Iterator[list[Piece]]:
    """The pieces in groups of `rows` positions, the last of which may have fewer. Pieces are cut where a group ends."""
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
