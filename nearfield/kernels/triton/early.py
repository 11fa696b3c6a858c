"""Starting a kernel while the one before still runs (programmatic dependent launch), on cards and versions that know how.

A kernel that is launched so (`launch_pdl=True`) loads what the one before does not write, and waits for it to end.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda
from triton.runtime.jit import JITFunction

from nearfield.kernels.triton.launch import VERSION

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
