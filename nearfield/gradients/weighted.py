"""Attention over a weighted key set, with the exact gradient of that estimator.

Any estimator that attends to a chosen or drawn set of keys is softmax(z + log a) V over the set, a = 1 for near keys and
one over the inclusion probability for drawn ones. The ordinary backward pass of attention on that set is its exact
gradient with the set held fixed, for O(width * dim) per row; no row-by-key matrix is ever stored. The plan of a single block
is, where it is no larger than the inputs, which are stored in any case; otherwise the backward pass plans each block again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nearfield import kernels
from nearfield.gradients.base import refuse_double_backward
from nearfield.index.base import flat_ids
from nearfield.kernels.reference import weighted_softmax
from nearfield.plan import Plan, Planner
from nearfield.precision import full_precision


def weighted_attention(
    queries: Tensor, keys: Tensor, values: Tensor, planner: Planner, backend: str = "auto", stderr: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of `[batch, rows, dim]` over the planned keys: output, log-normaliser, standard error.

    The logits come with the plan. Queries, keys and values get the exact gradient of the estimator. The standard error
    is zero where nothing was drawn, and all zeros unless `stderr` asks for it.
    """
    return _WeightedAttention.apply(queries, keys, values, planner, backend, stderr)


class _WeightedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, planner: Planner, backend: str, stderr: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = kernels.choose(backend, queries.device)
        output = values.new_empty(*queries.shape[:2], values.shape[2])
        lse = queries.new_empty(queries.shape[:2])
        error = queries.new_zeros(queries.shape[:2])
        table = values.flatten(0, 1)
        blocks = list(planner.blocks())
        kept: tuple[Tensor | None, ...] = ()
        for block in blocks:
            plan = planner.plan(block)
            weights, lse[:, block] = weighted_softmax(plan.logits, plan.log_weight)
            applied = weights if plan.keep is None else weights * plan.keep
            rows = kernel.pair_sums(applied.flatten(0, 1), table, flat_ids(plan.ids, values.shape[1]))
            output[:, block] = rows.unflatten(0, weights.shape[:2])
            if stderr and plan.left_out is not None:
                error[:, block] = _standard_error(kernel, plan, weights, output[:, block], table)
            parts = (plan.ids, plan.logits, plan.log_weight, plan.keep)
            if len(blocks) == 1 and any(ctx.needs_input_grad) and _bytes(*parts) <= _bytes(queries, keys, values):
                kept = parts
        ctx.save_for_backward(queries, keys, values, *kept)
        # A planner holds on to the inputs: only as long as it has something to do.
        ctx.planner, ctx.kernel = None if kept else planner, kernel
        ctx.mark_non_differentiable(lse, error)
        return output, lse, error

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        with full_precision(grad_output):
            return (*_weighted_backward(ctx, grad_output), None, None, None)


def _bytes(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def _plans(planner: Planner | None, kept: Sequence[Tensor | None], rows: int) -> Iterator[tuple[slice, Plan]]:
    """The blocks of the forward pass, with the plan that was kept or made again."""
    if planner is None:
        ids, logits, log_weight, keep = kept
        assert ids is not None
        assert logits is not None
        yield slice(0, rows), Plan(ids, logits, log_weight, keep)
        return
    for block in planner.blocks():
        yield block, planner.plan(block)


def _weighted_backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    queries, keys, values, *kept = ctx.saved_tensors
    kernel = ctx.kernel
    key_table, value_table = keys.flatten(0, 1), values.flatten(0, 1)
    grad_queries = torch.empty_like(queries)
    grad_keys, grad_values = torch.zeros_like(key_table), torch.zeros_like(value_table)
    for block, plan in _plans(ctx.planner, kept, queries.shape[1]):
        ids = flat_ids(plan.ids, keys.shape[1])
        weights = weighted_softmax(plan.logits, plan.log_weight)[0].flatten(0, 1)
        query_rows, upstream = queries[:, block].flatten(0, 1), grad_output[:, block].flatten(0, 1)

        grad_weights = kernel.pair_scores(upstream, value_table, ids)
        applied = weights
        if plan.keep is not None:
            keep = plan.keep.flatten(0, 1)
            applied, grad_weights = weights * keep, grad_weights * keep
        grad_logits = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))

        grad_queries[:, block] = kernel.pair_sums(grad_logits, key_table, ids).view_as(queries[:, block])
        kernel.pair_scatter_(grad_keys, grad_logits, query_rows, ids)
        kernel.pair_scatter_(grad_values, applied, upstream, ids)
    return grad_queries, grad_keys.view_as(keys), grad_values.view_as(values)


def _standard_error(kernel: ModuleType, plan: Plan, weights: Tensor, output: Tensor, table: Tensor) -> Tensor:
    """Standard error of a row by the delta method, as a norm over the columns.

    With drawn weights p_t (t = 1..l) the error is, to first order, the mean of r_t = l p_t (v_t - output) around its
    expectation; drawing without replacement from `left_out` keys multiplies the variance by 1 - l / left_out.
    """
    assert plan.left_out is not None
    drawn = plan.ids[..., plan.near :]
    share = weights[..., plan.near :]
    count = (drawn >= 0).sum(-1).to(share.dtype)
    flat = flat_ids(drawn, table.shape[0] // drawn.shape[0])
    along = kernel.pair_scores(output.flatten(0, 1), table, flat).view(share.shape)
    square = table.square().sum(-1)[flat].view(share.shape) - 2 * along + output.square().sum(-1, keepdim=True)
    mean = kernel.pair_sums(share.flatten(0, 1), table, flat).view(output.shape) - share.sum(-1, keepdim=True) * output
    spread = count.square() * (share.square() * square.clamp(min=0)).sum(-1) - count * mean.square().sum(-1).where(count > 1, 0)
    variance = spread.clamp(min=0) / (count - 1).clamp(min=1) / count.clamp(min=1)
    return (variance * (1 - count / plan.left_out.clamp(min=1)).clamp(min=0)).sqrt()
