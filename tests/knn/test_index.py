"""Every index keeps the same contract; approximate ones also keep their recall."""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import Any

import index_contract
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_contract import assert_contract, build, clustered, logits, random

from nearfield.chunks import row_chunks
from nearfield.knn.index import (
    PADDING,
    BuiltIndex,
    CellIndex,
    ConcentricLSH,
    FaissIndex,
    KMeansIndex,
    gathered_scores,
    prefixes,
)
from nearfield.knn.index.candidates import best_of_lists
from nearfield.knn.index.lift import lift_keys, lift_queries

# Fixture.
kind = index_contract.kind


@cache
def built_once(kind: str) -> BuiltIndex:
    return build(kind, random(3, 300, 8, seed=1))


@pytest.mark.parametrize("k", [1, 7, 64, 400])
@pytest.mark.parametrize("offset", [None, 0, 150, -20])
def test_search_keeps_its_contract(kind: str, k: int, offset: int | None) -> None:
    assert_contract(kind, built_once(kind), random(3, 90, 8, seed=2), k, offset)


def test_contract_with_an_offset_per_row(kind: str) -> None:
    built = build(kind, random(2, 200, 8, seed=3))
    queries = random(2, 40, 8, seed=4)
    generator = torch.Generator().manual_seed(5)
    assert_contract(kind, built, queries, 9, torch.randint(-50, 250, (2, 1), generator=generator))
    assert_contract(kind, built, queries, 9, torch.randint(-50, 250, (2, 40), generator=generator))


@pytest.mark.parametrize(("length", "rows", "k"), [(1, 1, 1), (1, 5, 3), (2, 3, 2), (3, 4, 10), (17, 0, 2), (5, 300, 5)])
@pytest.mark.parametrize("offset", [None, 0])
def test_small_sizes(kind: str, length: int, rows: int, k: int, offset: int | None) -> None:
    built = build(kind, random(2, length, 4, seed=6))
    assert_contract(kind, built, random(2, rows, 4, seed=7), k, offset)


def test_no_keys(kind: str) -> None:
    scores, ids = build(kind, torch.zeros(2, 0, 4)).search(random(2, 3, 4), 2)
    assert bool((ids == PADDING).all())
    assert bool((scores == -torch.inf).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_dtypes(kind: str, dtype: torch.dtype) -> None:
    built = build(kind, random(2, 150, 16, seed=8, dtype=dtype))
    assert built.keys.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert_contract(kind, built, random(2, 20, 16, seed=9, dtype=dtype), 5, 100)


@pytest.mark.parametrize("offset", [None, 0])
def test_degenerate_keys(kind: str, offset: int | None) -> None:
    queries = random(2, 100, 8, seed=10)
    identical = torch.ones(2, 100, 8)
    duplicates = random(2, 10, 8, seed=11).repeat(1, 10, 1)
    outlier = random(2, 100, 8, seed=12)
    outlier[:, 50] *= 1000
    for keys in (identical, torch.zeros(2, 100, 8), duplicates, outlier):
        built = build(kind, keys)
        assert_contract(kind, built, queries, 12, offset)
        assert_contract(kind, built, torch.zeros(2, 100, 8), 12, offset)


def test_layouts_do_not_matter(kind: str) -> None:
    keys, queries = random(2, 120, 8, seed=13), random(2, 30, 8, seed=14)
    expected = build(kind, keys).search(queries, 6, 60)
    strided = keys.transpose(0, 1).contiguous().transpose(0, 1), queries.transpose(1, 2).contiguous().transpose(1, 2)
    assert not strided[0].is_contiguous()
    for got, want in zip(build(kind, strided[0]).search(strided[1], 6, 60), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_batch_entries_are_independent(kind: str) -> None:
    keys, queries = random(3, 200, 8, seed=15), random(3, 25, 8, seed=16)
    together = build(kind, keys).search(queries, 10)[1]
    other = keys.clone()
    other[0] = random(200, 8, seed=17)
    changed = build(kind, other).search(queries, 10)[1]
    assert torch.equal(together[1:], changed[1:])
    assert not torch.equal(together[0], changed[0])


def test_stale_keys_are_refused(kind: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        keys = random(1, 50, 4, seed=18, dtype=dtype)
        built = build(kind, keys)
        keys[0, 3] = 0
        with pytest.raises(RuntimeError, match="changed in place"):
            built.search(random(1, 2, 4), 1)
        with pytest.raises(RuntimeError, match="changed in place"):
            built.cutoffs(random(1, 2, 4), torch.zeros(1, 2, 1, dtype=torch.int64))


def test_deterministic_and_global_state_untouched(kind: str) -> None:
    keys, queries = random(2, 400, 8, seed=19), random(2, 60, 8, seed=20)
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    first = build(kind, keys).search(queries, 11, 340)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(1234)
    for got, want in zip(build(kind, keys).search(queries, 11, 340), first, strict=True):
        assert torch.equal(got, want)
    assert torch.get_num_threads() == threads


def test_search_arguments_are_checked(kind: str) -> None:
    built = build(kind, random(2, 30, 4))
    for k in (0, -1, 1.5, True):
        with pytest.raises(ValueError, match=f"k must be a positive integer, got {k!r}"):
            built.search(random(2, 3, 4), k)  # type: ignore[arg-type]
    for shape in ((3, 3, 4), (2, 3, 5), (3, 4)):
        with pytest.raises(ValueError, match=r"queries must have shape .* got"):
            built.search(random(*shape), 1)
    with pytest.raises(ValueError, match=r"keys must have shape"):
        build(kind, random(30, 4))
    with pytest.raises(TypeError, match="floating point"):
        build(kind, torch.zeros(1, 3, 4, dtype=torch.int64))


@pytest.mark.parametrize(
    ("recipe", "name", "value"),
    [(KMeansIndex, name, value) for name in ("cells", "probes", "sample") for value in (0, -3, 2.5, True)]
    + [(KMeansIndex, "iterations", -1), (KMeansIndex, "seed", 0.5), (KMeansIndex, "probes", None), (KMeansIndex, "leaf", 0)]
    + [(ConcentricLSH, name, value) for name in ("rungs", "tables", "shells") for value in (0, 1.5, True)]
    + [(ConcentricLSH, name, value) for name in ("width", "enough") for value in (0, -1.0, math.inf, math.nan, "4")]
    + [(recipe, "seed", seed) for recipe in (KMeansIndex, ConcentricLSH, CellIndex) for seed in (2**64, -(2**63) - 1, 2**70)]
    + [(ConcentricLSH, name, value) for name in ("rungs", "hashes") for value in (1025, 10**9, 2**70)]
    + [(ConcentricLSH, "hashes", 257), (ConcentricLSH, "width", 10**400), (ConcentricLSH, "enough", 10**400)]
    + [
        (ConcentricLSH, "flips", -1),
        (ConcentricLSH, "flips", 9),
        (ConcentricLSH, "tables", 1 << 15),
        (ConcentricLSH, "hashes", 0),
        (ConcentricLSH, "seed", None),
    ]
    + [(FaissIndex, "factory", ""), (FaissIndex, "factory", 3), (FaissIndex, "metric", "cosine")]
    + [(FaissIndex, "leaf", 0), (FaissIndex, "nprobe", 0), (FaissIndex, "nprobe", 1.5)],
)
def test_recipes_are_checked(recipe: Any, name: str, value: object) -> None:
    arguments = {"factory": "Flat"} if recipe is FaissIndex else {}
    with pytest.raises(ValueError) as error:
        recipe(**{**arguments, name: value})
    assert name in str(error.value)
    assert repr(value) in str(error.value)


def test_hashes_in_all_have_a_limit() -> None:
    """Each of these is fine by itself."""
    message = r"rungs \* tables \* hashes must be at most 33,554,432, got rungs=1000, tables=30000, hashes=200"
    with pytest.raises(ValueError, match=message):
        ConcentricLSH(rungs=1000, tables=30_000, hashes=200)
    with pytest.raises(ValueError, match="at most 33,554,432, got rungs=1024, tables=32767, hashes=2"):
        ConcentricLSH(rungs=1024, tables=(1 << 15) - 1, hashes=2)
    ConcentricLSH(rungs=1024, tables=(1 << 15) - 1)
    ConcentricLSH(rungs=512, tables=256, hashes=256)


@pytest.mark.parametrize(
    ("recipe", "name", "enough"),
    [
        (KMeansIndex, "cells", 40),
        (KMeansIndex, "probes", 55),
        (KMeansIndex, "sample", 55),
        (KMeansIndex, "leaf", 56),
        (ConcentricLSH, "shells", 40),
        (ConcentricLSH, "leaf", 56),
        (CellIndex, "cell_size", 56),
        (CellIndex, "probes", 56),
        (CellIndex, "segment", 56),
    ],
)
@pytest.mark.parametrize("size", [10**9, 2**70, 10**400])
def test_an_index_takes_sizes_beyond_all_keys(
    recipe: Any, name: str, enough: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """40 keys, and 15 more, which are taken in by what was learned."""
    monkeypatch.setattr(prefixes, "LEAST_REST", 4)
    arguments = {"enough": 0.1} if recipe is ConcentricLSH else {}
    fine, beyond = (recipe(**arguments, **{name: value}).build(random(2, 40, 8)) for value in (enough, size))
    queries = random(2, 7, 8, seed=1)
    for offset in (None, 3):
        for one, other in zip(fine.search(queries, 5, offset), beyond.search(queries, 5, offset), strict=True):
            assert torch.equal(one, other)
    # One of them is longer than all before.
    more = random(2, 15, 8, seed=2) * torch.linspace(0, 3, 15)[:, None]
    fine, beyond = fine.add(more), beyond.add(more)
    for one, other in zip(fine.search(queries, 5), beyond.search(queries, 5), strict=True):
        assert torch.equal(one, other)
    if name == "shells":
        assert torch.equal(fine.codes, beyond.codes)


def test_many_shells_leave_each_key_alone() -> None:
    """So it was when there were as many shells as asked for, also empty ones."""
    keys = random(1, 9, 4)
    norms = (keys - keys.mean(1, keepdim=True)).norm(dim=-1)
    for shells in (9, 16, 10**9):
        assert torch.equal(ConcentricLSH(shells=shells).build(keys).limits, norms.sort().values)


def test_faiss_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(ImportError, match=r"pip install 'nearfield\[faiss\]'"):
        FaissIndex("Flat").build(random(1, 10, 4))


def test_faiss_arguments_only_faiss_can_judge() -> None:
    pytest.importorskip("faiss")
    with pytest.raises(ValueError, match="factory 'Nonsense'"):
        FaissIndex("Nonsense").build(random(1, 10, 4))
    with pytest.raises(ValueError, match=r"nprobe must be None .* got 3"):
        FaissIndex("Flat", nprobe=3).build(random(1, 10, 4))


def test_the_future_has_no_influence(kind: str) -> None:
    """Not through scores, not through centroids, norms or widths that were learned from the keys."""
    keys, queries = random(2, 3000, 8, seed=21), random(2, 200, 8, seed=22)
    before = build(kind, keys).search(queries, 10, 2000)
    keys = keys.clone()
    keys[:, 2200:] = 100 * random(2, 800, 8, seed=23)
    for got, want in zip(build(kind, keys).search(queries, 10, 2000), before, strict=True):
        assert torch.equal(got, want)


def test_exact_kinds_find_the_top_k() -> None:
    pytest.importorskip("faiss")
    keys, queries = random(2, 500, 8, seed=24), random(2, 50, 8, seed=25)
    for kind in ("exact", "faiss-flat", "faiss-lifted"):
        built = build(kind, keys)
        for offset in (None, 300):
            scores, _ = built.search(queries, 20, offset)
            torch.testing.assert_close(scores.double(), logits(built, queries, offset).topk(20).values, rtol=0, atol=1e-5)


def test_opening_every_cell_is_exact() -> None:
    keys, queries = random(2, 500, 8, seed=26), random(2, 50, 8, seed=27)
    for index in (KMeansIndex(cells=20, probes=20, leaf=32), ConcentricLSH(enough=1e9, leaf=32)):
        built = index.build(keys)
        for offset in (None, 300):
            scores, _ = built.search(queries, 20, offset)
            torch.testing.assert_close(scores.double(), logits(built, queries, offset).topk(20).values, rtol=0, atol=1e-5)


@settings(max_examples=100, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    length=st.integers(1, 120),
    k=st.integers(1, 40),
    cells=st.integers(1, 30),
    probes=st.integers(1, 6),
    causal=st.sampled_from([None, -3, 0, 40]),
    spread=st.sampled_from([0.0, 1e-3, 1.0, 100.0]),
)
def test_kmeans_bounds_hold(seed: int, length: int, k: int, cells: int, probes: int, causal: int | None, spread: float) -> None:
    keys = random(2, length, 6, seed=seed) * spread + random(2, 1, 6, seed=seed + 1)
    built = KMeansIndex(cells=cells, probes=probes, iterations=2, seed=seed, leaf=16).build(keys)
    assert_contract("kmeans", built, random(2, 30, 6, seed=seed + 2), k, causal)


@settings(max_examples=60, derandomize=True, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    length=st.integers(1, 300),
    k=st.integers(1, 40),
    enough=st.sampled_from([0.5, 1.0, 3.0]),
    width=st.sampled_from([0.5, 3.0, 10.0]),
    causal=st.sampled_from([None, 0, 100]),
)
def test_lsh_always_finds_enough(seed: int, length: int, k: int, enough: float, width: float, causal: int | None) -> None:
    index = ConcentricLSH(rungs=3, tables=2, enough=enough, width=width, flips=2, shells=3, seed=seed, leaf=16)
    assert_contract("lsh", index.build(random(2, length, 6, seed=seed)), random(2, 30, 6, seed=seed + 2), k, causal)


def test_lift() -> None:
    keys, queries = random(2, 50, 8, seed=28), random(2, 20, 8, seed=29)
    lifted = lift_keys(keys)
    longest = keys.norm(dim=-1).amax(-1, keepdim=True)
    torch.testing.assert_close(lifted.norm(dim=-1), longest.expand(-1, 50))
    torch.testing.assert_close(lift_queries(queries) @ lifted.transpose(1, 2), queries @ keys.transpose(1, 2))
    assert lift_keys(keys.bfloat16()).dtype == torch.float32
    assert lift_keys(keys.double()).dtype == torch.float64
    assert bool(lift_keys(1e3 * torch.ones(1, 5, 7)).isfinite().all())
    assert lift_keys(torch.zeros(2, 0, 3)).shape == (2, 0, 4)


@pytest.mark.parametrize("row_cost", [1, 10, 35, 1000])
def test_row_chunks_cover_everything_once(row_cost: int) -> None:
    seen = torch.zeros(5, 7, dtype=torch.int64)
    for entries, part in row_chunks(5, 7, row_cost, 100):
        seen[entries, part] += 1
    assert bool((seen == 1).all())


def test_duplicates_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tables list the same keys; tiny passes must not change the answer."""
    keys, queries = random(1, 60, 4, seed=30), random(8, 4, seed=31)
    order = torch.cat([torch.arange(60), torch.arange(60)])
    starts = torch.tensor([[0, 75]]).expand(8, -1)
    counts = torch.tensor([[40, 30]]).expand(8, -1)
    entry = torch.zeros(8, dtype=torch.int64)
    want = (queries @ keys[0, :45].T).topk(12)
    for scores_per_pass in (1 << 23, 100):
        monkeypatch.setattr("nearfield.knn.index.candidates.SCORES_PER_PASS", scores_per_pass)
        monkeypatch.setattr("nearfield.knn.index.candidates.SCALARS_PER_PRODUCT", scores_per_pass)
        monkeypatch.setattr("nearfield.knn.index.candidates.MARKS_PER_PASS", scores_per_pass)
        scores, ids, found = best_of_lists(queries, keys, entry, order, starts, counts, 12, table=torch.tensor([0, 1]))
        torch.testing.assert_close(scores, want.values)
        assert torch.equal(ids, want.indices)
        assert found.tolist() == [45] * 8


def test_passes_do_not_change_the_answer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keys, queries = random(3, 250, 8, seed=32), random(3, 70, 8, seed=33)
    built = build(kind, keys)
    _, want = built.search(queries, 15, 200)
    for module, name in (
        ("candidates", "SCORES_PER_PASS"),
        ("candidates", "SCALARS_PER_PRODUCT"),
        ("candidates", "MARKS_PER_PASS"),
        ("kmeans", "ROUTE_SCORES_PER_PASS"),
        ("lsh", "LOOKUPS_PER_PASS"),
        ("faiss", "GATHERED_SCALARS_PER_PASS"),
    ):
        monkeypatch.setattr(f"nearfield.knn.index.{module}.{name}", 1000)
    assert torch.equal(built.search(queries, 15, 200)[1], want)


FAMILIES = {
    "clustered": lambda: clustered(4096, 32, seed=40),
    "gaussian": lambda: random(4096, 32, seed=41),
    "norms": lambda: clustered(4096, 32, seed=42) * random(4096, 1, seed=43).mul(0.4).exp(),
    "drift": lambda: random(4096, 32, seed=44).cumsum(0) / 16,
}
SEARCHED: dict[str, Any] = {
    "kmeans": KMeansIndex(),
    "lsh": ConcentricLSH(),
    "faiss": FaissIndex("IVF64,Flat", nprobe=8, leaf=1024),
}
RECALL_FLOORS: dict[tuple[str, str, bool], float] = {
    ("kmeans", "clustered", False): 0.999,
    ("kmeans", "clustered", True): 0.969,
    ("kmeans", "gaussian", False): 0.473,
    ("kmeans", "gaussian", True): 0.621,
    ("kmeans", "norms", False): 0.964,
    ("kmeans", "norms", True): 0.928,
    ("kmeans", "drift", False): 1.000,
    ("kmeans", "drift", True): 1.000,
    ("lsh", "clustered", False): 0.973,
    ("lsh", "clustered", True): 0.900,
    ("lsh", "gaussian", False): 1.000,
    ("lsh", "gaussian", True): 1.000,
    ("lsh", "norms", False): 0.847,
    ("lsh", "norms", True): 0.918,
    ("lsh", "drift", False): 0.589,
    ("lsh", "drift", True): 0.970,
    ("faiss", "clustered", False): 0.999,
    ("faiss", "clustered", True): 0.992,
    ("faiss", "gaussian", False): 0.497,
    ("faiss", "gaussian", True): 0.576,
    ("faiss", "norms", False): 0.970,
    ("faiss", "norms", True): 0.954,
    ("faiss", "drift", False): 0.339,
    ("faiss", "drift", True): 0.966,
}


@cache
def searched(name: str, family: str) -> BuiltIndex:
    return SEARCHED[name].build(FAMILIES[family]()[None])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("name", list(SEARCHED))
def test_recall(name: str, family: str, causal: bool) -> None:
    """Recall at k = sqrt(n) of perturbed keys as queries, against brute force; fixed seeds, so only code changes move it."""
    if name == "faiss":
        pytest.importorskip("faiss")
    keys = searched(name, family).keys[0]
    picked = torch.arange(2048, 4096, 8)
    queries = keys[picked] + 0.1 * random(len(picked), 32, seed=45)
    offset = (picked - torch.arange(len(picked)))[None] if causal else None
    built = searched(name, family)
    _, ids = built.search(queries[None], 64, offset)
    true = logits(built, queries[None], offset).topk(64).indices
    recall = float((true[..., None] == ids[..., None, :]).any(-1).double().mean())
    assert recall >= RECALL_FLOORS[name, family, causal] - 0.01, f"recall {recall:.3f}"


def test_gathered_scores_mark_padding() -> None:
    keys, queries = random(1, 5, 3), random(1, 2, 3)
    scores = gathered_scores(queries, keys, torch.tensor([[[0, PADDING], [4, 1]]]))
    assert scores[0, 0, 1] == -torch.inf
    assert bool(scores[0, 1].isfinite().all())
