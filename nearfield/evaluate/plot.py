"""The picture of `nearfield eval`: the error of every head, what it does to perplexity, and what each layer gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from nearfield.evaluate.run import Evaluation, Shown
from nearfield.evaluate.settings import percent

COLOURS = {"cells": "#4C6EF5", "topk": "#E8590C", "auto": "#37B24D", "config": "#7048E8"}
CHOSEN, GREY, INK = "#2B8A3E", "#868E96", "#212529"
NAMES = {"cells": "Cells", "topk": "Exact top-k", "auto": "Auto()", "config": "config"}
UNIT = "relative error of a row, mean over rows"


def save_plot(found: Evaluation, title: str, out: Path) -> None:
    """Heat maps over layers and heads, a line of them per method; below, excess of perplexity and the choice by layer."""
    import matplotlib

    # A file is all that is wanted: no window, whatever the user's default backend.
    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    style: Any = {
        "font.size": 10,
        "text.color": INK,
        "axes.edgecolor": GREY,
        "axes.titlesize": 10.5,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
    }
    maps = _lines([shown for shown in found.shown if shown.errors is not None])
    columns = max((len(line) for line in maps), default=1)
    with plt.rc_context(style):
        figure = plt.figure(figsize=(max(11.0, 4.4 * columns), 2.3 * len(maps) + 4.4), layout="constrained")
        top, bottom = figure.subfigures(  # type: ignore[misc]
            2, 1, height_ratios=(2.3 * len(maps), 4.0)
        )
        _draw_maps(top, maps, columns)
        if found.recommendation is None:
            _draw_excess(bottom.subplots(), found)
        else:
            left, right = bottom.subplots(1, 2, width_ratios=(2, 3))
            _draw_excess(left, found)
            _draw_choice(right, found)
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=GREY)
        figure.savefig(out, dpi=150)
        plt.close(figure)


def _lines(shown: list[Shown]) -> list[list[Shown]]:
    """By kind, in the order of their appearance."""
    kinds = dict.fromkeys(one.setting.kind for one in shown)
    return [[one for one in shown if one.setting.kind == kind] for kind in kinds]


def _draw_maps(figure: Any, maps: list[list[Shown]], columns: int) -> None:
    if not maps:
        return
    from matplotlib.colors import LogNorm

    every = np.concatenate([_errors(one).ravel() for line in maps for one in line])
    every = every[np.isfinite(every) & (every > 0)]
    high = float(every.max()) if every.size else 1.0
    norm = LogNorm(max(float(np.quantile(every, 0.02)) if every.size else 1e-4, high * 1e-4), high)
    axes = figure.subplots(len(maps), columns, squeeze=False, sharex=True, sharey=True, gridspec_kw={"hspace": 0.08})
    for row, line in zip(axes, maps, strict=True):
        for axis, one in zip(row, [*line, *[None] * (columns - len(line))], strict=True):
            if one is None:
                axis.set_visible(False)
                continue
            image = _errors(one).T
            drawn = axis.imshow(image, aspect="auto", interpolation="nearest", cmap="magma_r", norm=norm)
            budget = "" if one.setting.budget is None else f", {percent(one.setting.budget)}"
            axis.set_title(f"{NAMES.get(one.setting.kind, one.setting.kind)}{budget}")
            numbers = f"mean {np.nanmean(image):.1%}, worst {np.nanmax(image):.0%}"
            axis.text(1.0, 1.02, numbers, transform=axis.transAxes, ha="right", va="bottom", fontsize=8.5, color=GREY)
            axis.set_facecolor("#F1F3F5")
            axis.set_xticks([x - 0.5 for x in range(1, image.shape[1])], minor=True)
            axis.set_yticks([y - 0.5 for y in range(1, image.shape[0])], minor=True)
            axis.grid(which="minor", color="white", linewidth=0.6)
            axis.tick_params(which="both", length=0)
            for spine in axis.spines.values():
                spine.set_visible(False)
        row[0].set_ylabel("head")
    for column in axes.T:
        lowest = [axis for axis in column if axis.get_visible()][-1]
        lowest.set_xlabel("layer")
        lowest.tick_params(labelbottom=True)
    bar = figure.colorbar(drawn, ax=axes, label=UNIT, pad=0.01, aspect=15 * len(maps))
    bar.ax.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
    bar.outline.set_visible(False)


def _errors(shown: Shown) -> np.ndarray:
    """`[layers, heads]`"""
    assert shown.errors is not None
    return shown.errors.numpy()


def _draw_excess(axes: Any, found: Evaluation) -> None:
    """Excess of perplexity in the worst text against keys read per query."""
    all_keys = found.exact.keys or 1.0
    for line in _lines([one for one in found.shown if one.keys is not None]):
        kind = line[0].setting.kind
        keys = [one.keys / all_keys for one in line if one.keys is not None]
        excess, spread = zip(*(_worst(one) for one in line), strict=True)
        look: Any = {"color": COLOURS.get(kind, INK), "marker": "o", "markersize": 5, "linewidth": 1.4, "capsize": 2.5}
        axes.errorbar(keys, excess, spread, label=NAMES.get(kind, kind), **look)
    if found.recommendation is not None:
        chosen = found.recommendation
        axes.axhline(chosen.tolerance, color=GREY, linestyle="--", linewidth=1)
        axes.annotate(
            f"tolerance {percent(chosen.tolerance)}",
            (1.0, chosen.tolerance),
            xycoords=("axes fraction", "data"),
            xytext=(-2, 3),
            textcoords="offset points",
            ha="right",
            color=GREY,
            fontsize=8.5,
        )
        place = chosen.chosen.mixture.keys / all_keys
        axes.plot(place, chosen.chosen.excess, "*", markersize=14, color=CHOSEN, markeredgecolor="white", label="by layer")
    axes.axhline(0.0, color=GREY, linewidth=0.8)
    _plain(axes)
    axes.xaxis.set_major_formatter(lambda x, _: f"{100 * x:.3g}%")
    axes.yaxis.set_major_formatter(lambda y, _: f"{100 * y:.3g}%")
    axes.set_xlabel("keys read per query, of all that it sees")
    axes.set_title("Excess of perplexity" + (" (worst text)" if len(found.texts) > 1 else ""))
    axes.legend(frameon=False, fontsize=9)


def _worst(shown: Shown) -> tuple[float, float]:
    one = max(shown.perplexities, key=lambda some: some.excess)
    return one.excess, one.stderr


def _draw_choice(axes: Any, found: Evaluation) -> None:
    """What each layer gets: a bar as high as its rung on the ladder."""
    chosen = found.recommendation
    assert chosen is not None
    labels = [percent(setting.budget) if setting.budget else setting.label for setting in chosen.ladder]
    order = sorted(range(len(labels)), key=lambda rung: chosen.ladder[rung].budget or 0.0)
    height = {rung: place + 1 for place, rung in enumerate(order)} | {-1: len(order) + 1}
    heights = [height[rung] for rung in chosen.chosen.mixture.rungs]
    colours = [GREY if rung < 0 else CHOSEN for rung in chosen.chosen.mixture.rungs]
    axes.bar(range(len(heights)), heights, color=colours, width=0.78)
    axes.set_yticks(range(1, len(order) + 2), [*(labels[rung] for rung in order), "exact"])
    axes.set_ylim(0, len(order) + 1.4)
    axes.set_xlim(-0.6, len(heights) - 0.4)
    _plain(axes)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("layer")
    axes.set_ylabel("budget, of the past")
    share = chosen.chosen.mixture.keys / (found.exact.keys or 1.0)
    axes.set_title(f"Chosen by layer: {share:.0%} of the keys, perplexity {100 * chosen.chosen.excess:+.2f}%")


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#E9ECEF", linewidth=0.8)
    axes.set_axisbelow(True)
