"""Lazy Gumbel sampling: exact draws from a row's softmax without looking at all of its keys (paper, Algorithm 1).

The Gumbel-max trick draws j from softmax(z) as argmax z_j + G_j. Given the maximum M over a near set S and a bound
U_j >= z_j for every other key, only keys with G_j > M - U_j can beat M, and there are few of them. This module departs from the
printed algorithm in three ways, and stays exact:

* The bound comes from the index, per group of keys. The printed M - min_S z is right only if S is the true top k. For an
  approximate S (section:lsh_attn) the bound min_S z + c is right if no other key exceeds min_S z by more than c.
* M ~ Gumbel(log Z_S) and the winner within S ~ softmax(z_S) are independent, so a draw costs O(log k), not O(k).
* The set T of other keys with G_j > M - U_j holds each key independently with probability 1 - exp(-exp(U_j - M)). It is drawn as
  the distinct keys hit by Poisson(sum_j exp(U_j - M)) points that choose key j in proportion to exp(U_j). With one bound for all
  keys that is the law of a binomial number of keys drawn without replacement; here it serves any mixture of bounds at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from nearfield.kernels import backends
from nearfield.knn.index.base import PADDING, BuiltIndex, Cutoffs, Index, row_table
from nearfield.knn.index.exact import ExactIndex
from nearfield.knn.index.own import build_index, check_built
from nearfield.paper.full import cumulative_weights
from nearfield.problem import Rows
from nearfield.sampling import conditional_gumbel, gumbel, segmented_categorical, segmented_search, uniform

POINTS_AT_A_TIME = 1 << 18
"""About how many Poisson points are drawn together."""

GIVE_UP_SHARE = 0.25
"""A row whose bounds would make each draw look at more than this share of its keys is drawn from its full softmax instead."""

POINT_COST, SEARCH_COST, SCAN_COST, BUILD_COST = 48.0, 16.0, 1.0, 512.0
"""What it costs, in keys of a row that is drawn from its full softmax: a lazy draw, and every Poisson point of it; a key that an
index scores, or scores where it scores them all; and a key that an index is built of, if it is not built yet."""

BUILD_SHARE = 1 / 8
"""An index is built if that costs at most this share of all full softmaxes: only then it shows whether its bounds are good."""

MOST_SPENT = 0.5
"""An index is searched where that, and what follows, is expected to cost at most this share of full softmaxes: the costs above
are those of one machine, and vary with the number of keys by a factor of two."""

PILOTS, PILOT_SHARE = 32, 1 / 16
"""At most so many rows of a batch entry, and that share of them, are searched to see whether it pays to search the others."""

LEAST_KEYS = 1 << 22
"""With fewer keys, those of all rows together, it takes too long to find out whether it pays to ask an index."""


@dataclass(frozen=True)
class Draws:
    """One entry per draw."""

    ids: Tensor
    """the key drawn"""
    peak: Tensor
    """the perturbed maximum; exp(-peak) is exponential with rate Z, the normaliser of the row"""
    evaluated: Tensor
    """m: how many keys outside the near set were looked at"""
    distinct: Tensor
    """`[flat]`, one entry per row: how many different ones all its draws looked at (at most, where these are very many)"""


@dataclass(frozen=True)
class RowDraws:
    """The same number of draws for every row that sees a key."""

    ids: Tensor
    """`[seen, draws]`: the keys drawn"""
    log_total: Tensor
    """`[seen]`: log Z, known for a row that is drawn from its full softmax, and estimated from the perturbed maxima of others"""
    evaluated: Tensor
    """`[seen]`: how many keys outside the near set its draws looked at, a key that several looked at counted for each"""
    distinct: Tensor
    """`[flat]`: how many different ones"""
    start: Tensor
    """`[seen]`: where the keys of its batch entry begin among those of all, laid end to end"""

    @cached_property
    def place(self) -> Tensor:
        """Where the keys drawn are among the keys of all batch entries, `[seen, draws]`."""
        return self.ids + self.start[:, None]


@dataclass(frozen=True)
class LazyRows:
    """Rows prepared for sampling, flattened: row r of batch entry b has the number b * rows + r. All logits are float64."""

    rows: Rows
    near_ids: Tensor
    """`[flat, k]`: ascending; `length` where padded"""
    near_logits: Tensor
    """`[flat, k]`"""
    cutoffs: Cutoffs
    bounded_by: Literal["index", "slack"] | None
    """who says that the bounds hold: the index, or the slack that was given; None: nobody, they trust the near set"""
    dense: Tensor
    """`[flat]`: True for rows that are drawn from their full softmax"""
    backend: str = "auto"
    """the kernels that evaluate keys"""
    scored: Tensor | None = None
    """`[flat]`: how many keys the index scored; None: it does not say"""

    @cached_property
    def seen(self) -> Tensor:
        """Flat numbers of the rows that see at least one key."""
        return self.rows.visible.reshape(-1).gt(0).nonzero()[:, 0]

    def _of_seen(self, x: Tensor) -> Tensor:
        """The entries of the `seen` rows; `x` itself where these are all."""
        return x if len(self.seen) == len(x) else x[self.seen]

    def spread(self, x: Tensor) -> Tensor:
        """Values of the `seen` rows as `[batch, rows, ...]`, with zeros for the others."""
        if len(x) == self.rows.visible.numel():
            return x.unflatten(0, self.rows.visible.shape)
        full = x.new_zeros(self.rows.visible.numel(), *x.shape[1:])
        full[self.seen] = x
        return full.unflatten(0, self.rows.visible.shape)

    @property
    def needs_bound(self) -> Tensor:
        """`[flat]`: False for rows that are drawn from their full softmax, and for those whose keys are all near."""
        near = (self.near_ids < self.rows.length).sum(-1)
        return self.dense.logical_not() & (near < self.rows.visible.flatten())

    @property
    def certified(self) -> Tensor:
        """`[flat]`: whether draws are known to follow the softmax; if not, they may miss heavy keys that the index missed."""
        return self.needs_bound.logical_not() | (self.bounded_by is not None)

    @cached_property
    def log_near(self) -> Tensor:
        """log Z_S, `[flat]`."""
        return self.near_logits.logsumexp(-1)

    @cached_property
    def log_envelope(self) -> Tensor:
        """log of the sum of exp(U_j) over the visible keys, `[flat, groups]`. Near keys are included; `_draw` discards them."""
        return (self.cutoffs.counts.double().log() + self.cutoffs.bounds.double()).flatten(0, 1)

    def expected_evaluations(self) -> Tensor:
        """E[m] = sum over the keys outside S of e^U / (e^U + Z_S), `[flat]`, known before anything is drawn.

        With the bound U = min_S z + c for all keys that is at most (n-k) e^c / (e^c + k) < (n/k) e^c, since Z_S >= k e^(min_S z).
        """
        if self.near_ids.shape[1] == 0:
            return self.log_near.new_zeros(len(self.near_ids))
        log_near = self.log_near[:, None]
        bounds = self.cutoffs.bounds.double().flatten(0, 1)
        per_key = torch.sigmoid(bounds - log_near)
        total = (per_key * self.cutoffs.counts.flatten(0, 1)).sum(-1)
        near = (self.near_ids < self.rows.length).sum(-1)
        if per_key.shape[1] == 1:
            of_near = per_key[:, 0]
        else:
            # Near keys lie in groups that were searched, where the bound is the smallest near score.
            smallest = self.near_logits.masked_fill(self.near_logits == -torch.inf, torch.inf).amin(-1)
            of_near = torch.sigmoid(smallest - self.log_near)
        expected = total - near * of_near
        return expected.clamp(min=0).masked_fill(self.dense, 0.0)

    def keys_scored(self, drawn: Draws | RowDraws) -> Tensor:
        """How many of its keys a row has scored, by search or by draws, `[flat]`."""
        visible = self.rows.visible.flatten()
        searched = visible.clamp(max=self.near_ids.shape[1]) if self.scored is None else self.scored
        return torch.minimum(visible, torch.where(self.dense, visible, searched + drawn.distinct))

    def points(self) -> Tensor:
        """How many Poisson points a draw takes about, `[flat]`; some of them are near keys, or the same key again."""
        found = (self.log_envelope.logsumexp(-1) - self.log_near).exp()
        return found.masked_fill(self.rows.visible.flatten() == 0, 0.0)

    def draw_each(self, draws: int, generator: torch.Generator) -> RowDraws:
        """`draws` draws for every `seen` row."""
        flat, device = len(self.dense), self.dense.device
        ids = torch.empty(flat, draws, dtype=torch.long, device=device)
        evaluated = torch.zeros(flat, dtype=torch.long, device=device)
        log_total = torch.zeros(flat, dtype=torch.float64, device=device)
        lazy = self.seen[self.dense[self.seen].logical_not()]
        drawn = self.draw(lazy.repeat_interleave(draws), generator)
        ids[lazy] = drawn.ids.view(-1, draws)
        evaluated[lazy] = drawn.evaluated.view(-1, draws).sum(-1)
        # exp(-peak) is exponential with rate Z, so (draws - 1) / sum exp(-peak) is an unbiased estimate of Z.
        log_total[lazy] = math.log(max(1, draws - 1)) - (-drawn.peak.view(-1, draws)).logsumexp(-1)
        # All rows have as many draws: searched row by row, which is much faster than one long ladder.
        for rows, total, normaliser in cumulative_weights(self.rows, self.dense):
            keep = self.dense[rows]
            if not bool(keep.all()):
                rows, total, normaliser = rows[keep], total[keep], normaliser[keep]
            point = uniform((len(rows), draws), generator).mul_(total[:, -1:])
            ids.index_copy_(0, rows, torch.searchsorted(total, point))
            log_total[rows] = normaliser
        start = self.seen // self.rows.visible.shape[1] * self.rows.length
        return RowDraws(self._of_seen(ids), self._of_seen(log_total), self._of_seen(evaluated), drawn.distinct, start)

    def draw(self, segment: Tensor, generator: torch.Generator) -> Draws:
        """One draw for every entry of `segment`, flat row numbers in any order; rows must see at least one key."""
        count = len(segment)
        ids, evaluated = torch.empty_like(segment), torch.zeros_like(segment)
        peak = torch.empty(count, dtype=torch.float64, device=segment.device)
        distinct = torch.zeros(len(self.dense), dtype=torch.long, device=segment.device)
        dense = self.dense[segment]
        lazy, full = dense.logical_not().nonzero()[:, 0], dense.nonzero()[:, 0]
        for part in self._parts(segment, lazy):
            ids[part], peak[part], evaluated[part] = self._draw(segment[part], generator, distinct)
        if len(full):
            ids[full], peak[full] = self._draw_densely(segment[full], generator)
        return Draws(ids, peak, evaluated, distinct)

    def _parts(self, segment: Tensor, lazy: Tensor) -> Iterator[Tensor]:
        """The draws `lazy` in parts of about `POINTS_AT_A_TIME` points. All draws of a row are in one part, if they fit."""
        if len(lazy) == 0:
            return
        row, order = segment[lazy].sort(stable=True)
        spent = (1 + self.points()[row]).ceil().long().cumsum(0)  # integers: their sums are the same on every device
        first, last = torch.searchsorted(row, row), torch.searchsorted(row, row, right=True) - 1
        fits = spent[last] - spent[first] <= POINTS_AT_A_TIME
        part = torch.where(fits, spent[first], spent) // POINTS_AT_A_TIME
        _, sizes = part.unique_consecutive(return_counts=True)
        yield from lazy[order].split(sizes.tolist())

    def _draw(self, segment: Tensor, generator: torch.Generator, distinct: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, perturbed maxima and numbers of far keys looked at; `distinct` is told how many different ones each row has."""
        device, stride = segment.device, self.rows.length + 1
        log_near = self.log_near
        near_weights = (self.near_logits - log_near[:, None]).exp()
        peak = log_near[segment] + gumbel(tuple(segment.shape), generator)
        ids = self.near_ids[segment, segmented_categorical(near_weights, segment, generator)]

        log_envelope = self.log_envelope
        log_total = log_envelope.logsumexp(-1)
        count = torch.poisson((log_total[segment] - peak).exp(), generator=generator).long()
        owner = torch.repeat_interleave(torch.arange(len(segment), device=device), count)
        row = segment[owner]
        share = (log_envelope - log_total.masked_fill(log_total == -torch.inf, 0.0)[:, None]).exp()
        group = segmented_categorical(share, row, generator) if share.shape[1] > 1 else torch.zeros_like(row)
        key = self._key_of(row, group, generator)

        fresh = self._is_far(row, key)
        owner, row, group, key = owner[fresh], row[fresh], group[fresh], key[fresh]
        # By key of a row, and by draw: a key is scored once for all draws of its row, and counts once in a draw.
        point, order = ((row * stride + key) * len(segment) + owner).sort()
        order = order[_is_first(point)]
        owner, row, group, key = owner[order], row[order], group[order], key[order]
        new = _is_first(row * stride + key)
        logits = self._logits(row[new], key[new])[new.cumsum(0) - 1]
        distinct += torch.bincount(row[new], minlength=len(distinct))

        cutoff = peak[owner] - self.cutoffs.bounds.flatten(0, 1)[row, group].double()
        perturbed = logits + conditional_gumbel(cutoff, generator)
        best = peak.scatter_reduce(0, owner, perturbed, "amax")
        wins = perturbed == best[owner]
        ids[owner[wins]] = key[wins]
        return ids, best, torch.bincount(owner, minlength=len(segment))

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
        queries, (table, step) = self.rows.queries.flatten(0, 1), row_table(self.rows.keys)
        place = row // self.rows.queries.shape[1] * step + key
        kernel = backends.pair_kernels(self.backend, table.device)
        return kernel.pair_scores(queries[row], table, place[:, None])[:, 0].double()

    def _draw_densely(self, segment: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Keys and perturbed maxima drawn from the full softmax of their rows, of which each may have another number of draws."""
        ids, peak = torch.empty_like(segment), gumbel(tuple(segment.shape), generator)
        for flat, total, log_total in cumulative_weights(self.rows, self.dense):
            place = torch.full_like(self.dense, -1, dtype=torch.long).scatter(
                0, flat, torch.arange(len(flat), device=flat.device)
            )
            here = (place[segment] >= 0).nonzero()[:, 0]
            row = place[segment[here]]
            ids[here] = segmented_search(total, row, generator)
            peak[here] += log_total[row]
        return ids, peak


def _is_first(x: Tensor) -> Tensor:
    """Where a sorted list has a number for the first time."""
    first = torch.ones_like(x, dtype=torch.bool)
    first[1:] = x[1:] != x[:-1]
    return first


def index_that_pays(
    rows: Rows,
    index: Index,
    k: int,
    draws: float,
    certify: bool = True,
    backend: str = "auto",
    slack: float | None = None,
) -> BuiltIndex | None:
    """The index of the keys of `rows`, of which each will be drawn from so many times; None if it does not pay to search, or if
    rows see other keys than the first ones.

    First by what is known before anything is built: nothing is where there is little to do, where the draws alone cost more than
    full softmaxes, and where the index would score every key, or take too long to build. Then by some rows: to search them and
    to do what is cheaper has to cost less than half of full softmaxes.
    """
    if rows.first is not None:
        return None  # an index knows rows that see the first keys alone
    total, length = int(rows.visible.sum()), rows.length
    built_for_free = isinstance(index, BuiltIndex | ExactIndex)
    building = 0.0 if built_for_free else BUILD_COST * length * len(rows.visible)
    if total < LEAST_KEYS or POINT_COST * draws * rows.visible.numel() >= total or building > BUILD_SHARE * total:
        check_built(index, rows.keys)
        return None
    built = build_index(index, rows.keys)
    if built.scans and SCAN_COST >= 1:
        return None
    count = rows.visible.shape[1]
    most = max(1, min(PILOTS, int(count * PILOT_SHARE)))
    some = torch.arange(0, count, -(-count // most), device=rows.visible.device)
    chosen = replace(rows, queries=rows.queries[:, some], visible=rows.visible[:, some])
    pilots = _search(chosen, built, k, certify, backend, slack)
    dense = pilots.rows.visible.double().flatten()
    search = SCAN_COST * dense if built.scans or pilots.scored is None else SEARCH_COST * pilots.scored
    spent = search + torch.minimum(_lazy_costs(pilots, draws), dense)
    return built if float(spent.sum()) < MOST_SPENT * float(dense.sum()) else None


def prepare(
    rows: Rows,
    built: BuiltIndex | None,
    k: int,
    certify: bool = True,
    backend: str = "auto",
    draws: float | Tensor = 0,
    slack: float | None = None,
) -> LazyRows:
    """Find the near keys of every row and the bounds for the others.

    Args:
        built: None: all rows are drawn from their full softmax.
        certify: ask the index for bounds that hold. If False, or if the index knows none, the bound is the smallest near score,
            as the paper prints it, plus `slack`.
        draws: how many draws there will be, of each row or `[flat]`. A row whose draws would cost more lazily than from its full
            softmax is `dense`; the law is the same. 0: rows are dense only if a single draw would look at more than
            `GIVE_UP_SHARE` of their keys.
        slack: by how much a key that the index left out may exceed the smallest near score. None: nobody knows; draws are then
            exact only where the near set is the true top k.
    """
    if built is None:
        return _unsearched(rows, backend)
    lazy = _search(rows, built, k, certify, backend, slack)
    return replace(lazy, dense=_lazy_costs(lazy, draws) > lazy.rows.visible.flatten().clamp(min=1))


def _search(rows: Rows, built: BuiltIndex, k: int, certify: bool, backend: str, slack: float | None) -> LazyRows:
    """Rows that are all drawn lazily."""
    logits, ids, scored = built.find(rows.queries, k, rows.causal_offset)
    cutoffs = built.cutoffs(rows.queries, ids, rows.causal_offset) if certify else None
    bounded_by: Literal["index", "slack"] | None = "index"
    if cutoffs is None:
        bounded_by = None if slack is None else "slack"
        cutoffs = _printed_cutoffs(rows, logits, ids, slack or 0.0)
    flat_ids, order = ids.masked_fill(ids == PADDING, rows.length).flatten(0, 1).sort(-1)
    near_logits = logits.flatten(0, 1).gather(-1, order).double()
    none_dense = torch.zeros(len(flat_ids), dtype=torch.bool, device=ids.device)
    counted = None if scored is None else scored.flatten()
    return LazyRows(rows, flat_ids, near_logits, cutoffs, bounded_by, none_dense, backend, counted)


def _unsearched(rows: Rows, backend: str) -> LazyRows:
    """Rows that are all drawn from their full softmax."""
    flat, device = rows.visible.numel(), rows.visible.device
    none = torch.zeros(flat, 0, dtype=torch.long, device=device)
    cutoffs = Cutoffs.one_group(torch.full_like(rows.visible, -torch.inf, dtype=torch.float64), rows.visible, rows.length)
    dense = torch.ones(flat, dtype=torch.bool, device=device)
    return LazyRows(rows, none, none.double(), cutoffs, None, dense, backend, rows.visible.flatten())


def _lazy_costs(lazy: LazyRows, draws: float | Tensor) -> Tensor:
    """What so many draws cost once the rows are searched, `[flat]`, in keys of a full softmax."""
    per_point = torch.as_tensor(POINT_COST * draws, dtype=torch.float64, device=lazy.dense.device)
    return per_point + lazy.points() * per_point.clamp(min=1 / GIVE_UP_SHARE)


def _printed_cutoffs(rows: Rows, logits: Tensor, ids: Tensor, slack: float) -> Cutoffs:
    """min_S z + slack for every row that leaves a key out."""
    bound = logits.masked_fill(ids == PADDING, torch.inf).amin(-1) + slack
    complete = (ids != PADDING).sum(-1) >= rows.visible
    return Cutoffs.one_group(bound.masked_fill(complete, -torch.inf), rows.visible, rows.length)
