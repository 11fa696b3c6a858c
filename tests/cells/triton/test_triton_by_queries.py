"""The kernels group keys as queries are large, as the engine in torch does."""

from __future__ import annotations

import pytest
import torch
from by_hand import seeded
from torch import Tensor

import nearfield as nf
from nearfield.cells.sizes import CellSizes
from nearfield.cells.torch.head import sizes_of_queries

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ASKS = nf.KMeans(by_queries=True)


def sizes_by_kernel(queries: Tensor, visible: Tensor, length: int, sizes: CellSizes) -> Tensor:
    from nearfield.cells.triton.by_queries import sizes_of_queries as by_kernel
    from nearfield.cells.triton.layout import as_read, layout_of

    layout = layout_of(length, sizes, DEVICE)
    found = by_kernel(queries, as_read(visible), layout, sizes.group)
    # Of each segment, as torch has them.
    places = [span.first + span.segments - 1 for span in layout.spans.all]
    return torch.empty_like(found).index_copy(1, torch.tensor(places, device=DEVICE), found)


@pytest.mark.parametrize(
    ("rows", "keys", "offset", "dim"), [(200, 200, 0, 16), (90, 250, 160, 24), (200, 150, -50, 40), (3, 200, 197, 16)]
)
def test_sizes_are_those_of_torch(rows: int, keys: int, offset: int, dim: int) -> None:
    sizes = CellSizes(3, 32, 0, 2, 4, 3, 0, 3)
    queries = torch.randn(2, 3 * rows, dim, generator=seeded(0)).to(DEVICE)
    # The second entry has hidden keys, so that several rows see as many.
    own = (torch.arange(rows) + 1 + offset).clamp(0, keys)
    visible = torch.stack([own, (own * 3 // 4).clamp(max=keys)]).repeat(1, 3).to(DEVICE)
    found = sizes_by_kernel(queries, visible, keys, sizes)
    for entry in range(2):
        wanted = sizes_of_queries(queries[entry], visible[entry], sizes, ASKS)
        assert wanted is not None
        torch.testing.assert_close(found[entry, : len(wanted)], wanted, rtol=1e-5, atol=1e-6)
    assert (rows == 3) == (float(found[0].sum()) == 0.0)


@pytest.mark.parametrize("rows", [7, 64, 500])
def test_without_a_mask(rows: int) -> None:
    sizes = CellSizes(2, 0, 0, 2, 4, 3, 0)
    queries = torch.randn(2, 2 * rows, 16, generator=seeded(0)).to(DEVICE)
    visible = torch.full((2, 2 * rows), 100, device=DEVICE)
    found = sizes_by_kernel(queries, visible, 100, sizes)
    for entry in range(2):
        wanted = sizes_of_queries(queries[entry], visible[entry], sizes, ASKS)
        assert wanted is not None
        torch.testing.assert_close(found[entry], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, 1e30])
def test_sizes_that_say_nothing(bad: float) -> None:
    sizes = CellSizes(1, 32, 0, 0, 4, 3, 0, 3)
    queries = torch.randn(1, 130, 16, generator=seeded(0)).to(DEVICE)
    queries[0, 100, 3] = bad
    visible = torch.arange(1, 131, device=DEVICE)[None]
    found = sizes_by_kernel(queries, visible, 130, sizes)[0]
    # The row is among the latest 64 of the fourth segment only.
    assert float(found[3].abs().max()) == 0.0
    assert bool((found[:3].amax(1) == 1.0).all())


@pytest.mark.parametrize("causal", [True, False])
def test_cells_suit_the_queries(causal: bool) -> None:
    query, key, value = (torch.randn(1, heads, 300, 16, generator=seeded(heads)).to(DEVICE) for heads in (2, 1, 1))
    query[..., :8] *= 0.05
    query[..., 8:] *= 5.0
    key[..., :8] *= 4.0
    exact = nf.attention(query, key, value, is_causal=causal, enable_gqa=True, method=nf.Exact())
    errors = []
    for partition in (nf.KMeans(), ASKS):
        method = nf.Cells(8, 4, segment=64 if causal else None, partition=partition, share=1)
        found = nf.attention(query, key, value, is_causal=causal, enable_gqa=True, method=method, backend="triton")
        errors.append(float((found - exact).norm() / exact.norm()))
    assert errors[1] < 0.8 * errors[0]


def test_weights_that_are_zero_are_those_of_keys() -> None:
    from nearfield.cells.triton.cluster import kmeans
    from nearfield.cells.triton.layout import layout_of

    sizes = CellSizes(1, 32, 0, 0, 4, 3, 0, 3)
    keys = (torch.randn(2, 100, 16, generator=seeded(0)) * torch.linspace(0.1, 4.0, 16)).to(DEVICE)
    layout, cells = layout_of(100, sizes, DEVICE), []
    weights = torch.rand(2, 3, 16, generator=seeded(1)).to(DEVICE)
    own = weights.clone()
    own[0] = 0.0
    for given in (None, weights, own):
        found = torch.empty(2, 3, 100, dtype=torch.int32, device=DEVICE)
        kmeans(keys, layout, 2, 0, None, found, given)
        cells.append(found)
    assert torch.equal(cells[2][0], cells[0][0])
    assert torch.equal(cells[2][1], cells[1][1])
    assert not torch.equal(cells[1], cells[0])
