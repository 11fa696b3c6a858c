"""A segment is complete: its keys go into cells, once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.kernels.cells_assign import group_keys
from nearfield.partition.base import Partition
from nearfield.partition.cells import tabulate


@dataclass(frozen=True)
class ClosedSegment:
    """The cells of a segment, for all heads. Sorted, the keys outside of cells come first and then one cell after the other."""

    order: Tensor
    """`[heads, segment]`: which key stands at each place"""
    start: Tensor
    """`[heads, cells]`: the place of a cell's first key"""
    size: Tensor
    """`[heads, cells]` and as all that follows what `CellTable` has"""
    void: Tensor
    centroid: Tensor
    variance: Tensor
    value: Tensor
    cross: Tensor
    """`[heads, value_dim, dim]`"""


def close_segment(
    keys: Tensor, values: Tensor, counts: Tensor | None, outside: Tensor, cells: int, partition: Partition
) -> ClosedSegment:
    """Groups the keys `[heads, segment, dim]` of a segment into so many cells.

    `counts` `[heads, segment]`: False for padding, which changes nothing about a cell. `outside`, likewise: in no cell, which is
    padding, and the first keys, which are near anyway.
    """
    heads, segment, _ = keys.shape
    compute = torch.promote_types(keys.dtype, torch.float32)
    cell_of = _grouped(keys.to(compute), counts, cells, partition).masked_fill(outside, -1)
    order = cell_of.argsort(dim=1, stable=True)
    first = torch.arange(heads, device=keys.device)[:, None] * cells
    table = tabulate(
        keys.reshape(heads * segment, -1),
        values.reshape(heads * segment, -1),
        torch.where(cell_of < 0, -1, cell_of + first).view(1, -1),
        list(range(0, (heads + 1) * cells, cells)),
    )
    size, void, centroid, variance, value = (
        x.view(heads, cells, *x.shape[1:]) for x in (table.size, table.void, table.centroid, table.variance, table.value)
    )
    start = size.long().cumsum(1) - size.long() + outside.sum(1, keepdim=True)
    return ClosedSegment(order, start, size, void, centroid, variance, value, table.cross)


def _grouped(keys: Tensor, counts: Tensor | None, cells: int, partition: Partition) -> Tensor:
    """The cell of each key, `[heads, segment]`. Where there is padding, cells are as many as the keys that count call for."""
    whole = torch.ones(len(keys), dtype=torch.bool) if counts is None else counts.all(1).cpu()
    if bool(whole.all()):
        return group_keys(keys, cells, 0, partition)[0]
    assert counts is not None
    found = torch.full(counts.shape, -1, dtype=torch.int64, device=keys.device)
    if bool(whole.any()):
        some = whole.nonzero()[:, 0].to(keys.device)
        found[some] = group_keys(keys[some], cells, 0, partition)[0]
    for head in (~whole).nonzero()[:, 0].tolist():
        own = counts[head].nonzero()[:, 0]
        if len(own):
            few = max(1, round(len(own) * cells / keys.shape[1]))
            found[head, own] = group_keys(keys[head, own][None], few, 0, partition)[0][0]
    return found


def cross_of(keys: Tensor, values: Tensor, start: Tensor, centroid: Tensor, value: Tensor) -> Tensor:
    """What a closed segment adds to the products of deviations `[heads, value_dim, dim]`, from its sorted keys and its cells."""
    place = torch.arange(keys.shape[1], device=keys.device).expand(len(keys), -1).contiguous()
    # An empty cell starts where the next one does, and the last of those has the keys.
    cell = torch.searchsorted(start.contiguous(), place, right=True) - 1
    outside = (cell < 0)[..., None]
    cell = cell.clamp_(min=0)[..., None]
    off_key = (keys.to(centroid.dtype) - centroid.gather(1, cell.expand_as(keys))).masked_fill_(outside, 0.0)
    off_value = (values.to(value.dtype) - value.gather(1, cell.expand_as(values))).masked_fill_(outside, 0.0)
    return off_value.transpose(1, 2) @ off_key
