"""A descent from Gaussian queries, keys and values."""

from __future__ import annotations

import torch
from torch import Tensor

import nearfield as nf
from experiments.experiment import Row
from experiments.gradient_descent.estimators import Dice, Estimator, Point
from experiments.gradient_descent.losses import Target, value_and_upstream

DIM = 3
Inputs = tuple[Tensor, Tensor, Tensor]
HOPELESS = 1e3
"""A descent whose loss has grown by this factor is stopped: it has diverged."""


def start(count: int, seed: int) -> tuple[Inputs, Target]:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, 1, count, DIM, generator=generator) for _ in range(3))
    values = torch.randn(1, 1, count, DIM, generator=generator)
    return (query, key, value), Target(values, torch.randint(DIM, (1, 1, count), generator=generator))


def point_of(inputs: Inputs, loss: str, target: Target) -> tuple[float, Point]:
    """The loss of exact attention (mean over rows), and where its gradient is asked for."""
    value, upstream = value_and_upstream(loss, nf.attention(*inputs, method=nf.Exact()), target)
    return value, Point(*inputs, upstream)


def descend(estimator: Estimator, loss: str, rate: float, steps: int, count: int, seed: int) -> Row:
    """Losses before every step and after the last."""
    inputs, target = start(count, seed)
    dice = Dice.cast(seed)
    losses: list[float] = []
    for step in range(steps + 1):
        value, point = point_of(inputs, loss, target)
        losses.append(value)
        if step == steps or not value < HOPELESS * losses[0]:
            break
        query, key, values = (x - rate * gradient for x, gradient in zip(inputs, estimator(point, dice), strict=True))
        inputs = (query, key, values)
    return {"losses": losses, "diverged": len(losses) <= steps}
