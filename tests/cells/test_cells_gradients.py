"""Cells: gradients are those of the estimator, with what was opened and drawn held fixed."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from by_hand import QKV, inputs, seeded
from torch import Tensor

import nearfield as nf
from nearfield.cells.operator import CellsResult, Recipe, _reference, cells_attention
from nearfield.cells.partition import to_plain
from nearfield.cells.reference import CellPlan
from nearfield.cells.sizes import CellSizes
from nearfield.cells.torch.head import Head

CASES: dict[str, dict[str, Any]] = {
    "near-keys": {"probes": 9},
    "centroids": {"cell_size": 1},  # a cell of one key has no variance and no tilt
    "variances-and-tilt": {},
    "no-queries-of-their-own": {"spread": 0.0},
    "one-cell-of-all": {"cell_size": 20, "sinks": 0, "queries": 4},
    "sinks": {"sinks": 3},
    "groups": {"group": 2, "queries": 4},
    "causal": {"causal": True},
    "causal-groups": {"causal": True, "group": 2, "keys": 9},
    "causal-window": {"causal": True, "window": 1, "segment": 2, "cell_size": 2},
    "causal-no-sinks": {"causal": True, "sinks": 0, "cell_size": 4},
    "segments-of-one": {"causal": True, "segment": 1, "cell_size": 1},
    "few-queries": {"queries": 3, "causal": True, "segment": 1, "cell_size": 1},
    "few-keys": {"queries": 9, "keys": 6, "causal": True, "segment": 2, "cell_size": 1},
    "many-spans": {"causal": True, "segment": 2, "cell_size": 2, "keys": 15},
    "many-spans-window": {"causal": True, "segment": 2, "cell_size": 1, "keys": 15, "window": 1, "group": 2},
    "spans-of-one": {"causal": True, "span_levels": 1},
    "spans-of-two": {"causal": True, "segment": 2, "cell_size": 2, "keys": 15, "span_levels": 2},
    "spans-of-two-samples": {"causal": True, "segment": 2, "cell_size": 2, "keys": 15, "span_levels": 2, "samples": 3},
    "spans-of-four-samples": {"causal": True, "segment": 2, "cell_size": 1, "keys": 16, "span_levels": 3, "samples": 2},
    "samples": {"samples": 3},
    "samples-groups": {"samples": 2, "group": 2, "queries": 4},
    "samples-causal": {"samples": 3, "causal": True},
    "dropout": {"dropout_p": 0.3},
    "dropout-causal": {"dropout_p": 0.3, "causal": True},
    "dropout-samples": {"dropout_p": 0.3, "samples": 3, "causal": True},
    "blocks": {"partition": nf.Blocks(), "causal": True},
    "hash": {"partition": nf.HashBuckets()},
    "padded": {"seen": 7, "causal": True},
    "sharp": {"spread": 4.0, "causal": True},
    "scale": {"scale": -0.8},
    "share": {"share": 16, "queries": 19},
    "share-causal-groups": {"share": 16, "causal": True, "group": 2, "keys": 18, "segment": 5, "queries": 18},
}


@dataclass(frozen=True)
class Setting:
    """One head with one call of the operator: its inputs, and what it decided."""

    tensors: QKV
    visible: Tensor
    recipe: Recipe
    result: CellsResult

    @property
    def plan(self) -> CellPlan:
        return CellPlan(*(x[0] for x in self.result[3:]))

    def reference(self, queries: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Output and log-normaliser `[1, rows, ...]` by the specification, for the plan of this call."""
        plan, recipe = self.plan, self.recipe
        head = Head(
            queries[0], keys[0], values[0], self.visible[0], plan.cell_of.long(), recipe.sizes, recipe.scale, recipe.dropout_p,
            int(SEED),
        )  # fmt: skip
        output, lse = _reference(head, plan, queries[0], keys[0], values[0])
        return output[None], lse[None]


SEED = torch.tensor(7)


def clusters(count: int, dim: int) -> Tensor:
    """Keys around well separated places, some of which have several: what moves a little stays in its cell."""
    places = torch.tensor([[2.0, 0.0], [0.0, 2.0], [-2.0, -1.0], [1.0, -2.0]], dtype=torch.float64)
    places = torch.nn.functional.pad(places, (0, dim - 2))
    return places[torch.arange(count) % 4] + 0.3 * torch.randn(count, dim, generator=seeded(1), dtype=torch.float64)


def setting(case: dict[str, Any]) -> Setting:
    keys, group, dim, value_dim = (case.get(*pair) for pair in (("keys", 10), ("group", 1), ("dim", 2), ("value_dim", 2)))
    causal = case.get("causal", False)
    length = case.get("queries", keys if causal else 5)
    query, _, value = inputs(1, queries=group * length, keys=keys, dim=dim, value_dim=value_dim, dtype=torch.float64)
    position = torch.arange(1, length + 1).clamp(max=keys) if causal else torch.full((length,), keys)
    visible = position.clamp(max=case.get("seen", keys)).repeat(group)[None]
    segment = case.get("segment", 3) if causal else 0
    sizes = CellSizes(
        group, segment, case.get("window", 0), case.get("sinks", 1), case.get("cell_size", 3), case.get("probes", 1),
        case.get("samples", 0), case.get("span_levels", max(1, (keys // segment).bit_length()) if causal else 1),
        case.get("share", 1),
    )  # fmt: skip
    partition = to_plain(case.get("partition", nf.KMeans()))
    recipe = Recipe(sizes, case.get("scale", 0.7), case.get("dropout_p", 0.0), *partition, "torch")
    tensors = (case.get("spread", 1.0) * query, clusters(keys, dim)[None], value)
    return Setting(tensors, visible, recipe, cells_attention(*tensors, visible, SEED, recipe))


class Frozen(torch.autograd.Function):
    """Forwards the specification, backwards the engine: what gradcheck compares."""

    @staticmethod
    def forward(ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, frozen: Setting) -> Tensor:
        output, lse = frozen.reference(queries, keys, values)
        ctx.save_for_backward(queries, keys, values, frozen.visible, SEED, output, lse, *frozen.result[3:])
        ctx.recipe = frozen.recipe
        return output

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return (*torch.ops.nearfield.cells_backward(grads[0], None, *ctx.saved_tensors, *ctx.recipe.arguments()), None)


def leaves(tensors: QKV) -> list[Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


LONGEST = ("many-spans-window", "spans-of-two", "spans-of-two-samples", "spans-of-four-samples", "dropout-samples", "sharp")


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in LONGEST)) for name in CASES])
def test_gradcheck_with_the_plan_frozen(name: str) -> None:
    """Finite differences of the specification, factors of drawn keys included, against the gradient of the engine."""
    frozen = setting(CASES[name])
    torch.testing.assert_close(frozen.reference(*frozen.tensors)[0], frozen.result.output)
    assert torch.autograd.gradcheck(lambda *x: Frozen.apply(*x, frozen), leaves(frozen.tensors))


@pytest.mark.long
@pytest.mark.parametrize("name", ["near-keys", "variances-and-tilt", "causal", "dropout-causal", "padded", "spans-of-two"])
def test_gradcheck_of_the_engine(name: str) -> None:
    """Finite differences of the engine itself, where the plan stays what it is."""
    frozen = setting(CASES[name])
    for seed in range(3):
        moved = [x + 1e-5 * torch.randn(x.shape, generator=seeded(seed), dtype=torch.float64) for x in frozen.tensors]
        again = cells_attention(*moved, frozen.visible, SEED, frozen.recipe)
        assert all(torch.equal(x, y) for x, y in zip(again[3:], frozen.result[3:], strict=True))
    inputs = leaves(frozen.tensors)
    assert torch.autograd.gradcheck(lambda *x: cells_attention(*x, frozen.visible, SEED, frozen.recipe).output, inputs)


@pytest.mark.long
def test_gradcheck_from_outside() -> None:
    """The same through `nf.attention`: batch, heads, scale, groups, dropout and padding on the way in."""
    method = nf.Cells(cell_size=2, segment=2, probes=1, sinks=1)
    query, _, value = inputs(2, 2, queries=5, dim=2, value_dim=1, kv_heads=1, dtype=torch.float64)
    key = clusters(10, 2).view(2, 1, 5, 2)
    mask = torch.ones(2, 1, 1, 5, dtype=torch.bool)
    mask[0, ..., 1] = False

    def run(*x: Tensor) -> Tensor:
        return nf.attention(*x, mask, 0.2, True, -0.9, enable_gqa=True, method=method, generator=seeded(0))

    assert torch.autograd.gradcheck(run, leaves((query, key, value)))


def test_spreads_that_were_cut_off_have_no_gradient() -> None:
    """Queries so large along a direction in which all cells spread that u_c = 10^10, and no key near that would outweigh it."""
    frozen = setting({"keys": 16, "cell_size": 4, "sinks": 0, "partition": nf.Blocks(), "scale": 1.0})
    queries, keys, values = (x.clone() for x in frozen.tensors)
    queries[..., 1] = 1e5
    keys[0, :, 1] = torch.tensor([1.0, -1.0]).repeat(8)
    keys[0, 12:, 1] = 0.0
    # A cell of logits as moderate as those of the centroids, which routing would not have opened.
    plan = frozen.result._replace(opened=torch.full_like(frozen.result.opened, 3))
    frozen = Setting((queries, keys, values), frozen.visible, frozen.recipe, plan)
    upstream = torch.randn(plan.output.shape, generator=seeded(3), dtype=torch.float64)
    x = leaves(frozen.tensors)
    expected = torch.autograd.grad(frozen.reference(x[0], x[1], x[2])[0], x, upstream)
    found = torch.autograd.grad(Frozen.apply(*x, frozen), x, upstream)
    assert float(expected[0][..., 0].abs().max()) > 0.1, "cells share the weight"
    for grad, true in zip(found, expected, strict=True):
        torch.testing.assert_close(grad, true, atol=1e-9, rtol=1e-7)


LARGE: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "samples": {"samples": 4, "causal": True},
    "samples-small-cells": {"samples": 4, "cell_size": 2},
    "dropout": {"dropout_p": 0.3, "causal": True},
    "groups": {"group": 3, "causal": True},
    "spans-of-two": {"causal": True, "span_levels": 2, "samples": 3, "cell_size": 2},
    "share": {"causal": True, "share": 32, "group": 2},
}


SIZES = {"keys": 150, "queries": 150, "dim": 6, "value_dim": 5, "segment": 16, "cell_size": 6}


@functools.cache
def large(name: str) -> tuple[Setting, Tensor, tuple[Tensor, ...]]:
    """A call on 150 keys with an upstream gradient and what it leads to."""
    frozen = setting(SIZES | LARGE[name])
    x = leaves(frozen.tensors)
    result = cells_attention(*x, frozen.visible, SEED, frozen.recipe)
    upstream = torch.randn(result.output.shape, generator=seeded(3), dtype=torch.float64)
    return frozen, upstream, torch.autograd.grad(result.output, x, upstream)


@pytest.mark.parametrize("name", LARGE)
def test_a_shift_of_all_keys_has_no_gradient(name: str) -> None:
    """A vector added to all keys changes nothing, so the gradients of the keys sum to zero."""
    _, _, (_, key_grad, _) = large(name)
    assert float(key_grad.abs().max()) > 0.1
    torch.testing.assert_close(key_grad.sum(1), torch.zeros(1, 6, dtype=torch.float64), atol=1e-10, rtol=0)


@pytest.mark.parametrize("name", LARGE)
def test_values_times_their_gradient(name: str) -> None:
    """The output is linear in the values: <V, dV> = <O, dO>."""
    frozen, upstream, (_, _, value_grad) = large(name)
    assert float((frozen.tensors[2] * value_grad).sum()) == pytest.approx(float((frozen.result.output * upstream).sum()))


@pytest.mark.parametrize("name", [name for name, case in LARGE.items() if case.get("causal")])
def test_the_past_has_no_gradient_in_the_future(name: str) -> None:
    """d(rows up to r) / d(keys, values, queries after r) is zero, not only small."""
    frozen, _, _ = large(name)
    group = frozen.recipe.sizes.group
    x = leaves(frozen.tensors)
    output = cells_attention(*x, frozen.visible, SEED, frozen.recipe).output.unflatten(1, (group, 150))
    for row in (0, 15, 16, 40, 100, 148):
        some = output[:, :, : row + 1].square().sum()
        query_grad, key_grad, value_grad = torch.autograd.grad(some, x, retain_graph=True)
        for grad in (query_grad.unflatten(1, (group, 150))[0].transpose(0, 1), key_grad[0], value_grad[0]):
            assert not bool(grad[row + 1 :].any())
            assert bool(grad[: row + 1].any()) or row == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
@pytest.mark.parametrize("name", LARGE)
def test_low_precision_is_a_matter_of_storage(name: str, dtype: torch.dtype) -> None:
    """Arithmetic is float32: the gradients are those of the rounded inputs, rounded once more."""
    frozen, upstream, _ = large(name)
    recipe = frozen.recipe
    rounded = [x.to(dtype) for x in frozen.tensors]
    found = []
    for dtype_in in (dtype, torch.float32):
        x = [y.to(dtype_in).requires_grad_() for y in rounded]
        output = cells_attention(*x, frozen.visible, SEED, recipe).output
        assert output.dtype == torch.float32
        found.append([*torch.autograd.grad(output, x, upstream.float()), output])
    for low, single in zip(*found, strict=True):
        assert low.dtype in (dtype, torch.float32)
        torch.testing.assert_close(low.float(), single.to(low.dtype).float(), atol=1e-5, rtol=2 * torch.finfo(low.dtype).eps)


def test_what_is_asked_for_is_what_is_made() -> None:
    """Gradients of some inputs alone, and none where nothing needs one."""
    frozen, upstream, every = large("causal")
    for wanted in ((0,), (1,), (2,), (0, 2)):
        x = [y.clone().requires_grad_(number in wanted) for number, y in enumerate(frozen.tensors)]
        output = cells_attention(*x, frozen.visible, SEED, frozen.recipe).output
        for number, grad in zip(wanted, torch.autograd.grad(output, [x[i] for i in wanted], upstream), strict=True):
            assert torch.equal(grad, every[number])
    assert not cells_attention(*frozen.tensors, frozen.visible, SEED, frozen.recipe).output.requires_grad
