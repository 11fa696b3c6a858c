"""Cells as an index: what a row scores, that it keeps the best of that, and that nothing depends on later keys."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from by_hand import seeded
from index_contract import assert_same_state
from torch import Tensor

import nearfield as nf
from nearfield.cells.sizes import CellSizes
from nearfield.cells.spans import closed_keys
from nearfield.kernels import backends
from nearfield.knn.index.base import Found
from nearfield.knn.index.cells import CellIndex
from nearfield.synthetic import make

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def recall(found: Tensor, best: Tensor) -> float:
    hits = (found[..., :, None] == best[..., None, :]).any(-2) & (best >= 0)
    return float(hits.sum() / (best >= 0).sum())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("family", "least"), [("clustered", 0.97), ("gaussian", 0.5)])
def test_it_finds_the_near_set_where_there_is_one(family: str, least: float, causal: bool) -> None:
    query, key, _ = (x[0] for x in make(family, 1, 2, 3000, 16))
    offset = 0 if causal else None
    scores, ids = CellIndex().build(key).search(query, 32, offset)
    best_scores, best = nf.ExactIndex().build(key).search(query, 32, offset)
    assert recall(ids, best) > least
    assert bool((scores[..., 1:] <= scores[..., :-1]).all()), "largest first"
    assert bool((scores <= best_scores + 1e-4).all())


def test_opening_every_cell_is_an_exact_search() -> None:
    query, key = torch.randn(2, 2, 500, 8, generator=seeded(0)).unbind(0)
    for offset in (None, 0):
        built = CellIndex(cell_size=16, probes=500, segment=64).build(key)
        exact = nf.ExactIndex().build(key).search(query, 20, offset)
        for mine, other in zip(built.search(query, 20, offset), exact, strict=True):
            torch.testing.assert_close(mine, other)
        assert torch.equal(torch.as_tensor(built.find(query, 20, offset).scored), built.visible(query, offset))


def test_later_keys_change_nothing_for_a_causal_row() -> None:
    query, key = torch.randn(2, 1, 400, 8, generator=seeded(1)).unbind(0)
    other = key.clone()
    other[:, 300:] = 10 * torch.randn(1, 100, 8, generator=seeded(2))
    recipe = CellIndex(cell_size=8, probes=3, segment=32)
    before, after = (recipe.build(x).search(query, 7, 0)[1][:, :300] for x in (key, other))
    assert torch.equal(before, after)


def test_it_scores_fewer_keys_than_there_are_and_says_how_many() -> None:
    query, key, value = make("clustered", 1, 2, 4000, 16)
    for causal in (False, True):
        est = nf.estimate(query, key, value, is_causal=causal, method=nf.TopK(20, index=CellIndex()))
        assert 20 <= est.info["keys_per_query"] < 1000
        assert est.info["full_scans"] == 0


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("k", "size", "probes"), [(10, 16, 8), (1000, 512, None)])
def test_cells_hold_several_times_the_keys_that_are_wanted(k: int, size: int, probes: int | None, causal: bool) -> None:
    sizes = CellIndex(cell_size=size, probes=probes).sizes(10**6, k, causal, True)
    assert sizes.probes == (probes or math.ceil((8 if causal else 4.04) * k / size))
    assert (sizes.segment > 0) == causal


def test_longer_sequences_take_fewer_times_the_keys() -> None:
    over = [CellIndex(cell_size=1).sizes(length, 1000, False, True).probes / 1000 for length in (1000, 2**15, 2**20, 10**8)]
    assert over == [8, 8, 4, 4]


@pytest.mark.parametrize(("k", "kernels"), [(30, True), (400, False)])
def test_more_cells_than_the_kernels_can_open_are_opened_in_torch(k: int, kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.randn(2, 1, 1000, 8, generator=seeded(0)).unbind(0)
    asked: list[int] = []
    built = CellIndex(cell_size=4).build(key)
    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    monkeypatch.setattr(built, "_by_kernels", lambda *x: asked.append(x[1]) or Found(query[..., :1], query[..., :1].long()))
    built.find(query, k)
    assert asked == ([k] if kernels else [])


def test_kernels_are_not_asked_for_cells_that_take_keys_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would make all cells anew. Causal rows have spans of their own, which are made anew in any case."""
    query, key = torch.randn(2, 1, 200, 8, generator=seeded(0)).unbind(0)
    asked: list[int] = []
    built = CellIndex(cell_size=8).build(key[:, :150])
    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    empty = Found(query[..., :1], query[..., :1].long())
    monkeypatch.setattr(type(built), "_by_kernels", lambda self, *x: asked.append(self.length) or empty)
    built.find(query, 3)
    grown, shrunk = built.add(key[:, 150:]), built.remove([3])
    for index in (grown, grown.add(key[:, :1]), shrunk):
        found = index.find(query, 3)
        assert int(found.ids.max()) > 100
    assert asked == [150]
    grown.find(query, 3, 0)
    assert asked == [150, 200]


@pytest.mark.parametrize("name", ["cell_size", "probes", "segment", "iterations", "seed"])
def test_bad_sizes_are_refused(name: str) -> None:
    with pytest.raises((TypeError, ValueError), match=name):
        CellIndex(**{name: 1.5})  # type: ignore[arg-type]


# The kernels: on a card, or one row at a time in Triton's interpreter.

interpreted = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or Triton's interpreter"
)


def expected(query: Tensor, key: Tensor, cells: Any, opened: Tensor, closed: int, seen: int) -> Tensor:
    """The keys that a row of the first entry scores: those of its opened cells, and its own."""
    starts, order = cells.tables.starts.tolist(), cells.tables.order
    own = [torch.arange(closed, seen, device=key.device)]
    own += [order[starts[cell] : starts[cell + 1]].long() for cell in opened.tolist() if cell >= 0]
    return torch.cat(own)


@interpreted
@pytest.mark.parametrize(("k", "most"), [(5, 32), (60, 8192)])
@pytest.mark.parametrize("causal", [False, True])
def test_kernels_keep_the_best_of_what_a_row_has_opened(causal: bool, k: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece and in several, more of them than there are and fewer."""
    pytest.importorskip("triton")
    from nearfield.cells.triton.layout import as_read
    from nearfield.cells.triton.route import route
    from nearfield.knn.index import cells_triton
    from nearfield.knn.index.cells_triton import KernelCells

    monkeypatch.setattr(cells_triton, "MOST_SELECTED", most)
    monkeypatch.setattr(cells_triton, "LEAST_SELECTED", 32)
    monkeypatch.setattr(cells_triton, "SCORES_BYTES", 4 * 64 * 16)
    _, key, _ = (x[0].to(DEVICE) for x in make("clustered", 1, 2, 160, 16))
    query = torch.randn(2, 12, 16, generator=seeded(0)).to(DEVICE)
    sizes: CellSizes = CellIndex(cell_size=8, probes=3, segment=32).sizes(160, k, causal, True)
    visible = torch.arange(12, device=DEVICE).mul(14).clamp(max=160) if causal else torch.full((12,), 160, device=DEVICE)
    visible = visible.expand(2, -1)
    cells = KernelCells(key, sizes, None, 0)
    scores, ids, scored = cells.find(query, k, visible, sizes)
    assert scored is not None
    opened = torch.full((2, 12, sizes.probes), -1, dtype=torch.int32, device=DEVICE)
    route(query, as_read(visible), cells.tables, cells.layout, sizes, 1.0, opened)
    closed = closed_keys(visible, sizes)
    for row in range(12):
        mine = expected(query, key, cells, opened[0, row], int(closed[0, row]), int(visible[0, row]))
        products = key[0, mine] @ query[0, row]
        assert int(scored[0, row]) == len(mine)
        found = ids[0, row][ids[0, row] >= 0]
        assert len(found) == min(k, len(mine))
        assert set(found.tolist()) == set(mine[products.topk(len(found)).indices].tolist())
        torch.testing.assert_close(scores[0, row][: len(found)], key[0, found] @ query[0, row], rtol=2e-3, atol=2e-3)
        assert bool((scores[0, row][len(found) :] == -math.inf).all())


@interpreted
@pytest.mark.parametrize("most", [32, 8192])
def test_kernels_take_as_many_of_equal_scores_as_there_is_room_for(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten keys are better than the others, which are all the same: these fill up, each once."""
    pytest.importorskip("triton")
    from nearfield.knn.index import cells_triton

    monkeypatch.setattr(cells_triton, "MOST_SELECTED", most)
    monkeypatch.setattr(cells_triton, "LEAST_SELECTED", 32)
    key = torch.ones(1, 120, 16, device=DEVICE)
    better = torch.arange(5, 105, 10, device=DEVICE)
    key[0, better] *= 2
    sizes = CellIndex(cell_size=60, probes=8).sizes(120, 25, False, True)
    seen = torch.full((1, 2), 120, device=DEVICE)
    scores, ids, _ = cells_triton.KernelCells(key, sizes, None, 0).find(key[:, :2], 25, seen, sizes)
    for row in range(2):
        found = set(ids[0, row].tolist())
        assert len(found) == 25
        assert set(better.tolist()) < found
        assert sorted(scores[0, row].tolist()) == [16.0] * 15 + [32.0] * 10


@interpreted
@pytest.mark.skipif(DEVICE.type != "cpu", reason="a card rounds float32 products")
@pytest.mark.parametrize("size", [1e-15, 1.0, 1e15])
def test_kernels_tell_close_scores_apart(size: float) -> None:
    """Next float32 numbers, and numbers of all sizes."""
    pytest.importorskip("triton")
    from nearfield.knn.index.cells_triton import KernelCells

    key = torch.zeros(1, 90, 16)
    bits = torch.arange(60) + torch.tensor(size).view(torch.int32)
    key[0, :60, 0] = bits.to(torch.int32).view(torch.float32)
    key[0, 60:, 0] = -torch.logspace(-15, 15, 30)
    key = key[:, torch.randperm(90, generator=seeded(0))].to(DEVICE)
    query = torch.zeros(1, 1, 16, device=DEVICE)
    query[..., 0] = 1
    sizes = CellIndex(cell_size=45, probes=8).sizes(90, 70, False, True)
    cells = KernelCells(key, sizes, 0, 0)
    for k in (1, 17, 59, 70):
        scores, _, _ = cells.find(query, k, torch.full((1, 1), 90, device=DEVICE), sizes)
        expected = key[0, :, 0].sort(descending=True).values[:k]
        assert torch.equal(scores[0, 0].sort(descending=True).values, expected)


@pytest.mark.long
@interpreted
@pytest.mark.parametrize(("dtype", "offset"), [(torch.float32, 0), (torch.float16, None)])
def test_kernels_search_the_cells_of_a_file(
    offset: int | None, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    pytest.importorskip("safetensors")
    from nearfield.knn.index import cells, cells_triton

    query, key = torch.randn(2, 2, 40, 16, generator=seeded(0)).to(DEVICE, dtype).unbind(0)
    built = CellIndex(cell_size=4, probes=3, segment=8).build(key)
    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    wanted = built.find(query[:, :20], 5, offset)
    built.save(tmp_path / "index")
    state = built._state()
    assert state.keys() == {"counts", "base.changed", "kernels.all" if offset is None else "kernels.causal"}
    grown = built.add(key[:, :10])
    assert grown._state().keys() == {"counts", "base.changed"}, "those cells were of fewer keys"
    wanted_grown = grown.find(query[:, :20], 5, offset)
    grown.save(tmp_path / "grown")

    def never(*_: Any) -> None:
        raise AssertionError("grouped again")

    monkeypatch.setattr(cells_triton, "cells_of", never)
    monkeypatch.setattr(cells, "assign", never)
    for name, true, found in (("index", state, wanted), ("grown", grown._state(), wanted_grown)):
        loaded = nf.index.load(tmp_path / name, device=DEVICE)
        assert all(map(torch.equal, loaded.find(query[:, :20], 5, offset), found))
        assert_same_state(loaded._state(), true)
