"""Time and memory against length, with where each method stops, and the paper's own numbers."""

from __future__ import annotations

import re
from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.efficiency.methods import DIM, HEADS, NAMES
from experiments.efficiency.paper import MARKS
from experiments.experiment import Rows
from experiments.look import CORAL, INK, OCHRE, PLUM, QUIET, SAGE, alike, lengths, panels, say, styled

COLORS = {"naive": PLUM, "sdpa": INK, "topk-sqrt": SAGE, "topk-fourth": OCHRE, "cells": CORAL}


@styled
def draw(rows: Rows) -> dict[str, Figure]:
    figure, axes = panels(2, 2, 11.5, 7.6, sharex=True)
    for column, causal in enumerate((True, False)):
        mine = [row for row in rows if row["causal"] == causal]
        title = "causal, as in the paper's listing" if causal else "no mask"
        curves(axes[0, column], mine, "seconds")
        curves(axes[1, column], mine, "megabytes")
        axes[0, column].set_title(f"Time, {title}")
        axes[1, column].set_title(f"Peak memory beyond the inputs, {title}")
        if causal:
            paper(axes[0, column], max(row["n"] for row in rows))
    dtypes = " and ".join(sorted({row["dtype"] for row in rows}))
    axes[0, 0].set_ylabel(f"seconds, {HEADS} heads of {DIM}, {dtypes}")
    axes[1, 0].set_ylabel("megabytes")
    sizes = sorted({row["n"] for row in rows})
    for axis in axes.flat:
        axis.set_yscale("log")
        lengths(axis, sizes)
        axis.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.25)
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    for axis in axes[0]:
        axis.set_xlabel("")
        axis.tick_params(labelbottom=True)
    for pair in axes:
        alike(pair, 1.6)
    ran = [method for method in COLORS if any(row["method"] == method for row in rows)]
    handles: list[Any] = [Line2D([], [], color=COLORS[method], marker="o", label=label(method)) for method in ran]
    handles.append(Line2D([], [], color=QUIET, linestyle=":", marker="x", markersize=6, label="beyond the limit of a call"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return {"efficiency": figure}


def curves(axis: Any, rows: Rows, what: str) -> None:
    """One line per method, upright strokes from the fastest to the slowest round; dotted to a cross where the next length
    would pass the limit of this panel."""
    for method, color in COLORS.items():
        mine = [row for row in rows if row["method"] == method]
        ran = [row for row in mine if row["status"] == "ok"]
        if not ran:
            continue
        x, y = [row["n"] for row in ran], [max(row[what], 1.0 if what == "megabytes" else 1e-4) for row in ran]
        axis.plot(x, y, "o-", color=color, linewidth=2.4 if method == "cells" else 1.6)
        if what == "seconds":
            axis.vlines(x, [row["fastest"] for row in ran], [row["slowest"] for row in ran], color=color, linewidth=1)
        stopped = next((row for row in mine if row["status"] != "ok"), None)
        if stopped is not None and (stopped["status"] == "time") == (what == "seconds"):
            limit = stopped["limit"] * (1024 if what == "megabytes" else 1)
            reached = stopped["predicted"] or max(limit, y[-1])
            axis.plot([x[-1], stopped["n"]], [y[-1], reached], ":", color=color, linewidth=1.1)
            axis.plot([stopped["n"]], [reached], "x", color=color, markersize=6, markeredgewidth=1.6)


def paper(axis: Any, longest: int) -> None:
    """The paper's times, as open diamonds."""
    for mark in MARKS:
        if mark.n > longest:
            continue
        color = COLORS[mark.method]
        axis.plot([mark.n], [mark.seconds], "D", markerfacecolor="none", color=color, markersize=7, markeredgewidth=1.6)
        say(axis, mark.n, mark.seconds, f"paper: {mark.said()}", color, (9, 0), weight="normal", fontsize=8)


def label(method: str) -> str:
    """The method's name with its powers as matplotlib wants them."""
    return re.sub(r"(\w+\^\{[^}]*\})", r"$\1$", NAMES[method])
