"""Which keys of closed segments heads look at most: for saying where in a text an answer comes from."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nearfield.cells.cache.state import CacheState


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
        if not 0.0 < self.share <= 1.0:
            raise ValueError(f"share must be above 0 and at most 1, got {self.share}")
        self.counts = torch.zeros(self.length, dtype=torch.int64)

    def add(self, state: CacheState, place: Tensor, weight: Tensor) -> None:
        """Count weights `[heads * rows, group, keys]` of keys at `place` `[heads * rows, keys]`, heads of all batch entries."""
        times = (weight >= self.share).sum(1)
        row, slot = times.nonzero(as_tuple=True)
        order = state.order.flat
        found, head = place[row, slot], row // (len(place) // len(order))
        bounds = torch.tensor(state.bounds, device=found.device)
        position = order[head, found] + bounds[torch.searchsorted(bounds, found, right=True) - 1]
        is_counted = position < self.length
        self.counts.index_add_(0, position[is_counted].cpu(), times[row, slot][is_counted].cpu())
