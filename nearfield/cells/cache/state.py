"""What a store holds: keys and values, with those of closed segments sorted by cell, and the moments of the cells."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from nearfield.cells.cache.buffers import Buffer
from nearfield.cells.cache.segments import CacheTables, close_segment, cross_of
from nearfield.cells.cache.steps import hidden_mask
from nearfield.cells.partition import Partition
from nearfield.cells.sizes import CacheSizes


class CacheState:
    """Keys and values `[batch, heads, length, dim]`: first closed segments, each sorted by cell, then the open end.

    The open end is all that is in no closed segment: the window and the running segment. The *position* of a key is its number in
    the order in which keys came, its *place* is where it is stored. They are the same in the open end, which is not sorted.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        sizes: CacheSizes,
        partition: Partition,
        memory_length: int = 0,
        offload: bool = False,
    ) -> None:
        """For keys and values like these. It holds the first `memory_length` of them, sorted already, and no others."""
        if memory_length and offload:
            raise ValueError("a memory stays where it is and cannot be offloaded; make its cache without offload")
        self.sizes, self.partition, self.offload = sizes, partition, offload
        self.memory_length = memory_length
        """how many keys belong to a memory, which is never changed and not copied"""
        self.keys, self.values = (Buffer(x, base=x, offset=memory_length) for x in (key, value))
        self.order = Buffer(key[..., 0], torch.int32)
        """`[batch, heads, closed]`: the key that is at each place, counted from the start of its segment"""
        self.tables = CacheTables(key, value)
        self.sinks = torch.full((len(key), sizes.sinks), -1, device=key.device)
        """`[batch, sinks]`: the places of the first keys, as far as they are in closed segments; -1: none"""
        self.key_padding: Tensor | None = None
        """`[batch, length]`: False for padding; None: there is none"""
        self.settled = 0
        """how many keys can no longer change from padding to real, or back"""
        self.bounds = [0]
        """0, and then where each closed segment ends"""
        self._sink_rows: tuple[Tensor, Tensor, Tensor | None] | None = None
        self._device_length = torch.zeros(1, dtype=torch.int32, device=key.device)
        self._synced_length = 0
        """the value of `_device_length`, without asking the device"""

    @property
    def length(self) -> int:
        return self.keys.length

    @property
    def closed(self) -> int:
        """How many keys are in closed segments."""
        return self.bounds[-1]

    @property
    def heads(self) -> int:
        return self.keys.storage.shape[1]

    @property
    def no_padding(self) -> Tensor:
        """`[batch, length]` of True, which takes no memory."""
        return torch.ones((), dtype=torch.bool, device=self.sinks.device).expand(len(self.sinks), self.length)

    def append(self, key: Tensor, value: Tensor, key_padding: Tensor | None) -> None:
        """Add keys and values `[batch, heads, new, dim]`; `key_padding` `[batch, new]` is False for padding."""
        before = self.no_padding if self.key_padding is None else self.key_padding
        if key.is_cuda and torch.cuda.is_current_stream_capturing():
            self._append_in_graph(key, value)
        else:
            self.keys.append(key)
            self.values.append(value)
        if key_padding is not None or self.key_padding is not None:
            new = self.no_padding[:, len(before[0]) :] if key_padding is None else key_padding.to(key.device)
            self.key_padding = torch.cat([before, new], 1)

    def _append_in_graph(self, key: Tensor, value: Tensor) -> None:
        """Add one key at the length that the device holds, so that each replay of the graph adds the next one."""
        if key.shape[2] != 1 or self._synced_length != self.length or self.key_padding is not None:
            raise RuntimeError("a graph appends one key at a time, without padding, to a store that has already attended once")
        row = self._device_length.long() - self.keys.offset
        for buffer, new in ((self.keys, key), (self.values, value)):
            if buffer.length - buffer.offset >= buffer.storage.shape[2]:
                raise RuntimeError("a graph cannot make room for more keys; call store.reserve(keys) before capturing it")
            buffer.storage.index_copy_(2, row, new)
            buffer.length += 1

    def advance(self, keys: int) -> None:
        """Count keys that a replayed graph has appended. The device has counted them already."""
        for buffer in (self.keys, self.values):
            buffer.length += keys
        self.settled = self._synced_length = self.length

    def sync_device_length(self) -> Tensor:
        """`[1]`, on the device: how many keys there are, brought up to date without waiting for the device.

        Kernels read the length there, so that a captured graph stays right when keys are added.
        """
        if self._synced_length != self.length:
            self._device_length.add_(self.length - self._synced_length)
        self._synced_length = self.length
        return self._device_length

    def settle_padding(self, key_padding: Tensor | None) -> None:
        """Set the padding of all keys so far. Newly settled padding is set to zero, since it may hold anything, even NaN."""
        new = slice(self.settled, self.length)
        if key_padding is not None and not bool(key_padding[:, new].all()):
            for buffer in (self.keys, self.values):
                buffer.view(new).masked_fill_(~key_padding[:, None, new, None], 0.0)
        self.key_padding, self.settled = key_padding, self.length

    def select(self, entries: Tensor) -> None:
        """Keep these batch entries, in this order."""
        for part in (self.keys, self.values, self.order, self.tables):
            part.select(entries)
        self.sinks, self._sink_rows = self.sinks.index_select(0, entries), None
        self.key_padding = None if self.key_padding is None else self.key_padding.index_select(0, entries)

    def in_order(self, buffer: Buffer) -> Tensor:
        """A copy of `keys` or `values` in the order in which they came."""
        found = buffer.filled.clone(memory_format=torch.contiguous_format)
        for segment in map(slice, self.bounds, self.bounds[1:]):
            found[:, :, segment] = _unsorted(found[:, :, segment], self.order.filled[:, :, segment])
        return found

    def close_next(self, end: int) -> None:
        """Close the next segment, which ends at key `end`: group its keys into cells, and sort them."""
        segment = slice(self.closed, end)
        keys, values = (x.view(segment).flatten(0, 1) for x in (self.keys, self.values))
        padding = None if self.key_padding is None else self.key_padding[:, segment].repeat_interleave(self.heads, 0)
        outside, sinks = self._find_sinks(segment)
        # Whatever fails here leaves the state as it was.
        found = close_segment(
            keys, values, padding, outside.repeat_interleave(self.heads, 0), self._cells_in(segment), self.partition
        )
        order = found.order.unflatten(0, (-1, self.heads))
        for buffer in (self.keys, self.values):
            rows = buffer.view(segment)
            rows.copy_(rows.gather(2, order[..., None].expand_as(rows)))
        self.order.append(order)
        self.tables.append(found, segment.start)
        self.sinks, self._sink_rows = sinks, None
        self.bounds.append(end)
        self.settled = max(self.settled, end)

    def _cells_in(self, segment: slice) -> int:
        return self.sizes.cells(segment.start, segment.stop)

    def _find_sinks(self, segment: slice) -> tuple[Tensor, Tensor]:
        """`[batch, segment]`: True for keys that belong to no cell, which are sinks and padding; and the new `sinks`."""
        is_real = (self.no_padding if self.key_padding is None else self.key_padding)[:, segment]
        number = (self.sinks >= 0).sum(1, keepdim=True) + is_real.cumsum(1)
        is_sink = is_real & (number <= self.sizes.sinks)
        outside = is_sink | ~is_real
        # Sorting puts all of these first, in the order in which they came.
        place = segment.start + outside.cumsum(1) - 1
        entry, column = is_sink.nonzero(as_tuple=True)
        sinks = self.sinks.clone()
        sinks[entry, number[entry, column] - 1] = place[entry, column]
        return outside, sinks

    def offload_closed(self) -> None:
        """With `offload`: move keys and values of closed segments to the CPU, if they are not there yet."""
        if self.offload and self.keys.offset < self.closed:
            self.split(self.closed)

    def split(self, place: int) -> None:
        """Put rows before `place` on the CPU and the others on the device.

        Keys and values move together: if memory runs out, neither has moved.
        """
        buffers = self.keys, self.values
        storages = [buffer.prepare_split(place, self.sizes.most_open(place)) for buffer in buffers]
        for buffer, storage in zip(buffers, storages, strict=True):
            buffer.split(place, storage)

    def crop(self, length: int, most_closed: int) -> None:
        """Keep the first `length` keys. Segments that end after key `most_closed` are opened again."""
        ends = [bound for bound in self.bounds if bound > most_closed]
        if ends:
            self._reopen(ends, length)
        self._truncate(length)
        if ends and self.offload:
            self.split(self.closed)  # `_reopen` has made room for whole segments, which is too much by now.

    def _truncate(self, length: int) -> None:
        """Keep the first keys; the others must be in the open end."""
        for buffer in (self.keys, self.values):
            buffer.truncate(length)
        self.settled = min(self.settled, length)
        self.key_padding = None if self.key_padding is None else self.key_padding[:, :length]

    def _reopen(self, ends: list[int], length: int) -> None:
        """Open the last segments, which end at `ends`, and forget those that begin at key `length` or later."""
        bounds = self.bounds[: -len(ends)]
        reopened = [slice(*segment) for segment in pairwise([bounds[-1], *ends])]
        cross = self._cross_without(reopened)
        kept = [segment for segment in reopened if segment.start < length]
        self._truncate(max(length, kept[-1].stop if kept else bounds[-1]))
        if self.keys.offset > bounds[-1]:
            self.split(bounds[-1])
        for buffer in (self.keys, self.values):
            for segment in kept:
                rows = buffer.view(segment)
                rows.copy_(_unsorted(rows, self.order.filled[:, :, segment]))
        self.tables.drop_last(sum(map(self._cells_in, reopened)), cross)
        self.bounds = bounds
        self.order.truncate(self.closed)
        self.sinks.masked_fill_(self.sinks >= self.closed, -1)
        self._sink_rows = None

    def _cross_without(self, segments: list[slice]) -> Tensor:
        """`tables.cross` without these segments, the last ones. Those on the CPU are copied over one by one."""
        tables, last = self.tables, len(self.tables)
        if segments[0].start == 0:
            return torch.zeros_like(tables.cross)
        cross = tables.cross
        for segment in reversed(segments):
            cells = slice(last - self._cells_in(segment), last)
            last = cells.start
            start = tables.start.flat[:, cells].long() - segment.start
            means = (x.flat[:, cells].to(cross.dtype) for x in (tables.centroid, tables.value))
            keys, values = (x.read(segment).flatten(0, 1) for x in (self.keys, self.values))
            cross = cross - cross_of(keys, values, start, *means).view_as(cross)
        return cross

    def sink_rows(self, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor | None]:
        """The keys and values `[batch * heads, sinks, dim]` at `sinks`, and `[batch * heads, 1, sinks]`: True if there is none.

        They are a copy, made once. The mask is None if all of them are there.
        """
        if self._sink_rows is None or self._sink_rows[0].dtype != dtype:
            place = self.sinks.repeat_interleave(self.heads, 0)
            absent = (place < 0)[:, None]
            self._sink_rows = (*self.gather(place.clamp(min=0), dtype), absent if bool(absent.any()) else None)
        return self._sink_rows

    def gather(self, place: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Some keys and values of each head: `[batch * heads, any, dim]` for `place` `[batch * heads, any]`."""
        return self.keys.gather(place).to(dtype), self.values.gather(place).to(dtype)

    def hidden_mask(self, keys: slice, first: int, rows: int, group: int) -> Tensor | None:
        """True where a row does not see a key; see `steps.hidden_mask`."""
        return hidden_mask(self.key_padding, self.heads, keys, first, rows, group, self.sinks.device)


def _unsorted(rows: Tensor, order: Tensor) -> Tensor:
    """Rows `[batch, heads, segment, dim]` of a closed segment in the order in which they came."""
    return torch.empty_like(rows).scatter_(2, order.long()[..., None].expand_as(rows), rows)
