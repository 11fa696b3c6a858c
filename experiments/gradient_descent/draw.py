"""Loss against steps: a row for what moves, a column for each loss; then the larger N and single gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments.experiment import Rows
from experiments.gradient_descent.losses import LOSSES
from experiments.gradient_descent.names import COLORS, INPUTS, LABELS
from experiments.gradient_descent.select import errors_of, of_kind, paths, typical
from experiments.look import INK, QUIET, panels, say, styled
from experiments.words import number

MOVING = {"Q and V move, as in the paper": ("exact-qv", "printed-qv"), "Q, K and V move": ("exact", "printed", "walks", "topk")}
THICK, THIN = 2.6, 1.6


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
        axes[0, 0].plot([], [], color=COLORS[name], linewidth=2, label=LABELS[name])
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
    alive = ~np.isnan(table).all(0)
    low, mid, high = (how(table[:, alive], 0) for how in (np.nanmin, np.nanmedian, np.nanmax))
    axis.fill_between(steps[alive], low, high, color=COLORS[name], alpha=0.13, linewidth=0)
    axis.plot(steps[alive], mid, dashes, color=COLORS[name], linewidth=THICK if name.startswith("exact") else THIN)
    start = float(np.nanmax(table[:, 0]))
    return [start, *(float(value) for value in mid if value <= start)]


def beyond(rows: Rows) -> Figure:
    """Above: descents and seconds at the larger N. Below: errors of one gradient there and at the paper's N."""
    large, single = of_kind(rows, "large"), of_kind(rows, "gradient")
    figure, axes = panels(2, 2, 12, 7.6)
    long_descents(axes[0, 0], large)
    bars_of_time(axes[0, 1], of_kind(rows, "time"))
    bars_of_error(axes[1, 0], large, ("walks", "topk", "cells"))
    bars_of_error(axes[1, 1], single, ("printed", "signed", "walks", "topk"))
    return figure


def long_descents(axis: Any, large: Rows) -> None:
    loss, rate = large[0]["loss"], large[0]["rate"]
    limits: list[float] = []
    for name in dict.fromkeys(row["estimator"] for row in large):
        dashes = "--" if name == "exact-kv" else "-"
        limits += curve(axis, paths(large, loss, rate, name), name, dashes)
        axis.plot([], [], dashes, color=COLORS[name], label=LABELS[name])
    span = max(limits) - min(limits)
    axis.set_ylim(min(limits) - 0.08 * span, max(limits) + 0.08 * span)
    axis.set(xlabel="step", ylabel="loss / loss at the start")
    axis.set_title(f"N = {large[0]['N']:,}, {loss} loss, learning rate {rate:g}")
    axis.legend(loc="lower left")


def bars_of_time(axis: Any, times: Rows) -> None:
    """Medians, with lines from the fastest to the slowest."""
    labels = {**LABELS, "exact": "exact, nf.Exact"}
    for i, row in enumerate(reversed(times)):
        name = row["estimator"]
        axis.barh([i], [row["seconds"]], color=COLORS[name], height=0.6)
        axis.plot([row["fastest"], row["slowest"]], [i, i], color=QUIET, linewidth=1.2)
        say(axis, max(row["seconds"], row["slowest"]), i, f"{row['seconds']:.2g} s", INK, (5, 0), weight="normal")
    names = [row["estimator"] for row in reversed(times)]
    axis.set_yticks(range(len(names)), [labels[name] for name in names])
    for tick, name in zip(axis.get_yticklabels(), names, strict=True):
        tick.set_color(COLORS[name])
        tick.set_fontweight("bold")
    axis.set(xlabel="seconds for one gradient (line: fastest to slowest)", title=f"Time, N = {times[0]['N']:,}")
    axis.margins(x=0.15)
    axis.grid(axis="y", visible=False)


def bars_of_error(axis: Any, rows: Rows, names: Sequence[str]) -> None:
    """Relative error of D^Q, D^K, D^V by estimator: medians, with lines over the seeds."""
    place, ticks = 0.0, []
    for which, label in INPUTS.items():
        shown = [(name, found) for name in names if (found := [x for x in errors_of(rows, name, which) if np.isfinite(x)])]
        ticks.append((place + (len(shown) - 1) / 2, label))
        for name, found in shown:
            axis.bar([place], [typical(found)], color=COLORS[name], width=0.85)
            axis.plot([place, place], [min(found), max(found)], color=INK, linewidth=1)
            say(axis, place, max(found), number(float(f"{typical(found):.2g}")), COLORS[name], (0, 7), ha="center", fontsize=8)
            place += 1
        place += 0.8
    axis.set_xticks([x for x, _ in ticks], [f"${label}$" for _, label in ticks])
    axis.set(yscale="log", title=f"Relative error of one gradient, N = {rows[0]['N']:,}")
    axis.axhline(1, color=QUIET, linestyle=":", linewidth=1.2)
    say(axis, 1.0, 1.0, "zero\nvector", QUIET, (4, 0), xycoords=axis.get_yaxis_transform(), weight="normal", fontsize=8)
    for name in names:
        axis.bar([0], [0], color=COLORS[name], label=LABELS[name])
    low, high = axis.get_ylim()
    axis.set_ylim(low, high * 10)
    axis.legend(loc="upper right", ncols=2)
    axis.grid(axis="x", visible=False)
