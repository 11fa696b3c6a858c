"""Section of bench_generate_gpu.py: requests of different lengths that are continued together.

16 requests of 4,096 to 65,536 tokens, evenly spaced in log, in the shape of a 1B model; keys and values of the family
`clustered`, the same in all layers. Ways, which take turns:

cells          `CellCache.batch`, a step of the model in a graph: every request has its own keys, and there is no padding
padded         SDPA over static keys that are padded on the left to the longest request, with a mask, in a graph
transformers   a StaticCache with the same padding, as `generate` would step, without a graph

Then some requests go on alone from where they began, each with its own cache and the same tokens: their logits, and the tokens
that they would choose, are compared with those of the batch.
"""

from __future__ import annotations

import argparse
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import generate_models as models
import record
import torch
from gpu_timing import DEVICE
from torch import Tensor
from transformers import StaticCache

from nearfield import hf
from nearfield.cells.cache import CellStore

COMPARED = 4
"""Steps that a request also takes alone."""
ROOM = 256
"""A StaticCache has room for so many steps."""


@dataclass(frozen=True)
class Case:
    shape: str
    requests: int
    shortest: int
    longest: int

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.requests}x{self.shortest}-{self.longest}"

    @property
    def lengths(self) -> list[int]:
        ratio = math.log(self.longest / self.shortest)
        return [round(self.shortest * math.exp(ratio * number / (self.requests - 1))) for number in range(self.requests)]


CASES = (Case("1b", 16, 4096, 65_536),)
QUICK = (Case("tiny", 3, 300, 1500),)


def requests(cases: list[Case], make: models.Models, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for case in cases:
        yield measure(case, make(case.shape))
        models.free()


@torch.no_grad()
def measure(case: Case, model: Any) -> dict[str, Any]:
    lengths = case.lengths
    key, value = models.keys_and_values(case.shape, case.longest)
    stores = [models.store_of(key[:, :, -length:], value[:, :, -length:]) for length in lengths]
    print(f"  {len(lengths)} requests, {sum(lengths):,} keys", flush=True)
    answers = {number: _alone(model, stores[number]) for number in sorted({0, len(lengths) // 2, len(lengths) - 1})}
    print("  some of them alone", flush=True)
    cache = hf.CellCache.batch([models.cache_of(model, store) for store in stores])
    step = models.cells_step(model, cache, len(lengths))
    alike = _compare(model, stores, answers)
    del stores
    models.free()

    mask = torch.arange(case.longest, device=DEVICE) >= case.longest - torch.tensor(lengths, device=DEVICE)[:, None]
    padded = [_padded(key, mask), _padded(value, mask)]
    positions = torch.tensor(lengths, device=DEVICE)[:, None] - 1
    stored = [(padded[0].clone(), padded[1].clone()) for _ in range(model.config.num_hidden_layers)]
    exact, backend = models.exact_step(model, stored, mask[:, None, None], positions)
    print(f"  padded, by {backend}", flush=True)
    runs = models.interleaved({"cells": step, "padded": exact})
    exact_gb = sum(x.nbytes for pair in stored for x in pair) / 1e9
    del exact, stored
    models.free()
    failed: dict[str, str] = {}
    try:
        runs["transformers"] = _transformers(model, padded, mask)
    except (RuntimeError, TypeError, ValueError) as error:  # out of memory, or another version of Transformers
        failed["transformers"] = str(error).split(". ")[0]
        print("  transformers:", failed["transformers"], flush=True)
    ms = models.medians(runs)
    return {
        "case": case.name,
        "shape": case.shape,
        "lengths": lengths,
        "backend": backend,
        "ms": ms,
        "runs_ms": runs,
        "tokens_per_second": {name: 1e3 * len(lengths) / spent for name, spent in ms.items()},
        "ratio": ms["padded"] / ms["cells"],
        "cache_gb": {"cells": sum(cache.nbytes.values()) / 1e9, "padded": exact_gb},
        "alone": alike,
        "failed": failed,
    }


def _padded(x: Tensor, mask: Tensor) -> Tensor:
    return x * mask[:, None, :, None]


def _steps(model: Any, cache: hf.CellCache, entries: int, steps: int) -> Tensor:
    """The logits `[steps, entries, vocabulary]` of the next steps."""
    step = models.cells_step(model, cache, entries)
    return torch.stack([step()[:, -1].float() for _ in range(steps)])


def _alone(model: Any, store: CellStore) -> Tensor:
    found = _steps(model, models.cache_of(model, store), 1, COMPARED)[:, 0]
    models.free()
    return found


def _compare(model: Any, stores: list[CellStore], answers: dict[int, Tensor]) -> dict[str, Any]:
    """How far the logits of requests in a batch are from those that they have alone."""
    batch = hf.CellCache.batch([models.cache_of(model, copy.copy(store)) for store in stores])
    together = _steps(model, batch, len(stores), COMPARED)
    off, same = {}, {}
    for number, alone in answers.items():
        found = together[:, number]
        off[stores[number].length] = float((found - alone).norm() / alone.norm())
        same[stores[number].length] = float((found.argmax(-1) == alone.argmax(-1)).float().mean())
    return {"steps": COMPARED, "logits_off": off, "same_tokens": same}


def _transformers(model: Any, padded: list[Tensor], mask: Tensor) -> list[float]:
    """Milliseconds of a step, in some rounds."""
    model.set_attn_implementation("sdpa")
    cache = StaticCache(config=model.config, max_cache_len=mask.shape[1] + ROOM)
    for layer in range(model.config.num_hidden_layers):
        cache.update(*padded, layer)
    seen = mask.long()
    ids = torch.ones(len(mask), 1, dtype=torch.long, device=DEVICE)

    def step() -> None:
        nonlocal seen
        seen = torch.cat([seen, ids], 1)
        model(input_ids=ids, attention_mask=seen, position_ids=seen.sum(1, keepdim=True) - 1, past_key_values=cache)

    models.timed(step, 1)
    found = [models.timed(step, 2) for _ in range(3)]
    model.set_attn_implementation(models.OURS)
    return found


def show_requests(rows: list[dict[str, Any]]) -> Any:
    names = ("case", "way", "ms", "tokens/s", "cache, GB", "logits off, alone", "same tokens")
    found = record.table(*names, title="requests of different lengths", words=("case", "way"))
    for row in rows:
        for name, spent in row["ms"].items():
            size = row["cache_gb"].get(name)
            off, same = row["alone"]["logits_off"].values(), row["alone"]["same_tokens"].values()
            alone = [f"{max(off):.2g}", f"{min(same):.0%}"] if name == "cells" else ["", ""]
            speed = f"{row['tokens_per_second'][name]:,.0f}"
            found.add_row(row["case"], name, f"{spent:.2f}", speed, "" if size is None else f"{size:.2f}", *alone)
    return found
