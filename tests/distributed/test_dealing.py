"""Who groups which keys, and the numbers of cells."""

from __future__ import annotations

import pytest
import torch

import nearfield as nf
from nearfield.cells.operator import Recipe
from nearfield.cells.partition import to_plain
from nearfield.cells.sizes import CellSizes
from nearfield.cells.spans import Spans
from nearfield.cells.torch.head import assign
from nearfield.distributed.dealing import Dealt


def dealt(closed: tuple[int, ...], ranks: int) -> Dealt:
    sizes = CellSizes(group=1, segment=16, window=0, sinks=2, cell_size=4, probes=3, samples=0, span_levels=4)
    return Dealt(Recipe(sizes, 1.0, 0.0, *to_plain(nf.KMeans()), "torch"), closed, 128, ranks)


def work(found: Dealt) -> list[int]:
    return [sum(span.segments**2 for share in shares for span in share.spans) for shares in found.shares]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("entries", [1, 2, 5])
def test_everything_is_grouped_once(entries: int, ranks: int) -> None:
    found = dealt((112, 96, 128, 0, 16)[:entries], ranks)
    shared = [(share.entry, span) for shares in found.shares for share in shares for span in share.spans]
    assert sorted(shared) == [(entry, span) for entry in range(entries) for span in found.spans(entry).all]


def test_spans_of_few_heads_are_dealt_out_by_cost() -> None:
    whole = dealt((112,) * 4, 4)
    assert len(set(work(whole))) == 1
    assert all(len(shares) == 1 for shares in whole.shares)
    few = dealt((112,), 2)  # seven segments: one span of four, two of two, four of one
    assert work(few) == [16, 12]


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_cells_are_those_of_one_process(ranks: int) -> None:
    keys = torch.randn(2, 128, 8, generator=torch.Generator().manual_seed(0))
    found = dealt((112, 96), ranks)
    visible = torch.tensor([[128], [112]])
    parts = []
    for rank, shares in enumerate(found.shares):
        own = [share.entry for share in shares]
        parts.append(found.group(rank, keys[own], visible[own]))
        assert parts[-1].shape == (found.most,)
    wanted = [assign(keys[entry], visible[entry], found.recipe.sizes, nf.KMeans()) for entry in range(2)]
    assert torch.equal(found.together(parts).long(), torch.stack(wanted))


@pytest.mark.parametrize("levels", [1, 3, 8])
def test_cells_of_fewer_segments_are_numbered_anew(levels: int) -> None:
    every = Spans(13, levels)
    edges = every.edges(4)
    cell_of = torch.full((levels, 13 * 16 + 5), -1)
    for span in every.all:
        # The first key of a span has its first cell, the last one its last cell.
        start, stop = span.first * 16, (span.first + span.segments) * 16
        cell_of[span.level, start:stop] = edges[span.number]
        cell_of[span.level, stop - 1] = edges[span.number + 1] - 1
    cell_of[:, :2] = -1
    for segments in range(14):
        fewer = Spans(segments, levels)
        found, own = fewer.renumbered(cell_of, every, 16, 4), fewer.edges(4)
        reached = torch.zeros_like(found, dtype=torch.bool)
        for span in fewer.all:
            start, stop = span.first * 16, (span.first + span.segments) * 16
            assert (found[span.level, max(2, start) : stop - 1] == own[span.number]).all()
            assert found[span.level, stop - 1] == own[span.number + 1] - 1
            reached[span.level, max(2, start) : stop] = True
        # What is in no span may be in a cell only where nobody looks.
        assert (found[~reached] < max(1, own[-1])).all() or segments == 0
        assert (found[:, segments * 16 :] == -1).all()
