"""Requests of different lengths in one cache, without padding between them: each keeps stores of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nearfield.cells.cache.steps import StepError, checked_entries
from nearfield.cells.cache.store import CellStore
from nearfield.knn.store import IndexStore

Store = CellStore | IndexStore


class RequestStores:
    """The stores of one layer, one for each request, with the interface of one store for a batch.

    To the model it looks like a batch that is padded on the left: `length` is that of the longest request, and of `padding`
    before it. What is stored, read and computed is each request's own, and its result is the one it gets alone.
    """

    def __init__(self, stores: Sequence[Store], padding: int = 0) -> None:
        if len(set(map(id, stores))) < len(stores):
            raise ValueError("every request needs a cache of its own, got one of them twice; copy.deepcopy(cache) makes another")
        self.stores, self.padding = list(stores), padding
        self._checked = False
        """whether a mask was compared with the requests; those of later steps only grow"""

    @property
    def lengths(self) -> list[int]:
        return [store.length for store in self.stores]

    @property
    def length(self) -> int:
        return max(self.lengths, default=0) + self.padding

    @property
    def method(self) -> Any:
        return self.stores[0].method

    @property
    def audit(self) -> bool:
        return all(store.audit for store in self.stores)

    @audit.setter
    def audit(self, audit: bool) -> None:
        for store in self.stores:
            store.audit = audit

    @property
    def errors(self) -> list[StepError]:
        """Those of all requests, one request after the other."""
        return [error for store in self.stores for error in store.errors]

    @property
    def summary(self) -> str:
        return f"{len(self.stores)} requests of {min(self.lengths, default=0)} to {max(self.lengths, default=0)} keys"

    @property
    def nbytes(self) -> dict[str, int]:
        total: dict[str, int] = {}
        for store in self.stores:
            for what, size in store.nbytes.items():
                total[what] = total.get(what, 0) + size
        return total

    @property
    def keys(self) -> Tensor | None:
        """`[batch, heads, length, dim]`, zero before the first key of a request: a copy, to look at."""
        return self._padded([store.keys for store in self.stores])

    @property
    def values(self) -> Tensor | None:
        return self._padded([store.values for store in self.stores])

    def _padded(self, found: list[Tensor | None]) -> Tensor | None:
        some = next((x for x in found if x is not None), None)
        if some is None:
            return None
        padded = some.new_zeros(len(found), some.shape[1], self.length, some.shape[3])
        for row, x in zip(padded, found, strict=True):
            if x is not None:
                row[:, self.length - x.shape[2] :] = x[0]
        return padded

    def append(self, key: Tensor, value: Tensor) -> None:
        """Add keys and values `[batch, heads, new, dim]`, the same number to each request. All of them get theirs, or none."""
        if len(key) != len(self.stores):
            raise ValueError(f"the cache holds {len(self.stores)} requests, but the batch has {len(key)}; see cache.replace")
        # Of copies, which share memory with the stores: these do not notice what is written behind their keys.
        grown = [copy.copy(store) for store in self.stores]
        for number, store in enumerate(grown):
            store.append(key[number : number + 1], value[number : number + 1])
        self.stores = grown

    def mark(self, counts: Tensor | None) -> None:
        """Compare the mask of a padded batch, `[batch, length]` with False for padding, with the requests, once."""
        if not self._checked:
            expected = self.counts()
            given = torch.ones_like(expected) if counts is None else counts.cpu()
            if not torch.equal(given, expected):
                raise ValueError(
                    "attention_mask must be 0 before the first token of each request and 1 from there on, as in "
                    f"cache.attention_mask(); the requests have {self.lengths} keys, padded to {self.length}"
                )
        self._checked = True

    def counts(self, more: int = 0) -> Tensor:
        """`[batch, length + more]`: the mask of the padded batch, False for padding."""
        return torch.arange(self.length + more) >= self.length - torch.tensor(self.lengths)[:, None]

    def on_trial(self) -> RequestStores:
        """A copy that shares memory with this one, for a step that is not meant."""
        copies = [store.unguarded() if isinstance(store, CellStore) else copy.copy(store) for store in self.stores]
        found = RequestStores(copies, self.padding)
        found._checked = True
        return found

    def attend(self, query: Tensor, scale: float | None = None) -> Tensor:
        """Attention of queries `[batch, heads, rows, dim]`, those of the latest `rows` keys of each request."""
        calls = [_attends(store, query[number : number + 1], scale) for number, store in enumerate(self.stores)]
        return torch.cat(_side_by_side(calls, query))

    def close(self) -> None:
        for store in self.stores:
            store.close()

    def crop(self, length: int) -> None:
        """Remove as many of the latest keys of each request as the longest one has to lose to have `length`."""
        fewer = self.length - length
        if fewer > min(self.lengths, default=0):
            raise ValueError(f"cannot remove {fewer} keys of every request: the shortest has {min(self.lengths)}")
        for store in self.stores:
            store.check_crop(store.length - fewer)
        for store in self.stores:
            store.crop(store.length - fewer)

    def select(self, entries: Tensor) -> None:
        """Keep these requests, in this order."""
        kept = checked_entries(entries, len(self.stores), torch.device("cpu"))
        if kept is None:
            return
        chosen = kept.tolist()
        if len(set(chosen)) < len(chosen):
            raise ValueError(
                f"requests of different lengths cannot be repeated, got entries {chosen}: beams and several results per prompt "
                "need prompts of one length, in a batch"
            )
        self.stores, self._checked = [self.stores[entry] for entry in chosen], False

    def repeat(self, times: int) -> None:
        self.select(torch.arange(len(self.stores)).repeat_interleave(times))


def _attends(store: Store, query: Tensor, scale: float | None) -> Callable[[], Tensor]:
    return lambda: store.attend(query, scale)


def _side_by_side(calls: Sequence[Callable[[], Tensor]], like: Tensor) -> list[Tensor]:
    """What these return. Captured in a CUDA graph, they become branches of it that may run at the same time."""
    if not like.is_cuda or not torch.cuda.is_current_stream_capturing():
        return [call() for call in calls]
    here = torch.cuda.current_stream(like.device)
    sides = [torch.cuda.Stream(like.device) for _ in calls]
    found: list[Tensor] = []
    for call, side in zip(calls, sides, strict=True):
        side.wait_stream(here)
        with torch.cuda.stream(side):
            found.append(call())
    for side in sides:
        here.wait_stream(side)
    return found
