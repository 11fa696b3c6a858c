"""Ways to look at the rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.experiment import Row, Rows
from experiments.words import middle

COUNTERPART = {"printed-qv": "exact-qv"}
"""The exact descent that moves the same tensors; of all others it is "exact"."""


def of_kind(rows: Rows, kind: str) -> Rows:
    return [row for row in rows if row["kind"] == kind]


def paths(rows: Rows, loss: str, rate: float, estimator: str) -> list[list[float | None]]:
    """The losses of every seed."""
    return [row["losses"] for row in rows if (row["loss"], row["rate"], row["estimator"]) == (loss, rate, estimator)]


def pairs(rows: Rows, loss: str, estimator: str, rate: float | None = None) -> list[tuple[Row, Row]]:
    """Descents of every seed (and rate, if none is given), each with the exact one from the same start.

    Starts from which the exact descent diverges, or does not fall, are left out.
    """
    mine = [row for row in rows if row["loss"] == loss and row["estimator"] == estimator and rate in (None, row["rate"])]
    found = []
    for row in mine:
        wanted = (loss, row["rate"], row["seed"], COUNTERPART.get(estimator, "exact"))
        exact = next(r for r in rows if (r["loss"], r["rate"], r["seed"], r["estimator"]) == wanted)
        if not is_lost(exact) and fall(exact) > 0:
            found.append((row, exact))
    return found


def is_lost(row: Row) -> bool:
    return row["diverged"] or None in row["losses"]


def fall(row: Row) -> float:
    return row["losses"][0] - row["losses"][-1]


def progress(rows: Rows, loss: str, estimator: str, rate: float | None = None) -> list[float]:
    """How much of the exact descent's fall each reaches. 1: as far as exact; 0: none; minus infinity: diverged."""
    return [-math.inf if is_lost(row) else fall(row) / fall(exact) for row, exact in pairs(rows, loss, estimator, rate)]


def gaps(rows: Rows, loss: str, estimator: str, rate: float | None = None) -> list[float]:
    """The largest distance from the exact descent's loss on the way, in parts of its fall. Infinity: diverged."""

    def gap(row: Row, exact: Row) -> float:
        if is_lost(row):
            return math.inf
        return max(abs(a - b) for a, b in zip(row["losses"], exact["losses"], strict=True)) / fall(exact)

    return [gap(row, exact) for row, exact in pairs(rows, loss, estimator, rate)]


def typical(values: Sequence[float]) -> float:
    """The median; not a number where there is nothing."""
    return middle(values) if values else math.nan


def errors_of(rows: Rows, estimator: str, name: str) -> list[float]:
    """Relative errors of one gradient, over seeds; none where it was not estimated. Not finite: infinity."""
    mine = [row for row in rows if row["estimator"] == estimator]
    if estimator in ("shifted", "signed") and name != "value":
        return []
    return [math.inf if row[name] is None else row[name] for row in mine]
