"""Section of bench_cache.py: a million keys, appended one by one: a day's worth at twelve per second.

It measures the time of a step, the memory beyond the keys, and the longest append, which closes a segment. One layer with 2 heads
of 16 columns and 4 query heads; the keys drift, like those of a long text.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from record import each, exponent, high_water, restart_high_water, table
from rich.table import Table
from torch import Tensor

from nearfield.cells.cache.store import CellStore

HEADS, GROUP, DIM = 2, 2, 16
KEYS, FEWEST = 1 << 20, 1 << 13
QUICK_KEYS, QUICK_FEWEST = 1 << 12, 1 << 11
STEPS = 64
TOPICS, STAY = 256, 0.99
"""Every key is near one of 256 centres, and the next key mostly near the same one."""


def appends(quick: bool) -> dict[str, Any]:
    keys, fewest = (QUICK_KEYS, QUICK_FEWEST) if quick else (KEYS, FEWEST)
    lengths = [fewest << i for i in range((keys // fewest).bit_length())]
    store = CellStore(group_from=0)
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(TOPICS, HEADS, 2 * DIM, generator=generator)
    longest = 0.0
    rows = []
    before = restart_high_water()
    for length in each(lengths, lambda length: f"appends, up to {length:,} keys"):
        for start in range(store.length, length - STEPS, 1024):
            new = _stream(min(1024, length - STEPS - start), centres, generator)
            longest = max(longest, *(_append(store, row) for row in new.split(1, 2)))
        rows.append({"n": length, **_steps(store, centres, generator), **_sizes(store)})
    late = rows[-4:]
    return {
        "heads": HEADS,
        "query_heads": HEADS * GROUP,
        "dim": DIM,
        "rows": rows,
        "step_exponent": exponent([row["n"] for row in rows], [row["step_ms"] for row in rows]),
        "late_step_exponent": exponent([row["n"] for row in late], [row["step_ms"] for row in late]),
        "longest_append_ms": longest,
        "high_water_mb": high_water() - before,
    }


def _stream(count: int, centres: Tensor, generator: torch.Generator) -> Tensor:
    """Keys and values side by side, `[1, heads, count, 2 dim]`."""
    moves = torch.rand(count, generator=generator) > STAY
    topics = torch.randint(TOPICS, (count + 1,), generator=generator)[moves.cumsum(0)]
    noise = torch.randn(count, HEADS, 2 * DIM, generator=generator)
    return (centres[topics] + 0.5 * noise).transpose(0, 1)[None]


def _append(store: CellStore, row: Tensor) -> float:
    """Milliseconds, including those of closing a segment when it is due."""
    start = time.perf_counter()
    store.append(row[..., :DIM], row[..., DIM:])
    store.close()
    return 1e3 * (time.perf_counter() - start)


def _steps(store: CellStore, centres: Tensor, generator: torch.Generator) -> dict[str, float]:
    """The median time of "append and attend"."""
    spent = []
    for row in _stream(STEPS, centres, generator).split(1, 2):
        query = 2.0 * row[..., :DIM].repeat_interleave(GROUP, 1)
        start = time.perf_counter()
        store.append(row[..., :DIM], row[..., DIM:])
        store.attend(query)
        spent.append(1e3 * (time.perf_counter() - start))
    return {"step_ms": statistics.median(spent)}


def _sizes(store: CellStore) -> dict[str, Any]:
    parts = store.nbytes
    plain = 2 * 4 * HEADS * DIM * store.length
    return {
        "cells": store.cells,
        "probes": store.probes,
        "open_end": store.length - store.closed,
        "bytes": parts,
        "bytes_over_keys": sum(parts.values()) / plain,
        "moments_over_keys": parts["moments"] / plain,
    }


def show_appends(results: dict[str, Any]) -> Table:
    title = (
        f"appended one by one: step ~ n^{results['step_exponent']:.2f}, n^{results['late_step_exponent']:.2f} at the end; "
        f"longest append {results['longest_append_ms']:.0f} ms"
    )
    found = table("keys", "step, ms", "cells", "opened", "read one by one", "bytes / keys", "moments / keys", title=title)
    for row in results["rows"]:
        counts = (f"{row[name]:,}" for name in ("cells", "probes", "open_end"))
        found.add_row(
            f"{row['n']:,}", f"{row['step_ms']:.3f}", *counts, f"{row['bytes_over_keys']:.2f}", f"{row['moments_over_keys']:.3f}"
        )
    return found
