"""The default of `nf.attention` on a GPU: its pooled error, and its time over that of SDPA and of Cells with the same budget.

python benchmarks/bench_default_gpu.py --captured FOLDER    # results/default_gpu.json; three minutes on an H200
python benchmarks/bench_default_gpu.py --quick              # tiny sizes, on a CPU too; written only with --out

Eight heads of 64 in bfloat16: `torch.randn`, the families of nearfield.synthetic and, at more lengths, clusters made on the card;
real inputs are layers that gpu_capture.py has saved. "Always" is the default where it looks from the crossover length on, whether
or not a call of that size repays the look: its times tell from which length on it does. SDPA has its fastest backend.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import record
import torch
from gpu_timing import CUDA, DEVICE, DTYPE, HEADS, QKV, Call, backends, card, clustered, fastest, interleaved, sdpa
from peers_inputs import captured

import nearfield as nf
from nearfield import auto
from nearfield.synthetic import FAMILIES, make

DIM = 64
LENGTHS, LONG_LENGTHS = (65_536, 16_384), (131_072, 262_144)
QUICK_CROSSOVER = 128


class Case(NamedTuple):
    name: str
    inputs: QKV
    causal: bool


def cases(quick: bool, folder: Path | None) -> Iterator[Case]:
    if folder is not None:
        for layer, inputs in captured(folder):
            for causal in (True, False):
                yield Case(layer, inputs, causal)
    for n in () if quick else LONG_LENGTHS:
        inputs = clustered(n, DIM)
        for causal in (False, True):
            yield Case("clustered", inputs, causal)
    for n in (512,) if quick else LENGTHS:
        for family in ("randn", "clustered") if quick else ("randn", *FAMILIES):
            if family == "randn":
                generator = torch.Generator().manual_seed(0)
                made = torch.randn(3, 1, HEADS, n, DIM, generator=generator).unbind(0)
            else:
                made = make(family, 1, HEADS, n, DIM)
            query, key, value = (x.to(DEVICE, DTYPE) for x in made)
            for causal in (False, True):
                yield Case(family, (query, key, value), causal)


class _Always(nf.Auto):
    """`Auto` that looks at its error from the crossover length on."""

    def prefers_exact(self, problem: Any) -> bool:
        limit = self.crossover
        return bool(auto.is_exact_faster(problem.query, problem.key, problem.is_causal, limit, checked=False))


def measure(case: Case, quick: bool) -> dict[str, Any]:
    inputs, causal = case.inputs, case.causal
    crossover = QUICK_CROSSOVER if quick else None
    always, default = _Always(crossover=crossover), nf.Auto(crossover=crossover)
    backend, _ = fastest({name: lambda name=name: sdpa(name, *inputs, causal) for name in backends()})
    exact = sdpa(backend, *inputs, causal)
    calls: dict[str, Call] = {
        "sdpa": lambda: sdpa(backend, *inputs, causal),
        "default": lambda: nf.attention(*inputs, is_causal=causal, method=default if quick else None),
        "always": lambda: nf.attention(*inputs, is_causal=causal, method=always),
    }
    est = nf.estimate(*inputs, is_causal=causal, method=always)
    chosen = est.info["chosen"]
    if isinstance(chosen, nf.Cells):
        calls["cells"] = lambda: nf.attention(*inputs, is_causal=causal, method=chosen)
    errors = {}
    for name, call in calls.items():
        output = call()
        assert isinstance(output, torch.Tensor)
        errors[name] = float((output.double() - exact.double()).norm() / exact.double().norm())
        del output
    runs = interleaved(calls)
    ms = {name: statistics.median(found) for name, found in runs.items()}
    return {
        "name": case.name,
        "n": inputs[1].shape[2],
        "heads": inputs[0].shape[1],
        "dim": inputs[0].shape[3],
        "causal": causal,
        "backend": backend,
        "default_ran": repr(nf.estimate(*inputs, is_causal=causal, method=default).info["chosen"]),
        "always_ran": repr(chosen),
        "steps": est.info["steps"],
        "pooled_errors": errors,
        "ms": ms,
        "runs_ms": runs,
        "default_over_sdpa": ms["default"] / ms["sdpa"],
        "always_over_sdpa": ms["always"] / ms["sdpa"],
        "always_over_cells": ms["always"] / ms["cells"] if "cells" in ms else None,
    }


def show(rows: list[dict[str, Any]]) -> None:
    titles = ("inputs", "keys", "SDPA, ms", "default, ms", "always, ms", "error", "always over SDPA", "over Cells", "ran")
    found = record.table(*titles, title="the default on a GPU", words=("inputs", "ran"))
    for row in rows:
        over = row["always_over_cells"]
        found.add_row(
            row["name"] + (", causal" if row["causal"] else ""),
            f"{row['n']:,}",
            *(f"{row['ms'][name]:.2f}" for name in ("sdpa", "default", "always")),
            f"{row['pooled_errors']['always']:.4f}",
            f"{row['always_over_sdpa']:.2f}",
            "" if over is None else f"{over:.2f}",
            row["always_ran"],
        )
    record.show(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--captured", type=Path, help="folder with real inputs that gpu_capture.py has saved")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written unless --out says where")
    parser.add_argument("--out", type=Path, help="folder for default_gpu.json")
    arguments = parser.parse_args()
    if not CUDA and not arguments.quick:
        print("skipped: there is no CUDA device (--quick runs without one)")
        return
    if arguments.out:
        record.RESULTS = arguments.out
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for case in cases(arguments.quick, arguments.captured):
            rows.append(measure(case, arguments.quick))
            show(rows[-1:])
            if arguments.out is not None or not arguments.quick:
                record.merge("default_gpu", "cases", {"card": card(), "rows": rows})
    show(rows)


if __name__ == "__main__":
    main()
