"""K-means on a GPU: two kernels per iteration, no table of scores in memory, and sums in a fixed order."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels.triton.common import dot_dtype, dot_type, padded, precision

POINTS = 128
CELLS = 64
SAMPLE = 16
"""Keys per cell that iterations look at."""


@triton.jit
def _nearest(
    points,
    offset,
    weight,
    centroids,
    half,
    found,
    count,
    cells,
    dim,
    sets,
    point_entry,
    point_set,
    point_row,
    found_entry,
    found_set,
    first,
    step,
    PREPARED: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """found = first + step * set + argmax_c (x.c - |c|^2 / 2), x = (point - offset) * weight, for a block of one set."""
    which = tl.program_id(1).to(tl.int64)
    entry, number = which // sets, which % sets
    point = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    column = tl.arange(0, BD)
    wide = column < dim
    there = point < count
    base = points + entry * point_entry + number * point_set
    x = tl.load(base + point[:, None] * point_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    if not PREPARED:
        shift = tl.load(offset + which * dim + column, mask=wide, other=0.0)
        stretch = tl.load(weight + which * dim + column, mask=wide, other=0.0)
        x = ((x.to(tl.float32) - shift[None, :]) * stretch[None, :]).to(DT)
    best = tl.full([BP], -float("inf"), tl.float32)
    chosen = tl.zeros([BP], tl.int32)
    for start in range(0, cells, BC):
        cell = start + tl.arange(0, BC)
        real = cell < cells
        c = tl.load(
            centroids + (which * cells + cell[None, :]) * dim + column[:, None], mask=real[None, :] & wide[:, None], other=0.0
        )
        score = tl.dot(x, c, input_precision=IP) - tl.load(half + which * cells + cell, mask=real, other=float("inf"))[None, :]
        top = tl.max(score, 1)
        place = tl.argmax(score, 1).to(tl.int32) + start
        chosen = tl.where(top > best, place, chosen)
        best = tl.maximum(top, best)
    tl.store(found + entry * found_entry + number * found_set + point, chosen + first + step * number.to(tl.int32), mask=there)


@triton.jit
def _means(
    points,
    assigned,
    centroids,
    half,
    count,
    cells,
    dim,
    again,
    BP: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    IP: tl.constexpr,
):
    """The mean of the points `[count, dim]` of each of a block of cells; where there is none, the point number `again` + cell."""
    which = tl.program_id(1).to(tl.int64)
    cell = tl.program_id(0) * BC + tl.arange(0, BC)
    column = tl.arange(0, BD)
    wide = column < dim
    points += which * count * dim
    total = tl.zeros([BC, BD], tl.float32)
    size = tl.zeros([BC], tl.float32)
    for start in range(0, count, BP):
        point = start + tl.arange(0, BP)
        there = point < count
        x = tl.load(points + point[:, None] * dim + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
        own = tl.load(assigned + which * count + point, mask=there, other=-1)
        member = (own[None, :] == cell[:, None]).to(x.dtype)
        total += tl.dot(member, x, input_precision=IP)
        size += tl.sum(member.to(tl.float32), 1)
    other = tl.load(points + ((again + cell) % count)[:, None] * dim + column[None, :], mask=wide[None, :], other=0.0)
    mean = tl.where((size > 0)[:, None], total / tl.maximum(size, 1.0)[:, None], other.to(tl.float32))
    mean = mean.to(centroids.dtype.element_ty)
    real = cell < cells
    tl.store(centroids + (which * cells + cell)[:, None] * dim + column[None, :], mean, mask=real[:, None] & wide[None, :])
    rounded = tl.where(wide[None, :], mean.to(tl.float32), 0.0)
    tl.store(half + which * cells + cell, tl.sum(rounded * rounded, 1) / 2, mask=real)


def kmeans(
    keys: Tensor,
    sets: int,
    count: int,
    stride: int,
    cells: int,
    iterations: int,
    seed: int,
    found: Tensor,
    first: int,
    step: int,
) -> None:
    """Cells of the keys `[entries, n, dim]`: of each of `sets` runs of `count` keys, `stride` apart, by itself.

    Coordinates are weighted by their root mean square. Fills in `found` `[entries, n]`: cells are counted from `first` on, and
    those of the next run `step` further. As `partition.kmeans` does it, except that an empty cell starts again at some key of
    the sample.
    """
    entries, _, dim = keys.shape
    batch = entries * sets
    inside = keys[:, : (sets - 1) * stride + count]
    by_set = inside.unfold(1, count, stride) if sets > 1 else inside[:, None].transpose(2, 3)  # [entries, sets, dim, count]
    size = min(count, SAMPLE * cells)
    picked = _some_of(count, size, seed, keys.device)
    seen = by_set.index_select(3, picked).flatten(0, 1).transpose(1, 2).float()
    offset = seen.mean(1)
    weight = seen.square().mean(1).sqrt()
    low = ((seen - offset[:, None]) * weight[:, None]).to(dot_dtype(keys.dtype)).contiguous()
    centroids = low[:, :cells].contiguous()
    half = centroids.float().square().sum(-1) / 2
    assigned = torch.empty(batch, size, dtype=torch.int32, device=keys.device)
    common = {"BD": padded(dim), "IP": precision(keys.dtype), "num_warps": 4 if dim <= 128 else 8}

    def nearest(points: Tensor, strides: tuple[int, int, int], into: Tensor, total: int, runs: int, prepared: bool) -> None:
        _nearest[(triton.cdiv(total, POINTS), batch)](
            points,
            offset,
            weight,
            centroids,
            half,
            into,
            total,
            cells,
            dim,
            runs,
            *strides,
            into.stride(0),
            0 if prepared else stride,
            0 if prepared else first,
            0 if prepared else step,
            PREPARED=prepared,
            BP=POINTS,
            BC=CELLS,
            DT=dot_type(keys.dtype),
            num_stages=2 if dim <= 128 else 1,
            **common,
        )

    for number in range(iterations):
        nearest(low, (size * dim, 0, dim), assigned, size, 1, True)
        _means[(triton.cdiv(cells, CELLS), batch)](
            low, assigned, centroids, half, size, cells, dim, (number + 1) * cells, BP=64, BC=CELLS, num_stages=2, **common
        )
    nearest(keys, (keys.stride(0), stride * keys.stride(1), keys.stride(1)), found, count, sets, False)


_PICKED: dict[tuple[int, int, int, torch.device], Tensor] = {}


def _some_of(count: int, size: int, seed: int, device: torch.device) -> Tensor:
    """`size` of `count` numbers at random, the same ones whenever asked for. Kept: a captured graph cannot copy from the host."""
    key = (count, size, seed, device)
    if key not in _PICKED:
        generator = torch.Generator("cpu").manual_seed(seed)
        _PICKED[key] = torch.randperm(count, generator=generator)[:size].to(device)
    return _PICKED[key]
