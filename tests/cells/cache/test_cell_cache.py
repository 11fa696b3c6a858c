"""`CellStore`: exact attention with all cells opened, the engine with a span per segment with few; padding, crop, batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nearfield
from nearfield.cells import sizes as cells_sizes
from nearfield.cells.cache import attention as cache_attention
from nearfield.cells.cache.attention import Routed, route, scaled_queries
from nearfield.cells.cache.segments import PER_CELL, CacheTables
from nearfield.cells.cache.state import CacheState
from nearfield.cells.cache.store import CellStore
from nearfield.cells.partition import Partition, build_cells
from nearfield.hf.stored import StoredKeys
from nearfield.knn.store import IndexStore

BATCH, HEADS, GROUP, LENGTH, DIM, VALUE_DIM = 2, 2, 2, 150, 16, 12
STEPS = (37, 1, 1, 30, 9, 1, 71)
SIZES = {"segment": 16, "cell_size": 4, "sinks": 5, "window": 0}
ALL = nearfield.Cells(probes=10**6, **SIZES)
FEW = nearfield.Cells(probes=3, **SIZES)


def inputs(dtype: torch.dtype = torch.float32, length: int = LENGTH, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS * GROUP, DIM), (HEADS, DIM), (HEADS, VALUE_DIM))
    query, key, value = (torch.randn(BATCH, heads, length, dim, generator=generator) for heads, dim in shapes)
    return (2 * query).to(dtype), key.to(dtype), value.to(dtype)


def exact(query: Tensor, key: Tensor, value: Tensor, counts: Tensor | None = None) -> Tensor:
    seen = torch.ones(key.shape[2], key.shape[2], dtype=torch.bool).tril()[-query.shape[2] :]
    seen = seen[None, None] if counts is None else seen & counts[:, None, None]
    return F.scaled_dot_product_attention(query, key, value, seen, enable_gqa=True).nan_to_num(0.0)


def run(store: CellStore, data: tuple[Tensor, Tensor, Tensor], steps: Sequence[int] = STEPS, start: int = 0) -> Tensor:
    """Append and attend in steps of so many keys."""
    query, key, value = data
    outputs = []
    for step in steps:
        part = slice(start, start + step)
        store.append(key[:, :, part], value[:, :, part])
        outputs.append(store.attend(query[:, :, part]))
        start += step
    return torch.cat(outputs, 2)


def state(store: CellStore) -> CacheState:
    assert store.state is not None
    return store.state


# Attending.


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [0, 20, None])
def test_all_opened_is_exact(dtype: torch.dtype, window: int | None) -> None:
    data = inputs(dtype)
    output = run(CellStore(nearfield.Cells(probes=10**6, **SIZES | {"window": window})), data)
    truth = exact(*(x.double() for x in data))
    plain = (exact(*data) - truth).abs().max()
    assert output.dtype == dtype
    assert (output - truth).abs().max() <= 2 * plain + (1e-14 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("method", [FEW, nearfield.Cells(probes=2, segment=32, cell_size=8, sinks=0, window=32)])
@pytest.mark.parametrize("steps", [STEPS, (LENGTH,), (1,) * LENGTH], ids=["mixed", "at once", "one by one"])
def test_few_opened_is_the_engine_with_a_span_per_segment(
    method: nearfield.Cells, steps: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # One query head for each head of keys: in the engine each query opens cells of its own, here a group opens them together.
    query, key, value = inputs(torch.float64)
    data = query[:, ::GROUP], key, value
    output = run(CellStore(method), data, steps)
    monkeypatch.setattr(cells_sizes, "MOST_SPAN_LEVELS", 1)
    theirs = nearfield.attention(*data, is_causal=True, method=method, backend="reference")
    assert (output - theirs).abs().max() < 1e-12
    assert (output - exact(*data)).abs().max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_rows_at_once_are_rows_one_by_one(dtype: torch.dtype) -> None:
    """Also if a group opens cells together, and if the open end is longer than the keys that stand for it in that choice."""
    data = inputs(dtype, length=400)
    method = nearfield.Cells(probes=3, segment=100, cell_size=5, sinks=4, window=8)
    first = run(CellStore(method), data, (1,) * 400)
    for steps in ((400,), (150, 1, 249)):
        torch.testing.assert_close(run(CellStore(method), data, steps), first)


def test_the_latest_keys_stand_for_the_open_end_where_cells_are_chosen() -> None:
    """The open end has 90 keys. Two queries attend to all of them, and the latest 64 count when they choose cells."""
    generator = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 1, 1, 190, DIM, generator=generator, dtype=torch.float64)
    query = torch.randn(1, 2, 1, DIM, generator=generator, dtype=torch.float64)
    opened = []
    for place in (100, 120, 130, 189):
        own = key.clone()
        own[0, 0, place] = 8 * query[0, 0, 0]  # The first query has nearly all its weight there.
        store = CellStore(nearfield.Cells(probes=3, segment=100, cell_size=5, sinks=0, window=0))
        store.append(own, value)
        store.close()
        queries = scaled_queries(query, 1, 1.0)
        near = (queries @ own[0].transpose(1, 2))[..., 100:]
        for seen, name in ((near[..., -64:].logsumexp(2), "latest"), (near.logsumexp(2), "all")):
            opened.append((place, name, set(route(state(store).tables, queries, 1, 3, seen).opened[0].tolist())))
        assert torch.allclose(near_lse_of_a_step(store, query), near[..., -64:].logsumexp(2))
    by_place = {(place, name): cells for place, name, cells in opened}
    assert by_place[100, "latest"] != by_place[100, "all"]
    assert by_place[130, "latest"] == by_place[130, "all"]


def near_lse_of_a_step(store: CellStore, query: Tensor) -> Tensor:
    """What `route` is told about the keys that a query reads anyway."""
    seen: list[Tensor] = []

    def recorded(tables: CacheTables, queries: Tensor, rows: int, probes: int, near_lse: Tensor | None, *rest: float) -> Routed:
        assert near_lse is not None
        seen.append(near_lse)
        return route(tables, queries, rows, probes, near_lse, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache_attention, "route", recorded)
        store.attend(query, 1.0)
    return seen[0]


def test_one_step_by_hand() -> None:
    """Two query heads open cells together: those in which one of them may have the largest share of its weights."""
    query, key, value = inputs(torch.float64)
    store = CellStore(FEW)
    store.append(key[:, :, :40], value[:, :, :40])
    entry, head = 0, 1
    output = store.attend(query[:, :, 39:40], scale=0.3)[entry, GROUP * head : GROUP * head + GROUP, 0]
    q, k, v = 0.3 * query[entry, GROUP * head : GROUP * head + GROUP, 39], key[entry, head, :40], value[entry, head, :40]
    members, means, scores, masses = [], [], [], []
    deviations = torch.zeros(VALUE_DIM, DIM, dtype=torch.float64)
    for first in (0, 16):
        cell_of = build_cells(nearfield.KMeans(), k[None, first : first + 16], 4)[0]
        for cell in range(4):
            own = (cell_of == cell).nonzero()[:, 0] + first
            own = own[own >= 5]
            if len(own) == 0:
                continue
            mu, mean = k[own].mean(0), v[own].mean(0)
            u = (q.square() * (k[own] - mu).square().mean(0)).sum(1)
            members.append(own)
            means.append(mean)
            scores.append(q @ mu + 3 * u.sqrt())
            masses.append(len(own) * (q @ mu).exp() * (1 + u / 4) ** 2)
            deviations += (v[own] - mean).T @ (k[own] - mu)
    pooled = sum(len(own) for own in members)
    assert pooled == 32 - 5
    near = torch.cat([torch.arange(5), torch.arange(32, 40)])
    all_of_it = (q @ k[near].T).exp().sum(1) + sum(masses)
    share = [float((score.exp() / all_of_it).max()) for score in scores]
    order = sorted(range(len(share)), key=lambda cell: -share[cell])
    near = torch.cat([near, *(members[cell] for cell in order[:3])])
    mass = (q @ k[near].T).exp()
    numerator, total = mass @ v[near], mass.sum(1, keepdim=True)
    for cell in order[3:]:
        weight = masses[cell][:, None]
        numerator, total = numerator + weight * (means[cell] + q @ (deviations / pooled).T), total + weight
    assert torch.allclose(output, numerator / total, rtol=1e-10)
    apart = [sorted(range(len(share)), key=lambda cell: -float(scores[cell][i]))[:3] for i in range(GROUP)]
    assert set(apart[1]) != set(apart[0]) != set(order[:3])  # Else the choice would be that of the first query.


def test_reads_only_what_it_opens() -> None:
    query, key, value = inputs()
    store = CellStore(FEW)
    store.append(key, value)
    first = store.attend(query[:, :, -1:])
    state(store).values.filled[:, :, : store.closed] = torch.nan
    changed = store.attend(query[:, :, -1:])
    assert changed.isnan().any()  # from an opened cell
    # What is not opened is not read: NaN there changes nothing.
    store = CellStore(nearfield.Cells(probes=1, segment=16, cell_size=4, sinks=0, window=0))
    store.append(key, value)
    first = store.attend(query[:1].expand(2, -1, -1, -1)[:, :, -1:])
    own = state(store)
    read = torch.zeros(BATCH, HEADS, LENGTH, dtype=torch.bool)
    read[:, :, store.closed :] = True
    calls = []
    gather = own.gather

    def recorded(place: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        calls.append(place)
        return gather(place, dtype)

    own.gather = recorded  # type: ignore[method-assign]
    store.attend(query[:1].expand(2, -1, -1, -1)[:, :, -1:])
    for place in calls:
        read.view(BATCH * HEADS, -1).scatter_(1, place, True)
    assert read.sum() <= BATCH * HEADS * (GROUP * 8 * 4 + LENGTH - store.closed)
    for buffer in (own.keys, own.values):
        buffer.filled.masked_fill_(~read[..., None], torch.nan)
    assert torch.equal(store.attend(query[:1].expand(2, -1, -1, -1)[:, :, -1:]), first)


@pytest.mark.parametrize("different", [1, 3])
def test_empty_cells(different: int) -> None:
    query, key, value = inputs()
    key = key[:, :, torch.arange(LENGTH) % different]  # fewer keys than cells
    store = CellStore(ALL)
    assert torch.allclose(run(store, (query, key, value)), exact(query, key, value), atol=1e-5)
    sizes = state(store).tables.size.filled
    assert (sizes == 0).any()
    assert (sizes[:, :, :4].sum(2) == 16 - 5).all()
    assert run(CellStore(FEW), (query, 1e4 * key, value)).isfinite().all()


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = inputs(torch.float64)
    whole = run(CellStore(FEW), data)
    monkeypatch.setattr("nearfield.cells.cache.store.BLOCK_BYTES", 1)
    assert torch.allclose(run(CellStore(FEW), data), whole, rtol=1e-12)


@pytest.mark.parametrize("rows", [1, 2, 17])
def test_kernels_serve_the_latest_row(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no row before it, since they see all stored keys. Small blocks make all rows come one by one."""
    pytest.importorskip("triton")
    query, key, value = inputs()
    outputs = []
    for runs in (False, True):
        store = CellStore(FEW)
        store.append(key[:, :, :-rows], value[:, :, :-rows])
        store.close()
        store.append(key[:, :, -rows:], value[:, :, -rows:])
        monkeypatch.setattr("nearfield.cells.cache.store.BLOCK_BYTES", 1)
        monkeypatch.setattr("nearfield.kernels.backends.runs_triton", lambda device, runs=runs: runs)
        outputs.append(store.attend(query[:, :, -rows:]))  # not contiguous
    torch.testing.assert_close(*outputs, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("partition", [nearfield.Blocks(), nearfield.HashBuckets()])
def test_other_partitions(partition: nearfield.Blocks | nearfield.HashBuckets) -> None:
    data = inputs()
    output = run(CellStore(nearfield.Cells(probes=10**6, partition=partition, **SIZES)), data)
    assert torch.allclose(output, exact(*data), atol=1e-5)


class OwnPartition:
    """A partition that the library does not know, with the cells of one that it knows, as integers of another dtype."""

    def __init__(self, inner: Partition) -> None:
        self.inner = inner
        self.calls: list[tuple[int, int]] = []
        """keys and cells"""

    def build(self, keys: Tensor, cells: int) -> Tensor:
        self.calls.append((keys.shape[1], cells))
        return self.inner.build(keys, cells).int()


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("inner", [nearfield.KMeans(seed=3), nearfield.Blocks()])
def test_a_partition_of_the_user(inner: Partition, padded: bool) -> None:
    """Bit for bit what a built-in partition with the same cells gives: several rows, a step, after a crop, with padding."""
    query, key, value = inputs(seed=4)
    counts = padding() if padded else None
    own = OwnPartition(inner)
    stores = [CellStore(nearfield.Cells(probes=3, partition=x, **SIZES)) for x in (inner, own)]

    def both_attend(part: slice) -> None:
        for store in stores:
            store.append(key[:, :, part], value[:, :, part], None if counts is None else counts[:, part])
        found, expected = (store.attend(query[:, :, part]) for store in stores)
        assert torch.equal(found, expected)

    for part in (slice(0, 60), slice(60, 61), slice(61, 100)):
        both_attend(part)
    for store in stores:
        store.crop(70)
    both_attend(slice(70, 71))
    both_attend(slice(71, LENGTH))
    tables = [state(store).tables for store in stores]
    for name in PER_CELL:
        assert torch.equal(*(getattr(x, name).filled for x in tables))
    assert torch.equal(*(state(store).keys.filled for store in stores))
    assert (16, 4) in own.calls
    # The first entry has padding of two segments and three keys: a head of the third segment has 13 keys and fewer cells.
    assert ((13, 3) in own.calls) == padded


def test_a_segment_that_could_not_be_closed_is_closed_by_the_next_step() -> None:
    """A partition that fails once, as one may that runs out of memory: nothing of the failed attempt is left."""

    class FailsOnce:
        failed = False

        def build(self, keys: Tensor, cells: int) -> Tensor:
            if not self.failed:
                self.failed = True
                raise MemoryError("once")
            return nearfield.KMeans().build(keys, cells)

    query, key, value = inputs()
    store = CellStore(nearfield.Cells(segment=32, cell_size=4, probes=10**6, sinks=5, window=0, partition=FailsOnce()))
    store.append(key, value)
    with pytest.raises(MemoryError, match="once"):
        store.attend(query[:, :, -1:])
    found = store.attend(query[:, :, -1:])
    torch.testing.assert_close(found, exact(query, key, value)[:, :, -1:], atol=1e-5, rtol=1e-5)


def test_default_sizes() -> None:
    query, key, value = inputs(length=8301)
    for length, closed, cells in ((8206, 0, 0), (8208, 8192, 512), (8300, 8272, 514)):
        store = CellStore()
        store.append(key[:, :, :length], value[:, :, :length])
        store.close()
        assert (store.length, store.closed, store.cells, store.probes) == (length, closed, cells, 20)
        store.append(key[:, :, length : length + 1], value[:, :, length : length + 1])
        given = query[:, :, length : length + 1], key[:, :, : length + 1], value[:, :, : length + 1]
        exact = F.scaled_dot_product_attention(*given, enable_gqa=True)
        assert torch.allclose(store.attend(given[0]), exact, atol=1e-6) == (closed == 0), "exact until keys are grouped"


@pytest.mark.parametrize("group_from", [0, 1024, 2000])
def test_from_how_many_keys_on_they_are_grouped(group_from: int) -> None:
    _, key, value = inputs(length=3100)
    store = CellStore(group_from=group_from)
    first = max(1024, group_from)
    for end, closed in ((first + 15, 0), (first + 16, first), (3100, 3072)):
        store.append(key[:, :, store.length : end], value[:, :, store.length : end])
        store.close()
        assert store.closed == closed
    with pytest.raises(ValueError, match="group_from must be"):
        CellStore(group_from=-1)
    assert CellStore(nearfield.Cells(segment=64), group_from=group_from).sizes.length(0) == 64


def test_closed_cells_never_change() -> None:
    data = inputs()
    store = CellStore(FEW)
    run(store, data, (40,))
    tables = copy.deepcopy(state(store).tables)
    keys = state(store).keys.filled[:, :, : store.closed].clone()
    assert len(tables) == 8
    run(store, inputs(seed=1), (1, 1, 50), start=40)
    assert len(state(store).tables) == 20
    for name in ("start", "size", "centroid", "variance", "value"):
        assert torch.equal(getattr(state(store).tables, name).filled[:, :, :8], getattr(tables, name).filled)
    assert torch.equal(state(store).keys.filled[:, :, :32], keys)


@pytest.mark.parametrize("seed", range(4))
def test_later_keys_change_no_earlier_row(seed: int) -> None:
    """Of the same segment, products may be rounded otherwise: how many rows are multiplied together depends on later ones."""
    query, key, value = inputs(seed=seed)
    before = run(CellStore(FEW), (query, key, value), (LENGTH,))
    key, value = key.clone(), value.clone()
    key[:, :, 70:], value[:, :, 70:] = 9.0, 100.0
    after = run(CellStore(FEW), (query, key, value), (LENGTH,))
    assert torch.equal(after[:, :, :64], before[:, :, :64])
    torch.testing.assert_close(after[:, :, 64:70], before[:, :, 64:70], atol=1e-6, rtol=1e-6)
    value[:, :, 70:] = torch.nan
    after = run(CellStore(FEW), (query, key, value), (LENGTH,))
    assert torch.allclose(after[:, :, :70], before[:, :, :70], atol=1e-6)
    assert after[:, :, 70:].isnan().all()


# Padding.


def padding(length: int = LENGTH) -> Tensor:
    """Left padding: two segments and a bit in the first entry, none in the second."""
    counts = torch.ones(BATCH, length, dtype=torch.bool)
    counts[0, :35] = False
    return counts


def run_padded(method: nearfield.Cells, data: tuple[Tensor, Tensor, Tensor], steps: Sequence[int] = (60, 1, 39, 50)) -> Tensor:
    counts = padding()
    store, outputs, start = CellStore(method), [], 0
    for step in steps:
        part = slice(start, start + step)
        start += step
        store.append(data[1][:, :, part], data[2][:, :, part])
        store.mark(counts[:, :start])
        outputs.append(store.attend(data[0][:, :, part]))
    return torch.cat(outputs, 2)


def test_padding_with_all_opened_is_exact() -> None:
    data = inputs()
    assert torch.allclose(run_padded(ALL, data), exact(*data, padding()), atol=1e-5)


def test_padding_may_be_anything() -> None:
    query, key, value = inputs()
    clean = run_padded(FEW, (query, key, value))
    key, value = key.clone(), value.clone()
    key[0, :, :35], value[0, :, :35] = 1e4, torch.nan
    assert torch.equal(run_padded(FEW, (query, key, value)), clean)
    alone = run(CellStore(FEW), tuple(x[1:] for x in (query, key, value)), (60, 1, 39, 50))  # type: ignore[arg-type]
    assert torch.allclose(clean[1:], alone, atol=1e-5)


def test_padding_of_whole_segments_is_as_if_it_were_not_there() -> None:
    data = inputs()
    counts = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    counts[0, :32] = False
    store = CellStore(FEW)
    store.append(data[1], data[2], counts)
    padded = store.attend(data[0][:, :, -1:])[0]
    alone = run(CellStore(FEW), tuple(x[:1, :, 32:] for x in data), (LENGTH - 32,))  # type: ignore[arg-type]
    assert torch.allclose(padded, alone[0, :, -1:], atol=1e-5)
    assert state(store).sinks.tolist() == [[32, 33, 34, 35, 36], [0, 1, 2, 3, 4]]


def test_a_segment_with_padding_has_fewer_cells() -> None:
    _, key, value = inputs()
    counts = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    counts[0, :8] = False
    store = CellStore(nearfield.Cells(probes=3, **SIZES | {"sinks": 0}))
    store.append(key, value, counts)
    store.close()
    used = state(store).tables.size.filled[:, :, :4]
    assert ((used > 0).sum(2) == torch.tensor([[2], [4]])).all()
    assert (used.sum(2) == torch.tensor([[8.0], [16.0]])).all()


def test_padding_stays_as_it_is() -> None:
    query, key, value = inputs()
    store = CellStore(FEW)
    store.append(key, value, padding())
    store.attend(query[:, :, -1:])
    store.mark(padding())
    with pytest.raises(ValueError, match="no sliding window"):
        store.mark(None)
    other = CellStore(FEW)
    other.append(key, value)
    other.attend(query[:, :, -1:])
    with pytest.raises(ValueError, match="no sliding window"):
        other.mark(padding())
    with pytest.raises(ValueError, match=r"counts must be boolean and \[2, 150\]"):
        store.mark(padding(20))


# Crop, and batches.


@pytest.mark.parametrize("kept", [0, 3, 16, 31, 32, 33, 90, 96])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("window", [0, 16])
def test_crop_is_as_if_nothing_had_come(kept: int, padded: bool, window: int) -> None:
    query, key, value = inputs(torch.float64)
    method = nearfield.Cells(probes=3, **SIZES | {"window": window})
    counts = padding() if padded else torch.ones(BATCH, LENGTH, dtype=torch.bool)
    stores = [CellStore(method), CellStore(method)]
    stores[0].append(key[:, :, :kept], value[:, :, :kept], counts[:, :kept])
    if kept:
        stores[0].attend(query[:, :, :kept])
    stores[1].append(key[:, :, :kept], value[:, :, :kept], counts[:, :kept])
    more = inputs(torch.float64, seed=1)
    stores[1].append(more[1][:, :, : 97 - kept], more[2][:, :, : 97 - kept])
    stores[1].close()
    assert stores[1].closed == 96 - window
    stores[1].crop(kept)
    assert stores[1].length == kept
    outputs = []
    for store in stores:
        rows = 20 if kept > 35 or not padded else 40
        part = slice(kept, kept + rows)
        store.append(key[:, :, part], value[:, :, part], counts[:, part])
        outputs.append(store.attend(query[:, :, part]))
        assert torch.equal(store.keys, key[:, :, : part.stop] * counts[:, None, : part.stop, None])  # type: ignore[arg-type]
    assert torch.allclose(*outputs, rtol=1e-10)
    assert torch.equal(state(stores[0]).sinks, state(stores[1]).sinks)
    assert torch.allclose(state(stores[0]).tables.pooled, state(stores[1]).tables.pooled)


def test_select_and_repeat() -> None:
    data = inputs()
    store = CellStore(FEW)
    run(store, data, (60,))
    store.repeat(2)
    store.select(torch.tensor([3, 0, 2]))
    picked = [1, 0, 1]
    ours = run(store, tuple(x[picked] for x in data), (1, 30, 1), start=60)  # type: ignore[arg-type]
    other = CellStore(FEW)
    run(other, data, (60,))
    assert torch.allclose(ours, run(other, data, (1, 30, 1), start=60)[picked], atol=1e-6)
    store.select(torch.tensor([False, True, False]))
    assert store.keys is not None
    assert torch.equal(store.keys, data[1][:1, :, :92])


def test_memory_grows_by_a_quarter_at_a_time() -> None:
    _, key, value = inputs(length=400)
    store = CellStore(FEW)
    places = set()
    for i in range(400):
        store.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
        store.close()
        places.add(state(store).keys.storage.data_ptr())
    assert len(places) < 35
    sizes = store.nbytes
    assert sizes["keys"] <= 1.25 * key.nbytes
    assert sizes["values"] <= 1.25 * value.nbytes
    # 3 numbers per cell, and 2 dim + value_dim, in float32, for 4 keys each; and the covariance.
    most = 1.3 * BATCH * HEADS * 100 * (12 + 8 * DIM + 4 * VALUE_DIM) + BATCH * HEADS * 4 * DIM * VALUE_DIM
    assert sizes["moments"] <= most
    assert sizes["order"] <= 1.3 * 4 * BATCH * HEADS * 400


# Audit.


def test_audit_by_hand() -> None:
    query, key, value = inputs()
    store = CellStore(FEW, audit=True)
    store.append(key, value, padding())
    output = store.attend(query[:, :, -3:])
    (error,) = store.errors
    truth = exact(query[:, :, -3:], key, value, padding())
    off = (output - truth).norm(dim=-1)
    square = (value.square().sum(-1) * padding()[:, None]).sum(-1) / padding().sum(-1)[:, None]
    norm = square.sqrt().repeat_interleave(GROUP, 1)[..., None]
    assert error.first == LENGTH - 3
    assert "relative error" in str(error)
    assert torch.allclose(error.relative, off / truth.norm(dim=-1), rtol=1e-3)
    assert torch.allclose(error.additive, off / norm, rtol=1e-3)
    store.audit = False
    store.attend(query[:, :, -1:])
    assert len(store.errors) == 1


# Errors.


def test_bad_methods() -> None:
    with pytest.raises(TypeError, match=r"attends by Cells\(...\), got Exact"):
        CellStore(nearfield.Exact())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="draws no samples"):
        CellStore(nearfield.Cells(samples=4))
    with pytest.raises(ValueError, match="sinks must be at most 65536, got 1099511627776"):
        CellStore(nearfield.Cells(sinks=2**40))


def test_more_sinks_than_keys_take_no_more_memory_than_keys() -> None:
    query, key, value = inputs()
    store = CellStore(nearfield.Cells(segment=40, cell_size=4, probes=1, sinks=60_000, window=0))
    store.append(key, value)
    store.close()
    found = store.attend(query[:, :, -1:])
    assert store.closed >= 120
    torch.testing.assert_close(found, exact(query[:, :, -1:], key, value))
    assert store.state is not None
    assert store.state.sink_rows(key.dtype)[0].shape[1] == store.closed


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", [lambda: CellStore(FEW), lambda: IndexStore(nearfield.TopK(4))], ids=["cells", "index"])
def test_odd_arguments(make: Callable[[], CellStore | IndexStore]) -> None:
    """Each gets an error that names it, and the store is as it was."""
    query, key, value = inputs()
    store, seen, last = make(), torch.ones(BATCH, LENGTH, dtype=torch.bool), query[:, :, -1:]
    jagged = torch.nested.nested_tensor([seen[0], seen[1, :9]])
    not_boolean = r"counts must be boolean and \[2, 150\], got {} and \(2, 150\); .* pass counts.bool\(\)"
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (TypeError, "key must be a dense tensor", lambda: store.append(key.to_sparse(), value)),
        (ValueError, "value is on the device meta", lambda: store.append(key, value.to("meta"))),
        (ValueError, "at least one head", lambda: store.append(key[:, :0], value[:, :0])),
        (ValueError, r"at least one column, got \(2, 2, 150, 0\)", lambda: store.append(key[..., :0], value)),
        (ValueError, "keys must be an integer of at least 0, got -1", lambda: store.reserve(-1)),
        (ValueError, "keys must be at most", lambda: store.reserve(2**70)),
        (ValueError, "times must be a positive integer, got 0", lambda: store.repeat(0)),
        (ValueError, "length must be between", lambda: store.crop(2**70)),
        (ValueError, "length must be an integer, got 30.5", lambda: store.crop(30.5)),  # type: ignore[arg-type]
        (ValueError, "length must be an integer, got True", lambda: store.crop(True)),
        (ValueError, "length must be an integer, got '3'", lambda: store.crop("3")),  # type: ignore[arg-type]
        (TypeError, "counts must be a torch.Tensor, got list", lambda: store.mark(seen.tolist())),
        (ValueError, not_boolean.format("torch.int64"), lambda: store.mark(seen.long())),
        (ValueError, not_boolean.format("torch.float32"), lambda: store.mark(seen.float())),
        (TypeError, "counts must be a dense tensor", lambda: store.mark(seen.to_sparse())),
        (TypeError, "counts is a nested tensor", lambda: store.mark(jagged)),
        (ValueError, "counts is on the device meta", lambda: store.mark(seen.to("meta"))),
        (ValueError, r"counts must be boolean and \[2, 150\], got torch.bool and \(150,\)", lambda: store.mark(seen[0])),
        (TypeError, "counts must be a torch.Tensor, got list", lambda: store.append(key, value, seen.tolist())),
        (ValueError, not_boolean.format("torch.int64"), lambda: store.append(key, value, seen.long())),
        (TypeError, "counts must be a dense tensor", lambda: store.append(key, value, seen.to_sparse())),
        (ValueError, "counts is on the device meta", lambda: store.append(key, value, seen.to("meta"))),
        (TypeError, "key must be a torch.Tensor, got list", lambda: store.append(key.tolist(), value)),
        (TypeError, "one floating dtype", lambda: store.append(*(x.to(torch.float8_e4m3fn) for x in (key, value)))),
        (ValueError, r"mask \[2\], got torch.bool and \(3,\)", lambda: store.select(torch.tensor([True, False, True]))),
        (ValueError, r"mask \[2\], got torch.bool and \(1,\)", lambda: store.select(torch.tensor([True]))),
        (ValueError, r"entries must be integers .* got torch.float32 and \(2,\)", lambda: store.select(torch.ones(2))),
        (ValueError, r"entries must be integers .* got torch.int64 and \(1, 2\)", lambda: store.select(torch.tensor([[0, 1]]))),
        (ValueError, "entries is on the device meta", lambda: store.select(torch.zeros(2, device="meta"))),
        (TypeError, "entries must be numbers of batch entries, got 'ab'", lambda: store.select("ab")),  # type: ignore[arg-type]
        (TypeError, "query must be a tensor of floating", lambda: store.attend(query[:, :, -1:].long())),
        (ValueError, "scale must be a finite number", lambda: store.attend(query[:, :, -1:], float("nan"))),
        (ValueError, r"scale=1e\+39 is infinite", lambda: store.attend(query[:, :, -1:].float(), 1e39)),
        (ValueError, "scale=-1[0-9]* is infinite", lambda: store.attend(last, -(10**39))),
        (TypeError, "query must be a torch.Tensor, got list", lambda: store.attend(last.tolist())),
        (TypeError, "query must be a dense tensor", lambda: store.attend(last.to_sparse())),
        (ValueError, "query is on the device meta", lambda: store.attend(last.to("meta"))),
        (TypeError, r"query is torch.float64 .* pass query.to\('cpu', torch.float32\)", lambda: store.attend(last.double())),
    ]
    store.append(key, value)
    before, wanted = store.length, make()
    wanted.append(key, value)
    for kind, message, call in refused:
        with pytest.raises(kind, match=message):
            call()
    assert type(store.length) is int
    assert store.length == before
    assert torch.equal(store.attend(query[:, :, -1:]), wanted.attend(query[:, :, -1:]))


@pytest.mark.parametrize("make", [lambda: CellStore(ALL), lambda: IndexStore(nearfield.TopK(999))], ids=["cells", "index"])
@pytest.mark.parametrize("scale", [2**70, -(2**70), 2, 0.5, 3.0])
def test_scales_of_any_kind(make: Callable[[], CellStore | IndexStore], scale: float) -> None:
    """As in `nearfield.attention`."""
    query, key, value = inputs()
    store = make()
    store.append(key, value)
    expected = nearfield.attention(query[:, :, -1:], key, value, scale=scale, enable_gqa=True, method=nearfield.Exact())
    torch.testing.assert_close(store.attend(query[:, :, -1:], scale), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("make", [lambda: CellStore(ALL), lambda: IndexStore(nearfield.TopK(999))], ids=["cells", "index"])
def test_queries_of_half_precision_may_come_to_other_keys(make: Callable[[], CellStore | IndexStore], dtype: torch.dtype) -> None:
    """Arithmetic is in float32 for both."""
    query, key, value = inputs()
    store = make()
    store.append(key, value)
    found, wanted = (store.attend(x) for x in (query[:, :, -1:].to(dtype), query[:, :, -1:].to(dtype).float()))
    assert found.dtype == dtype
    assert torch.equal(found, wanted.to(dtype))


@pytest.mark.parametrize("make", [lambda: CellStore(FEW), lambda: IndexStore(nearfield.TopK(4))], ids=["cells", "index"])
def test_entries_of_any_kind(make: Callable[[], CellStore | IndexStore]) -> None:
    _, key, value = inputs()
    for entries in (torch.tensor([1], dtype=torch.int32), [1], [False, True], torch.tensor([1], dtype=torch.uint8)):
        store = make()
        store.append(key, value)
        store.select(entries)  # type: ignore[arg-type]
        assert torch.equal(store.keys, key[1:])  # type: ignore[arg-type]
    store.select([])  # type: ignore[arg-type]
    assert store.entries == 0


@pytest.mark.gpu
@pytest.mark.parametrize("make", [lambda: CellStore(FEW), lambda: IndexStore(nearfield.TopK(4))], ids=["cells", "index"])
def test_queries_on_a_gpu_are_not_for_keys_on_a_cpu(make: Callable[[], CellStore | IndexStore]) -> None:
    query, key, value = inputs()
    store = make()
    store.append(key, value)
    with pytest.raises(TypeError, match=r"query is torch.float32 on cuda:0, but the store holds torch.float32 on cpu; pass"):
        store.attend(query[:, :, -1:].cuda())


@pytest.mark.parametrize("make", [lambda: CellStore(FEW), lambda: IndexStore(nearfield.TopK(4))], ids=["cells", "index"])
@pytest.mark.parametrize("closed", [False, True])
def test_a_batch_that_all_have_left(make: Callable[[], CellStore | IndexStore], closed: bool) -> None:
    query, key, value = inputs()
    store = make()
    store.append(key, value)
    if closed:
        store.close()
    store.select(torch.tensor([], dtype=torch.int64))
    assert (store.entries, store.length) == (0, LENGTH)
    for rows in (1, 3):
        assert store.attend(query[:0, :, -rows:]).shape == (0, query.shape[1], rows, value.shape[3])
    store.close()
    store.append(key[:0], value[:0])
    store.crop(100)
    assert store.attend(query[:0, :, -1:]).shape[0] == 0


def test_lengths_are_integers_before_the_first_key() -> None:
    for store in (CellStore(FEW), IndexStore()):
        with pytest.raises(ValueError, match="length must be an integer, got False"):
            store.crop(False)


def test_bad_inputs() -> None:
    query, key, value = inputs()
    store = CellStore(FEW)
    with pytest.raises(ValueError, match="nothing is stored yet"):
        store.attend(query)
    with pytest.raises(ValueError, match=r"got \(2, 2, 150, 16\) and \(2, 2, 10, 12\)"):
        store.append(key, value[:, :, :10])
    with pytest.raises(TypeError, match="one floating dtype"):
        store.append(key, value.double())
    with pytest.raises(ValueError, match="no gradients"):
        store.append(key.clone().requires_grad_(), value)
    with pytest.raises(ValueError, match=r"counts must be boolean and \[2, 150\]"):
        store.append(key, value, torch.ones(2, 150))
    store.append(key, value)
    with pytest.raises(TypeError, match=r"key is torch.float64 on cpu, but the store holds torch.float32"):
        store.append(key.double(), value.double())
    with pytest.raises(ValueError, match=r"key must be \[2, 2, new, 16\]"):
        store.append(key[:1], value[:1])
    with pytest.raises(ValueError, match="a multiple of 2"):
        store.attend(query[:, :3])
    with pytest.raises(ValueError, match="151 queries for 150 keys"):
        store.attend(torch.cat([query, query[:, :, :1]], 2))
    with pytest.raises(ValueError, match="between 0 and 150"):
        store.crop(151)
    store.close()
    with pytest.raises(ValueError, match="position 140 comes too late"):
        store.attend(query[:, :, 140:])


def test_handles_have_no_numbers() -> None:
    _, key, value = inputs()
    store = CellStore(FEW)
    store.append(key, value)
    handle = StoredKeys(store, key[:, :, -1:])
    assert (handle.shape, handle.dtype, handle.device, handle.dim(), handle.size(2)) == (key.shape, key.dtype, key.device, 4, 150)
    assert "StoredKeys(shape=(2, 2, 150, 16)" in repr(handle)
    for use in (lambda: handle + 1, lambda: handle[:, :1], lambda: handle.transpose(1, 2), lambda: F.softmax(handle, -1)):
        with pytest.raises(RuntimeError, match="set_attn_implementation"):
            use()
    with pytest.raises(RuntimeError, match="set_attn_implementation"):
        torch.ops.aten.mm(handle, key)
