"""The library inside torch's modes: inference, autocast, another default dtype; and what it leaves behind."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import nearfield as nf

INDICES: dict[str, Any] = {
    "exact": nf.ExactIndex(),
    "kmeans": nf.KMeansIndex(leaf=16),
    "lsh": nf.ConcentricLSH(leaf=16, rungs=2, tables=2, enough=1.0),
    "faiss": nf.FaissIndex("Flat", leaf=16),
}
METHODS: dict[str, Any] = {
    "exact": nf.Exact(),
    "cells": nf.Cells(cell_size=8, probes=3, segment=16, sinks=4),
    "cells-samples": nf.Cells(cell_size=8, probes=1, segment=16, sinks=4, samples=3),
    **{f"topk-{name}": nf.TopK(7, 5, index) for name, index in INDICES.items()},
    **{f"gumbel-{name}": nf.LazyGumbel(k=7, draws=50, index=index) for name, index in INDICES.items()},
}


@pytest.fixture(params=list(METHODS))
def method(request: pytest.FixtureRequest) -> Any:
    if "faiss" in request.param:
        pytest.importorskip("faiss")
    return METHODS[request.param]


def inputs(dtype: torch.dtype = torch.float32, n: int = 70) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, n, 8, generator=generator).to(dtype) for _ in range(3)]


def call(tensors: list[torch.Tensor], method: Any, **options: Any) -> torch.Tensor:
    return nf.attention(*tensors, is_causal=True, method=method, generator=torch.Generator().manual_seed(1), **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_inference_mode(method: Any, dtype: torch.dtype) -> None:
    want = call(inputs(dtype), method)
    with torch.inference_mode():
        assert torch.equal(call(inputs(dtype), method), want)


def test_autocast_ends_before_the_arithmetic_of_the_backward_pass(method: Any) -> None:
    """Backward inside autocast: the same gradients as outside, where only the cast of the inputs is left."""
    for backend in ("auto", "reference"):
        grads = []
        for inside in (False, True):
            tensors = [x.bfloat16().requires_grad_() for x in inputs()]
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                call(tensors, method, backend=backend).float().square().sum().backward()
            grads.append([x.grad for x in tensors])
        for outside, inside_grad in zip(*grads, strict=True):
            assert torch.equal(outside, inside_grad)


@pytest.mark.parametrize("name", list(INDICES))
def test_an_index_is_not_touched_by_autocast(name: str) -> None:
    if name == "faiss":
        pytest.importorskip("faiss")
    keys, queries, _ = (x[0] for x in inputs())
    want = INDICES[name].build(keys).search(queries, 5, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = INDICES[name].build(keys).search(queries, 5, 0)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_the_audit_is_not_touched_by_autocast() -> None:
    tensors = [x.bfloat16() for x in inputs()]
    audits = []
    for inside in (False, True):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
            generator = torch.Generator().manual_seed(2)
            audits.append(nf.estimate(*tensors, method=nf.TopK(7), audit=20, generator=generator).audit)
    assert audits[0] is not None
    assert audits[1] is not None
    assert torch.equal(audits[0].additive_errors, audits[1].additive_errors)


def test_gradient_functions_are_not_touched_by_autocast() -> None:
    query, key, value = inputs()
    want = nf.gradients.exact(query, key, value, value)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        # The inputs are cast, as by any function under autocast; the sums are not.
        got = nf.gradients.exact(query, key, value, value)
    cast = nf.gradients.exact(query.bfloat16(), key.bfloat16(), value.bfloat16(), value)
    for a, b, c in zip(got, cast, want, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


@pytest.mark.parametrize("name", list(INDICES))
def test_an_index_is_freed_when_it_is_dropped(name: str) -> None:
    """No reference cycle: a training loop builds an index per step and must not wait for the garbage collector."""
    if name == "faiss":
        pytest.importorskip("faiss")
    keys, queries, _ = (x[0] for x in inputs())
    gc.disable()
    try:
        built = INDICES[name].build(keys)
        built.search(queries, 5, 0)
        seen = weakref.ref(built)
        del built
        assert seen() is None
    finally:
        gc.enable()


def test_walks_are_seeded_in_the_forward_pass() -> None:
    """Two calls from one generator, differentiated in either order, give the same gradients."""
    results = []
    for order in ((0, 1), (1, 0)):
        generator = torch.Generator().manual_seed(3)
        tensors = [[x.clone().requires_grad_() for x in inputs()] for _ in range(2)]
        gradient = nf.gradients.RandomWalk(walks=4)
        outputs = [nf.attention(*some, gradient=gradient, generator=generator) for some in tensors]
        for which in order:
            outputs[which].sum().backward()
        results.append([x.grad for some in tensors for x in some])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert not torch.equal(results[0][0], results[0][3])


def test_gradient_functions_refuse_nan() -> None:
    query, key, value = inputs()
    query[0, 0, 3] = torch.nan
    with pytest.raises(ValueError, match="query"):
        nf.gradients.exact(query, key, value, value)
    with pytest.raises(ValueError, match="query"):
        nf.gradients.estimate(query, key, value, value, nf.gradients.RandomWalk())


def test_gradient_functions_without_keys() -> None:
    query, key, value = (x[:, :, :n] for x, n in zip(inputs(), (5, 0, 0), strict=True))
    upstream = torch.ones(1, 2, 5, 8)
    for grads in (
        nf.gradients.exact(query, key, value, upstream),
        nf.gradients.estimate(query, key, value, upstream, nf.gradients.RandomWalk()),
    ):
        assert [tuple(x.shape) for x in grads] == [(1, 2, 5, 8), (1, 2, 0, 8), (1, 2, 0, 8)]
        assert not bool(grads.query.any())
    assert nf.gradients.approx_pos_prod(query, key, upstream, 10).shape == (1, 2, 0, 8)


@pytest.mark.parametrize("wrong", ["walks", nf.gradients.RandomWalk, 3])
def test_wrong_gradients(wrong: Any) -> None:
    with pytest.raises(TypeError, match="gradient must be"):
        nf.attention(*inputs(), gradient=wrong)


@pytest.mark.parametrize("recipe", [nf.TopK, nf.LazyGumbel, nf.gradients.RandomWalk, nf.gradients.PrintedWalk])
@pytest.mark.parametrize("wrong", [3, nf.ExactIndex, None])
def test_wrong_indices(recipe: Any, wrong: Any) -> None:
    with pytest.raises(TypeError, match="index must be"):
        recipe(index=wrong)


def test_a_nan_row_that_sees_nothing_spoils_no_gradient() -> None:
    for method in (nf.TopK(7, 5), nf.TopK(7), nf.Exact(), METHODS["cells"]):
        tensors = [x.clone().requires_grad_() for x in inputs()]
        with torch.no_grad():
            tensors[0][0, 0, 0] = torch.nan
        mask = torch.ones(1, 1, 1, 70, dtype=torch.bool)
        mask[..., :3] = False
        output = nf.attention(*tensors, mask, is_causal=True, method=method)
        output[:, :, 3:].sum().backward()
        for x in tensors[1:]:
            assert x.grad is not None
            assert bool(x.grad.isfinite().all())


def test_float_masks_of_another_dtype_are_named() -> None:
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(TypeError, match="attn_mask"):
            nf.attention(*inputs(), torch.zeros(70, 70, dtype=dtype))


def test_default_dtype_does_not_matter(method: Any) -> None:
    want = call(inputs(), method)
    try:
        torch.set_default_dtype(torch.float64)
        assert torch.equal(call(inputs_like(want.dtype), method), want)
    finally:
        torch.set_default_dtype(torch.float32)


def inputs_like(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, 2, 70, 8, generator=generator, dtype=dtype) for _ in range(3)]


@pytest.mark.long
@pytest.mark.parametrize("name", ["exact", "cells"])
@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
def test_a_compiled_call_honours_its_generator_or_refuses_it(name: str, dropout_p: float) -> None:
    generator = torch.Generator()

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        return nf.attention(*tensors, dropout_p=dropout_p, is_causal=True, method=METHODS[name], generator=generator)

    def seeded(function: Any) -> torch.Tensor:
        torch.compiler.reset()
        generator.manual_seed(1)
        return function(*inputs())

    want = seeded(run)
    assert torch.equal(seeded(torch.compile(run, backend="aot_eager")), want)
    whole = torch.compile(run, backend="aot_eager", fullgraph=True)
    if dropout_p:
        with pytest.raises(RuntimeError, match="generator= cannot be traced"):
            seeded(whole)
    else:
        assert torch.equal(seeded(whole), want), "nothing is drawn"
