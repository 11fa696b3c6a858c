"""Decoding a whole model on a CPU: a step with `hf.CellCache`, and with Transformers' own caches and SDPA, side by side.

    python benchmarks/bench_generate.py                              # results/generate.json: SmolLM2 and Qwen, about 25 minutes
    python benchmarks/bench_generate.py --only smollm2 overhead      # leaves the other sections of the file as they are
    python benchmarks/bench_generate.py --quick                      # tiny, without a model; writes only with --out

smollm2     SmolLM2-135M in float32, 8,192, 16,384 and 32,768 keys                  `make smollm2` fetches it
qwen        Qwen2.5-Coder-1.5B in bfloat16, the same                                `make qwen`
overhead    what a step takes per layer where there is next to nothing to compute   a minute

All caches are filled before any is timed, which takes 20 GB of memory for both models. A prompt of 8,192 tokens is read, the
docstrings of Python's standard library unless --text is given; longer caches are made of it (`generate_prompt.py`). Caches take
turns, a few steps each, and what counts is the median over the turns: by the clock, and of the processor. They get the same
tokens: those that come next in the text. A `StaticCache` has room for the steps that come and no more. Steps after those that are
timed are audited: how far attention with cells is from exact attention, head by head.

Threads that wait for each other take many times as long where other work has the cores. With --wait, timing begins when others
have left them, or after so many minutes; `busy_before` and `busy_after` say how many cores others had, right before and after it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
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
QUIET = 0.2
"""Cores that others may have while steps are timed."""
NAME = "nearfield-generate"


@dataclass
class Case:
    """Caches of one length that hold the same keys, and the tokens that come next."""

    section: str
    model: Any
    layers: Layers
    read: int
    following: torch.Tensor
    rounds: int
    caches: dict[str, Any] = field(default_factory=dict)
    seconds_to_close: float = 0.0

    @property
    def length(self) -> int:
        return self.layers[0][0].shape[2]

    @property
    def steps(self) -> int:
        return (self.rounds + 1) * STEPS

    def fill(self) -> None:
        start = time.perf_counter()
        self.caches["cells"] = cells_of(self.model, self.layers)
        self.seconds_to_close = time.perf_counter() - start
        room = self.length + self.steps
        self.caches["static"] = filled(StaticCache(config=self.model.config, max_cache_len=room), self.layers)
        self.caches["dynamic"] = filled(DynamicCache(config=self.model.config), self.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=(*MODELS, "overhead"), metavar="SECTION", help="these sections")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="numbers of keys")
    parser.add_argument("--text", type=Path, help="a text in UTF-8 that is read in place of docstrings")
    parser.add_argument("--models", type=Path, default=FOLDER, help="the folder that models are in, and read prompts are kept in")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--wait", type=float, default=0.0, help="for at most so many minutes, until the machine is quiet")
    parser.add_argument("--out", type=Path, help="folder for generate.json")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written unless --out says where")
    options = parser.parse_args()
    if options.out:
        record.RESULTS = options.out
    if not options.quick:
        torch.set_num_threads(THREADS)
    hf.register(NAME, nf.Exact())
    sections = options.only or (*MODELS, "overhead")
    cases = [case for section in sections if section in MODELS for case in prepare(section, options)]
    before = quiet(60 * options.wait)
    print(f"timing, while others have {before:.2f} cores", flush=True)
    if "overhead" in sections:
        found = overhead(options.quick)
        save(options, "overhead", found)
        record.show(show_overhead(found))
    times = [timed(case) for case in cases]
    after = busy()
    print(f"timed; others have {after:.2f} cores", flush=True)
    rows: dict[str, list[dict[str, Any]]] = {}
    for case, spent in zip(cases, times, strict=True):
        own = rows.setdefault(case.section, [])
        row = {"keys": case.length, "read": case.read, **spent, "seconds_to_close": case.seconds_to_close, **audited(case)}
        own.append(row)
        folder, dtype = MODELS[case.section]
        others = {"busy_before": before, "busy_after": after}
        results = {**others, "model": folder, "dtype": str(dtype).removeprefix("torch."), "threads": torch.get_num_threads()}
        save(options, case.section, results | {"text": str(options.text or "docstrings of the standard library"), "rows": own})
        record.show(show_decode(case.section, own))


def save(options: argparse.Namespace, section: str, results: dict[str, Any]) -> None:
    if options.out is not None or not options.quick:
        print("written:", record.merge("generate", section, results), flush=True)


def quiet(seconds: float) -> float:
    """Wait until others use little of the processor, or for so many seconds; returns how many cores they have then."""
    end = time.monotonic() + seconds
    while (found := busy()) > QUIET and time.monotonic() < end:
        time.sleep(5)
    return found


def busy(seconds: float = 2.0) -> float:
    """How many cores are at work while this process sleeps (Linux)."""

    def idle() -> int:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()
        return int(fields[4]) + int(fields[5])  # idle, and waiting for a disk

    start, before = time.monotonic(), idle()
    time.sleep(seconds)
    free = (idle() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - start)
    return max(0.0, (os.cpu_count() or 1) - free)


@torch.no_grad()
def prepare(section: str, options: argparse.Namespace) -> Iterator[Case]:
    """All lengths of one model, with caches that are filled; none if there is no such model."""
    folder, dtype = MODELS[section]
    if options.quick:
        model, lengths, rounds = tiny_model(), [1500, 2048], 1
        ids = torch.randint(50, (1, 1600), generator=torch.Generator().manual_seed(0))
        prompt = generate_prompt.read(model, ids[:, :1500])
    elif not (options.models / folder).exists():
        print(f"skipped: no model in {options.models / folder} (`make {section}` fetches it)")
        return
    else:
        model, lengths, rounds = generate_prompt.load(options.models / folder, dtype), options.lengths, options.rounds
        ids = generate_prompt.token_ids(options.models / folder, options.text, READ + (rounds + 1) * STEPS + AUDITED)
        prompt = generate_prompt.kept(model, ids[:, :READ], options.models / "prompts" / f"{folder}-{READ}.pt")
    read = prompt[0][0].shape[2]
    for length in lengths:
        layers = generate_prompt.extended(model, prompt, length)
        case = Case(section, model, layers, min(length, read), ids[:, read:], rounds)
        case.fill()
        print(f"{section}, {length:,} keys: caches are filled, ours in {case.seconds_to_close:.0f} s", flush=True)
        yield case


@torch.no_grad()
def timed(case: Case) -> dict[str, Any]:
    """Seconds of a step with each cache, interleaved."""
    wall: dict[str, list[float]] = {name: [] for name in case.caches}
    processor: dict[str, list[float]] = {name: [] for name in case.caches}
    for turn in range(case.rounds + 1):
        for name in case.caches:
            case.model.set_attn_implementation(NAME if name == "cells" else "sdpa")
            start, start_processor = time.perf_counter(), time.process_time()
            for step in range(turn * STEPS, (turn + 1) * STEPS):
                step_of(case, name, step)
            if turn:  # the first one is to get warm
                wall[name].append((time.perf_counter() - start) / STEPS)
                processor[name].append((time.process_time() - start_processor) / STEPS)
    median = {name: statistics.median(found) for name, found in wall.items()}
    shown = ", ".join(f"{name} {1e3 * spent:.0f} ms" for name, spent in median.items())
    print(f"{case.section}, {case.length:,} keys: {shown}", flush=True)
    return {
        "seconds": median,
        "processor_seconds": {name: statistics.median(found) for name, found in processor.items()},
        "runs": wall,
        "processor_runs": processor,
        "tokens_per_second": {name: 1 / spent for name, spent in median.items()},
    }


def step_of(case: Case, name: str, step: int) -> None:
    """Feed one more token of those that follow."""
    token, position = case.following[:, step : step + 1], torch.tensor([[case.length + step]])
    case.model(token, past_key_values=case.caches[name], position_ids=position)


def cells_of(model: Any, layers: Layers) -> hf.CellCache:
    """A cache that holds these keys and values, closed as a prompt is."""
    model.set_attn_implementation(NAME)
    cache = hf.CellCache(config=model.config)
    for layer, (key, value) in zip(cache.layers, layers, strict=True):
        layer.store.append(key, value)
        layer.store.close()
    return cache


def filled(cache: Any, layers: Layers) -> Any:
    """A cache of Transformers that holds these."""
    for number, (key, value) in enumerate(layers):
        cache.update(key, value, number)
    return cache


@torch.no_grad()
def audited(case: Case) -> dict[str, Any]:
    """The error of some more steps, and how many keys they read of how many."""
    cache = case.caches["cells"]
    case.model.set_attn_implementation(NAME)
    cache.audit = True
    for step in range(case.steps, case.steps + AUDITED):
        step_of(case, "cells", step)
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
