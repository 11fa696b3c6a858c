"""The keys of a few rows on a GPU, summed up by the number of budgets that leave a key's cell closed. For pilots."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nearfield.kernels.launch import LN2, LOG2E, Kernel, dense, padded, precision, strides

SHARES = 32
"""Programs per row."""

LEVELS = 16
"""Rows of the matrix product that sums up values. There are fewer levels."""


@Kernel
def _level_sums(
    queries,
    keys,
    values,
    visible,
    closed,
    segments,
    entry_of,
    row_of,
    cell_of,
    level_of,
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
    cell_entry,
    cell_row,
    cells,
    segment,
    shares,
    scale,
    SPANS: tl.constexpr,
    LEVELS: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
):
    """Of one row, over a share of the keys that it sees: the largest logit, and relative to it the sums of each level."""
    which, share = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry, row = tl.load(entry_of + which).to(tl.int64), tl.load(row_of + which).to(tl.int64)
    column, value_column, level = tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, LEVELS)
    wide, value_wide = column < dim, value_column < value_dim
    query = tl.load(queries + entry * query_entry + row * query_row + column, mask=wide, other=0.0).to(tl.float32)
    sees, shut = tl.load(visible + which).to(tl.int32), tl.load(closed + which).to(tl.int32)
    past = tl.load(segments + which).to(tl.int32)
    blocks = (sees + BN - 1) // BN
    per_share = (blocks + shares - 1) // shares * BN
    begin = share * per_share
    end = tl.minimum(sees, begin + per_share)
    m_i = -float("inf")
    l_i = tl.zeros([LEVELS], tl.float32)
    acc = tl.zeros([LEVELS, BV], tl.float32)
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
        # A row sees a key through the longest of its spans that reaches the key.
        own = position // segment
        span = tl.zeros([BN], tl.int64)
        for i in tl.static_range(1, SPANS):
            span += (own < ((past >> i) << i)).to(tl.int64)
        cell = tl.load(cell_of + entry * cell_entry + span * cell_row + position, mask=real & (position < shut), other=-1)
        left = tl.load(level_of + which * cells + cell, mask=cell >= 0, other=0).to(tl.int32)
        logit = tl.where(real, tl.sum(key.to(tl.float32) * query[None, :], 1) * scale, -float("inf"))
        m_new = tl.maximum(m_i, tl.max(logit, 0))
        # -inf less -inf would be NaN, where all logits so far are -inf.
        base = tl.where(m_new == -float("inf"), 0.0, m_new)
        p = tl.where(left[None, :] == level[:, None], tl.exp2(logit - base)[None, :], 0.0)
        alpha = tl.exp2(m_i - base)
        l_i = l_i * alpha + tl.sum(p, 1)
        acc = tl.dot(p.to(value.dtype), value, acc * alpha, input_precision=IP)
        m_i = m_new
    into = which * shares + share
    tl.store(tops + into, m_i)
    tl.store(sums + into * LEVELS + level, l_i)
    tl.store(parts + (into * LEVELS + level[:, None]) * value_dim + value_column[None, :], acc, mask=value_wide[None, :])


def level_sums(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    closed: Tensor,
    segments: Tensor,
    entry: Tensor,
    row: Tensor,
    cell_of: Tensor,
    level_of: Tensor,
    segment: int,
    scale: float,
    levels: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """For each i, of row `row[i]` of entry `entry[i]`: the largest logit; relative to it the sums of weights `[count, levels]`
    and of weighted values `[count, levels, value_dim]` of the keys of each level.

    A row sees the first `visible[i]` keys, the first `closed[i]` of them, in `segments[i]` segments, through cells. The level of
    those is that of their cell, `level_of` `[count, cells]`; the others have level 0.
    """
    assert levels <= LEVELS
    count, value_dim = len(entry), values.shape[2]
    parts = torch.empty(count, SHARES, LEVELS, value_dim, dtype=torch.float32, device=keys.device)
    sums = torch.empty(count, SHARES, LEVELS, dtype=torch.float32, device=keys.device)
    tops = torch.empty(count, SHARES, dtype=torch.float32, device=keys.device)
    queries, keys, values = (dense(x) for x in (queries, keys, values))
    large = max(keys.shape[2], value_dim) > 128
    _level_sums[(count, SHARES)](
        queries=queries,
        keys=keys,
        values=values,
        visible=visible,
        closed=closed,
        segments=segments,
        entry_of=entry,
        row_of=row,
        cell_of=cell_of,
        level_of=level_of,
        parts=parts,
        tops=tops,
        sums=sums,
        dim=keys.shape[2],
        value_dim=value_dim,
        **strides(query=queries, key=keys, value=values, cell=cell_of),
        cells=level_of.shape[1],
        segment=segment or keys.shape[1],
        shares=SHARES,
        scale=scale * LOG2E.value,
        SPANS=cell_of.shape[1],
        LEVELS=LEVELS,
        BN=32 if large else 64,
        BD=padded(keys.shape[2]),
        BV=padded(value_dim),
        IP=precision(values.dtype),
        num_warps=4,
    )
    most = tops.amax(1)
    factor = torch.exp2(tops - torch.where(most == -torch.inf, 0.0, most)[:, None])[:, :, None]
    return most * LN2.value, (sums * factor).sum(1)[:, :levels], (parts * factor[..., None]).sum(1)[:, :levels]
