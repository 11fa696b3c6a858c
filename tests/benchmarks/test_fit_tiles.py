"""How block sizes are made smaller until they fit. Nothing is compiled: a formula says what a block takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("triton")

from nearfield.cells.triton.tuning import TileSizes
from nearfield.kernels import cards


def settled(fit: Any, start: TileSizes, shared: Callable[[TileSizes], int], stack: Callable[[TileSizes], int]) -> tuple[Any, Any]:
    """Where the search ends, and what it has tried on the way."""
    search = fit.Search("near_fwd", "8.6", start)
    while search.settled is None:
        now = search.now
        # Two versions of a kernel: the worse one counts.
        search.take(
            [fit.Compiled("_near_fwd", size, 99, spilled, 0, False) for size, spilled in ((0, 0), (shared(now), stack(now)))]
        )
    return search.settled, [blocks for blocks, _ in search.tried]


def test_blocks_shrink_only_where_they_must(load: Callable[[str], Any]) -> None:
    fit = load("fit_tiles")
    start = TileSizes(128, 4, 3, 128)
    assert settled(fit, start, lambda _: cards.SHARED["8.6"], lambda _: fit.SPILLED) == (start, [start])
    limit = cards.SHARED["8.6"]
    found, tried = settled(fit, start, lambda b: limit if b.stages == 1 else limit + 1, lambda _: 0)
    assert found == start._replace(stages=1)
    assert tried == [start._replace(stages=stages) for stages in (3, 2, 1)]
    found, tried = settled(fit, start, lambda _: 0, lambda b: 0 if b.warps == 8 else 100)
    assert found == start._replace(warps=8)
    assert tried == [start, found]  # fewer stages would not keep registers from spilling
    found, _ = settled(fit, start, lambda b: 2 * b.rows * b.keys * b.stages, lambda b: max(0, b.rows * b.keys // b.warps - 512))
    assert found.rows * found.keys // found.warps - 512 <= fit.SPILLED
    assert 2 * found.rows * found.keys * found.stages <= limit


def test_where_everything_spills_the_least_is_kept(load: Callable[[str], Any]) -> None:
    fit = load("fit_tiles")
    found, tried = settled(fit, TileSizes(64, 4, 1, 64), lambda _: 0, lambda b: b.rows * b.keys)
    assert len(tried) > 2
    assert found.rows * found.keys == min(b.rows * b.keys for b in tried) < 64 * 64
    with pytest.raises(RuntimeError, match=r"near_fwd does not fit on a card of class 8.6"):
        settled(fit, TileSizes(64, 4, 1, 64), lambda _: 1 << 20, lambda _: 0)


@pytest.mark.parametrize("kernel", ["near_fwd", "route", "vote", "attend", "products", "moments_dkv"])
def test_what_blocks_may_become(kernel: str, load: Callable[[str], Any]) -> None:
    """Powers of two, none of them less than a kernel can do with, and only sizes that it reads."""
    fit = load("fit_tiles")
    start = TileSizes(128, 4, 3, 64)
    choices = fit.smaller(kernel, start)
    assert choices[0] == start
    assert len(choices) == len(set(choices))
    varied = fit.VARIED.get(kernel, ("rows", "keys"))
    for field in ("rows", "keys", "cells", "columns"):
        least = {"rows": 16, "keys": fit.LEAST.get(kernel, 16), "cells": 16, "columns": 16}[field]
        expected = {size for size in (128, 64, 32, 16) if least <= size <= getattr(start, field)}
        assert {getattr(one, field) for one in choices} == (expected if field in varied else {getattr(start, field)})
    assert {one.stages for one in choices} == {1, 2, 3}
    assert {one.warps for one in choices} == {4, 8}


def test_what_was_compiled_fits(load: Callable[[str], Any]) -> None:
    """By the committed results: all classes, with two versions of Triton, and no kernel beyond the limit."""
    found = json.loads((load("record").RESULTS / "compiled.json").read_text())
    columns = load("compile_kernels").TENSOR_COLUMNS
    assert len(found) >= 2
    for saved in found.values():
        results = saved["results"]
        assert results["limits"] == cards.SHARED
        assert set(results["classes"]) == set(cards.SHARED)
        for name, cases in results["classes"].items():
            assert set(cases) >= {"bfloat16, 64", "bfloat16, 128", "float32, 64"}
            for kernels in cases.values():
                assert len(kernels) > 35
                assert {kernel: most[0] for kernel, most in kernels.items() if most[0] > cards.SHARED[name]} == {}
                assert {kernel: most[3] for kernel, most in kernels.items() if most[3] > columns} == {}
