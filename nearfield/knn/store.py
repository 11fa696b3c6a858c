"""`IndexStore`: the keys and values of one layer, which grow token by token, with an index that grows along."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Protocol, TypeGuard

import torch
from torch import Tensor

from nearfield.cells.cache.attention import scaled_queries
from nearfield.cells.cache.steps import (
    StepError,
    check_alike,
    check_length,
    check_new,
    check_query,
    checked_entries,
    checked_padding,
    exact_rows,
    scale_or_default,
)
from nearfield.checks import MOST, check_generator, check_positive
from nearfield.kernels.backends import full_precision
from nearfield.knn.entries import Entry
from nearfield.knn.index.base import BuiltIndex, Index, default_k
from nearfield.knn.index.room import release
from nearfield.knn.topk import TopK
from nearfield.problem import Call, Rows
from nearfield.sampling import Seeds

MOST_ROWS = 1024
"""Rows that are served together: each scores the keys of the others one by one."""


class IndexMethod(Protocol):
    """What a store attends by: `TopK`, `LazyGumbel`, or a method of your own that can use an index which is there already."""

    @property
    def k(self) -> int | None:
        """Near keys per row; None: ceil(sqrt(n)) of the keys that it sees."""
        ...

    @property
    def index(self) -> Index: ...

    def attend_rows(self, rows: Rows, built: BuiltIndex, k: int, call: Call) -> Tensor:
        """Output `[batch, rows, value_dim]` of rows with `k` near keys each, by an index of their keys."""
        ...


@dataclass(frozen=True)
class _State:
    """What a store holds. It never changes: each operation makes another one, and takes its place when it has succeeded."""

    key: Tensor
    """`[batch, heads, 0, dim]`: what keys are like"""
    value: Tensor
    entries: tuple[Entry | None, ...]
    """by batch entry, the settled keys that are not padding; None: there is none yet"""
    pending: tuple[tuple[Tensor, Tensor], ...] = ()
    """keys and values `[batch, heads, new, dim]` behind them, as they came"""
    settled: int = 0
    """how many keys, with padding, are in `entries`; they can no longer change from padding to real, or back"""
    length: int = 0
    key_padding: Tensor | None = None
    """`[batch, length]`: False for padding; None: there is none"""
    owes: bool = False
    """whether the last keys are in no structure of their index yet"""

    @property
    def nothing(self) -> Tensor:
        """`[batch, length]` of True, which takes no memory."""
        return torch.ones((), dtype=torch.bool, device=self.key.device).expand(len(self.key), self.length)

    def waiting(self) -> tuple[Tensor, Tensor]:
        """All pending keys and values, `[batch, heads, pending, dim]`."""
        keys, values = ([pair[i] for pair in self.pending] for i in range(2))
        return torch.cat([self.key, *keys], 2), torch.cat([self.value, *values], 2)


class IndexStore:
    """The keys and values of one layer, with an index over them. A query reads the keys that the index finds for it.

    A query attends by `TopK` or `LazyGumbel` to all keys up to its own, as `nearfield.attention` would. Only, the index is not
    built in every call: it grows with the keys (`BuiltIndex.add`). For `KMeansIndex` that takes O(sqrt(n) (dim + log n)) a key,
    amortised, and a step O((sqrt(n) + k) dim) for each query head.

    Args:
        method: `TopK(...)`, `LazyGumbel(...)`, or your own `IndexMethod`. Its `k=None` means ceil(sqrt(n)) of the n keys that a
            row sees. `LazyGumbel` always searches here, and decides row by row whether to draw lazily; its promise is made for
            the rows of one call.
        audit: compare every call of `attend` with exact attention over all stored keys, and keep the errors in `errors`.
        generator: the source of all randomness (`tail`, draws); None: torch's default generator.

    Batch entries have indices of their own, in which padding does not occur. Rows of one call are causal among themselves: what
    an index learns, it learns from keys that all of them see, and their own keys are scored one by one. Keys and values are kept
    in float32 (float64 if they are), and their tables double when they are full. A key or value that is not finite makes NaN of
    all rows of its head that see it.

    Every operation succeeds, or leaves the store as it was; only random numbers that were drawn are gone.

    Example:
        >>> from nearfield.knn.store import IndexStore
        >>> store = IndexStore(nearfield.TopK(k=16, tail=16, index=nearfield.KMeansIndex()))
        >>> store.append(k, v)
        >>> store.attend(q[:, :, -1:]).shape
        torch.Size([1, 2, 1, 8])
    """

    def __init__(
        self, method: IndexMethod | None = None, *, audit: bool = False, generator: torch.Generator | None = None
    ) -> None:
        self.method: IndexMethod = TopK() if method is None else method
        check_method(self.method)
        check_generator(generator)
        self.audit, self.generator = audit, generator
        self.errors: list[StepError] = []
        """one for every call of `attend` while `audit` was set"""
        self._state: _State | None = None

    @property
    def length(self) -> int:
        """How many keys are stored."""
        return 0 if self._state is None else self._state.length

    @property
    def entries(self) -> int:
        """Of the batch."""
        return 0 if self._state is None else len(self._state.key)

    @property
    def closed(self) -> int:
        """How many of them are in an index."""
        return 0 if self._state is None else self._state.settled

    @property
    def summary(self) -> str:
        """What it holds, in words."""
        return f"{self.length} keys, {self.closed} of them in {self.method.index!r}"

    @property
    def indices(self) -> list[BuiltIndex | None]:
        """By batch entry, the index of the keys that are not padding; None: no key yet. To look at, until the store changes."""
        return [] if self._state is None else [None if entry is None else entry.index for entry in self._state.entries]

    @property
    def keys(self) -> Tensor | None:
        """`[batch, heads, length, dim]` in the order in which they came, zero for padding: a copy, to look at."""
        return None if self._state is None else self._everything(self._state)[0]

    @property
    def values(self) -> Tensor | None:
        """Likewise."""
        return None if self._state is None else self._everything(self._state)[1]

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by what they are for: "keys" and "values" (with room to grow), and "index", the tensors that it has learned."""
        if self._state is None:
            return {}
        sizes = {"keys": 0, "values": 0, "index": 0}
        seen: set[int] = set()
        for what, tensor in self._tensors(self._state):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                sizes[what] += storage.nbytes()
        return sizes

    @staticmethod
    def _tensors(state: _State) -> Iterator[tuple[str, Tensor]]:
        for key, value in state.pending:
            yield from (("keys", key), ("values", value))
        for entry in filter(None, state.entries):
            yield from (("keys", entry.index.keys), ("values", entry.values))
            yield from (("index", x) for x in entry.learned())

    def append(self, key: Tensor, value: Tensor, counts: Tensor | None = None) -> None:
        """Add keys and values `[batch, heads, new, dim]`; `counts` `[batch, new]` is False for padding."""
        check_new(key, value, counts)
        state = self._state
        if state is None:
            state = _State(key.detach()[:, :, :0].clone(), value.detach()[:, :, :0].clone(), (None,) * len(key))
        check_alike(key, value, state.key, state.value)
        # Copies: the caller may change the tensors later.
        new = (key.detach().clone(), value.detach().clone())
        padding, more = state.key_padding, None if counts is None else counts.to(key.device)
        grown = replace(state, pending=(*state.pending, new), length=state.length + key.shape[2])
        if padding is not None or more is not None:
            before = state.nothing if padding is None else padding
            more = grown.nothing[:, state.length :] if more is None else more
            grown = replace(grown, key_padding=torch.cat([before, more], 1))
        self._state = grown

    def reserve(self, keys: int) -> None:
        """Make room for this many more keys, so that appending them moves nothing."""
        check_positive("keys", keys, least=0, most=MOST)
        state = self._settle(self._require_state())
        self._state = replace(state, entries=tuple(x and x.reserve(keys) for x in state.entries))

    def mark(self, counts: Tensor | None) -> None:
        """Say which of all stored keys are padding: False in `counts` `[batch, length]`. None: none of them.

        This may not change for keys that a query has attended to.
        """
        state = self._require_state()
        self._state = replace(state, key_padding=checked_padding(counts, state.key_padding, state.nothing, state.settled))

    def check_crop(self, length: int) -> None:
        """Raise unless the store can be cropped to this length."""
        check_length(length, self.length)

    def crop(self, length: int) -> None:
        """Keep the first `length` keys. O(1), unless what the index has learned from is among the others."""
        self.check_crop(length)
        state = self._state
        if state is None or length == state.length:
            return
        padding = None if state.key_padding is None else state.key_padding[:, :length]
        if length >= state.settled:
            key, value = (x[:, :, : length - state.settled] for x in state.waiting())
            self._state = replace(state, pending=((key, value),), length=length, key_padding=padding)
            return
        kept = [length] * len(state.key) if padding is None else padding.sum(1).tolist()
        entries = tuple(x.first(n) if x is not None and n else None for x, n in zip(state.entries, kept, strict=True))
        self._state = replace(state, entries=entries, pending=(), settled=length, length=length, key_padding=padding, owes=True)
        # Nobody else has these indices, so what was cut off may be written over.
        release((room, entry.length) for entry in filter(None, entries) for room in entry.rooms())

    def select(self, entries: Tensor) -> None:
        """Keep these batch entries, in this order; an entry may be taken several times.

        Nothing is copied now. Where an entry was taken twice, the next key that is added to the second one copies it.
        """
        state = self._state
        chosen = None if state is None else checked_entries(entries, len(state.key), state.key.device)
        if state is None or chosen is None:
            return
        padding = None if state.key_padding is None else state.key_padding.index_select(0, chosen)
        key, value = (x.index_select(0, chosen) for x in (state.key, state.value))
        pending = tuple((a.index_select(0, chosen), b.index_select(0, chosen)) for a, b in state.pending)
        kept = tuple(state.entries[i] for i in chosen.tolist())
        self._state = replace(state, key=key, value=value, entries=kept, pending=pending, key_padding=padding)

    def repeat(self, times: int) -> None:
        """Repeat every batch entry, with its copies next to each other."""
        check_positive("times", times, most=MOST)
        if self._state is not None:
            self.select(torch.arange(len(self._state.key), device=self._state.key.device).repeat_interleave(times))

    def close(self) -> None:
        """Put all keys into the index. `attend` does this by itself."""
        self._state = self._settle(self._require_state())

    def _settle(self, state: _State) -> _State:
        with torch.no_grad(), torch.autocast(state.key.device.type, enabled=False), full_precision(state.key):
            return self._settled(state, state.length)

    def _settled(self, state: _State, length: int, take_in: bool = True) -> _State:
        """With the first `length` keys in the indices, which learn from them (`take_in`) or leave them as they are."""
        if length <= state.settled and not (take_in and state.owes):
            return state
        new = max(0, length - state.settled)
        length = state.settled + new
        key, value = state.waiting()
        entries = []
        for i, entry in enumerate(state.entries):
            some = (key[i, :, :new], value[i, :, :new])
            if state.key_padding is not None:
                counts = state.key_padding[i, state.settled : length]
                some = (some[0][:, counts], some[1][:, counts])
            entries.append(Entry.begin(self.method.index, *some) if entry is None else entry.grown(*some, take_in=take_in))
        rest = ((key[:, :, new:], value[:, :, new:]),) if new < key.shape[2] else ()
        return replace(state, entries=tuple(entries), pending=rest, settled=length, owes=not take_in)

    @torch.no_grad()
    def attend(self, query: Tensor, scale: float | None = None) -> Tensor:
        """Attention of queries `[batch, heads, rows, dim]`, those of the latest `rows` keys. Each sees the keys up to its own."""
        state = self._require_state()
        check_query(query, state.key, state.length, scale)
        rows, first = query.shape[2], state.length - query.shape[2]
        scale = scale_or_default(query, scale)
        output = query.new_zeros((*query.shape[:3], state.value.shape[3]))
        with torch.autocast(query.device.type, enabled=False), full_precision(query):
            for start in range(0, rows, MOST_ROWS):
                block = slice(start, min(rows, start + MOST_ROWS))
                is_single = block.stop - start == 1
                if not is_single:
                    # What these rows do not all see must teach the index nothing yet.
                    state = self._settled(state, first + start)
                state = self._settled(state, first + block.stop, take_in=is_single)
                for i, entry in enumerate(state.entries):
                    if entry is not None:
                        seen = _visible(state, i, first + start, first + block.stop)
                        self._attend_entry(entry, query[i, :, block], seen, scale, output[i, :, block])
            if rows and self.audit:
                queries = scaled_queries(query, state.key.shape[1], scale)
                error = exact_rows(queries, *self._everything(state), state.key_padding, output, first).error(output)
        self._state = state
        if rows and self.audit:
            self.errors.append(error)
        return output

    def _attend_entry(self, entry: Entry, query: Tensor, seen: list[int], scale: float, output: Tensor) -> None:
        """Fill in the output `[query heads, rows, value_dim]` of rows of one batch entry that see so many keys each."""
        heads = len(entry.values)
        start = 0
        # With k=None, a row has as many near keys as if it came alone.
        for k, same in groupby(seen, lambda n: default_k(self.method.k, n)):
            visible = list(same)
            part = slice(start, start + len(visible))
            start = part.stop
            if not k:
                continue
            queries = scaled_queries(query[None, :, part], heads, scale)
            counts = torch.tensor(visible, device=query.device).repeat(len(query) // heads).expand(heads, -1)
            bad = queries.isfinite().all(-1).logical_not_() | entry.spoils(counts)
            rows = Rows(queries.masked_fill(bad[..., None], 0.0), entry.index.keys, entry.values, counts)
            call = Call(Seeds(self.generator, query.device))
            found = self.method.attend_rows(rows, entry.index, k, call).masked_fill(bad[..., None], torch.nan)
            output[:, part] = found.reshape(len(query), len(visible), -1)

    @staticmethod
    def _everything(state: _State) -> tuple[Tensor, Tensor]:
        """Copies of all keys and values, `[batch, heads, length, dim]`."""
        found = []
        for like, waiting, name in zip((state.key, state.value), state.waiting(), ("keys", "values"), strict=True):
            everything = like.new_zeros((*like.shape[:2], state.length, like.shape[3]))
            everything[:, :, state.settled :] = waiting
            for i, entry in enumerate(state.entries):
                if entry is not None:
                    here = state.nothing[i] if state.key_padding is None else state.key_padding[i]
                    everything[i][:, here[: state.settled].nonzero()[:, 0]] = getattr(entry, name).to(like.dtype)
            found.append(everything)
        return found[0], found[1]

    def _require_state(self) -> _State:
        if self._state is None:
            raise ValueError("nothing is stored yet; append keys and values first")
        return self._state


def can_search(method: object) -> TypeGuard[IndexMethod]:
    """Whether this can attend by an index that is there already."""
    return not isinstance(method, type) and callable(getattr(method, "attend_rows", None))


def check_method(method: object) -> None:
    """Raise unless this attends by an index, which is a recipe."""
    if not can_search(method):
        raise TypeError(f"an index store attends by TopK(...) or LazyGumbel(...), got {method!r}")
    if isinstance(method.index, BuiltIndex):
        raise ValueError(f"a store builds an index of its own keys, got one that is built already: {method!r}; give its recipe")


def _visible(state: _State, entry: int, first: int, stop: int) -> list[int]:
    """How many keys of a batch entry the rows at the positions from `first` to `stop` see."""
    if state.key_padding is None:
        return list(range(first + 1, stop + 1))
    counted: list[int] = state.key_padding[entry, :stop].cumsum(0)[first:].tolist()
    return counted
