"""Which cells each row opens: lists of them, and marks, which have a bit for every column of a row.

Marks are `[entries, words, rows]`: neighbouring rows, which are read together, lie together.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells.sizes import CellSizes
from nearfield.cells.triton.far_field import (
    LEAST_SCORE,
    ROUTE_SPREADS,
    VOID,
    cell_moments,
    squares,
    wide_cell_score,
)
from nearfield.cells.triton.layout import COLUMNS, Layout, closed_segments, position_at, within
from nearfield.cells.triton.moments import Tables
from nearfield.cells.triton.tuning import blocks_for
from nearfield.kernels.launch import Kernel, cdiv, dot_type, next_power_of_2, padded, precision, strides


@triton.jit
def is_marked(words, mark_word, counts, lane, BC: tl.constexpr):
    """Whether cells are marked, for a tile of 32 or 64 columns whose first word is at `words`, row by row; all are in rows that
    do not count."""
    word = tl.load(words, mask=counts, other=-1)[:, None]
    if BC == 64:
        more = tl.load(words + mark_word, mask=counts, other=-1)
        word = tl.where((lane < 32)[None, :], word, more[:, None])
    return (word & (1 << (lane % 32))[None, :]) != 0


@Kernel
def _mark(
    opened,
    order,
    span_of_cell,
    cell_edges,
    span_column,
    marks,
    rows,
    positions,
    share,
    opened_entry,
    slots,
    words,
    ORDERED: tl.constexpr,
    BM: tl.constexpr,
):
    entry = tl.program_id(1).to(tl.int64)
    number = tl.program_id(0) * BM + tl.arange(0, BM)
    there = number < rows
    member, place = number // positions, number % positions
    block = member * tl.cdiv(positions, share) + place // share
    row = member * positions + position_at(order + entry * rows, number if ORDERED else place, there, ORDERED)
    opened += entry * opened_entry + block.to(tl.int64) * slots
    marks += entry * rows * words + row
    for word_number in range(words):
        tl.store(marks + tl.cast(word_number, tl.int64) * rows, tl.zeros([BM], tl.int32), mask=there)
    for slot in range(slots):
        cell = tl.load(opened + slot, mask=there, other=-1)
        real = cell >= 0
        span = tl.load(span_of_cell + cell, mask=real, other=0)
        column = tl.load(span_column + span, mask=real, other=0) + cell - tl.load(cell_edges + span, mask=real, other=0)
        # Each row belongs to one thread: no other writes to its words.
        here = marks + (column // 32).to(tl.int64) * rows
        word = tl.load(here, mask=real, other=0)
        tl.store(here, word | (1 << (column % 32)).to(tl.int32), mask=real)


def mark(opened: Tensor, order: Tensor, rows: int, layout: Layout, sizes: CellSizes) -> Tensor:
    """`[entries, words, rows]`: 1 where the row opened the cell of the column.

    `opened` `[entries, blocks, probes]`, `order` `[entries, rows]` or empty: see `CellPlan`.
    """
    entries, _, slots = opened.shape
    marks = torch.empty(entries, layout.mark_words, rows, dtype=torch.int32, device=opened.device)
    _mark[(cdiv(rows, 128), entries)](
        opened=opened,
        order=order if sizes.ordered else opened,
        span_of_cell=layout.span_of_cell,
        cell_edges=layout.cell_edges,
        span_column=layout.span_column,
        marks=marks,
        rows=rows,
        positions=rows // sizes.group,
        share=sizes.share,
        opened_entry=opened.stride(0),
        slots=slots,
        words=layout.mark_words,
        ORDERED=sizes.ordered,
        BM=128,
        num_warps=4,
    )
    return marks


BISECTIONS = 12
"""Cells count as equally good if their scores differ by less than a 4,096th of the range of those that are kept."""

FEW_PROBES = tl.constexpr(16)
"""Each column of a tile is a class. Up to this many probes, the two best scores of each class are kept, and the best of those are
found one by one; for more probes, four are kept."""


@triton.jit
def least_of(scores):
    """The least score of a cell in each row."""
    return tl.min(tl.where(scores > LEAST_SCORE, scores, float("inf")), 1)


@triton.jit
def _mark_columns(code, taken, marks, rows):
    """Set the bits of columns, row by row."""
    tl.atomic_or(marks[:, None] + (code // 32).to(tl.int64) * rows, 1 << (code % 32), mask=taken, sem="relaxed")


@triton.jit
def record_above(scores, least, filled, opened, marks, rows, tile_cell, begin, lane, probes, CODES: tl.constexpr):
    """Record the cells whose scores are not below `least`, as long as there is room. Returns how many are recorded in all."""
    taken = (scores >= least[:, None]) & (scores > LEAST_SCORE)
    # A product numbers them 1, 2, 3, ...; from 2^23 on the bits of a float32 count up by one.
    number = tl.dot(taken.to(tl.float16), (lane[:, None] <= lane[None, :]).to(tl.float16))
    slot = (number + 8388608.0).to(tl.int32, bitcast=True) + (filled - 0x4B000001)[:, None]
    taken = taken & (slot < probes)
    code = scores.to(tl.int32, bitcast=True) & (CODES - 1)
    cell = tl.load(tile_cell + begin[:, None] + code // lane.shape[0], mask=taken, other=0) + code % lane.shape[0]
    tl.store(opened[:, None] + slot, cell, mask=taken)
    _mark_columns(code, taken, marks, rows)
    return tl.minimum(filled + tl.max(number, 1).to(tl.int32), probes)


@Kernel
def _route(
    queries,
    visible,
    centroid,
    variance,
    column_most,
    tile_edges,
    tile_cell,
    tile_begin,
    tile_end,
    opened,
    marks,
    rows,
    cells,
    columns,
    dim,
    query_entry,
    query_row,
    visible_entry,
    opened_entry,
    words,
    scale,
    segment,
    window,
    segments,
    probes,
    CAUSAL: tl.constexpr,
    CODES: tl.constexpr,
    STEPS: tl.constexpr,
    FEW: tl.constexpr,
    FULL: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    entry = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    there = row < rows
    queries += entry * query_entry
    visible += entry * visible_entry
    centroid += entry * cells * dim
    variance += entry * cells * dim
    column_most += entry * columns
    column = tl.arange(0, BD)
    wide = column < dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    square = squares(query, scale * ROUTE_SPREADS, DT)
    sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    least = tl.min(tl.where(there, closed, segments), 0)
    last_past = tl.max(closed, 0)
    lane = tl.arange(0, BC)
    best = tl.full([BM, BC], VOID, tl.float32)
    second, third, fourth = best, best, best
    for past in range(least, last_past + 1):
        mine = (closed == past) & there
        first_tile = tl.load(tile_edges + past)
        # Rows of a block hardly ever see different segments; where they do, most of those in between are seen by none.
        tiles = tl.where(tl.max(mine.to(tl.int32), 0) > 0, tl.load(tile_edges + past + 1) - first_tile, 0)
        # One ahead, so that nothing waits for them.
        next_cell, first_cell = tl.load(tile_cell + first_tile), tl.load(tile_begin + first_tile)
        last_cell = tl.load(tile_end + first_tile)
        for tile in range(tiles):
            cell = next_cell + lane
            at = within(cell, first_cell, last_cell)
            next_tile = first_tile + tl.minimum(tile + 1, tiles - 1)
            next_cell, first_cell = tl.load(tile_cell + next_tile), tl.load(tile_begin + next_tile)
            last_cell = tl.load(tile_end + next_tile)
            most = tl.load(column_most + (first_tile + tile) * BC + lane)
            first, spread = cell_moments(query, square, centroid, variance, at, column, wide, dim, FULL, IP)
            # To add something large to the score of a cell that a row does not see would not make any score small.
            score = tl.minimum(wide_cell_score(first * scale, spread), most[None, :])
            score = tl.where(mine[:, None], score, VOID)
            # The last bits of a score hold its column.
            score = ((score.to(tl.int32, bitcast=True) & -CODES) | (tile * BC + lane)[None, :]).to(tl.float32, bitcast=True)
            if not FEW:
                fourth = tl.maximum(fourth, tl.minimum(third, score))
                third = tl.maximum(third, tl.minimum(second, score))
            second = tl.maximum(second, tl.minimum(best, score))
            best = tl.maximum(best, score)

    opened += entry * opened_entry + row * probes
    marks += entry * words * rows + row
    begin = tl.load(tile_edges + closed)
    for number in range(words):
        tl.store(marks + tl.cast(number, tl.int64) * rows, tl.zeros([BM], tl.int32), mask=there)
    tl.debug_barrier()
    if FEW:
        # One by one, the best of all in the first column.
        chosen = tl.full([BM, BC], VOID, tl.float32)
        for slot in range(probes):
            high = tl.max(best, 1)
            chosen = tl.where((lane == slot)[None, :], high[:, None], chosen)
            gone = best == high[:, None]
            best = tl.where(gone, second, best)
            second = tl.where(gone, VOID, second)
        # The first columns alone.
        chosen = tl.max(tl.reshape(chosen, [BM, BC // FEW_PROBES, FEW_PROBES]), 1)
        taken = there[:, None] & (chosen > LEAST_SCORE)
        code = chosen.to(tl.int32, bitcast=True) & (CODES - 1)
        cell = tl.load(tile_cell + begin[:, None] + code // BC, mask=taken, other=0) + code % BC
        slot = tl.arange(0, FEW_PROBES)[None, :]
        tl.store(opened[:, None] + slot, tl.where(taken, cell, -1), mask=there[:, None] & (slot < probes))
        _mark_columns(code, taken, marks, rows)
    else:
        # Those that reach a threshold: the largest, up to bisection, that `probes` of the kept scores reach.
        high = tl.max(best, 1)
        low = tl.minimum(least_of(best), least_of(second))
        low = tl.minimum(low, tl.minimum(least_of(third), least_of(fourth)))
        low = tl.minimum(low, high)
        for _ in range(STEPS):
            middle = 0.5 * (low + high)
            reach = tl.sum((best >= middle[:, None]).to(tl.int32) + (second >= middle[:, None]).to(tl.int32), 1)
            reach += tl.sum((third >= middle[:, None]).to(tl.int32) + (fourth >= middle[:, None]).to(tl.int32), 1)
            low = tl.where(reach >= probes, middle, low)
            high = tl.where(reach >= probes, high, middle)
        low = tl.where(there, low, float("inf"))
        filled = tl.zeros([BM], tl.int32)
        filled = record_above(best, low, filled, opened, marks, rows, tile_cell, begin, lane, probes, CODES)
        filled = record_above(second, low, filled, opened, marks, rows, tile_cell, begin, lane, probes, CODES)
        filled = record_above(third, low, filled, opened, marks, rows, tile_cell, begin, lane, probes, CODES)
        filled = record_above(fourth, low, filled, opened, marks, rows, tile_cell, begin, lane, probes, CODES)
        for slot in range(probes):
            tl.store(opened + slot, tl.full([BM], -1, tl.int32), mask=there & (slot >= filled))


def route(
    queries: Tensor,
    visible: Tensor,
    tables: Tables,
    layout: Layout,
    sizes: CellSizes,
    scale: float,
    opened: Tensor,
) -> Tensor:
    """Fills in `opened` `[entries, rows, probes]`: the cells that queries `[entries, rows, dim]` open; -1 where there are fewer.

    Returns the same as marks.
    """
    entries, rows, dim = queries.shape
    marks = torch.empty(entries, layout.mark_words, rows, dtype=torch.int32, device=queries.device)
    blocks = blocks_for("route", dim, queries.dtype, queries.device)
    _route[(cdiv(rows, blocks.rows), entries)](
        queries=queries,
        visible=visible,
        centroid=tables.centroid,
        variance=tables.variance,
        column_most=tables.column_most,
        tile_edges=layout.tile_edges,
        tile_cell=layout.tile_cell,
        tile_begin=layout.tile_begin,
        tile_end=layout.tile_end,
        opened=opened,
        marks=marks,
        rows=rows,
        cells=layout.cells,
        columns=tables.column_most.shape[1],
        dim=dim,
        **strides(query=queries),
        visible_entry=visible.stride(0),
        opened_entry=opened.stride(0),
        words=layout.mark_words,
        scale=scale,
        segment=layout.segment,
        window=sizes.window,
        segments=layout.segments,
        probes=sizes.probes,
        CAUSAL=sizes.segment > 0,
        CODES=next_power_of_2(32 * layout.mark_words),
        STEPS=BISECTIONS,
        FEW=sizes.probes <= FEW_PROBES.value,
        FULL=dim == padded(dim),
        BM=blocks.rows,
        BC=COLUMNS,
        BD=padded(dim),
        DT=dot_type(queries.dtype),
        IP=precision(queries.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return marks
