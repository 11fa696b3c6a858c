"""Which keys of a cache are on which rank: segments, dealt out. All ranks find the same from the lengths of what was appended.

Keys that come one by one fill segments of the lengths that a cache on one machine would give them (`CacheSizes`), and the ranks
take turns. Keys that come together, such as a prompt, are as many as one machine would close at once: each rank gets an equal
share of consecutive keys, which is a segment. The window behind them begins the next segment.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.cells.sizes import END_MULTIPLE, SEGMENT, CacheSizes
from nearfield.distributed.layout import ZigZag


class Segment(NamedTuple):
    """Consecutive keys of one rank."""

    start: int
    stop: int
    """where it ends when it is full; the last one may not be"""
    owner: int
    """the rank that has its keys"""

    def within(self, keys: slice) -> slice:
        """As many of these keys as it has; empty where it has none."""
        start = min(max(self.start, keys.start), self.stop)
        return slice(start, max(start, min(self.stop, keys.stop)))


@dataclass(frozen=True)
class Deal:
    """The segments of `length` keys on so many `ranks`."""

    sizes: CacheSizes
    ranks: int
    length: int = 0
    segments: tuple[Segment, ...] = ()
    """one after the other from key 0 on; those with all their keys, and at most one without"""
    digest: int = 0
    """of the segments: the same number on all ranks that have dealt alike"""

    def extended(self, length: int) -> Deal:
        """With more keys, up to `length` in all."""
        if length <= self._stop:
            return replace(self, length=length)
        segments, start = [*self.segments], self._stop
        while start < length:
            for stop in self._stops(start, length):
                segments.append(Segment(start, stop, self._turn(segments)))
                start = stop
        return self._with(length, segments)

    def _stops(self, start: int, length: int) -> list[int]:
        """Where the next segments end, of which the first begins at `start`, if there are keys up to `length`."""
        end = self.sizes.next_end(start, length)
        if end == start or self.sizes.segment is not None:
            return [start + self.sizes.length(start)]
        shares = min(self.ranks, max(1, (end - start) // SEGMENT))
        units = (end - start) // END_MULTIPLE
        return [start + units * share // shares * END_MULTIPLE for share in range(1, shares)] + [end]

    def cropped(self, length: int) -> Deal:
        """With the first `length` keys. The last segment may get more, up to where it would end if it began with them."""
        segments = [segment for segment in self.segments if segment.start < length]
        if segments and segments[-1].stop > length:
            last = segments[-1]
            segments[-1] = last._replace(stop=min(last.stop, max(length, last.start + self.sizes.length(last.start))))
        return self._with(length, segments)

    def sharded(self, layout: ZigZag) -> Deal:
        """With the keys of a prompt that ranks have read in zig-zag, after none: each piece is a segment of its rank.

        The window behind the last one, and what is left to a multiple, begin the next segment, on the rank that has them.
        """
        segments = []
        closed = (layout.length - self.sizes.window) // END_MULTIPLE * END_MULTIPLE
        for owner in range(self.ranks):
            for piece in layout.pieces(owner):
                cut = min(max(piece.start, closed), piece.stop)
                segments += [Segment(*ends, owner) for ends in ((piece.start, cut), (cut, piece.stop)) if ends[0] < ends[1]]
        segments.sort()
        last = segments[-1]
        segments[-1] = last._replace(stop=max(last.stop, last.start + self.sizes.length(last.start)))
        return self._with(layout.length, segments)

    def _with(self, length: int, segments: list[Segment]) -> Deal:
        found = tuple(segments)
        return replace(self, length=length, segments=found, digest=hash(found))

    @property
    def _stop(self) -> int:
        return self.segments[-1].stop if self.segments else 0

    def _turn(self, segments: list[Segment]) -> int:
        return (segments[-1].owner + 1) % self.ranks if segments else 0

    def own(self, rank: int, keys: slice) -> list[slice]:
        """Which of these keys a rank has."""
        found = []
        for segment in reversed(self.segments):
            if segment.stop <= keys.start:
                break
            part = segment.within(keys)
            if segment.owner == rank and part.start < part.stop:
                found.append(part)
        return found[::-1]

    def held(self, rank: int, length: int | None = None) -> int:
        """How many of the first `length` keys a rank has; None: of all."""
        return _count(self.own(rank, slice(0, self.length if length is None else length)))

    def held_from(self, rank: int, start: int, stop: int) -> int:
        """How many of these keys a rank has."""
        return _count(self.own(rank, slice(start, stop)))

    def positions(self, rank: int, keys: slice, device: torch.device | None = None) -> Tensor:
        """Those that a rank has of these keys."""
        parts = [torch.arange(part.start, part.stop, device=device) for part in self.own(rank, keys)]
        return torch.cat(parts) if parts else torch.arange(0, device=device)


def _count(parts: list[slice]) -> int:
    return sum(part.stop - part.start for part in parts)
