"""The cells engine as operators of torch: opaque to torch.compile, differentiable, and foldable under vmap.

`nearfield::cells` makes the plan and attends; `nearfield::cells_backward` is its gradient with the plan held fixed. An
`autograd.Function` ties them together: it is what works with gradcheck, torch.func and torch.compile(fullgraph=True) alike.
Forward mode (torch.func.jvp) and second derivatives are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from nearfield.kernels import cells_engine
from nearfield.kernels.cells_plan import CellSettings
from nearfield.precision import full_precision

_LIBRARY = torch.library.Library("nearfield", "DEF")
_SETTINGS = "int[] sizes, float scale, float dropout_p, str partition, int[] options, str backend, bool trained"
_PLAN = ("cell_of", "coarse_of", "opened", "unfolded", "drawn", "log_factor")
_LIBRARY.define(
    f"cells(Tensor queries, Tensor keys, Tensor values, Tensor visible, Tensor seed, {_SETTINGS}) -> "
    f"(Tensor output, Tensor lse, Tensor stderr, {', '.join(f'Tensor {name}' for name in _PLAN)})"
)
_LIBRARY.define(
    "cells_backward(Tensor output_grad, Tensor queries, Tensor keys, Tensor values, Tensor visible, Tensor seed, Tensor output, "
    f"Tensor lse, {', '.join(f'Tensor {name}' for name in _PLAN)}, {_SETTINGS}) -> (Tensor, Tensor, Tensor)"
)


def _implement(name: str, engine: Callable[..., tuple[Tensor, ...]]) -> None:
    def run(*arguments: Any) -> tuple[Tensor, ...]:
        # Here and not around the call: a backward pass may be started under autocast, and an exported program, which has lost
        # the function below, while gradients are recorded (torch then warns that there are none).
        with full_precision(arguments[0]), torch.no_grad():
            return engine(*arguments)

    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")


_implement("cells", cells_engine.forward)
_implement("cells_backward", cells_engine.backward)


class Recipe(NamedTuple):
    """What an operator is told beside its tensors, in types that a schema knows."""

    sizes: CellSettings
    scale: float
    dropout_p: float
    partition: str
    options: tuple[int, ...]
    backend: str
    trained: bool = False
    """whether a gradient will be asked for, which takes memory that the forward pass may use before"""

    def arguments(self) -> tuple[list[int], float, float, str, list[int], str, bool]:
        return [*self.sizes], self.scale, self.dropout_p, self.partition, [*self.options], self.backend, self.trained


class CellsResult(NamedTuple):
    """Tensors `[batch, rows, ...]`."""

    output: Tensor
    """`[*shape, value_dim]` where a shape was asked for"""
    lse: Tensor
    stderr: Tensor
    """no columns where nothing is drawn"""
    cell_of: Tensor
    coarse_of: Tensor
    opened: Tensor
    unfolded: Tensor
    drawn: Tensor
    log_factor: Tensor


def cells_attention(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, seed: Tensor, recipe: Recipe, shape: Sequence[int] = ()
) -> CellsResult:
    """Attention by cells of queries `[batch, group * length, dim]`, each row seeing the first `visible[b, r]` keys.

    With a shape (batch, heads, length) the output is laid out in memory as `[batch, length, heads, value_dim]`. A model that goes
    on with that keeps it for its own gradient, and it is the one that is kept here: one output in memory, not two.
    """
    return CellsResult(*_Cells.apply(queries, keys, values, visible, seed, *recipe.arguments(), [*shape]))


class _Cells(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(  # every argument by name: torch.compile counts them
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Tensor,
        seed: Tensor,
        sizes: list[int],
        scale: float,
        dropout_p: float,
        partition: str,
        options: list[int],
        backend: str,
        trained: bool,
        shape: list[int],
    ) -> tuple[Tensor, ...]:
        output, *rest = torch.ops.nearfield.cells(
            queries, keys, values, visible, seed, sizes, scale, dropout_p, partition, options, backend, trained
        )
        if shape:
            output = output.view(*shape, output.shape[-1]).transpose(1, 2).contiguous().transpose(1, 2)
        return output, *rest

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        queries, keys, values, visible, seed, *settings, _ = inputs
        result, lse, _, *plan = output
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(queries, keys, values, visible, seed, result, lse, *plan)
        ctx.settings = settings

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        nothing: tuple[None, ...] = (None,) * 13
        if output_grad is None:
            return nothing
        queries, keys, values, visible, seed, output, *rest = ctx.saved_tensors
        rows = (*queries.shape[:2], values.shape[2])
        output_grad, output = output_grad.reshape(rows), output.reshape(rows)
        # What is compiled refuses a second derivative by itself.
        apply = torch.ops.nearfield.cells_backward if torch.compiler.is_compiling() else _CellsBackward.apply
        grads = apply(output_grad, queries, keys, values, visible, seed, output, *rest, *ctx.settings)
        return (*grads, *nothing[3:])


class _CellsBackward(torch.autograd.Function):
    """The gradient as a function that has none.

    Refusing `create_graph=True`, as other backward passes here do, would refuse torch.func.grad, which always sets it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return torch.ops.nearfield.cells_backward(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *_: Any) -> NoReturn:
        raise NotImplementedError(
            "nearfield does not support double backward; "
            "use torch.nn.functional.scaled_dot_product_attention with the math backend for second derivatives"
        )


@torch.library.register_fake("nearfield::cells")
def _(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, seed: Tensor, *settings: Any) -> tuple[Tensor, ...]:
    recipe = Recipe(*settings)
    return cells_engine.empty_results(queries, keys, values, CellSettings(*recipe.sizes), recipe.backend)


@torch.library.register_fake("nearfield::cells_backward")
def _(output_grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return queries.new_empty(queries.shape), keys.new_empty(keys.shape), values.new_empty(values.shape)


def _vmap_rule(operator: Callable[..., tuple[Tensor, ...]]) -> Callable[..., tuple[tuple[Tensor, ...], tuple[int, ...]]]:
    """A vmapped dimension is more batch: fold it in, call once, and unfold what comes out.

    Draws depend on the number of a row in the batch, and the gradient has to meet the draws of the forward pass, which may have
    been called without that dimension. What is random is therefore called entry by entry.
    """

    def rule(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        def entry(number: int) -> list[Any]:
            return [x if not isinstance(dim, int) else x.select(dim, number) for x, dim in zip(arguments, in_dims, strict=True)]

        def folded(x: Any, dim: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            x = x.expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1) if x.dim() > 1 else x[0]  # the seed, which nothing depends on here

        recipe = Recipe(*arguments[-len(Recipe._fields) :])
        if CellSettings(*recipe.sizes).samples or recipe.dropout_p:
            calls = [operator(*entry(number)) for number in range(info.batch_size)]
            outputs = tuple(torch.stack(parts) for parts in zip(*calls, strict=True))
        else:
            found = operator(*map(folded, arguments, in_dims))
            outputs = tuple(x.unflatten(0, (info.batch_size, x.shape[0] // info.batch_size)) for x in found)
        return outputs, (0,) * len(outputs)

    return rule


for _operator in (torch.ops.nearfield.cells, torch.ops.nearfield.cells_backward):
    torch.library.register_vmap(_operator.default, _vmap_rule(_operator), lib=_LIBRARY)
