"""Cells: what is known of each group of keys, and how gradients of that come back to the keys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

KEYS_PER_PASS = 1 << 14

MOST_VARIANCE = 1e30


@dataclass(frozen=True)
class CellTable:
    """The keys of one head, cell by cell, with the moments of every cell.

    Cells are numbered segment by segment, `per_segment` of them each, so that what a causal row may see of them is a prefix.
    """

    order: Tensor
    """`[members]`: key positions, cell by cell, ascending inside a cell"""
    cell: Tensor
    """`[members]`: the cell of each of them"""
    starts: Tensor
    """`[cells + 1]`: the cell's range of `order`"""
    per_segment: int
    size: Tensor
    """`[cells]`: how many keys, in the dtype of arithmetic"""
    void: Tensor
    """`[cells]`: -inf where a cell is empty, else 0"""
    centroid: Tensor
    """`[cells, dim]`"""
    variance: Tensor
    """`[cells, dim]`: of the keys around their centroid, per coordinate"""
    value: Tensor
    """`[cells, value_dim]`: the mean value"""
    cross: Tensor
    """`[segments + 1, value_dim, dim]`: covariance of values and keys inside cells, pooled over the first s segments"""

    @property
    def cells(self) -> int:
        return len(self.size)

    @property
    def members_before(self) -> Tensor:
        """`[segments + 1]`: keys in the first s segments"""
        return self.starts[:: self.per_segment]

    def passes(self) -> Iterator[tuple[int, slice]]:
        """(segment, range of `order`) pieces of bounded size that cover all members, none across two segments."""
        edges = self.members_before.tolist()
        for segment, (first, last) in enumerate(pairwise(edges)):
            for start in range(first, last, KEYS_PER_PASS):
                yield segment, slice(start, min(start + KEYS_PER_PASS, last))


def tabulate(keys: Tensor, values: Tensor, cell_of: Tensor, cells: int, per_segment: int) -> CellTable:
    """The table of keys `[n, dim]` and values `[n, value_dim]` whose cells are `cell_of` `[n]` (-1: in none). O(n dim^2)."""
    compute = torch.promote_types(keys.dtype, torch.float32)
    order = cell_of.argsort(stable=True)
    sizes = torch.bincount(cell_of + 1, minlength=cells + 1)
    order, sizes = order[int(sizes[0]) :], sizes[1:]
    cell = cell_of[order]
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    share = sizes.clamp(min=1).to(compute).reciprocal()[:, None]
    centroid = keys.new_zeros(cells, keys.shape[1], dtype=compute)
    value = values.new_zeros(cells, values.shape[1], dtype=compute)
    variance = torch.zeros_like(centroid)
    cross = values.new_zeros(cells // per_segment + 1, values.shape[1], keys.shape[1], dtype=compute)
    size = sizes.to(compute)
    void = torch.zeros_like(size).masked_fill_(sizes == 0, -torch.inf)
    table = CellTable(order, cell, starts, per_segment, size, void, centroid, variance, value, cross)
    for _, part in table.passes():
        centroid.index_add_(0, cell[part], keys[order[part]].to(compute))
        value.index_add_(0, cell[part], values[order[part]].to(compute))
    centroid.mul_(share)
    value.mul_(share)
    for segment, part in table.passes():
        off_key, off_value = deviations(table, keys, values, part)
        variance.index_add_(0, cell[part], off_key.square())
        cross[segment + 1].addmm_(off_value.T, off_key)
    # Infinite, it would turn a zero query into NaN.
    variance.mul_(share).clamp_(max=MOST_VARIANCE)
    # One segment after the other, so that no sum knows of later ones.
    for segment in range(len(cross) - 1):
        cross[segment + 1] += cross[segment]
    cross.div_(table.members_before.clamp(min=1).to(compute)[:, None, None])
    return table


def deviations(table: CellTable, keys: Tensor, values: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Keys and values of a range of `order`, less the means of their cells."""
    own, cell = table.order[part], table.cell[part]
    compute = table.centroid.dtype
    return keys[own].to(compute) - table.centroid[cell], values[own].to(compute) - table.value[cell]


@dataclass(frozen=True)
class TableGradient:
    """Gradients with respect to the moments of a table, accumulated while a backward pass runs."""

    centroid: Tensor
    variance: Tensor
    value: Tensor
    cross: Tensor

    @staticmethod
    def zeros_like(table: CellTable) -> TableGradient:
        return TableGradient(*(torch.zeros_like(x) for x in (table.centroid, table.variance, table.value, table.cross)))

    def spread_(self, table: CellTable, keys: Tensor, values: Tensor, key_grad: Tensor, value_grad: Tensor) -> None:
        """Add to the gradients of keys and values what the moments pass on to them.

        A mean passes 1/n_c of its gradient to each member; a variance 2 (k - mu)/n_c; a covariance the other factor's deviation
        over the number of keys pooled (the terms through the means vanish: deviations sum to zero).
        """
        share = table.size.clamp(min=1).reciprocal()[:, None]
        pooled = self.cross / table.members_before.clamp(min=1).to(self.cross.dtype)[:, None, None]
        # Segment s counts in the pools s + 1, s + 2, ...
        pooled = pooled.flip(0).cumsum(0).flip(0)
        to_key, to_value, stretch = self.centroid * share, self.value * share, 2 * self.variance * share
        for segment, part in table.passes():
            own, cell = table.order[part], table.cell[part]
            key, value = deviations(table, keys, values, part)
            matrix = pooled[segment + 1]
            key_grad.index_add_(0, own, torch.addmm(to_key[cell] + stretch[cell] * key, value, matrix))
            value_grad.index_add_(0, own, torch.addmm(to_value[cell], key, matrix.T))
