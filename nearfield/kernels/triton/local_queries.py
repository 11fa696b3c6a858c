"""Gradients of queries on a GPU through the keys that they see one by one."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels.cells_plan import CellSettings
from nearfield.kernels.triton.common import cdiv, padded, precision
from nearfield.kernels.triton.launch import Kernel
from nearfield.kernels.triton.layout import Layout
from nearfield.kernels.triton.local import edges_of, keys_and_values, rows_at, tile_at
from nearfield.kernels.triton.route import closed_segments
from nearfield.kernels.triton.rows import Rows
from nearfield.kernels.triton.tuning import blocks_for


@triton.jit
def pull(query, key, value, grad, ended, product, scale, seen, MASKED: tl.constexpr, IP: tl.constexpr):
    """What keys add to the gradient of queries, but for the scale; `scale` and `ended` are those of logits to base 2."""
    weight = tl.exp2(tl.minimum(tl.dot(query, key, input_precision=IP) * scale - ended[:, None], 0.0))
    slope = weight * (tl.dot(grad, tl.trans(value), input_precision=IP) - product[:, None])
    if MASKED:
        slope = tl.where(seen, slope, 0.0)
    return tl.dot(slope.to(key.dtype), tl.trans(key), input_precision=IP)


@Kernel
def _local_queries(
    queries,
    keys,
    values,
    visible,
    grads,
    lse,
    delta,
    query_grad,
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
    grad_entry,
    grad_row,
    row_entry,
    result_entry,
    result_row,
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
    LOG2E: tl.constexpr = 1.4426950408889634
    entry = tl.program_id(1).to(tl.int64)
    row, there = rows_at(tl.program_id(0), positions, BM)
    queries += entry * query_entry
    keys += entry * key_entry
    values += entry * value_entry
    visible += entry * visible_entry
    grads += entry * grad_entry
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    grad = tl.load(grads + row[:, None] * grad_row + value_column[None, :], mask=there[:, None] & value_wide[None, :], other=0.0)
    ended = tl.load(lse + entry * row_entry + row, mask=there, other=float("inf")) * LOG2E
    product = tl.load(delta + entry * row_entry + row, mask=there, other=0.0)
    sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    total = tl.zeros([BM, BD], tl.float32)
    if CAUSAL:
        local = tl.where(there & (sees > 0), closed * segment, 2147483647)
        begin, middle, whole, last, sink_tiles, before, tiles = edges_of(sees, local, there, sinks, BN)
        for start in range(middle, whole, BN):
            position = start + tl.arange(0, BN)
            key, value = keys_and_values(
                keys, values, position, position, key_row, value_row, column, value_column, wide, value_wide, False
            )
            total += pull(query, key, value, grad, ended, product, scale, position, False, IP)
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
        seen = real[None, :] & (position[None, :] < sees[:, None]) & (ahead == (position[None, :] < local[:, None]))
        if CAUSAL:
            # Zero times a later key that is not finite would not be zero.
            key = tl.where(key.to(tl.float32) * 0.0 == 0.0, key, 0.0).to(key.dtype)
        total += pull(query, key, value, grad, ended, product, scale, seen, True, IP)
    tl.store(
        query_grad + entry * result_entry + row[:, None] * result_row + column[None, :],
        (total * (scale / LOG2E)).to(query_grad.dtype.element_ty),
        mask=there[:, None] & wide[None, :],
    )


def local_queries(
    rows: Rows,
    keys: Tensor,
    values: Tensor,
    layout: Layout,
    settings: CellSettings,
    scale: float,
    query_grad: Tensor,
) -> None:
    """Fills in `query_grad` `[entries, rows, dim]`."""
    entries, count, dim = rows.queries.shape
    value_dim = values.shape[2]
    blocks = blocks_for("local_queries", max(dim, value_dim), keys.dtype)
    positions = count // settings.group
    _local_queries[(settings.group * cdiv(positions, blocks.rows), entries)](
        rows.queries,
        keys,
        values,
        rows.visible,
        rows.grads,
        rows.lse,
        rows.delta,
        query_grad,
        positions,
        dim,
        value_dim,
        *rows.queries.stride()[:2],
        *keys.stride()[:2],
        *values.stride()[:2],
        rows.visible.stride(0),
        *rows.grads.stride()[:2],
        rows.lse.stride(0),
        *query_grad.stride()[:2],
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
        IP=precision(keys.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
