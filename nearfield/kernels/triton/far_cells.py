"""Gradients of the moments of cells on a GPU: cell by cell, over the rows that see them closed."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nearfield.kernels.cells_plan import MOST_SPREAD, MOST_SQUARE, CellSettings
from nearfield.kernels.triton.common import cdiv, dot_type, padded, precision
from nearfield.kernels.triton.launch import Kernel
from nearfield.kernels.triton.layout import Layout
from nearfield.kernels.triton.route import closed_segments, squares_of
from nearfield.kernels.triton.rows import Rows
from nearfield.kernels.triton.tables import Tables
from nearfield.kernels.triton.tuning import blocks_for


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
    settings: CellSettings,
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
            count // settings.group,
            settings.group,
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
            settings.window,
            layout.segments,
            CAUSAL=settings.segment > 0,
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


def tilt(rows: Rows, layout: Layout, settings: CellSettings, scale: float, far_mass: Tensor, row_starts: Tensor) -> Tensor:
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
            count // settings.group,
            settings.group,
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
