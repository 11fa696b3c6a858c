"""How many keys an index looked at, and what it says where that were all of them."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from by_hand import seeded
from torch import Tensor

import nearfield as nf
from nearfield.knn.index import base, build_index
from nearfield.synthetic import make

LENGTH = 3000
INDICES: dict[str, nf.Index] = {
    "k-means": nf.KMeansIndex(probes=3, leaf=256),
    "lsh": nf.ConcentricLSH(leaf=256),
    "faiss-lists": nf.FaissIndex("IVF16,Flat", nprobe=2, leaf=512),
    "faiss-graph": nf.FaissIndex("HNSW16", leaf=512),
    "exact": nf.ExactIndex(),
}


def clustered() -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = make("clustered", 1, 2, LENGTH, 16, seed=1)
    return query[:, :, -200:], key, value


@pytest.mark.parametrize("name", INDICES)
@pytest.mark.parametrize("causal", [False, True])
def test_an_index_says_how_many_keys_it_scored(name: str, causal: bool) -> None:
    if name.startswith("faiss"):
        pytest.importorskip("faiss")
    query, key, _ = (x[0] for x in clustered())
    offset = LENGTH - 200 if causal else None
    found = INDICES[name].build(key).find(query, 8, offset)  # type: ignore[attr-defined]
    visible = torch.arange(LENGTH - 199, LENGTH + 1) if causal else torch.full((200,), LENGTH)
    assert found.scored is not None
    assert found.scored.shape == (2, 200)
    if name == "exact":
        assert torch.equal(found.scored, visible.expand(2, -1))
    else:
        assert bool((found.scored >= 8).all())
        assert float((found.scored / visible).mean()) < 0.8


def test_k_means_scores_the_keys_of_its_cells_alone() -> None:
    _, key, _ = (x[0] for x in clustered())
    built = nf.KMeansIndex(cells=30, probes=3).build(key)
    query = torch.randn(2, 20, 16, generator=seeded(0))
    routed = (query @ built.centroids.mT).topk(3).indices
    sizes = built.sizes[:, None].expand(-1, 20, -1).gather(-1, routed).sum(-1)
    assert torch.equal(built.find(query, 5).scored, sizes)


def test_top_k_and_lazy_draws_report_what_was_scored() -> None:
    query, key, value = clustered()
    index = nf.KMeansIndex(probes=3)
    built = build_index(index, key[0])
    scored = built.find(query[0], 8).scored
    assert scored is not None
    info = nf.estimate(query, key, value, method=nf.TopK(k=8, index=index)).info
    assert info["keys_per_query"] == pytest.approx(float(scored.double().mean()))
    assert info["keys_used"] == 8
    assert info["full_scans"] == 0
    with_tail = nf.estimate(query, key, value, method=nf.TopK(k=8, tail=5, index=index)).info
    assert with_tail["keys_per_query"] == pytest.approx(info["keys_per_query"] + 5)
    exact = nf.estimate(query, key, value, method=nf.TopK(k=8)).info
    assert (exact["keys_per_query"], exact["full_scans"]) == (LENGTH, 1.0)
    lazy = nf.estimate(query, key, value, method=nf.LazyGumbel(draws=1000, index=index)).info
    assert (lazy["keys_per_query"], lazy["full_scans"]) == (LENGTH, 1.0)


def scanned(index: nf.Index, length: int, **options: Any) -> list[str]:
    query, key, value = torch.randn(3, 1, 1, length, 64, generator=seeded(0)).unbind(0)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        nf.attention(query[:, :, :256], key, value, method=nf.TopK(k=32, index=index), **options)
    return [str(one.message) for one in said if "looked at all keys" in str(one.message)]


def test_an_index_that_looks_at_everything_says_so() -> None:
    """Gaussian keys of many dimensions have no near neighbours that hashing could find."""
    (said,) = scanned(nf.ConcentricLSH(), 2048)
    assert "BuiltConcentricLSH looked at all keys for 100% of the queries" in said
    assert "ExactIndex()" in said
    query, key, value = torch.randn(3, 1, 1, 2048, 64, generator=seeded(0)).unbind(0)
    with pytest.warns(UserWarning, match="looked at all keys"):
        info = nf.estimate(query[:, :, :256], key, value, method=nf.TopK(k=32, index=nf.ConcentricLSH())).info
    assert (info["keys_per_query"], info["full_scans"]) == (2048, 1.0)


def test_those_that_may_look_at_everything_do_not() -> None:
    assert scanned(nf.ExactIndex(), 2048) == []
    assert scanned(nf.ConcentricLSH(), 1024) == [], "few keys"
    assert scanned(nf.KMeansIndex(), 2048) == []
    (said,) = scanned(nf.KMeansIndex(cells=4, probes=4), 2048)
    assert "fewer probes" in said


def test_draws_that_look_at_everything_are_not_the_fault_of_an_index(monkeypatch: pytest.MonkeyPatch) -> None:
    for cost, keys in (("LEAST_KEYS", 0), ("BUILD_COST", 0), ("SEARCH_COST", 1), ("POINT_COST", 32), ("MOST_SPENT", 1)):
        monkeypatch.setattr(f"nearfield.paper.lazy.{cost}", keys)
    query, key, value = clustered()
    index = nf.KMeansIndex(probes=3)
    for draws in (1, 8, 30):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            info = nf.estimate(query, key, value, method=nf.LazyGumbel(draws=draws, index=index), generator=seeded(0)).info
        assert info["full_scans"] == info["dense_rows"] / 400
        assert (info["full_scans"] > 0.2) == (draws > 1)
    with pytest.warns(UserWarning, match="looked at all keys"):
        nf.attention(query, key, value, method=nf.LazyGumbel(draws=1, index=nf.KMeansIndex(cells=4, probes=4), always_lazy=True))


def test_the_tail_is_not_the_fault_of_an_index() -> None:
    query, key, value = torch.randn(3, 1, 1, 2048, 16, generator=seeded(0)).unbind(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        info = nf.estimate(query[:, :, :9], key, value, method=nf.TopK(8, 2040, nf.KMeansIndex(probes=1))).info
    assert info["full_scans"] == 1


@pytest.mark.parametrize("factory", ["SQ8", "PCA8,Flat", "NSG16"])
def test_what_faiss_does_not_count_is_not_told(factory: str) -> None:
    pytest.importorskip("faiss")
    key = torch.randn(1, 2048, 16, generator=seeded(0))
    assert nf.FaissIndex(factory).build(key).find(key[:, :9], 4).scored is None


def test_an_own_index_need_not_count() -> None:
    class Newest(nf.BuiltIndex):
        def _search(self, queries: Tensor, k: int, visible: Tensor) -> tuple[Tensor, Tensor]:
            ids = (visible[..., None] - 1 - torch.arange(k)).clamp(min=-1)
            return base.gathered_scores(queries, self.keys, ids), ids

    class Recipe:
        def build(self, keys: Tensor) -> Newest:
            return Newest(keys)

    query, key, value = clustered()
    found = nf.estimate(query, key, value, method=nf.TopK(k=8, tail=4, index=Recipe())).info
    assert (found["keys_per_query"], found["keys_used"], found["full_scans"]) == (12, 12, 0)
