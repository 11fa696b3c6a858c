"""Where the cells of a head are, by its shape alone: tables that kernels look things up in, made once per shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from nearfield.kernels.cells_plan import CellSettings, Span, Spans

COLUMNS = 64
"""Cells that a kernel looks at together. A row sees its cells in columns, span by span, each span filled up to a multiple."""


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
    tile_edges: Tensor
    """`[segments + 2]`: a row with s closed segments sees the tiles from this one on, up to the next entry"""
    tile_cell: Tensor
    """`[tiles]`: the first cell of each tile of at most `COLUMNS`"""
    tile_stop: Tensor
    """`[tiles]`: where its span ends"""
    column: Tensor
    """`[segments + 1, spans]`: the column of the first cell of a span for a row with s closed segments; -1: not seen"""
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

    @property
    def cells(self) -> int:
        return len(self.span_of)

    @property
    def heights(self) -> list[tuple[int, int]]:
        """The range of cells of each height."""
        edges = self.spans.edges(self.per_segment)
        groups = [list(group) for _, group in groupby(self.spans.all, key=attrgetter("height"))]
        return [(edges[own[0].number], edges[own[-1].number + 1]) for own in groups]

    def cell_tiles(self, block: int) -> tuple[Tensor, Tensor]:
        """The cells in tiles of at most `block` of one span: the span of each tile, and its first cell."""
        return _tiles(self, block)

    def chunks(self, size: int) -> tuple[Tensor, Tensor]:
        """The keys of all spans in chunks of at most `size`: the span of each chunk, and its number in there."""
        return _chunks(self, size, None)

    def chunk_groups(self, size: int) -> list[tuple[Tensor, Tensor]]:
        """The same, one height after the other: a key is in one chunk of each."""
        return [_chunks(self, size, height) for height in range(len(self.heights))]


@lru_cache(maxsize=64)
def _tiles(layout: Layout, block: int) -> tuple[Tensor, Tensor]:
    edges = layout.spans.edges(layout.per_segment)
    found = [
        (span.number, cell) for span in layout.spans.all for cell in range(edges[span.number], edges[span.number + 1], block)
    ]
    return _pairs(found, layout.span_of.device)


@lru_cache(maxsize=64)
def _chunks(layout: Layout, size: int, height: int | None) -> tuple[Tensor, Tensor]:
    spans = [span for span in layout.spans.all if height is None or span.height == height]
    found = [(span.number, i) for span in spans for i in range(-(-span.segments * layout.segment // size))]
    return _pairs(found, layout.span_of.device)


def _pairs(found: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    table = torch.tensor(found, dtype=torch.int32, device=device).view(-1, 2)
    return table[:, 0].contiguous(), table[:, 1].contiguous()


@lru_cache(maxsize=64)
def layout_of(length: int, settings: CellSettings, device: torch.device) -> Layout:
    segment = settings.segment or max(1, length)
    segments = max(0, (length - 1) // segment - settings.window) if settings.segment else int(length > 0)
    per_segment, _ = settings.per_segment(segment)
    spans = Spans(segments, settings.heights)
    edges = spans.edges(per_segment)
    tile_edges, widest = [0], COLUMNS
    tile_cell: list[int] = []
    tile_stop: list[int] = []
    column = torch.full((segments + 1, len(spans.all)), -1, dtype=torch.int32)
    for closed in range(segments + 1):
        first = 0
        for span in spans.seen(closed):
            start, stop = edges[span.number], edges[span.number + 1]
            column[closed, span.number] = first
            tiles = range(start, stop, COLUMNS)
            tile_cell += tiles
            tile_stop += [stop] * len(tiles)
            first += COLUMNS * len(tiles)
        tile_edges.append(len(tile_cell))
        widest = max(widest, first)

    def there(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=device)

    span_of = torch.repeat_interleave(torch.arange(len(spans.all)), torch.tensor(edges).diff()).to(device, torch.int32)
    return Layout(
        length,
        segment,
        segments,
        per_segment,
        spans,
        there(edges),
        there(tile_edges),
        there(tile_cell),
        there(tile_stop),
        column.to(device),
        span_of,
        (column >= 0).to(device, torch.float32),
        there([span.first + span.segments for span in spans.all]),
        there([_last_seen(span, spans.tallest, segments) for span in spans.all]),
        widest // 32,
    )


def _last_seen(span: Span, tallest: int, segments: int) -> int:
    """A span is seen until it is joined with the next one; the tallest are never joined."""
    return segments + 1 if span.height == tallest else min(span.first + 2 * span.segments, segments + 1)
