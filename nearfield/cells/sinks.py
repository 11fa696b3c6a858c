"""Attention by cells beside a sink: a logit per row that counts in the denominator alone.

With Z the normaliser of a row and s its sink, the output is multiplied by Z / (Z + e^s), and the log-normaliser becomes that of
Z + e^s. A backward pass that is given these two computes every weight beside the sink, so it is right as it stands, in every
engine: a sink is a key with value zero, and no gradient leads through its key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearfield.cells.operator import CellsBackward, CellsResult, Recipe
from nearfield.kernels.dense import sink_share


def sunk_attention(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, seed: Tensor, sinks: Tensor, recipe: Recipe
) -> CellsResult:
    """`cells_attention` beside `sinks` `[batch, rows]`, which have gradients too. The output is laid out by rows."""
    recipe = recipe._replace(memory=recipe.memory._replace(heads=0))
    return CellsResult(*_SunkCells.apply(queries, keys, values, visible, seed, sinks, recipe.arguments()))


class _SunkCells(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, seed: Tensor, sinks: Tensor, settings: tuple[Any, ...]
    ) -> tuple[Tensor, ...]:
        output, lse, stderr, *plan = torch.ops.nearfield.cells(queries, keys, values, visible, seed, *settings)
        share, total = sink_share(lse, sinks)
        return (output * share[..., None]).to(output.dtype), total, stderr * share if stderr.numel() else stderr, *plan

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        queries, keys, values, visible, seed, sinks, settings = inputs
        result, lse, _, *plan = output
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sinks, queries, keys, values, visible, seed, result, lse, *plan)
        ctx.settings = settings

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        if output_grad is None:
            return (None,) * 7
        sinks, *saved = ctx.saved_tensors
        output, lse = saved[5:7]
        # A compiled program refuses second derivatives by itself.
        apply = torch.ops.nearfield.cells_backward if torch.compiler.is_compiling() else CellsBackward.apply
        grads = apply(output_grad, *saved, *ctx.settings)
        along = (output_grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
        return *grads, None, None, -(sinks - lse).exp() * along, None
