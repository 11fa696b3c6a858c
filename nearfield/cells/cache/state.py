"""What a store holds: keys and values, those of closed segments sorted by cell, and the moments of the cells."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from nearfield.cells.cache.buffers import Buffer
from nearfield.cells.cache.segments import CellTables, close_segment, cross_of
from nearfield.cells.partition import Partition
from nearfield.cells.sizes import CacheSizes


class CacheState:
    """Keys and values `[batch, heads, length, dim]`: closed segments first, then those of the running one as they came.

    A *place* is where a key is now; in a closed segment that is not where it came.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        sizes: CacheSizes,
        partition: Partition,
        base: int = 0,
        offload: bool = False,
    ) -> None:
        """Empty, for keys and values like these; but for the first `base` of them, sorted already, which stay where they are."""
        if base and offload:
            raise ValueError("a memory stays where it is and cannot be offloaded; make its cache without offload")
        self.sizes, self.partition, self.offload = sizes, partition, offload
        self.remembered = base
        """how many keys belong to a memory"""
        self.keys, self.values = Buffer(key, base=key, offset=base), Buffer(value, base=value, offset=base)
        self.order = Buffer(key[..., 0], torch.int32)
        """which key of its segment stands at each place"""
        self.tables = CellTables(key, value)
        self.sinks = torch.full((len(key), sizes.sinks), -1, device=key.device)
        """`[batch, sinks]`: the places of the first keys that are in closed segments; -1: none"""
        self.counts: Tensor | None = None
        """`[batch, length]`: False for padding; None: all count"""
        self.marked = 0
        """of how many keys that is known"""
        self.bounds = [0]
        """where closed segments end, after where the first one begins"""
        self._first_rows: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._count = torch.zeros(1, dtype=torch.int32, device=key.device)
        self._told = 0

    @property
    def length(self) -> int:
        return self.keys.length

    @property
    def closed(self) -> int:
        """How many keys are in closed segments."""
        return self.bounds[-1]

    @property
    def segments(self) -> int:
        """How many are closed."""
        return len(self.bounds) - 1

    @property
    def heads(self) -> int:
        return self.keys.storage.shape[1]

    @property
    def all_count(self) -> Tensor:
        """`[batch, length]` of True, which takes no memory"""
        return torch.ones((), dtype=torch.bool, device=self.sinks.device).expand(len(self.sinks), self.length)

    def append(self, key: Tensor, value: Tensor, counts: Tensor | None) -> None:
        before = self.all_count if self.counts is None else self.counts
        if key.is_cuda and torch.cuda.is_current_stream_capturing():
            self._append_on_device(key, value)
        else:
            self.keys.append(key)
            self.values.append(value)
        if counts is not None or self.counts is not None:
            more = self.all_count[:, len(before[0]) :] if counts is None else counts.to(key.device)
            self.counts = torch.cat([before, more], 1)

    def _append_on_device(self, key: Tensor, value: Tensor) -> None:
        """One more key, where the device says: a graph that does so can be replayed."""
        if key.shape[2] != 1 or self._told != self.length or self.counts is not None:
            raise RuntimeError("a graph appends one key at a time, without padding, to a store that has been asked before")
        place = self._count.long() - self.keys.offset
        for buffer, more in ((self.keys, key), (self.values, value)):
            if buffer.length - buffer.offset >= buffer.storage.shape[2]:
                raise RuntimeError("a graph cannot make room for more keys; call store.reserve(keys) before it is captured")
            buffer.storage.index_copy_(2, place, more)
            buffer.length += 1

    def replayed(self, steps: int = 1) -> None:
        """A graph has appended so many keys: the device knows, and this is for all others."""
        for buffer in (self.keys, self.values):
            buffer.length += steps
        self.marked = self.length
        self._told = self.length

    @property
    def count(self) -> Tensor:
        """`[1]`, on the device: how many keys there are.

        Kernels read it there. What is captured in a graph then goes on being right when there are more keys.
        """
        if self._told != self.length:
            self._count.add_(self.length - self._told)
        self._told = self.length
        return self._count

    def mark(self, counts: Tensor | None) -> None:
        """Say of keys that are not marked yet whether they count. Padding becomes zero, for whatever it is, it may not matter."""
        part = slice(self.marked, self.length)
        if counts is not None and not bool(counts[:, part].all()):
            for buffer in (self.keys, self.values):
                buffer.part(part).masked_fill_(~counts[:, None, part, None], 0.0)
        self.counts, self.marked = counts, self.length

    def select(self, entries: Tensor) -> None:
        for part in (self.keys, self.values, self.order, self.tables):
            part.select(entries)
        self.sinks, self._first_rows = self.sinks.index_select(0, entries), None
        self.counts = None if self.counts is None else self.counts.index_select(0, entries)

    def cut(self, length: int) -> None:
        """Keep the first keys; none of the others may be in a closed segment."""
        for buffer in (self.keys, self.values):
            buffer.cut(length)
        self.marked = min(self.marked, length)
        self.counts = None if self.counts is None else self.counts[:, :length]

    def in_order(self, buffer: Buffer) -> Tensor:
        """A copy of keys or values as they came."""
        found = buffer.filled.clone(memory_format=torch.contiguous_format)
        for part in map(slice, self.bounds, self.bounds[1:]):
            found[:, :, part] = _unsorted(found[:, :, part], self.order.filled[:, :, part])
        return found

    def close(self, end: int) -> None:
        """Group the keys of the next segment, which ends there, into cells, and sort them."""
        part = slice(self.closed, end)
        keys, values = self.keys.part(part).flatten(0, 1), self.values.part(part).flatten(0, 1)
        counts = None if self.counts is None else self.counts[:, part].repeat_interleave(self.heads, 0)
        outside = self._place_sinks(part).repeat_interleave(self.heads, 0)
        found = close_segment(keys, values, counts, outside, self.sizes.cells(part.start, end), self.partition)
        order = found.order.unflatten(0, (-1, self.heads))
        for buffer in (self.keys, self.values):
            place = buffer.part(part)
            place.copy_(place.gather(2, order[..., None].expand_as(place)))
        self.order.append(order)
        self.tables.append(found, part.start)
        self.bounds.append(end)
        self.marked = max(self.marked, end)

    def put_away(self) -> None:
        """Keys and values of closed segments leave the device, if they should."""
        if self.offload and self.keys.offset < self.closed:
            self.split(self.closed)

    def split(self, place: int) -> None:
        """Rows before this place are in memory of the CPU, the others on the device.

        Of keys and values, or, if memory runs out, of neither: whoever reads both counts on that.
        """
        buffers = self.keys, self.values
        rooms = [buffer.storage_from(place, self.sizes.most_open(place)) for buffer in buffers]
        for buffer, room in zip(buffers, rooms, strict=True):
            buffer.split(place, room)

    def _place_sinks(self, part: slice) -> Tensor:
        """Where the first keys of each batch entry go that are in this segment; `[batch, segment]`: who is in no cell."""
        counts = (self.all_count if self.counts is None else self.counts)[:, part]
        number = (self.sinks >= 0).sum(1, keepdim=True) + counts.cumsum(1)
        first = counts & (number <= self.sizes.sinks)
        outside = first | ~counts
        place = part.start + outside.cumsum(1) - 1
        entry, where = first.nonzero(as_tuple=True)
        self.sinks[entry, number[entry, where] - 1] = place[entry, where]
        self._first_rows = None
        return outside

    def back_to(self, most: int, length: int) -> None:
        """Keep the first `length` keys, at most so many of them in closed segments; others that are closed are opened again."""
        ends = [bound for bound in self.bounds if bound > most]
        if ends:
            self._reopen(ends, length)
        self.cut(length)
        if ends and self.offload:
            self.split(self.closed)  # The room was for whole segments.

    def _reopen(self, ends: list[int], length: int) -> None:
        """The last segments, which end there. Keys of those that begin at `length` or later are gone."""
        bounds = self.bounds[: -len(ends)]
        parts = [slice(*part) for part in pairwise([bounds[-1], *ends])]
        cross = self._cross_without(parts)
        kept = [part for part in parts if part.start < length]
        self.cut(max(length, kept[-1].stop if kept else bounds[-1]))
        if self.keys.offset > bounds[-1]:
            self.split(bounds[-1])
        for buffer in (self.keys, self.values):
            for part in kept:
                place = buffer.part(part)
                place.copy_(_unsorted(place, self.order.filled[:, :, part]))
        self.tables.drop(sum(self._cells(part) for part in parts), cross)
        self.bounds, self.order.length = bounds, bounds[-1]
        self.sinks.masked_fill_(self.sinks >= self.closed, -1)
        self._first_rows = None

    def _cells(self, part: slice) -> int:
        """How many a closed segment has."""
        return self.sizes.cells(part.start, part.stop)

    def _cross_without(self, parts: list[slice]) -> Tensor:
        """What `tables.cross` is without these segments, the last ones; those that were put away are brought over, one by one."""
        tables, last = self.tables, len(self.tables)
        if parts[0].start == 0:
            return torch.zeros_like(tables.cross)
        cross = tables.cross
        for part in reversed(parts):
            cells = slice(last - self._cells(part), last)
            last = cells.start
            start = tables.start.heads[:, cells].long() - part.start
            moments = start, *(x.heads[:, cells].to(cross.dtype) for x in (tables.centroid, tables.value))
            keys, values = (buffer.at(part).flatten(0, 1) for buffer in (self.keys, self.values))
            cross = cross - cross_of(keys, values, *moments).view_as(cross)
        return cross

    def first_rows(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """A copy of the first keys and values `[batch * heads, sinks, dim]`, and `[batch * heads, 1, sinks]` where none are."""
        if self._first_rows is None or self._first_rows[0].dtype != dtype:
            place = self.sinks.repeat_interleave(self.heads, 0)
            absent = (place < 0)[:, None]
            self._first_rows = (*self.gather(place.clamp(min=0), dtype), absent if bool(absent.any()) else None)
        return self._first_rows

    def gather(self, place: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values at some places of each head `[batch * heads, any]`."""
        return self.keys.rows(place).to(dtype), self.values.rows(place).to(dtype)

    def hidden(self, keys: slice, first: int, rows: int, group: int) -> Tensor | None:
        """What rows from position `first` on do not see of keys that stand as they came; None: they see all of them.

        `[batch * heads or 1, group * rows, keys]`
        """
        hidden = None
        if rows > 1:
            own = torch.arange(first, first + rows, device=self.sinks.device)[:, None]
            hidden = (torch.arange(keys.start, keys.stop, device=self.sinks.device) > own)[None]
        if self.counts is not None:
            padding = ~self.counts[:, keys].repeat_interleave(self.heads, 0)[:, None]
            hidden = padding if hidden is None else padding | hidden
        return None if hidden is None else hidden.repeat(1, group, 1)


def _unsorted(x: Tensor, order: Tensor) -> Tensor:
    """Rows `[batch, heads, n, dim]` back where they came from."""
    return torch.empty_like(x).scatter_(2, order.long()[..., None].expand_as(x), x)
