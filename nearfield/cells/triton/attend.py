"""Attention in one kernel, with one running softmax over keys and cells.

`attend_rows`: rows that open cells by themselves attend to all but these, `near` does the rest.
`attend`: a block of rows that open cells together attends to everything. It reads, in this order: the keys of its list (sinks,
and the members of the cells that it opened), the keys after its last closed segment, and the cells left closed. All rows of a
block see the same keys and cells, up to the causal mask at its end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells.sizes import CellSizes
from nearfield.cells.triton.far_field import NOT_FINITE, boost, cell_logit, log2_cell_mass, squares
from nearfield.cells.triton.layout import COLUMNS, Layout, closed_segments, position_at, within
from nearfield.cells.triton.local import edges_of, rows_at, tile_at
from nearfield.cells.triton.moments import Tables
from nearfield.cells.triton.route import is_marked
from nearfield.cells.triton.softmax import add_keys, add_seen, is_lost
from nearfield.cells.triton.tuning import blocks_for, fitting_warps
from nearfield.kernels.launch import LN2, LOG2E, Kernel, cdiv, dot_type, padded, precision, strides


@dataclass(frozen=True)
class Lists:
    """What each block of rows reads, `[entries, blocks, ...]`."""

    keys: Tensor
    """`[..., most]`: positions of keys that are read one by one, wherever they are"""
    count: Tensor
    """how many of these there are"""
    log2_size: Tensor
    """`[..., columns]`: log2 of how many keys the cell of a column has; -inf where it is opened, or there is none"""


@triton.jit
def _tile(
    keys,
    values,
    position,
    real,
    key_row,
    value_row,
    column,
    value_column,
    wide,
    value_wide,
    ALL: tl.constexpr,
    FULL: tl.constexpr,
):
    """Keys and values `[positions, columns]`; zeros where they are not `real`, unless ALL are. FULL: no columns are missing."""
    key_at = keys + position.to(tl.int64)[:, None] * key_row + column[None, :]
    value_at = values + position.to(tl.int64)[:, None] * value_row + value_column[None, :]
    if ALL and FULL:
        key, value = tl.load(key_at), tl.load(value_at)
    elif FULL:
        key, value = tl.load(key_at, mask=real[:, None], other=0.0), tl.load(value_at, mask=real[:, None], other=0.0)
    else:
        key = tl.load(key_at, mask=real[:, None] & wide[None, :], other=0.0)
        value = tl.load(value_at, mask=real[:, None] & value_wide[None, :], other=0.0)
    return key, value


@triton.jit
def cell_tile(centroid, variance, mean_value, cell, dim, value_dim, column, value_column, wide, value_wide, FULL: tl.constexpr):
    """Centroids, variances and mean values of some cells `[cells, columns]`."""
    mean, value = _tile(centroid, mean_value, cell, cell >= 0, dim, value_dim, column, value_column, wide, value_wide, True, FULL)
    if FULL:
        var = tl.load(variance + cell[:, None] * dim + column[None, :])
    else:
        var = tl.load(variance + cell[:, None] * dim + column[None, :], mask=wide[None, :], other=0.0)
    return mean, var, value


@triton.jit
def _add_cells(logit, spread, value, m_i, l_i, acc, NARROW: tl.constexpr, FIXED: tl.constexpr, IP: tl.constexpr):
    """Add cells to a softmax: their logits (see `cell_logit`; -inf: none there), spreads and mean values."""
    if FIXED:
        p = tl.exp2(logit - m_i[:, None]) * boost(spread)
        return m_i, l_i + tl.sum(p, 1), tl.dot(p.to(value.dtype), value, acc, input_precision=IP)
    if NARROW:
        # float16 holds no weight far above 1.
        logit = log2_cell_mass(logit, spread)
    m_new = tl.maximum(m_i, tl.max(logit, 1))
    base = tl.where(m_new > -float("inf"), m_new, 0.0)
    p = tl.exp2(logit - base[:, None])
    if not NARROW:
        p = p * boost(spread)
    alpha = tl.exp2(m_i - base)
    acc = tl.dot(p.to(value.dtype), value, acc * alpha[:, None], input_precision=IP)
    return m_new, l_i * alpha + tl.sum(p, 1), acc


@triton.jit
def _lost_before(lse, there):
    """Which rows are to be computed again. Only they are stored: rows of a block must not depend on each other."""
    known = tl.load(lse, mask=there, other=0.0)
    return known != known


@triton.jit
def _told(m_i, l_i, NARROW: tl.constexpr, FIXED: tl.constexpr):
    """Weights, NaN where a row is lost or, in the end, sees a cell with a member that is not finite: it outweighs everything."""
    if FIXED:
        bad = is_lost(l_i, NARROW)
    else:
        bad = m_i >= NOT_FINITE / 3
    return tl.where(bad, float("nan"), l_i)


@triton.jit
def _without_odd(qk, value):
    """Logits and values that do no harm where a row does not see them.

    Zero times a later value that is not finite would not be zero. Rows that do see it get NaN from their logits.
    """
    fine = value.to(tl.float32) * 0.0 == 0.0
    odd = tl.sum(tl.where(fine, 0, 1), 1) > 0
    value = tl.where(fine, value, 0.0).to(value.dtype)
    return tl.where(odd[None, :], float("nan"), qk), value


@triton.jit
def _tilt(
    queries,
    row,
    query_row,
    there,
    matrix,
    value_column,
    value_wide,
    dim,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """X q, where X is the `matrix` `[value_dim, dim]`."""
    acc = tl.zeros([BM, BV], tl.float32)
    for start in range(0, BD, BK):
        some = start + tl.arange(0, BK)
        narrow = some < dim
        part = tl.load(queries + row[:, None] * query_row + some[None, :], mask=there[:, None] & narrow[None, :], other=0.0)
        block = tl.load(
            matrix + value_column[None, :] * dim + some[:, None], mask=value_wide[None, :] & narrow[:, None], other=0.0
        )
        acc += tl.dot(part.to(DT), block.to(DT), input_precision=IP)
    return acc


@Kernel
def _attend(
    queries,
    keys,
    values,
    visible,
    order,
    listed,
    listed_count,
    log2_size,
    centroid,
    variance,
    mean_value,
    cross,
    tile_edges,
    tile_cell,
    tile_begin,
    tile_end,
    output,
    lse,
    positions,
    share,
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
    output_entry,
    output_row,
    lse_entry,
    most_listed,
    columns,
    scale,
    segment,
    window,
    segments,
    CAUSAL: tl.constexpr,
    ORDERED: tl.constexpr,
    NARROW: tl.constexpr,
    FIXED: tl.constexpr,
    AGAIN: tl.constexpr,
    FULL: tl.constexpr,
    TILE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    entry = tl.program_id(1).to(tl.int64)
    # The last blocks of a causal head see most: they begin first.
    per_member = tl.cdiv(positions, BM)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    member, inside = number // per_member, number % per_member
    place = inside * BM + tl.arange(0, BM)
    there = place < positions
    order += entry * (tl.num_programs(0) // per_member) * positions + member * positions
    row = (member * positions + position_at(order, place, there, ORDERED)).to(tl.int64)
    # Several blocks of this kernel may share one list.
    first_position = inside * BM // share * share
    block = entry * (tl.num_programs(0) // per_member) * tl.cdiv(positions, share)
    block += member * tl.cdiv(positions, share) + inside * BM // share
    lse += entry * lse_entry + row
    stored = there
    if AGAIN:
        stored = _lost_before(lse, there)
        if tl.max(stored.to(tl.int32), 0) == 0:
            return
    queries += entry * query_entry
    keys += entry * key_entry
    values += entry * value_entry
    visible += entry * visible_entry
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
    first_sees = tl.load(visible + member * positions + first_position).to(tl.int32)
    closed = closed_segments(first_sees, segment, window, segments, CAUSAL)
    scale2 = scale * LOG2E
    m_i = tl.full([BM], -float("inf"), tl.float32)
    l_i = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    lane = tl.arange(0, BN)

    listed += block * most_listed
    count = tl.load(listed_count + block)
    listed_whole = tl.maximum(count - 1, 0) // BN * BN
    begin = closed * segment
    whole = begin
    if CAUSAL:
        # Keys after the last closed segment that not all rows see. Every row sees one of them: itself.
        least = tl.min(tl.where(there, sees, 2147483647), 0)
        last = tl.max(sees, 0)
        whole = begin + tl.maximum(least - 1 - begin, 0) // BN * BN
        for start in range(whole, last, BN):
            own = start + lane
            key, value = _tile(
                keys, values, own, own < last, key_row, value_row, column, value_column, wide, value_wide, False, FULL
            )
            qk = tl.dot(query, tl.trans(key), input_precision=IP)
            qk, value = _without_odd(qk, value)
            qk = tl.where(own[None, :] < sees[:, None], qk, -float("inf"))
            m_i, l_i, acc = add_keys(qk, value, scale2, m_i, l_i, acc, IP)
    # Keys of the list, which all rows see. The last ones come first: there is always one of them if there are any at all.
    if listed_whole < count:
        real = listed_whole + lane < count
        own = tl.load(listed + listed_whole + lane, mask=real, other=0)
        key, value = _tile(keys, values, own, real, key_row, value_row, column, value_column, wide, value_wide, False, FULL)
        qk = tl.where(real[None, :], tl.dot(query, tl.trans(key), input_precision=IP), -float("inf"))
        m_i, l_i, acc = add_keys(qk, value, scale2, m_i, l_i, acc, IP)
    # One tile ahead, so that keys and values wait for nothing.
    next_own = tl.load(listed + lane, mask=lane < listed_whole, other=0)
    for start in range(0, listed_whole, BN):
        own, next_own = next_own, tl.load(listed + tl.minimum(start + BN, listed_whole - BN) + lane)
        key, value = _tile(keys, values, own, own >= 0, key_row, value_row, column, value_column, wide, value_wide, True, FULL)
        qk = tl.dot(query, tl.trans(key), input_precision=IP)
        m_i, l_i, acc = add_seen(qk, value, scale2, m_i, l_i, acc, FIXED, IP)
    if CAUSAL:
        for start in range(begin, whole, BN):
            own = start + lane
            key, value = _tile(
                keys, values, own, own >= 0, key_row, value_row, column, value_column, wide, value_wide, True, FULL
            )
            qk = tl.dot(query, tl.trans(key), input_precision=IP)
            m_i, l_i, acc = add_seen(qk, value, scale2, m_i, l_i, acc, FIXED, IP)

    # Cells left closed.
    first_tile = tl.load(tile_edges + closed)
    tiles = tl.load(tile_edges + closed + 1) - first_tile
    if tiles > 0:
        centroid += entry * cells * dim
        variance += entry * cells * dim
        mean_value += entry * cells * value_dim
        cross += (entry * (segments + 1) + closed) * value_dim * dim
        log2_size += block * columns
        tile_cell += first_tile
        tile_begin += first_tile
        tile_end += first_tile
        square = squares(query, scale, DT)
        l_before, m_before = l_i, m_i
        lane_c = tl.arange(0, BC)
        # One ahead, so that nothing waits for them.
        next_cell, first_cell, last_cell = tl.load(tile_cell), tl.load(tile_begin), tl.load(tile_end)
        for start in range(0, tiles * TILE, BC):
            # Beyond the ends of a span sizes are zero.
            cell = within(next_cell + start % TILE + lane_c, first_cell, last_cell)
            next_tile = tl.minimum((start + BC) // TILE, tiles - 1)
            next_cell, first_cell = tl.load(tile_cell + next_tile), tl.load(tile_begin + next_tile)
            last_cell = tl.load(tile_end + next_tile)
            log2_n = tl.load(log2_size + start + lane_c)
            mean, var, value = cell_tile(
                centroid, variance, mean_value, cell, dim, value_dim, column, value_column, wide, value_wide, FULL
            )
            logit = cell_logit(tl.dot(query, tl.trans(mean), input_precision=IP), scale, log2_n[None, :])
            spread = tl.dot(square, tl.trans(var), input_precision=IP)
            m_i, l_i, acc = _add_cells(logit, spread, value, m_i, l_i, acc, NARROW, FIXED, IP)
        far_l = l_i - (l_before if FIXED else l_before * tl.exp2(m_before - tl.where(m_i > -float("inf"), m_i, 0.0)))
        tilt = _tilt(queries, row, query_row, there, cross, value_column, value_wide, dim, BM, BD, BV, BK, DT, IP)
        acc += (far_l * scale)[:, None] * tilt

    l_i = _told(m_i, l_i, NARROW, FIXED)
    blind = (l_i <= 0.0) | (sees == 0)
    result = tl.where(blind[:, None], 0.0, acc / tl.where(blind, 1.0, l_i)[:, None])
    tl.store(
        output + entry * output_entry + row[:, None] * output_row + value_column[None, :],
        result.to(output.dtype.element_ty),
        mask=stored[:, None] & value_wide[None, :],
    )
    lse_i = (m_i + tl.log2(tl.where(blind, 1.0, l_i))) * LN2
    tl.store(lse, tl.where(blind, -float("inf"), lse_i), mask=stored)


@Kernel
def _attend_rows(
    queries,
    keys,
    values,
    visible,
    marks,
    column_size,
    centroid,
    variance,
    mean_value,
    cross,
    tile_edges,
    tile_cell,
    tile_begin,
    tile_end,
    output,
    lse,
    positions,
    cells,
    table_columns,
    dim,
    value_dim,
    query_entry,
    query_row,
    key_entry,
    key_row,
    value_entry,
    value_row,
    visible_entry,
    output_entry,
    output_row,
    lse_entry,
    mark_entry,
    mark_word,
    scale,
    segment,
    window,
    segments,
    sinks,
    CAUSAL: tl.constexpr,
    NARROW: tl.constexpr,
    FIXED: tl.constexpr,
    AGAIN: tl.constexpr,
    FULL: tl.constexpr,
    TILE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """Where each row opens cells by itself: sinks, keys after its last closed segment, and the cells that it left closed."""
    entry = tl.program_id(1).to(tl.int64)
    # The last blocks of a causal head see most: they begin first.
    row, there = rows_at(tl.num_programs(0) - 1 - tl.program_id(0), positions, BM)
    lse += entry * lse_entry + row
    stored = there
    if AGAIN:
        stored = _lost_before(lse, there)
        if tl.max(stored.to(tl.int32), 0) == 0:
            return
    queries += entry * query_entry
    keys += entry * key_entry
    values += entry * value_entry
    visible += entry * visible_entry
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    scale2 = scale * LOG2E
    m_i = tl.full([BM], -float("inf"), tl.float32)
    l_i = tl.zeros([BM], tl.float32)
    acc = tl.zeros([BM, BV], tl.float32)
    if CAUSAL:
        local = tl.where(there & (sees > 0), closed * segment, 2147483647)
        begin, middle, whole, last, sink_tiles, before, tiles = edges_of(sees, local, there, sinks, BN)
    else:
        local = sees
        begin, middle, whole, last = 0, 0, 0, tl.max(sees, 0)
        sink_tiles = (tl.minimum(sinks, last) + BN - 1) // BN
        before, tiles = sink_tiles, sink_tiles
    for tile in range(tiles):
        own, stop, is_sink = tile_at(tile, begin, middle, whole, last, sink_tiles, before, sinks, BN)
        key, value = _tile(keys, values, own, own < stop, key_row, value_row, column, value_column, wide, value_wide, False, FULL)
        qk = tl.dot(query, tl.trans(key), input_precision=IP)
        if CAUSAL:
            qk, value = _without_odd(qk, value)
        # A sink that is also one of the keys after the last closed segment counts once.
        low, high = tl.where(is_sink, 0, local), tl.minimum(tl.where(is_sink, tl.minimum(sees, local), sees), stop)
        qk = tl.where((own[None, :] >= low[:, None]) & (own[None, :] < high[:, None]), qk, -float("inf"))
        m_i, l_i, acc = add_keys(qk, value, scale2, m_i, l_i, acc, IP)
    if CAUSAL:
        for start in range(middle, whole, BN):
            own = start + tl.arange(0, BN)
            key, value = _tile(
                keys, values, own, own >= 0, key_row, value_row, column, value_column, wide, value_wide, True, FULL
            )
            qk = tl.dot(query, tl.trans(key), input_precision=IP)
            m_i, l_i, acc = add_seen(qk, value, scale2, m_i, l_i, acc, FIXED, IP)

    # Cells left closed.
    centroid += entry * cells * dim
    variance += entry * cells * dim
    mean_value += entry * cells * value_dim
    column_size += entry * table_columns
    cross += entry * (segments + 1) * value_dim * dim
    marks += entry * mark_entry + row
    square = squares(query, scale, DT)
    lane = tl.arange(0, BC)
    least = tl.min(tl.where(there, closed, segments), 0)
    for past in range(least, tl.max(closed, 0) + 1):
        mine = (closed == past) & there
        l_before, m_before = l_i, m_i
        first_tile = tl.load(tile_edges + past)
        # Rows of a block hardly ever see different segments; where they do, most of those in between are seen by none.
        columns = tl.where(tl.max(mine.to(tl.int32), 0) > 0, (tl.load(tile_edges + past + 1) - first_tile) * TILE, 0)
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
            # Rows that see other segments get nothing.
            taken = is_marked(marks + tl.cast(start // 32, tl.int64) * mark_word, mark_word, mine, lane, BC)
            logit = cell_logit(tl.dot(query, tl.trans(mean), input_precision=IP), scale, log2_n[None, :])
            spread = tl.dot(square, tl.trans(var), input_precision=IP)
            if FIXED:
                p = tl.where(taken, 0.0, tl.exp2(logit - m_i[:, None]) * boost(spread))
                l_i += tl.sum(p, 1)
                acc = tl.dot(p.to(value.dtype), value, acc, input_precision=IP)
            else:
                # What a row does not see may not be finite.
                logit, spread = tl.where(taken, -float("inf"), logit), tl.where(taken, 0.0, spread)
                m_i, l_i, acc = _add_cells(logit, spread, value, m_i, l_i, acc, NARROW, FIXED, IP)
        if columns > 0:
            far_l = l_i - (l_before if FIXED else l_before * tl.exp2(m_before - tl.where(m_i > -float("inf"), m_i, 0.0)))
            matrix = cross + past * value_dim * dim
            tilt = _tilt(queries, row, query_row, there, matrix, value_column, value_wide, dim, BM, BD, BV, BK, DT, IP)
            acc += tl.where(mine[:, None], (far_l * scale)[:, None] * tilt, 0.0)

    l_i = _told(m_i, l_i, NARROW, FIXED)
    blind = (l_i <= 0.0) | (sees == 0)
    result = tl.where(blind[:, None], 0.0, acc / tl.where(blind, 1.0, l_i)[:, None])
    tl.store(
        output + entry * output_entry + row[:, None] * output_row + value_column[None, :],
        result.to(output.dtype.element_ty),
        mask=stored[:, None] & value_wide[None, :],
    )
    lse_i = tl.where(blind, -float("inf"), m_i + tl.log2(tl.where(blind, 1.0, l_i)))
    tl.store(lse, lse_i, mask=stored)


def attend_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    tables: Tables,
    layout: Layout,
    sizes: CellSizes,
    scale: float,
    marks: Tensor,
    members: int,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Fills in `output` `[entries, rows, value_dim]` and log2-normalisers `lse` `[entries, rows]`, without opened cells.

    `marks` `[entries, words, rows]`: a bit for every column of the row, 1 where the cell is opened. `members`: of how many heads
    these rows are, equally many of each.
    """
    entries, rows, dim = queries.shape
    value_dim, positions = values.shape[2], rows // members
    blocks = blocks_for("attend_rows", max(dim, value_dim), queries.dtype, queries.device)
    for fixed, again in ((True, False), (False, True)) if sizes.segment else ((False, False),):
        _attend_rows[(members * cdiv(positions, blocks.rows), entries)](
            queries=queries,
            keys=keys,
            values=values,
            visible=visible,
            marks=marks,
            column_size=tables.column_size,
            centroid=tables.centroid,
            variance=tables.variance,
            mean_value=tables.value,
            cross=tables.cross,
            tile_edges=layout.tile_edges,
            tile_cell=layout.tile_cell,
            tile_begin=layout.tile_begin,
            tile_end=layout.tile_end,
            output=output,
            lse=lse,
            positions=positions,
            cells=layout.cells,
            table_columns=tables.column_size.shape[1],
            dim=dim,
            value_dim=value_dim,
            **strides(query=queries, key=keys, value=values),
            visible_entry=visible.stride(0),
            **strides(output=output),
            lse_entry=lse.stride(0),
            mark_entry=marks.stride(0),
            mark_word=marks.stride(1),
            scale=scale,
            segment=layout.segment,
            window=sizes.window,
            segments=layout.segments,
            sinks=sizes.sinks,
            CAUSAL=sizes.segment > 0,
            NARROW=queries.dtype == torch.float16,
            FIXED=fixed,
            AGAIN=again,
            FULL=dim == padded(dim) and value_dim == padded(value_dim),
            TILE=COLUMNS,
            BM=blocks.rows,
            BN=blocks.keys,
            BC=blocks.cells,
            BD=padded(dim),
            BV=padded(value_dim),
            BK=min(64, padded(dim)),
            DT=dot_type(queries.dtype),
            IP=precision(queries.dtype),
            num_warps=fitting_warps(blocks.warps, dim, value_dim),
            num_stages=blocks.stages,
        )


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    tables: Tables,
    layout: Layout,
    sizes: CellSizes,
    scale: float,
    order: Tensor,
    lists: Lists,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Fills in `output` `[entries, rows, value_dim]` and log-normalisers `lse` `[entries, rows]`.

    `order` `[entries, rows]`: see `CellPlan`.
    """
    entries, rows, dim = queries.shape
    value_dim, positions = values.shape[2], rows // sizes.group
    blocks = blocks_for("attend", max(dim, value_dim), queries.dtype, queries.device)
    size = min(blocks.rows, sizes.share)
    for fixed, again in (True, False), (False, True):
        _attend[(sizes.group * cdiv(positions, size), entries)](
            queries=queries,
            keys=keys,
            values=values,
            visible=visible,
            order=order,
            listed=lists.keys,
            listed_count=lists.count,
            log2_size=lists.log2_size,
            centroid=tables.centroid,
            variance=tables.variance,
            mean_value=tables.value,
            cross=tables.cross,
            tile_edges=layout.tile_edges,
            tile_cell=layout.tile_cell,
            tile_begin=layout.tile_begin,
            tile_end=layout.tile_end,
            output=output,
            lse=lse,
            positions=positions,
            share=sizes.share,
            cells=layout.cells,
            dim=dim,
            value_dim=value_dim,
            **strides(query=queries, key=keys, value=values),
            visible_entry=visible.stride(0),
            **strides(output=output),
            lse_entry=lse.stride(0),
            most_listed=lists.keys.shape[2],
            columns=lists.log2_size.shape[2],
            scale=scale,
            segment=layout.segment,
            window=sizes.window,
            segments=layout.segments,
            CAUSAL=sizes.segment > 0,
            ORDERED=sizes.ordered,
            NARROW=queries.dtype == torch.float16,
            FIXED=fixed,
            AGAIN=again,
            FULL=dim == padded(dim) and value_dim == padded(value_dim),
            TILE=COLUMNS,
            BM=size,
            BN=blocks.keys,
            BC=blocks.cells,
            BD=padded(dim),
            BV=padded(value_dim),
            BK=min(64, padded(dim)),
            DT=dot_type(queries.dtype),
            IP=precision(queries.dtype),
            num_warps=fitting_warps(blocks.warps, dim, value_dim),
            num_stages=blocks.stages,
        )
