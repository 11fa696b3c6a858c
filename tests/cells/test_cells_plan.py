"""The plan of the cells engine: which rows see which spans of closed segments, and which key lives in which cell of them."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from by_hand import all_spans, spans_seen
from partitions import PARTITIONS, normal

import nearfield as nf
from nearfield.cells.sizes import MOST_SPAN_LEVELS, CellSizes
from nearfield.cells.spans import Spans, closed_keys, pieces, row_blocks_of
from nearfield.cells.torch.head import assign
from nearfield.problem import check

partitions = pytest.mark.parametrize("name", PARTITIONS)


# Spans

MOST = 40


def test_thirteen_segments() -> None:
    """As the documentation says: 8, 4 and 1. And with three lengths at most: 4, 4, 4 and 1."""
    assert [(span.first, span.segments) for span in Spans(13, 8).seen(13)] == [(0, 8), (8, 4), (12, 1)]
    assert [(span.first, span.segments) for span in Spans(13, 3).seen(13)] == [(0, 4), (4, 4), (8, 4), (12, 1)]


@pytest.mark.parametrize("levels", range(1, 9))
def test_spans_by_hand(levels: int) -> None:
    for segments in range(MOST + 1):
        spans = Spans(segments, levels)
        assert [span.number for span in spans.all] == list(range(len(spans.all)))
        assert [(span.level, span.first) for span in spans.all] == all_spans(segments, levels), "those that are seen, no others"
        for seen in range(segments + 1):
            found = spans.seen(seen)
            assert [(span.level, span.first) for span in found] == spans_seen(seen, levels)
            assert all(span is spans.all[span.number] for span in found)


@pytest.mark.parametrize("levels", range(1, 9))
def test_spans_tile_the_past(levels: int) -> None:
    """Every segment once and in order, longer spans first, in as few parts as there are bits where no length is too long."""
    spans = Spans(MOST, levels)
    for seen in range(MOST + 1):
        found = spans.seen(seen)
        assert [x for span in found for x in range(span.first, span.first + span.segments)] == list(range(seen))
        lengths = [span.segments for span in found]
        assert lengths == sorted(lengths, reverse=True)
        assert all(length == 2**span.level and span.level < levels for length, span in zip(lengths, found, strict=True))
        short = [length for length in lengths if length < 2 ** (levels - 1)]
        assert len(set(short)) == len(short), "only the longest may follow one of its length"


@pytest.mark.parametrize("levels", range(1, 9))
def test_what_is_seen_does_not_depend_on_later_segments(levels: int) -> None:
    for seen in range(MOST + 1):
        alone = [span._replace(number=0) for span in Spans(seen, levels).seen(seen)]
        for total in range(seen, MOST + 1):
            assert [span._replace(number=0) for span in Spans(total, levels).seen(seen)] == alone


@pytest.mark.parametrize("levels", range(1, 9))
def test_a_segment_is_in_one_span_of_each_level_at_most(levels: int) -> None:
    for segments in (1, 7, 24, MOST):
        members = [(span.level, x) for span in Spans(segments, levels).all for x in range(span.first, span.first + span.segments)]
        assert len(set(members)) == len(members)


@pytest.mark.parametrize("per_segment", [0, 1, 5])
@pytest.mark.parametrize("levels", [1, 2, 8])
def test_edges_of_spans(levels: int, per_segment: int) -> None:
    for segments in range(MOST + 1):
        spans = Spans(segments, levels)
        edges = spans.edges(per_segment)
        assert edges == [0, *accumulate(2**level * per_segment for level, _ in all_spans(segments, levels))]
        assert len(edges) == len(spans.all) + 1


@pytest.mark.parametrize(
    ("length", "levels"), [(1, 1), (15, 1), (16, 1), (32, 2), (63, 2), (64, 3), (16 * 300, MOST_SPAN_LEVELS)]
)
def test_levels_of_a_call(length: int, levels: int) -> None:
    """Enough for one span of all segments, up to a limit; without a mask all keys are one span."""
    tensors = 3 * (torch.zeros(1, 1, length, 2),)
    for causal in (True, False):
        problem = check(*tensors, None, 0.0, causal, None, False)
        assert nf.Cells(segment=16).sizes(problem).span_levels == (levels if causal else 1)


# Which key lives in which cell


@pytest.mark.parametrize("sinks", [0, 3, 20])
@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize(("segment", "levels"), [(0, 1), (16, 1), (16, 2), (16, 3), (8, 2), (8, 8)])
@partitions
def test_cells_of_keys(name: str, segment: int, levels: int, window: int, sinks: int) -> None:
    length = 70
    sizes = CellSizes(1, segment, window if segment else 0, sinks, 3, 1, 0, levels)
    keys = normal(length, 4)
    visible = torch.arange(1, length + 1) if segment else torch.full((length,), length)
    cell_of = assign(keys, visible, sizes, PARTITIONS[name])
    size = segment or length
    closed = (length - 1) // segment - sizes.window if segment else 1
    per_segment = sizes.cells_in(size)
    assert cell_of.shape == (levels, length)
    homeless = torch.ones_like(cell_of, dtype=torch.bool)
    first = 0
    for level, start in all_spans(closed, levels):
        place = slice(max(sinks, start * size), (start + 2**level) * size)
        homeless[level, place] = False
        own = cell_of[level, place]
        last = first + 2**level
        assert bool(((own >= first * per_segment) & (own < last * per_segment)).all()), "numbered span by span"
        first = last
    assert bool((cell_of[homeless] == -1).all()), "sinks, keys that no row sees closed, keys that are in no span of this level"


@partitions
def test_a_span_is_grouped_as_a_whole(name: str) -> None:
    """The keys of a span are grouped as if there were no others."""
    sizes = CellSizes(1, 16, 0, 0, 4, 1, 0, 3)
    keys = normal(128, 4)
    cell_of = assign(keys, torch.arange(1, 129), sizes, PARTITIONS[name])
    first = 0
    for level, start in all_spans(7, 3):
        place = slice(16 * start, 16 * (start + 2**level))
        alone = PARTITIONS[name].build(keys[None, place], 4 * 2**level)[0]
        assert torch.equal(cell_of[level, place], alone + first)
        first += 4 * 2**level


@pytest.mark.parametrize("levels", [1, 2, 8])
@partitions
def test_cells_know_nothing_of_later_segments(name: str, levels: int) -> None:
    """What a row before them sees: all spans that end before they begin."""
    sizes = CellSizes(1, 16, 0, 2, 2, 1, 0, levels)
    keys, visible = normal(100, 8, dtype=torch.float32), torch.arange(1, 101)
    early = assign(keys, visible, sizes, PARTITIONS[name])
    for size in (1.0, 1e6, 1e18):
        keys[48:] = size * normal(52, 8, seed=1, dtype=torch.float32)
        later = assign(keys, visible, sizes, PARTITIONS[name])
        for seen in range(4):
            for level, first in spans_seen(seen, levels):
                place = slice(16 * first, 16 * (first + 2**level))
                assert torch.equal(early[level, place], later[level, place])


# Rows


def closed_by_hand(seen: int, sizes: CellSizes) -> int:
    """Whole segments among the first `seen` keys that do not hold the last of them, less the window."""
    if not sizes.segment:
        return seen
    return max(0, max(0, seen - 1) // sizes.segment - sizes.window) * sizes.segment


@pytest.mark.parametrize(("segment", "window"), [(0, 0), (4, 0), (4, 1), (5, 2), (1, 0), (100, 0)])
@pytest.mark.parametrize("kind", ["causal", "padded", "short", "all", "none"])
def test_pieces_and_blocks_of_rows(kind: str, segment: int, window: int) -> None:
    """Every position once and in order, with the segments that it sees closed."""
    sizes = CellSizes(1, segment, window, 0, 2, 1, 0)
    every = torch.arange(1, 24)
    kinds = {"padded": (every - 5).clamp(min=0), "short": every.clamp(max=9), "all": every * 0 + 23, "none": every * 0}
    visible = kinds.get(kind, every)
    found = pieces(visible, sizes)
    assert [row for piece in found for row in range(piece.start, piece.stop)] == list(range(23))
    for piece in found:
        for row in range(piece.start, piece.stop):
            assert piece.closed == closed_by_hand(int(visible[row]), sizes) == int(closed_keys(visible[row], sizes))
        assert piece.segments == (piece.closed // segment if segment else int(piece.closed > 0))
    for rows in (1, 3, 7, 100):
        blocks = list(row_blocks_of(found, rows))
        assert [row for block in blocks for piece in block for row in range(piece.start, piece.stop)] == list(range(23))
        assert all(sum(piece.length for piece in block) == rows for block in blocks[:-1])
        assert 0 < sum(piece.length for piece in blocks[-1]) <= rows
    assert pieces(visible[:0], sizes) == list(row_blocks_of([], 3)) == []
