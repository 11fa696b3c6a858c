"""Descents with exact and with estimated gradients, errors of single gradients, and what they cost at the larger N."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

import nearfield as nf
from experiments.digest import digest
from experiments.experiment import Row, Rows, Unit
from experiments.gradient_descent.descend import DIM, HOPELESS, descend, point_of, start
from experiments.gradient_descent.estimators import DELTA, EPS, WALKS, Dice, large, small, timed
from experiments.gradient_descent.losses import LOSSES
from experiments.gradient_descent.times import times
from experiments.printed_law import draws_per_gradient, sizes
from experiments.settings import Settings
from nearfield.paper.gradients import Gradients, estimate_product


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
    rounds: int


FULL = Size(100, 40, (0.05, 0.2, 0.5), 4, tuple(LOSSES), 20_000, 6, 3, 5)
QUICK = Size(24, 3, (0.05, 0.5), 1, tuple(LOSSES), 256, 2, 1, 3)
LARGE_LOSS, LARGE_RATE = "exponential", 0.05
"""At the larger N a loss that falls within a few steps."""
SINGLE_LOSS = "squared error"
"""Of the single gradients."""


def plan(settings: Settings) -> list[Unit]:
    """Times come first, before this run has put load on the machine."""
    return units(QUICK if settings.quick else FULL, settings.seed)


def units(size: Size, seed: int) -> list[Unit]:
    near, far = f"N={size.count}", f"N={size.large_count}"

    def descent(loss: str, rate: float, i: int) -> Unit:
        made = digest(DIM, HOPELESS, size.steps, small(size.count, DIM))
        key = f"{near}, {loss}, rate={rate:g}, seed={i}"
        return Unit(key, lambda done: descents(size, loss, rate, seed + i), digest=made)

    def at_length(i: int) -> Unit:
        made = digest(DIM, HOPELESS, size.large_steps, large(size.large_count))
        key = f"{far}, {LARGE_LOSS}, rate={LARGE_RATE:g}, seed={i}"
        return Unit(key, lambda done: long_descents(size, seed + i), digest=made)

    def single(i: int) -> Unit:
        made = digest(DIM, SINGLE_LOSS, small(size.count, DIM))
        return Unit(f"one gradient, {near}, seed={i}", lambda done: one_gradient(size, seed + i), digest=made)

    made = digest(DIM, LARGE_LOSS, size.rounds, timed(size.large_count))
    in_turn = Unit(f"times, {far}", lambda done: times(size.large_count, LARGE_LOSS, size.rounds, seed), digest=made)
    return [
        in_turn,
        *(single(i) for i in range(2 * size.seeds)),
        *(descent(loss, rate, i) for loss in size.losses for rate in size.rates for i in range(size.seeds)),
        *(at_length(i) for i in range(size.large_seeds)),
    ]


def descents(size: Size, loss: str, rate: float, seed: int) -> Rows:
    """From one start with every estimator."""
    about: Row = {"kind": "descent", "N": size.count, "loss": loss, "rate": rate, "seed": seed}
    return [
        {**about, "estimator": name, **descend(estimator, loss, rate, size.steps, size.count, seed)}
        for name, estimator in small(size.count, DIM).items()
    ]


def long_descents(size: Size, seed: int) -> Rows:
    """Short descents at the larger N from one start, and the errors of their first gradients."""
    count = size.large_count
    about: Row = {"kind": "large", "N": count, "loss": LARGE_LOSS, "rate": LARGE_RATE, "seed": seed}
    inputs, target = start(count, seed)
    _, point = point_of(inputs, LARGE_LOSS, target)
    right = nf.gradients.exact(*point)
    found = []
    for name, estimator in large(count).items():
        path = descend(estimator, LARGE_LOSS, LARGE_RATE, size.large_steps, count, seed)
        found.append({**about, "estimator": name, **path, **relative(estimator(point, Dice.cast(seed)), right)})
    return found


def one_gradient(size: Size, seed: int) -> Rows:
    """Relative errors of each gradient at the start of a descent, and what they cost in draws."""
    inputs, target = start(size.count, seed)
    _, point = point_of(inputs, SINGLE_LOSS, target)
    right = nf.gradients.exact(*point)
    asked = sizes(size.count, DIM, EPS, DELTA)
    about: Row = {"kind": "gradient", "N": size.count, "seed": seed}
    estimators = small(size.count, DIM)
    costs = {
        "printed": draws_per_gradient(size.count, DIM, asked, with_key=True),
        "walks": WALKS * size.count,
        "topk": math.ceil(math.sqrt(size.count)) * size.count,
    }
    found = [
        {**about, "estimator": name, "draws": cost, **relative(estimators[name](point, Dice.cast(seed)), right)}
        for name, cost in costs.items()
    ]
    for form in ("shifted", "signed"):
        generator = torch.Generator().manual_seed(seed)
        got = estimate_product(point.query, point.key, point.upstream, asked.walks, form=form, generator=generator)
        columns = DIM + (form == "shifted")
        cost = {"draws": asked.walks * columns, "query": None, "key": None}
        found.append({**about, "estimator": form, **cost, "value": float((got - right.value).norm() / right.value.norm())})
    return found


def relative(got: Gradients, right: Gradients) -> dict[str, float]:
    return {name: float((a - b).norm() / b.norm()) for name, a, b in zip(Gradients._fields, got, right, strict=True)}
