"""Gradients of the keys that rows see one by one on a GPU, and of the keys behind the moments of cells."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels.cells_plan import CellSettings
from nearfield.kernels.triton.common import dot_type, padded, precision
from nearfield.kernels.triton.layout import Layout
from nearfield.kernels.triton.route import closed_segments
from nearfield.kernels.triton.rows import Rows
from nearfield.kernels.triton.tables import CHUNK, MEMBERS, Moments
from nearfield.kernels.triton.tuning import blocks_for


@triton.jit
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
    tl.atomic_add(key_grad + place[:, None] * dim + column[None, :], to_key * scale, mask=real[:, None] & wide[None, :])
    tl.atomic_add(
        value_grad + place[:, None] * value_dim + value_column[None, :], to_value, mask=real[:, None] & value_wide[None, :]
    )


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
    kinds = [(False, triton.cdiv(length, tuned.keys), 1)] if settings.segment else []
    if settings.sinks:
        kinds.append((True, triton.cdiv(min(settings.sinks, length), tuned.keys), 1 if deterministic else 64))
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


@triton.jit
def _spread(
    keys,
    values,
    order,
    starts,
    cell_of_member,
    span_cell,
    chunk_span,
    chunk_number,
    centroid,
    value,
    size,
    centroid_grad,
    variance_grad,
    mean_grad,
    cross_grad,
    key_grad,
    value_grad,
    cells,
    spans,
    length,
    dim,
    value_dim,
    key_entry,
    key_row,
    value_entry,
    value_row,
    CHUNK: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """A mean passes 1/n of its gradient to each member, a variance 2 (k - mu)/n, a product of deviations the other deviation."""
    chunk = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1).to(tl.int64)
    span = tl.load(chunk_span + chunk)
    first = tl.load(starts + entry * cells + tl.load(span_cell + span))
    last = tl.load(starts + entry * cells + tl.load(span_cell + span + 1))
    first = first + tl.load(chunk_number + chunk) * CHUNK
    last = tl.minimum(last, first + CHUNK)
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    cross_grad += (entry * spans + span) * value_dim * dim
    for start in range(first, last, BM):
        lane = start + tl.arange(0, BM)
        there = lane < last
        own = tl.load(order + lane, mask=there, other=0).to(tl.int64)
        cell = tl.load(cell_of_member + lane, mask=there, other=0).to(tl.int64)
        share = 1.0 / tl.maximum(tl.load(size + cell, mask=there, other=1.0), 1.0)
        at = cell[:, None] * dim + column[None, :]
        value_at = cell[:, None] * value_dim + value_column[None, :]
        load, value_load = there[:, None] & wide[None, :], there[:, None] & value_wide[None, :]
        key = tl.load(keys + entry * key_entry + own[:, None] * key_row + column[None, :], mask=load, other=0.0).to(tl.float32)
        off_key = key - tl.load(centroid + at, mask=load, other=0.0)
        to_key = (
            tl.load(centroid_grad + at, mask=load, other=0.0) + 2.0 * tl.load(variance_grad + at, mask=load, other=0.0) * off_key
        )
        to_value = tl.load(mean_grad + value_at, mask=value_load, other=0.0)
        to_key = to_key * share[:, None]
        to_value = to_value * share[:, None]
        for begin in range(0, BV, BK):
            some = begin + tl.arange(0, BK)
            narrow = there[:, None] & (some < value_dim)[None, :]
            here = tl.load(values + entry * value_entry + own[:, None] * value_row + some[None, :], mask=narrow, other=0.0)
            off = here.to(tl.float32) - tl.load(value + cell[:, None] * value_dim + some[None, :], mask=narrow, other=0.0)
            matrix = tl.load(
                cross_grad + some[:, None] * dim + column[None, :], mask=(some < value_dim)[:, None] & wide[None, :], other=0.0
            )
            to_key += tl.dot(off.to(DT), matrix.to(DT), input_precision=IP)
        for begin in range(0, BD, BK):
            some = begin + tl.arange(0, BK)
            narrow = there[:, None] & (some < dim)[None, :]
            here = tl.load(keys + entry * key_entry + own[:, None] * key_row + some[None, :], mask=narrow, other=0.0)
            off = here.to(tl.float32) - tl.load(centroid + cell[:, None] * dim + some[None, :], mask=narrow, other=0.0)
            matrix = tl.load(
                cross_grad + value_column[None, :] * dim + some[:, None],
                mask=value_wide[None, :] & (some < dim)[:, None],
                other=0.0,
            )
            to_value += tl.dot(off.to(DT), matrix.to(DT), input_precision=IP)
        place = entry * length + own
        tl.atomic_add(key_grad + place[:, None] * dim + column[None, :], to_key, mask=load)
        tl.atomic_add(value_grad + place[:, None] * value_dim + value_column[None, :], to_value, mask=value_load)


def spread(
    keys: Tensor,
    values: Tensor,
    moments: Moments,
    layout: Layout,
    centroid_grad: Tensor,
    variance_grad: Tensor,
    mean_grad: Tensor,
    cross_grad: Tensor,
    key_grad: Tensor,
    value_grad: Tensor,
    by_height: bool,
) -> None:
    """Add to the gradients of keys and values what the moments of their cells pass on. `by_height`: one after the other."""
    entries, length, dim = keys.shape
    value_dim = values.shape[2]
    for span, number in layout.chunk_groups(CHUNK) if by_height else [layout.chunks(CHUNK)]:
        _spread[(len(span), entries)](
            keys,
            values,
            moments.order,
            moments.starts,
            moments.cell_of_member,
            layout.span_cell,
            span,
            number,
            moments.centroid,
            moments.value,
            moments.size,
            centroid_grad,
            variance_grad,
            mean_grad,
            cross_grad,
            key_grad,
            value_grad,
            layout.cells,
            len(layout.spans.all),
            length,
            dim,
            value_dim,
            *keys.stride()[:2],
            *values.stride()[:2],
            CHUNK=CHUNK,
            BM=MEMBERS,
            BD=padded(dim),
            BV=padded(value_dim),
            BK=min(64, padded(dim), padded(value_dim)),
            DT=dot_type(keys.dtype),
            IP=precision(keys.dtype),
            num_warps=4,
            num_stages=1,
        )
