"""The far field on a GPU: cells that a row does not open, through their moments. Forward, dq, and gradients of the moments."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells.far_field import MOST_SPREAD, MOST_SQUARE
from nearfield.cells.sizes import CellSizes
from nearfield.cells.triton.far_field import cell_moments, closed_segments, squares_of
from nearfield.cells.triton.layout import Layout
from nearfield.cells.triton.local import Rows
from nearfield.cells.triton.moments import Tables
from nearfield.cells.triton.route import is_marked
from nearfield.cells.triton.tuning import blocks_for
from nearfield.kernels.launch import Kernel, cdiv, dot_type, padded, precision


@Kernel
def _far_fwd(
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
    sizes: CellSizes,
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
    _far_fwd[(cdiv(rows, blocks.rows), entries)](
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
        sizes.window,
        layout.segments,
        CAUSAL=sizes.segment > 0,
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
    sizes: CellSizes,
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
        sizes.window,
        layout.segments,
        CAUSAL=sizes.segment > 0,
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


@Kernel
def _far_cells(
    queries,
    visible,
    grads,
    lse,
    delta,
    along,
    centroid,
    variance,
    mean_value,
    weights,
    tile_span,
    tile_cell,
    span_cell,
    span_from,
    span_to,
    row_starts,
    column_of,
    marks,
    centroid_grad,
    variance_grad,
    value_grad,
    rows,
    positions,
    group,
    cells,
    spans,
    dim,
    value_dim,
    query_entry,
    query_row,
    visible_entry,
    grad_entry,
    grad_row,
    row_entry,
    words,
    splits,
    entries,
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
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """Gradients of the moments of a tile of cells, over a share of the rows that see its span."""
    LOG2E: tl.constexpr = 1.4426950408889634
    tile, entry, share = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    queries += entry * query_entry
    visible += entry * visible_entry
    grads += entry * grad_entry
    lse += entry * row_entry
    delta += entry * row_entry
    along += entry * row_entry
    span = tl.load(tile_span + tile)
    start_cell = tl.load(tile_cell + tile)
    cell = start_cell + tl.arange(0, BC)
    real = cell < tl.load(span_cell + span + 1)
    offset = start_cell - tl.load(span_cell + span)
    least, beyond = tl.load(span_from + span), tl.load(span_to + span)
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    load = real[:, None] & wide[None, :]
    base = entry * cells + cell
    mean = tl.load(centroid + base[:, None] * dim + column[None, :], mask=load, other=0.0)
    spread = tl.load(variance + base[:, None] * dim + column[None, :], mask=load, other=0.0)
    value = tl.load(
        mean_value + base[:, None] * value_dim + value_column[None, :], mask=real[:, None] & value_wide[None, :], other=0.0
    )
    count = tl.load(weights + base, mask=real, other=-float("inf"))
    to_mean = tl.zeros([BC, BD], tl.float32)
    to_spread = tl.zeros([BC, BD], tl.float32)
    to_value = tl.zeros([BC, BV], tl.float32)
    first_position = tl.load(row_starts + entry * (segments + 2) + least)
    last_position = tl.load(row_starts + entry * (segments + 2) + beyond)
    number = (last_position - first_position + BM - 1) // BM
    per_share = (number + splits - 1) // splits
    begin = first_position + share * per_share * BM
    end = tl.minimum(last_position, begin + per_share * BM)
    for member in range(group):
        for start in range(begin, end, BM):
            position = start + tl.arange(0, BM)
            there = position < end
            row = (member * positions + position).to(tl.int64)
            query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
            grad = tl.load(
                grads + row[:, None] * grad_row + value_column[None, :], mask=there[:, None] & value_wide[None, :], other=0.0
            )
            ended = tl.load(lse + row, mask=there, other=float("inf"))
            product = tl.load(delta + row, mask=there, other=0.0) - tl.load(along + row, mask=there, other=0.0)
            sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
            closed = closed_segments(sees, segment, window, segments, CAUSAL)
            here = tl.load(column_of + closed * spans + span, mask=there, other=-1) + offset
            words_at = marks + (entry * rows + row) * words + here // 32
            past_word = words - here // 32
            by = here % 32
            taken = tl.zeros([BC, BM], tl.int32)
            for i in tl.static_range((BC + 31) // 32):
                # Columns need not begin with a word.
                word = tl.load(words_at + i, mask=there, other=0)
                more = tl.load(words_at + i + 1, mask=there & (past_word > i + 1) & (by > 0), other=0)
                word = ((word.to(tl.uint32) >> by.to(tl.uint32)) | (more.to(tl.uint32) << ((32 - by) % 32).to(tl.uint32))).to(
                    tl.int32
                )
                bit = word[None, :] & (1 << (tl.arange(0, BC) % 32))[:, None]
                taken = tl.where((tl.arange(0, BC) // 32 == i)[:, None], bit, taken)
            square = squares_of(query, scale, 1.0, MOST_SQ, DT)
            first = tl.dot(mean, tl.trans(query), input_precision=IP)
            second = tl.dot(spread, tl.trans(square), input_precision=IP)
            boost = 1.0 + 0.25 * tl.minimum(second, MOST)
            logit = first * (scale * LOG2E) + (count[:, None] - (ended * LOG2E)[None, :])
            weight = tl.exp2(logit) * (boost * boost)
            weight = tl.where((taken != 0) | (there == 0)[None, :], 0.0, weight)
            to_value += tl.dot(weight.to(grad.dtype), grad, input_precision=IP)
            slope = weight * (tl.dot(value, tl.trans(grad), input_precision=IP) - product[None, :])
            to_mean += tl.dot(slope.to(query.dtype), query, input_precision=IP)
            bend = tl.where(second < MOST, slope / (2.0 * boost), 0.0)
            to_spread += tl.dot(bend.to(DT), square, input_precision=IP)
    into = (share * entries + entry) * cells + cell
    tl.store(centroid_grad + into[:, None] * dim + column[None, :], to_mean * scale, mask=load)
    tl.store(variance_grad + into[:, None] * dim + column[None, :], to_spread, mask=load)
    tl.store(value_grad + into[:, None] * value_dim + value_column[None, :], to_value, mask=real[:, None] & value_wide[None, :])


def far_cells(
    rows: Rows,
    tables: Tables,
    layout: Layout,
    sizes: CellSizes,
    scale: float,
    marks: Tensor,
    along: Tensor,
    row_starts: Tensor,
    splits: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of centroids, variances and mean values `[entries, cells, ...]`, float32."""
    entries, count, dim = rows.queries.shape
    value_dim = rows.grads.shape[2]
    device, cells = rows.queries.device, layout.cells
    blocks = blocks_for("far_cells", max(dim, value_dim), rows.queries.dtype)
    found = [torch.empty(splits, entries, cells, width, device=device) for width in (dim, dim, value_dim)]
    if cells:
        tile_span, tile_cell = layout.cell_tiles(blocks.keys)
        _far_cells[(tile_span.shape[0], entries, splits)](
            rows.queries,
            rows.visible,
            rows.grads,
            rows.lse,
            rows.delta,
            along,
            tables.centroid,
            tables.variance,
            tables.value,
            tables.weight,
            tile_span,
            tile_cell,
            layout.span_cell,
            layout.span_from,
            layout.span_to,
            row_starts,
            layout.column,
            marks,
            *found,
            count,
            count // sizes.group,
            sizes.group,
            cells,
            len(layout.spans.all),
            dim,
            value_dim,
            *rows.queries.stride()[:2],
            rows.visible.stride(0),
            *rows.grads.stride()[:2],
            rows.lse.stride(0),
            layout.words,
            splits,
            entries,
            scale,
            layout.segment,
            sizes.window,
            layout.segments,
            CAUSAL=sizes.segment > 0,
            MOST=MOST_SPREAD,
            MOST_SQ=MOST_SQUARE,
            BM=blocks.rows,
            BC=blocks.keys,
            BD=padded(dim),
            BV=padded(value_dim),
            DT=dot_type(rows.queries.dtype),
            IP=precision(rows.queries.dtype),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    centroid, variance, value = (x.sum(0) if splits > 1 else x[0] for x in found)
    return centroid, variance, value


FULL = 1024
"""Programs that fill a card."""


@Kernel
def _tilt(
    queries,
    grads,
    far_mass,
    row_starts,
    found,
    positions,
    group,
    dim,
    value_dim,
    query_entry,
    query_row,
    grad_entry,
    grad_row,
    row_entry,
    segments,
    splits,
    scale,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """The gradient of X for rows with one number of closed segments, a share of them: sum of mass * grad * query^T."""
    which = tl.program_id(0)
    entry = tl.program_id(1).to(tl.int64)
    past, share = which // splits + 1, which % splits
    queries += entry * query_entry
    grads += entry * grad_entry
    far_mass += entry * row_entry
    column = tl.arange(0, BD)
    value_column = tl.program_id(2) * BV + tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    first = tl.load(row_starts + entry * (segments + 2) + past)
    last = tl.load(row_starts + entry * (segments + 2) + past + 1)
    number = (last - first + BM - 1) // BM
    per_share = (number + splits - 1) // splits
    begin = first + share * per_share * BM
    end = tl.minimum(last, begin + per_share * BM)
    total = tl.zeros([BV, BD], tl.float32)
    for member in range(group):
        for start in range(begin, end, BM):
            position = start + tl.arange(0, BM)
            there = position < end
            row = (member * positions + position).to(tl.int64)
            query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
            grad = tl.load(
                grads + row[None, :] * grad_row + value_column[:, None], mask=there[None, :] & value_wide[:, None], other=0.0
            )
            mass = tl.load(far_mass + row, mask=there, other=0.0)
            total += tl.dot((grad.to(tl.float32) * mass[None, :]).to(DT), query.to(DT), input_precision=IP)
    place = (entry * segments * splits + which) * value_dim + value_column
    tl.store(found + place[:, None] * dim + column[None, :], total * scale, mask=value_wide[:, None] & wide[None, :])


def tilt(rows: Rows, layout: Layout, sizes: CellSizes, scale: float, far_mass: Tensor, row_starts: Tensor) -> Tensor:
    """`[entries, segments, value_dim, dim]`: the gradient of the covariance that rows with 1, 2, ... closed segments see."""
    entries, count, dim = rows.queries.shape
    value_dim = rows.grads.shape[2]
    splits = max(1, min(32, FULL // max(1, entries * layout.segments)))
    found = torch.empty(entries, layout.segments, splits, value_dim, dim, device=rows.queries.device)
    block = min(64, padded(value_dim))
    if layout.segments:
        _tilt[(layout.segments * splits, entries, cdiv(value_dim, block))](
            rows.queries,
            rows.grads,
            far_mass,
            row_starts,
            found,
            count // sizes.group,
            sizes.group,
            dim,
            value_dim,
            *rows.queries.stride()[:2],
            *rows.grads.stride()[:2],
            rows.lse.stride(0),
            layout.segments,
            splits,
            scale,
            BM=64,
            BD=padded(dim),
            BV=block,
            DT=dot_type(rows.queries.dtype),
            IP=precision(rows.queries.dtype),
            num_warps=4,
            num_stages=2 if dim <= 64 else 1,
        )
    return found.sum(2)
