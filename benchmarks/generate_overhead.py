"""Section of bench_generate.py: what a step takes per layer where there is next to nothing to compute.

A model with 2 heads of keys of 4 columns, so that what is left is Python, and the start of torch's operations. The time per layer
is that of a model with ten layers minus that of one with two, over eight: it has the layer's own projections, norms and MLP in
it, which are alike for all caches. `beyond_dynamic` is what a CellCache takes more than a DynamicCache. One thread, time of the
processor.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import record
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

import nearfield as nf
from nearfield import hf
from nearfield.cells.cache import CellStore

NAME = "nearfield-overhead"
KEYS, LAYERS, ROUNDS, STEPS = 2048, (2, 10), 9, 30
HEADS, GROUP, DIM = 2, 2, 4


@torch.no_grad()
def overhead(quick: bool) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rounds, steps = (1, 2) if quick else (ROUNDS, STEPS)
        hf.register(NAME, nf.Exact())
        found = {name: _per_layer(name, rounds, steps) for name in ("cells", "static", "dynamic")}
        store = _store()
        query, key = torch.randn(1, HEADS * GROUP, 1, DIM), torch.randn(1, HEADS, 1, DIM)
        parts = {
            "append": _median(lambda: store.append(key, key), rounds, steps),
            "attend": _median(lambda: store.attend(query), rounds, steps),
        }
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            store.attend(query)
        operations = [event for event in seen.events() if event.name.startswith("aten::") and _is_outermost(event)]
    finally:
        torch.set_num_threads(threads)
    return {
        "keys": KEYS,
        "microseconds_per_layer": found,
        "beyond_dynamic": found["cells"] - found["dynamic"],
        "microseconds_of_a_store": parts,
        "operations_of_attend": len(operations),
    }


def _is_outermost(event: Any) -> bool:
    return event.cpu_parent is None or not event.cpu_parent.name.startswith("aten::")


def _store() -> CellStore:
    key, value = torch.randn(2, 1, HEADS, KEYS, DIM, generator=torch.Generator().manual_seed(0))
    store = CellStore(group_from=0)
    store.append(key, value)
    store.close()
    store.reserve(1024)
    store.append(key[:, :, :1], value[:, :, :1])
    return store


def _per_layer(name: str, rounds: int, steps: int) -> float:
    few, many = (_step(name, layers, rounds, steps) for layers in LAYERS)
    return (many - few) / (LAYERS[1] - LAYERS[0])


def _step(name: str, layers: int, rounds: int, steps: int) -> float:
    """Microseconds of a step of a model."""
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": HEADS * GROUP, "num_key_value_heads": HEADS}
    config = LlamaConfig(vocab_size=50, num_hidden_layers=layers, head_dim=DIM, **sizes)
    model: Any = LlamaForCausalLM(config).eval()
    model.set_attn_implementation(NAME if name == "cells" else "sdpa")
    room = KEYS + (rounds + 1) * steps
    cache: Any = {
        "cells": lambda: hf.CellCache(config=config, group_from=0),
        "static": lambda: StaticCache(config=config, max_cache_len=room),
        "dynamic": lambda: DynamicCache(config=config),
    }[name]()
    ids = torch.randint(50, (1, KEYS), generator=torch.Generator().manual_seed(0))
    model(ids, past_key_values=cache, logits_to_keep=1)
    return _median(lambda: model(ids[:, :1], past_key_values=cache), rounds, steps)


def _median(call: Any, rounds: int, steps: int) -> float:
    """Microseconds of the processor, after a round that is not timed."""
    found = []
    for _ in range(rounds + 1):
        start = time.thread_time()
        for _ in range(steps):
            call()
        found.append((time.thread_time() - start) / steps * 1e6)
    return statistics.median(found[1:])


def show_overhead(results: dict[str, Any]) -> Any:
    found = record.table("cache", "µs per layer", title="a step with next to nothing to compute", words=("cache",))
    for name, spent in results["microseconds_per_layer"].items():
        found.add_row(name, f"{spent:.0f}")
    parts = results["microseconds_of_a_store"]
    found.add_row("CellStore alone", f"{sum(parts.values()):.0f}")
    found.add_row("its operations of torch", str(results["operations_of_attend"]))
    return found
