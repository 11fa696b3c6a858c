"""The near field on a GPU: (row, cell) pairs grouped by cell, each cell's keys against blocks of the rows that opened it.

Forward, merge, dq, dk and dv.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells.sizes import CellSizes
from nearfield.cells.triton.cluster import pack_cells, sort_by_cell
from nearfield.cells.triton.layout import Layout
from nearfield.cells.triton.local import BackwardRows
from nearfield.cells.triton.moments import Tables
from nearfield.cells.triton.tuning import TileSizes, blocks_for
from nearfield.kernels.launch import LN2, LOG2E, Kernel, cdiv, padded, precision, strides

NUMBERS_PER_BLOCK = 8
"""Numbers per block in `Groups.blocks`; a power of two, so that they are loaded together."""

PAIRS_PER_PROGRAM = 1024


@dataclass(frozen=True)
class Groups:
    """The (row, slot) pairs of some rows, cell by cell, in blocks. A pair is numbered (entry * rows + row) * slots + slot."""

    pair: Tensor
    """`[entries * rows * slots]`: pairs in the order of their cells"""
    first: Tensor
    """`[entries * cells + 1]`: where the pairs of each cell begin"""
    edges: Tensor
    """`[entries * cells + 1]`: the first block of each cell"""
    blocks: Tensor
    """`[most, 8]`: cell, first pair, one after the last; first key of the cell in `Tables.order`, one after the last. Blocks that
    are not needed are empty."""
    size: int
    """of a block"""

    def most(self, entries: int, rows: int, slots: int, cells: int) -> int:
        """The most blocks that the pairs of some entries can take."""
        return cdiv(entries * rows * slots, self.size) + entries * cells


@triton.jit
def block_at(blocks, edges, first_cell):
    """The block of a program, counted from the first one of a cell: what `Groups.blocks` says of it."""
    at = blocks + (tl.load(edges + first_cell) + tl.program_id(0)).to(tl.int64) * 8
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4)


@Kernel
def _count_pairs(opened, counts, per_entry, cells, opened_entry, BP: tl.constexpr):
    """How many pairs there are of each cell."""
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    cell = tl.load(opened + entry * opened_entry + lane, mask=lane < per_entry, other=-1)
    tl.atomic_add(counts + entry * cells + cell, 1, mask=cell >= 0, sem="relaxed")


@Kernel
def _scan_counts(counts, first, edges, total, size, BC: tl.constexpr):
    """Running sums of the counts and of the blocks of `size` they take. Overwrites `counts` with where the next pair goes."""
    pairs = 0
    blocks = 0
    for start in range(0, total, BC):
        cell = start + tl.arange(0, BC)
        own = tl.load(counts + cell, mask=cell < total, other=0)
        need = (own + size - 1) // size
        ends = tl.cumsum(own, 0)
        block_ends = tl.cumsum(need, 0)
        tl.store(first + cell, pairs + ends - own, mask=cell < total)
        tl.store(counts + cell, pairs + ends - own, mask=cell < total)
        tl.store(edges + cell, blocks + block_ends - need, mask=cell < total)
        pairs += tl.sum(own, 0)
        blocks += tl.sum(need, 0)
    tl.store(first + total, pairs)
    tl.store(edges + total, blocks)


@Kernel
def _place_pairs(opened, places, pair, per_entry, cells, opened_entry, BP: tl.constexpr):
    """Each pair goes to the next place of its cell."""
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    cell = tl.load(opened + entry * opened_entry + lane, mask=lane < per_entry, other=-1)
    place = tl.atomic_add(places + entry * cells + cell, 1, mask=cell >= 0, sem="relaxed")
    tl.store(pair + place, (entry * per_entry + lane).to(tl.int32), mask=cell >= 0)


@Kernel
def _block_ranges(first, edges, starts, blocks, most, total, size, STEPS: tl.constexpr, BB: tl.constexpr):
    """The cell of each block, by bisection, and its ranges of pairs and of keys."""
    block = tl.program_id(0) * BB + tl.arange(0, BB)
    there = block < most
    low = tl.zeros([BB], tl.int32)
    high = tl.zeros([BB], tl.int32) + total
    for _ in range(STEPS):
        middle = (low + high) // 2
        above = tl.load(edges + middle + 1, mask=middle < total, other=2147483647) > block
        high = tl.where(above, middle, high)
        low = tl.where(above, low, tl.minimum(middle + 1, total))
    cell = tl.minimum(low, total - 1)
    begin = tl.load(first + cell) + (block - tl.load(edges + cell)) * size
    end = tl.minimum(tl.load(first + cell + 1), begin + size)
    real = low < total
    at = blocks + block.to(tl.int64) * 8
    tl.store(at, cell, mask=there)
    tl.store(at + 1, tl.where(real, begin, 0), mask=there)
    tl.store(at + 2, tl.where(real, end, 0), mask=there)
    tl.store(at + 3, tl.load(starts + cell), mask=there)
    tl.store(at + 4, tl.load(starts + cell + 1), mask=there)


def group(opened: Tensor, tables: Tables, size: int, counts: Tensor | None = None, stable: Layout | None = None) -> Groups:
    """Group the pairs of `opened` `[entries, rows, slots]` by cell, in blocks of at most `size`.

    `counts`: how many there are of each cell, where that is known; it is overwritten. The order of pairs inside a cell differs
    from run to run, which matters only where something is summed over rows. With a layout in `stable` it is always the same.
    """
    entries, rows, slots = opened.shape
    device, cells = opened.device, tables.cells
    total, per_entry = entries * cells, rows * slots
    assert opened.stride(1) == slots
    assert opened.numel() < 2**31
    first, edges = (torch.empty(total + 1, dtype=torch.int32, device=device) for _ in range(2))
    grid = (cdiv(per_entry, PAIRS_PER_PROGRAM), entries)
    if counts is None:
        counts = torch.zeros(total, dtype=torch.int32, device=device)
        if total:
            _count_pairs[grid](
                opened=opened,
                counts=counts,
                per_entry=per_entry,
                cells=cells,
                opened_entry=opened.stride(0),
                BP=PAIRS_PER_PROGRAM,
                num_warps=4,
            )
    _scan_counts[(1,)](
        counts=counts,
        first=first,
        edges=edges,
        total=total,
        size=size,
        BC=1024,
        num_warps=4,
    )
    most = cdiv(opened.numel(), size) + total
    blocks = torch.empty(most, NUMBERS_PER_BLOCK, dtype=torch.int32, device=device)
    if stable is not None:
        pair = sort_by_cell(pack_cells(opened, stable), stable, entries)[1].int()
    else:
        pair = torch.empty(opened.numel(), dtype=torch.int32, device=device)
        if total:
            _place_pairs[grid](
                opened=opened,
                places=counts,
                pair=pair,
                per_entry=per_entry,
                cells=cells,
                opened_entry=opened.stride(0),
                BP=PAIRS_PER_PROGRAM,
                num_warps=4,
            )
    if total:
        _block_ranges[(cdiv(most, 256),)](
            first=first,
            edges=edges,
            starts=tables.starts,
            blocks=blocks,
            most=most,
            total=total,
            size=size,
            STEPS=total.bit_length() + 1,
            BB=256,
            num_warps=4,
        )
    else:
        blocks.zero_()
    return Groups(pair, first, edges, blocks, size)


@partial(Kernel, do_not_specialize=("first_entry", "beyond"))
def _near_fwd(
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
    """Output and log2-normaliser of up to BM pairs of one cell, for the entries from `first_entry` to `beyond`."""
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
    m_i = tl.full([BM], -float("inf"), tl.float32)
    l_i = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    for start in range(start_key, stop_key, BN):
        member = start + tl.arange(0, BN)
        real = member < stop_key
        position = tl.load(order + member, mask=real, other=0).to(tl.int64)
        key = tl.load(keys + position[None, :] * key_row + column[:, None], mask=real[None, :] & wide[:, None], other=0.0)
        qk = tl.where(real[None, :], tl.dot(query, key, input_precision=IP), -float("inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1) * scale)
        p = tl.exp2(qk * scale - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        value = tl.load(
            values + position[:, None] * value_row + value_column[None, :], mask=real[:, None] & value_wide[None, :], other=0.0
        )
        acc = acc * alpha[:, None] + tl.dot(p.to(value.dtype), value, input_precision=IP)
        m_i = m_new
    own = own.to(tl.int64) - first_entry.to(tl.int64) * rows * SLOTS
    tl.store(lse + own, m_i + tl.log2(l_i), mask=there)
    result = (acc / l_i[:, None]).to(output.dtype.element_ty)
    tl.store(output + own[:, None] * value_dim + value_column[None, :], result, mask=there[:, None] & value_wide[None, :])


def near_forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tables,
    sizes: CellSizes,
    groups: Groups,
    some: slice,
    scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Fills in `output` `[some entries, rows, slots, value_dim]` and log2-normalisers for each opened cell."""
    entries, rows, slots, value_dim = output.shape
    dim = queries.shape[2]
    blocks = near_forward_blocks(queries, values, sizes)
    _near_fwd[(groups.most(entries, rows, slots, tables.cells),)](
        queries=queries,
        keys=keys,
        values=values,
        order=tables.order,
        blocks=groups.blocks,
        edges=groups.edges,
        pair=groups.pair,
        output=output,
        lse=lse,
        first_entry=some.start,
        beyond=some.stop,
        rows=rows,
        cells=tables.cells,
        dim=dim,
        value_dim=value_dim,
        **strides(query=queries, key=keys, value=values),
        scale=scale * LOG2E.value,
        SLOTS=slots,
        BM=blocks.rows,
        BN=blocks.keys,
        BD=padded(dim),
        BV=padded(value_dim),
        IP=precision(queries.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def near_forward_blocks(queries: Tensor, values: Tensor, sizes: CellSizes) -> TileSizes:
    """Block sizes of the forward pass: pairs are grouped in blocks of `rows`."""
    return blocks_for("near_fwd", max(queries.shape[2], values.shape[2]), queries.dtype, queries.device, sizes.cell_size)


@Kernel
def _merge(
    parts,
    part_lse,
    opened,
    output,
    lse,
    rows,
    value_dim,
    opened_entry,
    output_entry,
    output_row,
    lse_entry,
    SLOTS: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
):
    entry = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    there = row < rows
    column = tl.arange(0, BV)
    wide = column < value_dim
    place = (entry * rows + row) * SLOTS
    opened += entry * opened_entry + row * SLOTS
    output += entry * output_entry + row[:, None] * output_row + column[None, :]
    lse += entry * lse_entry + row
    # The output holds what comes from keys seen one by one and from closed cells.
    closed_lse = tl.load(lse, mask=there, other=-float("inf"))
    m_i = closed_lse
    for slot in range(SLOTS):
        real = tl.load(opened + slot, mask=there, other=-1) >= 0
        m_i = tl.maximum(m_i, tl.load(part_lse + place + slot, mask=real, other=-float("inf")))
    base = tl.where(m_i > -float("inf"), m_i, 0.0)
    l_i = tl.exp2(closed_lse - base)
    value = tl.load(output, mask=there[:, None] & wide[None, :], other=0.0)
    acc = l_i[:, None] * value.to(tl.float32)
    for slot in range(SLOTS):
        real = tl.load(opened + slot, mask=there, other=-1) >= 0
        p = tl.exp2(tl.load(part_lse + place + slot, mask=real, other=-float("inf")) - base)
        part = tl.load(
            parts + (place + slot)[:, None] * value_dim + column[None, :], mask=real[:, None] & wide[None, :], other=0.0
        )
        l_i += p
        acc += p[:, None] * part.to(tl.float32)
    blind = l_i <= 0.0
    result = tl.where(blind[:, None], 0.0, acc / tl.where(blind, 1.0, l_i)[:, None])
    tl.store(output, result.to(output.dtype.element_ty), mask=there[:, None] & wide[None, :])
    lse_i = (base + tl.log2(tl.where(blind, 1.0, l_i))) * LN2
    tl.store(lse, tl.where(blind, -float("inf"), lse_i), mask=there)


def merge(parts: Tensor, part_lse: Tensor, opened: Tensor, output: Tensor, lse: Tensor) -> None:
    """Adds parts `[entries, rows, slots, value_dim]` that have a cell to `output` and `lse` (base 2 before, natural after)."""
    entries, rows, slots, value_dim = parts.shape
    _merge[(cdiv(rows, 32), entries)](
        parts=parts,
        part_lse=part_lse,
        opened=opened,
        output=output,
        lse=lse,
        rows=rows,
        value_dim=value_dim,
        opened_entry=opened.stride(0),
        **strides(output=output),
        lse_entry=lse.stride(0),
        SLOTS=slots,
        BM=32,
        BV=padded(value_dim),
        num_warps=4,
    )


@Kernel
def _near_dkv(
    queries,
    keys,
    values,
    do,
    lse,
    delta,
    order,
    starts,
    pair,
    first,
    block_edges,
    block_cell,
    dk,
    dv,
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
    do_entry,
    do_row,
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
    """dk and dv of a block of keys of a cell, over all rows that opened it; only cells from `least` to `beyond` of each entry."""
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
    do += entry * do_entry
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
    dk_acc = tl.zeros([BN, BD], tl.float32)
    dv_acc = tl.zeros([BN, BV], tl.float32)
    for start in range(begin_row, last, BM):
        lane = start + tl.arange(0, BM)
        there = lane < last
        row = (tl.load(pair + lane, mask=there, other=0) // SLOTS).to(tl.int64) - entry * rows
        query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
        do_i = tl.load(do + row[:, None] * do_row + value_column[None, :], mask=there[:, None] & value_wide[None, :], other=0.0)
        lse_i = tl.load(lse + row, mask=there, other=float("inf"))
        delta_i = tl.load(delta + row, mask=there, other=0.0)
        logit = tl.dot(key, tl.trans(query), input_precision=IP) * scale - lse_i[None, :]
        p = tl.where(real[:, None], tl.exp2(tl.minimum(logit * LOG2E, 0.0)), 0.0)
        dv_acc += tl.dot(p.to(do_i.dtype), do_i, input_precision=IP)
        ds = p * (tl.dot(value, tl.trans(do_i), input_precision=IP) - delta_i[None, :])
        dk_acc += tl.dot(ds.to(query.dtype), query, input_precision=IP)
    place = entry * length + position
    into, mask = dk + place[:, None] * dim + column[None, :], real[:, None] & wide[None, :]
    tl.atomic_add(into, dk_acc * scale, mask=mask, sem="relaxed")
    into, mask = dv + place[:, None] * value_dim + value_column[None, :], real[:, None] & value_wide[None, :]
    tl.atomic_add(into, dv_acc, mask=mask, sem="relaxed")


@partial(Kernel, do_not_specialize=("first_entry", "beyond"))
def _near_dq(
    queries,
    keys,
    values,
    do,
    lse,
    delta,
    order,
    blocks,
    edges,
    pair,
    dq,
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
    do_entry,
    do_row,
    row_entry,
    scale,
    SLOTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
):
    """What the keys of a cell add to dq, for up to BM pairs of the cell, and the entries from `first_entry` to `beyond`."""
    cell, begin, end, start_key, stop_key = block_at(blocks, edges, first_entry * cells)
    if (begin >= end) | (cell >= beyond * cells):
        return
    entry = (cell // cells).to(tl.int64)
    queries += entry * query_entry
    keys += entry * key_entry
    values += entry * value_entry
    do += entry * do_entry
    lse += entry * row_entry
    delta += entry * row_entry
    lane = begin + tl.arange(0, BM)
    there = lane < end
    own = tl.load(pair + lane, mask=there, other=0)
    row = (own // SLOTS).to(tl.int64) - entry * rows
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    do_i = tl.load(do + row[:, None] * do_row + value_column[None, :], mask=there[:, None] & value_wide[None, :], other=0.0)
    lse_i = tl.load(lse + row, mask=there, other=float("inf"))
    delta_i = tl.load(delta + row, mask=there, other=0.0)
    acc = tl.zeros([BM, BD], tl.float32)
    for start in range(start_key, stop_key, BN):
        member = start + tl.arange(0, BN)
        real = member < stop_key
        position = tl.load(order + member, mask=real, other=0).to(tl.int64)
        key = tl.load(keys + position[:, None] * key_row + column[None, :], mask=real[:, None] & wide[None, :], other=0.0)
        value = tl.load(
            values + position[:, None] * value_row + value_column[None, :], mask=real[:, None] & value_wide[None, :], other=0.0
        )
        logit = tl.dot(query, tl.trans(key), input_precision=IP) * scale - lse_i[:, None]
        p = tl.where(real[None, :], tl.exp2(tl.minimum(logit * LOG2E, 0.0)), 0.0)
        ds = p * (tl.dot(do_i, tl.trans(value), input_precision=IP) - delta_i[:, None])
        acc += tl.dot(ds.to(key.dtype), key, input_precision=IP)
    result = (acc * scale).to(dq.dtype.element_ty)
    own = own.to(tl.int64) - first_entry.to(tl.int64) * rows * SLOTS
    tl.store(dq + own[:, None] * dim + column[None, :], result, mask=there[:, None] & wide[None, :])


def near_dkv(
    rows: BackwardRows,
    keys: Tensor,
    values: Tensor,
    tables: Tables,
    sizes: CellSizes,
    opened: Tensor,
    scale: float,
    dk: Tensor,
    dv: Tensor,
    cell_ranges: list[tuple[int, int]],
    stable: Layout | None,
) -> None:
    """Adds to `dk` and `dv` `[entries, n, ...]`, float32. One launch for each range of cells in `cell_ranges`."""
    entries, length, dim = keys.shape
    value_dim = values.shape[2]
    blocks = blocks_for("near_dkv", max(dim, value_dim), keys.dtype, keys.device, sizes.cell_size)
    groups = group(opened, tables, blocks.rows, stable=stable)
    edges, of_block = key_blocks(tables.starts, tables.order.numel(), blocks.keys)
    for least, beyond in cell_ranges:
        _near_dkv[(of_block.shape[0],)](
            queries=rows.queries,
            keys=keys,
            values=values,
            do=rows.do,
            lse=rows.lse,
            delta=rows.delta,
            order=tables.order,
            starts=tables.starts,
            pair=groups.pair,
            first=groups.first,
            block_edges=edges,
            block_cell=of_block,
            dk=dk,
            dv=dv,
            rows=rows.count,
            entries=entries,
            cells=tables.cells,
            length=length,
            dim=dim,
            value_dim=value_dim,
            **strides(query=rows.queries, key=keys, value=values, do=rows.do),
            row_entry=rows.lse.stride(0),
            scale=scale,
            least=least,
            beyond=beyond,
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


def near_dq(
    rows: BackwardRows,
    keys: Tensor,
    values: Tensor,
    tables: Tables,
    sizes: CellSizes,
    groups: Groups,
    some: slice,
    scale: float,
    dq: Tensor,
) -> None:
    """Fills in `dq` `[some entries, rows, slots, dim]`, cell by cell; undefined where no cell was opened."""
    entries, count, slots, dim = dq.shape
    value_dim = values.shape[2]
    blocks = near_dq_blocks(keys, values, sizes)
    _near_dq[(groups.most(entries, count, slots, tables.cells),)](
        queries=rows.queries,
        keys=keys,
        values=values,
        do=rows.do,
        lse=rows.lse,
        delta=rows.delta,
        order=tables.order,
        blocks=groups.blocks,
        edges=groups.edges,
        pair=groups.pair,
        dq=dq,
        first_entry=some.start,
        beyond=some.stop,
        rows=count,
        cells=tables.cells,
        dim=dim,
        value_dim=value_dim,
        **strides(query=rows.queries, key=keys, value=values, do=rows.do),
        row_entry=rows.lse.stride(0),
        scale=scale,
        SLOTS=slots,
        BM=blocks.rows,
        BN=blocks.keys,
        BD=padded(dim),
        BV=padded(value_dim),
        IP=precision(keys.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


def near_dq_blocks(keys: Tensor, values: Tensor, sizes: CellSizes) -> TileSizes:
    """The same for dq."""
    return blocks_for("near_dq", max(keys.shape[2], values.shape[2]), keys.dtype, keys.device, sizes.cell_size)
