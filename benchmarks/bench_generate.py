"""Decoding a whole model on a CPU: a step with `hf.CellCache`, and with Transformers' own caches and SDPA, side by side.

    python benchmarks/bench_generate.py                              # results/generate.json: SmolLM2 and Qwen, about 25 minutes
    python benchmarks/bench_generate.py --only smollm2 overhead      # leaves the other sections of the file as they are
    python benchmarks/bench_generate.py --quick                      # tiny, without a model; writes only with --out

smollm2     SmolLM2-135M in float32, 8,192, 16,384 and 32,768 keys                  `make smollm2` fetches it
qwen        Qwen2.5-Coder-1.5B in bfloat16, the same                                `make qwen`
overhead    what a step takes per layer where there is next to nothing to compute   a minute

A prompt of 8,192 tokens is read, the docstrings of Python's standard library unless --text is given; longer caches are made of
it (`generate_prompt.py`). Caches take turns, a few steps each, and what counts is the median over the turns: by the clock, and of
the processor, which other work on the machine changes less. They get the same tokens: those that come next in the text. A
`StaticCache` has room for the steps that come and no more. Steps after those that are timed are audited: how far attention with
cells is from exact attention, head by head.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import generate_prompt
import record
import torch
from generate_overhead import overhead, show_overhead
from generate_prompt import Layers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import nearfield as nf
from nearfield import hf

MODELS = {"smollm2": ("smollm2-135m", torch.float32), "qwen": ("qwen2.5-coder-1.5b", torch.bfloat16)}
"""Section, folder in models/, and dtype on a CPU."""
FOLDER = Path(__file__).parent.parent / "models"
READ, LENGTHS = 8192, (8192, 16_384, 32_768)
THREADS, ROUNDS, STEPS, AUDITED = 2, 9, 3, 4
"""A turn is so many steps, and each cache gets so many turns; after them, some steps are audited."""
NAME = "nearfield-generate"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*MODELS, "overhead"), metavar="SECTION", help="these sections")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="numbers of keys")
    parser.add_argument("--text", type=Path, help="a text in UTF-8 that is read in place of docstrings")
    parser.add_argument("--models", type=Path, default=FOLDER, help="the folder that models are in, and read prompts are kept in")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--out", type=Path, help="folder for generate.json")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written unless --out says where")
    options = parser.parse_args()
    if options.out:
        record.RESULTS = options.out
    if not options.quick:
        torch.set_num_threads(THREADS)
    hf.register(NAME, nf.Exact())
    for section in options.only or (*MODELS, "overhead"):
        if section == "overhead":
            save(options, section, found := overhead(options.quick))
            record.show(show_overhead(found))
            continue
        folder, dtype = MODELS[section]
        if not options.quick and not (options.models / folder).exists():
            print(f"skipped: no model in {options.models / folder} (`make {section}` fetches it)")
            continue
        decode(section, options, folder, dtype)


def save(options: argparse.Namespace, section: str, results: dict[str, Any]) -> None:
    if options.out is not None or not options.quick:
        print("written:", record.merge("generate", section, results), flush=True)


def decode(section: str, options: argparse.Namespace, folder: str, dtype: torch.dtype) -> None:
    """All lengths of one model; saved after each."""
    if options.quick:
        model, lengths, rounds = tiny_model(), [1500, 2048], 1
        ids = torch.randint(50, (1, 1600), generator=torch.Generator().manual_seed(0))
        prompt = generate_prompt.read(model, ids[:, :1500])
    else:
        model, lengths, rounds = generate_prompt.load(options.models / folder, dtype), options.lengths, options.rounds
        ids = generate_prompt.token_ids(options.models / folder, options.text, READ + (rounds + 1) * STEPS + AUDITED)
        prompt = generate_prompt.kept(model, ids[:, :READ], options.models / "prompts" / f"{folder}-{READ}.pt")
    read = prompt[0][0].shape[2]
    rows: list[dict[str, Any]] = []
    for length in lengths:
        layers = generate_prompt.extended(model, prompt, length)
        rows.append({"keys": length, "read": min(length, read), **measure(model, layers, ids[:, read:], rounds)})
        record.show(show_decode(section, rows[-1:]))
        results = {"model": folder, "dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
        save(options, section, results | {"text": str(options.text or "docstrings of the standard library"), "rows": rows})
    record.show(show_decode(section, rows))


@torch.no_grad()
def measure(model: Any, layers: Layers, following: torch.Tensor, rounds: int) -> dict[str, Any]:
    """Seconds of a step with each cache, interleaved, and what ours reads and how far it is off. `following`: token ids."""
    length, timed = layers[0][0].shape[2], (rounds + 1) * STEPS
    ours, seconds_to_close = cells_of(model, layers)
    caches: dict[str, Any] = {
        "cells": ours,
        "static": filled(StaticCache(config=model.config, max_cache_len=length + timed), layers),
        "dynamic": filled(DynamicCache(config=model.config), layers),
    }
    wall: dict[str, list[float]] = {name: [] for name in caches}
    processor: dict[str, list[float]] = {name: [] for name in caches}
    for turn in range(rounds + 1):
        for name, cache in caches.items():
            model.set_attn_implementation(NAME if name == "cells" else "sdpa")
            start, start_processor = time.perf_counter(), time.process_time()
            for step in range(turn * STEPS, (turn + 1) * STEPS):
                step_of(model, cache, following, length, step)
            if turn:  # the first one is to get warm
                wall[name].append((time.perf_counter() - start) / STEPS)
                processor[name].append((time.process_time() - start_processor) / STEPS)
    return {
        "seconds": {name: statistics.median(found) for name, found in wall.items()},
        "processor_seconds": {name: statistics.median(found) for name, found in processor.items()},
        "runs": wall,
        "processor_runs": processor,
        "tokens_per_second": {name: 1 / statistics.median(found) for name, found in wall.items()},
        "seconds_to_close": seconds_to_close,
        **audited(model, ours, following, length, timed),
    }


def step_of(model: Any, cache: Any, following: torch.Tensor, length: int, step: int) -> None:
    """Feed one more token of those that follow."""
    model(following[:, step : step + 1], past_key_values=cache, position_ids=torch.tensor([[length + step]]))


def cells_of(model: Any, layers: Layers) -> tuple[hf.CellCache, float]:
    """A cache that holds these keys and values, closed as a prompt is, and how many seconds the closing took."""
    model.set_attn_implementation(NAME)
    cache = hf.CellCache(config=model.config)
    start = time.perf_counter()
    for layer, (key, value) in zip(cache.layers, layers, strict=True):
        layer.store.append(key, value)
        layer.store.close()
    return cache, time.perf_counter() - start


def filled(cache: Any, layers: Layers) -> Any:
    """A cache of Transformers that holds these."""
    for number, (key, value) in enumerate(layers):
        cache.update(key, value, number)
    return cache


def audited(model: Any, cache: hf.CellCache, following: torch.Tensor, length: int, done: int) -> dict[str, Any]:
    """The error of some more steps, and how many keys they read of how many."""
    model.set_attn_implementation(NAME)
    cache.audit = True
    for step in range(done, done + AUDITED):
        step_of(model, cache, following, length, step)
    cache.audit = False
    errors = torch.stack([torch.cat([step.relative.flatten() for step in steps]) for steps in cache.errors.values()])
    store = cache.layers[0].store
    opened = store.probes * store.closed / max(1, store.cells)
    return {
        "error": {"mean": float(errors.mean()), "worst_layer": float(errors.mean(1).max()), "worst": float(errors.max())},
        "keys_read": round(opened + store.sizes.sinks + store.length - store.closed),
        "cells": store.cells,
        "probes": store.probes,
    }


def tiny_model() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16}
    return LlamaForCausalLM(LlamaConfig(vocab_size=50, num_key_value_heads=2, max_position_embeddings=8192, **sizes)).eval()


def show_decode(section: str, rows: list[dict[str, Any]]) -> Any:
    names = ("keys", "cells, tokens/s", "static", "dynamic", "processor ms: cells", "static ", "dynamic ", "keys read", "error")
    found = record.table(*names, title=f"{section}: decoding, tokens per second")
    for row in rows:
        found.add_row(
            f"{row['keys']:,}",
            *(f"{row['tokens_per_second'][name]:.2f}" for name in ("cells", "static", "dynamic")),
            *(f"{1e3 * row['processor_seconds'][name]:.0f}" for name in ("cells", "static", "dynamic")),
            f"{row['keys_read']:,}",
            f"{row['error']['mean']:.1%} / {row['error']['worst_layer']:.1%}",
        )
    return found


if __name__ == "__main__":
    main()
