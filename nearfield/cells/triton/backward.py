"""The gradient of the cells engine on a GPU: what to launch, on what, in which order."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nearfield.cells.sizes import CellSizes, MemoryPolicy
from nearfield.cells.triton.far import far_dcross, far_dmoments, far_dq
from nearfield.cells.triton.forward import layout_for
from nearfield.cells.triton.layout import Layout, as_read
from nearfield.cells.triton.local import BackwardRows, backward_rows, first_positions, first_sees, local_dkv, local_dq
from nearfield.cells.triton.memory import MOST_ENTRIES, entry_parts, memory_budget, slabs_of, units_of
from nearfield.cells.triton.moments import Tables, member_grads, moments_dkv, moments_of, tabulate
from nearfield.cells.triton.near import group, group_bytes, near_dkv, near_dq, near_dq_blocks
from nearfield.cells.triton.route import mark
from nearfield.cells.triton.share import list_bytes, list_keys, listed_dq
from nearfield.kernels.launch import dense
from nearfield.kernels.tensors import cast_
from nearfield.problem import with_positive_scale

LEAST_BACKWARD_BYTES = 256 << 20

SPLITS = 4
"""Kernels that go over cells take the rows in this many shares: enough programs to fill a card."""


def backward(
    do: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    output: Tensor,
    lse: Tensor,
    cell_of: Tensor,
    opened: Tensor,
    order: Tensor,
    sizes: CellSizes,
    scale: float,
    lse_grad: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of queries, keys and values from those of the output and the lse, the plan held fixed."""
    if len(queries) > MOST_ENTRIES:
        found = []
        for some in entry_parts(len(queries)):
            inputs = do[some], queries[some], keys[some], values[some], visible[some], output[some], lse[some]
            own_lse_grad = None if lse_grad is None else lse_grad[some]
            found.append(backward(*inputs, cell_of[some], opened[some], order[some], sizes, scale, own_lse_grad))
        return tuple(torch.cat(parts) for parts in zip(*found, strict=True))
    deterministic = torch.are_deterministic_algorithms_enabled()
    sign = 1.0 if scale > 0 else -1.0 if scale else 0.0
    queries, scale = with_positive_scale(queries, scale)
    do, queries, keys, values = (dense(x) for x in (do, queries, keys, values))
    visible = as_read(visible)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (queries, keys, values))
    layout = layout_for(keys, sizes)
    rows = backward_rows(queries, visible, first_sees(visible, sizes), output, lse, do)
    if lse_grad is not None:
        rows.delta.sub_(lse_grad)
    # First, so that it keeps the device busy while many small kernels are launched.
    local_dq(rows, keys, values, layout, sizes, scale, dq)
    # The first row with at least 0, 1, 2, ... closed segments.
    positions = rows.count // sizes.group
    row_starts = first_positions(rows.visible, positions, layout.row_start_needs(sizes.window), sizes.share)
    moments = moments_of(keys, values, cell_of, layout)
    tables = tabulate(keys, values, cell_of, moments, layout)
    far_mass, tilt_delta = torch.empty_like(rows.delta), torch.empty_like(rows.delta)
    widths = queries.shape[2], queries.shape[2], values.shape[2]
    moment_grads = [
        torch.empty(SPLITS, len(keys), layout.cells, width, dtype=torch.float32, device=keys.device) for width in widths
    ]
    for part in _entries(4 * rows.count * layout.mark_words, (queries, keys, values)):
        own, own_tables = rows.part(part, slice(None)), tables.of(part)
        marks = mark(opened[part], order[part], rows.count, layout, sizes)
        into = dq[part], far_mass[part], tilt_delta[part]
        given = own, keys[part], values[part], own_tables, layout, sizes, scale
        if sizes.share > 1:
            _dq_of_lists(*given, opened[part], order[part], marks, *into)
        else:
            _dq_of_cells(*given, opened[part], marks, *into)
        dcentroid, dvariance, dvalue = (x[:, part] for x in moment_grads)
        starts = row_starts[part]
        far_dmoments(own, own_tables, layout, sizes, scale, marks, tilt_delta[part], starts, (dcentroid, dvariance, dvalue))
        del marks, dcentroid, dvariance, dvalue
    dcross = far_dcross(rows, tables, layout, sizes, scale, far_mass, row_starts)
    grads = member_grads(moments, layout, (moment_grads[0], moment_grads[1], moment_grads[2]), dcross)
    del moments, moment_grads, dcross
    sums_and_pairs = 4 * (keys[0].numel() + values[0].numel()) + 4 * opened[0].numel()
    for part in _entries(sums_and_pairs, (queries, keys, values)):
        own, own_keys, own_values = rows.part(part, slice(None)), keys[part], values[part]
        own_dk, own_dv = (torch.empty(x.shape, dtype=torch.float32, device=x.device) for x in (own_keys, own_values))
        moments_dkv(own_keys, own_values, cell_of[part], layout, grads.of(part), own_dk, own_dv)
        local_dkv(own, own_keys, own_values, layout, sizes, scale, row_starts[part], own_dk, own_dv, deterministic)
        near_dkv(
            own,
            own_keys,
            own_values,
            tables.of(part),
            sizes,
            opened[part],
            order[part],
            scale,
            own_dk,
            own_dv,
            members=layout.members,
            # A key is in one cell of each level at most: level by level, no two programs add to the same place.
            cell_ranges=layout.level_cells if deterministic else [(0, layout.cells)],
            stable=layout if deterministic else None,
        )
        cast_(dk[part], own_dk)
        cast_(dv[part], own_dv)
    return dq if sign == 1.0 else dq * sign, dk, dv


def _entries(per_entry: int, inputs: tuple[Tensor, ...]) -> Iterator[slice]:
    """Entries of the batch in parts that take no more memory than half of the inputs, at `per_entry` bytes each."""
    entries, step = len(inputs[0]), max(1, max(LEAST_BACKWARD_BYTES, _bytes(inputs) // 2) // max(1, per_entry))
    for start in range(0, entries, step):
        yield slice(start, min(start + step, entries))


def _bytes(tensors: tuple[Tensor, ...]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _dq_of_cells(
    rows: BackwardRows,
    keys: Tensor,
    values: Tensor,
    tables: Tables,
    layout: Layout,
    sizes: CellSizes,
    scale: float,
    opened: Tensor,
    marks: Tensor,
    dq: Tensor,
    far_mass: Tensor,
    tilt_delta: Tensor,
) -> None:
    """Adds to `dq` what comes from opened and closed cells, part by part; for the rest see `far_dq`. Rows open cells by
    themselves."""
    entries, count, slots = opened.shape
    dim = keys.shape[2]
    per_row = slots * dim * keys.element_size()
    budget = memory_budget((rows.queries, rows.do, keys, values), (), MemoryPolicy().beyond)
    units, size = units_of(entries, count, per_row, budget.parts), near_dq_blocks(keys, values, sizes).rows
    for slab in slabs_of(units, group_bytes(units.size, slots, tables.cells, size), budget.pairs):
        groups = None
        if tables.cells:
            groups = group(opened, tables.starts, tables.cells, units, slice(slab[0].start, slab[-1].stop), size)
        parts = keys.new_empty((units.together, units.size, slots, dim))
        for some in slab:
            if groups is not None:
                near_dq(rows, keys, values, tables.order, sizes, groups, some, scale, parts)
            part = units.slices(some)
            into = [x[part] for x in (dq, far_mass, tilt_delta)]
            own_tables, own_marks = tables.of(part[0]), marks[part[0], :, part[1]]
            far_dq(rows.part(*part), own_tables, layout, sizes, scale, opened[part], own_marks, parts, *into)
        del groups, parts


def _dq_of_lists(
    rows: BackwardRows,
    keys: Tensor,
    values: Tensor,
    tables: Tables,
    layout: Layout,
    sizes: CellSizes,
    scale: float,
    opened: Tensor,
    order: Tensor,
    marks: Tensor,
    dq: Tensor,
    far_mass: Tensor,
    tilt_delta: Tensor,
) -> None:
    """The same where rows open cells together."""
    dim = keys.shape[2]
    per_entry = list_bytes(layout, sizes, opened.shape[1]) + rows.count * dim * keys.element_size()
    budget = memory_budget((rows.queries, rows.do, keys, values), (), MemoryPolicy().beyond)
    step = max(1, budget.parts // max(1, per_entry))
    for first in range(0, len(keys), step):
        some = slice(first, min(first + step, len(keys)))
        own, own_tables, own_opened = rows.part(some, slice(None)), tables.of(some), opened[some]
        lists = list_keys(own.visible, own_tables, layout, sizes, own_opened, 0)
        parts = keys.new_empty((len(own_opened), rows.count, 1, dim))
        listed_dq(own, keys[some], values[some], sizes, order[some], lists, scale, parts)
        into = dq[some], far_mass[some], tilt_delta[some]
        far_dq(own, own_tables, layout, sizes, scale, own_opened, marks[some], parts, *into)
        del lists, parts
