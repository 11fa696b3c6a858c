"""One step of a cell store by the kernels in Triton, held to the step in torch: interpreted on a CPU, for real on a GPU."""

from __future__ import annotations

import pytest
import torch
from by_hand import seeded
from torch import Tensor

import nearfield as nf
from nearfield.cache import CellStore, StepGraph
from nearfield.cache.attend import attend, by_head
from nearfield.cache.held import Held

pytest.importorskip("triton")

from nearfield.cache.decode import decode, serves, tiles_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {"segment": 32, "cell_size": 4, "sinks": 5, "window": 8}


def filled(
    length: int, probes: int = 3, batch: int = 2, heads: int = 2, dim: int = 16, value_dim: int = 16, padding: int = 0
) -> CellStore:
    store = CellStore(nf.Cells(probes=probes, **SIZES))
    key, value = (torch.randn(batch, heads, length, wide, generator=seeded(wide + i)) for i, wide in enumerate((dim, value_dim)))
    counts = None
    if padding:
        counts = torch.ones(batch, length, dtype=torch.bool)
        counts[0, :padding] = False
    last = length - 1
    store.append(key[:, :, :last].to(DEVICE), value[:, :, :last].to(DEVICE), None if counts is None else counts[:, :last])
    store.close()
    store.append(key[:, :, last:].to(DEVICE), value[:, :, last:].to(DEVICE), None if counts is None else counts[:, last:])
    return store


def both(store: CellStore, group: int = 2, scale: float = 0.3) -> tuple[Tensor, Tensor]:
    """A step by the kernels, and in torch."""
    held = the(store)
    batch, heads, _, dim = held.keys.room.shape
    query = 2 * torch.randn(batch, heads * group, 1, dim, generator=seeded(7)).to(DEVICE)
    assert serves(held, query)
    expected = attend(held, by_head(query, heads, scale), held.length - 1, 1, store.probes)
    most_near = store.settings.most_open(held.segments)
    return decode(held, query.reshape(batch * heads, group, dim), scale, store.probes, most_near), expected


def the(store: CellStore) -> Held:
    assert store.held is not None
    return store.held


def assert_alike(found: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(*found, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("length", [1, 20, 41, 100, 203])
@pytest.mark.parametrize("group", [1, 3])
def test_a_step_is_the_step_in_torch(length: int, group: int) -> None:
    assert_alike(both(filled(length), group))


def test_columns_that_fill_no_block() -> None:
    assert_alike(both(filled(150, dim=24, value_dim=40), 5))


def test_all_cells_opened_is_exact_attention() -> None:
    store = filled(150, probes=10**6)
    found, expected = both(store)
    assert_alike((found, expected))
    held = the(store)
    query = 2 * torch.randn(2, 4, 1, 16, generator=seeded(7)).to(DEVICE)
    keys, values = (held.in_order(x) for x in (held.keys, held.values))
    exact = torch.nn.functional.scaled_dot_product_attention(query, keys, values, scale=0.3, enable_gqa=True)
    assert_alike((found, exact.reshape(found.shape)))


def test_padding_is_not_seen() -> None:
    assert_alike(both(filled(150, padding=70)))
    assert_alike(both(filled(40, padding=39)))


def test_a_cell_with_something_that_is_not_finite_stays_closed() -> None:
    store = filled(150)
    tables = the(store).tables
    tables.void.room[:, :, 3] = -torch.inf
    tables.centroid.room[:, :, 3] = 0.0
    tables.value.room[:, :, 3] = 0.0
    assert_alike(both(store))


def test_a_beginning_that_somebody_else_keeps() -> None:
    """A memory: the first keys are in a tensor that all batch entries share, the others in the store."""
    whole = filled(203, batch=1)
    held = the(whole)
    base = held.closed - 32
    expected = both(whole)[1]
    for buffer in (held.keys, held.values):
        buffer.base = buffer.filled.clone()
        buffer.room = buffer.room[:, :, base:].contiguous()
        buffer.offset = base
    assert_alike((both(whole)[0], expected))


def test_numbers_are_where_kernels_read_them() -> None:
    store = filled(100)
    held = the(store)
    for _ in range(3):
        assert held.numbers.tolist() == [held.length, held.closed, len(held.tables)]
        store.append(*torch.randn(2, 2, 2, 1, 16).to(DEVICE))
    store.crop(50)
    assert held.numbers.tolist() == [held.length, held.closed, len(held.tables)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_tiles_are_blocks_that_triton_multiplies(dim: int, dtype: torch.dtype) -> None:
    for size in tiles_for(dim, dtype)[:4]:
        assert size >= 16
        assert size & (size - 1) == 0


def test_a_graph_is_for_a_card() -> None:
    store = filled(40)
    key, value, query = torch.randn(3, 2, 2, 1, 16)
    with pytest.raises(ValueError, match="on a GPU"):
        StepGraph(store, key, value, query)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_real_sizes_on_a_card(dim: int, dtype: torch.dtype) -> None:
    store = CellStore(nf.Cells(segment=512, cell_size=32, probes=6))
    key, value = (torch.randn(1, 2, 5000, dim, device="cuda").to(dtype) for _ in range(2))
    store.append(key, value)
    query = 2 * torch.randn(1, 8, 1, dim, device="cuda").to(dtype)
    found = store.attend(query)
    held = the(store)
    expected = attend(held, by_head(query, 2, dim**-0.5), 4999, 1, store.probes).view(found.shape)
    off = (found.double() - expected.double()).norm() / expected.double().norm()
    assert float(off) < {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]


@pytest.mark.gpu
def test_a_captured_step_goes_on_being_right() -> None:
    """Append and attend in a graph: every replay is one more token."""
    store, other = (CellStore(nf.Cells(segment=64, cell_size=16, probes=6)) for _ in range(2))
    key, value = torch.randn(2, 1, 2, 700, 64, device="cuda")
    query = torch.randn(1, 8, 700, 64, device="cuda")
    for one in (store, other):
        one.append(key[:, :, :610], value[:, :, :610])
        one.attend(query[:, :, 609:610])
    inputs = [x[:, :, 610:611].clone() for x in (key, value, query)]
    step = StepGraph(store, *inputs)
    for at in range(610, 700):
        for place, x in zip(inputs, (key, value, query), strict=True):
            place.copy_(x[:, :, at : at + 1])
        found = step()
        other.append(key[:, :, at : at + 1], value[:, :, at : at + 1])
        torch.testing.assert_close(found, other.attend(query[:, :, at : at + 1]), atol=1e-5, rtol=1e-5)
    assert store.length == other.length
    assert store.closed == other.closed > 512
