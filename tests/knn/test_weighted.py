"""Attention over planned keys: where its plan is kept for the backward pass, and that it makes no difference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import QKV, gradients, inputs, seeded
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import nearfield as nf
from nearfield.knn import topk
from nearfield.knn.topk import Plan

METHODS = {"topk": nf.TopK(k=3), "tail": nf.TopK(k=2, tail=3), "kmeans": nf.TopK(k=3, tail=2, index=nf.KMeansIndex(probes=1))}
methods = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[slice]:
    """The blocks that were planned."""
    seen: list[slice] = []
    plain = topk._Planner.plan

    def spy(planner: Any, block: slice) -> Plan:
        seen.append(block)
        return plain(planner, block)

    monkeypatch.setattr(topk._Planner, "plan", spy)
    return seen


def problem() -> QKV:
    return inputs(2, 4, queries=24, dim=16, kv_heads=2)


def attend(method: Any, dropout_p: float = 0.2) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda q, k, v: nf.attention(q, k, v, None, dropout_p, True, enable_gqa=True, method=method, generator=seeded(0))


UPSTREAM = torch.randn(2, 4, 24, 16, generator=seeded(2))


@methods
def test_a_small_plan_is_made_once(method: Any, planned: list[slice]) -> None:
    gradients(attend(method), problem(), UPSTREAM)
    assert planned == [slice(0, 48)]


def test_a_large_plan_is_made_again(planned: list[slice]) -> None:
    """4 entries of 48 rows: a pair takes 12 bytes (id, logit), a row of the inputs 128 (a query, and half a key and a value)."""
    gradients(attend(nf.TopK(k=10), dropout_p=0.0), problem(), UPSTREAM)
    assert planned == [slice(0, 48)]
    gradients(attend(nf.TopK(k=11), dropout_p=0.0), problem(), UPSTREAM)
    assert planned == [slice(0, 48)] * 3


def test_plans_of_several_blocks_are_made_again(planned: list[slice], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfield.chunks.BLOCK_BYTES", 15000)
    gradients(attend(nf.TopK(k=3)), problem(), UPSTREAM)
    blocks = planned[: len(planned) // 2]
    assert len(blocks) > 1
    assert planned == blocks * 2


@methods
def test_it_makes_no_difference(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, kept_grads = gradients(attend(method), problem(), UPSTREAM)
    monkeypatch.setattr(topk, "_bytes", lambda *tensors: len(tensors))  # four of a plan, three inputs
    again, again_grads = gradients(attend(method), problem(), UPSTREAM)
    assert torch.equal(kept, again)
    for mine, true in zip(kept_grads, again_grads, strict=True):
        assert torch.equal(mine, true)


def test_nothing_is_kept_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(topk, "_bytes", lambda *tensors: asked.append(len(tensors)) or 0)
    attend(nf.TopK(k=3))(*problem())
    assert not asked


@methods
def test_backward_twice(method: Any) -> None:
    leaves = [x.requires_grad_() for x in problem()]
    output = attend(method)(*leaves)
    first = torch.autograd.grad(output, leaves, UPSTREAM, retain_graph=True)
    second = torch.autograd.grad(output, leaves, UPSTREAM)
    for one, two in zip(first, second, strict=True):
        assert torch.equal(one, two)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output, leaves, UPSTREAM)


@methods
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool, method: Any) -> None:
    """Drawn from the default generator, which checkpointing sets back."""

    def run(wrap: Callable[..., Tensor]) -> list[Tensor | None]:
        torch.manual_seed(3)
        leaves = [x.requires_grad_() for x in problem()]
        output = wrap(lambda *x: nf.attention(*x, None, 0.2, enable_gqa=True, method=method), *leaves)
        output.backward(UPSTREAM)
        return [output, *(x.grad for x in leaves)]

    with torch.random.fork_rng(devices=[]):
        expected = run(lambda function, *x: function(*x))
        found = run(lambda function, *x: checkpoint(function, *x, use_reentrant=reentrant))
    for mine, true in zip(found, expected, strict=True):
        assert mine is not None
        assert true is not None
        assert torch.equal(mine, true)
