"""Moments of cells on a GPU: a program for every cell, which reads its keys where they lie."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton.language as tl
from torch import Tensor

from nearfield.kernels.triton.common import cdiv, dot_dtype, dot_type, padded, precision
from nearfield.kernels.triton.launch import Kernel
from nearfield.kernels.triton.layout import Layout
from nearfield.kernels.triton.sort import members_of
from nearfield.partition.cells import MOST_VARIANCE

VOID = -1e30
"""Added to the score of a cell that is not to be opened."""
MEMBERS = 32
"""Keys that a program reads at a time."""
CHUNK = 1024
"""Keys whose deviations one program multiplies, so many at a time:"""
AT_A_TIME = 64


@dataclass(frozen=True)
class Tables:
    """The cells of all entries of a batch; see `partition.cells.CellTable`. Numbers of cells count on over the entries."""

    order: Tensor
    """`[members]`: key positions inside their entry, cell by cell"""
    starts: Tensor
    """`[entries * cells + 1]`: the range of each cell in `order`"""
    void: Tensor
    """`[entries, cells]`: `VOID` where a cell is empty or has a member that is not finite, so that it is not opened; else 0"""
    weight: Tensor
    """`[entries, cells]`: log2 of how many keys; -inf where it is empty, 3e38 where a member is not finite"""
    centroid: Tensor
    """`[entries, cells, dim]`, in the dtype of the keys, as the values are; zeros where a member is not finite"""
    variance: Tensor
    value: Tensor
    cross: Tensor
    """`[entries, segments + 1, value_dim, dim]`: the pooled covariance for rows with s closed segments, float32"""
    pooled: Tensor
    """`[entries, segments + 1]`: of how many keys"""

    @property
    def cells(self) -> int:
        """per entry"""
        return self.void.shape[1]

    def of(self, entries: slice) -> Tables:
        """Those of some entries."""
        starts = self.starts[entries.start * self.cells : entries.stop * self.cells + 1]
        others = (self.void, self.weight, self.centroid, self.variance, self.value, self.cross, self.pooled)
        return Tables(self.order, starts, *(x[entries] for x in others))


@Kernel
def _moments(
    keys,
    values,
    order,
    starts,
    centroid,
    value,
    low_centroid,
    low_variance,
    low_value,
    void,
    weight,
    cells,
    dim,
    value_dim,
    key_entry,
    key_row,
    value_entry,
    value_row,
    MOST: tl.constexpr,
    NOTHING: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Centroid, variance and mean value of one cell, in float32 and as kernels look them up."""
    cell = tl.program_id(0).to(tl.int64)
    entry = cell // cells
    first, last = tl.load(starts + cell), tl.load(starts + cell + 1)
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    lane = tl.arange(0, BM)
    keys += entry * key_entry
    # Sums of deviations from one of the members, so that a common offset costs no digits.
    one = tl.load(order + first, mask=last > first, other=0).to(tl.int64)
    shift = tl.load(keys + one * key_row + column, mask=wide, other=0.0).to(tl.float32)
    total = tl.zeros([BM, BD], tl.float32)
    square = tl.zeros([BM, BD], tl.float32)
    value_total = tl.zeros([BM, BV], tl.float32)
    for start in range(first, last, BM):
        there = start + lane < last
        own = tl.load(order + start + lane, mask=there, other=0).to(tl.int64)
        key = tl.load(keys + own[:, None] * key_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
        off = tl.where(there[:, None], key.to(tl.float32) - shift[None, :], 0.0)
        total += off
        square += off * off
        val = tl.load(
            values + entry * value_entry + own[:, None] * value_row + value_column[None, :],
            mask=there[:, None] & value_wide[None, :],
            other=0.0,
        )
        value_total += val.to(tl.float32)
    share = 1.0 / tl.maximum((last - first).to(tl.float32), 1.0)
    off_mean = tl.sum(total, 0) * share
    mean = tl.where(last > first, shift + off_mean, 0.0)
    tl.store(centroid + cell * dim + column, mean, mask=wide)
    mean_value = tl.sum(value_total, 0) * share
    tl.store(value + cell * value_dim + value_column, mean_value, mask=value_wide)
    spread = tl.minimum(tl.maximum(tl.sum(square, 0) * share - off_mean * off_mean, 0.0), MOST)
    # 0 times a number that is not finite is not 0.
    odd = tl.sum(tl.where(mean * 0.0 == 0.0, 0, 1), 0) + tl.sum(tl.where(mean_value * 0.0 == 0.0, 0, 1), 0)
    fine = odd == 0
    tl.store(low_centroid + cell * dim + column, tl.where(fine, mean, 0.0).to(low_centroid.dtype.element_ty), mask=wide)
    tl.store(low_variance + cell * dim + column, tl.where(fine, spread, 0.0).to(low_variance.dtype.element_ty), mask=wide)
    tl.store(
        low_value + cell * value_dim + value_column,
        tl.where(fine, mean_value, 0.0).to(low_value.dtype.element_ty),
        mask=value_wide,
    )
    tl.store(void + cell, tl.where(fine & (last > first), 0.0, NOTHING))
    count = tl.where(last > first, tl.log2(tl.maximum(last - first, 1).to(tl.float32)), -float("inf"))
    tl.store(weight + cell, tl.where(fine, count, 3e38))


@Kernel
def _products(
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
    found,
    cells,
    dim,
    value_dim,
    key_entry,
    key_row,
    value_entry,
    value_row,
    chunks,
    CHUNK: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """Sum over some keys of one span of (value - mean of its cell) (key - mean of its cell)^T, for a block of value columns."""
    chunk = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1).to(tl.int64)
    span = tl.load(chunk_span + chunk)
    first = tl.load(starts + entry * cells + tl.load(span_cell + span))
    last = tl.load(starts + entry * cells + tl.load(span_cell + span + 1))
    first = first + tl.load(chunk_number + chunk) * CHUNK
    last = tl.minimum(last, first + CHUNK)
    column = tl.arange(0, BD)
    value_column = tl.program_id(2) * BV + tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    lane = tl.arange(0, BM)
    total = tl.zeros([BV, BD], tl.float32)
    for start in range(first, last, BM):
        there = start + lane < last
        own = tl.load(order + start + lane, mask=there, other=0).to(tl.int64)
        cell = tl.load(cell_of_member + start + lane, mask=there, other=0).to(tl.int64)
        key = tl.load(
            keys + entry * key_entry + own[:, None] * key_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0
        )
        mean = tl.load(centroid + cell[:, None] * dim + column[None, :], mask=there[:, None] & wide[None, :], other=0.0).to(
            tl.float32
        )
        val = tl.load(
            values + entry * value_entry + own[None, :] * value_row + value_column[:, None],
            mask=there[None, :] & value_wide[:, None],
            other=0.0,
        )
        middle = tl.load(
            value + cell[None, :] * value_dim + value_column[:, None], mask=there[None, :] & value_wide[:, None], other=0.0
        )
        off_key = (key.to(tl.float32) - mean).to(DT)
        off_value = (val.to(tl.float32) - middle.to(tl.float32)).to(DT)
        total += tl.dot(off_value, off_key, input_precision=IP)
    place = found + ((entry * chunks + chunk) * value_dim + value_column[:, None]) * dim + column[None, :]
    # What is not finite is told by the weights of cells; here it would spread to rows that do not see it.
    tl.store(place, tl.where(total * 0.0 == 0.0, total, 0.0), mask=value_wide[:, None] & wide[None, :])


@dataclass(frozen=True)
class Moments:
    """The cells of all entries of a batch, also in float32, as the backward pass needs it."""

    order: Tensor
    starts: Tensor
    cell_of_member: Tensor
    """`[members]`: the cell of each entry of `order`, counted on over the entries"""
    size: Tensor
    """`[entries, cells]`: how many keys, float32"""
    centroid: Tensor
    value: Tensor
    low: tuple[Tensor, ...]
    """void, weight, centroid, variance and value, see `Tables`"""

    def of(self, entries: slice) -> Moments:
        """Those of some entries, as far as they are told by entry."""
        return replace(
            self,
            size=self.size[entries],
            centroid=self.centroid[entries],
            value=self.value[entries],
            low=tuple(x[entries] for x in self.low),
        )


def moments_of(keys: Tensor, values: Tensor, cell_of: Tensor, layout: Layout) -> Moments:
    """Of the cells of keys `[entries, n, dim]` and values; `cell_of` `[entries, heights, n]`, -1 for none."""
    entries, _, dim = keys.shape
    value_dim, cells, device = values.shape[2], layout.cells, keys.device
    last = entries * cells
    order, cell_of_member, starts = members_of(cell_of, layout)
    centroid = torch.empty(entries, cells, dim, device=device)
    value = torch.empty(entries, cells, value_dim, device=device)
    low = (
        torch.empty(entries, cells, device=device),
        torch.empty(entries, cells, device=device),
        torch.empty_like(centroid, dtype=keys.dtype),
        torch.empty_like(centroid, dtype=dot_dtype(keys.dtype)),
        torch.empty_like(value, dtype=keys.dtype),
    )
    if last:
        _moments[(last,)](
            keys,
            values,
            order,
            starts,
            centroid,
            value,
            *low[2:],
            *low[:2],
            cells,
            dim,
            value_dim,
            *keys.stride()[:2],
            *values.stride()[:2],
            MOST=MOST_VARIANCE,
            NOTHING=VOID,
            BM=MEMBERS,
            BD=padded(dim),
            BV=padded(value_dim),
            num_warps=2 if max(dim, value_dim) <= 64 else 4 if max(dim, value_dim) <= 128 else 8,
        )
    size = starts.diff().view(entries, cells).float()
    return Moments(order, starts, cell_of_member, size, centroid, value, low)


def tabulate(keys: Tensor, values: Tensor, moments: Moments, layout: Layout) -> Tables:
    """What kernels look up, in their dtypes."""
    cross, pooled = _covariances(keys, values, moments, layout)
    void, weight, centroid, variance, value = moments.low
    return Tables(moments.order, moments.starts, void, weight, centroid, variance, value, cross, pooled)


def _covariances(keys: Tensor, values: Tensor, moments: Moments, layout: Layout) -> tuple[Tensor, Tensor]:
    """What each number of closed segments has in common, `[entries, segments + 1, value_dim, dim]`; of how many keys."""
    entries, _, dim = keys.shape
    value_dim, device, spans = values.shape[2], keys.device, layout.spans.all
    if not spans:
        return torch.zeros(entries, 1, value_dim, dim, device=device), torch.ones(entries, 1, device=device)
    span, number = layout.chunks(CHUNK)
    found = torch.empty(entries, span.shape[0], value_dim, dim, device=device)
    block = min(64, padded(value_dim))
    _products[(span.shape[0], entries, cdiv(value_dim, block))](
        keys,
        values,
        moments.order,
        moments.starts,
        moments.cell_of_member,
        layout.span_cell,
        span,
        number,
        moments.low[2],  # that a mean is rounded does not matter here: deviations from it sum up to zero
        moments.low[4],
        found,
        layout.cells,
        dim,
        value_dim,
        *keys.stride()[:2],
        *values.stride()[:2],
        span.shape[0],
        CHUNK=CHUNK,
        BM=AT_A_TIME if max(dim, value_dim) <= 128 else MEMBERS,
        BD=padded(dim),
        BV=block,
        DT=dot_type(keys.dtype),
        IP=precision(keys.dtype),
        num_warps=4,
    )
    # What a row sees is a sum over chunks: one product with a table of zeros and ones.
    members = moments.starts[layout.first_cells(entries)].diff(dim=1).float()
    pooled = (members @ layout.seen.T).clamp_(min=1)
    cross = torch.matmul(layout.seen_chunks(CHUNK), found.flatten(2)).unflatten(2, (value_dim, dim))
    return cross.div_(pooled[..., None, None]), pooled
