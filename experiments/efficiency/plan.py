"""The units of the efficiency experiment, and when a length is not tried."""

from __future__ import annotations

import os
import statistics
from typing import Any

import torch

from experiments import isolate
from experiments.digest import digest
from experiments.efficiency.growth import extrapolated
from experiments.efficiency.methods import (
    DIM,
    HEADS,
    JUDGED_ROWS,
    METHODS,
    SPREAD,
    dtype_on,
    near_keys,
    on_cpu,
    output_megabytes,
    prepare,
    recipe,
)
from experiments.experiment import Done, Row, Rows, Unit
from experiments.isolate import Rounds
from experiments.settings import Settings

LENGTHS = (5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
QUICK_LENGTHS = (256, 512)
ON_CPU, ON_GPU = Rounds(5, 30.0, least=3), Rounds(10, 5.0)


def plan(settings: Settings) -> list[Unit]:
    """Lengths from short to long; each knows how the shorter ones of its method went."""
    lengths = QUICK_LENGTHS if settings.quick else LENGTHS
    return [unit(settings, method, causal, n, lengths) for n in lengths for causal in (True, False) for method in METHODS]


def unit(settings: Settings, method: str, causal: bool, n: int, lengths: tuple[int, ...]) -> Unit:
    def measure(done: Done) -> Rows:
        before = [done[name_of(method, causal, m)][0] for m in lengths if m < n]
        return [measured(settings, method, causal, n, before)]

    return Unit(name_of(method, causal, n), measure, lambda rows: stale(rows, settings), made_with(settings, method, n))


def name_of(method: str, causal: bool, n: int) -> str:
    return f"{method}, {'causal' if causal else 'no mask'}, n={n}"


def stale(rows: Rows, settings: Settings) -> bool:
    """Whether limits were raised, and what they stopped may run now."""
    limits = {"time": settings.time_limit, "memory": settings.memory_limit}
    return any(row["status"] != "ok" and row["limit"] < limits[row["status"]] for row in rows)


def made_with(settings: Settings, method: str, n: int) -> str:
    """The digest of all that rows depend on, but for the seed, the device and the limits."""
    inputs = (HEADS, DIM, SPREAD, str(dtype_on(settings.device)))
    return digest(inputs, JUDGED_ROWS, rounds_on(settings.device), method, recipe(method, n))


def rounds_on(device: str) -> Rounds:
    """Time on a GPU is dear, and calls are short there."""
    return ON_CPU if on_cpu(device) else ON_GPU


def hopeless(settings: Settings, n: int, before: Rows, dtype: torch.dtype) -> Row | None:
    """The limit that a run would pass, going by shorter ones; of two, the one that it would pass by the larger factor."""
    expected = {
        "memory": (extrapolated(before, n, "megabytes", output_megabytes(1, dtype)), settings.memory_limit, 1024),
        "time": (extrapolated(before, n, "seconds"), settings.time_limit, 1),
    }
    factors = {status: value / unit / limit for status, (value, limit, unit) in expected.items() if value is not None}
    worst = max(factors, key=factors.__getitem__, default=None)
    if worst is None or factors[worst] <= 1:
        return None
    return {"status": worst, "limit": expected[worst][1], "predicted": expected[worst][0], "tried": False}


def measured(settings: Settings, method: str, causal: bool, n: int, before: Rows) -> Row:
    """Time and memory of one method at one length; a run that would pass a limit, going by shorter ones, is not started."""
    dtype = dtype_on(settings.device)
    row: Row = {"method": method, "causal": causal, "n": n, "k": near_keys(method, n), "dtype": str(dtype).removeprefix("torch.")}
    stop = hopeless(settings, n, before, dtype)
    if stop is not None:
        return {**row, **stop}
    arguments = (method, n, causal, settings.seed, settings.device)
    load = os.getloadavg()[0]
    # Which kernels a GPU needs depends on the length: those of a short call are not enough.
    how: dict[str, Any] = {"warm_up": not on_cpu(settings.device), "rounds": rounds_on(settings.device)}
    if settings.quick:
        result = isolate.here(prepare, *arguments, **how)
    else:
        how |= {"time_limit": settings.time_limit, "memory_limit": settings.memory_limit}
        result = isolate.apart(prepare, *arguments, **how)
    if result.status != "ok":
        limit = settings.memory_limit if result.status == "memory" else settings.time_limit
        return {**row, "status": result.status, "limit": limit, "predicted": None, "tried": True}
    spent = result.seconds
    times = {"seconds": statistics.median(spent), "fastest": min(spent), "slowest": max(spent), "rounds": len(spent)}
    return {**row, "status": "ok", **times, "megabytes": result.megabytes, "load": load, **result.judged}
