"""Speed and memory against context, loss curves, and what fine-tuning does to real weights."""

from __future__ import annotations

import math
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from experiments.experiment import Row, Rows
from experiments.gpt2_xl.select import NAMES, costs, has_memory, of_kind, stopped, tuned
from experiments.gpt2_xl.sizes import PAPERS_GPU
from experiments.look import CORAL, INK, OCHRE, QUIET, SAGE, end_labels, panels, say, styled
from experiments.look import lengths as length_axis
from experiments.words import fixed

COLORS = {"naive": QUIET, "exact": INK, "topk": SAGE, "cells": CORAL}
LABELS = {**NAMES, "topk": "TopK, $k=n^{1/2}$"}
BEFORE = "#dcdde3"


@styled
def draw(rows: Rows) -> dict[str, Figure]:
    figures = {"gpt2-xl-cost": cost(rows), "gpt2-xl-losses": curves(rows)}
    if tuned(rows):
        figures["gpt2-xl-tuned"] = tuning(rows)
    return figures


def cost(rows: Rows) -> Figure:
    """Tokens per second, and peak memory where it was measured."""
    some = of_kind(rows, "cost")
    sizes = sorted({row["n"] for row in some})
    titles = {"tokens_per_second": f"Tokens per second of a training step, {some[0]['model']}"}
    if has_memory(rows):
        titles["megabytes"] = "Peak memory of a step, GB"
    figure, (axes,) = panels(1, len(titles), 11.5 if len(titles) == 2 else 7.5, 4.6)
    for axis, (what, title) in zip(axes, titles.items(), strict=True):
        axis.set_title(title)
        ends = lines(axis, rows, what)
        if what == "megabytes":
            held(axis, rows, sizes)
        axis.set_yscale("log")
        length_axis(axis, sizes, "context, tokens")
        axis.set_xticks(sizes, [f"{n:,}" for n in sizes])
        axis.set_xlim(sizes[0] / 1.15, sizes[-1] * 2.4)
        low, high = axis.get_ylim()
        axis.set_ylim(low / 1.15, high * 1.15)
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
        axis.yaxis.set_minor_formatter(lambda y, _: "")
        end_labels(axis, ends, height=255)
    return figure


def lines(axis: Any, rows: Rows, what: str) -> list[tuple[float, float, str, str]]:
    """One line per method, and open circles where all activations were kept. Returns their ends."""
    ends = []
    unit = 1024 if what == "megabytes" else 1
    for method, color in COLORS.items():
        kept, ran = (costs(rows, method, recomputed) for recomputed in (False, True))
        axis.plot([row["n"] for row in kept], [row[what] / unit for row in kept], "o", color=color, markerfacecolor="none")
        if not ran:
            continue
        x, y = [row["n"] for row in ran], [row[what] / unit for row in ran]
        wide = method == "cells"
        axis.plot(x, y, "o-", color=color, linewidth=2.4 if wide else 1.6, zorder=2 if wide else 3)
        if what == "tokens_per_second" or apart(rows, ran[-1]):
            stop = ", then out of memory" if stopped(rows, method) else ""
            ends.append((x[-1], y[-1], LABELS[method] + stop, color))
    return ends


def apart(rows: Rows, row: Row) -> bool:
    """Whether a label has room: the line ends at the last context, or away from that of exact attention."""
    exact = costs(rows, "exact")
    beside = next((other for other in exact if other["n"] == row["n"]), None)
    return beside is None or row["n"] == exact[-1]["n"] or abs(row["megabytes"] / beside["megabytes"] - 1) > 0.1


def held(axis: Any, rows: Rows, sizes: list[int]) -> None:
    """What no attention changes, and what the paper's GPU had."""
    needed = {row["n"]: row["held"] / 1024 for row in of_kind(rows, "cost")}
    axis.plot(sizes, [needed[n] for n in sizes], ":", color=QUIET, linewidth=1.2)
    say(axis, sizes[0], needed[sizes[0]], "weights and moments of AdamW", QUIET, (2, -9), weight="normal")
    if max(needed.values()) > PAPERS_GPU / 4:
        axis.axhline(PAPERS_GPU, color=OCHRE, linewidth=1.2, linestyle="--")
        say(axis, sizes[0], PAPERS_GPU, f"{PAPERS_GPU} GB: the paper's GPU", OCHRE, (2, 8), weight="normal")


def curves(rows: Rows) -> Figure:
    """A panel for each context; cells as a broad line under that of exact attention."""
    some = of_kind(rows, "curve")
    contexts = sorted({row["n"] for row in some})
    figure, (axes,) = panels(1, len(contexts), 5.9 * max(1.3, len(contexts)), 4.2, sharey=True)
    for axis, n in zip(axes, contexts, strict=True):
        for row in sorted((row for row in some if row["n"] == n), key=lambda row: row["method"]):
            wide = row["method"] == "cells"
            steps = range(1, row["steps"] + 1)
            axis.plot(steps, row["losses"], color=COLORS[row["method"]], linewidth=3.6 if wide else 1.3, alpha=0.6 if wide else 1)
        axis.set_title(f"{some[0]['model']}, random weights, {n:,} tokens a step")
        axis.set_xlabel("step")
        for method in ("exact", "cells"):
            axis.plot([], [], color=COLORS[method], linewidth=3.6 if method == "cells" else 1.3, label=LABELS[method])
        axis.legend()
    axes[0].set_ylabel("loss, nats per byte")
    return figure


def tuning(rows: Rows) -> Figure:
    """A line of panels for each model."""
    models = tuned(rows)
    figure, axes = panels(len(models), 2, 11.5, 4.2 * len(models), width_ratios=[3, 2])
    for pair, runs in zip(axes, models, strict=True):
        tuning_of(pair, [*runs.values()])
    return figure


def tuning_of(axes: Any, some: Rows) -> None:
    """Losses of the steps, and perplexity of the held-out text before and after."""
    for row in sorted(some, key=lambda row: row["method"]):
        color, wide = COLORS[row["method"]] if not row["order"] else QUIET, row["method"] == "cells"
        width, alpha = (3.6, 0.6) if wide else (1.3, 1.0)
        axes[0].plot(range(1, row["steps"] + 1), row["losses"], color=color, linewidth=width, alpha=alpha, label=run_name(row))
    axes[0].set(xlabel="step", ylabel="loss, nats per token")
    axes[0].set_title(f"{some[0]['model']}, {some[0]['n']:,} tokens a step")
    axes[0].legend()
    for place, row in enumerate(some):
        color = COLORS[row["method"]] if not row["order"] else QUIET
        for shift, when, fill in ((-0.2, "before", BEFORE), (0.2, "after", color)):
            height = row[when] if math.isfinite(row[when]) else 0.0
            axes[1].bar(place + shift, height, 0.38, color=fill)
            axes[1].annotate(fixed(row[when]), (place + shift, height), (0, 3), textcoords="offset points", ha="center")
    axes[1].set_xticks(range(len(some)), [run_name(row).replace(", ", ",\n") for row in some])
    axes[1].set_title("Perplexity of held-out text, before and after")
    axes[1].grid(visible=False, axis="x")
    axes[1].margins(y=0.12)


def run_name(row: Row) -> str:
    return NAMES[row["method"]] + (", other order of windows" if row["order"] else "")
