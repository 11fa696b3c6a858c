"""Which cells a block of rows opens together, the list of keys that it reads, and their part in the gradient of queries.

See `cells.far_field` for the rule.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells.far_field import POOL
from nearfield.cells.sizes import CellSizes
from nearfield.cells.triton.attend import Lists
from nearfield.cells.triton.far_field import NOT_FINITE, ROUTE_SPREADS, VOID, squares, wide_cell_score
from nearfield.cells.triton.layout import COLUMNS, Layout, closed_segments, position_at, within
from nearfield.cells.triton.local import BackwardRows, backward_tile
from nearfield.cells.triton.moments import Tables
from nearfield.cells.triton.near import member_tile, position_of
from nearfield.cells.triton.tuning import blocks_for, fitting_warps
from nearfield.kernels.launch import LOG2E, Kernel, cdiv, dot_type, next_power_of_2, padded, precision, strides

BISECTIONS = 18
OCTAVES = 40
"""The threshold of votes is sought by bisection between the largest vote and 2^-40 of it: to 1 part in 10,000."""

CELLS_PER_WARP = 2048
"""A program holds the votes of all cells in registers."""

SLOTS = 16
"""Opened cells whose members one program lists."""


@triton.jit
def _cells_of(tile_cell, tile_begin, tile_end, column, columns, TILE: tl.constexpr):
    """The cells of some columns, and which of them exist. Those that do not are others of their span, or the very first one."""
    tile = column // TILE
    there = column < columns
    cell = tl.load(tile_cell + tile, mask=there, other=0) + column % TILE
    first, last = tl.load(tile_begin + tile, mask=there, other=0), tl.load(tile_end + tile, mask=there, other=0)
    return within(cell, first, last), (cell >= first) & (cell < last)


@triton.jit
def scores_of(query, square, centroid, variance, cell, column, wide, dim, cells, scale, FULL: tl.constexpr, IP: tl.constexpr):
    """Scores of cells for some queries, to base 2. Where a column has no cell they are those of any other."""
    at = tl.minimum(tl.maximum(cell, 0), cells - 1)[:, None] * dim + column[None, :]
    if FULL:
        mean, var = tl.load(centroid + at), tl.load(variance + at)
    else:
        mean = tl.load(centroid + at, mask=wide[None, :], other=0.0)
        var = tl.load(variance + at, mask=wide[None, :], other=0.0)
    first = tl.dot(query, tl.trans(mean), input_precision=IP)
    spread = tl.dot(square, tl.trans(var), input_precision=IP)
    return wide_cell_score(first * scale, spread) * LOG2E


@triton.jit
def _list_members(opened, starts, order, listed, own_sinks, slots, probes, BS: tl.constexpr, BP: tl.constexpr, BN: tl.constexpr):
    """Lists the positions of the members of BS opened cells of a block, from slot `slots` on, and before them the first
    `own_sinks` positions. Returns how many positions its list has in all."""
    every = tl.arange(0, BP)
    cell = tl.load(opened + every, mask=every < probes, other=-1)
    size = tl.load(starts + cell + 1, mask=cell >= 0, other=0) - tl.load(starts + cell, mask=cell >= 0, other=0)
    slot = slots + tl.arange(0, BS)
    into = tl.sum(tl.where(every[None, :] < slot[:, None], size[None, :], 0), 1) + own_sinks
    cell = tl.load(opened + slot, mask=slot < probes, other=-1)
    first = tl.load(starts + cell, mask=cell >= 0, other=0)
    held = tl.load(starts + cell + 1, mask=cell >= 0, other=0) - first
    lane = tl.arange(0, BN)
    for start in range(0, tl.max(held, 0), BN):
        real = start + lane[None, :] < held[:, None]
        position = tl.load(order + first[:, None] + start + lane[None, :], mask=real, other=0)
        tl.store(listed + into[:, None] + start + lane[None, :], position, mask=real)
    if slots == 0:
        for start in range(0, own_sinks, BN):
            tl.store(listed + start + lane, start + lane, mask=start + lane < own_sinks)
    return tl.sum(size, 0) + own_sinks


@triton.jit
def _own_sinks(sees, closed, segment, sinks, CAUSAL: tl.constexpr):
    """How many sinks a block sees through cells."""
    return tl.minimum(sinks, closed * segment if CAUSAL else sees)


@Kernel
def _vote(
    queries,
    visible,
    order,
    centroid,
    variance,
    log2_size,
    starts,
    tile_edges,
    tile_cell,
    tile_begin,
    tile_end,
    members,
    votes,
    opened,
    listed,
    listed_count,
    positions,
    share,
    cells,
    dim,
    query_entry,
    query_row,
    visible_entry,
    most_columns,
    most_listed,
    scale,
    segment,
    window,
    segments,
    sinks,
    probes,
    most_keys,
    CAUSAL: tl.constexpr,
    ORDERED: tl.constexpr,
    POOL: tl.constexpr,
    POOLS: tl.constexpr,
    STEPS: tl.constexpr,
    RANGE: tl.constexpr,
    FULL: tl.constexpr,
    TILE: tl.constexpr,
    BC: tl.constexpr,
    BW: tl.constexpr,
    BS: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """The cells that one block opens, and its `Lists`; `votes` end up as what `Lists.log2_size` says."""
    entry = tl.program_id(1).to(tl.int64)
    per_member = tl.cdiv(positions, share)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    member = number // per_member
    begin = number % per_member * share
    block = entry * tl.num_programs(0) + number
    queries += entry * query_entry + (member * positions).to(tl.int64) * query_row
    centroid += entry * cells * dim
    variance += entry * cells * dim
    log2_size += entry * cells
    starts += entry * cells
    votes += block * most_columns
    opened += block * probes
    sees = tl.load(visible + entry * visible_entry + member * positions + begin).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    first_tile = tl.load(tile_edges + closed)
    columns = (tl.load(tile_edges + closed + 1) - first_tile) * TILE
    tile_cell += first_tile
    tile_begin += first_tile
    tile_end += first_tile
    coordinate = tl.arange(0, BD)
    wide = coordinate < dim
    pool = tl.arange(0, POOLS)
    end = tl.minimum(begin + share, positions)
    order += entry * (tl.num_programs(0) // per_member) * positions + member * positions
    total = tl.zeros([POOLS, BD], tl.float32)
    for i in tl.static_range(POOL):
        place = begin + pool * POOL + i
        there = place < end
        position = position_at(order, place, there, ORDERED)
        query = tl.load(
            queries + position.to(tl.int64)[:, None] * query_row + coordinate[None, :],
            mask=there[:, None] & wide[None, :],
            other=0.0,
        ).to(tl.float32)
        # A query that is not finite must not decide for the others.
        total += tl.where(query * 0.0 == 0.0, query, 0.0)
    held = tl.minimum(tl.maximum(end - begin - pool * POOL, 0), POOL)
    pooled = (total / tl.maximum(held, 1).to(tl.float32)[:, None]).to(queries.dtype.element_ty)
    square = squares(pooled, scale * ROUTE_SPREADS, DT)
    lane = tl.arange(0, BC)

    m_i = tl.full([POOLS], VOID, tl.float32)
    l_i = tl.zeros([POOLS], tl.float32)
    for start in range(0, columns, BC):
        cell, real = _cells_of(tile_cell, tile_begin, tile_end, start + lane, columns, TILE)
        score = scores_of(pooled, square, centroid, variance, cell, coordinate, wide, dim, cells, scale, FULL, IP)
        size = tl.load(log2_size + cell, mask=real, other=-float("inf"))
        # A cell with a member that is not finite is not opened.
        score = tl.where(((size > -float("inf")) & (size < NOT_FINITE))[None, :], score + size[None, :], -float("inf"))
        m_new = tl.maximum(m_i, tl.max(score, 1))
        l_i = l_i * tl.exp2(m_i - m_new) + tl.sum(tl.exp2(score - m_new[:, None]), 1)
        m_i = m_new
    # A pool without rows has no vote.
    lse = tl.where(held > 0, m_i + tl.log2(tl.maximum(l_i, 1e-30)), -VOID)
    top = 0
    for start in range(0, columns, BC):
        cell, real = _cells_of(tile_cell, tile_begin, tile_end, start + lane, columns, TILE)
        score = scores_of(pooled, square, centroid, variance, cell, coordinate, wide, dim, cells, scale, FULL, IP)
        size = tl.load(log2_size + cell, mask=real, other=-float("inf"))
        vote = tl.sum(tl.exp2(score - lse[:, None]), 0)
        vote = tl.where((size > -float("inf")) & (size < NOT_FINITE) & (vote < float("inf")), vote, 0.0)
        tl.store(votes + start + lane, vote, mask=start + lane < columns)
        # Numbers that are not negative are in the same order as their bits.
        top = tl.maximum(top, tl.max(vote.to(tl.int32, bitcast=True), 0))
    tl.debug_barrier()

    # The least threshold, up to bisection, that few enough cells with few enough keys exceed.
    every = tl.arange(0, BW)
    vote = tl.load(votes + every, mask=every < columns, other=0.0).to(tl.int32, bitcast=True)
    cell, real = _cells_of(tile_cell, tile_begin, tile_end, every, columns, TILE)
    size = tl.load(starts + cell + 1, mask=real, other=0) - tl.load(starts + cell, mask=real, other=0)
    high = top
    low = tl.maximum(top - RANGE, 0) - 1
    for _ in range(STEPS):
        middle = low + (high - low) // 2
        taken = (vote > middle) & (vote > 0)
        reach, keys = tl.sum(taken.to(tl.int32), 0), tl.sum(tl.where(taken, size, 0), 0)
        fits = (reach <= probes) & (keys <= most_keys)
        high = tl.where(fits, middle, high)
        low = tl.where(fits, low, middle)
    taken = (vote > high) & (vote > 0)
    rank = tl.cumsum(taken.to(tl.int32), 0)
    tl.store(opened + rank - 1, cell, mask=taken)
    filled = tl.sum(taken.to(tl.int32), 0)
    tl.store(opened + every, tl.full([BW], -1, tl.int32), mask=(every >= filled) & (every < probes))
    left = tl.load(log2_size + cell, mask=real & (taken == 0), other=-float("inf"))
    tl.store(votes + every, left, mask=every < columns)
    tl.debug_barrier()
    own_sinks = _own_sinks(sees, closed, segment, sinks, CAUSAL)
    listed += block * most_listed
    count = own_sinks
    for slots in range(0, probes, BS):
        count = _list_members(opened, starts, members, listed, own_sinks, slots, probes, BS, BP, BN)
    tl.store(listed_count + block, count)


@Kernel
def _left_closed(
    visible,
    opened,
    log2_size,
    tile_edges,
    tile_cell,
    tile_begin,
    tile_end,
    left,
    positions,
    share,
    cells,
    visible_entry,
    most_columns,
    segment,
    window,
    segments,
    probes,
    CAUSAL: tl.constexpr,
    TILE: tl.constexpr,
    BC: tl.constexpr,
):
    """What `Lists.log2_size` says, for one block and the cells that it has opened."""
    entry = tl.program_id(1).to(tl.int64)
    per_member = tl.cdiv(positions, share)
    number = tl.program_id(0)
    block = entry * tl.num_programs(0) + number
    first_row = number // per_member * positions + number % per_member * share
    sees = tl.load(visible + entry * visible_entry + first_row).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    first_tile = tl.load(tile_edges + closed)
    columns = (tl.load(tile_edges + closed + 1) - first_tile) * TILE
    tile_cell += first_tile
    tile_begin += first_tile
    tile_end += first_tile
    log2_size += entry * cells
    opened += block * probes
    left += block * most_columns
    for start in range(0, columns, BC):
        column = start + tl.arange(0, BC)
        cell, real = _cells_of(tile_cell, tile_begin, tile_end, column, columns, TILE)
        for slot in range(probes):
            real = real & (cell != tl.load(opened + slot))
        size = tl.load(log2_size + cell, mask=real, other=-float("inf"))
        tl.store(left + column, size, mask=column < columns)


@Kernel
def _list_keys(
    visible,
    opened,
    starts,
    order,
    listed,
    count,
    positions,
    share,
    cells,
    visible_entry,
    most_listed,
    sinks,
    segment,
    window,
    segments,
    probes,
    CAUSAL: tl.constexpr,
    BS: tl.constexpr,
    BP: tl.constexpr,
    BN: tl.constexpr,
):
    """Positions of the members of some opened cells of one block; the first program lists the sinks too."""
    entry = tl.program_id(1).to(tl.int64)
    per_member = tl.cdiv(positions, share)
    number = tl.program_id(0)
    block = entry * tl.num_programs(0) + number
    first_row = number // per_member * positions + number % per_member * share
    sees = tl.load(visible + entry * visible_entry + first_row).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    own_sinks = _own_sinks(sees, closed, segment, sinks, CAUSAL)
    starts += entry * cells
    listed += block * most_listed
    held = _list_members(opened + block * probes, starts, order, listed, own_sinks, tl.program_id(2) * BS, probes, BS, BP, BN)
    if tl.program_id(2) == 0:
        tl.store(count + block, held)


def _most_listed(layout: Layout, sizes: CellSizes) -> tuple[int, int]:
    """The most keys that a block opens, and the length of its list."""
    most_keys = sizes.probes * cdiv(layout.segment, layout.cells_per_segment)
    return most_keys, cdiv(sizes.sinks + most_keys, 128) * 128


def list_bytes(layout: Layout, sizes: CellSizes, blocks: int) -> int:
    """How much memory the lists of an entry take."""
    return 4 * blocks * (32 * layout.mark_words + _most_listed(layout, sizes)[1])


def _room_for_lists(layout: Layout, sizes: CellSizes, opened: Tensor) -> tuple[Tensor, Tensor]:
    """What `list_keys` returns, to be filled in."""
    entries, number, _ = opened.shape
    listed = torch.empty(entries, number, _most_listed(layout, sizes)[1], dtype=torch.int32, device=opened.device)
    return listed, torch.empty(entries, number, dtype=torch.int32, device=opened.device)


def list_keys(
    visible: Tensor, tables: Tables, layout: Layout, sizes: CellSizes, opened: Tensor, sinks: int
) -> tuple[Tensor, Tensor]:
    """`[entries, blocks, most]`: the positions of the first `sinks` keys, as far as a block sees them through cells, and of the
    members of the cells that it opened; `[entries, blocks]`: how many these are."""
    entries, number, _ = opened.shape
    listed, count = _room_for_lists(layout, sizes, opened)
    _list_keys[(number, entries, cdiv(sizes.probes, SLOTS))](
        visible=visible,
        opened=opened,
        starts=tables.starts,
        order=tables.order,
        listed=listed,
        count=count,
        positions=visible.shape[1] // sizes.group,
        share=sizes.share,
        cells=layout.cells,
        visible_entry=visible.stride(0),
        most_listed=listed.shape[2],
        sinks=sinks,
        segment=layout.segment,
        window=sizes.window,
        segments=layout.segments,
        probes=sizes.probes,
        CAUSAL=sizes.segment > 0,
        BS=SLOTS,
        BP=next_power_of_2(max(16, sizes.probes)),
        BN=64,
        num_warps=4,
    )
    return listed, count


def lists_for(
    queries: Tensor,
    visible: Tensor,
    order: Tensor,
    tables: Tables,
    layout: Layout,
    sizes: CellSizes,
    scale: float,
    opened: Tensor,
) -> Lists:
    """Fills in `opened` `[entries, blocks, probes]`: the cells that blocks of rows open; -1 where there are fewer.

    They have no more keys than so many cells of mean size. `order` `[entries, rows]`: see `CellPlan`.
    """
    entries, rows, dim = queries.shape
    positions, number = rows // sizes.group, opened.shape[1]
    columns = 32 * layout.mark_words
    most_keys, _ = _most_listed(layout, sizes)
    log2_size = torch.empty(entries, number, columns, dtype=torch.float32, device=queries.device)
    listed, count = _room_for_lists(layout, sizes, opened)
    tuned = blocks_for("vote", dim, queries.dtype, queries.device)
    _vote[(number, entries)](
        queries=queries,
        visible=visible,
        order=order,
        centroid=tables.centroid,
        variance=tables.variance,
        log2_size=tables.log2_size,
        starts=tables.starts,
        tile_edges=layout.tile_edges,
        tile_cell=layout.tile_cell,
        tile_begin=layout.tile_begin,
        tile_end=layout.tile_end,
        members=tables.order,
        votes=log2_size,
        opened=opened,
        listed=listed,
        listed_count=count,
        positions=positions,
        share=sizes.share,
        cells=layout.cells,
        dim=dim,
        **strides(query=queries),
        visible_entry=visible.stride(0),
        most_columns=columns,
        most_listed=listed.shape[2],
        scale=scale,
        segment=layout.segment,
        window=sizes.window,
        segments=layout.segments,
        sinks=sizes.sinks,
        probes=sizes.probes,
        most_keys=most_keys,
        CAUSAL=sizes.segment > 0,
        ORDERED=sizes.ordered,
        POOL=POOL,
        POOLS=max(16, next_power_of_2(cdiv(sizes.share, POOL))),
        STEPS=BISECTIONS,
        RANGE=OCTAVES << 23,
        FULL=dim == padded(dim),
        TILE=COLUMNS,
        BC=tuned.keys,
        BW=next_power_of_2(max(columns, sizes.probes)),
        BS=SLOTS,
        BP=next_power_of_2(max(16, sizes.probes)),
        BN=64,
        BD=padded(dim),
        DT=dot_type(queries.dtype),
        IP=precision(queries.dtype),
        num_warps=max(tuned.warps, next_power_of_2(columns) // CELLS_PER_WARP),
        num_stages=tuned.stages,
    )
    return Lists(listed, count, log2_size)


def lists_of(visible: Tensor, tables: Tables, layout: Layout, sizes: CellSizes, opened: Tensor) -> Lists:
    """The same for cells that blocks have opened already. Waits for the card."""
    entries, number, probes = opened.shape
    held = torch.nn.functional.pad(tables.starts.diff().view(entries, -1), (1, 0))
    keys = held.gather(1, (opened + 1).long().flatten(1)).view(opened.shape).sum(-1)
    most_keys, _ = _most_listed(layout, sizes)
    if keys.numel() and int(keys.max()) > most_keys:
        raise ValueError(
            f"opened has cells of {int(keys.max())} keys for some block, and {probes} probes have room for {most_keys}; "
            "use more probes, with -1 in those that are not needed"
        )
    columns = 32 * layout.mark_words
    log2_size = torch.empty(entries, number, columns, dtype=torch.float32, device=opened.device)
    _left_closed[(number, entries)](
        visible=visible,
        opened=opened,
        log2_size=tables.log2_size,
        tile_edges=layout.tile_edges,
        tile_cell=layout.tile_cell,
        tile_begin=layout.tile_begin,
        tile_end=layout.tile_end,
        left=log2_size,
        positions=visible.shape[1] // sizes.group,
        share=sizes.share,
        cells=layout.cells,
        visible_entry=visible.stride(0),
        most_columns=columns,
        segment=layout.segment,
        window=sizes.window,
        segments=layout.segments,
        probes=probes,
        CAUSAL=sizes.segment > 0,
        TILE=COLUMNS,
        BC=256,
        num_warps=4,
    )
    listed, count = list_keys(visible, tables, layout, sizes, opened, sizes.sinks)
    return Lists(listed, count, log2_size)


@Kernel
def _listed_dq(
    queries,
    keys,
    values,
    do,
    lse,
    delta,
    order,
    listed,
    listed_count,
    dq,
    positions,
    rows,
    share,
    dim,
    value_dim,
    query_entry,
    query_row,
    key_entry,
    key_row,
    value_entry,
    value_row,
    do_entry,
    do_row,
    row_entry,
    most_listed,
    scale,
    ORDERED: tl.constexpr,
    FULL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
):
    """What the keys of a block's list add to dq."""
    entry = tl.program_id(1).to(tl.int64)
    per_member = tl.cdiv(positions, BM)
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    member, inside = number // per_member, number % per_member
    place = inside * BM + tl.arange(0, BM)
    there = place < positions
    first_row = member * positions
    at = tl.minimum(place, positions - 1)
    row = (first_row + position_at(order + entry * rows + first_row, at, there, ORDERED)).to(tl.int64)
    block = (entry * (tl.num_programs(0) // per_member) + member) * tl.cdiv(positions, share) + inside * BM // share
    keys += entry * key_entry
    values += entry * value_entry
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query, do_i, lse_i, delta_i = backward_tile(
        queries + entry * query_entry,
        do + entry * do_entry,
        lse + entry * row_entry,
        delta + entry * row_entry,
        row,
        there,
        query_row,
        do_row,
        column,
        value_column,
        wide,
        value_wide,
        FULL,
    )
    acc = tl.zeros([BM, BD], tl.float32)
    listed += block * most_listed
    count = tl.load(listed_count + block)
    # One tile ahead, so that keys and values wait for nothing.
    position = position_of(listed, 0, tl.maximum(count, 1), BN)
    for start in range(0, count, BN):
        lane = start + tl.arange(0, BN)
        here, position = position, position_of(listed, start + BN, count, BN)
        key, value = member_tile(keys, values, here, key_row, value_row, column, value_column, wide, value_wide, FULL)
        logit = tl.dot(query, tl.trans(key), input_precision=IP) * (scale * LOG2E) - lse_i[:, None]
        p = tl.where((lane < count)[None, :], tl.exp2(tl.minimum(logit, 0.0)), 0.0)
        ds = p * (tl.dot(do_i, tl.trans(value), input_precision=IP) - delta_i[:, None])
        acc = tl.dot(ds.to(key.dtype), key, acc, input_precision=IP)
    into = dq + (entry * rows + row)[:, None] * dim + column[None, :]
    tl.store(into, (acc * scale).to(dq.dtype.element_ty), mask=there[:, None] & wide[None, :])


def listed_dq(
    rows: BackwardRows,
    keys: Tensor,
    values: Tensor,
    sizes: CellSizes,
    order: Tensor,
    lists: tuple[Tensor, Tensor],
    scale: float,
    dq: Tensor,
) -> None:
    """Fills in `dq` `[entries, rows, 1, dim]`: what comes from the keys of lists, see `list_keys`."""
    listed, count = lists
    entries, _, dim = rows.queries.shape
    value_dim, positions = values.shape[2], rows.count // sizes.group
    tuned = blocks_for("local_dq", max(dim, value_dim), keys.dtype, keys.device)
    size = min(tuned.rows, sizes.share)
    _listed_dq[(sizes.group * cdiv(positions, size), entries)](
        queries=rows.queries,
        keys=keys,
        values=values,
        do=rows.do,
        lse=rows.lse,
        delta=rows.delta,
        order=order if sizes.ordered else listed,
        listed=listed,
        listed_count=count,
        dq=dq,
        positions=positions,
        rows=rows.count,
        share=sizes.share,
        dim=dim,
        value_dim=value_dim,
        **strides(query=rows.queries, key=keys, value=values, do=rows.do),
        row_entry=rows.lse.stride(0),
        most_listed=listed.shape[2],
        scale=scale,
        ORDERED=sizes.ordered,
        FULL=dim == padded(dim) and value_dim == padded(value_dim),
        BM=size,
        BN=tuned.keys,
        BD=padded(dim),
        BV=padded(value_dim),
        IP=precision(keys.dtype),
        num_warps=fitting_warps(tuned.warps, dim, value_dim),
        num_stages=tuned.stages,
    )
