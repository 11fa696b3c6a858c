"""The cells engine on a GPU, forward: what to launch, on what, in which order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nearfield.kernels.cells_plan import CellSettings
from nearfield.kernels.triton.assign import kmeans
from nearfield.kernels.triton.far import far, opened_cells
from nearfield.kernels.triton.layout import Layout, layout_of
from nearfield.kernels.triton.merge import merge
from nearfield.kernels.triton.near import near
from nearfield.kernels.triton.route import thresholds
from nearfield.kernels.triton.tables import moments_of, tabulate

LEAST_BYTES = 64 << 20
SHARE = 3
"""Partial results take no more than this part of the inputs, or `LEAST_BYTES`."""


def assign(
    keys: Tensor, visible: Tensor, settings: CellSettings, layout: Layout, iterations: int, seed: int, cell_of: Tensor
) -> None:
    """Fills in `cell_of` `[entries, heights, n]`: the cells of each key, -1 where it is in none."""
    cell_of.fill_(-1)
    kmeans(keys, layout, iterations, seed, cell_of)
    cell_of[:, :, : settings.sinks] = -1
    if not settings.segment:
        beyond = torch.arange(keys.shape[1], device=keys.device) >= visible.amax(1, keepdim=True)
        cell_of.masked_fill_(beyond[:, None], -1)


def forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    settings: CellSettings,
    scale: float,
    iterations: int,
    seed: int,
    output: Tensor,
    lse: Tensor,
    cell_of: Tensor,
    opened: Tensor,
) -> None:
    """Fills in the output and log-normaliser of queries `[entries, group * length, dim]`, cells of keys and opened cells."""
    queries, scale = upright(queries, scale)
    queries, keys, values = (dense(x) for x in (queries, keys, values))
    visible = visible.to(torch.int32).contiguous()
    entries, rows, _ = queries.shape
    layout = layout_of(keys.shape[1], settings, keys.device)
    if keys.is_cuda and torch.cuda.is_current_stream_capturing():
        layout.keep()
    assign(keys, visible, settings, layout, iterations, seed, cell_of)
    tables = tabulate(keys, values, moments_of(keys, values, cell_of, layout), layout)
    slots, value_dim = settings.slots, values.shape[2]
    per_row = entries * (slots * (value_dim * queries.element_size() + 8) + 4 * layout.words)
    for part in row_parts(rows, per_row, (queries, keys, values)):
        query, sees, found = queries[:, part], visible[:, part], opened[:, part]
        parts = queries.new_empty((*found.shape[:2], slots + 1, value_dim))
        parts_lse = torch.empty(parts.shape[:3], device=queries.device)
        threshold = thresholds(query, sees, tables, layout, settings, scale)
        marks = far(query, keys, values, sees, tables, layout, settings, scale, threshold, parts, parts_lse)
        opened_cells(marks, sees, layout, settings, found)
        near(query, keys, values, tables, settings, found, scale, parts, parts_lse)
        merge(parts, parts_lse, found, output[:, part], lse[:, part])


def upright(queries: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same products with a positive scale, as kernels want it."""
    return (queries, scale) if scale > 0 else (queries * (-1.0 if scale else 0.0), -scale or 1.0)


def dense(x: Tensor) -> Tensor:
    """With its columns side by side, which is all that the kernels ask for."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def row_parts(rows: int, per_row: int, inputs: tuple[Tensor, ...]) -> Iterator[slice]:
    """Ranges of rows whose partial results fit into the budget."""
    budget = max(LEAST_BYTES, sum(x.numel() * x.element_size() for x in inputs) // SHARE)
    step = max(1024, budget // per_row // 1024 * 1024)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
