"""A few operations of torch as kernels of ours, so that all a call starts are such kernels: see `kernels.replay`."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nearfield.kernels.launch import Kernel, cdiv

NUMBERS = 4096
"""Numbers that a program fills in or copies."""


@Kernel
def _fill(x, count, value, B: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    tl.store(x + lane, tl.full([B], value, x.dtype.element_ty), mask=lane < count)


def fill_(x: Tensor, value: int) -> Tensor:
    """Every number of a contiguous tensor becomes `value`."""
    assert x.is_contiguous()
    if x.numel():
        _fill[(cdiv(x.numel(), NUMBERS),)](x=x, count=x.numel(), value=value, B=NUMBERS, num_warps=4)
    return x


def zeros(*shape: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return fill_(torch.empty(shape, dtype=dtype, device=device), 0)


@Kernel
def _cast(x, into, count, B: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    tl.store(into + lane, tl.load(x + lane, mask=lane < count).to(into.dtype.element_ty), mask=lane < count)


def cast_(into: Tensor, x: Tensor) -> None:
    """Fills in `into` with the numbers of `x`, in its own dtype; both contiguous."""
    assert into.is_contiguous()
    assert x.is_contiguous()
    if x.numel():
        _cast[(cdiv(x.numel(), NUMBERS),)](x=x, into=into, count=x.numel(), B=NUMBERS, num_warps=4)


@Kernel
def _weighted_sums(
    factors,
    parts,
    divisor,
    sums,
    rows,
    count,
    width,
    DIVIDED: tl.constexpr,
    BR: tl.constexpr,
    BP: tl.constexpr,
    BW: tl.constexpr,
):
    entry = tl.program_id(2).to(tl.int64)
    column = tl.program_id(0) * BW + tl.arange(0, BW)
    row = tl.program_id(1) * BR + tl.arange(0, BR)
    wide = column < width
    acc = tl.zeros([BR, BW], tl.float32)
    parts += entry * count * width
    for start in range(0, count, BP):
        part = start + tl.arange(0, BP)
        there = part < count
        factor = tl.load(factors + row[:, None] * count + part[None, :], mask=(row < rows)[:, None] & there[None, :], other=0.0)
        at = parts + part.to(tl.int64)[:, None] * width + column[None, :]
        some = tl.load(at, mask=there[:, None] & wide[None, :], other=0.0)
        acc = tl.dot(factor, some, acc, input_precision="tf32x3")
    if DIVIDED:
        acc = acc / tl.load(divisor + entry)
    into = sums + (entry * rows + row.to(tl.int64)[:, None]) * width + column[None, :]
    tl.store(into, acc, mask=(row < rows)[:, None] & wide[None, :])


def weighted_sums(factors: Tensor, parts: Tensor, divisor: Tensor | None = None) -> Tensor:
    """`[entries, rows, ...]`: sums of `parts` `[entries, count, ...]` with `factors` `[rows, count]`, all float32 and contiguous.

    They are as good as float32 products, whatever the caller allows torch. `divisor` `[entries]`: what they are divided by.
    """
    entries, count, *shape = parts.shape
    rows, width = len(factors), parts[0, 0].numel() if count else 0
    sums = torch.empty(entries, rows, *shape, dtype=torch.float32, device=parts.device)
    assert factors.is_contiguous()
    assert parts.is_contiguous()
    if sums.numel():
        _weighted_sums[(cdiv(width, 128), cdiv(rows, 32), entries)](
            factors=factors,
            parts=parts,
            divisor=factors if divisor is None else divisor,
            sums=sums,
            rows=rows,
            count=count,
            width=width,
            DIVIDED=divisor is not None,
            BR=32,
            BP=32,
            BW=128,
            num_warps=4,
        )
    return sums
