"""Ways to look at the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.experiment import Row, Rows
from experiments.shakespeare.methods import NAMES
from experiments.words import change, finite

MAY_DIVERGE = ("train", "validation", "mean", "max")
Pair = tuple[Row, Row]
"""Evaluations of a method and of exact attention, at one iteration of one seed."""


def seed_of(row: Row) -> int:
    """Rows that were saved when there was one seed do not name it."""
    return row.get("seed", 0)


def seeds(rows: Rows, context: int, method: str) -> list[int]:
    """Those whose training came to its end, or to the limit of its time."""
    return sorted(seed_of(row) for row in rows if (row["kind"], row["context"], row["method"]) == ("end", context, method))


def shared(rows: Rows, context: int, method: str) -> list[int]:
    """The seeds that exact attention has too."""
    return [seed for seed in seeds(rows, context, method) if seed in seeds(rows, context, "exact")]


def contexts(rows: Rows) -> list[int]:
    """Those with a model of exact attention: there is something to compare with."""
    return sorted({row["context"] for row in rows if (row["kind"], row["method"]) == ("end", "exact")})


def methods(rows: Rows, context: int) -> list[str]:
    """In the order of their names' table."""
    return [name for name in NAMES if shared(rows, context, name)]


def seed_counts(rows: Rows) -> list[int]:
    """How many seeds there are of every method in every context."""
    return [len(shared(rows, context, name)) for context in contexts(rows) for name in methods(rows, context)]


def curve(rows: Rows, context: int, method: str, seed: int) -> dict[int, Row]:
    """Evaluations by iteration, in order; infinity where a number was not finite."""
    asked = ("evaluation", context, method, seed)
    mine = [row for row in rows if (row["kind"], row["context"], row["method"], seed_of(row)) == asked]
    whole = [{**row, **{name: finite(row[name]) for name in MAY_DIVERGE}} for row in mine]
    return {row["iteration"]: row for row in sorted(whole, key=lambda row: row["iteration"])}


def curves(rows: Rows, context: int, method: str) -> list[Rows]:
    """Evaluations in order, one list for every seed."""
    return [list(curve(rows, context, method, seed).values()) for seed in shared(rows, context, method)]


def ends(rows: Rows, context: int, method: str) -> Rows:
    """One row for every seed."""
    asked = ("end", context, method)
    found = {seed_of(row): row for row in rows if (row["kind"], row["context"], row["method"]) == asked}
    return [found[seed] for seed in shared(rows, context, method)]


def beside_exact(rows: Rows, context: int, method: str) -> list[list[Pair]]:
    """For every seed, evaluations of a method and of exact attention at the iterations that both have reached, in order."""
    found = []
    for seed in shared(rows, context, method):
        mine, exact = curve(rows, context, method, seed), curve(rows, context, "exact", seed)
        found.append([(mine[i], exact[i]) for i in mine if i in exact])
    return found


def over_seeds(each: Sequence[Mapping[int, float]]) -> dict[int, list[float]]:
    """Numbers of all seeds, by the iterations that all of them have reached."""
    return {i: [found[i] for found in each] for i in each[0] if all(i in found for found in each)}


def gap(pair: Pair) -> float:
    """How much larger the validation perplexity is than with exact attention: 0.05 is 5%."""
    return change(pair[0]["validation"], pair[1]["validation"])


def best(found: Rows) -> Row:
    return min(found, key=lambda row: row["validation"])


def gap_of_best(pairs: list[Pair]) -> float:
    """The gap between the best models of both, whenever they were."""
    return gap((best([mine for mine, _ in pairs]), best([exact for _, exact in pairs])))
