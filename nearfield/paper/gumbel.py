"""Attention from draws of the softmax: the paper's kNN attention (Algorithm 2)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor

from nearfield.checks import check_fraction, check_index, check_not_negative, check_positive
from nearfield.kernels import backends
from nearfield.knn.index.base import BuiltIndex, Index, row_table
from nearfield.knn.index.exact import ExactIndex
from nearfield.knn.index.tally import Tally
from nearfield.paper.budgets import budget
from nearfield.paper.gradients import with_gradient
from nearfield.paper.sampler import Sampler
from nearfield.paper.walks import RandomWalk
from nearfield.problem import Call, Gradient, Problem, Rows
from nearfield.results import Outcome
from nearfield.sampling import Dropout, pair_dropout
from nearfield.windows import Blocks, in_blocks

MOST_DRAWS = 1 << 24
"""Of a row, which has all of them in memory at a time. As many have an error of about 2^-12, which exact attention beats."""


@dataclass(frozen=True)
class LazyGumbel:
    """Draws from every row's softmax by lazy Gumbel sampling, combined by median of means (paper, Algorithms 1 and 2).

    With the default number of draws, with probability 1 - delta every entry of the output is within

        eps (sum_j P_ij V_jc^2)^(1/2)   (estimator="median")      or      eps (max_j V_jc - min_j V_jc)   (estimator="mean").

    The paper's multiplicative guarantee needs V >= 0 and entries bounded away from zero; this one needs nothing.

    Args:
        eps, delta: the promise above.
        k: near keys per row; None: ceil(sqrt(Lk)), as `budget(theorem="lazy-gumbel")` says. It decides the cost, not the promise.
        index: finds them; a built-in index or your own (`nearfield.Index`), or one that is built already. Draws are exact for an
            index that bounds the keys it leaves out (`ExactIndex`, `KMeansIndex`). With any other, unless `slack` is given,
            `info["certified"]` is False: draws are then exact only for rows whose true top k was found.
        estimator: `"median"` of means, or the plain `"mean"` (unbiased, and better unless values are heavy-tailed).
        draws: overrides the number of draws per row. At most 2^24, also where eps and delta decide.
        certify: False uses the paper's cutoff, which trusts the index to have found the true top k (rows that are drawn from
            their full softmax need none).
        always_lazy: draw lazily also where that costs more. Otherwise a row whose draws together would cost more than its full
            softmax is drawn from that, which is the same law (`info["dense_rows"]`), and where that can be expected of most
            rows, or an index is not built yet and too dear for so few, it is neither built nor asked. A row for which a single
            draw would look at a quarter of its keys is drawn from its full softmax in any case.
        slack: c, your word that no key which the index leaves out has a logit (scale q.k) more than c above the smallest of
            its near keys (paper, approximate k-MIPS). The cutoff is then M - min_S z - c, draws are exact if that is true, and
            `info["certified_by"]` is `"slack"`. An index that bounds its keys by itself is believed instead (`"index"`), unless
            `certify=False`. `nearfield.index.slack` measures c.

    All columns share the draws, and a key is scored once for all draws of a row. Cost: the search, plus
    O(draws * (log k + E[m]) + m * dim) per row with E[m] <= n/k, or (n/k) e^slack, and m < n the keys that its draws look at;
    never much more than O(n * dim + draws * log n). In a window with bounds on both sides no index is asked: every row is drawn
    from the full softmax of the keys in its window, which is the same law. Draws have no gradient of their own, so the gradient
    is that of `gradients.RandomWalk`.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 256, 16).unbind(0)
        >>> est = nearfield.estimate(q, k, v, method=LazyGumbel(eps=0.3, delta=0.1), audit=59)
    """

    eps: float = 0.1
    delta: float = 0.1
    k: int | None = None
    index: Index = field(default_factory=ExactIndex)
    estimator: Literal["median", "mean"] = "median"
    draws: int | None = None
    certify: bool = True
    always_lazy: bool = False
    slack: float | None = None

    any_mask = False
    any_logits = False
    any_window = True
    gives_lse = False
    drops_pairs = True

    def __post_init__(self) -> None:
        check_fraction("eps", self.eps)
        check_fraction("delta", self.delta)
        check_positive("k", self.k, optional=True)
        check_positive("draws", self.draws, optional=True, most=MOST_DRAWS)
        check_index("index", self.index)
        check_not_negative("slack", self.slack, optional=True)
        if self.estimator not in ("median", "mean"):
            raise ValueError(f"estimator must be 'median' or 'mean', got {self.estimator!r}")

    def run(self, problem: Problem, call: Call) -> Outcome:
        layout = problem if problem.window is None else in_blocks(problem)
        rows = layout.rows
        groups, size = self._sizes(rows)
        dropout = pair_dropout(problem.dropout_p, call.seeds)
        with torch.no_grad():
            settings = self.k, groups * size, self.certify, self.slack, self.always_lazy, call.backend
            sampler = Sampler.of(rows.detach(), self.index, *settings)
            output, lse, stderr, info = self._estimate(sampler, groups, call, dropout)
        if isinstance(layout, Blocks):
            # Without the rows that fill up the last block.
            count = problem.query.shape[:3].numel()
            info |= {"keys_per_query": info["keys_per_query"] * rows.count / count, "dense_rows": count}
        outcome = Outcome(layout.by_head(output), layout.by_head(lse), None if stderr is None else layout.by_head(stderr), info)
        if call.gradient is not None or not torch.is_grad_enabled():
            return outcome
        own: Gradient = RandomWalk(index=self.index, k=self.k, slack=self.slack)
        return replace(outcome, output=layout.by_head(with_gradient(output, rows, own, call.seeds, dropout)))

    def is_async(self, problem: Problem, backend: str) -> bool:
        return False

    @torch.no_grad()
    def attend_rows(self, rows: Rows, built: BuiltIndex, k: int, call: Call) -> Tensor:
        """Output `[batch, rows, value_dim]` of rows with `k` near keys each, by an index of their keys that is there already."""
        groups, size = self._sizes(rows)
        sampler = Sampler(rows, built, k, groups * size, self.certify, self.slack, self.always_lazy, call.backend)
        return self._estimate(sampler, groups, call)[0]

    def _sizes(self, rows: Rows) -> tuple[int, int]:
        """How many groups, and how many draws in each."""
        is_mean = self.estimator == "mean"
        theorem, form = ("mean", "corrected") if is_mean else ("median-of-means", "tight")
        asked = budget(rows.count, self.eps, self.delta, d=rows.values.shape[-1], theorem=theorem, form=form)
        groups, size = asked.groups or 1, asked.group_size or 1
        if self.draws is None:
            if groups * size > MOST_DRAWS:
                raise ValueError(
                    f"eps={self.eps!r} and delta={self.delta!r} ask for {groups * size:,} draws of each row, and there can be "
                    f"{MOST_DRAWS:,}; raise eps, give draws, or use Exact()"
                )
            return groups, size
        if is_mean:
            return 1, self.draws
        groups = min(groups, self.draws)
        groups -= 1 - groups % 2  # odd, so that the median is one of the means
        return groups, self.draws // groups

    def _estimate(
        self, sampler: Sampler, groups: int, call: Call, dropout: Dropout | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, dict[str, Any]]:
        """What an `Outcome` has, in the layout of the rows."""
        rows, draws = sampler.rows, sampler.draws
        batch, count = rows.visible.shape
        size = draws // groups
        output = rows.values.new_zeros(batch, count, rows.values.shape[-1])
        lse, stderr = (rows.queries.new_zeros(batch, count) for _ in range(2))
        backend = backends.pairs_backend(call.backend, rows.keys, rows.values)
        kernel = backends.pair_kernels(call.backend, rows.keys.device)
        table, step = row_table(rows.values)
        tally, searches = Tally(sampler.built), Tally(sampler.built)
        trusts, bounded_by, evaluated, dense, expected = False, None, 0, 0, 0.0
        for block, lazy, drawn in sampler.blocks(call.seeds):
            part = lazy.rows
            trusts |= bool(lazy.needs_bound.any())
            bounded_by = lazy.bounded_by
            evaluated += int(drawn.evaluated.sum())
            dense += int(lazy.dense.sum())
            tally.add(lazy.keys_scored(drawn), part.visible.flatten())
            if lazy.scored is not None:
                searches.add(lazy.scored, part.visible.flatten())
            expected += float(lazy.expected_evaluations().sum())

            place = drawn.ids + (lazy.seen // part.visible.shape[1] * step)[:, None]
            weights = rows.values.new_full((place.numel() // size, size), 1.0 / size)
            if dropout is not None:
                row = rows.numbers(block).flatten()[lazy.seen]
                weights = weights * dropout.factors(row[:, None], drawn.ids, weights.dtype).view(weights.shape)
            means = kernel.pair_sums(weights, table, place.view(weights.shape)).view(len(lazy.seen), groups, table.shape[-1])
            output[:, block] = lazy.spread(means.median(1).values)
            lse[:, block] = lazy.spread(drawn.log_total.to(lse.dtype)).masked_fill(part.visible == 0, -torch.inf)
            if call.diagnostics and dropout is None:
                stderr[:, block] = lazy.spread(_standard_error(table, place, means))
        searches.warn(sampler.built)
        info = {
            **tally.info(),
            "k": sampler.k,
            "draws": draws,
            "groups": groups,
            "certified": not trusts or bounded_by is not None,
            "certified_by": bounded_by if trusts else "full softmax",
            "evaluated_per_draw": evaluated / max(1, rows.count * draws),
            "expected_per_draw": expected / max(1, rows.count),
            "dense_rows": dense,
            "backend": backend,
        }
        return output, lse, None if dropout is not None else stderr, info


def _standard_error(table: Tensor, place: Tensor, means: Tensor) -> Tensor:
    """Standard error of the mean of the draws, as a norm; for the median of several groups it is sqrt(pi/2) times larger."""
    square = table.square().sum(-1)[place].mean(-1)
    variance = (square - means.mean(1).square().sum(-1)).clamp(min=0) / max(1, place.shape[1] - 1)
    return variance.sqrt() * (math.sqrt(math.pi / 2) if means.shape[1] > 1 else 1.0)
