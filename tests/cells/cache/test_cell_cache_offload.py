"""`CellStore(offload=True)`: bit for bit what a store without offload is, whatever is done to it."""

from __future__ import annotations

import copy
import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from few_keys import few_keys
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import nearfield
from nearfield.cells.cache.attention import cached_attention, scaled_queries
from nearfield.cells.cache.buffers import Buffer
from nearfield.cells.cache.state import CacheState
from nearfield.cells.cache.store import CellStore

BATCH, HEADS, GROUP, LENGTH, DIM, VALUE_DIM = 2, 2, 2, 200, 16, 12
GIVEN = nearfield.Cells(probes=3, segment=16, cell_size=4, sinks=5, window=6)
GROWS = nearfield.Cells(probes=3, sinks=5, window=6)
WIDE = nearfield.Cells(probes=3, segment=16, cell_size=4, sinks=5, window=40)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    few_keys(monkeypatch)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((HEADS * GROUP, DIM), (HEADS, DIM), (HEADS, VALUE_DIM))
    query, key, value = (torch.randn(BATCH, heads, LENGTH, dim, generator=generator) for heads, dim in shapes)
    return 2 * query, key, value


def state(store: CellStore) -> CacheState:
    assert store.state is not None
    return store.state


def assert_alike(store: CellStore, plain: CellStore) -> None:
    """Both hold the same numbers, and the first one has closed segments on the CPU."""
    assert (store.length, store.closed, store.cells) == (plain.length, plain.closed, plain.cells)
    assert torch.equal(store.keys, plain.keys)  # type: ignore[arg-type]
    assert torch.equal(store.values, plain.values)  # type: ignore[arg-type]
    for buffer in (state(store).keys, state(store).values):
        assert buffer.offset == store.closed
        assert (buffer.base is None) == (store.closed == 0)
        assert buffer.base is None or buffer.base.shape[0] == buffer.storage.shape[0]


@pytest.mark.long
@given(data=st.data())
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.parametrize("method", [GIVEN, GROWS, WIDE])
def test_whatever_is_done_to_it(small: None, method: nearfield.Cells, data: st.DataObject) -> None:
    query, key, value = inputs()
    most = 120  # keys: up to seven segments
    counts = torch.ones(BATCH, most, dtype=torch.bool)
    counts[0, : data.draw(st.sampled_from([0, 0, 9, 40]))] = False
    stores = CellStore(method, offload=True), CellStore(method)
    entries = torch.arange(BATCH)
    for _ in range(data.draw(st.integers(1, 10))):
        done = data.draw(st.sampled_from(["append", "append", "append", "crop", "select", "repeat", "close"]))
        length = stores[0].length
        if done == "append" or length == 0:
            part = slice(length, length + data.draw(st.integers(1, most - length) if length < most else st.just(0)))
            rows = data.draw(st.sampled_from([part.stop - part.start, 1, 0]))
            late = slice(max(part.start, part.stop - rows), part.stop)
            outputs = []
            for store in stores:
                store.append(key[entries, :, part], value[entries, :, part], counts[entries, part])
                outputs.append(store.attend(query[entries, :, late]))
            assert torch.equal(*outputs)
        elif done == "crop":
            kept = data.draw(st.integers(0, length))
            for store in stores:
                store.crop(kept)
        elif done == "close":
            for store in stores:
                store.close()
        else:
            chosen = torch.arange(len(entries)).repeat_interleave(2)
            if done == "select" or len(entries) > 3:
                chosen = torch.tensor(data.draw(st.lists(st.integers(0, len(entries) - 1), min_size=1, max_size=4)))
            entries = entries[chosen]
            for store in stores:
                store.select(chosen)
        assert_alike(*stores)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("method", [GIVEN, GROWS])
def test_what_stays_on_the_device(method: nearfield.Cells) -> None:
    query, key, value = inputs()
    store, plain = CellStore(method, offload=True), CellStore(method)
    for one in (store, plain):
        one.append(key, value)
        one.close()
    row = BATCH * HEADS * (DIM + VALUE_DIM) * 4
    found, whole = store.nbytes, plain.nbytes
    assert found["keys"] + found["values"] <= row * store.sizes.most_open(store.closed) < row * LENGTH / 2
    assert row * store.closed <= found["offloaded"] <= 1.25 * row * store.closed
    assert {name: found[name] for name in ("order", "moments")} == {name: whole[name] for name in ("order", "moments")}
    assert "offloaded" not in whole
    # Steps have room, and offloaded rows are appended to: no step moves what is there.
    addresses = set()
    for i in range(LENGTH):
        for one in (store, plain):
            one.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
        assert torch.equal(store.attend(query[:, :, i : i + 1]), plain.attend(query[:, :, i : i + 1]))
        addresses.add(state(store).keys.storage.data_ptr())
    assert_alike(store, plain)
    assert len(addresses) <= len(state(store).bounds) + 1


def test_a_step_brings_over_what_it_opens(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing else: the first keys have been copied before."""
    query, key, value = inputs()
    store = CellStore(GIVEN, offload=True)
    store.append(key, value)
    store.attend(query[:, :, -1:])
    brought = []
    gather = state(store).keys.gather

    def recorded(place: Tensor) -> Tensor:
        found = gather(place)
        brought.append(found.shape)
        return found

    monkeypatch.setattr(state(store).keys, "gather", recorded)
    store.attend(query[:, :, -1:])
    ((heads, most, dim),) = brought
    assert (heads, dim) == (BATCH * HEADS, DIM)
    assert most <= 3 * 16


def test_kernels_read_offloaded_keys_where_they_are() -> None:
    pytest.importorskip("triton")
    from nearfield.cells.cache.decode import decode

    query, key, value = inputs()
    store = CellStore(GIVEN, offload=True)
    store.append(key, value)
    store.close()
    expected = cached_attention(state(store), scaled_queries(query[:, :, -1:], HEADS, 0.3), LENGTH - 1, 1, store.opening)
    rows = query[:, :, -1:].reshape(BATCH * HEADS, GROUP, DIM).contiguous()
    found = decode(state(store), rows, 0.3, store.opening)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_copies_go_their_own_way() -> None:
    query, key, value = inputs()
    store, plain = CellStore(GIVEN, offload=True), CellStore(GIVEN)
    for one in (store, plain):
        one.append(key[:, :, :100], value[:, :, :100])
        one.close()
    other = copy.deepcopy(store)
    store.crop(0)
    store.append(-key, -value)
    store.close()
    assert_alike(other, plain)
    for one in (other, plain):
        one.append(key[:, :, 100:], value[:, :, 100:])
    assert torch.equal(other.attend(query[:, :, 100:]), plain.attend(query[:, :, 100:]))
    assert_alike(other, plain)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("before", [0, 100])
def test_memory_runs_out(late: bool, before: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If values cannot be offloaded, keys are not either, no segment is closed, and the next call tries again."""
    query, key, value = inputs()
    store, plain = CellStore(GIVEN, offload=True), CellStore(GIVEN)
    for one in (store, plain):
        one.append(key[:, :, :before], value[:, :, :before])
        one.close()
    offloaded, split = store.closed, Buffer.split

    def fails(buffer: Buffer, place: int, room: int) -> Buffer:
        done = split(buffer, place, room) if late or buffer.storage.shape[3] == DIM else None
        if done is None or buffer.storage.shape[3] == VALUE_DIM:
            raise MemoryError
        return done

    monkeypatch.setattr(Buffer, "split", fails)
    for part in (slice(before, 150), slice(150, LENGTH)):
        last = query[:, :, part.stop - 1 : part.stop]
        for one in (store, plain):
            one.append(key[:, :, part], value[:, :, part])
        wanted = plain.attend(last)
        with pytest.raises(MemoryError):
            store.attend(last)
        assert store.closed == offloaded
        assert [buffer.offset for buffer in (state(store).keys, state(store).values)] == [offloaded, offloaded]
        assert torch.equal(store.keys, plain.keys)  # type: ignore[arg-type]
        assert torch.equal(store.values, plain.values)  # type: ignore[arg-type]
    monkeypatch.undo()
    other, shorter = copy.deepcopy(store), copy.deepcopy(plain)
    assert torch.equal(store.attend(last), wanted)
    assert_alike(store, plain)
    for one in (other, shorter):
        one.select(torch.tensor([1, 0, 1]))
        one.crop(120)
        one.close()
    assert_alike(other, shorter)


def test_pinned_memory_is_dropped_when_nobody_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is when the GPU that reads it is done, whichever GPU is the current one."""
    gpu, waited = torch.device("cuda", 1), []
    buffer = Buffer(torch.empty(2, 3, 0, 4), pinned_for=gpu)
    new_empty = Tensor.new_empty

    def pageable(like: Tensor, shape: tuple[int, ...], pin_memory: bool) -> Tensor:
        assert pin_memory
        return new_empty(like, shape)

    monkeypatch.setattr(Tensor, "new_empty", pageable)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waited.append((device, buffer.storage.data_ptr())))
    rows = torch.randn(2, 3, 8, 4)
    buffer = buffer.append(rows)
    assert waited == []
    first = buffer.storage.data_ptr()
    buffer = buffer.append(rows)
    assert waited == [(gpu, first)]
    second = buffer.storage.data_ptr()
    buffer = buffer.select(torch.tensor([1]))
    assert waited == [(gpu, first), (gpu, second)]
    assert torch.equal(buffer.filled, torch.cat([rows, rows], 2)[1:])
    third = buffer.storage.data_ptr()
    buffer = buffer.truncate(0).reserve(100)
    assert waited[2:] == [(gpu, third)]


@pytest.mark.parametrize("method", [GIVEN, WIDE])
@pytest.mark.parametrize("length", [0, 3, 203, 390])
def test_crop_brings_back_what_is_kept(method: nearfield.Cells, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 400, 8, generator=generator)
    store, plain = CellStore(method, offload=True), CellStore(method)
    for one in (store, plain):
        one.append(key, value)
        one.close()
    before, ends = state(store).keys.storage.nbytes, state(store).bounds[1:]
    brought = []
    read = Buffer.read

    def recorded(buffer: Buffer, rows: slice) -> Tensor:
        brought.append(rows.stop - rows.start)
        return read(buffer, rows)

    most = max(0, length - store.sizes.window)
    with monkeypatch.context() as patch:
        patch.setattr(Buffer, "read", recorded)
        store.crop(length)
    plain.crop(length)
    opened = sum(end > most for end in ends)
    kept = sum(end > most and end - 16 < length for end in ends)
    once = [16] * opened if most >= 16 else []  # to take them out of `cross`, unless nothing is left of it
    assert brought == [rows for rows in once for _ in range(2)] + [16 * kept] * 2 * (kept > 0)  # of keys, and of values
    assert state(store).keys.storage.nbytes == before
    assert_alike(store, plain)
    for one in (store, plain):
        one.append(-key, -value)
    assert torch.equal(store.attend(query), plain.attend(query))
    assert_alike(store, plain)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("length", [3, 40, 150])
def test_crop_into_a_prompt(length: int) -> None:
    """The prompt is one segment: all of it comes back to the device, and only the beginning stays."""
    _, key, value = inputs()
    store = CellStore(GROWS, offload=True)
    store.append(key, value)
    store.close()
    assert store.state is not None
    assert len(store.state.bounds) == 2
    store.crop(length)
    assert store.state.keys.storage.shape[2] == max(length, store.sizes.most_open(0))
    assert torch.equal(store.keys, key[:, :, :length])  # type: ignore[arg-type]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("method", [GIVEN, GROWS])
@pytest.mark.parametrize("offload", [False, True])
def test_segments_are_reopened_one_by_one_or_at_once(method: nearfield.Cells, offload: bool) -> None:
    _, key, value = inputs()
    stores = [CellStore(method, offload=offload) for _ in range(2)]
    for one in stores:
        one.append(key[:, :, :100], value[:, :, :100])
        one.close()
        one.append(key[:, :, 100:], value[:, :, 100:])
        one.close()
    some, all_at_once = map(state, stores)
    most = some.bounds[1]
    while some.closed > most:
        some = some.crop(some.length, some.bounds[-2], lambda saved: None)
    assert torch.equal(some.in_order(some.keys), key)
    some = some.crop(150, most, lambda saved: None)
    all_at_once = all_at_once.crop(150, most, lambda saved: None)
    same = [
        (one.in_order(one.keys), one.in_order(one.values), one.tables.cross, one.tables.pooled) for one in (some, all_at_once)
    ]
    assert all(torch.equal(*both) for both in zip(*same, strict=True))


def test_padding_cannot_change_after_a_segment_is_closed() -> None:
    _, key, value = inputs()
    counts = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    counts[0, :40] = False
    for offload in (False, True):
        store = CellStore(GIVEN, offload=offload)
        store.append(key, value)
        store.close()
        with pytest.raises(ValueError, match="hides keys that it showed before"):
            store.mark(counts)


def test_a_memory_cannot_be_offloaded() -> None:
    _, key, value = inputs()
    with pytest.raises(ValueError, match="make its cache without offload"):
        CacheState(key, value, CellStore(GIVEN).sizes, GIVEN.partition, memory_length=16, offload=True)


@pytest.mark.gpu
@pytest.mark.parametrize("method", [GIVEN, nearfield.Cells(probes=20)])
def test_on_a_gpu(method: nearfield.Cells) -> None:
    key, value = torch.randn(2, 2, 2, 3000, 64, device="cuda", dtype=torch.bfloat16)
    query = torch.randn(2, 8, 3000, 64, device="cuda", dtype=torch.bfloat16)
    store, plain = CellStore(method, offload=True, group_from=0), CellStore(method, group_from=0)
    for one in (store, plain):
        one.append(key[:, :, :2000], value[:, :, :2000])
        one.close()
    base = state(store).keys.base
    assert base is not None
    assert base.is_pinned()
    # On a GPU, sums are taken in any order and two stores may have different cells. So the same store, with all keys on the GPU.
    for i in range(2000, 2600):
        store.append(key[:, :, i : i + 1], value[:, :, i : i + 1])
        found = store.attend(query[:, :, i : i + 1])
        if i % 50 == 0:
            whole = copy.deepcopy(store)
            whole.state = state(whole).split(0).but(offload=False)
            torch.testing.assert_close(whole.attend(query[:, :, i : i + 1]), found, atol=1e-2, rtol=1e-2)
    store.select(torch.tensor([1, 0, 1]))
    assert state(store).keys.base.is_pinned()  # type: ignore[union-attr]
    assert copy.deepcopy(state(store)).keys.base.is_pinned()  # type: ignore[union-attr]
    store.crop(700)
    assert torch.equal(store.keys, key[[1, 0, 1], :, :700])  # type: ignore[arg-type]


# In Transformers.


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 4}], ids=["greedy", "beams", "lookup"])
def test_generate(options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    from hf_models import pair, tokens

    from nearfield import hf

    name = "nearfield-offloaded"
    hf.register(name, nearfield.Exact())
    ours = pair("llama", name)[1]
    method = nearfield.Cells(probes=1, segment=8, cell_size=4, sinks=3, window=0)
    ids = tokens(1, 23).repeat(1, 2)
    caches = [hf.CellCache(method, config=ours.config, offload=offload, audit=True) for offload in (True, False)]
    said = [ours.generate(ids, max_new_tokens=20, do_sample=False, past_key_values=cache, **options) for cache in caches]
    assert torch.equal(*said)
    for one, other in zip(*(cache.errors[1] for cache in caches), strict=True):
        assert torch.equal(one.relative, other.relative)
    assert set(caches[0].nbytes) == {"keys", "values", "order", "moments", "offloaded", "resident"}
    assert caches[0].nbytes["offloaded"] > caches[0].nbytes["keys"]
    caches[0].reset()
    assert all(layer.store.offload for layer in caches[0].layers)
    with pytest.raises(NotImplementedError, match=r"CellCache\(offload=True\)"):
        caches[0].layers[0].offload()
