"""Block sizes for classes of cards that nobody has measured: the largest that compile within what such a card has.

python benchmarks/fit_tiles.py 8.6                    # derive the table of a class: cells/triton/derived.json
python benchmarks/fit_tiles.py --record               # compile every kernel for every class: results/compiled.json
python benchmarks/fit_tiles.py --record 8.6 --dims 64 --dtypes bfloat16

No card is needed. A table starts from what the class has already, or else from what was measured on an H200, and shrinks only
where a kernel takes more shared memory than there is, or spills registers. So it can be run with several versions of Triton in
turn, and the table serves all of them; `--anew` starts from the beginning.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from compile_kernels import VERSIONS, Compiled, Compiler, compile_all, passes
from record import compact, environment, merge

from nearfield.cells.triton import tuning as triton_tuning
from nearfield.cells.triton.limits import MOST_WIDE_FLOAT32, WIDE_FLOAT32_BYTES
from nearfield.cells.triton.tuning import MEASURED_CLASSES, TileSizes, trying
from nearfield.kernels import cards

DERIVED = Path(triton_tuning.__file__).with_name("derived.json")
MEASURED = DERIVED.with_name("tuning.json")
START = {"12.0": "8.6"}
"""Classes whose table starts from that of another one with the same shared memory. The others start from the H200's."""
DTYPES = {"half": ("bfloat16", "float16"), "float32": ("float32",)}
DIMS = (64, 128, 256)
SPILLED = 64
"""Bytes per thread that may be spilled: a few numbers that wait outside of the loops."""
MOST_TRIED = 12
NARROW = ("attend_rows", "attend")
"""Kernels that compute with float16 otherwise than with bfloat16."""
WITHOUT_MASK = ("route", "products")
"""Kernels that take most where there is no mask and many probes; the others with a causal mask."""
VARIED = {
    "route": ("rows",),
    "moments_dkv": ("rows",),
    "products": ("rows", "keys", "columns"),
    "far_dcross": ("rows", "columns"),
    "vote": ("keys",),
    "attend": ("rows", "keys", "cells"),
    "attend_rows": ("rows", "keys"),
}
"""What a kernel reads of its block sizes, other than warps and stages; other kernels read rows and keys."""
LEAST = {"far_dq": 32, "vote": 32}
"""keys of a block, where marks are read, which come 32 in a word; others can do with 16"""
LOST = {"rows": 3.0, "keys": 2.5, "cells": 1.0, "columns": 3.0}
"""What it costs to halve a size, next to one stage less. A guess: small blocks read more of everything."""


class Job(NamedTuple):
    name: str
    """of the class"""
    kind: str
    dim: int
    start: dict[str, dict[str, list[int]]]
    """block sizes by kernel and cell size"""


def smaller(kernel: str, start: TileSizes) -> list[TileSizes]:
    """`start`, then what it can be replaced with, from what loses least to what loses most."""
    choices: dict[str, list[tuple[float, int]]] = {
        "stages": [(float(start.stages - stages), stages) for stages in range(start.stages, 0, -1)],
        "warps": [(0.0, start.warps)] + ([(1.5, 8)] if start.warps < 8 else []),
    }
    for field in VARIED.get(kernel, ("rows", "keys")):
        least = LEAST.get(kernel, 16) if field == "keys" else 16
        size = getattr(start, field)
        halves = [size >> times for times in range(size.bit_length()) if size >> times >= least]
        choices[field] = [(times * LOST[field], half) for times, half in enumerate(halves)]
    found = []
    for picked in product(*choices.values()):
        loss = sum(cost for cost, _ in picked)
        found.append((loss, start._replace(**{field: size for field, (_, size) in zip(choices, picked, strict=True)})))
    return [blocks for _, blocks in sorted(found, key=lambda one: one[0])]


class Search:
    """The block sizes of one kernel: tries them in turn, and leaves out what cannot be better than what was tried."""

    def __init__(self, kernel: str, name: str, start: TileSizes) -> None:
        self.kernel, self.name = kernel, name
        self.left = smaller(kernel, start)
        self.tried: list[tuple[TileSizes, Compiled]] = []
        self.settled: TileSizes | None = None

    @property
    def now(self) -> TileSizes:
        return self.settled or self.left[0]

    def restart(self) -> None:
        """Go on from where it has settled, for another dtype."""
        self.left, self.tried, self.settled = smaller(self.kernel, self.now), [], None

    def take(self, found: list[Compiled]) -> None:
        """What became of the current sizes, in all versions of the kernel."""
        blocks = self.left.pop(0)
        worst = Compiled(self.kernel, *(max(values) for values in list(zip(*found, strict=True))[1:]))
        fits = worst.fits(self.name)
        self.tried.append((blocks, worst))
        if fits and worst.stack <= SPILLED:
            self.settled = blocks
            return
        too_big = self._takes_as_much_memory if not fits else self._spills_as_much
        self.left = [one for one in self.left if not too_big(one, blocks)]
        if not self.left or (len(self.tried) >= MOST_TRIED and any(least.fits(self.name) for _, least in self.tried)):
            fitting = [(least.stack, place) for place, (_, least) in enumerate(self.tried) if least.fits(self.name)]
            if not fitting:
                raise RuntimeError(f"{self.kernel} does not fit on a card of class {self.name}: {self.tried}")
            self.settled = self.tried[min(fitting)[1]][0]

    @staticmethod
    def _takes_as_much_memory(one: TileSizes, than: TileSizes) -> bool:
        return all(getattr(one, field) >= getattr(than, field) for field in ("rows", "keys", "cells", "columns", "stages"))

    @staticmethod
    def _spills_as_much(one: TileSizes, than: TileSizes) -> bool:
        if one.rows / one.warps < than.rows / than.warps or one.warps > than.warps:
            return False
        return all(getattr(one, field) >= getattr(than, field) for field in ("keys", "cells", "columns"))


def fit(job: Job) -> tuple[Job, dict[str, dict[str, list[int]]], list[str]]:
    """The block sizes of all kernels for one kind of dtype and one dimension, and what was given up for them."""
    starts = {(kernel, tuple(blocks)) for kernel, sizes in job.start.items() for blocks in sizes.values()}
    found: dict[tuple[str, tuple[int, ...]], TileSizes] = {}
    said = []
    while starts:
        # One search per kernel at a time: cells of another size may start from other blocks.
        some = dict(sorted(starts, reverse=True))
        starts -= set(some.items())
        searches = [Search(kernel, job.name, TileSizes(*start)) for kernel, start in some.items()]
        settle(job, searches, getattr(torch, DTYPES[job.kind][0]))
        for dtype in DTYPES[job.kind][1:]:
            again = [search for search in searches if search.kernel in NARROW]
            for search in again:
                search.restart()
            settle(job, again, getattr(torch, dtype))
        for search, start in zip(searches, some.values(), strict=True):
            found[search.kernel, start] = search.now
            stack = next(worst.stack for blocks, worst in reversed(search.tried) if blocks == search.now)
            if search.now != TileSizes(*start) or stack > SPILLED:
                said.append(f"{search.kernel}: {tuple(start)} -> {tuple(search.now)}, stack {stack}")
    sizes = {
        kernel: {of: trimmed(found[kernel, tuple(blocks)]) for of, blocks in sizes.items()} for kernel, sizes in job.start.items()
    }
    return job, sizes, said


def trimmed(blocks: TileSizes) -> list[int]:
    """Without the sizes at the end that have their defaults."""
    sizes = list(blocks)
    while len(sizes) > 4 and sizes[-1] == TileSizes._field_defaults[TileSizes._fields[len(sizes) - 1]]:
        sizes.pop()
    return sizes


def settle(job: Job, searches: list[Search], dtype: torch.dtype) -> None:
    """Compile the kernels again and again, with smaller and smaller blocks, until all of them fit."""
    compiler = Compiler(job.name, forgiving=True)
    while tried := [search for search in searches if search.settled is None]:
        compiler.latest = []
        with ExitStack() as stack:
            stack.enter_context(compiler.in_place_of_launches(job.name))
            # The others are not compiled, but launched.
            for kernel, sizes in job.start.items():
                stack.enter_context(trying(kernel, TileSizes(*next(iter(sizes.values())))))
            for search in tried:
                stack.enter_context(trying(search.kernel, search.now))
            for version in VERSIONS:
                compiler.only = frozenset(f"_{one.kernel}" for one in tried if (one.kernel in WITHOUT_MASK) != version["causal"])
                passes(job.dim, dtype, **version)
        for search in tried:
            search.take([one for one in compiler.latest if one.kernel == f"_{search.kernel}"])


def is_served(name: str, dtype: str, dim: int) -> bool:
    """Whether the kernels of whole sequences serve it on cards of a class."""
    return dtype != "float32" or dim <= MOST_WIDE_FLOAT32 or cards.SHARED[name] >= WIDE_FLOAT32_BYTES


def jobs(name: str, anew: bool) -> Iterator[Job]:
    derived = json.loads(DERIVED.read_text())["classes"] if DERIVED.exists() else {}
    of = name if name in derived and not anew else START.get(name, "")
    table = derived.get(of) or json.loads(MEASURED.read_text())["cards"]["NVIDIA H200"]
    for kind, dim in product(DTYPES, DIMS):
        if not is_served(name, kind, dim):
            continue
        yield Job(name, kind, dim, {kernel: sizes[f"{kind}, {dim}"] for kernel, sizes in table["blocks"].items()})


def derive(name: str, anew: bool, workers: int) -> None:
    blocks: dict[str, dict[str, Any]] = {}
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for job, found, said in pool.imap(fit, list(jobs(name, anew))):
            for kernel, sizes in found.items():
                blocks.setdefault(kernel, {})[f"{job.kind}, {job.dim}"] = sizes
            print(f"{name}, {job.kind}, {job.dim}", *said, sep="\n  ", flush=True)
    tables = json.loads(DERIVED.read_text()) if DERIVED.exists() else {"classes": {}}
    before = tables["classes"].get(name, {})
    seen = {} if anew else before.get("compiled with", {})
    decode = json.loads(MEASURED.read_text())["cards"]["NVIDIA H200"]["decode"]
    tables["classes"][name] = {
        "compiled with": {**seen, f"Triton {triton.__version__}": environment()},
        "fields": list(TileSizes._fields),
        "blocks": blocks,
        "decode": before.get("decode", decode),
    }
    tables["classes"] = dict(sorted(tables["classes"].items(), key=lambda one: cards.capability_of(one[0])))
    DERIVED.write_text(compact(tables))
    triton_tuning._tables.cache_clear()


def compiled(case: tuple[str, str, int]) -> tuple[tuple[str, str, int], dict[str, list[int]]]:
    """The most that any version of each kernel takes: bytes of shared memory, registers, bytes of stack, columns."""
    name, dtype, dim = case
    most: dict[str, list[int]] = {}
    for one in compile_all(name, dim, getattr(torch, dtype)):
        before = most.get(one.kernel, [0, 0, 0, 0])
        most[one.kernel] = [max(pair) for pair in zip(before, one[1:5], strict=True)]
    return case, most


def record(names: list[str], dtypes: list[str], dims: list[int], workers: int) -> None:
    kernels: dict[str, dict[str, dict[str, list[int]]]] = {}
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        for (name, dtype, dim), found in pool.imap(compiled, [case for case in product(names, dtypes, dims) if is_served(*case)]):
            kernels.setdefault(name, {})[f"{dtype}, {dim}"] = found
            over = {kernel: most for kernel, most in found.items() if most[0] > cards.SHARED[name]}
            spilled = {kernel: most[2] for kernel, most in found.items() if most[2] > SPILLED}
            print(f"{name}, {dtype}, {dim}: {len(found)} kernels; do not fit: {over}; spill: {spilled}", flush=True)
    results = {"fields": ["shared", "registers", "stack", "columns of tensor memory"], "limits": cards.SHARED, "classes": kernels}
    print("written:", merge("compiled", f"Triton {triton.__version__}", results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "classes", nargs="*", choices=[*cards.SHARED, []], metavar="CLASS", help="of cards, by compute capability; without: all"
    )
    parser.add_argument("--record", action="store_true", help="compile every kernel with the tables as they are")
    parser.add_argument("--anew", action="store_true", help="derive without looking at what the class has")
    parser.add_argument("--dims", nargs="+", type=int, default=list(DIMS), help="for --record")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], help="for --record")
    parser.add_argument("--workers", type=int, default=2)
    arguments = parser.parse_args()
    names = arguments.classes or list(cards.SHARED)
    if arguments.record:
        record(names, arguments.dtypes, arguments.dims, arguments.workers)
        return
    for name in names:
        if name not in MEASURED_CLASSES:
            derive(name, arguments.anew, arguments.workers)


if __name__ == "__main__":
    main()
