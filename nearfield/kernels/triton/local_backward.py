"""Gradients of the keys that rows see one by one on a GPU."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nearfield.kernels.cells_plan import CellSettings
from nearfield.kernels.triton.common import cdiv, padded, precision
from nearfield.kernels.triton.launch import Kernel
from nearfield.kernels.triton.layout import Layout
from nearfield.kernels.triton.route import closed_segments
from nearfield.kernels.triton.rows import Rows
from nearfield.kernels.triton.tuning import blocks_for


@Kernel
def _local_keys(
    queries,
    keys,
    values,
    visible,
    grads,
    lse,
    delta,
    seen_from,
    row_starts,
    key_grad,
    value_grad,
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
    grad_entry,
    grad_row,
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
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    IP: tl.constexpr,
):
    """Of a block of keys: over the rows that see them after their last closed segment, or (SINKS) as sinks, a share of them."""
    LOG2E: tl.constexpr = 1.4426950408889634
    block, entry, share = tl.program_id(0), tl.program_id(1).to(tl.int64), tl.program_id(2)
    queries += entry * query_entry
    visible += entry * visible_entry
    grads += entry * grad_entry
    lse += entry * row_entry
    delta += entry * row_entry
    key_position = block * BN + tl.arange(0, BN)
    real = key_position < length
    if SINKS:
        real = real & (key_position < sinks)
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    far = key_position.to(tl.int64)
    key = tl.load(
        keys + entry * key_entry + far[:, None] * key_row + column[None, :], mask=real[:, None] & wide[None, :], other=0.0
    )
    value = tl.load(
        values + entry * value_entry + far[:, None] * value_row + value_column[None, :],
        mask=real[:, None] & value_wide[None, :],
        other=0.0,
    )
    begin = tl.load(seen_from + entry * blocks + block).to(tl.int32)
    end = positions
    if not SINKS:
        # From so many closed segments on all of these keys are closed.
        past = tl.minimum((block * BN + BN - 1) // segment + 1, segments + 1)
        end = tl.load(row_starts + entry * (segments + 2) + past)
    number = (end - begin + BM - 1) // BM
    per_share = (number + splits - 1) // splits
    begin = begin + share * per_share * BM
    end = tl.minimum(end, begin + per_share * BM)
    to_key = tl.zeros([BN, BD], tl.float32)
    to_value = tl.zeros([BN, BV], tl.float32)
    for member in range(group):
        for start in range(begin, end, BM):
            position = start + tl.arange(0, BM)
            there = position < end
            row = (member * positions + position).to(tl.int64)
            query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
            grad = tl.load(
                grads + row[:, None] * grad_row + value_column[None, :], mask=there[:, None] & value_wide[None, :], other=0.0
            )
            ended = tl.load(lse + row, mask=there, other=float("inf"))
            product = tl.load(delta + row, mask=there, other=0.0)
            sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
            if CAUSAL:
                local = closed_segments(sees, segment, window, segments, CAUSAL) * segment
            else:
                local = sees
            seen = real[:, None] & there[None, :] & (key_position[:, None] < sees[None, :])
            if SINKS:
                seen = seen & (key_position[:, None] < local[None, :])
            else:
                seen = seen & (key_position[:, None] >= local[None, :])
            logit = tl.dot(key, tl.trans(query), input_precision=IP) * scale - ended[None, :]
            weight = tl.where(seen, tl.exp2(tl.minimum(logit * LOG2E, 0.0)), 0.0)
            to_value += tl.dot(weight.to(grad.dtype), grad, input_precision=IP)
            slope = weight * (tl.dot(value, tl.trans(grad), input_precision=IP) - product[None, :])
            to_key += tl.dot(slope.to(query.dtype), query, input_precision=IP)
    place = entry * length + far
    into, mask = key_grad + place[:, None] * dim + column[None, :], real[:, None] & wide[None, :]
    tl.atomic_add(into, to_key * scale, mask=mask, sem="relaxed")
    into, mask = value_grad + place[:, None] * value_dim + value_column[None, :], real[:, None] & value_wide[None, :]
    tl.atomic_add(into, to_value, mask=mask, sem="relaxed")


def local_keys(
    rows: Rows,
    keys: Tensor,
    values: Tensor,
    layout: Layout,
    settings: CellSettings,
    scale: float,
    row_starts: Tensor,
    key_grad: Tensor,
    value_grad: Tensor,
    deterministic: bool,
) -> None:
    """Add to the gradients of keys and values what rows that see them one by one have to say."""
    entries, length, dim = keys.shape
    value_dim, positions = values.shape[2], rows.count // settings.group
    tuned = blocks_for("local_keys", max(dim, value_dim), keys.dtype)
    kinds = [(False, cdiv(length, tuned.keys), 1)] if settings.segment else []
    if settings.sinks:
        kinds.append((True, cdiv(min(settings.sinks, length), tuned.keys), 1 if deterministic else 64))
    for sinks, blocks, splits in kinds:
        first = torch.arange(blocks, device=keys.device, dtype=rows.visible.dtype) * tuned.keys
        seen_from = torch.searchsorted(
            rows.visible[:, :positions].contiguous(), first.expand(entries, -1).contiguous(), right=True
        )
        _local_keys[(blocks, entries, splits)](
            rows.queries,
            keys,
            values,
            rows.visible,
            rows.grads,
            rows.lse,
            rows.delta,
            seen_from,
            row_starts,
            key_grad,
            value_grad,
            length,
            positions,
            settings.group,
            dim,
            value_dim,
            *rows.queries.stride()[:2],
            *keys.stride()[:2],
            *values.stride()[:2],
            rows.visible.stride(0),
            *rows.grads.stride()[:2],
            rows.lse.stride(0),
            blocks,
            splits,
            scale,
            layout.segment,
            settings.window,
            layout.segments,
            settings.sinks,
            SINKS=sinks,
            CAUSAL=settings.segment > 0,
            BM=tuned.rows,
            BN=tuned.keys,
            BD=padded(dim),
            BV=padded(value_dim),
            IP=precision(keys.dtype),
            num_warps=tuned.warps,
            num_stages=tuned.stages,
        )
