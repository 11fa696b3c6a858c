"""`nearfield.merge` of two outputs on a GPU, without gradients: each is read once, as it lies, and the result is written once."""

from __future__ import annotations

from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from nearfield.kernels import backends
from nearfield.kernels.launch import LOG2E, Kernel, cdiv, dense, padded

NUMBERS = 4096
"""Numbers of each output that a program holds."""


@partial(Kernel, do_not_specialize=("heads", "rows"))
def _merge_two(
    first,
    second,
    first_lse,
    second_lse,
    output,
    heads,
    rows,
    dim,
    first_batch,
    first_head,
    first_row,
    second_batch,
    second_head,
    second_row,
    first_lse_batch,
    first_lse_head,
    first_lse_row,
    second_lse_batch,
    second_lse_head,
    second_lse_row,
    output_batch,
    output_head,
    output_row,
    BM: tl.constexpr,
    BD: tl.constexpr,
):
    # All on one axis of the grid: the others take 65,535 programs at most.
    blocks = (rows + BM - 1) // BM
    entry = tl.program_id(0) // blocks
    batch, head = (entry // heads).to(tl.int64), (entry % heads).to(tl.int64)
    row = (tl.program_id(0) % blocks).to(tl.int64) * BM + tl.arange(0, BM)
    column = tl.arange(0, BD)
    there = row < rows
    real = there[:, None] & (column < dim)[None, :]
    first += batch * first_batch + head * first_head + row[:, None] * first_row + column[None, :]
    second += batch * second_batch + head * second_head + row[:, None] * second_row + column[None, :]
    output += batch * output_batch + head * output_head + row[:, None] * output_row + column[None, :]
    first_lse += batch * first_lse_batch + head * first_lse_head + row * first_lse_row
    second_lse += batch * second_lse_batch + head * second_lse_head + row * second_lse_row
    lse_1 = tl.load(first_lse, mask=there, other=-float("inf"))
    lse_2 = tl.load(second_lse, mask=there, other=-float("inf"))
    # Also where they do not count: loads that waited for the normalisers would take longer.
    acc_1 = tl.load(first, mask=real, other=0.0).to(tl.float32)
    acc_2 = tl.load(second, mask=real, other=0.0).to(tl.float32)
    unseen_1, unseen_2 = lse_1 == -float("inf"), lse_2 == -float("inf")
    blind = unseen_1 & unseen_2
    # Of infinities the difference would be NaN, as it is to be for +inf, but not for rows that see nothing.
    m = tl.where(blind, 0.0, tl.maximum(lse_1, lse_2))
    p_1, p_2 = tl.exp2((lse_1 - m) * LOG2E), tl.exp2((lse_2 - m) * LOG2E)
    share = 1.0 / tl.where(blind, 1.0, p_1 + p_2)
    # What does not count may hold anything, and zero times NaN is NaN.
    acc_1 = tl.where(unseen_1[:, None], 0.0, acc_1)
    acc_2 = tl.where(unseen_2[:, None], 0.0, acc_2)
    acc = (p_1 * share)[:, None] * acc_1 + (p_2 * share)[:, None] * acc_2
    tl.store(output, acc.to(output.dtype.element_ty), mask=real)


def merge_two(first: Tensor, second: Tensor, first_lse: Tensor, second_lse: Tensor, dtype: torch.dtype) -> Tensor:
    """The output of `merge([first, second], [first_lse, second_lse])` in `dtype`, rounded once.

    Outputs are `[batch, heads, rows, dim]` in any of `TRITON_DTYPES`, normalisers `[batch, heads, rows]` in float32. The result
    lies in memory as `first` does: where that is head by head in each row, so will a model want it.
    """
    batch, heads, rows, dim = first.shape
    first, second = dense(first), dense(second)
    output = dense(torch.empty_like(first, dtype=dtype))
    tensors = {"first": first, "second": second, "first_lse": first_lse, "second_lse": second_lse, "output": output}
    size = max(1, NUMBERS // padded(dim))
    if output.numel():
        with backends.device_guard(first.device):
            _merge_two[(batch * heads * cdiv(rows, size),)](
                **tensors,
                heads=heads,
                rows=rows,
                dim=dim,
                **_strides(**tensors),
                BM=size,
                BD=padded(dim),
                num_warps=4,
            )
    return output


def _strides(**tensors: Tensor) -> dict[str, int]:
    """The strides of batch entries, heads and rows, as the launch names them."""
    axes = ("batch", "head", "row")
    return {f"{name}_{axis}": x.stride(place) for name, x in tensors.items() for place, axis in enumerate(axes)}
