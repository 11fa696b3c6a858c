"""Estimates of P^T x by walks, P the softmax matrix (paper, Algorithm 3: ApproxPosProd and EstimateProduct)."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.gradients.walks import Walker
from nearfield.sampling import categorical


def positive_product(walker: Walker, x: Tensor, walks: int, generator: torch.Generator) -> Tensor:
    """ApproxPosProd: P^T x for x >= 0. x `[batch, rows, columns]` -> `[batch, length, columns]`.

    `walks` walks per column start in row i with probability x_i / sum x; the share that ends in key v, times sum x, is an
    unbiased estimate of (P^T x)_v with error at most eps sum x for `budget(theorem="walks")` walks.
    """
    if bool((x < 0).any()):
        raise ValueError("approx_pos_prod needs x >= 0; use estimate_product for x of any sign")
    return signed_product(walker, x, walks, generator)


def signed_product(walker: Walker, x: Tensor, walks: int, generator: torch.Generator) -> Tensor:
    """P^T x for any x: a walk starts in row i with probability |x_i| / ||x||_1 and carries the sign of x_i.

    Variance of entry v: (||x||_1 (P^T |x|)_v - (P^T x)_v^2) / walks. A column of zeros is estimated as zero. The error is at most
    eps ||x||_1 for `budget(theorem="walks", form="signed")` walks.
    """
    batch, rows, columns = x.shape
    by_column = x.transpose(1, 2).reshape(batch * columns, rows)
    weight = by_column.abs().double()
    # Rows that see no key lead nowhere: their row of P is zero.
    weight = weight * (walker.rows.visible > 0).repeat_interleave(columns, 0)
    total = weight.sum(-1)
    alive = (total > 0).nonzero()[:, 0]
    out = torch.zeros(batch * walker.rows.length * columns, dtype=torch.float64, device=x.device)
    if len(alive) == 0:
        return out.view(batch, -1, columns).to(x.dtype)
    start = categorical(weight[alive], walks, generator)
    entry, column = alive // columns, alive % columns
    key = walker.step((entry[:, None] * rows + start).reshape(-1), generator).view(start.shape)
    place = (entry[:, None] * walker.rows.length + key) * columns + column[:, None]
    carried = by_column[alive].gather(1, start).sign().double() * total[alive, None] / walks
    out.index_add_(0, place.reshape(-1), carried.reshape(-1))
    return out.view(batch, walker.rows.length, columns).to(x.dtype)


def shifted_product(walker: Walker, x: Tensor, walks: int, generator: torch.Generator, row_sums: Tensor | None = None) -> Tensor:
    """EstimateProduct as printed: lift every column by its most negative entry, walk, and take the lift out again.

    P^T x = P^T (x + M) - M P^T 1, with P^T 1 estimated once (`row_sums`, `[batch, length, 1]`). Unbiased, but with many times the
    variance of `signed_product` for x of mixed sign.
    """
    if row_sums is None:
        row_sums = positive_product(walker, torch.ones_like(x[..., :1]), walks, generator)
    lift = (-x).clamp(min=0).amax(1, keepdim=True)
    return positive_product(walker, x + lift, walks, generator) - lift * row_sums
