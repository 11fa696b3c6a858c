"""The pair kernels of `reference.py`: rows of the table are read where they lie, and never put down as `[f, t, d]`."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels.launch import Kernel, cdiv, dense, next_power_of_2

NUMBERS = 4096
"""that a program holds of the table at a time"""

MOST_PAIRS, MOST_ROWS = 16, 128
"""pairs of a row at a time, and rows"""

WARPS = 4


@triton.jit
def tile_of(rows, ids, count, width, dim, row_stride, BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """The pairs of a program: where they are listed, which are real, their keys, the rows themselves, and the columns."""
    parts = (width + BT - 1) // BT
    row = (tl.program_id(0) // parts).to(tl.int64) * BM + tl.arange(0, BM)
    pair = tl.program_id(0) % parts * BT + tl.arange(0, BT)
    column = tl.arange(0, BD)[None, None, :]
    wide = column < dim
    real = (row < count)[:, None] & (pair < width)[None, :]
    place = row[:, None] * width + pair[None, :]
    key = tl.load(ids + place, mask=real, other=0).to(tl.int64)
    one = tl.load(rows + row[:, None, None] * row_stride + column, mask=(row < count)[:, None, None] & wide, other=0.0)
    return place, real, key, one.to(tl.float32), column, wide


@partial(Kernel, varied=("count",))
def _scores(
    rows, table, ids, found, count, width, dim, row_stride, table_stride, BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    place, real, key, one, column, wide = tile_of(rows, ids, count, width, dim, row_stride, BM, BT, BD)
    two = tl.load(table + key[:, :, None] * table_stride + column, mask=real[:, :, None] & wide, other=0.0)
    product = tl.sum(one * two.to(tl.float32), 2)
    tl.store(found + place, product.to(found.dtype.element_ty), mask=real)


@partial(Kernel, varied=("count",))
def _sums(weights, table, ids, found, count, width, dim, table_stride, BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.arange(0, BD)
    total = tl.zeros([BM, BD], tl.float32)
    for start in range(0, width, BT):
        pair = start + tl.arange(0, BT)
        real = (row < count)[:, None] & (pair < width)[None, :]
        place = row[:, None] * width + pair[None, :]
        key = tl.load(ids + place, mask=real, other=0).to(tl.int64)
        weight = tl.load(weights + place, mask=real, other=0.0).to(tl.float32)
        value = tl.load(
            table + key[:, :, None] * table_stride + column[None, None, :],
            mask=real[:, :, None] & (column < dim)[None, None, :],
            other=0.0,
        )
        total += tl.sum(weight[:, :, None] * value.to(tl.float32), 1)
    mask = (row < count)[:, None] & (column < dim)[None, :]
    tl.store(found + row[:, None] * dim + column[None, :], total.to(found.dtype.element_ty), mask=mask)


@partial(Kernel, varied=("count",))
def _scatter(
    out, weights, rows, ids, count, width, dim, out_stride, row_stride, BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    place, real, key, one, column, wide = tile_of(rows, ids, count, width, dim, row_stride, BM, BT, BD)
    weight = tl.load(weights + place, mask=real, other=0.0).to(tl.float32)
    # Pairs that do not count all have the same place: they would queue up there to add nothing.
    mask = (real & (weight != 0.0))[:, :, None] & wide
    tl.atomic_add(
        out + key[:, :, None] * out_stride + column,
        weight[:, :, None] * one,
        mask=mask,
        sem="relaxed",
    )


def _tile(width: int, dim: int) -> dict[str, int]:
    """Pairs of as many rows as fit."""
    pairs, columns = min(MOST_PAIRS, next_power_of_2(width)), next_power_of_2(dim)
    return {"BM": max(1, min(MOST_ROWS, NUMBERS // (pairs * columns))), "BT": pairs, "BD": columns}


def scores(rows: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """`reference.pair_scores`, summed in float32."""
    (count, width), dim = ids.shape, table.shape[1]
    found = rows.new_empty(count, width)
    if found.numel():
        rows, table, tile = dense(rows), dense(table), _tile(width, dim)
        strides = rows.stride(0), table.stride(0)
        _scores[(cdiv(count, tile["BM"]) * cdiv(width, tile["BT"]),)](
            rows, table, ids.contiguous(), found, count, width, dim, *strides, **tile, num_warps=WARPS
        )
    return found


def sums(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """`reference.pair_sums`, summed in float32."""
    (count, width), dim = ids.shape, table.shape[1]
    found = table.new_empty(count, dim)
    if found.numel():
        table, tile = dense(table), _tile(width, dim)
        _sums[(cdiv(count, tile["BM"]),)](
            weights.contiguous(), table, ids.contiguous(), found, count, width, dim, table.stride(0), **tile, num_warps=WARPS
        )
    return found


def scatter_(out: Tensor, weights: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """`reference.pair_scatter_` into float32 `out`, in whatever order the additions come. Pairs of weight zero are left out."""
    assert out.dtype == torch.float32
    (count, width), dim = ids.shape, rows.shape[1]
    if ids.numel() and dim:
        rows, tile = dense(rows), _tile(width, dim)
        strides = out.stride(0), rows.stride(0)
        _scatter[(cdiv(count, tile["BM"]) * cdiv(width, tile["BT"]),)](
            out, weights.contiguous(), rows, ids.contiguous(), count, width, dim, *strides, **tile, num_warps=WARPS
        )
    return out
