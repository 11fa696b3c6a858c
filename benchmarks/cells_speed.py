"""Sections of bench_cells.py: how fast Cells() is. One head of 64, float32, clustered inputs, default settings."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import errors
import torch
import torch.nn.functional as F
from record import (
    each,
    exponent,
    high_water,
    in_fresh_process,
    median_ratio,
    peak_memory,
    restart_high_water,
    side_by_side,
    table,
)
from rich.table import Table
from torch import Tensor

import nearfield as nf
from nearfield.synthetic import make

DIM, FAMILY = 64, "clustered"
SIZES = (4096, 8192, 16_384, 32_768, 65_536, 131_072)
SCALING = tuple(2**e for e in range(14, 21))
PAPER = {"n": 100_000, "seconds": 2080, "k": "n^(1/4)", "machine": "M3, 8 GB"}
"""What the paper reports for its forward pass at the largest length it ran."""


def settings(info: dict[str, Any]) -> dict[str, Any]:
    """The sizes of a call of Cells and the keys it read, from `Estimate.info`."""
    names = ("keys_per_query", "cell_size", "probes", "segment", "window", "sinks")
    return {name: info[name] for name in names if name in info}


def attend(name: str, inputs: tuple[Tensor, Tensor, Tensor], causal: bool) -> Tensor:
    if name == "sdpa":
        return F.scaled_dot_product_attention(*inputs, is_causal=causal)
    return nf.attention(*inputs, is_causal=causal, method=nf.Cells())


def forward_task(name: str, n: int) -> Callable[[], Tensor]:
    inputs = make(FAMILY, 1, 1, n, DIM)
    return lambda: attend(name, inputs, False)


def training_task(name: str, n: int) -> Callable[[], tuple[Tensor, ...]]:
    """A causal forward pass and its backward pass to query, key and value."""
    query, key, value = (x.requires_grad_() for x in make(FAMILY, 1, 1, n, DIM))
    upstream = torch.randn(query.shape, generator=torch.Generator().manual_seed(1))
    return lambda: torch.autograd.grad(attend(name, (query, key, value), True), (query, key, value), upstream)


def rounds_at(n: int) -> int:
    return 3 if n <= 32_768 else 2


def crossover(rows: list[dict[str, Any]]) -> float | None:
    """The length at which Cells last overtakes SDPA, interpolated in logs; None if it does not in this range."""
    found = None
    for low, high in pairwise(rows):
        a, b = math.log(low["sdpa_over_cells"]), math.log(high["sdpa_over_cells"])
        if a < 0 <= b:
            found = math.exp(math.log(low["n"]) + a / (a - b) * math.log(high["n"] / low["n"]))
    return found


def forward(quick: bool) -> dict[str, Any]:
    """No mask, forward only."""
    rows = []
    for n in each((512, 1024) if quick else SIZES, lambda n: f"forward, n = {n:,}"):
        inputs = make(FAMILY, 1, 1, n, DIM)
        estimate = nf.estimate(*inputs, method=nf.Cells(), generator=torch.Generator().manual_seed(0), audit=200)
        calls = {name: forward_task(name, n) for name in ("sdpa", "cells")}
        seconds = side_by_side(calls, rounds_at(n), warm=n <= 32_768)
        measured = () if quick else tuple(calls)
        rows.append(
            {
                "n": n,
                "seconds": seconds,
                "sdpa_over_cells": median_ratio(seconds["sdpa"], seconds["cells"]),
                "settings": settings(estimate.info),
                "errors": errors.of_audit(estimate.audit),
                "peak_megabytes": {name: peak_memory(forward_task, name, n) for name in measured},
            }
        )
    return {"family": FAMILY, "dim": DIM, "rows": rows, "crossover": crossover(rows)}


def training(quick: bool) -> dict[str, Any]:
    """Causal, forward and backward."""
    rows = []
    for n in each((1024,) if quick else SIZES[1:], lambda n: f"training, n = {n:,}"):
        calls = {name: training_task(name, n) for name in ("sdpa", "cells")}
        off = None
        if n <= 32_768:
            exact, ours = (call() for call in calls.values())
            names = ("query", "key", "value")
            off = {name: float((a - b).norm() / b.norm()) for name, a, b in zip(names, ours, exact, strict=True)}
            del exact, ours
        seconds = side_by_side(calls, 1 if n > 65_536 else rounds_at(n), warm=False)
        measured = () if quick else ("cells",) if n > 65_536 else tuple(calls)
        with torch.no_grad():
            inputs = make(FAMILY, 1, 1, n, DIM)
            generator = torch.Generator().manual_seed(0)
            estimate = nf.estimate(*inputs, is_causal=True, method=nf.Cells(), generator=generator, audit=200)
        rows.append(
            {
                "n": n,
                "seconds": seconds,
                "sdpa_over_cells": median_ratio(seconds["sdpa"], seconds["cells"]),
                "settings": settings(estimate.info),
                "errors": errors.of_audit(estimate.audit),
                "relative_error_of_gradients": off,
                "peak_megabytes": {name: peak_memory(training_task, name, n) for name in measured},
            }
        )
    return {"family": FAMILY, "dim": DIM, "rows": rows, "crossover": crossover(rows)}


def scaling(quick: bool) -> dict[str, Any]:
    """No mask, forward only, Cells alone, up to a million keys."""
    rows = []
    for n in each((256, 512, 1024) if quick else SCALING, lambda n: f"scaling, n = {n:,}"):
        inputs = make(FAMILY, 1, 1, n, DIM)
        # An audited row reads every key, so long inputs get fewer of them.
        audit = 200 if n <= 131_072 else 59
        estimate = nf.estimate(*inputs, method=nf.Cells(), generator=torch.Generator().manual_seed(0), audit=audit)
        call = forward_task("cells", n)
        seconds = side_by_side({"cells": call}, 3 if n <= 131_072 else 2, warm=False)["cells"]
        del call
        rows.append(
            {
                "n": n,
                "seconds": seconds,
                "settings": settings(estimate.info),
                "errors": errors.of_audit(estimate.audit),
                "peak_megabytes": None if quick else peak_memory(forward_task, "cells", n),
            }
        )
    middle = [statistics.median(row["seconds"]) for row in rows]
    return {"family": FAMILY, "dim": DIM, "rows": rows, "exponent": exponent([row["n"] for row in rows], middle)}


def million(quick: bool) -> dict[str, Any]:
    """A million keys and queries, ten heads, forward."""
    n, heads = (2048, 2) if quick else (1_000_000, 10)
    for _ in each((n,), lambda n: f"n = {n:,}, {heads} heads"):
        result = in_fresh_process(_million, n, heads)
    return {"family": FAMILY, "dim": DIM, **result, "paper": PAPER}


def _million(n: int, heads: int) -> dict[str, Any]:
    query, key, value = (torch.empty(1, heads, n, DIM) for _ in range(3))
    for head in range(heads):
        for whole, part in zip((query, key, value), make(FAMILY, 1, 1, n, DIM, seed=head), strict=True):
            whole[:, head] = part[:, 0]
            del part
    before = restart_high_water()
    start = time.perf_counter()
    output = nf.attention(query, key, value, method=nf.Cells())
    seconds = time.perf_counter() - start
    beyond = high_water() - before
    sizes = nf.estimate(query[:, :1, :16], key[:, :1], value[:, :1], method=nf.Cells()).info
    megabytes = output.nbytes / 2**20
    return {
        "n": n,
        "heads": heads,
        "seconds": seconds,
        "settings": settings(sizes),
        "errors": errors.of_random_rows(output, query, key, value, rows=59, seed=1)[0],
        "input_megabytes": 3 * megabytes,
        "output_megabytes": megabytes,
        "peak_megabytes_beyond_inputs_and_output": beyond - megabytes,
    }


def show_forward(results: dict[str, Any]) -> Table:
    return _show_compared(results, "forward, no mask")


def show_training(results: dict[str, Any]) -> Table:
    return _show_compared(results, "forward and backward, causal")


def _show_compared(results: dict[str, Any], title: str) -> Table:
    titles = ("n", "SDPA, s", "Cells, s", "SDPA / Cells", *errors.HEADINGS, "keys", "cell x probes", "peak MB: SDPA", "Cells")
    equal = results["crossover"]
    where = f"equal at n = {equal:,.0f}" if equal else "no crossover in this range"
    found = table(*titles, "gradients rel.", title=f"{title}; {where}")
    for row in results["rows"]:
        sizes, memory = row["settings"], row["peak_megabytes"]
        found.add_row(
            f"{row['n']:,}",
            *(f"{statistics.median(row['seconds'][name]):.3f}" for name in ("sdpa", "cells")),
            f"{row['sdpa_over_cells']:.2f}",
            *errors.written(row["errors"]),
            f"{sizes['keys_per_query']:,.0f}",
            f"{sizes['cell_size']} x {sizes['probes']}",
            *(f"{memory[name]:.0f}" if name in memory else "" for name in ("sdpa", "cells")),
            " ".join(f"{x:.3f}" for x in (row.get("relative_error_of_gradients") or {}).values()),
        )
    return found


def show_scaling(results: dict[str, Any]) -> Table:
    found = table(
        "n", "seconds", *errors.HEADINGS, "keys", "cell x probes", "peak MB", title=f"time ~ n^{results['exponent']:.2f}"
    )
    for row in results["rows"]:
        sizes = row["settings"]
        found.add_row(
            f"{row['n']:,}",
            f"{statistics.median(row['seconds']):.3f}",
            *errors.written(row["errors"]),
            f"{sizes['keys_per_query']:,.0f}",
            f"{sizes['cell_size']} x {sizes['probes']}",
            f"{row['peak_megabytes'] or math.nan:,.0f}",
        )
    return found


def show_million(results: dict[str, Any]) -> Table:
    found = table("", "n", "heads", "seconds", *errors.HEADINGS, "MB beyond inputs and output", words=("",))
    found.add_row(
        "Cells()",
        f"{results['n']:,}",
        f"{results['heads']}",
        f"{results['seconds']:.1f}",
        *errors.written(results["errors"]),
        f"{results['peak_megabytes_beyond_inputs_and_output']:,.0f}",
    )
    paper = results["paper"]
    found.add_row(f"paper ({paper['machine']})", f"{paper['n']:,}", "", f"{paper['seconds']:,}", "", "", "", "")
    return found
