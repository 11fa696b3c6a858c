"""The cells engine on a GPU, forward: what to launch, on what, in which order. Not chosen by any method yet."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter

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
    length = keys.shape[1]
    cell_of.fill_(-1)
    edges = layout.spans.edges(layout.per_segment)
    for height, group in groupby(layout.spans.all, key=attrgetter("height")):
        own = list(group)
        size = own[0].segments * layout.segment
        stride = (own[1].first - own[0].first) * layout.segment if len(own) > 1 else size
        cells = own[0].segments * layout.per_segment
        kmeans(keys, len(own), size, stride, min(cells, size), iterations, seed, cell_of[:, height], edges[own[0].number], cells)
    cell_of[:, :, : settings.sinks] = -1
    if not settings.segment:
        beyond = torch.arange(length, device=keys.device) >= visible.amax(1, keepdim=True)
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
    entries, rows, _ = queries.shape
    layout = layout_of(keys.shape[1], settings, keys.device)
    assign(keys, visible, settings, layout, iterations, seed, cell_of)
    tables = tabulate(keys, values, moments_of(keys, values, cell_of, layout), layout)
    slots, value_dim = settings.slots, values.shape[2]
    per_row = entries * (slots * (value_dim * queries.element_size() + 24) + 4 * layout.words)
    for part in row_parts(rows, per_row, (queries, keys, values)):
        query, sees, found = queries[:, part], visible[:, part], opened[:, part]
        parts = queries.new_empty((*found.shape[:2], slots + 1, value_dim))
        parts_lse = torch.empty(parts.shape[:3], device=queries.device)
        threshold = thresholds(query, sees, tables, layout, settings, scale)
        marks = far(query, keys, values, sees, tables, layout, settings, scale, threshold, parts, parts_lse)
        opened_cells(marks, sees, layout, settings, found)
        near(query, keys, values, tables, layout.cells, found, scale, parts, parts_lse)
        merge(parts, parts_lse, found, output[:, part], lse[:, part])


def row_parts(rows: int, per_row: int, inputs: tuple[Tensor, ...]) -> Iterator[slice]:
    """Ranges of rows whose partial results fit into the budget."""
    budget = max(LEAST_BYTES, sum(x.numel() * x.element_size() for x in inputs) // SHARE)
    step = max(1024, budget // per_row // 1024 * 1024)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))
