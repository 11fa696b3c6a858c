"""Sequences of operations on a store, as ranks carry them out together, and one process with the same segments."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor

import nearfield as nf
from nearfield.cells.cache.attention import Opening, cached_attention, opened_places, scaled_queries
from nearfield.cells.cache.state import CacheState
from nearfield.cells.cache.store import CellStore
from nearfield.cells.sizes import CacheSizes, default_cache_probes
from nearfield.distributed import ShardedStore
from nearfield.distributed.deal import Deal

Step = tuple[Any, ...]
"""("append", keys), ("attend", rows), ("crop", length), ("select", entries), ("repeat", times), ("mark", pads), ("close",),
("close", rows): with the queries of the latest keys"""

SMALL: dict[str, Any] = {"segment": 16, "cell_size": 4, "sinks": 5, "window": 4}
ALL = 10**6


class Source:
    """Random tensors that do not depend on who asks, only on when."""

    def __init__(self, heads: int, group: int, dim: int, value_dim: int, dtype: torch.dtype, seed: int = 0) -> None:
        self.heads, self.group, self.dim, self.value_dim, self.dtype = heads, group, dim, value_dim, dtype
        self.generator = torch.Generator().manual_seed(seed)

    def keys(self, batch: int, count: int) -> tuple[Tensor, Tensor]:
        shapes = [(batch, self.heads, count, dim) for dim in (self.dim, self.value_dim)]
        key, value = (torch.randn(shape, generator=self.generator, dtype=torch.float64) for shape in shapes)
        return key.to(self.dtype), value.to(self.dtype)

    def queries(self, batch: int, rows: int) -> Tensor:
        query = 2 * torch.randn(batch, self.heads * self.group, rows, self.dim, generator=self.generator, dtype=torch.float64)
        return query.to(self.dtype)


def padding_of(pads: list[int], length: int) -> Tensor:
    """`[batch, length]`: False for so many of the first keys of each entry."""
    return torch.arange(length) >= torch.tensor(pads)[:, None]


def carry_out(store: Any, steps: list[Step], source: Source, batch: int) -> list[Tensor]:
    """The outputs of all steps that attend."""
    found: list[Tensor] = []
    pads: list[int] | None = None
    for what, *arguments in steps:
        if what == "append":
            store.append(*source.keys(batch, arguments[0]))
            if pads is not None:
                store.mark(padding_of(pads, store.length))
        elif what == "attend":
            found.append(store.attend(source.queries(batch, arguments[0])))
        elif what == "crop":
            store.crop(arguments[0])
        elif what == "select":
            store.select(torch.tensor(arguments[0]))
            batch = len(arguments[0])
            pads = None if pads is None else [pads[entry] for entry in arguments[0]]
        elif what == "repeat":
            store.repeat(arguments[0])
            batch *= arguments[0]
            pads = None if pads is None else [pad for pad in pads for _ in range(arguments[0])]
        elif what == "mark":
            pads = arguments[0]
            store.mark(padding_of(pads, store.length))
        else:
            store.close(query=source.queries(batch, arguments[0]) if arguments else None)
    return found


class Alone:
    """One process with all keys, in the segments that so many ranks would have."""

    def __init__(self, method: nf.Cells, ranks: int, group_from: int | None = None) -> None:
        self.method = method
        self.sizes = CacheSizes.of(method.segment, method.cell_size, method.window, method.sinks, group_from)
        self.deal = Deal(self.sizes, ranks)
        self.state: CacheState | None = None
        self.opened: list[Tensor] = []
        """`[heads, length]` for every row: True for keys in opened cells"""

    def _keep(self, saved: Any) -> None:
        pass

    @property
    def length(self) -> int:
        return self.deal.length

    def append(self, key: Tensor, value: Tensor) -> None:
        if self.state is None:
            self.state = CacheState(key, value, self.sizes, self.method.partition)
        self.deal = self.deal.extended(self.length + key.shape[2])
        self.state = self.state.append(key, value, None)

    def mark(self, counts: Tensor) -> None:
        assert self.state is not None
        self.state = self.state.settle_padding(counts, self._keep)

    def _close_before(self, position: int) -> CacheState:
        assert self.state is not None
        for segment in self.deal.segments:
            if segment.start == self.state.closed and segment.stop + self.sizes.window <= position:
                self.state = self.state.close_next(segment.stop, self._keep)
        return self.state

    def close(self, query: Tensor | None = None) -> None:
        assert self.state is not None
        if query is not None:
            self.state = self.state.seen_by(query)
        self._close_before(self.length)

    def attend(self, query: Tensor) -> Tensor:
        rows, outputs = query.shape[2], []
        assert self.state is not None
        self.state = self.state.but(settled=self.length)
        for row in range(rows):
            position = self.length - rows + row
            state = self._close_before(position)
            queries = scaled_queries(query[:, :, row : row + 1], state.heads, query.shape[3] ** -0.5)
            cells = len(state.tables)
            probes = self.method.probes or default_cache_probes(state.closed, cells)
            output = cached_attention(state, queries, position, 1, Opening(probes))
            outputs.append(output.to(query.dtype).view(*query.shape[:2], 1, -1))
        return torch.cat(outputs, 2)

    def crop(self, length: int) -> None:
        assert self.state is not None
        self.state = self.state.crop(length, max(0, length - self.sizes.window), self._keep)
        self.deal = self.deal.cropped(length)

    def select(self, entries: Tensor) -> None:
        assert self.state is not None
        self.state = self.state.select(entries)

    def repeat(self, times: int) -> None:
        assert self.state is not None
        self.select(torch.arange(len(self.state.sinks)).repeat_interleave(times))


def opened_positions(state: CacheState, opened: Tensor) -> Tensor:
    """`[heads, length]`: True for the keys of these cells `[heads, any]`, by their positions."""
    place, missing = opened_places(state.tables.flat, opened, len(opened))
    bounds = torch.tensor(state.bounds)
    start = bounds[torch.searchsorted(bounds, place, right=True) - 1]
    position = state.order.flat.gather(1, place) + start
    found = torch.zeros(len(opened), state.length + 1, dtype=torch.bool)
    return found.scatter_(1, position.masked_fill(missing, state.length), True)[:, : state.length]


def random_steps(seed: int, batch: int, padded: bool) -> list[Step]:
    """A prompt in chunks, steps, crops, and batch entries that change."""
    chance = random.Random(seed)
    steps: list[Step] = [("append", chance.choice([7, 40, 150]))]
    length = steps[0][1]
    if padded:
        steps.append(("mark", [chance.randrange(0, 8) for _ in range(batch)]))
    steps.append(("attend", 1))
    for _ in range(14):
        what = chance.choice(["step"] * 4 + ["rows", "chunk", "crop", "select", "repeat", "close"])
        if what == "crop":
            length = chance.randrange(max(min(9, length), length - 60), length + 1)
            steps.append(("crop", length))
        elif what == "select" or (what == "repeat" and batch > 2):
            entries = [chance.randrange(batch) for _ in range(chance.choice([1, 2]))]
            batch = len(entries)
            steps.append(("select", entries))
        elif what == "repeat":
            batch *= 2
            steps.append(("repeat", 2))
        elif what == "close":
            steps.append(("close",))
        more = {"step": 1, "rows": 5, "chunk": chance.randrange(20, 80)}.get(what, 1)
        length += more
        steps += [("append", more), ("attend", more)]
    return steps


def on_ranks(group: Any, cases: list[Any]) -> list[Any]:
    """For each case: outputs, how many keys each rank holds, and what was sent."""
    results = []
    for method, options, steps, form, batch in cases:
        store = ShardedStore(method, group, **options)
        outputs = carry_out(store, steps, Source(*form), batch)
        results.append((outputs, store.held, dict(store.ranks.sent), [error.pooled for error in store.errors]))
    return results


def alone(ranks: int, case: Any) -> list[Tensor]:
    method, options, steps, form, batch = case
    return carry_out(Alone(method, ranks, options.get("group_from")), steps, Source(*form), batch)


def one_store(case: Any) -> list[Tensor]:
    """By a `CellStore`, which opens everything here: exact attention, whatever the segments are."""
    method, _, steps, form, batch = case
    return carry_out(CellStore(method), steps, Source(*form), batch)
