"""Where the spans and cells of a head are, which follows from the shape alone: tables for the kernels, made once per shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from operator import attrgetter
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells.partition.kmeans import sample_of
from nearfield.cells.sizes import CellSizes
from nearfield.cells.spans import Span, Spans

COLUMNS = 64
"""Cells that a kernel looks at together. A row sees its cells in columns, span by span, each padded to a multiple of this."""

SAMPLED = 16
"""Keys per cell that k-means looks at."""

KEPT_SAMPLES = 8
"""A layout remembers the samples of this many seeds."""


class PackedCells(NamedTuple):
    """How numbers of cells are stored while they are sorted: in 16 bits where they fit. Numbers continue from entry to entry."""

    last: int
    """how many cells there are; also stands for no cell"""

    @property
    def shift(self) -> int:
        """what is subtracted from the number of a cell"""
        return 1 << 15 if self.last < 1 << 16 else 0

    @property
    def dtype(self) -> torch.dtype:
        return torch.int16 if self.shift else torch.int32

    def all(self) -> Tensor:
        """All cells in order, then the number for no cell."""
        return torch.arange(-self.shift, self.last + 1 - self.shift, dtype=self.dtype)


class Chunks:
    """Ranges of numbers, one per span, cut into blocks of any size."""

    def __init__(self, counts: list[int], device: torch.device) -> None:
        self._counts, self._device = counts, device
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def of(self, size: int) -> tuple[Tensor, Tensor]:
        """Blocks of at most `size`: the span of each block, and its number in there."""
        if size not in self._made:
            found = [(span, i) for span, count in enumerate(self._counts) for i in range(-(-count // size))]
            self._made[size] = _pairs(found, self._device)
        return self._made[size]


class Sample:
    """The keys of every span that k-means looks at, see `sample_of`. Kept, because a captured graph cannot copy from the host."""

    def __init__(self, layout: Layout, seed: int) -> None:
        device = layout.span_of_cell.device
        generator = torch.Generator("cpu").manual_seed(seed)
        edges = layout.spans.edges(layout.cells_per_segment)
        starts = [span.first * layout.segment for span in layout.spans.all]
        counts = [span.segments * layout.segment for span in layout.spans.all]
        sizes = [min(count, SAMPLED * (edges[i + 1] - edges[i])) for i, count in enumerate(counts)]
        first = [0, *accumulate(sizes)]
        picked = [
            start + sample_of(count, edges[i + 1] - edges[i], sizes[i], generator)
            for i, (start, count) in enumerate(zip(starts, counts, strict=True))
        ]
        self.size = first[-1]
        self.position = lasting(torch.cat(picked).int() if picked else torch.empty(0, dtype=torch.int32), device)
        """`[size]`: key positions, span by span"""
        self.first = _ints(first, device)
        """`[spans + 1]`: where those of each span begin"""
        self.ranges = _ints([edge for pair in pairwise(first) for edge in pair], device)
        """`[2 * spans]`: where they begin and end"""
        self._chunks = Chunks(sizes, device)

    def chunks(self, size: int) -> tuple[Tensor, Tensor]:
        """See `Layout.chunks`."""
        return self._chunks.of(size)


@dataclass(frozen=True, eq=False)
class Layout:
    """The spans and cells of a head with `length` keys.

    "A row with s" below is one that sees s closed segments through cells. It sees the cells of its spans in columns.
    """

    length: int
    segment: int
    """keys per segment; all of them without a mask"""
    segments: int
    causal: bool
    sinks: int
    cells_per_segment: int
    spans: Spans
    cell_edges: Tensor
    """`[spans + 1]`: the first cell of each span"""
    span_column: Tensor
    """`[spans]`: the column of the first cell of a span. What comes before a span is the same for all rows that see it."""
    tile_edges: Tensor
    """`[segments + 2]`: the first tile of `COLUMNS` columns of a row with s; those of a row with s + 1 follow its last one"""
    tile_cell: Tensor
    """`[tiles + 1]`: the cell in the first column of each tile; one more, so that it is never empty"""
    tile_begin: Tensor
    """`[tiles + 1]`: the first cell of its span"""
    tile_end: Tensor
    """`[tiles + 1]`: one after the last cell of its span"""
    span_of_cell: Tensor
    """`[cells]`"""
    sees_span: Tensor
    """`[segments + 1, spans]`: 1 where a row with s sees a span"""
    span_seen_from: Tensor
    """`[spans]`: the least s of a row that sees the span"""
    span_seen_until: Tensor
    """`[spans]`: one more than the largest s of a row that sees it"""
    mark_words: int
    """32-bit words that have a bit for every column of a row"""
    key_ranges: Tensor
    """`[2 * spans]`: the first key of each span, and one after its last"""
    span_level: Tensor
    """`[spans]`"""
    span_of_segment: Tensor
    """`[span_levels, segments]`; -1: none of this level"""
    members: int
    """keys of all spans"""
    _keys: Chunks = field(repr=False)
    _sees_span: Tensor = field(repr=False)
    """`sees_span` on the host"""
    _tiles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _samples: dict[int, Sample] = field(default_factory=dict, repr=False)
    _made: dict[tuple[str, int], Tensor] = field(default_factory=dict, repr=False)

    @property
    def cells(self) -> int:
        return self.span_of_cell.shape[0]

    @property
    def most_cells(self) -> int:
        """in one span"""
        return max((span.segments for span in self.spans.all), default=0) * self.cells_per_segment

    @property
    def level_cells(self) -> list[tuple[int, int]]:
        """The range of cells of each level of spans."""
        edges = self.spans.edges(self.cells_per_segment)
        groups = [list(group) for _, group in groupby(self.spans.all, key=attrgetter("level"))]
        return [(edges[own[0].number], edges[own[-1].number + 1]) for own in groups]

    def cell_tiles(self, block: int) -> tuple[Tensor, Tensor]:
        """The cells in tiles of at most `block` of one span: the span of each tile, and its first cell."""
        if block not in self._tiles:
            edges = self.spans.edges(self.cells_per_segment)
            found = [(i, cell) for i in range(len(self.spans.all)) for cell in range(edges[i], edges[i + 1], block)]
            self._tiles[block] = _pairs(found, self.span_of_cell.device)
        return self._tiles[block]

    def chunks(self, size: int) -> tuple[Tensor, Tensor]:
        """The keys of all spans in chunks of at most `size`: the span of each chunk, and its number in there."""
        return self._keys.of(size)

    def tallies(self, size: int) -> tuple[Tensor, Tensor, int]:
        """Where in a list the numbers of each chunk begin that has one for every cell of its span; the first chunk of each span,
        and how many chunks there are at the end; the length of the list."""
        chunks = [-(-span.segments * self.segment // size) for span in self.spans.all]
        cells = [span.segments * self.cells_per_segment for span in self.spans.all]

        def edges() -> Tensor:
            wide = [own for own, count in zip(cells, chunks, strict=True) for _ in range(count)]
            return torch.tensor([0, *accumulate(wide)], dtype=torch.int32)

        first = self._kept("span_chunks", size, lambda: torch.tensor([0, *accumulate(chunks)], dtype=torch.int32))
        total = sum(own * count for own, count in zip(cells, chunks, strict=True))
        return self._kept("chunk_edges", size, edges), first, total

    def first_members(self, entries: int) -> Tensor:
        """`[entries]`: where the members of each entry begin, if all keys of spans but sinks are members."""

        def make() -> Tensor:
            ends = [((span.first + span.segments) * self.segment, span.first * self.segment) for span in self.spans.all]
            held = sum(end - min(end, max(first, self.sinks)) for end, first in ends)
            return torch.arange(entries, dtype=torch.int32) * held

        return self._kept("first_members", entries, make)

    def packed_cells(self, entries: int) -> Tensor:
        """All cells of this many entries, in order: see `PackedCells`."""
        return self._kept("packed_cells", entries, PackedCells(entries * self.cells).all)

    def part_factors(self, chunk: int) -> Tensor:
        """`[segments + 1, parts]`: how a row with s counts sums over keys, chunk by chunk, and over cells, span by span, for the
        covariance inside cells. Causal: divided by how many keys there are."""

        def make() -> Tensor:
            per_segment = -(-self.segment // chunk)
            before = torch.arange(self.segments * per_segment) // per_segment < torch.arange(self.segments + 1)[:, None]
            factors = torch.cat([before.float(), -self._sees_span], 1)
            return factors / self._pooled[:, None] if self.causal else factors

        return self._kept("part_factors", chunk, make)

    def product_factors(self, splits: int) -> Tensor:
        """`[spans + segments, segments * splits]`: how the gradients of the covariance that rows with 1, 2, ... closed segments
        see, each in `splits` parts, add up to those of each span, and of all spans that the keys of a segment are in.

        A row with s sees every one of the first s segments through one span. Causal: divided as the covariance is."""

        def make() -> Tensor:
            before = torch.arange(self.segments)[:, None] < torch.arange(1, self.segments + 1)
            factors = torch.cat([self._sees_span[1:].T, before.float()])
            return (factors / self._pooled[1:] if self.causal else factors).repeat_interleave(splits, 1)

        return self._kept("product_factors", splits, make)

    def row_start_needs(self, window: int) -> Tensor:
        """`[segments + 2]`: how many keys a row has to see, at least, to have 0, 1, 2, ... closed segments."""

        def make() -> Tensor:
            numbers = torch.arange(self.segments + 2, dtype=torch.int64)
            needs = (numbers + window) * self.segment + 1 if self.causal else torch.where(numbers < 2, numbers, 2**31 - 1)
            return torch.where(numbers > 0, needs, 0).clamp(max=2**31 - 1).to(torch.int32)

        return self._kept("row_start_needs", window, make)

    def key_block_needs(self, size: int) -> Tensor:
        """`[2 * blocks]`: how many keys a row has to see, to see the first of a block of `size` keys; then, to see all of it."""

        def make() -> Tensor:
            first = torch.arange(0, self.length, size, dtype=torch.int32)
            return torch.cat([first + 1, (first + size).clamp(max=self.length)])

        return self._kept("key_block_needs", size, make)

    @property
    def pooled(self) -> Tensor:
        """Causal: `[segments + 1]`: how many keys a row with s sees through cells."""
        return self._kept("pooled", 0, lambda: self._pooled)

    @property
    def _pooled(self) -> Tensor:
        return (torch.arange(self.segments + 1) * self.segment - self.sinks).clamp(min=1).float()

    def _kept(self, name: str, number: int, make: Callable[[], Tensor]) -> Tensor:
        """Made on the host, so that all streams may use it. While a graph is captured it cannot be made."""
        if (name, number) not in self._made:
            self._made[name, number] = lasting(make().contiguous(), self.span_of_cell.device)
        return self._made[name, number]

    def sample(self, seed: int) -> Sample:
        """The keys that k-means looks at, always the same for a seed."""
        if seed not in self._samples:
            if len(self._samples) >= KEPT_SAMPLES and self not in _IN_GRAPHS:
                del self._samples[next(iter(self._samples))]
            self._samples[seed] = Sample(self, seed)
        return self._samples[seed]

    def keep(self) -> None:
        """Keep this layout and its samples for good: a captured graph reads their tables."""
        _IN_GRAPHS.add(self)


_IN_GRAPHS: set[Layout] = set()


def _pairs(found: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    table = lasting(torch.tensor(found, dtype=torch.int32).view(-1, 2).T.contiguous(), device)
    return table[0], table[1]


def _ints(numbers: list[int], device: torch.device) -> Tensor:
    return lasting(torch.tensor(numbers, dtype=torch.int32), device)


def lasting(table: Tensor, device: torch.device) -> Tensor:
    """A table on the device, in memory that no graph lays claim to.

    While `torch.compile` warms up a call for a graph, what its thread (in older versions: its stream) allocates belongs to that
    graph. So another thread does it, on the default stream.
    """
    if device.type != "cuda":
        return table.to(device)
    with ThreadPoolExecutor(1) as another:
        made = another.submit(table.to, device).result()
    # Once it is dropped, its memory waits for what this stream still has to do.
    made.record_stream(torch.cuda.current_stream(device))
    return made


def as_read(visible: Tensor) -> Tensor:
    """How many keys rows see, `[entries, rows]`, as kernels read it. Where all entries see the same, one row serves them all."""
    if visible.stride(0) == 0:
        return visible[:1].to(torch.int32).contiguous().expand(len(visible), -1)
    return visible.to(torch.int32).contiguous()


# A remembered call takes up to two.
@lru_cache(maxsize=256)
def layout_of(length: int, sizes: CellSizes, device: torch.device) -> Layout:
    segment = sizes.segment or max(1, length)
    segments = max(0, (length - 1) // segment - sizes.window) if sizes.segment else int(length > 0)
    cells_per_segment = sizes.cells_in(segment)
    spans = Spans(segments, sizes.span_levels)
    edges = spans.edges(cells_per_segment)
    tile_edges, widest = [0], COLUMNS
    tile_cell: list[int] = []
    tile_begin: list[int] = []
    tile_end: list[int] = []
    span_column = [-1] * len(spans.all)
    sees_span = torch.zeros(segments + 1, len(spans.all))
    span_of_segment = torch.full((sizes.span_levels, segments), -1, dtype=torch.int32)
    for span in spans.all:
        span_of_segment[span.level, span.first : span.first + span.segments] = span.number
    for closed in range(segments + 1):
        first = 0
        for span in spans.seen(closed):
            start, stop = edges[span.number], edges[span.number + 1]
            shift = _shift(span, cells_per_segment, spans.tallest)
            assert span_column[span.number] in (-1, first + shift)
            span_column[span.number] = first + shift
            sees_span[closed, span.number] = 1.0
            tiles = range(start - shift, stop, COLUMNS)
            tile_cell += tiles
            tile_begin += [start] * len(tiles)
            tile_end += [stop] * len(tiles)
            first += COLUMNS * len(tiles)
        tile_edges.append(len(tile_cell))
        widest = max(widest, first)

    def on_device(numbers: Iterable[int]) -> Tensor:
        return _ints(list(numbers), device)

    span_of_cell = torch.repeat_interleave(torch.arange(len(spans.all)), torch.tensor(edges).diff()).int()
    return Layout(
        length=length,
        segment=segment,
        segments=segments,
        causal=sizes.segment > 0,
        sinks=sizes.sinks,
        cells_per_segment=cells_per_segment,
        spans=spans,
        cell_edges=on_device(edges),
        span_column=on_device(span_column),
        tile_edges=on_device(tile_edges),
        tile_cell=on_device([*tile_cell, 0]),
        tile_begin=on_device([*tile_begin, 0]),
        tile_end=on_device([*tile_end, 0]),
        span_of_cell=lasting(span_of_cell, device),
        sees_span=lasting(sees_span, device),
        span_seen_from=on_device(span.first + span.segments for span in spans.all),
        span_seen_until=on_device(_seen_until(span, spans.tallest, segments) for span in spans.all),
        mark_words=widest // 32,
        key_ranges=on_device(key for span in spans.all for key in (span.first * segment, (span.first + span.segments) * segment)),
        span_level=on_device(span.level for span in spans.all),
        span_of_segment=lasting(span_of_segment, device),
        members=sum(span.segments * segment for span in spans.all),
        _keys=Chunks([span.segments * segment for span in spans.all], device),
        _sees_span=sees_span,
    )


def _shift(span: Span, cells_per_segment: int, tallest: int) -> int:
    """Empty columns before the first cell of a span that does not fill a tile, so that cells of different spans are in different
    columns."""
    size = span.segments * cells_per_segment
    if size >= COLUMNS:
        return 0
    free = COLUMNS - size
    return span.number * size % (free + 1) if span.level == tallest else min(cells_per_segment * (span.segments - 1), free)


def _seen_until(span: Span, tallest: int, segments: int) -> int:
    """A span is seen until it is joined with the next one; the longest are never joined."""
    return segments + 1 if span.level == tallest else min(span.first + 2 * span.segments, segments + 1)


@triton.jit
def closed_segments(visible, segment, window, segments, CAUSAL: tl.constexpr):
    """How many segments a row sees through cells if it sees `visible` keys."""
    if CAUSAL:
        own = (visible - 1) // segment
        return tl.where(visible > 0, tl.minimum(tl.maximum(own - window, 0), segments), 0)
    else:
        return tl.where(visible > 0, 1, 0)


@triton.jit
def within(cell, first, last):
    """`cell`, or the closest one from `first` to `last`, which is not included: what a row does not see must not be multiplied by
    zero, which gives no zero if it is not finite or too large."""
    return tl.maximum(tl.minimum(cell, last - 1), first)


@triton.jit
def position_at(order, place, there, ORDERED: tl.constexpr):
    """The position of the row at a place; `order` is that of a head."""
    if ORDERED:
        return tl.load(order + place, mask=there, other=0)
    else:
        return place
