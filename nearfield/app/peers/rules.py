"""Which keys a query reads, by the rules that others have published, and its attention to those alone.

Every rule has the same budget: how many keys a query head may read, the first and the latest ones among them. Each query head
chooses for itself, also where several share their keys. docs/ruler.md says where a rule is not as its authors have it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nearfield._compat import float32_products

LLOYD_LOGITS = 1 << 27
"""So many products of points and centroids are made at a time."""

Notes = dict[str, Tensor]
"""What a rule has noted about a prompt when it was read: see `Rule.notes`."""


@dataclass(frozen=True)
class Rows:
    """Queries `[batch, heads, rows, dim]` at the end of keys and values `[batch, kv_heads, length, dim]`.

    `counts` `[batch, length]` is False for padding; None: there is none. `layer` is for rules that draw. `at` `[rows, 1]`: the
    places of the rows' own keys, where these are not the last ones; those after them are not there yet. `logits` is all of them,
    which no rule would compute.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    scale: float
    counts: Tensor | None = None
    layer: int = 0
    at: Tensor | None = None

    @property
    def length(self) -> int:
        return self.key.shape[2]

    @cached_property
    def group(self) -> int:
        return self.query.shape[1] // self.key.shape[1]

    @cached_property
    def position(self) -> Tensor:
        """`[rows, 1]`: that of the key of each row."""
        if self.at is not None:
            return self.at
        rows = self.query.shape[2]
        return torch.arange(self.length - rows, self.length, device=self.query.device)[:, None]

    @cached_property
    def visible(self) -> Tensor:
        """`[batch or 1, 1, rows, length]`"""
        seen = (torch.arange(self.length, device=self.query.device) <= self.position)[None, None]
        return seen if self.counts is None else seen & self.counts[:, None, None]

    def times(self, table: Tensor) -> Tensor:
        """Products of the queries with a table `[batch, kv_heads, any, dim]`: `[batch, heads, rows, any]`, float32."""
        query = self.query.unflatten(1, (-1, self.group)).flatten(2, 3)
        return _in_float32(query, table.mT).unflatten(2, (self.group, -1)).flatten(1, 2)

    @cached_property
    def missing(self) -> Tensor:
        """`[batch or 1, 1]`: how much padding there is before the first key."""
        if self.counts is None:
            return torch.zeros(1, 1, dtype=torch.int64, device=self.query.device)
        return (~self.counts).sum(1, keepdim=True)

    @cached_property
    def logits(self) -> Tensor:
        """`[batch, heads, rows, length]`, float32; -inf where a row sees no key."""
        found = self.times(self.key) * self.scale
        return found.masked_fill(~self.visible, -torch.inf)

    def per_head(self, x: Tensor) -> Tensor:
        """`[batch, kv_heads, ...]` for every query head."""
        return x if self.group == 1 else x.repeat_interleave(self.group, 1)


class Choice(NamedTuple):
    """What rows read."""

    read: Tensor
    """`[batch, heads, rows, length]`: whether a key is read"""
    log_weight: Tensor | None = None
    """of the same shape: how often a key counts, as a logarithm; None: once"""
    far_logits: Tensor | None = None
    """`[batch, heads, rows, any]`: what stands for keys that are not read"""
    far_values: Tensor | None = None
    """`[batch, kv_heads, any, dim]`"""


@dataclass(frozen=True)
class Rule:
    """Choose by `choose`. `reads_prompts`: whether rows of a prompt may choose by it, too, and not only those of an answer."""

    name: str
    reads_prompts = True
    notes_need_budget = False
    """whether notes differ from budget to budget"""

    def notes(self, query: Tensor, key: Tensor, value: Tensor, scale: float, budget: int) -> Notes:
        """What it remembers of a prompt: the last queries `[1, heads, rows, dim]`, and all keys and values.

        Tensors whose names begin with `key` have a number for each key in their last axis, the others a row for each cluster in
        their third.
        """
        return {}

    def choose(self, rows: Rows, budget: int, notes: Notes) -> Choice:
        raise NotImplementedError

    def attend(self, rows: Rows, budget: int, notes: Notes) -> Tensor:
        """`[batch, heads, rows, dim]`: softmax over what rows read."""
        if rows.length <= budget:
            return exact(rows)
        choice = self.choose(rows, budget, notes)
        logits = rows.logits.masked_fill(~choice.read, -torch.inf)
        if choice.log_weight is not None:
            logits = logits + choice.log_weight
        return _weighted(rows, logits, choice)


def exact(rows: Rows) -> Tensor:
    """`[batch, heads, rows, dim]`: softmax over all keys that rows see."""
    return _weighted(rows, rows.logits, None)


def _in_float32(a: Tensor, b: Tensor) -> Tensor:
    """The product of `[batch, heads, ...]` and `[batch, heads, ...]` in float32. Half precision need not be copied for it on a
    GPU."""
    if a.is_cuda and a.dtype == b.dtype and a.dtype in (torch.float16, torch.bfloat16) and float32_products is not None:
        return float32_products(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])
    return a.float() @ b.float()


def _weighted(rows: Rows, logits: Tensor, choice: Choice | None) -> Tensor:
    near = logits.shape[-1]
    if choice is not None and choice.far_logits is not None:
        logits = torch.cat([logits, choice.far_logits], -1)
    # A row without keys (padding) has zeros, as in `Exact`.
    weights = torch.softmax(logits, -1).nan_to_num(0.0)
    found = _sums(weights[..., :near], rows.value, rows.group)
    if choice is not None and choice.far_values is not None:
        found = found + _sums(weights[..., near:], choice.far_values, rows.group)
    return found.to(rows.value.dtype)


def _sums(weights: Tensor, values: Tensor, group: int) -> Tensor:
    grouped = weights.unflatten(1, (-1, group)).flatten(2, 3)
    if values.is_cuda:  # as in SDPA: weights are rounded to the dtype of values, and sums are not
        grouped = grouped.to(values.dtype)
    return _in_float32(grouped, values).unflatten(2, (group, -1)).flatten(1, 2)


def _first(rows: Rows, count: int) -> Tensor:
    """`[batch or 1, 1, 1, length]`: the first keys, behind padding."""
    if rows.counts is None:
        return (torch.arange(rows.length, device=rows.key.device) < count)[None, None, None]
    return (rows.counts & (rows.counts.cumsum(1) <= count))[:, None, None]


def _latest(rows: Rows, count: int) -> Tensor:
    """`[1, 1, rows, length]`: the latest keys of each row, its own among them."""
    place = torch.arange(rows.length, device=rows.key.device)
    return ((place > rows.position - count) & (place <= rows.position))[None, None]


def _best(scores: Tensor, count: int) -> Tensor:
    """Whether a score is among the `count` best of its row; those of -inf never are."""
    found = torch.zeros_like(scores, dtype=torch.bool)
    if count < 1:
        return found
    best = scores.topk(min(count, scores.shape[-1]), -1, sorted=False).indices
    return found.scatter_(-1, best, True) & (scores > -torch.inf)


@dataclass(frozen=True)
class Heaviest(Rule):
    """Exact top-k: the keys with the largest logits. No search finds better ones."""

    def choose(self, rows: Rows, budget: int, notes: Notes) -> Choice:
        return Choice(_best(rows.logits, budget))


@dataclass(frozen=True)
class Streaming(Rule):
    """StreamingLLM: the first keys and the latest ones (arXiv:2309.17453)."""

    sinks: int = 4

    def choose(self, rows: Rows, budget: int, notes: Notes) -> Choice:
        read = (_first(rows, self.sinks) | _latest(rows, budget - self.sinks)) & rows.visible
        return Choice(read.expand_as(rows.logits))


@dataclass(frozen=True)
class Blocks(Rule):
    """Blocks of consecutive keys, the best by some score of a block. What comes after the last whole block of a prompt, above all
    the answer, is always read; within a prompt, a row's own block is."""

    size: int = 64

    def tables(self, blocks: Tensor) -> Notes:
        """What scores take, `[batch, kv_heads, blocks, dim]` each, of keys `[batch, kv_heads, blocks, size, dim]`."""
        raise NotImplementedError

    def scores(self, rows: Rows, tables: Notes) -> Tensor:
        """`[batch, heads, rows, blocks]`"""
        raise NotImplementedError

    def notes(self, query: Tensor, key: Tensor, value: Tensor, scale: float, budget: int) -> Notes:
        whole = key.shape[2] // self.size
        count = torch.full((1, 1, 1, 1), whole, device=key.device)
        return {"whole": count, **self.tables(key[:, :, : whole * self.size].unflatten(2, (whole, self.size)))}

    def choose(self, rows: Rows, budget: int, notes: Notes) -> Choice:
        # Blocks are counted from the first key of each entry, wherever its padding ends.
        place = torch.arange(rows.length, device=rows.key.device) - rows.missing[:, None, None]
        if not notes:  # of a prompt, in which each row has its own blocks; it has no padding
            notes = self.notes(rows.query, rows.key, rows.value, rows.scale, budget)
            own = rows.position[None, None] // self.size
        else:
            own = notes["whole"]
        scores = self.scores(rows, notes)
        scores = scores.masked_fill(torch.arange(scores.shape[3], device=place.device) >= own, -torch.inf)
        chosen = _best(scores, budget // self.size - 1)
        block = (place // self.size).clamp(0, max(0, scores.shape[3] - 1)).expand(*scores.shape[:3], -1)
        inside = chosen.gather(3, block) if scores.shape[3] else torch.zeros_like(block, dtype=torch.bool)
        return Choice((inside | (place >= own * self.size)) & rows.visible)


@dataclass(frozen=True)
class Quest(Blocks):
    """Quest: pages of 16 keys, by a bound on their products from the least and the largest entry of each column
    (arXiv:2406.10774)."""

    size: int = 16

    def tables(self, blocks: Tensor) -> Notes:
        return {"least": blocks.amin(3), "most": blocks.amax(3)}

    def scores(self, rows: Rows, tables: Notes) -> Tensor:
        positive = replace(rows, query=rows.query.clamp(min=0))
        negative = replace(rows, query=rows.query.clamp(max=0))
        return positive.times(tables["most"]) + negative.times(tables["least"])


@dataclass(frozen=True)
class MoBA(Blocks):
    """MoBA: blocks by the product with their mean key (arXiv:2502.13189). Its blocks are larger; so few would fit no budget."""

    def tables(self, blocks: Tensor) -> Notes:
        return {"mean": blocks.float().mean(3)}

    def scores(self, rows: Rows, tables: Notes) -> Tensor:
        return rows.times(tables["mean"])


@dataclass(frozen=True)
class SnapKV(Rule):
    """SnapKV: keys that the last queries of a prompt gave most weight, smoothed over neighbours, are kept; all others are gone
    (arXiv:2404.14469). Tokens of the answer are kept."""

    observed: int = 32
    kernel: int = 7
    reads_prompts = False
    notes_need_budget = True

    def notes(self, query: Tensor, key: Tensor, value: Tensor, scale: float, budget: int) -> Notes:
        rows = Rows(query[:, :, -self.observed :], key, value, scale)
        seen = rows.query.shape[2]
        given = torch.softmax(rows.logits, -1).sum(2)[..., : rows.length - seen]
        smooth = F.avg_pool1d(given, self.kernel, 1, self.kernel // 2) if given.shape[2] else given
        kept = F.pad(_best(smooth, budget - seen), (0, seen), value=True)
        return {"key_kept": kept}

    def choose(self, rows: Rows, budget: int, notes: Notes) -> Choice:
        kept = notes["key_kept"]
        return Choice(F.pad(kept, (0, rows.length - kept.shape[2]), value=True)[:, :, None] & rows.visible)


def _clustered(points: Tensor, clusters: int, iterations: int = 5) -> Tensor:
    """The cluster of each point `[batch, points, dim]`, by Lloyd's k-means from points at regular distances."""
    batch, count, dim = points.shape
    if not count:
        return torch.zeros(batch, 0, dtype=torch.int64, device=points.device)
    start = torch.arange(clusters, device=points.device) * count // max(1, clusters)
    centroids = points[:, start].float()
    step = max(1, LLOYD_LOGITS // (batch * clusters))
    for number in range(iterations + 1):
        # Of the same rounded numbers: what all points have in common would else be judged by their rounding.
        wanted = centroids.to(points.dtype)
        half = wanted.float().square().sum(-1) / 2
        parts = [
            (_in_float32(part[:, None], wanted.mT[:, None])[:, 0] - half[:, None]).argmax(-1) for part in points.split(step, 1)
        ]
        cell = torch.cat(parts, 1)
        if number < iterations:
            place = cell[..., None].expand(-1, -1, dim)
            total = torch.zeros_like(centroids).scatter_add_(1, place, points.float())
            size = torch.zeros(batch, clusters, device=points.device).scatter_add_(
                1, cell, torch.ones_like(cell, dtype=torch.float32)
            )
            centroids = torch.where(size[..., None] > 0, total / size[..., None].clamp(min=1), centroids)
    return cell


@dataclass(frozen=True)
class RetroInfer(Rule):
    """RetroInfer: clusters of about 16 keys, the best by their centroids are read; each of the others stands for its keys, with
    its size, its centroid and its mean value, and no second order (arXiv:2505.02922). All of the others do, not some of them."""

    size: int = 16
    sinks: int = 4
    window: int = 64
    reads_prompts = False

    def notes(self, query: Tensor, key: Tensor, value: Tensor, scale: float, budget: int) -> Notes:
        first = min(self.sinks, key.shape[2])
        stop = max(first, key.shape[2] - self.window)
        own = key[:, :, first:stop]
        clusters = max(1, own.shape[2] // self.size)
        cell = _clustered(own.flatten(0, 1), clusters).unflatten(0, own.shape[:2])
        size = torch.zeros(*own.shape[:2], clusters, device=key.device).scatter_add_(2, cell, torch.ones_like(cell).float())
        tables = {}
        for name, x in (("centroid", own), ("mean", value[:, :, first:stop])):
            place = cell[..., None].expand(-1, -1, -1, x.shape[3])
            total = torch.zeros(*size.shape, x.shape[3], device=key.device).scatter_add_(2, place, x.float())
            tables[name] = total / size[..., None].clamp(min=1)
        of_key = F.pad(cell, (first, key.shape[2] - stop), value=-1)
        return {"key_cell": of_key, "size": size[..., None], **tables}

    def choose(self, rows: Rows, budget: int, notes: Notes) -> Choice:
        size = notes["size"][..., 0]
        scores = rows.times(notes["centroid"]) * rows.scale
        scores = scores.masked_fill(rows.per_head(size == 0)[:, :, None], -torch.inf)
        # The best clusters, as long as their keys fit.
        order = scores.argsort(-1, descending=True)
        read = rows.per_head(size)[:, :, None].expand_as(scores).gather(3, order).cumsum(3)
        fits = read <= budget - self.sinks - self.window
        opened = torch.zeros_like(fits).scatter_(3, order, fits) & (scores > -torch.inf)
        cell = F.pad(notes["key_cell"], (0, rows.length - notes["key_cell"].shape[2]), value=-1)
        place = rows.per_head(cell)[:, :, None].expand(-1, -1, opened.shape[2], -1)
        inside = opened.gather(3, place.clamp(min=0)) & (place >= 0)
        far = (scores + rows.per_head(size).clamp(min=1).log()[:, :, None]).masked_fill(opened, -torch.inf)
        return Choice((inside | (place < 0)) & rows.visible, None, far, notes["mean"])


def _dice(rows: Rows, seed: int) -> Tensor:
    """Numbers in [0, 1) `[batch, heads, rows, length]`: for a layer, a head, a row and a key always the same, also in a batch.

    SplitMix64's mixing of a count; multiples of large odd numbers keep the counts of different rows apart.
    """
    device, first = rows.query.device, rows.missing[:, None, None]
    heads = torch.arange(rows.query.shape[1], device=device)[:, None, None]
    key, row = torch.arange(rows.length, device=device) - first, rows.position[None, None] - first
    count = (seed * 7919 + rows.layer) * 1181783497276652981 % (1 << 63)
    mixed = key * -7046029254386353131 + row * 4354685564936845355 + heads * 2685821657736338717 + count
    for shift, factor in ((30, -4658895280553007687), (27, -7723592293110705685)):
        mixed = (mixed ^ ((mixed >> shift) & ((1 << (64 - shift)) - 1))) * factor
    mixed = mixed ^ ((mixed >> 31) & ((1 << 33) - 1))
    return ((mixed >> 40) & 0xFFFFFF).float() / 0x1000000


@dataclass(frozen=True)
class VAttention(Rule):
    """vAttention: the first and the latest keys, the heaviest ones, and a random sample of all others that counts for them
    (arXiv:2510.05688). Half of the budget is the sample."""

    sinks: int = 16
    window: int = 64
    seed: int = 0

    def choose(self, rows: Rows, budget: int, notes: Notes) -> Choice:
        near = (_first(rows, self.sinks) | _latest(rows, self.window)) & rows.visible
        rest = rows.logits.masked_fill(near, -torch.inf)
        heavy = _best(rest, budget - budget // 2 - self.sinks - self.window)
        left = rows.visible & ~near & ~heavy
        dice = _dice(rows, self.seed).masked_fill(~left, -torch.inf)
        drawn = _best(dice, budget // 2)
        times = left.sum(-1, keepdim=True) / drawn.sum(-1, keepdim=True).clamp(min=1)
        log_weight = torch.where(drawn, times.clamp(min=1).log(), 0.0)
        return Choice(near | heavy | drawn, log_weight)


RULES: dict[str, Rule] = {
    rule.name: rule
    for rule in (
        Heaviest("topk"),
        Quest("quest"),
        MoBA("moba"),
        SnapKV("snapkv"),
        Streaming("streaming"),
        RetroInfer("retroinfer"),
        VAttention("vattention"),
    )
}


def budget_of(share: float, tokens: int) -> int:
    """How many keys a query may read of a prompt: a share of it, at least 192, so that every rule has room for what it always
    reads."""
    return max(192, math.ceil(share * tokens))
