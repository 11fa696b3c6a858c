"""The moments of cells, and how their gradients lead back to keys and values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

KEYS_PER_PASS = 1 << 12
"""How many keys are copied at a time."""

MOST_VARIANCE = 1e30
"""Variances are cut off here: an infinite one times a query of zero would be NaN."""


@dataclass(frozen=True)
class Moments:
    """The moments of some cells, in the dtype of arithmetic."""

    size: Tensor
    """`[cells]`: how many keys"""
    log_exists: Tensor
    """`[cells]`: -inf where a cell is empty, else 0"""
    centroid: Tensor
    """`[cells, dim]`"""
    variance: Tensor
    """`[cells, dim]`: of the keys around their centroid, coordinate by coordinate"""
    value: Tensor
    """`[cells, value_dim]`: the mean value"""


@dataclass(frozen=True)
class CellTable(Moments):
    """The keys of one head, cell by cell, with the moments of every cell.

    Cells are numbered span by span. A key may be in cells of several spans, and a causal row sees the cells of some spans.
    """

    order: Tensor
    """`[members]`: key positions, cell by cell, ascending inside a cell"""
    cell: Tensor
    """`[members]`: the cell of each of them"""
    starts: Tensor
    """`[cells + 1]`: where the members of each cell begin in `order`"""
    spans: list[int]
    """`[spans + 1]`: the first cell of each span"""
    cross: Tensor
    """`[spans, value_dim, dim]`: products of the deviations of values and keys from the means of their cells, summed per span"""

    @property
    def cells(self) -> int:
        return len(self.size)

    @property
    def members(self) -> Tensor:
        """`[spans]`: how many keys are in cells of each span"""
        return self.starts[self.spans].diff()

    def passes(self, cells: slice | None = None) -> Iterator[tuple[int, slice]]:
        """Pairs (span, range of `order`) that cover the members of these cells; None: of all. Each range is bounded in size and
        lies in one span."""
        every = slice(0, self.cells) if cells is None else cells
        begin, end = self.starts[[every.start, every.stop]].tolist()
        for span, (first, last) in enumerate(pairwise(self.starts[self.spans].tolist())):
            first, last = max(first, begin), min(last, end)
            for start in range(first, last, KEYS_PER_PASS):
                yield span, slice(start, min(start + KEYS_PER_PASS, last))

    def seen(self, spans: Sequence[int]) -> SeenCells:
        """The cells of some spans."""
        ranges = [slice(self.spans[span], self.spans[span + 1]) for span in spans]
        device = self.size.device
        ids = torch.cat([torch.arange(cells.start, cells.stop, device=device) for cells in ranges])
        column = torch.full((self.cells,), -1, device=device)
        column[ids] = torch.arange(len(ids), device=device)
        size, log_exists, centroid, variance, value = (
            joined(x, ranges) for x in (self.size, self.log_exists, self.centroid, self.variance, self.value)
        )
        pooled = int(self.members[[*spans]].sum())
        cross = self.cross[[*spans]].sum(0) / max(1, pooled)
        return SeenCells(size, log_exists, centroid, variance, value, [*spans], ranges, ids, column, pooled, cross)


@dataclass(frozen=True)
class SeenCells(Moments):
    """The cells of a table that some rows see, side by side: these are the columns of their score tables."""

    spans: list[int]
    ranges: list[slice]
    """the cells of each span"""
    ids: Tensor
    """`[columns]`: the cell of each column"""
    column: Tensor
    """`[cells of the table]`: the column of each cell; -1: not seen"""
    pooled: int
    """how many keys are in these cells"""
    cross: Tensor
    """`[value_dim, dim]`: covariance of values and keys inside cells, pooled over all of these cells"""

    def __len__(self) -> int:
        return len(self.ids)

    def columns(self, cells: Tensor) -> Tensor:
        """The columns of some cells; -1 stays -1."""
        return torch.where(cells < 0, -1, self.column[cells.clamp(min=0)])


def joined(x: Tensor, ranges: list[slice]) -> Tensor:
    """Some ranges of rows, one after the other. A single range is not copied."""
    return x[ranges[0]] if len(ranges) == 1 else torch.cat([x[part] for part in ranges])


def tabulate(keys: Tensor, values: Tensor, cell_of: Tensor, spans: list[int]) -> CellTable:
    """The table of keys `[n, dim]` and values `[n, value_dim]`. O(span_levels n dim^2).

    `cell_of` `[span_levels, n]`: the cells of each key, -1 for none. `spans` `[spans + 1]`: the first cell of each span.
    """
    table = without_moments(keys, values, cell_of, spans)
    sum_up_(table, keys, values, slice(0, table.cells))
    return table


def without_moments(keys: Tensor, values: Tensor, cell_of: Tensor, spans: list[int]) -> CellTable:
    """The table that `tabulate` makes, with zeros in the place of its moments."""
    compute = torch.promote_types(keys.dtype, torch.float32)
    cells = spans[-1]
    flat = cell_of.reshape(-1)
    # Of small integers sorting is several times as fast.
    order = flat.to(torch.int16 if cells < 2**15 else torch.int32).argsort(stable=True)
    sizes = torch.bincount(flat + 1, minlength=cells + 1)
    order, sizes = order[int(sizes[0]) :], sizes[1:]
    cell = flat[order]
    order %= max(1, len(keys))
    starts = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    centroid = keys.new_zeros(cells, keys.shape[1], dtype=compute)
    value = values.new_zeros(cells, values.shape[1], dtype=compute)
    cross = values.new_zeros(len(spans) - 1, values.shape[1], keys.shape[1], dtype=compute)
    size = sizes.to(compute)
    log_exists = torch.zeros_like(size).masked_fill_(sizes == 0, -torch.inf)
    return CellTable(size, log_exists, centroid, torch.zeros_like(centroid), value, order, cell, starts, spans, cross)


def sum_up_(table: CellTable, keys: Tensor, values: Tensor, cells: slice) -> None:
    """Put the moments of these cells in the place of zeros, and add to `cross` what their members have a part in."""
    compute = table.centroid.dtype
    share = table.size[cells].clamp(min=1).reciprocal()[:, None]
    for _, part in table.passes(cells):
        table.centroid.index_add_(0, table.cell[part], keys[table.order[part]].to(compute))
        table.value.index_add_(0, table.cell[part], values[table.order[part]].to(compute))
    table.centroid[cells].mul_(share)
    table.value[cells].mul_(share)
    for span, part in table.passes(cells):
        off_key, off_value = deviations(table, keys, values, part)
        table.variance.index_add_(0, table.cell[part], off_key.square())
        table.cross[span].addmm_(off_value.T, off_key)
    table.variance[cells].mul_(share).clamp_(max=MOST_VARIANCE)


def deviations(table: CellTable, keys: Tensor, values: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Keys and values of a range of `order`, minus the means of their cells."""
    own, cell = table.order[part], table.cell[part]
    compute = table.centroid.dtype
    return keys[own].to(compute) - table.centroid[cell], values[own].to(compute) - table.value[cell]


@dataclass(frozen=True)
class TableGradient:
    """Gradients with respect to the moments of cells, summed up while a backward pass runs."""

    centroid: Tensor
    variance: Tensor
    value: Tensor
    cross: Tensor

    @staticmethod
    def zeros_like(table: CellTable | SeenCells) -> TableGradient:
        return TableGradient(*(torch.zeros_like(x) for x in (table.centroid, table.variance, table.value, table.cross)))

    def add_(self, seen: SeenCells, own: TableGradient) -> None:
        """Add gradients with respect to the moments of cells that some rows see."""
        start = 0
        for cells in seen.ranges:
            columns = slice(start, start + cells.stop - cells.start)
            for place, grad in ((self.centroid, own.centroid), (self.variance, own.variance), (self.value, own.value)):
                place[cells] += grad[columns]
            start = columns.stop
        for span in seen.spans:
            self.cross[span].add_(own.cross, alpha=1.0 / max(1, seen.pooled))

    def spread_(
        self,
        table: CellTable,
        keys: Tensor,
        values: Tensor,
        key_grad: Tensor,
        value_grad: Tensor,
        cells: slice | None = None,
    ) -> None:
        """Add to the gradients of keys and values what the moments of these cells pass on to them; None: those of all.

        A mean passes 1/n_c of its gradient to each member, and a variance 2 (k - mu)/n_c of it. A product of deviations passes
        its gradient to each factor times the other one; terms through the means vanish, because deviations sum to zero.
        """
        share = table.size.clamp(min=1).reciprocal()[:, None]
        to_key, to_value, stretch = self.centroid * share, self.value * share, 2 * self.variance * share
        for span, part in table.passes(cells):
            own, cell = table.order[part], table.cell[part]
            key, value = deviations(table, keys, values, part)
            matrix = self.cross[span]
            key_grad.index_add_(0, own, torch.addmm(to_key[cell] + stretch[cell] * key, value, matrix))
            value_grad.index_add_(0, own, torch.addmm(to_value[cell], key, matrix.T))
