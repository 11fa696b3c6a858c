"""A segment is complete: its keys go into cells, once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield import kernels
from nearfield.kernels.cells_assign import group_keys
from nearfield.methods.cells import MOST_CELLS, MOST_COLUMNS, TRITON_DTYPES
from nearfield.partition.base import Partition
from nearfield.partition.cells import tabulate
from nearfield.partition.kmeans import KMeans

BYTES_AT_A_TIME = 256 << 20
"""Keys or values of so many heads, in the dtype of arithmetic, are looked at together; those of one head at least."""


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
    heads, segment, dim = keys.shape
    per_head = segment * max(dim, values.shape[2]) * torch.promote_types(keys.dtype, torch.float32).itemsize
    step = max(1, BYTES_AT_A_TIME // max(1, per_head))
    parts = []
    for first in range(0, max(1, heads), step):
        some = slice(first, first + step)
        own = None if counts is None else counts[some]
        parts.append(_close(keys[some], values[some], own, outside[some], cells, partition))
    if len(parts) == 1:
        return parts[0]
    return ClosedSegment(*(torch.cat(x) for x in zip(*(vars(part).values() for part in parts), strict=True)))


def _close(
    keys: Tensor, values: Tensor, counts: Tensor | None, outside: Tensor, cells: int, partition: Partition
) -> ClosedSegment:
    """Of some heads."""
    heads, segment, _ = keys.shape
    cell_of = _grouped(keys, counts, cells, partition).masked_fill(outside, -1)
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
        return _group_whole(keys, cells, partition)
    assert counts is not None
    found = torch.full(counts.shape, -1, dtype=torch.int64, device=keys.device)
    if bool(whole.any()):
        some = whole.nonzero()[:, 0].to(keys.device)
        found[some] = _group_whole(keys[some], cells, partition)
    for head in (~whole).nonzero()[:, 0].tolist():
        own = counts[head].nonzero()[:, 0]
        if len(own):
            few = max(1, round(len(own) * cells / keys.shape[1]))
            found[head, own] = _group_in_torch(keys[head, own][None], few, partition)[0]
    return found


def _group_whole(keys: Tensor, cells: int, partition: Partition) -> Tensor:
    """The same where all keys count: by the kernels in Triton, if they can."""
    fits = keys.dtype in TRITON_DTYPES and keys.shape[2] <= MOST_COLUMNS and cells <= MOST_CELLS
    if not (kernels.runs_triton(keys.device) and fits and type(partition) is KMeans):
        return _group_in_torch(keys, cells, partition)
    from nearfield.kernels import cells_gpu_group

    return cells_gpu_group.group_keys(keys, cells, partition.iterations, partition.seed).long()


def _group_in_torch(keys: Tensor, cells: int, partition: Partition) -> Tensor:
    return group_keys(keys.to(torch.promote_types(keys.dtype, torch.float32)), cells, 0, partition)[0]


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
