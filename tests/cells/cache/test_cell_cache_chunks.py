"""Chunks of a prompt: many rows attend to closed cells by the engine for whole sequences, and to the rest by a method."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from broken_off import at_allocation, at_line_of_stores, break_off, points
from by_hand import seeded
from few_keys import few_keys
from torch import Tensor

import nearfield as nf
from nearfield.attention import causal_attention
from nearfield.cells.cache import store as cache_store
from nearfield.cells.cache.chunks import _joined, attend_to_closed, cells_in_place
from nearfield.cells.cache.store import CellStore, Near
from nearfield.cells.sizes import default_cell_size, default_probes
from nearfield.kernels import backends

BATCH, HEADS, GROUP, LENGTH, DIM, VALUE_DIM = 2, 2, 2, 200, 16, 12


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    few_keys(monkeypatch)
    monkeypatch.setattr(cache_store, "LEAST_CHUNK", 8)


def inputs(length: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((HEADS * GROUP, DIM), (HEADS, DIM), (HEADS, VALUE_DIM))
    query, key, value = (torch.randn(BATCH, heads, length, dim, generator=seeded(dim)) for heads, dim in shapes)
    return 2 * query, key, value


def near_by(query: Tensor, method: nf.Method, calls: list[int]) -> Near:
    def near(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(keys.shape[2])
        found = causal_attention(query, keys, values, None, method, keys.shape[2] - query.shape[2], return_lse=True)
        assert found.lse is not None
        return found.output, found.lse

    return near


def read(store: CellStore, parts: list[int], method: nf.Method) -> tuple[Tensor, list[int]]:
    """The output of a text that is read in chunks, and how many keys each attended to by the method."""
    query, key, value = inputs()
    outputs, calls, start = [], [], 0
    for part in parts:
        own = slice(start, start + part)
        store.append(key[:, :, own], value[:, :, own])
        rows = query[:, :, own].contiguous()
        outputs.append(store.attend(rows, None, near_by(rows, method, calls)))
        start += part
    return torch.cat(outputs, 2), calls


def exact() -> Tensor:
    return nf.attention(*inputs(), is_causal=True, enable_gqa=True, method=nf.Exact())


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("segment", [None, 12])
@pytest.mark.parametrize("parts", [[200], [60, 60, 80], [20, 9, 171], [100, 3, 97], [8] * 25])
def test_with_all_cells_opened_it_is_exact_attention(parts: list[int], segment: int | None, offload: bool) -> None:
    method = nf.Cells(probes=10_000, sinks=5, segment=segment)
    store = CellStore(method, offload=offload)
    found, calls = read(store, parts, nf.Exact())
    torch.testing.assert_close(found, exact(), atol=2e-5, rtol=1e-4)
    assert len(calls) == len([part for part in parts if part >= 8])
    # All before a chunk is closed, but for a window and what is too short for a segment.
    assert max(calls[1:], default=0) < max(parts[1:], default=1) + 100
    assert store.length == LENGTH
    assert store.closed >= LENGTH - (30 if parts[-1] >= 30 else 80)
    assert torch.equal(store.keys, inputs()[1])  # type: ignore[arg-type]


def test_by_cells_on_both_sides() -> None:
    """Cells of the method near by, cells of the cache before."""
    method = nf.Cells(probes=6, segment=16, cell_size=4, sinks=5)
    store = CellStore(nf.Cells(probes=6, sinks=5), audit=True)
    found, _ = read(store, [100, 100], method)
    wanted = exact()
    error = (found - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert 0.0 < float(error.mean()) < 0.35
    told = torch.cat([step.relative for step in store.errors], 2)
    torch.testing.assert_close(told.view_as(error).to(error), error, atol=1e-3, rtol=1e-3)


def test_a_chunk_in_16_bits_is_rounded_once() -> None:
    query, key, value = (x.bfloat16() for x in inputs())
    store = CellStore(nf.Cells(probes=10_000, sinks=5))
    store.append(key[:, :, :120], value[:, :, :120])
    store.close()
    store.append(key[:, :, 120:], value[:, :, 120:])
    rows = query[:, :, 120:].contiguous()

    def near(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return near_by(rows.float(), nf.Exact(), [])(keys.float(), values.float())

    found = store.attend(rows, None, near)
    exactly = nf.attention(*(x.double() for x in (query, key, value)), is_causal=True, enable_gqa=True, method=nf.Exact())
    wanted = exactly[:, :, 120:]
    assert found.dtype == torch.bfloat16
    assert float((found.double() - wanted).norm()) < 1.02 * float((wanted.bfloat16().double() - wanted).norm())


def test_rows_do_not_depend_on_later_ones() -> None:
    method = nf.Cells(probes=2, segment=16, cell_size=4, sinks=5)
    query, key, value = inputs()
    outputs = []
    for changed in (False, True):
        store = CellStore(nf.Cells(probes=2, sinks=5))
        own, late = [x.clone() for x in (query, key, value)], slice(170, 200)
        if changed:
            for x in own:
                x[:, :, late] = 3 * torch.randn(x[:, :, late].shape, generator=seeded(9))
        store.append(own[1][:, :, :100], own[2][:, :, :100])
        store.close()
        store.append(own[1][:, :, 100:], own[2][:, :, 100:])
        rows = own[0][:, :, 100:].contiguous()
        outputs.append(store.attend(rows, None, near_by(rows, method, []))[:, :, :70])
    assert torch.equal(*outputs)


def test_few_rows_and_padding_go_row_by_row() -> None:
    query, key, value = inputs()
    calls: list[int] = []
    store = CellStore(nf.Cells(probes=10_000, sinks=5))
    counts = torch.ones(BATCH, 100, dtype=torch.bool)
    counts[0, :3] = False
    store.append(key[:, :, :100], value[:, :, :100], counts)
    rows = query[:, :, 50:100].contiguous()
    with_near = copy.deepcopy(store).attend(rows, None, near_by(rows, nf.Exact(), calls))
    assert torch.equal(with_near, store.attend(rows))
    assert calls == []


@pytest.mark.parametrize("segment", [None, 4])
def test_in_which_cell_a_key_is(segment: int | None) -> None:
    store = CellStore(nf.Cells(sinks=5, segment=segment))
    read(store, [100, 100], nf.Exact())
    state = store.state
    assert state is not None
    found = cells_in_place(state)
    assert bool((found[:, :5] == -1).all())
    assert bool((found[:, 5:] >= 0).all())
    size = state.tables.size.flat.long()
    for own, wanted in zip(found, size, strict=True):
        assert torch.equal(torch.bincount(own[5:], minlength=len(wanted)), wanted)
    keys = state.keys.flat[:, : state.closed]
    mean = torch.zeros_like(state.tables.centroid.flat).index_add_(1, found[0, 5:], keys[:, 5:])[0] / size[0, :, None].clamp(
        min=1
    )
    torch.testing.assert_close(mean, state.tables.centroid.flat[0], atol=1e-5, rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("way", [at_line_of_stores, at_allocation])
def test_broken_off_anywhere_it_has_not_happened(way: Any) -> None:
    query, key, value = inputs()
    template = CellStore(nf.Cells(probes=3, sinks=5))
    template.append(key[:, :, :100], value[:, :, :100])
    template.close()
    template.append(key[:, :, 100:150], value[:, :, 100:150])
    rows = query[:, :, 100:150].contiguous()

    def operation(store: CellStore) -> Tensor:
        return store.attend(rows, None, near_by(rows, nf.Exact(), []))

    whole, fresh = copy.deepcopy(template), copy.deepcopy(template)
    wanted = operation(whole)
    for at in points(way, lambda: operation(fresh), 40):
        store = copy.deepcopy(template)
        break_off(way, at, lambda: operation(store))  # noqa: B023
        assert torch.equal(store.keys, template.keys)  # type: ignore[arg-type]
        if store.closed == template.closed:
            torch.testing.assert_close(operation(store), wanted)
        assert store.state is not None
        assert whole.state is not None
        assert store.state.bounds == whole.state.bounds


@pytest.mark.parametrize("group", [1, 2])
def test_by_kernels(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, what they cannot compute in 16 bits aside."""
    pytest.importorskip("triton")
    query, key, value = inputs()
    store = CellStore(nf.Cells(sinks=5))
    store.append(key, torch.cat([value, value[..., :4]], 3))
    store.close()
    state = store.state
    assert state is not None
    rows = query[:, : HEADS * group, -20:].contiguous()
    wanted = attend_to_closed(state, rows, 0.25, 4, nf.KMeans())
    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    found = attend_to_closed(state, rows, 0.25, 4, nf.KMeans())
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("by_rows", [False, True])
def test_both_sides_are_merged_by_a_kernel(by_rows: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter; what is near often lies head by head in each row, and the output then lies so too."""
    pytest.importorskip("triton")
    from nearfield.cells.triton import merge_two as module

    calls, merge_two = [], module.merge_two
    monkeypatch.setattr(module, "merge_two", lambda *given: calls.append(given[0]) or merge_two(*given))  # type: ignore[func-returns-value]
    query, key, value = inputs()
    store = CellStore(nf.Cells(probes=10_000, sinks=5))
    store.append(key[:, :, :150], value[:, :, :150])
    store.close()
    store.append(key[:, :, 150:], value[:, :, 150:])
    rows = query[:, :, 150:].contiguous()

    def near(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        output, lse = near_by(rows, nf.Exact(), [])(keys, values)
        return (output.transpose(1, 2).contiguous().transpose(1, 2) if by_rows else output), lse

    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    found = store.attend(rows, None, near)
    torch.testing.assert_close(found, exact()[:, :, 150:], atol=2e-5, rtol=1e-4)
    assert len(calls) == 1
    assert found.transpose(1, 2).is_contiguous() is by_rows


def test_rows_of_a_chunk_on_a_gpu_have_cells_as_rows_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they are told how many, or the guard asks for more."""
    monkeypatch.undo()
    _, key, value = inputs(20_000)
    found = {}
    for eps, given in ((None, nf.Cells()), (0.5, nf.Cells()), (None, nf.Cells(probes=7)), (None, nf.Cells(cell_size=40))):
        store = CellStore(given, eps=eps, group_from=0)
        store.append(key, value)
        store.close()
        assert store._chunk_sizes(store.state) == (store.probes, None)
        monkeypatch.setattr(backends, "runs_triton", lambda device: True)
        for factor in (1, 8):
            if store.state.guard is not None:
                store.state = store.state.but(guard=store.state.guard._replace(factor=factor))
            found[eps, given, factor] = store._chunk_sizes(store.state)
        monkeypatch.undo()
    size = default_cell_size(20_000, causal=True, on_gpu=True)
    probes, cells = found[None, nf.Cells(), 1]
    assert cells == store.closed // size
    assert probes == default_probes(20_000, size, causal=True, on_gpu=True)
    assert found[0.5, nf.Cells(), 1] == (probes, cells)
    assert found[0.5, nf.Cells(), 8] == (8 * probes, cells)
    assert found[None, nf.Cells(probes=7), 1] == (7, None)
    assert found[None, nf.Cells(cell_size=40), 1][1] == store.closed // 40


@pytest.mark.parametrize("by_kernels", [False, True])
def test_cells_that_are_joined(by_kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys of a cell go together, keys of no cell stay outside, and what comes of it is attention by these cells."""
    if by_kernels:
        pytest.importorskip("triton")
        monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    query, key, value = inputs()
    store = CellStore(nf.Cells(sinks=5, probes=4))
    store.append(key, value)
    store.close()
    state = store.state
    assert state is not None
    fine = cells_in_place(state)
    assert (fine < 0).any()
    coarse = _joined(state, fine, 6, nf.KMeans())
    assert torch.equal(coarse < 0, fine < 0)
    for own_fine, own_coarse in zip(fine, coarse, strict=True):
        for cell in own_fine.unique().tolist():
            assert len(own_coarse[own_fine == cell].unique()) == 1
        assert 3 < len(own_coarse[own_coarse >= 0].unique()) <= 6
    rows = query[:, :, -20:].contiguous()
    found, _ = attend_to_closed(state, rows, 0.25, 6, nf.KMeans(), 6)
    # With all of them open nothing is left to sum up.
    keys, values = (x.repeat_interleave(GROUP, 1)[:, :, : state.closed] for x in (key, value))
    wanted = torch.softmax(rows @ keys.mT * 0.25, -1) @ values
    torch.testing.assert_close(found, wanted, atol=2e-3, rtol=2e-3)
    some, _ = attend_to_closed(state, rows, 0.25, 2, nf.KMeans(), 6)
    error = (some - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert 0.01 < float(error.mean()) < 0.5
