"""The numbers behind the text."""

from __future__ import annotations

import math

from experiments.experiment import Rows, Table
from experiments.gradient_descent.losses import LOSSES
from experiments.gradient_descent.names import INPUTS, LABELS
from experiments.gradient_descent.say import between, off, reached
from experiments.gradient_descent.select import errors_of, gaps, progress, typical
from experiments.words import number


def progress_table(runs: Rows) -> Table:
    names = ("printed-qv", "printed", "walks", "topk")
    body = []
    for loss in LOSSES:
        for rate in sorted({row["rate"] for row in runs}):
            body.append([f"{loss}, {rate:g}", *(both(runs, loss, name, rate) for name in names)])
    return Table(
        "Share of the exact descent's fall of the loss that is reached, and the largest distance from its loss on the way, in "
        "parts of that fall; medians over seeds",
        ["loss, learning rate", *(LABELS[name] for name in names)],
        body,
    )


def both(runs: Rows, loss: str, name: str, rate: float) -> str:
    gap = typical(gaps(runs, loss, name, rate))
    return f"{reached(typical(progress(runs, loss, name, rate)))}, {off(gap)}" if math.isfinite(gap) else off(gap)


def error_table(single: Rows) -> Table:
    body = []
    for name in dict.fromkeys(row["estimator"] for row in single):
        cost = next(row["draws"] for row in single if row["estimator"] == name)
        body.append([LABELS[name], f"{cost:,}", *(between(errors_of(single, name, which), number) for which in INPUTS)])
    title = "One gradient at the start: relative error, median over seeds (smallest to largest)"
    return Table(title, ["", "draws", *INPUTS.values()], body)


def large_table(large: Rows) -> Table:
    body = []
    for name in dict.fromkeys(row["estimator"] for row in large):
        errors = [between(errors_of(large, name, which), number) for which in INPUTS]
        share = between(progress(large, large[0]["loss"], name), reached)
        body.append([LABELS[name], *errors, share])
    title = f"N = {large[0]['N']:,}: relative error of the first gradient, progress next to exact; medians over seeds"
    return Table(title, ["", *INPUTS.values(), "progress"], body)


def time_table(times: Rows) -> Table:
    first = times[0]
    labels = {**LABELS, "exact": "exact, by `Exact`, which calls SDPA"}
    body = [[labels[row["estimator"]], *(number(row[which]) for which in ("seconds", "fastest", "slowest"))] for row in times]
    title = f"N = {first['N']:,}: seconds of one gradient in {first['rounds']} rounds, fastest and slowest"
    return Table(title, ["", "median", "fastest", "slowest"], body)
