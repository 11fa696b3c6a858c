"""The operators behind `Cells` inside torch: opcheck, torch.func and autograd."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
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
    states,
    tensors,
)
from torch import Tensor

import nearfield as nf
from nearfield.cells.operator import Recipe, cells_attention
from nearfield.cells.sizes import CellSizes

# opcheck


def arguments(
    group: int = 1,
    causal: bool = False,
    samples: int = 0,
    dropout_p: float = 0.0,
    padded: bool = False,
    layout: str = "contiguous",
    partition: tuple[str, tuple[int, ...]] = ("KMeans", (3, 0)),
    dtype: torch.dtype = torch.float32,
    value_dim: int = 8,
    window: int = 0,
    span_levels: int = 2,
    share: int = 1,
) -> tuple[Any, ...]:
    """What `nearfield::cells` is called with."""
    batch, length = 2, 20
    queries, keys = tensors(batch, group * length, 8, count=2, dtype=dtype)
    keys, values = keys[:, :length], tensors(batch, length, value_dim, count=1, dtype=dtype)[0]
    if layout == "permuted":
        queries, keys, values = (x.permute(2, 0, 1).contiguous().permute(1, 2, 0) for x in (queries, keys, values))
    elif layout == "strided":
        queries, keys, values = (x.repeat_interleave(2, -1)[..., ::2] for x in (queries, keys, values))
    elif layout == "expanded":
        queries, keys, values = (x[:1].expand(batch, -1, -1) for x in (queries, keys, values))
    seen = torch.arange(1, length + 1) if causal else torch.full((length,), length)
    visible = seen.repeat(group).expand(batch, -1)
    if padded:
        visible = visible.clamp(max=length - 7).clone()
        visible[1].clamp_(max=11)
    sizes = CellSizes(group, 6 if causal else 0, window, 2, 3, 2, samples, span_levels if causal else 1, share)
    recipe = Recipe(sizes, 0.35, dropout_p, *partition, "torch")
    return queries, keys, values, visible, torch.tensor(5), *recipe.arguments()


SAMPLES: dict[str, dict[str, Any]] = {
    "plain": {},
    "permuted": {"layout": "permuted"},
    "strided-causal": {"layout": "strided", "causal": True, "span_levels": 1},
    "expanded": {"layout": "expanded"},
    "grouped": {"group": 2, "value_dim": 5},
    "grouped-causal-permuted": {"group": 3, "causal": True, "window": 1, "layout": "permuted"},
    "samples-causal": {"causal": True, "samples": 3},
    "samples-grouped": {"samples": 4, "group": 2},
    "dropout-causal": {"dropout_p": 0.2, "causal": True},
    "share": {"group": 2, "causal": True, "share": 16},
    "share-in-order": {"group": 2, "share": 16, "padded": True},
    "padding-dropout-hashed": {"padded": True, "dropout_p": 0.2, "partition": ("HashBuckets", (0, 1))},
    "padding-causal-low-precision": {"padded": True, "causal": True, "dtype": torch.bfloat16, "partition": ("Blocks", ())},
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_opcheck(sample: str) -> None:
    inputs = arguments(**SAMPLES[sample])
    torch.library.opcheck(torch.ops.nearfield.cells.default, inputs)
    output, lse, _, *plan = torch.ops.nearfield.cells(*inputs)
    upstream = torch.randn(output.shape, generator=seeded(2)).to(output.dtype)
    for lse_grad in (None, torch.randn(lse.shape, generator=seeded(3)).to(lse.dtype)):
        given = upstream, lse_grad, *inputs[:5], output, lse, *plan, *inputs[5:]
        torch.library.opcheck(torch.ops.nearfield.cells_backward.default, given)


# torch.func


def stacked(function: Callable[..., Any], in_dims: tuple[int | None, ...], inputs: list[Tensor]) -> Any:
    """What vmap stands for."""
    size = next(x.shape[dim] for x, dim in zip(inputs, in_dims, strict=True) if dim is not None)
    results = []
    for number in range(size):
        results.append(function(*(x if dim is None else x.select(dim, number) for x, dim in zip(inputs, in_dims, strict=True))))
    return torch.stack(results) if isinstance(results[0], Tensor) else tuple(map(torch.stack, zip(*results, strict=True)))


IN_DIMS = [(0, 0, 0), (0, None, None), (None, 0, 0), (0, 1, None), (3, 0, 0), (None, None, 2)]


def batched(in_dims: tuple[int | None, ...], shape: tuple[int, ...] = (1, 2, 24, 8)) -> list[Tensor]:
    """Queries, keys, values of a `shape`, with a dimension of three more at `in_dims`."""
    inputs = tensors(3, *shape)
    return [x[0] if dim is None else x.movedim(0, dim) for x, dim in zip(inputs, in_dims, strict=True)]


@pytest.mark.parametrize("in_dims", IN_DIMS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"is_causal": True, "method": MANY_SPANS},
        {"is_causal": True, "method": SHARED},
        {"method": SHARED},
    ],
)
def test_vmap(in_dims: tuple[int | None, ...], options: dict[str, Any]) -> None:
    function, inputs = partial(attend, **options), batched(in_dims)
    assert_all_equal(torch.vmap(function, in_dims)(*inputs), stacked(function, in_dims, inputs))


def test_vmap_of_the_operator_itself() -> None:
    queries, keys, values, visible, _, *settings = arguments(causal=True)
    inputs = [torch.stack([queries, queries + 1], 1), keys, torch.stack([values, -values], 3), visible, torch.tensor([5, 6])]

    def function(*inputs: Tensor) -> tuple[Tensor, ...]:
        return torch.ops.nearfield.cells(*inputs, *settings)

    in_dims = (1, None, 3, None, 0)
    assert_all_equal(torch.vmap(function, in_dims)(*inputs), stacked(function, in_dims, inputs))


@pytest.mark.parametrize("in_dims", IN_DIMS)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_vmap_of_grad(in_dims: tuple[int | None, ...], backend: str) -> None:
    def loss(*inputs: Tensor) -> Tensor:
        return attend(*inputs, is_causal=True, backend=backend).square().sum()

    gradient, inputs = torch.func.grad(loss, (0, 1, 2)), batched(in_dims)
    assert_all_equal(torch.vmap(gradient, in_dims)(*inputs), stacked(gradient, in_dims, inputs))


@pytest.mark.parametrize("in_dims", IN_DIMS)
def test_grad_of_vmap(in_dims: tuple[int | None, ...]) -> None:
    inputs = batched(in_dims)

    def loss(mapped: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        return mapped(*inputs).square().sum()

    found = torch.func.grad(partial(loss, torch.vmap(attend, in_dims)), (0, 1, 2))(*inputs)
    mine = leaves(*inputs)
    torch.testing.assert_close(found, torch.autograd.grad(loss(partial(stacked, attend, in_dims), mine), mine))


def test_vmap_of_vmap_and_of_masks() -> None:
    inputs = tensors(2, 3, 2, 24, 8)
    masks = torch.rand(2, 3, 1, 24, generator=seeded(1)) > 0.3

    def one(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        return attend(q, k, v, mask, is_causal=True)

    nested = torch.vmap(torch.vmap(one))(*inputs, masks)
    assert_all_equal(nested, torch.stack([stacked(one, (0,) * 4, [x[i] for x in (*inputs, masks)]) for i in range(2)]))


@pytest.mark.parametrize("options", [{}, {"is_causal": True, "dropout_p": 0.3}, {"method": DRAWN}])
def test_grad_and_vjp_equal_autograd(options: dict[str, Any]) -> None:
    def function(*inputs: Tensor) -> Tensor:
        return attend(*inputs, generator=seeded(1), **options)

    output, *expected = grads(function, *tensors())
    weight = torch.randn(output.shape, generator=seeded(3))
    found, pullback = torch.func.vjp(function, *tensors())
    assert_all_equal(found, output)
    assert_all_equal(pullback(weight), tuple(expected))
    gradient = torch.func.grad(lambda *inputs: (function(*inputs) * weight).sum(), (0, 1, 2))
    assert_all_equal(gradient(*tensors()), tuple(expected))


@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.3}, {"samples": 2}])
def test_jacrev(options: dict[str, Any]) -> None:
    """Also where the cotangents are a batch and the draws are not."""
    options = dict(options)
    method = nf.Cells(2, 2, options.pop("samples", 0), sinks=1)

    def function(*inputs: Tensor) -> Tensor:
        return attend(*inputs, method=method, generator=seeded(1), **options)

    inputs = tensors(2, 6, 2, dtype=torch.float64)
    found = torch.func.jacrev(function, (0, 1, 2))(*inputs)
    mine = leaves(*inputs)
    output = function(*mine)
    rows = [torch.autograd.grad(x, mine, retain_graph=True) for x in output.reshape(-1)]
    expected = tuple(torch.stack(x).view(*output.shape, *inputs[0].shape) for x in zip(*rows, strict=True))
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("options", [{"dropout_p": 0.3}, {"method": DRAWN}])
def test_vmap_honours_randomness(options: dict[str, Any]) -> None:
    shape = (3, 1, 2, LENGTH, 8)
    inputs = [x[:1].expand(shape) for x in tensors(*shape)]  # the same thrice

    def loss(*inputs: Tensor) -> Tensor:
        return attend(*inputs, **options).square().sum()

    function = torch.func.grad_and_value(loss, (0, 1, 2))
    with pytest.raises(RuntimeError, match="randomness"):
        torch.vmap(function)(*inputs)
    gradients, values = torch.vmap(function, randomness="same")(*inputs)
    assert all(torch.equal(x[0], x[1]) for x in (values, *gradients))
    gradients, values = torch.vmap(function, randomness="different")(*inputs)
    assert len({float(x) for x in values}) == 3
    # The gradients are those of what was drawn: v . dL/dv = 2 L, for the output is linear in v.
    torch.testing.assert_close((gradients[2] * inputs[2]).sum((1, 2, 3, 4)), 2 * values)


def test_functional_call_with_gradients_per_example() -> None:
    layer = nf.nn.Attention(16, 2, num_kv_heads=1, method=METHOD)
    parameters, x = dict(layer.named_parameters()), states()

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(layer, parameters, (x,), {"is_causal": True})[0].square().sum()

    found = torch.func.grad(loss)(parameters, x)
    loss(parameters, x).backward()
    torch.testing.assert_close(found, {name: p.grad for name, p in layer.named_parameters()})
    each = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    torch.testing.assert_close({name: one.sum(0) for name, one in each.items()}, found)


# autograd


def clusters(groups: int, size: int, dim: int) -> Tensor:
    """`[size * groups, dim]`: tight clusters far apart, in turns, so that a small step changes no decision."""
    centre = torch.randn(groups, dim, generator=seeded(0), dtype=torch.float64)
    spread = torch.randn(size, groups, dim, generator=seeded(1), dtype=torch.float64)
    return (centre * 2 + spread * 0.05).reshape(-1, dim)


FROZEN: dict[str, dict[str, Any]] = {
    "causal-window": {"method": nf.Cells(2, 1, sinks=0, segment=2, window=2), "is_causal": True},
    "dropout": {"method": nf.Cells(2, 1, sinks=1), "dropout_p": 0.4},
    "padded-causal": {
        "method": nf.Cells(2, 1, sinks=1, segment=4),
        "is_causal": True,
        "attn_mask": torch.tensor([False, True, False] + [True] * 5),
    },
}


@pytest.mark.parametrize("case", FROZEN)
def test_gradcheck(case: str) -> None:
    queries, values = tensors(2, 8, 2, count=2, dtype=torch.float64)

    def function(*inputs: Tensor) -> Tensor:
        return nf.attention(*inputs, enable_gqa=True, generator=seeded(0), **FROZEN[case])

    torch.autograd.gradcheck(function, leaves(queries, clusters(4, 2, 2)[None], values[:1]), check_batched_grad=case == "dropout")


@pytest.mark.parametrize("with_lse", [False, True])
def test_only_what_is_asked_for_is_differentiable(with_lse: bool) -> None:
    queries, keys, values, visible, seed, *settings = arguments(samples=2)
    recipe = Recipe.of(settings)
    result = cells_attention(*leaves(queries, keys, values), visible, seed, recipe, with_lse)
    assert [x.requires_grad for x in result] == [True, with_lse] + [False] * 6


def test_second_derivatives_are_refused() -> None:
    inputs = leaves(*tensors())
    gradients = torch.autograd.grad(attend(*inputs).square().sum(), inputs, create_graph=True)
    assert_all_equal(gradients, torch.autograd.grad(attend(*inputs).square().sum(), inputs))
    for gradient in gradients:
        with pytest.raises(NotImplementedError, match="double backward"):
            torch.autograd.grad(gradient.sum(), inputs, retain_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: attend(q, *inputs[1:]).sum())(q).sum())(inputs[0])
    gradient = torch.autograd.grad(compiled(attend)(*inputs).square().sum(), inputs, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="double backward"):
        gradient.sum().backward()


def test_forward_mode_is_refused() -> None:
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(attend, tuple(tensors()), tuple(tensors()))


def test_inputs_changed_before_the_backward_pass() -> None:
    inputs = leaves(*tensors())
    key = inputs[1] * 1
    output = attend(inputs[0], key, inputs[2])
    key.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
