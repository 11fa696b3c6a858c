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

from nearfield import kernels
from nearfield.blocks import near_keys, row_blocks
from nearfield.checks import check_positive, check_strategy
from nearfield.gradients.exact import Gradients
from nearfield.index.base import PADDING, BuiltIndex, Index
from nearfield.index.exact import ExactIndex
from nearfield.lazy_gumbel import LazyRows, prepare
from nearfield.problem import Rows
from nearfield.sampling import Seeds


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
        check_strategy("index", self.index, "build", "an index such as ExactIndex()")

    @torch.no_grad()
    def estimate(self, rows: Rows, grad_output: Tensor, seeds: Seeds) -> Gradients:
        return shared_walks(rows, grad_output, self, seeds)


class Walker:
    """Takes steps from rows to keys, with the index built once."""

    def __init__(self, rows: Rows, index: Index, k: int | None) -> None:
        self.rows = rows
        self.k = near_keys(k, rows.length)
        self.built: BuiltIndex = index.build(rows.keys)

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
    kernel = kernels.choose("auto", rows.keys.device)
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
