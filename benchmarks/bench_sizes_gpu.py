"""How large cells are, and how many keys a row opens: time and error of prompts and of a cache's steps, on a model's own inputs.

python benchmarks/bench_sizes_gpu.py --model models/gemma-3-270m --text TEXT     # on a GPU; writes results/sizes_gpu.json
python benchmarks/bench_sizes_gpu.py --model DIR --prepared FILE                 # texts by bench_perplexity_gpu.py --prepare
python benchmarks/bench_sizes_gpu.py --model DIR --device cpu --tokens 4096      # small enough for a CPU: errors, and slow times
python benchmarks/bench_sizes_gpu.py --quick                                     # random inputs, anywhere, nothing written

The model reads one text of each kind by exact attention; layers without a window, five of them at most, are looked at.

prompts  `Cells` with cells of the default size, a half and a quarter of it, and rows that open as many keys as by default, half
         as many and a third. Milliseconds of one layer; errors of the last 256 rows.
steps    a `CellStore` of all tokens but the last 64, likewise, with its keys grouped for the queries. Milliseconds to close it;
         microseconds of a step, on a GPU in a CUDA graph; errors of the 64 steps.

An error is that of a row of a head, relative to the norm of exact attention's; shown are the mean, and the share of rows that are
off by more than 30%. Those are what a model that copies notices.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import perplexity_texts
import real
import record
import torch
from errors import exact_rows
from gpu_timing import CUDA, DEVICE, card, clustered, elapsed, wait
from perplexity_texts import Text
from torch import Tensor

import nearfield as nf
from nearfield.cells.cache import CellStore, StepGraph
from nearfield.cells.sizes import CacheSizes, default_cache_probes, default_cell_size, default_probes

FILE = "sizes_gpu"
TOKENS, LAYERS = 32_768, 5
ROWS, STEPS, LATEST = 256, 64, 64
"""Rows of a prompt and steps of a cache whose errors are taken, and queries that a cache's keys are grouped for."""
SMALLER, FEWER = (1, 2, 4), (1, 2, 3)
"""By which default sizes of cells, and numbers of opened keys, are divided."""
LARGE = 0.3
TURNS = 15

Layer = tuple[str, Tensor, Tensor, Tensor]
"""Its name, and queries, keys and values `[1, heads, tokens, dim]`; the default scale is the model's."""


def told(found: Tensor, exact: Tensor) -> dict[str, float]:
    off = (found.float() - exact).norm(dim=-1) / exact.norm(dim=-1)
    return {"error": float(off.mean()), "far_off": float((off > LARGE).double().mean())}


def grid(size: int, opened: float) -> Iterator[tuple[int, int]]:
    """Keys of a cell, and cells that a row opens."""
    for smaller, fewer in product(SMALLER, FEWER):
        own = max(2, round(size / smaller))
        yield own, max(1, round(opened / fewer / own))


def of_prompts(layer: Layer, times: bool) -> list[dict[str, Any]]:
    _, query, key, value = layer
    length = key.shape[2]
    exact = exact_rows(query, key, value, min(ROWS, length))
    size = default_cell_size(length, causal=True, on_gpu=True)
    opened = size * default_probes(length, size, causal=True, on_gpu=True)
    found = []
    for own, probes in grid(size, opened):
        call = partial(
            nf.attention, query, key, value, is_causal=True, method=nf.Cells(cell_size=own, probes=probes), enable_gqa=True
        )
        output = call()[:, :, -exact.shape[2] :]
        ms = statistics.median(elapsed(call) for _ in range(TURNS)) if times else None
        found.append({"cell_size": own, "probes": probes, "ms": ms, **told(output, exact)})
    return found


def of_steps(layer: Layer, times: bool) -> list[dict[str, Any]]:
    _, query, key, value = layer
    length = key.shape[2]
    first = length - STEPS
    exact = exact_rows(query, key, value, STEPS)
    cells = CacheSizes.of(None, None, None, 16).cells(0, first)
    opened = default_cache_probes(first, cells, on_gpu=True) * first / cells
    found = []
    for own, probes in grid(round(first / cells), opened):
        store = CellStore(nf.Cells(cell_size=own, probes=probes), group_from=0)
        store.append(key[:, :, :first], value[:, :, :first])
        wait()
        start = time.perf_counter()
        store.close(query=query[:, :, first - LATEST : first])
        wait()
        row: dict[str, Any] = {"cell_size": own, "probes": probes, "close_ms": 1e3 * (time.perf_counter() - start)}
        row["step_us"] = step_time(store, query, key, value) if times else None
        outputs = []
        for place in range(first, length):
            store.append(key[:, :, place : place + 1], value[:, :, place : place + 1])
            outputs.append(store.attend(query[:, :, place : place + 1]))
        found.append(row | told(torch.cat(outputs, 2), exact))
    return found


def step_time(store: CellStore, query: Tensor, key: Tensor, value: Tensor) -> float:
    """Microseconds of a step; the store is as it was afterwards."""
    one = [x[:, :, -1:].clone() for x in (key, value, query)]
    length = store.length
    step: Callable[[], object]
    if CUDA and key.is_cuda:
        step = StepGraph(store, *one)
    else:

        def step() -> None:
            store.append(*one[:2])
            store.attend(one[2])

    step()
    spent = statistics.median(elapsed(step) for _ in range(TURNS))
    store.crop(length)
    return 1e3 * spent


SECTIONS: dict[str, Callable[[Layer, bool], list[dict[str, Any]]]] = {"prompts": of_prompts, "steps": of_steps}


def measure(layers: list[Layer]) -> dict[str, Any]:
    """Errors are means over layers, times those of the first one, which is asked twice: once for what is compiled."""
    found: dict[str, Any] = {}
    for section, of_layer in SECTIONS.items():
        of_layer(layers[0], False)
        shown = record.each(layers, lambda layer, section=section: f"{section}, {layer[0]}")
        tables = [of_layer(layer, number == 0) for number, layer in enumerate(shown)]
        found[section] = [
            {**rows[0], **{what: statistics.fmean(row[what] for row in rows) for what in ("error", "far_off")}}
            for rows in zip(*tables, strict=True)
        ]
    return found


def show(name: str, found: dict[str, Any]) -> None:
    for section, rows in found.items():
        timed = [what for what in ("ms", "close_ms", "step_us") if what in rows[0]]
        columns = ("keys of a cell", "cells opened", "keys opened", *timed, "error", f"rows over {LARGE:.0%}")
        shown = record.table(*columns, title=f"{name}: {section}")
        for row in rows:
            sizes = (row["cell_size"], row["probes"], row["cell_size"] * row["probes"])
            times = [f"{row[what]:.2f}" for what in timed]
            shown.add_row(*(f"{x:,}" for x in sizes), *times, f"{row['error']:.4f}", f"{row['far_off']:.2%}")
        record.show(shown)


def layers_of(model: Any, texts: list[Text], dtype: torch.dtype) -> list[Layer]:
    """Of each text, those without a window, five of them at most."""
    config = model.config.get_text_config()
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    whole = [number for number, kind in enumerate(kinds) if kind == "full_attention"]
    chosen = whole[:: -(-len(whole) // LAYERS)]
    found: list[Layer] = []
    for text in texts:

        def keep(number: int, *inputs: Tensor, name: str = text.name) -> None:
            query, key, value = (x.to(dtype) for x in inputs)
            found.append((f"{name}, layer {number}", query, key, value))

        real.visit_layers(model, text.ids.to(model.device), keep, chosen)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a causal language model, its weights packed or not")
    parser.add_argument("--text", type=Path, action="append", default=[], help="a book; may be repeated")
    parser.add_argument("--prepared", type=Path, metavar="FILE", help="texts that bench_perplexity_gpu.py --prepare has written")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of a text (default: %(default)s)")
    parser.add_argument("--device", help="default: a GPU")
    parser.add_argument("--quick", action="store_true", help="random inputs, nothing written unless --out says where")
    parser.add_argument("--out", type=Path, help=f"folder for {FILE}.json")
    options = parser.parse_args()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        record.RESULTS = options.out
    if options.quick:
        name, layers = "random", [(f"layer {seed}", *clustered(1500, 16, 1, seed=seed, group=2)) for seed in range(2)]
    elif not (CUDA or options.device):
        print("skipped: there is no CUDA device (--device cpu --tokens 4096 runs without one, and so does --quick)")
        return
    elif options.model is None or not options.model.exists():
        print(f"skipped: no model in {options.model} (`make qwen` or `make gemma` fetches one; --model names its folder)")
        return
    else:
        from generate_qwen import load

        device = torch.device(options.device or DEVICE)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        name, model = options.model.name.removesuffix("-gguf"), load(options.model, device, dtype)
        if options.prepared:
            texts = perplexity_texts.load(options.prepared, options.tokens)
        else:
            from nearfield.app.evaluate.models import load_tokenizer

            texts = perplexity_texts.find(load_tokenizer(options.model), options.text, options.tokens, 1)
        first_of_kind = {text.kind: text for text in reversed(texts)}
        layers = layers_of(model, list(first_of_kind.values()), dtype)
        del model
    with torch.no_grad():
        found = measure(layers)
    show(name, found)
    if not options.quick or options.out:
        about = {"card": card(), "tokens": layers[0][2].shape[2], "layers": [layer[0] for layer in layers]}
        print("written:", record.merge(FILE, name, {**about, **found}))


if __name__ == "__main__":
    main()
