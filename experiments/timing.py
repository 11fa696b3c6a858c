"""Time and memory of one call, length after length, under limits that shorter lengths tell whether it would pass."""

from __future__ import annotations

import os
import statistics
from typing import Any

from experiments import isolate
from experiments.experiment import Row, Rows
from experiments.growth import extrapolated
from experiments.isolate import Prepare, Rounds
from experiments.settings import Settings


def timed(
    settings: Settings,
    row: Row,
    before: Rows,
    per_key: float,
    prepare: Prepare,
    arguments: tuple[Any, ...],
    rounds: Rounds,
    judging: float = isolate.JUDGING,
) -> Row:
    """`row` with what was measured. A call that would pass a limit, going by the shorter ones `before`, is not started.

    Args:
        row: says which call of `n` keys it is.
        per_key: megabytes that every key is known to add.
        prepare: see `isolate`; it is given `arguments`.
        judging: seconds that judging its output may take.
    """
    stop = hopeless(settings, row["n"], before, per_key)
    if stop is not None:
        return {**row, **stop}
    load = os.getloadavg()[0]
    # Which kernels a GPU needs depends on the length: those of a short call are not enough.
    how: dict[str, Any] = {"warm_up": settings.device != "cpu", "rounds": rounds}
    if settings.quick:
        result = isolate.here(prepare, *arguments, **how)
    else:
        how |= {"time_limit": settings.time_limit, "memory_limit": settings.memory_limit, "judging": judging}
        result = isolate.apart(prepare, *arguments, **how)
    if result.status != "ok":
        limit = settings.memory_limit if result.status == "memory" else settings.time_limit
        return {**row, "status": result.status, "limit": limit, "predicted": None, "tried": True}
    spent = result.seconds
    times = {"seconds": statistics.median(spent), "fastest": min(spent), "slowest": max(spent), "rounds": len(spent)}
    return {**row, "status": "ok", **times, "megabytes": result.megabytes, "load": load, **result.judged}


def hopeless(settings: Settings, n: int, before: Rows, per_key: float) -> Row | None:
    """The limit that a run would pass, going by shorter ones; of two, the one that it would pass by the larger factor."""
    expected = {
        "memory": (extrapolated(before, n, "megabytes", per_key), settings.memory_limit, 1024),
        "time": (extrapolated(before, n, "seconds"), settings.time_limit, 1),
    }
    factors = {status: value / unit / limit for status, (value, limit, unit) in expected.items() if value is not None}
    worst = max(factors, key=factors.__getitem__, default=None)
    if worst is None or factors[worst] <= 1:
        return None
    return {"status": worst, "limit": expected[worst][1], "predicted": expected[worst][0], "tried": False}


def stale(rows: Rows, settings: Settings) -> bool:
    """Whether limits were raised, and what they stopped may run now."""
    limits = {"time": settings.time_limit, "memory": settings.memory_limit}
    return any(row["status"] != "ok" and row["limit"] < limits[row["status"]] for row in rows)
