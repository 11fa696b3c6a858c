"""Gradients of attention: exact formulas, and the paper's Monte-Carlo estimators of D^V, D^Q and D^K.

`RandomWalk` and `PrintedWalk` are strategies for `nearfield.attention(..., gradient=...)`. The functions of this module
work on plain tensors `[..., length, dim]` and return gradients of the same shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.checks import check_positive, check_strategy
from nearfield.gradients import products
from nearfield.gradients.base import Gradient
from nearfield.gradients.exact import Gradients, exact_gradients
from nearfield.gradients.printed import PrintedWalk
from nearfield.gradients.walks import RandomWalk, Walker
from nearfield.index.exact import ExactIndex
from nearfield.precision import full_precision
from nearfield.problem import Problem, check
from nearfield.sampling import Seeds

__all__ = ["Gradient", "Gradients", "PrintedWalk", "RandomWalk", "approx_pos_prod", "estimate", "estimate_product", "exact"]


def exact(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> Gradients:
    """The gradients by the formulas of the paper's lemma, blocked.

    Example:
        >>> q, k, v, g = torch.randn(4, 1, 2, 100, 8).unbind(0)
        >>> nearfield.gradients.exact(q, k, v, g).key.shape
        torch.Size([1, 2, 100, 8])
    """
    problem = check(query, key, value, is_causal=is_causal, scale=scale, check_finite=True)
    with full_precision(query):
        return _like_inputs(problem, exact_gradients(problem.rows.detach(), _upstream(problem, grad_output)))


def estimate(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad_output: Tensor,
    walk: Gradient,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    generator: torch.Generator | None = None,
) -> Gradients:
    """The same gradients estimated by random walks: `RandomWalk` (the estimators to use) or `PrintedWalk` (the paper's).

    Example:
        >>> grad = nearfield.gradients.estimate(q, k, v, g, nearfield.gradients.RandomWalk(walks=128))
    """
    problem = check(query, key, value, is_causal=is_causal, scale=scale, check_finite=True)
    check_strategy("walk", walk, "estimate", "a gradient such as RandomWalk()")
    upstream = _upstream(problem, grad_output)
    if problem.is_empty:
        return _like_inputs(problem, exact_gradients(problem.rows.detach(), upstream))
    with full_precision(query):
        grads = walk.estimate(problem.rows.detach(), upstream, Seeds(generator, query.device))
    return _like_inputs(problem, Gradients(*grads))


def approx_pos_prod(
    query: Tensor,
    key: Tensor,
    x: Tensor,
    walks: int,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """ApproxPosProd: an estimate of P^T x for x >= 0, `[..., Lq, columns]` -> `[..., Lk, columns]`, P the softmax matrix."""
    return _product("positive", query, key, x, walks, is_causal, scale, generator)


def estimate_product(
    query: Tensor,
    key: Tensor,
    x: Tensor,
    walks: int,
    *,
    form: str = "signed",
    is_causal: bool = False,
    scale: float | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """EstimateProduct: P^T x for any x. `form="signed"` walks with signs, `form="shifted"` is the paper's (more variance)."""
    if form not in ("signed", "shifted"):
        raise ValueError(f"form must be 'signed' or 'shifted', got {form!r}")
    return _product(form, query, key, x, walks, is_causal, scale, generator)


@torch.no_grad()
def _product(
    form: str,
    query: Tensor,
    key: Tensor,
    x: Tensor,
    walks: int,
    is_causal: bool,
    scale: float | None,
    generator: torch.Generator | None,
) -> Tensor:
    check_positive("walks", walks)
    if x.shape[:-1] != query.shape[:-1]:
        raise ValueError(f"x must have shape [..., Lq, columns] to go with query {tuple(query.shape)}, got {tuple(x.shape)}")
    problem = check(query, key, key, is_causal=is_causal, scale=scale, check_finite=True)
    rows = problem.rows.detach()
    if problem.is_empty:
        return x.new_zeros(*key.shape[:-1], x.shape[-1])
    function = {"positive": products.positive_product, "signed": products.signed_product, "shifted": products.shifted_product}
    columns = x.reshape(*rows.queries.shape[:2], -1).to(rows.queries.dtype)
    random = Seeds(generator, query.device).generator(0)
    with full_precision(query):
        return function[form](Walker(rows, ExactIndex(), None), columns, walks, random).reshape(*key.shape[:-1], -1)


def _upstream(problem: Problem, grad_output: Tensor) -> Tensor:
    if tuple(grad_output.shape) != problem.out_shape:
        raise ValueError(f"grad_output must have the shape of the output {problem.out_shape}, got {tuple(grad_output.shape)}")
    rows = problem.rows
    return grad_output.detach().reshape(*rows.queries.shape[:2], -1).to(rows.queries.dtype)


def _like_inputs(problem: Problem, grads: Gradients) -> Gradients:
    """From the layout of `Rows`, whose queries carry the scale, back to the inputs'."""
    leading = problem.leading
    query = (grads.query * problem.scale).reshape(*leading, *problem.query.shape[2:])
    key, value = (x.reshape(*leading, problem.key.shape[2], x.shape[-1]) for x in (grads.key, grads.value))
    return Gradients(query, key, value)
