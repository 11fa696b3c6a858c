"""Section of bench_generate_gpu.py: a real model on a real text, Qwen2.5-Coder-1.5B on 31,500 tokens.

--model names its folder: that of `make qwen`, or the packed one of `fetch_model.py qwen --gguf`, which is unpacked on the card.
The text is the docstrings of Python's standard library unless --text names another. Reading is measured as in `prefill`, steps as
in `decode` (graph against graph), over the keys and values that exact attention has read. After the text has been read in each
way, some more steps are audited, without a graph: how far their attention is from exact attention over the same keys, by head.
Timed steps read what follows in the text, also with keys and values offloaded: `found_resident` is as in `decode`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import generate_models as models
import generate_prefill
import gguf_qwen
import real
import record
import torch
from gpu_timing import DEVICE
from torch import Tensor

from nearfield import hf
from nearfield.app.evaluate.models import load_model

AUDITED, FOLLOWING = 4, 160
"""Tokens of the text after what was read: some whose attention is audited, and some that timed steps read."""


@dataclass(frozen=True)
class Case:
    tokens: int
    is_quick: bool = False

    @property
    def name(self) -> str:
        return f"{'tiny' if self.is_quick else 'qwen'}-{self.tokens}"


CASES = (Case(31_500),)
QUICK = (Case(1100, is_quick=True),)


def qwen(cases: list[Case], make: models.Models, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    generate_prefill.register()
    for case in cases:
        if case.is_quick:
            model: Any = make("tiny")
            text = torch.randint(500, (case.tokens + FOLLOWING,), generator=torch.Generator().manual_seed(0))
        else:
            if options.model is None or not options.model.exists():
                print(f"skipped: no model in {options.model} (`make qwen` fetches one; --model names its folder)")
                return
            make.drop()
            model = load(options.model)
            with real.text_file(options.text) as path:
                text = real.token_ids(options.model, path, case.tokens + FOLLOWING)[0]
        yield {"case": case.name, **measure(model, text.to(DEVICE), case.tokens, options.limit)}


def load(folder: Path, device: torch.device | str = DEVICE, dtype: torch.dtype = models.DTYPE) -> Any:
    """A model in a folder of `fetch_model.py`, packed or not. Transformers unpacks what `gguf_qwen` does not."""
    if any(folder.glob("*.gguf")) and not any(folder.glob("*.safetensors")) and gguf_qwen.serves(folder):
        return gguf_qwen.load(folder, device, dtype)
    return load_model(folder, device, dtype)[0]


@torch.no_grad()
def measure(model: Any, text: Tensor, tokens: int, limit: float) -> dict[str, Any]:
    ids, following = text[:tokens], text[tokens:]
    ways = generate_prefill.ways_of(model)
    read = generate_prefill.compare(model, ids, ways, limit)
    errors = {name: audited(model, ways[name](ids), following[:AUDITED], name) for name in generate_prefill.NAMES}
    models.free()
    exact = ways["sdpa"](ids)
    stored = [(layer.keys, layer.values) for layer in exact.layers]
    kinds: dict[str, dict[str, Any]] = {
        "cells": {},
        "offloaded": {"offload": True},
        "nothing kept": {"offload": True, "resident": 0},
    }
    caches = {name: cache_of(model, stored, **kind) for name, kind in kinds.items()}
    steps = {name: models.cells_step(model, cache, text=following) for name, cache in caches.items()}
    one, backend = models.exact_step(model, stored)
    steps = {"exact": one, **steps, "no attention": models.step_without_attention(model, 1)}
    if models.CUDA:
        steps |= {
            "exact, compiled": models.exact_step(model, stored, compile=True)[0],
            "cells, compiled": models.cells_step(model, caches["cells"], text=following, compile=True),
            "no attention, compiled": models.step_without_attention(model, 1, compile=True),
        }
    runs = models.interleaved(steps)
    ms, store = models.medians(runs), caches["cells"].layers[0].store
    found = [layer.store.found_resident for layer in caches["offloaded"].layers]
    return {
        "tokens": tokens,
        "prefill": read,
        "step": {"backend": backend, "ms": ms, "runs_ms": runs, "ratio": ms["exact"] / ms["cells"], "found_resident": found},
        "keys_read": models.keys_read(store),
        "errors": errors,
    }


def cache_of(model: Any, stored: list[tuple[Tensor, Tensor]], **options: Any) -> hf.CellCache:
    """A cache with these keys and values of every layer but the last ones."""
    model.set_attn_implementation(models.OURS)
    cache = hf.CellCache(config=model.config, **options)
    for layer, (key, value) in zip(cache.layers, stored, strict=True):
        layer.store = models.store_of(key[:, :, :-1], value[:, :, :-1], **options)
    return cache


def audited(model: Any, cache: hf.CellCache, following: Tensor, name: str) -> dict[str, float]:
    """Relative errors of the attention of some steps: mean over all heads, of the worst layer, and of the worst head."""
    model.set_attn_implementation(generate_prefill.NAMES[name])
    cache.audit = True
    for token in following:
        positions = torch.tensor([[cache.get_seq_length()]], device=DEVICE)
        model(input_ids=token.view(1, 1), position_ids=positions, past_key_values=cache)
    errors = torch.stack([torch.cat([step.relative.flatten() for step in steps]) for steps in cache.errors.values()])
    return {"mean": float(errors.mean()), "worst_layer": float(errors.mean(1).max()), "worst": float(errors.max())}


def show_qwen(rows: list[dict[str, Any]]) -> Any:
    names = ("case", "way", "reading, ms", "times as fast", "step, ms", "times as fast ", "error of a step, mean", "worst layer")
    found = record.table(*names, title="a real model", words=("case", "way"))
    for row in rows:
        read, step = row["prefill"], row["step"]
        for name, spent in read["ms"].items():
            error = row["errors"].get(name)
            kind = "exact" if name == "sdpa" else "cells"
            found.add_row(
                row["case"],
                name,
                f"{spent:,.0f}",
                f"{read['ratio'][name]:.2f}",
                f"{step['ms'][kind]:.2f}",
                "" if name == "sdpa" else f"{step['ratio']:.2f}",
                *(["", ""] if error is None else [f"{error['mean']:.2%}", f"{error['worst_layer']:.2%}"]),
            )
    return found
