"""Cells of a prompt that its cache takes over, next to cells that it makes anew: the error of steps, and the time to close.

    python benchmarks/bench_adopted.py                                # results/adopted.json: a model and all families, 10 minutes
    python benchmarks/bench_adopted.py --model FOLDER --tokens 32768  # of a model that knows so many positions
    python benchmarks/bench_adopted.py --quick                        # one family, few keys, nothing written

Steps are those of the last rows; all keys before them are closed. "As they are" leaves the cells of the prompt as large as they
were. All three open as many keys. The time is that of the cache alone, after attention has grouped its keys.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import real
import record
import torch
from torch import Tensor

import nearfield as nf
from nearfield.attention import causal_attention
from nearfield.cells.cache import CellStore, adopted

STEPS, KEYS = 64, 60_000
"""60,000 keys are spans of 32,768, 16,384 and 8,192 keys, and a rest that is grouped anew."""
WAYS = ("taken over", "as they are", "anew")
Layer = tuple[str, Tensor, Tensor, Tensor]


def close(way: str, prepared: Any, key: Tensor, value: Tensor) -> tuple[CellStore, float]:
    """A store that has closed all keys it can, and how many seconds that took."""
    store = CellStore(regroup=way == "anew", group_from=0)
    store.append(key, value)
    with ExitStack() as changes:
        changes.enter_context(mock.patch.object(adopted, "LEAST_KEYS", 0))
        if way == "as they are":
            changes.enter_context(mock.patch.object(adopted.KnownCells, "halved", lambda self, keys: self))
        start = time.perf_counter()
        store.close(prepared)
        return store, time.perf_counter() - start


@torch.no_grad()
def measure(name: str, query: Tensor, key: Tensor, value: Tensor) -> dict[str, Any]:
    """The mean relative error of a step, by head, for each way."""
    last = key.shape[2] - STEPS
    early = [x[:, :, :last].contiguous() for x in (query, key, value)]
    # As on a GPU: cells twice as large as those of a cache, and two iterations.
    sizes = {"cell_size": 2 * round(last / CellStore().sizes.cells(0, last)), "partition": nf.KMeans(iterations=2)}
    prepared = causal_attention(*early, None, nf.Cells(**sizes), keep_cells=True).prepared
    group = query.shape[1] // key.shape[1]
    seen = torch.arange(key.shape[2]) <= torch.arange(last, key.shape[2])[:, None]
    keys, values = (x.repeat_interleave(group, 1) for x in (key, value))
    exact = torch.nn.functional.scaled_dot_product_attention(query[:, :, last:], keys, values, attn_mask=seen)
    found: dict[str, Any] = {"inputs": name, "keys": last, "error": {}, "seconds": {}, "segments": {}, "cells": {}}
    opened = None
    for way in ("anew", "taken over", "as they are"):
        store, seconds = close(way, prepared, *early[1:])
        assert store.state is not None
        opened = store.probes * store.closed / store.cells if opened is None else opened
        store.method = nf.Cells(probes=round(opened * store.cells / store.closed))
        found["segments"][way], found["cells"][way], found["seconds"][way] = len(store.state.bounds) - 1, store.cells, seconds
        store.append(key[:, :, last:], value[:, :, last:])
        output = store.attend(query[:, :, last:])
        found["error"][way] = float(((output - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())
    return found


def show(rows: Iterable[dict[str, Any]]) -> None:
    columns = [f"{what}, {way}" for what in ("error", "seconds") for way in WAYS]
    table = record.table("inputs", "keys", *columns, title="steps after a prompt", words=("inputs",))
    for row in rows:
        errors, seconds = ([row[what][way] for way in WAYS] for what in ("error", "seconds"))
        table.add_row(row["inputs"], f"{row['keys']:,}", *(f"{x:.4f}" for x in errors), *(f"{x:.2f}" for x in seconds))
    record.show(table)


def of_model(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every fifth layer, and the mean over them."""
    count = real.layer_count(options.model)
    kept: dict[int, tuple[Tensor, ...]] = {}
    with real.text_file(options.text) as text:
        ids = real.token_ids(options.model, text, options.tokens)
    real.visit_layers(real.load(options.model), ids, lambda layer, *x: kept.__setitem__(layer, x), range(1, count, 5))
    return [measure(f"layer {layer}", *x) for layer, x in record.each(list(kept.items()), lambda item: f"layer {item[0]}")]


def mean_of(rows: list[dict[str, Any]], name: str) -> dict[str, Any]:
    means = {what: {way: sum(row[what][way] for row in rows) / len(rows) for way in WAYS} for what in ("error", "seconds")}
    return {"inputs": name, "keys": rows[0]["keys"], **means}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=real.SMOLLM2, help="folder of a causal language model")
    parser.add_argument("--text", type=Path, help="what it reads; default: docstrings of Python's standard library")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--quick", action="store_true", help="one family and few keys, nothing written")
    options = parser.parse_args()
    torch.manual_seed(0)
    families, keys = (("local",), 3000) if options.quick else (tuple(nf.synthetic.FAMILIES), KEYS)
    rows = [measure(name, *nf.synthetic.make(name, 1, 1, keys, 64)) for name in record.each(families, str)]
    show(rows)
    if not options.quick:
        record.merge("adopted", "families", rows)
    if options.quick or not (options.model / "config.json").exists():
        return
    layers = of_model(options)
    mean = mean_of(layers, options.model.name)
    show([*layers, mean])
    print("written:", record.merge("adopted", f"{options.model.name}-{options.tokens}", {"layers": layers, "mean": mean}))


if __name__ == "__main__":
    main()
