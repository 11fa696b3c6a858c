"""Exact attention of a few rows on a GPU, for audits: the keys of each row in several shares, read in place."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nearfield.kernels.launch import LOG2E, Kernel, dense, padded, strides

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
    sums,
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
    """Output of one row over a share of the keys that it sees, as a running softmax: its maximum, and sums relative to it."""
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
    m_i = -float("inf")
    l_i = 0.0
    acc = tl.zeros([BV], tl.float32)
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
        m_new = tl.maximum(m_i, tl.max(logit, 0))
        p = tl.exp2(logit - m_new)
        alpha = tl.exp2(m_i - m_new)
        l_i = l_i * alpha + tl.sum(p, 0)
        acc = acc * alpha + tl.sum(p[:, None] * value.to(tl.float32), 0)
        m_i = m_new
    into = which * shares + share
    tl.store(tops + into, m_i)
    tl.store(sums + into, l_i)
    tl.store(parts + into * value_dim + value_column, acc, mask=value_wide)


def exact_rows(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, entry: Tensor, row: Tensor, scale: float
) -> Tensor:
    """Attention `[count, value_dim]`, float32, of row `row[i]` of entry `entry[i]`, for each i.

    Queries are `[entries, rows, dim]`; each row sees the first `visible` keys, and is zero if it sees none.
    """
    count, value_dim = len(entry), values.shape[2]
    parts = torch.empty(count, SHARES, value_dim, dtype=torch.float32, device=keys.device)
    tops, sums = (torch.empty(count, SHARES, dtype=torch.float32, device=keys.device) for _ in range(2))
    queries, keys, values = (dense(x) for x in (queries, keys, values))
    visible = visible.to(torch.int32).contiguous()
    if count:
        _exact_rows[(count, SHARES)](
            queries=queries,
            keys=keys,
            values=values,
            visible=visible,
            entry_of=entry,
            row_of=row,
            parts=parts,
            tops=tops,
            sums=sums,
            dim=keys.shape[2],
            value_dim=value_dim,
            **strides(query=queries, key=keys, value=values),
            visible_entry=visible.stride(0),
            shares=SHARES,
            scale=scale * LOG2E.value,
            BN=64 if max(keys.shape[2], value_dim) <= 128 else 32,
            BD=padded(keys.shape[2]),
            BV=padded(value_dim),
            num_warps=4,
        )
    most = tops.amax(1, keepdim=True)
    factor = torch.exp2(tops - torch.where(most == -torch.inf, 0.0, most))
    total = (sums * factor).sum(1)
    return (parts * factor[..., None]).sum(1) / torch.where(total == 0, 1.0, total)[:, None]
