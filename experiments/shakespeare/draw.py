"""Perplexity over training with its gap to exact attention, and the error of attention over training."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from experiments.experiment import Rows
from experiments.look import CORAL, INK, OCHRE, PLUM, QUIET, SAGE, panels, styled
from experiments.shakespeare.methods import NAMES
from experiments.shakespeare.select import beside_exact, contexts, curve, gap, methods

COLORS = {"exact": INK, "topk-5": OCHRE, "topk": SAGE, "tail": PLUM, "cells": CORAL, "cells-default": CORAL}
DASHED = "cells-default"


@styled
def draw(rows: Rows) -> dict[str, Figure]:
    return {"shakespeare": perplexities(rows), "shakespeare-errors": errors(rows)}


def perplexities(rows: Rows) -> Figure:
    """Above: perplexity; below: how much larger than with exact attention on the validation text."""
    lengths = contexts(rows)
    figure, axes = panels(2, len(lengths), 11.5, 7.6, sharex="col", height_ratios=(1.5, 1))
    for (above, below), context in zip(axes.T, lengths, strict=True):
        for name in methods(rows, context):
            found = curve(rows, context, name)
            line(above, list(found), [row["validation"] for row in found.values()], name)
            above.plot(list(found), [row["train"] for row in found.values()], ":", color=COLORS[name], linewidth=1.1)
            pairs = beside_exact(rows, context, name)
            line(below, [mine["iteration"] for mine, _ in pairs], [100 * gap(pair) for pair in pairs], name)
        above.set(yscale="log", title=f"Perplexity of a character, context {context:,}")
        curves = [list(curve(rows, context, name).values()) for name in methods(rows, context)]
        low = min(min(row["train"], row["validation"]) for found in curves for row in found)
        plain_numbers(above, low, max(5 * low, *(found[-1]["validation"] for found in curves)))
        below.set(title="Validation perplexity, above that of exact attention", xlabel="iterations")
        below.yaxis.set_major_formatter(lambda y, _: f"{y:+g}%" if y else "0%")
        below.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    axes[0, 0].set_ylabel("perplexity (dotted: on the text of training)")
    legend(figure, axes[0], rows, ("training text", ":"))
    return figure


def errors(rows: Rows) -> Figure:
    """Mean error of a row as a line, the largest dotted."""
    lengths = contexts(rows)
    figure, axes = panels(1, len(lengths), 11.5, 4.6, sharey=True)
    for axis, context in zip(axes[0], lengths, strict=True):
        for name in methods(rows, context):
            # Exact attention in float32 is what the others are compared with.
            found = {i: row for i, row in curve(rows, context, name).items() if row["mean"] > 0 and row["max"] > 0}
            line(axis, list(found), [row["mean"] for row in found.values()], name)
            axis.plot(list(found), [row["max"] for row in found.values()], ":", color=COLORS[name], linewidth=1.3)
        axis.set(yscale="log", title=f"Error of a row of attention, context {context:,}", xlabel="iterations")
        axis.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axis.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
    axes[0, 0].set_ylabel("||estimate − exact|| / ||exact||")
    legend(figure, axes[0], rows, ("largest row", ":"))
    return figure


def line(axis: Any, x: list[int], y: list[float], name: str) -> None:
    """With a dot where it ends, which for some is before the others do."""
    style = "--" if name == DASHED else "-"
    axis.plot(x, y, style, color=COLORS[name], linewidth=2.4 if name == "exact" else 1.7, marker="o", markevery=[-1])


def plain_numbers(axis: Any, low: float, high: float) -> None:
    """Perplexities from `low` to `high` as numbers; what was there before training is beyond the top."""
    marks = (1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20, 30, 40, 50, 60, 70, 80, 100)
    drawn = axis.get_ylim()[1]
    axis.set_ylim(low / 1.08, max(min(drawn, 1.08 * high), low * 1.2))
    shown = [mark for mark in marks if axis.get_ylim()[0] <= mark <= axis.get_ylim()[1]]
    axis.set_yticks(shown, [f"{mark:g}" for mark in shown])
    axis.minorticks_off()


def legend(figure: Figure, axes: Any, rows: Rows, other: tuple[str, str]) -> None:
    axis = axes[0]
    for name in NAMES:
        if any(row["method"] == name for row in rows):
            axis.plot([], [], "--" if name == DASHED else "-", color=COLORS[name], label=NAMES[name])
    axis.plot([], [], other[1], color=QUIET, label=other[0])
    figure.legend(*axis.get_legend_handles_labels(), loc="outside upper center", ncols=7)
