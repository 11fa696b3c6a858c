"""Perplexity over training with its gap to exact attention, and the error of attention over training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from experiments.experiment import Rows
from experiments.look import CORAL, INK, OCHRE, PLUM, QUIET, SAGE, panels, styled
from experiments.shakespeare.methods import NAMES
from experiments.shakespeare.seeds import span
from experiments.shakespeare.select import beside_exact, contexts, curves, gap, methods, over_seeds, seed_counts

COLORS = {"exact": INK, "topk-5": OCHRE, "topk": SAGE, "tail": PLUM, "cells": CORAL, "cells-default": CORAL}
DASHED = "cells-default"
BAND = 0.2
"""How dark bands are."""


@styled
def draw(rows: Rows) -> dict[str, Figure]:
    """Nothing, where no model of exact attention is there to compare with."""
    return {"shakespeare": perplexities(rows), "shakespeare-errors": errors(rows)} if contexts(rows) else {}


def perplexities(rows: Rows) -> Figure:
    """Above: perplexity; below: how much larger than with exact attention on the validation text."""
    lengths = contexts(rows)
    figure, axes = panels(2, len(lengths), 11.5, 7.6, sharex="col", height_ratios=(1.5, 1))
    for (above, below), context in zip(axes.T, lengths, strict=True):
        shown, last = list[float](), list[float]()
        for name in methods(rows, context):
            found = {what: over(curves(rows, context, name), what) for what in ("train", "validation")}
            line(above, found["validation"], name)
            dotted(above, found["train"], name, 1.1)
            pairs = beside_exact(rows, context, name)
            line(
                below, over_seeds([{mine["iteration"]: 100 * gap((mine, exact)) for mine, exact in each} for each in pairs]), name
            )
            shown += [x for numbers in found.values() for values in numbers.values() for x in values]
            last += list(found["validation"].values())[-1]
        above.set(yscale="log", title=f"Perplexity of a character, context {context:,}")
        plain_numbers(above, min(shown), max(5 * min(shown), *last))
        below.set(title="Validation perplexity, above that of exact attention", xlabel="iterations")
        below.yaxis.set_major_formatter(lambda y, _: f"{y:+g}%" if y else "0%")
        below.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes[0, 0].set_ylabel("perplexity (dotted: on the text of training)")
    legend(figure, axes[0], rows, "training text")
    return figure


def errors(rows: Rows) -> Figure:
    """Mean error of a row as a line, the largest dotted."""
    lengths = contexts(rows)
    figure, axes = panels(1, len(lengths), 11.5, 4.6, sharey=True)
    for axis, context in zip(axes[0], lengths, strict=True):
        for name in methods(rows, context):
            found = {what: over(curves(rows, context, name), what) for what in ("mean", "max")}
            # Exact attention in float32 is what the others are compared with.
            line(axis, positive(found["mean"]), name)
            dotted(axis, positive(found["max"]), name, 1.3)
        axis.set(yscale="log", title=f"Error of a row of attention, context {context:,}", xlabel="iterations")
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axis.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
    axes[0, 0].set_ylabel("||estimate − exact|| / ||exact||")
    legend(figure, axes[0], rows, "largest row")
    return figure


Numbers = Mapping[int, Sequence[float]]
"""Those of all seeds, by iteration."""


def over(each: list[Rows], what: str) -> Numbers:
    return over_seeds([{row["iteration"]: row[what] for row in found} for found in each])


def positive(numbers: Numbers) -> Numbers:
    """Where all are, as a logarithmic axis needs it."""
    return {i: values for i, values in numbers.items() if min(values) > 0}


def line(axis: Any, numbers: Numbers, name: str) -> None:
    """The mean over seeds, with a dot where it ends, which for some is before the others do; from the least to the largest seed
    a band, where there are several."""
    style = "--" if name == DASHED else "-"
    width = 2.4 if name == "exact" else 1.7
    means = [mean(values) for values in numbers.values()]
    axis.plot(list(numbers), means, style, color=COLORS[name], linewidth=width, marker="o", markevery=[-1])
    if any(len(values) > 1 for values in numbers.values()):
        low, high = ([pick(values) for values in numbers.values()] for pick in (min, max))
        axis.fill_between(list(numbers), low, high, color=COLORS[name], alpha=BAND, linewidth=0)


def dotted(axis: Any, numbers: Numbers, name: str, width: float) -> None:
    means = [mean(values) for values in numbers.values()]
    axis.plot(list(numbers), means, ":", color=COLORS[name], linewidth=width)


def plain_numbers(axis: Any, low: float, high: float) -> None:
    """Perplexities from `low` to `high` as numbers; what was there before training is beyond the top."""
    marks = (1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 40, 50, 60, 70, 80, 100)
    drawn = axis.get_ylim()[1]
    axis.set_ylim(low / 1.08, max(min(drawn, 1.08 * high), low * 1.2))
    shown = [mark for mark in marks if axis.get_ylim()[0] <= mark <= axis.get_ylim()[1]]
    axis.set_yticks(shown, [f"{mark:g}" for mark in shown])
    axis.minorticks_off()


def legend(figure: Figure, axes: Any, rows: Rows, other: str) -> None:
    axis = axes[0]
    there = {name for context in contexts(rows) for name in methods(rows, context)}
    for name in NAMES:
        if name in there:
            axis.plot([], [], "--" if name == DASHED else "-", color=COLORS[name], label=NAMES[name])
    axis.plot([], [], ":", color=QUIET, label=other)
    handles, labels = axis.get_legend_handles_labels()
    seeds = seed_counts(rows)
    if max(seeds) > 1:
        handles.append(Patch(color=QUIET, alpha=BAND, linewidth=0))
        labels.append(f"mean, least and largest of {span(seeds)} seeds")
    figure.legend(handles, labels, loc="outside upper center", ncols=8)
