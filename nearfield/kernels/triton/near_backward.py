"""Gradients through the keys of opened cells on a GPU. Every weight is computed again from the row's normaliser."""

from __future__ import annotations

from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from nearfield.kernels.cells_plan import CellSettings
from nearfield.kernels.triton.common import padded, precision
from nearfield.kernels.triton.group import Groups, block_at, group
from nearfield.kernels.triton.launch import Kernel
from nearfield.kernels.triton.layout import Layout
from nearfield.kernels.triton.rows import Rows
from nearfield.kernels.triton.tables import Tables
from nearfield.kernels.triton.tuning import Blocks, blocks_for


@Kernel
def _near_keys(
    queries,
    keys,
    values,
    grads,
    lse,
    delta,
    order,
    starts,
    pair,
    first,
    block_edges,
    block_cell,
    key_grad,
    value_grad,
    rows,
    entries,
    cells,
    length,
    dim,
    value_dim,
    query_entry,
    query_row,
    key_entry,
    key_row,
    value_entry,
    value_row,
    grad_entry,
    grad_row,
    row_entry,
    scale,
    least,
    beyond,
    SLOTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
):
    """Of one block of the keys of a cell (number least..beyond of its entry), over all rows that opened it."""
    LOG2E: tl.constexpr = 1.4426950408889634
    block = tl.program_id(0)
    cell = tl.load(block_cell + block)
    if cell >= entries * cells:
        return
    own_cell = cell % cells
    begin_row, last = tl.load(first + cell), tl.load(first + cell + 1)
    if (own_cell < least) | (own_cell >= beyond) | (begin_row >= last):
        return
    entry = (cell // cells).to(tl.int64)
    queries += entry * query_entry
    grads += entry * grad_entry
    lse += entry * row_entry
    delta += entry * row_entry
    begin = tl.load(starts + cell) + (block - tl.load(block_edges + cell)) * BN
    member = begin + tl.arange(0, BN)
    real = member < tl.load(starts + cell + 1)
    position = tl.load(order + member, mask=real, other=0).to(tl.int64)
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    key = tl.load(
        keys + entry * key_entry + position[:, None] * key_row + column[None, :], mask=real[:, None] & wide[None, :], other=0.0
    )
    value = tl.load(
        values + entry * value_entry + position[:, None] * value_row + value_column[None, :],
        mask=real[:, None] & value_wide[None, :],
        other=0.0,
    )
    to_key = tl.zeros([BN, BD], tl.float32)
    to_value = tl.zeros([BN, BV], tl.float32)
    for start in range(begin_row, last, BM):
        lane = start + tl.arange(0, BM)
        there = lane < last
        row = (tl.load(pair + lane, mask=there, other=0) // SLOTS).to(tl.int64) - entry * rows
        query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
        grad = tl.load(
            grads + row[:, None] * grad_row + value_column[None, :], mask=there[:, None] & value_wide[None, :], other=0.0
        )
        ended = tl.load(lse + row, mask=there, other=float("inf"))
        product = tl.load(delta + row, mask=there, other=0.0)
        logit = tl.dot(key, tl.trans(query), input_precision=IP) * scale - ended[None, :]
        weight = tl.where(real[:, None], tl.exp2(tl.minimum(logit * LOG2E, 0.0)), 0.0)
        to_value += tl.dot(weight.to(grad.dtype), grad, input_precision=IP)
        slope = weight * (tl.dot(value, tl.trans(grad), input_precision=IP) - product[None, :])
        to_key += tl.dot(slope.to(query.dtype), query, input_precision=IP)
    place = entry * length + position
    into, mask = key_grad + place[:, None] * dim + column[None, :], real[:, None] & wide[None, :]
    tl.atomic_add(into, to_key * scale, mask=mask, sem="relaxed")
    into, mask = value_grad + place[:, None] * value_dim + value_column[None, :], real[:, None] & value_wide[None, :]
    tl.atomic_add(into, to_value, mask=mask, sem="relaxed")


@partial(Kernel, varied=("first_entry", "beyond"))
def _near_queries(
    queries,
    keys,
    values,
    grads,
    lse,
    delta,
    order,
    blocks,
    edges,
    pair,
    output,
    first_entry,
    beyond,
    rows,
    cells,
    dim,
    value_dim,
    query_entry,
    query_row,
    key_entry,
    key_row,
    value_entry,
    value_row,
    grad_entry,
    grad_row,
    row_entry,
    scale,
    SLOTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
):
    """Of up to BM (row, cell) pairs of one cell: what the cell's keys add to the gradient of the query. For some entries."""
    LOG2E: tl.constexpr = 1.4426950408889634
    cell, begin, end, start_key, stop_key = block_at(blocks, edges, first_entry * cells)
    if (begin >= end) | (cell >= beyond * cells):
        return
    entry = (cell // cells).to(tl.int64)
    queries += entry * query_entry
    keys += entry * key_entry
    values += entry * value_entry
    grads += entry * grad_entry
    lse += entry * row_entry
    delta += entry * row_entry
    lane = begin + tl.arange(0, BM)
    there = lane < end
    own = tl.load(pair + lane, mask=there, other=0)
    row = (own // SLOTS).to(tl.int64) - entry * rows
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    grad = tl.load(grads + row[:, None] * grad_row + value_column[None, :], mask=there[:, None] & value_wide[None, :], other=0.0)
    ended = tl.load(lse + row, mask=there, other=float("inf"))
    product = tl.load(delta + row, mask=there, other=0.0)
    total = tl.zeros([BM, BD], tl.float32)
    for start in range(start_key, stop_key, BN):
        member = start + tl.arange(0, BN)
        real = member < stop_key
        position = tl.load(order + member, mask=real, other=0).to(tl.int64)
        key = tl.load(keys + position[:, None] * key_row + column[None, :], mask=real[:, None] & wide[None, :], other=0.0)
        value = tl.load(
            values + position[:, None] * value_row + value_column[None, :], mask=real[:, None] & value_wide[None, :], other=0.0
        )
        logit = tl.dot(query, tl.trans(key), input_precision=IP) * scale - ended[:, None]
        weight = tl.where(real[None, :], tl.exp2(tl.minimum(logit * LOG2E, 0.0)), 0.0)
        slope = weight * (tl.dot(grad, tl.trans(value), input_precision=IP) - product[:, None])
        total += tl.dot(slope.to(key.dtype), key, input_precision=IP)
    result = (total * scale).to(output.dtype.element_ty)
    own = own.to(tl.int64) - first_entry.to(tl.int64) * rows * SLOTS
    tl.store(output + own[:, None] * dim + column[None, :], result, mask=there[:, None] & wide[None, :])


def near_keys(
    rows: Rows,
    keys: Tensor,
    values: Tensor,
    tables: Tables,
    settings: CellSettings,
    opened: Tensor,
    scale: float,
    key_grad: Tensor,
    value_grad: Tensor,
    heights: list[tuple[int, int]],
    stable: Layout | None,
) -> None:
    """Add to the gradients `[entries, n, ...]` (float32) of keys and values. One launch for each range of cells in `heights`."""
    entries, length, dim = keys.shape
    value_dim = values.shape[2]
    blocks = blocks_for("near_keys", max(dim, value_dim), keys.dtype, settings.cell_size)
    groups = group(opened, tables, blocks.rows, stable=stable)
    edges, of_block = key_blocks(tables.starts, tables.order.numel(), blocks.keys)
    for least, beyond in heights:
        _near_keys[(of_block.shape[0],)](
            rows.queries,
            keys,
            values,
            rows.grads,
            rows.lse,
            rows.delta,
            tables.order,
            tables.starts,
            groups.pair,
            groups.first,
            edges,
            of_block,
            key_grad,
            value_grad,
            rows.count,
            entries,
            tables.cells,
            length,
            dim,
            value_dim,
            *rows.queries.stride()[:2],
            *keys.stride()[:2],
            *values.stride()[:2],
            *rows.grads.stride()[:2],
            rows.lse.stride(0),
            scale,
            least,
            beyond,
            SLOTS=opened.shape[2],
            BM=blocks.rows,
            BN=blocks.keys,
            BD=padded(dim),
            BV=padded(value_dim),
            IP=precision(keys.dtype),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


def key_blocks(starts: Tensor, members: int, size: int) -> tuple[Tensor, Tensor]:
    """The first block of `size` keys of each cell, and the cell of each block."""
    edges = torch.zeros_like(starts)
    edges[1:] = ((starts.diff() + size - 1) // size).cumsum(0)
    most = -(-members // size) + starts.shape[0] - 1
    block = torch.arange(most, device=starts.device, dtype=torch.int32)
    return edges, torch.searchsorted(edges[1:], block, right=True).int()


def near_queries(
    rows: Rows,
    keys: Tensor,
    values: Tensor,
    tables: Tables,
    settings: CellSettings,
    groups: Groups,
    some: slice,
    scale: float,
    output: Tensor,
) -> None:
    """Fills in `output` `[some entries, rows, slots, dim]`; undefined where no cell was opened."""
    entries, count, slots, dim = output.shape
    value_dim = values.shape[2]
    blocks = query_blocks(keys, values, settings)
    _near_queries[(groups.most(entries, count, slots, tables.cells),)](
        rows.queries,
        keys,
        values,
        rows.grads,
        rows.lse,
        rows.delta,
        tables.order,
        groups.blocks,
        groups.edges,
        groups.pair,
        output,
        some.start,
        some.stop,
        count,
        tables.cells,
        dim,
        value_dim,
        *rows.queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        *rows.grads.stride()[:2],
        rows.lse.stride(0),
        scale,
        SLOTS=slots,
        BM=blocks.rows,
        BN=blocks.keys,
        BD=padded(dim),
        BV=padded(value_dim),
        IP=precision(keys.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def query_blocks(keys: Tensor, values: Tensor, settings: CellSettings) -> Blocks:
    """How the pairs are to be grouped."""
    return blocks_for("near_queries", max(keys.shape[2], values.shape[2]), keys.dtype, settings.cell_size)
