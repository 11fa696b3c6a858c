"""Descents from Gaussian queries, keys and values, with exact and with estimated gradients."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor

import nearfield as nf
from experiments.experiment import Row, Rows, Unit
from experiments.gradient_descent.estimators import DELTA, EPS, Dice, Estimator, Point, large, small
from experiments.gradient_descent.losses import LOSSES, Target, value_and_upstream
from experiments.gradient_descent.printed_law import draws_per_gradient, sizes
from experiments.settings import Settings
from nearfield.gradients import Gradients, estimate_product

DIM = 3
Inputs = tuple[Tensor, Tensor, Tensor]
HOPELESS = 1e3
"""A descent whose loss has grown by this factor is stopped: it has diverged."""


@dataclass(frozen=True)
class Size:
    count: int
    steps: int
    rates: tuple[float, ...]
    seeds: int
    losses: tuple[str, ...]
    large_count: int
    large_steps: int
    large_seeds: int


FULL = Size(100, 40, (0.05, 0.2, 0.5), 4, tuple(LOSSES), 20_000, 6, 1)
QUICK = Size(24, 3, (0.05, 0.5), 1, tuple(LOSSES), 256, 2, 1)
LARGE_LOSS, LARGE_RATE = "exponential", 0.05
"""At the larger N a loss that falls within a few steps."""


def plan(settings: Settings) -> list[Unit]:
    size = QUICK if settings.quick else FULL

    def descent(loss: str, rate: float, seed: int) -> Unit:
        key = f"N={size.count}, {loss}, rate={rate:g}, seed={seed}"
        return Unit(key, lambda done: [*descents(size, loss, rate, settings.seed + seed)])

    def at_length(name: str, seed: int) -> Unit:
        key = f"N={size.large_count}, {LARGE_LOSS}, rate={LARGE_RATE:g}, {name}, seed={seed}"
        return Unit(key, lambda done: [one_large(size, name, settings.seed + seed)])

    def single(seed: int) -> Unit:
        return Unit(f"one gradient, N={size.count}, seed={seed}", lambda done: one_gradient(size, settings.seed + seed))

    return [
        *(single(seed) for seed in range(2 * size.seeds)),
        *(descent(loss, rate, seed) for loss in size.losses for rate in size.rates for seed in range(size.seeds)),
        *(at_length(name, seed) for name in large(size.large_count) for seed in range(size.large_seeds)),
    ]


def start(count: int, seed: int) -> tuple[Inputs, Target]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, 1, count, DIM, generator=generator) for _ in range(3))
    values = torch.randn(1, 1, count, DIM, generator=generator)
    return (query, key, value), Target(values, torch.randint(DIM, (1, 1, count), generator=generator))


def descents(size: Size, loss: str, rate: float, seed: int) -> Rows:
    """From one start with every estimator."""
    found = []
    for name, estimator in small(size.count, DIM).items():
        path = descend(estimator, loss, rate, size.steps, size.count, seed)
        found.append({"kind": "descent", "N": size.count, "loss": loss, "rate": rate, "seed": seed, "estimator": name, **path})
    return found


def descend(estimator: Estimator, loss: str, rate: float, steps: int, count: int, seed: int) -> Row:
    """Losses (mean over rows, by exact attention) before every step and after the last; seconds of the gradients alone."""
    inputs, target = start(count, seed)
    dice = Dice.cast(seed)
    losses: list[float] = []
    seconds = 0.0
    for step in range(steps + 1):
        output = nf.attention(*inputs, method=nf.Exact())
        value, upstream = value_and_upstream(loss, output, target)
        losses.append(value)
        if step == steps or not value < HOPELESS * losses[0]:
            break
        begin = time.perf_counter()
        gradients = estimator(Point(*inputs, upstream), dice)
        seconds += time.perf_counter() - begin
        query, key, values = (x - rate * gradient for x, gradient in zip(inputs, gradients, strict=True))
        inputs = (query, key, values)
    return {"losses": losses, "diverged": len(losses) <= steps, "seconds": seconds / max(1, len(losses) - 1)}


def one_large(size: Size, name: str, seed: int) -> Row:
    """A short descent at the larger N, and the error of its first gradient."""
    estimator = large(size.large_count)[name]
    path = descend(estimator, LARGE_LOSS, LARGE_RATE, size.large_steps, size.large_count, seed)
    inputs, target = start(size.large_count, seed)
    _, upstream = value_and_upstream(LARGE_LOSS, nf.attention(*inputs, method=nf.Exact()), target)
    point = Point(*inputs, upstream)
    error = relative(estimator(point, Dice.cast(seed)), nf.gradients.exact(*point))
    about = {"kind": "large", "N": size.large_count, "loss": LARGE_LOSS, "rate": LARGE_RATE, "seed": seed, "estimator": name}
    return {**about, **path, **error}


def one_gradient(size: Size, seed: int) -> Rows:
    """Relative errors of each gradient at the start of the squared-error descent, and what they cost in draws."""
    inputs, target = start(size.count, seed)
    _, upstream = value_and_upstream("squared error", nf.attention(*inputs, method=nf.Exact()), target)
    point = Point(*inputs, upstream)
    right = nf.gradients.exact(*point)
    asked = sizes(size.count, DIM, EPS, DELTA)
    about = {"kind": "gradient", "N": size.count, "seed": seed}
    near = math.ceil(math.sqrt(size.count))
    costs = {
        "printed": draws_per_gradient(size.count, DIM, asked, with_key=True),
        "walks": 64 * size.count,
        "topk": near * size.count,
    }
    found = [
        {**about, "estimator": name, "draws": cost, **relative(small(size.count, DIM)[name](point, Dice.cast(seed)), right)}
        for name, cost in costs.items()
    ]
    for form in ("shifted", "signed"):
        generator = torch.Generator().manual_seed(seed)
        got = estimate_product(*point[:2], upstream, asked.walks, form=form, generator=generator)
        columns = DIM + (form == "shifted")
        cost = {"draws": asked.walks * columns, "query": None, "key": None}
        found.append({**about, "estimator": form, **cost, "value": float((got - right.value).norm() / right.value.norm())})
    return found


def relative(got: Gradients, right: Gradients) -> dict[str, float]:
    return {name: float((a - b).norm() / b.norm()) for name, a, b in zip(Gradients._fields, got, right, strict=True)}
