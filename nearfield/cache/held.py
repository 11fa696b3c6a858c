"""What a store holds: keys and values, those of closed segments sorted by cell, and the moments of the cells."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.cache.buffers import Buffer
from nearfield.cache.segments import close_segment, cross_of
from nearfield.cache.sizes import StoreSizes
from nearfield.cache.tables import CellTables
from nearfield.partition.base import Partition


class Held:
    """Keys and values `[batch, heads, length, dim]`: closed segments first, then those of the running one as they came.

    A *place* is where a key is now; in a closed segment that is not where it came.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        settings: StoreSizes,
        partition: Partition,
        base: int = 0,
    ) -> None:
        """Empty, for keys and values like these; but for the first `base` of them, sorted already, which stay where they are."""
        self.settings, self.partition = settings, partition
        self.keys, self.values = Buffer(key, base=key, offset=base), Buffer(value, base=value, offset=base)
        self.order = Buffer(key[..., 0], torch.int32)
        """which key of its segment stands at each place"""
        self.tables = CellTables(key, value)
        self.sinks = torch.full((len(key), settings.sinks), -1, device=key.device)
        """`[batch, sinks]`: the places of the first keys that are in closed segments; -1: none"""
        self.counts: Tensor | None = None
        """`[batch, length]`: False for padding; None: all count"""
        self.marked = 0
        """of how many keys that is known"""
        self.segments = 0
        """closed ones"""
        self._first_rows: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._numbers = torch.zeros(3, dtype=torch.int32, device=key.device)
        self._told = (0, 0, 0)

    @property
    def length(self) -> int:
        return self.keys.length

    @property
    def closed(self) -> int:
        return self.settings.start(self.segments)

    @property
    def heads(self) -> int:
        return self.keys.room.shape[1]

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
        if key.shape[2] != 1 or self._told[0] != self.length or self.counts is not None:
            raise RuntimeError("a graph appends one key at a time, without padding, to a store that has been asked before")
        place = self._numbers[:1].long() - self.keys.offset
        for buffer, more in ((self.keys, key), (self.values, value)):
            if buffer.length - buffer.offset >= buffer.room.shape[2]:
                raise RuntimeError("a graph cannot make room for more keys; call store.reserve(keys) before it is captured")
            buffer.room.index_copy_(2, place, more)
            buffer.length += 1

    def replayed(self, steps: int = 1) -> None:
        """A graph has appended so many keys: the device knows, and this is for all others."""
        for buffer in (self.keys, self.values):
            buffer.length += steps
        self.marked = self.length
        self._told = (self.length, *self._told[1:])

    @property
    def numbers(self) -> Tensor:
        """`[3]`, on the device: how many keys there are, how many of them in closed segments, and how many cells.

        Kernels read it there. What is captured in a graph then goes on being right when there are more keys.
        """
        now = (self.length, self.closed, len(self.tables))
        if now[1:] == self._told[1:] and now != self._told:
            self._numbers[:1].add_(now[0] - self._told[0])
        elif now != self._told:
            self._numbers.copy_(torch.tensor(now, dtype=torch.int32), non_blocking=True)
        self._told = now
        return self._numbers

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
        self.keys.length = self.values.length = length
        self.marked = min(self.marked, length)
        self.counts = None if self.counts is None else self.counts[:, :length]

    def in_order(self, buffer: Buffer) -> Tensor:
        """A copy of keys or values as they came."""
        found = buffer.filled.clone(memory_format=torch.contiguous_format)
        for segment in range(self.segments):
            part = self._places(segment)
            found[:, :, part] = _unsorted(found[:, :, part], self.order.filled[:, :, part])
        return found

    def _places(self, segment: int) -> slice:
        return slice(self.settings.start(segment), self.settings.start(segment + 1))

    def close(self) -> None:
        """Group the keys of the next segment into cells, and sort them."""
        part = self._places(self.segments)
        keys, values = self.keys.part(part).flatten(0, 1), self.values.part(part).flatten(0, 1)
        counts = None if self.counts is None else self.counts[:, part].repeat_interleave(self.heads, 0)
        outside = self._place_sinks(part).repeat_interleave(self.heads, 0)
        found = close_segment(keys, values, counts, outside, self.settings.cells(self.segments), self.partition)
        order = found.order.unflatten(0, (-1, self.heads))
        for buffer in (self.keys, self.values):
            place = buffer.part(part)
            place.copy_(place.gather(2, order[..., None].expand_as(place)))
        self.order.append(order)
        self.tables.append(found, part.start)
        self.segments += 1

    def _place_sinks(self, part: slice) -> Tensor:
        """Where the first keys of each batch entry go that are in this segment; `[batch, segment]`: who is in no cell."""
        counts = (self.all_count if self.counts is None else self.counts)[:, part]
        number = (self.sinks >= 0).sum(1, keepdim=True) + counts.cumsum(1)
        first = counts & (number <= self.settings.sinks)
        outside = first | ~counts
        place = part.start + outside.cumsum(1) - 1
        entry, where = first.nonzero(as_tuple=True)
        self.sinks[entry, number[entry, where] - 1] = place[entry, where]
        self._first_rows = None
        return outside

    def reopen(self) -> None:
        """Undo the last `close`: the keys stand as they came, and nothing is left of their cells."""
        self.segments -= 1
        part = self._places(self.segments)
        keys, values, tables = self.keys.part(part), self.values.part(part), self.tables
        cells = self.settings.cells(self.segments)
        last = slice(len(tables) - cells, len(tables))
        start = tables.start.heads[:, last].long() - part.start
        compute = tables.cross.dtype
        moments = start, tables.centroid.heads[:, last].to(compute), tables.value.heads[:, last].to(compute)
        tables.drop(cells, cross_of(keys.flatten(0, 1), values.flatten(0, 1), *moments))
        for place in (keys, values):
            place.copy_(_unsorted(place, self.order.filled[:, :, part]))
        self.order.length = part.start
        self.sinks.masked_fill_(self.sinks >= part.start, -1)
        self._first_rows = None

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
