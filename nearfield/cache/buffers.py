"""Tensors that grow along their length without being copied at every step."""

from __future__ import annotations

import torch
from torch import Tensor

GROWTH = 1.25
"""A full buffer moves to one of this size: at most a quarter stays unused, and a number is copied about five times in all."""


class Buffer:
    """`[batch, heads, length, ...]`, with room for more.

    Its beginning may be that of a tensor `[1, heads, ...]` which somebody else keeps, a mapped file perhaps: all batch entries
    share it, and nobody writes there.
    """

    def __init__(self, like: Tensor, dtype: torch.dtype | None = None, base: Tensor | None = None, offset: int = 0) -> None:
        """Empty but for the first `offset` rows of `base`, and wide as `like` `[batch, heads, any, ...]`."""
        self.room = like.new_empty((*like.shape[:2], 0, *like.shape[3:]), dtype=dtype)
        self.base = base if offset else None
        self.offset = self.length = offset

    def append(self, more: Tensor) -> None:
        held = self.length - self.offset
        needed = held + more.shape[2]
        if needed > self.room.shape[2]:
            self.reserve(more.shape[2] if not held else int(needed * GROWTH) - held)
        self.room[:, :, held:needed] = more
        self.length += more.shape[2]

    def reserve(self, more: int) -> None:
        """Have room for so many more."""
        held = self.length - self.offset
        if held + more > self.room.shape[2]:
            room = self.room.new_empty((*self.room.shape[:2], held + more, *self.room.shape[3:]))
            room[:, :, :held] = self.room[:, :, :held]
            self.room = room

    def part(self, places: slice) -> Tensor:
        """`[batch, heads, places, ...]` after the base, not a copy"""
        return self.room[:, :, places.start - self.offset : places.stop - self.offset]

    @property
    def filled(self) -> Tensor:
        """`[batch, heads, length, ...]`, not a copy where there is no base"""
        own = self.room[:, :, : self.length - self.offset]
        if self.base is None:
            return own
        shared = self.base[:, :, : self.offset]
        return torch.cat([shared.expand(len(own), *shared.shape[1:]), own], 2)

    @property
    def heads(self) -> Tensor:
        """`[batch * heads, length, ...]`, likewise"""
        return self.filled.flatten(0, 1) if self.base is not None else self.room.flatten(0, 1)[:, : self.length]

    def rows(self, place: Tensor) -> Tensor:
        """Those at some places of each head `[batch * heads, any]`: `[batch * heads, any, ...]`."""
        head = torch.arange(len(place), device=place.device)[:, None]
        if self.base is None:
            return _rows(self.room, place + head * self.room.shape[2])
        shared = _rows(self.base, place.clamp(max=self.offset - 1) + head % self.base.shape[1] * self.base.shape[2])
        if self.room.shape[2] == 0:
            return shared
        own = _rows(self.room, (place - self.offset).clamp(min=0) + head * self.room.shape[2])
        return torch.where((place < self.offset)[..., None], shared, own)

    def select(self, entries: Tensor) -> None:
        self.room = self.room.index_select(0, entries)

    @property
    def nbytes(self) -> int:
        """Without the base."""
        return self.room.nbytes


def _rows(room: Tensor, number: Tensor) -> Tensor:
    return room.flatten(0, 2).index_select(0, number.view(-1)).unflatten(0, number.shape)
