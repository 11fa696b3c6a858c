"""The tables of docs/benchmarks.md, docs/cache.md, docs/cells.md, docs/gpu.md, docs/guarantees.md, docs/peers.md and
docs/quality.md that are made of results/gpu.json, peers.json, topk_gpu.json, generate.json, generate_gpu.json, slack.json,
spread.json, sharp.json, distributed.json, distributed_cost.json, perplexity_gpu.json, extend_gpu.json and ruler_*.json.

python benchmarks/gpu_tables.py            # writes them anew
python benchmarks/gpu_tables.py --check    # says which ones differ from the results, and fails if some do

A table stands between `<!-- table NAME -->` and `<!-- end of table -->`.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import ruler_plot
import vllm_tables
from bench_distributed import efficiency
from perplexity_plot import RULES, TITLES
from record import RESULTS, read_sections

ROOT = Path(__file__).parent.parent
NAMED = ("benchmarks", "cache", "cells", "distributed", "gpu", "guarantees", "peers", "quality", "vllm")
PAGES = tuple(f"docs/{name}.md" for name in NAMED)
PLACE = re.compile(r"(<!-- table (?P<name>[^>]+) -->\n)(?:\|.*\n)*(<!-- end of table -->)")

SMOLLM2 = "SmolLM2-135M"
NAMES = {"default": "`Cells()`", "shared": "`share=128`", "fast": "`probes=4`", "accurate": "`probes=20`"}
GROUPS = ("partition", "route", "near", "own segment and far", "all of a block")
BACKWARD = ("backward: near", "backward: far", "backward: own segment")


def rows_of(*cells: Iterable[Any]) -> str:
    """The first row is the head."""
    lines = ["| " + " | ".join(map(str, row)) + " |" for row in cells]
    return "\n".join([lines[0], "|" + "---|" * len(list(cells[0])), *lines[1:]]) + "\n"


def ms(x: float) -> str:
    """Three digits, at most two of them behind the point."""
    return f"{x:.2f}" if x < 10 else f"{x:.1f}" if x < 100 else f"{x:.0f}"


def lengths(gpu: dict[str, Any]) -> str:
    """By length: what most readers look for."""
    training = {(row["n"], row["dim"]): row for row in gpu["training"]["rows"] if row["causal"]}
    forward = {(row["dim"], row["n"], row["causal"]): row for row in gpu["forward"]["rows"]}
    head = ["n", "d", "forward, no mask: time", "error", "memory", "forward, causal: time", "error", "memory"]
    head += ["`share=128`: time", "error", "memory", "forward + backward, causal: time", "memory"]
    found: list[list[str]] = []
    for dim, n, causal in forward:
        if causal or n < 16384:
            continue
        free, past = forward[dim, n, False], forward[dim, n, True]
        cells = [f"{n:,}", str(dim)]
        for row, name in ((free, "default"), (past, "default"), (past, "shared")):
            cells += _gain(row, name)
        trained = training.get((n, dim))
        cells += [_ratio(trained["ours"]["default"]["exact_over_ours"]), _memory(trained, "default")] if trained else ["", ""]
        found.append(cells)
    return rows_of(head, *found)


def _gain(row: dict[str, Any], name: str) -> list[str]:
    ours = row["ours"][name]
    time, memory = _ratio(ours["exact_over_ours"]), _memory(row, name)
    if row["exact"]["extrapolated"]:
        time, memory = f"({time})", f"({memory})"
    error = ours["errors"]["mean_relative"]
    return [time, f"{error:.3f}" if error < 0.1 else f"{error:.2f}", memory]


def _ratio(x: float) -> str:
    return f"{x:.2f}" if x < 10 else f"{x:.1f}"


def _memory(row: dict[str, Any], name: str) -> str:
    return f"{row['ours'][name]['memory_over_exact']:.2f}"


def passes(gpu: dict[str, Any]) -> str:
    """Every row of forward and training."""
    head = ["pass", "d", "n", "Cells", "SDPA, ms", "Cells, ms", "SDPA / Cells", "mean error", "95% of rows", "worst row"]
    found = []
    for section in ("forward", "training"):
        for row in gpu[section]["rows"]:
            what = "forward" if section == "forward" else "forward + backward"
            what += ", causal" if row["causal"] else ", no mask"
            assumed = row["exact"]["extrapolated"]
            for name, ours in row["ours"].items():
                errors = ours["errors"]
                exact, gain, memory = ms(row["exact"]["ms"]), f"{ours['exact_over_ours']:.2f}", _memory(row, name)
                if assumed:
                    exact, gain, memory = f"({exact})", f"({gain})", f"({memory})"
                cells = [what, row["dim"], f"{row['n']:,}", NAMES[name], exact, ms(ours["ms"]), gain]
                cells += [f"{errors['mean_relative']:.4f}", f"{errors['p95_relative']:.3f}", f"{errors['max_relative']:.3f}"]
                found.append([*cells, memory])
    return rows_of([*head, "memory: Cells / SDPA"], *found)


def accuracy(gpu: dict[str, Any]) -> str:
    """Next to a perfect index."""
    found = []
    for row in gpu["accuracy"]["rows"]:
        shared = row["setting"] == "shared" or (row["setting"] == "default" and not row["causal"])
        cells = f"{row['settings']['probes']} of {row['settings']['cell_size']}{', shared' if shared else ''}"
        errors = [f"{row[name]:.4f}" for name in ("cells_mean", "topk_mean", "cells_worst_head", "topk_worst_head")]
        mask = "causal" if row["causal"] else "no mask"
        found.append([f"{row['inputs']}, {row['n']:,}", mask, cells, f"{row['keys_of_topk']:,.0f}", *errors])
    return rows_of(["inputs", "", "cells", "keys of top-k", "mean: Cells", "top-k", "worst head: Cells", "top-k"], *found)


def parts(gpu: dict[str, Any]) -> str:
    """Where the time goes."""
    found = []
    for row in gpu["parts"]["rows"]:
        groups = {name: group["ms"] for name, group in row["groups"].items()}
        rest = sum(time for name, time in groups.items() if name not in GROUPS + BACKWARD)
        times = [*(groups.get(name) for name in GROUPS + BACKWARD), rest or None]
        times += [row["device_ms"], row["event_ms"], row.get("graph_ms")]
        found.append([row["dim"], row["what"], *("" if time is None else f"{time:.1f}" for time in times)])
    return rows_of(["d", "what", *GROUPS, *BACKWARD, "rest", "kernels", "call", "graph"], *found)


def floor(gpu: dict[str, Any]) -> str:
    """The least that kernels have to do."""
    ordered = sorted(gpu["floor"]["rows"], key=lambda row: (row["kernel"], row["dim"]))
    found = [
        [f"`{row['kernel']}`", row["dim"]]
        + [f"{row[name]:.2f}" for name in ("bytes_ms", "flops_ms", "special_ms", "ms")]
        + [f"{row['over_floor']:.1f}"]
        for row in ordered
    ]
    return rows_of(["kernel", "d", "bytes", "products", "exponentials and roots", "measured", "measured / floor"], *found)


def peers(sections: dict[str, Any], section: str, kind: str) -> str:
    """Everybody, on one kind of input. A star: does not agree with exact attention when it reads all keys."""
    part = sections[section]["parts"][kind]
    trained = section.startswith(("training", "grouped_training"))
    head = ["method", "ms", "SDPA / method", *([] if trained else ["mean error", "rows off by more than 30%"])]
    tests = sections["self_tests"]["parts"][f"{'training' if trained else 'forward'}/{section.split('/')[2]}"]
    exact = part["sdpa"] | {"speedup": 1.0, "share": 1.0, "memory_over_sdpa": 1.0}
    found = []
    for name, method in [("SDPA", exact), *part["methods"].items()]:
        if "ms" not in method:  # it failed: the results say why
            continue
        errors = [] if trained else [f"{method['errors']['mean']:.4f}", f"{method['errors']['large']:.1%}"]
        passed = tests.get(method.get("peer"), {"passed": True})["passed"]
        found.append([name if passed else f"{name} (*)", ms(method["ms"]), f"{method['speedup']:.2f}", *errors])
        found[-1] += [f"{method['share']:.1%}", f"{method['memory_over_sdpa']:.2f}"]
    return rows_of([*head, "keys read", "memory / SDPA"], *found)


def topk(sections: dict[str, Any]) -> str:
    """kNN attention over cells, by mask and length."""
    head = ["mask", "n", "k", "SDPA, ms", "`tail=0`, ms", "SDPA / method", "error", "`tail=32`, ms", "SDPA / method", "error"]
    found = []
    for mask in ("no mask", "causal"):
        for row in sections[mask]["lengths"]:
            cells = [mask, f"{row['n']:,}", f"{row['k']:,}", ms(row["methods"]["SDPA"]["ms"])]
            for name in ("tail=0", "tail=32"):
                method = row["methods"][name]
                cells += [ms(method["ms"]), f"{method['speedup']:.2f}", f"{method['errors']['mean']:.2f}"]
            memory = row["methods"]["tail=32"]["peak_megabytes"]["total"]
            found.append([*cells, f"{memory / 1024:.2f}", f"{row['recall']:.3f}", f"{row['scored']:,.0f}"])
    return rows_of([*head, "peak, GiB", "recall", "keys scored"], *found)


def generate(sections: dict[str, Any]) -> str:
    """Decoding whole models on a CPU."""
    head = ["model", "keys", "`CellCache`, tokens per second", "`StaticCache`", "`DynamicCache`"]
    found = []
    for row, model in _generated(sections):
        speed = row["tokens_per_second"]
        found.append([model, f"{row['keys']:,}", *(_ratio(speed[name]) for name in ("cells", "static", "dynamic"))])
        found[-1] += [f"{1e3 * row['processor_seconds'][name]:.0f}" for name in ("cells", "static", "dynamic")]
    return rows_of([*head, "processor, ms a step: `CellCache`", "`StaticCache`", "`DynamicCache`"], *found)


def generate_errors(sections: dict[str, Any]) -> str:
    """What a step reads there, and how far it is off."""
    head = ["model", "keys", "of them read by the model", "times as fast as the faster other cache", "keys read by a step"]
    found = []
    for row, model in _generated(sections):
        faster = min(row["seconds"][name] for name in ("static", "dynamic"))
        cells = [
            model,
            f"{row['keys']:,}",
            f"{row['read']:,}",
            f"{faster / row['seconds']['cells']:.2f}",
            f"{row['keys_read']:,}",
        ]
        found.append(cells + [f"{row['error'][name]:.1%}" for name in ("mean", "worst_layer", "worst")])
    return rows_of([*head, "error, mean", "worst layer", "worst head"], *found)


def _generated(sections: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    names = {"smollm2": "SmolLM2-135M, float32", "qwen": "Qwen2.5-Coder-1.5B, bfloat16"}
    return [(row, label) for name, label in names.items() if name in sections for row in sections[name]["rows"]]


SHAPES = {"1b": "1B", "8b": "8B", "8b, 8 layers": "8B, 8 of 32 layers"}
READ = {"sdpa": "SDPA, `DynamicCache`", "default": "default", "cells": "`Cells()`", "shared": '`prefill="shared"`'}


def gpu_steps(sections: dict[str, Any]) -> str:
    """A step of whole models on a GPU."""
    head = ["model", "keys", "exact, ms", "`CellCache`, ms", "times as fast", "without attention, ms", "keys read"]
    found = []
    for row in sections["decode"]["rows"]:
        batch = f"{row['batch']} x " if row["batch"] > 1 else ""
        name = SHAPES[row["shape"]] + (", offloaded" if row["offload"] else "")
        found += _steps(name, f"{batch}{row['keys']:,}", row["ms"], "cells", f"{row['keys_read']:,}")
    for row in sections["qwen"]["rows"]:
        given = f"{row['tokens']:,}", row["step"]["ms"]
        found += _steps("Qwen2.5-Coder-1.5B", *given, "cells", f"{row['keys_read']:,}")
        found += _steps("Qwen2.5-Coder-1.5B, offloaded", *given, "offloaded", f"{row['keys_read']:,}")
    return rows_of(head, *found)


def _steps(model: str, keys: str, spent: dict[str, float], ours: str, read: str) -> list[list[str]]:
    """A row, and where it was measured one of what lies between the layers' attention compiled."""
    found = []
    for ending in ("", ", compiled"):
        if ours + ending in spent:
            exact, cells = spent["exact" + ending], spent[ours + ending]
            nothing = spent.get("no attention" + ending)
            times = [ms(exact), ms(cells), f"{exact / cells:.2f}"]
            found.append([model + ending, keys, *times, "" if nothing is None else ms(nothing), read])
    return found


def gpu_prompts(sections: dict[str, Any]) -> str:
    """Reading prompts there."""
    found = []
    rows = [(SHAPES[row["shape"]], row) for row in sections["prefill"]["rows"] if "sdpa" in row["ms"]]
    rows += [("Qwen2.5-Coder-1.5B", row["prefill"] | {"tokens": row["tokens"]}) for row in sections["qwen"]["rows"]]
    for name, row in rows:
        cells = [name, f"{row['tokens']:,}", *(f"{row['ms'][way]:,.0f}" for way in READ)]
        found.append([*cells, *(f"{row['ratio'][way]:.2f}" for way in READ if way != "sdpa"), _gigabytes(row)])
    names = list(READ.values())
    head = ["model", "tokens", f"{names[0]}, ms", *(f"{name}, ms" for name in names[1:])]
    return rows_of([*head, *(f"{name}: times as fast" for name in names[1:]), "peak, GB: SDPA / default"], *found)


def gpu_chunks(sections: dict[str, Any]) -> str:
    """Reading them 32,768 tokens at a time."""
    head = ["model", "tokens", "way", "at once, ms", "in chunks, ms", "peak, GB: at once / in chunks"]
    found = []
    for row in sections["prefill"]["rows"]:
        for way in [name for name in row["ms"] if f"{name}, chunks" in row["ms"]]:
            spent, memory = ([row[what][name] for name in (way, f"{way}, chunks")] for what in ("ms", "peak_gb"))
            told = [f"{x:,.0f}" for x in spent], " / ".join(f"{x:.1f}" for x in memory)
            found.append([SHAPES[row["shape"]], f"{row['tokens']:,}", READ[way], *told[0], told[1]])
    return rows_of(head, *found)


def _gigabytes(row: dict[str, Any]) -> str:
    return f"{row['peak_gb']['sdpa']:.1f} / {row['peak_gb']['default']:.1f}"


def slack(results: dict[str, Any]) -> str:
    """By keys and index."""
    head = ["keys", "index", "c, median of 299 rows", "largest", "e^c", "recall", "keys scored"]
    found = []
    for row in results["rows"]:
        cells = [row["family"], row["index"], f"{row['median']:.2f}", f"{row['largest']:.2f}", f"{math.exp(row['largest']):,.1f}"]
        found.append([*cells, f"{row['recall']:.3f}", f"{row['read']:.1%}"])
    return rows_of(head, *found)


PROMPTS = {
    "default": "default",
    "cells": "`Cells()`",
    "queries": "`Cells(partition=KMeans(by_queries=True))`",
    "shared": "`Cells(share=128)`",
}
SHARES = ("1.5", "3", "6", "12")
KINDS = ("book", "code", "documentation")


def perplexity_read(sections: dict[str, Any]) -> str:
    """Whole texts in one pass."""
    head = ["model", "attention", "texts", "perplexity", "excess", *KINDS, "first quarter", "last quarter"]
    names = PROMPTS | {f"cells-{share}-both": f"`cells-{share}-both`" for share in SHARES}
    found = []
    for model, part in _models(sections, "reading"):
        exact = part["pooled"]["exact"]
        found.append([model, "SDPA", exact["texts"], f"{exact['perplexity']:.3f}", *[""] * (len(head) - 4)])
        for name, label in names.items():
            if way := part["pooled"].get(name):
                by_place, quarter = way["excess_by_position"], len(way["excess_by_position"]) // 4
                ends = [sum(some) / quarter for some in (by_place[:quarter], by_place[-quarter:])]
                cells = [model, label, way["texts"], f"{way['perplexity']:.3f}", _excess(way)]
                found.append([*cells, *_by_kind(way), *(f"{x:+.2%}" for x in ends)])
    return rows_of(head, *found)


def perplexity_cache(sections: dict[str, Any]) -> str:
    """The end of texts, written by a cache as it comes."""
    head = ["model", "texts", "keys read", "perplexity: exact", "`CellCache()`", "excess", *KINDS]
    found = []
    for model, part in _models(sections, "writing"):
        if way := part["pooled"].get("exact+cache"):
            cells = [model, way["texts"], f"{way['keys_read']:,.0f}", f"{way['exact']:.3f}", f"{way['perplexity']:.3f}"]
            found.append([*cells, _excess(way), *_by_kind(way)])
    return rows_of(head, *found)


def perplexity_written(sections: dict[str, Any]) -> str:
    """The same with a budget of keys, by cells and by the rules of others, on the same texts."""
    found = []
    for model, part in _models(sections, "writing"):
        for rule, label in {"cells": "cells", **{rule: looks[0] for rule, looks in RULES.items()}}.items():
            ways = [part["same_texts"].get(f"{rule}-{share}") for share in SHARES]
            if any(ways):
                read = part["tokens"] - part["written"] / 2
                said = ("" if way is None else f"{_excess(way)} ({way['keys_read'] / read:.1%})" for way in ways)
                found.append([model, label, *said])
    return rows_of(["model", "rule", *(f"{share}%" for share in SHARES)], *found)


def _models(sections: dict[str, Any], section: str) -> list[tuple[str, dict[str, Any]]]:
    return [(label, sections[f"{name}/{section}"]) for name, label in TITLES.items() if f"{name}/{section}" in sections]


def _excess(way: dict[str, Any]) -> str:
    return f"{way['excess']:+.2%} ± {way['stderr']:.2%}"


def _by_kind(way: dict[str, Any]) -> list[str]:
    return [f"{way['excess_by_kind'][kind]:+.2%}" if kind in way["excess_by_kind"] else "" for kind in KINDS]


def perplexity(name: str) -> str:
    """None until the first model was measured."""
    if not (RESULTS / "perplexity_gpu.json").exists():
        return ""
    makers = {"read": perplexity_read, "cache": perplexity_cache, "written": perplexity_written}
    return makers[name](read_sections("perplexity_gpu"))


NEEDLES = {"niah_multivalue": "multivalue", "niah_multiquery": "multiquery", "niah_multikey_3": "multikey 3", "vt": "variables"}


def ruler() -> str:
    """Scores of all ways on all tasks, and on those where something is lost first."""
    head = ["model", "way", "keys read", "answers", "score", "95%", "below exact", "p", *NEEDLES.values()]
    found = []
    for model, one in ruler_plot.results().items():
        by_task = {task: ruler_plot.scores(one, task=task) for task in NEEDLES}
        for way, row in ruler_plot.scores(one).items():
            cells = [TITLES.get(model, model), f"`{way}`", f"{row['share']:.1%}", row["answers"], f"{row['mean']:.1f}"]
            cells += [f"{row['low']:.0f}-{row['high']:.0f}"]
            cells += ["", ""] if row["loss"] is None else [f"{row['loss']:+.1f}", f"{row['p']:.2g}"]
            found.append([*cells, *(f"{by_task[task][way]['mean']:.0f}" if way in by_task[task] else "" for task in NEEDLES)])
    return rows_of(head, *found) if found else ""


def spread(sections: dict[str, Any]) -> str:
    """Errors by cut-off, of every model and length."""
    found = []
    for key, results in sections.items():
        model, length = key.split("/")
        cuts = results["cut_off"]
        head = ["model", "tokens", *(f"cut off at {cut}" if cut != "none" else "not at all" for cut in cuts)]
        cells = [f"{100 * row['error']:.1f}%, {100 * row['far_off']:.1f}%" for row in cuts.values()]
        found.append([TITLES.get(model, SMOLLM2 if model == "smollm2-135m" else model), f"{int(length):,}", *cells])
    return rows_of(head, *found)


READING = "/reading"


def sharp_reading(sections: dict[str, Any]) -> str:
    """What reading whole texts by cells costs, as these are made."""
    kinds = ("book", "code", "documentation")
    titles = {"usual": ("`Cells()`", "keys"), "6%": ("6% of the keys", "keys")}
    titles |= {f"{name}, queries": (title, "queries") for name, (title, _) in titles.items()}
    found = []
    for key, results in sections.items():
        if key.endswith(READING):
            model, length, _ = key.split("/")
            for name, (title, made) in titles.items():
                way = results["pooled"][name]
                excess = [f"{way['excess_by_kind'][kind]:+.2%}" if kind in way["excess_by_kind"] else "" for kind in kinds]
                found.append([TITLES.get(model, model), f"{int(length):,}", title, f"as {made} are large", _excess(way), *excess])
    return rows_of(["model", "tokens", "rows read", "keys are grouped", "excess", *kinds], *found)


def sharp(sections: dict[str, Any]) -> str:
    """What a cache costs at the end of long texts, as its cells have been made."""
    kinds = ("book", "code", "documentation")
    titles = {
        "keys, uncut": "as keys are large, spreads not cut off",
        "keys": "as keys are large",
        "queries": "as queries are large",
        "queries, 0.4%": "as queries are large, `min_weight=0.004`",
    }
    head = ["model", "tokens", "keys are grouped", "keys read", "excess", *kinds, "error of a step", "rows over 30%"]
    found = []
    for key, results in sections.items():
        if key.endswith(READING):
            continue
        model, length = key.split("/")
        for name, title in titles.items():
            if name not in results["pooled"]:
                continue
            way = results["pooled"][name]
            known = way["excess_by_kind"]
            excess = [f"{known[kind]:+.2%}" if kind in known else "" for kind in kinds]
            cells = [f"{way['keys_read']:,.0f}", _excess(way), *excess, f"{way['error']:.1%}", f"{way['far_off']:.1%}"]
            found.append([TITLES.get(model, model), f"{int(length):,}", title, *cells])
    return rows_of(head, *found)


def extend(sections: dict[str, Any]) -> str:
    """Loss in the first, the last trained and the last bin, and needles, before and after training with cells."""
    results = sections["cells"]
    lengths, positions = results["plan"]["lengths"], results["plan"]["positions"]
    bins = len(results["after"]["exact"]["loss"])
    places = {"first": 0, "trained": results["plan"]["tokens"] * bins // positions - 1, "last": bins - 1}
    ends = {name: (place + 1) * positions // bins for name, place in places.items()}
    head = ["model", "attention", *(f"loss, up to {end:,}" for end in ends.values()), *(f"needles, {n:,}" for n in lengths)]
    found = []
    for stage, title in (("as_it_was", "as it was"), ("before", "base raised"), ("after", "base raised, trained")):
        for way, own in results[stage].items():
            cells = [title, "SDPA" if way == "exact" else "`Cells()`", *(f"{own['loss'][x]:.2f}" for x in places.values())]
            rows = [own.get("needles", {}).get(str(n), []) for n in lengths]
            found.append([*cells, *(f"{sum(x['found'] for x in row)} of {len(row)}" if row else "" for row in rows)])
    return rows_of(head, *found)


def distributed(cases: dict[str, Any]) -> str:
    """Prompts, training and steps on ranks of one machine: times, what is left of more ranks, and bytes."""
    head = ["machine", "", "keys", "ranks x threads", "seconds", "efficiency", "of CPU time", "times the ideal"]
    head += ["MB sent", "ring", "all-gather"]
    order = ("prompts", "training", "steps", "profile")

    def place_of(row: dict[str, Any]) -> tuple[Any, ...]:
        return order.index(row["section"]), row["n"], row["method"], row["cpus"], row["device"], row["ranks"]

    rows, found = sorted(cases.values(), key=place_of), []
    names = {"global": "step, best of all", "local": "step, best of each"}
    for row in rows:
        for name, seconds in row.get("seconds", {}).items():
            if name == "ideal":
                continue
            own = statistics.median(seconds)
            parts = [efficiency(rows, row, name, what) for what in ("seconds", "cpu_seconds")]
            if row["device"] == "cpu" and row["ranks"] * row["threads"] > row["cpus"]:  # they wait for each other's cores
                parts[0] = None
            ideal = row["seconds"].get("ideal")
            place, ranks = row.get("gpu"), f"{row['ranks']}"
            if row["device"] == "cpu":
                place, ranks = f"{row['cpus']} cores", f"{row['ranks']} x {row['threads']}"
            what = names.get(name, f"{'prompt' if row['section'] == 'prompts' else row['section']}, {name}")
            cells = [place, what, f"{row['n']:,}", ranks, f"{own:.3g}"]
            cells += ["" if part is None else f"{part:.2f}" for part in parts]
            cells += ["" if ideal is None else f"{own / statistics.median(ideal):.2f}"]
            sizes = [sum(row["sent"].get(name, {}).values()), *row["by_formula"].values()]
            found.append([*cells, *("0" if not x else f"{x / 1e6:.3g}" for x in sizes)])
    return rows_of(head, *found)


def distributed_cost(results: dict[str, Any]) -> str:
    """A layer of the 8B shape: a prompt and a step, arithmetic beside what ranks exchange."""
    head = ["tokens", "GPUs", "prompt: exact, ms", "cells, ms", "exchange, ms", "step: cells, ms", "exchange, ms"]
    found = []
    for one, step in zip(results["prompts"], results["steps"], strict=True):
        if one["shape"] == "8B":
            times = [one[name] for name in ("exact_ms", "cells_ms", "exchange_ms")]
            numbers = [f"{x:,.0f}" if x >= 100 else f"{x:.3g}" for x in times]
            found.append([f"{one['n']:,}", one["gpus"], *numbers, *(f"{step[x]:.3f}" for x in ("cells_ms", "exchange_ms"))])
    return rows_of(head, *found)


def table(name: str) -> str:
    """The table of that name; those of peers are named `peers SECTION KIND`."""
    makers: dict[str, Callable[[dict[str, Any]], str]] = {
        "gpu lengths": lengths,
        "gpu passes": passes,
        "gpu accuracy": accuracy,
        "gpu parts": parts,
        "gpu floor": floor,
    }
    if name.startswith("generate gpu"):
        of_models = {"generate gpu steps": gpu_steps, "generate gpu prompts": gpu_prompts, "generate gpu chunks": gpu_chunks}
        return of_models[name](read_sections("generate_gpu"))
    if name.startswith("generate"):
        return {"generate": generate, "generate errors": generate_errors}[name](read_sections("generate"))
    if name == "ruler":
        return ruler()
    if name.startswith("perplexity "):
        return perplexity(name.removeprefix("perplexity "))
    if name == "slack":
        return slack(json.loads((RESULTS / "slack.json").read_text())["results"])
    if name.startswith("vllm "):
        return rows_of(*vllm_tables.rows(name.removeprefix("vllm ")))
    if name in ("spread", "extend"):
        return spread(read_sections("spread")) if name == "spread" else extend(read_sections("extend_gpu"))
    if name == "distributed":
        return distributed(read_sections("distributed"))
    if name == "distributed cost":
        return distributed_cost(json.loads((RESULTS / "distributed_cost.json").read_text())["results"])
    if name == "sharp":
        return sharp(read_sections("sharp"))
    if name == "sharp reading":
        return sharp_reading(read_sections("sharp"))
    if name.startswith("peers "):
        _, section, kind = name.split(" ")
        return peers(read_sections("peers"), section, kind)
    return topk(read_sections("topk_gpu")) if name == "topk" else makers[name](read_sections("gpu"))


def fresh(text: str) -> str:
    """A page with its tables as the results have them."""
    return PLACE.sub(lambda found: found[1] + table(found["name"]) + found[3], text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    old = [page for page in PAGES if fresh((ROOT / page).read_text()) != (ROOT / page).read_text()]
    for page in old:
        print(page, "differs from the results" if check else "written")
        if not check:
            (ROOT / page).write_text(fresh((ROOT / page).read_text()))
    sys.exit(1 if check and old else 0)


if __name__ == "__main__":
    main()
