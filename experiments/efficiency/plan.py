"""The units of the efficiency experiment, and when a length is not tried."""

from __future__ import annotations

import math
import os
import statistics

import torch

from experiments import isolate
from experiments.efficiency.methods import METHODS, near_keys, prepare
from experiments.experiment import Done, Row, Rows, Unit
from experiments.settings import Settings

LENGTHS = (5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
QUICK_LENGTHS = (256, 512)


def plan(settings: Settings) -> list[Unit]:
    """Lengths from short to long; each knows how the shorter ones of its method went."""
    lengths = QUICK_LENGTHS if settings.quick else LENGTHS
    return [unit(settings, method, causal, n, lengths) for n in lengths for causal in (True, False) for method in METHODS]


def unit(settings: Settings, method: str, causal: bool, n: int, lengths: tuple[int, ...]) -> Unit:
    def measure(done: Done) -> Rows:
        before = [done[name_of(method, causal, m)][0] for m in lengths if m < n]
        return [measured(settings, method, causal, n, before)]

    def stale(rows: Rows) -> bool:
        """Limits were raised, and what they stopped may run now."""
        limits = {"time": settings.time_limit, "memory": settings.memory_limit}
        return any(row["status"] != "ok" and row["limit"] < limits[row["status"]] for row in rows)

    return Unit(name_of(method, causal, n), measure, stale)


def name_of(method: str, causal: bool, n: int) -> str:
    return f"{method}, {'causal' if causal else 'no mask'}, n={n}"


def measured(settings: Settings, method: str, causal: bool, n: int, before: Rows) -> Row:
    """Time and memory of one method at one length; a run that would pass a limit, going by shorter ones, is not started."""
    row: Row = {"method": method, "causal": causal, "n": n, "k": near_keys(method, n)}
    for what, limit in (("memory", 1024 * settings.memory_limit), ("time", settings.time_limit)):
        expected = extrapolated(before, n, "megabytes" if what == "memory" else "seconds")
        if expected is not None and expected > limit:
            shown = settings.memory_limit if what == "memory" else limit
            return {**row, "status": what, "limit": shown, "predicted": expected, "tried": False}
    arguments = (method, n, causal, settings.seed, settings.device)
    if settings.quick:
        result = isolate.here(prepare, *arguments)
    else:
        limits = {"time_limit": settings.time_limit, "memory_limit": settings.memory_limit}
        # Which kernels a GPU needs depends on the length: those of a short call are not enough.
        result = isolate.apart(prepare, *arguments, **limits, warm_up=torch.device(settings.device).type != "cpu")
    if result.status != "ok":
        limit = settings.memory_limit if result.status == "memory" else settings.time_limit
        return {**row, "status": result.status, "limit": limit, "predicted": None, "tried": True}
    row |= {"status": "ok", "seconds": statistics.median(result.seconds), "megabytes": result.megabytes}
    return {**row, "load": os.getloadavg()[0], **result.judged}


def extrapolated(before: Rows, n: int, what: str) -> float | None:
    """The next value by the power law through the last two lengths that ran. Where there is but one, time is taken as quadratic;
    memory is not guessed, for a call that asks for too much fails at once.

    A method that was tried and stopped at a shorter length will not get further: infinity.
    """
    ran = [row for row in before if row["status"] == "ok"]
    name = "memory" if what == "megabytes" else "time"
    if any(row["status"] == name and row["tried"] for row in before):
        return math.inf
    if not ran or (what == "megabytes" and len(ran) == 1):
        return None
    last, power = ran[-1], 2.0
    if len(ran) > 1 and ran[-2][what] > 0:
        power = math.log(max(last[what], 1e-9) / ran[-2][what]) / math.log(last["n"] / ran[-2]["n"])
        power = min(2.0, max(1.0, power))
    return last[what] * (n / last["n"]) ** power
