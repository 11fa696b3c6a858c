"""What is said of timed rows: their dtypes, limits, rounds, how busy the machine was, and how time grows."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.experiment import Row, Rows
from experiments.growth import FLOORS
from experiments.words import listed, megabytes, middle, percent, seconds


def dtypes(rows: Rows) -> str:
    return listed(sorted({row["dtype"] for row in rows}))


def stops(rows: Rows) -> str:
    """The limits that stopped something; rows of several runs may have had several."""
    words = []
    for status, unit in (("time", "s"), ("memory", "GB")):
        limits = sorted({row["limit"] for row in rows if row["status"] == status})
        words += [" or ".join(f"{limit:g}" for limit in limits) + f" {unit}"] if limits else []
    return f"The limits here: {listed(words)} for a call." if words else "No limit was reached."


def rounds(rows: Rows) -> str:
    """How often calls were timed, and how much their times differ."""
    found = [row for row in rows if row["status"] == "ok"]
    spread = [row["slowest"] / row["fastest"] - 1 for row in found if row["rounds"] > 1]
    if not spread:
        return "Every call is timed once."
    fewest, most = min(row["rounds"] for row in found), max(row["rounds"] for row in found)
    often = f"{fewest} to {most} times, long ones less often" if fewest < most else f"{most} times"
    return (
        f"Calls are timed {often}, and the median is told; the slowest of them took {percent(middle(spread))} longer than the "
        f"fastest in the middle, {percent(max(spread))} at most."
    )


def load(rows: Rows) -> str:
    """How busy the machine was: with more to do than it has cores, times are too long."""
    found = [row["load"] for row in rows if row["status"] == "ok"]
    if not found:
        return ""
    return (
        f"Load of the machine before a call, earlier calls included: {middle(found):.1f} in the middle, {max(found):.1f} at most."
    )


def growth(what: str, parts: Sequence[str]) -> str:
    """The exponents of time or memory, as they are told."""
    name, least = ("Time", seconds(FLOORS[what])) if what == "seconds" else ("Memory", megabytes(FLOORS[what]))
    said = "; ".join(parts) or "nothing to fit"
    return f"{name} against n (calls from {least} on, three lengths at least; 95% confidence): {said}."


def stopped(row: Row) -> str:
    """A limit that a call passed, or would."""
    return f"out of {row['status']}" + ("" if row["tried"] else " (predicted)")
