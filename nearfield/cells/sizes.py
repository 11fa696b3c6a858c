"""The sizes of a call and of a cache, and their defaults. docs/cells.md says how they were chosen, with measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from nearfield.problem import Problem

MOST_SPAN_LEVELS = 8
"""Causal: closed segments are joined into spans of at most 2^7 of them."""

SHARES = (1, 16, 32, 64, 128, 256)
"""How many rows may open cells together."""

SHARE, LEAST_QUERIES = 128, 1024
"""Without a mask, so many rows open cells together by default where the Triton kernels run, from so many queries on: with fewer
there are too few blocks to tell rows apart."""

MANY_KEYS = 131_072
"""From so many keys on, memory is what runs out first."""


class CellSizes(NamedTuple):
    """The sizes of one call as operators and kernels take them: plain integers."""

    group: int
    """query heads per key-value head"""
    segment: int
    """causal: keys per segment; 0: no causal mask, all keys are one segment"""
    window: int
    """causal: how many segments before its own a row sees key by key"""
    sinks: int
    """how many of the first keys are near for every row"""
    cell_size: int
    probes: int
    """cells opened per row"""
    samples: int
    """far keys drawn per row"""
    span_levels: int = 1
    """causal: how many lengths of spans there are: 1, 2, 4, ... segments"""
    share: int = 1
    """how many queries of a head open cells together, as a block: consecutive ones, or in the order of their best cells"""

    @property
    def ordered(self) -> bool:
        """Whether blocks are made of rows in the order of their best cells: without a mask any rows may be a block."""
        return self.share > 1 and not self.segment

    def cells_in(self, keys: int) -> int:
        """How many cells this many keys are grouped into."""
        return max(1, round(keys / self.cell_size))

    def blocks_of(self, rows: int) -> int:
        """How many blocks the rows of a group are: those of each member are cut by themselves."""
        # A traced program has symbols for sizes, and would not know that group * (rows // group) are all rows.
        return rows if self.share == 1 else self.group * -(-(rows // self.group) // self.share)


class MemoryPolicy(NamedTuple):
    """How much memory a call takes beyond its inputs and output, and how its output lies in memory."""

    beyond: float = 0.48
    """intermediate results may take this share of the memory of inputs and output"""
    heads: int = 0
    """how many heads an output laid out as `[batch, length, heads, value_dim]` has; 0: it is laid out head by head"""

    @staticmethod
    def of(problem: Problem) -> MemoryPolicy:
        """The policy for a call.

        Many keys take less, which makes a pass a little slower.
        In training, the forward pass may use the memory that the backward pass will take anyway. A model that goes on with a
        transposed output keeps that for its own backward pass; an output already laid out that way is kept once for both.
        """
        query = problem.query
        transposed = query.shape[1] > 1 and query.stride(1) < query.stride(2)
        if problem.needs_grad:
            return MemoryPolicy(1.0, query.shape[1] if transposed else 0)
        return MemoryPolicy(0.3) if problem.key.shape[-2] >= MANY_KEYS else MemoryPolicy()


def default_cell_size(length: int, causal: bool = False, on_gpu: bool = False) -> int:
    """A power of two, for 512 cells at first, about 4 sqrt(length) from 16k keys on; causal, up to twice as many from 64k on.

    On a GPU a power of two near sqrt(length) / 2.5: 64 at 32k, 128 at 131k, 512 at a million.
    """
    if on_gpu:
        return 2 ** max(4, round(math.log2(math.sqrt(max(1, length)) / 2.5)))
    cells = max(512.0, 4.0 * math.sqrt(length))
    size = 2 ** max(2, math.ceil(math.log2(max(1.0, length / cells))))
    return max(64, size // 2) if causal and size > 64 else size


def default_probes(length: int, cell_size: int, causal: bool = False, on_gpu: bool = False, share: int = 1) -> int:
    """As many as it takes to open 54 length^(1/4) keys: 512 of 8k, 724 of 32k, 1,024 of 131k; at least 8 cells.

    On a GPU a causal row opens 60 length^(1/4) keys, since it sees several spans, and others 27, in at least 4 cells. Rows that
    open cells together open 115 with a mask, in at least 12 cells, and 108 without: each needs some of its own.
    """
    if share > 1:
        return max(12, round(115 * length**0.25 / cell_size)) if causal else max(8, round(108 * length**0.25 / cell_size))
    few = on_gpu and not causal
    return max(4 if few else 8, round((27 if few else 60 if on_gpu else 54) * length**0.25 / cell_size))


def default_segment(length: int, on_gpu: bool = False) -> int:
    """A power of two near 11 sqrt(length): 1,024 at 8k, 2,048 at 32k, 4,096 at 131k; on a GPU half of that."""
    return 2 ** max(6, round(math.log2((5.6 if on_gpu else 11) * math.sqrt(max(1, length)))))


def span_levels(length: int, segment: int) -> int:
    """As many as it takes for one span to hold all segments, but at most `MOST_SPAN_LEVELS`."""
    return max(1, min(MOST_SPAN_LEVELS, (length // segment).bit_length()))


SEGMENT, WINDOW, CELL_SIZE = 1024, 16, 16
"""Defaults of a cache. Segments and cells grow beyond 8,192 keys, the window does not."""
FIXED_SEGMENTS = 8
"""A cache: after this many segments of the default length they grow."""
GROUP_FROM, GROUP_FROM_ON_GPU = 8192, 16_384
"""A cache groups nothing until it has so many keys. Up to there a step that reads all of them takes about as long, on a GPU less
time."""
ROOM = 1024
"""A captured step of a cache has room for so many more keys, or for as many as there are."""
END_MULTIPLE = 16
"""A cache: a segment that takes in all keys there are ends at a multiple of this."""
FEWEST_PROBES = 20
"""A cache opens at least this many cells by default."""
OPENED, OPENED_ON_GPU = 3.5, 9.0
"""A cache opens cells of so many times sqrt(n) keys. Where they are on a GPU, a step takes little longer for more of them."""


@dataclass(frozen=True)
class CacheSizes:
    """When a cache closes a segment, where the segment ends, and how many cells it gets. No closed segment is grouped again.

    Cells of a large segment are better, because keys that are alike are scattered over the whole text. So a segment takes in all
    keys that are there when it is closed: a prompt is one segment. There is none before `group_from` keys. Token by token,
    segments and cells grow with the square root of the number of keys before them. A step scores all cells and reads the running
    segment, so it takes time of that order: n keys are in at most 11 sqrt(n) cells, and the running segment has as many keys.
    """

    segment: int | None
    """keys per segment; None: all that are there, but at least `group_from`, then 1,024, and from 8,192 keys on 11 sqrt(n)"""
    cell_size: int | None
    """keys per cell; None: 16 up to 8,192 keys, then sqrt(n / 32)"""
    window: int
    """how many keys before the running segment are read one by one"""
    sinks: int
    group_from: int = 0
    """how many keys the first segment has at least, unless `segment` says how many each has"""

    @staticmethod
    def of(
        segment: int | None,
        cell_size: int | None,
        window: int | None,
        sinks: int,
        group_from: int | None = None,
        on_gpu: bool = False,
    ) -> CacheSizes:
        """These sizes, with the default window and the default length of the first segment where they are None."""
        window = min(WINDOW, segment or SEGMENT) if window is None else window
        if group_from is None:
            group_from = GROUP_FROM_ON_GPU if on_gpu else GROUP_FROM
        return CacheSizes(segment, cell_size, window, sinks, group_from)

    def length(self, start: int) -> int:
        """The fewest keys that the segment that begins at key `start` may have."""
        if self.segment is not None:
            return self.segment
        if start == 0:
            return max(SEGMENT, self.group_from)
        if start < FIXED_SEGMENTS * SEGMENT:
            return SEGMENT
        # Segments that grow with the square root end at squares: 32 m^2, 32 (m + 1)^2, ...
        unit = SEGMENT // (4 * FIXED_SEGMENTS)
        return unit * (2 * math.isqrt(start // unit) + 1)

    def next_close(self, start: int) -> int:
        """The first position whose query finds the segment that begins at key `start` closed."""
        return start + self.length(start) + self.window

    def next_end(self, start: int, position: int) -> int:
        """Where the segment that begins at key `start` ends, for a query at this position; `start` itself if it is still open."""
        if position < self.next_close(start):
            return start
        least = start + self.length(start)
        return least if self.segment is not None else max(least, (position - self.window) // END_MULTIPLE * END_MULTIPLE)

    def room(self, closed: int, length: int) -> int:
        """How many more keys a captured step has room for: until a segment is closed, or as many again."""
        return min(self.next_close(closed) - length, max(ROOM, length))

    def cells(self, start: int, end: int) -> int:
        """How many cells a segment is given."""
        size = self.cell_size or max(CELL_SIZE, CELL_SIZE * math.sqrt(end / (FIXED_SEGMENTS * SEGMENT)))
        return max(1, round((end - start) / size))

    def most_open(self, closed: int) -> int:
        """The largest number of keys, a query's own included, that are in no closed segment."""
        return self.window + self.length(closed)


def default_cache_probes(closed: int, cells: int, on_gpu: bool = False) -> int:
    """As many as it takes to open 3.5 sqrt(n) of n keys: 1,267 of 131k, 3,584 of a million; at least 20 cells, 320 keys of 8k.

    For keys on a GPU 9 sqrt(n): 1,629 of 32k, 3,258 of 131k, 9,216 of a million.
    """
    opened = OPENED_ON_GPU if on_gpu else OPENED
    return max(FEWEST_PROBES, round(opened * math.sqrt(closed) * cells / max(1, closed)))
