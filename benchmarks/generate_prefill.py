"""Section of bench_generate_gpu.py: reading a prompt, with exact attention and with cells.

Tokens and weights are random, so keys and values are what such a model makes of them, and cannot be chosen: they lie in no
clusters, and times say nothing about errors. (`qwen` reads a real text.) Ways, which take turns:

sdpa       Transformers: SDPA, its fastest backend, and a DynamicCache
default    `hf.register()` and a CellCache: `Auto()`, which looks at its error first, and then may choose exact attention
cells      `hf.register(method=Cells())`: every row opens cells by itself
shared     the same with `prefill="shared"`: 128 rows open cells together

A time has everything in it until the cache can serve the next token: for ours, that the prompt is grouped into cells. `next_ms`
is the first step after it, without a graph; `graph_ms`, for ours, the same with capturing one. Memory is what was allocated at
most, with weights and cache. Only the last logits are computed.

Each way first reads a prompt once that does not count (sdpa, at long lengths, a short one). Then there are as many rounds as fit
into the limit per case, at least one. Cases with `chunks` read 32,768 tokens at a time, next to all at once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import generate_models as models
import record
import torch
from gpu_timing import BACKENDS, CUDA, DEVICE, wait
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from transformers import DynamicCache

import nearfield as nf
from nearfield import hf
from nearfield.hf.generation import read_prompt
from nearfield.hf.model_step import ModelStep

CHUNK = 32_768
LONG = 65_536
"""From so many tokens on, exact attention gets warm with a short prompt."""
MOST_ROUNDS, SHORT = 5, 4096
NAMES = {"default": "bench-default", "cells": "bench-strict", "shared": "bench-shared"}


@dataclass(frozen=True)
class Case:
    shape: str
    tokens: int
    chunks: bool = False

    @property
    def name(self) -> str:
        return f"{self.shape.replace(', ', '-').replace(' ', '-')}-{self.tokens}" + ("-chunks" if self.chunks else "")


LENGTHS = {"1b": (4096, 16_384, 32_768, 131_072, 262_144), "8b, 8 layers": (131_072, 262_144)}
CASES = (
    *(Case("1b", tokens) for tokens in LENGTHS["1b"]),
    Case("1b", 131_072, chunks=True),
    *(Case("8b, 8 layers", tokens) for tokens in LENGTHS["8b, 8 layers"]),
    Case("8b, 8 layers", 131_072, chunks=True),
)
QUICK = (Case("tiny", 600), Case("tiny", 600, chunks=True))


def register() -> None:
    hf.register(NAMES["default"])
    hf.register(NAMES["cells"], nf.Cells())
    hf.register(NAMES["shared"], nf.Cells(), prefill="shared")


def prefill(cases: list[Case], make: models.Models, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    register()
    for case in cases:
        model = make(case.shape)
        ids = torch.randint(model.config.vocab_size, (case.tokens,), generator=torch.Generator().manual_seed(0)).to(DEVICE)
        ways = ways_of(model, chunked=case.chunks, chunk=CHUNK if case.shape != "tiny" else 256)
        yield {"case": case.name, "shape": case.shape, "tokens": case.tokens, **compare(model, ids, ways, options.limit)}
        models.free()


Read = Callable[[Tensor], Any]
"""Reads token ids `[length]`, and returns the cache."""


def ways_of(model: Any, chunked: bool = False, chunk: int = CHUNK) -> dict[str, Read]:
    if chunked:
        found = {name: partial(_read, model, NAMES[name], None) for name in ("default", "cells")}
        return found | {f"{name}, chunks": partial(_read, model, NAMES[name], chunk) for name in ("default", "cells")}
    return {"sdpa": partial(_read_exact, model, None)} | {name: partial(_read, model, NAMES[name], None) for name in NAMES}


def _read(model: Any, name: str, chunk: int | None, ids: Tensor) -> hf.CellCache:
    model.set_attn_implementation(name)
    cache = hf.CellCache(config=model.config)
    read_prompt(model, ids, cache, chunk)
    for layer in cache.layers:
        layer.store.close()
    return cache


def _read_exact(model: Any, backend: str | None, ids: Tensor) -> DynamicCache:
    model.set_attn_implementation("sdpa")
    cache = DynamicCache(config=model.config)
    if backend is None:
        model(input_ids=ids[None], past_key_values=cache, logits_to_keep=1)
    else:
        with sdpa_kernel(BACKENDS[backend]):
            model(input_ids=ids[None], past_key_values=cache, logits_to_keep=1)
    return cache


@torch.no_grad()
def compare(model: Any, ids: Tensor, ways: dict[str, Read], limit: float) -> dict[str, Any]:
    """Milliseconds of reading in each way, and of the step after it, and gigabytes; `limit`: seconds for all rounds."""
    ways, backend, failed = dict(ways), None, {}
    if "sdpa" in ways:
        backend = fastest_backend(model, ids)
        ways["sdpa"] = partial(_read_exact, model, backend)
    for name, read in list(ways.items()):
        is_short = name == "sdpa" and len(ids) >= LONG
        print(f"  {name}: the first time", end="", flush=True)
        start = time.perf_counter()
        try:
            read(ids[:SHORT] if is_short else ids)
            wait()
        except torch.OutOfMemoryError as error:
            failed[name] = str(error).split(". ")[0]
            del ways[name]
        print(f", {time.perf_counter() - start:.1f} s", flush=True)
        models.free()
    runs: dict[str, list[float]] = {name: [] for name in ways}
    steps: dict[str, list[float]] = {name: [] for name in ways}
    graphs: dict[str, list[float]] = {name: [] for name in ways}
    memory: dict[str, float | None] = {}
    begun = time.perf_counter()
    for number in range(MOST_ROUNDS):
        round_begun = time.perf_counter()
        for name, read in [(name, read) for name, read in ways.items() if name not in failed]:
            told = models.watch_memory()
            try:
                spent, cache = _timed(partial(read, ids))
            except torch.OutOfMemoryError as error:
                failed[name] = str(error).split(". ")[0]
                models.free()
                continue
            runs[name].append(spent)
            memory[name] = told()
            steps[name].append(_timed(partial(_step, model, cache, len(ids)))[0])
            if CUDA and name != "sdpa":
                graphs[name].append(_timed(partial(_graph_step, model, cache, len(ids) + 1))[0])
            print(f"  round {number}, {name}: {spent:,.0f} ms, then {steps[name][-1]:.1f} ms", flush=True)
            del cache
            models.free()
        now = time.perf_counter()
        if now - begun + (now - round_begun) > limit:
            break
    ms = models.medians({name: found for name, found in runs.items() if found})
    first = next(iter(ms))
    return {
        "backend": backend,
        "ms": ms,
        "runs_ms": runs,
        "over": first,
        "ratio": {name: ms[first] / spent for name, spent in ms.items()},
        "next_ms": models.medians({name: found for name, found in steps.items() if found}),
        "graph_ms": {name: statistics.median(found) for name, found in graphs.items() if found},
        "peak_gb": memory,
        "weights_gb": sum(x.nbytes for x in model.parameters()) / 1e9,
        "failed": failed,
    }


def fastest_backend(model: Any, ids: Tensor) -> str | None:
    """That of a prompt of medium length; None without a card."""
    if not CUDA:
        return None
    times = {}
    for name in BACKENDS:
        try:
            _read_exact(model, name, ids[:CHUNK])
            times[name] = _timed(partial(_read_exact, model, name, ids[:CHUNK]))[0]
        except RuntimeError:  # it does not serve the shape
            continue
        models.free()
    print("  " + ", ".join(f"{name} {spent:.0f} ms" for name, spent in times.items()), flush=True)
    return min(times, key=lambda name: times[name])


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    wait()
    start = time.perf_counter()
    found = call()
    wait()
    return 1e3 * (time.perf_counter() - start), found


def _step(model: Any, cache: Any, position: int) -> None:
    positions = torch.tensor([[position]], device=DEVICE)
    model(input_ids=torch.ones_like(positions), position_ids=positions, past_key_values=cache)


def _graph_step(model: Any, cache: hf.CellCache, position: int) -> None:
    positions = torch.tensor([[position]], device=DEVICE)
    ModelStep(model, cache)(torch.ones_like(positions), positions)


def show_prefill(rows: list[dict[str, Any]]) -> Any:
    names = ("case", "way", "ms", "times as fast", "next step, ms", "with a graph", "peak, GB")
    found = record.table(*names, title="reading a prompt", words=("case", "way"))
    for row in rows:
        for name, spent in row["ms"].items():
            found.add_row(
                row["case"],
                name,
                f"{spent:,.0f}",
                f"{row['ratio'][name]:.2f}",
                f"{row['next_ms'][name]:.1f}",
                f"{row['graph_ms'][name]:.0f}" if name in row["graph_ms"] else "",
                "" if row["peak_gb"][name] is None else f"{row['peak_gb'][name]:.1f}",
            )
        for name, reason in row["failed"].items():
            found.add_row(row["case"], name, reason[:40], *[""] * 4)
    return found
