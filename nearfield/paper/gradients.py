"""Gradients of attention: exact formulas, and the paper's Monte-Carlo estimators of D^V, D^Q and D^K.

`RandomWalk` and `PrintedWalk` are strategies for `nearfield.attention(..., gradient=...)`. The functions of this module
take plain tensors `[..., length, dim]` and return gradients of the same shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nearfield.checks import check_gradient, check_index, check_positive, refuse_double_backward
from nearfield.kernels.backends import full_precision
from nearfield.knn.index.base import Index
from nearfield.knn.index.exact import ExactIndex
from nearfield.paper.walks import PrintedWalk, RandomWalk, Walker, positive_product, shifted_product, signed_product
from nearfield.problem import Gradient, Problem, Rows, check, isolate_non_finite
from nearfield.results import Gradients
from nearfield.sampling import Dropout, Seeds

__all__ = ["Gradient", "Gradients", "PrintedWalk", "RandomWalk", "approx_pos_prod", "estimate", "estimate_product", "exact"]


def exact(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, *, is_causal: bool = False, scale: float | None = None
) -> Gradients:
    """The gradients by the formulas of the paper's lemma, block by block.

    Example:
        >>> q, k, v, g = torch.randn(4, 1, 2, 100, 8).unbind(0)
        >>> nearfield.gradients.exact(q, k, v, g).key.shape
        torch.Size([1, 2, 100, 8])
    """
    problem = isolate_non_finite(check(query, key, value, is_causal=is_causal, scale=scale), raise_instead=True)
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
    """The same gradients, estimated by random walks: `RandomWalk` (the one to use) or `PrintedWalk` (the paper's).

    Example:
        >>> grad = nearfield.gradients.estimate(q, k, v, g, nearfield.gradients.RandomWalk(walks=128))
    """
    problem = isolate_non_finite(check(query, key, value, is_causal=is_causal, scale=scale), raise_instead=True)
    check_gradient("walk", walk)
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
    k: int | None = None,
    index: Index | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """ApproxPosProd: an estimate of P^T x for x >= 0, `[..., Lq, columns]` -> `[..., Lk, columns]`, P the softmax matrix.

    `k` and `index` as for `RandomWalk`; None: `ExactIndex()`.
    """
    return _product(positive_product, query, key, x, walks, is_causal, scale, k, index, generator)


def estimate_product(
    query: Tensor,
    key: Tensor,
    x: Tensor,
    walks: int,
    *,
    form: str = "signed",
    is_causal: bool = False,
    scale: float | None = None,
    k: int | None = None,
    index: Index | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """EstimateProduct: the same for any x. Walks carry signs (`form="signed"`), or x is shifted as printed (more variance)."""
    if form not in ("signed", "shifted"):
        raise ValueError(f"form must be 'signed' or 'shifted', got {form!r}")
    function = signed_product if form == "signed" else shifted_product
    return _product(function, query, key, x, walks, is_causal, scale, k, index, generator)


@torch.no_grad()
def _product(
    function: Callable[[Walker, Tensor, int, torch.Generator], Tensor],
    query: Tensor,
    key: Tensor,
    x: Tensor,
    walks: int,
    is_causal: bool,
    scale: float | None,
    k: int | None,
    index: Index | None,
    generator: torch.Generator | None,
) -> Tensor:
    check_positive("walks", walks)
    check_positive("k", k, optional=True)
    index = ExactIndex() if index is None else index
    check_index("index", index)
    if x.shape[:-1] != query.shape[:-1]:
        raise ValueError(f"x must have shape [..., Lq, columns] to go with query {tuple(query.shape)}, got {tuple(x.shape)}")
    problem = isolate_non_finite(check(query, key, key, is_causal=is_causal, scale=scale), raise_instead=True)
    rows = problem.rows.detach()
    if problem.is_empty:
        return x.new_zeros(*key.shape[:-1], x.shape[-1])
    columns = x.reshape(*rows.queries.shape[:2], -1).to(rows.queries.dtype)
    random = Seeds(generator, query.device).generator(0)
    with full_precision(query):
        walker = Walker(rows, index, k, walks * columns.shape[-1] / max(1, rows.visible.shape[1]))
        return function(walker, columns, walks, random).reshape(*key.shape[:-1], -1)


def _upstream(problem: Problem, grad_output: Tensor) -> Tensor:
    if tuple(grad_output.shape) != problem.out_shape:
        raise ValueError(f"grad_output must have the shape of the output {problem.out_shape}, got {tuple(grad_output.shape)}")
    rows = problem.rows
    return grad_output.detach().reshape(*rows.queries.shape[:2], -1).to(rows.queries.dtype)


def _like_inputs(problem: Problem, grads: Gradients) -> Gradients:
    """Gradients in the layout of `Rows`, whose queries are multiplied by the scale, as gradients of the inputs."""
    leading = problem.leading
    query = (grads.query * problem.scale).reshape(*leading, *problem.query.shape[2:])
    key, value = (x.reshape(*leading, problem.key.shape[2], x.shape[-1]) for x in (grads.key, grads.value))
    return Gradients(query, key, value)


class _WithGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        output: Tensor,
        visible: Tensor,
        first: Tensor | None,
        gradient: Gradient,
        seeds: Seeds,
        dropout: Dropout | None,
    ) -> Tensor:
        ctx.save_for_backward(queries, keys, values, visible, first)
        ctx.gradient, ctx.seeds = gradient, seeds
        # A gradient of one's own may have no such argument.
        ctx.options = {} if dropout is None else {"dropout": dropout}
        return output.clone()

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        rows = Rows(*ctx.saved_tensors)
        with full_precision(grad_output):
            return (*ctx.gradient.estimate(rows, grad_output, ctx.seeds, **ctx.options), *[None] * 6)


def with_gradient(output: Tensor, rows: Rows, gradient: Gradient, seeds: Seeds, dropout: Dropout | None = None) -> Tensor:
    """`output`, with `gradient` as its backward pass. `dropout`: what was dropped on the way to `output`."""
    # Drawn now, as autograd decides in which order backward passes run; and also where no gradient is wanted: checkpointing may
    # run the first pass without one, and the second has to draw the same numbers.
    _ = seeds.base
    # Exact attention may come in bfloat16: the incoming gradient is to have the dtype of the rows.
    output = output.detach().to(rows.values.dtype)
    parts = rows.queries, rows.keys, rows.values, output, rows.visible, rows.first
    return _WithGradient.apply(*parts, gradient, seeds, dropout)


BLOCK_ELEMENTS = 1 << 22
"""Logits that `exact_gradients` holds at a time."""


def exact_gradients(rows: Rows, grad_output: Tensor) -> Gradients:
    """D^V = P^T D^O;  D^Q_i = sum_k P_ik (D^P_ik - <D^P_i, P_i>) K_k;  D^K_i = sum_k P_ki (D^P_ki - <D^P_k, P_k>) Q_k.

    D^P_ij = <D^O_i, V_j>. Block of rows by block of rows: time O(rows * length * dim), and no matrix of all logits.
    """
    batch, count, _ = rows.queries.shape
    grad = Gradients(torch.empty_like(rows.queries), torch.zeros_like(rows.keys), torch.zeros_like(rows.values))
    step = max(1, BLOCK_ELEMENTS // max(1, batch * rows.length))
    for start in range(0, count, step):
        block = slice(start, start + step)
        part, upstream = rows.at(block), grad_output[:, block]
        hidden = torch.arange(rows.length, device=rows.keys.device) >= part.visible[..., None]
        weights = (part.queries @ rows.keys.transpose(1, 2)).masked_fill(hidden, -torch.inf).softmax(-1)
        weights = weights.masked_fill(part.visible[..., None] == 0, 0.0)
        grad_weights = upstream @ rows.values.transpose(1, 2)
        grad_logits = weights * (grad_weights - (weights * grad_weights).sum(-1, keepdim=True))
        grad.query[:, block] = grad_logits @ rows.keys
        grad.key.add_(grad_logits.transpose(1, 2) @ part.queries)
        grad.value.add_(weights.transpose(1, 2) @ upstream)
    return grad
