"""Errors of top-k, top-k with a sampled tail, and cells, on uniform inputs, at about equal numbers of keys."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

import nearfield as nf
from experiments.digest import digest
from experiments.error_vs_k.methods import CELL_SIZES, CLOSE, cells, fitted, top, with_tail
from experiments.error_vs_k.spreads import EARLIER, FIGURE, OURS
from experiments.experiment import Row, Rows, Unit
from experiments.powers import power
from experiments.settings import Settings

DIM = 64
ROWS = 512
"""Queries per input: rows are independent, so more of them tell little more."""
SPREADS = (*OURS, *EARLIER, FIGURE)
LENGTHS = (4_096, 16_384)
SEEDS = 5


def counts(n: int) -> dict[str, int]:
    """The paper's k, rounded up, by name; log is the natural one."""
    return {
        "3": 3,
        "n^{1/8}": power(n, 1 / 8),
        "n^{1/5}": power(n, 1 / 5),
        "log n": math.ceil(math.log(n)),
        "n^{1/4}": power(n, 1 / 4),
        "n^{1/2}": power(n, 1 / 2),
    }


def plan(settings: Settings) -> list[Unit]:
    lengths, spreads, seeds = (LENGTHS, SPREADS, SEEDS) if not settings.quick else ((512,), (1.0, 3.0, FIGURE), 2)

    def unit(n: int, spread: float, seed: int) -> Unit:
        return Unit(
            f"n={n}, B={spread:g}, seed={seed}",
            lambda done: measure(n, spread, settings.seed + seed),
            digest=made_with(n, spread),
        )

    return [unit(n, spread, seed) for n in lengths for spread in spreads for seed in range(seeds)]


def made_with(n: int, spread: float) -> str:
    """The digest of all that rows depend on, but for the seed."""
    used = [(name, top(k), with_tail(k)) for name, k in counts(n).items()]
    return digest(n, spread, DIM, ROWS, used, cells(1, 1), CELL_SIZES, CLOSE)


def inputs(n: int, spread: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * seed + round(100 * spread) + n)
    shapes = ((1, 1, min(ROWS, n), DIM), (1, 1, n, DIM), (1, 1, n, DIM))
    query, key, value = ((2 * torch.rand(shape, generator=generator) - 1) * spread for shape in shapes)
    return query, key, value


def measure(n: int, spread: float, seed: int) -> Rows:
    """All methods and all k on one input."""
    query, key, value = inputs(n, spread, seed)
    exact = nf.attention(query, key, value, method=nf.Exact())
    largest = max(counts(n).values())
    mass = (query[0, 0] @ key[0, 0].T / math.sqrt(DIM)).softmax(-1).topk(largest).values.cumsum(-1).mean(0)

    def estimate(method: nf.TopK | nf.Cells) -> nf.Estimate:
        return nf.estimate(query, key, value, method=method, generator=torch.Generator().manual_seed(seed))

    @cache
    def by_cells(size: int, probes: int) -> nf.Estimate:
        return estimate(cells(size, probes))

    found: Rows = []
    for name, k in counts(n).items():
        about: Row = {"n": n, "B": spread, "seed": seed, "power": name, "k": k, "mass": float(mass[k - 1])}
        size, probes = fitted(k, lambda size, probes: _keys(by_cells(size, probes)))
        for method, result in (
            ("topk", estimate(top(k))),
            ("tail", estimate(with_tail(k))),
            ("cells", by_cells(size, probes)),
        ):
            sizes = {"cell_size": size, "probes": probes} if method == "cells" else {}
            found.append({**about, "method": method, "keys": _keys(result), **sizes, **errors(result.output, exact, value)})
    return found


def _keys(estimate: nf.Estimate) -> float:
    return float(estimate.info["keys_used"])


def errors(output: Tensor, exact: Tensor, value: Tensor) -> dict[str, float]:
    """Of rows: relative to the row, and in units of the rms norm of the values."""
    error = (output - exact).norm(dim=-1)
    relative, additive = error / exact.norm(dim=-1), error / value.square().sum(-1).mean().sqrt()
    return {
        "mean": float(relative.mean()),
        "max": float(relative.max()),
        "mean_additive": float(additive.mean()),
        "max_additive": float(additive.max()),
    }
