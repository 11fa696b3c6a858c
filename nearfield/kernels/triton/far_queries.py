"""Gradients of queries on a GPU, row by row: through cells left closed, and what opened cells add."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels.cells_plan import MOST_SPREAD, MOST_SQUARE, CellSettings
from nearfield.kernels.triton.common import cdiv, dot_type, padded, precision
from nearfield.kernels.triton.launch import Kernel
from nearfield.kernels.triton.layout import Layout
from nearfield.kernels.triton.mark import is_marked
from nearfield.kernels.triton.route import closed_segments, squares_of
from nearfield.kernels.triton.rows import Rows
from nearfield.kernels.triton.tables import Tables
from nearfield.kernels.triton.tuning import blocks_for


@triton.jit
def back_through(
    matrix,
    grads,
    row,
    grad_row,
    there,
    column,
    wide,
    dim,
    value_dim,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """X^T of the gradient, X being the `matrix` `[value_dim, dim]`."""
    back = tl.zeros([BM, BD], tl.float32)
    for start in range(0, BV, BK):
        some = start + tl.arange(0, BK)
        narrow = some < value_dim
        part = tl.load(matrix + some[:, None] * dim + column[None, :], mask=narrow[:, None] & wide[None, :], other=0.0)
        piece = tl.load(grads + row[:, None] * grad_row + some[None, :], mask=there[:, None] & narrow[None, :], other=0.0)
        back += tl.dot(piece.to(DT), part.to(DT), input_precision=IP)
    return back


@Kernel
def _far_queries(
    queries,
    visible,
    grads,
    lse,
    delta,
    centroid,
    variance,
    mean_value,
    weights,
    cross,
    seen_edges,
    seen_from,
    seen_cell,
    seen_stop,
    opened,
    marks,
    parts,
    query_grad,
    far_mass,
    along,
    rows,
    cells,
    dim,
    value_dim,
    query_entry,
    query_row,
    visible_entry,
    grad_entry,
    grad_row,
    row_entry,
    opened_entry,
    result_entry,
    result_row,
    slots,
    words,
    scale,
    segment,
    window,
    segments,
    CAUSAL: tl.constexpr,
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
    entry = tl.program_id(1).to(tl.int64)
    queries += entry * query_entry
    visible += entry * visible_entry
    grads += entry * grad_entry
    centroid += entry * cells * dim
    variance += entry * cells * dim
    mean_value += entry * cells * value_dim
    weights += entry * cells
    cross += entry * (segments + 1) * value_dim * dim
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    there = row < rows
    place = entry * rows + row
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    grad = tl.load(grads + row[:, None] * grad_row + value_column[None, :], mask=there[:, None] & value_wide[None, :], other=0.0)
    ended = tl.load(lse + entry * row_entry + row, mask=there, other=float("inf"))
    product = tl.load(delta + entry * row_entry + row, mask=there, other=0.0)
    sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    into = query_grad + entry * result_entry + row[:, None] * result_row + column[None, :]
    square = squares_of(query, scale, 1.0, MOST_SQ, DT)
    least = tl.min(tl.where(there, closed, segments), 0)
    most = tl.max(closed, 0)
    lane = tl.arange(0, BC)
    # Rows that see different cells are kept apart to the end: what is not finite in a later one must not reach an earlier one.
    for past in range(least, most + 1):
        mine = (closed == past) & there
        # Minus infinity where a row is not to see these cells.
        base = tl.where(mine, ended * LOG2E, float("inf"))
        first_run = tl.load(seen_edges + past)
        runs_end = tl.load(seen_edges + past + 1)
        some = tl.max(mine.to(tl.int32), 0) > 0
        last_run = tl.where(some, runs_end, 0)
        total = tl.zeros([BM, BD], tl.float32)
        stretched = tl.zeros([BM, BD], tl.float32)
        far = tl.zeros([BM], tl.float32)
        tilt = tl.zeros([BM], tl.float32)

        # Cells left closed.
        if last_run > first_run:
            # What X q has in common with the gradient.
            matrix = cross + past * value_dim * dim
            back = back_through(matrix, grads, row, grad_row, there, column, wide, dim, value_dim, BM, BD, BV, BK, DT, IP)
            tilt = tl.sum(back * query.to(tl.float32), 1) * scale
            number = 0
            for run in range(first_run, last_run):
                stop = tl.load(seen_stop + run)
                first_cell = tl.load(seen_cell + run)
                for start in range(tl.load(seen_from + run), stop, BC):
                    cell = start + lane
                    real = (cell >= first_cell) & (cell < stop)
                    count = tl.load(weights + cell, mask=real, other=-float("inf"))
                    load = real[:, None] & wide[None, :]
                    mean = tl.load(centroid + cell[:, None] * dim + column[None, :], mask=load, other=0.0)
                    spread = tl.load(variance + cell[:, None] * dim + column[None, :], mask=load, other=0.0)
                    value = tl.load(
                        mean_value + cell[:, None] * value_dim + value_column[None, :],
                        mask=real[:, None] & value_wide[None, :],
                        other=0.0,
                    )
                    first = tl.dot(query, tl.trans(mean), input_precision=IP)
                    second = tl.dot(square, tl.trans(spread), input_precision=IP)
                    boost = 1.0 + 0.25 * tl.minimum(second, MOST)
                    taken = is_marked(marks + place * words + number, there, lane, BC)
                    logit = first * (scale * LOG2E) + (count[None, :] - base[:, None])
                    weight = tl.where(taken, 0.0, tl.exp2(logit) * (boost * boost))
                    far += tl.sum(weight, 1)
                    slope = weight * (tl.dot(grad, tl.trans(value), input_precision=IP) + (tilt - product)[:, None])
                    total += tl.dot(slope.to(mean.dtype), mean, input_precision=IP)
                    bend = tl.where(second < MOST, slope / (2.0 * boost), 0.0)
                    stretched += tl.dot(bend.to(DT), spread, input_precision=IP)
                    number += BC // 32
                number += number % 2  # a run begins with a tile of 64
            # Again, and not kept: there are not enough registers.
            back = back_through(matrix, grads, row, grad_row, there, column, wide, dim, value_dim, BM, BD, BV, BK, DT, IP)
            total += far[:, None] * back
        if some:
            total = total * scale + stretched * (2.0 * scale * scale) * query.to(tl.float32)
            # What keys seen one by one add is there already.
            total += tl.load(into, mask=mine[:, None] & wide[None, :], other=0.0).to(tl.float32)
            # Cells that were opened.
            for slot in range(slots):
                cell = tl.load(opened + entry * opened_entry + row * slots + slot, mask=mine, other=-1)
                real = mine & (cell >= 0)
                part = tl.load(
                    parts + (place * slots + slot)[:, None] * dim + column[None, :], mask=real[:, None] & wide[None, :], other=0.0
                )
                total += part.to(tl.float32)
            tl.store(into, total.to(query_grad.dtype.element_ty), mask=mine[:, None] & wide[None, :])
            tl.store(far_mass + entry * row_entry + row, far, mask=mine)
            tl.store(along + entry * row_entry + row, tilt, mask=mine)


def far_queries(
    rows: Rows,
    tables: Tables,
    layout: Layout,
    settings: CellSettings,
    scale: float,
    opened: Tensor,
    marks: Tensor,
    parts: Tensor,
    query_grad: Tensor,
    far_mass: Tensor,
    along: Tensor,
) -> None:
    """Add to the gradient of queries what closed and opened cells do; per row the mass of the closed cells and what X q has in
    common with the gradient are filled in."""
    entries, count, dim = rows.queries.shape
    value_dim, dtype = rows.grads.shape[2], rows.queries.dtype
    blocks = blocks_for("far_queries", max(dim, value_dim), dtype)
    assert far_mass.stride(0) == rows.lse.stride(0) == along.stride(0) == rows.delta.stride(0)
    _far_queries[(cdiv(count, blocks.rows), entries)](
        rows.queries,
        rows.visible,
        rows.grads,
        rows.lse,
        rows.delta,
        tables.centroid,
        tables.variance,
        tables.value,
        tables.weight,
        tables.cross,
        layout.seen_edges,
        layout.seen_from,
        layout.seen_cell,
        layout.seen_stop,
        opened,
        marks,
        parts,
        query_grad,
        far_mass,
        along,
        count,
        layout.cells,
        dim,
        value_dim,
        *rows.queries.stride()[:2],
        rows.visible.stride(0),
        *rows.grads.stride()[:2],
        rows.lse.stride(0),
        opened.stride(0),
        *query_grad.stride()[:2],
        opened.shape[2],
        layout.words,
        scale,
        layout.segment,
        settings.window,
        layout.segments,
        CAUSAL=settings.segment > 0,
        MOST=MOST_SPREAD,
        MOST_SQ=MOST_SQUARE,
        BM=blocks.rows,
        BC=blocks.keys,
        BD=padded(dim),
        BV=padded(value_dim),
        BK=min(64, padded(value_dim)),
        DT=dot_type(dtype),
        IP=precision(dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
