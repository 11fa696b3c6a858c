"""Keys that rows see one by one on a GPU: the sinks, and those after the last closed segment. Forward, dq, dk and dv."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells.sizes import CellSizes
from nearfield.cells.triton.far_field import closed_segments
from nearfield.cells.triton.layout import Layout
from nearfield.cells.triton.tuning import blocks_for
from nearfield.kernels.launch import Kernel, cdiv, padded, precision


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
def _local_fwd(
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
    sizes: CellSizes,
    scale: float,
    output: Tensor,
    lse: Tensor,
) -> None:
    """Fills in `output` `[entries, rows, value_dim]` and log2-normalisers `lse` `[entries, rows]`."""
    entries, rows, dim = queries.shape
    value_dim = values.shape[2]
    blocks = blocks_for("local", max(dim, value_dim), queries.dtype)
    positions = rows // sizes.group
    _local_fwd[(sizes.group * cdiv(positions, blocks.rows), entries)](
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
        sizes.window,
        layout.segments,
        sizes.sinks,
        CAUSAL=sizes.segment > 0,
        BM=blocks.rows,
        BN=blocks.keys,
        BD=padded(dim),
        BV=padded(value_dim),
        IP=precision(queries.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


@dataclass(frozen=True)
class Rows:
    """Rows `[entries, count, ...]` with what the forward pass left of them."""

    queries: Tensor
    visible: Tensor
    grads: Tensor
    """of the output"""
    lse: Tensor
    """natural logarithm; +inf where a row sees nothing, so that its weights are 0"""
    delta: Tensor
    """the output times its gradient"""

    @property
    def count(self) -> int:
        return self.queries.shape[1]

    def part(self, entries: slice, rows: slice) -> Rows:
        return Rows(*(x[entries, rows] for x in (self.queries, self.visible, self.grads, self.lse, self.delta)))


@Kernel
def _delta(
    output, grads, found, rows, value_dim, output_entry, output_row, grad_entry, grad_row, BM: tl.constexpr, BV: tl.constexpr
):
    entry = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.arange(0, BV)
    mask = (row < rows)[:, None] & (column < value_dim)[None, :]
    one = tl.load(output + entry * output_entry + row[:, None] * output_row + column[None, :], mask=mask, other=0.0)
    two = tl.load(grads + entry * grad_entry + row[:, None] * grad_row + column[None, :], mask=mask, other=0.0)
    tl.store(found + entry * rows + row, tl.sum(one.to(tl.float32) * two.to(tl.float32), 1), mask=row < rows)


def rows_of(queries: Tensor, visible: Tensor, output: Tensor, lse: Tensor, grads: Tensor) -> Rows:
    entries, rows, value_dim = output.shape
    delta = torch.empty(entries, rows, device=output.device)
    _delta[(cdiv(rows, 64), entries)](
        output,
        grads,
        delta,
        rows,
        value_dim,
        *output.stride()[:2],
        *grads.stride()[:2],
        BM=64,
        BV=padded(value_dim),
        num_warps=4,
    )
    return Rows(queries, visible, grads, lse.masked_fill(lse == -torch.inf, torch.inf), delta)


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
    sizes: CellSizes,
    scale: float,
    query_grad: Tensor,
) -> None:
    """Fills in `query_grad` `[entries, rows, dim]`."""
    entries, count, dim = rows.queries.shape
    value_dim = values.shape[2]
    blocks = blocks_for("local_queries", max(dim, value_dim), keys.dtype)
    positions = count // sizes.group
    _local_queries[(sizes.group * cdiv(positions, blocks.rows), entries)](
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
        sizes.window,
        layout.segments,
        sizes.sinks,
        CAUSAL=sizes.segment > 0,
        BM=blocks.rows,
        BN=blocks.keys,
        BD=padded(dim),
        BV=padded(value_dim),
        IP=precision(keys.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )


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
    sizes: CellSizes,
    scale: float,
    row_starts: Tensor,
    key_grad: Tensor,
    value_grad: Tensor,
    deterministic: bool,
) -> None:
    """Add to the gradients of keys and values what rows that see them one by one have to say."""
    entries, length, dim = keys.shape
    value_dim, positions = values.shape[2], rows.count // sizes.group
    tuned = blocks_for("local_keys", max(dim, value_dim), keys.dtype)
    kinds = [(False, cdiv(length, tuned.keys), 1)] if sizes.segment else []
    if sizes.sinks:
        kinds.append((True, cdiv(min(sizes.sinks, length), tuned.keys), 1 if deterministic else 64))
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
            sizes.group,
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
            sizes.window,
            layout.segments,
            sizes.sinks,
            SINKS=sinks,
            CAUSAL=sizes.segment > 0,
            BM=tuned.rows,
            BN=tuned.keys,
            BD=padded(dim),
            BV=padded(value_dim),
            IP=precision(keys.dtype),
            num_warps=tuned.warps,
            num_stages=tuned.stages,
        )
