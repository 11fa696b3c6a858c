"""One batch entry of an `IndexStore`: its index, and the values of its keys."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass

import torch
from torch import Tensor

from nearfield.knn.index.base import BuiltIndex, Index
from nearfield.knn.index.own import build_index
from nearfield.knn.index.room import Room


@dataclass(frozen=True)
class Entry:
    """Keys without padding, in an index, and their values. It never changes, and batch entries of a store may share one."""

    index: BuiltIndex
    """of keys `[heads, length, dim]`"""
    room: Room
    """of values `[heads, capacity, value_dim]`, in float32, or float64 if these are"""
    bad: Tensor | None = None
    """`[heads]`: the first key that is not finite, or has such a value; both are zero here. None: all are finite."""

    @classmethod
    def begin(cls, index: Index, key: Tensor, value: Tensor) -> Entry | None:
        """For keys and values `[heads, new, dim]`; None if there is none."""
        if key.shape[1] == 0:
            return None
        key, value, bad = _clean(key, value, 0)
        return cls(build_index(index, key), Room(value, value.shape[1]), bad)

    @property
    def length(self) -> int:
        return self.index.length

    @property
    def keys(self) -> Tensor:
        return self.index.keys

    @property
    def values(self) -> Tensor:
        """`[heads, length, value_dim]`"""
        return self.room.table[:, : self.length]

    def grown(self, key: Tensor, value: Tensor, take_in: bool) -> Entry:
        """With more keys behind these."""
        key, value, bad = _clean(key, value, self.length)
        if self.bad is not None and bad is not None:
            bad = torch.minimum(self.bad, bad)
        index = self.index.add(key, take_in=take_in)
        room, _ = self.room.append(self.length, value)
        return Entry(index, room, self.bad if bad is None else bad)

    def first(self, length: int) -> Entry:
        """With the first keys alone."""
        bad = None if self.bad is None or not bool((self.bad < length).any()) else self.bad
        return Entry(self.index.first(length), self.room, bad)

    def reserve(self, more: int) -> Entry:
        """With free space for so many more keys."""
        room = self.room if self.room.has_space(self.length, more) else Room(self.values, self.length + more)
        return Entry(self.index.reserve(more), room, self.bad)

    def spoils(self, visible: Tensor) -> Tensor:
        """Whether rows `[heads, rows]` that see so many keys see one that is not finite."""
        return torch.zeros_like(visible, dtype=torch.bool) if self.bad is None else visible > self.bad[:, None]

    def rooms(self) -> tuple[Room | None, Room]:
        return self.index._room, self.room

    def learned(self) -> Iterator[Tensor]:
        """All tensors of the index, its keys among them; some may share memory."""
        return _memory_of(self.index)


def _memory_of(holder: object) -> Iterator[Tensor]:
    if isinstance(holder, Tensor):
        yield holder
        return
    if isinstance(holder, Mapping):
        parts: Iterable[object] = holder.values()
    elif isinstance(holder, list | tuple):
        parts = holder
    elif isinstance(holder, BuiltIndex) or is_dataclass(holder):
        parts = vars(holder).values()
    else:
        return
    for part in parts:
        yield from _memory_of(part)


def _clean(key: Tensor, value: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Keys and values, these in the dtype of arithmetic, with zeros in place of what is not finite; and the first such key."""
    value = value.to(torch.promote_types(value.dtype, torch.float32))
    # A sum is finite only if all its terms are: one cheap pass for the usual case.
    if bool((key.sum(dtype=value.dtype) + value.sum()).isfinite()):
        return key, value, None
    bad = (key.isfinite().all(-1) & value.isfinite().all(-1)).logical_not()
    if not bool(bad.any()):
        return key, value, None
    number = torch.arange(start, start + bad.shape[1], device=bad.device)
    first = torch.where(bad, number, torch.iinfo(torch.int64).max).amin(1)
    return key.masked_fill(bad[..., None], 0.0), value.masked_fill(bad[..., None], 0.0), first
