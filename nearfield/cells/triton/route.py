"""Opened cells as bits, one for every column of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells.far_field import MOST_SQUARE, ROUTE_SPREADS
from nearfield.cells.sizes import CellSizes
from nearfield.cells.triton.far_field import VOID, cell_moments, closed_segments, squares_of
from nearfield.cells.triton.layout import COLUMNS, Layout
from nearfield.cells.triton.moments import Tables
from nearfield.cells.triton.tuning import blocks_for
from nearfield.kernels.launch import Kernel, cdiv, dot_type, next_power_of_2, padded, precision


@triton.jit
def is_marked(words, there, lane, BC: tl.constexpr):
    """Whether cells are marked, for a tile of 32 or 64 columns whose first word is at `words`, row by row."""
    word = tl.load(words, mask=there, other=0)[:, None]
    if BC == 64:
        more = tl.load(words + 1, mask=there, other=0)
        word = tl.where((lane < 32)[None, :], word, more[:, None])
    return (word & (1 << (lane % 32))[None, :]) != 0


@Kernel
def _mark(
    opened,
    visible,
    span_of,
    span_cell,
    column,
    marks,
    rows,
    opened_entry,
    visible_entry,
    slots,
    words,
    spans,
    segment,
    window,
    segments,
    CAUSAL: tl.constexpr,
    BM: tl.constexpr,
):
    entry = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    there = row < rows
    opened += entry * opened_entry
    visible += entry * visible_entry
    marks += entry * rows * words
    sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    for slot in range(slots):
        cell = tl.load(opened + row * slots + slot, mask=there, other=-1)
        real = cell >= 0
        span = tl.load(span_of + cell, mask=real, other=0)
        place = tl.load(column + closed * spans + span, mask=real, other=0) + cell - tl.load(span_cell + span, mask=real, other=0)
        # A row is one thread's own: no one else writes to its words.
        here = marks + row * words + place // 32
        word = tl.load(here, mask=real, other=0)
        tl.store(here, word | (1 << (place % 32)).to(tl.int32), mask=real)


def mark(opened: Tensor, visible: Tensor, layout: Layout, sizes: CellSizes) -> Tensor:
    """`[entries, rows, words]`: 1 where the row opened the cell of the column."""
    entries, rows, slots = opened.shape
    marks = torch.zeros(entries, rows, layout.words, dtype=torch.int32, device=opened.device)
    _mark[(cdiv(rows, 128), entries)](
        opened,
        visible,
        layout.span_of,
        layout.span_cell,
        layout.column,
        marks,
        rows,
        opened.stride(0),
        visible.stride(0),
        slots,
        layout.words,
        len(layout.spans.all),
        layout.segment,
        sizes.window,
        layout.segments,
        CAUSAL=sizes.segment > 0,
        BM=128,
        num_warps=4,
    )
    return marks


BISECTIONS = 12
"""Cells whose scores differ by less than a 4,096th of those of the best and the worst kept one are as good as each other."""

FEW_PROBES = 16
"""Up to so many two scores of each class are kept, and the best found one after the other; beyond that four."""


@triton.jit
def least_of(scores, NONE: tl.constexpr):
    """The least in each row that is one."""
    return tl.min(tl.where(scores > NONE, scores, float("inf")), 1)


@triton.jit
def note(cell, code, slot, taken, opened, marks, counts):
    """Put cells on the lists of their rows, mark their columns, and count them."""
    tl.store(opened + slot, cell, mask=taken)
    tl.atomic_or(marks + code // 32, 1 << (code % 32), mask=taken, sem="relaxed")
    tl.atomic_add(counts + cell, 1, mask=taken, sem="relaxed")


@triton.jit
def list_above(
    scores, least, filled, opened, marks, counts, tile_cell, begin, lane, probes, NONE: tl.constexpr, CODES: tl.constexpr
):
    """The cells whose scores are not below `least`, as long as there is room."""
    taken = (scores >= least[:, None]) & (scores > NONE)
    # A product numbers them 1, 2, 3, ...; from 2^23 on the bits of a float32 count up by one.
    number = tl.dot(taken.to(tl.float16), (lane[:, None] <= lane[None, :]).to(tl.float16))
    slot = (number + 8388608.0).to(tl.int32, bitcast=True) + (filled - 0x4B000001)[:, None]
    taken = taken & (slot < probes)
    code = scores.to(tl.int32, bitcast=True) & (CODES - 1)
    cell = tl.load(tile_cell + begin[:, None] + code // lane.shape[0], mask=taken, other=0) + code % lane.shape[0]
    note(cell, code, slot, taken, opened[:, None], marks[:, None], counts)
    return tl.minimum(filled + tl.max(number, 1).to(tl.int32), probes)


@Kernel
def _route(
    queries,
    visible,
    centroid,
    variance,
    void,
    seen_edges,
    seen_from,
    seen_cell,
    seen_stop,
    tile_edges,
    tile_cell,
    opened,
    marks,
    counts,
    rows,
    cells,
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
    SPREADS: tl.constexpr,
    MOST_SQ: tl.constexpr,
    VOID: tl.constexpr,
    CODES: tl.constexpr,
    STEPS: tl.constexpr,
    FEW: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    NONE: tl.constexpr = VOID / 2
    entry = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    there = row < rows
    queries += entry * query_entry
    visible += entry * visible_entry
    centroid += entry * cells * dim
    variance += entry * cells * dim
    void += entry * cells
    column = tl.arange(0, BD)
    wide = column < dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    square = squares_of(query, scale, SPREADS, MOST_SQ, DT)
    sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    least = tl.min(tl.where(there, closed, segments), 0)
    most = tl.max(closed, 0)
    lane = tl.arange(0, BC)
    best = tl.full([BM, BC], VOID, tl.float32)
    second, third, fourth = best, best, best
    for past in range(least, most + 1):
        mine = (closed == past) & there
        # Rows of a block hardly ever see different segments; where they do, most of those in between are seen by none.
        end = tl.where(tl.max(mine.to(tl.int32), 0) > 0, tl.load(seen_edges + past + 1), 0)
        tile = 0
        for run in range(tl.load(seen_edges + past), end):
            stop = tl.load(seen_stop + run)
            first_cell = tl.load(seen_cell + run)
            for start in range(tl.load(seen_from + run), stop, BC):
                cell = start + lane
                real = (cell >= first_cell) & (cell < stop)
                none = tl.load(void + cell, mask=real, other=VOID)
                first, spread = cell_moments(query, square, centroid, variance, cell, real, column, wide, dim, IP)
                spread = tl.maximum(spread, 1e-30)
                score = first * scale + (spread * tl.rsqrt(spread) + none[None, :])
                score = tl.where(mine[:, None], score, VOID)
                # The last digits of a score tell its column.
                score = ((score.to(tl.int32, bitcast=True) & -CODES) | (tile * BC + lane)[None, :]).to(tl.float32, bitcast=True)
                if not FEW:
                    fourth = tl.maximum(fourth, tl.minimum(third, score))
                    third = tl.maximum(third, tl.minimum(second, score))
                second = tl.maximum(second, tl.minimum(best, score))
                best = tl.maximum(best, score)
                tile += 1

    opened += entry * opened_entry + row * probes
    marks += (entry * rows + row) * words
    counts += entry * cells
    begin = tl.load(tile_edges + closed)
    if FEW:
        # One after the other.
        filled = tl.zeros([BM], tl.int32)
        for slot in range(probes):
            high = tl.max(best, 1)
            taken = there & (high > NONE)
            code = high.to(tl.int32, bitcast=True) & (CODES - 1)
            cell = tl.load(tile_cell + begin + code // BC, mask=taken, other=0) + code % BC
            note(cell, code, slot, taken, opened, marks, counts)
            filled += taken.to(tl.int32)
            gone = best == high[:, None]
            best = tl.where(gone, second, best)
            second = tl.where(gone, VOID, second)
    else:
        # Those above the largest number, up to bisection, that `probes` of the kept scores reach.
        high = tl.max(best, 1)
        low = tl.minimum(least_of(best, NONE), least_of(second, NONE))
        low = tl.minimum(low, tl.minimum(least_of(third, NONE), least_of(fourth, NONE)))
        low = tl.minimum(low, high)
        for _ in range(STEPS):
            middle = 0.5 * (low + high)
            reach = tl.sum((best >= middle[:, None]).to(tl.int32) + (second >= middle[:, None]).to(tl.int32), 1)
            reach += tl.sum((third >= middle[:, None]).to(tl.int32) + (fourth >= middle[:, None]).to(tl.int32), 1)
            low = tl.where(reach >= probes, middle, low)
            high = tl.where(reach >= probes, high, middle)
        low = tl.where(there, low, float("inf"))
        filled = tl.zeros([BM], tl.int32)
        filled = list_above(best, low, filled, opened, marks, counts, tile_cell, begin, lane, probes, NONE, CODES)
        filled = list_above(second, low, filled, opened, marks, counts, tile_cell, begin, lane, probes, NONE, CODES)
        filled = list_above(third, low, filled, opened, marks, counts, tile_cell, begin, lane, probes, NONE, CODES)
        filled = list_above(fourth, low, filled, opened, marks, counts, tile_cell, begin, lane, probes, NONE, CODES)
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
    counts: Tensor,
) -> Tensor:
    """Fills in the cells that queries `[entries, rows, dim]` open, `[entries, rows, probes]`; -1 where there are no more.

    Returns the same as marks, see `mark`. To `counts` `[entries, cells]` is added how many rows open each.
    """
    entries, rows, dim = queries.shape
    marks = torch.zeros(entries, rows, layout.words, dtype=torch.int32, device=queries.device)
    blocks = blocks_for("route", dim, queries.dtype)
    _route[(cdiv(rows, blocks.rows), entries)](
        queries,
        visible,
        tables.centroid,
        tables.variance,
        tables.void,
        layout.seen_edges,
        layout.seen_from,
        layout.seen_cell,
        layout.seen_stop,
        layout.tile_edges,
        layout.tile_cell,
        opened,
        marks,
        counts,
        rows,
        layout.cells,
        dim,
        queries.stride(0),
        queries.stride(1),
        visible.stride(0),
        opened.stride(0),
        layout.words,
        scale,
        layout.segment,
        sizes.window,
        layout.segments,
        sizes.probes,
        CAUSAL=sizes.segment > 0,
        SPREADS=ROUTE_SPREADS,
        MOST_SQ=MOST_SQUARE,
        VOID=VOID,
        CODES=next_power_of_2(32 * layout.words),
        STEPS=BISECTIONS,
        FEW=sizes.probes <= FEW_PROBES,
        BM=blocks.rows,
        BC=COLUMNS,
        BD=padded(dim),
        DT=dot_type(queries.dtype),
        IP=precision(queries.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return marks
