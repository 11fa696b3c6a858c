"""`nearfield demo`: every method next to exact attention on synthetic inputs, as a table and a plot."""

from __future__ import annotations

import importlib.util
import math
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import nearfield as nf
from nearfield.app import wide_console
from nearfield.audit import audit_rows
from nearfield.problem import Method
from nearfield.results import Audit
from nearfield.synthetic import QKV, make

HEADS = 4

DIM = 64

AUDITED = audit_rows(0.95, 0.95)


@dataclass(frozen=True)
class MethodResult:
    """What one method did. Errors are those of all rows, `[rows]`."""

    name: str
    seconds: float
    keys: float
    """keys used per query, on average"""
    additive: Tensor
    """||estimate - exact|| in units of the rms norm of the values of its head"""
    relative: Tensor
    """||estimate - exact|| / ||exact||"""
    audit: Audit


def methods(length: int) -> dict[str, Method]:
    """The methods to show, by name; k is about sqrt(length), as in the paper."""
    k = math.isqrt(length - 1) + 1
    shown: dict[str, Method] = {
        "cells": nf.Cells(),
        f"top {k}": nf.TopK(k),
        f"top {k} + {k} sampled": nf.TopK(k, tail=k),
        f"top {k} + {k}, k-means": nf.TopK(k, tail=k, index=nf.KMeansIndex()),
        f"top {k} + {k}, LSH": nf.TopK(k, tail=k, index=nf.ConcentricLSH()),
    }
    if importlib.util.find_spec("faiss") is not None:
        # Faiss wants 39 keys per cell to train on, and complains on the terminal if there are fewer.
        shown[f"top {k} + {k}, Faiss"] = nf.TopK(k, tail=k, index=nf.FaissIndex(f"IVF{min(32, max(1, length // 64))},Flat"))
    shown["lazy Gumbel"] = nf.LazyGumbel(eps=0.3, delta=0.1, estimator="mean")
    return shown


def run(*, out: Path, length: int = 4096, family: str = "clustered", seed: int = 0) -> list[MethodResult]:
    """Measure every method, print the table, and save the plot if matplotlib is installed."""
    console = wide_console(100)
    inputs = make(family, 1, HEADS, length, DIM, seed=seed)
    title = f"Causal attention, {family} inputs, {HEADS} heads, {length:,} queries and keys of dimension {DIM}"
    console.print(title, highlight=False)
    shown, sizes = methods(length), _sweep(length)
    with _progress(console) as progress:
        task = progress.add_task("exact", total=1 + len(shown) + 3 * len(sizes))
        reference = _estimate(nf.Exact(), inputs, seed)
        all_keys: float = reference.info["keys_per_query"]
        exact_seconds = _seconds(nf.Exact(), inputs, seed)
        outcomes = []
        for name, method in shown.items():
            progress.update(task, description=name, advance=1)
            outcomes.append(_measure(name, method, inputs, reference.output, seed))
        console.print(_table(outcomes, exact_seconds, all_keys))
        console.print(_legend(outcomes[0].audit), highlight=False)
        if importlib.util.find_spec("matplotlib") is None:
            console.print("no plot: it needs matplotlib: pip install 'nearfield[plots]'", markup=False)
            return outcomes
        curves = []
        for name, build in (("top k", _near_only), ("top k/2 + k/2 sampled", _near_and_far), ("cells", _cells)):
            points = []
            for k in sizes:
                progress.update(task, description=f"{name}, k = {k}", advance=1)
                result = _estimate(build(k), inputs, seed)
                points.append((result.info["keys_used"], _errors(result, reference.output, inputs)[0].mean().item()))
            curves.append(Curve(name, [keys for keys, _ in points], [error for _, error in points]))
    ridges = [Ridge(o.name, o.additive, o.audit.additive, o.keys) for o in outcomes]
    save_plot(ridges, curves, all_keys, title, out, outcomes[0].audit)
    console.print(f"plot saved to {out}")
    return outcomes


def _sweep(length: int) -> list[int]:
    """Sizes for the curves: powers of two up to an eighth of the keys."""
    return [2**power for power in range(3, 12) if 2**power <= max(8, length // 8)]


def _near_only(k: int) -> Method:
    return nf.TopK(k)


def _near_and_far(k: int) -> Method:
    return nf.TopK(k // 2, tail=k // 2)


def _cells(k: int) -> Method:
    return nf.Cells(cell_size=8, probes=max(1, k // 8), segment=256)


def _measure(name: str, method: Method, inputs: QKV, exact: Tensor, seed: int) -> MethodResult:
    with warnings.catch_warnings():
        # So few keys do not keep an index from looking at all of them for some rows. The table is about errors.
        warnings.filterwarnings("ignore", message=".*looked at all keys")
        seconds = _seconds(method, inputs, seed)
        result = _estimate(method, inputs, seed, AUDITED)
    assert result.audit is not None
    return MethodResult(name, seconds, result.info["keys_used"], *_errors(result, exact, inputs), result.audit)


def _estimate(method: Method, inputs: QKV, seed: int, audit: int = 0) -> nf.Estimate:
    generator = torch.Generator().manual_seed(seed)
    return nf.estimate(*inputs, is_causal=True, method=method, audit=audit, generator=generator)


def _seconds(method: Method, inputs: QKV, seed: int) -> float:
    """Of the plain call, which neither audits nor computes standard errors."""
    generator = torch.Generator().manual_seed(seed)
    start = time.perf_counter()
    nf.attention(*inputs, is_causal=True, method=method, generator=generator)
    return time.perf_counter() - start


def _errors(result: nf.Estimate, exact: Tensor, inputs: QKV) -> tuple[Tensor, Tensor]:
    """Additive and relative error of every row, `[rows]` each."""
    error = (result.output - exact).norm(dim=-1)
    unit = inputs[2].square().sum(-1).mean(-1, keepdim=True).sqrt()
    return (error / unit).flatten(), (error / exact.norm(dim=-1)).flatten()


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _legend(audit: Audit) -> str:
    return (
        "Additive errors are in units of the rms norm of the values, relative ones in units of the norm of the exact row. "
        f"Audited bound (additive): {audit.rows} random rows were recomputed exactly; with {audit.confidence:.0%} confidence, "
        f"{audit.quantile:.0%} of all rows are within it."
    )


def _table(outcomes: list[MethodResult], exact_seconds: float, all_keys: float) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nmethod", no_wrap=True)
    # Short headings, so that the table fits into 80 columns.
    for heading in ("time\n(s)", "keys/\nquery", "mean\nadd.", "error\nrel.", "worst\nadd.", "error\nrel.", "audited\nbound"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("exact (SDPA)", f"{exact_seconds:.2f}", f"{all_keys:,.0f}", *["0"] * 4)
    for o in outcomes:
        mean = (f"{o.additive.mean():.4f}", f"{o.relative.mean():.1%}")
        worst = (f"{o.additive.max():.3f}", f"{o.relative.max():.0%}")
        table.add_row(o.name, f"{o.seconds:.2f}", f"{o.keys:,.0f}", *mean, *worst, f"{o.audit.additive:.3f}")
    return table


COLOURS = ("#4C6EF5", "#1098AD", "#37B24D", "#F59F00", "#E8590C", "#C2255C", "#7048E8")

GREY = "#868E96"

INK = "#212529"

LOWEST = 1e-4
"""Smaller errors are rounding, or of rows short enough to be exact; they would only stretch the axis."""


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


def save_plot(ridges: Sequence[Ridge], curves: Sequence[Curve], all_keys: float, title: str, out: Path, audit: Audit) -> None:
    """Left: the distribution of row errors with the audited bound. Right: mean error against keys used per query."""
    import matplotlib

    # Only a file is wanted, and no window, whatever the user's default backend.
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
        # Later methods get smaller dots, so that all stay visible where several use as many keys.
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
