"""The cells of all closed segments, side by side, and the attention of some rows to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.cache.buffers import Buffer
from nearfield.cache.segments import ClosedSegment
from nearfield.kernels.cells_far import best_of, squares
from nearfield.kernels.cells_plan import MOST_SPREAD, ROUTE_SPREADS
from nearfield.kernels.tiles import products

MOMENTS = ("start", "size", "void", "centroid", "variance", "value")


class CellTables:
    """Moments of all cells of `[batch, heads]`, closed segment by closed segment, in the order in which they were closed."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        """Empty, for keys and values like these `[batch, heads, any, dim]`."""
        compute = torch.promote_types(key.dtype, torch.float32)
        # On a GPU a step is as fast as its cells are read.
        kept = torch.bfloat16 if key.is_cuda and key.dtype.itemsize == 2 else compute
        self.start = Buffer(key[..., 0], torch.int32)
        self.size, self.void = Buffer(key[..., 0], compute), Buffer(key[..., 0], compute)
        self.centroid, self.variance = Buffer(key, kept), Buffer(key, kept)
        self.value = Buffer(value, kept)
        batch, heads = key.shape[:2]
        self.cross = key.new_zeros((batch, heads, value.shape[3], key.shape[3]), dtype=compute)
        """products of the deviations of values and keys from the means of their cells, summed"""
        self.pooled = key.new_zeros((batch, heads), dtype=compute)
        """how many keys are in cells"""

    def __len__(self) -> int:
        return self.size.length

    def append(self, closed: ClosedSegment, first: int) -> None:
        """The cells of one more segment, which begins at the place `first`."""
        shape = self.cross.shape[:2]
        for name in MOMENTS:
            more = getattr(closed, name)
            getattr(self, name).append((more + first if name == "start" else more).unflatten(0, shape))
        self.cross += closed.cross.unflatten(0, shape)
        self.pooled += closed.size.sum(1).unflatten(0, shape)

    def drop(self, cells: int, cross: Tensor) -> None:
        """Forget the last ones; `cross` is what it is without them."""
        kept = len(self) - cells
        self.pooled -= self.size.filled[:, :, kept:].sum(2)
        self.cross = cross
        for name in MOMENTS:
            getattr(self, name).length = kept

    def select(self, entries: Tensor) -> None:
        for name in MOMENTS:
            getattr(self, name).select(entries)
        self.cross, self.pooled = self.cross.index_select(0, entries), self.pooled.index_select(0, entries)

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in MOMENTS) + self.cross.nbytes


@dataclass(frozen=True)
class Routed:
    """What some rows open, and what they see of all other cells."""

    opened: Tensor
    """`[heads * rows, probes]`: cells, the same for all queries of a group"""
    logits: Tensor
    """`[heads, group * rows, cells]`: of the masses of cells; -inf for those that are opened, and for empty ones"""


def route(tables: CellTables, queries: Tensor, rows: int, probes: int, near: Tensor) -> Routed:
    """Scores all cells for queries (times scale) `[heads, group * rows, dim]`, and opens the best ones for each group.

    A group shares keys, and what one of its queries opens all of them read. What counts is how large a share of its weights a
    query may have in a cell: its score, less the log-normaliser of all that it sees, of which `near` `[heads, group * rows]` is
    that of keys it reads anyway, the first and the latest ones. The best share in the group decides.
    """
    heads, every, _ = queries.shape
    centroid, variance = (x.heads.to(queries.dtype) for x in (tables.centroid, tables.variance))
    first = products(queries, centroid, tables.void.heads[:, None])
    spread = products(squares(queries), variance).clamp_(max=MOST_SPREAD)
    scores = torch.add(first, spread.sqrt(), alpha=ROUTE_SPREADS)
    # log of n_c e^{q.mu_c} (1 + u_c / 4)^2
    logits = first.add_(spread.mul_(0.25).log1p_(), alpha=2.0).add_(tables.size.heads.log()[:, None])
    if every > rows:
        scores -= torch.logaddexp(logits.logsumexp(2), near)[..., None]
        scores = scores.view(heads, -1, rows, scores.shape[2]).amax(1)
    _, opened = best_of(scores.view(heads * rows, -1), probes)
    taken = opened.view(heads, 1, rows, -1).expand(-1, every // rows, -1, -1)
    return Routed(opened, logits.scatter_(2, taken.reshape(heads, every, -1), -torch.inf))


def sum_up(tables: CellTables, queries: Tensor, weight: Tensor) -> Tensor:
    """The values of closed cells with these weights `[heads, rows, cells]`: `[heads, rows, value_dim]`."""
    covariance = tables.cross.flatten(0, 1) / tables.pooled.clamp(min=1).view(-1, 1, 1)
    tilt = products(queries, covariance).mul_(weight.sum(2, keepdim=True))
    return tilt.baddbmm_(weight, tables.value.heads.to(queries.dtype))


def members(tables: CellTables, opened: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """The places of all keys of the opened cells `[heads * rows, most]`, and where a row has fewer of them than that."""
    by_head = opened.view(heads, -1)
    size, start = (x.heads.gather(1, by_head).view_as(opened).long() for x in (tables.size, tables.start))
    stop = size.cumsum(1)
    total = stop[:, -1:]
    most = int(total.max()) if total.numel() else 0
    slot = torch.arange(most, device=opened.device).expand(len(opened), -1).contiguous()
    which = torch.searchsorted(stop, slot, right=True).clamp_(max=max(0, opened.shape[1] - 1))
    missing = slot >= total
    place = start.sub_(stop).add_(size).gather(1, which).add_(slot)
    return place.masked_fill_(missing, 0), missing
