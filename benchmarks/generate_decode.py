"""Section of bench_generate_gpu.py: a step with exact attention and with a CellCache, both in a CUDA graph, side by side.

Keys and values are those of the family `clustered`, in memory of their own for every layer. Exact attention is torch's, over
exactly the keys that there are, without a mask; the fastest backend counts. The loop of `generate` is not part of a step. "No
attention" is the same step with attention, and the cache, left out. "Compiled" is with `compile=True`: what lies between the
attention of two layers by torch.compile, in the same way for all.

With offload, cells that were opened lately stay on the card, and `found_resident` says which share of those that are opened is
found there, for each layer. Tokens are random, since the same one again and again would open the same cells; so are the weights,
and a model that reads a text may find more of them or fewer. "Nothing kept" is without that, "on the card" without offload.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import generate_models as models
import record
import torch


@dataclass(frozen=True)
class Case:
    shape: str
    keys: int
    batch: int = 1
    offload: bool = False

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.keys}" + (f"x{self.batch}" if self.batch > 1 else "") + ("-offload" if self.offload else "")


CASES = (
    Case("1b", 131_072),
    Case("1b", 1_048_576),
    Case("1b", 65_536, batch=16),
    Case("8b", 262_144),
    Case("8b", 262_144, offload=True),
)
QUICK = (Case("tiny", 2048), Case("tiny", 1536, batch=2), Case("tiny", 2048, offload=True))


def decode(cases: list[Case], make: models.Models, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for case in cases:
        yield measure(case, make(case.shape), options.resident)
        models.free()


@torch.no_grad()
def measure(case: Case, model: Any, resident: int | None = None) -> dict[str, Any]:
    """`resident`: how many offloaded keys stay on the card; None: the default."""
    key, value = models.keys_and_values(case.shape, case.keys, case.batch)
    prompt = key[:, :, :-1], value[:, :, :-1]
    kinds: dict[str, dict[str, Any]] = {"cells": {}}
    if case.offload:
        offloaded = {"cells": {"offload": True, "resident": resident}, "nothing kept": {"offload": True, "resident": 0}}
        kinds = {**offloaded, "on the card": {}}
    caches = {name: models.cache_of(model, models.store_of(*prompt, **kind)) for name, kind in kinds.items()}
    steps = {name: models.cells_step(model, cache, case.batch, at_random=True) for name, cache in caches.items()}
    stored = [(key.clone(), value.clone()) for _ in range(model.config.num_hidden_layers)]
    exact, backend = models.exact_step(model, stored)
    steps = {"exact": exact, **steps, "no attention": models.step_without_attention(model, case.batch)}
    if models.CUDA and not case.offload:
        steps |= {
            "exact, compiled": models.exact_step(model, stored, compile=True)[0],
            "cells, compiled": models.cells_step(model, caches["cells"], case.batch, at_random=True, compile=True),
            "no attention, compiled": models.step_without_attention(model, case.batch, compile=True),
        }
    runs = models.interleaved(steps)
    ms, store = models.medians(runs), caches["cells"].layers[0].store
    return {
        "case": case.name,
        "shape": case.shape,
        "keys": case.keys,
        "batch": case.batch,
        "offload": case.offload,
        "resident": resident,
        "found_resident": [layer.store.found_resident for layer in caches["cells"].layers],
        "backend": backend,
        "ms": ms,
        "runs_ms": runs,
        "ratio": ms["exact"] / ms["cells"],
        "keys_read": models.keys_read(store),
        "cells": store.cells,
        "memory_gb": {name: size / 1e9 for name, size in caches["cells"].nbytes.items()},
    }


def show_decode(rows: list[dict[str, Any]]) -> Any:
    names = ("case", "exact, ms", "cells, ms", "times as fast", "others, ms", "keys read")
    found = record.table(*names, title="a step of a model", words=("case", "others, ms"))
    for row in rows:
        ms = row["ms"]
        others = ", ".join(f"{name} {ms[name]:.2f}" for name in ms if name not in ("exact", "cells"))
        found.add_row(
            row["case"], f"{ms['exact']:.2f}", f"{ms['cells']:.2f}", f"{row['ratio']:.2f}", others, f"{row['keys_read']:,}"
        )
    return found
