"""Gradient: a strategy for the backward pass, chosen apart from the method of the forward pass."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from nearfield.precision import full_precision
from nearfield.problem import Rows
from nearfield.sampling import Seeds


class Gradient(Protocol):
    """Estimates the gradients of attention from its inputs and the gradient of its output."""

    def estimate(self, rows: Rows, grad_output: Tensor, seeds: Seeds) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of `rows.queries`, `rows.keys` and `rows.values`."""
        ...


def refuse_double_backward() -> None:
    """Called in a backward pass, where gradients are being recorded only if somebody wants to differentiate them."""
    if torch.is_grad_enabled():
        raise NotImplementedError(
            "nearfield does not support double backward (create_graph=True); "
            "use torch.nn.functional.scaled_dot_product_attention with the math backend for second derivatives"
        )


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, queries: Tensor, keys: Tensor, values: Tensor, output: Tensor, visible: Tensor, gradient: Gradient, seeds: Seeds
    ) -> Tensor:
        ctx.save_for_backward(queries, keys, values, visible)
        ctx.gradient, ctx.seeds = gradient, seeds
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        rows = Rows(*ctx.saved_tensors)
        with full_precision(grad_output):
            return (*ctx.gradient.estimate(rows, grad_output, ctx.seeds), None, None, None, None)


def with_gradient(output: Tensor, rows: Rows, gradient: Gradient, seeds: Seeds) -> Tensor:
    """`output`, with `gradient` as its backward pass."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in (rows.queries, rows.keys, rows.values)):
        _ = seeds.base  # drawn here and not in the backward pass, whose order is not ours
    return _WithGradient.apply(rows.queries, rows.keys, rows.values, output.detach(), rows.visible, gradient, seeds)
