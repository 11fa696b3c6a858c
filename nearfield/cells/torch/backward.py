"""The backward pass in torch: the exact gradient of the estimator, the plan held fixed.

Every weight is computed again, block by block, from the log-normaliser of its row. So nothing of the forward pass is kept but
the plan, the output and one number per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.cells.far_field import boost_backward, cap_moments, cap_moments_backward, masses, moments, squares
from nearfield.cells.moments import SeenCells, TableGradient
from nearfield.cells.reference import CellPlan
from nearfield.cells.torch import dense
from nearfield.cells.torch.forward import cell_keep, row_parts, tile_members
from nearfield.cells.torch.head import Head, RowBlock, local_runs
from nearfield.cells.torch.tiles import Stack, products, stacks
from nearfield.kernels import backends
from nearfield.kernels.dense import cap_slope, capped


@dataclass(frozen=True)
class Sums:
    """Gradients of a head, summed up block by block."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    table: TableGradient


@dataclass(frozen=True)
class BackwardBlock:
    """A block of rows with their results, and one more row at the end: it has weight 0, and fills up tiles."""

    block: RowBlock
    plan: CellPlan
    """of these rows"""
    output: Tensor
    lse: Tensor
    grad: Tensor
    """of the output"""
    delta: Tensor
    """`[rows + 1]`: the inner product of the output and its gradient, less the gradient of the lse"""
    query_grad: Tensor
    extreme: bool
    """whether some logits are so large that their rounding matters"""
    has_lse_grad: bool

    def tile(self, stack: Stack) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries (times scale), output gradients, log-normalisers and deltas of a stack: `[tiles, tile_rows, ...]` each."""
        row, shape = stack.rows.view(-1), (*stack.rows.shape, -1)
        queries = self.block.head.scaled(self.block.numbers.index_select(0, row)).view(shape)
        lse, delta = (x.index_select(0, row).view(shape) for x in (self.lse, self.delta))
        return queries, self.grad.index_select(0, row).view(shape), lse, delta


def backward(
    head: Head,
    plan: CellPlan,
    output: Tensor,
    lse: Tensor,
    output_grad: Tensor,
    into: Sequence[Tensor | None] = (None,) * 3,
    lse_grad: Tensor | None = None,
    table_grad: TableGradient | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values of one head, in the dtype of arithmetic; written to `into` where it has a tensor.

    `table_grad`: to which those of moments are added; None: they are passed on to keys and values.
    """
    queries, keys, values = (
        torch.zeros_like(x, dtype=head.compute) if place is None else place.zero_()
        for x, place in zip((head.queries, head.keys, head.values), into, strict=True)
    )
    sums = Sums(queries, keys, values, TableGradient.zeros_like(head.table) if table_grad is None else table_grad)
    for block in head.blocks():
        part = _with_results(block, plan, output, lse, output_grad, lse_grad)
        _far(part, sums)
        if head.sizes.samples:
            _drawn(part, sums)
        _local(part, sums)
        _near(part, sums)
        sums.queries.index_copy_(0, block.rows, part.query_grad[:-1].mul_(head.scale))
    if table_grad is None:
        sums.table.spread_(head.table, head.keys, head.values, sums.keys, sums.values)
    return sums.queries, sums.keys, sums.values


def _with_results(
    block: RowBlock, plan: CellPlan, output: Tensor, lse: Tensor, output_grad: Tensor, lse_grad: Tensor | None
) -> BackwardBlock:
    head, rows = block.head, block.rows
    out, grad = (torch.cat([x.index_select(0, rows), x.new_zeros(1, x.shape[1])]).to(head.compute) for x in (output, output_grad))
    of_rows = (x.index_select(0, i) for x, i in ((plan.opened, head.block_of[rows]), (plan.drawn, rows), (plan.log_factor, rows)))
    opened, *drawn = (x if x.is_floating_point() else x.long() for x in of_rows)
    own = CellPlan(plan.cell_of, opened, plan.order, *drawn)
    # A row that sees nothing, like the one that fills up tiles, gets weights e^(z - inf) = 0.
    own_lse = torch.cat([lse.index_select(0, rows), lse.new_full((1,), torch.inf)])
    own_lse = own_lse.masked_fill_(own_lse == -torch.inf, torch.inf)
    query_grad = head.queries.new_zeros(len(grad), head.queries.shape[1], dtype=head.compute)
    delta = (out * grad).sum(1)
    if lse_grad is not None:
        delta[:-1] -= lse_grad.index_select(0, rows)
    is_extreme = dense.is_extreme(own_lse)
    return BackwardBlock(block, own, out, own_lse, grad, delta, query_grad, is_extreme, lse_grad is not None)


def _far(part: BackwardBlock, sums: Sums) -> None:
    """Add the gradients through cells left closed."""
    head = part.block.head
    for piece, own in part.block.far_pieces():
        seen = head.seen_by(piece)
        found = TableGradient.zeros_like(seen)
        home = head.homes(piece) if head.sizes.samples else None
        for rows in row_parts(own, len(seen), head.scores_per_pass):
            queries, grad = part.block.scaled(rows), part.grad[rows]
            first, spread = moments(queries, seen)
            raw, slope = (first, spread), None
            if head.softcap:
                first, spread, slope = cap_moments(*raw, head.softcap)
            weight, top = masses(first, spread, seen.columns(part.plan.opened[rows]), seen.size)
            weight.mul_((top - part.lse[rows]).exp_()[:, None])
            if home is not None:
                weight.mul_(_left(part.plan.drawn[rows], part.plan.log_factor[rows], home, seen))
            keep = cell_keep(head, part.block, rows, seen.ids)
            kept = weight if keep is None else weight * keep
            found.value.addmm_(kept.T, grad)
            tilted = kept if slope is None else kept * slope
            tilt_grad = tilted.sum(1, keepdim=True) * grad
            found.cross.addmm_(tilt_grad.T, queries)
            query_grad = tilt_grad @ seen.cross
            weight_grad = grad @ seen.value.T
            along = (grad * (queries @ seen.cross.T)).sum(1, keepdim=True)
            weight_grad += along if slope is None else along * slope
            if keep is not None:
                weight_grad.mul_(keep)
            logit_grad = weight_grad.sub_(part.delta[rows, None]).mul_(weight)
            if slope is None:
                query_grad.addmm_(logit_grad, seen.centroid)
                found.centroid.addmm_(logit_grad.T, queries)
                spread_grad = boost_backward(logit_grad, spread)
            else:
                spread_grad = boost_backward(logit_grad.clone(), spread)
                grads = logit_grad, spread_grad, kept * along
                first_grad, spread_grad = cap_moments_backward(*grads, *raw, slope, head.softcap)
                query_grad.addmm_(first_grad, seen.centroid)
                found.centroid.addmm_(first_grad.T, queries)
            query_grad.addcmul_(queries, spread_grad @ seen.variance, value=2.0)
            found.variance.addmm_(spread_grad.T, squares(queries))
            part.query_grad[rows] += query_grad
        sums.table.add_(seen, found)


def _left(drawn: Tensor, log_factor: Tensor, home: Tensor, seen: SeenCells) -> Tensor:
    """`[rows, cells]`: the share that drawn keys leave of their cells, 1 - (sum of their factors) / n_c; it may be negative."""
    place = seen.columns(home[drawn.clamp(min=0)])
    # A slot without a key goes to an extra column, which is dropped.
    place = torch.where((drawn < 0) | (place < 0), len(seen), place)
    share = log_factor.exp() / seen.size[place.clamp(max=len(seen) - 1)].clamp(min=1)
    used = log_factor.new_zeros(len(drawn), len(seen) + 1).scatter_add_(1, place, share)
    return 1.0 - used[:, :-1]


def _drawn(part: BackwardBlock, sums: Sums) -> None:
    """Add the gradients through drawn keys, each with the factor that the plan gave it."""
    head = part.block.head
    kernels = backends.pair_kernels(backends.without_triton("auto", part.grad.device), part.grad.device)
    queries, grad, drawn = part.block.scaled(slice(None)), part.grad[:-1], part.plan.drawn.clamp(min=0)
    keys, values = head.keys.to(head.compute), head.values.to(head.compute)
    logits = capped(kernels.pair_scores(queries, keys, drawn), head.softcap)
    weight = (logits + part.plan.log_factor - part.lse[:-1, None]).exp_()
    keep = head.keep(part.block.rows[:, None], drawn)
    kept = weight if keep is None else weight * keep
    weight_grad = kernels.pair_scores(grad, values, drawn)
    if keep is not None:
        weight_grad = weight_grad * keep
    logit_grad = weight * (weight_grad - part.delta[:-1, None])
    if head.softcap:
        logit_grad = logit_grad * cap_slope(logits, head.softcap)
    part.query_grad[:-1] += kernels.pair_sums(logit_grad, keys, drawn)
    kernels.pair_scatter_(sums.keys, logit_grad, queries, drawn)
    kernels.pair_scatter_(sums.values, kept, grad, drawn)


def _local(part: BackwardBlock, sums: Sums) -> None:
    """Add the gradients through keys that rows see one by one."""
    head = part.block.head
    for run in local_runs(part.block):
        keys, values = head.members(run.own)
        keep = head.keep(part.block.rows[run.rows].view(run.shape), run.own)
        query_grad, key_grad, value_grad = dense.dense_attention_backward(
            part.grad[run.rows].view(run.shape),
            part.block.scaled(run.rows).view(run.shape),
            keys,
            values,
            part.output[run.rows].view(run.shape),
            part.lse[run.rows].view(run.shape[:2]),
            run.causal,
            keep,
            run.seen,
            head.softcap,
            part.delta[run.rows].view(run.shape[:2]) if part.has_lse_grad else None,
        )
        part.query_grad[run.rows] += query_grad.flatten(0, 1)
        sums.keys.index_add_(0, run.own, key_grad)
        sums.values.index_add_(0, run.own, value_grad)


def _near(part: BackwardBlock, sums: Sums) -> None:
    """Add the gradients through the keys of opened cells."""
    head = part.block.head
    for stack in stacks(part.plan.opened, head.table.starts, head.keys.shape[1]):
        row, shape = stack.rows.view(-1), (*stack.rows.shape, -1)
        keys, values, position = tile_members(head, stack)
        queries, grad, lse, delta = part.tile(stack)
        slope = None
        if head.softcap:
            logits = capped(products(queries, keys), head.softcap)
            weight, slope = logits - lse, cap_slope(logits, head.softcap)
        else:
            weight = products(queries, keys, -lse)
        if stack.missing is not None:
            weight.masked_fill_(stack.missing[:, None], -torch.inf)
        # A weight is at most 1, even where logits are so large that rounding says otherwise.
        if part.extreme:
            weight.clamp_(max=0.0)
        weight.exp_()
        keep = head.keep(part.block.numbers[row].view(shape), position[:, None])
        kept = weight if keep is None else weight * keep
        weight_grad = products(grad, values)
        if keep is not None:
            weight_grad.mul_(keep)
        sums.values.index_add_(0, position.view(-1), torch.bmm(kept.transpose(1, 2), grad).flatten(0, 1))
        logit_grad = weight_grad.sub_(delta).mul_(weight)
        if slope is not None:
            logit_grad.mul_(slope)
        sums.keys.index_add_(0, position.view(-1), torch.bmm(logit_grad.transpose(1, 2), queries).flatten(0, 1))
        part.query_grad.index_add_(0, row, torch.bmm(logit_grad, keys).flatten(0, 1))
