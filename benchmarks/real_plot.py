"""The plot of bench_real.py: errors of layers and heads, as a heat map."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def plot(results: dict[str, Any], folder: Path) -> None:
    """`cells_real.png`: the error of every head, exact top-k above Cells, and their ratio, for the first setting."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    import numpy
    from matplotlib.colors import LogNorm, TwoSlopeNorm

    first = results["settings"][0]
    topk, cells = (numpy.array(first["per_head"][name]).T for name in ("topk", "cells"))
    # Where attention rests on a few keys, both errors are mere rounding, and their ratio means nothing.
    ratio = numpy.log2(numpy.maximum(cells, 1e-6) / numpy.maximum(topk, 1e-6)).clip(-4, 4)
    low, high = min(topk.min(), cells.min()), max(topk.max(), cells.max())
    shared = LogNorm(max(low, high * 1e-4), high)
    reach = max(1.0, numpy.abs(ratio).max())
    layers = results["layers"]
    with plt.rc_context({"font.size": 9, "axes.titleweight": "bold"}):
        figure, axes = plt.subplots(3, 1, figsize=(8.6, 7.4), constrained_layout=True, sharex=True)
        numbers = first["all_layers"]
        means = {
            name: f"mean {numbers[f'{name}_mean']:.1%}, worst head {numbers[f'{name}_worst_head']:.0%}"
            for name in ("topk", "cells")
        }
        better = f"top-k is better in {numbers['heads_where_topk_is_better']} of {numbers['heads']} heads"
        titles = (
            f"Exact top-k, {first['keys']:.0f} keys of the past: {means['topk']}",
            f"Cells, as many keys: {means['cells']}",
            f"Cells over top-k: {numbers['ratio_of_means']:.2f} in the mean; {better}",
        )
        for axis, title, image in zip(axes, titles, (topk, cells, ratio), strict=True):
            looks = (
                {"cmap": "PuOr", "norm": TwoSlopeNorm(0, -reach, reach)}
                if image is ratio
                else {"cmap": "magma_r", "norm": shared}
            )
            drawn = axis.imshow(image, aspect="auto", interpolation="nearest", **looks)
            axis.set_title(title, loc="left", fontsize=9.5)
            axis.set_ylabel("head")
            axis.set_yticks(range(0, len(image), 2))
            axis.tick_params(length=0)
            axis.set_xticks([x - 0.5 for x in range(1, image.shape[1])], minor=True)
            axis.set_yticks([y - 0.5 for y in range(1, image.shape[0])], minor=True)
            axis.grid(which="minor", color="white", linewidth=0.8)
            axis.tick_params(which="minor", length=0)
            for spine in axis.spines.values():
                spine.set_visible(False)
            if image is cells:
                bar = figure.colorbar(drawn, ax=axes[:2], shrink=0.8, label="relative error of a row, mean over rows")
                bar.ax.yaxis.set_major_formatter(lambda y, _: f"{100 * y:g}%")
            elif image is ratio:
                bar = figure.colorbar(drawn, ax=axis, label="Cells / top-k")
                bar.ax.yaxis.set_major_formatter(lambda y, _: f"{2.0**y:.2g}×")
        step = max(1, len(layers) // 10)
        axes[-1].set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
        axes[-1].set_xlabel("layer")
        figure.savefig(folder / "cells_real.png", dpi=160)
        plt.close(figure)
