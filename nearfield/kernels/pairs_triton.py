"""The pair kernels of `reference.py`: rows of the table are read in place, and never gathered into `[f, t, d]`."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels.launch import Kernel, cdiv, dense, next_power_of_2

MOST_NUMBERS = 4096
"""numbers of the table that a program holds at a time"""

MOST_PAIRS, MOST_ROWS = 16, 128
"""pairs of a row, and rows, that a program holds at a time"""

WARPS = 4


@triton.jit
def pair_tile(rows, ids, count, width, dim, row_stride, BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    """The pairs of a program: where they are listed, which of them exist, their ids and rows, and the columns."""
    parts = (width + BT - 1) // BT
    row = (tl.program_id(0) // parts).to(tl.int64) * BM + tl.arange(0, BM)
    pair = tl.program_id(0) % parts * BT + tl.arange(0, BT)
    column = tl.arange(0, BD)[None, None, :]
    wide = column < dim
    real = (row < count)[:, None] & (pair < width)[None, :]
    place = row[:, None] * width + pair[None, :]
    key_id = tl.load(ids + place, mask=real, other=0).to(tl.int64)
    row_i = tl.load(rows + row[:, None, None] * row_stride + column, mask=(row < count)[:, None, None] & wide, other=0.0)
    return place, real, key_id, row_i.to(tl.float32), column, wide


@partial(Kernel, do_not_specialize=("count",))
def _pair_scores(
    rows, table, ids, found, count, width, dim, row_stride, table_stride, BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    place, real, key_id, row, column, wide = pair_tile(rows, ids, count, width, dim, row_stride, BM, BT, BD)
    key = tl.load(table + key_id[:, :, None] * table_stride + column, mask=real[:, :, None] & wide, other=0.0)
    product = tl.sum(row * key.to(tl.float32), 2)
    tl.store(found + place, product.to(found.dtype.element_ty), mask=real)


@partial(Kernel, do_not_specialize=("count",))
def _pair_sums(weights, table, ids, found, count, width, dim, table_stride, BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.arange(0, BD)
    acc = tl.zeros([BM, BD], tl.float32)
    for start in range(0, width, BT):
        pair = start + tl.arange(0, BT)
        real = (row < count)[:, None] & (pair < width)[None, :]
        place = row[:, None] * width + pair[None, :]
        key_id = tl.load(ids + place, mask=real, other=0).to(tl.int64)
        weight = tl.load(weights + place, mask=real, other=0.0).to(tl.float32)
        value = tl.load(
            table + key_id[:, :, None] * table_stride + column[None, None, :],
            mask=real[:, :, None] & (column < dim)[None, None, :],
            other=0.0,
        )
        acc += tl.sum(weight[:, :, None] * value.to(tl.float32), 1)
    mask = (row < count)[:, None] & (column < dim)[None, :]
    tl.store(found + row[:, None] * dim + column[None, :], acc.to(found.dtype.element_ty), mask=mask)


@partial(Kernel, do_not_specialize=("count",))
def _pair_scatter(
    out, weights, rows, ids, count, width, dim, out_stride, row_stride, BM: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr
):
    place, real, key_id, row, column, wide = pair_tile(rows, ids, count, width, dim, row_stride, BM, BT, BD)
    weight = tl.load(weights + place, mask=real, other=0.0).to(tl.float32)
    # Pairs that do not count have weight zero and share one id: they would queue up there to add nothing.
    mask = (real & (weight != 0.0))[:, :, None] & wide
    tl.atomic_add(
        out + key_id[:, :, None] * out_stride + column,
        weight[:, :, None] * row,
        mask=mask,
        sem="relaxed",
    )


def _tile(width: int, dim: int) -> dict[str, int]:
    """The block of a program: pairs of as many rows as fit."""
    pairs, columns = min(MOST_PAIRS, next_power_of_2(width)), next_power_of_2(dim)
    return {"BM": max(1, min(MOST_ROWS, MOST_NUMBERS // (pairs * columns))), "BT": pairs, "BD": columns}


def scores(rows: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """`reference.pair_scores`, summed in float32."""
    (count, width), dim = ids.shape, table.shape[1]
    found = rows.new_empty(count, width)
    if found.numel():
        rows, table, tile = dense(rows), dense(table), _tile(width, dim)
        _pair_scores[(cdiv(count, tile["BM"]) * cdiv(width, tile["BT"]),)](
            rows=rows,
            table=table,
            ids=ids.contiguous(),
            found=found,
            count=count,
            width=width,
            dim=dim,
            row_stride=rows.stride(0),
            table_stride=table.stride(0),
            **tile,
            num_warps=WARPS,
        )
    return found


def sums(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """`reference.pair_sums`, summed in float32."""
    (count, width), dim = ids.shape, table.shape[1]
    found = table.new_empty(count, dim)
    if found.numel():
        table, tile = dense(table), _tile(width, dim)
        _pair_sums[(cdiv(count, tile["BM"]),)](
            weights=weights.contiguous(),
            table=table,
            ids=ids.contiguous(),
            found=found,
            count=count,
            width=width,
            dim=dim,
            table_stride=table.stride(0),
            **tile,
            num_warps=WARPS,
        )
    return found


def scatter_(out: Tensor, weights: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """`reference.pair_scatter_` into float32 `out`, in whatever order the additions come. Pairs of weight zero are left out."""
    assert out.dtype == torch.float32
    (count, width), dim = ids.shape, rows.shape[1]
    if ids.numel() and dim:
        rows, tile = dense(rows), _tile(width, dim)
        _pair_scatter[(cdiv(count, tile["BM"]) * cdiv(width, tile["BT"]),)](
            out=out,
            weights=weights.contiguous(),
            rows=rows,
            ids=ids.contiguous(),
            count=count,
            width=width,
            dim=dim,
            out_stride=out.stride(0),
            row_stride=rows.stride(0),
            **tile,
            num_warps=WARPS,
        )
    return out
