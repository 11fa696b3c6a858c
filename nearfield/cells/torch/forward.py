"""The forward pass in torch: one head at a time, in blocks of rows, nothing quadratic in memory. See `cells/reference.py`.

The work of a block: score the cells and sum up those that stay closed (`far`), attend to the sinks and the open segment
(`local`), and attend to the opened cells, one cell at a time, so that its keys meet dense tiles of queries (`near`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import Tensor

from nearfield.cells.far_field import best_cell, cap_moments, largest_first, masses, moments, open_best, open_together, pooled
from nearfield.cells.moments import SeenCells
from nearfield.cells.reference import CellPlan
from nearfield.cells.spans import Piece
from nearfield.cells.torch.dense import LARGE, dense_attention
from nearfield.cells.torch.draws import ClosedCells, Draws
from nearfield.cells.torch.head import Head, Partial, RowBlock, local_runs
from nearfield.cells.torch.tiles import Stack, products, rows_of_a_tile, stacks
from nearfield.kernels.dense import capped


def forward(
    head: Head, output: Tensor, lse: Tensor, stderr: Tensor, plan: CellPlan, known: Collection[str] = frozenset()
) -> None:
    """Fill in the output `[rows, value_dim]`, the log-normaliser `[rows]`, the standard error `[rows]` if keys are drawn, and the
    part of the plan that rows decide and that is not `known`."""
    sizes, device = head.sizes, head.keys.device
    if sizes.ordered:
        if "order" not in known:
            plan.order.copy_(by_best_cell(head))
        head.cut_into_blocks(plan.order)
    for block in head.blocks():
        total = Partial(len(block), output)
        opened = torch.full((len(block), sizes.probes), -1, dtype=torch.int64, device=device)
        draws = Draws(head, block) if sizes.samples else None
        chosen = plan.opened[head.block_of[block.rows]].long() if "opened" in known else None
        ref = far(head, block, total, opened, draws, chosen)
        local(head, block, total)
        numerator, mass, ref = near(head, block, opened, ref)
        total.add(slice(0, len(block)), numerator, ref, mass)
        found, found_lse = total.finish()
        output.index_copy_(0, block.rows, found)
        lse.index_copy_(0, block.rows, found_lse)
        if chosen is None:
            # All rows of a block write the same.
            plan.opened[head.block_of[block.rows]] = opened.int()
        if draws is not None:
            plan.drawn.index_copy_(0, block.rows, draws.drawn.int())
            plan.log_factor.index_copy_(0, block.rows, draws.log_factor)
            stderr.index_copy_(0, block.rows, draws.stderr(found, found_lse))


def by_best_cell(head: Head) -> Tensor:
    """`[rows]`: the positions of rows, member by member of the group, in the order of the cells of largest score.

    Rows with the same cell stay in their own order. Without a mask all rows see the same cells.
    """
    group, length = head.sizes.group, head.length
    best = torch.zeros(group * length, dtype=torch.int64, device=head.keys.device)
    if head.pieces and head.pieces[0].segments:
        seen = head.seen_by(head.pieces[0])
        for rows in row_parts(slice(0, len(best)), len(seen), head.scores_per_pass):
            queries = head.scaled(torch.arange(rows.start, rows.stop, device=best.device))
            best[rows] = best_cell(*moments(queries, seen))
    return best.view(group, length).sort(dim=1, stable=True).indices.flatten()


def local(head: Head, block: RowBlock, total: Partial) -> None:
    """The sinks and the keys after the last closed segment, one by one."""
    for run in local_runs(block):
        keys, values = head.members(run.own)
        keep = head.keep(block.rows[run.rows].view(run.shape), run.own)
        output, lse = dense_attention(
            block.scaled(run.rows).view(run.shape), keys, values, run.causal, keep, run.seen, head.softcap
        )
        total.add(run.rows, output.flatten(0, 1), lse.reshape(-1))


HEADROOM = 30.0
"""If a logit exceeds the reference of its row by more than this, the sums of the row are formed again around a better one."""


def near(head: Head, block: RowBlock, opened: Tensor, ref: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numerator `[rows, value_dim]`, mass and reference `[rows]` over the keys of the opened cells.

    Sums are formed around `ref`, which must not exceed the largest logit. The logit of an opened centroid never does, and is
    usually close to it. Rows for which it is too low are done again around their largest logit.
    """
    tile_rows = rows_of_a_tile(opened.numel() / max(1, head.table.cells))
    numerator, mass, above = _sums(head, block.numbers, opened, ref, tile_rows)
    low = ((above > HEADROOM) | (ref.abs() > LARGE)).logical_and_(above > -torch.inf).nonzero()[:, 0]
    if len(low):
        numbers = torch.cat([block.numbers[low], block.numbers[-1:]])
        _, _, top = _sums(head, numbers, opened[low], torch.zeros_like(ref[low]), tile_rows)
        ref = ref.index_copy(0, low, top)
        again, again_mass, _ = _sums(head, numbers, opened[low], top, tile_rows, apart=True)
        numerator.index_copy_(0, low, again)
        mass.index_copy_(0, low, again_mass)
    return numerator, mass, ref


def _sums(
    head: Head, numbers: Tensor, opened: Tensor, ref: Tensor, tile_rows: int, apart: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Numerator and mass around `ref`, and by how much the largest logit exceeds it.

    `apart`: subtract the reference from finished logits, so that the largest comes out as exactly 0 whatever its size.
    """
    rows = len(opened)
    numerator = ref.new_zeros(rows + 1, head.values.shape[1])
    mass, top = ref.new_zeros(rows + 1), ref.new_full((rows + 1,), -torch.inf)
    base = torch.cat([-ref, ref.new_zeros(1)])
    for stack in stacks(opened, head.table.starts, head.keys.shape[1], tile_rows):
        row, shape = stack.rows.view(-1), (*stack.rows.shape, -1)
        number = numbers.index_select(0, row)
        keys, values, position = tile_members(head, stack)
        queries = head.queries.index_select(0, number).to(head.compute).view(shape)
        plus = base.index_select(0, row).view(shape)
        apart_here = apart or head.softcap > 0
        logits = products(queries, keys, torch.zeros_like(plus) if apart_here else plus, head.scale)
        if apart_here:
            logits = capped(logits, head.softcap).add_(plus)
        if stack.missing is not None:
            logits.masked_fill_(stack.missing[:, None], -torch.inf)
        top.scatter_reduce_(0, row, logits.amax(-1).view(-1), "amax")
        weight = logits.exp_()
        mass.index_add_(0, row, weight.sum(-1).view(-1))
        keep = head.keep(number.view(shape), position[:, None])
        output = torch.bmm(weight if keep is None else weight.mul_(keep), values)
        numerator.index_add_(0, row, output.flatten(0, 1))
    return numerator[:rows], mass[:rows], top[:rows]


def tile_members(head: Head, stack: Stack) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of the cells of a stack, `[tiles, width, ...]`, and their positions `[tiles, width]`."""
    position = head.table.order[stack.members]
    keys, values = head.members(position.view(-1))
    return keys.view(*position.shape, -1), values.view(*position.shape, -1), position


def far(head: Head, block: RowBlock, total: Partial, opened: Tensor, draws: Draws | None, chosen: Tensor | None = None) -> Tensor:
    """Score the cells that a block of rows sees, fill in `opened` `[rows, probes]`, and add the cells left closed to `total`.

    `chosen` `[rows, probes]`: the cells to open; None: the best ones.
    Returns the largest q.mu_c of the opened cells, `[rows]`; -inf where none is opened.
    """
    ref = total.ref.new_full((len(block),), -torch.inf)
    for piece, part in block.far_pieces():
        seen = head.seen_by(piece)
        together = None
        if chosen is not None:
            together = seen.columns(chosen[part])
        elif head.sizes.share > 1:
            together = _open_together(head, block, piece, part, seen)
        for rows in row_parts(part, len(seen), head.scores_per_pass):
            queries = block.scaled(rows)
            first, spread = moments(queries, seen)
            if together is None:
                best = open_best(first, spread, opened.shape[1])
            else:
                best = together[rows.start - part.start : rows.stop - part.start]
            opened[rows, : best.shape[1]] = seen.ids[best.clamp(min=0)].masked_fill_(best < 0, -1)
            slope = None
            if head.softcap:
                first, spread, slope = cap_moments(first, spread, head.softcap)
            ref[rows] = largest_first(first, best)
            weight, top = masses(first, spread, best, seen.size)
            cells = ClosedCells(seen, weight, top, queries @ seen.cross.T, cell_keep(head, block, rows, seen.ids), slope)
            if draws is None:
                total.add(rows, cells.numerator(weight), top, weight.sum(1))
            else:
                total.add(rows, *draws.correct(rows, cells))
    return ref


def _open_together(head: Head, block: RowBlock, piece: Piece, part: slice, seen: SeenCells) -> Tensor:
    """The columns of the cells that the rows of a piece open, each row what its block does: `[rows, probes or fewer]`."""
    group, share = head.sizes.group, head.sizes.share
    means, present = pooled(block.scaled(part).view(group, piece.length, -1), share)
    pools, means = present.shape[1], means.flatten(0, 1)
    found = []
    # Parts are of 32 rows or a multiple, so they tear no block of 2, 4, ..., 32 pools.
    for some in row_parts(slice(0, len(means)), len(seen), head.scores_per_pass):
        blocks = slice(some.start // pools, some.stop // pools)
        found.append(open_together(*moments(means[some], seen), seen.size, present[blocks], head.sizes.probes, head.softcap))
    columns = torch.cat(found).unflatten(0, (group, -1)).repeat_interleave(share, 1)
    return columns[:, : piece.length].flatten(0, 1)


def row_parts(part: slice, cost: int, budget: int) -> Iterator[slice]:
    """Ranges of rows whose score tables, with `cost` entries per row, stay within a budget of entries."""
    step = max(32, budget // max(1, cost) // 32 * 32)
    for start in range(part.start, part.stop, step):
        yield slice(start, min(start + step, part.stop))


def cell_keep(head: Head, block: RowBlock, rows: slice, ids: Tensor) -> Tensor | None:
    """Dropout factors of some rows and cells: see `Head.keep`."""
    return None if head.dropout_p == 0.0 else head.keep(block.rows[rows, None], ids + len(head.keys))
