"""Errors of top-k, top-k with a sampled tail, and cells, on uniform inputs, at equal numbers of keys."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

import nearfield as nf
from experiments.experiment import Row, Rows, Unit
from experiments.settings import Settings

DIM = 64
ROWS = 512
"""Queries per input: rows are independent, so more of them tell little more."""
PAPER = 10.0
"""The B of the paper's figure."""
SPREADS = (0.5, 1.0, 2.0, 2.5, 3.0, 3.5, 4.0, PAPER)
"""B; logits have standard deviation B^2/3 with d = 64 and the usual scale: 0.08 to 5.3, and 33 for the paper's."""
LENGTHS = (4_096, 16_384)
SEEDS = 5
CELL = 8


def counts(n: int) -> dict[str, int]:
    """The paper's k, rounded up, by name; log is the natural one."""
    power = {
        "n^{1/8}": n ** (1 / 8),
        "n^{1/5}": n ** (1 / 5),
        "log n": math.log(n),
        "n^{1/4}": n ** (1 / 4),
        "n^{1/2}": n ** (1 / 2),
    }
    return {"3": 3, **{name: math.ceil(round(value, 6)) for name, value in power.items()}}


def plan(settings: Settings) -> list[Unit]:
    lengths, spreads, seeds = (LENGTHS, SPREADS, SEEDS) if not settings.quick else ((512,), (1.0, 3.0, PAPER), 2)

    def unit(n: int, spread: float, seed: int) -> Unit:
        return Unit(f"n={n}, B={spread:g}, seed={seed}", lambda done: measure(n, spread, settings.seed + seed))

    return [unit(n, spread, seed) for n in lengths for spread in spreads for seed in range(seeds)]


def methods(k: int) -> dict[str, Any]:
    """Each attends to about k keys of its row one by one."""
    cell = min(CELL, k)
    return {
        "topk": nf.TopK(k),
        "tail": nf.TopK(k - k // 2, tail=k // 2),
        "cells": nf.Cells(cell_size=cell, probes=max(1, round(k / cell)), sinks=0),
    }


def measure(n: int, spread: float, seed: int) -> Rows:
    """All methods and all k on one input."""
    generator = torch.Generator().manual_seed(1000 * seed + round(100 * spread) + n)
    shapes = ((1, 1, min(ROWS, n), DIM), (1, 1, n, DIM), (1, 1, n, DIM))
    query, key, value = ((2 * torch.rand(shape, generator=generator) - 1) * spread for shape in shapes)
    exact = nf.attention(query, key, value, method=nf.Exact())
    weights = (query[0, 0] @ key[0, 0].T / math.sqrt(DIM)).softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    found: Rows = []
    for name, k in counts(n).items():
        for method, recipe in methods(k).items():
            estimate = nf.estimate(query, key, value, method=recipe, generator=torch.Generator().manual_seed(seed))
            about: Row = {"n": n, "B": spread, "seed": seed, "power": name, "k": k, "method": method}
            keys = float(estimate.info["keys_per_query"])
            found.append(
                {**about, "keys": keys, "mass": float(weights[:, k - 1].mean()), **errors(estimate.output, exact, value)}
            )
    return found


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
