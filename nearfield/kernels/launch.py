"""Starting a kernel for less than Triton asks: what was compiled for a call is found again without asking Triton.

Triton binds and describes every argument anew at each launch, which takes longer than many of our kernels run. The engine starts
dozens of them, so that at moderate lengths the card waits for Python.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda
from triton.runtime.jit import JITFunction

VERSION = tuple(int(x) for x in triton.__version__.split(".")[:2])

KNOWN = VERSION >= (3, 4)
"""Older versions start what they compiled with other arguments."""

MOST = 4096
"""Calls that a kernel remembers."""

Grid = tuple[int, ...]


class Kernel:
    """A function in Triton's language, to be started as `kernel[grid](*arguments, **constants)`, like one of `triton.jit`.

    Two calls are the same if they have the same numbers, and tensors of the same dtypes that are equally well aligned: all that
    Triton would look at, and more. Of numbers that change from launch to launch (`varied`) no value gets a version of its own.
    """

    def __init__(self, function: Callable[..., Any], varied: tuple[str, ...] = ()) -> None:
        self.__name__ = function.__name__
        self.jitted = triton.jit(function, do_not_specialize=varied)
        self.remembered: dict[Any, tuple[Callable[..., None], tuple[Any, ...]]] = {}

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return functools.partial(self.start, grid)

    def start(self, grid: Grid, *arguments: Any, **constants: Any) -> None:
        device = arguments[0].get_device()
        same = [(x.dtype, x.data_ptr() & 15) if type(x) is Tensor else x for x in arguments]
        key = (device, grid, *constants.items(), *same)
        found = self.remembered.get(key) if device >= 0 else None
        if found is not None:
            run, tail = found
            run(*arguments, *tail, stream=torch._C._cuda_getCurrentRawStream(device))
            return
        made = self.jitted[grid](*arguments, **constants)
        if device < 0 or made is None or not KNOWN or not isinstance(self.jitted, JITFunction):
            return
        if any(isinstance(x, Tensor) for x in same):  # of a class of its own, which may be anything
            return
        if len(self.remembered) >= MOST:
            self.remembered.clear()
        names = self.jitted.arg_names[len(arguments) :]
        self.remembered[key] = made[(*grid, 1, 1)[:3]], tuple(constants[name] for name in names)


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


IS_NEW = VERSION >= (3, 6) and hasattr(cuda, "gdc_wait")
"""Older versions look up every name in a kernel, also in a branch that is not compiled: there must be none."""


if IS_NEW:

    @triton.jit
    def let_next_start(EARLY: tl.constexpr):
        if EARLY:
            cuda.gdc_launch_dependents()

    @triton.jit
    def wait_for_last(EARLY: tl.constexpr):
        """Until the kernel before has ended, and what it wrote is there."""
        if EARLY:
            cuda.gdc_wait()

else:

    @triton.jit
    def let_next_start(EARLY: tl.constexpr):
        pass

    @triton.jit
    def wait_for_last(EARLY: tl.constexpr):
        pass


HAS_EARLY = IS_NEW and isinstance(wait_for_last, JITFunction)
"""Not in the interpreter, which runs kernels one after the other."""
