"""Gradients by random walks of one step: from a row to a key drawn from its softmax.

Products with P are expectations over a row's softmax; products with the transpose of P are what walks that start in rows
leave behind in keys. The paper draws the walks of each column, and for D^K of each entry, apart (`printed.py`). Here the same
few walks from every row serve D^Q, D^K and D^V in all columns at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nearfield.checks import check_index, check_positive
from nearfield.chunks import row_blocks
from nearfield.kernels import backends
from nearfield.knn.index.base import PADDING, Index, build_index, default_k
from nearfield.knn.index.exact import ExactIndex
from nearfield.paper.lazy import LazyRows, prepare
from nearfield.problem import Rows
from nearfield.results import Gradients
from nearfield.sampling import Seeds, categorical


@dataclass(frozen=True)
class RandomWalk:
    """Monte-Carlo gradients: `walks` keys j_t drawn from the softmax of every row i, g_t = <D^O_i, V_{j_t}>, g the mean of g_t:

        D^V_{j_t} += D^O_i / walks
        D^Q_i      = sum_t (g_t - g) K_{j_t} / (walks - 1)
        D^K_{j_t} += (g_t - g) Q_i / (walks - 1)

    All three are exactly unbiased: with P_i the softmax of row i, the last two are sample covariances of D^P_i with K and
    with the indicator of a key. The error falls as 1/sqrt(walks).

    Args:
        walks: draws per row, at least 2.
        k, index: for the lazy Gumbel sampler; None: ceil(sqrt(Lk)).

    Cost: one search per row, plus O(walks * (E[m] + 1) * dim) per row; memory O(inputs).

    Example:
        >>> q, k, v = (torch.randn(1, 4, 2048, 64, requires_grad=True) for _ in range(3))
        >>> nearfield.attention(q, k, v, gradient=RandomWalk(walks=64)).square().sum().backward()
    """

    walks: int = 64
    k: int | None = None
    index: Index = field(default_factory=ExactIndex)

    def __post_init__(self) -> None:
        check_positive("walks", self.walks, least=2)
        check_positive("k", self.k, optional=True)
        check_index("index", self.index)

    @torch.no_grad()
    def estimate(self, rows: Rows, grad_output: Tensor, seeds: Seeds) -> Gradients:
        return shared_walks(rows, grad_output, self, seeds)


class Walker:
    """Takes steps from rows to keys, with the index built once."""

    def __init__(self, rows: Rows, index: Index, k: int | None) -> None:
        self.rows = rows
        self.k = default_k(k, rows.length)
        self.built = build_index(index, rows.keys)

    def blocks(self, walks: int) -> Iterator[slice]:
        """Ranges of rows for which a number of walks each fit into memory."""
        return row_blocks(self.rows.visible.shape, 80 * max(walks, self.k, self.built.groups))

    def prepare(self, block: slice) -> LazyRows:
        return prepare(self.rows.at(block), self.built, self.k)

    def step(self, source: Tensor, generator: torch.Generator) -> Tensor:
        """One step from every flat row number of `source` (batch * rows + row): the key it reaches, or `PADDING`."""
        count = self.rows.visible.shape[1]
        entry, row = source // count, source % count
        by_row, order = row.sort(stable=True)
        reached = torch.full_like(source, PADDING)
        leads_on = self.rows.visible[entry, row] > 0
        for block in self.blocks(1):
            first, last = torch.searchsorted(by_row, torch.tensor([block.start, block.stop], device=source.device)).tolist()
            here = order[first:last]
            here = here[leads_on[here]]
            if len(here) == 0:
                continue
            local = entry[here] * (block.stop - block.start) + row[here] - block.start
            reached[here] = self.prepare(block).draw(local, generator).ids
        return reached


def shared_walks(rows: Rows, grad_output: Tensor, recipe: RandomWalk, seeds: Seeds) -> Gradients:
    """The estimators of `RandomWalk`."""
    walker = Walker(rows, recipe.index, recipe.k)
    kernel = backends.pair_kernels("auto", rows.keys.device)
    walks = recipe.walks
    key_table, value_table = rows.keys.flatten(0, 1), rows.values.flatten(0, 1)
    grad = Gradients(torch.zeros_like(rows.queries), torch.zeros_like(key_table), torch.zeros_like(value_table))
    for block in walker.blocks(walks):
        lazy = walker.prepare(block)
        place = lazy.draw_each(walks, seeds.generator(-2, block.start)).place
        upstream = grad_output[:, block].flatten(0, 1)[lazy.seen]
        query_rows = lazy.rows.queries.flatten(0, 1)[lazy.seen]

        scores = kernel.pair_scores(upstream, value_table, place)
        centred = (scores - scores.mean(-1, keepdim=True)) / (walks - 1)
        grad.query[:, block] = lazy.spread(kernel.pair_sums(centred, key_table, place))
        kernel.pair_scatter_(grad.key, centred, query_rows, place)
        kernel.pair_scatter_(grad.value, torch.full_like(centred, 1.0 / walks), upstream, place)
    return Gradients(grad.query, grad.key.view_as(rows.keys), grad.value.view_as(rows.values))


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
