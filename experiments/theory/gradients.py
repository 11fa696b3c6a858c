"""The promises for D^Q and D^K, and whether the zero vector would keep them as well.

As printed: three medians of means for D^Q, walks for every entry of D^K, with the constants of the proofs. They are drawn by
their law. Corrected: walks that all columns share, sized by McDiarmid's inequality (`nf.budget`).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import nearfield as nf
from experiments.experiment import Row
from experiments.printed_law import Sizes, printed_gradients

EPS, DELTA = 0.1, 0.1
HARD = 16
"""Rows and keys of the inputs on which the corrected promises are hard to keep."""
HEAVY = (1 - math.sqrt(0.5)) / 2
"""The weight of a key at which the sample variance of its indicator varies most."""
LENGTHS = (16, 64, 256)
DIM = 4
FORMS = ("printed", "corrected")
SYMBOLS = {"dq": "D^{Q}", "dk": "D^{K}"}
SIZES = (EPS, DELTA, HARD, HEAVY)


class Inputs(NamedTuple):
    """`[n, d]`, and everything that the bounds need."""

    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.query.shape[1])

    @property
    def weights(self) -> Tensor:
        return (self.scale * self.query @ self.key.T).softmax(-1)

    @property
    def scores(self) -> Tensor:
        """D^P"""
        return self.upstream @ self.value.T

    def exact(self, which: str) -> Tensor:
        found = nf.gradients.exact(*self)
        return found.query if which == "dq" else found.key


def gaussian(n: int, seed: int) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    return Inputs(*(torch.randn(n, DIM, generator=generator, dtype=torch.float64) for _ in range(4)))


def heavy() -> Inputs:
    """One key has a value, and a weight of 0.146 in every row; all rows push it the same way."""
    key, value = torch.zeros(2, HARD, 1, dtype=torch.float64)
    key[0], value[0] = math.log(HEAVY / (1 - HEAVY) * (HARD - 1)), 1.0
    ones = torch.ones(HARD, 1, dtype=torch.float64)
    return Inputs(ones, key, value, ones)


def bound(inputs: Inputs, which: str, form: str) -> Tensor:
    """The largest error that is allowed, entry by entry."""
    if which == "dq":
        return inputs.scale * (_printed_dq(inputs) if form == "printed" else _range(inputs.scores) * _range(inputs.key.T).T * EPS)
    return _printed_dk(inputs) if form == "printed" else EPS * (_queries(inputs) * _range(inputs.scores)).norm(dim=0)[None]


def _range(x: Tensor) -> Tensor:
    return x.amax(-1, keepdim=True) - x.amin(-1, keepdim=True)


def _queries(inputs: Inputs) -> Tensor:
    return inputs.scale * inputs.query


def _mean_and_spread(inputs: Inputs, terms: Tensor) -> tuple[Tensor, Tensor]:
    """Under every row's softmax, of terms `[rows or 1, keys, columns]`."""
    mean, square = (torch.einsum("rk,rkc->rc", inputs.weights, x.expand(len(inputs.query), -1, -1)) for x in (terms, terms**2))
    return mean, (square - mean**2).clamp(min=0).sqrt()


def _printed_dq(inputs: Inputs) -> Tensor:
    """eps + eps^2 + eps (E2 + E3), with the error of each of the three in units of its own standard deviation."""
    scores = inputs.scores[..., None]
    _, sd1 = _mean_and_spread(inputs, scores * inputs.key)
    e2, sd2 = _mean_and_spread(inputs, inputs.key[None])
    e3, sd3 = _mean_and_spread(inputs, scores)
    return EPS * (sd1 + EPS * sd2 * sd3 + e2.abs() * sd3 + e3.abs() * sd2)


def _printed_dk(inputs: Inputs) -> Tensor:
    """eps <P_:i + X_:j, 1> + eps^2 n + 2 eps n M^X_j + eps <Y_:j, 1> + 2 eps n M, with |X^ - X| <= eps |Q| sd(D^P)."""
    queries, n = _queries(inputs), len(inputs.query)
    mean, spread = _mean_and_spread(inputs, inputs.scores[..., None])
    x, off = queries * mean, EPS * queries.abs() * spread
    lift = (queries.abs().amax(1) * inputs.upstream.norm(dim=1)).amax() * inputs.value.norm(dim=1).amax()
    a = inputs.scores.T @ queries + 2 * n * lift
    b = (x + off).sum(0) + 2 * n * (off - x).clamp(min=0).amax(0)
    return EPS * (a + b) + inputs.weights.T @ off


def sizes(n: int, d: int, which: str, form: str, share: float = 1.0) -> Sizes:
    """A share of what is asked for: of the walks, and of the draws of every group."""
    asked = nf.budget(n, EPS, DELTA, d=d, theorem=which, form=form)
    drawn = asked.walks if which == "dk" else asked.draws
    if form == "corrected":
        return Sizes(max(2, round((drawn or 2) * share)), 0, 0, 0)
    groups = asked.groups or 1
    return Sizes(max(1, round((asked.walks or 1) * share)), groups, groups, max(1, round((asked.group_size or 1) * share)))


def estimate(inputs: Inputs, which: str, form: str, asked: Sizes, seed: int) -> Tensor:
    if form == "corrected":
        generator = torch.Generator().manual_seed(seed)
        found = nf.gradients.estimate(*inputs, nf.gradients.RandomWalk(asked.walks), generator=generator)
    else:
        four = (x[None, None] for x in inputs)
        found = printed_gradients(*four, asked, np.random.default_rng(seed), with_key=which == "dk")
    return (found.query if which == "dq" else found.key).reshape(inputs.query.shape)


def broken(which: str, form: str, share: float, seed: int) -> bool:
    inputs = heavy()
    found = estimate(inputs, which, form, sizes(HARD, 1, which, form, share), seed)
    return bool(((found - inputs.exact(which)).abs() > bound(inputs, which, form)).any())


def usual(n: int, which: str, form: str, trials: int, seed: int) -> Row:
    """On Gaussian inputs: how far estimate and zero vector are from the gradient, next to the bound and to the gradient."""
    asked = sizes(n, DIM, which, form)
    errors, zeros, relative = [], [], []
    for trial in range(trials):
        inputs = gaussian(n, 10_000 * seed + trial)
        right, allowed = inputs.exact(which), bound(inputs, which, form)
        off = estimate(inputs, which, form, asked, 10_000 * seed + trial) - right
        errors.append(float((off.abs() / allowed).amax()))
        zeros.append(float((right.abs() / allowed).amax()))
        relative.append(float(off.norm() / right.norm()))
    return {
        "kind": "gradients",
        "gradient": which,
        "n": n,
        "form": form,
        "eps": EPS,
        "draws": asked.walks if form == "corrected" or which == "dk" else 3 * asked.groups * asked.group_size,
        "seeds": trials,
        "broken": sum(error > 1 for error in errors),
        "allowed": DELTA,
        "error": sum(errors) / trials,
        "zero": sum(zeros) / trials,
        "zero_broken": sum(zero > 1 for zero in zeros),
        "relative": sum(relative) / trials,
    }
