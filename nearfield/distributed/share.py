"""What one rank holds of a cache: the keys and cells of its own segments, and what it knows of all others."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.cells.cache.attention import RECENT
from nearfield.cells.cache.buffers import Buffer
from nearfield.cells.cache.guard import Guard
from nearfield.cells.cache.segments import CacheTables, FlatTables, can_stretch
from nearfield.cells.cache.state import CacheState, Keep, Saved
from nearfield.cells.cache.stretch import query_sizes
from nearfield.distributed.deal import Deal
from nearfield.distributed.layout import ZigZag


class OpenEnd(NamedTuple):
    """Own keys in no closed segment, as rows see them."""

    places: slice
    hidden: Tensor | None
    """True where a row does not see a key"""
    positions: Tensor | None
    """in the sequence; None: there is one row"""
    recent: int
    """how many of them are among the latest keys of that row, which count where cells are chosen"""


class Share:
    """The part of one rank in a state of all ranks, with the interface of a `CacheState`.

    `length`, `closed`, `cells`, `key_padding` and positions are those of the whole sequence, and the same on all ranks. `own` is
    what this rank has: a state in which the places of keys are counted among its own, in the order of their positions.

    As a `CacheState`, it never changes: each operation returns another one.
    """

    memory_length = 0
    resident = None

    def __init__(self, own: CacheState, deal: Deal, rank: int) -> None:
        self.own, self.deal, self.rank = own, deal, rank
        self.closed_segments = self.cells = 0
        """how many are closed on all ranks, and in how many cells they are"""
        self.by_queries = True
        """that of `CacheTables`, of the cells of all ranks; those of `own` say the same"""
        self.key_padding: Tensor | None = None
        self.settled = 0
        self.guard: Guard | None = None
        self.undo: Saved = ()
        self.selected = 0
        """a digest of which batch entries were kept"""
        self.counted: list[int] | None = None
        """how many keys of each batch entry are no padding, as far as that was said; None: all"""
        self.covariance: Tensor | None = None
        """that of `FlatTables`, of the cells of all ranks; None: not known yet. Found out once, as `CacheTables.flat` is"""

    def but(self, **changes: Any) -> Share:
        """This one with some attributes changed."""
        made = object.__new__(type(self))
        made.__dict__ = self.__dict__ | changes
        return made

    @property
    def facts(self) -> dict[str, Any]:
        """What is the same on ranks that hold shares of one sequence."""
        return {
            "length": self.length,
            "closed": self.closed,
            "segments": self.deal.digest,
            "by_queries": self.by_queries,
            "entries": self.selected,
            "padding": self.counted,
        }

    def restored(self) -> Share:
        """This one after an operation that did not come to its end: its rows are put back. May itself be interrupted."""
        for rows, before in self.undo:
            rows.copy_(before)
        return self.but(undo=())

    @property
    def length(self) -> int:
        return self.deal.length

    @property
    def closed(self) -> int:
        return self.deal.segments[self.closed_segments - 1].stop if self.closed_segments else 0

    @property
    def bounds(self) -> list[int]:
        return [0, *(segment.stop for segment in self.deal.segments[: self.closed_segments])]

    @property
    def heads(self) -> int:
        return self.own.heads

    # What these are like is the same on all ranks; how many rows they have is not.

    @property
    def keys(self) -> Buffer:
        return self.own.keys

    @property
    def values(self) -> Buffer:
        return self.own.values

    @property
    def order(self) -> Buffer:
        return self.own.order

    @property
    def tables(self) -> CacheTables:
        return self.own.tables

    @property
    def sinks(self) -> Tensor:
        return self.own.sinks

    @property
    def no_padding(self) -> Tensor:
        """`[batch, length]` of True, which takes no memory."""
        return torch.ones((), dtype=torch.bool, device=self.sinks.device).expand(len(self.sinks), self.length)

    @property
    def flat(self) -> FlatTables:
        """The tables of the own cells, with the covariance of all cells."""
        flat = self.own.tables.flat
        return flat if self.covariance is None else flat._replace(covariance=self.covariance)

    def append(self, key: Tensor, value: Tensor, key_padding: Tensor | None) -> Share:
        """With more keys and values `[batch, heads, new, dim]`, of which this rank keeps its own."""
        deal = self.deal.extended(self.length + key.shape[2])
        parts = deal.own(self.rank, slice(self.length, deal.length))
        own = self.own
        if parts:
            new: slice | Tensor = slice(parts[0].start - self.length, parts[0].stop - self.length)
            if len(parts) > 1:
                new = deal.positions(self.rank, slice(self.length, deal.length), key.device) - self.length
            mine = None if key_padding is None else key_padding.to(key.device)[:, new]
            own = own.append(key[:, :, new], value[:, :, new], mine)
        grown = self.but(own=own, deal=deal)
        if key_padding is None:
            if self.key_padding is None:
                return grown
            return grown.but(key_padding=torch.cat([self.key_padding, grown.no_padding[:, self.length :]], 1))
        key_padding = key_padding.to(key.device)
        padding = torch.cat([self.no_padding if self.key_padding is None else self.key_padding, key_padding], 1)
        return grown.but(key_padding=None if bool(padding.all()) else padding, settled=deal.length)

    def append_shard(self, key: Tensor, value: Tensor, layout: ZigZag) -> Share:
        """With a prompt of which this has the tokens of its rank alone."""
        deal = self.deal.sharded(layout)
        # Of a piece that is cut, both parts are here, one after the other: the order is that of positions anyway.
        return self.but(own=self.own.append(key, value, None), deal=deal)

    def settle_padding(self, key_padding: Tensor | None, keep: Keep) -> Share:
        """With the padding of all keys so far; see `CacheState.settle_padding`."""
        if key_padding is self.key_padding and self.settled == self.length:
            return self
        own = self.own.but(settled=self.deal.held(self.rank, self.settled))
        mine = None
        if key_padding is not None:
            mine = key_padding[:, self.deal.positions(self.rank, slice(0, self.length), key_padding.device)]
        counted = None if key_padding is None else key_padding.sum(1).tolist()
        return self.but(own=own.settle_padding(mine, keep), key_padding=key_padding, settled=self.length, counted=counted)

    def seen_by(self, query: Tensor) -> Share:
        """With the sizes of the queries of the latest keys; see `CacheState.seen_by`."""
        counts = None if self.key_padding is None else self.key_padding[:, self.length - query.shape[2] :]
        return self.but(own=self.own.but(query_sizes=query_sizes(query.detach(), self.heads, counts)))

    def select(self, entries: Tensor) -> Share:
        """With these batch entries, in this order."""
        covariance = self.covariance
        if covariance is not None:
            covariance = covariance.unflatten(0, (-1, self.heads)).index_select(0, entries).flatten(0, 1)
        padding = None if self.key_padding is None else self.key_padding.index_select(0, entries)
        selected = hash((self.selected, *entries.tolist()))
        return self.but(own=self.own.select(entries), key_padding=padding, covariance=covariance, selected=selected)

    def close_next(self, end: int, keep: Keep) -> Share:
        """With the next segment closed, which ends at key `end`: the rank that has it groups its keys into cells."""
        segment = self.deal.segments[self.closed_segments]
        cells, own = self.deal.sizes.cells(segment.start, end), self.own
        by_queries = self.by_queries and own.query_sizes is not None and can_stretch(own.partition)
        if segment.owner == self.rank:
            before: int | Tensor = segment.start
            if self.key_padding is not None:
                before = self.key_padding[:, : segment.start].sum(1)
            place = own.closed + end - segment.start
            own = own.but(settled=max(own.settled, place)).close_next(place, keep, cells=cells, before=before)
        closed = self.but(closed_segments=self.closed_segments + 1, cells=self.cells + cells, covariance=None)
        return closed.but(own=_marked(own, by_queries), by_queries=by_queries, settled=max(self.settled, end))

    def crop(self, length: int, most_closed: int, keep: Keep) -> Share:
        """With the first `length` keys. Segments that end after key `most_closed` are opened again."""
        kept = sum(segment.stop <= most_closed for segment in self.deal.segments[: self.closed_segments])
        closed = self.deal.segments[kept - 1].stop if kept else 0
        own = self.own.crop(self.deal.held(self.rank, length), self.deal.held(self.rank, closed), keep)
        changes: dict[str, Any] = {}
        if kept < self.closed_segments:
            cells = sum(self.deal.sizes.cells(*segment[:2]) for segment in self.deal.segments[:kept])
            by_queries = self.by_queries or not kept
            changes = {"closed_segments": kept, "cells": cells, "covariance": None, "by_queries": by_queries}
            own = _marked(own, by_queries)
        padding = None if self.key_padding is None else self.key_padding[:, :length]
        deal = self.deal.cropped(length)
        return self.but(own=own, deal=deal, settled=min(self.settled, length), key_padding=padding, **changes)

    def offload_closed(self) -> Share:
        own = self.own.offload_closed()
        return self if own is self.own else self.but(own=own)

    def open_end(self, first: int, rows: int, group: int) -> OpenEnd:
        """What rows at the positions from `first` on see of the own keys that are in no closed segment."""
        seen = slice(self.closed, first + rows)
        place, device = self.own.closed, self.sinks.device
        if rows == 1:
            places = slice(place, place + self.deal.held_from(self.rank, seen.start, seen.stop))
            recent = self.deal.held_from(self.rank, max(seen.start, seen.stop - RECENT), seen.stop)
            return OpenEnd(places, self.own.hidden_mask(places, first, rows, group), None, recent)
        positions = self.deal.positions(self.rank, seen, device)
        places = slice(place, place + len(positions))
        return OpenEnd(places, self.own.hidden_mask(places, first, rows, group, positions), positions, 0)


def _marked(own: CacheState, by_queries: bool) -> CacheState:
    """What a rank has, with its cells scored as those of all ranks are: they are compared."""
    return own if own.tables.by_queries == by_queries else own.but(tables=own.tables.but(by_queries=by_queries))
