"""The gradient of the cells engine on a CPU: exact for the estimator, the plan held fixed.

Every weight is computed again from the global log-normaliser, block by block, so nothing of the forward pass is kept but the
plan, the output and one number per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.kernels.cells_far import cell_keep, child_edges, far_logits, moments, row_parts, tiles
from nearfield.kernels.cells_head import Block, Head, by_cell, local_runs, pair_kernels
from nearfield.kernels.cells_plan import CAP, CellPlan
from nearfield.kernels.tiles import tile_backward
from nearfield.partition.cells import CellTable, TableGradient


@dataclass
class Sums:
    """Gradients of a head, filled block by block."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    tables: dict[int, TableGradient]

    def of(self, table: CellTable) -> TableGradient:
        return self.tables[id(table)]


@dataclass
class BackwardBlock:
    """A block of rows with what the forward pass left of it."""

    block: Block
    output: Tensor
    lse: Tensor
    output_grad: Tensor
    delta: Tensor
    """`[rows]`: output times its gradient"""
    query_grad: Tensor
    opened: Tensor
    unfolded: Tensor
    drawn: Tensor
    log_factor: Tensor


def backward(head: Head, plan: CellPlan, output: Tensor, lse: Tensor, output_grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values of one head, in the dtype of arithmetic."""
    levels = [table for table in (head.fine, head.coarse) if table is not None]
    sums = Sums(
        queries=torch.zeros_like(head.queries, dtype=head.compute),
        keys=torch.zeros_like(head.keys, dtype=head.compute),
        values=torch.zeros_like(head.values, dtype=head.compute),
        tables={id(table): TableGradient.zeros_like(table) for table in levels},
    )
    for block in head.blocks():
        rows = block.rows
        out, grad = output[rows].to(head.compute), output_grad[rows].to(head.compute)
        part = BackwardBlock(
            block,
            out,
            lse[rows],
            grad,
            (out * grad).sum(1),
            torch.zeros_like(block.queries),
            plan.opened[rows].long(),
            plan.unfolded[rows].long(),
            plan.drawn[rows].long(),
            plan.log_factor[rows],
        )
        _far(head, part, sums)
        if head.coarse is not None:
            _children(head, part, sums)
        if head.settings.samples:
            _drawn(head, part, sums)
        _local(head, part, sums)
        _near(head, part, sums)
        sums.queries[rows] = part.query_grad * head.scale
    for table in levels:
        sums.of(table).spread_(table, head.keys, head.values, sums.keys, sums.values)
    return sums.queries, sums.keys, sums.values


def _far(head: Head, part: BackwardBlock, sums: Sums) -> None:
    """Cells that were summed up, at the level that was routed densely."""
    table, taken = (head.fine, part.opened) if head.coarse is None else (head.coarse, part.unfolded)
    for piece, own in part.block.far_pieces():
        cells = slice(0, piece.segments * table.per_segment)
        for rows in row_parts(own, cells.stop):
            queries = part.block.queries[rows]
            first, spread = moments(queries, table, cells)
            logits = far_logits(first, spread, taken[rows])
            keep = cell_keep(head, part.block, rows, table, torch.arange(cells.stop, device=logits.device))
            factor = None
            if head.settings.samples:
                home = (head.cell_of if head.coarse is None else head.coarse_of).long()
                factor = _left(part.drawn[rows], part.log_factor[rows], home, table, cells.stop)
            _cells(part, sums, table, rows, piece.segments, cells, logits, spread, keep, factor)


def _cells(
    part: BackwardBlock,
    sums: Sums,
    table: CellTable,
    rows: slice | Tensor,
    segments: int,
    cells: slice,
    logits: Tensor,
    spread: Tensor,
    keep: Tensor | None,
    factor: Tensor | None,
) -> None:
    """Some rows against a range of cells, as far field."""
    queries, grad, into = part.block.queries[rows], part.output_grad[rows], sums.of(table)
    lse = part.lse[rows]
    weight = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[:, None]).exp_()
    if factor is not None:
        weight = weight * factor
    matrix = table.cross[segments]
    kept = weight if keep is None else weight * keep
    into.value[cells].addmm_(kept.T, grad)
    tilt_grad = kept.sum(1, keepdim=True) * grad
    into.cross[segments].addmm_(tilt_grad.T, queries)
    query_grad = tilt_grad @ matrix
    weight_grad = grad @ table.value[cells].T
    weight_grad += (grad * (queries @ matrix.T)).sum(1, keepdim=True)
    if keep is not None:
        weight_grad = weight_grad * keep
    logit_grad = weight_grad.sub_(part.delta[rows][:, None]).mul_(weight)
    query_grad.addmm_(logit_grad, table.centroid[cells])
    into.centroid[cells].addmm_(logit_grad.T, queries)
    spread_grad = logit_grad.mul_(0.5).masked_fill_(spread > 2 * CAP, 0.0)
    query_grad.addcmul_(queries, spread_grad @ table.variance[cells], value=2.0)
    into.variance[cells].addmm_(spread_grad.T, queries.square())
    if isinstance(rows, slice):
        part.query_grad[rows] += query_grad
    else:
        part.query_grad.index_add_(0, rows, query_grad)


def _left(drawn: Tensor, log_factor: Tensor, home: Tensor, table: CellTable, cells: int) -> Tensor:
    """`[rows, cells]`: what drawn keys leave of their cells, 1 - (factors of the keys drawn there) / n_c; may be negative."""
    place = home[drawn.clamp(min=0)]
    # A key that stands for a cell of the other level, or for none, goes to a column that is thrown away.
    place = torch.where((drawn < 0) | (place < 0) | (place >= cells), cells, place)
    size = table.size[place.clamp(max=table.cells - 1)].clamp(min=1).to(log_factor.dtype)
    used = log_factor.new_zeros(len(drawn), cells + 1).scatter_add_(1, place, log_factor.exp() / size)
    return 1.0 - used[:, :cells]


def _children(head: Head, part: BackwardBlock, sums: Sums) -> None:
    """Fine cells of unfolded coarse ones that were not opened, coarse cell by coarse cell."""
    assert head.coarse is not None
    edges = child_edges(head)
    rows, slots = part.unfolded.shape
    number = torch.arange(rows, device=edges.device)
    segments = torch.zeros(rows, dtype=torch.int64, device=edges.device)
    for piece, own in part.block.far_pieces():
        segments[own] = piece.segments
    opened = _membership(part.opened, head.fine.cells)
    left = None
    if head.settings.samples:
        left = _left(part.drawn, part.log_factor, head.cell_of.long(), head.fine, head.fine.cells)
    for cell, pairs, row in tiles(head, part.unfolded):
        real = pairs < rows * slots
        row = number[row[real]]
        cells = slice(int(edges[cell]), int(edges[cell + 1]))
        first, spread = moments(part.block.queries[row], head.fine, cells)
        logits = far_logits(first, spread, first.new_zeros(len(row), 0, dtype=torch.int64))
        logits.masked_fill_(opened[row, cells], -torch.inf)
        ids = torch.arange(cells.start, cells.stop, device=row.device)
        keep = head.keep(part.block.rows[row, None], ids + len(head.keys))
        factor = None if left is None else left[row, cells]
        # X is pooled over what a row sees, which differs between the pieces of a block.
        for seen in segments[row].unique().tolist():
            some = (segments[row] == seen).nonzero()[:, 0]
            _cells(
                part,
                sums,
                head.fine,
                row[some],
                seen,
                cells,
                logits[some],
                spread[some],
                None if keep is None else keep[some],
                None if factor is None else factor[some],
            )


def _membership(chosen: Tensor, cells: int) -> Tensor:
    """`[rows, cells]`: whether a row chose a cell."""
    found = torch.zeros(len(chosen), cells + 1, dtype=torch.bool, device=chosen.device)
    return found.scatter_(1, torch.where(chosen < 0, cells, chosen), True)[:, :cells]


def _drawn(head: Head, part: BackwardBlock, sums: Sums) -> None:
    """Drawn keys, each with the factor that the plan gave it."""
    queries, drawn = part.block.queries, part.drawn.clamp(min=0)
    kernels = pair_kernels(queries.device)
    keys, values = head.keys.to(head.compute), head.values.to(head.compute)
    logits = kernels.pair_scores(queries, keys, drawn) + part.log_factor
    weight = (logits - part.lse.masked_fill(part.lse == -torch.inf, 0.0)[:, None]).exp_()
    keep = head.keep(part.block.rows[:, None], drawn)
    kept = weight if keep is None else weight * keep
    weight_grad = kernels.pair_scores(part.output_grad, values, drawn)
    if keep is not None:
        weight_grad = weight_grad * keep
    logit_grad = weight * (weight_grad - part.delta[:, None])
    part.query_grad += kernels.pair_sums(logit_grad, keys, drawn)
    kernels.pair_scatter_(sums.keys, logit_grad, queries, drawn)
    kernels.pair_scatter_(sums.values, kept, part.output_grad, drawn)


def _local(head: Head, part: BackwardBlock, sums: Sums) -> None:
    group = head.settings.group
    for piece, own in zip(part.block.pieces, part.block.ranges, strict=True):
        shape = (group, piece.length, -1)
        for position, causal, seen in local_runs(head, piece):
            keys, values = head.members(position)
            keep = head.keep(part.block.rows[own].view(group, -1, 1), position)
            query_grad, key_grad, value_grad = tile_backward(
                part.output_grad[own].view(shape),
                part.block.queries[own].view(shape),
                keys,
                values,
                part.output[own].view(shape),
                part.lse[own].view(shape[:2]),
                causal,
                keep,
                seen,
            )
            part.query_grad[own] += query_grad.flatten(0, 1)
            sums.keys.index_add_(0, position, key_grad)
            sums.values.index_add_(0, position, value_grad)


def _near(head: Head, part: BackwardBlock, sums: Sums) -> None:
    """Opened cells, one after the other."""
    if not head.fine.cells:
        return
    _, row, edges = by_cell(part.opened, head.fine.cells, 1)
    starts = head.fine.starts.tolist()
    for cell in range(head.fine.cells):
        if edges[cell] == edges[cell + 1]:
            continue
        some = row[edges[cell] : edges[cell + 1]]
        position = head.fine.order[starts[cell] : starts[cell + 1]]
        keys, values = head.members(position)
        keep = head.keep(part.block.rows[some][:, None], position)
        query_grad, key_grad, value_grad = tile_backward(
            part.output_grad[some][None],
            part.block.queries[some][None],
            keys,
            values,
            part.output[some][None],
            part.lse[some][None],
            keep=None if keep is None else keep[None],
        )
        part.query_grad.index_add_(0, some, query_grad[0])
        sums.keys.index_add_(0, position, key_grad)
        sums.values.index_add_(0, position, value_grad)
