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
from nearfield.cells.triton.layout import Layout, position_at
from nearfield.cells.triton.local import BackwardRows, add_dkv, backward_tile
from nearfield.cells.triton.memory import Units
from nearfield.cells.triton.moments import Tables
from nearfield.cells.triton.tuning import TileSizes, blocks_for
from nearfield.kernels.launch import LN2, LOG2E, Kernel, cdiv, padded, precision, strides
from nearfield.kernels.tensors import zeros

NUMBERS_PER_BLOCK = 4
"""Numbers per block in `Groups.blocks`; a power of two, so that they are loaded together."""

PAIRS_PER_PROGRAM = 1024

MOST_COPIES = 16
"""Counters per cell, at most. Nearly all rows may open the same cell, and those that add to one counter wait for each other."""

PAIRS_PER_COUNTER = 8
"""There are no more counters than one for so many pairs: all of them are read again."""


@dataclass(frozen=True)
class Pairs:
    """The (row, slot) pairs of some units of rows, cell by cell. Inside a unit, a pair is numbered row * slots + slot."""

    pair: Tensor
    """`[units, pairs]`: numbers of pairs in the order of their cells"""
    first: Tensor
    """`[units, cells + 1]`: where the pairs of each cell begin"""


@dataclass(frozen=True)
class Groups:
    """The same, and the blocks in which cells meet their rows."""

    pair: Tensor
    """see `Pairs`"""
    blocks: Tensor
    """`[units, most, 4]`: first pair, one after the last; first key of the cell in `Tables.order`, one after the last. Those
    that are not needed are empty."""
    units: Units
    start: int
    """the first of the units that are grouped"""


def most_blocks(pairs: int, cells: int, size: int) -> int:
    """The most blocks of `size` that the pairs of a unit can take."""
    return cdiv(pairs, size) + cells


def group_bytes(unit_rows: int, slots: int, cells: int, size: int) -> int:
    """What `Groups` of one unit take."""
    pairs = unit_rows * slots
    return 4 * (pairs + NUMBERS_PER_BLOCK * most_blocks(pairs, cells, size))


@triton.jit
def unit_at(number, units_per_entry, unit_rows):
    """The entry of a unit, and its first row in there."""
    return (number // units_per_entry).to(tl.int64), (number % units_per_entry).to(tl.int64) * unit_rows


@triton.jit
def block_at(blocks, unit):
    """What `Groups.blocks` says of a program's block, of a unit counted from the first that is grouped."""
    at = blocks + (unit.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)) * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)


@triton.jit
def cells_of_pairs(opened, rows, unit_rows, units_per_entry, slots, opened_entry, start, BP: tl.constexpr):
    """The cells of a program's pairs, -1 where there is none, and the numbers of these pairs inside their unit."""
    entry, first_row = unit_at(start + tl.program_id(1), units_per_entry, unit_rows)
    lane = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    there = lane < tl.minimum(rows - first_row, unit_rows) * slots
    return tl.load(opened + entry * opened_entry + first_row * slots + lane, mask=there, other=-1), lane


@triton.jit
def counters_at(counts, cells, COPIES: tl.constexpr):
    """The counters of a program. Programs that run at the same time have different ones."""
    return counts + (tl.program_id(1).to(tl.int64) * COPIES + tl.program_id(0) % COPIES) * cells


@partial(Kernel, do_not_specialize=("start",))
def _count_pairs(
    opened,
    counts,
    rank,
    rows,
    unit_rows,
    units_per_entry,
    slots,
    cells,
    opened_entry,
    start,
    COPIES: tl.constexpr,
    BP: tl.constexpr,
):
    """How many pairs of each cell a counter has met, and the rank of each pair among them."""
    cell, lane = cells_of_pairs(opened, rows, unit_rows, units_per_entry, slots, opened_entry, start, BP)
    own = tl.atomic_add(counters_at(counts, cells, COPIES) + cell, 1, mask=cell >= 0, sem="relaxed")
    tl.store(rank + tl.program_id(1).to(tl.int64) * unit_rows * slots + lane, own, mask=cell >= 0)


@Kernel
def _scan_counts(counts, first, edges, cells, size, COPIES: tl.constexpr, BC: tl.constexpr):
    """Running sums of the counts of a unit, and of the blocks of `size` they take. `counts` becomes where each one's pairs go."""
    unit = tl.program_id(0).to(tl.int64)
    counts += unit * COPIES * cells
    first += unit * (cells + 1)
    edges += unit * (cells + 1)
    copy = tl.arange(0, COPIES)
    pairs = 0
    blocks = 0
    for start in range(0, cells, BC):
        cell = start + tl.arange(0, BC)
        there = cell < cells
        at = counts + copy[:, None] * cells + cell[None, :]
        counted = tl.load(at, mask=there[None, :], other=0)
        own = tl.sum(counted, 0)
        need = (own + size - 1) // size
        begin = pairs + tl.cumsum(own, 0) - own
        tl.store(first + cell, begin, mask=there)
        tl.store(edges + cell, blocks + tl.cumsum(need, 0) - need, mask=there)
        tl.store(at, begin[None, :] + tl.cumsum(counted, 0) - counted, mask=there[None, :])
        pairs += tl.sum(own, 0)
        blocks += tl.sum(need, 0)
    tl.store(first + cells, pairs)
    tl.store(edges + cells, blocks)


@partial(Kernel, do_not_specialize=("start",))
def _place_pairs(
    opened,
    begins,
    rank,
    pair,
    rows,
    unit_rows,
    units_per_entry,
    slots,
    cells,
    opened_entry,
    start,
    COPIES: tl.constexpr,
    BP: tl.constexpr,
):
    """Each pair goes to its place."""
    cell, lane = cells_of_pairs(opened, rows, unit_rows, units_per_entry, slots, opened_entry, start, BP)
    real = cell >= 0
    unit = tl.program_id(1).to(tl.int64) * unit_rows * slots
    begin = tl.load(counters_at(begins, cells, COPIES) + cell, mask=real, other=0)
    own = tl.load(rank + unit + lane, mask=real, other=0)
    tl.store(pair + unit + begin + own, lane.to(tl.int32), mask=real)


@partial(Kernel, do_not_specialize=("start",))
def _block_ranges(
    first,
    edges,
    starts,
    blocks,
    most,
    cells,
    size,
    first_unit,
    starts_entry,
    units_per_entry,
    start,
    STEPS: tl.constexpr,
    BB: tl.constexpr,
):
    """The cell of each block, by bisection, the range of the block in `first`, and that of the cell in `starts`."""
    unit = tl.program_id(1).to(tl.int64)
    first += unit * first_unit
    edges += unit * (cells + 1)
    starts += ((start + tl.program_id(1)) // units_per_entry).to(tl.int64) * starts_entry
    block = tl.program_id(0) * BB + tl.arange(0, BB)
    there = block < most
    low = tl.zeros([BB], tl.int32)
    high = tl.zeros([BB], tl.int32) + cells
    for _ in range(STEPS):
        middle = (low + high) // 2
        above = tl.load(edges + middle + 1, mask=middle < cells, other=2147483647) > block
        high = tl.where(above, middle, high)
        low = tl.where(above, low, tl.minimum(middle + 1, cells))
    cell = tl.minimum(low, cells - 1)
    begin = tl.load(first + cell) + (block - tl.load(edges + cell)) * size
    end = tl.minimum(tl.load(first + cell + 1), begin + size)
    real = low < cells
    at = blocks + (unit * most + block) * 4
    tl.store(at, tl.where(real, begin, 0), mask=there)
    tl.store(at + 1, tl.where(real, end, 0), mask=there)
    tl.store(at + 2, tl.load(starts + cell), mask=there)
    tl.store(at + 3, tl.load(starts + cell + 1), mask=there)


def _counters_per_cell(pairs: int, cells: int) -> int:
    """A power of two."""
    wanted = max(1, min(MOST_COPIES, pairs // (PAIRS_PER_COUNTER * cells)))
    return 1 << (wanted.bit_length() - 1)


def _sorted_pairs(opened: Tensor, cells: int, units: Units, some: slice, size: int) -> tuple[Pairs, Tensor]:
    """The pairs of some units, and the first block of `size` of each cell.

    The order of pairs inside a cell differs from run to run, which matters only where something is summed over rows.
    """
    slots, device, count = opened.shape[2], opened.device, some.stop - some.start
    pairs = units.size * slots
    assert opened.stride(1) == slots
    assert pairs < 2**31
    copies = _counters_per_cell(pairs, cells)
    first, edges = torch.empty(2, count, cells + 1, dtype=torch.int32, device=device).unbind(0)
    counts = zeros(count, copies, cells, dtype=torch.int32, device=device)
    rank, pair = (torch.empty(count, pairs, dtype=torch.int32, device=device) for _ in range(2))
    grid = (cdiv(pairs, PAIRS_PER_PROGRAM), count)
    numbers = {
        "rows": units.rows,
        "unit_rows": units.size,
        "units_per_entry": units.per_entry,
        "slots": slots,
        "cells": cells,
        "opened_entry": opened.stride(0),
        "start": some.start,
        "COPIES": copies,
        "BP": PAIRS_PER_PROGRAM,
        "num_warps": 4,
    }
    _count_pairs[grid](opened=opened, counts=counts, rank=rank, **numbers)
    _scan_counts[(count,)](
        counts=counts,
        first=first,
        edges=edges,
        cells=cells,
        size=size,
        COPIES=copies,
        BC=1024,
        num_warps=8,
    )
    _place_pairs[grid](opened=opened, begins=counts, rank=rank, pair=pair, **numbers)
    return Pairs(pair, first), edges


def group(opened: Tensor, starts: Tensor, cells: int, units: Units, some: slice, size: int) -> Groups:
    """Group the pairs of `opened` `[entries, rows, slots]` by cell, in blocks of at most `size`, for some units.

    `starts`: see `Tables`, of all entries.
    """
    pairs, edges = _sorted_pairs(opened, cells, units, some, size)
    count, most = some.stop - some.start, most_blocks(pairs.pair.shape[1], cells, size)
    blocks = torch.empty(count, most, NUMBERS_PER_BLOCK, dtype=torch.int32, device=opened.device)
    _block_ranges[(cdiv(most, 256), count)](
        first=pairs.first,
        edges=edges,
        starts=starts,
        blocks=blocks,
        most=most,
        cells=cells,
        size=size,
        first_unit=pairs.first.stride(0),
        starts_entry=cells,
        units_per_entry=units.per_entry,
        start=some.start,
        STEPS=cells.bit_length() + 1,
        BB=256,
        num_warps=4,
    )
    return Groups(pairs.pair, blocks, units, some.start)


def pairs_of_entries(opened: Tensor, tables: Tables, stable: Layout | None) -> Pairs:
    """The pairs of all rows, each entry a unit. With a layout in `stable` their order is always the same."""
    entries, rows, slots = opened.shape
    if stable is None:
        return _sorted_pairs(opened, tables.cells, Units(entries, rows, rows, entries), slice(0, entries), 1)[0]
    assert opened.numel() < 2**31
    _, places, starts = sort_by_cell(pack_cells(opened, stable), stable, entries)
    # One list for all entries, which begins anew for none of them.
    pair = places.remainder_(rows * slots).int().expand(entries, -1)
    return Pairs(pair, starts.unfold(0, tables.cells + 1, tables.cells))


@triton.jit
def position_of(order, member, stop, B: tl.constexpr):
    """The positions of B members of a cell; beyond the end that of the last one."""
    return tl.load(order + tl.minimum(member + tl.arange(0, B), stop - 1)).to(tl.int64)


@triton.jit
def member_tile(keys, values, position, key_row, value_row, column, value_column, wide, value_wide, FULL: tl.constexpr):
    """Keys and values `[positions, columns]`. FULL: no columns are missing."""
    key_at = keys + position[:, None] * key_row + column[None, :]
    value_at = values + position[:, None] * value_row + value_column[None, :]
    if FULL:
        key, value = tl.load(key_at), tl.load(value_at)
    else:
        key = tl.load(key_at, mask=wide[None, :], other=0.0)
        value = tl.load(value_at, mask=value_wide[None, :], other=0.0)
    return key, value


@partial(Kernel, do_not_specialize=("start", "skipped"))
def _near_fwd(
    queries,
    keys,
    values,
    order,
    blocks,
    pair,
    output,
    lse,
    start,
    skipped,
    unit_rows,
    units_per_entry,
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
    FULL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
):
    """Output and log2-normaliser of up to BM pairs of one cell. Units are those from `start` on; `skipped` others come before."""
    begin, end, start_key, stop_key = block_at(blocks, skipped + tl.program_id(1))
    if begin >= end:
        return
    entry, first_row = unit_at(start + tl.program_id(1), units_per_entry, unit_rows)
    queries += entry * query_entry
    keys += entry * key_entry
    values += entry * value_entry
    # One tile ahead, so that keys and values wait for nothing.
    position = position_of(order, start_key, stop_key, BN)
    lane = begin + tl.arange(0, BM)
    there = lane < end
    # What is beyond the end is loaded from the last place: a mask takes longer.
    own = tl.load(pair + (skipped + tl.program_id(1)).to(tl.int64) * unit_rows * SLOTS + tl.minimum(lane, end - 1))
    row = first_row + own // SLOTS
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=wide[None, :], other=0.0)
    m_i = tl.full([BM], -float("inf"), tl.float32)
    l_i = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    for key_at in range(start_key, stop_key, BN):
        real = key_at + tl.arange(0, BN) < stop_key
        here, position = position, position_of(order, key_at + BN, stop_key, BN)
        key, value = member_tile(keys, values, here, key_row, value_row, column, value_column, wide, value_wide, FULL)
        qk = tl.where(real[None, :], tl.dot(query, tl.trans(key), input_precision=IP), -float("inf"))
        m_new = tl.maximum(m_i, tl.max(qk, 1) * scale)
        p = tl.exp2(qk * scale - m_new[:, None])
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None], input_precision=IP)
        m_i = m_new
    place = tl.program_id(1).to(tl.int64) * unit_rows * SLOTS + own
    # A plan that was given may open an empty cell.
    weight = tl.where(l_i == 0.0, 1.0, l_i)
    tl.store(lse + place, m_i + tl.log2(weight), mask=there)
    result = (acc / weight[:, None]).to(output.dtype.element_ty)
    tl.store(output + place[:, None] * value_dim + value_column[None, :], result, mask=there[:, None] & value_wide[None, :])


def near_forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    order: Tensor,
    sizes: CellSizes,
    groups: Groups,
    some: slice,
    scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Fills in `output` `[units, rows, slots, value_dim]` and log2-normalisers for each opened cell of some units.

    `order`: see `Tables`.
    """
    _, _, slots, value_dim = output.shape
    dim = queries.shape[2]
    blocks = near_forward_blocks(queries, values, sizes)
    _near_fwd[(groups.blocks.shape[1], some.stop - some.start)](
        queries=queries,
        keys=keys,
        values=values,
        order=order,
        blocks=groups.blocks,
        pair=groups.pair,
        output=output,
        lse=lse,
        start=some.start,
        skipped=some.start - groups.start,
        unit_rows=groups.units.size,
        units_per_entry=groups.units.per_entry,
        dim=dim,
        value_dim=value_dim,
        **strides(query=queries, key=keys, value=values),
        scale=scale * LOG2E.value,
        SLOTS=slots,
        FULL=dim == padded(dim) and value_dim == padded(value_dim),
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


@partial(Kernel, do_not_specialize=("start",))
def _merge(
    parts,
    part_lse,
    opened,
    output,
    lse,
    start,
    rows,
    unit_rows,
    units_per_entry,
    value_dim,
    opened_entry,
    output_entry,
    output_row,
    lse_entry,
    SLOTS: tl.constexpr,
    BM: tl.constexpr,
    BV: tl.constexpr,
):
    entry, first_row = unit_at(start + tl.program_id(1), units_per_entry, unit_rows)
    own = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    row = first_row + own
    there = (own < unit_rows) & (row < rows)
    column = tl.arange(0, BV)
    wide = column < value_dim
    place = (tl.program_id(1).to(tl.int64) * unit_rows + own) * SLOTS
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


def merge(parts: Tensor, part_lse: Tensor, opened: Tensor, units: Units, some: slice, output: Tensor, lse: Tensor) -> None:
    """Adds parts `[units, rows, slots, value_dim]` that have a cell to `output` and `lse` (base 2 before, natural after).

    They are those of some units; the others, of which there may be parts too, are left as they are.
    """
    _, _, slots, value_dim = parts.shape
    _merge[(cdiv(units.size, 32), some.stop - some.start)](
        parts=parts,
        part_lse=part_lse,
        opened=opened,
        output=output,
        lse=lse,
        start=some.start,
        rows=units.rows,
        unit_rows=units.size,
        units_per_entry=units.per_entry,
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
    blocks,
    row_order,
    dk,
    dv,
    cells,
    length,
    positions,
    rows,
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
    pair_entry,
    scale,
    least,
    beyond,
    SLOTS: tl.constexpr,
    SHARE: tl.constexpr,
    ORDERED: tl.constexpr,
    FULL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
):
    """dk and dv of a block of keys of a cell, over all rows that opened it; only cells from `least` to `beyond` of each entry."""
    entry = tl.program_id(1).to(tl.int64)
    begin, end, begin_row, last = block_at(blocks, tl.program_id(1))
    starts += entry * cells
    if (begin >= end) | (begin_row >= last) | (begin < tl.load(starts + least)) | (begin >= tl.load(starts + beyond)):
        return
    pair += entry * pair_entry
    queries += entry * query_entry
    do += entry * do_entry
    lse += entry * row_entry
    delta += entry * row_entry
    member = begin + tl.arange(0, BN)
    real = member < end
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
    row_order += entry * rows
    # A pair is of a row or, if rows open cells together, of a block.
    per_pair: tl.constexpr = (SHARE + BM - 1) // BM
    count = (last - begin_row) * per_pair if SHARE > 1 else (last - begin_row + BM - 1) // BM
    for tile in range(count):
        if SHARE > 1:
            block = tl.load(pair + begin_row + tile // per_pair) // SLOTS
            per_member = tl.cdiv(positions, SHARE)
            first_place = block % per_member * SHARE
            lane = first_place + tile % per_pair * BM + tl.arange(0, BM)
            there = lane < tl.minimum(first_place + SHARE, positions)
            first_row = block // per_member * positions
            lane = tl.minimum(lane, positions - 1)
            row = (first_row + position_at(row_order + first_row, lane, there, ORDERED)).to(tl.int64)
        else:
            lane = begin_row + tile * BM + tl.arange(0, BM)
            there = lane < last
            row = (tl.load(pair + tl.minimum(lane, last - 1)) // SLOTS).to(tl.int64)
        query, do_i, lse_i, delta_i = backward_tile(
            queries, do, lse, delta, row, there, query_row, do_row, column, value_column, wide, value_wide, FULL
        )
        dk_acc, dv_acc = add_dkv(key, value, query, do_i, lse_i, delta_i, scale * LOG2E, there, dk_acc, dv_acc, False, IP)
    place = entry * length + position
    into, mask = dk + place[:, None] * dim + column[None, :], real[:, None] & wide[None, :]
    tl.atomic_add(into, dk_acc * scale, mask=mask, sem="relaxed")
    into, mask = dv + place[:, None] * value_dim + value_column[None, :], real[:, None] & value_wide[None, :]
    tl.atomic_add(into, dv_acc, mask=mask, sem="relaxed")


@partial(Kernel, do_not_specialize=("start", "skipped"))
def _near_dq(
    queries,
    keys,
    values,
    do,
    lse,
    delta,
    order,
    blocks,
    pair,
    dq,
    start,
    skipped,
    unit_rows,
    units_per_entry,
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
    FULL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
):
    """What the keys of a cell add to dq, for up to BM pairs of the cell. Units: see `_near_fwd`."""
    begin, end, start_key, stop_key = block_at(blocks, skipped + tl.program_id(1))
    if begin >= end:
        return
    entry, first_row = unit_at(start + tl.program_id(1), units_per_entry, unit_rows)
    queries += entry * query_entry
    keys += entry * key_entry
    values += entry * value_entry
    do += entry * do_entry
    lse += entry * row_entry
    delta += entry * row_entry
    position = position_of(order, start_key, stop_key, BN)
    lane = begin + tl.arange(0, BM)
    there = lane < end
    own = tl.load(pair + (skipped + tl.program_id(1)).to(tl.int64) * unit_rows * SLOTS + tl.minimum(lane, end - 1))
    row = first_row + own // SLOTS
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query, do_i, lse_i, delta_i = backward_tile(
        queries, do, lse, delta, row, there, query_row, do_row, column, value_column, wide, value_wide, FULL
    )
    acc = tl.zeros([BM, BD], tl.float32)
    for key_at in range(start_key, stop_key, BN):
        real = key_at + tl.arange(0, BN) < stop_key
        here, position = position, position_of(order, key_at + BN, stop_key, BN)
        key, value = member_tile(keys, values, here, key_row, value_row, column, value_column, wide, value_wide, FULL)
        logit = tl.dot(query, tl.trans(key), input_precision=IP) * (scale * LOG2E) - lse_i[:, None]
        p = tl.where(real[None, :], tl.exp2(tl.minimum(logit, 0.0)), 0.0)
        ds = p * (tl.dot(do_i, tl.trans(value), input_precision=IP) - delta_i[:, None])
        acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=IP)
    result = (acc * scale).to(dq.dtype.element_ty)
    place = tl.program_id(1).to(tl.int64) * unit_rows * SLOTS + own
    tl.store(dq + place[:, None] * dim + column[None, :], result, mask=there[:, None] & wide[None, :])


def near_dkv(
    rows: BackwardRows,
    keys: Tensor,
    values: Tensor,
    tables: Tables,
    sizes: CellSizes,
    opened: Tensor,
    order: Tensor,
    scale: float,
    dk: Tensor,
    dv: Tensor,
    members: int,
    cell_ranges: list[tuple[int, int]],
    stable: Layout | None,
) -> None:
    """Adds to `dk` and `dv` `[entries, n, ...]`, float32. One launch for each range of cells in `cell_ranges`.

    `opened` and `order`: see `CellPlan`. `members`: the most that the cells of an entry have.
    """
    entries, length, dim = keys.shape
    value_dim = values.shape[2]
    # Whole blocks of rows are read as those of the own segment are.
    kernel = "near_dkv" if sizes.share == 1 else "local_dkv"
    blocks = blocks_for(kernel, max(dim, value_dim), keys.dtype, keys.device, sizes.cell_size if sizes.share == 1 else 0)
    if not tables.cells:
        return
    pairs = pairs_of_entries(opened, tables, stable)
    key_blocks, most = blocks_of_keys(tables, pairs, members, blocks.keys)
    for least, beyond in cell_ranges:
        _near_dkv[(most, entries)](
            queries=rows.queries,
            keys=keys,
            values=values,
            do=rows.do,
            lse=rows.lse,
            delta=rows.delta,
            order=tables.order,
            starts=tables.starts,
            pair=pairs.pair,
            blocks=key_blocks,
            row_order=order if sizes.ordered else pairs.pair,
            dk=dk,
            dv=dv,
            cells=tables.cells,
            length=length,
            positions=rows.count // sizes.group,
            rows=rows.count,
            dim=dim,
            value_dim=value_dim,
            **strides(query=rows.queries, key=keys, value=values, do=rows.do),
            row_entry=rows.lse.stride(0),
            pair_entry=pairs.pair.stride(0),
            scale=scale,
            least=least,
            beyond=beyond,
            SLOTS=opened.shape[2],
            SHARE=sizes.share,
            ORDERED=sizes.ordered,
            FULL=dim == padded(dim) and value_dim == padded(value_dim),
            BM=blocks.rows if sizes.share == 1 else min(blocks.rows, sizes.share),
            BN=blocks.keys,
            BD=padded(dim),
            BV=padded(value_dim),
            IP=precision(keys.dtype),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


@Kernel
def _scan_blocks(starts, edges, cells, size, BC: tl.constexpr):
    """How many blocks of `size` keys the cells of an entry take, in running sums."""
    entry = tl.program_id(0).to(tl.int64)
    starts += entry * cells
    edges += entry * (cells + 1)
    blocks = 0
    for start in range(0, cells, BC):
        cell = start + tl.arange(0, BC)
        there = cell < cells
        own = tl.load(starts + cell + 1, mask=there, other=0) - tl.load(starts + cell, mask=there, other=0)
        need = (own + size - 1) // size
        tl.store(edges + cell, blocks + tl.cumsum(need, 0) - need, mask=there)
        blocks += tl.sum(need, 0)
    tl.store(edges + cells, blocks)


def blocks_of_keys(tables: Tables, pairs: Pairs, members: int, size: int) -> tuple[Tensor, int]:
    """`[entries, most, 4]`: blocks of at most `size` keys of one cell: first and one after the last in `Tables.order`; the first
    pair of the cell, one after its last. Those that are not needed are empty. `members`: the most that an entry has."""
    entries, cells = tables.log_exists.shape
    device, most = tables.order.device, cdiv(members, size) + cells
    edges = torch.empty(entries, cells + 1, dtype=torch.int32, device=device)
    blocks = torch.empty(entries, most, NUMBERS_PER_BLOCK, dtype=torch.int32, device=device)
    _scan_blocks[(entries,)](starts=tables.starts, edges=edges, cells=cells, size=size, BC=1024, num_warps=4)
    _block_ranges[(cdiv(most, 256), entries)](
        first=tables.starts,
        edges=edges,
        starts=pairs.first,
        blocks=blocks,
        most=most,
        cells=cells,
        size=size,
        first_unit=cells,
        starts_entry=pairs.first.stride(0),
        units_per_entry=1,
        start=0,
        STEPS=cells.bit_length() + 1,
        BB=256,
        num_warps=4,
    )
    return blocks, most


def near_dq(
    rows: BackwardRows,
    keys: Tensor,
    values: Tensor,
    order: Tensor,
    sizes: CellSizes,
    groups: Groups,
    some: slice,
    scale: float,
    dq: Tensor,
) -> None:
    """Fills in `dq` `[units, rows, slots, dim]` of some units, cell by cell; undefined where no cell was opened."""
    _, _, slots, dim = dq.shape
    value_dim = values.shape[2]
    blocks = near_dq_blocks(keys, values, sizes)
    _near_dq[(groups.blocks.shape[1], some.stop - some.start)](
        queries=rows.queries,
        keys=keys,
        values=values,
        do=rows.do,
        lse=rows.lse,
        delta=rows.delta,
        order=order,
        blocks=groups.blocks,
        pair=groups.pair,
        dq=dq,
        start=some.start,
        skipped=some.start - groups.start,
        unit_rows=groups.units.size,
        units_per_entry=groups.units.per_entry,
        dim=dim,
        value_dim=value_dim,
        **strides(query=rows.queries, key=keys, value=values, do=rows.do),
        row_entry=rows.lse.stride(0),
        scale=scale,
        SLOTS=slots,
        FULL=dim == padded(dim) and value_dim == padded(value_dim),
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
