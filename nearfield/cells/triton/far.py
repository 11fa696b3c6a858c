"""Gradients of the far field on a GPU, that is of cells that a row does not open: of queries and of the moments of cells."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells.sizes import CellSizes
from nearfield.cells.triton.attend import cell_tile
from nearfield.cells.triton.far_field import (
    boost_backward,
    cell_logit,
    cell_mass_roots,
    squares,
)
from nearfield.cells.triton.layout import COLUMNS, Layout, closed_segments, within
from nearfield.cells.triton.local import BackwardRows, backward_tile
from nearfield.cells.triton.moments import Tables
from nearfield.cells.triton.route import is_marked
from nearfield.cells.triton.tuning import blocks_for
from nearfield.kernels.launch import LOG2E, Kernel, cdiv, dot_type, padded, precision, strides
from nearfield.kernels.tensors import weighted_sums


@triton.jit
def tilt_backward(
    matrix,
    do,
    row,
    do_row,
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
    """X^T do, where X is the `matrix` `[value_dim, dim]`."""
    acc = tl.zeros([BM, BD], tl.float32)
    for start in range(0, BV, BK):
        some = start + tl.arange(0, BK)
        narrow = some < value_dim
        part = tl.load(matrix + some[:, None] * dim + column[None, :], mask=narrow[:, None] & wide[None, :], other=0.0)
        do_part = tl.load(do + row[:, None] * do_row + some[None, :], mask=there[:, None] & narrow[None, :], other=0.0)
        acc += tl.dot(do_part.to(DT), part.to(DT), input_precision=IP)
    return acc


@Kernel
def _far_dq(
    queries,
    visible,
    do,
    lse,
    delta,
    centroid,
    variance,
    mean_value,
    column_size,
    cross,
    tile_edges,
    tile_cell,
    tile_begin,
    tile_end,
    opened,
    marks,
    parts,
    dq,
    far_mass,
    tilt_delta,
    rows,
    cells,
    table_columns,
    dim,
    value_dim,
    query_entry,
    query_row,
    visible_entry,
    do_entry,
    do_row,
    row_entry,
    opened_entry,
    dq_entry,
    dq_row,
    slots,
    mark_entry,
    mark_word,
    scale,
    segment,
    window,
    segments,
    CAUSAL: tl.constexpr,
    LISTED: tl.constexpr,
    FULL: tl.constexpr,
    TILE: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    entry = tl.program_id(1).to(tl.int64)
    queries += entry * query_entry
    visible += entry * visible_entry
    do += entry * do_entry
    centroid += entry * cells * dim
    variance += entry * cells * dim
    mean_value += entry * cells * value_dim
    column_size += entry * table_columns
    cross += entry * (segments + 1) * value_dim * dim
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    there = row < rows
    place = entry * rows + row
    marks += entry * mark_entry + row
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    do_i = tl.load(do + row[:, None] * do_row + value_column[None, :], mask=there[:, None] & value_wide[None, :], other=0.0)
    lse_i = tl.load(lse + entry * row_entry + row, mask=there, other=float("inf"))
    delta_i = tl.load(delta + entry * row_entry + row, mask=there, other=0.0)
    sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    into = dq + entry * dq_entry + row[:, None] * dq_row + column[None, :]
    square = squares(query, scale, DT)
    least = tl.min(tl.where(there, closed, segments), 0)
    most = tl.max(closed, 0)
    lane = tl.arange(0, BC)
    # Rows that see different cells are kept apart to the end: what is not finite in a later one must not reach an earlier one.
    for past in range(least, most + 1):
        mine = (closed == past) & there
        # Logits become -inf where a row does not see these cells.
        base = tl.where(mine, lse_i * LOG2E, float("inf"))
        first_tile = tl.load(tile_edges + past)
        some = tl.max(mine.to(tl.int32), 0) > 0
        columns = tl.where(some, (tl.load(tile_edges + past + 1) - first_tile) * TILE, 0)
        acc = tl.zeros([BM, BD], tl.float32)
        dsquare = tl.zeros([BM, BD], tl.float32)
        far_l = tl.zeros([BM], tl.float32)
        tilt = tl.zeros([BM], tl.float32)

        # Cells left closed.
        if columns > 0:
            matrix = cross + past * value_dim * dim
            dtilt = tilt_backward(matrix, do, row, do_row, there, column, wide, dim, value_dim, BM, BD, BV, BK, DT, IP)
            tilt = tl.sum(dtilt * query.to(tl.float32), 1) * scale
            # One ahead, so that nothing waits for them.
            next_cell, first_cell = tl.load(tile_cell + first_tile), tl.load(tile_begin + first_tile)
            last_cell = tl.load(tile_end + first_tile)
            for start in range(0, columns, BC):
                cell = next_cell + start % TILE + lane
                at = within(cell, first_cell, last_cell)
                next_tile = first_tile + tl.minimum(start + BC, columns - 1) // TILE
                next_cell, first_cell = tl.load(tile_cell + next_tile), tl.load(tile_begin + next_tile)
                last_cell = tl.load(tile_end + next_tile)
                log2_n = tl.load(column_size + first_tile * TILE + start + lane)
                mean, var, value = cell_tile(
                    centroid, variance, mean_value, at, dim, value_dim, column, value_column, wide, value_wide, FULL
                )
                first = tl.dot(query, tl.trans(mean), input_precision=IP)
                spread = tl.dot(square, tl.trans(var), input_precision=IP)
                taken = is_marked(marks + tl.cast(start // 32, tl.int64) * mark_word, mark_word, mine, lane, BC)
                logit = cell_logit(first, scale, log2_n[None, :] - base[:, None])
                part, root = cell_mass_roots(logit, spread)
                part = tl.where(taken, 0.0, part)
                far_l += tl.sum(part * root, 1)
                dpart = part * (tl.dot(do_i, tl.trans(value), input_precision=IP) + (tilt - delta_i)[:, None])
                acc = tl.dot((dpart * root).to(mean.dtype), mean, acc, input_precision=IP)
                du = boost_backward(dpart, spread)
                dsquare = tl.dot(du.to(DT), var, dsquare, input_precision=IP)
            # Computed again: there are not enough registers to keep it.
            dtilt = tilt_backward(matrix, do, row, do_row, there, column, wide, dim, value_dim, BM, BD, BV, BK, DT, IP)
            acc += far_l[:, None] * dtilt
        if some:
            acc = acc * scale + dsquare * (2.0 * scale * scale) * query.to(tl.float32)
            # What comes from keys seen one by one is there already.
            acc += tl.load(into, mask=mine[:, None] & wide[None, :], other=0.0).to(tl.float32)
            # Cells that were opened.
            for slot in range(slots):
                real = mine
                if not LISTED:
                    real = mine & (tl.load(opened + entry * opened_entry + row * slots + slot, mask=mine, other=-1) >= 0)
                part = tl.load(
                    parts + (place * slots + slot)[:, None] * dim + column[None, :], mask=real[:, None] & wide[None, :], other=0.0
                )
                acc += part.to(tl.float32)
            tl.store(into, acc.to(dq.dtype.element_ty), mask=mine[:, None] & wide[None, :])
            tl.store(far_mass + entry * row_entry + row, far_l, mask=mine)
            tl.store(tilt_delta + entry * row_entry + row, tilt, mask=mine)


def far_dq(
    rows: BackwardRows,
    tables: Tables,
    layout: Layout,
    sizes: CellSizes,
    scale: float,
    opened: Tensor,
    marks: Tensor,
    parts: Tensor,
    dq: Tensor,
    far_mass: Tensor,
    tilt_delta: Tensor,
) -> None:
    """Adds to `dq` what comes from closed cells and, in `parts` `[entries, rows, slots, dim]`, from opened ones: of each by
    itself or, where rows open cells together, of all in one slot.

    Fills in, for each row, the mass of its closed cells (`far_mass`) and the product of their tilt and do (`tilt_delta`).
    """
    entries, count, dim = rows.queries.shape
    value_dim, dtype = rows.do.shape[2], rows.queries.dtype
    blocks = blocks_for("far_dq", max(dim, value_dim), dtype, rows.queries.device)
    assert far_mass.stride(0) == rows.lse.stride(0) == tilt_delta.stride(0) == rows.delta.stride(0)
    _far_dq[(cdiv(count, blocks.rows), entries)](
        queries=rows.queries,
        visible=rows.block_sees,
        do=rows.do,
        lse=rows.lse,
        delta=rows.delta,
        centroid=tables.centroid,
        variance=tables.variance,
        mean_value=tables.value,
        column_size=tables.column_size,
        cross=tables.cross,
        tile_edges=layout.tile_edges,
        tile_cell=layout.tile_cell,
        tile_begin=layout.tile_begin,
        tile_end=layout.tile_end,
        opened=opened,
        marks=marks,
        parts=parts,
        dq=dq,
        far_mass=far_mass,
        tilt_delta=tilt_delta,
        rows=count,
        cells=layout.cells,
        table_columns=tables.column_size.shape[1],
        dim=dim,
        value_dim=value_dim,
        **strides(query=rows.queries),
        visible_entry=rows.block_sees.stride(0),
        **strides(do=rows.do),
        row_entry=rows.lse.stride(0),
        opened_entry=opened.stride(0),
        **strides(dq=dq),
        slots=parts.shape[2],
        mark_entry=marks.stride(0),
        mark_word=marks.stride(1),
        scale=scale,
        segment=layout.segment,
        window=sizes.window,
        segments=layout.segments,
        CAUSAL=sizes.segment > 0,
        LISTED=sizes.share > 1,
        FULL=dim == padded(dim) and value_dim == padded(value_dim),
        TILE=COLUMNS,
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
def _far_dmoments(
    queries,
    do,
    lse,
    delta,
    tilt_delta,
    centroid,
    variance,
    mean_value,
    log2_size,
    tile_span,
    tile_cell,
    cell_edges,
    span_seen_from,
    span_seen_until,
    row_starts,
    span_column,
    marks,
    dcentroid,
    dvariance,
    dvalue,
    rows,
    positions,
    group,
    cells,
    dim,
    value_dim,
    query_entry,
    query_row,
    do_entry,
    do_row,
    row_entry,
    words,
    splits,
    split,
    value_split,
    scale,
    segments,
    FULL: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """Gradients of the moments of a tile of cells, over a share of the rows that see its span."""
    tile, entry, share = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    queries += entry * query_entry
    do += entry * do_entry
    lse += entry * row_entry
    delta += entry * row_entry
    tilt_delta += entry * row_entry
    span = tl.load(tile_span + tile)
    start_cell = tl.load(tile_cell + tile)
    cell = start_cell + tl.arange(0, BC)
    real = cell < tl.load(cell_edges + span + 1)
    here = tl.load(span_column + span) + start_cell - tl.load(cell_edges + span)
    first_word, by = here // 32, (here % 32).to(tl.uint32)
    marks += (entry * words + first_word) * rows
    least, beyond = tl.load(span_seen_from + span), tl.load(span_seen_until + span)
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    load = real[:, None] & wide[None, :]
    base = entry * cells + cell
    mean = tl.load(centroid + base[:, None] * dim + column[None, :], mask=load, other=0.0)
    var = tl.load(variance + base[:, None] * dim + column[None, :], mask=load, other=0.0)
    value = tl.load(
        mean_value + base[:, None] * value_dim + value_column[None, :], mask=real[:, None] & value_wide[None, :], other=0.0
    )
    log2_n = tl.load(log2_size + base, mask=real, other=-float("inf"))
    dcentroid_acc = tl.zeros([BC, BD], tl.float32)
    dvariance_acc = tl.zeros([BC, BD], tl.float32)
    dvalue_acc = tl.zeros([BC, BV], tl.float32)
    first_position = tl.load(row_starts + entry * (segments + 2) + least)
    last_position = tl.load(row_starts + entry * (segments + 2) + beyond)
    number = (last_position - first_position + BM - 1) // BM
    per_share = (number + splits - 1) // splits
    begin = first_position + share * per_share * BM
    end = tl.minimum(last_position, begin + per_share * BM)
    for member in range(group):
        first_row = (member * positions).to(tl.int64)
        for start in range(begin, end, BM):
            position = start + tl.arange(0, BM)
            row = first_row + tl.minimum(position, end - 1)
            query, do_i, lse_i, delta_i = backward_tile(
                queries, do, lse, delta, row, position < end, query_row, do_row, column, value_column, wide, value_wide, FULL
            )
            delta_i -= tl.load(tilt_delta + row)
            taken = tl.zeros([BC, BM], tl.int32)
            for i in tl.static_range((BC + 31) // 32):
                # The first column need not be at the start of a word.
                # Beyond the last word there are no cells.
                own, after = tl.minimum(i, words - 1 - first_word), tl.minimum(i + 1, words - 1 - first_word)
                word = tl.load(marks + own * rows + row).to(tl.uint32) >> by
                more = tl.load(marks + after * rows + row).to(tl.uint32) << (32 - by) % 32
                word = tl.where(by > 0, word | more, word).to(tl.int32)
                bit = word[None, :] & (1 << (tl.arange(0, BC) % 32))[:, None]
                taken = tl.where((tl.arange(0, BC) // 32 == i)[:, None], bit, taken)
            square = squares(query, scale, DT)
            first = tl.dot(mean, tl.trans(query), input_precision=IP)
            spread = tl.dot(var, tl.trans(square), input_precision=IP)
            logit = cell_logit(first, scale, log2_n[:, None] - lse_i[None, :])
            # Rows that are not there have a normaliser of infinity.
            part, root = cell_mass_roots(logit, spread)
            part = tl.where(taken != 0, 0.0, part)
            dvalue_acc = tl.dot((part * root).to(do_i.dtype), do_i, dvalue_acc, input_precision=IP)
            dpart = part * (tl.dot(value, tl.trans(do_i), input_precision=IP) - delta_i[None, :])
            dcentroid_acc = tl.dot((dpart * root).to(query.dtype), query, dcentroid_acc, input_precision=IP)
            du = boost_backward(dpart, spread)
            dvariance_acc = tl.dot(du.to(DT), square, dvariance_acc, input_precision=IP)
    into = share.to(tl.int64) * split + base[:, None] * dim + column[None, :]
    tl.store(dcentroid + into, dcentroid_acc * scale, mask=load)
    tl.store(dvariance + into, dvariance_acc, mask=load)
    into = share.to(tl.int64) * value_split + base[:, None] * value_dim + value_column[None, :]
    tl.store(dvalue + into, dvalue_acc, mask=real[:, None] & value_wide[None, :])


def far_dmoments(
    rows: BackwardRows,
    tables: Tables,
    layout: Layout,
    sizes: CellSizes,
    scale: float,
    marks: Tensor,
    tilt_delta: Tensor,
    row_starts: Tensor,
    moment_grads: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Fills in the gradients of centroids, variances and mean values `[splits, entries, cells, ...]`, in parts to be added."""
    dcentroid, dvariance, dvalue = moment_grads
    entries, count, dim = rows.queries.shape
    value_dim = rows.do.shape[2]
    device, cells = rows.queries.device, layout.cells
    blocks = blocks_for("far_dmoments", max(dim, value_dim), rows.queries.dtype, device)
    if cells:
        tile_span, tile_cell = layout.cell_tiles(blocks.keys)
        _far_dmoments[(tile_span.shape[0], entries, len(dcentroid))](
            queries=rows.queries,
            do=rows.do,
            lse=rows.lse,
            delta=rows.delta,
            tilt_delta=tilt_delta,
            centroid=tables.centroid,
            variance=tables.variance,
            mean_value=tables.value,
            log2_size=tables.log2_size,
            tile_span=tile_span,
            tile_cell=tile_cell,
            cell_edges=layout.cell_edges,
            span_seen_from=layout.span_seen_from,
            span_seen_until=layout.span_seen_until,
            row_starts=row_starts,
            span_column=layout.span_column,
            marks=marks,
            dcentroid=dcentroid,
            dvariance=dvariance,
            dvalue=dvalue,
            rows=count,
            positions=count // sizes.group,
            group=sizes.group,
            cells=cells,
            dim=dim,
            value_dim=value_dim,
            **strides(query=rows.queries),
            **strides(do=rows.do),
            row_entry=rows.lse.stride(0),
            words=layout.mark_words,
            splits=len(dcentroid),
            split=dcentroid.stride(0),
            value_split=dvalue.stride(0),
            scale=scale,
            segments=layout.segments,
            FULL=dim == padded(dim) and value_dim == padded(value_dim),
            BM=blocks.rows,
            BC=blocks.keys,
            BD=padded(dim),
            BV=padded(value_dim),
            DT=dot_type(rows.queries.dtype),
            IP=precision(rows.queries.dtype),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )


FULL_CARD = 1024
"""How many programs fill a card."""


@Kernel
def _far_dcross(
    queries,
    do,
    far_mass,
    row_starts,
    dcross,
    positions,
    group,
    dim,
    value_dim,
    query_entry,
    query_row,
    do_entry,
    do_row,
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
    """The gradient of X for a share of the rows with one number of closed segments: the sum of far_l do q^T."""
    which = tl.program_id(0)
    entry = tl.program_id(1).to(tl.int64)
    past, share = which // splits + 1, which % splits
    queries += entry * query_entry
    do += entry * do_entry
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
    acc = tl.zeros([BV, BD], tl.float32)
    for member in range(group):
        for start in range(begin, end, BM):
            position = start + tl.arange(0, BM)
            there = position < end
            row = (member * positions + position).to(tl.int64)
            query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
            do_t = tl.load(
                do + row[None, :] * do_row + value_column[:, None], mask=there[None, :] & value_wide[:, None], other=0.0
            )
            far_l = tl.load(far_mass + row, mask=there, other=0.0)
            acc += tl.dot((do_t.to(tl.float32) * far_l[None, :]).to(DT), query.to(DT), input_precision=IP)
    place = (entry * segments * splits + which) * value_dim + value_column
    tl.store(dcross + place[:, None] * dim + column[None, :], acc * scale, mask=value_wide[:, None] & wide[None, :])


def far_dcross(
    rows: BackwardRows, tables: Tables, layout: Layout, sizes: CellSizes, scale: float, far_mass: Tensor, row_starts: Tensor
) -> Tensor:
    """`[entries, spans + segments, value_dim, dim]`: the gradients of the products of deviations of each span; then, for each
    segment, the sum over the spans that its keys are in."""
    entries, count, dim = rows.queries.shape
    value_dim = rows.do.shape[2]
    splits = max(1, min(32, FULL_CARD // max(1, entries * layout.segments)))
    dcross = torch.empty(entries, layout.segments * splits, value_dim, dim, dtype=torch.float32, device=rows.queries.device)
    blocks = blocks_for("far_dcross", max(dim, value_dim), rows.queries.dtype, rows.queries.device)
    block = min(blocks.columns, padded(value_dim))
    if layout.segments:
        _far_dcross[(layout.segments * splits, entries, cdiv(value_dim, block))](
            queries=rows.queries,
            do=rows.do,
            far_mass=far_mass,
            row_starts=row_starts,
            dcross=dcross,
            positions=count // sizes.group,
            group=sizes.group,
            dim=dim,
            value_dim=value_dim,
            **strides(query=rows.queries, do=rows.do),
            row_entry=rows.lse.stride(0),
            segments=layout.segments,
            splits=splits,
            scale=scale,
            BM=blocks.rows,
            BD=padded(dim),
            BV=block,
            DT=dot_type(rows.queries.dtype),
            IP=precision(rows.queries.dtype),
            num_warps=blocks.warps,
            num_stages=blocks.stages,
        )
    divisor = None if layout.causal else tables.pooled[:, 1].contiguous()
    return weighted_sums(layout.product_factors(splits), dcross, divisor)
