"""The picture of RULER: points lost against keys read, all rules, of the models whose results are kept. Each way is compared with
exact attention on the prompts that it has answered; how many these are stands at its name.

nearfield ruler MODEL --out DIR ...                                   # measures
cp DIR/ruler.json benchmarks/results/ruler_MODEL.json
python benchmarks/ruler_plot.py && python benchmarks/gpu_tables.py    # draws docs/figures/ruler.png, writes the tables
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cells_plot import CELLS, HALO, QUIET, SDPA, WASH
from perplexity_plot import RULES, TITLES, write_names
from record import FIGURES, RESULTS

WANTED = 1.0
"""Points below exact attention."""
TEMPLATE = "raw"


def results(folder: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """By model, what `nearfield ruler` has written."""
    found = {path.stem.removeprefix("ruler_"): json.loads(path.read_text()) for path in sorted(folder.glob("ruler_*.json"))}
    return {name: found[name] for name in [*(x for x in TITLES if x in found), *(x for x in found if x not in TITLES)]}


def scores(found: dict[str, Any], length: int | None = None, task: str | None = None) -> dict[str, dict[str, Any]]:
    """By way, those of a length (None: the longest) and a task (None: all); ways that lack tasks are left out."""
    every = [row for row in found["scores"] if row["template"] == TEMPLATE]
    length = max(row["length"] for row in every if row["length"] is not None) if length is None else length
    chosen = {row["way"]: row for row in every if row["length"] == length and row["task"] == task}
    return {way: row for way, row in chosen.items() if row["parts"] == chosen["exact"]["parts"]}


def plot(found: dict[str, dict[str, Any]], path: Path) -> None:
    """One panel for each model."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold"}
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, len(found), figsize=(6.4 * len(found), 4.4), squeeze=False, layout="constrained")
        for axis, (name, one) in zip(axes[0], found.items(), strict=True):
            draw(axis, TITLES.get(name, name), scores(one))
        figure.savefig(path, dpi=140)
        plt.close(figure)


def draw(axis: Any, title: str, ways: dict[str, dict[str, Any]]) -> None:
    lines: dict[str, list[tuple[float, dict[str, Any]]]] = {}
    for way, row in ways.items():
        rule, _, share = way.rpartition("-")
        if share.replace(".", "").isdigit():
            # How many keys are read by weight is not in the name.
            lines.setdefault(rule, []).append((100 * row["share"] if rule == "weight" else float(share), row))
    axis.set_title(title, loc="left")
    axis.set(
        xscale="log", xlabel="keys that a token of the answer reads", ylabel="RULER, points more than exact on the same prompts"
    )
    axis.set_ylim(1.3 * min(-2 * WANTED, *(-row["loss"] for row in ways.values() if row["loss"] is not None)), 8)
    axis.axhspan(-WANTED, WANTED, color=WASH, zorder=0, linewidth=0)
    axis.axhline(0, color=SDPA, linewidth=1)
    names = []
    for rule, points in lines.items():
        label, color, marker = RULES.get(rule, ("cells", CELLS, "o"))
        ours = rule == "cells"
        x, y = zip(*sorted((share, -row["loss"]) for share, row in points), strict=True)
        wide = {"linewidth": 2.4, "markersize": 6.5, "zorder": 5} if ours else {"linewidth": 1, "markersize": 5, "zorder": 3}
        axis.plot(x, y, marker=marker, color=color, **wide)
        counts = sorted({row["answers"] for _, row in points})
        told = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
        names.append((x[0], y[0], f"{label} ({told} prompts)", color, "bold" if ours else "normal"))
    if "default" in ways:
        row = ways["default"]
        place = 100 * row["share"], -row["loss"]
        axis.plot(*place, "*", color=CELLS, markersize=14, markeredgecolor="white", zorder=6)
        at: Any = {"textcoords": "offset points", "color": CELLS, "weight": "bold", "fontsize": 8, "zorder": 7, "bbox": HALO}
        axis.annotate(f"CellCache() ({row['answers']} prompts)", place, (-9, -13), ha="right", **at)
    axis.set_xlim(0.35, 16)
    axis.set_xticks([1.5, 3, 6, 12])
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}%")
    axis.minorticks_off()
    axis.text(0.36, 0, "exact", ha="left", va="bottom", color=SDPA, weight="bold", fontsize=8)
    axis.grid(axis="y", color="#ececf1", linewidth=0.7, zorder=0)
    axis.tick_params(colors=QUIET, labelcolor="black")
    write_names(axis, names)


if __name__ == "__main__":
    known = results()
    if not known:
        raise SystemExit(f"there is no ruler_MODEL.json in {RESULTS}; `nearfield ruler MODEL --out DIR` writes DIR/ruler.json")
    plot(known, FIGURES / "ruler.png")
    print(FIGURES / "ruler.png")
