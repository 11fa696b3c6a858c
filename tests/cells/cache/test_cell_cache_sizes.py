"""Sizes of segments and cells in a store: they grow with the square root of the number of keys, unless they are given."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from few_keys import few_keys
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import nearfield
from nearfield.cells.cache.store import CellStore
from nearfield.cells.sizes import CacheSizes, default_cache_probes

DEFAULT = CellStore().sizes
GIVEN = CellStore(nearfield.Cells(segment=24, cell_size=5, window=30)).sizes


def token_by_token(sizes: CacheSizes, segments: int) -> list[int]:
    """0, and then where each of so many segments ends if keys come one by one."""
    bounds = [0]
    for _ in range(segments):
        bounds.append(sizes.next_end(bounds[-1], sizes.next_close(bounds[-1])))
    return bounds


@pytest.mark.parametrize("sizes", [DEFAULT, GIVEN])
def test_segments_follow_each_other(sizes: CacheSizes) -> None:
    for start, end in pairwise(token_by_token(sizes, 300)):
        assert end - start == sizes.length(start) > 0
        # The window is not rounded: a segment is closed as soon as a window of keys has come after it.
        assert sizes.next_close(start) == end + sizes.window
        assert sizes.next_end(start, end + sizes.window - 1) == start
        assert sizes.most_open(start) >= sizes.length(start) + sizes.window


@pytest.mark.parametrize("sizes", [DEFAULT, GIVEN])
@pytest.mark.parametrize("start", [0, 720, 8160, 8192, 131016])
@pytest.mark.parametrize("more", [0, 1, 15, 16, 17, 5000, 10**6])
def test_what_is_there_goes_into_one_segment(sizes: CacheSizes, start: int, more: int) -> None:
    position = sizes.next_close(start) + more
    end = sizes.next_end(start, position)
    if sizes is GIVEN:
        assert end == start + 24
        return
    assert start + sizes.length(start) <= end <= position - sizes.window
    assert position - sizes.window - end < 16
    # Fewer keys than a segment are left, and the query's own key is among them.
    assert sizes.next_end(end, position) == end
    assert position + 1 - end <= sizes.most_open(end)


def test_a_captured_step_has_room_for_as_many_keys_again() -> None:
    for length, room in ((1, 1024), (1024, 1024), (3000, 3000), (8000, 208), (8207, 1)):
        assert DEFAULT.room(0, length) == room
    assert DEFAULT.room(8192, 8300) == 8192 + 1056 + 16 - 8300
    assert GIVEN.room(24, 30) == 24 + 24 + 30 - 30


def test_given_sizes_are_constant() -> None:
    bounds = token_by_token(GIVEN, 1000)
    assert bounds[:4] == [0, 24, 48, 72]
    assert {GIVEN.cells(*ends) for ends in pairwise(bounds)} == {5}
    assert GIVEN.most_open(72) == 54


def test_growth() -> None:
    bounds = token_by_token(DEFAULT, 400)
    assert [bounds[segment] for segment in (1, 2, 49, 166)] == [8192, 9248, 131072, 1048352]
    assert DEFAULT.cells(0, 8192) == 512
    early = CellStore(group_from=0).sizes
    bounds = token_by_token(early, 400)
    assert [bounds[segment] for segment in (1, 8, 9, 56, 173)] == [1024, 8192, 9248, 131072, 1048352]
    cells = [early.cells(*ends) for ends in pairwise(bounds)]
    assert cells[:8] == [64] * 8
    for segment, (start, end) in enumerate(pairwise(bounds)):
        if segment >= 8:
            assert sum(cells[:segment]) < 8 * math.sqrt(2 * start)
            assert end - start < 12 * math.sqrt(start)
    only_cells = CellStore(nearfield.Cells(segment=1024)).sizes
    wanted = {0: 64, 7: 64, 31: 32, 127: 16, 1023: 6, 10**5: 1}
    assert {segment: only_cells.cells(1024 * segment, 1024 * segment + 1024) for segment in wanted} == wanted
    # One large segment has cells as large as those of the last of many segments, and therefore fewer.
    assert DEFAULT.cells(0, 131072) == 2048 < sum(cells[:56]) == 3532


def test_probes() -> None:
    assert default_cache_probes(0, 0) == 20
    assert default_cache_probes(7168, 448) == 20
    assert default_cache_probes(131072, 3456) == round(3.5 * math.sqrt(131072) * 3456 / 131072) == 33
    assert default_cache_probes(32768, 1024, on_gpu=True) == 51
    assert default_cache_probes(0, 0, on_gpu=True) == 20


@pytest.mark.gpu
def test_more_cells_are_opened_of_keys_on_a_gpu() -> None:
    key, value = torch.randn(2, 1, 1, 20_000, 64, device="cuda", dtype=torch.bfloat16)
    probes = {}
    for offload in (False, True):
        store = CellStore(offload=offload)
        store.append(key, value)
        store.close()
        probes[offload] = store.probes, store.closed, store.cells
    assert probes == {offload: (default_cache_probes(*sizes, not offload), *sizes) for offload, (_, *sizes) in probes.items()}
    assert probes[False][0] > 2 * probes[True][0]


# Stores with small sizes, so that segments grow after a few keys.


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    few_keys(monkeypatch)


def inputs(length: int = 500) -> Tensor:
    """Queries, keys and values."""
    return torch.randn(3, 1, 2, length, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def filled(method: nearfield.Cells, key: Tensor, value: Tensor) -> CellStore:
    store = CellStore(method)
    store.append(key, value)
    store.close()
    return store


def bounds(store: CellStore) -> list[int]:
    assert store.state is not None
    return store.state.bounds


FEW = nearfield.Cells(probes=2, sinks=5, window=3)
ALL = nearfield.Cells(probes=10**6, sinks=5, window=3)


@pytest.mark.usefixtures("small")
def test_a_prompt_is_one_segment() -> None:
    query, key, value = inputs()
    store = filled(FEW, key, value)
    assert bounds(store) == [0, 496]
    assert store.cells == store.sizes.cells(0, 496) < 500 / 5
    assert torch.equal(store.keys, key)  # type: ignore[arg-type]
    # All its keys are grouped together.
    other = filled(nearfield.Cells(probes=2, sinks=5, window=3, segment=496), key, value)
    assert torch.equal(store.attend(query[:, :, -1:]), other.attend(query[:, :, -1:]))


@pytest.mark.usefixtures("small")
def test_token_by_token_segments_are_short() -> None:
    query, key, value = inputs()
    one_by_one, at_once, closed = CellStore(FEW), CellStore(FEW), CellStore(FEW)
    outputs = []
    for i in range(500):
        row = slice(i, i + 1)
        one_by_one.append(key[:, :, row], value[:, :, row])
        outputs.append(one_by_one.attend(query[:, :, row]))
        closed.append(key[:, :, row], value[:, :, row])
        closed.close()
    assert bounds(one_by_one)[:6] == [0, 16, 32, 50, 72, 98]
    assert bounds(one_by_one) == bounds(closed) == token_by_token(closed.sizes, 13)
    # Rows that attend together see the same segments as rows that attend one by one.
    at_once.append(key, value)
    assert torch.allclose(at_once.attend(query), torch.cat(outputs, 2), rtol=1e-9)
    assert bounds(at_once) == bounds(one_by_one)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("method", [FEW, ALL])
def test_a_prompt_in_chunks(method: nearfield.Cells) -> None:
    """Each chunk attends to what came before it, and segments are closed as they become complete."""
    query, key, value = inputs()
    store, outputs = filled(method, key[:, :, :130], value[:, :, :130]), []
    assert bounds(store) == [0, 124]
    for part in (slice(130, 260), slice(260, 261), slice(261, 500)):
        store.append(key[:, :, part], value[:, :, part])
        outputs.append(store.attend(query[:, :, part]))
    assert bounds(store)[:3] == [0, 124, 124 + store.sizes.length(124)]
    assert torch.equal(store.keys, key)  # type: ignore[arg-type]
    seen = torch.ones(500, 500, dtype=torch.bool).tril()[130:]
    exact = F.scaled_dot_product_attention(query[:, :, 130:], key, value, seen)
    off = (torch.cat(outputs, 2) - exact).abs().max()
    assert (off < 1e-12) == (method is ALL)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kept", [0, 3, 200, 498, 499])
def test_crop_into_a_prompt_opens_it_again(kept: int) -> None:
    query, key, value = inputs()
    store = filled(FEW, key, value)
    store.crop(kept)
    assert bounds(store) == ([0, 496] if kept == 499 else [0])
    assert torch.equal(store.keys, key[:, :, :kept])  # type: ignore[arg-type]
    other = CellStore(FEW)
    if kept == 499:
        other = filled(FEW, key[:, :, :499], value[:, :, :499])
    else:
        other.append(key[:, :, :kept], value[:, :, :kept])
    outputs = []
    for one in (store, other):
        one.append(key[:, :, kept:], value[:, :, kept:])
        outputs.append(one.attend(query[:, :, kept:]))
    assert bounds(store) == bounds(other)
    assert torch.allclose(*outputs, rtol=1e-9)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("length", [299, 498, 500])
def test_a_query_of_a_closed_prompt_is_too_late(length: int) -> None:
    query, key, value = inputs()
    store = filled(FEW, key, value)
    store.attend(query[:, :, -1:])
    with pytest.raises(ValueError, match=f"position {500 - length} comes too late"):
        store.attend(query[:, :, -length:])


@given(data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_whatever_is_appended_and_cropped(small: None, data: st.DataObject) -> None:
    """Keys come out in the order in which they came, and with all cells opened attention is exact."""
    query, key, value = inputs(300)
    window = data.draw(st.integers(0, 20))
    store = CellStore(nearfield.Cells(probes=10**6, sinks=data.draw(st.integers(0, 6)), window=window))
    store.append(key[:, :, :0], value[:, :, :0])
    for _ in range(data.draw(st.integers(1, 8))):
        if data.draw(st.booleans()):
            store.crop(data.draw(st.integers(0, store.length)))
        part = slice(store.length, store.length + data.draw(st.integers(0, 300 - store.length)))
        store.append(key[:, :, part], value[:, :, part])
        if data.draw(st.booleans()):
            found = store.attend(query[:, :, part])
            seen = torch.ones(part.stop, part.stop, dtype=torch.bool).tril()[part]
            exact = F.scaled_dot_product_attention(query[:, :, part], key[:, :, : part.stop], value[:, :, : part.stop], seen)
            assert torch.allclose(found, exact, rtol=1e-9, atol=1e-12)
        if data.draw(st.booleans()):
            store.close()
        ends = bounds(store)
        assert torch.equal(store.keys, key[:, :, : part.stop])  # type: ignore[arg-type]
        assert torch.equal(store.values, value[:, :, : part.stop])  # type: ignore[arg-type]
        assert store.cells == sum(store.sizes.cells(*one) for one in pairwise(ends))
        assert all(end - start >= store.sizes.length(start) for start, end in pairwise(ends))
        assert store.closed <= max(0, store.length - window)
