"""Closing a segment by the kernels in Triton and in torch: interpreted on a CPU, for real on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import seeded
from torch import Tensor

import nearfield as nf
from nearfield.cells.cache import segments as cache_segments
from nearfield.cells.cache.segments import ClosedSegment, close_segment
from nearfield.cells.cache.store import CellStore
from nearfield.cells.partition import Partition
from nearfield.kernels import backends

pytest.importorskip("triton")

from nearfield.cells.triton import forward as triton_forward
from nearfield.cells.triton.layout import layout_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, SEGMENT, CELLS = 3, 160, 13
TWICE = nf.KMeans(iterations=2)
# The interpreter multiplies the bits of numbers with few digits, not the numbers.
HALVES = [pytest.param(dtype, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float16)]


def clustered(heads: int = HEADS, length: int = SEGMENT, dim: int = 16, groups: int = 20, seed: int = 0) -> Tensor:
    """Keys around some means, far from zero, and with coordinates that are not alike."""
    generator = seeded(seed)
    middles = torch.linspace(0.3, 2.0, dim) * torch.randn(heads, groups, dim, generator=generator)
    which = torch.randint(groups, (heads, length, 1), generator=generator).expand(-1, -1, dim)
    return (middles.gather(1, which) + torch.randn(heads, length, dim, generator=generator) + 1.0).to(DEVICE)


def normal(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=seeded(seed)).to(DEVICE)


def sinks(heads: int = HEADS, length: int = SEGMENT, first: int = 5) -> Tensor:
    return (torch.arange(length, device=DEVICE) < first).expand(heads, -1)


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """As on a card. How many heads each call of the kernels was for."""
    calls = []
    group_keys = triton_forward.group_keys

    def counted(keys: Tensor, *arguments: Any) -> Tensor:
        calls.append(len(keys))
        return group_keys(keys, *arguments)

    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    monkeypatch.setattr(triton_forward, "group_keys", counted)
    return calls


def assert_right(found: ClosedSegment, keys: Tensor, values: Tensor, outside: Tensor, cells: int, atol: float = 1e-5) -> None:
    """Every key is where it says, once, and the moments of a cell are those of its keys."""
    heads, segment, dim = keys.shape
    assert torch.equal(found.order.sort(1).values, torch.arange(segment, device=DEVICE).expand(heads, -1))
    assert found.size.shape == found.start.shape == (heads, cells)
    assert found.cross.shape == (heads, values.shape[2], dim)
    close = {"atol": atol, "rtol": 1e-4}
    for head in range(heads):
        apart = int(outside[head].sum())
        size = found.size[head].long()
        assert bool(outside[head, found.order[head, :apart]].all())
        assert int(size.sum()) == segment - apart
        assert torch.equal(found.start[head], apart + size.cumsum(0) - size)
        assert torch.equal(found.void[head] == -torch.inf, size == 0)
        cell = torch.arange(cells, device=DEVICE).repeat_interleave(size)
        own_keys, own_values = (x[head, found.order[head, apart:]].double() for x in (keys, values))

        def mean(rows: Tensor, cell: Tensor = cell, size: Tensor = size) -> Tensor:
            total = rows.new_zeros(cells, rows.shape[1]).index_add_(0, cell, rows)
            return total / size.clamp(min=1)[:, None]

        off_keys, off_values = own_keys - mean(own_keys)[cell], own_values - mean(own_values)[cell]
        torch.testing.assert_close(found.centroid[head].double(), mean(own_keys), **close)
        torch.testing.assert_close(found.value[head].double(), mean(own_values), **close)
        torch.testing.assert_close(found.variance[head].double(), mean(off_keys.square()), **close)
        off = (found.cross[head].double() - off_values.T @ off_keys).norm()
        assert float(off) <= 1e-4 * segment


def scatter(found: ClosedSegment, keys: Tensor) -> float:
    """What k-means makes small: squared deviations from the mean of a cell, coordinates weighted by their root mean square."""
    return float((found.size[..., None] * found.variance * keys.float().square().mean(1, keepdim=True)).sum())


def assert_same(found: ClosedSegment, expected: ClosedSegment) -> None:
    for name, theirs in vars(expected).items():
        # Sums on a card are in no order of their own.
        exact = not theirs.is_floating_point()
        torch.testing.assert_close(getattr(found, name), theirs, atol=0 if exact else 1e-3, rtol=0 if exact else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("dim", "value_dim"), [(16, 16), (64, 24)])
def test_a_segment_closed_by_kernels(dim: int, value_dim: int, dtype: torch.dtype, by_kernels: list[int]) -> None:
    keys, values, outside = clustered(dim=dim).to(dtype), normal(HEADS, SEGMENT, value_dim).to(dtype), sinks()
    found = close_segment(keys, values, None, outside, CELLS, TWICE)
    assert by_kernels == [HEADS]
    assert_right(found, keys, values, outside, CELLS)
    assert int((found.size > 0).sum(1).min()) > 0.9 * CELLS


@pytest.mark.parametrize(("length", "cells"), [(300, 1), (300, 7), (100, 67), (40, 40), (5, 9), (1, 1)])
def test_as_many_cells_as_asked_for(length: int, cells: int) -> None:
    keys = normal(2, length, 16)
    found = triton_forward.group_keys(keys, cells, 2, 0)
    assert found.shape == (2, length)
    assert int(found.min()) >= 0
    assert int(found.max()) < min(cells, length)
    assert all(len(own.unique()) > 0.8 * min(cells, length) for own in found)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("dim", [16, 64])
def test_cells_are_as_tight_as_in_torch(
    dim: int, dtype: torch.dtype, by_kernels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, values = clustered(dim=dim, length=600, groups=37).to(dtype), normal(HEADS, 600, 4).to(dtype)
    outside = sinks(length=600, first=0)
    inside = scatter(close_segment(keys, values, None, outside, 37, nf.KMeans()), keys)
    monkeypatch.setattr(backends, "runs_triton", lambda device: False)
    in_torch = scatter(close_segment(keys, values, None, outside, 37, nf.KMeans()), keys)
    worse = scatter(close_segment(keys, values, None, outside, 37, nf.KMeans(iterations=0)), keys)
    assert by_kernels == [HEADS]
    assert inside <= 1.04 * in_torch < worse


def test_keys_that_are_alike_do_not_share_one_cell() -> None:
    keys = clustered(length=1)[:, :1].expand(-1, SEGMENT, -1)
    found = triton_forward.group_keys(keys, CELLS, 2, 0)
    assert max(int(own.bincount().max()) for own in found) <= 9 * -(-SEGMENT // CELLS)  # eight times, and what the host had


def test_iterations_and_seed_are_those_of_the_partition(by_kernels: list[int]) -> None:
    keys, values, outside = clustered(), normal(HEADS, SEGMENT, 4), sinks()
    first, again, other, rough = (
        close_segment(keys, values, None, outside, CELLS, partition).order
        for partition in (TWICE, TWICE, nf.KMeans(2, seed=1), nf.KMeans(0))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, rough)


def test_padding_goes_the_way_of_torch(by_kernels: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values, outside = clustered(), normal(HEADS, SEGMENT, 4), sinks()
    counts = torch.ones(HEADS, SEGMENT, dtype=torch.bool, device=DEVICE)
    counts[1, :40] = counts[1, 100:130] = False
    outside = outside | ~counts
    found = close_segment(keys, values, counts, outside, CELLS, TWICE)
    assert by_kernels == [2]
    assert_right(found, keys, values, outside, CELLS)
    monkeypatch.setattr(backends, "runs_triton", lambda device: False)
    in_torch = close_segment(keys, values, counts, outside, CELLS, TWICE)
    assert torch.equal(found.order[1], in_torch.order[1])
    assert by_kernels == [2]


@pytest.mark.parametrize(
    ("dim", "dtype", "cells", "partition"),
    [
        (16, torch.float64, CELLS, TWICE),
        (257, torch.float32, CELLS, TWICE),
        (16, torch.float32, CELLS, nf.Blocks()),
        (16, torch.float32, CELLS, nf.HashBuckets()),
    ],
    ids=["dtype", "columns", "blocks", "hash"],
)
def test_what_the_kernels_do_not_serve(
    dim: int, dtype: torch.dtype, cells: int, partition: Partition, by_kernels: list[int]
) -> None:
    keys, values, outside = clustered(dim=dim).to(dtype), normal(HEADS, SEGMENT, 4).to(dtype), sinks()
    assert_right(close_segment(keys, values, None, outside, cells, partition), keys, values, outside, cells)
    assert not by_kernels


def test_more_cells_than_the_kernels_serve(by_kernels: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_segments, "MOST_CELLS", CELLS - 1)
    close_segment(clustered(), normal(HEADS, SEGMENT, 4), None, sinks(), CELLS, TWICE)
    assert not by_kernels
    close_segment(clustered(), normal(HEADS, SEGMENT, 4), None, sinks(), CELLS - 1, TWICE)
    assert by_kernels == [HEADS]


@pytest.mark.parametrize("runs_triton", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_some_heads_at_a_time(runs_triton: bool, padding: bool, by_kernels: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "runs_triton", lambda device: runs_triton)
    keys, values, outside, counts = clustered(5), normal(5, SEGMENT, 40), sinks(5), None
    if padding:
        counts = torch.ones(5, SEGMENT, dtype=torch.bool, device=DEVICE)
        counts[3, :40] = False
        outside = outside | ~counts
    whole = close_segment(keys, values, counts, outside, CELLS, TWICE)
    by_kernels.clear()
    # Two heads: values are wider than keys.
    monkeypatch.setattr(cache_segments, "BYTES_AT_A_TIME", 2 * SEGMENT * 40 * 4)
    assert_same(close_segment(keys, values, counts, outside, CELLS, TWICE), whole)
    assert by_kernels == ([] if not runs_triton else [2, 1, 1] if padding else [2, 2, 1])
    monkeypatch.setattr(cache_segments, "BYTES_AT_A_TIME", 1)
    assert_same(close_segment(keys, values, counts, outside, CELLS, TWICE), whole)


def test_more_heads_than_a_grid_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = clustered()
    whole = triton_forward.group_keys(keys, CELLS, 2, 0)
    monkeypatch.setattr("nearfield.cells.triton.memory.MOST_ENTRIES", 2)
    assert torch.equal(triton_forward.group_keys(keys, CELLS, 2, 0), whole)


@pytest.mark.usefixtures("poisoned")
def test_keys_of_a_larger_buffer() -> None:
    keys = clustered()
    room = torch.full((HEADS, 2 * SEGMENT, 32), torch.nan, device=DEVICE)
    part, apart = room[:, 100 : 100 + SEGMENT, :16], room[:, 100 : 100 + SEGMENT, ::2]
    expected = triton_forward.group_keys(keys, CELLS, 2, 0)
    for place in (part, apart):
        place.copy_(keys)
        assert torch.equal(triton_forward.group_keys(place, CELLS, 2, 0), expected)


def test_layouts_of_the_engine_stay(by_kernels: list[int]) -> None:
    before = layout_of.cache_info()
    for length in range(20, 30):
        close_segment(normal(1, length, 16), normal(1, length, 4), None, sinks(1, length, 0), 4, nf.KMeans(iterations=1))
    assert len(by_kernels) == 10
    assert layout_of.cache_info() == before


def test_a_store_whose_segments_are_closed_by_kernels(monkeypatch: pytest.MonkeyPatch, by_kernels: list[int]) -> None:
    store = CellStore(nf.Cells(segment=32, cell_size=4, sinks=5, window=8, probes=10**6))
    key, value, query = normal(2, 2, 110, 16, seed=0), normal(2, 2, 110, 16), normal(2, 4, 110, 16, seed=2)
    store.append(key, value)
    store.close()
    assert by_kernels == [4, 4, 4]
    assert torch.equal(store.keys, key)
    monkeypatch.setattr(backends, "runs_triton", lambda device: False)
    exact = torch.nn.functional.scaled_dot_product_attention(query[:, :, -1:], key, value, enable_gqa=True)
    torch.testing.assert_close(store.attend(query[:, :, -1:]), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_a_long_segment_on_a_card(by_kernels: list[int]) -> None:
    heads, length, cells = 8, 65536, 1448
    keys, values = (torch.randn(heads, length + 64, 128, device="cuda").bfloat16()[:, :length] for _ in range(2))
    outside = sinks(heads, length, 16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = close_segment(keys, values, None, outside, cells, nf.KMeans())
    assert torch.cuda.max_memory_allocated() - before < 2 << 30
    assert by_kernels == [heads]
    assert_right(found, keys, values, outside, cells, atol=1e-4)
    assert float(found.size.max()) <= 10 * 46  # parts are cut as if at random
