"""Moments of cells on a GPU, and what their gradients give keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells import moments as cell_moments
from nearfield.cells.triton.cluster import members_of
from nearfield.cells.triton.far_field import MOST_SCORE, NOT_FINITE, VOID
from nearfield.cells.triton.layout import COLUMNS, Layout
from nearfield.cells.triton.tuning import blocks_for, fitting_warps
from nearfield.kernels.launch import Kernel, cdiv, dot_dtype, dot_type, padded, precision, strides
from nearfield.kernels.tensors import fill_, weighted_sums, zeros

MOST_VARIANCE = tl.constexpr(cell_moments.MOST_VARIANCE)

MEMBERS = 32
"""Keys that a program reads at a time."""

CHUNK = 1024
"""Keys whose products of deviations one program sums up."""


@dataclass(frozen=True)
class Tables:
    """The cells of all entries of a batch, as kernels read them; see `cells.moments.CellTable`.

    The numbers of cells continue from entry to entry.
    """

    order: Tensor
    """`[members]`: key positions inside their entry, cell by cell"""
    starts: Tensor
    """`[entries * cells + 1]`: the range of each cell in `order`"""
    log_exists: Tensor
    """`[entries, cells]`: `VOID` where a cell is empty or has a member that is not finite, so that it is not opened; else 0"""
    log2_size: Tensor
    """`[entries, cells]`: log2 of how many keys; -inf where it is empty, `NOT_FINITE` where a member is not finite"""
    centroid: Tensor
    """`[entries, cells, dim]`, in the dtype of the keys, as the values are; zeros where a member is not finite"""
    variance: Tensor
    value: Tensor
    cross: Tensor
    """`[entries, segments + 1, value_dim, dim]`: the pooled covariance for rows with s closed segments, float32"""
    pooled: Tensor
    """`[entries, segments + 1]`: how many keys these are pooled over"""
    column_most: Tensor
    """`[entries, columns]`: the largest score that a cell may have, column by column of the tiles of `Layout`; `VOID` where there
    is no cell, or it must not be opened. To look at the ends of a span for each of its cells would take longer than their
    products do."""
    column_size: Tensor
    """`[entries, columns]`: the same of `log2_size`, -inf where there is no cell"""

    @property
    def cells(self) -> int:
        """per entry"""
        return self.log_exists.shape[1]

    def of(self, entries: slice) -> Tables:
        """Those of some entries."""
        if entries == slice(0, len(self.log_exists)):
            return self
        starts = self.starts[entries.start * self.cells : entries.stop * self.cells + 1]
        _, _, *others = vars(self).values()
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
    log_exists,
    log2_size,
    cells,
    dim,
    value_dim,
    key_entry,
    key_row,
    value_entry,
    value_row,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Centroid, variance and mean value of one cell, in float32 and as kernels read them."""
    cell = tl.program_id(0).to(tl.int64)
    entry = cell // cells
    first, last = tl.load(starts + cell), tl.load(starts + cell + 1)
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    lane = tl.arange(0, BM)
    keys += entry * key_entry
    # Sums of deviations from one of the members, so that a common offset costs no precision.
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
    spread = tl.minimum(tl.maximum(tl.sum(square, 0) * share - off_mean * off_mean, 0.0), MOST_VARIANCE)
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
    tl.store(log_exists + cell, tl.where(fine & (last > first), 0.0, VOID))
    count = tl.where(last > first, tl.log2(tl.maximum(last - first, 1).to(tl.float32)), -float("inf"))
    tl.store(log2_size + cell, tl.where(fine, count, NOT_FINITE))


@triton.jit
def _fill_columns(
    log_exists,
    log2_size,
    tile_cell,
    tile_begin,
    tile_end,
    column_most,
    column_size,
    columns,
    TILE: tl.constexpr,
    B: tl.constexpr,
):
    """A program's share of `Tables.column_most` and `column_size` of an entry."""
    program = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    for start in range(program * B, columns, tl.num_programs(0) * tl.num_programs(2) * B):
        column = start + tl.arange(0, B)
        there = column < columns
        cell = tl.load(tile_cell + column // TILE, mask=there, other=0) + column % TILE
        real = there & (cell >= tl.load(tile_begin + column // TILE, mask=there, other=0))
        real = real & (cell < tl.load(tile_end + column // TILE, mask=there, other=0))
        exists = tl.load(log_exists + cell, mask=real, other=VOID)
        tl.store(column_most + column, tl.where(exists == 0.0, MOST_SCORE, VOID), mask=there)
        tl.store(column_size + column, tl.load(log2_size + cell, mask=real, other=-float("inf")), mask=there)


@Kernel
def _products(
    keys,
    values,
    cell_of,
    centroid,
    value,
    starts,
    cell_edges,
    log_exists,
    log2_size,
    tile_cell,
    tile_begin,
    tile_end,
    products,
    pooled,
    column_most,
    column_size,
    parts,
    chunks,
    length,
    segment,
    sinks,
    cells,
    columns,
    dim,
    value_dim,
    key_entry,
    key_row,
    value_entry,
    value_row,
    cell_entry,
    CAUSAL: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    BF: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """Sums of products value key^T, both minus the means of some early keys, for a block of value columns.

    The first programs take the keys of one chunk of a segment, the others the means of the cells of one span, as often as these
    have keys. The difference of such sums is the covariance inside cells. Besides: what is known of the cells of each column.
    """
    part, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    own_exists, own_size = log_exists + entry * cells, log2_size + entry * cells
    column_most += entry * columns
    column_size += entry * columns
    _fill_columns(own_exists, own_size, tile_cell, tile_begin, tile_end, column_most, column_size, columns, TILE, BF)
    if not CAUSAL:
        # How many keys there are.
        held = tl.load(starts + (entry + 1) * cells) - tl.load(starts + entry * cells)
        tl.store(pooled + entry, tl.maximum(held, 1).to(tl.float32))
    column = tl.arange(0, BD)
    value_column = tl.program_id(2) * BV + tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    keys += entry * key_entry
    values += entry * value_entry
    # Every row that sees a cell with members sees the whole segment of the first key that is no sink.
    early = sinks + tl.arange(0, BM)
    known = early < tl.minimum((sinks // segment + 1) * segment, length)
    count = tl.maximum(tl.sum(known.to(tl.float32), 0), 1.0)
    at = early.to(tl.int64)[:, None]
    early_key = tl.load(keys + at * key_row + column[None, :], mask=known[:, None] & wide[None, :], other=0.0)
    early_value = tl.load(values + at * value_row + value_column[None, :], mask=known[:, None] & value_wide[None, :], other=0.0)
    key_shift = tl.sum(early_key.to(tl.float32), 0) / count
    value_shift = tl.sum(early_value.to(tl.float32), 0) / count
    total = tl.zeros([BV, BD], tl.float32)
    if part < chunks:
        per_segment = (segment + CHUNK - 1) // CHUNK
        number = part // per_segment
        first = number * segment + part % per_segment * CHUNK
        last = tl.minimum(tl.minimum(first + CHUNK, (number + 1) * segment), length)
        for start in range(first, last, BM):
            position = start + tl.arange(0, BM)
            there = (position < last) & (position >= sinks)
            if not CAUSAL:
                there = there & (tl.load(cell_of + entry * cell_entry + position, mask=there, other=-1) >= 0)
            place = position.to(tl.int64)
            key = tl.load(keys + place[:, None] * key_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
            val = tl.load(
                values + place[:, None] * value_row + value_column[None, :], mask=there[:, None] & value_wide[None, :], other=0.0
            )
            off_key = tl.where(there[:, None], key.to(tl.float32) - key_shift[None, :], 0.0).to(DT)
            off_value = tl.where(there[:, None], val.to(tl.float32) - value_shift[None, :], 0.0).to(DT)
            total = tl.dot(tl.trans(off_value), off_key, total, input_precision=IP)
    else:
        span = part - chunks
        last_cell = tl.load(cell_edges + span + 1)
        for start in range(tl.load(cell_edges + span), last_cell, BC):
            cell = entry * cells + start + tl.arange(0, BC)
            real = start + tl.arange(0, BC) < last_cell
            size = (tl.load(starts + cell + 1, mask=real, other=0) - tl.load(starts + cell, mask=real, other=0)).to(tl.float32)
            mean = tl.load(centroid + cell[:, None] * dim + column[None, :], mask=real[:, None] & wide[None, :], other=0.0)
            middle = tl.load(
                value + cell[:, None] * value_dim + value_column[None, :], mask=real[:, None] & value_wide[None, :], other=0.0
            )
            middle = (middle - value_shift[None, :]) * size[:, None]
            total = tl.dot(tl.trans(middle), mean - key_shift[None, :], total, input_precision="tf32x3")
    into = products + ((entry * parts + part) * value_dim + value_column[:, None]) * dim + column[None, :]
    # `log2_size` says where something is not finite; here it would reach rows that do not see it.
    tl.store(into, tl.where(total * 0.0 == 0.0, total, 0.0), mask=value_wide[:, None] & wide[None, :])


@dataclass(frozen=True)
class Moments:
    """The cells of all entries of a batch: in float32, for the backward pass, and rounded (`low_...`), as `Tables` has them."""

    order: Tensor
    starts: Tensor
    centroid: Tensor
    """`[entries, cells, ...]`, as all that follows"""
    value: Tensor
    log_exists: Tensor
    log2_size: Tensor
    low_centroid: Tensor
    low_variance: Tensor
    low_value: Tensor


def moments_of(keys: Tensor, values: Tensor, cell_of: Tensor, layout: Layout, sizes: Tensor | None = None) -> Moments:
    """Moments of the cells of keys `[entries, n, dim]` and values; `cell_of` `[entries, span_levels, n]`, -1 for none.

    `sizes`: see `members_of`.
    """
    entries, _, dim = keys.shape
    value_dim, cells, device = values.shape[2], layout.cells, keys.device
    last = entries * cells
    order, starts = members_of(cell_of, sizes, layout)
    centroid = torch.empty(entries, cells, dim, dtype=torch.float32, device=device)
    value = torch.empty(entries, cells, value_dim, dtype=torch.float32, device=device)
    log_exists, log2_size = (torch.empty(entries, cells, dtype=torch.float32, device=device) for _ in range(2))
    low_centroid, low_value = torch.empty_like(centroid, dtype=keys.dtype), torch.empty_like(value, dtype=keys.dtype)
    low_variance = torch.empty_like(centroid, dtype=dot_dtype(keys.dtype))
    if last:
        _moments[(last,)](
            keys=keys,
            values=values,
            order=order,
            starts=starts,
            centroid=centroid,
            value=value,
            low_centroid=low_centroid,
            low_variance=low_variance,
            low_value=low_value,
            log_exists=log_exists,
            log2_size=log2_size,
            cells=cells,
            dim=dim,
            value_dim=value_dim,
            **strides(key=keys, value=values),
            BM=MEMBERS,
            BD=padded(dim),
            BV=padded(value_dim),
            num_warps=2 if max(dim, value_dim) <= 64 else 4 if max(dim, value_dim) <= 128 else 8,
        )
    low = log_exists, log2_size, low_centroid, low_variance, low_value
    return Moments(order, starts, centroid, value, *low)


def tabulate(keys: Tensor, values: Tensor, cell_of: Tensor, moments: Moments, layout: Layout) -> Tables:
    """What kernels read, in their dtypes."""
    cross, pooled, *columns = covariances(keys, values, cell_of, moments, layout)
    low = moments.log_exists, moments.log2_size, moments.low_centroid, moments.low_variance, moments.low_value
    return Tables(moments.order, moments.starts, *low, cross, pooled, *columns)


def covariances(keys: Tensor, values: Tensor, cell_of: Tensor, moments: Moments, layout: Layout) -> tuple[Tensor, ...]:
    """By number of closed segments: the covariance `[entries, segments + 1, value_dim, dim]`, and how many keys it is over.

    Then `Tables.column_most` and `column_size`.
    """
    entries, length, dim = keys.shape
    value_dim, device, spans = values.shape[2], keys.device, layout.spans.all
    most, size = torch.empty(2, entries, COLUMNS * layout.tile_cell.shape[0], dtype=torch.float32, device=device).unbind(0)
    if not spans:
        cross = zeros(entries, 1, value_dim, dim, dtype=torch.float32, device=device)
        return cross, fill_(torch.empty(entries, 1, dtype=torch.float32, device=device), 1), most, size
    chunks = layout.segments * cdiv(layout.segment, CHUNK)
    parts = chunks + len(spans)
    products = torch.empty(entries, parts, value_dim, dim, dtype=torch.float32, device=device)
    pooled = torch.empty(entries, dtype=torch.float32, device=device)
    blocks = blocks_for("products", max(dim, value_dim), keys.dtype, device)
    block = min(blocks.columns, padded(value_dim))
    _products[(parts, entries, cdiv(value_dim, block))](
        keys=keys,
        values=values,
        cell_of=cell_of,
        centroid=moments.centroid,
        value=moments.value,
        starts=moments.starts,
        cell_edges=layout.cell_edges,
        log_exists=moments.log_exists,
        log2_size=moments.log2_size,
        tile_cell=layout.tile_cell,
        tile_begin=layout.tile_begin,
        tile_end=layout.tile_end,
        products=products,
        pooled=pooled,
        column_most=most,
        column_size=size,
        parts=parts,
        chunks=chunks,
        length=length,
        segment=layout.segment,
        sinks=layout.sinks,
        cells=layout.cells,
        columns=most.shape[1],
        dim=dim,
        value_dim=value_dim,
        **strides(key=keys, value=values),
        cell_entry=cell_of.stride(0),
        CAUSAL=layout.causal,
        CHUNK=CHUNK,
        TILE=COLUMNS,
        BF=256,
        BM=blocks.rows,
        BC=blocks.keys,
        BD=padded(dim),
        BV=block,
        DT=dot_type(keys.dtype),
        IP=precision(keys.dtype),
        num_warps=fitting_warps(blocks.warps, dim, value_dim),
        num_stages=blocks.stages,
    )
    # What a row sees is a sum of such parts. It is a difference of large sums, and has to be precise.
    if layout.causal:
        return weighted_sums(layout.part_factors(CHUNK), products), layout.pooled.expand(entries, -1), most, size
    return weighted_sums(layout.part_factors(CHUNK), products, pooled), pooled[:, None].expand(entries, 2), most, size


@Kernel
def _member_grads(
    centroid,
    value,
    starts,
    dcentroid,
    dvariance,
    dvalue,
    dcross,
    tile_span,
    tile_cell,
    cell_edges,
    constant,
    factor,
    value_constant,
    cells,
    matrices,
    splits,
    dim,
    value_dim,
    split,
    value_split,
    BC: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """What a member with key k and value v of each of a tile of cells gets is linear in both: see `MemberGrads`."""
    tile, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    span = tl.load(tile_span + tile)
    cell = tl.load(tile_cell + tile) + tl.arange(0, BC)
    real = cell < tl.load(cell_edges + span + 1)
    cell = entry * cells + cell
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    at, load = cell[:, None] * dim + column[None, :], real[:, None] & wide[None, :]
    value_at, value_load = cell[:, None] * value_dim + value_column[None, :], real[:, None] & value_wide[None, :]
    size = tl.load(starts + cell + 1, mask=real, other=1) - tl.load(starts + cell, mask=real, other=0)
    share = (1.0 / tl.maximum(size, 1).to(tl.float32))[:, None]
    mean_grad = tl.zeros([BC, BD], tl.float32)
    variance_grad = tl.zeros([BC, BD], tl.float32)
    value_grad = tl.zeros([BC, BV], tl.float32)
    for part in range(splits):
        number = tl.cast(part, tl.int64)
        mean_grad += tl.load(dcentroid + number * split + at, mask=load, other=0.0)
        variance_grad += tl.load(dvariance + number * split + at, mask=load, other=0.0)
        value_grad += tl.load(dvalue + number * value_split + value_at, mask=value_load, other=0.0)
    slope = 2.0 * variance_grad * share
    mean = tl.load(centroid + at, mask=load, other=0.0)
    key_constant = mean_grad * share - slope * mean
    value_grad = value_grad * share
    matrix = dcross + (entry * matrices + span) * value_dim * dim
    for begin in range(0, BV, BK):
        some = begin + tl.arange(0, BK)
        middle = tl.load(
            value + cell[:, None] * value_dim + some[None, :], mask=real[:, None] & (some < value_dim)[None, :], other=0.0
        )
        block = tl.load(
            matrix + some[:, None] * dim + column[None, :], mask=(some < value_dim)[:, None] & wide[None, :], other=0.0
        )
        key_constant -= tl.dot(middle, block, input_precision="tf32x3")
    for begin in range(0, BD, BK):
        some = begin + tl.arange(0, BK)
        middle = tl.load(centroid + cell[:, None] * dim + some[None, :], mask=real[:, None] & (some < dim)[None, :], other=0.0)
        block = tl.load(
            matrix + value_column[None, :] * dim + some[:, None], mask=value_wide[None, :] & (some < dim)[:, None], other=0.0
        )
        value_grad -= tl.dot(middle, block, input_precision="tf32x3")
    tl.store(constant + at, key_constant, mask=load)
    tl.store(factor + at, slope, mask=load)
    tl.store(value_constant + value_at, value_grad, mask=value_load)


@triton.jit
def precise_dot(x, matrix, acc, PAIRED: tl.constexpr):
    """acc + x @ matrix as good as float32. PAIRED: x is exact in bfloat16, so two products do."""
    if PAIRED:
        high = matrix.to(tl.bfloat16)
        acc = tl.dot(x, high, acc)
        return tl.dot(x, (matrix - high.to(tl.float32)).to(tl.bfloat16), acc)
    return tl.dot(x.to(tl.float32), matrix, acc, input_precision="tf32x3")


@Kernel
def _moments_dkv(
    keys,
    values,
    cell_of,
    constant,
    factor,
    value_constant,
    dcross,
    dk,
    dv,
    cells,
    matrices,
    spans,
    levels,
    segment,
    segments,
    length,
    dim,
    value_dim,
    key_entry,
    key_row,
    value_entry,
    value_row,
    PAIRED: tl.constexpr,
    BM: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
    BK: tl.constexpr,
):
    """dk and dv of a block of keys, through the moments of their cells."""
    block, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    position = block * BM + tl.arange(0, BM)
    there = position < length
    place = position.to(tl.int64)
    column, value_column = tl.arange(0, BD), tl.arange(0, BV)
    wide, value_wide = column < dim, value_column < value_dim
    keys += entry * key_entry
    values += entry * value_entry
    cell_of += entry * levels * length + place
    key = tl.load(keys + place[:, None] * key_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    key = key.to(tl.float32)
    dk_acc = tl.zeros([BM, BD], tl.float32)
    dv_acc = tl.zeros([BM, BV], tl.float32)
    member = position < 0
    for level in range(levels):
        cell = tl.load(cell_of + tl.cast(level, tl.int64) * length, mask=there, other=-1)
        inside = cell >= 0
        member = member | inside
        cell = entry * cells + cell
        at, load = cell[:, None] * dim + column[None, :], inside[:, None] & wide[None, :]
        slope = tl.load(factor + at, mask=load, other=0.0)
        dk_acc += tl.load(constant + at, mask=load, other=0.0) + tl.where(slope != 0.0, slope * key, 0.0)
        value_at = cell[:, None] * value_dim + value_column[None, :]
        dv_acc += tl.load(value_constant + value_at, mask=inside[:, None] & value_wide[None, :], other=0.0)
    first_segment = block * BM // segment
    last_segment = tl.minimum(block * BM + BM - 1, length - 1) // segment
    for number in range(first_segment, tl.minimum(last_segment + 1, segments)):
        inside = member & (position // segment == number)
        matrix_at = dcross + (entry * matrices + spans + number) * value_dim * dim
        for begin in range(0, BV, BK):
            some = begin + tl.arange(0, BK)
            narrow = inside[:, None] & (some < value_dim)[None, :]
            here = tl.load(values + place[:, None] * value_row + some[None, :], mask=narrow, other=0.0)
            load_some = (some < value_dim)[:, None] & wide[None, :]
            matrix = tl.load(matrix_at + some[:, None] * dim + column[None, :], mask=load_some, other=0.0)
            dk_acc = precise_dot(here, matrix, dk_acc, PAIRED)
        for begin in range(0, BD, BK):
            some = begin + tl.arange(0, BK)
            narrow = inside[:, None] & (some < dim)[None, :]
            here = tl.load(keys + place[:, None] * key_row + some[None, :], mask=narrow, other=0.0)
            matrix = tl.load(
                matrix_at + value_column[None, :] * dim + some[:, None],
                mask=value_wide[None, :] & (some < dim)[:, None],
                other=0.0,
            )
            dv_acc = precise_dot(here, matrix, dv_acc, PAIRED)
    into = entry * length + place
    tl.store(dk + into[:, None] * dim + column[None, :], dk_acc, mask=there[:, None] & wide[None, :])
    tl.store(dv + into[:, None] * value_dim + value_column[None, :], dv_acc, mask=there[:, None] & value_wide[None, :])


@dataclass(frozen=True)
class MemberGrads:
    """What members of cells get through their moments, float32.

    A mean passes 1/n of its gradient to each member, a variance 2 (k - mu)/n, a product of deviations the other deviation. So a
    key k with value v gets, from each of its cells, `constant + factor * k`, its value `value_constant`, and from the products of
    all its cells M^T v and M k, where M belongs to its segment.
    """

    constant: Tensor
    """`[entries, cells, dim]`"""
    factor: Tensor
    value_constant: Tensor
    """`[entries, cells, value_dim]`"""
    dcross: Tensor
    """`[entries, spans + segments, value_dim, dim]`: the gradients of the products of each span, then M of each segment"""

    def of(self, entries: slice) -> MemberGrads:
        return MemberGrads(*(x[entries] for x in vars(self).values()))


def member_grads(moments: Moments, layout: Layout, moment_grads: tuple[Tensor, Tensor, Tensor], dcross: Tensor) -> MemberGrads:
    """`moment_grads` `[splits, entries, cells, ...]`: gradients of centroids, variances and mean values, in parts to be added."""
    dcentroid, dvariance, dvalue = moment_grads
    splits, entries, cells, dim = dcentroid.shape
    value_dim, device = dvalue.shape[3], dcentroid.device
    constant, factor = (torch.empty(entries, cells, dim, dtype=torch.float32, device=device) for _ in range(2))
    value_constant = torch.empty(entries, cells, value_dim, dtype=torch.float32, device=device)
    tile_span, tile_cell = layout.cell_tiles(32)
    if cells:
        _member_grads[(len(tile_span), entries)](
            centroid=moments.centroid,
            value=moments.value,
            starts=moments.starts,
            dcentroid=dcentroid,
            dvariance=dvariance,
            dvalue=dvalue,
            dcross=dcross,
            tile_span=tile_span,
            tile_cell=tile_cell,
            cell_edges=layout.cell_edges,
            constant=constant,
            factor=factor,
            value_constant=value_constant,
            cells=cells,
            matrices=dcross.shape[1],
            splits=splits,
            dim=dim,
            value_dim=value_dim,
            split=dcentroid.stride(0),
            value_split=dvalue.stride(0),
            BC=32,
            BD=padded(dim),
            BV=padded(value_dim),
            BK=min(32, padded(dim), padded(value_dim)),
            num_warps=4 if max(dim, value_dim) <= 64 else 8,
        )
    return MemberGrads(constant, factor, value_constant, dcross)


def moments_dkv(
    keys: Tensor, values: Tensor, cell_of: Tensor, layout: Layout, grads: MemberGrads, dk: Tensor, dv: Tensor
) -> None:
    """Fills in `dk` and `dv` `[entries, n, ...]`, float32: what comes through the moments of cells."""
    entries, length, dim = keys.shape
    value_dim = values.shape[2]
    blocks = blocks_for("moments_dkv", max(dim, value_dim), keys.dtype, keys.device)
    _moments_dkv[(cdiv(length, blocks.rows), entries)](
        keys=keys,
        values=values,
        cell_of=cell_of,
        constant=grads.constant,
        factor=grads.factor,
        value_constant=grads.value_constant,
        dcross=grads.dcross,
        dk=dk,
        dv=dv,
        cells=layout.cells,
        matrices=grads.dcross.shape[1],
        spans=len(layout.spans.all),
        levels=cell_of.shape[1],
        segment=layout.segment,
        segments=layout.segments,
        length=length,
        dim=dim,
        value_dim=value_dim,
        **strides(key=keys, value=values),
        PAIRED=keys.dtype == torch.bfloat16,
        BM=blocks.rows,
        BD=padded(dim),
        BV=padded(value_dim),
        BK=min(64, padded(dim), padded(value_dim)),
        num_warps=fitting_warps(blocks.warps, dim, value_dim),
        num_stages=blocks.stages,
    )
