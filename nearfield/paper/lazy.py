"""Lazy Gumbel sampling: exact draws from a row's softmax without looking at all of its keys (paper, Algorithm 1).

The Gumbel-max trick draws j from softmax(z) as argmax z_j + G_j. Given the maximum M over a near set S and a bound
U_j >= z_j for every other key, only keys with G_j > M - U_j can beat M, and there are few of them. This module departs from the
printed algorithm in three ways, and stays exact:

* The bound comes from the index, per group of keys. The printed M - min_S z is right only if S is the true top k.
* M ~ Gumbel(log Z_S) and the winner within S ~ softmax(z_S) are independent, so a draw costs O(log k), not O(k).
* The set T of other keys with G_j > M - U_j holds each key independently with probability 1 - exp(-exp(U_j - M)). It is drawn as
  the distinct keys hit by Poisson(sum_j exp(U_j - M)) points that choose key j in proportion to exp(U_j). With one bound for all
  keys that is the law of a binomial number of keys drawn without replacement; here it serves any mixture of bounds at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from nearfield.chunks import row_blocks
from nearfield.kernels import backends
from nearfield.kernels.reference import exact_logits
from nearfield.knn.index.base import PADDING, BuiltIndex, Cutoffs
from nearfield.problem import Rows
from nearfield.sampling import conditional_gumbel, gumbel, segmented_categorical, uniform

POINTS_AT_A_TIME = 1 << 18
"""About how many Poisson points are drawn together."""

GIVE_UP_SHARE = 0.25
"""A row whose bounds would make each draw look at more than this share of its keys is drawn from its full softmax instead."""


@dataclass(frozen=True)
class Draws:
    """One entry per draw."""

    ids: Tensor
    """the key drawn"""
    peak: Tensor
    """the perturbed maximum; exp(-peak) is exponential with rate Z, the normaliser of the row"""
    evaluated: Tensor
    """m: how many keys outside the near set were looked at"""


@dataclass(frozen=True)
class RowDraws(Draws):
    """The same number of draws for every row that sees a key; all tensors are `[seen, draws]`."""

    place: Tensor
    """where the key drawn is among the keys of all batch entries, laid end to end"""


@dataclass(frozen=True)
class LazyRows:
    """Rows prepared for sampling, flattened: row r of batch entry b has the number b * rows + r. All logits are float64."""

    rows: Rows
    near_ids: Tensor
    """`[flat, k]`: ascending; `length` where padded"""
    near_logits: Tensor
    """`[flat, k]`"""
    cutoffs: Cutoffs
    certified: bool
    """whether the bounds are known to hold; if not, draws may miss heavy keys that the index missed"""
    dense: Tensor
    """`[flat]`: True for rows that are drawn from their full softmax"""
    backend: str = "auto"
    """the kernels that evaluate keys"""

    @cached_property
    def seen(self) -> Tensor:
        """Flat numbers of the rows that see at least one key."""
        return self.rows.visible.reshape(-1).gt(0).nonzero()[:, 0]

    def spread(self, x: Tensor) -> Tensor:
        """Values of the `seen` rows as `[batch, rows, ...]`, with zeros for the others."""
        full = x.new_zeros(self.rows.visible.numel(), *x.shape[1:])
        full[self.seen] = x
        return full.unflatten(0, self.rows.visible.shape)

    @cached_property
    def log_near(self) -> Tensor:
        """log Z_S, `[flat]`."""
        return self.near_logits.logsumexp(-1)

    @cached_property
    def log_envelope(self) -> Tensor:
        """log of the sum of exp(U_j) over the visible keys, `[flat, groups]`. Near keys are included; `_draw` discards them."""
        return (self.cutoffs.counts.double().log() + self.cutoffs.bounds.double()).flatten(0, 1)

    def expected_evaluations(self) -> Tensor:
        """E[m] = sum over the keys outside S of e^U / (e^U + Z_S), `[flat]`, known before anything is drawn."""
        log_near = self.log_near[:, None]
        bounds = self.cutoffs.bounds.double().flatten(0, 1)
        per_key = torch.sigmoid(bounds - log_near)
        total = (per_key * self.cutoffs.counts.flatten(0, 1)).sum(-1)
        smallest = self.near_logits.masked_fill(self.near_logits == -torch.inf, torch.inf).amin(-1)
        near = (self.near_ids < self.rows.length).sum(-1)
        # Near keys lie in groups that were searched, where the bound is the smallest near score.
        expected = total - near * torch.sigmoid(smallest - self.log_near)
        return expected.clamp(min=0).masked_fill(self.dense, 0.0)

    def draw_each(self, draws: int, generator: torch.Generator) -> RowDraws:
        """`draws` draws for every `seen` row."""
        result = self.draw(self.seen.repeat_interleave(draws), generator)
        ids, peak, evaluated = (x.view(-1, draws) for x in (result.ids, result.peak, result.evaluated))
        start = self.seen // self.rows.visible.shape[1] * self.rows.length
        return RowDraws(ids, peak, evaluated, ids + start[:, None])

    def draw(self, segment: Tensor, generator: torch.Generator) -> Draws:
        """One draw for every entry of `segment`, flat row numbers in any order; rows must see at least one key."""
        points = (self.log_envelope.logsumexp(-1) - self.log_near).exp().masked_fill(self.dense, 0.0)
        cost = 1 + float(points[segment].mean()) if len(segment) else 1.0
        parts = [self._draw(part, generator) for part in segment.split(max(1, int(POINTS_AT_A_TIME / cost)))]
        if not parts:
            empty = segment.new_empty(0)
            return Draws(empty, empty.double(), empty)
        draws = Draws(*(torch.cat([getattr(part, name) for part in parts]) for name in ("ids", "peak", "evaluated")))
        dense = self.dense[segment].nonzero()[:, 0]
        if len(dense):
            draws.ids[dense], draws.peak[dense] = self._draw_densely(segment[dense], generator)
        return draws

    def _draw(self, segment: Tensor, generator: torch.Generator) -> Draws:
        device, length = segment.device, self.rows.length
        log_near = self.log_near
        near_weights = (self.near_logits - log_near[:, None]).exp()
        peak = log_near[segment] + gumbel(tuple(segment.shape), generator)
        ids = self.near_ids[segment, segmented_categorical(near_weights, segment, generator)]

        log_envelope = self.log_envelope.masked_fill(self.dense[:, None], -torch.inf)
        log_total = log_envelope.logsumexp(-1)
        count = torch.poisson((log_total[segment] - peak).exp(), generator=generator).long()
        owner = torch.repeat_interleave(torch.arange(len(segment), device=device), count)
        row = segment[owner]
        share = (log_envelope - log_total.masked_fill(log_total == -torch.inf, 0.0)[:, None]).exp()
        group = segmented_categorical(share, row, generator) if share.shape[1] > 1 else torch.zeros_like(row)
        key = self._key_of(row, group, generator)

        fresh = self._is_far(row, key)
        owner, row, group, key = owner[fresh], row[fresh], group[fresh], key[fresh]
        pair = owner * length + key
        pair, order = pair.sort()
        first = torch.ones_like(pair, dtype=torch.bool)
        first[1:] = pair[1:] != pair[:-1]
        order = order[first]
        owner, row, group, key = owner[order], row[order], group[order], key[order]

        cutoff = peak[owner] - self.cutoffs.bounds.flatten(0, 1)[row, group].double()
        perturbed = self._logits(row, key) + conditional_gumbel(cutoff, generator)
        best = peak.scatter_reduce(0, owner, perturbed, "amax")
        wins = perturbed == best[owner]
        ids[owner[wins]] = key[wins]
        return Draws(ids, best, torch.bincount(owner, minlength=len(segment)))

    def _key_of(self, row: Tensor, group: Tensor, generator: torch.Generator) -> Tensor:
        """A visible key of the group, drawn uniformly."""
        batch = row // self.rows.queries.shape[1]
        count = self.cutoffs.counts.flatten(0, 1)[row, group]
        rank = (uniform(tuple(row.shape), generator) * count).ceil().long().sub(1).clamp(min=0)
        return self.cutoffs.order[batch, self.cutoffs.starts[batch, group] + rank]

    def _is_far(self, row: Tensor, key: Tensor) -> Tensor:
        stride = self.rows.length + 1
        near = (torch.arange(len(self.near_ids), device=row.device)[:, None] * stride + self.near_ids).reshape(-1)
        pair = row * stride + key
        return near[torch.searchsorted(near, pair).clamp(max=len(near) - 1)] != pair

    def _logits(self, row: Tensor, key: Tensor) -> Tensor:
        queries, keys = self.rows.queries.flatten(0, 1), self.rows.keys
        place = row // self.rows.queries.shape[1] * self.rows.length + key
        kernel = backends.pair_kernels(self.backend, keys.device)
        return kernel.pair_scores(queries[row], keys.flatten(0, 1), place[:, None])[:, 0].double()

    def _draw_densely(self, segment: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Keys and perturbed maxima drawn from the full softmax of their rows."""
        batch, count = self.rows.visible.shape
        columns = self.dense.view(batch, count).any(0).nonzero()[:, 0]
        # Blocks of rows, over all batch entries; the draws are sorted by the block of their row.
        column, order = torch.searchsorted(columns, segment % count).sort(stable=True)
        ids, peak = torch.empty_like(segment), gumbel(tuple(segment.shape), generator)
        for block in row_blocks((batch, len(columns)), 32 * max(1, self.rows.length)):
            chosen = columns[block]
            first, last = torch.searchsorted(column, torch.tensor([block.start, block.stop], device=column.device)).tolist()
            here = order[first:last]
            logits = exact_logits(self.rows.queries[:, chosen], self.rows.keys, self.rows.visible[:, chosen]).double()
            log_total = logits.logsumexp(-1)
            weights = (logits - log_total.masked_fill(log_total == -torch.inf, 0.0)[..., None]).exp().flatten(0, 1)
            row = segment[here] // count * len(chosen) + column[first:last] - block.start
            ids[here] = segmented_categorical(weights, row, generator)
            peak[here] += log_total.reshape(-1)[row]
        return ids, peak


def prepare(rows: Rows, built: BuiltIndex, k: int, certify: bool = True, backend: str = "auto") -> LazyRows:
    """Find the near keys of every row and the bounds for the others.

    Args:
        certify: ask the index for bounds that hold. If False, or if the index knows none, the smallest near score is used, as
            the paper prints it; draws are then exact only where the near set is the true top k.
    """
    logits, ids = built.search(rows.queries, k, rows.causal_offset)
    cutoffs = built.cutoffs(rows.queries, ids, rows.causal_offset) if certify else None
    certified = cutoffs is not None
    if cutoffs is None:
        cutoffs = _printed_cutoffs(rows, logits, ids)
    flat_ids, order = ids.masked_fill(ids == PADDING, rows.length).flatten(0, 1).sort(-1)
    near_logits = logits.flatten(0, 1).gather(-1, order).double()
    none_dense = torch.zeros(len(flat_ids), dtype=torch.bool, device=ids.device)
    lazy = LazyRows(rows, flat_ids, near_logits, cutoffs, certified, none_dense, backend)
    points = lazy.log_envelope.logsumexp(-1) - lazy.log_near
    dense = points > (rows.visible.double() * GIVE_UP_SHARE).clamp(min=1.0).log().flatten()
    return replace(lazy, dense=dense)


def _printed_cutoffs(rows: Rows, logits: Tensor, ids: Tensor) -> Cutoffs:
    smallest = logits.masked_fill(ids == PADDING, torch.inf).amin(-1)
    complete = (ids != PADDING).sum(-1) >= rows.visible
    return Cutoffs.one_group(smallest.masked_fill(complete, -torch.inf), rows.visible, rows.length)
