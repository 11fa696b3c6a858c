"""The far field on a GPU: cells that a row does not open, through their moments."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nearfield.kernels.cells_plan import MOST_SPREAD, MOST_SQUARE, CellSettings
from nearfield.kernels.triton.common import cdiv, dot_type, padded, precision
from nearfield.kernels.triton.launch import Kernel
from nearfield.kernels.triton.layout import Layout
from nearfield.kernels.triton.mark import is_marked
from nearfield.kernels.triton.route import cell_moments, closed_segments, squares_of
from nearfield.kernels.triton.tables import Tables
from nearfield.kernels.triton.tuning import blocks_for


@Kernel
def _far(
    queries,
    visible,
    centroid,
    variance,
    mean_value,
    weight,
    cross,
    seen_edges,
    seen_from,
    seen_cell,
    seen_stop,
    marks,
    output,
    lse,
    rows,
    cells,
    dim,
    value_dim,
    query_entry,
    query_row,
    visible_entry,
    output_entry,
    output_row,
    lse_entry,
    words,
    scale,
    segment,
    window,
    segments,
    CAUSAL: tl.constexpr,
    NARROW: tl.constexpr,
    MOST: tl.constexpr,
    MOST_SQ: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    LOG2E: tl.constexpr = 1.4426950408889634
    ODD: tl.constexpr = 1e38
    entry = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    there = row < rows
    place = entry * rows + row
    queries += entry * query_entry
    visible += entry * visible_entry
    centroid += entry * cells * dim
    variance += entry * cells * dim
    mean_value += entry * cells * value_dim
    weight += entry * cells
    cross += entry * (segments + 1) * value_dim * dim
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    # Keys seen one by one have been attended to.
    output += entry * output_entry + row[:, None] * output_row + value_column[None, :]
    lse += entry * lse_entry + row
    filled = there[:, None] & value_wide[None, :]
    top = tl.load(lse, mask=there, other=-float("inf"))
    mass = tl.where(top == -float("inf"), 0.0, 1.0)
    total = tl.load(output, mask=filled, other=0.0).to(tl.float32)

    # Cells that are not opened.
    square = squares_of(query, scale, 1.0, MOST_SQ, DT)
    least = tl.min(tl.where(there, closed, segments), 0)
    most = tl.max(closed, 0)
    lane = tl.arange(0, BC)
    for past in range(least, most + 1):
        mine = (closed == past) & there
        mass_before, top_before = mass, top
        first_run = tl.load(seen_edges + past)
        last_run = tl.where(tl.max(mine.to(tl.int32), 0) > 0, tl.load(seen_edges + past + 1), 0)
        number = 0
        for run in range(first_run, last_run):
            stop = tl.load(seen_stop + run)
            first_cell = tl.load(seen_cell + run)
            for start in range(tl.load(seen_from + run), stop, BC):
                cell = start + lane
                real = (cell >= first_cell) & (cell < stop)
                count = tl.load(weight + cell, mask=real, other=-float("inf"))
                first, spread = cell_moments(query, square, centroid, variance, cell, real, column, wide, dim, IP)
                value = tl.load(
                    mean_value + cell[:, None] * value_dim + value_column[None, :],
                    mask=real[:, None] & value_wide[None, :],
                    other=0.0,
                )
                taken = is_marked(marks + place * words + number, there, lane, BC)
                boost = 1.0 + 0.25 * tl.minimum(spread, MOST)
                logit = first * (scale * LOG2E) + count[None, :]
                if NARROW:
                    # float16 holds no weight much beyond 1.
                    logit = tl.where(taken, -float("inf"), logit + 2.0 * tl.log2(boost))
                new = tl.where(mine, tl.maximum(top, tl.max(logit, 1)), top)
                base = tl.where(new > -float("inf"), new, 0.0)
                power = tl.where(mine[:, None], tl.exp2(logit - base[:, None]), 0.0)
                if not NARROW:
                    power = tl.where(taken, 0.0, power * (boost * boost))
                shrink = tl.exp2(top - base)
                mass = mass * shrink + tl.sum(power, 1)
                total = total * shrink[:, None] + tl.dot(power.to(value.dtype), value, input_precision=IP)
                top = new
                number += BC // 32
            number += number % 2  # a run begins with a tile of 64
        if last_run > first_run:
            far = tl.where(mine, mass - mass_before * tl.exp2(top_before - tl.where(top > -float("inf"), top, 0.0)), 0.0)
            tilt = tl.zeros([BM, BV], tl.float32)
            for start in range(0, BD, BK):
                some = start + tl.arange(0, BK)
                part = tl.load(
                    queries + row[:, None] * query_row + some[None, :], mask=there[:, None] & (some < dim)[None, :], other=0.0
                )
                matrix = tl.load(
                    cross + (past * value_dim + value_column[None, :]) * dim + some[:, None],
                    mask=value_wide[None, :] & (some < dim)[:, None],
                    other=0.0,
                )
                tilt += tl.dot(part.to(DT), matrix.to(DT), input_precision=IP)
            total += tl.where(mine[:, None], (far * scale)[:, None] * tilt, 0.0)

    # A cell with a member that is not finite outweighs everything.
    mass = tl.where(top >= ODD, float("nan"), mass)
    blind = mass <= 0.0
    result = tl.where(blind[:, None], 0.0, total / tl.where(blind, 1.0, mass)[:, None])
    tl.store(output, result.to(output.dtype.element_ty), mask=filled)
    tl.store(lse, tl.where(blind, -float("inf"), top + tl.log2(tl.where(blind, 1.0, mass))), mask=there)


def far(
    queries: Tensor,
    visible: Tensor,
    tables: Tables,
    layout: Layout,
    settings: CellSettings,
    scale: float,
    marks: Tensor,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Add to `output` `[entries, rows, value_dim]` and log2-normalisers `lse` `[entries, rows]` what rows see of closed cells.

    `marks` `[entries, rows, words]`: a bit for every column of the row, 1 where the cell is opened.
    """
    entries, rows, dim = queries.shape
    value_dim = output.shape[2]
    blocks = blocks_for("far", max(dim, value_dim), queries.dtype)
    _far[(cdiv(rows, blocks.rows), entries)](
        queries,
        visible,
        tables.centroid,
        tables.variance,
        tables.value,
        tables.weight,
        tables.cross,
        layout.seen_edges,
        layout.seen_from,
        layout.seen_cell,
        layout.seen_stop,
        marks,
        output,
        lse,
        rows,
        layout.cells,
        dim,
        value_dim,
        *queries.stride()[:2],
        visible.stride(0),
        *output.stride()[:2],
        lse.stride(0),
        layout.words,
        scale,
        layout.segment,
        settings.window,
        layout.segments,
        CAUSAL=settings.segment > 0,
        NARROW=queries.dtype == torch.float16,
        MOST=MOST_SPREAD,
        MOST_SQ=MOST_SQUARE,
        BM=blocks.rows,
        BC=blocks.keys,
        BD=padded(dim),
        BV=padded(value_dim),
        BK=min(64, padded(dim)),
        DT=dot_type(queries.dtype),
        IP=precision(queries.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
