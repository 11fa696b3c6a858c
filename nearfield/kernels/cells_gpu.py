"""The cells engine on a GPU, forward: what to launch, on what, in which order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nearfield.kernels.cells_plan import CellSettings
from nearfield.kernels.triton.assign import kmeans
from nearfield.kernels.triton.common import dense
from nearfield.kernels.triton.far import far
from nearfield.kernels.triton.layout import Layout, layout_of
from nearfield.kernels.triton.limit import limit_sizes
from nearfield.kernels.triton.local import local
from nearfield.kernels.triton.merge import merge
from nearfield.kernels.triton.near import near
from nearfield.kernels.triton.route import route
from nearfield.kernels.triton.tables import moments_of, tabulate

LEAST_BYTES = 4 << 20
SHARE = 3.0
"""Partial results take no more than this part of the inputs, or `LEAST_BYTES`."""
LEAST_ROWS = 1024
"""Rows that are looked at together even if they do not fit."""
MOST_ENTRIES = 32768
"""What the second axis of a grid takes."""


def assign(
    keys: Tensor, visible: Tensor, settings: CellSettings, layout: Layout, iterations: int, seed: int, cell_of: Tensor
) -> None:
    """Fills in `cell_of` `[entries, heights, n]`: the cells of each key, -1 where it is in none."""
    cell_of.fill_(-1)
    kmeans(keys, layout, iterations, seed, cell_of)
    limit_sizes(cell_of, layout)
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
    if len(queries) > MOST_ENTRIES:
        for some in entry_parts(len(queries)):
            inputs = queries[some], keys[some], values[some], visible[some]
            forward(*inputs, settings, scale, iterations, seed, output[some], lse[some], cell_of[some], opened[some])
        return
    queries, scale = upright(queries, scale)
    queries, keys, values = (dense(x) for x in (queries, keys, values))
    visible = visible.to(torch.int32).contiguous()
    entries, rows, _ = queries.shape
    layout = layout_of(keys.shape[1], settings, keys.device)
    if keys.is_cuda and torch.cuda.is_current_stream_capturing():
        layout.keep()
    # First, and not last: it keeps the device busy while the many small kernels that make cells are started.
    local(queries, keys, values, visible, layout, settings, scale, output, lse)
    assign(keys, visible, settings, layout, iterations, seed, cell_of)
    tables = tabulate(keys, values, moments_of(keys, values, cell_of, layout), layout)
    slots, value_dim = settings.probes, values.shape[2]
    per_row = max(slots * (value_dim * queries.element_size() + 8), 4 * layout.words)
    for some, part in parts_of(entries, rows, per_row, (queries, keys, values)):
        query, sees, found = queries[some, part], visible[some, part], opened[some, part]
        own_keys, own_values, own_tables = keys[some], values[some], tables.of(some)
        into, ends = output[some, part], lse[some, part]
        marks, counts = route(query, sees, own_tables, layout, settings, scale, found)
        far(query, sees, own_tables, layout, settings, scale, marks, into, ends)
        del marks
        parts = queries.new_empty((*found.shape, value_dim))
        parts_lse = torch.empty(found.shape, device=queries.device)
        near(query, own_keys, own_values, own_tables, settings, found, counts, scale, parts, parts_lse)
        merge(parts, parts_lse, found, into, ends)
        del parts


def upright(queries: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same products with a positive scale, as kernels want it."""
    return (queries, scale) if scale > 0 else (queries * (-1.0 if scale else 0.0), -scale or 1.0)


def entry_parts(entries: int) -> Iterator[slice]:
    """All entries, in as few parts as a grid takes."""
    for first in range(0, entries, MOST_ENTRIES):
        yield slice(first, min(first + MOST_ENTRIES, entries))


def parts_of(entries: int, rows: int, per_row: int, inputs: tuple[Tensor, ...]) -> Iterator[tuple[slice, slice]]:
    """Entries, and rows of theirs, whose partial results fit into the budget. Rows stay together: tiles are then full."""
    budget = max(LEAST_BYTES, int(sum(x.numel() * x.element_size() for x in inputs) / SHARE))
    some = max(1, min(entries, budget // max(1, per_row * rows)))
    step = rows if some > 1 else max(LEAST_ROWS, budget // per_row // LEAST_ROWS * LEAST_ROWS)
    for first in range(0, entries, some):
        for start in range(0, rows, step):
            yield slice(first, min(first + some, entries)), slice(start, min(start + step, rows))
