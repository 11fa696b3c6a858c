"""Keys with free space behind them, so that adding a few does not copy them all."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Room:
    """A table `[batch, capacity, dim]` whose first `used` keys are taken, by indices that agree in the keys they share.

    An index never changes, so only the index that ends where the table ends may write behind itself, and what it writes lies
    beyond all others. Any other index gets a room of its own.
    """

    def __init__(self, keys: Tensor, capacity: int) -> None:
        batch, _, dim = keys.shape
        with torch.inference_mode(False):
            self.table = keys.new_empty(batch, capacity, dim)
        self.used = 0
        self._write(keys)

    def _write(self, keys: Tensor) -> None:
        # By `data`, so that the versions of the keys before, by which indices and autograd see changes, stay as they are.
        self.table.data[:, self.used : self.used + keys.shape[1]] = keys
        self.used += keys.shape[1]

    def has_space(self, length: int, more: int) -> bool:
        """Whether so many keys can be written behind the first `length` ones, where nobody else has written."""
        return self.used == length and self.table.shape[1] >= length + more

    def append(self, length: int, keys: Tensor) -> tuple[Room, Tensor]:
        """The first `length` keys and these behind them, `[batch, length + more, dim]`, and the room in which they are."""
        count = length + keys.shape[1]
        room = self
        if keys.shape[1] and not self.has_space(length, keys.shape[1]):
            room = Room(self.table[:, :length], 2 * count)
        room._write(keys)
        return room, room.table[:, :count]


def release(users: Iterable[tuple[Room | None, int]]) -> None:
    """Give back what lies behind the keys of the last user of a room, `(room, length)` for all of them.

    Only for somebody who has all indices of these rooms in hand. Those that are longer must not be used again.
    """
    longest: dict[Room, int] = {}
    for room, length in users:
        if room is not None:
            longest[room] = max(length, longest.get(room, 0))
    for room, length in longest.items():
        room.used = min(room.used, length)
