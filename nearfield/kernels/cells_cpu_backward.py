"""The gradient of the cells engine on a CPU: exact for the estimator, the plan held fixed.

Every weight is computed again from the global log-normaliser, block by block, so nothing of the forward pass is kept but the
plan, the output and one number per row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.kernels import dense
from nearfield.kernels.cells_far import cell_keep, child_edges, child_moments, masses, moments, row_parts, squares
from nearfield.kernels.cells_head import Block, Head, local_runs, pair_kernels
from nearfield.kernels.cells_near import tile_members
from nearfield.kernels.cells_plan import MOST_SPREAD, CellPlan
from nearfield.kernels.tiles import Stack, products, stacks
from nearfield.partition.cells import SeenCells, TableGradient


@dataclass(frozen=True)
class Sums:
    """Gradients of a head, filled block by block."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    fine: TableGradient
    coarse: TableGradient | None


@dataclass(frozen=True)
class BackwardBlock:
    """A block of rows with what the forward pass left of it. One more row at the end, for tiles to fill up with, weighs 0."""

    block: Block
    plan: CellPlan
    """of these rows"""
    output: Tensor
    lse: Tensor
    grad: Tensor
    """of the output"""
    delta: Tensor
    """`[rows + 1]`: output times its gradient"""
    query_grad: Tensor
    extreme: bool
    """whether some logits are so large that their rounding matters"""

    def tile(self, stack: Stack) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries (times scale), output gradients, log-normalisers and deltas of a stack, `[tiles, tile_rows, ...]`."""
        row, shape = stack.rows.view(-1), (*stack.rows.shape, -1)
        queries = self.block.head.scaled(self.block.numbers.index_select(0, row)).view(shape)
        lse, delta = (x.index_select(0, row).view(shape) for x in (self.lse, self.delta))
        return queries, self.grad.index_select(0, row).view(shape), lse, delta


def backward(
    head: Head, plan: CellPlan, output: Tensor, lse: Tensor, output_grad: Tensor, into: Sequence[Tensor | None] = (None,) * 3
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values of one head, in the dtype of arithmetic; written to the tensors of `into`."""
    queries, keys, values = (
        torch.zeros_like(x, dtype=head.compute) if place is None else place.zero_()
        for x, place in zip((head.queries, head.keys, head.values), into, strict=True)
    )
    sums = Sums(
        queries,
        keys,
        values,
        fine=TableGradient.zeros_like(head.fine),
        coarse=None if head.coarse is None else TableGradient.zeros_like(head.coarse),
    )
    for block in head.blocks():
        part = _with_results(block, plan, output, lse, output_grad)
        _dense_cells(part, sums)
        if head.coarse is not None:
            _children(part, sums)
        if head.settings.samples:
            _drawn(part, sums)
        _local(part, sums)
        _near(part, sums)
        sums.queries.index_copy_(0, block.rows, part.query_grad[:-1].mul_(head.scale))
    sums.fine.spread_(head.fine, head.keys, head.values, sums.keys, sums.values)
    if head.coarse is not None and sums.coarse is not None:
        sums.coarse.spread_(head.coarse, head.keys, head.values, sums.keys, sums.values)
    return sums.queries, sums.keys, sums.values


def _with_results(block: Block, plan: CellPlan, output: Tensor, lse: Tensor, output_grad: Tensor) -> BackwardBlock:
    head, rows = block.head, block.rows
    out, grad = (torch.cat([x.index_select(0, rows), x.new_zeros(1, x.shape[1])]).to(head.compute) for x in (output, output_grad))
    of_rows = (x.index_select(0, rows) for x in (plan.opened, plan.unfolded, plan.drawn, plan.log_factor))
    own = CellPlan(plan.cell_of, plan.coarse_of, *(x if x.is_floating_point() else x.long() for x in of_rows))
    # A row that sees nothing, like the one that fills tiles up, has weights e^(z - inf) = 0.
    ended = torch.cat([lse.index_select(0, rows), lse.new_full((1,), torch.inf)])
    ended = ended.masked_fill_(ended == -torch.inf, torch.inf)
    query_grad = head.queries.new_zeros(len(grad), head.queries.shape[1], dtype=head.compute)
    extreme = dense.is_extreme(ended)
    return BackwardBlock(block, own, out, ended, grad, (out * grad).sum(1), query_grad, extreme)


def _dense_cells(part: BackwardBlock, sums: Sums) -> None:
    """Cells that were summed up, at the level at which every row looks at all of them."""
    head, samples = part.block.head, part.block.head.settings.samples
    table, taken, cell_of, into = head.fine, part.plan.opened, head.cell_of, sums.fine
    if head.coarse is not None and sums.coarse is not None:
        table, taken, cell_of, into = head.coarse, part.plan.unfolded, head.coarse_of, sums.coarse
    for piece, own in part.block.far_pieces():
        seen = head.seen_by(piece, table)
        found = TableGradient.zeros_like(seen)
        home = head.homes(piece, cell_of) if samples else None
        for rows in row_parts(own, len(seen), head.scores_per_pass):
            queries, grad = part.block.scaled(rows), part.grad[rows]
            first, spread = moments(queries, seen)
            weight, top = masses(first, spread, seen.columns(taken[rows]), seen.size)
            weight.mul_((top - part.lse[rows]).exp_()[:, None])
            if home is not None:
                weight.mul_(_left(part.plan.drawn[rows], part.plan.log_factor[rows], home, seen))
            keep = cell_keep(head, part.block, rows, table, seen.ids)
            kept = weight if keep is None else weight * keep
            found.value.addmm_(kept.T, grad)
            tilt_grad = kept.sum(1, keepdim=True) * grad
            found.cross.addmm_(tilt_grad.T, queries)
            query_grad = tilt_grad @ seen.cross
            weight_grad = grad @ seen.value.T
            weight_grad += (grad * (queries @ seen.cross.T)).sum(1, keepdim=True)
            if keep is not None:
                weight_grad.mul_(keep)
            logit_grad = weight_grad.sub_(part.delta[rows, None]).mul_(weight)
            query_grad.addmm_(logit_grad, seen.centroid)
            found.centroid.addmm_(logit_grad.T, queries)
            spread_grad = _through_boost(logit_grad, spread)
            query_grad.addcmul_(queries, spread_grad @ seen.variance, value=2.0)
            found.variance.addmm_(spread_grad.T, squares(queries))
            part.query_grad[rows] += query_grad
        into.add_(seen, found)


def _through_boost(logit_grad: Tensor, spread: Tensor) -> Tensor:
    """The derivative of log (1 + u/4)^2 is 1 / (2 + u/2), and 0 where u was cut off. Overwrites `logit_grad`."""
    grad = logit_grad.div_((0.5 * spread).add_(2.0))
    return grad.masked_fill_(spread >= MOST_SPREAD, 0.0) if bool(spread.amax() >= MOST_SPREAD) else grad


def _left(drawn: Tensor, log_factor: Tensor, home: Tensor, seen: SeenCells) -> Tensor:
    """`[rows, cells]`: what drawn keys leave of their cells, 1 - (factors of the keys drawn there) / n_c; may be negative."""
    place = seen.columns(home[drawn.clamp(min=0)])
    # A slot without a key, or with one that is in no cell, goes to a column that is thrown away.
    place = torch.where((drawn < 0) | (place < 0), len(seen), place)
    used = log_factor.new_zeros(len(drawn), len(seen) + 1).scatter_add_(1, place, _per_key(log_factor, seen.size, place))
    return 1.0 - used[:, :-1]


def _per_key(log_factor: Tensor, size: Tensor, cell: Tensor) -> Tensor:
    """What a drawn key takes of its cell: its factor over the number of keys there."""
    return log_factor.exp() / size[cell.clamp(max=len(size) - 1)].clamp(min=1)


def _children(part: BackwardBlock, sums: Sums) -> None:
    """Fine cells of unfolded coarse ones that were not opened."""
    head, table, into = part.block.head, part.block.head.fine, sums.fine
    if not table.cells:
        return
    edges = child_edges(head)
    unfolded = part.plan.unfolded
    columns = _Columns(head, unfolded, edges)
    gone = columns.zeros(torch.bool)
    columns.put_(gone, part.plan.opened, torch.ones_like(part.plan.opened, dtype=torch.bool))
    left = None
    if head.settings.samples:
        cell = torch.full_like(part.plan.drawn, -1)
        for piece, own in part.block.far_pieces():
            drawn = part.plan.drawn[own]
            cell[own] = torch.where(drawn < 0, -1, head.homes(piece, head.cell_of)[drawn.clamp(min=0)])
        left = columns.zeros(part.lse.dtype).add_(1.0)
        columns.put_(left, cell, -_per_key(part.plan.log_factor, table.size, cell.clamp(min=0)))
    tilt = torch.zeros_like(part.grad)
    for piece, own in part.block.far_pieces():
        tilt[own] = part.block.scaled(own) @ head.seen_by(piece, table).cross.T
    along_tilt = (part.grad * tilt).sum(1)
    mass = torch.zeros_like(along_tilt)
    for stack in stacks(unfolded, edges, head.keys.shape[1], page_size=max(1, table.cells), with_pairs=True):
        row, shape = stack.rows.view(-1), (*stack.rows.shape, -1)
        queries, grad, lse, delta = part.tile(stack)
        first, spread = child_moments(head, part.block.numbers, stack)
        taken = columns.rows(gone, stack)
        weight = first.masked_fill_(taken, -torch.inf).sub_(lse).exp_().mul_((0.25 * spread).add_(1.0).square_())
        weight.mul_(table.size[stack.members][:, None])
        if left is not None:
            weight.mul_(columns.rows(left, stack))
        keep = head.keep(part.block.numbers[row].view(shape), stack.members[:, None] + len(head.keys))
        kept = weight if keep is None else weight * keep
        mass.index_add_(0, row, kept.sum(-1).view(-1))
        weight_grad = products(grad, table.value[stack.members])
        weight_grad += along_tilt.index_select(0, row).view(shape)
        if keep is not None:
            weight_grad.mul_(keep)
        logit_grad = weight_grad.sub_(delta).mul_(weight)
        query_grad = torch.bmm(logit_grad, table.centroid[stack.members])
        member = stack.members.view(-1)
        into.value.index_add_(0, member, torch.bmm(kept.transpose(1, 2), grad).flatten(0, 1))
        into.centroid.index_add_(0, member, torch.bmm(logit_grad.transpose(1, 2), queries).flatten(0, 1))
        spread_grad = _through_boost(logit_grad, spread)
        query_grad.addcmul_(queries, torch.bmm(spread_grad, table.variance[stack.members]), value=2.0)
        into.variance.index_add_(0, member, torch.bmm(spread_grad.transpose(1, 2), squares(queries)).flatten(0, 1))
        part.query_grad.index_add_(0, row, query_grad.flatten(0, 1))
    for piece, own in part.block.far_pieces():
        seen = head.seen_by(piece, table)
        tilt_grad = mass[own, None] * part.grad[own]
        into.add_cross_(seen, tilt_grad.T @ part.block.scaled(own))
        part.query_grad[own] += tilt_grad @ seen.cross


class _Columns:
    """A table with a column for every fine cell of what a row unfolded, `[rows * slots + 1, most children]`."""

    def __init__(self, head: Head, unfolded: Tensor, edges: Tensor) -> None:
        self.edges = edges
        self.slots = unfolded.shape[1]
        self.most = max(1, int(edges.diff().max()))
        self.pairs = unfolded.numel()
        self.sorted, self.slot = unfolded.sort(1)
        self.parent = torch.searchsorted(edges, torch.arange(head.fine.cells, device=edges.device), right=True) - 1

    def zeros(self, dtype: torch.dtype) -> Tensor:
        return torch.zeros(self.pairs + 1, self.most, dtype=dtype, device=self.edges.device)

    def put_(self, table: Tensor, cell: Tensor, amount: Tensor) -> None:
        """Add to the entries of fine cells `[rows, k]`; those that are -1, or not unfolded, are left out."""
        parent = self.parent[cell.clamp(min=0)]
        found = torch.searchsorted(self.sorted, parent).clamp(max=self.slots - 1)
        here = (cell >= 0) & (self.sorted.gather(1, found) == parent)
        row = torch.arange(len(cell), device=cell.device)[:, None]
        pair = torch.where(here, row * self.slots + self.slot.gather(1, found), self.pairs)
        column = torch.where(here, cell - self.edges[parent], 0)
        place = (pair * self.most + column).view(-1)
        if table.dtype == torch.bool:
            table.view(-1)[place] = True
        else:
            table.view(-1).index_add_(0, place, amount.reshape(-1))

    def rows(self, table: Tensor, stack: Stack) -> Tensor:
        """The entries of a stack, `[tiles, tile_rows, width]`."""
        assert stack.pairs is not None
        wide = stack.members.shape[1]
        entries = table.index_select(0, stack.pairs.view(-1))[:, :wide]
        if wide > self.most:
            entries = torch.nn.functional.pad(entries, (0, wide - self.most))
        return entries.view(*stack.pairs.shape, wide)


def _drawn(part: BackwardBlock, sums: Sums) -> None:
    """Drawn keys, each with the factor that the plan gave it."""
    head = part.block.head
    kernels = pair_kernels(part.grad.device)
    queries, grad, drawn = part.block.scaled(slice(None)), part.grad[:-1], part.plan.drawn.clamp(min=0)
    keys, values = head.keys.to(head.compute), head.values.to(head.compute)
    weight = (kernels.pair_scores(queries, keys, drawn) + part.plan.log_factor - part.lse[:-1, None]).exp_()
    keep = head.keep(part.block.rows[:, None], drawn)
    kept = weight if keep is None else weight * keep
    weight_grad = kernels.pair_scores(grad, values, drawn)
    if keep is not None:
        weight_grad = weight_grad * keep
    logit_grad = weight * (weight_grad - part.delta[:-1, None])
    part.query_grad[:-1] += kernels.pair_sums(logit_grad, keys, drawn)
    kernels.pair_scatter_(sums.keys, logit_grad, queries, drawn)
    kernels.pair_scatter_(sums.values, kept, grad, drawn)


def _local(part: BackwardBlock, sums: Sums) -> None:
    """Keys that rows see one by one."""
    head = part.block.head
    for run in local_runs(part.block):
        keys, values = head.members(run.own)
        keep = head.keep(part.block.rows[run.rows].view(run.shape), run.own)
        query_grad, key_grad, value_grad = dense.attend_backward(
            part.grad[run.rows].view(run.shape),
            part.block.scaled(run.rows).view(run.shape),
            keys,
            values,
            part.output[run.rows].view(run.shape),
            part.lse[run.rows].view(run.shape[:2]),
            run.causal,
            keep,
            run.seen,
        )
        part.query_grad[run.rows] += query_grad.flatten(0, 1)
        sums.keys.index_add_(0, run.own, key_grad)
        sums.values.index_add_(0, run.own, value_grad)


def _near(part: BackwardBlock, sums: Sums) -> None:
    """The keys of opened cells."""
    head = part.block.head
    for stack in stacks(part.plan.opened, head.fine.starts, head.keys.shape[1]):
        row, shape = stack.rows.view(-1), (*stack.rows.shape, -1)
        keys, values, position = tile_members(head, stack)
        queries, grad, lse, delta = part.tile(stack)
        weight = products(queries, keys, -lse)
        if stack.missing is not None:
            weight.masked_fill_(stack.missing[:, None], -torch.inf)
        # A weight is at most 1; where logits are so large that their rounding would say otherwise, hold it to that.
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
        sums.keys.index_add_(0, position.view(-1), torch.bmm(logit_grad.transpose(1, 2), queries).flatten(0, 1))
        part.query_grad.index_add_(0, row, torch.bmm(logit_grad, keys).flatten(0, 1))
