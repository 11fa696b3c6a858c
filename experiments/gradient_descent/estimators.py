"""Where a step's gradients come from."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import nearfield as nf
from experiments.gradient_descent.printed_law import Sizes, printed_gradients, sizes
from nearfield.gradients import Gradients, RandomWalk

EPS, DELTA = 0.05, 0.1
WALKS = 64
FEW_WALKS = 8
"""Walks per row at N = 20,000."""


class Point(NamedTuple):
    """Where a gradient is asked for; tensors are `[1, 1, N, d]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    upstream: Tensor


class Dice(NamedTuple):
    """The randomness of one descent."""

    torch: torch.Generator
    numpy: np.random.Generator

    @staticmethod
    def cast(seed: int) -> Dice:
        return Dice(torch.Generator().manual_seed(seed), np.random.default_rng(seed))


Estimator = Callable[[Point, Dice], Gradients]


def exact(point: Point, dice: Dice) -> Gradients:
    return nf.gradients.exact(*point)


def without_key(estimator: Estimator) -> Estimator:
    """The keys stay where they are: the paper estimates no D^K in its experiment."""

    def estimate(point: Point, dice: Dice) -> Gradients:
        return estimator(point, dice)._replace(key=torch.zeros_like(point.key))

    return estimate


def printed(asked: Sizes, with_key: bool) -> Estimator:
    return lambda point, dice: printed_gradients(*point, asked, dice.numpy, with_key)


def shared_walks(recipe: RandomWalk) -> Estimator:
    return lambda point, dice: nf.gradients.estimate(*point, recipe, generator=dice.torch)


def of_method(method: nf.TopK | nf.Cells) -> Estimator:
    """The exact gradient of an estimated output: what `attention(...).backward()` gives."""

    def estimate(point: Point, dice: Dice) -> Gradients:
        query, key, value = (x.detach().requires_grad_() for x in point[:3])
        output = nf.attention(query, key, value, method=method, generator=dice.torch)
        return Gradients(*torch.autograd.grad(output, (query, key, value), point.upstream))

    return estimate


def small(count: int, dim: int) -> dict[str, Estimator]:
    """At the paper's size. "-qv": only queries and values move."""
    asked = sizes(count, dim, EPS, DELTA)
    near = math.ceil(math.sqrt(count))
    return {
        "exact-qv": without_key(exact),
        "printed-qv": printed(asked, with_key=False),
        "exact": exact,
        "printed": printed(asked, with_key=True),
        "walks": shared_walks(RandomWalk(WALKS)),
        "topk": of_method(nf.TopK(near, tail=near)),
    }


def large(count: int) -> dict[str, Estimator]:
    """Where the exact gradient is no longer free: indices that do not look at every key."""
    near, index = math.ceil(math.sqrt(count)), nf.KMeansIndex()
    return {
        "exact": exact,
        "walks": shared_walks(RandomWalk(FEW_WALKS, index=index)),
        "topk": of_method(nf.TopK(near, tail=near, index=index)),
        "cells": of_method(nf.Cells()),
    }
