"""Lazy Gumbel draws with a near set that is not the top k: the printed cutoff against one that is known to hold.

With one-hot values the output of a row is the empirical distribution of its draws, which can be compared with the softmax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import nearfield as nf
from experiments.experiment import Row
from experiments.theory.lazy import looked_at_by_a_draw
from nearfield.knn.index import BuiltIndex, Cutoffs

MISSED = (64, 8)
"""n and k with one missed key."""
LISTS = (512, 23)
"""n and k with inverted lists."""
QUERIES, DIM, SPREAD = 16, 8, 3.0
SIZES = (MISSED, LISTS, QUERIES, DIM, SPREAD)


@dataclass(frozen=True)
class Forgetful:
    """An index that finds the top k of all keys but one, and knows a valid bound for the keys it leaves out."""

    missed: int

    def build(self, keys: Tensor) -> BuiltForgetful:
        return BuiltForgetful(keys, self.missed)


class BuiltForgetful(BuiltIndex):
    def __init__(self, keys: Tensor, missed: int) -> None:
        super().__init__(keys)
        self.missed = missed

    def _search(self, queries: Tensor, k: int, visible: Tensor) -> tuple[Tensor, Tensor]:
        scores = queries @ self.keys.transpose(1, 2)
        scores[..., self.missed] = -torch.inf
        found = scores.topk(k, dim=-1)
        return found.values, found.indices

    def _cutoffs(self, queries: Tensor, ids: Tensor, visible: Tensor) -> Cutoffs:
        scores = queries @ self.keys.transpose(1, 2)
        return Cutoffs.one_group(scores.scatter(-1, ids, -torch.inf).amax(-1), visible, self.length)


def missed_key(gap: float, certify: bool, draws: int, seed: int) -> Row:
    """One key is missed; its logit lies `gap` above the smallest of the near set."""
    n, k = MISSED
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, generator=generator, dtype=torch.float64)
    logits[0] = -torch.inf
    logits[0] = logits.topk(k).values[-1] + gap
    distance, _ = total_variation(
        torch.ones(1, 1).double(), logits[:, None], Forgetful(0), k, certify, draws, generator, scale=1.0
    )
    return {"kind": "missed", "gap": gap, "certified": certify, "seed": seed, "n": n, "k": k, "tv": distance}


def kmeans(probes: int, certify: bool, draws: int, seed: int) -> Row:
    """An inverted-list index that opens few cells, on logits of standard deviation 3."""
    n, k = LISTS
    generator = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(count, DIM, generator=generator, dtype=torch.float64) for count in (QUERIES, n))
    query = SPREAD * query
    index = nf.KMeansIndex(probes=probes)
    distance, info = total_variation(query, key, index, k, certify, draws, generator)
    near = index.build(key[None]).search(query[None], k)[1][0]
    true = (query @ key.T).topk(k).indices
    recall = float((near[:, :, None] == true[:, None, :]).any(1).double().mean())
    about = {"kind": "kmeans", "probes": probes, "certified": certify, "seed": seed, "n": n, "k": k}
    looked, dense = looked_at_by_a_draw(info, QUERIES, n, k)
    return {**about, "tv": distance, "recall": recall, "looked": looked, "dense": dense}


def total_variation(
    query: Tensor,
    key: Tensor,
    index: Forgetful | nf.KMeansIndex,
    k: int,
    certify: bool,
    draws: int,
    generator: torch.Generator,
    scale: float | None = None,
) -> tuple[float, Mapping[str, Any]]:
    """Mean over rows of the distance between draws and softmax, and the `info` of the method."""
    method = nf.LazyGumbel(k=k, index=index, certify=certify, draws=draws, estimator="mean", always_lazy=True)
    one_hot = torch.eye(len(key), dtype=key.dtype)
    estimate = nf.estimate(query, key, one_hot, method=method, scale=scale, generator=generator)
    weights = (query @ key.T * (scale or 1 / math.sqrt(key.shape[1]))).softmax(-1)
    return float(0.5 * (estimate.output - weights).abs().sum(-1).mean()), estimate.info
