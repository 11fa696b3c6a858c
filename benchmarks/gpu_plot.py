"""The picture of bench_gpu.py: time against length, how many times faster at 131,072 keys, and the error next to exact top-k."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cells_plot import CELLS, QUIET, SDPA, WASH

TOPK, BETWEEN, PALE = "#4f9d87", "#e8967c", "#f6cfc3"
LINES = {64: "-", 128: (0, (4, 1.5))}
COMPARED = 131_072

Row = dict[str, Any]
Draw = Callable[[Any, dict[str, Any]], None]


def plot(sections: dict[str, Any], folder: Path) -> None:
    """`gpu.png`, from the sections `forward`, `training` and `accuracy`: those of them that have been measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels: list[Draw] = [_times(causal) for causal in (False, True)] if "forward" in sections else []
    if _ratios(sections):
        panels.append(_draw_ratios)
    if "accuracy" in sections:
        panels.append(_draw_errors)
    if not panels:
        print("nothing to draw yet: measure forward, training or accuracy")
        return
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold"}
    with plt.rc_context(style):
        lines = -(-len(panels) // 2)
        figure, axes = plt.subplots(lines, 2, figsize=(10.5, 4.1 * lines), squeeze=False)
        figure.set_layout_engine("constrained", w_pad=0.1, h_pad=0.12)
        for axis in axes.flat[len(panels) :]:
            axis.remove()
        for axis, draw in zip(axes.flat, panels, strict=False):
            draw(axis, sections)
        if "forward" in sections:
            limits = [axis.get_ylim() for axis in axes[0]]
            for axis in axes[0]:
                axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
        figure.savefig(folder / "gpu.png", dpi=160)
        plt.close(figure)


def _times(causal: bool) -> Draw:
    """Draws the forward pass with or without a mask."""

    def draw(axis: Any, sections: dict[str, Any]) -> None:
        results = sections["forward"]
        mine = [row for row in results["rows"] if row["causal"] == causal]
        dims = sorted({row["dim"] for row in mine})
        for dim in dims:
            _draw_lines(axis, [row for row in mine if row["dim"] == dim], LINES.get(dim, "-"), fill=dim == dims[0])
        sizes = sorted({row["n"] for row in mine})
        top = [row for row in mine if row["n"] == sizes[-1]]
        exact, ours = max(row["exact"]["ms"] for row in top), min(own["ms"] for row in top for own in row["ours"].values())
        name = "SDPA, $n^2$ (not run)" if top[0]["exact"]["extrapolated"] else "SDPA"
        for label, y, color, up in ((name, exact, SDPA, 7), ("Cells()", ours, CELLS, -30)):
            axis.annotate(label, (sizes[-1], y), (-6, up), textcoords="offset points", color=color, ha="right", weight="bold")
        for trend in results["trends"]:
            if trend["causal"] == causal:
                axis.plot([], [], color=CELLS, linestyle=LINES.get(trend["dim"], "-"), label=_told(trend))
        if causal:
            axis.plot([], [], color=BETWEEN, linewidth=1.2, label="share=128")
        axis.legend(frameon=False, fontsize=8, loc="lower right", handlelength=2.6)
        axis.set(xscale="log", yscale="log", xlabel="keys and queries, n")
        axis.set_title(f"Forward pass, {'causal' if causal else 'no mask'}", loc="left")
        if not causal:
            axis.set_ylabel(f"milliseconds, {results['heads']} heads, bfloat16, {results['card']['gpu'] or 'CPU'}")
        axis.set_xticks(sizes, [f"{n // 1024}k" if n < 2**20 else f"{n // 2**20}M" for n in sizes])
        axis.minorticks_off()
        axis.margins(y=0.1)
        # Room for the legend below all lines.
        axis.set_ylim(bottom=min(min(row["exact"]["ms"], row["ours"]["default"]["ms"]) for row in mine) / 20)
        axis.yaxis.set_major_formatter(lambda y, _: f"{y:,g}")
        axis.grid(alpha=0.25, linewidth=0.6)

    return draw


def _draw_lines(axis: Any, rows: list[Row], line: Any, fill: bool) -> None:
    sizes = [row["n"] for row in rows]
    exact, ours = [row["exact"]["ms"] for row in rows], [row["ours"]["default"]["ms"] for row in rows]
    if fill:
        faster = [a >= b for a, b in zip(exact, ours, strict=True)]
        axis.fill_between(sizes, ours, exact, where=faster, interpolate=True, color=WASH, zorder=0, linewidth=0)
    run = sum(not row["exact"]["extrapolated"] for row in rows)
    axis.plot(sizes[:run], exact[:run], color=SDPA, linestyle=line, marker="o", markersize=3.5, linewidth=1.4)
    axis.plot(sizes[run - 1 :], exact[run - 1 :], color=SDPA, linestyle=":", linewidth=1.2)
    axis.plot(sizes[run:], exact[run:], "o", color=SDPA, markerfacecolor="white", markersize=3.5)
    if all("shared" in row["ours"] for row in rows):
        axis.plot(sizes, [row["ours"]["shared"]["ms"] for row in rows], color=BETWEEN, linestyle=line, linewidth=1.2)
    axis.plot(sizes, ours, color=CELLS, linestyle=line, marker="o", markersize=3.5, linewidth=2.0)


def _told(trend: dict[str, Any]) -> str:
    """The length from which Cells are faster, and how their time grows."""
    where = f"faster from {trend['faster_from'] // 1024}k on" if trend["faster_from"] else "not faster yet"
    grows = f"; $n^{{{trend['exponent']:.2f}}}$ from 64k on" if trend["exponent"] else ""
    return f"d = {trend['dim']}: {where}{grows}"


def _ratios(sections: dict[str, Any]) -> list[tuple[str, dict[str, float]]]:
    """(label, exact over ours by setting) at 131,072 keys."""
    found = []
    for section in ("forward", "training"):
        rows = sections.get(section, {}).get("rows", ())
        for row in sorted((row for row in rows if row["n"] == COMPARED), key=lambda row: row["causal"]):
            label = f"{section}, {'causal' if row['causal'] else 'no mask'},\nd = {row['dim']}"
            found.append((label, {name: own["exact_over_ours"] for name, own in row["ours"].items()}))
    return found


def _draw_ratios(axis: Any, sections: dict[str, Any]) -> None:
    found = _ratios(sections)
    most = max(max(ratios.values()) for _, ratios in found)
    colors = {"default": CELLS, "shared": BETWEEN, "fast": QUIET, "accurate": PALE}
    for place, (_, ratios) in enumerate(found):
        names = [name for name in colors if name in ratios]
        high = 0.8 / max(2, len(names))
        for number, name in enumerate(names):
            y = place + (number - (len(names) - 1) / 2) * high
            axis.barh(y, ratios[name], high * 0.9, color=colors[name])
            axis.text(ratios[name] + 0.015 * most, y, f"{ratios[name]:.1f}×", va="center", fontsize=8)
    labels = {"default": "Cells()", "shared": "share=128", "fast": "probes=4", "accurate": "probes=20"}
    for name, color in colors.items():
        axis.barh([0], [0], color=color, label=labels[name])
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.4, -0.12), ncols=4, columnspacing=1.0)
    axis.axvline(1, color=SDPA, linewidth=1, linestyle=(0, (2, 2)))
    axis.set_yticks(range(len(found)), [label for label, _ in found], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlim(0, 1.14 * most)
    axis.set_title(f"Times as fast as SDPA at {COMPARED // 1024}k keys", loc="left")
    axis.set_xlabel("time of the fastest backend / ours")
    axis.tick_params(axis="y", length=0)
    axis.set_axisbelow(True)
    axis.grid(axis="x", alpha=0.25, linewidth=0.6)


def _draw_errors(axis: Any, sections: dict[str, Any]) -> None:
    """Mean over heads (full) and worst head (open), Cells above top-k with as many keys."""
    from matplotlib.ticker import LogLocator

    rows = sections["accuracy"]["rows"]
    for place, row in enumerate(rows):
        for way, color, y in (("cells", CELLS, place - 0.15), ("topk", TOPK, place + 0.15)):
            mean, worst = row[f"{way}_mean"], row[f"{way}_worst_head"]
            axis.plot([mean, worst], [y, y], color=color, linewidth=1.6)
            axis.plot(mean, y, "o", color=color, markersize=5.5)
            axis.plot(worst, y, "o", color=color, markersize=5.5, markerfacecolor="white")
        axis.plot([row["sdpa_mean"]] * 2, [place - 0.3, place + 0.3], color=QUIET, linewidth=1.4)
        if place and (row["inputs"], row["causal"]) != (rows[place - 1]["inputs"], rows[place - 1]["causal"]):
            axis.axhline(place - 0.5, color=QUIET, linewidth=0.5, alpha=0.5)
    labels = [
        f"{row['inputs']}, {'causal' if row['causal'] else 'no mask'}\n{row['settings']['probes']} cells of "
        f"{row['settings']['cell_size']}{', together' * (row['setting'] == 'shared')}: {row['keys_of_topk']:,.0f} keys"
        for row in rows
    ]
    axis.set_xscale("log")
    axis.set_yticks(range(len(rows)), labels, fontsize=8)
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)
    axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.minorticks_off()
    for label, color, face in (("Cells, mean", CELLS, CELLS), ("worst head", CELLS, "white")):
        axis.plot([], [], "o", color=color, markerfacecolor=face, label=label)
    for label, color, face in (("top-k, mean", TOPK, TOPK), ("worst head", TOPK, "white")):
        axis.plot([], [], "o", color=color, markerfacecolor=face, label=label)
    axis.plot([], [], "|", color=QUIET, markersize=9, label="SDPA: rounding")
    axis.legend(frameon=False, fontsize=8, loc="upper center", bbox_to_anchor=(0.35, -0.09), ncols=3, columnspacing=1.2)
    axis.xaxis.set_major_formatter(lambda x, _: f"{100 * x:g}%")
    axis.set_title("Relative error of a row", loc="left")
    axis.set_axisbelow(True)
    axis.grid(axis="x", alpha=0.25, linewidth=0.6)
