"""`TopK` in programs: torch.compile and torch.export."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from by_hand import QKV, inputs, seeded
from operator_calls import compiled
from own_indices import OwnIndex
from torch import Tensor, nn
from torch.export import Dim, export

import nearfield as nf
from nearfield.knn.operator import Settings


def leaves(length: int = 40, **options: Any) -> QKV:
    q, k, v = inputs(1, 4, queries=length, dim=8, kv_heads=2, **options)
    return q.requires_grad_(), k.requires_grad_(), v.requires_grad_()


def results(function: Any, tensors: tuple[Tensor, ...], *others: Any) -> list[Tensor]:
    """Output, lse and gradients of something that depends on both."""
    torch.manual_seed(3)
    output, lse = function(*tensors, *others)
    upstream = torch.randn(output.shape, generator=seeded(1), dtype=output.dtype)
    total = (output * upstream).sum() + torch.where(lse > -torch.inf, lse, 0.0).square().sum()
    return [output.detach(), lse.detach(), *torch.autograd.grad(total, tensors)]


PADDING = (torch.arange(40) < 33).view(1, 1, 1, 40)

CASES: dict[str, tuple[nf.TopK, dict[str, Any], tuple[Any, ...]]] = {
    "near": (nf.TopK(k=5), {}, ()),
    "tail": (nf.TopK(k=5, tail=6), {"is_causal": True}, ()),
    "padded": (nf.TopK(k=5), {}, (PADDING,)),
    "default-k": (nf.TopK(), {}, ()),
    "dropout": (nf.TopK(k=5, tail=4), {"dropout_p": 0.3}, ()),
    "kmeans": (nf.TopK(k=5, index=nf.KMeansIndex()), {"is_causal": True}, ()),
    "own": (nf.TopK(k=5, index=OwnIndex()), {}, ()),
    "reference": (nf.TopK(k=5, tail=6), {"backend": "reference"}, ()),
    "all-keys": (nf.TopK(k=40), {}, ()),
    "offset": (nf.TopK(k=5, tail=6), {"is_causal": True, "offset": -4}, ()),
}


@pytest.mark.parametrize("case", CASES)
def test_compiled_equals_eager(case: str) -> None:
    method, options, others = CASES[case]
    eager = partial(nf.attention, enable_gqa=True, method=method, return_lse=True, **options)
    program = compiled(eager)
    tensors = leaves()
    torch.testing.assert_close(results(program, tensors, *others), results(eager, tensors, *others), rtol=1e-4, atol=1e-5)


def test_a_method_that_is_made_inside() -> None:
    tensors = inputs(1, 2, queries=20, dim=8)

    def call(*tensors: Tensor) -> Tensor:
        return nf.attention(*tensors, method=nf.TopK(k=3))

    torch.testing.assert_close(compiled(call)(*tensors), call(*tensors))


def test_draws_are_made_when_the_program_runs() -> None:
    tensors = inputs(1, 2, queries=40, dim=8)
    program = compiled(partial(nf.attention, method=nf.TopK(k=3, tail=3)))
    first, second = program(*tensors), program(*tensors)
    assert not torch.equal(first, second)


@pytest.mark.slow
def test_one_program_serves_all_lengths() -> None:
    eager = partial(nf.attention, method=nf.TopK(tail=4), enable_gqa=True, return_lse=True)
    program = compiled(eager, dynamic=True)
    results(program, leaves(33))
    with torch.compiler.set_stance("fail_on_recompile"):
        tensors = leaves(70)
        torch.testing.assert_close(results(program, tensors), results(eager, tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", ["near", "tail", "all-keys", "offset"])
def test_compiled_with_a_cap_and_sinks(case: str) -> None:
    method, options, _ = CASES[case]

    def eager(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return nf.attention(
            *tensors[:3], s_aux=tensors[3], softcap=0.7, enable_gqa=True, method=method, return_lse=True, **options
        )

    tensors = (*leaves(), torch.randn(4, generator=seeded(5)).requires_grad_())
    torch.testing.assert_close(results(compiled(eager), tensors), results(eager, tensors), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_the_operator_keeps_its_word(keep: bool, sunk: bool) -> None:
    queries, keys, values = (x.detach().flatten(0, 1) for x in inputs(1, 2, queries=12, dim=8, dtype=torch.float64))
    visible = torch.arange(1, 13).expand(2, -1)
    sinks = torch.randn(2, 12, generator=seeded(1), dtype=torch.float64) if sunk else None
    given = queries, keys, values, visible, torch.tensor(5), sinks, *Settings(3, 2, 0.2, 0, "auto", keep, 2.0 if sunk else 0.0)
    torch.library.opcheck(torch.ops.nearfield.topk.default, given)
    output, lse, ids = torch.ops.nearfield.topk(*given)
    assert ids.shape == (2, 12, 5 if keep else 0)
    if keep:
        torch.library.opcheck(torch.ops.nearfield.topk_backward.default, (output, lse, *given[:6], ids, *given[6:]))


def test_an_index_that_is_gone() -> None:
    with pytest.raises(RuntimeError, match=r"unknown or gone: make TopK\(index=...\) outside of the compiled function"):
        Settings(1, 0, 0.0, 12345, "auto", False).known_index()


def test_copies_are_known() -> None:
    method = copy.deepcopy(nf.TopK(k=5, index=nf.KMeansIndex()))
    tensors = inputs(1, 2, queries=40, dim=8)
    call = partial(nf.attention, method=method)
    torch.testing.assert_close(compiled(call)(*tensors), call(*tensors))


# torch.export, with a length that is not known


class Model(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nf.attention(q, k, v, **self.options)


EXPORTED: dict[str, dict[str, Any]] = {
    "exact": {"method": nf.Exact(), "is_causal": True},
    "topk-softcap": {"method": nf.TopK(k=8), "softcap": 2.0, "s_aux": torch.tensor([0.0, 1.0])},
    "cells-softcap": {"method": nf.Cells(8, 2), "softcap": 2.0, "s_aux": torch.tensor([0.0, 1.0])},
    "cells": {"method": nf.Cells(8, 2)},
    "cells-causal": {"method": nf.Cells(8, 2, segment=16), "is_causal": True},
    "topk": {"method": nf.TopK(k=8, tail=4), "is_causal": True},
    "auto": {},
}


@pytest.mark.parametrize("case", EXPORTED)
def test_exported_with_a_dynamic_length(case: str) -> None:
    model = Model(**EXPORTED[case])
    length = Dim("length", min=32, max=4096)
    program = export(model, inputs(1, 2, queries=100, dim=8), dynamic_shapes=({2: length},) * 3).module()
    for other in (40, 700):
        tensors = inputs(1, 2, queries=other, dim=8, seed=other)
        torch.manual_seed(0)
        found = program(*tensors)
        torch.manual_seed(0)
        torch.testing.assert_close(found, model(*tensors))


@pytest.mark.parametrize(("options", "advice"), [({}, "probes: Cells"), ({"is_causal": True}, "probes and segment: Cells")])
def test_sizes_that_follow_from_a_length_nobody_knows(options: dict[str, Any], advice: str) -> None:
    shapes = ({2: Dim("length", min=32, max=4096)},) * 3
    with pytest.raises(ValueError, match=rf"to export with a dynamic length give cell_size, {advice}"):
        export(Model(method=nf.Cells(), **options), inputs(1, 2, queries=100, dim=8), dynamic_shapes=shapes, strict=False)


def test_gradients_lie_as_the_operator_says() -> None:
    """In rows of whole heads, also where the queries do not."""
    query, key, value = (torch.randn(1, 20, 2, 8, generator=seeded(x)).transpose(1, 2) for x in range(3))
    query.requires_grad_()
    out = nf.attention(query, key, value, method=nf.TopK(4))
    (grad,) = torch.autograd.grad(out, query, torch.ones_like(out))
    assert grad.is_contiguous()
