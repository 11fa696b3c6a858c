"""One decoding step of one layer on a CPU: exact attention, cells, and the k nearest keys by an index that grows.

python benchmarks/bench_decode.py            # results/decode.json, about ten minutes on two cores
python benchmarks/bench_decode.py --quick    # small sizes, nothing written

A step appends a key and attends to all keys: 8 heads of 64 columns, float32, after a prompt of 8,192, 32,768 or 131,072 keys.
Keys drift: each is near one of 256 centres, and the next one mostly near the same. Methods take turns, so that a slow spell of
the machine hits all of them, on one thread, as threads that wait for each other on a busy machine take most of a short step. What
an index spends now and then on taking in the latest keys is timed by itself and shared out among them.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from record import command_line, each, show, side_by_side, table
from torch import Tensor

import nearfield as nf
from nearfield.cells.cache import CellStore
from nearfield.knn.store import IndexStore

HEADS, DIM = 8, 64
LENGTHS, QUICK_LENGTHS = (1 << 13, 1 << 15, 1 << 17), (1 << 10,)
ROUNDS, QUICK_ROUNDS = 40, 3
CENTRES, STAY, SPREAD = 256, 0.99, 0.5
SHARPNESS = 1.5
"""Queries are so many times as long as keys."""


def stores() -> dict[str, CellStore | IndexStore]:
    return {
        "Cells()": CellStore(group_from=0),
        "TopK(index=KMeansIndex())": IndexStore(nf.TopK(index=nf.KMeansIndex())),
        "TopK(tail=128, index=KMeansIndex())": IndexStore(nf.TopK(tail=128, index=nf.KMeansIndex())),
        "TopK()": IndexStore(nf.TopK()),
    }


def stream(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values `[1, heads, count, dim]`."""
    centres = torch.randn(HEADS, CENTRES, DIM, generator=generator)
    moves = torch.rand(count, generator=generator) > STAY
    topics = torch.randint(CENTRES, (count + 1,), generator=generator)[moves.cumsum(0)]
    key, query = (centres[:, topics] + SPREAD * torch.randn(HEADS, count, DIM, generator=generator) for _ in range(2))
    return SHARPNESS * query[None], key[None], torch.randn(1, HEADS, count, DIM, generator=generator)


def measure(quick: bool) -> dict[str, Any]:
    rows = []
    rounds = QUICK_ROUNDS if quick else ROUNDS
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        for length in each(QUICK_LENGTHS if quick else LENGTHS, lambda n: f"decode, {n:,} keys"):
            rows += steps(length, rounds)
    torch.set_num_threads(threads)
    found = table("keys", "method", "ms", "times exact", "build, s", "take in, ms a key", "error", "MB", words=("method",))
    for row in rows:
        numbers = (f"{row[name]:.3g}" for name in ("step_ms", "over_exact", "build_s", "take_in_ms", "error", "mb"))
        found.add_row(f"{row['n']:,}", row["method"], *numbers)
    show(found)
    return {"heads": HEADS, "dim": DIM, "rounds": rounds, "threads": 1, "load": os.getloadavg(), "rows": rows}


def steps(length: int, rounds: int) -> list[dict[str, Any]]:
    more = math.isqrt(length) + 65
    query, key, value = stream(length + rounds + 1 + more, torch.Generator().manual_seed(length))
    exact_outputs: list[Tensor] = []

    def exact() -> None:
        # Into room that is there already, as the stores do.
        seen = length + 1 + len(exact_outputs)
        row = query[:, :, seen - 1 : seen]
        exact_outputs.append(F.scaled_dot_product_attention(row, key[:, :, :seen], value[:, :, :seen]))

    functions: dict[str, Callable[[], object]] = {"exact": exact}
    outputs: dict[str, list[Tensor]] = {"exact": exact_outputs}
    built, made = {"exact": 0.0}, stores()
    for name, store in made.items():
        start = time.perf_counter()
        store.append(key[:, :, :length], value[:, :, :length])
        store.close()
        store.reserve(rounds + 1 + more)
        built[name] = time.perf_counter() - start
        outputs[name] = []
        functions[name] = lambda store=store, found=outputs[name]: found.append(step(store, query, key, value))
    seconds = side_by_side(functions, rounds)
    rows = []
    for name, spent in seconds.items():
        error = [(a - b).norm(dim=-1) / b.norm(dim=-1) for a, b in zip(outputs[name], exact_outputs, strict=True)]
        store_or_none = made.get(name)
        plain = 2 * 4 * HEADS * DIM * length
        rows.append(
            {
                "n": length,
                "method": name,
                "step_ms": 1e3 * statistics.median(spent),
                "over_exact": statistics.median(a / b for a, b in zip(spent, seconds["exact"], strict=True)),
                "build_s": built[name],
                "take_in_ms": take_in(store_or_none, key, value, more) if isinstance(store_or_none, IndexStore) else 0.0,
                "error": float(torch.stack(error).mean()),
                "mb": (plain if store_or_none is None else sum(store_or_none.nbytes.values())) / 2**20,
            }
        )
    return rows


def step(store: CellStore | IndexStore, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    own = slice(store.length, store.length + 1)
    store.append(key[:, :, own], value[:, :, own])
    return store.attend(query[:, :, own])


def take_in(store: IndexStore, key: Tensor, value: Tensor, more: int) -> float:
    """Milliseconds a key: so many at once that the index takes them in."""
    own = slice(store.length, store.length + more)
    start = time.perf_counter()
    store.append(key[:, :, own], value[:, :, own])
    store.close()
    return 1e3 * (time.perf_counter() - start) / more


if __name__ == "__main__":
    command_line(__doc__, "decode", measure)
