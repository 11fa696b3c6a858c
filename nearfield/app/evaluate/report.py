"""The results of `nearfield eval`: as a table, as JSON, as a config to register, and as a plot."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table

import nearfield
from nearfield.app.environment import environment as machine
from nearfield.app.evaluate.run import Evaluation, Recommendation, SettingResult
from nearfield.app.evaluate.settings import PastTopK, Setting, percent
from nearfield.hf.config import LayerConfig, describe, write_config

NUMBER = r"(?:-?\d[\d.eE+-]*|null)"


def environment(model: Any) -> dict[str, Any]:
    """Machine, versions, device and dtype of the measurements."""
    dtype = str(model.dtype).removeprefix("torch.")
    return {**machine(model.device), "transformers": version("transformers"), "device": str(model.device), "dtype": dtype}


def tabulated(found: Evaluation) -> Table:
    """One row per setting: keys, perplexity and its excess in each text, errors of heads, and time."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nattention", no_wrap=True)
    table.add_column("keys/\nquery", justify="right", no_wrap=True)
    for text in found.texts:
        table.add_column(f"{_short(text)}\nperplexity", justify="right", no_wrap=True)
        table.add_column("\nexcess", justify="right", no_wrap=True)
    for heading in ("error\nmean", "of heads\nworst", "time\n(s)"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = [found.exact, *found.results]
    for i, result in enumerate(rows):
        last = i + 1 == len(rows) or rows[i + 1].setting.kind != result.setting.kind
        table.add_row(*_table_row(result), end_section=last)
    if found.recommendation is not None:
        table.add_row(*_table_row(found.recommendation.result), style="bold green")
    return table


def _short(text: str) -> str:
    return text if len(text) <= 16 else text[:15] + "…"


def _table_row(result: SettingResult) -> list[str]:
    cells = [result.setting.label, "" if result.keys is None else f"{result.keys:,.0f}"]
    for one in result.perplexities:
        plain = result.setting.kind == "exact"
        cells += [f"{one.perplexity:.3f}", "" if plain else f"{100 * one.excess:+.2f}% ± {100 * one.stderr:.2f}"]
    if result.errors is None:
        cells += ["", ""]
    else:
        served = result.errors[result.errors.isfinite()]
        cells += [f"{served.mean():.2%}", f"{served.max():.1%}"]
    return [*cells, f"{result.seconds:.1f}"]


def sentence(found: Evaluation) -> str:
    """The recommendation in words."""
    recommendation, all_keys = found.recommendation, found.exact.keys or 1.0
    assert recommendation is not None
    chosen, limit = recommendation.chosen, percent(recommendation.tolerance)
    rungs, keys = chosen.mixture.rungs, chosen.mixture.keys
    if set(rungs) == {-1}:
        return f"Within {limit} of exact perplexity: exact attention only. {found.geometry.remedy}"
    counted = Counter("exact" if rung < 0 else recommendation.ladder[rung].label for rung in rungs)
    order = [*(setting.label for setting in recommendation.ladder), "exact"]
    parts = ", ".join(f"{label} ({counted[label]})" for label in sorted(counted, key=order.index))
    return (
        f"Within {limit} of exact perplexity: {keys / all_keys:.0%} of the keys, {100 * chosen.excess:+.2f}% in the worst "
        f"text. Layers: {parts}."
    )


def as_json(found: Evaluation, about: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that was measured. Numbers that are not finite become null."""
    geometry, chosen = found.geometry, found.recommendation
    whole = {
        **about,
        **geometry.sizes,
        "layers": found.layers,
        "texts": found.texts,
        "settings": [_as_json(result) for result in (found.exact, *found.results)],
        "recommendation": None if chosen is None else _recommended(chosen, found),
    }
    told: dict[str, Any] = _finite(whole)
    return told


def json_text(content: Mapping[str, Any]) -> str:
    """As JSON, with lists of numbers on one line, and null for numbers that are not finite."""
    text = json.dumps(_finite(content), indent=2, allow_nan=False)
    return re.sub(rf"\[\s*({NUMBER}(?:,\s*{NUMBER})*)\s*\]", lambda part: "[" + " ".join(part[1].split()) + "]", text) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_json(result: SettingResult) -> dict[str, Any]:
    errors = None if result.errors is None else [[_round(x) for x in heads] for heads in result.errors.tolist()]
    return {
        "label": result.setting.label,
        "method": _described(result.setting),
        "budget": result.setting.budget,
        "keys_per_query": result.keys,
        "seconds": result.seconds,
        "perplexity": [one.perplexity for one in result.perplexities],
        "excess": [one.excess for one in result.perplexities],
        "excess_stderr": [one.stderr for one in result.perplexities],
        "relative_error_by_layer_and_head": errors,
    }


def _described(setting: Setting) -> Any:
    method = setting.method
    if isinstance(method, Mapping):
        return {str(layer): describe(one) for layer, one in method.items()}
    return repr(method) if isinstance(method, PastTopK) else describe(method)


def _round(error: float) -> float | None:
    return None if error != error else float(f"{error:.4g}")


def _recommended(chosen: Recommendation, found: Evaluation) -> dict[str, Any]:
    return {
        "tolerance": chosen.tolerance,
        "in_words": sentence(found),
        "ladder": [{"label": setting.label, "method": _described(setting)} for setting in chosen.ladder],
        "rung_by_layer": list(chosen.chosen.mixture.rungs),
        "sensitivity_by_layer": [_round(x) for x in chosen.sensitivity.tolist()],
        **{key: value for key, value in _as_json(chosen.result).items() if key not in ("budget", "label", "method")},
        "trials": [
            {
                "rung_by_layer": list(one.mixture.rungs),
                "keys_per_query": one.mixture.keys,
                "predicted": one.mixture.predicted,
                "excess": one.excess,
            }
            for one in chosen.trials
        ],
    }


def save(found: Evaluation, about: Mapping[str, Any], folder: Path) -> Path:
    """Write `eval.json` (`cache.json` for answers) into a folder; returns the path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{found.geometry.name}.json"
    path.write_text(json_text(as_json(found, about)), encoding="utf-8")
    return path


def save_config(found: Evaluation, about: Mapping[str, Any], path: Path, kept: LayerConfig | None) -> None:
    """Write what was chosen for prompts or for answers, and keep what `kept`, for the same model, says of the other."""
    chosen = found.recommendation
    assert chosen is not None
    write_config(path, _joined(chosen.config, _about(found, chosen, about), kept))


def _joined(new: LayerConfig, about: Mapping[str, Any], kept: LayerConfig | None) -> LayerConfig:
    """What was chosen now for prompts or for answers, with what was chosen before for the other."""
    if new.cache is None:
        others = {} if kept is None else {"cache": kept.cache, "cache_about": kept.cache_about}
        return replace(new, about=about, **others)
    return replace(kept or new, num_hidden_layers=new.num_hidden_layers, cache=new.cache, cache_about=about)


def _about(found: Evaluation, chosen: Recommendation, about: Mapping[str, Any]) -> dict[str, Any]:
    """How the config was made, for people who find it later."""
    exact = found.exact.perplexities
    return {
        "model": about.get("model"),
        **{name: size for name, size in found.geometry.sizes.items() if name in ("tokens", "written")},
        "tolerance": percent(chosen.tolerance),
        "keys_per_query": round(chosen.chosen.mixture.keys, 1),
        "keys_per_query_exact": found.exact.keys,
        "perplexity": {
            text: {"exact": round(right.perplexity, 4), "this": round(ours.perplexity, 4)}
            for text, right, ours in zip(found.texts, exact, chosen.result.perplexities, strict=True)
        },
        "nearfield": nearfield.__version__,
    }


COLOURS = {
    "cells": "#4C6EF5",
    "topk": "#E8590C",
    "auto": "#37B24D",
    "config": "#7048E8",
    "small cells": "#E8590C",
    "default": "#37B24D",
}

CHOSEN, GREY, INK = "#2B8A3E", "#868E96", "#212529"

NAMES = {
    "cells": "Cells",
    "topk": "Exact top-k",
    "auto": "Auto()",
    "config": "config",
    "small cells": "Small cells",
    "default": "CellCache()",
}

UNIT = "relative error of a row, mean over rows"


def save_plot(found: Evaluation, title: str, out: Path) -> None:
    """Heat maps over layers and heads, a row of them per method; below, excess of perplexity and the choice by layer."""
    import matplotlib

    # Only a file is wanted, and no window, whatever the user's default backend.
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
    maps = _lines([result for result in found.results if result.errors is not None])
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


def _lines(results: list[SettingResult]) -> list[list[SettingResult]]:
    """Results by kind, in order of appearance."""
    kinds = dict.fromkeys(one.setting.kind for one in results)
    return [[one for one in results if one.setting.kind == kind] for kind in kinds]


def _draw_maps(figure: Any, maps: list[list[SettingResult]], columns: int) -> None:
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


def _errors(result: SettingResult) -> np.ndarray:
    """`[layers, heads]`"""
    assert result.errors is not None
    return result.errors.numpy()


def _draw_excess(axes: Any, found: Evaluation) -> None:
    """Excess of perplexity in the worst text against keys read per query."""
    all_keys = found.exact.keys or 1.0
    for line in _lines([one for one in found.results if one.keys is not None]):
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


def _worst(result: SettingResult) -> tuple[float, float]:
    one = max(result.perplexities, key=lambda some: some.excess)
    return one.excess, one.stderr


def _draw_choice(axes: Any, found: Evaluation) -> None:
    """The choice for each layer: a bar as high as its rung."""
    chosen = found.recommendation
    assert chosen is not None
    budgets = sorted({setting.budget or 0.0 for setting in chosen.ladder})
    kinds = list(dict.fromkeys(setting.kind for setting in chosen.ladder))
    colour = {kind: CHOSEN if len(kinds) == 1 else COLOURS[kind] for kind in kinds}
    heights, colours = [], []
    for rung in chosen.chosen.mixture.rungs:
        heights.append(len(budgets) + 1 if rung < 0 else 1 + budgets.index(chosen.ladder[rung].budget or 0.0))
        colours.append(GREY if rung < 0 else colour[chosen.ladder[rung].kind])
    axes.bar(range(len(heights)), heights, color=colours, width=0.78)
    if len(kinds) > 1:
        for kind in kinds:
            axes.bar(0, 0, color=colour[kind], label=NAMES[kind])
        axes.legend(frameon=False, fontsize=9, ncols=len(kinds), loc="upper right", bbox_to_anchor=(1.0, 1.13), borderaxespad=0)
    axes.set_yticks(range(1, len(budgets) + 2), [*map(percent, budgets), "exact"])
    axes.set_ylim(0, len(budgets) + 1.4)
    axes.set_xlim(-0.6, len(heights) - 0.4)
    _plain(axes)
    axes.grid(axis="x", visible=False)
    axes.set_xlabel("layer")
    axes.set_ylabel(found.geometry.budget)
    share = chosen.chosen.mixture.keys / (found.exact.keys or 1.0)
    axes.set_title(f"Chosen by layer: {share:.0%} of the keys, perplexity {100 * chosen.chosen.excess:+.2f}%")


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#E9ECEF", linewidth=0.8)
    axes.set_axisbelow(True)
