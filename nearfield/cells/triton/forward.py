"""The cells engine on a GPU, forward: what to launch, on what, in which order."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from nearfield.cells.sizes import CellSizes
from nearfield.cells.triton.cluster import kmeans, limit_sizes
from nearfield.cells.triton.far import far
from nearfield.cells.triton.layout import Layout, layout_of
from nearfield.cells.triton.local import local
from nearfield.cells.triton.memory import MOST_ENTRIES, entry_parts, parts_of, room_for, slabs_of
from nearfield.cells.triton.moments import moments_of, tabulate
from nearfield.cells.triton.near import group, merge, near, near_blocks
from nearfield.cells.triton.route import route
from nearfield.kernels import backends
from nearfield.kernels.launch import dense


def assign(keys: Tensor, visible: Tensor, sizes: CellSizes, layout: Layout, iterations: int, seed: int, cell_of: Tensor) -> None:
    """Fills in `cell_of` `[entries, span_levels, n]`: the cells of each key, -1 where it is in none."""
    cell_of.fill_(-1)
    kmeans(keys, layout, iterations, seed, cell_of)
    limit_sizes(cell_of, layout)
    cell_of[:, :, : sizes.sinks] = -1
    if not sizes.segment:
        beyond = torch.arange(keys.shape[1], device=keys.device) >= visible.amax(1, keepdim=True)
        cell_of.masked_fill_(beyond[:, None], -1)


def forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    sizes: CellSizes,
    scale: float,
    iterations: int,
    seed: int,
    output: Tensor,
    lse: Tensor,
    cell_of: Tensor,
    opened: Tensor,
    beyond: float,
) -> None:
    """Fills in the output and log-normaliser of queries `[entries, group * length, dim]`, cells of keys and opened cells.

    `beyond`: see `room_for`.
    """
    if len(queries) > MOST_ENTRIES:
        for some in entry_parts(len(queries)):
            inputs = queries[some], keys[some], values[some], visible[some]
            forward(*inputs, sizes, scale, iterations, seed, output[some], lse[some], cell_of[some], opened[some], beyond)
        return
    queries, scale = upright(queries, scale)
    queries, keys, values = (dense(x) for x in (queries, keys, values))
    visible = visible.to(torch.int32).contiguous()
    entries, rows, _ = queries.shape
    layout = layout_for(keys, sizes)
    # First, and not last: it keeps the device busy while the many small kernels that make cells are started.
    local(queries, keys, values, visible, layout, sizes, scale, output, lse)
    assign(keys, visible, sizes, layout, iterations, seed, cell_of)
    tables = tabulate(keys, values, moments_of(keys, values, cell_of, layout), layout)
    room = room_for((queries, keys, values, output), (cell_of, opened, visible, *vars(tables).values()), beyond)
    counts = torch.zeros(entries, tables.cells, dtype=torch.int32, device=keys.device)
    for some, part in parts_of(entries, rows, 4 * layout.words, room.parts):
        query, sees, own_tables = queries[some, part], visible[some, part], tables.of(some)
        marks = route(query, sees, own_tables, layout, sizes, scale, opened[some, part], counts[some])
        far(query, sees, own_tables, layout, sizes, scale, marks, output[some, part], lse[some, part])
        del marks
    value_dim, size = values.shape[2], near_blocks(queries, values, sizes).rows
    per_row = sizes.probes * (value_dim * queries.element_size() + 4)
    for slab in slabs_of(entries, rows, sizes.probes, per_row, room):
        own, part = slab.entries, slab.rows
        query, key, value, found, own_tables = queries[own, part], keys[own], values[own], opened[own, part], tables.of(own)
        groups = group(found, own_tables, size, counts[own].view(-1) if part == slice(0, rows) else None)
        into, ends = output[own, part], lse[own, part]
        for some in slab.parts:
            parts = queries.new_empty((some.stop - some.start, *found.shape[1:], value_dim))
            parts_lse = torch.empty(parts.shape[:3], device=queries.device)
            near(query, key, value, own_tables, sizes, groups, some, scale, parts, parts_lse)
            merge(parts, parts_lse, found[some], into[some], ends[some])
            del parts


def layout_for(keys: Tensor, sizes: CellSizes) -> Layout:
    """The layout of such keys; it stays for good if a graph is being captured, which will read it."""
    layout = layout_of(keys.shape[1], sizes, keys.device)
    if keys.is_cuda and torch.cuda.is_current_stream_capturing():
        layout.keep()
    return layout


def upright(queries: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same products with a positive scale, as kernels want it."""
    return (queries, scale) if scale > 0 else (queries * (-1.0 if scale else 0.0), -scale or 1.0)


def group_keys(keys: Tensor, cells: int, iterations: int, seed: int) -> Tensor:
    """The cells of the keys `[heads, n, dim]`, `[heads, n]`, at most `cells` of them: see `cells_assign.group_keys`."""
    heads, length, _ = keys.shape
    keys, layout = dense(keys), _layout(length, cells, keys.device)
    found = torch.empty(heads, 1, length, dtype=torch.int32, device=keys.device)
    with backends.device_guard(keys.device):
        for some in entry_parts(heads):
            kmeans(keys[some], layout, iterations, seed, found[some])
            limit_sizes(found[some], layout)
    return found[:, 0]


# Not among the layouts of the engine: segments get longer and longer, and only the layers of a model ask for the same one.
@lru_cache(maxsize=4)
def _layout(length: int, cells: int, device: torch.device) -> Layout:
    # Not a whole number of keys per cell, where that is what it takes to have just so many cells.
    cell_size = max(1.0, length / cells)
    none = {"segment": 0, "window": 0, "sinks": 0, "branching": 0, "unfold": 0, "samples": 0}
    sizes = CellSizes(group=1, cell_size=cell_size, probes=1, **none)  # type: ignore[arg-type]
    return layout_of.__wrapped__(length, sizes, device)
