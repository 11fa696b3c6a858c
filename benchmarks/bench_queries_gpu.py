"""Cells that are made for the queries, next to cells that are made for the keys alone: times of a prompt and of a training step.

python benchmarks/bench_queries_gpu.py           # on a GPU; writes results/queries_gpu.json
python benchmarks/bench_queries_gpu.py --quick   # small, anywhere, nothing written

`KMeans(by_queries=True)` looks at 64 queries of each head for each span, and weights the coordinates of keys by how large these
are. Both ways make as many cells and open as many. Times are medians of interleaved turns, in milliseconds. The error is that of
the last rows, relative to exact attention, pooled over heads. Heads are grouped as in Qwen2.5-1.5B, 12 of queries and 2 of keys.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import record
import torch
from errors import exact_rows
from gpu_timing import CUDA, QKV, card, clustered, interleaved, sdpa
from torch import Tensor

import nearfield as nf

KV_HEADS, GROUP, DIM = 2, 6, 128
LENGTHS = (32_768, 131_072)
ROWS = 256
WAYS = {"keys": nf.Cells(), "queries": nf.Cells(partition=nf.KMeans(by_queries=True))}


def uneven(n: int) -> QKV:
    """Clusters along whose coordinates queries are large where keys are small: what cells made for the queries are for."""
    query, key, value = clustered(n, DIM, KV_HEADS, run=16, group=GROUP)
    sizes = torch.logspace(1, -1, DIM, device=query.device).to(query.dtype)
    return query * sizes, key / sizes.sqrt(), value


def step(query: Tensor, key: Tensor, value: Tensor, cells: nf.Cells) -> None:
    """A forward and a backward pass."""
    own = [x.detach().requires_grad_() for x in (query, key, value)]
    nf.attention(*own, is_causal=True, method=cells, enable_gqa=True).sum().backward()


def error(query: Tensor, key: Tensor, value: Tensor, cells: nf.Cells) -> float:
    rows = nf.attention(query, key, value, is_causal=True, method=cells, enable_gqa=True)[:, :, -ROWS:].float()
    exact = exact_rows(query, key, value, ROWS)
    return float((rows - exact).norm() / exact.norm())


def measure(n: int) -> dict[str, Any]:
    inputs = uneven(n)
    keys, values = (x.repeat_interleave(GROUP, 1) for x in inputs[1:])
    backend = "cudnn" if CUDA else "cpu"
    found: dict[str, Any] = {"tokens": n, "sdpa": backend}
    found["error"] = {name: error(*inputs, cells) for name, cells in WAYS.items()}
    with torch.no_grad():
        calls: dict[str, Any] = {
            name: partial(nf.attention, *inputs, is_causal=True, method=cells, enable_gqa=True) for name, cells in WAYS.items()
        }
        calls["sdpa"] = partial(sdpa, backend, inputs[0], keys, values, True)
        for call in calls.values():
            call()
        found["prompt"] = {name: statistics.median(ms) for name, ms in interleaved(calls).items()}
    steps = {name: partial(step, *inputs, cells) for name, cells in WAYS.items()}
    for call in steps.values():
        call()
    found["training"] = {name: statistics.median(ms) for name, ms in interleaved(steps).items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one short length, nothing written")
    parser.add_argument("--out", type=Path, help="folder for queries_gpu.json")
    options = parser.parse_args()
    if not (CUDA or options.quick):
        print("skipped: there is no CUDA device (--quick runs without one)")
        return
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        record.RESULTS = options.out
    rows = [measure(n) for n in record.each((4096,) if options.quick else LENGTHS, lambda n: f"{n:,} tokens")]
    names = ("keys", "queries")
    columns = [f"{what}, {name}" for what in ("prompt ms", "training ms", "error") for name in names]
    shown = record.table("tokens", "prompt ms, SDPA", *columns, title="cells made for keys, and for queries")
    for row in rows:
        times = [f"{row[what][name]:.2f}" for what in ("prompt", "training") for name in names]
        errors = [f"{row['error'][name]:.4f}" for name in names]
        shown.add_row(f"{row['tokens']:,}", f"{row['prompt']['sdpa']:.2f}", *times, *errors)
    record.show(shown)
    if not options.quick or options.out:
        print("written:", record.write("queries_gpu", {"card": card(), "rows": rows}))


if __name__ == "__main__":
    main()
