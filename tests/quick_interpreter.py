"""Triton's interpreter, without what it does over and over again. Most of the tests' time is spent in it.

For every call of a helper inside a kernel it looks through all names of `triton.language` and puts its own functions in place of
those that are there already; for every operation it makes a table of dtypes; and it computes sums of integers a second time, to
see whether 32 bits hold them, and does nothing with the answer. Seen in Triton 3.9; where these functions have other
names, it stays as it is.
"""

from __future__ import annotations

import functools
import inspect
from dataclasses import replace
from typing import Any


def make_quick() -> None:
    """Changes the interpreter in place. Kernels compute what they computed before."""
    from triton.runtime import interpreter

    if not all(hasattr(interpreter, name) for name in ("_patch_lang", "_get_np_dtype", "_LangPatchScope", "GridExecutor")):
        return
    builder = getattr(interpreter, "interpreter_builder", None)
    if hasattr(getattr(builder, "options", None), "sanitize_overflow"):
        builder.options = replace(builder.options, sanitize_overflow=False)
    known: dict[str, Any] = {}
    find = interpreter._get_np_dtype

    def np_dtype(dtype: Any) -> Any:
        # By name: blocks and pointers have no hash. All pointers are alike.
        scalar = dtype.element_ty if isinstance(dtype, interpreter.tl.block_type) else dtype
        name = "pointer" if isinstance(scalar, interpreter.tl.pointer_type) else scalar.name
        if name not in known:
            known[name] = find(dtype)
        return known[name]

    interpreter._get_np_dtype = np_dtype
    language = (interpreter.tl, interpreter.tl.core)
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    done: set[int] = set()
    """which of the two are in place, in the launch that is under way"""

    @functools.cache
    def seen_by(fn: Any) -> frozenset[int]:
        return frozenset(id(x) for x in fn.__globals__.values() if inspect.ismodule(x) and x in language)

    def patch_once(fn: Any) -> Any:
        seen = seen_by(fn)
        if seen and seen <= done:
            return interpreter._LangPatchScope()
        done.update(seen)
        return patch(fn)

    @functools.wraps(launch)
    def launch_anew(self: Any, *arguments: Any, **options: Any) -> Any:
        done.clear()
        try:
            return launch(self, *arguments, **options)
        finally:
            done.clear()

    interpreter._patch_lang = patch_once
    interpreter.GridExecutor.__call__ = launch_anew
