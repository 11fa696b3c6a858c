"""The picture of bench_peers_gpu.py: error against speed, one panel for each kind of input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cells_plot import CELLS, QUIET, SDPA

COMPARED, DIM = 131_072, 128
"""The length and dimension that are drawn of inputs that are made; what comes nearest where they were not measured."""
TITLES = {
    "real": "Real inputs",
    "strewn": "Clusters all over the place",
    "runs": "Clusters in runs of 128 keys",
}
LOOKS = {
    "FlexAttention": ("#3d6fb6", "s"),
    "MInference block-sparse": ("#4f9d87", "D"),
    "MInference vertical-slash": ("#4f9d87", "X"),
    "FlexPrefill": ("#8d6cab", "^"),
    "XAttention": ("#b5892e", "v"),
    "MoBA (fla)": ("#c25b8e", "P"),
    "HyperAttention": ("#7a8b3c", "h"),
    "flash-sparse-attn": ("#5f6b7a", "*"),
}
SHORT = {"MInference block-sparse": "MInference blocks", "MInference vertical-slash": "MInference slash"}

Point = tuple[float, float, str]


def plot(sections: dict[str, Any], folder: Path) -> None:
    """`peers.png`, from forward sections: those kinds of input that have been measured."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = {kind: found for kind in TITLES if (found := _section(sections, kind)) is not None}
    if not panels:
        print("nothing to draw yet: measure forward")
        return
    style: Any = {"font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.titleweight": "bold"}
    with plt.rc_context(style):
        figure, axes = plt.subplots(1, len(panels), figsize=(4.9 * len(panels), 4.9), squeeze=False, sharey=True)
        figure.set_layout_engine("constrained", w_pad=0.1)
        for axis, (kind, (n, dim, found)) in zip(axes[0], panels.items(), strict=True):
            _draw(axis, found)
            axis.set_title(f"{TITLES[kind]}, {n:,} keys, d = {dim}", loc="left", fontsize=9)
        axes[0, 0].set_ylabel("mean relative error of a row")
        figure.savefig(folder / "peers.png", dpi=160)
        plt.close(figure)


def _section(sections: dict[str, Any], kind: str) -> tuple[int, int, dict[str, Any]] | None:
    """(length, dimension, results) of this kind that comes nearest to what is to be drawn."""
    found = []
    for name, section in sections.items():
        if name.startswith("forward/") and (part := section["parts"].get(kind)) and part.get("sdpa"):
            _, n, dim = name.split("/")
            found.append((abs(int(n) - COMPARED), abs(int(dim) - DIM), int(n), int(dim), part))
    return min(found, key=lambda x: x[:2])[2:] if found else None


def _points(found: dict[str, Any]) -> dict[str, list[Point]]:
    """(speed, error, label) by peer, and ours as two: row by row and shared."""
    points: dict[str, list[Point]] = {}
    for label, one in found["methods"].items():
        if "speedup" in one and one["errors"]["mean"] not in (0.0, float("inf")):
            name = ("shared" if "share" in one["arguments"] else "rows") if one["peer"] == "nearfield" else one["peer"]
            points.setdefault(name, []).append((one["speedup"], one["errors"]["mean"], label))
    return points


def _draw(axis: Any, found: dict[str, Any]) -> None:
    axis.set(xscale="log", yscale="log", xlabel="times as fast as SDPA")
    points = _points(found)
    texts: list[tuple[float, float, str, str, str]] = []
    for name, line, label in (("rows", "-", "Cells"), ("shared", (0, (4, 1.5)), "Cells, shared")):
        if own := sorted(points.pop(name, [])):
            axis.plot([x for x, _, _ in own], [y for _, y, _ in own], "o", linestyle=line, color=CELLS, linewidth=2, markersize=5)
            texts.append((*own[-1][:2], label, CELLS, "bold"))
    for name, some in points.items():
        color, marker = LOOKS.get(name, (QUIET, "o"))
        some = sorted(some)
        axis.plot([x for x, _, _ in some], [y for _, y, _ in some], ":", color=color, linewidth=0.8, alpha=0.6, zorder=1)
        axis.plot([x for x, _, _ in some], [y for _, y, _ in some], marker, color=color, markersize=6, linestyle="none")
        texts.append((*some[-1][:2], SHORT.get(name, name), color, "normal"))
    sdpa = found["sdpa"]["errors"]["mean"]
    axis.plot([1], [sdpa], "o", color=SDPA, markersize=6)
    texts.append((1.0, sdpa, "SDPA", SDPA, "bold"))
    axis.axvline(1, color=SDPA, linewidth=1, linestyle=(0, (2, 2)), zorder=0)
    axis.margins(x=0.22, y=0.1)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
    axis.xaxis.set_minor_formatter(lambda x, _: f"{x:g}×" if f"{x:.0e}"[0] in "25" else "")
    axis.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
    axis.tick_params(axis="x", which="minor", labelsize=8)
    axis.grid(alpha=0.25, linewidth=0.6)
    _label(axis, texts)


def _label(axis: Any, texts: list[tuple[float, float, str, str, str]]) -> None:
    """Write each name beside its last point, where it covers no other name and, if possible, no point."""
    figure = axis.figure
    figure.canvas.draw()
    points = [
        axis.transData.transform(xy) for line in axis.lines for xy in line.get_xydata() if line.get_marker() not in ("", "None")
    ]
    taken: list[Any] = []
    places = [(7, 0, "left", "center"), (0, 8, "center", "bottom"), (0, -8, "center", "top"), (-7, 0, "right", "center")]
    places += [(6, 7, "left", "bottom"), (6, -7, "left", "top"), (-6, 7, "right", "bottom"), (-6, -7, "right", "top")]
    frame = axis.get_window_extent()
    for x, y, text, color, weight in sorted(texts, key=lambda item: item[1]):
        best: tuple[float, Any] | None = None
        for dx, dy, across, up in places:
            options: Any = {
                "textcoords": "offset points",
                "color": color,
                "fontsize": 8,
                "weight": weight,
                "ha": across,
                "va": up,
            }
            written = axis.annotate(text, (x, y), (dx, dy), **options)
            box = written.get_window_extent(figure.canvas.get_renderer())
            cost = 10.0 * sum(box.overlaps(other) for other in taken) + sum(box.contains(*point) for point in points)
            cost += 20.0 * (box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1)
            if best is not None and best[0] <= cost:
                written.remove()
                continue
            if best is not None:
                best[1].remove()
            best = cost, written
        assert best is not None
        taken.append(best[1].get_window_extent(figure.canvas.get_renderer()))
