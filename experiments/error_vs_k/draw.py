"""Error against k: the paper's figure for several B, and three methods against the keys that they look at."""

from __future__ import annotations

from typing import Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from experiments.error_vs_k.select import lengths, over_seeds, powers, spreads
from experiments.error_vs_k.spreads import AUTHORS, FIGURE, named
from experiments.experiment import Rows
from experiments.look import CORAL, INK, QUIET, SAGE, band, end_labels, panels, styled
from experiments.words import middle

METHODS = {"topk": ("top k", INK), "tail": ("top k/2 + k/2 sampled", SAGE), "cells": ("cells", CORAL)}


@styled
def draw(rows: Rows) -> dict[str, Figure]:
    return {"error-vs-k": by_spread(rows), "error-vs-k-methods": by_method(rows)}


def by_spread(rows: Rows) -> Figure:
    """Mean and largest error of a row against k, a line for each B."""
    sizes = lengths(rows)
    figure, axes = panels(1, 2 * len(sizes) if len(sizes) < 2 else 3, 13, 4.6)
    wanted = [(n, "mean_additive") for n in sizes] + [(sizes[-1], "max_additive")]
    values = spreads(rows)
    colors = plt.get_cmap("crest_r" if "crest_r" in plt.colormaps() else "YlGnBu")
    for axis, (n, what) in zip(axes[0], wanted, strict=True):
        marks = powers(rows, n)
        x = [k for _, k in marks]
        ends: list[tuple[float, float, str, Any]] = []
        for i, spread in enumerate(values):
            paper = spread == FIGURE
            color = CORAL if paper else colors(0.35 + 0.65 * i / max(1, len(values) - 1))
            line = "-" if spread in AUTHORS else "--"
            each = [over_seeds(rows, n, spread, "topk", power, what) for power, _ in marks]
            band(axis, x, each, color, marker="o", linestyle=line, linewidth=2.4 if paper else 1.6)
            ends.append((float(x[-1]), middle(each[-1]), named(spread) if paper else f"B = {spread:g}", color))
        name = "Mean" if what.startswith("mean") else "Largest"
        axis.set_title(f"{name} error of a row, top k, n = {n:,}")
        _counts(axis, marks)
        axis.set_ylim(None, 3)
        end_labels(axis, _joined(ends), height=280)
    axes[0, 0].set_ylabel("||estimate − exact|| / rms norm of the values")
    return figure


def _joined(ends: list[tuple[float, float, str, Any]]) -> list[tuple[float, float, str, Any]]:
    """One label for lines that end in the same place."""
    found: list[tuple[float, float, str, Any]] = []
    for x, y, label, color in sorted(ends, key=lambda end: end[1]):
        if found and y < 1.25 * found[-1][1] and "(" not in label + found[-1][2]:
            x, y, before, color = found.pop()
            both = [*before.removeprefix("B = ").split(", "), label.removeprefix("B = ")]
            label = f"B = {', '.join(sorted(both, key=float))}"
        found.append((x, y, label, color))
    return found


def by_method(rows: Rows) -> Figure:
    """The three methods side by side, a panel for each B."""
    n = lengths(rows)[-1]
    values = spreads(rows)
    shown = [values[round(i * (len(values) - 1) / 3)] for i in range(4)] if len(values) > 4 else values
    figure, axes = panels(1, len(shown), 13, 4.2, sharey=True)
    marks = powers(rows, n)
    for axis, spread in zip(axes[0], shown, strict=True):
        for method, (_, color) in METHODS.items():
            for what, line in (("mean_additive", "-"), ("max_additive", ":")):
                each = [over_seeds(rows, n, spread, method, power, what) for power, _ in marks]
                keys = [middle(over_seeds(rows, n, spread, method, power, "keys")) for power, _ in marks]
                marker = "o" if line == "-" else None
                floor = [[max(value, 1e-7) for value in values] for values in each]
                band(axis, keys, floor, color, linestyle=line, marker=marker, linewidth=2 if line == "-" else 1.2)
        axis.set_title(f"{named(spread)}, logit sd {spread**2 / 3:.2g}")
        _counts(axis, marks, "keys per query, measured")
    axes[0, 0].set_ylim(4e-8, 4)
    for label, color in METHODS.values():
        axes[0, 0].plot([], [], "o-", color=color, label=label)
    axes[0, 0].plot([], [], ":", color=QUIET, label="largest row")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=4)
    axes[0, 0].set_ylabel(f"error of a row over the rms norm of V, n = {n:,}")
    return figure


def _counts(axis: Any, marks: list[tuple[str, int]], xlabel: str = "keys per query, k") -> None:
    """k on a logarithmic axis, named as the paper names it; neighbours a line apart."""
    axis.set(xscale="log", yscale="log", xlabel=xlabel)
    by_size: dict[int, list[str]] = {}
    for name, k in marks:
        by_size.setdefault(k, []).append(f"${name}$" if "^" in name else name)
    labels = []
    for i, (k, names) in enumerate(by_size.items()):
        named = " = ".join(name for name in names if name != "3")
        labels.append("\n\n" * (i % 2) + f"{k}\n{named}".rstrip())
    axis.set_xticks(list(by_size), labels)
    axis.minorticks_off()
