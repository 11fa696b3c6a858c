"""The default of `nf.attention`: its pooled error, and its time over that of SDPA and of Cells with the same budget.

On all families of `nearfield.synthetic` and on `torch.randn`, on a CPU. Times are seconds of the processor, all threads together,
and of the wall clock; both in turn, so that a slow spell of the machine hits all methods.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from record import command_line, each, show, table
from torch import Tensor

import nearfield as nf
from nearfield.synthetic import FAMILIES, make

DIM = 64


class Case(NamedTuple):
    family: str
    length: int
    causal: bool
    rounds: int


def cases(quick: bool) -> list[Case]:
    if quick:
        return [Case("randn", 512, False, 1), Case("clustered", 512, True, 1)]
    # Without a mask the default looks from 32,768 keys on.
    found = [Case("randn", 16_384, False, 3), *(Case(family, 32_768, False, 2) for family in ("randn", *FAMILIES))]
    found += [Case(family, 32_768, True, 3) for family in ("randn", "clustered", "local")]
    return [*found, Case("clustered", 65_536, False, 3), Case("randn", 65_536, False, 1)]


def inputs(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    if case.family == "randn":
        return torch.randn(3, 1, 1, case.length, DIM, generator=torch.Generator().manual_seed(0)).unbind(0)
    return make(case.family, 1, 1, case.length, DIM)


def timed(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Seconds of each call, by the wall clock and of the processor, after one round that is not timed."""
    seconds: dict[str, dict[str, list[float]]] = {name: {"wall": [], "processor": []} for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            wall, processor = time.perf_counter(), time.process_time()
            call()
            if turn or rounds == 1:
                seconds[name]["wall"].append(time.perf_counter() - wall)
                seconds[name]["processor"].append(time.process_time() - processor)
        if rounds == 1:
            break
    return seconds


def measure_case(case: Case, quick: bool) -> dict[str, Any]:
    q, k, v = inputs(case)
    method = nf.Auto(crossover=128) if quick else nf.Auto()
    est = nf.estimate(q, k, v, is_causal=case.causal, method=method)
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=case.causal)
    calls: dict[str, Callable[[], object]] = {
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, is_causal=case.causal),
        "default": lambda: nf.attention(q, k, v, is_causal=case.causal, method=method),
    }
    kept = est.info["chosen"] != nf.Exact()
    if kept:
        same = nf.Cells(probes=est.info["probes"])
        calls["cells"] = lambda: nf.attention(q, k, v, is_causal=case.causal, method=same)
    seconds = timed(calls, case.rounds)
    medians = {kind: {name: statistics.median(found[kind]) for name, found in seconds.items()} for kind in ("wall", "processor")}
    return {
        **case._asdict(),
        "ends_with": "cells" if kept else "exact",
        "probes": est.info["probes"] if kept else None,
        "pooled_error": float((est.output - exact).double().norm() / exact.double().norm()),
        "default_over_sdpa": {kind: found["default"] / found["sdpa"] for kind, found in medians.items()},
        "default_over_cells": {kind: found["default"] / found["cells"] for kind, found in medians.items()} if kept else None,
        "seconds": medians,
    }


def measure(quick: bool) -> list[dict[str, Any]]:
    described = each(cases(quick), lambda case: f"{case.family}, {case.length:,} keys{', causal' if case.causal else ''}")
    rows = [measure_case(case, quick) for case in described]
    columns = ("inputs", "keys", "ends with", "pooled error", "time over SDPA's", "over Cells'", "wall clock: SDPA's", "Cells'")
    found = table(*columns, title="the default, one head of 64", words=("inputs", "ends with"))
    for row in rows:
        cells = row["default_over_cells"] or {"processor": None, "wall": None}
        shown = [row["default_over_sdpa"]["processor"], cells["processor"], row["default_over_sdpa"]["wall"], cells["wall"]]
        name = f"{row['family']}{', causal' if row['causal'] else ''}"
        ends = f"{row['probes']} cells" if row["probes"] else "exact"
        found.add_row(
            name, f"{row['length']:,}", ends, f"{row['pooled_error']:.4f}", *("" if x is None else f"{x:.2f}" for x in shown)
        )
    show(found)
    return rows


def main() -> None:
    command_line(__doc__, "default", measure)


if __name__ == "__main__":
    main()
