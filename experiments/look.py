"""How the figures look: the colours of docs/figures, few lines, labels where the eye is."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

# A file is all that is wanted: no window, whatever the user's default backend.
matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from experiments.words import middle

INK, CORAL, SAGE, OCHRE, PLUM, QUIET = "#3d405b", "#e07a5f", "#5a9a7f", "#d19a3c", "#8a6a9e", "#8d8f9e"
DPI = 160
STYLE: Any = {
    "font.size": 9.5,
    "font.family": ["DejaVu Sans"],
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": QUIET,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "lines.markersize": 4,
    "lines.linewidth": 1.6,
    "svg.fonttype": "path",
    "svg.hashsalt": "nearfield",
}


def styled(draw: Callable[..., Mapping[str, Figure]]) -> Callable[..., Mapping[str, Figure]]:
    """The function, with its figures made in this style."""

    def drawn(*arguments: Any) -> Mapping[str, Figure]:
        with plt.rc_context(STYLE):
            return draw(*arguments)

    return drawn


def panels(rows: int, columns: int, width: float, height: float, **options: Any) -> tuple[Figure, Any]:
    """A figure with a grid of axes, always two-dimensional."""
    figure, axes = plt.subplots(rows, columns, figsize=(width, height), layout="constrained", squeeze=False, **options)
    return figure, axes


def band(
    axis: Any, x: Sequence[float], each: Sequence[Sequence[float]], color: Any, label: str | None = None, **line: Any
) -> None:
    """Median over seeds as a line, smallest to largest as a band; `each` holds the seeds' values at every x."""
    axis.fill_between(x, [min(values) for values in each], [max(values) for values in each], color=color, alpha=0.16, linewidth=0)
    axis.plot(x, [middle(values) for values in each], color=color, label=label, **line)


def say(axis: Any, x: float, y: float, text: str, color: str, at: tuple[float, float] = (5, 0), **how: Any) -> None:
    """A label beside a point, in the colour of its line."""
    halo = [withStroke(linewidth=2.5, foreground="white")]  # legible across lines
    options = {"va": "center", "ha": "left", "weight": "bold", "fontsize": 8.5, "path_effects": halo, **how}
    axis.annotate(text, (x, y), at, textcoords="offset points", color=color, annotation_clip=False, **options)


def end_labels(axis: Any, ends: Sequence[tuple[float, float, str, str]], height: float, gap: float = 11.0) -> None:
    """Labels (x, y, text, colour) at the ends of lines on a logarithmic axis `height` points high, pushed apart."""
    low, high = axis.get_ylim()
    unit = height / math.log(high / low)
    taken: list[tuple[float, float]] = []
    for x, y, text, color in sorted(ends, key=lambda end: end[1]):
        place = math.log(y / low) * unit
        lift = 0.0
        for other, used in taken:
            if abs(math.log(x / other)) < 1.2 and place + lift - used < gap:
                lift = used + gap - place
        taken.append((x, place + lift))
        say(axis, x, y, text, color, (7, lift))


def alike(axes: Iterable[Any], room: float = 1.0) -> None:
    """The same heights for all of them, with `room` times as much at the top."""
    axes = list(axes)
    low, high = min(axis.get_ylim()[0] for axis in axes), max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(low, room * high)


def lengths(axis: Any, sizes: Sequence[int], label: str = "keys and queries, n") -> None:
    """A logarithmic axis of lengths, labelled 5k, 100k, 1M."""
    axis.set(xscale="log", xlabel=label)
    axis.set_xticks(sizes, [short(n) for n in sizes])
    axis.minorticks_off()


def short(n: float) -> str:
    return f"{n / 1e6:g}M" if n >= 1e6 else f"{n / 1e3:g}k" if n >= 1000 else f"{n:g}"


def save(figures: Mapping[str, Figure], folder: Path) -> None:
    """Every figure as PNG and SVG. The same rows give the same files."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for name, figure in figures.items():
            # Everything finds its place once, and not by a drawing that nobody sees before each that is kept.
            usual, figure.dpi = figure.dpi, DPI
            engine = figure.get_layout_engine()
            if engine is not None:
                engine.execute(figure)
                figure.set_layout_engine(None)
            figure.dpi = usual
            figure.savefig(folder / f"{name}.png", dpi=DPI)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
            plt.close(figure)
