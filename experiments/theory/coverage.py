"""How often an (eps, delta) promise is broken, with all the draws that its theorem asks for and with a part of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

import nearfield as nf
from experiments.experiment import Row
from experiments.theory import gradients, walks

EPS, DELTA = 0.3, 0.1
QUERIES, KEYS = 2, 64
LONG = 4096
"""Keys of the trials of head and tail."""
AUDITED = 600
"""Rows of the trials of the audit."""
SMALL = 0.01
"""The output that is left where signed values cancel."""


def undecided(rows: int, keys: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Flat logits, and values -1 or 1 at random: the largest variance that the promises allow for."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(count, 4, generator=generator, dtype=torch.float64) for count in (rows, keys))
    value = torch.randint(0, 2, (keys, 1), generator=generator).double() * 2 - 1
    return 0.3 * query, key, value


def median(share: float, seed: int) -> bool:
    """Theorem on kNN attention, additive: |O^ - O| <= eps (sum_j P_ij V_jc^2)^{1/2} for all entries at once."""
    query, key, value = undecided(QUERIES, KEYS, 0)
    asked = nf.budget(QUERIES, EPS, DELTA, d=1, theorem="median-of-means", form="tight").draws or 1
    method = nf.LazyGumbel(eps=EPS, delta=DELTA, draws=max(1, round(asked * share)))
    weights = (query @ key.T / math.sqrt(key.shape[1])).softmax(-1)
    return _broken(query, key, value, method, EPS * (weights @ value.square()).sqrt(), seed)


def mean(share: float, seed: int) -> bool:
    """The plain mean: |O^ - O| <= eps range(V) for all entries at once."""
    query, key, value = undecided(QUERIES, KEYS, 0)
    asked = nf.budget(QUERIES, EPS, DELTA, d=1, theorem="mean").draws or 1
    method = nf.LazyGumbel(eps=EPS, delta=DELTA, estimator="mean", draws=max(1, round(asked * share)))
    return _broken(query, key, value, method, EPS * (value.amax(0) - value.amin(0)), seed)


def printed_signed(share: float, seed: int) -> bool:
    """Theorem on kNN attention as printed: all its conditions hold, but signed values nearly cancel.

    Every key occurs twice, with a value and its opposite, and all values are lifted a little: |V| <= ln n, and O is the lift.
    """
    query, key, _ = undecided(QUERIES, KEYS // 2, 0)
    value = torch.rand(KEYS // 2, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return _multiplicative(query, torch.cat([key, key]), torch.cat([value, -value]) + SMALL, share, seed)


def printed_positive(share: float, seed: int) -> bool:
    """The same with what its proof needs in addition: values 0 or 1, and O >= max V / ln n."""
    query, key, value = undecided(QUERIES, KEYS, 0)
    return _multiplicative(query, key, (value + 1) / 2, share, seed)


def _multiplicative(query: Tensor, key: Tensor, value: Tensor, share: float, seed: int) -> bool:
    """Whether |O^ - O| <= eps |O| is broken (printed: eps O, which no estimate meets where O < 0).

    As many groups of draws as printed, each by a row of its own, and then their median. A share of the draws is that share of
    every group.
    """
    asked = nf.budget(len(key), EPS, DELTA, d=1, theorem="median-of-means", form="printed")
    groups, size = asked.groups or 1, max(1, round((asked.group_size or 1) * share))
    method = nf.LazyGumbel(estimator="mean", draws=size)
    generator = torch.Generator().manual_seed(seed)
    means = nf.attention(query.repeat_interleave(groups, 0), key, value, method=method, generator=generator)
    output = means.view(len(query), groups, -1).quantile(0.5, dim=1)
    exact = nf.attention(query, key, value)
    return bool(((output - exact).abs() > EPS * exact.abs()).any())


def tail(share: float, seed: int) -> bool:
    return _head_and_tail("corrected", share, seed)


def tail_printed(share: float, seed: int) -> bool:
    return _head_and_tail("printed", share, seed)


def _head_and_tail(form: str, share: float, seed: int) -> bool:
    """Theorem on head and tail: |O^ - O| <= eps/(1-eps) max|V - O| for each entry; the printed one says O(eps).

    A hard case: besides the head there are as many keys that are nearly as heavy and have the opposite value, and the others have
    no weight. So few of the sampled keys count, and much depends on them. A share of the sizes is a share of k l.
    """
    asked = nf.budget(LONG, EPS, DELTA, theorem="tail", form=form)
    near, sampled = (max(1, round((size or 1) * math.sqrt(share))) for size in (asked.k, asked.ell))
    key = torch.full((LONG, 1), -30.0, dtype=torch.float64)
    key[:near], key[near : 2 * near] = 0.0, -0.01
    value = -torch.ones(LONG, 1, dtype=torch.float64)
    value[:near] = 1.0
    query = torch.ones(1, 1, dtype=torch.float64)
    exact = nf.attention(query, key, value)
    promise = EPS / (1 - EPS) * (value - exact).abs().amax(0)
    return _broken(query, key, value, nf.TopK(near, tail=sampled), promise, seed)


def audit(share: float, seed: int) -> bool:
    """The worst of 59 rows bounds 95% of all rows with confidence 95%; broken where it lies below their 95% quantile."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(AUDITED, 8, generator=generator) for _ in range(3))
    rows = max(1, round(nf.audit_rows(0.95, 0.95) * share))
    estimate = nf.estimate(2 * query, key, value, method=nf.TopK(8), audit=rows, generator=generator)
    assert estimate.audit is not None
    error = (estimate.output - nf.attention(2 * query, key, value)).norm(dim=-1) / value.square().sum(-1).mean().sqrt()
    return bool(estimate.audit.additive < error.quantile(0.95))


@dataclass(frozen=True)
class Promise:
    trial: Callable[[float, int], bool]
    """(share of the draws, seed) -> whether it was broken"""
    allowed: float
    label: str


ADDITIVE = {
    "median": Promise(median, DELTA, "median of means"),
    "mean": Promise(mean, DELTA, "plain mean"),
    "tail": Promise(tail, DELTA, "top k and sampled tail"),
    "audit": Promise(audit, 0.05, "audit of 59 rows"),
}
"""Corrected forms, by name."""
PRINTED = {
    "printed-signed": Promise(printed_signed, DELTA, "kNN attention as printed, signed V"),
    "printed-positive": Promise(printed_positive, DELTA, "kNN attention as printed, V >= 0"),
}
GRADIENTS = {
    "dq-printed": Promise(lambda share, seed: gradients.broken("dq", "printed", share, seed), DELTA, "D^{Q}, printed"),
    "dq": Promise(lambda share, seed: gradients.broken("dq", "corrected", share, seed), DELTA, "D^{Q}, corrected"),
    "dk-printed": Promise(lambda share, seed: gradients.broken("dk", "printed", share, seed), DELTA, "D^{K}, printed"),
    "dk": Promise(lambda share, seed: gradients.broken("dk", "corrected", share, seed), DELTA, "D^{K}, corrected"),
}
PROMISES = {
    **ADDITIVE,
    **PRINTED,
    "tail-printed": Promise(tail_printed, DELTA, "top k and sampled tail, printed sizes"),
    "walks-printed": Promise(
        lambda share, seed: walks.broken("printed", EPS, DELTA, share, seed), 1 / walks.HARD, "walks, printed"
    ),
    "walks": Promise(lambda share, seed: walks.broken("corrected", EPS, DELTA, share, seed), DELTA, "walks, corrected"),
    **GRADIENTS,
}
SIZES = (EPS, DELTA, QUERIES, KEYS, LONG, AUDITED, SMALL, walks.HARD, walks.FORMS)
"""What the trials depend on; those of D^Q and D^K depend on `gradients.SIZES`."""


def failures(name: str, share: float, seeds: int, seed: int) -> Row:
    promise = PROMISES[name]
    broken = sum(promise.trial(share, 10_000 * seed + i) for i in range(seeds))
    return {"kind": "coverage", "promise": name, "share": share, "seeds": seeds, "broken": broken, "allowed": promise.allowed}


def _broken(query: Tensor, key: Tensor, value: Tensor, method: nf.LazyGumbel | nf.TopK, promise: Tensor, seed: int) -> bool:
    exact = nf.attention(query, key, value)
    output = nf.attention(query, key, value, method=method, generator=torch.Generator().manual_seed(seed))
    return bool(((output - exact).abs() > promise).any())
