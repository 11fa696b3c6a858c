"""Four panels: lazy draws, coverage, sizes, approximate indices; then the bounds on gradients, and a real index."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from matplotlib.figure import Figure

from experiments.experiment import Rows
from experiments.look import CORAL, INK, OCHRE, PLUM, QUIET, SAGE, band, panels, say, short, styled
from experiments.theory.coverage import DELTA, PROMISES
from experiments.theory.gradients import SYMBOLS
from experiments.words import middle

SPREADS = (INK, SAGE, CORAL)
LINES = {
    "printed-signed": (CORAL, "--", "s"),
    "printed-positive": (CORAL, "--", "o"),
    "median": (CORAL, "-", "o"),
    "mean": (SAGE, "-", "o"),
    "tail-printed": (INK, "--", "o"),
    "tail": (INK, "-", "o"),
    "walks-printed": (PLUM, "--", "o"),
    "walks": (PLUM, "-", "o"),
    "audit": (OCHRE, "-", "o"),
}
"""Colour, line and marker of each promise; printed ones are dashed."""
GRADIENTS = {
    "dq-printed": (CORAL, "--", "o"),
    "dq": (CORAL, "-", "o"),
    "dk-printed": (INK, "--", "o"),
    "dk": (INK, "-", "o"),
}
"""Those of D^Q and D^K, which have a figure of their own."""


@styled
def draw(rows: Rows) -> dict[str, Figure]:
    figure, axes = panels(2, 2, 12, 8.4)
    lazy(axes[0, 0], [row for row in rows if row["kind"] == "lazy"])
    coverage(axes[0, 1], [row for row in rows if row["kind"] == "coverage"])
    sizes(axes[1, 0], [row for row in rows if row["kind"] == "sizes"])
    missed(axes[1, 1], [row for row in rows if row["kind"] == "missed"])
    return {
        "theory": figure,
        "theory-gradients": gradients(rows),
        "theory-index": lists([row for row in rows if row["kind"] == "kmeans"]),
    }


def lazy(axis: Any, rows: Rows) -> None:
    n = max(row["n"] for row in rows)
    rows = [row for row in rows if row["n"] == n]
    near = sorted({row["k"] for row in rows})
    axis.plot(near, [n / k for k in near], "--", color=QUIET)
    say(axis, near[-1], n / near[-1], "n / k (paper)", QUIET, weight="normal")
    for spread, color in zip(sorted({row["spread"] for row in rows}), SPREADS, strict=True):
        mine = [row for row in rows if row["spread"] == spread]
        closed = [middle(row["closed"] for row in mine if row["k"] == k) for k in near]
        band(axis, near, [[row["measured"] for row in mine if row["k"] == k] for k in near], color, marker="o", linestyle="none")
        axis.plot(near, closed, color=color, linewidth=1.2)
        label = "all keys tie" if spread == 0 else f"logit sd {spread:g}"
        say(axis, near[-1], closed[-1] / (1.25 if spread == 0 else 1), label, color)
    axis.set(xscale="log", yscale="log", xlabel="near keys, k", ylabel="far keys looked at by one draw, E[m]")
    axis.set_xticks(near, [f"{k:,}" for k in near])
    axis.minorticks_off()
    axis.set_xlim(near[0] / 1.2, near[-1] * 3.2)
    axis.set_title(f"Lazy Gumbel, n = {n:,}: measured (points), closed form (lines)")


def coverage(axis: Any, rows: Rows) -> None:
    shares = failures(axis, rows, LINES)
    axis.plot([shares[0], 1], [DELTA, DELTA], ":", color=QUIET, label="allowed (audit 0.05,\nprinted walks 1/n)")
    axis.set_xlim(shares[0] / 1.3, shares[0] ** -0.65)  # with room for the legend
    axis.legend(loc="center right", fontsize=7.5, handlelength=3)
    axis.set_title("How often the promises break")


def failures(axis: Any, rows: Rows, lines: Mapping[str, tuple[str, str, str]]) -> list[float]:
    """Failure rates of some promises against the share of the draws. Returns the shares."""
    for name, (color, line, marker) in lines.items():
        mine = sorted((row for row in rows if row["promise"] == name), key=lambda row: row["share"])
        rates = [row["broken"] / row["seeds"] for row in mine]
        error = [math.sqrt(max(rate * (1 - rate), 0) / row["seeds"]) for rate, row in zip(rates, mine, strict=True)]
        x = [row["share"] for row in mine]
        axis.plot(x, rates, color=color, linestyle=line, marker=marker, label=_marked(PROMISES[name].label))
        axis.errorbar(x, rates, yerr=error, fmt="none", ecolor=color, capsize=2)
    trials, shares = rows[0]["seeds"], sorted({row["share"] for row in rows})
    axis.set(
        xscale="log",
        xlabel="share of the draws (or rows) that the theorem asks for",
        ylabel=f"broken promises, of {trials} seeds",
    )
    axis.set_xticks(shares, ["1" if share == 1 else f"1/{round(1 / share)}" for share in shares])
    axis.minorticks_off()
    axis.set_ylim(-0.03, 1.03)
    return shares


def _marked(label: str) -> str:
    return re.sub(r"\w\^\{\w\}", lambda found: f"${found[0]}$", label.replace(">=", "≥"))


def gradients(rows: Rows) -> Figure:
    """The bounds on D^Q and D^K: how often they break, and what errors and the zero vector are next to them."""
    figure, axes = panels(1, 3, 13.5, 3.9)
    shares = failures(axes[0, 0], [row for row in rows if row["kind"] == "coverage"], GRADIENTS)
    axes[0, 0].plot([shares[0], 1], [DELTA, DELTA], ":", color=QUIET, label="allowed")
    axes[0, 0].legend()
    axes[0, 0].set_title("How often the bounds break")
    for axis, (which, symbol) in zip(axes[0, 1:], SYMBOLS.items(), strict=True):
        mine = [row for row in rows if row["kind"] == "gradients" and row["gradient"] == which]
        for form, line in (("printed", "--"), ("corrected", "-")):
            here = sorted((row for row in mine if row["form"] == form), key=lambda row: row["n"])
            lengths = [row["n"] for row in here]
            axis.plot(lengths, [row["error"] for row in here], line, marker="o", color=PLUM, label=f"estimate, {form}")
            axis.plot(lengths, [row["zero"] for row in here], line, marker="s", color=OCHRE, label=f"zero vector, {form}")
        axis.axhline(1, color=QUIET, linewidth=1)
        axis.set(xscale="log", yscale="log", xlabel="n", ylabel="largest error / bound (above 1: broken)")
        axis.set_xticks(lengths, [f"{n:,}" for n in lengths])
        axis.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        low, high = axis.get_ylim()
        axis.set_ylim(low, high * 12)  # with room for the legend
        axis.legend(loc="upper right", ncols=2)
        axis.set_title(f"${symbol}$, Gaussian inputs, ε = {mine[0]['eps']:g}")
    return figure


def sizes(axis: Any, rows: Rows) -> None:
    for n, color in zip(sorted({row["n"] for row in rows}), (PLUM, SAGE, INK), strict=True):
        for form, line in (("printed", ":"), ("corrected", "-")):
            mine = sorted((row for row in rows if row["n"] == n and row["form"] == form), key=lambda row: row["eps"])
            axis.plot(
                [row["eps"] for row in mine],
                [min(1.0, row["share"]) for row in mine],
                line,
                marker="o",
                color=color,
                linewidth=1.8,
            )
        say(axis, mine[-1]["eps"], mine[-1]["share"], f"n = {short(n)}", color)
    axis.plot([], [], ":", marker="o", color=QUIET, label="as printed, $n^{2/3}/ε$")
    axis.plot([], [], "-", marker="o", color=QUIET, label="corrected, $n^{1/2}/ε$")
    axis.axhline(1, color=QUIET, linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="ε", ylabel="keys asked for / n (at 1: everything)")
    marks = (0.02, 0.05, 0.1, 0.2, 0.5)
    axis.set_xticks(marks, [f"{mark:g}" for mark in marks])
    axis.tick_params(which="minor", bottom=False, labelbottom=False)
    axis.minorticks_off()
    axis.set_xlim(0.018, 0.85)
    axis.legend(loc="lower left")
    axis.set_title("Top k and sampled tail: near and sampled keys, δ = 0.1")


def missed(axis: Any, rows: Rows) -> None:
    gaps = sorted({row["gap"] for row in rows})
    for certified, color, label in (
        (False, CORAL, "printed cutoff, smallest near score"),
        (True, INK, "certified cutoff: noise of the draws"),
    ):
        each = [[row["tv"] for row in rows if row["gap"] == gap and row["certified"] == certified] for gap in gaps]
        band(axis, gaps, each, color, marker="o", linewidth=2)
        place, align = ((-6, 8), "right") if not certified else ((0, 9), "right")
        say(axis, gaps[-1], middle(each[-1]), label, color, place, ha=align)
    axis.set(xlabel="logit of the missed key above the smallest near one", ylabel="total variation between draws and softmax")
    axis.set_ylim(-0.02, None)
    axis.set_title(f"An index that misses one key (n = {rows[0]['n']}, k = {rows[0]['k']})")


def lists(rows: Rows) -> Figure:
    """Total variation and cost against probes for an inverted-list index."""
    figure, axes = panels(1, 3, 12.5, 3.6)
    probes = sorted({row["probes"] for row in rows})
    colors = {False: (CORAL, "printed cutoff"), True: (INK, "certified cutoff")}
    for certified, (color, label) in colors.items():
        mine = [row for row in rows if row["certified"] == certified]
        band(axes[0, 0], probes, [[row["tv"] for row in mine if row["probes"] == p] for p in probes], color, label, marker="o")
        band(axes[0, 1], probes, [[row["looked"] for row in mine if row["probes"] == p] for p in probes], color, marker="o")
    band(axes[0, 2], probes, [[row["recall"] for row in rows if row["probes"] == p] for p in probes], SAGE, "recall", marker="o")
    certain = [row for row in rows if row["certified"]]
    dense = [[row["dense"] for row in certain if row["probes"] == p] for p in probes]
    band(axes[0, 2], probes, dense, INK, "rows drawn densely", marker="o")
    axes[0, 0].set(ylabel="total variation", title=f"Draws against softmax, n = {rows[0]['n']}, k = {rows[0]['k']}")
    axes[0, 1].set(ylabel="far keys per draw (dense rows: all)", title="What a draw looks at")
    axes[0, 2].set(ylabel="share", title="Recall; rows drawn densely")
    axes[0, 0].legend()
    axes[0, 2].legend()
    for axis in axes[0]:
        axis.set(xscale="log", xlabel="cells opened by the index")
        axis.set_xticks(probes, [str(p) for p in probes])
        axis.minorticks_off()
        axis.set_ylim(0, None)
    axes[0, 1].set(yscale="log", ylim=(0.5, None))
    return figure
