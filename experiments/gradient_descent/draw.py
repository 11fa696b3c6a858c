"""Loss against steps: a row for what moves, a column for each loss; then the larger N and single gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.experiment import Rows
from experiments.gradient_descent.losses import LOSSES
from experiments.gradient_descent.select import gradient_error, of_kind, paths
from experiments.look import CORAL, INK, OCHRE, QUIET, SAGE, panels, say, styled
from experiments.words import middle

STYLES: dict[str, dict[str, Any]] = {
    "exact-qv": {"color": INK, "linewidth": 2.6, "label": "exact"},
    "printed-qv": {"color": SAGE, "linewidth": 1.6, "label": "as printed, ε = 0.05"},
    "exact": {"color": INK, "linewidth": 2.6, "label": "exact"},
    "printed": {"color": SAGE, "linewidth": 1.6, "label": "as printed, ε = 0.05"},
    "walks": {"color": CORAL, "linewidth": 1.6, "label": "64 shared walks per row"},
    "topk": {"color": OCHRE, "linewidth": 1.6, "label": "gradient of TopK + tail"},
    "cells": {"color": CORAL, "linewidth": 1.6, "label": "gradient of Cells"},
}
MOVING = {"Q and V move, as in the paper": ("exact-qv", "printed-qv"), "Q, K and V move": ("exact", "printed", "walks", "topk")}


@styled
def draw(rows: Rows) -> dict[str, Figure]:
    return {"gradient-descent": descents(of_kind(rows, "descent")), "gradient-descent-large": beyond(rows)}


def descents(rows: Rows) -> Figure:
    rates = sorted({row["rate"] for row in rows})
    shown = {rates[0]: ":", rates[-1]: "-"}
    figure, axes = panels(2, len(LOSSES), 14, 6.2, sharex=True)
    for line, (title, names) in enumerate(MOVING.items()):
        for column, loss in enumerate(LOSSES):
            axis = axes[line, column]
            limits: list[float] = []
            for name in names:
                for rate, dashes in shown.items():
                    limits += curve(axis, paths(rows, loss, rate, name), name, dashes)
            axis.set_title(loss if line == 0 else "")
            low, high = min(limits), max(limits)
            axis.set_ylim(low - 0.06 * (high - low), high + 0.12 * (high - low))
            if line:
                axis.set_xlabel("step")
        axes[line, 0].set_ylabel(f"{title}\nloss / loss at the start")
    for name in MOVING["Q, K and V move"]:
        axes[0, 0].plot([], [], color=STYLES[name]["color"], linewidth=2, label=STYLES[name]["label"])
    for rate, dashes in shown.items():
        axes[0, 0].plot([], [], dashes, color=QUIET, label=f"learning rate {rate:g}")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside upper center", ncols=6)
    return figure


def curve(axis: Any, found: list[list[float | None]], name: str, dashes: str) -> list[float]:
    """Median and range over seeds. Returns what the axis should show: of exact descents all, of others not beyond the start."""
    longest = max(len(path) for path in found)
    table = np.full((len(found), longest), np.nan)
    for i, path in enumerate(found):
        table[i, : len(path)] = [np.nan if value is None else value for value in path]
    table /= table[:, :1]
    steps = np.arange(longest)
    style = STYLES[name]
    alive = ~np.isnan(table).all(0)
    low, mid, high = (how(table[:, alive], 0) for how in (np.nanmin, np.nanmedian, np.nanmax))
    axis.fill_between(steps[alive], low, high, color=style["color"], alpha=0.13, linewidth=0)
    axis.plot(steps[alive], mid, dashes, color=style["color"], linewidth=style["linewidth"])
    start = float(np.nanmax(table[:, 0]))
    return [start, *(float(value) for value in mid if value <= start)]


def beyond(rows: Rows) -> Figure:
    """Left: the larger N. Middle: its seconds. Right: errors of one gradient at the paper's N."""
    large, single = of_kind(rows, "large"), of_kind(rows, "gradient")
    figure, axes = panels(1, 3, 13, 4.2)
    left, middle_axis, right = axes[0]
    names = list(dict.fromkeys(row["estimator"] for row in large))
    colors = {"exact": INK, "walks": SAGE, "topk": OCHRE, "cells": CORAL}
    labels = {"exact": "exact", "walks": "8 walks per row", "topk": "TopK + tail", "cells": "Cells"}
    limits: list[float] = []
    for name in names:
        mine = [row for row in large if row["estimator"] == name]
        for row in mine:
            values = [np.nan if value is None else value for value in row["losses"]]
            left.plot(values, "o-", color=colors[name], alpha=0.9, linewidth=2.4 if name == "exact" else 1.4)
        limits += [value for row in mine for value in row["losses"] if value is not None and value <= 1.2 * row["losses"][0]]
    count, rate, loss = (large[0][name] for name in ("N", "rate", "loss"))
    left.set(xlabel="step", ylabel=f"loss per row, {loss}", title=f"N = {count:,}, learning rate {rate:g}")
    span = max(limits) - min(limits)
    left.set_ylim(min(limits) - 0.08 * span, max(limits) + 0.08 * span)
    heights = [middle(row["seconds"] for row in large if row["estimator"] == name) for name in names]
    middle_axis.barh(
        [labels[name] for name in names][::-1], heights[::-1], color=[colors[name] for name in names][::-1], height=0.6
    )
    for i, height in enumerate(heights[::-1]):
        say(middle_axis, height, i, f"{height:.2g} s", INK, (4, 0), weight="normal")
    middle_axis.set(xlabel="seconds for one gradient", title=f"Time, N = {count:,}")
    middle_axis.margins(x=0.15)
    middle_axis.grid(axis="y", visible=False)
    for tick, name in zip(middle_axis.get_yticklabels(), names[::-1], strict=True):
        tick.set_color(colors[name])
        tick.set_fontweight("bold")
    grouped(right, single)
    return figure


def grouped(axis: Any, single: Rows) -> None:
    """Relative error of D^Q, D^K, D^V by estimator."""
    names = {
        "printed": ("as printed", SAGE),
        "shifted": ("lift (D$^V$)", QUIET),
        "signed": ("signs (D$^V$)", INK),
        "walks": ("64 walks per row", CORAL),
    }
    names |= {"topk": ("TopK + tail", OCHRE)}
    gap = 0.0
    ticks = []
    for which, label in (("query", "$D^Q$"), ("key", "$D^K$"), ("value", "$D^V$")):
        first = gap
        for name, (_, color) in names.items():
            error = gradient_error(single, name, which)
            if error is None:
                continue
            axis.bar([gap], [error], color=color, width=0.85)
            axis.text(gap, error * 1.08, f"{error:.2g}", ha="center", fontsize=7.5, color=color)
            gap += 1
        ticks.append(((first + gap - 1) / 2, label))
        gap += 0.8
    axis.set_xticks([place for place, _ in ticks], [label for _, label in ticks])
    axis.set(yscale="log", title=f"Relative error of one gradient, N = {single[0]['N']:,}")
    axis.axhline(1, color=QUIET, linestyle=":", linewidth=1)
    axis.text(0.0, 1.1, " the zero vector", transform=axis.get_yaxis_transform(), fontsize=7.5, color=QUIET)
    for _, (label, color) in names.items():
        axis.bar([0], [0], color=color, label=label)
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * 6)
    axis.legend(loc="upper right", fontsize=7.5, ncols=2)
    axis.grid(axis="x", visible=False)
