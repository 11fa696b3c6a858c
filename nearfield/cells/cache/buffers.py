"""Tensors that grow along their length without being copied at every step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

GROWTH = 1.25
"""A full buffer moves to one of this size: at most a quarter stays unused, and a number is copied about five times in all."""


class Buffer:
    """`[batch, heads, length, ...]`, with room for more.

    Its beginning may be elsewhere: in a tensor `[1, heads, ...]` which somebody else keeps, a mapped file perhaps, that all batch
    entries share and nobody writes to; or in memory of the CPU `[batch, heads, ...]`, where it was put away. If that is pinned, a
    block of it may take up to twice what it says, for PyTorch rounds its size up to a power of two.
    """

    def __init__(
        self,
        like: Tensor,
        dtype: torch.dtype | None = None,
        base: Tensor | None = None,
        offset: int = 0,
        reader: torch.device | None = None,
    ) -> None:
        """Empty but for the first `offset` rows of `base`, and wide as `like` `[batch, heads, any, ...]`."""
        self.storage = like.new_empty((*like.shape[:2], 0, *like.shape[3:]), dtype=dtype)
        self.base = base if offset else None
        self.offset = self.length = offset
        self.reader = reader
        """the GPU whose kernels read it though it is in memory of the CPU, which is pinned then"""
        self.away: Buffer | None = None
        """the keeper of a base that was put away"""

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy of pinned memory is not pinned.
        self.__dict__.update(state)
        if self.reader is not None and torch.cuda.is_available():
            self.storage = self.storage.pin_memory()
        if self.away is not None and self.offset:
            self.base = self.away.storage

    def append(self, more: Tensor) -> None:
        own = self.length - self.offset
        needed = own + more.shape[2]
        if needed > self.storage.shape[2]:
            self.reserve(more.shape[2] if not own else int(needed * GROWTH) - own)
        self.storage[:, :, own:needed] = more
        self.length += more.shape[2]

    def reserve(self, more: int) -> None:
        """Have room for so many more."""
        own = self.length - self.offset
        if own + more > self.storage.shape[2]:
            self._move(own + more)

    def _move(self, size: int) -> None:
        storage = self._empty(size)
        own = self.length - self.offset
        storage[:, :, :own] = self.storage[:, :, :own]
        self._give_up()
        self.storage = storage

    def _empty(self, size: int, batch: int | None = None) -> Tensor:
        """Another storage."""
        batch = len(self.storage) if batch is None else batch
        shape = (batch, self.storage.shape[1], size, *self.storage.shape[3:])
        return self.storage.new_empty(shape, pin_memory=self.reader is not None)

    def _give_up(self) -> None:
        """This storage: whoever is given pinned memory next does not wait for kernels that are reading it."""
        if self.reader is not None and self.storage.numel():
            torch.cuda.synchronize(self.reader)

    def storage_from(self, place: int, size: int) -> Tensor:
        """Another storage with the rows from this place on, for `size` in all. Those before it are in memory of the CPU then, too.

        For `split`. Before that nothing has changed, whatever fails here.
        """
        if self.away is None:
            self.away = Buffer(self.storage[:, :, :0].cpu(), reader=self.storage.device if self.storage.is_cuda else None)
        self.away.length = self.offset
        if place > self.offset:
            self.away.append(self.part(slice(self.offset, place)))
        storage = self._empty(max(size, self.length - place))
        middle = max(place, self.offset)
        if place < middle:
            storage[:, :, : middle - place] = self.at(slice(place, middle))
        storage[:, :, middle - place : self.length - place] = self.part(slice(middle, self.length))
        return storage

    def split(self, place: int, storage: Tensor) -> None:
        """Rows before this place are those that were put away, and the others are in `storage_from(place, ...)`."""
        assert self.away is not None
        self.storage, self.away.length = storage, place
        self._begin_at(place)

    def cut(self, length: int) -> None:
        """Keep the first rows."""
        self.length = length
        if self.offset > length:
            self._begin_at(length)

    def _begin_at(self, place: int) -> None:
        assert self.away is not None
        self.offset, self.base = place, self.away.storage if place else None

    def at(self, places: slice) -> Tensor:
        """`[batch, heads, places, ...]` on the device, all from before or all after `offset`; a copy where they were put away."""
        if places.start >= self.offset:
            return self.part(places)
        assert self.base is not None
        return self.base[:, :, places].to(self.storage.device)

    def part(self, places: slice) -> Tensor:
        """`[batch, heads, places, ...]` after the base, not a copy"""
        return self.storage[:, :, places.start - self.offset : places.stop - self.offset]

    @property
    def filled(self) -> Tensor:
        """`[batch, heads, length, ...]`, not a copy where there is no base"""
        own = self.storage[:, :, : self.length - self.offset]
        if self.base is None:
            return own
        shared = self.base[:, :, : self.offset].to(own.device)
        return torch.cat([shared.expand(len(own), *shared.shape[1:]), own], 2)

    @property
    def heads(self) -> Tensor:
        """`[batch * heads, length, ...]`, likewise"""
        return self.filled.flatten(0, 1) if self.base is not None else self.storage.flatten(0, 1)[:, : self.length]

    def rows(self, place: Tensor) -> Tensor:
        """Those at some places of each head `[batch * heads, any]`: `[batch * heads, any, ...]`.

        Of what is on another device these rows are brought over, and nothing else.
        """
        head = torch.arange(len(place), device=place.device)[:, None]
        if self.base is None:
            return _rows(self.storage, place + head * self.storage.shape[2])
        batch, heads, rows = self.base.shape[:3]
        number = place.clamp(max=self.offset - 1) + head % (batch * heads) * rows
        shared = _rows(self.base, number.to(self.base.device)).to(place.device, non_blocking=True)
        if self.storage.shape[2] == 0:
            return shared
        own = _rows(self.storage, (place - self.offset).clamp(min=0) + head * self.storage.shape[2])
        return torch.where((place < self.offset)[..., None], shared, own)

    def select(self, entries: Tensor) -> None:
        storage = torch.index_select(self.storage, 0, entries, out=self._empty(self.storage.shape[2], len(entries)))
        self._give_up()
        self.storage = storage
        if self.away is not None:
            self.away.select(entries.cpu())
            self.base = self.away.storage if self.offset else None

    @property
    def nbytes(self) -> int:
        """Without the base."""
        return self.storage.nbytes


def _rows(storage: Tensor, number: Tensor) -> Tensor:
    return storage.flatten(0, 2).index_select(0, number.view(-1)).unflatten(0, number.shape)
