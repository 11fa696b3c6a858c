"""`nearfield demo`: every method on built-in data next to exact attention, as a table and a plot."""

from __future__ import annotations

import importlib.util
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import nearfield as nf
from nearfield.budgets import audit_rows
from nearfield.demo_plot import Curve, Ridge, save
from nearfield.estimate import Audit
from nearfield.synthetic import QKV, make

HEADS = 4
DIM = 64
AUDITED = audit_rows(0.95, 0.95)


@dataclass(frozen=True)
class Outcome:
    """What one method did. Errors are per row, `[rows]`."""

    name: str
    seconds: float
    keys: float
    """keys used per query, on average"""
    additive: Tensor
    """||estimate - exact|| in units of the rms norm of the values of its head"""
    relative: Tensor
    """||estimate - exact|| / ||exact||"""
    audit: Audit | None


def methods(length: int) -> dict[str, Callable[[], Any]]:
    """The methods to show, by name; k is about sqrt(length), as in the paper."""
    k = math.isqrt(length - 1) + 1
    shown: dict[str, Callable[[], Any]] = {
        f"top {k}": lambda: nf.TopK(k),
        f"top {k} + {k} sampled": lambda: nf.TopK(k, tail=k),
        f"top {k} + {k}, k-means": lambda: nf.TopK(k, tail=k, index=nf.KMeansIndex()),
        f"top {k} + {k}, LSH": lambda: nf.TopK(k, tail=k, index=nf.ConcentricLSH()),
    }
    if importlib.util.find_spec("faiss") is not None:
        shown[f"top {k} + {k}, Faiss"] = lambda: nf.TopK(k, tail=k, index=nf.FaissIndex("IVF32,Flat"))
    shown["lazy Gumbel"] = lambda: nf.LazyGumbel(eps=0.3, delta=0.1)
    return shown


def run(
    *, out: Path, length: int = 4096, family: str = "clustered", seed: int = 0, console: Console | None = None
) -> list[Outcome]:
    """Measure every method, print the table, and save the plot where matplotlib is installed."""
    console = console or Console()
    inputs = make(family, 1, HEADS, length, DIM, seed=seed)
    title = f"Causal attention, {family} inputs, {HEADS} heads, {length:,} queries and keys of dimension {DIM}"
    console.print(f"{title}, on the CPU.")
    shown, sizes = methods(length), _sweep(length)
    with _progress(console) as progress:
        task = progress.add_task("exact", total=1 + len(shown) + 2 * len(sizes))
        exact, seconds = _timed(lambda: nf.estimate(*inputs, is_causal=True, method=nf.Exact()))
        all_keys: float = exact.info["keys_per_query"]
        outcomes = []
        for name, method in shown.items():
            progress.update(task, description=name, advance=1)
            outcomes.append(_measure(name, method(), inputs, exact.output, seed))
        console.print(_table(outcomes, seconds, all_keys))
        console.print(_legend(outcomes[0].audit))
        if importlib.util.find_spec("matplotlib") is None:
            console.print("No plot: matplotlib is not installed. Install it with: pip install 'nearfield[plots]'", markup=False)
            return outcomes
        curves = []
        for name, build in (("top k", _near_only), ("top k/2 + k/2 sampled", _near_and_far)):
            points = []
            for k in sizes:
                progress.update(task, description=f"{name}, k = {k}", advance=1)
                points.append(_measure(name, build(k), inputs, exact.output, seed, audit=False))
            curves.append(Curve(name, [p.keys for p in points], [p.additive.mean().item() for p in points]))
    ridges = [Ridge(o.name, o.additive, o.audit.additive, o.keys) for o in outcomes if o.audit is not None]
    save(ridges, curves, all_keys, title, out)
    console.print(f"Plot saved to {out}")
    return outcomes


def _sweep(length: int) -> list[int]:
    """Sizes for the curves: powers of two up to an eighth of the keys."""
    return [2**power for power in range(3, 12) if 2**power <= max(8, length // 8)]


def _near_only(k: int) -> Any:
    return nf.TopK(k)


def _near_and_far(k: int) -> Any:
    return nf.TopK(k // 2, tail=k // 2)


def _measure(name: str, method: Any, inputs: QKV, exact: Tensor, seed: int, audit: bool = True) -> Outcome:
    def estimate(rows: int = 0) -> nf.Estimate:
        generator = torch.Generator().manual_seed(seed)
        return nf.estimate(*inputs, is_causal=True, method=method, audit=rows, generator=generator)

    # Timed without the audit, whose cost does not depend on the method.
    result, seconds = _timed(estimate)
    audited = estimate(AUDITED).audit if audit else None
    error = (result.output - exact).norm(dim=-1)
    unit = inputs[2].square().sum(-1).mean(-1, keepdim=True).sqrt()
    relative = error / exact.norm(dim=-1)
    return Outcome(name, seconds, result.info["keys_per_query"], (error / unit).flatten(), relative.flatten(), audited)


def _timed(call: Callable[[], nf.Estimate]) -> tuple[nf.Estimate, float]:
    start = time.perf_counter()
    return call(), time.perf_counter() - start


def _progress(console: Console) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True)


def _legend(audit: Audit | None) -> str:
    text = "Errors are norms of a row's error: additive in units of the rms norm of the values, relative to the exact row."
    if audit is not None:
        text += (
            f" Bound: {audit.rows} rows were recomputed exactly; with {audit.confidence:.0%} confidence,"
            f" {audit.quantile:.0%} of all rows are within it."
        )
    return text


def _table(outcomes: list[Outcome], exact_seconds: float, all_keys: float) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nmethod", no_wrap=True)
    errors = ("mean error\nadditive", "\nrelative", "worst\nadditive", "\nrelative", "audited\nbound")
    for heading in ("time\n(s)", "keys per\nquery", *errors):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("exact (SDPA)", f"{exact_seconds:.2f}", f"{all_keys:,.0f}", *["0"] * 5)
    for o in outcomes:
        bound = "" if o.audit is None else f"{o.audit.additive:.3f}"
        mean = (f"{o.additive.mean():.4f}", f"{o.relative.mean():.1%}")
        worst = (f"{o.additive.max():.3f}", f"{o.relative.max():.0%}")
        table.add_row(o.name, f"{o.seconds:.2f}", f"{o.keys:,.0f}", *mean, *worst, bound)
    return table
