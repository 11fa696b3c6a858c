"""Attention by cells for a plan that is there already, made by an earlier call or by somebody else. Internal.

A call groups keys, puts rows in order, opens cells, and then attends. Here it is told the first, or all of these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearfield.cells.operator import CellsBackward, CellsResult, Given, Recipe, forward
from nearfield.kernels.backends import full_precision


def planned_attention(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, seed: Tensor, recipe: Recipe, given: Given
) -> CellsResult:
    """`cells_attention` with a plan, or a part of it, that is `given`; the plan of the result repeats it.

    Cells are numbered as the engine would number them: see `Spans`. The cells that a block has opened are different ones, among
    those that its first row sees, and -1 where there are fewer. None of that is looked at, except that a block of the Triton
    engine has room for as many keys as `probes` cells of mean size have. What is not given is found out: the cells that are
    opened, and before that the order of rows. Differentiable with respect to queries, keys and values; torch.compile and
    torch.func do not know this call.
    """
    _check(queries, keys, recipe, given)
    return CellsResult(*_Planned.apply(queries, keys, values, visible, seed, recipe, given))


def _check(queries: Tensor, keys: Tensor, recipe: Recipe, given: Given) -> None:
    sizes, (batch, rows, _) = recipe.sizes, queries.shape
    shapes = {
        "cell_of": (batch, sizes.span_levels, keys.shape[1]),
        "opened": (batch, sizes.blocks_of(rows), sizes.probes),
        "order": (batch, rows if sizes.ordered else 0),
    }
    for name, x in given._asdict().items():
        if x is not None and (x.shape != shapes[name] or x.is_floating_point()):
            raise ValueError(f"{name} must be integers of shape {shapes[name]}, got {x.dtype} of shape {tuple(x.shape)}")
    if given.opened is not None and given.order is None and sizes.ordered:
        raise ValueError("opened is the choice of blocks, which an order of rows makes: pass order too")
    if recipe.memory.heads:
        raise ValueError(f"the output is laid out by rows; got a policy for {recipe.memory.heads} heads")


class _Planned(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, seed: Tensor, recipe: Recipe, given: Given
    ) -> tuple[Tensor, ...]:
        settings = recipe.arguments()
        with full_precision(queries):
            results = forward(queries, keys, values, visible, seed, *settings, given=given)
        output, lse, _, *plan = results
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(queries, keys, values, visible, seed, output, lse, *plan)
        ctx.settings = settings
        return results

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        nothing = (None,) * 4
        if output_grad is None:
            return None, None, None, *nothing
        return *CellsBackward.apply(output_grad, None, *ctx.saved_tensors, *ctx.settings), *nothing
