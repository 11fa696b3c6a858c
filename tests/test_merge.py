"""Log-normalisers with gradients, and results over disjoint keys merged through them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import QKV, causal_mask, inputs, seeded
from operator_calls import compiled
from torch import Tensor
from torch.autograd import gradcheck

import nearfield as nf

attend = partial(nf.attention, return_lse=True)


def leaves(*lead: int, **options: Any) -> QKV:
    q, k, v = inputs(*lead, dtype=torch.float64, **options)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def loss(output: Tensor, lse: Tensor) -> Tensor:
    """Something that depends on every entry of both, and on rows that see a key alone."""
    weights = torch.randn(lse.shape, generator=seeded(9), dtype=lse.dtype)
    upstream = torch.randn(output.shape, generator=seeded(8), dtype=output.dtype)
    return (output * upstream).sum() + (torch.where(lse > -torch.inf, lse, 0.0) * weights).sum()


def dense(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Written out, by autograd."""
    group = q.shape[1] // k.shape[1]
    logits = q @ k.repeat_interleave(group, 1).mT / q.shape[-1] ** 0.5
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(-1) @ v.repeat_interleave(group, 1), logits.logsumexp(-1)


def assert_same(
    found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], tensors: tuple[Tensor, ...], again: bool = True
) -> None:
    """`again`: whether gradients may be asked for again, which a compiled program does not allow."""
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    got, wanted = (torch.autograd.grad(loss(*x), tensors, retain_graph=again) for x in (found, expected))
    torch.testing.assert_close(got, wanted, rtol=1e-8, atol=1e-8)


METHODS: dict[str, nf.Method] = {
    "exact": nf.Exact(),
    "auto": nf.Auto(),
    "topk": nf.TopK(k=20),
    "topk-search": nf.TopK(k=19, tail=1),
    "cells": nf.Cells(cell_size=4, probes=100),
}
"""All of them see every key."""


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
def test_two_halves_of_the_keys_are_all_keys(method: str, is_causal: bool) -> None:
    q, k, v = leaves(2, 4, queries=20, dim=8, kv_heads=2)
    first = (torch.arange(20) < 10).view(1, 1, 1, 20)
    parts = [attend(q, k, v, half, is_causal=is_causal, enable_gqa=True, method=METHODS[method]) for half in (first, ~first)]
    if is_causal:
        assert (parts[1][1][:, :, :10] == -torch.inf).all(), "the first rows see nothing of the second half"
    expected = dense(q, k, v, causal_mask(20, 20) if is_causal else None)
    assert_same(nf.merge(*zip(*parts, strict=True)), expected, (q, k, v))


def test_halves_that_were_cut() -> None:
    q, k, v = leaves(1, 2, queries=6, keys=14, dim=4, value_dim=3)
    parts = [attend(q, k[:, :, some], v[:, :, some]) for some in (slice(0, 5), slice(5, 6), slice(6, 14))]
    assert_same(nf.merge(*zip(*parts, strict=True)), dense(q, k, v), (q, k, v))
    once = nf.merge(*zip(parts[0], parts[1], strict=True))
    assert_same(nf.merge(*zip(once, parts[2], strict=True)), dense(q, k, v), (q, k, v))


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (2, 1, 5, 7)], ids=str)
def test_a_bias_gets_the_gradient_of_the_lse(shape: tuple[int, ...]) -> None:
    q, k, v = leaves(2, 2, queries=5, keys=7, dim=4)
    bias = torch.randn(shape, generator=seeded(3), dtype=torch.float64).requires_grad_()
    assert_same(attend(q, k, v, bias), dense(q, k, v, bias), (q, k, v, bias))


def test_gradcheck() -> None:
    q, k, v = leaves(1, 1, queries=3, keys=6, dim=2)
    keep = torch.tensor([[[[True, True, True, False, False, False]]]])

    def merged(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return nf.merge(*zip(*[attend(q, k, v, mask, method=nf.Exact()) for mask in (keep, ~keep)], strict=True))

    assert gradcheck(merged, (q, k, v))

    def sampled(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        return attend(q, k, v, method=nf.TopK(k=2, tail=2), generator=seeded(1), dropout_p=0.3)

    assert gradcheck(sampled, (q, k, v))


CELLS: dict[str, tuple[nf.Cells, dict[str, Any]]] = {
    "plain": (nf.Cells(4, 2, sinks=0), {}),
    "causal": (nf.Cells(4, 2, segment=8, sinks=2), {"is_causal": True}),
    "samples": (nf.Cells(4, 2, 4, sinks=0), {}),
    "dropout": (nf.Cells(4, 2, segment=8), {"is_causal": True, "dropout_p": 0.4}),
    "share": (nf.Cells(4, 2, share=16), {}),
}


@pytest.mark.parametrize("case", CELLS)
def test_the_lse_of_cells_has_the_gradient_of_the_specification(case: str) -> None:
    """The plan is the same, and the reference is differentiated by autograd."""
    method, options = CELLS[case]
    q, k, v = leaves(1, 2, queries=40, dim=8, kv_heads=1)
    found, expected = (
        attend(q, k, v, **options, enable_gqa=True, method=method, generator=seeded(4), backend=backend)
        for backend in ("auto", "reference")
    )
    assert_same(found, expected, (q, k, v))
    alone = [torch.autograd.grad(lse.sum(), (q, k), retain_graph=True) for _, lse in (found, expected)]
    torch.testing.assert_close(*alone, rtol=1e-8, atol=1e-8)


def test_top_k_has_the_lse_of_its_near_keys() -> None:
    q, k, v = leaves(1, 2, queries=12, dim=4)
    logits = q.detach() @ k.detach().mT
    near = logits >= logits.topk(5).values[..., -1:]
    assert_same(attend(q, k, v, method=nf.TopK(k=5)), dense(q, k, v, near), (q, k, v))


@pytest.mark.parametrize("method", [nf.Exact(), nf.Cells(4, 2)], ids=repr)
def test_compiled(method: nf.Method) -> None:
    q, k, v = leaves(1, 2, queries=24, dim=8)
    program = compiled(partial(attend, method=method))
    assert_same(program(q, k, v), attend(q, k, v, method=method), (q, k, v), again=False)


def test_inside_a_transform() -> None:
    q, k, v = (x.detach() for x in leaves(1, 2, queries=6, dim=4))

    def of_queries(q: Tensor) -> Tensor:
        return loss(*attend(q, k, v, method=nf.Exact()))

    (q := q.clone()).requires_grad_()
    torch.testing.assert_close(torch.func.grad(of_queries)(q.detach()), torch.autograd.grad(of_queries(q), q)[0])


@pytest.mark.parametrize("masked", [False, True])
def test_no_logits_are_kept_for_the_backward_pass(masked: bool) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(1, 1, queries=512, dim=8))
    mask = torch.zeros(512, 512).tril() if masked else None
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        _, lse = attend(q, k, v, mask, method=nf.Exact())
    assert lse.requires_grad
    assert all(x.numel() < 512 * 512 or x.data_ptr() == mask.data_ptr() for x in kept)


def test_half_precision() -> None:
    q, k, v = (x.bfloat16() for x in inputs(1, 2, queries=32, dim=8))
    parts = [attend(q, k[:, :, some], v[:, :, some]) for some in (slice(0, 9), slice(9, 32))]
    output, lse = nf.merge(*zip(*parts, strict=True))
    assert output.dtype == torch.bfloat16
    assert lse.dtype == parts[0][1].dtype == torch.float32
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, v), rtol=0.02, atol=0.02)


def test_nan_stays_in_its_rows() -> None:
    q, k, v = inputs(1, 1, queries=6, dim=4)
    q[0, 0, 2] = torch.nan
    output, lse = attend(q, k, v)
    bad = torch.arange(6) == 2
    assert torch.equal(lse[0, 0].isnan(), bad)
    assert torch.equal(output[0, 0].isnan().all(1), bad)


def test_rows_that_see_nothing() -> None:
    q, k, v = leaves(1, 1, queries=3, keys=4, dim=2)
    nothing = torch.zeros(1, 1, 3, 4, dtype=torch.bool)
    nothing[0, 0, 1] = True
    for mask in (nothing, torch.where(nothing, 0.0, -torch.inf).double()):
        part = attend(q, k, v, mask)
        output, lse = nf.merge(*zip(part, part, strict=True))
        assert torch.equal(lse > -torch.inf, nothing.any(-1))
        assert (output[0, 0, [0, 2]] == 0).all()
        grads = torch.autograd.grad(loss(output, lse), (q, k, v))
        assert all(x.isfinite().all() for x in grads)


def test_no_gradient_is_nan_where_no_part_sees_a_key() -> None:
    lses = [torch.tensor([-torch.inf, 0.5, -torch.inf], requires_grad=True) for _ in range(2)]
    outputs = [torch.ones(3, 2, requires_grad=True) for _ in range(2)]
    grads = torch.autograd.grad(loss(*nf.merge(outputs, lses)), [*outputs, *lses])
    assert all(x.isfinite().all() for x in grads)
    assert all((x[[0, 2]] == 0).all() for x in grads)
    assert all((x[1] != 0).all() for x in grads[:2])


def test_an_output_without_weight_may_hold_anything() -> None:
    outputs = [torch.ones(3, 2), torch.full((3, 2), torch.nan)]
    lses = [torch.tensor([0.0, 1.0, torch.inf]), torch.full((3,), -torch.inf)]
    output, lse = nf.merge(outputs, lses)
    assert torch.equal(output[:2], torch.ones(2, 2))
    assert torch.equal(lse[:2], lses[0][:2])
    assert bool(output[2].isnan().all()), "a normaliser of +inf does not pass for a number"


def test_no_keys() -> None:
    q, k, v = leaves(1, 1, queries=3, keys=0, dim=2)
    output, lse = attend(q, k, v)
    assert (lse == -torch.inf).all()
    assert (output == 0).all()


def test_who_has_no_lse_says_so() -> None:
    q, k, v = inputs(1, 1, queries=6, dim=4)
    with pytest.raises(ValueError, match=r"LazyGumbel.*has no log-normaliser with a gradient.*use Exact\(\), Cells"):
        attend(q, k, v, method=nf.LazyGumbel())
    with pytest.raises(ValueError, match=r"RandomWalk.*of the output alone; with return_lse=True leave gradient out"):
        attend(q, k, v, gradient=nf.gradients.RandomWalk())

    class Own(nf.Method):
        gives_lse = True

        def run(self, problem: nf.Problem, call: nf.Call) -> nf.Outcome:
            assert call.return_lse
            return nf.Outcome(torch.zeros_like(problem.value))

    with pytest.raises(ValueError, match=r"must return an Outcome with lse where call.return_lse is set"):
        attend(q, k, v, method=Own())


def test_estimates_keep_an_lse_without_gradient() -> None:
    q, k, v = leaves(1, 1, queries=6, dim=4)
    for method in METHODS.values():
        est = nf.estimate(q, k, v, method=method)
        assert est.output.requires_grad
        assert not est.lse.requires_grad
        torch.testing.assert_close(est.lse, attend(q, k, v, method=method)[1].detach())


BAD: dict[str, tuple[Any, Any, str]] = {
    "one tensor": (torch.zeros(2, 3, 4), [torch.zeros(3)], "outputs must be a list of tensors.*got Tensor"),
    "no list": (None, None, "outputs must be a list of tensors, one for each part of the keys, got NoneType"),
    "a generator": ([torch.zeros(3, 4)], (torch.zeros(3) for _ in range(1)), "lses must be a list of tensors.*got generator"),
    "no tensor": ([torch.zeros(3, 4)], [1.0], r"lses\[0\] must be a tensor of floating point numbers, got float"),
    "integers": ([torch.zeros(3, 4)], [torch.zeros(3).int()], r"lses\[0\] must be a tensor of .* got torch.int32"),
    "nothing": ([], [], "at least one of them; got 0 and 0"),
    "one missing": ([torch.zeros(3, 4)] * 2, [torch.zeros(3)], "got 2 and 1"),
    "shapes": ([torch.zeros(3, 4), torch.zeros(2, 4)], [torch.zeros(3)] * 2, r"outputs\[1\] torch.float32 of shape \(2, 4\)"),
    "dtypes": ([torch.zeros(3, 4), torch.zeros(3, 4).double()], [torch.zeros(3)] * 2, "torch.float64"),
    "lse": ([torch.zeros(3, 4)], [torch.zeros(3, 4)], r"lses\[0\] must have the shape .*\(3,\), got \(3, 4\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_parts(case: str) -> None:
    outputs, lses, message = BAD[case]
    with pytest.raises((TypeError, ValueError), match=message):
        nf.merge(outputs, lses)
