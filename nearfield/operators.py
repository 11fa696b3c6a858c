"""The cells engine as operators of torch: opaque to torch.compile, differentiable, and foldable under vmap.

`nearfield::cells` makes the plan and attends; `nearfield::cells_backward` is its gradient with the plan held fixed. One
`autograd.Function` ties them together: it is what works with gradcheck, torch.func and torch.compile(fullgraph=True) alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.gradients.base import refuse_double_backward
from nearfield.kernels import cells_engine
from nearfield.kernels.cells_plan import CellSettings

_LIBRARY = torch.library.Library("nearfield", "DEF")
_SETTINGS = "int[] sizes, float scale, float dropout_p, str partition, int[] options, str backend"
_PLAN = ("cell_of", "coarse_of", "opened", "unfolded", "drawn", "log_factor")
_LIBRARY.define(
    f"cells(Tensor queries, Tensor keys, Tensor values, Tensor visible, Tensor seed, {_SETTINGS}) -> "
    f"(Tensor output, Tensor lse, Tensor stderr, {', '.join(f'Tensor {name}' for name in _PLAN)})"
)
_LIBRARY.define(
    "cells_backward(Tensor output_grad, Tensor queries, Tensor keys, Tensor values, Tensor visible, Tensor seed, Tensor output, "
    f"Tensor lse, {', '.join(f'Tensor {name}' for name in _PLAN)}, {_SETTINGS}) -> (Tensor, Tensor, Tensor)"
)
_LIBRARY.impl("cells", cells_engine.forward, "CompositeExplicitAutograd")
_LIBRARY.impl("cells_backward", cells_engine.backward, "CompositeExplicitAutograd")


class Recipe(NamedTuple):
    """What an operator is told beside its tensors, in types that a schema knows."""

    sizes: CellSettings
    scale: float
    dropout_p: float
    partition: str
    options: tuple[int, ...]
    backend: str

    def arguments(self) -> tuple[list[int], float, float, str, list[int], str]:
        return [*self.sizes], self.scale, self.dropout_p, self.partition, [*self.options], self.backend


class CellsResult(NamedTuple):
    """Tensors `[batch, rows, ...]`."""

    output: Tensor
    lse: Tensor
    stderr: Tensor
    cell_of: Tensor
    coarse_of: Tensor
    opened: Tensor
    unfolded: Tensor
    drawn: Tensor
    log_factor: Tensor


def cells_attention(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, seed: Tensor, recipe: Recipe) -> CellsResult:
    """Attention by cells of queries `[batch, group * length, dim]`, each row seeing the first `visible[b, r]` keys."""
    return CellsResult(*_Cells.apply(queries, keys, values, visible, seed, *recipe.arguments()))


class _Cells(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return torch.ops.nearfield.cells(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        queries, keys, values, visible, seed, *settings = inputs
        result, lse, _, *plan = output
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(queries, keys, values, visible, seed, result, lse, *plan)
        ctx.settings = settings

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        nothing: tuple[None, ...] = (None,) * 11
        if output_grad is None:
            return nothing
        if not torch.compiler.is_compiling():
            refuse_double_backward()
        grads = torch.ops.nearfield.cells_backward(output_grad, *ctx.saved_tensors, *ctx.settings)
        return (*grads, *nothing[3:])


@torch.library.register_fake("nearfield::cells")
def _(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    seed: Tensor,
    sizes: Sequence[int],
    scale: float,
    dropout_p: float,
    partition: str,
    options: Sequence[int],
    backend: str,
) -> tuple[Tensor, ...]:
    return cells_engine.empty_results(queries, keys, values, CellSettings(*sizes))


@torch.library.register_fake("nearfield::cells_backward")
def _(output_grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    return queries.new_empty(queries.shape), keys.new_empty(keys.shape), values.new_empty(values.shape)


def _fold(operator: Any) -> Any:
    """A vmapped dimension is more batch: fold it in, call once, and unfold what comes out."""

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        def folded(x: Any, dim: int | None) -> Any:
            # The seed is one number for all, like every other setting.
            if not isinstance(x, Tensor) or x.dim() == 0:
                return x
            x = x.unsqueeze(0).expand(info.batch_size, *x.shape) if dim is None else x.movedim(dim, 0)
            return x.flatten(0, 1)

        dims = (*in_dims, *(None,) * (len(arguments) - len(in_dims)))
        outputs = operator(*(folded(x, dim) for x, dim in zip(arguments, dims, strict=True)))
        return tuple(x.unflatten(0, (info.batch_size, -1)) for x in outputs), (0,) * len(outputs)

    return rule


torch.library.register_vmap("nearfield::cells", _fold(torch.ops.nearfield.cells), lib=_LIBRARY)
torch.library.register_vmap("nearfield::cells_backward", _fold(torch.ops.nearfield.cells_backward), lib=_LIBRARY)
