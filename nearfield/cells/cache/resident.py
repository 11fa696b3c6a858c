"""Cells that were opened lately stay on the card when keys and values are offloaded: the memory for that, and its size."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.cells.cache.buffers import Buffer

PIECE = 16
"""Keys of a cell that are moved together. Tiles of the kernels are multiples of it."""

MOST_SLOTS = 1 << 14
"""Pieces per head that may be on the card: one program compares them."""

STEPS_KEPT, MOST_SHARE = 8, 8
"""By default there is room for what so many steps open, but for no more than one in so many of the offloaded keys."""


class Pool(NamedTuple):
    """Room on the card for some pieces of each head of each batch entry (`entries`), and which are there.

    See `triton/resident.py`. All of this is changed by kernels alone.
    """

    keys: Tensor
    """`[entries, slots * PIECE, dim]`"""
    values: Tensor
    slot_of: Tensor
    """`[entries, pieces]`"""
    piece_of: Tensor
    """`[entries, slots]`, as the next two"""
    used: Tensor
    is_filled: Tensor
    clock: Tensor
    """`[entries]`"""
    counts: Tensor
    """`[entries, 2]`"""

    @property
    def pieces(self) -> int:
        return self.slot_of.shape[1]

    @property
    def slots(self) -> int:
        return self.piece_of.shape[1]


class Resident:
    """What is on the card of the offloaded rows of one state. Its memory is made when a kernel first needs it, and never moves.

    A pool knows rows by their places and cells. So it serves the states that have the same rows offloaded; those with others
    have a `Resident` of their own, and it starts empty: see `anew`. Copies start empty too.
    """

    def __init__(self, keys: int | None) -> None:
        self.keys = keys
        """how many keys of each head may be on the card; None: see `STEPS_KEPT`"""
        self.pool: Pool | None = None
        self._rows = (0, 0)
        """of the pool: for how many entries it is, and how many rows of each are offloaded"""

    def __getstate__(self) -> dict[str, object]:
        return self.__dict__ | {"pool": None}

    def anew(self) -> Resident:
        """The same for other rows."""
        return Resident(self.keys)

    def slots(self, closed: int, cells: int, probes: int) -> int:
        """For how many pieces there is room, if `probes` of so many cells are opened, in which so many keys are."""
        keys = self.keys
        if keys is None:
            keys = min(STEPS_KEPT * -(-min(probes, cells) * closed // max(1, cells)), closed // MOST_SHARE)
        return min(-(-min(keys, closed) // PIECE), MOST_SLOTS)

    def made(self, keys: Buffer, values: Buffer, cells: int, probes: int) -> Pool | None:
        """The pool, for a state with these keys and values in so many cells. None while a graph is captured and there is none
        yet: its memory would be the graph's."""
        rows = keys.storage.shape[0] * keys.storage.shape[1], keys.offset
        if self.pool is None and not (keys.storage.is_cuda and torch.cuda.is_current_stream_capturing()):
            # Not of inference mode, since the next step may be outside of it.
            with torch.inference_mode(False):
                pool = self._make(keys, values, cells, self.slots(keys.offset, cells, probes))
            self._rows = rows
            self.pool = pool
        if self.pool is not None and self._rows != rows:
            raise RuntimeError(f"cells on the card are for {self._rows} heads and keys, not for {rows}: the cache is broken")
        return self.pool

    def _make(self, keys: Buffer, values: Buffer, cells: int, slots: int) -> Pool:
        """Empty."""
        entries = keys.storage.shape[0] * keys.storage.shape[1]
        own_keys, own_values = (x.storage.new_empty((entries, slots * PIECE, x.storage.shape[3])) for x in (keys, values))
        like = torch.empty(0, dtype=torch.int32, device=keys.storage.device)
        return Pool(
            keys=own_keys,
            values=own_values,
            slot_of=like.new_full((entries, keys.offset // PIECE + cells + 1), -1),
            piece_of=like.new_full((entries, slots), -1),
            used=like.new_zeros((entries, slots)),
            is_filled=like.new_zeros((entries, slots)),
            clock=like.new_zeros(entries),
            counts=like.new_zeros((entries, 2), dtype=torch.int64),
        )

    @property
    def nbytes(self) -> int:
        return 0 if self.pool is None else sum(x.nbytes for x in self.pool)
