"""An index that grows and shrinks keeps the contract of a fresh one, its recall, and its promised cost."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_contract import KINDS, assert_contract, build, clustered, logits, random
from laws import assert_frequencies, seeded
from own_indices import BuiltWithBounds, OwnIndex, Subclassed
from torch import Tensor

import nearfield as nf
from nearfield.knn.index import BuiltIndex, prefixes
from nearfield.paper.lazy import prepare
from nearfield.problem import Rows


@pytest.fixture(params=[name for name in KINDS if name not in ("lsh", "kmeans-one-probe")])
def kind(request: pytest.FixtureRequest) -> str:
    """One of every class, in small sizes: every change of an index is a build of it or two."""
    if request.param.startswith("faiss"):
        pytest.importorskip("faiss")
    return str(request.param)


EXACT = {"exact", "own", "subclassed"}


@pytest.fixture
def small_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys are enough to see an index take some in."""
    monkeypatch.setattr(prefixes, "LEAST_REST", 4)


def same(one: BuiltIndex, other: BuiltIndex, queries: Tensor, k: int, offset: int | Tensor | None = None) -> bool:
    return all(map(torch.equal, one.search(queries, k, offset), other.search(queries, k, offset)))


@pytest.mark.parametrize("more", [1, 30, 90, 400])
def test_added_keys(kind: str, more: int, small_rest: None) -> None:
    """One key behind the others, some that are not taken in, some that are, and so many that it learns anew."""
    keys, queries = random(2, 300 + more, 8, seed=1), random(2, 40, 8, seed=2)
    built = build(kind, keys[:, :300])
    before = built.search(queries, 9, 280)
    built.search(queries, 9)  # some indices learn no earlier than they have to
    grown = built.add(keys[:, 300:])
    assert grown.build(keys) is grown
    for offset in (None, 0, 270, 300 + more - 40):
        assert_contract(kind, grown, queries, 9, offset)
        if kind in EXACT:
            assert same(grown, build(kind, keys), queries, 9, offset)
    # The old one knows nothing of it.
    assert built.length == 300
    assert all(map(torch.equal, built.search(queries, 9, 280), before))


def test_one_by_one(kind: str, small_rest: None) -> None:
    """From nothing, with searches on the way, whose blocks stay."""
    keys, queries = random(2, 150, 8, seed=3), random(2, 30, 8, seed=4)
    built = build(kind, keys[:, :0])
    for step in range(150):
        built = built.add(keys[:, step : step + 1])
        if step % 37 == 36:
            assert_contract(kind, built, queries, 5, step - 20)
    for offset in (None, 0, 120):
        assert_contract(kind, built, queries, 5, offset)
    assert same(built, build(kind, keys), queries, 5, -1), "causal rows find what they find in a fresh index"


@pytest.mark.parametrize("gone", [[0, 3, 3, 150], list(range(60)), list(range(0, 300, 2)), list(range(300))])
def test_removed_keys(kind: str, gone: list[int], small_rest: None) -> None:
    keys, queries = random(2, 330, 8, seed=5), random(2, 40, 8, seed=6)
    for built in (build(kind, keys[:, :300]), build(kind, keys[:, :300]).add(keys[:, 300:310])):
        before = built.search(queries, 9, 250)
        built.search(queries, 9)
        kept = torch.ones(built.length, dtype=torch.bool)
        kept[gone] = False
        left = built.remove(torch.tensor(gone, dtype=torch.int32))
        assert left.build(built.keys[:, kept]) is left
        for offset in (None, left.length - 20):
            assert_contract(kind, left, queries, 9, offset)
            if kind in EXACT:
                assert same(left, build(kind, built.keys[:, kept]), queries, 9, offset)
        assert all(map(torch.equal, built.search(queries, 9, 250), before))


def test_a_window_slides(kind: str, small_rest: None) -> None:
    keys, queries = random(2, 260, 8, seed=7), random(2, 20, 8, seed=8)
    built = build(kind, keys[:, :100])
    for first in range(0, 160, 20):
        built = built.add(keys[:, first + 100 : first + 120]).remove(range(20))
        assert built.build(keys[:, first + 20 : first + 120]) is built
        assert_contract(kind, built, queries, 7, None)
        assert_contract(kind, built, queries, 7, 75)


@settings(max_examples=25, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    steps=st.lists(st.tuples(st.booleans(), st.integers(1, 60)), min_size=1, max_size=4),
    spread=st.sampled_from([0.0, 1.0, 10.0]),
    causal=st.sampled_from([None, 0, 40]),
)
def test_bounds_hold_whatever_happens(seed: int, steps: list[tuple[bool, int]], spread: float, causal: int | None) -> None:
    """Keys that come later lie outside the balls of cells, and these have to widen."""
    built: BuiltIndex = nf.KMeansIndex(probes=2, iterations=2, leaf=16).build(random(2, 150, 6, seed=seed))
    queries, generator = random(2, 10, 6, seed=seed + 1), torch.Generator().manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "LEAST_REST", 4)
        for number, (grows, count) in enumerate(steps):
            if grows:
                built = built.add(spread * random(2, count, 6, seed=seed + number) + random(2, 1, 6, seed=seed + 9))
            else:
                built = built.remove(torch.randperm(built.length, generator=generator)[:count])
            assert_contract("kmeans", built, queries, 5, causal)


@pytest.mark.parametrize("grown", [True, False])
def test_lazy_draws_stay_exact(grown: bool) -> None:
    """Frequencies of draws that are certified by a k-means that has taken keys in, has a rest, or has lost keys."""
    keys = random(1, 160, 3, seed=51)
    index = nf.KMeansIndex(cells=12, probes=1, leaf=16)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefixes, "LEAST_REST", 4)
        start = index.build(keys[:, :120])
        built = start.add(keys[:, 120:140]).add(keys[:, 140:144]) if grown else start.remove(range(0, 100, 3))
    assert built._learned == 120  # type: ignore[attr-defined]
    queries = random(1, 2, 3, seed=50)
    rows = Rows(queries, built.keys, built.keys, torch.tensor([[built.length, 60]]))
    lazy = prepare(rows, built, 5)
    assert bool(lazy.certified.all())
    assert not bool(lazy.dense.any())
    drawn = lazy.draw_each(60_000, seeded(0)).ids
    scores = (rows.queries @ rows.keys.mT)[0].double()
    for row, seen in enumerate((built.length, 60)):
        expected = torch.nn.functional.pad(scores[row, :seen].softmax(0), (0, built.length - seen))
        assert_frequencies(drawn[row].bincount(minlength=built.length), expected)


def recall(built: BuiltIndex, queries: Tensor) -> float:
    true = logits(built, queries, None).topk(32).indices
    return float((true[..., None] == built.search(queries, 32)[1][..., None, :]).any(-1).double().mean())


@pytest.mark.parametrize("family", ["clustered", "gaussian"])
@pytest.mark.parametrize("name", ["kmeans", "cells", "lsh", "faiss"])
def test_recall_of_a_grown_index(name: str, family: str) -> None:
    if name == "faiss":
        pytest.importorskip("faiss")
    kinds = {"cells": nf.CellIndex(), "lsh": nf.ConcentricLSH(), "faiss": nf.FaissIndex("IVF32,Flat", nprobe=8)}
    index: Any = kinds.get(name, nf.KMeansIndex())
    keys = (clustered(2048, 32, seed=40) if family == "clustered" else random(2048, 32, seed=41))[None]
    queries = keys[:, ::8] + 0.1 * random(1, 256, 32, seed=45)
    fresh = recall(index.build(keys), queries)
    for start in (400, 1400):
        grown = index.build(keys[:, :start])
        for first in range(start, 2048, 24):
            grown.search(queries[:, :1], 1)
            grown = grown.add(keys[:, first : first + 24])
        assert grown.length == 2048
        assert recall(grown, queries) >= fresh - 0.01, f"a fresh index has {fresh}"
    larger = index.build(torch.cat([keys, random(1, 700, 32, seed=46)], 1))
    larger.search(queries[:, :1], 1)
    assert recall(larger.remove(range(2048, 2748)), queries) >= fresh - 0.015, f"a fresh index has {fresh}"


def work(length: int, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int, int]:
    """Of an index that grows key by key: products of keys and centroids, keys that were listed, and keys that were copied."""
    from nearfield.cells.partition import kmeans as partition
    from nearfield.knn.index import kmeans, room

    done = {"products": 0, "listed": 0, "copied": 0}
    nearest, listing, writing = partition.nearest, kmeans.BuiltKMeans._list, room.Room._write

    def count_products(points: Tensor, centroids: Tensor, *more: Any) -> Any:
        done["products"] += points.shape[1] * centroids.shape[1]
        return nearest(points, centroids, *more)

    def count_listed(self: Any, assigned: Tensor) -> None:
        done["listed"] += assigned.shape[1]
        listing(self, assigned)

    def count_copied(self: Any, keys: Tensor) -> None:
        done["copied"] += keys.shape[1]
        writing(self, keys)

    with monkeypatch.context() as patch:
        patch.setattr(partition, "nearest", count_products)
        patch.setattr(kmeans, "nearest", count_products)
        patch.setattr(kmeans.BuiltKMeans, "_list", count_listed)
        patch.setattr(room.Room, "_write", count_copied)
        patch.setattr(prefixes, "LEAST_REST", 8)
        built: BuiltIndex = nf.KMeansIndex(iterations=1, sample=64).build(torch.zeros(1, 0, 2))
        keys = random(1, length, 2, seed=1)
        for step in range(length):
            built = built.add(keys[:, step : step + 1])
        # What is searched is bounded too: cells, their keys, and no more than sqrt(n) others.
        base = built._base or built  # type: ignore[attr-defined]
        assert length - base.length <= math.isqrt(length)
    return done["products"], done["listed"], done["copied"]


def test_growth_costs_a_root_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = work(500, monkeypatch), work(2000, monkeypatch)
    for name, n, (products, listed, copied) in (("small", 500, small), ("large", 2000, large)):
        assert products <= 5 * n**1.5, name
        assert listed <= 5 * n**1.5, name
        assert copied <= 4 * n, name
    # Four times as many keys: eight times the products, and not sixteen.
    assert large[0] <= 10 * small[0]
    assert large[1] <= 10 * small[1]


@pytest.mark.long
def test_growth_of_cells_costs_a_root_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an index that is searched after every key, with cells of sqrt(n) keys: products with centroids, and keys listed."""
    from nearfield.cells.partition import kmeans as partition
    from nearfield.knn.index import cells

    done = {"products": 0, "listed": 0}
    nearest, tabulate = partition.nearest, cells.tabulate

    def count_products(points: Tensor, centroids: Tensor, *more: Any) -> Any:
        done["products"] += points.shape[1] * centroids.shape[-2]
        return nearest(points, centroids, *more)

    def count_listed(keys: Tensor, *more: Any) -> Any:
        done["listed"] += len(keys)
        return tabulate(keys, *more)

    monkeypatch.setattr(partition, "nearest", count_products)
    monkeypatch.setattr(cells, "nearest", count_products)
    monkeypatch.setattr(cells, "tabulate", count_listed)
    monkeypatch.setattr(prefixes, "LEAST_REST", 8)
    found = []
    for length, size in ((200, 14), (800, 28)):
        done.update(products=0, listed=0)
        keys = random(1, length, 2, seed=1)
        built: BuiltIndex = nf.CellIndex(cell_size=size, probes=2, iterations=1).build(keys[:, :0])
        for step in range(length):
            built = built.add(keys[:, step : step + 1])
            scored = built.find(keys[:, step : step + 1], 4).scored
        assert scored is not None
        assert int(scored) <= 8 * math.sqrt(length)
        assert done["products"] <= 8 * length**1.5
        assert done["listed"] <= 8 * length**1.5
        found.append(dict(done))
    # Four times as many keys: eight times the work, and not sixteen. (The last time it learned was longer ago for one of them.)
    assert found[1]["products"] <= 13 * found[0]["products"]
    assert found[1]["listed"] <= 13 * found[0]["listed"]


@pytest.mark.parametrize("searched", [True, False])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0)])
def test_cells_that_are_made_late_are_those_of_their_keys(searched: bool, order: tuple[int, ...], small_rest: None) -> None:
    """Cells are made when first asked for, and shared: an index that grew from another must not fill in those of the other."""
    keys, queries = random(1, 120, 8, seed=47), random(1, 20, 8, seed=48)
    built: BuiltIndex = nf.CellIndex(cell_size=8, probes=10**6).build(keys[:, :90])
    if searched:
        built.search(queries, 5)
    indices = [built, built.add(keys[:, 90:92]), built.remove(range(60, 90)), built.add(keys[:, 90:])]
    for index in (indices[i] for i in order):
        assert torch.equal(index.search(queries, 5)[1], nf.ExactIndex().build(index.keys).search(queries, 5)[1])


def test_cells_that_lost_keys_are_opened_in_larger_numbers() -> None:
    """As many keys are scored as in an index that was built of what is left, not half of that."""
    keys, queries = random(1, 400, 8, seed=49), random(1, 20, 8, seed=50)
    index = nf.CellIndex(cell_size=10, probes=6)
    built = index.build(keys)
    built.search(queries, 5)
    left = built.remove(range(0, 380, 2))
    fresh = index.build(left.keys)
    ours, theirs = (torch.as_tensor(x.find(queries, 5).scored).double().mean() for x in (left, fresh))
    assert 0.8 * theirs < ours < 1.5 * theirs


def test_few_keys_that_are_left_have_smaller_cells() -> None:
    keys, queries = random(1, 2700, 8, seed=51), random(1, 20, 8, seed=52)
    built = nf.CellIndex().build(keys)
    built.search(queries, 5)
    assert built._whole[0].cell_size == 8
    left = built.remove(range(2000, 2700))
    assert same(left, nf.CellIndex().build(keys[:, :2000]), queries, 5)


def test_an_old_index_keeps_its_balls(small_rest: None) -> None:
    built = nf.KMeansIndex().build(random(1, 100, 4, seed=16))
    radii, longest = built.radii.clone(), built.longest.clone()
    grown: Any = built.add(9 * random(1, 20, 4, seed=17))
    assert grown.radii.max() > radii.max()
    assert_contract("kmeans", grown, random(1, 50, 4, seed=18), 3, None)
    assert torch.equal(built.radii, radii)
    assert torch.equal(built.longest, longest)


def test_two_that_grow_from_one(kind: str) -> None:
    """Free space behind the keys is written once."""
    keys, queries = random(2, 100, 8, seed=9), random(2, 10, 8, seed=10)
    built = build(kind, keys[:, :80]).add(keys[:, 80:90])
    one, other = built.add(keys[:, 90:]), built.add(-keys[:, 90:])
    assert one.keys.data_ptr() == built.keys.data_ptr() != other.keys.data_ptr()
    assert one.build(keys) is one
    assert other.build(torch.cat([keys[:, :90], -keys[:, 90:]], 1)) is other
    for grown in (built, one, other):
        assert_contract(kind, grown, queries, 5, None)


def test_after_an_exception_nothing_has_changed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = random(2, 120, 8, seed=11), random(2, 10, 8, seed=12)
    built = build(kind, keys[:, :90]).add(keys[:, 90:100])
    before = built.search(queries, 5)

    def fail(*_: Any) -> None:
        raise MemoryError

    for change in (lambda: built.add(keys[:, 100:]), lambda: built.remove([1])):
        with monkeypatch.context() as patch:
            patch.setattr(type(built), "_with_added", fail)
            patch.setattr(type(built), "_with_kept", fail)
            with pytest.raises(MemoryError):
                change()
        assert built.length == 100
        assert all(map(torch.equal, built.search(queries, 5), before))
    assert built.add(keys[:, 100:]).build(keys).length == 120


def test_old_keys_are_let_go(kind: str) -> None:
    """However often it has grown, an index keeps one copy of its keys: its blocks and its base look into that."""
    built = build(kind, random(2, 200, 8, seed=13))
    for step in range(4):  # so few that it does not learn anew
        built.search(random(2, 10, 8), 3, 150)
        built = built.add(random(2, 20, 8, seed=step))
    inside = [*getattr(built, "_blocks", {}).values(), getattr(built, "_base", None) or built]
    owned = built.keys.untyped_storage().data_ptr()
    assert {x.keys.untyped_storage().data_ptr() for x in inside} == {owned}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_dtypes_of_added_keys(kind: str, dtype: torch.dtype) -> None:
    keys = random(2, 100, 8, seed=14, dtype=dtype)
    grown = build(kind, keys[:, :60]).add(keys[:, 60:])
    assert grown.dtype == dtype
    assert grown.build(keys) is grown
    assert_contract(kind, grown.remove([5]), random(2, 10, 8, seed=15, dtype=dtype), 5, None)
    with pytest.raises(TypeError, match=rf"dtype of this index, {dtype}, got torch.float32"):
        grown.add(keys.float())


def test_what_cannot_be_added_or_removed(kind: str) -> None:
    keys = random(2, 50, 4)
    built = build(kind, keys)
    for shape in ((3, 5, 4), (2, 5, 3), (5, 4), (2, 2, 5, 4)):
        with pytest.raises(ValueError, match=r"keys to add must go with keys \(2, 50, 4\), got shape"):
            built.add(random(*shape))
    for ids in ([50], [-1], [3, 99]):
        with pytest.raises(ValueError, match="ids must be from 0 to 49, got"):
            built.remove(ids)
    for wrong in ([0.5], [[1, 2]], torch.ones(50, dtype=torch.bool)):
        with pytest.raises(ValueError, match="ids must be a list of integers"):
            built.remove(wrong)  # type: ignore[arg-type]
    assert built.remove([]).length == built.add(keys[:, :0]).length == 50
    keys[0, 0] = 7
    for change in (lambda: built.add(random(2, 1, 4)), lambda: built.remove([0])):
        with pytest.raises(RuntimeError, match="changed in place"):
            change()


def test_the_future_has_no_influence_on_a_grown_index(kind: str, small_rest: None) -> None:
    """Not through keys of the rest, of the base, or of blocks."""
    keys, queries = random(2, 1200, 8, seed=21), random(2, 60, 8, seed=22)
    changed = keys.clone()
    changed[:, 1100:] = 100 * random(2, 100, 8, seed=23)
    # Rows that see up to 1,100 keys: beyond the base, up to it, and less.
    for first in (1000, 1090):
        before = build(kind, keys[:, :first]).add(keys[:, first:1110]).add(keys[:, 1110:])
        after = build(kind, changed[:, :first]).add(changed[:, first:1110]).add(changed[:, 1110:])
        assert same(before, after, queries, 10, 1040)


def test_own_indices_grow() -> None:
    """One that has `build` alone, and one that has a base class."""
    keys = random(2, 40, 4)
    for index in (OwnIndex(), Subclassed(BuiltWithBounds)):
        built = nf.knn.index.build_index(index, keys[:, :30])  # type: ignore[attr-defined]
        grown = built.add(keys[:, 30:]).remove([0])
        assert type(grown) is type(built)
        assert same(grown, nf.ExactIndex().build(keys[:, 1:]), random(2, 5, 4, seed=1), 3)


def test_every_kind_takes_part() -> None:
    assert {type(index) for index in KINDS.values()} >= set(nf.knn.index.BUILT_IN.values())  # type: ignore[attr-defined]


@pytest.mark.parametrize("length", [0, 40, 195, 200])
def test_the_first_keys_of_an_index(kind: str, length: int, small_rest: None) -> None:
    """Of one that has a rest, and of none: the keys stay where they are, and what is behind them is not written over."""
    keys, queries = random(2, 260, 8, seed=31), random(2, 20, 8, seed=32)
    for built in (build(kind, keys[:, :190]).add(keys[:, 190:200], take_in=False), build(kind, keys[:, :200])):
        first = built.first(length)
        assert first.build(keys[:, :length]) is first
        assert not length or first.keys.data_ptr() == built.keys.data_ptr()
        for offset in (None, 0, 150):
            assert_contract(kind, first, queries, 5, offset)
        other = first.add(-keys[:, :30])
        assert_contract(kind, other, queries, 5, None)
        assert built.build(keys[:, :200]) is built
    with pytest.raises(ValueError, match="length must be at most 200, the number of keys, got 201"):
        built.first(201)


def test_reserved_room(kind: str) -> None:
    keys, queries = random(2, 200, 8, seed=33), random(2, 20, 8, seed=34)
    built = build(kind, keys[:, :100]).reserve(100)
    assert built.reserve(100) is built
    assert built.keys.untyped_storage().nbytes() == keys.nbytes
    place = built.keys.data_ptr()
    for step in range(100, 200, 25):
        built = built.add(keys[:, step : step + 25])
    assert built.keys.data_ptr() == place
    assert built.build(keys) is built
    assert_contract(kind, built, queries, 5, None)


def test_what_is_not_taken_in_teaches_nothing(kind: str, small_rest: None) -> None:
    """Rows that see no more than the first keys find what they found, and so do those that see some of the others."""
    keys, queries = random(2, 200, 8, seed=35), random(2, 20, 8, seed=36)
    other = keys.clone()
    other[:, 160:] *= -3
    base = build(kind, keys[:, :150])
    one, two = (base.add(x[:, 150:], take_in=False) for x in (keys, other))
    assert same(one, two, queries, 5, torch.full((1,), 155) - torch.arange(20))
    assert same(one, base, queries, 5, torch.full((1,), 149) - torch.arange(20))
    assert_contract(kind, one, queries, 5, None)
    assert_contract(kind, one.add(keys[:, :0]), queries, 5, None)


def test_a_base_keeps_no_space_that_was_left() -> None:
    """When keys move to a larger table, what the new index is based on lets go of the old one."""
    built = nf.KMeansIndex().build(torch.randn(1, 64, 8, generator=seeded(0)))
    for step in range(200):
        built = built.add(torch.randn(1, 1, 8, generator=seeded(step)))
        base = getattr(built, "_base", None)
        assert base is None or base._room is None
    assert built.length == 264
