"""Section of bench_cache.py: a text decoded token by token with a `CellCache`, next to a `DynamicCache` and SDPA.

8,192 tokens of each text: the first 6,144 are read at once, exactly. The others are fed one by one, whatever the model would have
said. The caches take turns, so that a slow spell of the machine hits both.

For every head of keys, a step reads the open end, the first keys, those of the opened cells, and the moments of all cells. `rows`
are those of K and V, each counted once per head of keys, as for exact attention; `rows_by_query_head` counts a row again for
every query head that opens its cell. Moments are counted in bytes.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
from typing import Any

import torch
import torch.nn.functional as F
from bench_language import ids_of
from record import each, table
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache

import nearfield as nf
from nearfield import hf
from nearfield.cells.cache.segments import PER_CELL

TOKENS, DECODED = 8192, 2048
QUICK_TOKENS, QUICK_DECODED = 320, 48
QUICK_METHOD = nf.Cells(segment=64, probes=4)
NAME = "nearfield-steps"
COUNTED = 8
"""Every eighth step counts what it reads, and is not timed."""


def steps(model: Any, tokenizer: Any, texts: dict[str, str], options: argparse.Namespace) -> dict[str, Any]:
    tokens = options.tokens or (QUICK_TOKENS if options.quick else TOKENS)
    decoded = QUICK_DECODED if options.quick else min(DECODED, tokens // 2)
    method = QUICK_METHOD if options.quick else nf.Cells()
    hf.register(NAME, nf.Exact())
    weights = {id(x): x for x in (*model.parameters(), *model.buffers())}
    ours, exact = (copy.deepcopy(model, dict(weights)) for _ in range(2))
    ours.set_attn_implementation(NAME)
    exact.set_attn_implementation("sdpa")
    rows = []
    for name, text in texts.items():
        ids = ids_of(tokenizer, text[: 12 * tokens])[:, :tokens].to(model.device)
        if ids.shape[1] < tokens:
            raise ValueError(f"{name} has {ids.shape[1]} tokens, and {tokens} are needed")
        caches = hf.CellCache(method, config=model.config, group_from=0), DynamicCache(config=model.config)
        rows.append({"text": name, **_decoded((ours, exact), caches, ids, tokens - decoded)})
    return {"tokens": tokens, "decoded": decoded, "method": repr(method), "rows": rows}


@torch.no_grad()
def _decoded(models: tuple[Any, Any], caches: tuple[Any, Any], ids: Tensor, prompt: int) -> dict[str, Any]:
    """Perplexity and speed of our cache and of the exact one after the prompt, and what ours reads."""
    losses: list[list[float]] = [[], []]
    seconds: list[list[float]] = [[], []]
    logits = []
    for model, cache in zip(models, caches, strict=True):
        logits.append(model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1).logits[0, -1:])
    reads = []
    for position in each(range(prompt, ids.shape[1]), lambda position: f"steps, token {position:,}"):
        counted = (position - prompt) % COUNTED == COUNTED // 2
        given = ids[:, position : position + 1]
        # They take turns at going first.
        for which in (0, 1) if position % 2 else (1, 0):
            losses[which].append(float(F.cross_entropy(logits[which].float(), given[0])))
            recorded = Reads(caches[0]) if counted and which == 0 else None
            start = time.perf_counter()
            logits[which] = models[which](given, past_key_values=caches[which]).logits[0]
            _wait(ids.device)
            if not counted:
                seconds[which].append(time.perf_counter() - start)
            if recorded is not None:
                reads.append(recorded.finish())
    medians = [statistics.median(spent) for spent in seconds]
    excess = torch.tensor(losses[0], dtype=torch.float64) - torch.tensor(losses[1], dtype=torch.float64)
    return {
        "perplexity": math.exp(statistics.fmean(losses[0])),
        "exact_perplexity": math.exp(statistics.fmean(losses[1])),
        "excess": math.expm1(float(excess.mean())),
        "excess_stderr": float(excess.std()) / math.sqrt(len(excess)),
        "tokens_per_second": 1 / medians[0],
        "exact_tokens_per_second": 1 / medians[1],
        "exact_over_ours": medians[1] / medians[0],
        "step_ms": [1e3 * median for median in medians],
        "read": _read(reads),
    }


class Reads:
    """Records which rows of K and V the next step reads, layer by layer."""

    def __init__(self, cache: Any) -> None:
        self.stores = [layer.store for layer in cache.layers]
        self.places: list[list[Tensor]] = [[] for _ in self.stores]
        for store, places in zip(self.stores, self.places, strict=True):
            store.state.gather = self._recorded(store.state.gather, places)

    @staticmethod
    def _recorded(gather: Any, places: list[Tensor]) -> Any:
        def call(place: Tensor, dtype: torch.dtype) -> Any:
            places.append(place)
            return gather(place, dtype)

        return call

    def finish(self) -> dict[str, float]:
        """Stop recording. Means over heads of keys and layers."""
        found = []
        for store, places in zip(self.stores, self.places, strict=True):
            state = store.state
            del state.gather
            # Place 0 is a filler, where a head has opened fewer keys than another one: it holds a sink and is in no cell.
            opened = [head[head > 0] for place in places for head in place]
            near = store.length - store.closed + store.sizes.sinks
            found.append(
                {
                    "exact_rows": store.length,
                    "rows": near + statistics.fmean(len(head.unique()) for head in opened) if opened else store.length,
                    "rows_by_query_head": near + statistics.fmean(map(len, opened)) if opened else store.length,
                    "bytes_of_a_row": (state.keys.storage.shape[3] + state.values.storage.shape[3]) * state.keys.storage.itemsize,
                    "bytes_of_moments": store.cells * sum(_width(getattr(state.tables, name).storage) for name in PER_CELL),
                }
            )
        return {name: statistics.fmean(one[name] for one in found) for name in found[0]}


def _width(storage: Tensor) -> int:
    """Bytes per cell and head."""
    return storage.itemsize * math.prod(storage.shape[3:])


def _read(reads: list[dict[str, float]]) -> dict[str, float]:
    """Means over steps, and how many times more exact attention reads."""
    mean = {name: statistics.fmean(one[name] for one in reads) for name in reads[0]}
    exact, size = mean["exact_rows"], mean["bytes_of_a_row"]
    return {
        **mean,
        "exact_over_rows": exact / mean["rows"],
        "exact_over_rows_by_query_head": exact / mean["rows_by_query_head"],
        "exact_over_all_bytes": exact * size / (mean["rows"] * size + mean["bytes_of_moments"]),
    }


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def show_steps(results: dict[str, Any]) -> Table:
    title = f"the last {results['decoded']:,} of {results['tokens']:,} tokens, one by one; {results['method']}"
    names = ("text", "perplexity", "exact", "excess", "tokens/s", "exact, tokens/s", "rows of K, V", "fewer", "with moments")
    found = table(*names, title=title, words=("text",))
    for row in results["rows"]:
        read = row["read"]
        found.add_row(
            row["text"],
            *(f"{row[name]:.3f}" for name in ("perplexity", "exact_perplexity")),
            f"{row['excess']:+.2%} ± {row['excess_stderr']:.2%}",
            *(f"{row[name]:.2f}" for name in ("tokens_per_second", "exact_tokens_per_second")),
            f"{read['rows']:,.0f} of {read['exact_rows']:,.0f}",
            f"{read['exact_over_rows']:.1f}x",
            f"{read['exact_over_all_bytes']:.1f}x",
        )
    return found
