"""The operators behind `Cells` in programs: torch.compile, export, checkpoints, autocast, threads, copies."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import seeded
from operator_calls import (
    DRAWN,
    LENGTH,
    MANY_SPANS,
    METHOD,
    SHARED,
    assert_all_equal,
    attend,
    compiled,
    grads,
    leaves,
    padding,
    states,
    tensors,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import nearfield as nf

# torch.compile


class Model(nn.Module):
    """A layer that calls `nf.attention` on heads as projections make them: not contiguous, keys fewer than queries."""

    def __init__(self, kv_heads: int = 2, **options: Any) -> None:
        super().__init__()
        self.kv_heads, self.options = kv_heads, options
        self.projection = nn.Linear(16, 16 + 16 * kv_heads)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        projected = self.projection(x).unflatten(-1, (-1, 8)).transpose(1, 2)
        q, k, v = projected.split([2, self.kv_heads, self.kv_heads], 1)
        return attend(q, k, v, attn_mask=mask, enable_gqa=True, **self.options).transpose(1, 2).flatten(2)


class Layers(nn.Module):
    """The same through the module."""

    def __init__(self, kv_heads: int = 2, is_causal: bool = False, dropout_p: float = 0.0, method: Any = METHOD) -> None:
        super().__init__()
        self.layer = nf.nn.Attention(16, 2, dropout_p, num_kv_heads=kv_heads, method=method)
        self.is_causal = is_causal

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = None if mask is None else ~mask[:, 0, 0]
        return self.layer(x, key_padding_mask=hidden, is_causal=self.is_causal)[0].relu()


def with_gradients(model: nn.Module, function: Callable[..., Tensor], x: Tensor, *others: Any) -> list[Tensor]:
    (x,) = leaves(x)
    torch.manual_seed(11)
    output = function(x, *others)
    output.square().sum().backward()
    found = [output.detach(), x.grad, *(p.grad for p in model.parameters())]
    model.zero_grad()
    assert all(isinstance(one, Tensor) for one in found)
    return found


CASES: dict[str, tuple[dict[str, Any], bool]] = {
    "plain": ({}, False),
    "causal-grouped-padded": ({"is_causal": True, "kv_heads": 1}, True),
    "dropout": ({"is_causal": True, "dropout_p": 0.3}, False),
    "samples": ({"method": nf.Cells(4, 2, 4, sinks=0)}, False),
    "blocks": ({"method": nf.Cells(4, 2, partition=nf.Blocks())}, False),
    "hash": ({"method": nf.Cells(4, 2, partition=nf.HashBuckets(seed=1))}, False),
    "reference": ({"is_causal": True, "backend": "reference"}, False),
    "share-in-order": ({"kv_heads": 1, "method": SHARED}, True),
    "share-dropout": ({"is_causal": True, "kv_heads": 1, "dropout_p": 0.3, "method": SHARED}, False),
}


@pytest.mark.parametrize("case", CASES)
def test_compiled_equals_eager(case: str) -> None:
    options, padded = CASES[case]
    model = Model(**options)
    others = (padding(),) if padded else ()
    function = compiled(model)
    assert_all_equal(with_gradients(model, function, states(), *others), with_gradients(model, model, states(), *others))


def test_compiled_modules_equal_eager_ones() -> None:
    model = Layers(kv_heads=1, is_causal=True)
    function = compiled(model)
    assert_all_equal(with_gradients(model, function, states(), padding()), with_gradients(model, model, states(), padding()))


@pytest.mark.slow
def test_compiled_by_inductor() -> None:
    model = Model(kv_heads=1, is_causal=True)
    function = compiled(model, "inductor")
    found, expected = (with_gradients(model, f, states(), padding()) for f in (function, model))
    torch.testing.assert_close(found, expected)
    model = Model(dropout_p=0.3)
    function = compiled(model, "inductor")
    first, second = function(states()), function(states())
    assert not torch.equal(first, second)


@pytest.mark.long
@torch.no_grad()
def test_compiled_dropout_is_drawn_when_the_program_runs() -> None:
    model = Layers(dropout_p=0.3)
    function = compiled(model)
    first, second = function(states()), function(states())
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    third = function(states())
    torch.manual_seed(5)
    assert torch.equal(function(states()), third)
    model.eval()
    assert torch.equal(function(states()), function(states()))
    assert torch.equal(function(states()), model(states()))


@pytest.mark.long
@pytest.mark.parametrize(("method", "scale"), [(METHOD, None), (SHARED, 0.3), (nf.Exact(), 0.3), (nf.Auto(), None)])
def test_one_program_serves_all_lengths(method: Any, scale: float | None) -> None:
    eager = partial(attend, is_causal=True, scale=scale, method=method)
    function = compiled(eager, dynamic=True)
    grads(function, *tensors(1, 2, 33, 8))
    with torch.compiler.set_stance("fail_on_recompile"):
        for length in (48, 20):
            inputs = tensors(1, 2, length, 8)
            assert_all_equal(grads(function, *inputs), grads(eager, *inputs))


@pytest.mark.long
def test_sizes_follow_the_length_in_one_program() -> None:
    eager = partial(attend, method=nf.Cells())
    function = compiled(eager, dynamic=True)
    grads(function, *tensors(1, 1, 300, 8))
    with torch.compiler.set_stance("fail_on_recompile"):
        inputs = tensors(1, 1, 2000, 8)
        torch.testing.assert_close(grads(function, *inputs), grads(eager, *inputs))


@pytest.mark.parametrize("is_causal", [False, True])
def test_nan_stays_in_its_rows_when_compiled(is_causal: bool) -> None:
    function = compiled(partial(attend, is_causal=is_causal, check_finite=True))  # which cannot raise here
    q, k, v = tensors()
    clean = attend(q, k, v, is_causal=is_causal)
    q[0, 1, 5, 3] = torch.nan
    before = torch.get_rng_state()
    output = function(q, k, v)
    assert torch.equal(torch.get_rng_state(), before)
    assert_all_equal(output, attend(q, k, v, is_causal=is_causal))
    assert output[0, 1, 5].isnan().all()
    output[0, 1, 5] = clean[0, 1, 5]
    torch.testing.assert_close(output, clean)
    k[1, 0, 20, 0] = torch.inf
    spoiled = function(q, k, v)[1, 0].isnan().all(-1)
    assert torch.equal(spoiled, torch.arange(LENGTH) >= (20 if is_causal else 0))


def test_rows_that_see_nothing_when_compiled() -> None:
    mask = padding()
    mask[0] = False
    function = compiled(attend)
    found = grads(partial(function, attn_mask=mask), *tensors())
    assert_all_equal(found, grads(partial(attend, attn_mask=mask), *tensors()))
    assert not any(x[0].any() for x in found)


@torch.no_grad()
def test_compiled_under_autocast() -> None:
    model = Model(is_causal=True)
    function = compiled(model)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = function(states()), model(states())
        assert found.dtype == torch.bfloat16
        assert torch.equal(found, expected)


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "attn_mask": padding()}])
def test_the_default_method_is_compiled(options: dict[str, Any]) -> None:
    function = compiled(partial(nf.attention, **options))
    torch.testing.assert_close(grads(function, *tensors()), grads(partial(nf.attention, **options), *tensors()))


@pytest.mark.long
def test_transforms_are_compiled() -> None:
    def loss(*inputs: Tensor) -> Tensor:
        return attend(*inputs, is_causal=True).square().sum()

    assert_all_equal(compiled(torch.vmap(attend))(*tensors()), attend(*tensors()))
    assert_all_equal(compiled(torch.func.grad(loss))(*tensors()), torch.func.grad(loss)(*tensors()))


def test_export() -> None:
    model = Layers(is_causal=True)
    program = torch.export.export(model, (states(),)).module()
    assert torch.equal(program(states()), model(states()))
    # What was exported for inference has lost its gradient, and says so.
    with pytest.warns(UserWarning, match="autograd kernel was not registered"):
        program(states()).sum().backward()


# What is around a call


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3}, {"method": DRAWN}])
def test_checkpoints(reentrant: bool, options: dict[str, Any]) -> None:
    function = partial(attend, is_causal=True, **options)
    torch.manual_seed(2)
    expected = grads(function, *tensors())
    torch.manual_seed(2)
    assert_all_equal(grads(partial(checkpoint, function, use_reentrant=reentrant), *tensors()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_autocast(dtype: torch.dtype) -> None:
    inputs = tensors(dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(*inputs)
        assert attend(*inputs).dtype == expected.dtype


@pytest.mark.parametrize("method", [METHOD, MANY_SPANS, SHARED])
def test_autocast_ends_before_the_backward_pass(method: Any) -> None:
    def function(inside: bool) -> list[Tensor]:
        inputs = leaves(*tensors())
        with torch.autocast("cpu", torch.bfloat16):
            loss = attend(*inputs, method=method).float().square().sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return [x.grad for x in inputs if x.grad is not None]

    assert_all_equal(function(True), function(False))


def test_concurrent_calls() -> None:
    problems = [tensors(seed=seed) for seed in range(8)]
    options = [{"generator": seeded(seed), "dropout_p": 0.3} if seed % 2 else {} for seed in range(8)]
    expected = [grads(partial(attend, **copied(option)), *problem) for problem, option in zip(problems, options, strict=True)]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda one: grads(partial(attend, **copied(one[1])), *one[0]), zip(problems, options, strict=True)))
    assert_all_equal(found, expected)


def copied(options: dict[str, Any]) -> dict[str, Any]:
    """The options with generators that start at the same state."""
    return {name: x.clone_state() if isinstance(x, torch.Generator) else x for name, x in options.items()}


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3, "generator": 1}, {"method": DRAWN, "generator": 1}])
def test_the_global_generator_is_untouched(options: dict[str, Any]) -> None:
    options = {name: seeded(1) if name == "generator" else x for name, x in options.items()}
    before = torch.get_rng_state()
    grads(partial(attend, is_causal=True, **options), *tensors())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(clone: Callable[[Any], Any]) -> None:
    method = nf.Cells(8, 2, 4, partition=nf.HashBuckets(seed=3), segment=16)
    assert clone(method) == method
    layer = nf.nn.Attention(16, 2, method=method).eval()
    twin = clone(layer)
    assert twin.method == method
    torch.manual_seed(1)
    expected = layer(states(), is_causal=True)[0]
    torch.manual_seed(1)
    assert torch.equal(twin(states(), is_causal=True)[0], expected)
