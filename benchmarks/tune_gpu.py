"""Block sizes of the Triton kernels: tries them all on this card and writes the fastest to cells/triton/tuning.json.

python benchmarks/tune_gpu.py                                           # everything, about ten minutes
python benchmarks/tune_gpu.py --kernels near_fwd attend --dims 64       # these only; the others stay in the file as they are
python benchmarks/tune_gpu.py --out FILE                                # write another file

Kernels are compiled by several processes at a time; only then are they timed, one after the other, inside whole forward and
backward passes (device time by the profiler), with and without a causal mask. The file has an entry for each card; those of other
cards stay as they are. A card that is not in it yet starts with the sizes of its class (fit_tiles.py), also for the steps of a
cache ("decode"), which this script does not measure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from record import environment
from rich.progress import track
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import nearfield as nf
from nearfield.cells.triton import tuning as triton_tuning
from nearfield.cells.triton.tuning import TileSizes, table_for, trying

TABLE = Path(triton_tuning.__file__).with_name("tuning.json")
LENGTH, HEADS, SEGMENT = 65536, 8, 2048
PROBES = 8
WORKERS = 14
FORWARD = ("route", "near_fwd", "attend_rows", "nearest", "means")
TOGETHER = ("vote", "attend")
"""Kernels of rows that open cells together."""
BACKWARD = ("near_dkv", "near_dq", "far_dq", "far_dmoments", "local_dkv", "local_dq", "moments_dkv")
SYMBOL = {name: f"_{name}" for name in (*FORWARD, *TOGETHER, *BACKWARD)}
BY_CELL_SIZE = ("near_fwd", "near_dkv", "near_dq")
"""Kernels to which the size of cells matters; the others are measured with cells of 128."""


class Case(NamedTuple):
    kernel: str
    dtype: str
    dim: int
    cell_size: int
    blocks: TileSizes

    @property
    def place(self) -> tuple[str, str, str]:
        return self.kernel, f"{'float32' if self.dtype == 'float32' else 'half'}, {self.dim}", str(self.cell_size)


# Rows, warps, stages, keys (and cells) of a block. What does not fit into shared memory is left out when it is tried.
CANDIDATES: dict[str, tuple[tuple[int, ...], ...]] = {
    "route": (
        (32, 4, 3, 64),
        (64, 4, 1, 64),
        (64, 4, 2, 64),
        (64, 4, 3, 64),
        (64, 8, 2, 64),
        (64, 8, 3, 64),
        (128, 8, 2, 64),
        (128, 8, 3, 64),
    ),
    "near_fwd": (
        *((64, 4, stages, keys) for stages in (1, 2) for keys in (64, 128)),
        *((128, 8, stages, keys) for stages in (1, 2) for keys in (64, 128)),
        *((128, 4, stages, keys) for stages in (1, 2) for keys in (64, 128)),
        (64, 8, 1, 128),
    ),
    "attend_rows": tuple(
        (rows, warps, stages, 64, cells)
        for rows, warps in ((64, 4), (128, 4), (128, 8))
        for stages in (2, 3)
        for cells in (32, 64)
    ),
    "attend": (
        *((128, 4, stages, 64, cells) for stages in (2, 3, 4) for cells in (32, 64)),
        *((128, 8, stages, keys, 32) for stages in (2, 3) for keys in (64, 128)),
        *((64, 4, stages, keys, 32) for stages in (2, 3) for keys in (64, 128)),
    ),
    "vote": tuple((16, warps, stages, keys) for warps in (2, 4) for stages in (1, 2, 3) for keys in (64, 128, 256)),
    "nearest": (
        *((128, 4, stages, keys) for stages in (2, 3) for keys in (32, 64)),
        *((64, 4, stages, keys) for stages in (2, 3) for keys in (32, 64)),
        *((256, 8, stages, keys) for stages in (2, 3) for keys in (32, 64)),
    ),
    "means": tuple((cells, 4, stages, points) for cells in (16, 32, 64) for stages in (2, 3) for points in (128, 256, 512)),
    "moments_dkv": ((32, 4, 1, 64), (32, 8, 1, 64), (64, 4, 1, 64), (64, 8, 1, 64)),
    "near_dkv": (
        (64, 4, 1, 64),
        (64, 4, 2, 64),
        (64, 4, 3, 64),
        (64, 8, 2, 64),
        (64, 8, 1, 128),
        (64, 8, 2, 128),
        (128, 8, 1, 64),
        (128, 8, 2, 64),
        (32, 4, 2, 64),
        (32, 4, 3, 64),
        (32, 8, 2, 128),
    ),
    "near_dq": (
        (64, 4, 1, 64),
        (64, 4, 2, 64),
        (64, 8, 1, 64),
        (64, 8, 2, 64),
        (64, 4, 1, 32),
        (64, 4, 2, 32),
        (128, 8, 1, 64),
        (128, 8, 2, 64),
        (128, 8, 1, 32),
        (64, 8, 1, 128),
    ),
    "far_dq": (
        *((64, warps, stages, keys) for warps in (4, 8) for stages in (1, 2) for keys in (32, 64)),
        *((32, 4, stages, keys) for stages in (1, 2) for keys in (32, 64)),
        (128, 8, 1, 32),
    ),
    "local_dq": (
        *((64, 4, stages, keys) for stages in (1, 2) for keys in (32, 64)),
        *((64, 8, stages, 64) for stages in (1, 2)),
        *((128, 8, stages, 64) for stages in (1, 2)),
    ),
    "far_dmoments": (
        (64, 4, 1, 64),
        (64, 4, 2, 64),
        (64, 8, 1, 64),
        (64, 8, 2, 64),
        (32, 4, 1, 64),
        (32, 4, 2, 64),
        (64, 4, 1, 32),
        (64, 4, 2, 32),
        (128, 8, 1, 64),
        (64, 8, 1, 128),
        (32, 8, 1, 128),
        (64, 4, 3, 32),
        (32, 4, 3, 32),
        (128, 4, 1, 32),
        (64, 8, 2, 32),
    ),
    "local_dkv": (
        (64, 4, 1, 64),
        (64, 4, 2, 64),
        (64, 4, 3, 64),
        (64, 8, 2, 64),
        (64, 8, 1, 128),
        (64, 8, 2, 128),
        (128, 8, 1, 64),
        (128, 8, 2, 64),
        (32, 4, 2, 64),
        (32, 4, 3, 64),
        (32, 8, 2, 128),
        (32, 8, 3, 128),
        (64, 8, 3, 128),
        (64, 4, 2, 128),
    ),
}
SMALL = (
    (16, 4, 1, 32),
    (32, 4, 1, 32),
    (32, 8, 1, 32),
    (32, 4, 2, 32),
    (16, 4, 1, 64),
    (16, 8, 1, 32),
    (16, 8, 1, 16),
    (32, 4, 1, 64),
    (32, 8, 1, 64),
    (64, 8, 1, 32),
)
"""For head dimensions beyond 128, and for float32."""


def candidates(kernel: str, dtype: str, dim: int) -> Iterator[TileSizes]:
    small = dim > 128 or dtype == "float32"
    yield from {
        TileSizes(*sizes)._replace(**({"keys": 64} if kernel == "route" else {})): None
        for sizes in (SMALL if small else CANDIDATES[kernel])
        if sizes[3] >= 32 or kernel == "far_dmoments"  # the others read the marks of 32 cells or more
    }


def cases(kernels: list[str], dtypes: list[str], dims: list[int], cell_sizes: list[int]) -> list[Case]:
    return [
        Case(kernel, dtype, dim, size, blocks)
        for kernel, dtype, dim in product(kernels, dtypes, dims)
        for size in (cell_sizes if kernel in BY_CELL_SIZE else [128])
        for blocks in candidates(kernel, dtype, dim)
    ]


def passes(case: Case) -> list[Callable[[], Any]]:
    """What to run to have the kernel timed."""
    dtype = getattr(torch, case.dtype)
    torch.manual_seed(0)
    centres = torch.randn(HEADS, 64, case.dim, device="cuda")
    which = torch.randint(64, (HEADS, LENGTH), device="cuda")

    def clustered() -> Tensor:
        centre = centres.gather(1, which[..., None].expand(-1, -1, case.dim))
        return (centre + 0.7 * torch.randn(HEADS, LENGTH, case.dim, device="cuda"))[None].to(dtype)

    query, key, value = (clustered().requires_grad_(case.kernel in BACKWARD) for _ in range(3))
    share, probes = (128, 2 * PROBES) if case.kernel in TOGETHER else (1, PROBES)
    method = nf.Cells(cell_size=case.cell_size, probes=probes, segment=SEGMENT, share=share)
    plain = nf.Cells(cell_size=case.cell_size, probes=probes, share=share)
    if case.kernel not in BACKWARD:
        return [
            lambda: nf.attention(query, key, value, method=plain),
            lambda: nf.attention(query, key, value, is_causal=True, method=method),
        ]
    output = nf.attention(query, key, value, is_causal=True, method=method)
    upstream = torch.randn_like(output)
    return [lambda: torch.autograd.grad(output, (query, key, value), upstream, retain_graph=True)]


def compile_some(mine: list[Case]) -> None:
    """Run each case once, so that what compiles is on disk afterwards."""
    prepared: dict[tuple[str, str, int, int], list[Callable[[], Any]]] = {}
    for case in mine:
        same = case[:4]
        if same not in prepared:
            prepared = {same: passes(case)}
        try:
            with trying(case.kernel, case.blocks):
                for run in prepared[same]:
                    run()
            torch.cuda.synchronize()
        except triton_errors():
            continue


def triton_errors() -> type[Exception]:
    """What Triton raises where a block does not fit."""
    from triton.runtime.errors import OutOfResources

    return OutOfResources


def microseconds(case: Case, runs: list[Callable[[], Any]]) -> float | None:
    """Device time of the kernel; None: it does not fit on this card."""
    try:
        with trying(case.kernel, case.blocks):
            for run in runs:
                run()
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CUDA]) as trace:
                for run in runs:
                    run()
                torch.cuda.synchronize()
    except triton_errors():
        return None
    return sum(event.self_device_time_total for event in trace.key_averages() if event.key == SYMBOL[case.kernel])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=SYMBOL, default=list(SYMBOL))
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--cell-sizes", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args()
    todo = cases(arguments.kernels, arguments.dtypes, arguments.dims, arguments.cell_sizes)
    context = multiprocessing.get_context("spawn")
    workers = [context.Process(target=compile_some, args=(todo[i::WORKERS],)) for i in range(WORKERS)]
    for worker in workers:
        worker.start()
    for worker in track(workers, description=f"compiling {len(todo)} variants"):
        worker.join()

    cards = json.loads(TABLE.read_text())["cards"]
    known = table_for(torch.device("cuda", torch.cuda.current_device()))
    table = json.loads(json.dumps(known["blocks"]))
    best: dict[tuple[str, str, str], tuple[float, Case]] = {}
    before: tuple[Any, ...] = ()
    runs: list[Callable[[], Any]] = []
    for case in track(todo, description="timing"):
        if case[:4] != before:
            before, runs = case[:4], passes(case)
        took = microseconds(case, runs)
        print(*case[:4], *case.blocks, "does not fit" if took is None else f"{took / 1e3:.3f} ms", flush=True)
        if took is not None and took < best.get(case.place, (float("inf"),))[0]:
            best[case.place] = took, case
    for (kernel, kind, size), (_, case) in best.items():
        table.setdefault(kernel, {}).setdefault(kind, {})[size] = list(case.blocks)
    measured = {"environment": environment(), "fields": list(TileSizes._fields), "blocks": table, "decode": known["decode"]}
    cards[torch.cuda.get_device_name()] = measured
    arguments.out.write_text(json.dumps({"cards": cards}, indent=1) + "\n")
    for place, (took, case) in best.items():
        print(*place, *case.blocks, f"{took / 1e3:.3f} ms")


if __name__ == "__main__":
    main()
