"""Closing a segment: its keys are grouped into cells, once, and the cells join those of the segments before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.cells.cache.buffers import Buffer
from nearfield.cells.cache.stretch import stretched
from nearfield.cells.far_field import MOST_SPREAD, MOST_SPREAD_BY_QUERIES
from nearfield.cells.moments import tabulate
from nearfield.cells.partition import Partition, build_cells
from nearfield.cells.partition.halve import halve
from nearfield.cells.partition.kmeans import ITERATIONS, KMeans
from nearfield.cells.triton.limits import unsupported
from nearfield.kernels import backends

BYTES_AT_A_TIME = 256 << 20
"""Heads are closed together as long as their keys, and their values, take no more than this in the dtype of arithmetic."""


@dataclass(frozen=True)
class ClosedSegment:
    """The cells of one segment, for all heads `[batch * heads]`.

    Its keys are sorted: first those that are in no cell, then cell by cell.
    """

    order: Tensor
    """`[heads, segment]`: the key, counted from the start of the segment, that is at each place after sorting"""
    start: Tensor
    """`[heads, cells]`: the place of a cell's first key, counted from the start of the segment"""
    size: Tensor
    """`[heads, cells]`: how many keys; this and the next four are as in `CellTable`"""
    log_exists: Tensor
    centroid: Tensor
    variance: Tensor
    value: Tensor
    cross: Tensor
    """`[heads, value_dim, dim]`: products of the deviations of values and keys from the means of their cells, summed"""


PER_CELL = ("start", "size", "log_exists", "centroid", "variance", "value")
"""The parts of `CacheTables` that have a row per cell."""


class FlatTables(NamedTuple):
    """What every step reads of tables: views `[batch * heads, cells, ...]` of the parts in `PER_CELL`, and what they imply."""

    start: Tensor
    size: Tensor
    log_exists: Tensor
    centroid: Tensor
    variance: Tensor
    value: Tensor
    log_size: Tensor
    """`[heads, 1, cells]`"""
    covariance: Tensor
    """`[heads, value_dim, dim]`: that of values and keys around the means of their cells, the same for all cells of a head"""
    most_spread: float
    """where spreads are cut off in scores"""


class CacheTables:
    """What a cache knows of its cells: those of all closed segments, in the order in which the segments were closed.

    The parts in `PER_CELL` are buffers `[batch, heads, cells, ...]`. Here `start` counts from the first key of the cache. Tables
    never change: each operation returns others.
    """

    def __init__(self, key: Tensor, value: Tensor) -> None:
        """Empty, for keys and values like these `[batch, heads, any, dim]`."""
        compute = torch.promote_types(key.dtype, torch.float32)
        # On a GPU, a step takes as long as it takes to read these.
        kept = torch.bfloat16 if key.is_cuda and key.dtype.itemsize == 2 else compute
        # Empty buffers of one shape may be the same one: a buffer never changes, and the first rows get a storage of their own.
        self.start = Buffer(key[..., 0], torch.int32)
        self.size = self.log_exists = Buffer(key[..., 0], compute)
        self.centroid = self.variance = Buffer(key, kept)
        self.value = self.centroid if key.shape == value.shape else Buffer(value, kept)
        batch, heads = key.shape[:2]
        self.cross = key.new_zeros((batch, heads, value.shape[3], key.shape[3]), dtype=compute)
        """as in `ClosedSegment`, summed over all segments"""
        self.pooled = key.new_zeros((batch, heads), dtype=compute)
        """how many keys are in cells"""
        self.by_queries = True
        """whether the keys of all cells were grouped as queries are large, see `stretch`"""
        self._flat: FlatTables | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_flat": None}  # a copy would have tensors of its own in place of views

    @property
    def flat(self) -> FlatTables:
        """Made once: between two closed segments there are a thousand steps."""
        if self._flat is None:
            covariance = self.cross.flatten(0, 1) / self.pooled.clamp(min=1).view(-1, 1, 1)
            views = {name: getattr(self, name).flat for name in PER_CELL}
            self._flat = FlatTables(
                **views, log_size=views["size"].log()[:, None], covariance=covariance, most_spread=self.most_spread
            )
        return self._flat

    def __len__(self) -> int:
        return self.size.length

    def but(self, **changes: Any) -> CacheTables:
        """These with some attributes changed."""
        made = object.__new__(type(self))
        made.__dict__ = self.__dict__ | {"_flat": None} | changes
        return made

    @property
    def most_spread(self) -> float:
        """Where spreads are cut off in scores."""
        return MOST_SPREAD_BY_QUERIES if self.by_queries else MOST_SPREAD

    def append(self, closed: ClosedSegment, first: int, by_queries: bool = False) -> CacheTables:
        """With the cells of the segment that begins at key `first`."""
        shape = self.cross.shape[:2]
        grown = {}
        for name in PER_CELL:
            new = getattr(closed, name)
            grown[name] = getattr(self, name).append((new + first if name == "start" else new).unflatten(0, shape))
        cross = self.cross + closed.cross.unflatten(0, shape)
        return self.but(
            **grown,
            cross=cross,
            pooled=self.pooled + closed.size.sum(1).unflatten(0, shape),
            by_queries=self.by_queries and by_queries,
        )

    def drop_last(self, cells: int, cross: Tensor) -> CacheTables:
        """Without the last cells; `cross` is that of the others."""
        kept = len(self) - cells
        shorter = {name: getattr(self, name).truncate(kept) for name in PER_CELL}
        pooled = self.pooled - self.size.filled[:, :, kept:].sum(2)
        return self.but(**shorter, cross=cross, pooled=pooled, by_queries=self.by_queries or not kept)

    def select(self, entries: Tensor) -> CacheTables:
        """With these batch entries, in this order."""
        chosen = {name: getattr(self, name).select(entries) for name in PER_CELL}
        return self.but(**chosen, cross=self.cross.index_select(0, entries), pooled=self.pooled.index_select(0, entries))

    @property
    def nbytes(self) -> int:
        return sum(getattr(self, name).nbytes for name in PER_CELL) + self.cross.nbytes


def close_segment(
    keys: Tensor,
    values: Tensor,
    key_padding: Tensor | None,
    outside: Tensor,
    cells: int,
    partition: Partition,
    given: Tensor | None = None,
    first_outside: int | None = None,
    sizes: Tensor | None = None,
) -> ClosedSegment:
    """Group the keys `[heads, segment, dim]` of a segment into cells.

    `key_padding` `[heads, segment]` is False for padding, which has no influence on the cells. `outside` `[heads, segment]` is
    True for keys that belong to no cell: padding, and the first keys, which every query reads anyway. `given` `[heads, segment]`:
    the cell of each key that is not outside, where that is known. `first_outside`: says that just so many of the first keys are
    outside, in every head; kernels in Triton need to know. `sizes` `[heads, dim]`: how large queries are (`stretch`), if that is
    known.
    """
    heads, segment, dim = keys.shape
    per_head = segment * max(dim, values.shape[2]) * torch.promote_types(keys.dtype, torch.float32).itemsize
    step = max(1, BYTES_AT_A_TIME // max(1, per_head))
    by_kernels = first_outside is not None and first_outside < segment and cells <= segment and _runs_kernels(cells, keys, values)
    parts = []
    for first in range(0, max(1, heads), step):
        some = slice(first, first + step)
        if given is None:
            padding = None if key_padding is None else key_padding[some]
            cell_of = _group(_as_queries_see(keys[some], sizes, some, partition), padding, cells, partition)
        else:
            cell_of = given[some]
        cell_of = cell_of.masked_fill(outside[some], -1)
        if by_kernels and first_outside is not None:
            parts.append(_close_by_kernels(keys[some], values[some], cell_of, first_outside, cells))
        else:
            parts.append(_close_heads(keys[some], values[some], cell_of.long(), outside[some], cells))
    if len(parts) == 1:
        return parts[0]
    return ClosedSegment(*(torch.cat(x) for x in zip(*(vars(part).values() for part in parts), strict=True)))


def can_stretch(partition: Partition) -> bool:
    """Whether sizes of queries matter to it. Other partitions than k-means do not look at distances."""
    return type(partition) is KMeans


def _as_queries_see(keys: Tensor, sizes: Tensor | None, heads: slice, partition: Partition) -> Tensor:
    """The keys of these heads as they are grouped."""
    return stretched(keys, sizes[heads]) if sizes is not None and can_stretch(partition) else keys


def _close_heads(keys: Tensor, values: Tensor, cell_of: Tensor, outside: Tensor, cells: int) -> ClosedSegment:
    """`close_segment` for a few heads, whose keys have these cells; -1: outside."""
    heads = len(keys)
    order = cell_of.argsort(dim=1, stable=True)
    # To `tabulate` all heads are one sequence, and each head is a span with cells of its own.
    first = torch.arange(heads, device=keys.device)[:, None] * cells
    table = tabulate(
        keys.flatten(0, 1),
        values.flatten(0, 1),
        torch.where(cell_of < 0, -1, cell_of + first).view(1, -1),
        list(range(0, (heads + 1) * cells, cells)),
    )
    size, log_exists, centroid, variance, value = (
        x.view(heads, cells, *x.shape[1:]) for x in (table.size, table.log_exists, table.centroid, table.variance, table.value)
    )
    start = size.long().cumsum(1) - size.long() + outside.sum(1, keepdim=True)
    return ClosedSegment(order, start, size, log_exists, centroid, variance, value, table.cross)


def _close_by_kernels(keys: Tensor, values: Tensor, cell_of: Tensor, outside: int, cells: int) -> ClosedSegment:
    """`_close_heads` without padding, on a GPU; so many of the first keys are outside."""
    from nearfield.cells.triton.closing import tabulate_segment

    found = tabulate_segment(keys, values, cell_of.int(), outside, cells)
    size = found.size.float()
    log_exists = torch.zeros_like(size).masked_fill_(size == 0, -torch.inf)
    return ClosedSegment(found.order, found.start, size, log_exists, found.centroid, found.variance, found.value, found.cross)


def _runs_kernels(cells: int, *tensors: Tensor) -> bool:
    """Whether kernels in Triton serve tensors like these, with keys in so many cells."""
    return backends.choose_triton("auto", tensors[0].device, unsupported(*tensors, cells=cells))


def _group(keys: Tensor, key_padding: Tensor | None, cells: int, partition: Partition) -> Tensor:
    """The cell of each key, `[heads, segment]`. A head with padding gets fewer cells, in proportion to its real keys."""
    if key_padding is None:
        return group_whole(keys, cells, partition)
    is_whole = key_padding.all(1).cpu()
    if bool(is_whole.all()):
        return group_whole(keys, cells, partition)
    found = torch.full(key_padding.shape, -1, dtype=torch.int64, device=keys.device)
    if bool(is_whole.any()):
        whole = is_whole.nonzero()[:, 0].to(keys.device)
        found[whole] = group_whole(keys[whole], cells, partition).long()
    for head in (~is_whole).nonzero()[:, 0].tolist():
        real = key_padding[head].nonzero()[:, 0]
        if len(real):
            fewer = max(1, round(len(real) * cells / keys.shape[1]))
            found[head, real] = _group_in_torch(keys[head, real][None], fewer, partition)[0]
    return found


def group_whole(keys: Tensor, cells: int, partition: Partition) -> Tensor:
    """The cell of each key where there is no padding: by the Triton kernels, if they can."""
    if not isinstance(partition, KMeans) or not _runs_kernels(cells, keys):
        return _group_in_torch(keys, cells, partition)
    from nearfield.cells.triton.forward import group_keys

    # As many as in torch: a segment is grouped once, and read at every step.
    return group_keys(keys, cells, partition.iterations_or(ITERATIONS), partition.seed)


def halved(keys: Tensor, cell_of: Tensor, cells: int) -> Tensor:
    """`cells.partition.halve.halve`, by the Triton kernels, if they can."""
    if cells > keys.shape[1] or not _runs_kernels(cells, keys):
        return halve(keys, cell_of, cells)
    from nearfield.cells.triton.halve import halve as halve_by_kernels

    return halve_by_kernels(keys, cell_of.int(), cells)


def _group_in_torch(keys: Tensor, cells: int, partition: Partition) -> Tensor:
    return build_cells(partition, keys.to(torch.promote_types(keys.dtype, torch.float32)), cells)


def last_started(start: Tensor, places: int) -> Tensor:
    """`[heads, places]`: the last cell that starts at each of the first places or before it; -1: none does.

    An empty cell starts where the next one does, and what is found is the last cell that starts there, which has the keys.
    """
    place = torch.arange(places, device=start.device).expand(len(start), -1).contiguous()
    return torch.searchsorted(start.contiguous(), place, right=True) - 1


def cross_of(keys: Tensor, values: Tensor, start: Tensor, centroid: Tensor, value: Tensor) -> Tensor:
    """`ClosedSegment.cross`, computed again from the sorted keys and values of a segment and from its cells."""
    cell = last_started(start, keys.shape[1])
    outside = (cell < 0)[..., None]
    cell = cell.clamp_(min=0)[..., None]
    off_key = (keys.to(centroid.dtype) - centroid.gather(1, cell.expand_as(keys))).masked_fill_(outside, 0.0)
    off_value = (values.to(value.dtype) - value.gather(1, cell.expand_as(values))).masked_fill_(outside, 0.0)
    return off_value.transpose(1, 2) @ off_key
