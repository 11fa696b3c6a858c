"""All that a row does not open, in one kernel: keys seen one by one, and cells below its threshold. Tells which are above."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels.cells_plan import MOST_SPREAD, MOST_SQUARE, ROUTE_SPREADS, CellSettings
from nearfield.kernels.triton.common import dot_type, padded, precision
from nearfield.kernels.triton.layout import COLUMNS, Layout
from nearfield.kernels.triton.route import cell_moments, closed_segments, squares_of
from nearfield.kernels.triton.tables import Tables
from nearfield.kernels.triton.tuning import blocks_for


@triton.jit
def add_keys(top, mass, total, logit, factor, value, IP: tl.constexpr):
    """Add weights 2^logit * factor (-inf: not seen) with these values to running sums; also by how much those were shrunk."""
    new = tl.maximum(top, tl.max(logit, 1))
    base = tl.where(new > -float("inf"), new, 0.0)
    weight = tl.exp2(logit - base[:, None]) * factor
    shrink = tl.exp2(top - base)
    gain = tl.sum(weight, 1)
    total = total * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=IP)
    return new, mass * shrink + gain, total, shrink, gain


@triton.jit
def _far(
    queries,
    keys,
    values,
    visible,
    centroid,
    variance,
    mean_value,
    size,
    void,
    cross,
    tile_edges,
    tile_cell,
    tile_stop,
    threshold,
    marks,
    output,
    lse,
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
    visible_entry,
    slots,
    words,
    scale,
    segment,
    window,
    segments,
    sinks,
    CAUSAL: tl.constexpr,
    NARROW: tl.constexpr,
    SPREADS: tl.constexpr,
    MOST: tl.constexpr,
    MOST_SQ: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
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
    keys += entry * key_entry
    values += entry * value_entry
    visible += entry * visible_entry
    centroid += entry * cells * dim
    variance += entry * cells * dim
    mean_value += entry * cells * value_dim
    size += entry * cells
    void += entry * cells
    cross += entry * (segments + 1) * value_dim * dim
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    there = row < rows
    place = entry * rows + row
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    top = tl.full([BM], -float("inf"), tl.float32)
    mass = tl.zeros([BM], tl.float32)
    total = tl.zeros([BM, BV], tl.float32)

    # Keys seen one by one: the sinks, and those after the last closed segment. A sink that is also one of these counts once.
    if CAUSAL:
        local = tl.where(there & (sees > 0), closed * segment, 2147483647)
    else:
        local = sees
    last = tl.max(sees, 0)
    for start in range(0, tl.minimum(sinks, last), BN):
        position = start + tl.arange(0, BN)
        real = (position < sinks) & (position < last)
        key = tl.load(
            keys + position[None, :].to(tl.int64) * key_row + column[:, None], mask=real[None, :] & wide[:, None], other=0.0
        )
        value = tl.load(
            values + position[:, None].to(tl.int64) * value_row + value_column[None, :],
            mask=real[:, None] & value_wide[None, :],
            other=0.0,
        )
        logit = tl.dot(query, key, input_precision=IP) * (scale * LOG2E)
        seen = real[None, :] & (position[None, :] < sees[:, None]) & (position[None, :] < local[:, None])
        top, mass, total, _, _ = add_keys(top, mass, total, tl.where(seen, logit, -float("inf")), 1.0, value, IP)
    if CAUSAL:
        for start in range(tl.min(local, 0), last, BN):
            position = start + tl.arange(0, BN)
            real = position < last
            key = tl.load(
                keys + position[None, :].to(tl.int64) * key_row + column[:, None], mask=real[None, :] & wide[:, None], other=0.0
            )
            value = tl.load(
                values + position[:, None].to(tl.int64) * value_row + value_column[None, :],
                mask=real[:, None] & value_wide[None, :],
                other=0.0,
            )
            logit = tl.dot(query, key, input_precision=IP) * (scale * LOG2E)
            seen = (position[None, :] < sees[:, None]) & (position[None, :] >= local[:, None])
            top, mass, total, _, _ = add_keys(top, mass, total, tl.where(seen, logit, -float("inf")), 1.0, value, IP)

    # Cells below the threshold.
    square = squares_of(query, scale, SPREADS, MOST_SQ, DT)
    least_score = tl.load(threshold + place, mask=there, other=float("inf"))
    least = tl.min(tl.where(there, closed, segments), 0)
    most = tl.max(closed, 0)
    lane = tl.arange(0, BC)
    for past in range(least, most + 1):
        mine = (closed == past) & there
        other = tl.where(mine, 0.0, -float("inf"))
        begin = tl.load(tile_edges + past)
        end = tl.where(tl.max(mine.to(tl.int32), 0) > 0, tl.load(tile_edges + past + 1), 0)
        far = tl.zeros([BM], tl.float32)
        filled = tl.zeros([BM], tl.int32)
        for tile in range(begin, end):
            cell = tl.load(tile_cell + tile) + lane
            stop = tl.load(tile_stop + tile)
            real = cell < stop
            none = tl.load(void + cell, mask=real, other=-float("inf"))
            count = tl.load(size + cell, mask=real, other=1.0)
            first, spread = cell_moments(query, square, centroid, variance, cell, stop, column, wide, dim, IP)
            hidden = none[None, :] + other[:, None]
            taken = first * scale + tl.sqrt(spread) + hidden >= least_score[:, None]
            # The last slot is for what is not opened. Cells for which there is no room stay closed.
            taken = taken & (filled[:, None] + tl.cumsum(taken.to(tl.int32), 1) < slots)
            filled += tl.sum(taken.to(tl.int32), 1)
            boost = 1.0 + tl.minimum(spread, MOST * SPREADS * SPREADS) * (0.25 / (SPREADS * SPREADS))
            logit = tl.where(taken, -float("inf"), first * (scale * LOG2E) + hidden)
            value = tl.load(
                mean_value + cell[:, None] * value_dim + value_column[None, :],
                mask=real[:, None] & value_wide[None, :],
                other=0.0,
            )
            if NARROW:
                # float16 holds no weight much beyond 1.
                logit += tl.log2(boost * boost * count[None, :])
                top, mass, total, shrink, gain = add_keys(top, mass, total, logit, 1.0, value, IP)
            else:
                top, mass, total, shrink, gain = add_keys(top, mass, total, logit, boost * boost * count[None, :], value, IP)
            far = far * shrink + gain
            bits = tl.where(taken & mine[:, None], (1 << (lane % 32))[None, :], 0).to(tl.int32)
            word = tl.sum(tl.reshape(bits, [BM, BC // 32, 32]), 2)
            number = (tile - begin) * (BC // 32) + tl.arange(0, BC // 32)
            tl.store(marks + place[:, None] * words + number[None, :], word, mask=mine[:, None])
        if end > begin:
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
            total += (far * scale)[:, None] * tilt

    blind = mass <= 0.0
    result = tl.where(blind[:, None], 0.0, total / tl.where(blind, 1.0, mass)[:, None])
    final = place * slots + slots - 1
    tl.store(
        output + final[:, None] * value_dim + value_column[None, :],
        result.to(output.dtype.element_ty),
        mask=there[:, None] & value_wide[None, :],
    )
    tl.store(lse + final, tl.where(blind, -float("inf"), top + tl.log2(tl.where(blind, 1.0, mass))), mask=there)


def far(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    tables: Tables,
    layout: Layout,
    settings: CellSettings,
    scale: float,
    threshold: Tensor,
    output: Tensor,
    lse: Tensor,
) -> Tensor:
    """Fills in the last slot of `output` `[entries, rows, slots, value_dim]` and of `lse` (base 2).

    Returns which cells are to be opened, `[entries, rows, words]`: a bit for every column of the row.
    """
    entries, rows, dim = queries.shape
    value_dim = values.shape[2]
    marks = torch.zeros(entries, rows, layout.words, dtype=torch.int32, device=queries.device)
    blocks = blocks_for("far", max(dim, value_dim), queries.dtype)
    _far[(triton.cdiv(rows, blocks.rows), entries)](
        queries,
        keys,
        values,
        visible,
        tables.centroid,
        tables.variance,
        tables.value,
        tables.size,
        tables.void,
        tables.cross,
        layout.tile_edges,
        layout.tile_cell,
        layout.tile_stop,
        threshold,
        marks,
        output,
        lse,
        rows,
        layout.cells,
        dim,
        value_dim,
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        visible.stride(0),
        lse.shape[2],
        layout.words,
        scale,
        layout.segment,
        settings.window,
        layout.segments,
        settings.sinks,
        CAUSAL=settings.segment > 0,
        NARROW=queries.dtype == torch.float16,
        SPREADS=ROUTE_SPREADS,
        MOST=MOST_SPREAD,
        MOST_SQ=MOST_SQUARE,
        BM=blocks.rows,
        BN=blocks.keys,
        BC=COLUMNS,
        BD=padded(dim),
        BV=padded(value_dim),
        BK=min(64, padded(dim)),
        DT=dot_type(queries.dtype),
        IP=precision(queries.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    return marks


@triton.jit
def _list(
    marks,
    visible,
    tile_edges,
    tile_cell,
    opened,
    rows,
    visible_entry,
    opened_entry,
    slots,
    words,
    segment,
    window,
    segments,
    CAUSAL: tl.constexpr,
    PER_TILE: tl.constexpr,
    BM: tl.constexpr,
):
    """The numbers of the cells whose bits are set, in the order of columns."""
    entry = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    there = row < rows
    marks += (entry * rows + row) * words
    opened += entry * opened_entry + row * slots
    sees = tl.load(visible + entry * visible_entry + row, mask=there, other=0).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    begin = tl.load(tile_edges + closed, mask=there, other=0)
    filled = tl.zeros([BM], tl.int32)
    for number in range(words):
        word = tl.load(marks + number, mask=there, other=0)
        first = tl.load(tile_cell + begin + number // PER_TILE, mask=word != 0, other=0) + number % PER_TILE * 32
        while tl.max((word != 0).to(tl.int32), 0) > 0:
            low = word & -word
            # log2 of one bit; the highest is a negative number.
            bit = tl.where(low < 0, 31, tl.log2(tl.where(low > 0, low, 1).to(tl.float32)).to(tl.int32))
            real = (word != 0) & (filled < slots)
            tl.store(opened + filled, first + bit, mask=real)
            filled += real.to(tl.int32)
            word = word ^ low
    for slot in range(slots):
        tl.store(opened + slot, tl.full([BM], -1, tl.int32), mask=there & (slot >= filled))


def opened_cells(marks: Tensor, visible: Tensor, layout: Layout, settings: CellSettings, opened: Tensor) -> None:
    """Fills in `opened` `[entries, rows, slots]`: the cells whose bits are set, -1 where there are no more."""
    entries, rows, words = marks.shape
    _list[(triton.cdiv(rows, 128), entries)](
        marks,
        visible,
        layout.tile_edges,
        layout.tile_cell,
        opened,
        rows,
        visible.stride(0),
        opened.stride(0),
        opened.shape[2],
        words,
        layout.segment,
        settings.window,
        layout.segments,
        CAUSAL=settings.segment > 0,
        PER_TILE=COLUMNS // 32,
        BM=128,
        num_warps=4,
    )
