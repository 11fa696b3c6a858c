"""Tensors that grow along their length without being copied at every step, and that may begin in another memory."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

GROWTH = 1.25
"""A full buffer grows by this factor: at most a quarter stays unused, and each number is copied about five times in all."""


def outside_inference() -> AbstractContextManager[Any]:
    """A context whose tensors are no inference tensors. To leave a mode that nobody is in takes longer than to make a tensor."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


class Buffer:
    """`[batch, heads, length, ...]`, with room for more.

    A buffer never changes: each operation returns another one. They may share a storage, since `append` writes behind `length`,
    where no reader looks. So only one of those that share a storage may be appended to in the end.

    The first `offset` rows may be elsewhere, in `base`; all others are in `storage`. The base is one of two things:

    - a tensor `[1, heads, ...]` that somebody else owns, such as a mapped file. All batch entries share it, and nobody writes to
      it.
    - CPU memory `[batch, heads, ...]` that rows were moved to, owned by the buffer `offloaded`. If it is pinned, it may take up
      to twice its size, because PyTorch rounds pinned blocks up to a power of two.
    """

    def __init__(
        self,
        like: Tensor,
        dtype: torch.dtype | None = None,
        base: Tensor | None = None,
        offset: int = 0,
        pinned_for: torch.device | None = None,
    ) -> None:
        """Holds the first `offset` rows of `base` only. Rows have the shape of those in `like` `[batch, heads, any, ...]`."""
        with outside_inference():  # as `_new_storage`
            self.storage = like.new_empty((*like.shape[:2], 0, *like.shape[3:]), dtype=dtype)
        self.base = base if offset else None
        self.offset = self.length = offset
        self.pinned_for = pinned_for
        """the GPU whose kernels read this storage, which is then pinned CPU memory"""
        self.offloaded: Buffer | None = None
        """the rows that were moved to the CPU"""

    def __setstate__(self, state: dict[str, Any]) -> None:
        # A copy of pinned memory is not pinned, and the copy of `base` must be that of the offloaded rows.
        self.__dict__.update(state)
        if self.pinned_for is not None and torch.cuda.is_available():
            self.storage = self.storage.pin_memory()
        if self.offloaded is not None and self.offset:
            self.base = self.offloaded.storage

    def but(self, **changes: Any) -> Buffer:
        """This one with some attributes changed."""
        made = object.__new__(type(self))
        made.__dict__ = self.__dict__ | changes
        return made

    def append(self, new: Tensor) -> Buffer:
        """With more rows, `[batch, heads, new, ...]`."""
        used = self.length - self.offset
        needed = used + new.shape[2]
        storage = self.storage
        if needed > storage.shape[2]:
            # The first rows, such as a prompt, are often all there will be for a long time: no room beyond them.
            storage = self.reserve(new.shape[2] if not used else int(needed * GROWTH) - used).storage
        storage[:, :, used:needed] = new
        return self.but(storage=storage, length=self.length + new.shape[2])

    def reserve(self, rows: int) -> Buffer:
        """With room for this many more rows."""
        used = self.length - self.offset
        if used + rows <= self.storage.shape[2]:
            return self
        storage = self._new_storage(used + rows)
        storage[:, :, :used] = self.storage[:, :, :used]
        return self._moved(storage)

    def _new_storage(self, rows: int, batch: int | None = None) -> Tensor:
        """Uninitialised."""
        batch = len(self.storage) if batch is None else batch
        shape = (batch, self.storage.shape[1], rows, *self.storage.shape[3:])
        # Inference tensors could not be written to outside of inference mode, where the next step may be.
        with outside_inference():
            return self.storage.new_empty(shape, pin_memory=self.pinned_for is not None)

    def _moved(self, storage: Tensor) -> Buffer:
        """With its rows in another storage. The one that it had may be dropped from now on."""
        # Pinned memory is free for others as soon as it is dropped, even while a kernel is still reading it.
        if self.pinned_for is not None and self.storage.numel():
            torch.cuda.synchronize(self.pinned_for)
        return self.but(storage=storage)

    def split(self, place: int, room: int) -> Buffer:
        """With copies of all rows: those before `place` on the CPU, the others in a storage with room for at least `room`."""
        offloaded = self.offloaded
        if offloaded is None:
            device = self.storage.device if self.storage.is_cuda else None
            offloaded = Buffer(self.storage[:, :, :0].cpu(), pinned_for=device)
        # What lies behind the rows that are offloaded now may be written over.
        offloaded = offloaded.but(length=self.offset)
        if place > self.offset:
            offloaded = offloaded.append(self.view(slice(self.offset, place)))
        storage = self._new_storage(max(room, self.length - place))
        middle = max(place, self.offset)
        if place < middle:
            storage[:, :, : middle - place] = self.read(slice(place, middle))
        storage[:, :, middle - place : self.length - place] = self.view(slice(middle, self.length))
        base = offloaded.storage if place else None
        return self.but(storage=storage, offset=place, base=base, offloaded=offloaded.but(length=place))

    def truncate(self, length: int) -> Buffer:
        """With the first rows alone."""
        if self.offset <= length:
            return self.but(length=length)
        return self.but(length=length, offset=length, base=self.base if length else None)

    def view(self, rows: slice) -> Tensor:
        """`[batch, heads, rows, ...]` of rows after the base, to read and to write."""
        return self.storage[:, :, rows.start - self.offset : rows.stop - self.offset]

    def read(self, rows: slice) -> Tensor:
        """`[batch, heads, rows, ...]` on the device: a copy if all rows are in the base, a view if all are after it."""
        if rows.start >= self.offset:
            return self.view(rows)
        assert self.base is not None
        return self.base[:, :, rows].to(self.storage.device)

    @property
    def filled(self) -> Tensor:
        """`[batch, heads, length, ...]`, all rows; a view unless there is a base."""
        own = self.storage[:, :, : self.length - self.offset]
        if self.base is None:
            return own
        early = self.base[:, :, : self.offset].to(own.device)
        return torch.cat([early.expand(len(own), *early.shape[1:]), own], 2)

    @property
    def flat(self) -> Tensor:
        """`[batch * heads, length, ...]`, all rows; a view unless there is a base."""
        return self.filled.flatten(0, 1) if self.base is not None else self.storage.flatten(0, 1)[:, : self.length]

    def gather(self, place: Tensor) -> Tensor:
        """Some rows of each head: `[batch * heads, any, ...]` for `place` `[batch * heads, any]`.

        If the base is on another device, only the rows that are asked for are copied over.
        """
        if self.base is None:
            return self.take(self.numbers(place))
        head = torch.arange(len(place), device=place.device)[:, None]
        batch, heads, rows = self.base.shape[:3]
        number = place.clamp(max=self.offset - 1) + head % (batch * heads) * rows
        early = _take(self.base, number.to(self.base.device)).to(place.device, non_blocking=True)
        if self.storage.shape[2] == 0:
            return early
        own = _take(self.storage, (place - self.offset).clamp(min=0) + head * self.storage.shape[2])
        return torch.where((place < self.offset)[..., None], early, own)

    def numbers(self, place: Tensor) -> Tensor:
        """Where rows are in the storage, counted through all heads, if there is no base: for `place` as in `gather`."""
        rows = self.storage.shape[2]
        return place + torch.arange(0, len(place) * max(1, rows), max(1, rows), device=place.device)[:, None]

    def take(self, number: Tensor) -> Tensor:
        """The rows at `numbers`."""
        return _take(self.storage, number)

    def select(self, entries: Tensor) -> Buffer:
        """With these batch entries, in this order."""
        storage = self._new_storage(self.storage.shape[2], len(entries))
        chosen = self._moved(torch.index_select(self.storage, 0, entries, out=storage))
        if self.offloaded is None:
            return chosen
        offloaded = self.offloaded.select(entries.cpu())
        return chosen.but(offloaded=offloaded, base=offloaded.storage if self.offset else None)

    @property
    def nbytes(self) -> int:
        """Bytes of `storage`, with its room to grow and without the base."""
        return self.storage.nbytes


def _take(x: Tensor, number: Tensor) -> Tensor:
    """Rows of `[batch, heads, rows, ...]`, counted through all heads."""
    return x.flatten(0, 2).index_select(0, number.view(-1)).view(*number.shape, *x.shape[3:])
