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
from torch import Tensor
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
