"""Keys are grouped as queries are large by coordinate, and by queries that every row that reads a cell may know."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import seeded
from operator_calls import compiled
from torch import Tensor

import nearfield as nf
from nearfield.cells.operator import Recipe
from nearfield.cells.partition import from_plain, to_plain
from nearfield.cells.partition.by_queries import LATEST, latest_squares, sizes_of, strewn_squares
from nearfield.cells.sizes import CellSizes
from nearfield.cells.torch.head import assign, sizes_of_queries

ASKS = nf.KMeans(by_queries=True)
SIZES = {"cell_size": 4, "probes": 3, "segment": 32, "sinks": 2}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64)


def inputs(length: int = 400, heads: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    """Keys differ most in the first half of coordinates, and queries ask along the second half."""
    query, key, value = normal(2, heads, length, 8), normal(2, 2, length, 8, seed=1), normal(2, 2, length, 8, seed=2)
    query[..., :4] *= 0.05
    query[..., 4:] *= 6.0
    key[..., :4] *= 4.0
    return query, key, value


def call(partition: nf.KMeans, causal: bool, given: tuple[Tensor, Tensor, Tensor] | None = None, **options: Any) -> Tensor:
    sizes = SIZES if causal else {name: x for name, x in SIZES.items() if name != "segment"}
    method = nf.Cells(partition=partition, **sizes)
    return nf.attention(*(given or inputs()), is_causal=causal, enable_gqa=True, method=method, **options)


def error(found: Tensor, causal: bool) -> float:
    exact = nf.attention(*inputs(), is_causal=causal, enable_gqa=True, method=nf.Exact())
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_cells_suit_the_queries(backend: str, causal: bool) -> None:
    usual, asked = (error(call(x, causal, backend=backend), causal) for x in (nf.KMeans(), ASKS))
    assert asked < 0.8 * usual


def test_latest_squares_by_hand() -> None:
    queries = normal(3, 2, 300, 5)
    # Some rows see nothing, and some as much as the row before them.
    visible = torch.cat([torch.zeros(20, dtype=torch.int64), torch.arange(1, 211), torch.full((70,), 210)])
    ends = [10, LATEST, 128, 209, 210, 500]
    found = latest_squares(queries, visible, ends)
    for number, end in enumerate(ends):
        own = [queries[:, :, row] for row in range(300) if max(0, end - LATEST) < visible[row] <= end]
        wanted = sum((x.square().sum(1) for x in own), torch.zeros(3, 5, dtype=torch.float64))
        torch.testing.assert_close(found[:, number], wanted)
    assert float(found[:, -1].abs().max()) == 0.0


@pytest.mark.parametrize("length", [5, LATEST, 1000])
def test_strewn_squares_by_hand(length: int) -> None:
    queries = normal(2, length, 3)
    count = min(length, LATEST)
    wanted = sum(queries[:, number * length // count].square().sum(0) for number in range(count))
    torch.testing.assert_close(strewn_squares(queries, torch.arange(length), length)[0], wanted)
    # Two ranks know half of the rows each.
    halves = [torch.arange(0, length, 2), torch.arange(1, length, 2)]
    torch.testing.assert_close(sum(strewn_squares(queries[:, x], x, length)[0] for x in halves), wanted)


def test_sizes_say_nothing_where_nothing_is_known() -> None:
    squares = torch.tensor([[4.0, 1.0], [0.0, 0.0], [torch.nan, 1.0], [torch.inf, 1.0], [1e-30, 4e-30]])
    wanted = torch.tensor([[1.0, 0.5], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [0.5, 1.0]])
    torch.testing.assert_close(sizes_of(squares), wanted)


def test_distances_are_weighted_by_sizes() -> None:
    """As if keys, times sizes, had been grouped without any weight."""
    keys, sizes = normal(2, 90, 4) * torch.tensor([9.0, 1.0, 1.0, 1.0]), normal(2, 4, seed=1).abs()
    found = ASKS.build(keys, 9, sizes)
    for entry in range(2):
        scaled = keys[entry] * sizes[entry]
        flat = scaled / scaled.square().mean(0).sqrt().sqrt()  # K-means multiplies by the root mean square again.
        assert torch.equal(found[entry], nf.KMeans().build(flat[None], 9)[0])
    nothing = torch.zeros(2, 4, dtype=torch.float64)
    assert torch.equal(ASKS.build(keys, 9, nothing), nf.KMeans().build(keys, 9))


def test_each_span_is_grouped_by_the_queries_at_its_end() -> None:
    sizes = CellSizes(2, 16, 0, 0, 4, 3, 0, 4)
    queries, keys = normal(2 * 130, 8), normal(130, 8, seed=1)
    visible = torch.arange(1, 131).repeat(2)
    asked = sizes_of_queries(queries, visible, sizes, ASKS)
    assert asked is not None
    assert asked.shape == (8, 8)
    members = queries.view(2, 130, 8)
    for segment, end in enumerate(range(16, 129, 16)):
        own = members[:, max(0, end - LATEST) : end].square().sum((0, 1)).sqrt()
        torch.testing.assert_close(asked[segment], own / own.max())
    found = assign(keys, visible, sizes, ASKS, queries=asked)
    per_span = 4 * 4
    # Segments 4 to 5 are the second span of level 1; level 0 has four spans before it, level 1 one of two segments.
    part = keys[64:96]
    wanted = ASKS.build(part[None], 8, asked[5][None])[0] + 4 * per_span // 4 + 8
    assert torch.equal(found[1, 64:96], wanted)
    assert sizes_of_queries(queries, visible, sizes, nf.KMeans()) is None


@pytest.mark.parametrize("causal", [True, False])
def test_a_query_that_is_not_finite_leaves_other_rows_finite(causal: bool) -> None:
    query, key, value = inputs()
    query[0, 0, 30] = torch.nan
    query[1, 3, 31] = torch.inf
    found = call(ASKS, causal, (query, key, value))
    bad = found.isnan().any(-1)
    assert bad[0, 0, 30]
    assert bad[1, 3, 31]
    assert int(bad.sum()) == 2


def test_rows_that_come_after_all_keys_change_no_cell() -> None:
    """The queries of the keys in cells are not there: then keys are weighted by their own size."""
    query, key, value = inputs()
    given = query[:, :, :3], key, value
    options = {"offset": 397}
    assert torch.equal(call(ASKS, True, given, **options), call(nf.KMeans(), True, given, **options))


def test_gradients_are_those_of_the_reference() -> None:
    grads = []
    for backend in ("cpu", "reference"):
        leaves = [x.clone().requires_grad_() for x in inputs(150)]
        output = call(ASKS, True, tuple(leaves), backend=backend)  # type: ignore[arg-type]
        grads.append(torch.autograd.grad((output * normal(*output.shape, seed=5)).sum(), leaves))
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_compiled_call_is_the_same() -> None:
    given = inputs(100)
    assert torch.equal(compiled(lambda *x: call(ASKS, True, x))(*given), call(ASKS, True, given))


def test_padding_is_as_if_keys_were_not_there() -> None:
    query, key, value = inputs(200, heads=2)
    mask = torch.ones(2, 1, 1, 200, dtype=torch.bool)
    mask[..., :40] = False
    padded = call(ASKS, True, (query, key, value), attn_mask=mask)
    without = call(ASKS, True, (query[:, :, 40:], key[:, :, 40:], value[:, :, 40:]))
    torch.testing.assert_close(padded[:, :, 40:], without)


def test_operators_are_told() -> None:
    for asks in (True, False):
        made = from_plain(*to_plain(nf.KMeans(3, 7, asks)))
        assert made == nf.KMeans(3, 7, asks)
        assert made.by_queries is asks  # type: ignore[attr-defined]
    recipe = Recipe(CellSizes(1, 0, 0, 0, 4, 3, 0), 1.0, 0.0, *to_plain(ASKS), "torch")
    assert all(type(option) is int for option in recipe.options)
    with pytest.raises(TypeError, match="by_queries must be True or False, got 'yes'"):
        nf.KMeans(by_queries="yes")  # type: ignore[arg-type]


class Inherits(nf.KMeans):
    pass


class Builds(nf.KMeans):
    def build(self, keys: Tensor, cells: int) -> Tensor:  # type: ignore[override]
        return super().build(keys, cells)


@pytest.mark.parametrize("own", [Inherits, Builds])
@pytest.mark.parametrize("options", [{"is_causal": True}, {"window_size": (299, 0)}], ids=["causal", "window"])
def test_partitions_of_ones_own_build_from_keys_alone(own: type[nf.KMeans], options: dict[str, Any]) -> None:
    given = inputs(600)
    found, wanted = (
        nf.attention(*given, enable_gqa=True, method=nf.Cells(partition=partition, **SIZES), **options)  # type: ignore[arg-type]
        for partition in (own(by_queries=True), nf.KMeans())
    )
    assert torch.equal(found, wanted)
