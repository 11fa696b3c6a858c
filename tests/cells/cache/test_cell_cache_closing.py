"""Closing a segment, by Triton kernels and in torch. Without a GPU the kernels run in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import seeded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import nearfield as nf
from nearfield.cells.cache import segments as cache_segments
from nearfield.cells.cache.segments import ClosedSegment, close_segment
from nearfield.cells.cache.store import CellStore
from nearfield.cells.partition import Partition
from nearfield.kernels import backends

pytest.importorskip("triton")

from nearfield.cells.triton import closing
from nearfield.cells.triton import forward as triton_forward
from nearfield.cells.triton.layout import layout_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HEADS, SEGMENT, CELLS = 3, 160, 13
TWICE = nf.KMeans(iterations=2)
# The interpreter computes nonsense with 16-bit floats.
HALVES = [pytest.param(dtype, marks=pytest.mark.gpu) for dtype in (torch.bfloat16, torch.float16)]


def clustered(heads: int = HEADS, length: int = SEGMENT, dim: int = 16, groups: int = 20, seed: int = 0) -> Tensor:
    """Keys around some centres, away from zero, with coordinates of different sizes."""
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
    """Have kernels close segments, as on a GPU. Returns a list of how many heads each of their calls was for."""
    calls = []
    group_keys = triton_forward.group_keys

    def counted(keys: Tensor, *arguments: Any) -> Tensor:
        calls.append(len(keys))
        return group_keys(keys, *arguments)

    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    monkeypatch.setattr(triton_forward, "group_keys", counted)
    return calls


def assert_right(
    found: ClosedSegment,
    keys: Tensor,
    values: Tensor,
    outside: Tensor,
    cells: int,
    atol: float = 1e-5,
    in_half: bool = False,
) -> None:
    """`order` has every key once, and the moments of a cell are those of its keys. `in_half`: up to rounding to 16 bits."""
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
        assert torch.equal(found.log_exists[head] == -torch.inf, size == 0)
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
        rounded = 2**-8 * float(off_values.norm() * off_keys.norm()) if in_half else 0.0  # both factors have 8 bits
        assert float(off) <= 1e-4 * segment + rounded


def scatter(found: ClosedSegment, keys: Tensor) -> float:
    """What k-means makes small: squared deviations from the means of cells, with coordinates weighted by their mean square."""
    return float((found.size[..., None] * found.variance * keys.float().square().mean(1, keepdim=True)).sum())


def assert_same(found: ClosedSegment, expected: ClosedSegment) -> None:
    for name, theirs in vars(expected).items():
        # On a GPU, sums are taken in any order.
        exact = not theirs.is_floating_point()
        torch.testing.assert_close(getattr(found, name), theirs, atol=0 if exact else 1e-3, rtol=0 if exact else 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize(("dim", "value_dim", "known"), [(16, 16, None), (64, 24, None), (16, 16, 5), (64, 24, 5), (16, 8, 0)])
def test_a_segment_closed_by_kernels(
    dim: int, value_dim: int, known: int | None, dtype: torch.dtype, by_kernels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is known how many keys are outside, kernels make the moments too."""
    keys, values = clustered(dim=dim).to(dtype), normal(HEADS, SEGMENT, value_dim).to(dtype)
    outside = sinks(first=5 if known is None else known)
    tables = []
    tabulate_segment = closing.tabulate_segment

    def counted(*arguments: Any) -> Any:
        tables.append(1)
        return tabulate_segment(*arguments)

    monkeypatch.setattr(closing, "tabulate_segment", counted)
    found = close_segment(keys, values, None, outside, CELLS, TWICE, first_outside=known)
    assert by_kernels == [HEADS]
    assert len(tables) == (known is not None)
    # What kernels read of 16-bit keys has 16 bits.
    in_half = dtype != torch.float32 and known is not None
    assert_right(found, keys, values, outside, CELLS, 0.05 if in_half else 1e-5, in_half)
    assert int((found.size > 0).sum(1).min()) > 0.9 * CELLS


class Waiting(TorchDispatchMode):
    """Notes the operations for which a host has to wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.nonzero.default, torch.ops.aten._local_scalar_dense.default):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("closed", "segment"), [(0, 2), (0, 64), (2, 64), (64, 128)])
def test_sinks_without_padding_are_known_without_waiting(closed: int, segment: int) -> None:
    """The same as where a mask says that there is none. In a prompt, a host that waits starts the next kernels too late."""
    store = CellStore(nf.Cells(segment=64, cell_size=8, sinks=5, window=4))
    store.append(*normal(2, 3, 2, 150, 16).unbind(0))
    assert store.state is not None
    state = store.state
    if closed:
        state = state.but(sinks=state._find_sinks(slice(0, closed))[1])
    padded = state.but(key_padding=torch.ones(3, 150, dtype=torch.bool, device=DEVICE))
    with Waiting() as waiting:
        found = state._find_sinks(slice(closed, segment))
    assert waiting.found == []
    for mine, expected in zip(found, padded._find_sinks(slice(closed, segment)), strict=True):
        assert torch.equal(mine, expected)
    with Waiting() as waiting:
        padded._find_sinks(slice(closed, segment))
    assert waiting.found != []


@pytest.mark.parametrize(("length", "cells"), [(300, 1), (300, 7), (100, 67), (40, 40), (5, 9), (1, 1)])
def test_as_many_cells_as_asked_for(length: int, cells: int) -> None:
    found = triton_forward.group_keys(normal(1, length, 16), cells, 2, 0)
    assert found.shape == (1, length)
    assert int(found.min()) >= 0
    assert int(found.max()) < min(cells, length)
    assert len(found.unique()) > 0.8 * min(cells, length)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("dim", [16, 64])
def test_cells_are_as_tight_as_in_torch(
    dim: int, dtype: torch.dtype, by_kernels: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On average: k-means ends somewhere else if a single key is on another side."""
    keys, values = clustered(1, 600, dim, groups=37).to(dtype), normal(1, 600, 4).to(dtype)
    outside = sinks(1, 600, first=0)

    def scattered(iterations: int | None = None) -> float:
        methods = [nf.KMeans(iterations, seed) for seed in range(3)]
        return sum(scatter(close_segment(keys, values, None, outside, 37, method), keys) for method in methods)

    by_triton = scattered()
    monkeypatch.setattr(backends, "runs_triton", lambda device: False)
    in_torch, worse = scattered(), scattered(0)
    assert by_kernels == [1, 1, 1]
    assert by_triton <= 1.04 * in_torch < worse


def test_keys_that_are_alike_do_not_share_one_cell() -> None:
    keys = clustered(length=1)[:, :1].expand(-1, SEGMENT, -1)
    found = triton_forward.group_keys(keys, CELLS, 2, 0)
    # Eight times the mean, in a small cell that keeps its own keys.
    assert max(int(own.bincount().max()) for own in found) <= 9 * -(-SEGMENT // CELLS)


def test_a_cache_iterates_five_times_by_kernels_as_well(by_kernels: list[int]) -> None:
    keys, values, outside = clustered(1), normal(1, SEGMENT, 4), sinks(1)
    found, five, two = (
        close_segment(keys, values, None, outside, CELLS, partition).order for partition in (nf.KMeans(), nf.KMeans(5), TWICE)
    )
    assert torch.equal(found, five)
    assert not torch.equal(found, two)
    assert by_kernels == [1, 1, 1]


def test_iterations_and_seed_are_those_of_the_partition(by_kernels: list[int]) -> None:
    keys, values, outside = clustered(1), normal(1, SEGMENT, 4), sinks(1)
    first, again, other, rough = (
        close_segment(keys, values, None, outside, CELLS, partition).order
        for partition in (TWICE, TWICE, nf.KMeans(2, seed=1), nf.KMeans(0))
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(first, rough)


def test_heads_with_padding_are_closed_in_torch(by_kernels: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    keys, values, outside = clustered(), normal(HEADS, SEGMENT, 4), sinks()
    key_padding = torch.ones(HEADS, SEGMENT, dtype=torch.bool, device=DEVICE)
    key_padding[1, :40] = key_padding[1, 100:130] = False
    outside = outside | ~key_padding
    found = close_segment(keys, values, key_padding, outside, CELLS, TWICE)
    assert by_kernels == [2]
    assert_right(found, keys, values, outside, CELLS)
    monkeypatch.setattr(backends, "runs_triton", lambda device: False)
    in_torch = close_segment(keys, values, key_padding, outside, CELLS, TWICE)
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
    monkeypatch.setattr("nearfield.cells.triton.limits.MOST_CELLS", CELLS - 1)
    close_segment(clustered(), normal(HEADS, SEGMENT, 4), None, sinks(), CELLS, TWICE)
    assert not by_kernels
    close_segment(clustered(), normal(HEADS, SEGMENT, 4), None, sinks(), CELLS - 1, TWICE)
    assert by_kernels == [HEADS]


@pytest.mark.parametrize("runs_triton", [False, True])
@pytest.mark.parametrize("padding", [False, True])
def test_some_heads_at_a_time(runs_triton: bool, padding: bool, by_kernels: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "runs_triton", lambda device: runs_triton)
    keys, values, outside, key_padding = clustered(), normal(HEADS, SEGMENT, 40), sinks(), None
    if padding:
        key_padding = torch.ones(HEADS, SEGMENT, dtype=torch.bool, device=DEVICE)
        key_padding[1, :40] = False
        outside = outside | ~key_padding
    arguments = keys, values, key_padding, outside, CELLS, nf.KMeans(iterations=1)
    whole = close_segment(*arguments)
    # Room for two heads, since values are wider than keys; and for none, which means one.
    for room, calls in ((2 * SEGMENT * 40 * 4, [1, 1] if padding else [2, 1]), (1, [1, 1] if padding else [1, 1, 1])):
        by_kernels.clear()
        monkeypatch.setattr(cache_segments, "BYTES_AT_A_TIME", room)
        assert_same(close_segment(*arguments), whole)
        assert by_kernels == (calls if runs_triton else [])


def test_more_heads_than_a_grid_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = clustered()
    whole = triton_forward.group_keys(keys, CELLS, 1, 0)
    monkeypatch.setattr("nearfield.cells.triton.memory.MOST_ENTRIES", 2)
    assert torch.equal(triton_forward.group_keys(keys, CELLS, 1, 0), whole)


@pytest.mark.usefixtures("poisoned")
def test_keys_of_a_larger_buffer() -> None:
    keys = clustered(2)
    buffer = torch.full((2, 2 * SEGMENT, 32), torch.nan, device=DEVICE)
    expected = triton_forward.group_keys(keys, CELLS, 1, 0)
    for columns in (slice(16), slice(0, None, 2)):
        view = buffer[:, 100 : 100 + SEGMENT, columns]
        view.copy_(keys)
        assert torch.equal(triton_forward.group_keys(view, CELLS, 1, 0), expected)


def test_layouts_of_the_engine_stay(by_kernels: list[int]) -> None:
    before = layout_of.cache_info()
    for length in range(20, 30):
        close_segment(normal(1, length, 16), normal(1, length, 4), None, sinks(1, length, 0), 4, nf.KMeans(iterations=1))
    assert len(by_kernels) == 10
    assert layout_of.cache_info() == before


def test_a_store_whose_segments_are_closed_by_kernels(monkeypatch: pytest.MonkeyPatch, by_kernels: list[int]) -> None:
    store = CellStore(nf.Cells(segment=32, cell_size=4, sinks=5, window=8, probes=10**6, partition=TWICE))
    key, value, query = normal(2, 2, 78, 16, seed=0), normal(2, 2, 78, 16), normal(2, 4, 78, 16, seed=2)
    store.append(key, value)
    store.close()
    assert by_kernels == [4, 4]
    assert torch.equal(store.keys, key)
    monkeypatch.setattr(backends, "runs_triton", lambda device: False)
    exact = torch.nn.functional.scaled_dot_product_attention(query[:, :, -1:], key, value, enable_gqa=True)
    torch.testing.assert_close(store.attend(query[:, :, -1:]), exact, atol=1e-5, rtol=1e-5)


@pytest.mark.gpu
def test_a_long_segment_on_a_gpu(by_kernels: list[int]) -> None:
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
    assert float(found.size.max()) <= 10 * 46  # A large cell is split at random, so its parts are not quite equal.
