"""The picture of `nearfield demo`: how wrong the rows are by each method, and what more keys buy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from nearfield.estimate import Audit

COLOURS = ("#4C6EF5", "#1098AD", "#37B24D", "#F59F00", "#E8590C", "#C2255C", "#7048E8")
GREY = "#868E96"
INK = "#212529"
LOWEST = 1e-4
"""Errors below this are float32 rounding or rows short enough to be exact; they would only stretch the axis."""


@dataclass(frozen=True)
class Ridge:
    """One method: the errors of its rows, the audited bound, and the keys it used."""

    name: str
    errors: Tensor
    """`[rows]`, in units of the rms norm of the values"""
    bound: float
    keys: float


@dataclass(frozen=True)
class Curve:
    """Mean error of one method at several sizes."""

    name: str
    keys: Sequence[float]
    errors: Sequence[float]


def save(ridges: Sequence[Ridge], curves: Sequence[Curve], all_keys: float, title: str, out: Path, audit: Audit) -> None:
    """Left: the distribution of row errors with the audited bound. Right: mean error against keys used per query."""
    import matplotlib

    # A file is all that is wanted: no window, whatever the user's default backend.
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    style: Any = {
        "font.size": 10.5,
        "text.color": INK,
        "axes.edgecolor": GREY,
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
    }
    with plt.rc_context(style):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, 5.6), width_ratios=(3, 2.4), layout="constrained")
        _draw_ridges(left, ridges, audit)
        _draw_keys(right, ridges, curves, all_keys)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=GREY)
        figure.savefig(out, dpi=150)
        plt.close(figure)


def _draw_ridges(axes: Any, ridges: Sequence[Ridge], audit: Audit) -> None:
    quantile = audit.quantile
    for height, (ridge, colour) in enumerate(zip(reversed(ridges), reversed(COLOURS[: len(ridges)]), strict=True)):
        errors = ridge.errors.double().numpy()
        centres, density = _density(errors)
        axes.fill_between(centres, height, height + 0.82 * density, color=colour, alpha=0.3, linewidth=0)
        axes.plot(centres, height + 0.82 * density, color=colour, linewidth=1.4)
        axes.axhline(height, color=GREY, linewidth=0.5)
        actual = np.quantile(errors, quantile)
        axes.plot([actual, actual], [height, height + 0.3], color=colour, linewidth=2.4)
        axes.plot(ridge.bound, height + 0.09, marker="v", markersize=9, color=colour, markeredgecolor="white")
        axes.plot(errors.max(), height + 0.06, marker="x", markersize=6, color=colour, markeredgewidth=1.6)
    axes.plot([], [], color=GREY, linewidth=2.4, label=f"{quantile:.0%} of all rows lie left of this")
    axes.plot([], [], "v", color=GREY, markersize=9, label=f"bound on it, from {audit.rows} audited rows")
    axes.plot([], [], "x", color=GREY, markeredgewidth=1.6, label="worst row")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    axes.set_yticks(range(len(ridges)), [ridge.name for ridge in reversed(ridges)], va="bottom")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.set(xscale="log", xlim=(LOWEST, 2 * max(r.errors.max().item() for r in ridges)), ylim=(-0.05, len(ridges) + 1.2))
    axes.set_xlabel("error of a row  /  rms norm of the values")
    axes.set_title("How wrong are the rows?")


def _density(errors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A smooth histogram of log errors, its peak at 1."""
    edges = np.linspace(np.log10(LOWEST) - 0.5, 1.0, 241)
    counts, _ = np.histogram(np.log10(np.maximum(errors, 1e-30)), edges)
    kernel = np.exp(-0.5 * (np.arange(-12, 13) / 4.0) ** 2)
    smooth = np.convolve(counts, kernel / kernel.sum(), mode="same")
    return 10 ** ((edges[1:] + edges[:-1]) / 2), smooth / max(smooth.max(), 1e-30)


def _draw_keys(axes: Any, ridges: Sequence[Ridge], curves: Sequence[Curve], all_keys: float) -> None:
    for curve, line in zip(curves, ("-", "--", ":"), strict=False):
        axes.plot(curve.keys, curve.errors, line, color=INK, linewidth=1.2, marker=".", markersize=4, label=curve.name, zorder=1)
    for i, (ridge, colour) in enumerate(zip(ridges, COLOURS, strict=False)):
        # Later methods get smaller dots: where several use the same keys, all of them stay visible.
        axes.plot(ridge.keys, ridge.errors.mean(), "o", markersize=15 - 1.2 * i, color=colour, markeredgecolor="white")
    axes.axvline(all_keys, color=GREY, linestyle=":", linewidth=1)
    axes.text(all_keys, 0.99, "all keys ", transform=axes.get_xaxis_transform(), ha="right", va="top", color=GREY)
    axes.set(xscale="log", yscale="log")
    axes.grid(True, which="major", color="#E9ECEF", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("keys used per query")
    axes.set_ylabel("mean error of a row  /  rms norm of the values")
    axes.set_title("What do more keys buy?")
    axes.legend(frameon=False, fontsize=9, loc="lower left")
