"""Steps in a CUDA graph: what a store holds, and what comes out, is that of steps without one."""

from __future__ import annotations

import pytest
import torch
from by_hand import seeded
from torch import Tensor

import nearfield as nf
from nearfield.cells.cache.graph import StepGraph
from nearfield.cells.cache.store import CellStore
from nearfield.checks import MOST

pytestmark = pytest.mark.gpu
LENGTH = 700


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = seeded(0)
    key, value = torch.randn(2, 2, 2, LENGTH, 64, generator=generator).cuda()
    return key, value, 2 * torch.randn(2, 8, LENGTH, 64, generator=generator).cuda()


def steps(store: CellStore, graph: StepGraph, data: tuple[Tensor, Tensor, Tensor], stop: int) -> None:
    """Up to so many keys; each output is that of the same row, asked again."""
    while store.length < stop:
        at = slice(store.length, store.length + 1)
        for place, x in zip(graph.inputs, data, strict=True):
            place.copy_(x[:, :, at])
        found = graph().clone()
        assert store.length == at.stop
        torch.testing.assert_close(found, store.attend(data[2][:, :, at]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("segment", "offload"), [(64, False), (64, True), (MOST, False)])
@pytest.mark.parametrize("first", [5, 600])
def test_a_graph_goes_on(first: int, segment: int, offload: bool) -> None:
    """Also from fewer keys than a window has, over several segments or in an endless one, and after keys have been taken back."""
    data = inputs()
    store = CellStore(nf.Cells(segment=segment, cell_size=16, probes=6), offload=offload)
    store.append(*(x[:, :, :first] for x in data[:2]))
    store.attend(data[2][:, :, first - 1 : first])
    graph = StepGraph(store, *(x[:, :, first : first + 1].clone() for x in data))
    steps(store, graph, data, first + 90)
    store.crop(first + 85)
    steps(store, graph, data, first + 90)
    store.crop(max(1, first - 200))
    steps(store, graph, data, first + 100)
    assert torch.equal(store.keys, data[0][:, :, : first + 100])  # type: ignore[arg-type]
    assert torch.equal(store.values, data[1][:, :, : first + 100])  # type: ignore[arg-type]


def test_all_cells_opened_is_exact_attention() -> None:
    data = inputs()
    store = CellStore(nf.Cells(segment=64, cell_size=16, probes=10**6))
    store.append(*(x[:, :, :600] for x in data[:2]))
    store.attend(data[2][:, :, 599:600])
    graph = StepGraph(store, *(x[:, :, 600:601].clone() for x in data))
    for at in range(600, LENGTH):
        for place, x in zip(graph.inputs, data, strict=True):
            place.copy_(x[:, :, at : at + 1])
        key, value = (x[:, :, : at + 1] for x in data[:2])
        exact = torch.nn.functional.scaled_dot_product_attention(data[2][:, :, at : at + 1], key, value, enable_gqa=True)
        torch.testing.assert_close(graph(), exact, atol=1e-4, rtol=1e-4)
