"""The cells engine on a CPU, one head at a time, in blocks of rows: torch's dense kernels, nothing quadratic in memory.

Held to `cells_reference.py`. The work of a block: route its rows and sum up the far field, attend to the sinks and to the open
segment, then meet the opened cells cell by cell, so that each cell's keys see a dense tile of queries. Partial results are merged
by their normalisers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.kernels.cells_far import Draws, Far
from nearfield.kernels.cells_head import TILE_ROWS, Block, Head, Partial, by_cell, local_runs
from nearfield.kernels.cells_plan import CellPlan
from nearfield.kernels.tiles import tile


def forward(head: Head) -> tuple[Tensor, Tensor, Tensor, CellPlan]:
    """Output `[rows, value_dim]`, log-normaliser and standard error `[rows]` (NaN without draws), and the plan."""
    rows, settings, device = len(head.queries), head.settings, head.keys.device
    output = head.values.new_empty(rows, head.values.shape[1], dtype=head.compute)
    lse = output.new_empty(rows)
    stderr = torch.full_like(lse, torch.nan)
    plan = CellPlan(
        head.cell_of,
        head.coarse_of,
        torch.full((rows, settings.probes), -1, dtype=torch.int32, device=device),
        torch.full((rows, settings.unfold), -1, dtype=torch.int32, device=device),
        torch.full((rows, settings.samples), -1, dtype=torch.int32, device=device),
        output.new_full((rows, settings.samples), -torch.inf),
    )
    for block in head.blocks():
        total = Partial(len(block), output)
        opened = torch.full((len(block), settings.probes), -1, dtype=torch.int64, device=device)
        unfolded = torch.full((len(block), settings.unfold), -1, dtype=torch.int64, device=device)
        draws = Draws(head, block) if settings.samples else None
        Far(head, block, total, opened, unfolded, draws).run()
        _local(head, block, total)
        _near(head, block, opened, total)
        output[block.rows], lse[block.rows] = total.finish()
        plan.opened[block.rows] = opened.int()
        plan.unfolded[block.rows] = unfolded.int()
        if draws is not None:
            plan.drawn[block.rows], plan.log_factor[block.rows] = draws.drawn.int(), draws.log_factor
            stderr[block.rows] = draws.stderr(output[block.rows], lse[block.rows])
    return output, lse, stderr, plan


def _local(head: Head, block: Block, total: Partial) -> None:
    """The sinks and the keys after the last closed segment, one by one."""
    group = head.settings.group
    for piece, part in zip(block.pieces, block.ranges, strict=True):
        for own, causal, seen in local_runs(head, piece):
            keys, values = head.members(own)
            keep = head.keep(block.rows[part].view(group, -1, 1), own)
            output, lse = tile(block.queries[part].view(group, piece.length, -1), keys, values, causal, keep, seen)
            total.add(part, output.flatten(0, 1), lse.reshape(-1))


def _near(head: Head, block: Block, opened: Tensor, total: Partial) -> None:
    """Meet the opened cells one after the other; then merge each row's partial results."""
    rows, probes = opened.shape
    if not head.fine.cells:
        return
    pairs, row, edges = by_cell(opened, head.fine.cells, TILE_ROWS if head.settings.segment else 1)
    output = block.queries.new_empty(rows * probes + 1, head.values.shape[1])
    lse = block.queries.new_full((rows * probes + 1,), -torch.inf)
    starts = head.fine.starts.tolist()
    for cell in range(head.fine.cells):
        run = slice(edges[cell], edges[cell + 1])
        if run.start == run.stop:
            continue
        own = head.fine.order[starts[cell] : starts[cell + 1]]
        keys, values = head.members(own)
        keep = head.keep(block.rows[row[run]][:, None], own)
        part, part_lse = tile(block.queries[row[run]][None], keys, values, keep=None if keep is None else keep[None])
        output[pairs[run]], lse[pairs[run]] = part[0], part_lse[0]
    if bool((opened < 0).any()):
        output[: rows * probes].masked_fill_(lse[: rows * probes, None] == -torch.inf, 0.0)
    lse = lse[:-1].view(rows, probes)
    top = lse.amax(1)
    weight = (lse - top.masked_fill(top == -torch.inf, 0.0)[:, None]).exp()
    merged = torch.bmm(weight[:, None], output[:-1].view(rows, probes, -1))[:, 0]
    total.add(slice(0, rows), merged, top, weight.sum(1))
