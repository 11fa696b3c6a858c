"""Ways to look at the rows."""

from __future__ import annotations

from experiments.experiment import Rows
from experiments.words import middle

COUNTERPART = {"printed-qv": "exact-qv", "printed": "exact", "walks": "exact", "topk": "exact", "cells": "exact"}
"""The exact descent that moves the same tensors."""


def of_kind(rows: Rows, kind: str) -> Rows:
    return [row for row in rows if row["kind"] == kind]


def paths(rows: Rows, loss: str, rate: float, estimator: str) -> list[list[float | None]]:
    """The losses of every seed."""
    return [row["losses"] for row in rows if (row["loss"], row["rate"], row["estimator"]) == (loss, rate, estimator)]


def progress(rows: Rows, loss: str, estimator: str, rate: float | None = None) -> list[float]:
    """How much of the exact descent's fall of the loss an estimated one reaches, for every seed (and rate, if none is given).

    1: as far as exact; 0: no progress; minus infinity: diverged. Starts from which exact descent diverges are left out.
    """
    mine = [row for row in rows if row["loss"] == loss and row["estimator"] == estimator and rate in (None, row["rate"])]
    found = []
    for row in mine:
        wanted = (loss, row["rate"], row["seed"], COUNTERPART[estimator])
        exact = next(r for r in rows if (r["loss"], r["rate"], r["seed"], r["estimator"]) == wanted)
        if exact["diverged"]:
            continue
        fall = exact["losses"][0] - exact["losses"][-1]
        last = row["losses"][-1]
        found.append(float("-inf") if row["diverged"] or last is None else (row["losses"][0] - last) / fall)
    return found


def typical(rows: Rows, loss: str, estimator: str, rate: float | None = None) -> float:
    return middle(progress(rows, loss, estimator, rate))


def gradient_error(rows: Rows, estimator: str, name: str) -> float | None:
    values = [row[name] for row in rows if row["estimator"] == estimator and row[name] is not None]
    return middle(values) if values else None
