"""Block sizes of the Triton kernels: tries them all on this card and writes the fastest to cells/triton/tuning.json.

python benchmarks/tune_gpu.py                                           # everything, about ten minutes
python benchmarks/tune_gpu.py --kernels near_fwd attend --dims 64       # these only; the others stay in the file as they are
python benchmarks/tune_gpu.py --out FILE                                # write another file

Kernels are compiled by several processes at a time; only then are they timed, one after the other, inside whole forward and
backward passes (device time by the profiler), with and without a causal mask. The file has an entry for each card; those of other
cards stay as they are. A card that is not in it yet starts with the sizes of its class (fit_tiles.py), also for the steps of a
cache ("decode"), which this script does not measure. `nearfield bench --calibrate` does the same within minutes, for one user: it
tries what is promising, and stops when its time is up.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

import torch
from record import environment
from rich.progress import track

from nearfield.app.blocks.compilers import Compilers, Job, workers_here
from nearfield.app.blocks.passes import setting_of
from nearfield.app.blocks.search import Place, Trial
from nearfield.app.blocks.times import Timer
from nearfield.cells.triton import tuning as triton_tuning
from nearfield.cells.triton.candidates import KERNELS, candidates
from nearfield.cells.triton.measured import kind_of
from nearfield.cells.triton.tiles import TileSizes

TABLE = Path(triton_tuning.__file__).with_name("tuning.json")
LENGTH = 65536
BY_CELL_SIZE = ("near_fwd", "near_dkv", "near_dq")
"""Kernels to which the size of cells matters; the others are measured with cells of 128."""
PATIENCE = 600.0
"""Seconds after which a process that compiles is given up."""


def trials(kernels: list[str], kind: str, dims: list[int], cell_sizes: list[int]) -> list[Trial]:
    return [
        Trial(Place(kernel, kind, dim, size), blocks)
        for kernel, dim in product(kernels, dims)
        for size in (cell_sizes if kernel in BY_CELL_SIZE else [128])
        for blocks in candidates(kernel, kind, dim)
    ]


def compile_all(todo: list[Trial], dtype: torch.dtype, device: torch.device) -> list[Trial]:
    """Those that compile."""
    good = set()
    with Compilers(device, workers_here()) as compilers:
        for trial in todo:
            kernel, _, dim, cell_size = trial.place
            passes = setting_of(kernel, dtype, dim, cell_size).passes(LENGTH)
            blocks = triton_tuning.all_blocks(dim, dtype, device, cell_size) | {kernel: trial.blocks}
            compilers.start(trial, Job(tuple((one, blocks) for one in passes), kernel))
        for _ in track(todo, description=f"compiling {len(todo)} variants"):
            done = compilers.finished(PATIENCE)
            if done is None:
                break
            if done[1]:
                good.add(done[0])
    return [trial for trial in todo if trial in good]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=list(KERNELS))
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--cell-sizes", nargs="+", type=int, default=[64, 128, 256])
    parser.add_argument("--out", type=Path, default=TABLE)
    arguments = parser.parse_args()
    device = torch.device("cuda", torch.cuda.current_device())
    timer = Timer(device, LENGTH, rounds=1)
    best: dict[Place, tuple[float, TileSizes]] = {}
    for name in arguments.dtypes:
        dtype = getattr(torch, name)
        todo = trials(arguments.kernels, kind_of(dtype), arguments.dims, arguments.cell_sizes)
        for place, blocks, _ in track(compile_all(todo, dtype, device), description=f"timing, {name}"):
            setting = setting_of(place.kernel, dtype, place.dim, place.cell_size)
            took = (timer.milliseconds(setting, {place.kernel: blocks}) or {}).get(place.kernel)
            print(*place, *blocks, "does not fit" if took is None else f"{took:.3f} ms", flush=True)
            if took is not None and took < best.get(place, (float("inf"),))[0]:
                best[place] = took, blocks

    cards = json.loads(TABLE.read_text())["cards"]
    known = triton_tuning.shipped_for(device)
    table = json.loads(json.dumps(known["blocks"]))
    for (kernel, kind, dim, size), (_, blocks) in best.items():
        table.setdefault(kernel, {}).setdefault(f"{kind}, {dim}", {})[str(size)] = list(blocks)
    measured = {"environment": environment(), "fields": list(TileSizes._fields), "blocks": table, "decode": known["decode"]}
    cards[torch.cuda.get_device_name()] = measured
    arguments.out.write_text(json.dumps({"cards": cards}, indent=1) + "\n")
    for place, (took, blocks) in best.items():
        print(*place, *blocks, f"{took:.3f} ms")


if __name__ == "__main__":
    main()
