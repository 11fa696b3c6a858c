"""`IndexStore`: what `nearfield.attention` computes for the latest rows, with an index that grows; padding, crop, batches."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from index_contract import clustered
from laws import seeded
from own_indices import OwnIndex
from torch import Tensor

import nearfield as nf
from nearfield.knn import store as stores
from nearfield.knn.index import prefixes
from nearfield.knn.store import IndexStore

BATCH, HEADS, GROUP, LENGTH, DIM, VALUE_DIM = 2, 2, 2, 150, 16, 12
STEPS = (37, 1, 1, 30, 9, 1, 71)
EVERYTHING = nf.KMeansIndex(probes=10**6, iterations=2)
"""It opens all cells, so it finds what `ExactIndex` finds, but learns, takes in and forgets on the way."""
CELLS = nf.CellIndex(cell_size=8, probes=10**6, segment=16)
INDICES = {"exact": nf.ExactIndex(), "kmeans": EVERYTHING, "cells": CELLS, "own": OwnIndex()}

Data = tuple[Tensor, Tensor, Tensor]


@pytest.fixture(autouse=True)
def small_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few keys are enough to see an index take some in."""
    monkeypatch.setattr(prefixes, "LEAST_REST", 4)


def inputs(dtype: torch.dtype = torch.float64, length: int = LENGTH, seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((HEADS * GROUP, DIM), (HEADS, DIM), (HEADS, VALUE_DIM))
    query, key, value = (torch.randn(BATCH, heads, length, dim, generator=generator) for heads, dim in shapes)
    return (2 * query).to(dtype), key.to(dtype), value.to(dtype)


def run(store: IndexStore, data: Data, steps: Sequence[int] = STEPS, start: int = 0, counts: Tensor | None = None) -> Tensor:
    """Append and attend in steps of so many keys."""
    query, key, value = data
    outputs = []
    for step in steps:
        part = slice(start, start + step)
        store.append(key[:, :, part], value[:, :, part], None if counts is None else counts[:, part])
        outputs.append(store.attend(query[:, :, part]))
        start += step
    return torch.cat(outputs, 2)


def by_hand(data: Data, k: int | None, counts: Tensor | None = None) -> Tensor:
    """Row i of an entry attends to the k best of the keys up to i that count; k=None: to ceil(sqrt) of their number."""
    query, key, value = data
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    logits = query @ key.mT / math.sqrt(query.shape[3])
    length = key.shape[2]
    seen = torch.ones(length, length, dtype=torch.bool).tril().expand(len(query), 1, -1, -1)
    seen = seen if counts is None else seen & counts[:, None, None]
    logits = logits.masked_fill(~seen, -torch.inf)
    number = seen.sum(-1).expand(logits.shape[:3])
    wanted = number.double().sqrt().ceil().long() if k is None else number.clamp(max=k)
    ranks = logits.argsort(-1, descending=True).argsort(-1)
    return logits.masked_fill(ranks >= wanted[..., None], -torch.inf).softmax(-1).nan_to_num(0.0) @ value


def padding(length: int = LENGTH) -> Tensor:
    """The first entry has 20 keys of padding on the left, and one more inside."""
    counts = torch.ones(BATCH, length, dtype=torch.bool)
    counts[0, :20] = counts[0, 50] = False
    return counts


# Attending.


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("steps", [STEPS, (LENGTH,), (110, *(1,) * 40)], ids=["mixed", "at once", "one by one"])
@pytest.mark.parametrize("k", [None, 9])
def test_rows_attend_to_their_best_keys(index: Any, steps: Sequence[int], k: int | None) -> None:
    data = inputs()
    output = run(IndexStore(nf.TopK(k, index=index)), data, steps)
    assert (output - by_hand(data, k)).abs().max() < 1e-12
    query, key, value = data
    last = nf.attention(query[:, :, -1:], key, value, enable_gqa=True, method=nf.TopK(k))
    assert (output[:, :, -1:] - last).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_all_keys_are_exact_attention(dtype: torch.dtype) -> None:
    data = inputs(dtype)
    output = run(IndexStore(nf.TopK(10**6, tail=4, index=EVERYTHING)), data)
    truth = F.scaled_dot_product_attention(*(x.double() for x in data), is_causal=True, enable_gqa=True)
    plain = (F.scaled_dot_product_attention(*data, is_causal=True, enable_gqa=True) - truth).abs().max()
    assert output.dtype == dtype
    assert (output - truth).abs().max() <= 2 * plain + (1e-14 if dtype == torch.float64 else 1e-6)


def test_scale() -> None:
    query, key, value = inputs()
    store = IndexStore(nf.TopK(10**6))
    store.append(key, value)
    for scale in (0.3, -0.7, 0.0):
        truth = F.scaled_dot_product_attention(query[:, :, -1:], key, value, scale=scale, enable_gqa=True)
        assert torch.allclose(store.attend(query[:, :, -1:], scale), truth)


def test_rows_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the parts, the index takes in the keys of earlier ones, and it never needs an index of a prefix."""
    monkeypatch.setattr(stores, "MOST_ROWS", 8)
    data = inputs()
    store = IndexStore(nf.TopK(9, index=nf.KMeansIndex(probes=10**6, iterations=2, leaf=8)))
    assert (run(store, data) - by_hand(data, 9)).abs().max() < 1e-12
    for index in store.indices:
        assert index is not None
        assert not index._blocks  # type: ignore[attr-defined]
        assert index.length - index._base.length == 71 % 8  # type: ignore[attr-defined]


def test_later_rows_have_no_say() -> None:
    """Neither through what an index learns nor through what it takes in."""
    query, key, value = inputs()
    other = key.clone()
    other[:, :, 100:] = 5 * inputs(seed=2)[1][:, :, 100:]
    method = nf.TopK(4, index=nf.KMeansIndex(probes=1, leaf=8))
    ours, theirs = (run(IndexStore(method), (query, x, value), (80, 1, 69)) for x in (key, other))
    assert torch.equal(ours[:, :, :100], theirs[:, :, :100])
    assert not torch.equal(ours[:, :, 100:], theirs[:, :, 100:])
    assert (ours - by_hand((query, key, value), 4)).abs().max() > 0.01


@pytest.mark.parametrize("index", [nf.ExactIndex(), EVERYTHING], ids=["exact", "kmeans"])
def test_the_tail_has_the_law_of_a_call(index: Any) -> None:
    """Averages and variances of 4,000 outputs of either."""
    generator = torch.Generator().manual_seed(1)
    key, value = torch.randn(2, 1, 2, 60, 8, generator=generator, dtype=torch.float64)
    query = torch.randn(1, 2, 1, 8, generator=generator, dtype=torch.float64).repeat_interleave(4000, 1)
    store = IndexStore(nf.TopK(4, tail=3, index=index), generator=seeded(0))
    store.append(key[:, :, :-1], value[:, :, :-1])
    store.close()
    store.append(key[:, :, -1:], value[:, :, -1:])
    ours = store.attend(query)[0].view(2, 4000, 8)
    method = nf.TopK(4, tail=3)
    theirs = nf.attention(query, key, value, enable_gqa=True, method=method, generator=seeded(1))[0].view(2, 4000, 8)
    sizes = (ours.var(1) + theirs.var(1)).div(4000).sqrt()
    # 16 columns, two sides: 5.6 standard errors are a level of 3e-7 in all, by the normal law.
    assert ((ours.mean(1) - theirs.mean(1)).abs() < 5.6 * sizes).all()
    assert ((ours.var(1) / theirs.var(1)).log().abs() < 0.35).all()
    assert ours.var(1).min() > 1e-4
    assert not torch.equal(store.attend(query)[0].view_as(ours), ours)


def test_rows_of_one_call_draw_by_themselves() -> None:
    """The rows that see 16 and 17 keys have 4 and 5 near ones, the first, and draw one of 12 others: alike once in 12 times."""
    key = torch.linspace(1e-3, 0, 17, dtype=torch.float64)[None, None, :, None]
    value = torch.eye(17, dtype=torch.float64)[None, None]
    store = IndexStore(nf.TopK(tail=1), generator=seeded(6))
    store.append(key, value)
    query, alike = torch.ones(1, 1, 2, 1, dtype=torch.float64), 0
    for _ in range(240):
        first, second = store.attend(query)[0, 0]
        alike += int(first[4:].argmax() == second[5:].argmax())
    # 20 are expected; by the binomial law, more than 50 come once in 10^8 times.
    assert 2 < alike < 50


@pytest.mark.parametrize(("index", "always_lazy"), [(nf.KMeansIndex(cells=12, probes=2), False), (nf.ExactIndex(), True)])
def test_lazy_gumbel(index: Any, always_lazy: bool) -> None:
    """With n draws, an entry of the mean is off by sqrt(sum P v^2 / n) at most: the square root of its variance."""
    query, key, value = inputs()
    method = nf.LazyGumbel(draws=400, estimator="mean", index=index, always_lazy=always_lazy)
    store = IndexStore(method, generator=seeded(3))
    run(store, (query[:, :, :140], key[:, :, :140], value[:, :, :140]), (100, *(1,) * 40))
    store.append(key[:, :, 140:], value[:, :, 140:])
    output = store.attend(query[:, :, 140:])
    truth = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)[:, :, 140:]
    square = F.scaled_dot_product_attention(query, key, value.square(), is_causal=True, enable_gqa=True)[:, :, 140:]
    error = (output - truth) / (square - truth.square()).clamp(min=1e-12).div(400).sqrt()
    # 960 entries, of means of 400 bounded draws.
    assert error.abs().max() < 7
    assert 0.8 < error.square().mean() < 1.25


@pytest.mark.parametrize("index", [nf.KMeansIndex(), nf.CellIndex(cell_size=32, probes=6)], ids=["kmeans", "cells"])
def test_recall_of_a_grown_store(index: Any) -> None:
    """Keys one by one, after a prompt; a fresh index has as many of the true top k, within 0.01."""
    length, k = 1536, 32
    key = clustered(length, 32, seed=40)[None, None]
    store = IndexStore(nf.TopK(k, index=index))
    store.append(key[:, :, :900], key[:, :, :900])
    store.attend(key[:, :, 899:900])
    for step in range(900, length):
        store.append(key[:, :, step : step + 1], key[:, :, step : step + 1])
        store.close()
    queries = key[0, :, ::4] + 0.1 * torch.randn(1, length // 4, 32, generator=seeded(4))
    true = (queries @ key[0].mT).topk(k).indices

    def recall(built: Any) -> float:
        return float((true[..., None] == built.search(queries, k)[1][..., None, :]).any(-1).double().mean())

    fresh = recall(index.build(key))
    assert fresh < 1.0
    assert recall(store.indices[0]) >= fresh - 0.01


def work(length: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Of a store that grows token by token and attends: what is learned and listed, copied, and searched."""
    from nearfield.cells.partition import kmeans as partition
    from nearfield.knn.index import kmeans, room

    done = {"products": 0, "listed": 0, "copied": 0, "searched": 0}

    def counted(name: str, function: Callable[..., Any], count: Callable[..., int]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            done[name] += count(*arguments)
            return function(*arguments)

        return call

    nearest = counted("products", partition.nearest, lambda points, centroids, *_: points.shape[1] * centroids.shape[1])
    listing = counted("listed", kmeans.BuiltKMeans._list, lambda _, assigned: assigned.shape[1])
    writing = counted("copied", room.Room._write, lambda _, keys: keys.shape[1])
    key = torch.randn(1, 1, length, 2, generator=seeded(1))
    store = IndexStore(nf.TopK(4, index=nf.KMeansIndex(probes=2, iterations=1, sample=64)))
    with monkeypatch.context() as patch:
        patch.setattr(partition, "nearest", nearest)
        patch.setattr(kmeans, "nearest", nearest)
        patch.setattr(kmeans.BuiltKMeans, "_list", listing)
        patch.setattr(room.Room, "_write", writing)
        for step in range(length):
            new = key[:, :, step : step + 1]
            store.append(new, new)
            store.attend(new)
            if step % 10 == 9:
                # As in assisted decoding: five tokens are tried, and three of them are taken back.
                tried = torch.randn(1, 1, 5, 2, generator=seeded(step))
                store.append(tried, tried)
                store.attend(tried)
                store.crop(store.length - 5)
        (index,) = store.indices
        assert index is not None
        done["searched"] = int(index.find(key[0, :, -1:], 4).scored.sum())  # type: ignore[union-attr]
    return done


@pytest.mark.long
def test_growth_costs_a_root_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = work(200, monkeypatch), work(800, monkeypatch)
    for n, done in ((200, small), (800, large)):
        assert done["products"] <= 8 * n**1.5
        assert done["listed"] <= 8 * n**1.5
        assert done["copied"] <= 12 * n, "keys and values are copied a few times each, also by a crop"
        assert done["searched"] <= 8 * n**0.5
    # Four times as many tokens: eight times the products, and not sixteen.
    assert large["products"] <= 10 * small["products"]
    assert large["listed"] <= 10 * small["listed"]


# Padding.


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("k", [None, 9])
def test_padding_is_never_found(index: Any, k: int | None) -> None:
    query, key, value = data = inputs()
    counts = padding()
    # If one of these counted, it would be the nearest by far.
    key[0, :, :20], value[0, :, :20] = 1e3, torch.nan
    key[0, :, 50], value[0, :, 50] = torch.inf, 1e6
    output = run(IndexStore(nf.TopK(k, index=index)), data, counts=counts)
    clean = (query, key.nan_to_num(0, 0, 0), value.nan_to_num(0.0))
    assert (output - by_hand(clean, k, counts)).abs().max() < 1e-12
    assert torch.equal(output[0, :, :20], torch.zeros_like(output[0, :, :20]))


def test_padding_may_be_told_later_and_stays_as_it_is() -> None:
    query, key, value = data = inputs()
    store = IndexStore(nf.TopK(9))
    store.append(key, value)
    store.mark(padding())
    assert (store.attend(query[:, :, -1:]) - by_hand(data, 9, padding())[:, :, -1:]).abs().max() < 1e-12
    assert torch.equal(store.keys, key * padding()[:, None, :, None])  # type: ignore[arg-type]
    store.mark(padding())
    with pytest.raises(ValueError, match="no sliding window"):
        store.mark(None)
    with pytest.raises(ValueError, match=r"counts must be boolean and \[2, 150\]"):
        store.mark(padding(60))


def test_what_is_not_finite_spoils_the_rows_that_see_it() -> None:
    query, key, value = (x.clone() for x in inputs())
    key[0, 1, 40, 3], value[1, 0, 90, 2], query[1, 3, 120, 0] = torch.nan, torch.inf, torch.nan
    truth = run(IndexStore(nf.TopK(9, index=EVERYTHING)), (query, key, value))
    bad = torch.zeros(BATCH, HEADS * GROUP, LENGTH, dtype=torch.bool)
    bad[0, 2:, 40:] = bad[1, :2, 90:] = bad[1, 3, 120] = True
    assert torch.equal(truth.isnan().all(-1), bad)
    assert torch.equal(truth.isnan().any(-1), bad)
    store = IndexStore(nf.TopK(9, index=EVERYTHING))
    run(store, (query, key, value))
    store.crop(30)
    clean = inputs()
    again = run(store, clean, (60, 60), start=30)
    assert (again - by_hand(clean, 9)[:, :, 30:]).abs().max() < 1e-12


# Crop, and batches.


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("kept", [0, 31, 96])
@pytest.mark.parametrize("padded", [False, True])
def test_crop_is_as_if_nothing_had_come(index: Any, kept: int, padded: bool) -> None:
    data, more = inputs(), inputs(seed=1)
    key = data[1]
    counts = padding() if padded else None
    store = IndexStore(nf.TopK(9, index=index))
    if kept:
        run(store, data, (kept,), counts=counts)
    run(store, more, (1,) * (97 - kept), start=kept)
    store.append(more[1][:, :, 97:99], more[2][:, :, 97:99])
    store.crop(98)
    store.crop(kept)
    assert store.length == kept
    output = run(store, data, (1, 20, 1, 1), start=kept, counts=counts)
    part = slice(kept, kept + 23)
    assert (output - by_hand(data, 9, counts)[:, :, part]).abs().max() < 1e-12
    real = key[:, :, : part.stop] if counts is None else key[:, :, : part.stop] * counts[:, None, : part.stop, None]
    assert torch.equal(store.keys, real)  # type: ignore[arg-type]


def test_a_crop_copies_nothing_and_keeps_apart_what_entries_share() -> None:
    """To the first entry a key is padding that the second, made from the same, has: they share a room and differ in length."""
    query, key, value = (x[:1] for x in inputs())
    store = IndexStore(nf.TopK(9, index=EVERYTHING))
    run(store, (query, key, value), (60, 1, 1))
    store.repeat(2)
    twice = tuple(x.repeat(2, 1, 1, 1) for x in (query, key, value))
    counts = torch.ones(2, LENGTH, dtype=torch.bool)
    counts[0, 62:64] = False
    run(store, twice, (1, 1), start=62, counts=counts)  # type: ignore[arg-type]
    assert len({index.keys.data_ptr() for index in store.indices if index}) == 1
    store.crop(63)
    counts[0, 63] = True
    output = run(store, twice, (1, 1, 30), start=63, counts=counts)  # type: ignore[arg-type]
    assert (output - by_hand(twice, 9, counts)[:, :, 63:95]).abs().max() < 1e-12  # type: ignore[arg-type]
    place = [index.keys.data_ptr() for index in store.indices if index]
    store.append(*(x[:, :, :4] for x in twice[1:]))
    store.attend(twice[0][:, :, :4])
    store.crop(store.length - 3)
    store.append(*(x[:, :, :1] for x in twice[1:]))
    store.close()
    assert [index.keys.data_ptr() for index in store.indices if index] == place


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("pending", [False, True])
def test_select_and_repeat(index: Any, pending: bool) -> None:
    data = inputs()
    store = IndexStore(nf.TopK(9, index=index))
    store.append(data[1][:, :, :60], data[2][:, :, :60], padding()[:, :60])
    if not pending:
        store.close()
    store.repeat(2)
    store.select(torch.tensor([3, 0, 2]))
    picked = [1, 0, 1]
    ours = run(store, tuple(x[picked] for x in data), (1, 30, 1), start=60)  # type: ignore[arg-type]
    # The two copies go on in different ways, and one of them is dropped again.
    apart = [x[picked].clone() for x in data]
    apart[1][2, :, 92:], apart[2][2, :, 92:] = 0.5 * apart[1][2, :, 92:], -apart[2][2, :, 92:]
    more = run(store, tuple(apart), (1, 5, 1), start=92)  # type: ignore[arg-type]
    truth = by_hand(tuple(apart), 9, padding()[picked])  # type: ignore[arg-type]
    assert (torch.cat([ours, more], 2) - truth[:, :, 60:99]).abs().max() < 1e-12
    store.select(torch.tensor([False, False, True]))
    assert torch.equal(store.keys, apart[1][2:, :, :99])  # type: ignore[arg-type]


def test_copies_are_apart() -> None:
    data = inputs()
    store = IndexStore(nf.TopK(9, index=EVERYTHING))
    run(store, data, (60, 1))
    other = copy.deepcopy(store)
    run(other, inputs(seed=1), (1, 5), start=61)
    ours = run(store, data, (1, 5), start=61)
    assert (ours - by_hand(data, 9)[:, :, 61:67]).abs().max() < 1e-12


# Audit, memory and errors.


def test_audit_by_hand() -> None:
    query, key, value = inputs()
    store = IndexStore(nf.TopK(3), audit=True)
    store.append(key, value, padding())
    output = store.attend(query[:, :, -3:])
    (error,) = store.errors
    truth = by_hand((query, key, value), 10**6, padding())[:, :, -3:]
    assert error.first == LENGTH - 3
    assert torch.allclose(error.relative, (output - truth).norm(dim=-1) / truth.norm(dim=-1))
    assert error.relative.mean() > 0.1
    store.audit = False
    store.attend(query[:, :, -1:])
    assert len(store.errors) == 1


def test_room() -> None:
    _, key, value = inputs(torch.float32, length=400)
    store = IndexStore(nf.TopK(9, index=nf.KMeansIndex()))
    store.append(key[:, :, :100], value[:, :, :100])
    store.reserve(300)
    assert store.nbytes["keys"] == key.nbytes
    assert store.nbytes["values"] == value.nbytes
    places = set()
    for i in range(100, 400):
        store.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
        store.close()
        places |= {index.keys.data_ptr() for index in store.indices if index}
    assert len(places) == BATCH
    assert store.nbytes["keys"] == key.nbytes
    # 20 to 25 cells with a centroid, and a number per key.
    assert BATCH * HEADS * (20 * 4 * DIM + 8 * 396) < store.nbytes["index"] < 2 * BATCH * HEADS * (25 * 4 * (DIM + 5) + 8 * 400)
    cells = IndexStore(nf.TopK(9, index=CELLS))
    cells.append(key, value)
    cells.attend(key[:, :, -1:])
    # 50 cells with two moments, and three numbers per key.
    assert BATCH * HEADS * (50 * 8 * DIM + 24 * 400) < cells.nbytes["index"] < 2 * BATCH * HEADS * (50 * 8 * DIM + 24 * 400)
    store.append(key[:, :, :1], value[:, :, :1])
    store.close()
    assert store.nbytes["keys"] < 2.1 * key.nbytes
    assert store.summary.startswith("401 keys, 401 of them in KMeansIndex(")


class FailsAt:
    """An index whose n-th build fails."""

    def __init__(self, number: int) -> None:
        self.left = number

    def build(self, keys: Tensor) -> Any:
        self.left -= 1
        if self.left == 0:
            raise MemoryError
        return nf.ExactIndex().build(keys)


@pytest.mark.parametrize("operation", ["attend", "close", "reserve"])
def test_after_an_exception_the_store_is_what_it_was(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = inputs()
    query, key, value = data
    store = IndexStore(nf.TopK(9, index=FailsAt(2)))
    store.append(key[:, :, :60], value[:, :, :60])
    # The second batch entry fails, when the first is done.
    with pytest.raises(MemoryError):
        {"attend": lambda: store.attend(query[:, :, 50:60]), "close": store.close, "reserve": lambda: store.reserve(5)}[
            operation
        ]()
    assert (store.length, store.closed) == (60, 0)
    run(store, data, (1, 3), start=60)
    with monkeypatch.context() as patch:
        patch.setattr(nf.TopK, "attend_rows", lambda *_: 1 / 0)
        store.append(key[:, :, 64:65], value[:, :, 64:65])
        with pytest.raises(ZeroDivisionError):
            store.attend(query[:, :, 64:65])
        assert (store.length, store.closed) == (65, 64)
    with pytest.raises(ValueError, match="entries must be from 0 to 1, got 0 to 2"):
        store.select(torch.tensor([0, 2]))
    assert (store.attend(query[:, :, 64:65]) - by_hand(data, 9)[:, :, 64:65]).abs().max() < 1e-12


def test_bad_methods() -> None:
    for wrong in (nf.Exact(), nf.Cells(), nf.TopK):
        with pytest.raises(TypeError, match=r"attends by TopK\(...\) or LazyGumbel\(...\), got"):
            IndexStore(wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"built already: .*; give its recipe"):
        IndexStore(nf.TopK(index=nf.ExactIndex().build(torch.randn(2, 5, 4))))
    with pytest.raises(TypeError, match="generator must be"):
        IndexStore(nf.TopK(), generator=3)  # type: ignore[arg-type]


def test_bad_inputs() -> None:
    query, key, value = inputs()
    store = IndexStore()
    for use in (lambda: store.attend(query), store.close, lambda: store.mark(None)):
        with pytest.raises(ValueError, match="nothing is stored yet"):
            use()
    with pytest.raises(ValueError, match="no gradients"):
        store.append(key.clone().requires_grad_(), value)
    with pytest.raises(ValueError, match=r"counts must be boolean and \[2, 150\]"):
        store.append(key, value, torch.ones(2, 150))
    store.append(key, value)
    with pytest.raises(TypeError, match=r"key is torch.float32 on cpu, but the store holds torch.float64"):
        store.append(key.float(), value.float())
    with pytest.raises(ValueError, match=r"key must be \[2, 2, new, 16\]"):
        store.append(key[:1], value[:1])
    with pytest.raises(ValueError, match="a multiple of 2"):
        store.attend(query[:, :3])
    with pytest.raises(ValueError, match="151 queries for 150 keys"):
        store.attend(torch.cat([query, query[:, :, :1]], 2))
    with pytest.raises(ValueError, match="between 0 and 150"):
        store.crop(151)
    with pytest.raises(ValueError, match="keys must be an integer of at least 0"):
        store.reserve(-1)
    assert store.attend(query[:, :, :0]).shape == (2, 4, 0, 12)


def test_the_caller_may_change_tensors() -> None:
    data = inputs()
    given = tuple(x.clone() for x in data)
    store = IndexStore(nf.TopK(9))
    store.append(given[1], given[2])
    given[1].zero_()
    given[2].zero_()
    assert (store.attend(data[0][:, :, -1:]) - by_hand(data, 9)[:, :, -1:]).abs().max() < 1e-12
