"""A segment is complete: its keys go into cells, once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.cells.cache.buffers import Buffer
from nearfield.cells.moments import tabulate
from nearfield.cells.partition import Partition, build_cells
from nearfield.cells.partition.kmeans import KMeans
from nearfield.cells.triton.limits import unsupported
from nearfield.kernels import backends

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
    log_exists: Tensor
    centroid: Tensor
    variance: Tensor
    value: Tensor
    cross: Tensor
    """`[heads, value_dim, dim]`"""


MOMENTS = ("start", "size", "log_exists", "centroid", "variance", "value")


class CellTables:
    """Moments of all cells of `[batch, heads]`, closed segment by closed segment, in the order in which they were closed."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        """Empty, for keys and values like these `[batch, heads, any, dim]`."""
        compute = torch.promote_types(key.dtype, torch.float32)
        # On a GPU a step is as fast as its cells are read.
        kept = torch.bfloat16 if key.is_cuda and key.dtype.itemsize == 2 else compute
        self.start = Buffer(key[..., 0], torch.int32)
        self.size, self.log_exists = Buffer(key[..., 0], compute), Buffer(key[..., 0], compute)
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
    size, log_exists, centroid, variance, value = (
        x.view(heads, cells, *x.shape[1:]) for x in (table.size, table.log_exists, table.centroid, table.variance, table.value)
    )
    start = size.long().cumsum(1) - size.long() + outside.sum(1, keepdim=True)
    return ClosedSegment(order, start, size, log_exists, centroid, variance, value, table.cross)


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
    missing = unsupported(keys, partition=partition, cells=cells)
    if not backends.choose_triton("auto", keys.device, missing) or not isinstance(partition, KMeans):
        return _group_in_torch(keys, cells, partition)
    from nearfield.cells.triton.forward import group_keys

    return group_keys(keys, cells, partition.iterations, partition.seed).long()


def _group_in_torch(keys: Tensor, cells: int, partition: Partition) -> Tensor:
    return build_cells(partition, keys.to(torch.promote_types(keys.dtype, torch.float32)), cells)


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
