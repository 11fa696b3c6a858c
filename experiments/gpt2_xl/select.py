"""Ways to look at the rows."""

from __future__ import annotations

from experiments.experiment import Row, Rows
from experiments.gpt2_xl.tune import COMPARED
from experiments.words import finite

NAMES = {"naive": "naive", "exact": "SDPA", "topk": "TopK", "cells": "Cells"}

MAY_DIVERGE = ("before", "after", "after_exact")
SHARED = ("n", "steps", "rate", "held_out", "sha256")
"""What the runs of a model have in common."""


def of_kind(rows: Rows, kind: str) -> Rows:
    """With infinity where a loss or a perplexity was not finite."""
    return [whole(row) for row in rows if row["kind"] == kind]


def whole(row: Row) -> Row:
    found = {**row, **{name: finite(row[name]) for name in MAY_DIVERGE if name in row}}
    return {**found, "losses": [finite(x) for x in row["losses"]]} if "losses" in row else found


def costs(rows: Rows, method: str, recomputed: bool = True) -> Rows:
    """Steps of a method that fitted, from short to long contexts."""
    found = [row for row in of_kind(rows, "cost") if row["method"] == method and row["status"] == "ok"]
    return sorted((row for row in found if row["recomputed"] == recomputed), key=lambda row: row["n"])


def cost_at(rows: Rows, method: str, n: int, recomputed: bool = True) -> Row | None:
    return next((row for row in costs(rows, method, recomputed) if row["n"] == n), None)


def stopped(rows: Rows, method: str) -> int | None:
    """The shortest context that a method had no memory for, layers computed again."""
    found = [row for row in of_kind(rows, "cost") if row["method"] == method and row["recomputed"]]
    return min((row["n"] for row in found if row["status"] != "ok"), default=None)


def has_memory(rows: Rows) -> bool:
    """Whether peak memory was measured."""
    return any(row.get("megabytes") is not None for row in of_kind(rows, "cost"))


def pairs(rows: Rows, one: str, other: str) -> list[tuple[Row, Row]]:
    """Both methods at the contexts that both had."""
    both = [(row, cost_at(rows, other, row["n"])) for row in costs(rows, one)]
    return [(a, b) for a, b in both if b is not None]


def curve_of(rows: Rows, method: str, n: int) -> Row:
    return next(row for row in of_kind(rows, "curve") if (row["method"], row["n"]) == (method, n))


def last(losses: list[float]) -> float:
    """Mean of the last quarter."""
    some = losses[-max(1, len(losses) // 4) :]
    return sum(some) / len(some)


def tuned(rows: Rows) -> list[dict[tuple[str, int], Row]]:
    """The runs of each model with real weights, by method and order. One that was stopped on the way is left out."""
    found: dict[str, dict[tuple[str, int], Row]] = {}
    for row in of_kind(rows, "tuned"):
        found.setdefault(row["model"], {})[row["method"], row["order"]] = row
    return [runs for runs in found.values() if runs.keys() >= set(COMPARED) and are_alike([*runs.values()])]


def are_alike(runs: Rows) -> bool:
    return all(row[name] == runs[0][name] for row in runs for name in SHARED)
