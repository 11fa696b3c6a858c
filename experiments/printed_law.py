"""The paper's Monte-Carlo gradients at full size, drawn by their law instead of walk by walk.

`nearfield.gradients.PrintedWalk` takes every walk. At N = 100 and eps = 0.05 that is some 27 million draws for one gradient, too
many for a descent. But walks are independent and enter only through counts: where walks end is multinomial, how many draws of a
group fall on a key is multinomial, how many of an entry's walks hit is binomial. For small N, where the softmax matrix fits, the
counts can be drawn at once; the estimates have the same law (tests compare them with `PrintedWalk`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import nearfield as nf
from nearfield.paper.gradients import Gradients

Array = np.ndarray


class Sizes(NamedTuple):
    walks: int
    groups: int
    """of the three medians of means of D^Q"""
    key_groups: int
    """of the one of D^K"""
    group_size: int


def sizes(count: int, dim: int, eps: float, delta: float) -> Sizes:
    """Walks as printed, 2 lg N / eps^2. For medians of means the paper leaves a constant open: here as `PrintedWalk` has it."""
    walks = nf.budget(count, eps, delta, d=dim, theorem="walks", form="printed").walks
    for_query, for_key = (nf.budget(count, eps, delta, d=dim, theorem=theorem, form="tight") for theorem in ("dq", "dk"))
    return Sizes(walks or 1, for_query.groups or 1, for_key.groups or 1, for_query.group_size or 1)


def draws_per_gradient(count: int, dim: int, asked: Sizes, with_key: bool) -> int:
    """Draws from a softmax that one gradient costs when every walk is taken."""
    draws = count * 3 * asked.groups * asked.group_size + asked.walks * (dim + 1)
    return draws + (count * asked.key_groups * asked.group_size + asked.walks * (count * dim + dim) if with_key else 0)


def printed_gradients(
    query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, asked: Sizes, random: np.random.Generator, with_key: bool = True
) -> Gradients:
    """D^Q by three medians of means, D^V and half of D^K by EstimateProduct, the other half entry by entry; `[1, 1, N, d]`."""
    scale = 1 / math.sqrt(query.shape[-1])
    queries, keys, values, above = (x[0, 0].double().numpy() for x in (query * scale, key, value, upstream))
    weights = np.exp(queries @ keys.T - (queries @ keys.T).max(1, keepdims=True))
    weights /= weights.sum(1, keepdims=True)
    scores = above @ values.T  # D^P
    row_sums = _ends(weights, np.ones((len(queries), 1)), asked.walks, random)

    groups, size = asked.groups, asked.group_size
    e1 = _median_of_means(weights, scores[:, :, None] * keys, groups, size, random)
    e2 = _median_of_means(weights, keys[None], groups, size, random)
    e3 = _median_of_means(weights, scores[:, :, None], groups, size, random)
    grad_value = _shifted(weights, above, asked.walks, row_sums, random)
    grad_key = np.zeros_like(keys)
    if with_key:
        mean_scores = _median_of_means(weights, scores[:, :, None], asked.key_groups, size, random)
        positive = _entry_by_entry(weights, queries, scores, above, values, asked.walks, row_sums, random)
        grad_key = positive - _shifted(weights, queries * mean_scores, asked.walks, row_sums, random)
    found = ((e1 - e2 * e3) * scale, grad_key, grad_value)
    return Gradients(*(torch.from_numpy(x).to(query.dtype)[None, None] for x in found))


def _median_of_means(weights: Array, terms: Array, groups: int, size: int, random: np.random.Generator) -> Array:
    """Of terms `[rows or 1, keys, columns]` under every row's softmax."""
    counts = random.multinomial(np.full((len(weights), groups), size), weights[:, None]) / size
    return np.median(counts @ terms, axis=1)


def _ends(weights: Array, x: Array, walks: int, random: np.random.Generator) -> Array:
    """ApproxPosProd: a walk ends in key v with probability (P^T x)_v / sum x."""
    total = x.sum(0)
    share = (weights.T @ x / np.where(total > 0, total, 1.0)).T
    share = np.where(total[:, None] > 0, share, 1 / share.shape[1])
    share /= share.sum(1, keepdims=True)
    return (random.multinomial(walks, share) * total[:, None] / walks).T


def _shifted(weights: Array, x: Array, walks: int, row_sums: Array, random: np.random.Generator) -> Array:
    """EstimateProduct: lift by the most negative entry, walk, take the lift out again."""
    lift = np.maximum(-x, 0).max(0)
    return _ends(weights, x + lift, walks, random) - lift * row_sums


def _entry_by_entry(
    weights: Array,
    queries: Array,
    scores: Array,
    above: Array,
    values: Array,
    walks: int,
    row_sums: Array,
    random: np.random.Generator,
) -> Array:
    """Part 1 of D^K: walks for entry (i, j) start in row k in proportion to Q_kj D^P_ki + M and count if they end in key i."""
    lift = (np.abs(queries).max(1) * np.linalg.norm(above, axis=1)).max() * np.linalg.norm(values, axis=1).max()
    total = scores.T @ queries + len(queries) * lift
    hit = ((weights * scores).T @ queries + lift * weights.sum(0)[:, None]) / np.where(total > 0, total, 1.0)
    return random.binomial(walks, hit.clip(0, 1)) / walks * total - lift * row_sums
