"""The far-field formula in torch; `triton/far_field.py` is the same in Triton. Score, boost and derivative are written nowhere
else: the reference imports its boost from here. Tests restate all of them independently. So is the rule by which a block of rows
opens cells together.

For a query q (times scale) and a cell c of n_c keys around a centroid mu_c with variances var_c:

    spread  u_c     = min(sum_i q_i^2 var_{c,i}, 9)   variance of the cell's logits, cut off
    score   s_c     = q.mu_c + 3 sqrt(u_c)            what its best keys may reach; the cells of largest score are opened
    boost   b(u)    = (1 + u / 4)^2                   agrees to second order in q with e^{u/2}, right for a Gaussian cell
                                                      but far too large where a cell is not Gaussian
    mass    m_c     = n_c e^{q.mu_c} b(u_c)           what a closed cell counts for
    derivative      d log b / du = 1 / (2 + u / 2)    0 where u_c was cut off

With a soft cap f(z) = cap tanh(z / cap), f is taken as linear around the logit of the centroid: with the slope f'_c = f'(q.mu_c),
f(q.mu_c) stands for q.mu_c, and f'_c^2 u_c for u_c. A cap keeps the order of scores.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.cells.moments import MOST_VARIANCE, SeenCells
from nearfield.kernels.dense import capped
from nearfield.kernels.reference import largest

ROUTE_SPREADS = 3.0
"""The score of a cell is q.mu_c plus this many standard deviations of its logits."""
MOST_SPREAD = 9.0
"""u_c is cut off here. Cells whose logits differ by more are no clouds of keys: their best key is not so many standard deviations
above the centroid, and a few such cells would be opened before, and count for more than, all others together."""
MOST_SPREAD_BY_QUERIES = 64.0
"""In the scores of a cache whose keys are grouped as queries are large, u_c is cut off here. A large one means what it says
there, and a head that looks for a single key finds it in such a cell."""
MOST_SQUARE = MOST_VARIANCE
"""Squares of queries are cut off here: inf times 0 is NaN, and topk takes NaN for the largest score."""
GROUP = 8
"""Cells per group where the best ones are found in two stages."""
FEW_SCORES = 1 << 15
"""With fewer scores than this, one stage is faster."""
POOL = 8
"""Rows that open cells together are averaged so many at a time before they vote."""


def squares(queries: Tensor) -> Tensor:
    """q^2, cut off. Products of these with variances are spreads."""
    return queries.square().clamp_(max=MOST_SQUARE)


def score(first: Tensor, spread: Tensor) -> Tensor:
    """s_c, from `first` = q.mu_c and u_c."""
    return torch.add(first, spread.sqrt(), alpha=ROUTE_SPREADS)


def boost(spread: Tensor) -> Tensor:
    """b(u)"""
    return (0.25 * spread).add_(1.0).square_()


def log_boost(spread: Tensor) -> Tensor:
    """log b(u)"""
    return 2.0 * torch.log1p(0.25 * spread)


def boost_backward(logit_grad: Tensor, spread: Tensor) -> Tensor:
    """The gradient of u_c from that of log m_c; 0 where u_c was cut off. Overwrites `logit_grad`."""
    grad = logit_grad.div_((0.5 * spread).add_(2.0))
    return grad.masked_fill_(spread >= MOST_SPREAD, 0.0) if bool(spread.amax() >= MOST_SPREAD) else grad


def moments(queries: Tensor, seen: SeenCells) -> tuple[Tensor, Tensor]:
    """q.mu_c (-inf for empty cells) and u_c for the cells that rows see, `[rows, cells]` each."""
    first = torch.addmm(seen.log_exists, queries, seen.centroid.T)
    spread = squares(queries) @ seen.variance.T
    # Finding the largest is much cheaper than clamping all of them.
    if spread.numel() and float(spread.amax()) > MOST_SPREAD:
        spread.clamp_(max=MOST_SPREAD)
    return first, spread


def open_best(first: Tensor, spread: Tensor, count: int) -> Tensor:
    """The columns of the `count` cells of largest score in each row; -1 where there are fewer non-empty cells."""
    best, column = best_columns(score(first, spread), count)
    return column.masked_fill_(best == -torch.inf, -1)


def cap_moments(first: Tensor, spread: Tensor, softcap: float) -> tuple[Tensor, Tensor, Tensor]:
    """f(q.mu_c) (-inf for empty cells), f'_c^2 u_c and f'_c."""
    slope = 1.0 - (first / softcap).tanh().square()
    return capped(first, softcap).masked_fill(first == -torch.inf, -torch.inf), spread * slope.square(), slope


def cap_moments_backward(
    first_grad: Tensor, spread_grad: Tensor, slope_grad: Tensor, first: Tensor, spread: Tensor, slope: Tensor, softcap: float
) -> tuple[Tensor, Tensor]:
    """The gradients of q.mu_c and u_c (0 where that was cut off) from those of what `cap_moments` returns."""
    slope_grad = slope_grad + 2.0 * spread_grad * spread * slope
    bend = -2.0 / softcap * (first / softcap).tanh() * slope
    cut = spread >= MOST_SPREAD
    return first_grad * slope + slope_grad * bend, (spread_grad * slope.square()).masked_fill_(cut, 0.0)


def best_cell(first: Tensor, spread: Tensor) -> Tensor:
    """The column of the cell of largest score in each row. Without a mask, rows become blocks in the order of these."""
    return score(first, spread).argmax(1)


def pooled(queries: Tensor, share: int) -> tuple[Tensor, Tensor]:
    """The means of every `POOL` rows of a block, `[runs * blocks, pools, dim]`, and which of these have rows `[..., pools]`.

    `queries` `[runs, length, dim]`: runs of rows that begin with a block; the last block of a run may be shorter than `share`.
    """
    runs, length, dim = queries.shape
    blocks, pools = -(-length // share), share // POOL
    whole = torch.nn.functional.pad(queries, (0, 0, 0, blocks * share - length))
    rows = (length - POOL * torch.arange(blocks * pools, device=queries.device)).clamp(0, POOL)
    mean = whole.view(runs, blocks * pools, POOL, dim).sum(2).div_(rows.clamp(min=1)[:, None])
    return mean.view(runs * blocks, pools, dim), (rows > 0).expand(runs, -1).reshape(runs * blocks, pools)


def votes(first: Tensor, spread: Tensor, size: Tensor, present: Tensor, softcap: float = 0.0) -> Tensor:
    """How many votes each cell has in each block, `[..., blocks, cells]`; -inf where it is empty.

    `first` and `spread` `[..., blocks * pools, cells]` are those of the means of `POOL` rows. Each mean gives every key of cell c
    e^{s_c} / sum_c' n_c' e^{s_c'} of a vote, its weight if all keys of a cell had the score of the cell; w_c is the sum over the
    means of a block that are `present` `[..., blocks, pools]`. All rows of a block that sees cells see some key, so all count.
    `size`: `[..., cells]`.
    """
    weight = score(first, spread).clamp_(max=torch.finfo(first.dtype).max)
    if softcap:
        weight = capped(weight, softcap)
    weight.sub_(finite(weight.amax(-1, keepdim=True))).exp_()
    weight.div_((weight @ size)[:, None] if size.dim() == 1 else weight @ size[..., None])
    found = weight.view(*present.shape, -1).masked_fill_(~present[..., None], 0.0).sum(-2)
    return found.masked_fill_(size[..., None, :] == 0, -torch.inf)


def open_together(first: Tensor, spread: Tensor, size: Tensor, present: Tensor, count: int, softcap: float = 0.0) -> Tensor:
    """The columns of the `count` cells with most `votes` in each block; -1 where there are fewer non-empty cells."""
    best, column = best_columns(votes(first, spread, size, present, softcap), count)
    return column.masked_fill_(best == -torch.inf, -1)


def best_columns(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest numbers of each row (or all, if there are fewer), in no particular order, and their columns."""
    cells = scores.shape[1]
    if cells // GROUP < 2 * count or scores.numel() < FEW_SCORES:
        best = scores.topk(min(count, cells), sorted=False)
        return best.values, best.indices
    return largest(scores, count, GROUP, sorted=False)


def largest_first(first: Tensor, columns: Tensor) -> Tensor:
    """The largest q.mu_c among the cells at some columns of each row, where -1 is no column; -inf where there are none."""
    return first.gather(1, columns.clamp(min=0)).masked_fill_(columns < 0, -torch.inf).amax(1)


def masses(first: Tensor, spread: Tensor, opened: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """m_c e^-top `[rows, cells]`, zero for cells at the columns `opened`, and top `[rows]`. Overwrites `first`."""
    # Empty slots (-1) go to column 0, which gets back what it had unless it is opened.
    zeroth = first[:, :1].masked_fill((opened == 0).any(1, keepdim=True), -torch.inf)
    first.scatter_(1, opened.clamp(min=0), -torch.inf)
    first[:, :1] = zeroth
    top = first.amax(1)
    return first.sub_(finite(top)[:, None]).exp_().mul_(boost(spread)).mul_(size), top


def finite(top: Tensor) -> Tensor:
    """`top`, with 0 in place of -inf, so that it can be subtracted."""
    return top.masked_fill(top == -torch.inf, 0.0)
