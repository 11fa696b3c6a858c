"""The tables of the page: perplexities, errors and times, and what the models write."""

from __future__ import annotations

from experiments.experiment import Rows, Table
from experiments.shakespeare.methods import NAMES
from experiments.shakespeare.seeds import counted, numbers, percents, span
from experiments.shakespeare.select import best, curves, ends, methods, shared
from experiments.words import as_it_is, finite, seconds

HEAD = (
    "",
    "keys",
    "training",
    "validation",
    "best (iteration)",
    "with exact",
    "mean error",
    "largest",
    "a step",
    "as a graph",
)


def table(rows: Rows, context: int) -> Table:
    return Table(title(rows, context), HEAD, [line(rows, context, name) for name in methods(rows, context)])


def title(rows: Rows, context: int) -> str:
    seeds = len(shared(rows, context, "exact"))
    said = "one seed" if seeds == 1 else f"mean ± half the range from the least to the largest of {counted(seeds)}"
    asked = max(row["asked"] for name in methods(rows, context) for row in ends(rows, context, name))
    least = "" if seeds == 1 else " (the least of all seeds)"
    return (
        f"Context {context:,}: perplexities and errors of attention after {asked:,} iterations, {said}, and time of a step{least}"
    )


def line(rows: Rows, context: int, name: str) -> list[str]:
    found, last = curves(rows, context, name), ends(rows, context, name)
    bests = [best(each) for each in found]
    stopped = [row["iterations"] for row in last if row["stopped"]]
    fewer = len(last) < len(shared(rows, context, "exact"))
    step, graph = step_seconds(last), graph_seconds(last)
    return [
        NAMES[name] + (f", stopped at {span(stopped)}" if stopped else "") + (f", {counted(len(last))}" if fewer else ""),
        numbers([row["keys"] for row in last]),
        *(numbers([each[-1][what] for each in found]) for what in ("train", "validation")),
        f"{numbers([row['validation'] for row in bests])} ({span([row['iteration'] for row in bests])})",
        numbers([finite(row["swapped"]["exact"]) for row in last]) if name != "exact" else "–",
        *(percents([each[-1][what] for each in found]) for what in ("mean", "max")),
        *(seconds(took) if took is not None else "–" for took in (step, graph)),
    ]


def step_seconds(last: Rows) -> float | None:
    """The least of all seeds: what is computed takes as long with every seed, and a busy machine only adds to it. None where
    models were trained side by side."""
    return least_of(last, "seconds")


def graph_seconds(last: Rows) -> float | None:
    """Of a step that is captured as a graph, where there is one."""
    return least_of(last, "graph_seconds")


def least_of(last: Rows, what: str) -> float | None:
    return min((row[what] for row in last if row[what] is not None), default=None)


def samples(rows: Rows, context: int) -> Table:
    firsts = {name: ends(rows, context, name)[0] for name in methods(rows, context)}
    said = " ".join(firsts["exact"]["prompt"].split())
    body = [[NAMES[name], as_it_is(row["sample"])] for name, row in firsts.items()]
    seed = "" if len(shared(rows, context, "exact")) == 1 else ", of the first seed"
    return Table(f"What the models write, context {context:,}{seed}, after a prompt that ends in “{said}”", ["", "sample"], body)
