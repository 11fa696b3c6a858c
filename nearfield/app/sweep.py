"""`nearfield bench`: time cells against exact attention over lengths, heads and dimensions, as a table, a sentence and a plot."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from nearfield import crossover
from nearfield.app import wide_console
from nearfield.app.calibrate import compare, describe
from nearfield.attention import estimate
from nearfield.cells.method import Cells
from nearfield.synthetic import make

FAMILY = "clustered"
"""Inputs with structure, as attention has in trained models. Independent Gaussians have none, and are the worst case."""

AUDITED = 59
"""Rows that are recomputed exactly: enough for a bound on 95% of the rows with 95% confidence."""

ROUNDS = 3

LINES = {
    "forward": ("#4C6EF5", "-"),
    "forward, causal": ("#4C6EF5", "--"),
    "training": ("#E8590C", "-"),
    "training, causal": ("#E8590C", "--"),
}


@dataclass(frozen=True)
class Sizes:
    """What is measured: every combination."""

    lengths: Sequence[int]
    heads: Sequence[int]
    dims: Sequence[int]
    dtypes: Sequence[torch.dtype]

    def cases(self) -> Iterator[tuple[torch.dtype, int, int, int]]:
        """(dtype, heads, dim, length), the short ones first."""
        return product(self.dtypes, self.heads, self.dims, self.lengths)


@dataclass(frozen=True)
class Case:
    """One call, by SDPA and by cells."""

    dtype: torch.dtype
    heads: int
    dim: int
    length: int
    kind: str
    exact: float
    """seconds"""
    cells: float
    """seconds"""
    error: float
    """audited, in units of the rms norm of the values"""

    @property
    def gain(self) -> float:
        """How many times as fast cells are."""
        return self.exact / self.cells

    @property
    def panel(self) -> str:
        return f"{self.heads} head{'s' if self.heads > 1 else ''} of {self.dim}, {crossover.dtype_name(self.dtype)}"

    def __str__(self) -> str:
        return f"{self.kind}, {self.length:,} keys, {self.panel}"


def usual_lengths(device: torch.device) -> list[int]:
    """What takes about a minute."""
    return [2**k for k in (range(13, 18) if device.type == "cuda" else range(11, 15))]


def usual_dtype(device: torch.device) -> torch.dtype:
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def run(device: torch.device, sizes: Sizes, out: Path) -> list[Case]:
    """Measure all cases, print the table and one sentence, and save the plot if matplotlib is installed. Ctrl-C ends it early."""
    console = wide_console(110)
    where = crossover.place(device)
    for dtype, dim in product(sizes.dtypes, sizes.dims):
        if len(named := describe(device, dtype, dim)) > len(f"{where}, {crossover.dtype_name(dtype)}"):
            console.print(named, highlight=False)  # cells would run in plain torch
    found: list[Case] = []
    columns = (TextColumn("{task.description:<44}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress, suppress(KeyboardInterrupt):  # shows what it has
        # Exact attention takes four times as long at twice the length, and this is what the bar goes by.
        cases = list(sizes.cases())
        bar = progress.add_task("", total=sum(_work(case) for case in cases) * len(crossover.KINDS))
        for dtype, heads, dim, length in cases:
            query, key, value = (x.to(device, dtype) for x in make(FAMILY, 1, heads, length, dim))
            for kind in crossover.KINDS:
                progress.update(bar, description=f"{kind}, {length:,} keys, {heads} of {dim}")
                exact, cells = compare((query, key, value), kind, ROUNDS)
                causal = kind.endswith("causal")
                audit = estimate(query, key, value, is_causal=causal, method=Cells(), audit=AUDITED).audit
                assert audit is not None
                found.append(Case(dtype, heads, dim, length, kind, exact, cells, audit.additive))
                progress.advance(bar, _work((dtype, heads, dim, length)))
    if not found:
        raise KeyboardInterrupt
    console.print(_table(found, f"SDPA and Cells() on {FAMILY} inputs, {where}"))
    console.print(
        f"error: with 95% confidence, 95% of the rows are this close to exact attention, in units of the rms norm of the values; "
        f"{AUDITED} rows were recomputed. A ratio below 1 is a case in which SDPA is faster.",
        highlight=False,
    )
    console.print(sentence(found), style="bold", highlight=False)
    if importlib.util.find_spec("matplotlib") is None:
        console.print("no plot: it needs matplotlib: pip install 'nearfield[plots]'", markup=False)
    else:
        save_plot(found, where, out)
        console.print(f"plot saved to {out}", highlight=False, soft_wrap=True)
    return found


def _work(case: tuple[torch.dtype, int, int, int]) -> float:
    _, heads, dim, length = case
    return heads * dim * float(length) ** 2


def sentence(found: Sequence[Case]) -> str:
    """Where cells win, where they lose, and what that costs in error."""
    best, worst = max(found, key=lambda case: case.gain), min(found, key=lambda case: case.gain)
    wins = [case for case in found if case.gain > 1.0]
    if not wins:
        closest = f"closest came {best} ({_times(best.gain)})"
        return f"SDPA was faster in all {len(found)} cases; {closest}, so longer inputs are worth a try."
    said = f"Cells were faster than SDPA in {len(wins)} of {len(found)} cases, most in {best} ({_times(best.gain)})"
    if len(wins) < len(found):
        said += f", least in {worst} ({_times(worst.gain)})"
    return f"{said}, with an error of at most {max(case.error for case in wins):.2g} where they were faster."


def _times(gain: float) -> str:
    return f"{gain:.2f} times as fast"


def _table(found: Sequence[Case], title: str) -> Table:
    table = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("heads", "kind"):
        table.add_column(name)
    for name in ("keys", "SDPA, s", "Cells, s", "SDPA / Cells", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    panel = ""
    for case in found:
        style = None if case.gain > 1.0 else "yellow"
        cells = (f"{case.length:,}", f"{case.exact:.3g}", f"{case.cells:.3g}", f"{case.gain:.2f}", f"{case.error:.2g}")
        table.add_row(case.panel if case.panel != panel else "", case.kind, *cells, style=style)
        panel = case.panel
    return table


def save_plot(found: Sequence[Case], where: str, out: Path) -> None:
    """Above: how many times as fast cells are at each length. Below: their audited error. A column for each kind of heads."""
    import matplotlib

    # Only a file is wanted, and no window, whatever the user's default backend.
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    panels = list(dict.fromkeys(case.panel for case in found))
    with plt.rc_context({"axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": "#868E96"}):
        figure, axes = plt.subplots(
            2,
            len(panels),
            figsize=(max(6.4, 4.2 * len(panels)), 6.6),
            sharex=True,
            sharey="row",
            squeeze=False,
            layout="constrained",
        )
        for column, panel in enumerate(panels):
            own = [case for case in found if case.panel == panel]
            _picture(axes[0, column], axes[1, column], own)
            axes[0, column].set_title(panel, loc="left", fontsize=10.5)
        axes[0, 0].set_ylabel("SDPA's time / time of cells")
        axes[1, 0].set_ylabel("audited error / rms norm of the values")
        axes[0, 0].legend(frameon=False, fontsize=9)
        figure.suptitle(f"Cells against SDPA: {where}", x=0.01, ha="left", fontsize=11, color="#495057")
        figure.savefig(out, dpi=150)
        plt.close(figure)


def _picture(above: Any, below: Any, cases: Sequence[Case]) -> None:
    lengths = sorted({case.length for case in cases})
    above.axhline(1.0, color="#868E96", linewidth=1)
    above.text(lengths[-1], 1.0, "above: cells are faster ", ha="right", va="bottom", fontsize=8.5, color="#868E96")
    for kind, (colour, line) in LINES.items():
        own = [case for case in cases if case.kind == kind]
        at = [case.length for case in own]
        above.plot(at, [case.gain for case in own], line, color=colour, marker="o", markersize=4, label=kind)
        # Errors below rounding are those of calls that were exact.
        below.plot(at, [max(case.error, 1e-7) for case in own], line, color=colour, marker="o", markersize=4)
    for axes in (above, below):
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(lengths, [_short(length) for length in lengths])
        axes.minorticks_off()
        axes.grid(True, color="#E9ECEF", linewidth=0.8)
        axes.set_axisbelow(True)
    if len(lengths) == 1:
        above.set_xlim(lengths[0] / 2, lengths[0] * 2)
    gains = [case.gain for case in cases]
    ticks = [2.0**k for k in range(math.floor(math.log2(min(*gains, 1.0))), math.ceil(math.log2(max(*gains, 1.0))) + 1)]
    above.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    below.set_xlabel("queries and keys")


def _short(length: int) -> str:
    return f"{length // 1024}k" if length % 1024 == 0 else f"{length:,}"
