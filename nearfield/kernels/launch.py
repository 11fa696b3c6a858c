"""How kernels are launched, and what all of them share.

Triton binds and describes every argument anew at each launch, which takes longer than many of our kernels do. The engine
launches dozens of them, so that at moderate lengths the card would wait for Python. A `Kernel` looks up what was compiled for
a call by the call's values, and launches that directly.
"""

from __future__ import annotations

import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import zip_longest
from operator import attrgetter, or_
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import cuda

from nearfield import _compat
from nearfield.kernels import cards

LOG2E, LN2 = tl.constexpr(math.log2(math.e)), tl.constexpr(math.log(2))
"""Kernels take powers and logarithms to base 2. On the host: `LOG2E.value`."""

MOST_REMEMBERED = 4096
"""Calls remembered per kernel."""

OPTIONS = ("num_warps", "num_stages", "launch_pdl")
"""The options of a launch that are for Triton itself."""

Grid = tuple[int, ...]
_dtype_of = attrgetter("dtype")


class Kernel:
    """A function in Triton's language, launched by keyword: `kernel[grid](queries=queries, ..., BM=64, num_warps=4)`.

    Keywords come in the order of the signature, tensors first; then `OPTIONS`, in their order, starting with `num_warps`. This is
    checked when a call is seen for the first time. Two calls are the same if they have the same numbers and options, and tensors
    of the same dtypes that are equally aligned: all that Triton looks at, and more. Numbers that differ from launch to launch are
    named in `do_not_specialize`, or Triton would compile a separate version for some of their values.
    """

    def __init__(self, function: Callable[..., Any], do_not_specialize: tuple[str, ...] = ()) -> None:
        self.__name__ = function.__name__
        self.jitted = triton.jit(function, do_not_specialize=do_not_specialize)
        self.parameters = tuple(inspect.signature(function).parameters)
        self.tensors = 0
        """how many of these are tensors; known from the first call on"""
        self.remembered: dict[Any, Callable[..., None]] = {}

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return functools.partial(self.launch, grid)

    def launch(self, grid: Grid, /, **arguments: Any) -> None:
        if _NOW.recorder is None:
            self.start(grid, arguments)
        else:
            _NOW.recorder.start(self, grid, arguments)

    def start(self, grid: Grid, arguments: dict[str, Any]) -> Callable[..., None] | None:
        """Launches it. Returns what launches it again, see `_compat.launcher`."""
        if not self.tensors:
            self.tensors = self.check(arguments)
        values = tuple(arguments.values())
        tensors = values[: self.tensors]
        device = tensors[0].get_device()
        addresses = [x.data_ptr() for x in tensors]
        alignments = 0 if not functools.reduce(or_, addresses) & 15 else tuple(address & 15 for address in addresses)
        # Of the options, only the last name: with their number and order it determines the others.
        key = (device, grid, next(reversed(arguments)), alignments, *map(_dtype_of, tensors), *values[self.tensors :])
        run = self.remembered.get(key)
        if run is not None:
            run(_compat.raw_stream(device), addresses, values[self.tensors : len(self.parameters)])
        else:
            self.check(arguments)
            compiled = self.jitted[grid](**arguments)
            run = _compat.launcher(self.jitted, compiled, grid) if device >= 0 else None
            if run is not None:
                if len(self.remembered) >= MOST_REMEMBERED:
                    self.remembered.clear()
                self.remembered[key] = run
        return run

    def check(self, arguments: dict[str, Any]) -> int:
        """Raises where keywords are not in their order. Returns how many of them are tensors."""
        given, parameters = list(arguments), len(self.parameters)
        options = [name for name in OPTIONS if name in arguments]
        for name, expected in zip_longest(given, (*self.parameters, *options)):
            if name != expected:
                raise TypeError(f"{self.__name__} takes {expected!r} where it got {name!r}: keywords go in the signature's order")
        if options and options[0] != OPTIONS[0]:
            raise TypeError(f"{self.__name__} takes {OPTIONS[0]!r} where it got {given[parameters]!r}")
        is_tensor = [isinstance(x, Tensor) for x in arguments.values()]
        tensors = sum(is_tensor)
        if not tensors or not all(is_tensor[:tensors]):
            raise TypeError(f"{self.__name__} takes tensors, and takes them first")
        return tensors


class _Now(threading.local):
    recorder: Any = None


_NOW = _Now()


@contextmanager
def recording(recorder: Any) -> Iterator[None]:
    """What this thread launches goes through `recorder.start`."""
    before, _NOW.recorder = _NOW.recorder, recorder
    try:
        yield
    finally:
        _NOW.recorder = before


def strides(**tensors: Tensor) -> dict[str, int]:
    """The strides of entries and rows, as a launch names them: `strides(query=queries)` has `query_entry` and `query_row`."""
    found = {}
    for name, x in tensors.items():
        entry, row = _stride_names(name)
        found[entry], found[row] = x.stride()[:2]
    return found


@functools.cache
def _stride_names(name: str) -> tuple[str, str]:
    return f"{name}_entry", f"{name}_row"


def precision(dtype: torch.dtype) -> str:
    """How `tl.dot` multiplies: float32 inputs in three tf32 products, which is as good as float32 and much faster."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def dot_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of intermediate results that go into a matrix product: range matters more than precision."""
    return torch.float32 if dtype == torch.float32 else torch.bfloat16


def dot_type(dtype: torch.dtype) -> tl.dtype:
    """The same as a Triton dtype."""
    return tl.float32 if dtype == torch.float32 else tl.bfloat16


def dense(x: Tensor) -> Tensor:
    """`x` with contiguous columns, which is all that the kernels ask for."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def cdiv(number: int, size: int) -> int:
    """`number / size`, rounded up. Triton's own does much more than divide."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def padded(dim: int) -> int:
    """Columns of a block that holds rows of `dim` numbers."""
    return max(16, next_power_of_2(dim))


# Programmatic dependent launch (PDL): a kernel starts while the one before still runs, and waits before it reads those results.
if _compat.has_dependent_launch():

    @triton.jit
    def launch_dependents(PDL: tl.constexpr):
        """Let the next kernel start."""
        if PDL:
            cuda.gdc_launch_dependents()

    @triton.jit
    def wait_for_previous(PDL: tl.constexpr):
        """Wait until the previous kernel has ended and its results can be read."""
        if PDL:
            cuda.gdc_wait()

else:

    @triton.jit
    def launch_dependents(PDL: tl.constexpr):
        pass

    @triton.jit
    def wait_for_previous(PDL: tl.constexpr):
        pass


HAS_PDL = _compat.has_dependent_launch() and _compat.is_compiled_by_triton(wait_for_previous)
"""The interpreter has no PDL: it runs kernels one after the other."""


def dependent_launch(like: Tensor) -> bool:
    """Whether kernels on the device of `like` are launched so. Ptxas refuses the instructions for cards that lack them."""
    return HAS_PDL and like.is_cuda and cards.starts_early(like.device)
