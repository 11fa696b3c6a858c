"""The picture of bench_peers_gpu.py: error against speed, one panel for each kind of input."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

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

SHARED = "#a8432b"
PLACES = (
    (7, 0, "left", "center"),
    (0, 7, "center", "bottom"),
    (0, -7, "center", "top"),
    (-7, 0, "right", "center"),
    (5, 6, "left", "bottom"),
    (5, -6, "left", "top"),
    (-5, 6, "right", "bottom"),
    (-5, -6, "right", "top"),
)
"""Where a name may stand beside its point: offset and alignment."""

Point = tuple[float, float, str]


class Name(NamedTuple):
    """To be written beside one of these points, best beside the first."""

    text: str
    points: list[tuple[float, float]]
    color: str
    weight: str


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
        names = []
        for axis, (kind, (n, dim, found)) in zip(axes[0], panels.items(), strict=True):
            names.append(_draw(axis, found))
            axis.set_title(f"{TITLES[kind]}, {n:,} keys, d = {dim}", loc="left", fontsize=9)
        axes[0, 0].set_ylabel("mean relative error of a row")
        # Names are placed where everything else has found its place for good.
        figure.canvas.draw()
        figure.set_layout_engine("none")
        for axis, some in zip(axes[0], names, strict=True):
            _write(axis, some)
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


def _draw(axis: Any, found: dict[str, Any]) -> list[Name]:
    """All but the names, which it returns."""
    axis.set(xscale="log", yscale="log", xlabel="times as fast as SDPA")
    points = _points(found)
    names: list[Name] = []
    for name, line, label, color in (("rows", "-", "Cells", CELLS), ("shared", (0, (4, 1.5)), "Cells, shared", SHARED)):
        if own := sorted(points.pop(name, [])):
            xy = [point[:2] for point in own]
            axis.plot(*zip(*xy, strict=True), "o", linestyle=line, color=color, linewidth=2, markersize=5)
            names.append(Name(label, xy[::-1], color, "bold"))
    for name, some in points.items():
        color, marker = LOOKS.get(name, (QUIET, "o"))
        xy = [point[:2] for point in sorted(some)]
        axis.plot(*zip(*xy, strict=True), marker, linestyle=":", color=color, linewidth=0.8, markersize=6)
        names.append(Name(SHORT.get(name, name), xy[::-1], color, "normal"))
    exact = found["sdpa"]["errors"]["mean"]
    axis.plot([1], [exact], "o", color=SDPA, markersize=6)
    names.append(Name("SDPA", [(1.0, exact)], SDPA, "bold"))
    axis.axvline(1, color=SDPA, linewidth=1, linestyle=(0, (2, 2)), zorder=0)
    axis.margins(x=0.22, y=0.1)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:g}×")
    axis.xaxis.set_minor_formatter(lambda x, _: f"{x:g}×" if f"{x:.0e}"[0] in "25" else "")
    axis.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
    axis.tick_params(axis="x", which="minor", labelsize=8)
    axis.grid(alpha=0.25, linewidth=0.6)
    return names


def _write(axis: Any, names: list[Name]) -> None:
    """Each name beside one of its points, where it covers the least: other names, points and lines, in this order."""
    renderer = axis.figure.canvas.get_renderer()
    lines = [axis.transData.transform(line.get_xydata()) for line in axis.lines[:-1]]
    marks = [point for line in lines for point in line]
    between = [a + (b - a) * part / 16 for line in lines for a, b in pairwise(line) for part in range(1, 16)]
    frame = axis.get_window_extent()
    taken: list[Any] = []

    def cost(box: Any) -> float:
        outside = box.x0 < frame.x0 or box.x1 > frame.x1 or box.y0 < frame.y0 or box.y1 > frame.y1
        covered = 3.0 * sum(box.padded(5).contains(*point) for point in marks) + 0.3 * sum(
            box.contains(*point) for point in between
        )
        return 40.0 * outside + 20.0 * sum(box.overlaps(other) for other in taken) + covered

    for name in sorted(names, key=lambda name: len(name.points)):
        tries = []
        for number, (point, (dx, dy, across, up)) in enumerate(product(name.points, PLACES)):
            where: Any = {"textcoords": "offset points", "ha": across, "va": up}
            text = axis.annotate(name.text, point, (dx, dy), color=name.color, fontsize=8, weight=name.weight, **where)
            box = text.get_window_extent(renderer)
            tries.append((cost(box) + 0.01 * number, number, text, box))
        best = min(tries)
        for _, _, text, _ in tries:
            if text is not best[2]:
                text.remove()
        taken.append(best[3])
