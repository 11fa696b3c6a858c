"""Which cells a row may open: a threshold on their scores, found without a [rows, cells] table in memory.

One sweep over the cells keeps the best score (for many probes the best two or four) of each of `COLUMNS` classes, the cells that
meet in the same column of a tile; the P-th best of these is a threshold that at least P cells reach, and rarely more.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels.cells_plan import MOST_SQUARE, ROUTE_SPREADS, CellSettings
from nearfield.kernels.triton.common import dot_type, padded, precision
from nearfield.kernels.triton.layout import COLUMNS, Layout
from nearfield.kernels.triton.tables import Tables
from nearfield.kernels.triton.tuning import blocks_for

BISECTIONS = 20
FEW_PROBES, MANY_PROBES = 8, 32
"""Up to so many one score of each class is kept, up to so many two, beyond that four."""


@triton.jit
def closed_segments(visible, segment, window, segments, CAUSAL: tl.constexpr):
    """How many segments a row that sees `visible` keys sees through cells."""
    if CAUSAL:
        own = (visible - 1) // segment
        return tl.where(visible > 0, tl.minimum(tl.maximum(own - window, 0), segments), 0)
    else:
        return tl.where(visible > 0, 1, 0)


@triton.jit
def squares_of(query, scale, SPREADS: tl.constexpr, MOST_SQ: tl.constexpr, DT: tl.constexpr):
    """(spreads * scale * q)^2: its product with variances is the square of what a score adds to q.mu."""
    scaled = query.to(tl.float32) * (scale * SPREADS)
    return tl.minimum(scaled * scaled, MOST_SQ).to(DT)


@triton.jit
def cell_moments(query, square, centroid, variance, cell, stop, column, wide, dim, IP: tl.constexpr):
    """q.mu and the squared spread of a tile of cells."""
    load = (cell < stop)[None, :] & wide[:, None]
    mean = tl.load(centroid + cell[None, :] * dim + column[:, None], mask=load, other=0.0)
    spread = tl.load(variance + cell[None, :] * dim + column[:, None], mask=load, other=0.0)
    return tl.dot(query, mean, input_precision=IP), tl.dot(square, spread, input_precision=IP)


@triton.jit
def score_of(first, spread, none, scale):
    """q.mu plus so many standard deviations, for all of a tile of cells."""
    spread = tl.maximum(spread, 1e-30)
    return first * scale + (spread * tl.rsqrt(spread) + none[None, :])


@triton.jit
def least_of(scores):
    """The least in each row that is one."""
    return tl.min(tl.where(scores > -float("inf"), scores, float("inf")), 1)


@triton.jit
def _threshold(
    queries,
    visible,
    centroid,
    variance,
    void,
    seen_edges,
    seen_cell,
    seen_stop,
    threshold,
    rows,
    cells,
    dim,
    query_entry,
    query_row,
    visible_entry,
    scale,
    segment,
    window,
    segments,
    probes,
    CAUSAL: tl.constexpr,
    SPREADS: tl.constexpr,
    MOST_SQ: tl.constexpr,
    STEPS: tl.constexpr,
    DEPTH: tl.constexpr,
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
    best = tl.full([BM, BC], -float("inf"), tl.float32)
    second = tl.full([BM, BC], -float("inf"), tl.float32)
    third, fourth = second, second
    for past in range(least, most + 1):
        mine = (closed == past) & there
        other = tl.where(mine, 0.0, -float("inf"))
        # Rows of a block hardly ever see different segments; where they do, most of those in between are seen by none.
        end = tl.where(tl.max(mine.to(tl.int32), 0) > 0, tl.load(seen_edges + past + 1), 0)
        for run in range(tl.load(seen_edges + past), end):
            stop = tl.load(seen_stop + run)
            for start in range(tl.load(seen_cell + run), stop, BC):
                cell = start + lane
                none = tl.load(void + cell, mask=cell < stop, other=-float("inf"))
                first, spread = cell_moments(query, square, centroid, variance, cell, stop, column, wide, dim, IP)
                score = score_of(first, spread, none, scale) + other[:, None]
                if DEPTH > 2:
                    fourth = tl.maximum(fourth, tl.minimum(third, score))
                    third = tl.maximum(third, tl.minimum(second, score))
                if DEPTH > 1:
                    second = tl.maximum(second, tl.minimum(best, score))
                best = tl.maximum(best, score)

    # The largest number, up to bisection, that `probes` of the kept scores reach.
    high = tl.max(best, 1)
    low = least_of(best)
    if DEPTH > 1:
        low = tl.minimum(low, least_of(second))
    if DEPTH > 2:
        low = tl.minimum(low, tl.minimum(least_of(third), least_of(fourth)))
    low = tl.minimum(low, high)
    for _ in range(STEPS):
        middle = 0.5 * (low + high)
        reach = tl.sum((best >= middle[:, None]).to(tl.int32), 1)
        if DEPTH > 1:
            reach += tl.sum((second >= middle[:, None]).to(tl.int32), 1)
        if DEPTH > 2:
            reach += tl.sum((third >= middle[:, None]).to(tl.int32) + (fourth >= middle[:, None]).to(tl.int32), 1)
        low = tl.where(reach >= probes, middle, low)
        high = tl.where(reach >= probes, high, middle)
    # Where there is no cell, none is opened.
    tl.store(threshold + entry * rows + row, tl.where(high > -float("inf"), low, float("inf")), mask=there)


def thresholds(queries: Tensor, visible: Tensor, tables: Tables, layout: Layout, settings: CellSettings, scale: float) -> Tensor:
    """The score from which on queries `[entries, rows, dim]` open a cell: `[entries, rows]`."""
    entries, rows, dim = queries.shape
    threshold = torch.empty(entries, rows, device=queries.device)
    blocks = blocks_for("route", dim, queries.dtype)
    _threshold[(triton.cdiv(rows, blocks.rows), entries)](
        queries,
        visible,
        tables.centroid,
        tables.variance,
        tables.void,
        layout.seen_edges,
        layout.seen_cell,
        layout.seen_stop,
        threshold,
        rows,
        layout.cells,
        dim,
        queries.stride(0),
        queries.stride(1),
        visible.stride(0),
        scale,
        layout.segment,
        settings.window,
        layout.segments,
        settings.probes,
        CAUSAL=settings.segment > 0,
        SPREADS=ROUTE_SPREADS,
        MOST_SQ=MOST_SQUARE,
        STEPS=BISECTIONS,
        DEPTH=1 if settings.probes <= FEW_PROBES else 2 if settings.probes <= MANY_PROBES else 4,
        BM=blocks.rows,
        BC=COLUMNS,
        BD=padded(dim),
        DT=dot_type(queries.dtype),
        IP=precision(queries.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return threshold
