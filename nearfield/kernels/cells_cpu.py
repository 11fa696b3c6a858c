"""The cells engine on a CPU, one head at a time, in blocks of rows: torch's dense kernels, nothing quadratic in memory.

Held to `cells_reference.py`. The work of a block: route its rows and sum up the far field, attend to the sinks and to the open
segment, then meet the opened cells cell by cell, so that each cell's keys see dense tiles of queries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.kernels.cells_far import Draws, Far
from nearfield.kernels.cells_head import Block, Head, Partial, local_runs
from nearfield.kernels.cells_near import near
from nearfield.kernels.cells_plan import CellPlan
from nearfield.kernels.dense import attend


def forward(head: Head, output: Tensor, lse: Tensor, stderr: Tensor, plan: CellPlan) -> None:
    """Fills in the output `[rows, value_dim]`, the log-normaliser `[rows]`, what rows decide, and the standard error `[rows]`
    where keys are drawn."""
    settings, device = head.settings, head.keys.device
    for block in head.blocks():
        total = Partial(len(block), output)
        opened = torch.full((len(block), settings.probes), -1, dtype=torch.int64, device=device)
        unfolded = torch.full((len(block), settings.unfold), -1, dtype=torch.int64, device=device)
        draws = Draws(head, block) if settings.samples else None
        ref = Far(head, block, total, opened, unfolded, draws).run()
        _local(head, block, total)
        numerator, mass, ref = near(head, block, opened, ref)
        total.add(slice(0, len(block)), numerator, ref, mass)
        found, found_lse = total.finish()
        output.index_copy_(0, block.rows, found)
        lse.index_copy_(0, block.rows, found_lse)
        plan.opened.index_copy_(0, block.rows, opened.int())
        plan.unfolded.index_copy_(0, block.rows, unfolded.int())
        if draws is not None:
            plan.drawn.index_copy_(0, block.rows, draws.drawn.int())
            plan.log_factor.index_copy_(0, block.rows, draws.log_factor)
            stderr.index_copy_(0, block.rows, draws.stderr(found, found_lse))


def _local(head: Head, block: Block, total: Partial) -> None:
    """The sinks and the keys after the last closed segment, one by one."""
    for run in local_runs(block):
        keys, values = head.members(run.own)
        keep = head.keep(block.rows[run.rows].view(run.shape), run.own)
        output, lse = attend(block.scaled(run.rows).view(run.shape), keys, values, run.causal, keep, run.seen)
        total.add(run.rows, output.flatten(0, 1), lse.reshape(-1))
