"""Section of bench_generate_gpu.py: how long the step stalls that closes a segment, and after which the graph is captured anew.

Steps are timed one by one, over a range in which the running segment becomes full: the one that closes it next to the
others. That is done twice from the same keys: the first time, kernels are compiled that group keys (`first_ms`).
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import generate_models as models
import record
import torch

from nearfield.cells.cache import CellStore

BEFORE, AFTER = 30, 30
"""Steps before the one that closes a segment, and after it."""


@dataclass(frozen=True)
class Case:
    shape: str
    keys: int

    @property
    def name(self) -> str:
        return f"{self.shape}-{self.keys}"


CASES = (Case("1b", 32_768), Case("1b", 131_072), Case("8b", 262_144))
QUICK = (Case("tiny", 1536),)


def closing(cases: list[Case], make: models.Models, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for case in cases:
        yield measure(case, make(case.shape))
        models.free()


def almost_full(case: Case) -> CellStore:
    """A prompt that is closed, and a running segment that is full after some more keys."""
    empty = CellStore()
    closed = empty.sizes.next_end(0, case.keys)
    more = empty.sizes.next_close(closed) - BEFORE
    key, value = models.keys_and_values(case.shape, more)
    store = models.store_of(key[:, :, : case.keys], value[:, :, : case.keys])
    store.append(key[:, :, case.keys :], value[:, :, case.keys :])
    return store


@torch.no_grad()
def measure(case: Case, model: Any) -> dict[str, Any]:
    store = almost_full(case)
    first = max(_singly(model, store)[0])
    models.free()
    spent, closed = _singly(model, store)
    (at,) = (step for step, (before, after) in enumerate(pairwise(closed)) if after > before)
    return {
        "case": case.name,
        "shape": case.shape,
        "keys": case.keys,
        "segment": closed[-1] - closed[0],
        "median_ms": statistics.median(spent),
        "closing_ms": spent[at],
        "largest_other_ms": max(spent[:at] + spent[at + 1 :]),
        "first_ms": first,
        "runs_ms": spent,
    }


def _singly(model: Any, store: CellStore) -> tuple[list[float], list[int]]:
    """Milliseconds of every step, and how many keys are in closed segments before the first and after each."""
    cache = models.cache_of(model, store)
    step = models.cells_step(model, cache)
    layer = cache.layers[0]
    spent, closed = [], [layer.store.closed]
    for _ in range(BEFORE + AFTER):
        spent.append(models.timed(step, 1))
        closed.append(layer.store.closed)
    return spent, closed


def show_closing(rows: list[dict[str, Any]]) -> Any:
    names = ("case", "segment", "median, ms", "closing, ms", "largest other", "with compiling, ms")
    found = record.table(*names, title="steps, one by one, over the end of a segment", words=("case",))
    for row in rows:
        times = (f"{row[name]:.2f}" for name in ("median_ms", "closing_ms", "largest_other_ms", "first_ms"))
        found.add_row(row["case"], f"{row['segment']:,}", *times)
    return found
