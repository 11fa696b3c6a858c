"""Keys that rows see one by one on a GPU: the sinks, and those after the last closed segment. How they lie, dq, dk and dv."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells.sizes import CellSizes
from nearfield.cells.triton.layout import Layout, closed_segments
from nearfield.cells.triton.tuning import blocks_for
from nearfield.kernels.launch import LOG2E, Kernel, cdiv, padded, precision, strides


@triton.jit
def keys_and_values(
    keys, values, position, real, key_row, value_row, column, value_column, wide, value_wide, MASKED: tl.constexpr
):
    """The keys `[columns, positions]` and values `[positions, columns]` at `position`; zeros where it is not `real`."""
    place = position.to(tl.int64)
    if MASKED:
        key = tl.load(keys + place[None, :] * key_row + column[:, None], mask=real[None, :] & wide[:, None], other=0.0)
        value = tl.load(
            values + place[:, None] * value_row + value_column[None, :], mask=real[:, None] & value_wide[None, :], other=0.0
        )
    else:
        key = tl.load(keys + place[None, :] * key_row + column[:, None], mask=wide[:, None], other=0.0)
        value = tl.load(values + place[:, None] * value_row + value_column[None, :], mask=value_wide[None, :], other=0.0)
    return key, value


@triton.jit
def rows_at(number, positions, BM: tl.constexpr):
    """The rows of a block, and which of them exist. No block has rows of two heads that share keys."""
    per_head = tl.cdiv(positions, BM)
    position = number % per_head * BM + tl.arange(0, BM)
    return (number // per_head).to(tl.int64) * positions + position, position < positions


@triton.jit
def edges_of(sees, local, there, sinks, BN: tl.constexpr):
    """Where the keys seen one by one begin, from where (`middle`) to where (`whole`) all rows see all of them, where they end.

    Then, of the tiles of BN keys that need a mask: how many the sinks take, how many come before `middle`, how many there are.
    """
    last = tl.max(sees, 0)
    begin = tl.min(local, 0)
    middle = tl.max(tl.where(there & (sees > 0), local, 0), 0)
    least = tl.min(tl.where(there, sees, 2147483647), 0)
    # Each row sees one of the keys from `whole` on.
    whole = tl.maximum(least - 1 - middle, 0) // BN * BN + middle
    # Rows that see nothing have no place to begin at: no tile can be whole.
    whole = tl.where(begin < 2147483647, whole, middle)
    sink_tiles = (tl.minimum(sinks, last) + BN - 1) // BN
    before = sink_tiles + tl.maximum(middle - begin + BN - 1, 0) // BN * (begin < 2147483647)
    tiles = before + tl.maximum(last - whole + BN - 1, 0) // BN
    return begin, middle, whole, last, sink_tiles, before, tiles


@triton.jit
def tile_at(tile, begin, middle, whole, last, sink_tiles, before, sinks, BN: tl.constexpr):
    """The positions of a tile that needs a mask, where they end, and whether they are sinks; see `edges_of`."""
    is_sink = tile < sink_tiles
    start = tl.where(is_sink, tile, tl.where(tile < before, tile - sink_tiles, tile - before)) * BN
    start += tl.where(is_sink, 0, tl.where(tile < before, begin, whole))
    stop = tl.where(is_sink, tl.minimum(sinks, last), tl.where(tile < before, middle, last))
    return start + tl.arange(0, BN), stop, is_sink


@dataclass(frozen=True)
class BackwardRows:
    """Rows `[entries, count, ...]` as the backward pass needs them."""

    queries: Tensor
    visible: Tensor
    block_sees: Tensor
    """how many keys the first row of a row's block sees: as many segments are closed for all of them"""
    do: Tensor
    """the gradient of the output"""
    lse: Tensor
    """natural logarithm; +inf where a row sees nothing, so that its weights are 0"""
    delta: Tensor
    """the scalar product of the output and its gradient"""

    @property
    def count(self) -> int:
        return self.queries.shape[1]

    def part(self, entries: slice, rows: slice) -> BackwardRows:
        return BackwardRows(*(x[entries, rows] for x in vars(self).values()))


@Kernel
def _delta(
    output,
    do,
    lse,
    delta,
    safe_lse,
    rows,
    value_dim,
    output_entry,
    output_row,
    do_entry,
    do_row,
    lse_entry,
    BM: tl.constexpr,
    BV: tl.constexpr,
):
    entry = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    there = row < rows
    column = tl.arange(0, BV)
    mask = there[:, None] & (column < value_dim)[None, :]
    output_i = tl.load(output + entry * output_entry + row[:, None] * output_row + column[None, :], mask=mask, other=0.0)
    do_i = tl.load(do + entry * do_entry + row[:, None] * do_row + column[None, :], mask=mask, other=0.0)
    tl.store(delta + entry * rows + row, tl.sum(output_i.to(tl.float32) * do_i.to(tl.float32), 1), mask=there)
    lse_i = tl.load(lse + entry * lse_entry + row, mask=there, other=0.0)
    tl.store(safe_lse + entry * rows + row, tl.where(lse_i == -float("inf"), float("inf"), lse_i), mask=there)


@Kernel
def _first_sees(visible, block_sees, rows, positions, share, visible_entry, BM: tl.constexpr):
    entry = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * BM + tl.arange(0, BM)
    there = row < rows
    first = row - row % positions % share
    tl.store(block_sees + entry * visible_entry + row, tl.load(visible + entry * visible_entry + first, mask=there), mask=there)


def first_sees(visible: Tensor, sizes: CellSizes) -> Tensor:
    """How many keys the first row of each row's block sees; `visible` itself where that makes no difference."""
    if sizes.share == 1 or not sizes.segment:
        return visible
    # Where all entries see the same, one row of numbers serves them all, and all programs write the same.
    found = torch.empty_strided(visible.shape, visible.stride(), dtype=visible.dtype, device=visible.device)
    _first_sees[(cdiv(visible.shape[1], 1024), len(visible))](
        visible=visible,
        block_sees=found,
        rows=visible.shape[1],
        positions=visible.shape[1] // sizes.group,
        share=sizes.share,
        visible_entry=visible.stride(0),
        BM=1024,
        num_warps=4,
    )
    return found


def backward_rows(queries: Tensor, visible: Tensor, block_sees: Tensor, output: Tensor, lse: Tensor, do: Tensor) -> BackwardRows:
    entries, rows, value_dim = output.shape
    delta, safe_lse = (torch.empty(entries, rows, dtype=torch.float32, device=output.device) for _ in range(2))
    _delta[(cdiv(rows, 64), entries)](
        output=output,
        do=do,
        lse=lse,
        delta=delta,
        safe_lse=safe_lse,
        rows=rows,
        value_dim=value_dim,
        **strides(output=output, do=do),
        lse_entry=lse.stride(0),
        BM=64,
        BV=padded(value_dim),
        num_warps=4,
    )
    return BackwardRows(queries, visible, block_sees, do, safe_lse, delta)


@Kernel
def _first_positions(visible, wanted, found, positions, count, visible_entry, step, STEPS: tl.constexpr, B: tl.constexpr):
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0) * B + tl.arange(0, B)
    there = lane < count
    least = tl.load(wanted + lane, mask=there, other=0)
    visible += entry * visible_entry
    low = tl.zeros([B], tl.int32)
    high = tl.zeros([B], tl.int32) + (positions + step - 1) // step
    for _ in range(STEPS):
        middle = (low + high) // 2
        enough = tl.load(visible + middle * step, mask=middle * step < positions, other=2147483647) >= least
        high = tl.where(enough, middle, high)
        low = tl.where(enough, low, tl.minimum(middle + 1, high))
    tl.store(found + entry * count + lane, tl.minimum(low * step, positions), mask=there)


def first_positions(visible: Tensor, positions: int, wanted: Tensor, step: int = 1) -> Tensor:
    """`[entries, count]`: the first of the multiples of `step` below `positions` whose row sees so many keys; else `positions`.

    `visible` `[entries, rows]` does not decrease from position to position. `wanted` `[count]`.
    """
    count = len(wanted)
    found = torch.empty(len(visible), count, dtype=torch.int32, device=visible.device)
    _first_positions[(cdiv(count, 128), len(visible))](
        visible=visible,
        wanted=wanted,
        found=found,
        positions=positions,
        count=count,
        visible_entry=visible.stride(0),
        step=step,
        STEPS=cdiv(positions, step).bit_length() + 1,
        B=128,
        num_warps=4,
    )
    return found


@triton.jit
def dq_of_keys(query, key, value, do_i, lse_i, delta_i, scale, seen, MASKED: tl.constexpr, IP: tl.constexpr):
    """What keys add to dq, up to the factor scale; `scale` and `lse_i` are those of logits to base 2."""
    p = tl.exp2(tl.minimum(tl.dot(query, key, input_precision=IP) * scale - lse_i[:, None], 0.0))
    ds = p * (tl.dot(do_i, tl.trans(value), input_precision=IP) - delta_i[:, None])
    if MASKED:
        ds = tl.where(seen, ds, 0.0)
    return tl.dot(ds.to(key.dtype), tl.trans(key), input_precision=IP)


@Kernel
def _local_dq(
    queries,
    keys,
    values,
    visible,
    block_sees,
    do,
    lse,
    delta,
    dq,
    positions,
    dim,
    value_dim,
    query_entry,
    query_row,
    key_entry,
    key_row,
    value_entry,
    value_row,
    visible_entry,
    do_entry,
    do_row,
    row_entry,
    dq_entry,
    dq_row,
    scale,
    segment,
    window,
    segments,
    sinks,
    CAUSAL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
):
    entry = tl.program_id(1).to(tl.int64)
    row, there = rows_at(tl.program_id(0), positions, BM)
    queries += entry * query_entry
    keys += entry * key_entry
    values += entry * value_entry
    visible += entry * visible_entry
    block_sees += entry * visible_entry
    do += entry * do_entry
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    do_i = tl.load(do + row[:, None] * do_row + value_column[None, :], mask=there[:, None] & value_wide[None, :], other=0.0)
    lse_i = tl.load(lse + entry * row_entry + row, mask=there, other=float("inf")) * LOG2E
    delta_i = tl.load(delta + entry * row_entry + row, mask=there, other=0.0)
    sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
    first_sees = tl.load(block_sees + row, mask=there, other=0).to(tl.int32)
    closed = closed_segments(first_sees, segment, window, segments, CAUSAL)
    acc = tl.zeros([BM, BD], tl.float32)
    if CAUSAL:
        local = tl.where(there & (sees > 0), closed * segment, 2147483647)
        begin, middle, whole, last, sink_tiles, before, tiles = edges_of(sees, local, there, sinks, BN)
        for start in range(middle, whole, BN):
            position = start + tl.arange(0, BN)
            key, value = keys_and_values(
                keys, values, position, position, key_row, value_row, column, value_column, wide, value_wide, False
            )
            acc += dq_of_keys(query, key, value, do_i, lse_i, delta_i, scale, position, False, IP)
    else:
        local = sees
        begin, whole, last = 0, 0, tl.max(sees, 0)
        middle = 0
        sink_tiles = (tl.minimum(sinks, last) + BN - 1) // BN
        before, tiles = sink_tiles, sink_tiles
    for tile in range(tiles):
        position, stop, is_sink = tile_at(tile, begin, middle, whole, last, sink_tiles, before, sinks, BN)
        real = position < stop
        key, value = keys_and_values(
            keys, values, position, real, key_row, value_row, column, value_column, wide, value_wide, True
        )
        seen = real[None, :] & (position[None, :] < sees[:, None]) & (is_sink == (position[None, :] < local[:, None]))
        if CAUSAL:
            # Zero times a later key that is not finite would not be zero.
            key = tl.where(key.to(tl.float32) * 0.0 == 0.0, key, 0.0).to(key.dtype)
        acc += dq_of_keys(query, key, value, do_i, lse_i, delta_i, scale, seen, True, IP)
    tl.store(
        dq + entry * dq_entry + row[:, None] * dq_row + column[None, :],
        (acc * (scale / LOG2E)).to(dq.dtype.element_ty),
        mask=there[:, None] & wide[None, :],
    )


def local_dq(
    rows: BackwardRows,
    keys: Tensor,
    values: Tensor,
    layout: Layout,
    sizes: CellSizes,
    scale: float,
    dq: Tensor,
) -> None:
    """Fills in `dq` `[entries, rows, dim]`."""
    entries, count, dim = rows.queries.shape
    value_dim = values.shape[2]
    blocks = blocks_for("local_dq", max(dim, value_dim), keys.dtype, keys.device)
    positions = count // sizes.group
    _local_dq[(sizes.group * cdiv(positions, blocks.rows), entries)](
        queries=rows.queries,
        keys=keys,
        values=values,
        visible=rows.visible,
        block_sees=rows.block_sees,
        do=rows.do,
        lse=rows.lse,
        delta=rows.delta,
        dq=dq,
        positions=positions,
        dim=dim,
        value_dim=value_dim,
        **strides(query=rows.queries, key=keys, value=values),
        visible_entry=rows.visible.stride(0),
        **strides(do=rows.do),
        row_entry=rows.lse.stride(0),
        **strides(dq=dq),
        scale=scale * LOG2E.value,
        segment=layout.segment,
        window=sizes.window,
        segments=layout.segments,
        sinks=sizes.sinks,
        CAUSAL=sizes.segment > 0,
        BM=blocks.rows,
        BN=blocks.keys,
        BD=padded(dim),
        BV=padded(value_dim),
        IP=precision(keys.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


@triton.jit
def backward_tile(
    queries, do, lse, delta, row, there, query_row, do_row, column, value_column, wide, value_wide, FULL: tl.constexpr
):
    """Queries, gradients of the output, log2-normalisers and deltas of some rows. Those that are not `there` have no weights.

    All of `row` exist. FULL: no columns are missing.
    """
    query_at = queries + row[:, None] * query_row + column[None, :]
    do_at = do + row[:, None] * do_row + value_column[None, :]
    if FULL:
        query, do_i = tl.load(query_at), tl.load(do_at)
    else:
        query = tl.load(query_at, mask=wide[None, :], other=0.0)
        do_i = tl.load(do_at, mask=value_wide[None, :], other=0.0)
    lse_i = tl.where(there, tl.load(lse + row) * LOG2E, float("inf"))
    return query, do_i, lse_i, tl.load(delta + row)


@triton.jit
def add_dkv(key, value, query, do_i, lse_i, delta_i, scale, seen, dk_acc, dv_acc, MASKED: tl.constexpr, IP: tl.constexpr):
    """Add to dk (up to the factor scale) and dv of some keys what comes from some rows; `scale` and `lse_i` are to base 2."""
    p = tl.exp2(tl.minimum(tl.dot(key, tl.trans(query), input_precision=IP) * scale - lse_i[None, :], 0.0))
    if MASKED:
        p = tl.where(seen, p, 0.0)
    dv_acc = tl.dot(p.to(do_i.dtype), do_i, dv_acc, input_precision=IP)
    ds = p * (tl.dot(value, tl.trans(do_i), input_precision=IP) - delta_i[None, :])
    if MASKED:
        # Zero times a gradient that is not finite would not be zero.
        ds = tl.where(seen, ds, 0.0)
    dk_acc = tl.dot(ds.to(query.dtype), query, dk_acc, input_precision=IP)
    return dk_acc, dv_acc


@Kernel
def _local_dkv(
    queries,
    keys,
    values,
    visible,
    block_sees,
    do,
    lse,
    delta,
    first_rows,
    row_starts,
    dk,
    dv,
    length,
    positions,
    group,
    dim,
    value_dim,
    query_entry,
    query_row,
    key_entry,
    key_row,
    value_entry,
    value_row,
    visible_entry,
    do_entry,
    do_row,
    row_entry,
    blocks,
    splits,
    scale,
    segment,
    window,
    segments,
    sinks,
    SINKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    FULL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
):
    """dk and dv of a block of keys, over a share of the rows that see them after the last closed segment, or (SINKS) as sinks."""
    block, entry, share = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    queries += entry * query_entry
    visible += entry * visible_entry
    block_sees += entry * visible_entry
    do += entry * do_entry
    lse += entry * row_entry
    delta += entry * row_entry
    key_position = block * BN + tl.arange(0, BN)
    real = key_position < length
    if SINKS:
        real = real & (key_position < sinks)
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    key_place = key_position.to(tl.int64)
    key = tl.load(
        keys + entry * key_entry + key_place[:, None] * key_row + column[None, :], mask=real[:, None] & wide[None, :], other=0.0
    )
    value = tl.load(
        values + entry * value_entry + key_place[:, None] * value_row + value_column[None, :],
        mask=real[:, None] & value_wide[None, :],
        other=0.0,
    )
    first_rows += entry * 2 * blocks + block
    begin = tl.load(first_rows)
    end = positions
    # From here on all rows see all of these keys one by one.
    whole = positions
    if not SINKS:
        # Rows with this many closed segments or more see all of these keys through cells.
        past = tl.minimum((block * BN + BN - 1) // segment + 1, segments + 1)
        end = tl.load(row_starts + entry * (segments + 2) + past)
        if (block * BN) // segment == (tl.minimum(block * BN + BN, length) - 1) // segment:
            whole = tl.load(first_rows + blocks)
    number = (end - begin + BM - 1) // BM
    per_share = (number + splits - 1) // splits
    begin = begin + share * per_share * BM
    end = tl.minimum(end, begin + per_share * BM)
    middle = begin + (tl.maximum(tl.minimum(whole, end) - begin, 0) + BM - 1) // BM * BM
    dk_acc = tl.zeros([BN, BD], tl.float32)
    dv_acc = tl.zeros([BN, BV], tl.float32)
    for member in range(group):
        first_row = (member * positions).to(tl.int64)
        for start in range(begin, tl.minimum(middle, end), BM):
            position = start + tl.arange(0, BM)
            there = position < end
            row = first_row + tl.minimum(position, end - 1)
            query, do_i, lse_i, delta_i = backward_tile(
                queries, do, lse, delta, row, there, query_row, do_row, column, value_column, wide, value_wide, FULL
            )
            sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
            if CAUSAL:
                first_sees = tl.load(block_sees + row, mask=there, other=0).to(tl.int32)
                local = closed_segments(first_sees, segment, window, segments, CAUSAL) * segment
            else:
                local = sees
            seen = real[:, None] & there[None, :] & (key_position[:, None] < sees[None, :])
            if SINKS:
                seen = seen & (key_position[:, None] < local[None, :])
            else:
                seen = seen & (key_position[:, None] >= local[None, :])
            dk_acc, dv_acc = add_dkv(key, value, query, do_i, lse_i, delta_i, scale * LOG2E, seen, dk_acc, dv_acc, True, IP)
        for start in range(middle, end, BM):
            position = start + tl.arange(0, BM)
            there = position < end
            row = first_row + tl.minimum(position, end - 1)
            query, do_i, lse_i, delta_i = backward_tile(
                queries, do, lse, delta, row, there, query_row, do_row, column, value_column, wide, value_wide, FULL
            )
            dk_acc, dv_acc = add_dkv(key, value, query, do_i, lse_i, delta_i, scale * LOG2E, there, dk_acc, dv_acc, False, IP)
    place = entry * length + key_place
    into, mask = dk + place[:, None] * dim + column[None, :], real[:, None] & wide[None, :]
    tl.atomic_add(into, dk_acc * scale, mask=mask, sem="relaxed")
    into, mask = dv + place[:, None] * value_dim + value_column[None, :], real[:, None] & value_wide[None, :]
    tl.atomic_add(into, dv_acc, mask=mask, sem="relaxed")


def local_dkv(
    rows: BackwardRows,
    keys: Tensor,
    values: Tensor,
    layout: Layout,
    sizes: CellSizes,
    scale: float,
    row_starts: Tensor,
    dk: Tensor,
    dv: Tensor,
    deterministic: bool,
) -> None:
    """Adds to `dk` and `dv` `[entries, n, ...]`, float32, what comes from rows that see the keys one by one."""
    entries, length, dim = keys.shape
    value_dim, positions = values.shape[2], rows.count // sizes.group
    tuned = blocks_for("local_dkv", max(dim, value_dim), keys.dtype, keys.device)
    kinds = [(False, cdiv(length, tuned.keys), 1)] if sizes.segment else []
    if sizes.sinks:
        kinds.append((True, cdiv(min(sizes.sinks, length), tuned.keys), 1 if deterministic else 64))
    every = cdiv(length, tuned.keys)
    first_rows = first_positions(rows.visible, positions, layout.key_block_needs(tuned.keys))
    for sinks, blocks, splits in kinds:
        _local_dkv[(blocks, entries, splits)](
            queries=rows.queries,
            keys=keys,
            values=values,
            visible=rows.visible,
            block_sees=rows.block_sees,
            do=rows.do,
            lse=rows.lse,
            delta=rows.delta,
            first_rows=first_rows,
            row_starts=row_starts,
            dk=dk,
            dv=dv,
            length=length,
            positions=positions,
            group=sizes.group,
            dim=dim,
            value_dim=value_dim,
            **strides(query=rows.queries, key=keys, value=values),
            visible_entry=rows.visible.stride(0),
            **strides(do=rows.do),
            row_entry=rows.lse.stride(0),
            blocks=every,
            splits=splits,
            scale=scale,
            segment=layout.segment,
            window=sizes.window,
            segments=layout.segments,
            sinks=sizes.sinks,
            SINKS=sinks,
            CAUSAL=sizes.segment > 0,
            FULL=dim == padded(dim) and value_dim == padded(value_dim),
            BM=tuned.rows,
            BN=tuned.keys,
            BD=padded(dim),
            BV=padded(value_dim),
            IP=precision(keys.dtype),
            num_warps=tuned.warps,
            num_stages=tuned.stages,
        )
