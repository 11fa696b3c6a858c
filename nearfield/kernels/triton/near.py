"""The near field on a GPU: (row, cell) pairs sorted by cell, each cell's keys against blocks of the rows that opened it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels.triton.common import padded, precision
from nearfield.kernels.triton.tables import Tables
from nearfield.kernels.triton.tuning import blocks_for


@dataclass(frozen=True)
class Groups:
    """The (row, slot) pairs of some rows, cell by cell, in blocks of rows. No number of it is known to the host."""

    pair: Tensor
    """`[rows * slots]`: pairs in the order of their cells"""
    first: Tensor
    """`[cells + 1]`: where the pairs of each cell begin"""
    block_edges: Tensor
    """`[cells + 1]`: the first block of each cell"""
    block_cell: Tensor
    """`[blocks]`: the cell of each block, `cells` for those that are not needed"""
    block_rows: int


def group(opened: Tensor, cells: int, block_rows: int) -> Groups:
    """Group the pairs of `opened` `[entries, rows, slots]` by cell; cells are counted on over the entries."""
    entries, device = len(opened), opened.device
    last = entries * cells
    number = torch.arange(entries, device=device, dtype=torch.int32)[:, None, None] * cells
    narrow = torch.int16 if last < 2**15 - 1 else torch.int32
    # Pairs without a cell go last.
    cell, pair = torch.where(opened < 0, last, opened + number).to(narrow).view(-1).sort(stable=True)
    first = torch.searchsorted(cell, torch.arange(last + 1, device=device, dtype=narrow)).int()
    blocks = first.new_zeros(last + 1)
    blocks[1:] = ((first.diff() + block_rows - 1) // block_rows).cumsum(0)
    most = -(-opened.numel() // block_rows) + last
    block_cell = torch.searchsorted(blocks[1:], torch.arange(most, device=device, dtype=torch.int32), right=True).int()
    return Groups(pair.int(), first, blocks, block_cell, block_rows)


@triton.jit
def _near(
    queries,
    keys,
    values,
    order,
    starts,
    pair,
    first,
    block_edges,
    block_cell,
    output,
    lse,
    rows,
    entries,
    cells,
    slots,
    dim,
    value_dim,
    query_entry,
    query_row,
    key_entry,
    key_row,
    value_entry,
    value_row,
    scale,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
):
    """Output and log2-normaliser of up to BM pairs of one cell."""
    block = tl.program_id(0)
    cell = tl.load(block_cell + block)
    if cell >= entries * cells:
        return
    entry = (cell // cells).to(tl.int64)
    queries += entry * query_entry
    keys += entry * key_entry
    values += entry * value_entry
    begin = tl.load(first + cell) + (block - tl.load(block_edges + cell)) * BM
    lane = begin + tl.arange(0, BM)
    there = lane < tl.load(first + cell + 1)
    own = tl.load(pair + lane, mask=there, other=0).to(tl.int64)
    row = own // slots - entry * rows
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    top = tl.full([BM], -float("inf"), tl.float32)
    mass = tl.zeros([BM], tl.float32)
    total = tl.zeros([BM, BV], tl.float32)
    last = tl.load(starts + cell + 1)
    for start in range(tl.load(starts + cell), last, BN):
        member = start + tl.arange(0, BN)
        real = member < last
        position = tl.load(order + member, mask=real, other=0).to(tl.int64)
        key = tl.load(keys + position[None, :] * key_row + column[:, None], mask=real[None, :] & wide[:, None], other=0.0)
        logit = tl.dot(query, key, input_precision=IP) * scale
        logit = tl.where(real[None, :], logit, -float("inf"))
        new = tl.maximum(top, tl.max(logit, 1))
        weight = tl.exp2(logit - new[:, None])
        shrink = tl.exp2(top - new)
        mass = mass * shrink + tl.sum(weight, 1)
        value = tl.load(
            values + position[:, None] * value_row + value_column[None, :], mask=real[:, None] & value_wide[None, :], other=0.0
        )
        total = total * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=IP)
        top = new
    own += own // slots  # there is one more slot, for what is not opened
    tl.store(lse + own, top + tl.log2(mass), mask=there)
    result = (total / mass[:, None]).to(output.dtype.element_ty)
    tl.store(output + own[:, None] * value_dim + value_column[None, :], result, mask=there[:, None] & value_wide[None, :])


def near(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tables,
    cells: int,
    opened: Tensor,
    scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Fills in `output` `[entries, rows, slots + 1, value_dim]` and log2-normalisers for each opened cell."""
    entries, rows, slots = opened.shape
    dim, value_dim = queries.shape[2], values.shape[2]
    blocks = blocks_for("near", max(dim, value_dim), queries.dtype)
    groups = group(opened, cells, blocks.rows)
    _near[(len(groups.block_cell),)](
        queries,
        keys,
        values,
        tables.order,
        tables.starts,
        groups.pair,
        groups.first,
        groups.block_edges,
        groups.block_cell,
        output,
        lse,
        rows,
        entries,
        cells,
        slots,
        dim,
        value_dim,
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        scale * math.log2(math.e),
        BM=groups.block_rows,
        BN=blocks.keys,
        BD=padded(dim),
        BV=padded(value_dim),
        IP=precision(queries.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
