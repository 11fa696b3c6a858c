"""Gradients of the moments of cells on a GPU, passed on to their keys: key by key, over all spans that a key is in."""

from __future__ import annotations

import triton.language as tl
from torch import Tensor

from nearfield.kernels.triton.common import cdiv, dot_type, padded, precision
from nearfield.kernels.triton.launch import Kernel
from nearfield.kernels.triton.layout import Layout
from nearfield.kernels.triton.tables import Moments
from nearfield.kernels.triton.tuning import blocks_for


@Kernel
def _spread(
    keys,
    values,
    cell_of,
    span_at,
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
    heights,
    segment,
    segments,
    length,
    dim,
    value_dim,
    key_entry,
    key_row,
    value_entry,
    value_row,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """A mean passes 1/n of its gradient to each member, a variance 2 (k - mu)/n, a product of deviations the other deviation."""
    block, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = block * BM + tl.arange(0, BM)
    there = position < length
    place = position.to(tl.int64)
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    keys += entry * key_entry
    values += entry * value_entry
    cell_of += entry * heights * length
    key = tl.load(keys + place[:, None] * key_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    to_key = tl.zeros([BM, BD], tl.float32)
    to_value = tl.zeros([BM, BV], tl.float32)
    first_segment = block * BM // segment
    last_segment = tl.minimum(block * BM + BM - 1, length - 1) // segment
    for height in range(heights):
        for number in range(first_segment, tl.minimum(last_segment + 1, segments)):
            span = tl.load(span_at + height * segments + number)
            if span >= 0:
                inside = there & (position // segment == number)
                cell = tl.load(cell_of + height * length + place, mask=inside, other=-1)
                inside = inside & (cell >= 0)
                cell = entry * cells + cell
                share = 1.0 / tl.load(size + cell, mask=inside, other=1.0)
                at = cell[:, None] * dim + column[None, :]
                value_at = cell[:, None] * value_dim + value_column[None, :]
                load, value_load = inside[:, None] & wide[None, :], inside[:, None] & value_wide[None, :]
                off_key = tl.where(load, key.to(tl.float32) - tl.load(centroid + at, mask=load, other=0.0), 0.0)
                own = tl.load(centroid_grad + at, mask=load, other=0.0)
                own += 2.0 * tl.load(variance_grad + at, mask=load, other=0.0) * off_key
                to_key += own * share[:, None]
                to_value += tl.load(mean_grad + value_at, mask=value_load, other=0.0) * share[:, None]
                matrix_at = cross_grad + (entry * spans + span) * value_dim * dim
                for begin in range(0, BV, BK):
                    some = begin + tl.arange(0, BK)
                    narrow = inside[:, None] & (some < value_dim)[None, :]
                    here = tl.load(values + place[:, None] * value_row + some[None, :], mask=narrow, other=0.0)
                    off = here.to(tl.float32) - tl.load(value + cell[:, None] * value_dim + some[None, :], mask=narrow, other=0.0)
                    load_some = (some < value_dim)[:, None] & wide[None, :]
                    matrix = tl.load(matrix_at + some[:, None] * dim + column[None, :], mask=load_some, other=0.0)
                    to_key += tl.dot(off.to(DT), matrix.to(DT), input_precision=IP)
                for begin in range(0, BD, BK):
                    some = begin + tl.arange(0, BK)
                    narrow = inside[:, None] & (some < dim)[None, :]
                    here = tl.load(keys + place[:, None] * key_row + some[None, :], mask=narrow, other=0.0)
                    off = here.to(tl.float32) - tl.load(centroid + cell[:, None] * dim + some[None, :], mask=narrow, other=0.0)
                    matrix = tl.load(
                        matrix_at + value_column[None, :] * dim + some[:, None],
                        mask=value_wide[None, :] & (some < dim)[:, None],
                        other=0.0,
                    )
                    to_value += tl.dot(off.to(DT), matrix.to(DT), input_precision=IP)
    into = entry * length + place
    tl.store(key_grad + into[:, None] * dim + column[None, :], to_key, mask=there[:, None] & wide[None, :])
    tl.store(value_grad + into[:, None] * value_dim + value_column[None, :], to_value, mask=there[:, None] & value_wide[None, :])


def spread(
    keys: Tensor,
    values: Tensor,
    cell_of: Tensor,
    moments: Moments,
    layout: Layout,
    grads: tuple[Tensor, Tensor, Tensor, Tensor],
    key_grad: Tensor,
    value_grad: Tensor,
) -> None:
    """Fills in what the moments of their cells pass on to keys and values, `[entries, n, ...]`, float32.

    `grads`: of centroids, variances and mean values, and of the products of deviations of each span.
    """
    entries, length, dim = keys.shape
    value_dim = values.shape[2]
    blocks = blocks_for("spread", max(dim, value_dim), keys.dtype)
    _spread[(cdiv(length, blocks.rows), entries)](
        keys,
        values,
        cell_of,
        layout.span_at,
        moments.centroid,
        moments.value,
        moments.size,
        *grads,
        key_grad,
        value_grad,
        layout.cells,
        len(layout.spans.all),
        cell_of.shape[1],
        layout.segment,
        layout.segments,
        length,
        dim,
        value_dim,
        *keys.stride()[:2],
        *values.stride()[:2],
        BM=blocks.rows,
        BD=padded(dim),
        BV=padded(value_dim),
        BK=min(64, padded(dim), padded(value_dim)),
        DT=dot_type(keys.dtype),
        IP=precision(keys.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
