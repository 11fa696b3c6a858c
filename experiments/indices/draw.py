"""Time, recall and memory against length, index by index."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.experiment import Rows
from experiments.indices.methods import DIM, NAMES, PLACES
from experiments.look import CORAL, INK, OCHRE, PLUM, QUIET, SAGE, alike, lengths, panels, say, styled

COLORS = {"sdpa": QUIET, "exact": INK, "kmeans": "#b5838d", "cells": CORAL, "ivf": SAGE, "hnsw": OCHRE, "lsh": PLUM}
WHATS = {"seconds": "Time", "recall": "Recall of the near set", "megabytes": "Peak memory"}
SLOPES = {"n^{3/2}": 1.5, "n^2": 2.0}


@styled
def draw(rows: Rows) -> dict[str, Figure]:
    figure, axes = panels(len(WHATS), len(PLACES), 13.0, 10.6, sharex=True)
    sizes = sorted({row["n"] for row in rows})
    for column, ((kind, causal), title) in enumerate(PLACES.items()):
        mine = [row for row in rows if row["kind"] == kind and row["causal"] == causal and row["status"] == "ok"]
        for line, (what, name) in enumerate(WHATS.items()):
            axis = axes[line, column]
            axis.set(title=f"{name}, {title}", yscale="linear" if what == "recall" else "log")
            curves(axis, mine, what)
            lengths(axis, sizes, "keys and queries, n" if line == len(WHATS) - 1 else "")
            axis.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.25)
            axis.tick_params(labelbottom=True)
            if what == "recall":
                axis.set_ylim(-0.03, 1.05)
            else:
                axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    alike(axes[0], 1.3)
    alike(axes[2], 1.3)
    for axis in axes[0]:
        slopes(axis, sizes)
    first = rows[0]
    many = f"{first['heads']} heads" if first["heads"] > 1 else "one head"
    axes[0, 0].set_ylabel(f"seconds, {many} of {DIM}, {first['dtype']}")
    axes[1, 0].set_ylabel("share of the k = $n^{1/2}$ best keys")
    axes[2, 0].set_ylabel("megabytes")
    drawn = [name for name in COLORS if any(row["method"].startswith(name) for row in rows)]
    handles: list[Any] = [Line2D([], [], color=COLORS[name], marker="o", label=NAMES[name]) for name in drawn]
    handles.append(Line2D([], [], color=QUIET, linestyle="--", label="with a tail (cells)"))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return {"indices": figure}


def curves(axis: Any, rows: Rows, what: str) -> None:
    """One line per method without a tail, and a dashed one for cells with one, whose near set is the same."""
    for method, color in COLORS.items():
        ran = [row for row in rows if row["method"] == method and row[what] is not None]
        axis.plot([row["n"] for row in ran], [row[what] for row in ran], "o-", color=color)
    drawn = [row for row in rows if row["method"] == "cells+tail"] if what != "recall" else []
    axis.plot([row["n"] for row in drawn], [row[what] for row in drawn], "--", color=COLORS["cells"])


def slopes(axis: Any, sizes: list[int]) -> None:
    """How steep n^{3/2} and n^2 are, from the lower left corner on."""
    low, high = axis.get_ylim()
    start = low * (high / low) ** 0.04
    for name, power in SLOPES.items():
        end = min(sizes[-1], sizes[0] * (0.1 * high / start) ** (1 / power))
        axis.plot([sizes[0], end], [start, start * (end / sizes[0]) ** power], ":", color=QUIET, linewidth=1)
        say(axis, end, start * (end / sizes[0]) ** power, f"${name}$", QUIET, (3, 0), weight="normal", fontsize=8)
