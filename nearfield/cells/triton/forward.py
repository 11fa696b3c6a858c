"""The cells engine on a GPU, forward: what to launch, on what, in which order."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from nearfield.cells.sizes import CellSizes
from nearfield.cells.triton.attend import attend, attend_rows
from nearfield.cells.triton.cluster import kmeans, limit_cell_sizes_
from nearfield.cells.triton.layout import Layout, layout_of
from nearfield.cells.triton.memory import MOST_ENTRIES, entry_parts, memory_budget, parts_of, pieces_of, slabs_of
from nearfield.cells.triton.moments import moments_of, tabulate
from nearfield.cells.triton.near import group, merge, near_forward, near_forward_blocks
from nearfield.cells.triton.route import route
from nearfield.cells.triton.share import list_bytes, open_together
from nearfield.kernels import backends
from nearfield.kernels.launch import dense
from nearfield.problem import with_positive_scale


def assign(keys: Tensor, visible: Tensor, sizes: CellSizes, layout: Layout, iterations: int, seed: int, cell_of: Tensor) -> Tensor:
    """Fills in `cell_of` `[entries, span_levels, n]`: the cells of each key; -1 where it is in none. Returns their sizes."""
    found = kmeans(keys, layout, iterations, seed, None if sizes.segment else visible, cell_of)
    limit_cell_sizes_(cell_of, found, layout)
    return found


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
    """Fills in output and log-normaliser of queries `[entries, group * length, dim]`, the cells of keys, and the opened cells.

    `beyond`: see `memory_budget`.
    """
    if len(queries) > MOST_ENTRIES:
        for some in entry_parts(len(queries)):
            inputs = queries[some], keys[some], values[some], visible[some]
            forward(*inputs, sizes, scale, iterations, seed, output[some], lse[some], cell_of[some], opened[some], beyond)
        return
    queries, scale = with_positive_scale(queries, scale)
    queries, keys, values = (dense(x) for x in (queries, keys, values))
    entries, rows, _ = queries.shape
    # Where all entries see the same, one row of numbers serves them all.
    visible = visible[:1].to(torch.int32).expand(entries, -1) if visible.stride(0) == 0 else visible.to(torch.int32).contiguous()
    layout = layout_for(keys, sizes)
    if sizes.share > 1:
        assign(keys, visible, sizes, layout, iterations, seed, cell_of)
        tables = tabulate(keys, values, cell_of, moments_of(keys, values, cell_of, layout), layout)
        budget = memory_budget((queries, keys, values, output), (cell_of, opened, *vars(tables).values()), beyond)
        step = max(1, budget.parts // list_bytes(layout, sizes, opened.shape[1]))
        for first in range(0, entries, step):
            some = slice(first, min(first + step, entries))
            query, sees, own_tables = queries[some], visible[some], tables.of(some)
            lists = open_together(query, sees, own_tables, layout, sizes, scale, opened[some])
            attend(query, keys[some], values[some], sees, own_tables, layout, sizes, scale, lists, output[some], lse[some])
        return
    assign(keys, visible, sizes, layout, iterations, seed, cell_of)
    tables = tabulate(keys, values, cell_of, moments_of(keys, values, cell_of, layout), layout)
    budget = memory_budget((queries, keys, values, output), (cell_of, opened, visible, *vars(tables).values()), beyond)
    counts = torch.zeros(entries, tables.cells, dtype=torch.int32, device=keys.device)
    positions = rows // sizes.group
    for some, part in parts_of(entries, rows, 4 * layout.mark_words, budget.parts):
        own_tables = tables.of(some)
        marks = route(queries[some, part], visible[some, part], own_tables, layout, sizes, scale, opened[some, part], counts[some])
        members = sizes.group if part == slice(0, rows) else 1
        for own in [part] if members > 1 else pieces_of(part, positions):
            query, sees = queries[some, own], visible[some, own]
            own_marks = marks if own == part else marks[:, own.start - part.start : own.stop - part.start].contiguous()
            inputs = query, keys[some], values[some], sees, own_tables
            attend_rows(*inputs, layout, sizes, scale, own_marks, members, output[some, own], lse[some, own])
        del marks
    value_dim, size = values.shape[2], near_forward_blocks(queries, values, sizes).rows
    per_row = sizes.probes * (value_dim * queries.element_size() + 4)
    for slab in slabs_of(entries, rows, sizes.probes, per_row, budget):
        own, part = slab.entries, slab.rows
        query, key, value, found, own_tables = queries[own, part], keys[own], values[own], opened[own, part], tables.of(own)
        groups = group(found, own_tables, size, counts[own].view(-1) if part == slice(0, rows) else None)
        into, ends = output[own, part], lse[own, part]
        for some in slab.parts:
            parts = queries.new_empty((some.stop - some.start, *found.shape[1:], value_dim))
            parts_lse = torch.empty(parts.shape[:3], device=queries.device)
            near_forward(query, key, value, own_tables, sizes, groups, some, scale, parts, parts_lse)
            merge(parts, parts_lse, found[some], into[some], ends[some])
            del parts


def layout_for(keys: Tensor, sizes: CellSizes) -> Layout:
    """The layout of such keys. If a graph is being captured, it stays for good: the graph will read it."""
    layout = layout_of(keys.shape[1], sizes, keys.device)
    if keys.is_cuda and torch.cuda.is_current_stream_capturing():
        layout.keep()
    return layout


def group_keys(keys: Tensor, cells: int, iterations: int, seed: int) -> Tensor:
    """The cell `[heads, n]` of each key `[heads, n, dim]`, one of at most `cells`: see `partition.build_cells`."""
    heads, length, _ = keys.shape
    keys, layout = dense(keys), _layout(length, cells, keys.device)
    found = torch.empty(heads, 1, length, dtype=torch.int32, device=keys.device)
    with backends.device_guard(keys.device):
        for some in entry_parts(heads):
            limit_cell_sizes_(found[some], kmeans(keys[some], layout, iterations, seed, None, found[some]), layout)
    return found[:, 0]


# Not in the cache of `layout_of`: a cache asks for longer and longer segments, once for each layer of a model.
@lru_cache(maxsize=4)
def _layout(length: int, cells: int, device: torch.device) -> Layout:
    # To get exactly `cells`, the number of keys per cell may have to be a fraction.
    cell_size: float = max(1.0, length / cells)
    sizes = CellSizes(group=1, segment=0, window=0, sinks=0, cell_size=cell_size, probes=1, samples=0)  # type: ignore[arg-type]
    return layout_of.__wrapped__(length, sizes, device)
