"""A cache that opens only the cells in which a query may give a key a share of its weights, as many as these are."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from by_hand import seeded
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import nearfield as nf
from nearfield import hf
from nearfield.cells.cache.attention import Opening, cached_attention, route, scaled_queries
from nearfield.cells.cache.heavy import ReadKeys
from nearfield.cells.cache.state import CacheState
from nearfield.cells.cache.store import TIMES_BY_WEIGHT, CellStore
from nearfield.kernels import backends

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"segment": 128, "cell_size": 4, "window": 0, "sinks": 4}
MOST = 20


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def filled(min_weight: float | None = None, probes: int | None = MOST, length: int = 300, **options: Any) -> CellStore:
    store = CellStore(nf.Cells(probes=probes, **SIZES), min_weight=min_weight, **options)
    store.append(*(normal(2, 2, length, 8, seed=seed) for seed in (1, 2)))
    store.close()
    return store


def state(store: CellStore) -> CacheState:
    assert store.state is not None
    return store.state


def queries(group: int = 2, rows: int = 1, size: float = 1.0) -> Tensor:
    """The heads of the second batch entry ask more sharply."""
    return size * normal(2, 2 * group, rows, 8, seed=9) * torch.tensor([1.0, 3.0])[:, None, None, None]


def opened_by_hand(store: CellStore, query: Tensor, min_weight: float) -> list[set[int]]:
    """By head of keys: cells among the best `MOST` in which a query of the group may give a key so much."""
    found = []
    tables = state(store).tables
    key = store.keys
    for entry in range(2):
        for head in range(2):
            shares = []
            for one in query[entry, 2 * head : 2 * head + 2, 0] * 8**-0.5:
                first = tables.centroid.storage[entry, head, : len(tables)] @ one
                spread = tables.variance.storage[entry, head, : len(tables)] @ one.square()
                size = tables.size.storage[entry, head, : len(tables)]
                mass = size.log() + first + 2 * torch.log1p(spread.clamp(max=9) / 4)
                near = torch.cat([key[entry, head, :4], key[entry, head, -64:]]) @ one
                # The latest 64 count as far as they are in no cell.
                near = torch.cat([near[:4], near[4:][-(store.length - store.closed) :]])
                score = first + 3 * spread.clamp(max=tables.most_spread).sqrt()
                shares.append(score - torch.cat([mass, near]).logsumexp(0))
            best = torch.stack(shares).amax(0)
            some = best.topk(MOST).indices
            found.append({int(cell) for cell in some if best[cell] > math.log(min_weight)})
    return found


@pytest.mark.parametrize("min_weight", [0.3, 0.02, 1e-9])
def test_opened_cells_by_hand(min_weight: float) -> None:
    store, query = filled(min_weight), queries()
    rows = scaled_queries(query, 2, 8**-0.5)
    near = torch.cat([state(store).sink_rows(rows.dtype)[0], state(store).keys.view(slice(256, 300)).flatten(0, 1)], 1)
    near_lse = (rows @ near.transpose(1, 2)).logsumexp(2)
    found = route(state(store).tables, rows, 1, MOST, near_lse, math.log(min_weight))
    assert found.taken is not None
    own = [{int(cell) for cell in cells[taken]} for cells, taken in zip(found.opened, found.taken, strict=True)]
    assert own == opened_by_hand(store, query, min_weight)
    sizes = {len(cells) for cells in own}
    assert sizes == {MOST} if min_weight == 1e-9 else len(sizes) > 1


@pytest.mark.parametrize("min_weight", [0.2, 0.02])
def test_a_step_is_the_one_that_opens_as_many(min_weight: float) -> None:
    """Of each head by itself: what it does not open is summed up."""
    query = queries()
    many = filled(min_weight)
    found = many.attend(query)
    counts = iter(map(len, opened_by_hand(many, query, min_weight)))
    for entry in range(2):
        for head in range(2):
            own = slice(head * 2, head * 2 + 2)
            probes = next(counts)
            single = CellStore(nf.Cells(probes=max(1, probes), **SIZES))
            single.append(*(x[entry : entry + 1, head : head + 1] for x in (many.keys, many.values)))
            single.close()
            if probes:
                torch.testing.assert_close(found[entry : entry + 1, own], single.attend(query[entry : entry + 1, own]))


def count_read(store: CellStore, query: Tensor) -> float:
    store.watch = ReadKeys()
    store.attend(query)
    assert store.watch.rows == 4
    return store.watch.mean


def test_fewer_keys_are_read_where_weights_are_spread_out() -> None:
    flat, sharp = (count_read(filled(0.02), queries(size=size)) for size in (0.1, 1.0))
    assert flat < sharp / 3
    assert count_read(filled(), queries(size=0.2)) > 3 * flat


def test_a_least_weight_of_next_to_nothing_opens_all_probes() -> None:
    query = queries()
    torch.testing.assert_close(filled(1e-300).attend(query), filled().attend(query))


def test_where_all_cells_may_be_opened_a_step_is_exact() -> None:
    query = queries()
    store = filled(0.99, probes=10**6)
    exact = sdpa(query, store.keys, store.values, enable_gqa=True)
    torch.testing.assert_close(store.attend(query), exact)
    assert not torch.allclose(filled(0.99).attend(query), exact, atol=1e-3)


def test_errors_are_smaller_than_those_of_as_many_keys() -> None:
    """One head looks for something, and the other does not: cells go where they are needed."""
    query = queries()
    exact = sdpa(query, filled().keys, filled().values, enable_gqa=True)

    def off(store: CellStore) -> float:
        return float((store.attend(query) - exact).norm() / exact.norm())

    few = filled(0.03)
    read = sum(map(len, opened_by_hand(few, query, 0.03))) / 4
    assert off(few) < 0.8 * off(filled(probes=math.ceil(read)))


def test_default_probes_are_four_times_as_many() -> None:
    usual, most = (filled(min_weight, probes=None, length=640) for min_weight in (None, 0.01))
    assert most.probes == TIMES_BY_WEIGHT * usual.probes < most.cells
    assert filled(0.01).probes == MOST


def test_of_few_cells_those_that_matter_are_opened() -> None:
    """Four times the usual number would be all of them, which is no reason to open all."""
    usual, most = (filled(min_weight, probes=None) for min_weight in (None, 0.3))
    assert usual.probes < usual.cells == most.probes
    assert count_read(most, queries()) < count_read(usual, queries())


def test_a_guard_opens_more_cells() -> None:
    """It opens more than the least weight lets it, until the error is small."""
    query = queries(size=2.0)
    store = filled(0.9, probes=2, eps=0.01)
    store.attend(query)
    guard = store.guard
    assert guard is not None
    assert guard.factor > 1
    assert guard.error is not None
    assert guard.error <= 0.01
    lowest = [store._opening(256, 64, factor).lowest for factor in (1, 2, 4, 32)]
    assert lowest == [math.log(0.9), math.log(0.9 / 4), math.log(0.9 / 16), -math.inf]


def test_a_guard_says_what_is_read(caplog: pytest.LogCaptureFixture) -> None:
    """Not how much there may be, and nothing where that is little."""
    query = queries(size=2.0)
    store = filled(0.9, probes=16, eps=0.2)
    with caplog.at_level("WARNING", "nearfield"):
        store.attend(query)
    guard = store.guard
    assert guard is not None
    assert guard.factor == 2
    assert store.probes == 32
    assert 44 + store.opened_keys(query) < 0.25 * 300 < 44 + 32 * 4
    assert not caplog.records


def test_a_guard_goes_on_until_all_is_read() -> None:
    """As many cells as there are may be opened, and few of them have the least weight."""
    query = queries(size=0.3)
    store = filled(0.9, probes=None, eps=1e-6)
    found = store.attend(query)
    torch.testing.assert_close(found, sdpa(query, store.keys, store.values, enable_gqa=True))


@pytest.mark.parametrize("min_weight", [None, 0.02])
def test_opened_keys(min_weight: float | None) -> None:
    store, query = filled(min_weight), queries(size=0.7)
    before = store.state
    found = store.opened_keys(query)
    assert store.state is before
    if min_weight is None:  # in cells of mean size
        assert found == MOST * 4
    else:
        assert found == count_read(store, query)


@pytest.mark.parametrize("min_weight", [None, 0.02])
def test_a_head_that_is_not_finite_has_no_say(min_weight: float | None) -> None:
    """In what the other one of its group opens: that is what it would open by itself."""
    query = queries()
    query[:, ::2] = query[:, 1::2]
    expected = filled(min_weight).attend(query)
    query[:, ::2] = torch.nan
    found = filled(min_weight).attend(query)
    assert torch.equal(found[:, 1::2], expected[:, 1::2])
    assert bool(found[:, ::2].isnan().all())


def test_stores_that_are_changed() -> None:
    """Keys in CPU memory, entries of a batch, keys that are taken back."""
    query = queries()
    expected = filled(0.02).attend(query)
    assert torch.equal(filled(0.02, offload=True).attend(query), expected)
    chosen = filled(0.02)
    chosen.select(torch.tensor([1, 0, 1]))
    assert torch.equal(chosen.attend(query[[1, 0, 1]]), expected[[1, 0, 1]])
    longer = filled(0.02)
    longer.append(*(normal(2, 2, 200, 8, seed=seed) for seed in (3, 4)))
    longer.close()
    longer.crop(300)
    torch.testing.assert_close(longer.attend(query), expected)
    assert torch.equal(copy.deepcopy(filled(0.02)).attend(query), expected)


def test_several_rows_and_padding() -> None:
    counts = torch.ones(2, 300, dtype=torch.bool)
    counts[1, :70] = False
    stores = [CellStore(nf.Cells(probes=MOST, **SIZES), min_weight=0.02) for _ in range(2)]
    query = queries(rows=3)
    for store in stores:
        store.append(*(normal(2, 2, 300, 8, seed=seed) for seed in (1, 2)), counts)
    together = stores[0].attend(query)
    # Row by row, with the keys that each sees.
    key, value = (normal(2, 2, 300, 8, seed=seed) for seed in (1, 2))
    for row in range(3):
        store = CellStore(nf.Cells(probes=MOST, **SIZES), min_weight=0.02)
        stop = 298 + row
        store.append(key[:, :, :stop], value[:, :, :stop], counts[:, :stop])
        torch.testing.assert_close(together[:, :, row : row + 1], store.attend(query[:, :, row : row + 1]))


def test_later_chunks_open_the_usual_number() -> None:
    usual, most = filled(probes=None), filled(0.01, probes=None)
    assert most._chunk_sizes(state(most)) == usual._chunk_sizes(state(usual))


@pytest.mark.parametrize("bad", [0.0, 1.0, -1, "much", True])
def test_it_is_a_share(bad: object) -> None:
    with pytest.raises(ValueError, match="min_weight must be a number between 0 and 1"):
        CellStore(min_weight=bad)  # type: ignore[arg-type]


def test_an_index_has_no_cells() -> None:
    with pytest.raises(ValueError, match=r"min_weight=0.01 is for Cells\(...\) only"):
        hf.CellCache(nf.TopK(8), min_weight=0.01)


def test_a_cache_hands_it_on() -> None:
    cache = hf.CellCache(nf.Cells(), min_weight=0.01)
    cache.update(normal(1, 2, 20, 8), normal(1, 2, 20, 8, seed=1), 0)
    layer: Any = cache.layers[0]
    assert layer.store.min_weight == 0.01
    assert hf.cache.StoreOptions.of(layer.store).min_weight == 0.01


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("min_weight", [0.3, 0.05, 1e-6])
def test_the_kernels_are_the_step_in_torch(group: int, min_weight: float) -> None:
    pytest.importorskip("triton")
    from nearfield.cells.cache.decode import decode

    store = CellStore(nf.Cells(probes=MOST, **SIZES))
    key, value = (normal(2, 2, 300, 16, seed=seed).float().to(DEVICE) for seed in (1, 2))
    store.append(key, value)
    store.close()
    query = normal(2, 2 * group, 1, 16, seed=7).float().to(DEVICE)
    with backends.device_guard(DEVICE):
        found = decode(state(store), query.reshape(4, group, 16), 0.5, Opening(MOST, math.log(min_weight)))
    rows = scaled_queries(query, 2, 0.5)
    expected = cached_attention(state(store), rows, 299, 1, Opening(MOST, math.log(min_weight)))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    if min_weight > 0.1:
        assert not torch.allclose(found, cached_attention(state(store), rows, 299, 1, Opening(MOST)), atol=1e-3)
