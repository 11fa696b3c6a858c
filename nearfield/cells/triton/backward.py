"""The gradient of the cells engine on a GPU: what to launch, on what, in which order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nearfield.cells.sizes import CellSizes
from nearfield.cells.spans import closed_keys
from nearfield.cells.triton.far import far_cells, far_queries, tilt
from nearfield.cells.triton.forward import layout_for, upright
from nearfield.cells.triton.layout import Layout
from nearfield.cells.triton.local import Rows, local_keys, local_queries, rows_of
from nearfield.cells.triton.memory import BEYOND, MOST_ENTRIES, entry_parts, room_for, slabs_of
from nearfield.cells.triton.moments import Tables, moments_of, spread, tabulate
from nearfield.cells.triton.near import group, near_keys, near_queries, query_blocks
from nearfield.cells.triton.route import mark
from nearfield.kernels.launch import dense

LEAST_BACKWARD_BYTES = 256 << 20

SPLITS = 4
"""Shares of the rows that kernels per cell are given to: enough programs to fill a card."""


def backward(
    output_grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    output: Tensor,
    lse: Tensor,
    cell_of: Tensor,
    opened: Tensor,
    sizes: CellSizes,
    scale: float,
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values, the plan held fixed."""
    if len(queries) > MOST_ENTRIES:
        found = []
        for some in entry_parts(len(queries)):
            inputs = output_grad[some], queries[some], keys[some], values[some], visible[some], output[some], lse[some]
            found.append(backward(*inputs, cell_of[some], opened[some], sizes, scale))
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
    deterministic = torch.are_deterministic_algorithms_enabled()
    factor = 1.0 if scale > 0 else -1.0 if scale else 0.0
    queries, scale = upright(queries, scale)
    output_grad, queries, keys, values = (dense(x) for x in (output_grad, queries, keys, values))
    visible = visible.to(torch.int32).contiguous()
    grads = tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (queries, keys, values))
    layout = layout_for(keys, sizes)
    rows = rows_of(queries, visible, output, lse, output_grad)
    # First, and not last: it keeps the device busy while many small kernels are started.
    local_queries(rows, keys, values, layout, sizes, scale, grads[0])
    row_starts = _row_starts(rows.visible, layout, sizes)
    moments = moments_of(keys, values, cell_of, layout)
    tables = tabulate(keys, values, moments, layout)
    far_mass, along = torch.empty_like(rows.delta), torch.empty_like(rows.delta)
    found = []
    for part in _entries(4 * rows.count * layout.words, (queries, keys, values)):
        own, own_tables = rows.part(part, slice(None)), tables.of(part)
        marks = mark(opened[part], own.visible, layout, sizes)
        pulls = grads[0][part], far_mass[part], along[part]
        _queries(own, keys[part], values[part], own_tables, layout, sizes, scale, opened[part], marks, *pulls)
        found.append(far_cells(own, own_tables, layout, sizes, scale, marks, along[part], row_starts[part], SPLITS))
        del marks
    centroid_grad, variance_grad, mean_grad = (torch.cat(x) if len(x) > 1 else x[0] for x in zip(*found, strict=True))
    del found
    covariance_grad = tilt(rows, layout, sizes, scale, far_mass, row_starts).div_(tables.pooled[:, 1:, None, None])
    cross_grad = torch.matmul(layout.seen[1:].T, covariance_grad.flatten(2)).unflatten(2, covariance_grad.shape[2:])
    sums_and_pairs = 4 * (keys[0].numel() + values[0].numel()) + 4 * opened[0].numel()
    for part in _entries(sums_and_pairs, (queries, keys, values)):
        own_keys, own_values = keys[part], values[part]
        key_grad, value_grad = (torch.empty(x.shape, device=x.device) for x in (own_keys, own_values))
        own_grads = centroid_grad[part], variance_grad[part], mean_grad[part], cross_grad[part]
        spread(own_keys, own_values, cell_of[part], moments.of(part), layout, own_grads, key_grad, value_grad)
        own = rows.part(part, slice(None))
        starts = row_starts[part]
        local_keys(own, own_keys, own_values, layout, sizes, scale, starts, key_grad, value_grad, deterministic)
        near_keys(
            own,
            own_keys,
            own_values,
            tables.of(part),
            sizes,
            opened[part],
            scale,
            key_grad,
            value_grad,
            layout.level_cells if deterministic else [(0, layout.cells)],
            layout if deterministic else None,
        )
        grads[1][part].copy_(key_grad)
        grads[2][part].copy_(value_grad)
    return (grads[0] if factor == 1.0 else grads[0] * factor, *grads[1:])


def _entries(per_entry: int, inputs: tuple[Tensor, ...]) -> Iterator[slice]:
    """Entries of the batch for which so many bytes each take no more memory than half of the inputs."""
    entries, step = len(inputs[0]), max(1, max(LEAST_BACKWARD_BYTES, _bytes(inputs) // 2) // max(1, per_entry))
    for start in range(0, entries, step):
        yield slice(start, min(start + step, entries))


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _row_starts(visible: Tensor, layout: Layout, sizes: CellSizes) -> Tensor:
    """`[entries, segments + 2]`: the first position with at least 0, 1, 2, ... closed segments."""
    positions = visible.shape[1] // sizes.group
    sees = visible[:, :positions]
    closed = closed_keys(sees, sizes) // layout.segment if sizes.segment else (sees > 0).to(visible.dtype)
    numbers = torch.arange(layout.segments + 2, device=visible.device, dtype=closed.dtype)
    return torch.searchsorted(closed.contiguous(), numbers.expand(len(visible), -1).contiguous()).int()


def _queries(
    rows: Rows,
    keys: Tensor,
    values: Tensor,
    tables: Tables,
    layout: Layout,
    sizes: CellSizes,
    scale: float,
    opened: Tensor,
    marks: Tensor,
    query_grad: Tensor,
    far_mass: Tensor,
    along: Tensor,
) -> None:
    """Adds to the gradient of queries, part by part."""
    entries, count, slots = opened.shape
    dim = keys.shape[2]
    per_row = slots * dim * keys.element_size()
    room = room_for((rows.queries, rows.grads, keys, values), (), BEYOND)
    for slab in slabs_of(entries, count, slots, per_row, room):
        own, found = rows.part(slab.entries, slab.rows), opened[slab.entries, slab.rows]
        own_keys, own_values, own_tables = keys[slab.entries], values[slab.entries], tables.of(slab.entries)
        own_marks = marks[slab.entries, slab.rows]
        into = [x[slab.entries, slab.rows] for x in (query_grad, far_mass, along)]
        groups = group(found, own_tables, query_blocks(keys, values, sizes).rows)
        for some in slab.parts:
            pieces = keys.new_empty((some.stop - some.start, *found.shape[1:], dim))
            near_queries(own, own_keys, own_values, own_tables, sizes, groups, some, scale, pieces)
            one, tables_of_one = own.part(some, slice(None)), own_tables.of(some)
            bits = own_marks[some].contiguous()
            pulls = [x[some] for x in into]
            far_queries(one, tables_of_one, layout, sizes, scale, found[some], bits, pieces, *pulls)
