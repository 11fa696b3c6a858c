"""Ways to look at the rows."""

from __future__ import annotations

from experiments.error_vs_k.spreads import AUTHORS
from experiments.experiment import Rows


def spreads(rows: Rows) -> list[float]:
    return sorted({row["B"] for row in rows})


def authors(rows: Rows) -> list[float]:
    """The B among them that the authors use."""
    return [spread for spread in spreads(rows) if spread in AUTHORS]


def lengths(rows: Rows) -> list[int]:
    return sorted({row["n"] for row in rows})


def powers(rows: Rows, n: int) -> list[tuple[str, int]]:
    """The names of k and their sizes, ascending."""
    return sorted({(row["power"], row["k"]) for row in rows if row["n"] == n}, key=lambda pair: (pair[1], pair[0]))


def over_seeds(rows: Rows, n: int, spread: float, method: str, power: str, what: str) -> list[float]:
    wanted = (n, spread, method, power)
    return [row[what] for row in rows if (row["n"], row["B"], row["method"], row["power"]) == wanted]
