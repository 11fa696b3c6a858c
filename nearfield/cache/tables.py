"""The cells of all closed segments, side by side, and the attention of some rows to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.cache.buffers import Buffer
from nearfield.cache.segments import ClosedSegment
from nearfield.kernels.cells_far import choose, masses, squares
from nearfield.kernels.cells_plan import MOST_SPREAD
from nearfield.kernels.tiles import products

MOMENTS = ("start", "size", "void", "centroid", "variance", "value")


class CellTables:
    """Moments of all cells of `[batch, heads]`, closed segment by closed segment, in the order in which they were closed."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        """Empty, for keys and values like these `[batch, heads, any, dim]`."""
        compute = torch.promote_types(key.dtype, torch.float32)
        self.start = Buffer(key[..., 0], torch.int32)
        self.size, self.void = Buffer(key[..., 0], compute), Buffer(key[..., 0], compute)
        self.centroid, self.variance = Buffer(key, compute), Buffer(key, compute)
        self.value = Buffer(value, compute)
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
        """Forget the last ones, which had added `cross` `[batch * heads, value_dim, dim]`."""
        kept = len(self) - cells
        self.pooled -= self.size.filled[:, :, kept:].sum(2)
        self.cross = self.cross - cross.view_as(self.cross) if kept else torch.zeros_like(self.cross)
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
    """What some rows `[heads * rows]` open, and their sums over all cells that they leave closed."""

    opened: Tensor
    """`[heads * rows, probes]`: cells; -1: nothing"""
    numerator: Tensor
    """`[heads * rows, value_dim]`: e^-top sum of mass times value"""
    mass: Tensor
    top: Tensor


def route(tables: CellTables, queries: Tensor, probes: int) -> Routed:
    """Scores all cells for queries (times scale) `[heads, rows, dim]`, opens the best ones and sums up the others."""
    heads, rows, _ = queries.shape
    first = products(queries, tables.centroid.heads, tables.void.heads[:, None]).flatten(0, 1)
    spread = products(squares(queries), tables.variance.heads).flatten(0, 1).clamp_(max=MOST_SPREAD)
    opened = choose(first, spread, probes)
    weight, top = masses(first, spread, opened, tables.size.heads.repeat_interleave(rows, 0))
    weight = weight.unflatten(0, (heads, rows))
    mass = weight.sum(2, keepdim=True)
    covariance = tables.cross.flatten(0, 1) / tables.pooled.clamp(min=1).view(-1, 1, 1)
    numerator = torch.baddbmm(mass * products(queries, covariance), weight, tables.value.heads)
    return Routed(opened, numerator.flatten(0, 1), mass.view(-1), top)


def members(tables: CellTables, opened: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The places of all keys of the opened cells `[heads * rows, most]`, and where a row has fewer of them than that."""
    head = torch.arange(len(opened) // max(1, rows), device=opened.device).repeat_interleave(rows)[:, None]
    cell = opened.clamp(min=0)
    size = tables.size.heads[head, cell].long().masked_fill_(opened < 0, 0)
    start = tables.start.heads[head, cell].long()
    stop = size.cumsum(1)
    most = int(stop[:, -1].max()) if stop.numel() else 0
    slot = torch.arange(most, device=opened.device).expand(len(opened), -1).contiguous()
    which = torch.searchsorted(stop, slot, right=True).clamp_(max=max(0, opened.shape[1] - 1))
    missing = slot >= stop[:, -1:]
    place = (start - stop + size).gather(1, which) + slot
    return place.masked_fill_(missing, 0), missing
