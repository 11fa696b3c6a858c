"""Who groups which keys, and the numbers of cells."""

from __future__ import annotations

import pytest
import torch

import nearfield as nf
from nearfield.cells.operator import Recipe
from nearfield.cells.partition import to_plain
from nearfield.cells.sizes import CellSizes
from nearfield.cells.torch.head import assign
from nearfield.distributed.dealing import Dealt


def dealt(closed: tuple[int, ...], ranks: int, levels: int = 4) -> Dealt:
    sizes = CellSizes(group=1, segment=16, window=0, sinks=2, cell_size=4, probes=3, samples=0, span_levels=levels)
    return Dealt(Recipe(sizes, 1.0, 0.0, *to_plain(nf.KMeans()), "torch"), closed, 128, ranks)


def work(found: Dealt) -> list[int]:
    """Segments that each rank groups, as often as it does."""
    return [sum(span.segments for share in shares for span in share.spans) for shares in found.shares]


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
    assert work(few) == [6, 6]
    many = dealt((63 * 16,) * 2, 8, levels=6)
    assert max(work(many)) < 1.2 * sum(work(many)) / 8


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_no_keys_come_but_those_that_are_grouped(ranks: int) -> None:
    found = dealt((112, 96, 128), ranks)
    for shares in found.shares:
        for share in shares:
            grouped = torch.zeros(128, dtype=torch.bool)
            for span in share.spans:
                grouped[span.first * 16 : (span.first + span.segments) * 16] = True
            come = torch.zeros(128, dtype=torch.int64)
            for some in found.keys(share):
                come[some] += 1
            assert torch.equal(come, grouped.long())


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
