"""Which keys of closed segments heads look at most: for saying where in a text an answer comes from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from nearfield.cells.cache.state import CacheState
from nearfield.checks import MOST, check_positive


class Watch(Protocol):
    """What a store can have as `watch`."""

    def add(self, state: CacheState, place: Tensor, weight: Tensor) -> None:
        """Weights `[heads * rows, group, keys]` of keys in opened cells at `place` `[heads * rows, keys]`, heads of all batch
        entries. Rows with fewer keys than others have place 0, and weight 0, after their last."""


@dataclass
class HeavyKeys:
    """How often a query gave a key in a cell that it opened at least `share` of its weights, by the position of the key.

    Many heads open some cells at every step because they must open some. What a head reads with a fifth of its weights, it has
    looked for. The first keys and the latest ones, which all queries read, are in no cell and never counted.

    Attributes:
        length: positions that are counted, from 0 on; keys that come later are not.
        share: of the weights of one query head.
        counts: `[length]` on the CPU, over all layers and heads whose stores have this object as `watch`.
    """

    length: int
    share: float = 0.2
    counts: Tensor = field(init=False)

    def __post_init__(self) -> None:
        check_positive("length", self.length, least=0, most=MOST)
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")
        self.counts = torch.zeros(self.length, dtype=torch.int64)

    def add(self, state: CacheState, place: Tensor, weight: Tensor) -> None:
        """Count weights `[heads * rows, group, keys]` of keys at `place` `[heads * rows, keys]`, heads of all batch entries."""
        times = (weight >= self.share).sum(1)
        row, slot = times.nonzero(as_tuple=True)
        position = _positions(state, place[row, slot], row // (len(place) // len(state.order.flat)))
        is_counted = position < self.length
        self.counts.index_add_(0, position[is_counted].cpu(), times[row, slot][is_counted].cpu())


@dataclass
class OpenedKeys:
    """How often each head of one layer opened some keys, and how often it gave them at least `share` of its weights.

    For a batch of one. Query heads that share keys open cells together, so their counts in `opened` are the same.

    Attributes:
        positions: which keys, `[keys]`.
        share: of the weights of one query head, over all of these keys.
        rows: queries that were counted.
        opened: `[query heads]` on the CPU: of so many queries a head opened a cell with one of these keys.
        looked: `[query heads]` on the CPU: and gave them together at least `share` of its weights.
    """

    positions: Tensor
    share: float = 0.2
    rows: int = 0
    opened: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    looked: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    def add(self, state: CacheState, place: Tensor, weight: Tensor) -> None:
        heads = len(state.order.flat)
        rows, group = len(place) // heads, weight.shape[1]
        head = torch.arange(heads, device=place.device).repeat_interleave(rows)[:, None].expand_as(place)
        is_wanted = torch.isin(_positions(state, place, head), self.positions.to(place.device))
        # Place 0 may stand for no key at all.
        is_there = is_wanted & ((place != 0) | (weight > 0).any(1))
        opened = is_there.any(1)[:, None].expand(-1, group)
        looked = (weight * is_wanted[:, None]).sum(2) >= self.share
        # Query heads that share keys follow one another.
        found = [x.view(heads, rows, group).sum(1).flatten().cpu() for x in (opened, looked)]
        if not self.rows:
            self.opened, self.looked = torch.zeros_like(found[0]), torch.zeros_like(found[1])
        self.rows, self.opened, self.looked = self.rows + rows, self.opened + found[0], self.looked + found[1]


@dataclass
class ReadKeys:
    """How many keys rows read in cells that they opened, over all stores that have this object as `watch`.

    Attributes:
        rows: how often a head of keys was asked, by its group of query heads.
        keys: that were read for it, one by one; the first keys and those in no cell yet are not counted.
    """

    rows: int = 0
    keys: int = 0

    def add(self, state: CacheState, place: Tensor, weight: Tensor) -> None:
        # Place 0 may stand for no key at all.
        self.rows += len(place)
        self.keys += int(((place != 0) | (weight > 0).any(1)).sum())

    @property
    def mean(self) -> float:
        return self.keys / max(1, self.rows)


def _positions(state: CacheState, place: Tensor, head: Tensor) -> Tensor:
    """In the order in which keys came: the positions of keys of these heads that are stored at `place`, in closed segments."""
    bounds = torch.tensor(state.bounds, device=place.device)
    return state.order.flat[head, place] + bounds[torch.searchsorted(bounds, place, right=True) - 1]
