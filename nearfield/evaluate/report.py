"""What `nearfield eval` has found: as a table, as JSON, and as a config to register."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

import nearfield
from nearfield.environment import environment as machine
from nearfield.evaluate.peers import PastTopK
from nearfield.evaluate.run import Evaluation, Recommendation, Shown
from nearfield.evaluate.settings import Setting, percent
from nearfield.hf.config import describe, write_config

NUMBER = r"(?:-?\d[\d.eE+-]*|null)"


def environment(model: Any) -> dict[str, Any]:
    """Where and with what the numbers were measured."""
    dtype = str(model.dtype).removeprefix("torch.")
    return {**machine(model.device), "transformers": version("transformers"), "device": str(model.device), "dtype": dtype}


def tabulated(found: Evaluation) -> Table:
    """A row per setting: keys, perplexity and its excess in each text, and the errors of heads."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    table.add_column("\nattention", no_wrap=True)
    table.add_column("keys/\nquery", justify="right", no_wrap=True)
    for text in found.texts:
        table.add_column(f"{_short(text)}\nperplexity", justify="right", no_wrap=True)
        table.add_column("\nexcess", justify="right", no_wrap=True)
    for heading in ("error\nmean", "of heads\nworst", "time\n(s)"):
        table.add_column(heading, justify="right", no_wrap=True)
    rows = [found.exact, *found.shown]
    for i, shown in enumerate(rows):
        last = i + 1 == len(rows) or rows[i + 1].setting.kind != shown.setting.kind
        table.add_row(*_cells(shown), end_section=last)
    if found.recommendation is not None:
        table.add_row(*_cells(found.recommendation.shown), style="bold green")
    return table


def _short(text: str) -> str:
    return text if len(text) <= 16 else text[:15] + "…"


def _cells(shown: Shown) -> list[str]:
    cells = [shown.setting.label, "" if shown.keys is None else f"{shown.keys:,.0f}"]
    for one in shown.perplexities:
        plain = shown.setting.kind == "exact"
        cells += [f"{one.perplexity:.3f}", "" if plain else f"{100 * one.excess:+.2f}% ± {100 * one.stderr:.2f}"]
    if shown.errors is None:
        cells += ["", ""]
    else:
        served = shown.errors[shown.errors.isfinite()]
        cells += [f"{served.mean():.2%}", f"{served.max():.1%}"]
    return [*cells, f"{shown.seconds:.1f}"]


def legend(found: Evaluation) -> str:
    geometry = found.geometry
    return (
        f"{geometry.tokens:,} tokens. A row reads its own segment of {geometry.segment:,} keys and the first {geometry.sinks} "
        f"one by one; a budget is the share of all earlier keys, {geometry.past:,.0f} on average, that it reads beyond that. "
        "topk: as many keys as cells, the heaviest ones, and nothing for the rest (a perfect index). Excess of perplexity over "
        "exact attention ± its standard error. Error: of an output row, relative, mean over rows."
    )


def sentence(recommendation: Recommendation, all_keys: float) -> str:
    """What is recommended, in words."""
    chosen, limit = recommendation.chosen, percent(recommendation.tolerance)
    rungs, keys = chosen.mixture.rungs, chosen.mixture.keys
    if set(rungs) == {-1}:
        return f"Within {limit} of exact perplexity: exact attention only. A larger --tolerance or --cell-size 8 may do better."
    counted = Counter("exact" if rung < 0 else recommendation.ladder[rung].label for rung in rungs)
    order = [*(setting.label for setting in recommendation.ladder), "exact"]
    parts = ", ".join(f"{label} ({counted[label]})" for label in sorted(counted, key=order.index))
    return (
        f"Within {limit} of exact perplexity: {keys / all_keys:.0%} of the keys, {100 * chosen.excess:+.2f}% in the worst "
        f"text. Layers: {parts}."
    )


def as_json(found: Evaluation, about: Mapping[str, Any]) -> dict[str, Any]:
    """All of it; null where there is no finite number."""
    geometry, chosen = found.geometry, found.recommendation
    whole = {
        **about,
        "tokens": geometry.tokens,
        "segment": geometry.segment,
        "sinks": geometry.sinks,
        "past_keys_mean": geometry.past,
        "layers": found.layers,
        "texts": found.texts,
        "settings": [_as_json(shown) for shown in (found.exact, *found.shown)],
        "recommendation": None if chosen is None else _recommended(chosen, found),
    }
    told: dict[str, Any] = _finite(whole)
    return told


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _finite(x) for name, x in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _as_json(shown: Shown) -> dict[str, Any]:
    errors = None if shown.errors is None else [[_round(x) for x in heads] for heads in shown.errors.tolist()]
    return {
        "label": shown.setting.label,
        "method": _described(shown.setting),
        "budget": shown.setting.budget,
        "keys_per_query": shown.keys,
        "seconds": shown.seconds,
        "perplexity": [one.perplexity for one in shown.perplexities],
        "excess": [one.excess for one in shown.perplexities],
        "excess_stderr": [one.stderr for one in shown.perplexities],
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
        "in_words": sentence(chosen, found.exact.keys or 1.0),
        "ladder": [{"label": setting.label, "method": _described(setting)} for setting in chosen.ladder],
        "rung_by_layer": list(chosen.chosen.mixture.rungs),
        "sensitivity_by_layer": [_round(x) for x in chosen.sensitivity.tolist()],
        **{key: value for key, value in _as_json(chosen.shown).items() if key not in ("budget", "label", "method")},
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


def save(found: Evaluation, about: Mapping[str, Any], folder: Path) -> list[Path]:
    """Write `eval.json` and, where there is a recommendation, `config.json`; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "eval.json"]
    text = json.dumps(as_json(found, about), indent=2, allow_nan=False)
    # Lists of numbers on one line.
    text = re.sub(rf"\[\s*({NUMBER}(?:,\s*{NUMBER})*)\s*\]", lambda part: "[" + " ".join(part[1].split()) + "]", text)
    written[0].write_text(text + "\n", encoding="utf-8")
    if found.recommendation is not None:
        written.append(folder / "config.json")
        write_config(written[1], found.recommendation.config, _about(found, found.recommendation, about))
    return written


def _about(found: Evaluation, chosen: Recommendation, about: Mapping[str, Any]) -> dict[str, Any]:
    """How the config came to be, for people who find it later."""
    exact = found.exact.perplexities
    return {
        "model": about.get("model"),
        "tokens": found.geometry.tokens,
        "tolerance": percent(chosen.tolerance),
        "keys_per_query": round(chosen.chosen.mixture.keys, 1),
        "keys_per_query_exact": found.exact.keys,
        "perplexity": {
            text: {"exact": round(right.perplexity, 4), "this": round(ours.perplexity, 4)}
            for text, right, ours in zip(found.texts, exact, chosen.shown.perplexities, strict=True)
        },
        "nearfield": nearfield.__version__,
    }
