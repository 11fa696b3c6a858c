"""Calls that are given a plan, or a part of it, by every engine."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch
from by_hand import inputs, seeded
from torch import Tensor

import nearfield as nf
from nearfield.cells.operator import CellsResult, Given, Recipe, cells_attention
from nearfield.cells.partition import to_plain
from nearfield.cells.planned import planned_attention
from nearfield.cells.reference import CellPlan, reference_attention
from nearfield.cells.sizes import CellSizes, MemoryPolicy
from nearfield.cells.spans import blocks_of_rows, closed_keys

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
ENGINES = ("torch", "reference", pytest.param("triton", marks=NEEDS_TRITON))
SEED = torch.tensor(3)
SCALE = 0.6

SIZES = {
    "plain": CellSizes(group=2, segment=0, window=0, sinks=2, cell_size=4, probes=3, samples=0),
    "causal": CellSizes(group=2, segment=12, window=0, sinks=2, cell_size=3, probes=3, samples=0, span_levels=3),
    "shared": CellSizes(group=2, segment=0, window=0, sinks=2, cell_size=4, probes=5, samples=0, share=16),
    "shared-causal": CellSizes(2, 12, 0, 2, 3, 4, 0, 3, share=16),
}
LENGTH, BATCH = 45, 2

cases = pytest.mark.parametrize("name", SIZES)
engines = pytest.mark.parametrize("engine", ENGINES)


def device_of(engine: str) -> torch.device:
    """Without a card the kernels run in Triton's interpreter. The other engines round differently from call to call on one."""
    return torch.device("cuda" if engine == "triton" and torch.cuda.is_available() else "cpu")


def problem(name: str, engine: str, padding: int = 0) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    sizes = SIZES[name]
    query, key, value = inputs(BATCH, queries=sizes.group * LENGTH, keys=LENGTH, dim=16, dtype=torch.float32)
    seen = torch.arange(1, LENGTH + 1) if sizes.segment else torch.full((LENGTH,), LENGTH - padding)
    device = device_of(engine)
    return (1.5 * query.to(device), key.to(device), value.to(device)), seen.to(device).repeat(sizes.group).expand(BATCH, -1)


def recipe_of(name: str, engine: str, **changes: Any) -> Recipe:
    return Recipe(SIZES[name]._replace(**changes), SCALE, 0.0, *to_plain(nf.KMeans(iterations=1)), engine)


def reference_says(name: str, tensors: tuple[Tensor, ...], visible: Tensor, result: CellsResult) -> tuple[Tensor, Tensor]:
    """Output and log-normaliser for the plan of a result, in float64, written without any engine."""
    sizes, outputs, ends = SIZES[name], [], []
    for entry in range(BATCH):
        query, key, value = (x[entry].double() for x in tensors)
        none = torch.empty(len(query), 0, device=query.device)
        order = result.order[entry].long()
        plan = CellPlan(result.cell_of[entry].long(), result.opened[entry].long(), order, none.long(), none.double())
        plan = plan.by_row(blocks_of_rows(len(query), sizes, query.device, order))
        closed = closed_keys(visible[entry], sizes, sizes.group)
        cells = max(1, int(result.cell_of[entry].max()) + 1)
        output, lse = reference_attention(SCALE * query, key, value, visible[entry], closed, sizes.segment, plan, cells)
        outputs.append(output)
        ends.append(lse)
    return torch.stack(outputs), torch.stack(ends)


def shuffled(name: str, cell_of: Tensor) -> Tensor:
    """Another partition: the keys of a span change places."""
    sizes, found = SIZES[name], cell_of.clone()
    for level in range(sizes.span_levels):
        size = sizes.segment << level if sizes.segment else cell_of.shape[2]
        for start in range(0, cell_of.shape[2], size):
            some = found[:, level, start : start + size]
            inside = (some[0] >= 0).nonzero()[:, 0]
            some[:, inside] = some[:, inside[torch.randperm(len(inside), generator=seeded(start + level))]]
    return found


def cells_of_blocks(name: str, engine: str, cell_of: Tensor) -> Tensor:
    """Opened cells as a call chooses them that is given another partition, so that all are seen; some slots are emptied."""
    tensors, visible = problem(name, engine)
    given = Given(cell_of)
    opened = planned_attention(*tensors, visible, SEED, recipe_of(name, engine), given).opened.clone()
    opened[:, ::2, 1] = -1
    opened[:, 1] = -1
    return opened


@engines
@pytest.mark.parametrize(
    "name", ["causal", "shared", *(pytest.param(x, marks=pytest.mark.slow) for x in ("plain", "shared-causal"))]
)
def test_a_call_that_is_given_its_own_plan_gives_the_same_bits(name: str, engine: str) -> None:
    tensors, visible = problem(name, engine)
    recipe = recipe_of(name, engine)
    first = cells_attention(*tensors, visible, SEED, recipe)
    order = first.order if recipe.sizes.ordered else None
    parts = [Given(first.cell_of), Given(first.cell_of, first.opened, order)]
    if recipe.sizes.ordered:
        parts.append(Given(first.cell_of, None, order))
    for given in parts:
        again = planned_attention(*tensors, visible, SEED, recipe, given)
        for one, two in zip(first, again, strict=True):
            assert torch.equal(one, two)


@engines
@cases
def test_with_another_plan_it_is_what_the_reference_says(name: str, engine: str) -> None:
    """Other cells, other opened cells with empty slots here and there, and rows in any order."""
    tensors, visible = problem(name, engine)
    recipe, sizes = recipe_of(name, engine), SIZES[name]
    own = cells_attention(*tensors, visible, SEED, recipe)
    cell_of = shuffled(name, own.cell_of)
    assert not torch.equal(cell_of, own.cell_of)
    opened = cells_of_blocks(name, engine, cell_of)
    order = None
    if sizes.ordered:
        places = [torch.randperm(LENGTH, generator=seeded(i)) for i in range(BATCH * sizes.group)]
        order = torch.stack(places).view(BATCH, -1).int().to(device_of(engine))
    leaves = [x.clone().requires_grad_() for x in tensors]
    found = planned_attention(*leaves, visible, SEED, recipe, Given(cell_of, opened, order))
    assert torch.equal(found.cell_of, cell_of)
    assert torch.equal(found.opened, opened)
    assert order is None or torch.equal(found.order, order)
    true = [x.double().requires_grad_() for x in tensors]
    output, lse = reference_says(name, tuple(true), visible, found)
    torch.testing.assert_close(found.output.double(), output, atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(found.lse.double(), lse, atol=5e-6, rtol=5e-6)
    upstream = torch.randn(output.shape, generator=seeded(7)).to(output.device)
    for mine, expected in zip(
        torch.autograd.grad(found.output, leaves, upstream), torch.autograd.grad(output, true, upstream.double()), strict=True
    ):
        torch.testing.assert_close(mine.double(), expected, atol=2e-5, rtol=2e-5)


@NEEDS_TRITON
@pytest.mark.parametrize("name", ["plain", "shared"])
def test_a_plan_of_one_engine_serves_another(name: str) -> None:
    """Without a mask and with padding, for which the kernels make more cells."""
    tensors, visible = problem(name, "triton", padding=9)
    first = cells_attention(*tensors, visible, SEED, recipe_of(name, "triton"))
    order = first.order if SIZES[name].ordered else None
    for engine in ("torch", "reference"):
        found = planned_attention(*tensors, visible, SEED, recipe_of(name, engine), Given(first.cell_of, first.opened, order))
        torch.testing.assert_close(found.output, first.output, atol=5e-6, rtol=5e-6)
        torch.testing.assert_close(found.lse, first.lse, atol=5e-6, rtol=5e-6)


@engines
def test_more_keys_than_blocks_open_by_themselves(engine: str) -> None:
    """Lists of the kernels have room for so many cells of mean size, and say so where that is not enough."""
    tensors, visible = problem("shared", engine)
    recipe = recipe_of("shared", engine, probes=2, cell_size=15)
    cell_of = torch.zeros(BATCH, 1, LENGTH, dtype=torch.int32)
    cell_of[..., :2], cell_of[..., -1] = -1, 1
    opened = torch.tensor([0, 1], dtype=torch.int32).expand(BATCH, recipe.sizes.blocks_of(2 * LENGTH), 2)
    order = torch.arange(LENGTH, dtype=torch.int32).repeat(BATCH, 2)
    given = Given(*(x.to(visible.device) for x in (cell_of, opened, order)))
    if engine == "triton":
        with pytest.raises(ValueError, match=r"cells of 43 keys for some block, and 2 probes have room for 30; use more probes"):
            planned_attention(*tensors, visible, SEED, recipe, given)
        recipe = recipe_of("shared", engine, probes=3, cell_size=15)
        given = given._replace(opened=torch.nn.functional.pad(given.opened, (0, 1), value=-1))
    found = planned_attention(*tensors, visible, SEED, recipe, given)
    exact = torch.nn.functional.scaled_dot_product_attention(*tensors, scale=SCALE)
    torch.testing.assert_close(found.output, exact, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"cell_of": torch.zeros(BATCH, 1, 7, dtype=torch.int32)},
            r"cell_of must be integers of shape \(2, 1, 45\), got torch.int32",
        ),
        ({"opened": torch.zeros(BATCH, 6, 5)}, r"opened must be integers of shape \(2, 6, 5\), got torch.float32"),
        ({"order": torch.zeros(BATCH, 45, dtype=torch.int32)}, r"order must be integers of shape \(2, 90\)"),
        ({"opened": torch.zeros(BATCH, 6, 5, dtype=torch.int32)}, "pass order too"),
    ],
)
def test_wrong_plans(change: dict[str, Tensor], message: str) -> None:
    tensors, visible = problem("shared", "torch")
    given = Given(torch.zeros(BATCH, 1, LENGTH, dtype=torch.int32))._replace(**change)
    with pytest.raises(ValueError, match=message):
        planned_attention(*tensors, visible, SEED, recipe_of("shared", "torch"), given)


def test_an_output_by_heads_is_refused() -> None:
    tensors, visible = problem("shared", "torch")
    recipe = recipe_of("shared", "torch")._replace(memory=MemoryPolicy(1.0, 2))
    with pytest.raises(ValueError, match="laid out by rows"):
        planned_attention(*tensors, visible, SEED, recipe, Given(torch.zeros(BATCH, 1, LENGTH, dtype=torch.int32)))


@engines
@pytest.mark.parametrize("name", ["plain", "shared"])
def test_an_opened_cell_may_be_empty(name: str, engine: str) -> None:
    tensors, visible = problem(name, engine)
    recipe = recipe_of(name, engine)
    own = cells_attention(*tensors, visible, SEED, recipe)
    cell_of = torch.where(own.cell_of == 1, 0, own.cell_of)
    opened = torch.full_like(own.opened, -1)
    opened[..., 0], opened[..., 1] = 1, 2
    leaves = [x.clone().requires_grad_() for x in tensors]
    order = own.order if recipe.sizes.ordered else None
    found = planned_attention(*leaves, visible, SEED, recipe, Given(cell_of, opened, order))
    output, _ = reference_says(name, tensors, visible, found)
    torch.testing.assert_close(found.output.double(), output, atol=5e-6, rtol=5e-6)
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(found.output.sum(), leaves))


@engines
def test_visible_may_be_one_number_per_entry(engine: str) -> None:
    """In integers of any size, laid out in any way."""
    tensors, _ = problem("plain", engine)
    recipe = recipe_of("plain", engine)
    seen = torch.tensor([LENGTH, LENGTH - 7], dtype=torch.int32, device=device_of(engine))[:, None].expand(-1, 2 * LENGTH)
    results = []
    for visible in (seen, seen.long().contiguous()):
        leaves = [x.clone().requires_grad_() for x in tensors]
        output = cells_attention(*leaves, visible, SEED, recipe).output
        results.append((output, *torch.autograd.grad(output.square().sum(), leaves)))
    for one, two in zip(*results, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-6)
