"""Several budgets from one set of scores: each is what a call with that budget gives, by every engine."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from by_hand import attention64, inputs, seeded
from torch import Tensor

import nearfield as nf
from nearfield.cells.operator import Recipe, cells_attention
from nearfield.cells.partition import to_plain
from nearfield.cells.planned import planned_attention
from nearfield.cells.sizes import CellSizes
from nearfield.cells.spans import Spans
from nearfield.cells.trial import Prepared, prepare, seen_spans, try_budgets

NEEDS_TRITON = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
SEED = torch.tensor(0)
SCALE = 0.6
BATCH, LENGTH = 2, 45

SIZES = {
    "plain": CellSizes(group=2, segment=0, window=0, sinks=2, cell_size=4, probes=1, samples=0),
    "causal": CellSizes(group=2, segment=12, window=0, sinks=2, cell_size=3, probes=1, samples=0, span_levels=3),
    "window": CellSizes(group=1, segment=6, window=1, sinks=0, cell_size=3, probes=1, samples=0, span_levels=2),
    "shared": CellSizes(group=2, segment=0, window=0, sinks=2, cell_size=4, probes=1, samples=0, share=16),
    "shared-causal": CellSizes(2, 12, 0, 2, 3, 1, 0, 3, share=16),
}


def problem(sizes: CellSizes, engine: str, dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    device = "cuda" if engine == "triton" and torch.cuda.is_available() else "cpu"
    query, key, value = inputs(BATCH, queries=sizes.group * LENGTH, keys=LENGTH, dim=dim, dtype=torch.float32)
    # The second entry has padding: its rows see fewer keys.
    most = torch.tensor([[LENGTH], [LENGTH - 7]])
    seen = torch.arange(1, LENGTH + 1) if sizes.segment else torch.full((LENGTH,), LENGTH)
    visible = torch.minimum(seen.repeat(sizes.group).expand(BATCH, -1), most)
    return (1.5 * query).to(device), key.to(device), value.to(device), visible.to(device)


def recipe_of(sizes: CellSizes, engine: str, probes: int = 1) -> Recipe:
    return Recipe(sizes._replace(probes=probes), SCALE, 0.0, *to_plain(nf.KMeans(iterations=1)), engine)


CASES = [(name, "torch", dim) for name in SIZES for dim in (16, 5)]
BY_KERNELS = [pytest.param(name, "triton", 16, marks=[NEEDS_TRITON, pytest.mark.long]) for name in ("causal", "shared")]


@pytest.mark.parametrize(("name", "engine", "dim"), CASES + BY_KERNELS)
def test_each_budget_is_a_call_with_that_budget(name: str, engine: str, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, budgets = SIZES[name], (1, 3, 4, 6)
    if engine == "triton":
        from nearfield.cells.triton import trial

        # Under the interpreter, every program takes its time.
        monkeypatch.setattr(trial, "SHARES", 3)
        budgets = (1, 4)
    tensors = problem(sizes, engine, dim)
    prepared = prepare(*tensors, recipe_of(sizes, engine))
    numbers = torch.randint(BATCH * sizes.group * LENGTH, (80,), generator=seeded(0))
    exact, found = try_budgets(prepared, numbers, budgets)
    for entry in range(BATCH):
        mine, rows = numbers // (sizes.group * LENGTH) == entry, numbers % (sizes.group * LENGTH)
        query, key, value, visible = (x[entry].double() for x in tensors)
        mask = torch.arange(LENGTH, device=key.device) < visible[:, None]
        by_hand = attention64(query[None, None], key[None, None], value[None, None], mask, scale=SCALE)[0, 0]
        torch.testing.assert_close(exact[mine].double(), by_hand[rows[mine]], atol=1e-4, rtol=1e-4)
        for budget, ours in zip(budgets, found, strict=True):
            call = cells_attention(*tensors, SEED, recipe_of(sizes, engine, budget))
            assert torch.equal(call.cell_of, prepared.given.cell_of)
            torch.testing.assert_close(ours[mine], call.output[entry][rows[mine]], atol=2e-3, rtol=2e-3)
    assert float((found[0] - found[-1]).abs().max()) > 0.01, "budgets differ"


@pytest.mark.parametrize(("name", "engine"), [("causal", "torch"), ("shared", "torch")])
def test_what_is_prepared_serves_the_call(name: str, engine: str) -> None:
    """Bit for bit the call that prepares itself, gradients included."""
    sizes = SIZES[name]
    *tensors, visible = problem(sizes, engine, 16)
    recipe = recipe_of(sizes, engine, 3)
    prepared: Prepared = prepare(*tensors, visible, recipe)
    results = []
    for given in (True, False):
        leaves = [x.clone().requires_grad_() for x in tensors]
        if given:
            result = planned_attention(*leaves, visible, SEED, recipe, prepared.given, prepared.tables)
        else:
            result = cells_attention(*leaves, visible, SEED, recipe)
        results.append((result.output, *torch.autograd.grad(result.output.square().sum(), leaves)))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


def test_rows_that_see_nothing_are_zero() -> None:
    sizes = SIZES["plain"]
    query, key, value, visible = problem(sizes, "torch", 16)
    visible = visible.clone()
    visible[0] = 0
    prepared = prepare(query, key, value, visible, recipe_of(sizes, "torch"))
    exact, found = try_budgets(prepared, torch.arange(4), (1, 2))
    assert not bool(exact.any())
    assert not bool(found.any())


@pytest.mark.parametrize("levels", [1, 2, 4])
def test_seen_spans_at_a_time(levels: int) -> None:
    spans = Spans(13, levels)
    seen = seen_spans(spans, torch.arange(14))
    for segments in range(14):
        assert seen[segments].nonzero()[:, 0].tolist() == sorted(span.number for span in spans.seen(segments))
