"""The near field on a GPU: (row, cell) pairs grouped by cell, each cell's keys against blocks of the rows that opened it."""

from __future__ import annotations

import math
from functools import partial

import triton.language as tl
from torch import Tensor

from nearfield.kernels.cells_plan import CellSettings
from nearfield.kernels.triton.common import padded, precision
from nearfield.kernels.triton.group import Groups, block_at
from nearfield.kernels.triton.launch import Kernel
from nearfield.kernels.triton.tables import Tables
from nearfield.kernels.triton.tuning import Blocks, blocks_for


@partial(Kernel, varied=("first_entry", "beyond"))
def _near(
    queries,
    keys,
    values,
    order,
    blocks,
    edges,
    pair,
    output,
    lse,
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
    scale,
    SLOTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
):
    """Output and log2-normaliser of up to BM pairs of one cell, for the entries from the first one on up to `beyond`."""
    cell, begin, end, start_key, stop_key = block_at(blocks, edges, first_entry * cells)
    if (begin >= end) | (cell >= beyond * cells):
        return
    entry = (cell // cells).to(tl.int64)
    queries += entry * query_entry
    keys += entry * key_entry
    values += entry * value_entry
    lane = begin + tl.arange(0, BM)
    there = lane < end
    own = tl.load(pair + lane, mask=there, other=0)
    row = (own // SLOTS).to(tl.int64) - entry * rows
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    top = tl.full([BM], -float("inf"), tl.float32)
    mass = tl.zeros([BM], tl.float32)
    total = tl.zeros([BM, BV], tl.float32)
    for start in range(start_key, stop_key, BN):
        member = start + tl.arange(0, BN)
        real = member < stop_key
        position = tl.load(order + member, mask=real, other=0).to(tl.int64)
        key = tl.load(keys + position[None, :] * key_row + column[:, None], mask=real[None, :] & wide[:, None], other=0.0)
        product = tl.where(real[None, :], tl.dot(query, key, input_precision=IP), -float("inf"))
        new = tl.maximum(top, tl.max(product, 1) * scale)
        weight = tl.exp2(product * scale - new[:, None])
        shrink = tl.exp2(top - new)
        mass = mass * shrink + tl.sum(weight, 1)
        value = tl.load(
            values + position[:, None] * value_row + value_column[None, :], mask=real[:, None] & value_wide[None, :], other=0.0
        )
        total = total * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=IP)
        top = new
    own = own.to(tl.int64) - first_entry.to(tl.int64) * rows * SLOTS
    tl.store(lse + own, top + tl.log2(mass), mask=there)
    result = (total / mass[:, None]).to(output.dtype.element_ty)
    tl.store(output + own[:, None] * value_dim + value_column[None, :], result, mask=there[:, None] & value_wide[None, :])


def near(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tables,
    settings: CellSettings,
    groups: Groups,
    some: slice,
    scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Fills in `output` `[some entries, rows, slots, value_dim]` and log2-normalisers for each opened cell."""
    entries, rows, slots, value_dim = output.shape
    dim = queries.shape[2]
    blocks = near_blocks(queries, values, settings)
    _near[(groups.most(entries, rows, slots, tables.cells),)](
        queries,
        keys,
        values,
        tables.order,
        groups.blocks,
        groups.edges,
        groups.pair,
        output,
        lse,
        some.start,
        some.stop,
        rows,
        tables.cells,
        dim,
        value_dim,
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        scale * math.log2(math.e),
        SLOTS=slots,
        BM=blocks.rows,
        BN=blocks.keys,
        BD=padded(dim),
        BV=padded(value_dim),
        IP=precision(queries.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def near_blocks(queries: Tensor, values: Tensor, settings: CellSettings) -> Blocks:
    """How the pairs are to be grouped."""
    return blocks_for("near", max(queries.shape[2], values.shape[2]), queries.dtype, settings.cell_size)
