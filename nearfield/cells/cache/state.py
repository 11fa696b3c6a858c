"""What a store holds: keys and values, with those of closed segments sorted by cell, and the moments of the cells."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from nearfield.cells.cache.adopted import KnownCells
from nearfield.cells.cache.buffers import Buffer, outside_inference
from nearfield.cells.cache.guard import Guard
from nearfield.cells.cache.resident import Pool, Resident
from nearfield.cells.cache.segments import CacheTables, can_stretch, close_segment, cross_of
from nearfield.cells.cache.steps import hidden_mask
from nearfield.cells.cache.stretch import query_sizes
from nearfield.cells.partition import Partition
from nearfield.cells.sizes import CacheSizes

Saved = tuple[tuple[Tensor, Tensor], ...]
"""Rows of a buffer, and copies of what was there before they were written over."""

Keep = Callable[[Saved], None]
"""What is called before rows that a store holds are written over: it sees to it that they are put back if anything fails."""


class DeviceLength:
    """A number of keys where kernels read it. The tensor stays where it is, so that a captured graph finds it."""

    def __init__(self, device: torch.device) -> None:
        with outside_inference():
            self.tensor = torch.zeros(1, dtype=torch.int32, device=device)
        self.known: int | None = 0
        """the value of `tensor`, without asking the device; None: it may be any"""

    def set(self, length: int) -> None:
        """Bring it up to date, without waiting for the device."""
        if self.known != length:
            self.known = None  # whatever interrupts what follows
            self.tensor.fill_(length)
            self.known = length


class CacheState:
    """Keys and values `[batch, heads, length, dim]`: first closed segments, each sorted by cell, then the open end.

    The open end is all that is in no closed segment: the window and the running segment. The *position* of a key is its number in
    the order in which keys came, its *place* is where it is stored. They are the same in the open end, which is not sorted.

    A state never changes: each operation returns another one, for the store to put in the place of this one when all has
    succeeded. They share memory. New rows are written behind those of this state, where it does not look. Where rows of this
    state itself are written over (a segment is sorted, padding is set to zero), `Keep` is called with a copy of them first.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        sizes: CacheSizes,
        partition: Partition,
        memory_length: int = 0,
        offload: bool = False,
        resident: int | None = None,
    ) -> None:
        """For keys and values like these. It holds the first `memory_length` of them, sorted already, and no others.

        `resident`: how many offloaded keys stay on the card, see `Resident`.
        """
        if memory_length and offload:
            raise ValueError("a memory stays where it is and cannot be offloaded; make its cache without offload")
        self.sizes, self.partition, self.offload = sizes, partition, offload
        self.memory_length = memory_length
        """how many keys belong to a memory, which is never changed and not copied"""
        self.keys, self.values = (Buffer(x, base=x, offset=memory_length) for x in (key, value))
        self.tables = CacheTables(key, value)
        self.order = self.tables.start  # as empty
        """`[batch, heads, closed]`: the key that is at each place, counted from the start of its segment"""
        self.sinks = torch.full((len(key), sizes.sinks), -1, device=key.device)
        """`[batch, sinks]`: the places of the first keys, as far as they are in closed segments; -1: none"""
        self.key_padding: Tensor | None = None
        """`[batch, length]`: False for padding; None: there is none"""
        self.settled = 0
        """how many keys can no longer change from padding to real, or back"""
        self.bounds = [0]
        """0, and then where each closed segment ends"""
        self.cell_bounds = [0]
        """0, and then where its cells end"""
        self.query_sizes: Tensor | None = None
        """`[batch, heads, dim]`: how large queries of the prompt are, see `stretch`; None: it is not known. A crop leaves it"""
        self.guard: Guard | None = None
        """what looks at the error of steps have found; None: there are none"""
        self.undo: Saved = ()
        """rows that an operation has written over, or is about to; it has not come to its end"""
        self.in_graph = False
        """whether the last key was appended while a graph was captured, which then counts it on the device"""
        self._sink_rows: tuple[Tensor, Tensor, Tensor | None] | None = None
        self.device_length = DeviceLength(key.device)
        """shared by all states of a store: what a state says about it, it says by `sync_device_length`"""
        self.resident = Resident(resident) if offload and resident != 0 else None
        """which offloaded rows are on the card too, for kernels to read there; shared by states with the same rows offloaded"""

    def but(self, **changes: Any) -> CacheState:
        """This one with some attributes changed."""
        made = object.__new__(type(self))
        made.__dict__ = self.__dict__ | changes
        return made

    def restored(self) -> CacheState:
        """This one after an operation that did not come to its end: its rows are put back. May itself be interrupted."""
        for rows, before in self.undo:
            rows.copy_(before)
        return self.but(undo=())

    @property
    def length(self) -> int:
        return self.keys.length

    @property
    def closed(self) -> int:
        """How many keys are in closed segments."""
        return self.bounds[-1]

    @property
    def cells(self) -> int:
        """In how many cells these are."""
        return len(self.tables)

    @property
    def heads(self) -> int:
        return self.keys.storage.shape[1]

    @property
    def no_padding(self) -> Tensor:
        """`[batch, length]` of True, which takes no memory."""
        return torch.ones((), dtype=torch.bool, device=self.sinks.device).expand(len(self.sinks), self.length)

    def append(self, key: Tensor, value: Tensor, key_padding: Tensor | None) -> CacheState:
        """With more keys and values `[batch, heads, new, dim]`; `key_padding` `[batch, new]` is False for padding.

        Where that is said, it is settled, and padding is stored as zero, since it may hold anything, even NaN.
        """
        if key.is_cuda and torch.cuda.is_current_stream_capturing():
            return self._append_in_graph(key, value)
        if key_padding is None:
            grown = self.but(keys=self.keys.append(key), values=self.values.append(value), in_graph=False)
            if self.key_padding is None:
                return grown
            return grown.but(key_padding=torch.cat([self.key_padding, grown.no_padding[:, self.length :]], 1))
        key_padding = key_padding.to(key.device)
        hidden = ~key_padding[:, None, :, None]
        grown = self.but(
            keys=self.keys.append(key.masked_fill(hidden, 0.0)),
            values=self.values.append(value.masked_fill(hidden, 0.0)),
            in_graph=False,
        )
        padding = torch.cat([self.no_padding if self.key_padding is None else self.key_padding, key_padding], 1)
        return grown.but(key_padding=None if bool(padding.all()) else padding, settled=grown.length)

    def _append_in_graph(self, key: Tensor, value: Tensor) -> CacheState:
        """With one key at the length that the device holds, so that each replay of the graph adds the next one."""
        count = self.device_length
        if key.shape[2] != 1 or count.known != self.length or self.key_padding is not None:
            raise RuntimeError("a graph appends one key at a time, without padding, to a store that has already attended once")
        for buffer in (self.keys, self.values):
            if buffer.length - buffer.offset >= buffer.storage.shape[2]:
                raise RuntimeError("a graph cannot make room for more keys; call store.reserve(keys) before capturing it")
        count.known = None  # Nothing of this runs now.
        row = count.tensor.long() - self.keys.offset
        self.keys.storage.index_copy_(2, row, key)
        self.values.storage.index_copy_(2, row, value)
        count.tensor.add_(1)
        return self.advanced(1).but(in_graph=True)

    def advanced(self, keys: int) -> CacheState:
        """With keys that a replayed graph has written behind those of this state."""
        length = self.length + keys
        return self.but(keys=self.keys.but(length=length), values=self.values.but(length=length), settled=length)

    def sync_device_length(self) -> Tensor:
        """`[1]`, on the device: how many keys there are, brought up to date without waiting for the device.

        Kernels read the length there, so that a captured graph stays right when keys are added.
        """
        count = self.device_length
        if not (self.in_graph and torch.cuda.is_current_stream_capturing()):
            count.set(self.length)
        return count.tensor

    def pool(self, probes: int) -> Pool | None:
        """Where kernels find offloaded rows that are on the card, for steps that open so many cells; None: there are none."""
        if self.resident is None or self.keys.base is None or not len(self.tables):
            return None
        return self.resident.made(self.keys, self.values, len(self.tables), probes)

    def _none_resident(self) -> Resident | None:
        """For a state with other rows offloaded than this one, or with the same ones elsewhere."""
        return None if self.resident is None else self.resident.anew()

    def settle_padding(self, key_padding: Tensor | None, keep: Keep) -> CacheState:
        """With the padding of all keys so far. Newly settled padding is set to zero, since it may hold anything, even NaN."""
        if key_padding is self.key_padding and self.settled == self.length:
            return self
        new = slice(self.settled, self.length)
        if key_padding is not None and not bool(key_padding[:, new].all()):
            places = [buffer.view(new) for buffer in (self.keys, self.values)]
            hidden = ~key_padding[:, None, new, None]
            keep(tuple((rows, rows.clone()) for rows in places))
            for rows in places:
                rows.masked_fill_(hidden, 0.0)
        return self.but(key_padding=key_padding, settled=self.length)

    def select(self, entries: Tensor) -> CacheState:
        """With these batch entries, in this order."""
        return self.but(
            **{name: getattr(self, name).select(entries) for name in ("keys", "values", "order", "tables")},
            sinks=self.sinks.index_select(0, entries),
            key_padding=None if self.key_padding is None else self.key_padding.index_select(0, entries),
            query_sizes=None if self.query_sizes is None else self.query_sizes.index_select(0, entries),
            resident=self._none_resident(),
            _sink_rows=None,
        )

    def in_order(self, buffer: Buffer) -> Tensor:
        """A copy of `keys` or `values` in the order in which they came."""
        found = buffer.filled.clone(memory_format=torch.contiguous_format)
        for segment in map(slice, self.bounds, self.bounds[1:]):
            found[:, :, segment] = _unsorted(found[:, :, segment], self.order.filled[:, :, segment])
        return found

    def _reorder(self, segment: slice, order: Tensor, keep: Keep) -> None:
        """Put the rows of a segment where they are in another order `[batch, heads, segment]`."""
        saved = tuple((rows, rows.clone()) for rows in (x.view(segment) for x in (self.keys, self.values)))
        keep(saved)
        for rows, before in saved:
            torch.gather(before, 2, order.long()[..., None].expand_as(rows), out=rows)

    def close_next(
        self,
        end: int,
        keep: Keep,
        known: KnownCells | None = None,
        cells: int | None = None,
        before: int | Tensor | None = None,
    ) -> CacheState:
        """With the next segment closed, which ends at key `end`: its keys are grouped into cells, and sorted.

        `known`: their cells, where somebody has grouped them already; `cells`: how many to make. Where this holds a share of the
        keys, `before` says how many keys that are no padding come before the segment in the sequence, of all batch entries or
        `[batch]` of each. None: as many as lie before it here.
        """
        segment = slice(self.closed, end)
        if cells is None:
            cells = self.sizes.cells(segment.start, end) if known is None else known.cells
        keys, values = (x.view(segment).flatten(0, 1) for x in (self.keys, self.values))
        padding = None if self.key_padding is None else self.key_padding[:, segment].repeat_interleave(self.heads, 0)
        outside, sinks = self._find_sinks(segment, before)
        outside = outside.repeat_interleave(self.heads, 0)
        first_outside = None
        if padding is None and not isinstance(before, Tensor):
            first, last = self._first_keys(segment, before)
            first_outside = last - first
        given = None if known is None else known.cell_of
        sizes = None if self.query_sizes is None else self.query_sizes.flatten(0, 1)
        found = close_segment(keys, values, padding, outside, cells, self.partition, given, first_outside, sizes)
        order = found.order.unflatten(0, (-1, self.heads))
        closed = self.but(
            order=self.order.append(order),
            tables=self.tables.append(found, segment.start, sizes is not None and known is None and can_stretch(self.partition)),
            sinks=sinks,
            bounds=[*self.bounds, end],
            cell_bounds=[*self.cell_bounds, self.cell_bounds[-1] + cells],
            settled=max(self.settled, end),
            _sink_rows=None,
        )
        closed._reorder(segment, order, keep)
        return closed

    def seen_by(self, query: Tensor) -> CacheState:
        """With the sizes of the queries `[batch, heads, rows, dim]` of the latest keys, for segments that are closed later."""
        counts = None if self.key_padding is None else self.key_padding[:, self.length - query.shape[2] :]
        return self.but(query_sizes=query_sizes(query.detach(), self.heads, counts))

    def _find_sinks(self, segment: slice, before: int | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """`[batch, segment]`: True for keys that belong to no cell, which are sinks and padding; and the new `sinks`.

        `before`: see `close_next`.
        """
        if self.key_padding is None and not isinstance(before, Tensor):
            return self._find_first_keys(segment, before)
        is_real = (self.no_padding if self.key_padding is None else self.key_padding)[:, segment]
        earlier = (
            (self.sinks >= 0).sum(1) if before is None else torch.as_tensor(before, device=is_real.device).expand(len(is_real))
        )
        number = earlier[:, None] + is_real.cumsum(1)
        is_sink = is_real & (number <= self.sizes.sinks)
        outside = is_sink | ~is_real
        # Sorting puts all of these first, in the order in which they came.
        place = segment.start + outside.cumsum(1) - 1
        entry, column = is_sink.nonzero(as_tuple=True)
        sinks = self.sinks.clone()
        sinks[entry, number[entry, column] - 1] = place[entry, column]
        return outside, sinks

    def _find_first_keys(self, segment: slice, before: int | None = None) -> tuple[Tensor, Tensor]:
        """`_find_sinks` without padding, where sinks are the first keys: nobody has to wait for a GPU to look at them."""
        first, last = self._first_keys(segment, before)
        device, place = self.sinks.device, segment.start
        outside = torch.arange(segment.stop - place, device=device) < last - first
        sinks = self.sinks.clone()
        sinks[:, first:last] = torch.arange(place, place + last - first, dtype=sinks.dtype, device=device)
        return outside.expand(len(sinks), -1), sinks

    def _first_keys(self, segment: slice, before: int | None) -> tuple[int, int]:
        """Of the first keys of the sequence, which are in the segment: from this one on, and up to this one."""
        start = segment.start if before is None else before
        return min(start, self.sizes.sinks), min(start + segment.stop - segment.start, self.sizes.sinks)

    @property
    def has_room(self) -> bool:
        """Whether one more key can be appended where memory lies."""
        return self.length - self.keys.offset < self.keys.storage.shape[2]

    def offload_closed(self) -> CacheState:
        """With `offload`: keys and values of closed segments are on the CPU."""
        return self.split(self.closed) if self.offload and self.keys.offset < self.closed else self

    def split(self, place: int) -> CacheState:
        """With rows before `place` on the CPU and the others on the device."""
        room = self.sizes.most_open(place)
        split = {"keys": self.keys.split(place, room), "values": self.values.split(place, room)}
        return self.but(**split, resident=self._none_resident())

    def crop(self, length: int, most_closed: int, keep: Keep) -> CacheState:
        """With the first `length` keys. Segments that end after key `most_closed` are opened again."""
        ends = [bound for bound in self.bounds if bound > most_closed]
        if not ends:
            return self._truncated(length)
        cropped = self._reopened(ends, length, keep)._truncated(length)
        # `_reopened` has made room for whole segments, which is too much by now.
        return cropped.split(cropped.closed) if self.offload else cropped

    def _truncated(self, length: int) -> CacheState:
        """With the first keys; the others must be in the open end."""
        return self.but(
            keys=self.keys.truncate(length),
            values=self.values.truncate(length),
            settled=min(self.settled, length),
            key_padding=None if self.key_padding is None else self.key_padding[:, :length],
            in_graph=False,
        )

    def _reopened(self, ends: list[int], length: int, keep: Keep) -> CacheState:
        """With the last segments open, which end at `ends`, and without those that begin at key `length` or later."""
        bounds = self.bounds[: -len(ends)]
        reopened = [slice(*segment) for segment in pairwise([bounds[-1], *ends])]
        cell_bounds = self.cell_bounds[: len(bounds)]
        cross = self._cross_without(reopened)
        kept = [segment for segment in reopened if segment.start < length]
        state = self._truncated(max(length, kept[-1].stop if kept else bounds[-1]))
        if state.keys.offset > bounds[-1]:
            state = state.split(bounds[-1])
        for segment in kept:
            state._reorder(segment, _inverse(self.order.filled[:, :, segment]), keep)
        return state.but(
            order=self.order.truncate(bounds[-1]),
            tables=self.tables.drop_last(len(self.tables) - cell_bounds[-1], cross),
            sinks=self.sinks.masked_fill(self.sinks >= bounds[-1], -1),
            bounds=bounds,
            cell_bounds=cell_bounds,
            resident=self._none_resident(),
            _sink_rows=None,
        )

    def _cross_without(self, segments: list[slice]) -> Tensor:
        """`tables.cross` without these segments, the last ones. Those on the CPU are copied over one by one."""
        tables, cross = self.tables, self.tables.cross
        if segments[0].start == 0:
            return torch.zeros_like(cross)
        own = [slice(*ends) for ends in pairwise(self.cell_bounds[-len(segments) - 1 :])]
        for segment, cells in zip(reversed(segments), reversed(own), strict=True):
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
            # There may be room for more of them than there are keys.
            used = (self.sinks >= 0).any(0).nonzero()[:, 0].tolist()
            place = self.sinks[:, : used[-1] + 1 if used else 0].repeat_interleave(self.heads, 0)
            absent = (place < 0)[:, None]
            self._sink_rows = (*self.gather(place.clamp(min=0), dtype), absent if bool(absent.any()) else None)
        return self._sink_rows

    def gather(self, place: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Some keys and values of each head: `[batch * heads, any, dim]` for `place` `[batch * heads, any]`."""
        keys, values = self.keys, self.values
        if keys.base is None and values.base is None and keys.storage.shape[2] == values.storage.shape[2]:
            number = keys.numbers(place)
            return keys.take(number).to(dtype), values.take(number).to(dtype)
        return keys.gather(place).to(dtype), values.gather(place).to(dtype)

    def hidden_mask(self, keys: slice, first: int, rows: int, group: int, positions: Tensor | None = None) -> Tensor | None:
        """True where a row does not see a key; see `steps.hidden_mask`."""
        return hidden_mask(self.key_padding, self.heads, keys, first, rows, group, self.sinks.device, positions)


def _inverse(order: Tensor) -> Tensor:
    """The order `[batch, heads, segment]` that undoes this one."""
    number = torch.arange(order.shape[2], device=order.device).expand(order.shape)
    return torch.empty_like(number, memory_format=torch.contiguous_format).scatter_(2, order.long(), number)


def _unsorted(rows: Tensor, order: Tensor) -> Tensor:
    """Rows `[batch, heads, segment, dim]` of a closed segment in the order in which they came."""
    return torch.empty_like(rows).scatter_(2, order.long()[..., None].expand_as(rows), rows)
