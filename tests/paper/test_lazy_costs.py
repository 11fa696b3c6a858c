"""Rows are drawn lazily where that is cheaper than to look at all their keys, and no key of a row is looked at twice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from by_hand import seeded
from torch import Tensor

import nearfield as nf
from nearfield.knn.index.base import BuiltIndex
from nearfield.knn.index.own import build_index
from nearfield.paper import lazy
from nearfield.paper.lazy import index_that_pays, prepare
from nearfield.problem import Rows, check
from nearfield.synthetic import make


def rows_of(family: str, length: int, rows: int, dim: int = 32) -> Rows:
    query, key, value = make(family, 1, 1, length, dim, seed=0)
    return check(query[:, :, :rows], key, value).rows


@pytest.mark.parametrize(("length", "eps"), [(512, 0.3), (1024, 0.3), (1024, 0.1)])
def test_many_draws_of_few_keys_look_at_each_key_once(length: int, eps: float) -> None:
    query, key, value = torch.randn(3, 1, 1, length, 64, generator=seeded(0)).unbind(0)
    found = nf.estimate(query[:, :, :64], key, value, method=nf.LazyGumbel(eps=eps, delta=0.1), generator=seeded(1)).info
    assert found["draws"] > length
    assert found["keys_per_query"] == length
    assert found["dense_rows"] == 64
    assert found["certified"]


def test_it_pays_to_search_for_few_draws_alone() -> None:
    rows = rows_of("clustered", 131072, 40)
    index = nf.KMeansIndex(probes=4).build(rows.keys)
    assert int(rows.visible.sum()) >= lazy.LEAST_KEYS
    assert index_that_pays(rows, nf.ExactIndex(), 363, 1) is None, "an index that scores every key saves nothing"
    assert index_that_pays(rows, index, 363, 1) is index
    assert index_that_pays(rows, index, 363, 60) is None, "by the points of its draws"
    assert index_that_pays(rows.at(slice(0, 15)), index, 363, 1) is None, "little to do"


@dataclass(frozen=True)
class Counting:
    """A k-means index that notes what is done with it."""

    seen: list[str]

    def build(self, keys: Tensor) -> BuiltIndex:
        self.seen.append("built")
        return nf.KMeansIndex(probes=4).build(keys)


@pytest.mark.parametrize(
    ("length", "rows", "draws", "built"),
    [(2048, 4200, 1, True), (2048, 3900, 1, False), (2048, 4200, 48, False), (1024, 1024, 1, False)],
    ids=["many rows", "fewer rows", "many draws", "little to do"],
)
def test_what_cannot_pay_is_not_built(length: int, rows: int, draws: int, built: bool) -> None:
    """Building costs as much as the full softmaxes of 512 rows, and may cost an eighth of all."""
    query, key = torch.randn(1, rows, 8, generator=seeded(1)), torch.randn(1, length, 8, generator=seeded(2))
    many = Rows(query, key, key, torch.full((1, rows), length))
    index = Counting([])
    index_that_pays(many, index, 32, draws)
    assert index.seen == ["built"] * built


def test_nothing_is_searched_where_an_index_scores_all_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "_search", None)
    rows = rows_of("gaussian", 16384, 320)
    assert index_that_pays(rows, nf.ExactIndex(), 128, 1) is None
    assert index_that_pays(rows, nf.ExactIndex().build(rows.keys), 128, 1) is None


def test_a_sample_of_few_rows_builds_nothing() -> None:
    query, key, _ = make("clustered", 1, 1, 65536, 8, seed=0)
    index = Counting([])
    found = nf.sample(query[:, :, :80], key, 1, index, generator=seeded(0))
    assert bool(found.dense.all())
    assert not index.seen
    nf.sample(query[:, :, :4], key[:, :, :500], 1, index, always_lazy=True, generator=seeded(0))
    assert index.seen == ["built"]


def test_few_rows_are_searched_to_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    for cost in ("LEAST_KEYS", "SCAN_COST"):
        monkeypatch.setattr(lazy, cost, 0)
    searched: list[int] = []
    search = lazy._search

    def counted(rows: Rows, *arguments: Any) -> lazy.LazyRows:
        searched.append(rows.visible.shape[1])
        return search(rows, *arguments)

    monkeypatch.setattr(lazy, "_search", counted)
    for count in (5, 160, 2000):
        index_that_pays(rows_of("gaussian", 2000, count, dim=4), nf.ExactIndex(), 20, 1)
    assert searched[0] == 1
    assert searched[1] == 10
    assert 16 < searched[2] <= 32


def test_each_row_goes_the_cheaper_way() -> None:
    """Sharp rows look at few keys whatever the number of draws; flat ones at many."""
    rows = rows_of("clustered", 16384, 8)
    scale = torch.tensor([8.0, 8.0, 8.0, 8.0, 0.01, 0.01, 0.01, 0.01])[:, None]
    rows = Rows(rows.queries * scale, rows.keys, rows.values, rows.visible)
    built = build_index(nf.ExactIndex(), rows.keys)
    for draws, expected in ((1, [False] * 8), (50, [False] * 4 + [True] * 4)):
        assert prepare(rows, built, 128, draws=draws).dense.tolist() == expected
    several = torch.tensor([1, 1, 1, 1, 1, 1, 50, 50])
    assert prepare(rows, built, 128, draws=several).dense.tolist() == [False] * 6 + [True] * 2
    assert prepare(rows, None, 128).dense.all()


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_normaliser_of_a_full_softmax_is_known(dtype: torch.dtype, scale: float, is_causal: bool) -> None:
    q, k, v = torch.randn(3, 2, 2, 40, 8, generator=seeded(9)).to(dtype).unbind(0)
    est = nf.estimate(q, k, v, is_causal=is_causal, scale=scale, method=nf.LazyGumbel(draws=4), generator=seeded(10))
    assert est.info["dense_rows"] == 160
    logits = (scale * q.double()) @ k.double().mT
    hidden = torch.ones(40, 40, dtype=torch.bool).triu(1) if is_causal else torch.zeros(40, 40, dtype=torch.bool)
    torch.testing.assert_close(est.lse.double(), logits.masked_fill(hidden, -torch.inf).logsumexp(-1), rtol=1e-5, atol=1e-5)


def scored_pairs(rows: Rows, draws: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[tuple[int, int]], lazy.Draws, Tensor]:
    """Every (row, key) that draws have scored, the draws, and what they are said to have scored."""
    prepared = prepare(rows, build_index(nf.KMeansIndex(cells=20, probes=2), rows.keys), 20)
    assert not bool(prepared.dense.any())
    pairs: list[tuple[int, int]] = []
    score = lazy.LazyRows._logits

    def counted(self: lazy.LazyRows, row: Tensor, key: Tensor) -> Tensor:
        pairs.extend(zip(row.tolist(), key.tolist(), strict=True))
        return score(self, row, key)

    monkeypatch.setattr(lazy.LazyRows, "_logits", counted)
    drawn = prepared.draw_each(draws, seeded(0))
    return pairs, drawn, prepared.keys_scored(drawn)


@pytest.mark.parametrize("at_a_time", [1 << 18, 1 << 14])
def test_a_key_is_scored_once_for_all_draws_of_a_row(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "POINTS_AT_A_TIME", at_a_time)
    rows = rows_of("gaussian", 400, 6, dim=3)
    pairs, drawn, scored = scored_pairs(rows, 300, monkeypatch)
    assert len(pairs) == len(set(pairs)) == int(drawn.distinct.sum())
    assert int(drawn.evaluated.sum()) > 2 * len(pairs), "draws look at the same keys"
    assert drawn.distinct.tolist() == [sum(row == one for one, _ in pairs) for row in range(6)]
    assert bool((scored <= 400).all())
    searched = nf.KMeansIndex(cells=20, probes=2).build(rows.keys).find(rows.queries, 20).scored
    assert searched is not None
    assert torch.equal(scored, (searched[0] + drawn.distinct).clamp(max=400))


@pytest.mark.parametrize("at_a_time", [1 << 18, 1 << 14])
def test_parts_do_not_depend_on_the_order_of_draws(at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All draws of a row are in one part, in whatever order they are asked for."""
    monkeypatch.setattr(lazy, "POINTS_AT_A_TIME", at_a_time)
    prepared = prepare(
        rows_of("gaussian", 400, 6, dim=3), build_index(nf.ExactIndex(), rows_of("gaussian", 400, 6, dim=3).keys), 20
    )
    segment = torch.randint(6, (2000,), generator=seeded(1))
    parts = list(prepared._parts(segment, torch.arange(2000)))
    assert (len(parts) > 1) == (at_a_time == 1 << 14)
    assert sorted(torch.cat(parts).tolist()) == list(range(2000))
    owners = [set(segment[part].tolist()) for part in parts]
    assert sum(map(len, owners)) == 6


def test_a_row_of_very_many_points_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lazy, "POINTS_AT_A_TIME", 300)
    rows = rows_of("gaussian", 400, 6, dim=3)
    prepared = prepare(rows, build_index(nf.ExactIndex(), rows.keys), 20)
    segment = torch.randint(6, (2000,), generator=seeded(1))
    parts = list(prepared._parts(segment, torch.arange(2000)))
    assert sorted(torch.cat(parts).tolist()) == list(range(2000))
    points = 1 + prepared.points()
    assert max(float(points[segment[part]].sum()) for part in parts) < 2 * 300
    assert bool((prepared.keys_scored(prepared.draw(segment, seeded(2))) <= 400).all())


def test_rows_that_see_nothing_do_not_decide() -> None:
    rows = rows_of("clustered", 131072, 40)
    visible = rows.visible.clone()
    visible[:, :3] = 0
    rows = Rows(rows.queries, rows.keys, rows.values, visible)
    built = index_that_pays(rows, nf.KMeansIndex(probes=4).build(rows.keys), 363, 1)
    assert built is not None
    assert prepare(rows, built, 363, draws=1).points()[:3].tolist() == [0, 0, 0]
