"""What all kernels agree on."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor


def precision(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies: float32 inputs in three tf32 products, which is as good as float32 and much faster."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def dot_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of what is made from inputs and goes into a matrix product: wide range rather than many digits."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The same, as Triton calls it."""
    return tl.float32 if dtype == torch.float32 else tl.bfloat16


def dense(x: Tensor) -> Tensor:
    """With its columns side by side, which is all that the kernels ask for."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def cdiv(number: int, size: int) -> int:
    """How many of `size` it takes. Triton's own does much more than to divide."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def padded(dim: int) -> int:
    """Columns of a block that holds rows of `dim` numbers."""
    return max(16, next_power_of_2(dim))
