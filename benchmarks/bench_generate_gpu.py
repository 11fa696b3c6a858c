"""Decoding a whole model on a GPU: a step with exact attention and with a CellCache, both in a CUDA graph, side by side.

    python benchmarks/bench_generate_gpu.py                     # all cases, on a card with 141 GB
    python benchmarks/bench_generate_gpu.py --only 1b-131072    # one
    python benchmarks/bench_generate_gpu.py --quick             # tiny, anywhere: to see that it runs

Models have the shapes of Llama 3.2 1B and Llama 3.1 8B and random weights: times do not depend on these. Keys and values are
those of the family `clustered`, in memory of their own for every layer. Exact attention is torch's, over exactly the keys that
there are, without a mask; query heads that share keys are rows of one call, and the fastest backend counts. The loop of
`generate` is not part of a step. With offload, `found_resident` says for each layer which share of the opened cells was found on
the card; tokens and weights are random here, and a model that reads a text may find more of them or fewer.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import record
import torch
import torch.nn.functional as F
from gpu_timing import BACKENDS, CUDA, DEVICE, card, clustered
from torch import Tensor
from torch.nn.attention import sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface, LlamaConfig, LlamaForCausalLM
from transformers.masking_utils import sdpa_mask

from nearfield import hf
from nearfield.cells.cache import CellStore
from nearfield.hf.model_step import ModelStep

EXACT, OURS = "bench-exact", "bench-cells"
ROUNDS, STEPS = 7, 20
"""A time is the median of so many rounds of so many steps, with those of the others in between."""
SHAPES: dict[str, dict[str, Any]] = {
    "1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "head_dim": 64},
    "8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": 128},
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16},
}


@dataclass(frozen=True)
class Case:
    shape: str
    keys: int
    batch: int = 1
    offload: bool = False
    resident: int | None = None
    """offloaded keys that stay on the card; None: the default"""

    @property
    def name(self) -> str:
        many = f"x{self.batch}" if self.batch > 1 else ""
        offload = "-offload" if self.offload else ""
        return f"{self.shape}-{self.keys}{many}{offload}" + ("" if self.resident is None else f"-{self.resident}")


CASES = (
    Case("1b", 131_072),
    Case("1b", 1_048_576),
    Case("1b", 65_536, batch=16),
    Case("8b", 262_144),
    Case("8b", 262_144, offload=True),
    Case("8b", 262_144, offload=True, resident=0),
)
QUICK = (Case("tiny", 2048), Case("tiny", 1536, batch=2))


def make_model(shape: str) -> Any:
    """Random weights, made on the device."""
    sizes = SHAPES[shape]
    heads = {"num_key_value_heads": 2 if shape == "tiny" else 8}
    config = LlamaConfig(vocab_size=500 if shape == "tiny" else 128_256, tie_word_embeddings=True, **sizes, **heads)
    config._attn_implementation = OURS
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16 if CUDA else torch.float32)
    try:
        with torch.device(DEVICE):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def keys_and_values(case: Case) -> tuple[Tensor, Tensor]:
    """Of one layer, `[batch, heads, keys, dim]`; entries of a batch are alike."""
    sizes = SHAPES[case.shape]
    _, key, value = clustered(case.keys, sizes["head_dim"], 2 if case.shape == "tiny" else 8)
    key, value = (x.to(torch.bfloat16 if CUDA else torch.float32) for x in (key, value))
    return key.repeat(case.batch, 1, 1, 1), value.repeat(case.batch, 1, 1, 1)


class ExactAttention:
    """Static keys and values of all layers; a step writes its own over the last one, and attends to all."""

    def __init__(self, layers: int, key: Tensor, value: Tensor, group: int) -> None:
        self.stored = [(key.clone(), value.clone()) for _ in range(layers)]
        self.backend = self._fastest(key, value, group)

    def _fastest(self, key: Tensor, value: Tensor, group: int) -> str:
        if not CUDA:
            return "cpu"
        query = torch.randn(len(key), key.shape[1], group, key.shape[3], dtype=key.dtype, device=key.device)
        times = {}
        for name, backend in BACKENDS.items():
            with sdpa_kernel(backend):
                try:
                    times[name] = median_ms(lambda: F.scaled_dot_product_attention(query, key, value), 5)
                except RuntimeError:  # this backend does not serve the shape
                    continue
        return min(times, key=lambda name: times[name])

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[Tensor, None]:
        keys, values = self.stored[module.layer_idx]
        keys[:, :, -1:], values[:, :, -1:] = key, value
        rows = query.unflatten(1, (keys.shape[1], -1)).squeeze(3)
        if self.backend == "cpu":
            found = F.scaled_dot_product_attention(rows, keys, values, scale=scaling)
        else:
            with sdpa_kernel(BACKENDS[self.backend]):
                found = F.scaled_dot_product_attention(rows, keys, values, scale=scaling)
        return found.reshape(len(query), 1, query.shape[1], -1), None


def captured(step: Callable[[], Any]) -> Callable[[], Any]:
    if not CUDA:
        return step
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def median_ms(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    call()
    return statistics.median(timed(call) for _ in range(rounds))


def timed(call: Callable[[], Any], steps: int = STEPS) -> float:
    """Milliseconds of a call."""
    if CUDA:
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        call()
    if CUDA:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) / steps * 1e3


def exact_step(model: Any, case: Case, key: Tensor, value: Tensor) -> tuple[Callable[[], Any], str]:
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    attention = ExactAttention(model.config.num_hidden_layers, key, value, group)
    AttentionInterface.register(EXACT, attention)
    AttentionMaskInterface.register(EXACT, sdpa_mask)
    model.set_attn_implementation(EXACT)
    ids = torch.ones(case.batch, 1, dtype=torch.long, device=DEVICE)
    positions = torch.full_like(ids, case.keys - 1)
    return captured(lambda: model(input_ids=ids, position_ids=positions, use_cache=False).logits), attention.backend


def our_step(model: Any, case: Case, key: Tensor, value: Tensor) -> tuple[Callable[[], Any], hf.CellCache]:
    model.set_attn_implementation(OURS)
    cache = hf.CellCache(config=model.config, offload=case.offload, resident=case.resident)
    first = CellStore(offload=case.offload, resident=case.resident)
    first.append(key[:, :, :-1], value[:, :, :-1])
    first.close()
    for layer in cache.layers:
        layer.store = copy.deepcopy(first)

    def token() -> tuple[Tensor, Tensor]:
        # Any token: the same one again and again would open the same cells, and find them on the card.
        ids = torch.randint(model.config.vocab_size, (case.batch, 1), device=DEVICE)
        return ids, torch.full_like(ids, cache.get_seq_length())

    if not CUDA:

        def uncaptured() -> Any:
            ids, positions = token()
            return model(input_ids=ids, position_ids=positions, past_key_values=cache).logits

        return uncaptured, cache
    step = ModelStep(model, cache)

    def run() -> Any:
        return step(*token())

    run()
    return run, cache


@torch.no_grad()
def measure(case: Case) -> dict[str, Any]:
    model = make_model(case.shape)
    key, value = keys_and_values(case)
    steps: dict[str, Callable[[], Any]] = {}
    ours, cache = our_step(model, case, key, value)
    resident = None
    if case.offload:
        resident, _ = our_step(model, replace(case, offload=False, resident=None), key, value)
    exact, backend = exact_step(model, case, key, value)
    model.set_attn_implementation(OURS)
    steps = {"exact": exact, "cells": ours, **({"resident": resident} if resident else {})}
    for step in steps.values():
        timed(step, 3)
    rounds = {name: [] for name in steps}
    for _ in range(ROUNDS):
        for name, step in steps.items():
            rounds[name].append(timed(step))
    ms = {name: statistics.median(found) for name, found in rounds.items()}
    store = cache.layers[0].store
    opened = store.probes * store.closed / max(1, store.cells)
    return {
        "case": case.name,
        "shape": case.shape,
        "keys": case.keys,
        "batch": case.batch,
        "offload": case.offload,
        "backend": backend,
        "ms": ms,
        "ratio": ms["exact"] / ms["cells"],
        "found_resident": [layer.store.found_resident for layer in cache.layers],
        "keys_read": round(opened + store.length - store.closed),
        "cells": store.cells,
        "memory_gb": {name: size / 1e9 for name, size in cache.nbytes.items()},
    }


def show(rows: list[dict[str, Any]]) -> None:
    found = record.table(
        "case", "exact, ms", "cells, ms", "times as fast", "keys read", title="a step of a model", words=("case",)
    )
    for row in rows:
        ms = row["ms"]
        found.add_row(row["case"], f"{ms['exact']:.2f}", f"{ms['cells']:.2f}", f"{row['ratio']:.2f}", f"{row['keys_read']:,}")
    record.show(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the name of a case, such as 1b-131072")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, nothing written unless --out says where")
    parser.add_argument("--out", type=Path, help="folder for generate_gpu.json")
    arguments = parser.parse_args()
    if not CUDA and not arguments.quick:
        parser.error("needs a GPU; --quick runs without one")
    if arguments.out:
        record.RESULTS = arguments.out
    all_cases = QUICK if arguments.quick else CASES
    chosen = [case for case in all_cases if arguments.only in (None, case.name)]
    if not chosen:
        parser.error(f"--only must be one of {', '.join(case.name for case in all_cases)}, got {arguments.only}")
    hf.register(OURS)
    rows: list[dict[str, Any]] = []
    for case in chosen:
        rows.append(measure(case))
        show(rows[-1:])
        if CUDA:
            torch.cuda.empty_cache()
        if arguments.out is not None or not arguments.quick:
            record.merge("generate_gpu", "decode", {"card": card(), "rows": rows})
    show(rows)


if __name__ == "__main__":
    main()
