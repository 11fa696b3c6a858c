"""Where the cells of a head are, by its shape alone: tables that kernels look things up in, made once per shape."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, groupby, pairwise
from operator import attrgetter

import torch
from torch import Tensor

from nearfield.cells.sizes import CellSizes
from nearfield.cells.spans import Span, Spans

COLUMNS = 64
"""Cells that a kernel looks at together. A row sees its cells in columns, span by span, each span filled up to a multiple."""

SAMPLED = 16
"""Keys per cell that k-means looks at."""

KEPT_SAMPLES = 8
"""A layout remembers the samples of so many seeds."""


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
    """Keys of every span, at random, that k-means looks at. Kept: a captured graph cannot copy from the host."""

    def __init__(self, layout: Layout, seed: int) -> None:
        device = layout.span_of.device
        generator = torch.Generator("cpu").manual_seed(seed)
        edges = layout.spans.edges(layout.per_segment)
        starts = [span.first * layout.segment for span in layout.spans.all]
        counts = [span.segments * layout.segment for span in layout.spans.all]
        sizes = [min(count, SAMPLED * (edges[i + 1] - edges[i])) for i, count in enumerate(counts)]
        first = [0, *accumulate(sizes)]
        picked = [
            start + torch.randperm(count, generator=generator)[:size]
            for start, count, size in zip(starts, counts, sizes, strict=True)
        ]
        self.size = first[-1]
        self.position = torch.cat(picked).to(device, torch.int32) if picked else _ints([], device)
        """`[size]`: key positions, span by span"""
        self.first = _ints(first, device)
        """`[spans + 1]`: where those of each span begin"""
        self.edges = _ints([edge for pair in pairwise(first) for edge in pair], device)
        """`[2 * spans]`: where they begin and end"""
        self._chunks = Chunks(sizes, device)

    def chunks(self, size: int) -> tuple[Tensor, Tensor]:
        return self._chunks.of(size)


@dataclass(frozen=True, eq=False)
class Layout:
    """The spans and cells of a head with `length` keys, whatever its rows turn out to see."""

    length: int
    segment: int
    """keys per segment; all of them without a mask"""
    segments: int
    per_segment: int
    """cells per segment"""
    spans: Spans
    span_cell: Tensor
    """`[spans + 1]`: the first cell of each span"""
    seen_edges: Tensor
    """`[segments + 2]`: a row with s closed segments sees the runs of cells from this one on, up to the next entry"""
    seen_from: Tensor
    """`[runs]`: the cell in the first column of each run, the cells of one span: its first one, or one before that"""
    seen_cell: Tensor
    """`[runs]`: the first cell of each run"""
    seen_stop: Tensor
    """`[runs]`: where it ends"""
    column: Tensor
    """`[segments + 1, spans]`: the column of the first cell of a span for a row with s closed segments; -1: not seen"""
    tile_edges: Tensor
    """`[segments + 2]`: the same for tiles of at most `COLUMNS` of one span"""
    tile_cell: Tensor
    """`[tiles]`: the first cell of each tile"""
    span_of: Tensor
    """`[cells]`: the span of each cell"""
    seen: Tensor
    """`[segments + 1, spans]`: 1 where a row with s closed segments sees a span"""
    span_from: Tensor
    """`[spans]`: rows with so many closed segments are the first to see a span"""
    span_to: Tensor
    """`[spans]`: and those with so many no longer do"""
    words: int
    """32-bit words that have a bit for every column of a row"""
    span_edges: Tensor
    """`[2 * spans]`: the first key of each span, and where it ends"""
    span_level: Tensor
    span_at: Tensor
    """`[span_levels, segments]`: the span of a segment; -1: none of this height"""
    members: Tensor
    """`[keys of all spans]`: where they are in `[span_levels, n]`, span by span"""
    _keys: Chunks = field(repr=False)
    _seen: Tensor = field(repr=False)
    """`seen` on the host"""
    _tiles: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)
    _samples: dict[int, Sample] = field(default_factory=dict, repr=False)
    _made: dict[tuple[str, int], Tensor] = field(default_factory=dict, repr=False)

    @property
    def cells(self) -> int:
        return self.span_of.shape[0]

    @property
    def level_cells(self) -> list[tuple[int, int]]:
        """The range of cells of each level of spans."""
        edges = self.spans.edges(self.per_segment)
        groups = [list(group) for _, group in groupby(self.spans.all, key=attrgetter("level"))]
        return [(edges[own[0].number], edges[own[-1].number + 1]) for own in groups]

    def cell_tiles(self, block: int) -> tuple[Tensor, Tensor]:
        """The cells in tiles of at most `block` of one span: the span of each tile, and its first cell."""
        if block not in self._tiles:
            edges = self.spans.edges(self.per_segment)
            found = [(i, cell) for i in range(len(self.spans.all)) for cell in range(edges[i], edges[i + 1], block)]
            self._tiles[block] = _pairs(found, self.span_of.device)
        return self._tiles[block]

    def chunks(self, size: int) -> tuple[Tensor, Tensor]:
        """The keys of all spans in chunks of at most `size`: the span of each chunk, and its number in there."""
        return self._keys.of(size)

    def numbers(self, entries: int) -> Tensor:
        """The cells of all entries and one more, as they are when they are sorted: see `sort.Narrow`."""
        last = entries * self.cells
        shift, dtype = (1 << 15, torch.int16) if last < 1 << 16 else (0, torch.int32)
        return self._kept("numbers", entries, lambda: torch.arange(-shift, last + 1 - shift, dtype=dtype))

    def first_cells(self, entries: int) -> Tensor:
        """`[entries, spans + 1]`: the first cell of each span, counted on over the entries."""

        def make() -> Tensor:
            return torch.arange(entries)[:, None] * self.cells + torch.tensor(self.spans.edges(self.per_segment))

        return self._kept("first_cells", entries, make)

    def seen_chunks(self, size: int) -> Tensor:
        """`[segments + 1, chunks]`: 1 where a row with s closed segments sees the span of a chunk."""

        def make() -> Tensor:
            span = [span.number for span in self.spans.all for _ in range(-(-span.segments * self.segment // size))]
            return self._seen[:, span]

        return self._kept("seen_chunks", size, make)

    def _kept(self, name: str, number: int, make: Callable[[], Tensor]) -> Tensor:
        """Made on the host, so that it is there for all streams, and cannot be made while a graph is captured."""
        if (name, number) not in self._made:
            self._made[name, number] = make().to(self.span_of.device)
        return self._made[name, number]

    def sample(self, seed: int) -> Sample:
        """The keys that k-means looks at, the same ones whenever asked for."""
        if seed not in self._samples:
            if len(self._samples) >= KEPT_SAMPLES and self not in _IN_GRAPHS:
                del self._samples[next(iter(self._samples))]
            self._samples[seed] = Sample(self, seed)
        return self._samples[seed]

    def keep(self) -> None:
        """Never forget this layout: a captured graph reads its tables."""
        _IN_GRAPHS.add(self)


_IN_GRAPHS: set[Layout] = set()


def _pairs(found: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    table = torch.tensor(found, dtype=torch.int32).view(-1, 2).T.contiguous().to(device)
    return table[0], table[1]


def _ints(numbers: list[int], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


@lru_cache(maxsize=64)
def layout_of(length: int, sizes: CellSizes, device: torch.device) -> Layout:
    segment = sizes.segment or max(1, length)
    segments = max(0, (length - 1) // segment - sizes.window) if sizes.segment else int(length > 0)
    per_segment = sizes.cells_in(segment)
    spans = Spans(segments, sizes.span_levels)
    edges = spans.edges(per_segment)
    seen_edges, tile_edges, widest = [0], [0], COLUMNS
    tile_cell: list[int] = []
    seen_from: list[int] = []
    seen_cell: list[int] = []
    seen_stop: list[int] = []
    column = torch.full((segments + 1, len(spans.all)), -1, dtype=torch.int32)
    span_at = torch.full((sizes.span_levels, segments), -1, dtype=torch.int32)
    for span in spans.all:
        span_at[span.level, span.first : span.first + span.segments] = span.number
    for closed in range(segments + 1):
        first = 0
        for span in spans.seen(closed):
            start, stop = edges[span.number], edges[span.number + 1]
            shift = _shift(span, per_segment, spans.tallest)
            column[closed, span.number] = first + shift
            seen_from.append(start - shift)
            seen_cell.append(start)
            seen_stop.append(stop)
            tiles = range(start - shift, stop, COLUMNS)
            tile_cell += tiles
            first += COLUMNS * len(tiles)
        seen_edges.append(len(seen_cell))
        tile_edges.append(len(tile_cell))
        widest = max(widest, first)

    def there(numbers: Iterable[int]) -> Tensor:
        return _ints(list(numbers), device)

    span_of = torch.repeat_interleave(torch.arange(len(spans.all)), torch.tensor(edges).diff()).to(device, torch.int32)
    return Layout(
        length,
        segment,
        segments,
        per_segment,
        spans,
        there(edges),
        there(seen_edges),
        there(seen_from),
        there(seen_cell),
        there(seen_stop),
        column.to(device),
        there(tile_edges),
        there(tile_cell),
        span_of,
        (column >= 0).to(device, torch.float32),
        there([span.first + span.segments for span in spans.all]),
        there([_last_seen(span, spans.tallest, segments) for span in spans.all]),
        widest // 32,
        there(key for span in spans.all for key in (span.first * segment, (span.first + span.segments) * segment)),
        there(span.level for span in spans.all),
        span_at.to(device),
        _members(spans, length, segment).to(device),
        Chunks([span.segments * segment for span in spans.all], device),
        (column >= 0).float(),
    )


def _members(spans: Spans, length: int, segment: int) -> Tensor:
    found = [
        torch.arange(span.first * segment, (span.first + span.segments) * segment, dtype=torch.int32) + span.level * length
        for span in spans.all
    ]
    return torch.cat(found) if found else torch.zeros(0, dtype=torch.int32)


def _shift(span: Span, per_segment: int, tallest: int) -> int:
    """Columns before the first cell of a span that does not fill a tile: cells of different spans should be in different ones."""
    size = span.segments * per_segment
    if size >= COLUMNS:
        return 0
    room = COLUMNS - size
    return span.number * size % (room + 1) if span.level == tallest else min(per_segment * (span.segments - 1), room)


def _last_seen(span: Span, tallest: int, segments: int) -> int:
    """A span is seen until it is joined with the next one; the tallest are never joined."""
    return segments + 1 if span.level == tallest else min(span.first + 2 * span.segments, segments + 1)
