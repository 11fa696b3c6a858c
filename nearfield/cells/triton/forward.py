"""The cells engine on a GPU, forward: what to launch, on what, in which order."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import lru_cache

import torch
from torch import Tensor

from nearfield.cells.partition.kmeans import KERNEL_ITERATIONS, KMeans
from nearfield.cells.sizes import CellSizes
from nearfield.cells.triton.attend import attend, attend_rows
from nearfield.cells.triton.by_queries import sizes_of_queries
from nearfield.cells.triton.cluster import kmeans, limit_cell_sizes_
from nearfield.cells.triton.layout import Layout, as_read, layout_of
from nearfield.cells.triton.memory import MOST_ENTRIES, MemoryBudget, entry_parts, memory_budget, pieces_of, slabs_of, units_of
from nearfield.cells.triton.moments import Tables, moments_of, tabulate
from nearfield.cells.triton.near import group, group_bytes, merge, near_forward, near_forward_blocks
from nearfield.cells.triton.order import order_rows
from nearfield.cells.triton.route import mark, route
from nearfield.cells.triton.share import list_bytes, lists_for, lists_of
from nearfield.kernels import backends
from nearfield.kernels.launch import dense
from nearfield.problem import with_positive_scale


def cells_of(
    queries: Tensor | None,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    sizes: CellSizes,
    layout: Layout,
    partition: KMeans,
    cell_of: Tensor,
) -> Tables:
    """Fills in `cell_of` `[entries, span_levels, n]`: the cells of each key; -1 where it is in none. Returns their tables.

    `queries`: None where there are none; the partition may not ask for them then.
    """
    weights = None
    if queries is not None and partition.by_queries:
        weights = sizes_of_queries(queries, visible, layout, sizes.group)
    iterations = partition.iterations_or(KERNEL_ITERATIONS)
    counts = kmeans(keys, layout, iterations, partition.seed, None if sizes.segment else visible, cell_of, weights)
    return tabulate(keys, values, cell_of, moments_of(keys, values, cell_of, layout, counts), layout)


def forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    sizes: CellSizes,
    scale: float,
    partition: KMeans,
    output: Tensor,
    lse: Tensor,
    cell_of: Tensor,
    opened: Tensor,
    order: Tensor,
    beyond: float,
    known: Collection[str] = frozenset(),
    tables: Tables | None = None,
) -> None:
    """Fills in output and log-normaliser of queries `[entries, group * length, dim]`, and the plan: the cells of keys, the opened
    cells, and the order in which rows open them together, if it is not their own.

    `beyond`: see `memory_budget`. `known`: the names of parts of the plan that are there already. `tables`: of these
    cells, where they are known and have been made before.
    """
    if len(queries) > MOST_ENTRIES:
        for some in entry_parts(len(queries)):
            inputs = queries[some], keys[some], values[some], visible[some]
            results = output[some], lse[some], cell_of[some], opened[some], order[some]
            own = None if tables is None else tables.of(some)
            forward(*inputs, sizes, scale, partition, *results, beyond, known, own)
        return
    queries, scale = with_positive_scale(queries, scale)
    queries, keys, values = (dense(x) for x in (queries, keys, values))
    visible = as_read(visible)
    layout = layout_for(keys, sizes)
    if tables is None and "cell_of" in known:
        tables = tabulate(keys, values, cell_of, moments_of(keys, values, cell_of, layout), layout)
    elif tables is None:
        tables = cells_of(queries, keys, values, visible, sizes, layout, partition, cell_of)
    if sizes.share > 1:
        budget = memory_budget((queries, keys, values, output), (cell_of, opened, order, *vars(tables).values()), beyond)
        step = max(1, budget.parts // max(1, list_bytes(layout, sizes, opened.shape[1])))
        for first in range(0, len(queries), step):
            some = slice(first, min(first + step, len(queries)))
            query, sees, own_tables = queries[some], visible[some], tables.of(some)
            places = order[some] if sizes.ordered else sees
            if sizes.ordered and "order" not in known:
                order_for(query, own_tables, layout, sizes, scale, places)
            if "opened" in known:
                lists = lists_of(sees, own_tables, layout, sizes, opened[some])
            else:
                lists = lists_for(query, sees, places, own_tables, layout, sizes, scale, opened[some])
            own_keys, own_values, into = keys[some], values[some], (output[some], lse[some])
            attend(query, own_keys, own_values, sees, own_tables, layout, sizes, scale, places, lists, *into)
        return
    inputs, ours = (queries, keys, values, output), (cell_of, opened, visible)
    budget = memory_budget(inputs, (*ours, *vars(tables).values()), beyond)
    chosen = "opened" in known
    _closed_cells(queries, keys, values, visible, tables, layout, sizes, scale, opened, chosen, output, lse, budget)
    members, starts, cells = tables.order, tables.starts, tables.cells
    # Without the other tables there is more room for partial results.
    del tables
    budget = memory_budget(inputs, (*ours, members, starts), beyond)
    _opened_cells(queries, keys, values, members, starts, cells, sizes, scale, opened, output, lse, budget)


def order_for(queries: Tensor, tables: Tables, layout: Layout, sizes: CellSizes, scale: float, order: Tensor) -> None:
    """Fills in `order` `[entries, rows]`: see `order_rows`. `layout`: of the keys."""
    order_rows(queries, tables, _layout_of_rows(queries, sizes, max(1, layout.cells)), sizes, scale, order)


def _closed_cells(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    tables: Tables,
    layout: Layout,
    sizes: CellSizes,
    scale: float,
    opened: Tensor,
    chosen: bool,
    output: Tensor,
    lse: Tensor,
    budget: MemoryBudget,
) -> None:
    """Fills in the opened cells, unless they are `chosen`, and output and log-normaliser with what comes from everything else."""
    entries, rows, _ = queries.shape
    # There are no pairs yet: marks may take their memory too.
    units = units_of(entries, rows, 4 * layout.mark_words, budget.parts + budget.pairs)
    for part in map(units.slices, units.parts()):
        query, sees, own_tables = queries[part], visible[part], tables.of(part[0])
        if chosen:
            # Each row is a block; a part need not have as many of each member.
            marks = mark(opened[part], opened[part], query.shape[1], layout, sizes._replace(group=1))
        else:
            marks = route(query, sees, own_tables, layout, sizes, scale, opened[part])
        # A block of rows belongs to one head.
        members = sizes.group if query.shape[1] == rows else 1
        for own in [slice(0, rows)] if members > 1 else _within_heads(part[1], rows // sizes.group):
            inputs = query[:, own], keys[part[0]], values[part[0]], sees[:, own], own_tables
            into = output[part][:, own], lse[part][:, own]
            attend_rows(*inputs, layout, sizes, scale, marks[:, :, own], members, *into)
        del marks


def _within_heads(part: slice, length: int) -> Iterator[slice]:
    """The rows of a part, head by head, counted from its first row."""
    for piece in pieces_of(part, length):
        yield slice(piece.start - part.start, piece.stop - part.start)


def _opened_cells(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    order: Tensor,
    starts: Tensor,
    cells: int,
    sizes: CellSizes,
    scale: float,
    opened: Tensor,
    output: Tensor,
    lse: Tensor,
    budget: MemoryBudget,
) -> None:
    """Adds to output and log-normaliser what comes from opened cells, part by part. `order`, `starts`: see `Tables`."""
    entries, rows, slots = opened.shape
    value_dim, size = values.shape[2], near_forward_blocks(queries, values, sizes).rows
    per_row = slots * (value_dim * queries.element_size() + 4)
    units = units_of(entries, rows, per_row, budget.parts)
    for slab in slabs_of(units, group_bytes(units.size, slots, cells, size), budget.pairs):
        groups = group(opened, starts, cells, units, slice(slab[0].start, slab[-1].stop), size) if cells else None
        parts = queries.new_empty((units.together, units.size, slots, value_dim))
        parts_lse = torch.empty(parts.shape[:3], dtype=torch.float32, device=queries.device)
        for some in slab:
            if groups is not None:
                near_forward(queries, keys, values, order, sizes, groups, some, scale, parts, parts_lse)
            merge(parts, parts_lse, opened, units, some, output, lse)
        # Before the next pairs are grouped, which takes memory too.
        del groups, parts, parts_lse


def layout_for(keys: Tensor, sizes: CellSizes) -> Layout:
    """The layout of such keys. If a graph is being captured, it stays for good: the graph will read it."""
    return _kept(layout_of(keys.shape[1], sizes, keys.device))


def _layout_of_rows(queries: Tensor, sizes: CellSizes, cells: int) -> Layout:
    """The layout of the rows of one head, if they were keys in so many cells."""
    length = queries.shape[1] // sizes.group
    return _kept(layout_of(length, _one_span(length / cells), queries.device))


def _one_span(cell_size: float) -> CellSizes:
    """Sizes for cells alone. To get a given number of them, the number of keys per cell may have to be a fraction."""
    return CellSizes(group=1, segment=0, window=0, sinks=0, cell_size=cell_size, probes=1, samples=0)  # type: ignore[arg-type]


def _kept(layout: Layout) -> Layout:
    if layout.span_of_cell.is_cuda and torch.cuda.is_current_stream_capturing():
        layout.keep()
    return layout


def group_keys(keys: Tensor, cells: int, iterations: int, seed: int) -> Tensor:
    """The cell `[heads, n]` of each key `[heads, n, dim]`, one of at most `cells`: see `partition.build_cells`."""
    heads, length, _ = keys.shape
    keys, layout = dense(keys), one_span_layout(length, cells, keys.device)
    found = torch.empty(heads, 1, length, dtype=torch.int32, device=keys.device)
    with backends.device_guard(keys.device):
        for some in entry_parts(heads):
            beyond = torch.full((some.stop - some.start,), length, dtype=torch.int32, device=keys.device)
            limit_cell_sizes_(found[some], kmeans(keys[some], layout, iterations, seed, beyond, found[some]), layout)
    return found[:, 0]


# Not in the cache of `layout_of`: a cache asks for longer and longer segments, once for each layer of a model.
@lru_cache(maxsize=4)
def one_span_layout(length: int, cells: int, device: torch.device) -> Layout:
    """The layout of keys that are all in one span, of so many cells."""
    return layout_of.__wrapped__(length, _one_span(max(1.0, length / cells)), device)
