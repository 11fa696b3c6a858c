"""Keys are grouped as the latest queries of a prompt are large, by coordinate."""

from __future__ import annotations

import math

import pytest
import torch
from by_hand import seeded
from few_keys import few_keys
from torch import Tensor

import nearfield as nf
from nearfield.attention import causal_attention
from nearfield.cells.cache import segments as cache_segments
from nearfield.cells.cache import store as cache_store
from nearfield.cells.cache.attention import route
from nearfield.cells.cache.segments import close_segment
from nearfield.cells.cache.state import CacheState
from nearfield.cells.cache.store import CellStore
from nearfield.cells.cache.stretch import query_sizes, stretched
from nearfield.cells.partition.by_queries import LATEST
from nearfield.kernels import backends

SIZES = {"segment": 32, "cell_size": 4, "window": 0, "sinks": 2}
SHARP = nf.Cells(probes=3, **SIZES)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def inputs(length: int = 64, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Keys differ most in the first half of coordinates, and queries ask along the second half."""
    query, key, value = (normal(batch, heads, length, 8, seed=heads + seed) for heads, seed in ((4, 0), (2, 1), (2, 2)))
    query[..., :4] *= 0.05
    query[..., 4:] *= 6.0
    key[..., :4] *= 4.0
    return query, key, value


def filled(query: Tensor | None, key: Tensor, value: Tensor, method: nf.Cells = SHARP, counts: Tensor | None = None) -> CellStore:
    store = CellStore(method, audit=True)
    store.append(key, value, counts)
    store.close(query=query)
    return store


def state(store: CellStore) -> CacheState:
    assert store.state is not None
    return store.state


def step_error(store: CellStore) -> float:
    query, key, value = (x[:, :, :16] for x in inputs(100))
    store.append(key, value)
    store.attend(query)
    return float(store.errors[-1].relative.mean())


def test_sizes_by_hand() -> None:
    query = normal(2, 4, LATEST + 30, 8)
    found = query_sizes(query, 2, None)
    counts = torch.rand(2, LATEST + 30, generator=seeded(1)) > 0.3
    padded = query_sizes(query.masked_fill(~counts[:, None, :, None], torch.nan), 2, counts)
    for entry in range(2):
        for head in range(2):
            own = query[entry, 2 * head : 2 * head + 2, 30:]
            torch.testing.assert_close(found[entry, head], own.square().sum((0, 1)).sqrt())
            real = own[:, counts[entry, 30:]]
            torch.testing.assert_close(padded[entry, head], real.square().sum((0, 1)).sqrt())


def test_k_means_weights_coordinates_by_sizes() -> None:
    """It multiplies what it is given by its root mean square."""
    keys, sizes = normal(3, 50, 8) * torch.linspace(0.1, 9.0, 8, dtype=torch.float64), normal(3, 8, seed=1).abs()
    given = stretched(keys, sizes)
    weighted = given * given.square().mean(1, keepdim=True).sqrt()
    factor = weighted / (keys * sizes[:, None])
    torch.testing.assert_close(factor, factor[:, :1, :1].expand_as(factor))
    assert float((given / keys).amax()) <= 1.0 + 1e-12


@pytest.mark.parametrize("says_nothing", [0.0, torch.nan, torch.inf])
def test_sizes_that_say_nothing_change_nothing(says_nothing: float) -> None:
    keys = normal(2, 50, 8)
    sizes = torch.ones(2, 8, dtype=torch.float64)
    sizes[0] = says_nothing
    found = stretched(keys, sizes)
    assert torch.equal(found[0], keys[0])
    assert not torch.equal(found[1], keys[1])
    # A coordinate in which all keys are zero stays so, and no other one changes.
    keys[..., 3] = 0.0
    found = stretched(keys, sizes)
    assert bool(found.isfinite().all())
    assert bool((found[..., 3] == 0.0).all())


def test_keys_that_look_alike_to_queries_share_cells() -> None:
    query, key, value = inputs()
    before, after = (step_error(filled(given, key, value)) for given in (None, query))
    assert after < 0.7 * before


def test_scores_trust_spreads_of_cells_that_queries_made() -> None:
    query, key, value = inputs(100)
    known, unknown = (filled(given, *(x[:, :, :64] for x in (key, value))) for given in (query[:, :, :64], None))
    assert (state(known).tables.most_spread, state(unknown).tables.most_spread) == (64.0, 9.0)
    # One segment that was grouped otherwise is enough.
    unknown.append(key[:, :, 64:], value[:, :, 64:])
    unknown.close(query=query[:, :, 64:])
    assert not state(unknown).tables.by_queries
    unknown.crop(0)
    unknown.append(key[:, :, :64], value[:, :, :64])
    unknown.close(query=query[:, :, :64])
    assert state(unknown).tables.by_queries
    assert not state(filled(query, key, value, nf.Cells(probes=3, partition=nf.Blocks(), **SIZES))).tables.by_queries


def test_where_spreads_are_cut_off_by_hand() -> None:
    """The first cell has the largest centroid, the second one a spread of 25, and the query would find it by that."""
    key = torch.zeros(1, 1, 8, 2, dtype=torch.float64)
    key[..., :4, 0], key[..., 4:, 1] = 12.0, torch.tensor([-5.0, 5.0, -5.0, 5.0])
    value = normal(1, 1, 8, 2)
    method = nf.Cells(cell_size=4, probes=1, segment=8, window=0, sinks=0, partition=nf.Blocks())
    store = filled(None, key, value, method)
    tables = state(store).tables
    for by_queries, opened in ((False, 0), (True, 1)):
        query = torch.ones(1, 1, 2, dtype=torch.float64)
        assert route(tables.but(by_queries=by_queries), query, 1, 1, None).opened.tolist() == [[opened]]
        # What it counts for is the same.
        routed = route(tables.but(by_queries=by_queries), query, 1, 0, None)
        expected = [math.log(4) + 12.0, math.log(4) + 2 * math.log1p(9.0 / 4)]
        torch.testing.assert_close(routed.far_logits[0, 0], torch.tensor(expected, dtype=torch.float64))


def test_only_k_means_looks_at_distances(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = inputs()
    asked: list[nf.Partition] = []
    for partition in (nf.Blocks(), nf.HashBuckets(), nf.KMeans()):

        def noted(keys: torch.Tensor, sizes: torch.Tensor, partition: nf.Partition = partition) -> torch.Tensor:
            asked.append(partition)
            return keys

        monkeypatch.setattr(cache_segments, "stretched", noted)
        filled(query, key, value, nf.Cells(probes=3, partition=partition, **SIZES))
    assert set(asked) == {nf.KMeans()}


def test_padding_of_a_prompt_says_nothing() -> None:
    query, key, value = inputs(batch=1)
    counts = torch.ones(1, 64, dtype=torch.bool)
    counts[:, :20] = False
    wild = query.clone()
    wild[:, :, :20] = torch.nan
    stores = [filled(x, key, value, counts=counts) for x in (query, wild)]
    assert torch.equal(*(state(store).tables.centroid.filled for store in stores))
    unknown = filled(None, key, value, counts=counts)
    assert not torch.equal(*(state(store).tables.centroid.filled for store in (stores[0], unknown)))


def test_sizes_follow_their_batch_entries() -> None:
    query, key, value = inputs(100)
    chosen = torch.tensor([1, 1, 0])
    store = filled(query[:, :, :64], key[:, :, :64], value[:, :, :64])
    # Those of entries differ, or it would not matter which is whose.
    assert not torch.allclose(*state(store).query_sizes)  # type: ignore[misc]
    store.select(chosen)
    other = filled(*(x[chosen, :, :64] for x in (query, key, value)))
    for one in (store, other):
        one.append(key[chosen, :, 64:], value[chosen, :, 64:])
        one.close()
    assert store.closed == other.closed == 96
    torch.testing.assert_close(state(store).tables.centroid.filled, state(other).tables.centroid.filled)


def test_segments_after_a_prompt_are_grouped_alike() -> None:
    query, key, value = inputs(100)
    store = filled(query[:, :, :64], key[:, :, :64], value[:, :, :64])
    store.append(key[:, :, 64:], value[:, :, 64:])
    store.close()
    whole = filled(None, key, value)
    whole.crop(0)
    whole.append(key[:, :, :64], value[:, :, :64])
    whole.close(query=query[:, :, :64])
    whole.append(key[:, :, 64:], value[:, :, 64:])
    whole.attend(query[:, :, 99:])
    torch.testing.assert_close(state(store).tables.centroid.filled, state(whole).tables.centroid.filled)


def test_a_crop_groups_again_as_before() -> None:
    query, key, value = inputs(100)
    store = filled(query, key, value)
    before = state(store).tables.centroid.filled.clone()
    store.crop(70)
    assert store.closed == 64
    store.append(key[:, :, 70:], value[:, :, 70:])
    store.close()
    torch.testing.assert_close(state(store).tables.centroid.filled, before)


def test_chunks_say_how_large_their_queries_are(monkeypatch: pytest.MonkeyPatch) -> None:
    few_keys(monkeypatch)
    monkeypatch.setattr(cache_store, "LEAST_CHUNK", 8)
    query, key, value = inputs(200)

    def near(own: slice) -> cache_store.Near:
        def attend(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
            rows = query[:, :, own]
            found = causal_attention(rows, keys, values, None, nf.Exact(), keys.shape[2] - rows.shape[2], return_lse=True)
            assert found.lse is not None
            return found.output, found.lse

        return attend

    store = CellStore(group_from=0)
    for own in (slice(0, 120), slice(120, 200)):
        store.append(key[:, :, own], value[:, :, own])
        store.attend(query[:, :, own], None, near(own))
        assert torch.equal(state(store).query_sizes, query_sizes(query[:, :, own], 2, None))  # type: ignore[arg-type]


def test_queries_must_be_those_of_stored_keys() -> None:
    query, key, value = inputs()
    store = filled(None, key, value)
    with pytest.raises(ValueError, match="there are 80 queries for 64 keys"):
        store.close(query=normal(2, 4, 80, 8))
    with pytest.raises(ValueError, match="query must be"):
        store.close(query=query[..., :4])
    store.close(query=query[:, :, :0])
    assert state(store).query_sizes is None


def test_kernels_group_by_the_same_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the logits of queries, cells by kernels are as tight as those in torch, and far tighter than without sizes."""
    pytest.importorskip("triton")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    query, key, value = (x[:1, :1].float().to(device) for x in inputs(160))
    sizes = query_sizes(query, 1, None)[0]
    outside = torch.zeros(1, 160, dtype=torch.bool, device=device)

    def scatter(given: Tensor | None) -> float:
        found = close_segment(key[0], value[0], None, outside, 16, nf.KMeans(), first_outside=0, sizes=given)
        return float((found.size[..., None] * found.variance * sizes.square()[:, None]).sum())

    in_torch, by_keys = scatter(sizes), scatter(None)
    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    by_kernels = scatter(sizes)
    assert by_kernels < 1.2 * in_torch
    assert by_kernels < 0.5 * by_keys
