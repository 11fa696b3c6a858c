"""Keys that rows see one by one on a GPU: the sinks, and those after the last closed segment."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels.cells_plan import CellSettings
from nearfield.kernels.triton.common import cdiv, padded, precision
from nearfield.kernels.triton.launch import Kernel
from nearfield.kernels.triton.layout import Layout
from nearfield.kernels.triton.route import closed_segments
from nearfield.kernels.triton.tuning import blocks_for


@triton.jit
def attend(product, value, scale, top, mass, total, IP: tl.constexpr):
    """Add keys with logits product * scale (base 2; -inf: not seen) to running sums."""
    new = tl.maximum(top, tl.max(product, 1) * scale)
    base = tl.where(new > -float("inf"), new, 0.0)
    weight = tl.exp2(product * scale - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink[:, None] + tl.dot(weight.to(value.dtype), value, input_precision=IP)
    return new, mass * shrink + tl.sum(weight, 1), total


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
    """The rows of a block, and which of them there are. No block has rows of two heads that share keys."""
    per_head = tl.cdiv(positions, BM)
    position = number % per_head * BM + tl.arange(0, BM)
    return (number // per_head).to(tl.int64) * positions + position, position < positions


@triton.jit
def edges_of(sees, local, there, sinks, BN: tl.constexpr):
    """Where keys seen one by one begin, from where and up to where all rows see them all, and where they end.

    In tiles of BN, those of the sinks first: their number, that of the tiles before `whole`, and that of all that need a mask.
    """
    last = tl.max(sees, 0)
    begin = tl.min(local, 0)
    middle = tl.max(tl.where(there & (sees > 0), local, 0), 0)
    least = tl.min(tl.where(there, sees, 2147483647), 0)
    whole = tl.maximum(least - middle, 0) // BN * BN + middle
    # Rows that see nothing have no place to begin at: no tile can be whole.
    whole = tl.where(begin < 2147483647, whole, middle)
    sink_tiles = (tl.minimum(sinks, last) + BN - 1) // BN
    before = sink_tiles + tl.maximum(middle - begin + BN - 1, 0) // BN * (begin < 2147483647)
    tiles = before + tl.maximum(last - whole + BN - 1, 0) // BN
    return begin, middle, whole, last, sink_tiles, before, tiles


@triton.jit
def tile_at(tile, begin, middle, whole, last, sink_tiles, before, sinks, BN: tl.constexpr):
    """The positions of a tile that needs a mask, which of them there are, and whether they are sinks; see `edges_of`."""
    ahead = tile < sink_tiles
    start = tl.where(ahead, tile, tl.where(tile < before, tile - sink_tiles, tile - before)) * BN
    start += tl.where(ahead, 0, tl.where(tile < before, begin, whole))
    stop = tl.where(ahead, tl.minimum(sinks, last), tl.where(tile < before, middle, last))
    position = start + tl.arange(0, BN)
    return position, position < stop, ahead


@Kernel
def _local(
    queries,
    keys,
    values,
    visible,
    output,
    lse,
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
    output_entry,
    output_row,
    lse_entry,
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
    """A sink that is also one of the keys after the last closed segment counts once. `scale` is that of logits to base 2."""
    entry = tl.program_id(1).to(tl.int64)
    row, there = rows_at(tl.program_id(0), positions, BM)
    queries += entry * query_entry
    keys += entry * key_entry
    values += entry * value_entry
    visible += entry * visible_entry
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    top = tl.full([BM], -float("inf"), tl.float32)
    mass = tl.zeros([BM], tl.float32)
    total = tl.zeros([BM, BV], tl.float32)
    if CAUSAL:
        local = tl.where(there & (sees > 0), closed * segment, 2147483647)
        begin, middle, whole, last, sink_tiles, before, tiles = edges_of(sees, local, there, sinks, BN)
        for start in range(middle, whole, BN):
            position = start + tl.arange(0, BN)
            key, value = keys_and_values(
                keys, values, position, position, key_row, value_row, column, value_column, wide, value_wide, False
            )
            product = tl.dot(query, key, input_precision=IP)
            top, mass, total = attend(product, value, scale, top, mass, total, IP)
    else:
        local = sees
        begin, whole, last = 0, 0, tl.max(sees, 0)
        middle = 0
        sink_tiles = (tl.minimum(sinks, last) + BN - 1) // BN
        before, tiles = sink_tiles, sink_tiles
    for tile in range(tiles):
        position, real, ahead = tile_at(tile, begin, middle, whole, last, sink_tiles, before, sinks, BN)
        key, value = keys_and_values(
            keys, values, position, real, key_row, value_row, column, value_column, wide, value_wide, True
        )
        product = tl.dot(query, key, input_precision=IP)
        seen = real[None, :] & (position[None, :] < sees[:, None]) & (ahead == (position[None, :] < local[:, None]))
        if CAUSAL:
            # Zero times a later value that is not finite would not be zero: its own rows are told by their logits.
            fine = value.to(tl.float32) * 0.0 == 0.0
            odd = tl.sum(tl.where(fine, 0, 1), 1) > 0
            value = tl.where(fine, value, 0.0).to(value.dtype)
            product = tl.where(odd[None, :], float("nan"), product)
        product = tl.where(seen, product, -float("inf"))
        top, mass, total = attend(product, value, scale, top, mass, total, IP)
    blind = mass <= 0.0
    result = tl.where(blind[:, None], 0.0, total / tl.where(blind, 1.0, mass)[:, None])
    tl.store(
        output + entry * output_entry + row[:, None] * output_row + value_column[None, :],
        result.to(output.dtype.element_ty),
        mask=there[:, None] & value_wide[None, :],
    )
    ended = tl.where(blind, -float("inf"), top + tl.log2(tl.where(blind, 1.0, mass)))
    tl.store(lse + entry * lse_entry + row, ended, mask=there)


def local(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    layout: Layout,
    settings: CellSettings,
    scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Fills in `output` `[entries, rows, value_dim]` and log2-normalisers `lse` `[entries, rows]`."""
    entries, rows, dim = queries.shape
    value_dim = values.shape[2]
    blocks = blocks_for("local", max(dim, value_dim), queries.dtype)
    positions = rows // settings.group
    _local[(settings.group * cdiv(positions, blocks.rows), entries)](
        queries,
        keys,
        values,
        visible,
        output,
        lse,
        positions,
        dim,
        value_dim,
        *queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        visible.stride(0),
        *output.stride()[:2],
        lse.stride(0),
        scale * math.log2(math.e),
        layout.segment,
        settings.window,
        layout.segments,
        settings.sinks,
        CAUSAL=settings.segment > 0,
        BM=blocks.rows,
        BN=blocks.keys,
        BD=padded(dim),
        BV=padded(value_dim),
        IP=precision(queries.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
