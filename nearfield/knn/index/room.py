"""Keys with free space behind them, so that adding a few does not copy them all."""

from __future__ import annotations

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

    def append(self, length: int, keys: Tensor) -> tuple[Room, Tensor]:
        """The first `length` keys and these behind them, `[batch, length + more, dim]`, and the room in which they are."""
        count = length + keys.shape[1]
        room = self
        if self.used != length or self.table.shape[1] < count:
            room = Room(self.table[:, :length], 2 * count)
        room._write(keys)
        return room, room.table[:, :count]
