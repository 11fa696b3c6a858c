"""Where a step's gradients come from: frozen, so that a digest knows their sizes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import nearfield as nf
from experiments.printed_law import Sizes, printed_gradients, sizes
from nearfield.paper.gradients import Gradients, RandomWalk

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


@dataclass(frozen=True)
class Backward:
    """The exact gradient of an output, which may be an estimate: what `attention(...).backward()` gives."""

    method: nf.Exact | nf.TopK | nf.Cells

    def __call__(self, point: Point, dice: Dice) -> Gradients:
        return _backward(lambda *inputs: nf.attention(*inputs, method=self.method, generator=dice.torch), point)


@dataclass(frozen=True)
class Torch:
    """The exact gradient without this library."""

    def __call__(self, point: Point, dice: Dice) -> Gradients:
        return _backward(F.scaled_dot_product_attention, point)


@dataclass(frozen=True)
class Walks:
    recipe: RandomWalk

    def __call__(self, point: Point, dice: Dice) -> Gradients:
        return nf.gradients.estimate(*point, self.recipe, generator=dice.torch)


@dataclass(frozen=True)
class AfterForward:
    """With the exact output, which the upstream gradient comes from and which walks do not make."""

    estimator: Estimator

    def __call__(self, point: Point, dice: Dice) -> Gradients:
        F.scaled_dot_product_attention(point.query, point.key, point.value)
        return self.estimator(point, dice)


@dataclass(frozen=True)
class Printed:
    asked: Sizes
    with_key: bool

    def __call__(self, point: Point, dice: Dice) -> Gradients:
        return printed_gradients(*point, self.asked, dice.numpy, self.with_key)


@dataclass(frozen=True)
class Without:
    """One input stays where it is: the keys, of which the paper's experiment estimates no gradient, or the queries."""

    name: str
    estimator: Estimator

    def __call__(self, point: Point, dice: Dice) -> Gradients:
        found = self.estimator(point, dice)
        return found._replace(**{self.name: torch.zeros_like(getattr(found, self.name))})


def small(count: int, dim: int) -> dict[str, Estimator]:
    """At the paper's size. "-qv": only queries and values move."""
    asked = sizes(count, dim, EPS, DELTA)
    near = math.ceil(math.sqrt(count))
    exact = Backward(nf.Exact())
    return {
        "exact-qv": Without("key", exact),
        "printed-qv": Printed(asked, with_key=False),
        "exact": exact,
        "printed": Printed(asked, with_key=True),
        "walks": Walks(RandomWalk(WALKS)),
        "topk": Backward(nf.TopK(near, tail=near)),
    }


def large(count: int) -> dict[str, Estimator]:
    """Where the exact gradient is no longer free: indices that do not look at every key. "-kv": only keys and values move."""
    near, index = math.ceil(math.sqrt(count)), nf.KMeansIndex()
    exact = Backward(nf.Exact())
    return {
        "exact": exact,
        "exact-kv": Without("query", exact),
        "walks": Walks(RandomWalk(FEW_WALKS, index=index)),
        "topk": Backward(nf.TopK(near, tail=near, index=index)),
        "cells": Backward(nf.Cells()),
    }


def timed(count: int) -> dict[str, Estimator]:
    """Every way to an output and its gradient at the larger N; two of them exact, of which the faster one counts."""
    ways = large(count)
    del ways["exact-kv"]
    return {"sdpa": Torch(), **ways, "walks": AfterForward(ways["walks"])}


def _backward(attend: Callable[..., Tensor], point: Point) -> Gradients:
    inputs = [x.detach().requires_grad_() for x in point[:3]]
    return Gradients(*torch.autograd.grad(attend(*inputs), inputs, point.upstream))
