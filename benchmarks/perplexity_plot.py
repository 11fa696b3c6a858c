"""The picture of bench_perplexity_gpu.py: for each model, excess against keys read, and loss and excess by position."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

from cells_plot import CELLS, HALO, QUIET, SDPA, WASH

FLOOR = 1e-4
"""What is less than rounding in bfloat16 makes of it is drawn here."""
WANTED = 0.003
RULES = {
    "topk": ("exact top-k", "#5f6b7a", "s"),
    "quest": ("Quest", "#3d6fb6", "D"),
    "moba": ("MoBA", "#c25b8e", "P"),
    "snapkv": ("SnapKV", "#4f9d87", "^"),
    "streaming": ("StreamingLLM", "#a0a3ad", "v"),
    "retroinfer": ("RetroInfer", "#8d6cab", "X"),
    "vattention": ("vAttention", "#b5892e", "h"),
    "weight": ("cells, as many as matter", CELLS, "p"),
}
READ = {"cells": ("Cells()", CELLS, "-"), "shared": ("Cells(share=128)", "#a8432b", (0, (4, 1.5)))}
TITLES = {"qwen2.5-coder-1.5b": "Qwen2.5-Coder-1.5B", "gemma-3-270m": "Gemma 3 270M", "smollm2-135m": "SmolLM2-135M"}
GAP = 0.055
"""Between two names, in heights of a panel."""

Point = tuple[float, float, float]


def plot(sections: dict[str, Any], folder: Path) -> None:
    """`perplexity.png`, of the models that have been measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    models = list(dict.fromkeys(name.partition("/")[0] for name in sections))
    models = [name for name in TITLES if name in models] + [name for name in models if name not in TITLES]
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold"}
    with plt.rc_context(style):
        figure = plt.figure(figsize=(10.5, 4.3 * len(models)), layout="constrained")
        for part, model in zip(figure.subfigures(len(models), 1, squeeze=False)[:, 0], models, strict=True):
            grid = part.add_gridspec(2, 2, width_ratios=(1.25, 1))
            left, above = part.add_subplot(grid[:, 0]), part.add_subplot(grid[0, 1])
            below = part.add_subplot(grid[1, 1], sharex=above)
            written, read = sections.get(f"{model}/writing"), sections.get(f"{model}/reading")
            name = TITLES.get(model, model)
            if written is None or not lines(written):
                left.set_axis_off()
                left.set_title(name, loc="left")
            else:
                left.set_title(f"{name}: written after {written['tokens'] - written['written']:,} tokens", loc="left")
                draw_shares(left, written)
            if read:
                above.set_title(f"read, {read['tokens']:,} tokens in one pass", loc="left")
                draw_positions(above, below, read)
        figure.savefig(folder / "perplexity.png", dpi=160)
        plt.close(figure)


def lines(written: dict[str, Any]) -> dict[str, list[Point]]:
    """(share of keys read, excess, its standard error) by rule, in the order of keys; cells are one of them."""
    length = written["tokens"] - written["written"] / 2
    found: dict[str, list[Point]] = {}
    for name, way in written["same_texts"].items():
        rule, _, share = name.rpartition("-")
        if share.replace(".", "").isdigit():
            found.setdefault(rule, []).append((way["keys_read"] / length, way["excess"], way["stderr"]))
    return {rule: sorted(points) for rule, points in found.items()}


def draw_shares(axis: Any, written: dict[str, Any]) -> None:
    found = lines(written)
    everything = [point for points in found.values() for point in points]
    axis.set(xscale="log", yscale="log", xlabel="share of the keys that a token reads", ylabel="excess perplexity")
    names = []
    for rule, points in found.items():
        label, color, marker = RULES.get(rule, ("cells", CELLS, "o"))
        ours = rule == "cells"
        x, y = [point[0] for point in points], [max(FLOOR, point[1]) for point in points]
        wide = {"linewidth": 2.4, "markersize": 6.5, "zorder": 5} if ours else {"linewidth": 1, "markersize": 5, "zorder": 3}
        axis.plot(x, y, marker=marker, color=color, **wide)
        for share, excess, off in points:
            axis.plot([share] * 2, [max(FLOOR, excess - off), max(FLOOR, excess + off)], color=color, linewidth=0.8, alpha=0.6)
        names.append((x[0], y[0], label, color, "bold" if ours else "normal"))
    default = written["same_texts"].get("exact+cache")
    if default:
        share = default["keys_read"] / (written["tokens"] - written["written"] / 2)
        place = (share, max(FLOOR, default["excess"]))
        axis.plot(*place, "*", color=CELLS, markersize=14, markeredgecolor="white", zorder=6)
        at = {"textcoords": "offset points", "color": CELLS, "weight": "bold", "fontsize": 8, "zorder": 7, "bbox": HALO}
        axis.annotate("CellCache()", place, (9, 6), **at)
    shares, excesses = ([point[i] for point in everything] for i in (0, 1))
    low, high = FLOOR, max(2 * WANTED, 1.6 * max(excesses))
    axis.set_ylim(low / 1.25, high)
    axis.set_xlim(min(shares) / 2.15, 1.12 * max(shares))
    axis.axhspan(low / 1.25, WANTED, color=WASH, zorder=0, linewidth=0)
    axis.text(0.01, WANTED, "0.3%", transform=axis.get_yaxis_transform(), va="top", color=QUIET, fontsize=8)
    axis.grid(axis="y", color="#ececf1", linewidth=0.7, zorder=0)
    axis.set_xticks([share for share in (0.015, 0.03, 0.06, 0.12, 0.25, 0.5) if min(shares) <= 1.3 * share <= 1.8 * max(shares)])
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:.1%}" if x < 0.02 else f"{x:.0%}")
    axis.yaxis.set_major_formatter(lambda y, _: f"≤ {y:.2%}" if y <= FLOOR else f"{100 * y:g}%")
    axis.minorticks_off()
    write_names(axis, names)


def write_names(axis: Any, names: list[tuple[float, float, str, str, str]]) -> None:
    """Before the first point of each line, so far apart that none lies on another."""
    to_panel = axis.transData + axis.transAxes.inverted()
    order = sorted(names, key=lambda name: name[1])
    heights = apart([float(to_panel.transform((x, y))[1]) for x, y, *_ in order], GAP)
    for (x, y, label, color, weight), height in zip(order, heights, strict=True):
        own = float(to_panel.transform((x, y))[0])
        axis.annotate(
            label,
            (x, y),
            (own - 0.035, height),
            textcoords="axes fraction",
            ha="right",
            va="center",
            color=color,
            weight=weight,
            fontsize=8,
            bbox=HALO,
            zorder=4,
            arrowprops={"arrowstyle": "-", "color": color, "linewidth": 0.6, "shrinkA": 1, "shrinkB": 3},
        )


def apart(heights: list[float], gap: float) -> list[float]:
    """Heights in a panel in rising order, moved until there is a gap between any two."""
    heights = list(heights)
    for _ in range(200):
        for i, (lower, upper) in enumerate(pairwise(heights)):
            if (missing := gap - (upper - lower)) > 1e-6:
                heights[i], heights[i + 1] = lower - missing / 2, upper + missing / 2
        heights = [min(0.985, max(0.02, height)) for height in heights]
    return heights


def draw_positions(above: Any, below: Any, read: dict[str, Any]) -> None:
    exact = read["pooled"]["exact"]["loss_by_position"]
    width = read["tokens"] / len(exact)
    middles = [width * (number + 0.5) for number in range(len(exact))]
    above.plot(middles, exact, "o-", color=SDPA, markersize=3, linewidth=1.6)
    by_kind: dict[str, list[list[float]]] = {}
    for text in read["texts"].values():
        if "exact" in text["ways"]:
            by_kind.setdefault(text["kind"], []).append(text["ways"]["exact"]["loss_by_position"])
    ends: list[tuple[float, str, dict[str, Any]]] = []
    for kind, some in by_kind.items():
        means = [sum(column) / len(column) for column in zip(*some, strict=True)]
        above.plot(middles, means, color=QUIET, linewidth=0.8)
        ends.append((means[-1], kind, {"color": QUIET}))
    ends.append((exact[-1], "all", {"color": SDPA, "weight": "bold"}))
    ends.sort(key=lambda end: end[0])
    above.get_ylim()  # settles it: until then, the panel has another scale
    to_panel = above.transData + above.transAxes.inverted()
    heights = apart([float(to_panel.transform((0, end[0]))[1]) for end in ends], 2 * GAP)
    for (_, label, looks), height in zip(ends, heights, strict=True):
        above.text(0.845, height, label, transform=above.transAxes, fontsize=8, va="center", **looks)
    above.set_ylabel("loss, nats")
    above.tick_params(labelbottom=False)
    limits = [WANTED]
    for name, (label, color, dashes) in READ.items():
        if way := read["pooled"].get(name):
            excess = way["excess_by_position"]
            below.plot(middles, excess, color=color, linestyle=dashes, marker="o", markersize=3, linewidth=1.8, label=label)
            limits += [abs(x) for x in excess]
    below.axhline(0, color=SDPA, linewidth=0.8)
    below.axhspan(-WANTED, WANTED, color=WASH, zorder=0, linewidth=0)
    below.set_ylim(-1.15 * max(limits), 1.5 * max(limits))
    below.set(ylabel="excess perplexity", xlabel="position in the text")
    below.yaxis.set_major_formatter(lambda y, _: f"{100 * y:+.1f}%" if y else "0")
    below.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
    below.set_xticks([read["tokens"] * quarter // 4 for quarter in range(5)])
    below.set_xlim(0, 1.19 * read["tokens"])
    below.legend(frameon=False, fontsize=8, loc="upper left", ncols=2, borderaxespad=0)
