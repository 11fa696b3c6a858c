"""Ways to look at the rows."""

from __future__ import annotations

from experiments.experiment import Row, Rows
from experiments.shakespeare.methods import NAMES
from experiments.words import change, finite

MAY_DIVERGE = ("train", "validation", "mean", "max")


def contexts(rows: Rows) -> list[int]:
    return sorted({row["context"] for row in rows})


def methods(rows: Rows, context: int) -> list[str]:
    """In the order of their names' table."""
    there = {row["method"] for row in rows if row["context"] == context}
    return [name for name in NAMES if name in there]


def curve(rows: Rows, context: int, method: str) -> dict[int, Row]:
    """Evaluations by iteration, in order; infinity where a number was not finite."""
    mine = [row for row in rows if (row["kind"], row["context"], row["method"]) == ("evaluation", context, method)]
    whole = [{**row, **{name: finite(row[name]) for name in MAY_DIVERGE}} for row in mine]
    return {row["iteration"]: row for row in sorted(whole, key=lambda row: row["iteration"])}


def end(rows: Rows, context: int, method: str) -> Row:
    return next(row for row in rows if (row["kind"], row["context"], row["method"]) == ("end", context, method))


def beside_exact(rows: Rows, context: int, method: str) -> list[tuple[Row, Row]]:
    """Evaluations of a method and of exact attention at the iterations that both have reached, in order."""
    mine, exact = curve(rows, context, method), curve(rows, context, "exact")
    return [(mine[i], exact[i]) for i in mine if i in exact]


def gap(pair: tuple[Row, Row]) -> float:
    """How much larger the validation perplexity is than with exact attention: 0.05 is 5%."""
    return change(pair[0]["validation"], pair[1]["validation"])


def best(found: list[Row]) -> Row:
    return min(found, key=lambda row: row["validation"])


def gap_of_best(pairs: list[tuple[Row, Row]]) -> float:
    """The gap between the best models of both, whenever they were."""
    return gap((best([mine for mine, _ in pairs]), best([exact for _, exact in pairs])))
