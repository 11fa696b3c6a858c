"""Losses of an attention output: mean over columns, summed over rows, so that learning rates of 0.05 to 0.5 are in their range.

The paper names mean squared error and cross-entropy; a part of the appendix that is commented out in its source names
quadratic, cubic and exponential ones and defines none. All five are convex in the output; what is not convex is attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Target(NamedTuple):
    values: Tensor
    """`[..., N, d]`"""
    classes: Tensor
    """`[..., N]`, below d"""


def squared_error(output: Tensor, target: Target) -> Tensor:
    return (output - target.values).square().mean(-1).sum()


def cross_entropy(output: Tensor, target: Target) -> Tensor:
    return F.cross_entropy(output.flatten(0, -2), target.classes.flatten(), reduction="sum")


def quadratic(output: Tensor, target: Target) -> Tensor:
    return output.square().mean(-1).sum()


def cubic(output: Tensor, target: Target) -> Tensor:
    return output.abs().pow(3).mean(-1).sum()


def exponential(output: Tensor, target: Target) -> Tensor:
    return output.exp().mean(-1).sum()


LOSSES: dict[str, Callable[[Tensor, Target], Tensor]] = {
    "squared error": squared_error,
    "cross-entropy": cross_entropy,
    "quadratic": quadratic,
    "cubic": cubic,
    "exponential": exponential,
}


def value_and_upstream(loss: str, output: Tensor, target: Target) -> tuple[float, Tensor]:
    """The mean loss of a row, and D^O, the gradient of the sum."""
    leaf = output.detach().requires_grad_()
    total = LOSSES[loss](leaf, target)
    (upstream,) = torch.autograd.grad(total, leaf)
    return float(total.detach()) / (output.numel() // output.shape[-1]), upstream
