"""Attention by cells beside a sink: a logit per row that counts in the denominator alone.

With Z the normaliser of a row and s its sink, the output is multiplied by Z / (Z + e^s), and the log-normaliser becomes that of
Z + e^s. A backward pass that is given these two computes every weight beside the sink, so it is right as it stands, in every
engine, for the output and for the log-normaliser: a sink is a key with value zero, and no gradient leads through its key.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearfield.cells.operator import CellsBackward, CellsResult, Recipe
from nearfield.kernels.dense import sink_share, sink_weight


def sunk_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    seed: Tensor,
    sinks: Tensor,
    recipe: Recipe,
    with_lse: bool = False,
) -> CellsResult:
    """`cells_attention` beside `sinks` `[batch, rows]`, which have gradients too. The output is laid out by rows:
    the policy of the recipe has no `heads`.

    `with_lse`: the log-normaliser, which includes the sink, has a gradient too.
    """
    return CellsResult(*_SunkCells.apply(queries, keys, values, visible, seed, sinks, with_lse, recipe.arguments()))


def beside_sinks(result: CellsResult, sinks: Tensor) -> CellsResult:
    """The result of a call whose log-normaliser has a gradient, beside `sinks` `[batch, rows]`."""
    share, total = sink_share(result.lse, sinks)
    stderr = result.stderr * share if result.stderr.numel() else result.stderr
    return result._replace(output=(result.output * share[..., None]).to(result.output.dtype), lse=total, stderr=stderr)


class _SunkCells(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        visible: Tensor,
        seed: Tensor,
        sinks: Tensor,
        with_lse: bool,
        settings: tuple[Any, ...],
    ) -> tuple[Tensor, ...]:
        output, lse, stderr, *plan = torch.ops.nearfield.cells(queries, keys, values, visible, seed, *settings)
        share, total = sink_share(lse, sinks)
        return (output * share[..., None]).to(output.dtype), total, stderr * share if stderr.numel() else stderr, *plan

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        queries, keys, values, visible, seed, sinks, with_lse, settings = inputs
        result, lse, _, *plan = output
        ctx.mark_non_differentiable(*output[2 if with_lse else 1 :])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sinks, queries, keys, values, visible, seed, result, lse, *plan)
        ctx.settings, ctx.with_lse = settings, with_lse

    @staticmethod
    def backward(ctx: Any, output_grad: Tensor | None, lse_grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        # A compiled program makes zeros of what has no gradient, and zeros would have to be subtracted.
        lse_grad = lse_grad if ctx.with_lse else None
        if output_grad is None and lse_grad is None:
            return (None,) * 8
        sinks, *saved = ctx.saved_tensors
        output, lse = saved[5:7]
        output_grad = torch.zeros_like(output) if output_grad is None else output_grad
        # A compiled program refuses second derivatives by itself.
        apply = torch.ops.nearfield.cells_backward if torch.compiler.is_compiling() else CellsBackward.apply
        grads = apply(output_grad, lse_grad, *saved, *ctx.settings)
        delta = (output_grad.to(lse.dtype) * output.to(lse.dtype)).sum(-1)
        delta = delta if lse_grad is None else delta - lse_grad
        return *grads, None, None, -sink_weight(lse, sinks) * delta, None, None
