"""Exact attention of a few rows on a GPU, as an audit needs it: each row's keys in several shares, read where they lie."""

from __future__ import annotations

import math

import torch
import triton.language as tl
from torch import Tensor

from nearfield.kernels.launch import Kernel, dense, padded

SHARES = 64
"""Programs per row."""


@Kernel
def _exact_rows(
    queries,
    keys,
    values,
    visible,
    entry_of,
    row_of,
    parts,
    tops,
    masses,
    dim,
    value_dim,
    query_entry,
    query_row,
    key_entry,
    key_row,
    value_entry,
    value_row,
    visible_entry,
    shares,
    scale,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Weights of one row to base 2^top, their sum, and that of their values, over a share of the keys that it sees."""
    which, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry, row = tl.load(entry_of + which).to(tl.int64), tl.load(row_of + which).to(tl.int64)
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + entry * query_entry + row * query_row + column, mask=wide, other=0.0).to(tl.float32)
    sees = tl.load(visible + entry * visible_entry + row).to(tl.int32)
    blocks = (sees + BN - 1) // BN
    per_share = (blocks + shares - 1) // shares * BN
    begin = share * per_share
    end = tl.minimum(sees, begin + per_share)
    top = -float("inf")
    mass = 0.0
    total = tl.zeros([BV], tl.float32)
    for start in range(begin, end, BN):
        position = (start + tl.arange(0, BN)).to(tl.int64)
        real = position < end
        key = tl.load(
            keys + entry * key_entry + position[:, None] * key_row + column[None, :],
            mask=real[:, None] & wide[None, :],
            other=0.0,
        )
        value = tl.load(
            values + entry * value_entry + position[:, None] * value_row + value_column[None, :],
            mask=real[:, None] & value_wide[None, :],
            other=0.0,
        )
        logit = tl.where(real, tl.sum(key.to(tl.float32) * query[None, :], 1) * scale, -float("inf"))
        new = tl.maximum(top, tl.max(logit, 0))
        weight = tl.exp2(logit - new)
        shrink = tl.exp2(top - new)
        mass = mass * shrink + tl.sum(weight, 0)
        total = total * shrink + tl.sum(weight[:, None] * value.to(tl.float32), 0)
        top = new
    into = which * shares + share
    tl.store(tops + into, top)
    tl.store(masses + into, mass)
    tl.store(parts + into * value_dim + value_column, total, mask=value_wide)


def exact_rows(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, entry: Tensor, row: Tensor, scale: float
) -> Tensor:
    """Attention `[count, value_dim]`, float32, of row `row[i]` of `entry[i]`; queries `[entries, rows, dim]`, of which each sees
    the first `visible` keys. A row that sees none is zero."""
    count, value_dim = len(entry), values.shape[2]
    parts = torch.empty(count, SHARES, value_dim, device=keys.device)
    tops, masses = (torch.empty(count, SHARES, device=keys.device) for _ in range(2))
    queries, keys, values = (dense(x) for x in (queries, keys, values))
    visible = visible.to(torch.int32).contiguous()
    if count:
        _exact_rows[(count, SHARES)](
            queries,
            keys,
            values,
            visible,
            entry,
            row,
            parts,
            tops,
            masses,
            keys.shape[2],
            value_dim,
            *queries.stride()[:2],
            *keys.stride()[:2],
            *values.stride()[:2],
            visible.stride(0),
            SHARES,
            scale * math.log2(math.e),
            BN=64 if max(keys.shape[2], value_dim) <= 128 else 32,
            BD=padded(keys.shape[2]),
            BV=padded(value_dim),
            num_warps=4,
        )
    most = tops.amax(1, keepdim=True)
    factor = torch.exp2(tops - torch.where(most == -torch.inf, 0.0, most))
    mass = (masses * factor).sum(1)
    return (parts * factor[..., None]).sum(1) / torch.where(mass == 0, 1.0, mass)[:, None]
