"""Time and recall against length, index by index."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.experiment import Rows
from experiments.indices.methods import NAMES, PLACES
from experiments.look import CORAL, INK, OCHRE, PLUM, QUIET, SAGE, lengths, panels, styled

COLORS = {"sdpa": QUIET, "exact": INK, "kmeans": CORAL, "cells": "#b5838d", "ivf": SAGE, "hnsw": OCHRE, "lsh": PLUM}


@styled
def draw(rows: Rows) -> dict[str, Figure]:
    figure, axes = panels(2, 3, 13.0, 7.6, sharex=True)
    for column, ((kind, causal), title) in enumerate(PLACES.items()):
        mine = [row for row in rows if row["kind"] == kind and row["causal"] == causal and row["status"] == "ok"]
        for method, color in COLORS.items():
            ran = [row for row in mine if row["method"] == method]
            axes[0, column].plot([row["n"] for row in ran], [row["seconds"] for row in ran], "o-", color=color)
            found = [row for row in ran if row["recall"] is not None]
            axes[1, column].plot([row["n"] for row in found], [row["recall"] for row in found], "o-", color=color)
        axes[0, column].set(yscale="log", title=f"Time, {title}")
        axes[1, column].set(ylim=(-0.03, 1.05), title=f"Recall of the near set, {title}")
    first = rows[0]
    many = f"{first['heads']} heads" if first["heads"] > 1 else "one head"
    axes[0, 0].set_ylabel(f"seconds, {many} of 64, {first['dtype']}")
    axes[1, 0].set_ylabel("share of the k = $n^{1/2}$ best keys")
    sizes = sorted({row["n"] for row in rows})
    for axis in axes.flat:
        lengths(axis, sizes)
        axis.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.25)
    low, high = min(axis.get_ylim()[0] for axis in axes[0]), max(axis.get_ylim()[1] for axis in axes[0])
    for axis in axes[0]:
        axis.set_ylim(low, high)
        axis.set_xlabel("")
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
    handles: list[Any] = [
        Line2D([], [], color=color, marker="o", label=NAMES[method])
        for method, color in COLORS.items()
        if any(row["method"] == method for row in rows)
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return {"indices": figure}
