"""How often an (eps, delta) promise is broken, with all the draws its theorem asks for and with a part of them."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

import nearfield as nf
from experiments.experiment import Row

EPS, DELTA = 0.3, 0.1


def undecided(rows: int, keys: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Flat logits, and values -1 or 1 at random: the largest variance that the promises allow for."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(count, 4, generator=generator, dtype=torch.float64) for count in (rows, keys))
    value = torch.randint(0, 2, (keys, 1), generator=generator).double() * 2 - 1
    return 0.3 * query, key, value


def median(share: float, seed: int) -> bool:
    """Theorem on kNN attention: |O^ - O| <= eps (sum_j P_ij V_jc^2)^{1/2} for all entries at once."""
    query, key, value = undecided(2, 64, 0)
    asked = nf.budget(2, EPS, DELTA, d=1, theorem="median-of-means", form="tight").draws or 1
    method = nf.LazyGumbel(eps=EPS, delta=DELTA, draws=max(1, round(asked * share)))
    weights = (query @ key.T / math.sqrt(key.shape[1])).softmax(-1)
    return _broken(query, key, value, method, EPS * (weights @ value.square()).sqrt(), seed)


def mean(share: float, seed: int) -> bool:
    """The plain mean: |O^ - O| <= eps range(V) for all entries at once."""
    query, key, value = undecided(2, 64, 0)
    asked = nf.budget(2, EPS, DELTA, d=1, theorem="mean").draws or 1
    method = nf.LazyGumbel(eps=EPS, delta=DELTA, estimator="mean", draws=max(1, round(asked * share)))
    return _broken(query, key, value, method, EPS * (value.amax(0) - value.amin(0)), seed)


def tail(share: float, seed: int) -> bool:
    """Theorem on head and tail, corrected: |O^ - O| <= eps/(1-eps) max|V - O| for each entry.

    Hard for it: twice as many heavy keys as the head holds, all alike, the others weightless, so that few sampled keys count. A
    share of the sizes is a share of k l.
    """
    asked = nf.budget(4096, EPS, DELTA, theorem="tail")
    near, sampled = (max(1, round((size or 1) * math.sqrt(share))) for size in (asked.k, asked.ell))
    generator = torch.Generator().manual_seed(seed)
    key = torch.full((4096, 1), -30.0, dtype=torch.float64)
    key[: 2 * near] = 0.0
    value = torch.randint(0, 2, (4096, 1), generator=generator).double() * 2 - 1
    query = torch.ones(1, 1, dtype=torch.float64)
    exact = nf.attention(query, key, value)
    promise = EPS / (1 - EPS) * (value - exact).abs().amax(0)
    return _broken(query, key, value, nf.TopK(near, tail=sampled), promise, seed)


def audit(share: float, seed: int) -> bool:
    """The worst of 59 rows bounds 95% of all rows with confidence 95%; broken where it lies below their 95% quantile."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(600, 8, generator=generator) for _ in range(3))
    rows = max(1, round(nf.audit_rows(0.95, 0.95) * share))
    estimate = nf.estimate(2 * query, key, value, method=nf.TopK(8), audit=rows, generator=generator)
    assert estimate.audit is not None
    error = (estimate.output - nf.attention(2 * query, key, value)).norm(dim=-1) / value.square().sum(-1).mean().sqrt()
    return bool(estimate.audit.additive < error.quantile(0.95))


PROMISES: dict[str, tuple[Callable[[float, int], bool], float, str]] = {
    "median": (median, DELTA, "median of means"),
    "mean": (mean, DELTA, "plain mean"),
    "tail": (tail, DELTA, "top k and sampled tail"),
    "audit": (audit, 0.05, "audit of 59 rows"),
}
"""By name: the trial, the failure rate that is allowed, and how to call it."""


def failures(name: str, share: float, seeds: int, seed: int) -> Row:
    trial, allowed, _ = PROMISES[name]
    broken = sum(trial(share, 10_000 * seed + i) for i in range(seeds))
    return {"kind": "coverage", "promise": name, "share": share, "seeds": seeds, "broken": broken, "allowed": allowed}


def _broken(query: Tensor, key: Tensor, value: Tensor, method: nf.LazyGumbel | nf.TopK, promise: Tensor, seed: int) -> bool:
    exact = nf.attention(query, key, value)
    output = nf.attention(query, key, value, method=method, generator=torch.Generator().manual_seed(seed))
    return bool(((output - exact).abs() > promise).any())
