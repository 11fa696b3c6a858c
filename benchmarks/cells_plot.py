"""The plot of bench_cells.py: time of SDPA and Cells against length, and the error of Cells."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

SDPA, CELLS, WASH, QUIET = "#3d405b", "#e07a5f", "#fbe9e3", "#8d8f9e"
HALO = {"facecolor": "white", "edgecolor": "none", "pad": 0.8, "alpha": 0.8}


def plot(sections: dict[str, Any], folder: Path) -> None:
    """`cells.png`, from those of the sections `forward`, `training` and `scaling` that have been measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [name for name in ("forward", "training") if name in sections]
    if not panels:
        print("nothing to draw yet: measure forward or training")
        return
    style = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold"}
    with plt.rc_context(style):
        width = [1.25 if name == "forward" and "scaling" in sections else 1.0 for name in panels]
        figure, axes = plt.subplots(
            1, len(panels) + 1, figsize=(4.2 * (sum(width) + 0.8), 4.3), width_ratios=[*width, 0.8], constrained_layout=True
        )
        titles = {"forward": "Forward pass, no mask", "training": "Forward and backward, causal"}
        for axis, name in zip(axes, panels, strict=False):
            _draw_times(axis, sections[name], sections.get("scaling") if name == "forward" else None)
            axis.set_title(titles[name], loc="left")
        axes[0].set_ylabel("seconds, one head of 64, float32, CPU")
        _draw_errors(axes[-1], sections)
        figure.savefig(folder / "cells.png", dpi=160)
        plt.close(figure)


def _draw_times(axis: Any, results: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    rows = results["rows"]
    sizes = [row["n"] for row in rows]
    sdpa, cells = ([statistics.median(row["seconds"][name]) for row in rows] for name in ("sdpa", "cells"))
    axis.set_yscale("log")
    faster = [a >= b for a, b in zip(sdpa, cells, strict=True)]
    axis.fill_between(sizes, cells, sdpa, where=faster, interpolate=True, color=WASH, zorder=0, linewidth=0)
    axis.plot(sizes, sdpa, "o-", color=SDPA, markersize=4)
    axis.plot(sizes, cells, "o-", color=CELLS, markersize=4, linewidth=2.2)
    ends = {"SDPA": (sizes[-1], sdpa[-1], SDPA), "Cells": (sizes[-1], cells[-1], CELLS)}
    beyond = [row for row in scaling["rows"] if row["n"] > sizes[-1]] if scaling else []
    if scaling and beyond:
        x = [sizes[-1], *(row["n"] for row in beyond)]
        y = [cells[-1], *(statistics.median(row["seconds"]) for row in beyond)]
        axis.plot(x, y, "o-", color=CELLS, markersize=4, linewidth=2.2)
        axis.plot(x, [sdpa[-1] * (n / sizes[-1]) ** 2 for n in x], ":", color=SDPA, linewidth=1.2)
        quadratic = sdpa[-1] * (x[-1] / sizes[-1]) ** 2
        ends = {"SDPA, $n^2$ (not run)": (x[-1], quadratic, SDPA), "Cells": (x[-1], y[-1], CELLS)}
        sizes = [*sizes, *x[1:]]
        axis.text(
            math.sqrt(x[0] * x[-1]), 0.5 * math.sqrt(y[0] * y[-1]), f"$n^{{{scaling['exponent']:.2f}}}$", color=CELLS, ha="left"
        )
    for label, (n, seconds, color) in ends.items():
        axis.annotate(label, (n, seconds), (-4, 8), textcoords="offset points", color=color, ha="right", weight="bold")
    for row, above, below in zip(rows, sdpa, cells, strict=True):
        ratio = row["sdpa_over_cells"]
        if ratio >= 3:
            axis.text(row["n"], math.sqrt(above * below), f"{ratio:.1f}×", ha="center", va="center", fontsize=8, bbox=HALO)
        elif ratio > 1:  # no room between the lines
            axis.annotate(f"{ratio:.1f}×", (row["n"], above), (-4, 3), textcoords="offset points", ha="right", fontsize=8)
    if results["crossover"]:
        axis.axvline(results["crossover"], color=QUIET, linestyle=(0, (2, 2)), linewidth=1, zorder=0)
        label = f" equal at {results['crossover']:,.0f}"
        axis.text(results["crossover"], 0.97, label, transform=axis.get_xaxis_transform(), color=QUIET, va="top", fontsize=8)
    axis.margins(y=0.09)
    _lengths(axis, sizes)
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:g}")


def _draw_errors(axis: Any, sections: dict[str, Any]) -> None:
    kinds = {"forward": ("no mask", "-", "o"), "training": ("causal", "--", "s")}
    sizes: list[int] = []
    for name, (label, line, marker) in kinds.items():
        if name not in sections:
            continue
        rows = list(sections[name]["rows"])
        if name == "forward" and "scaling" in sections:
            rows += [row for row in sections["scaling"]["rows"] if row["n"] > rows[-1]["n"]]
        x = [row["n"] for row in rows]
        sizes = sorted({*sizes, *x})
        for key, color, what in (("mean_relative", CELLS, "mean"), ("p95_relative", SDPA, "95th percentile")):
            y = [row["errors"][key] for row in rows]
            axis.plot(x, y, line, marker=marker, color=color, markersize=4, label=f"{what}, {label}")
    axis.set_yscale("log")
    axis.set_title("Relative error of a row", loc="left")
    axis.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
    low, high = axis.get_ylim()
    axis.set_ylim(low / 1.5, high * 4)
    axis.legend(fontsize=8, frameon=False, loc="upper left")
    _lengths(axis, sizes)


def _lengths(axis: Any, sizes: list[int]) -> None:
    axis.set(xscale="log", xlabel="keys and queries, n")
    shown = sizes if len(sizes) <= 7 else sizes[:: -(-len(sizes) // 7)]
    axis.set_xticks(shown, [f"{n // 1024}k" if n < 2**20 else f"{n // 2**20}M" for n in shown])
    axis.minorticks_off()
    axis.grid(alpha=0.25, linewidth=0.6)
