"""How many far keys a lazy Gumbel draw looks at: measured, by the closed form, and by the paper's bound n/k."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

import nearfield as nf
from experiments.experiment import Row

DIM, QUERIES = 16, 16


def looked_at(n: int, k: int, spread: float, draws: int, seed: int) -> Row:
    """`spread` is the standard deviation of the logits; at 0 all keys tie, the worst case of the bound."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(count, DIM, generator=generator, dtype=torch.float64) for count in (QUERIES, n))
    value = torch.zeros(n, 1, dtype=torch.float64)
    method = nf.LazyGumbel(k=k, draws=draws, estimator="mean", always_lazy=True)
    info = nf.estimate(spread * query, key, value, method=method, generator=generator).info
    measured, dense = looked_at_by_a_draw(info, QUERIES, n, k)
    return {
        "kind": "lazy",
        "n": n,
        "k": k,
        "spread": spread,
        "seed": seed,
        "draws": draws * QUERIES,
        "measured": measured,
        "dense": dense,
        "closed": info["expected_per_draw"],
        "printed": n / k,
        "bound": (n - k) / (k + 1),
    }


def looked_at_by_a_draw(info: Mapping[str, Any], rows: int, n: int, k: int) -> tuple[float, float]:
    """Far keys that one draw looks at, and the share of rows drawn from their full softmax, which look at all of them."""
    dense = info["dense_rows"] / rows
    return info["evaluated_per_draw"] + dense * (n - k), dense


def around_root(n: int) -> tuple[int, ...]:
    """k from an eighth of sqrt(n) to eight times as much."""
    return tuple(max(4, round(math.sqrt(n) * factor)) for factor in (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8))
