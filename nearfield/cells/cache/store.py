"""`CellStore`: the keys and values of one layer, which grow token by token, and attention to them."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nearfield.cells.cache.adopted import known_segments, takes_over
from nearfield.cells.cache.attention import Opening, cached_attention, scaled_queries
from nearfield.cells.cache.chunks import attend_to_closed, merged
from nearfield.cells.cache.guard import Guard
from nearfield.cells.cache.heavy import ReadKeys, Watch
from nearfield.cells.cache.state import CacheState, Saved
from nearfield.cells.cache.steps import (
    ExactRows,
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
from nearfield.cells.method import Cells
from nearfield.cells.partition.kmeans import KMeans
from nearfield.cells.sizes import CacheSizes, default_cache_probes, default_cell_size, default_probes
from nearfield.cells.trial import Prepared
from nearfield.checks import MOST, check_fraction, check_positive
from nearfield.chunks import BLOCK_BYTES
from nearfield.kernels import backends

Near = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Attention of the latest rows to keys and values `[batch, heads, length, dim]`, causal with the last row at the last key: output
and log-normaliser."""

MOST_SINKS = 1 << 16
"""First keys that a cache may keep apart: it notes for each batch entry where they are, before any is there."""

TIMES_BY_WEIGHT = 4
"""With `min_weight`, so many times the usual number of cells may be opened."""

LEAST_CHUNK, CHUNK_SHARE = 256, 64
"""So many rows, and at least one for so many keys, are a chunk: tables of all closed cells are made for them, which takes as long
as a few hundred rows do."""


class CellStore:
    """The keys and values of one layer. A query reads some of them, and a few numbers about all others.

    Keys come in segments of consecutive keys. A query reads the running segment, the window before it and the first `sinks` keys
    one by one. A segment that has left the window is closed: its keys are grouped into cells, once, and from then on a query sees
    them as in `Cells`. It opens the `probes` best cells of all closed segments, and takes the others into account through their
    moments (count, centroid, variances, mean value, and one covariance of values and keys per head). Unless its length is given,
    a segment takes in all keys that have left the window when it is closed, such as those of a prompt.

    Args:
        method: `Cells(...)`. The cache uses its segment (None: all keys that are there, at least 1,024, from 8,192 keys on 11
            sqrt(n); see `group_from`), cell_size (None: 16 up to 8,192 keys, then sqrt(n / 32)), probes (None: at least 20, and
            cells of 3.5 sqrt(n) keys, of 9 sqrt(n) if keys are on a GPU), window (None: 16; a number of keys, which is not
            rounded to whole segments), sinks and partition. There are no samples, and queries at different positions do not open
            cells together.
        audit: compare every call of `attend` with exact attention over all stored keys, and keep the errors in `errors`.
        offload: keep keys and values of closed segments in CPU memory, pinned if the others are on a GPU. The moments of cells
            and the keys in no closed segment stay on the device. A step moves the keys and values of the cells it opens, and the
            first ones. Results are the same with the same `probes`. Reordering batch entries copies all that is on the CPU;
            reading `keys` or `values`, or an audit, copies all of it to the device.
        resident: with `offload`, how many of these keys stay on the device as well, per head of each batch entry, with their
            values: cells that were opened lately, so that a step moves only those that the latest steps have not opened. The
            cells that were not opened for the longest time make way. None: what eight steps may open, 28 sqrt(n) keys by default,
            but no more than an eighth of all; 0: none; at most 262,144. It is for the Triton kernels and takes memory from the
            first step on that they serve. Results are the same bit for bit. When a segment is closed, and after a `crop` into
            one, `select` or `repeat`, it starts empty: beams had better have 0.
        regroup: True: group the keys of a prompt anew, even if its attention has grouped them into cells already. False: from
            32,768 keys on, `close` takes these over, each cut in two, as far as they are in long spans, which takes less time;
            errors are a little larger on texts, and more so where keys that are alike are strewn over all of a text.
        group_from: how many keys there are before any are grouped; until then `attend` is exact. None: 8,192, on a GPU 16,384,
            since up to there cells save little time or none. Fewer than 1,024 mean 1,024. Where `method` has a segment, that
            decides.
        min_weight: cells stay closed in which no query may give a single key more than this share of its weights, judged by the
            cell's score. So a step opens as many as it needs: few where weights are spread out, many where a head looks for
            something; `probes` are the most there may be, by default four times the number above. It does not count where
            `probes`, or the number above, is all cells, nor in later chunks of a prompt. None: all `probes` are opened.
        eps: the error that a step may have, pooled over heads and in units of the norm of the exact output. Every 32nd step (the
            first among them) is compared with exact attention over all keys, which with `offload` come to the device for it.
            Where it is off by more, the number of cells that are opened is doubled (and `min_weight` divided by four) until it is
            not, for this step and those after it; where it is off by less than a quarter of eps, it is halved, down to the usual
            number. With all cells open, only rounding is left. `guard` tells what was found. Steps in between are not looked at,
            and promise nothing; neither do calls with several rows. With very many cells open, the kernels may have no room, and
            PyTorch serves the steps. None: no look.

    Query heads that share keys open cells together: what decides is the largest share of its weights that any of them may have in
    a cell. With all cells opened, the result is exact attention. A step takes three products per cell and two per key that it
    reads: for a prompt of n keys, from 8,192 on, about 35 sqrt(n) of them.

    Every operation succeeds, or leaves the store as it was: if it is interrupted or runs out of memory, `length` says whether
    the keys of an `append` are there, and any operation may be tried again. One that sorts a segment keeps a copy of its keys
    and values until it has succeeded. `copy.copy` makes a store that shares memory with this one: append to one of them only, or
    use `copy.deepcopy`.

    Example:
        >>> from nearfield.cells.cache import CellStore
        >>> store = CellStore(nearfield.Cells(segment=32, cell_size=4, probes=4))
        >>> store.append(k, v)
        >>> store.attend(q[:, :, -1:]).shape
        torch.Size([1, 2, 1, 8])
    """

    def __init__(
        self,
        method: Cells | None = None,
        *,
        audit: bool = False,
        offload: bool = False,
        resident: int | None = None,
        regroup: bool = True,
        group_from: int | None = None,
        min_weight: float | None = None,
        eps: float | None = None,
    ) -> None:
        self.method = Cells() if method is None else method
        check_method(self.method)
        check_resident(resident, offload)
        check_positive("group_from", group_from, optional=True, least=0)
        if min_weight is not None:
            check_fraction("min_weight", min_weight)
        if eps is not None:
            check_fraction("eps", eps)
        self._guard = None if eps is None else Guard(float(eps))
        self.audit, self.offload, self.resident = audit, offload, resident
        self.group_from, self.min_weight = group_from, min_weight
        self.sizes = self._sizes(on_gpu=False)
        """those of a CPU until the first key says where it is"""
        self.errors: list[StepError] = []
        """one for every call of `attend` while `audit` was set"""
        self.regroup = regroup
        self.watch: Watch | None = None
        """counts what `attend` looks at while it is set; such steps do not use the kernels, which keep no weights"""
        # All there is, in one attribute: an operation ends by setting it. While one writes over rows, `undo` has what was there.
        self._state: CacheState | None = None

    @property
    def state(self) -> CacheState | None:
        """What it holds; None before the first key. It never changes: `attend` and all others put another one in its place."""
        if self._state is not None and self._state.undo:
            self._state = self._state.restored()
        return self._state

    @state.setter
    def state(self, state: CacheState) -> None:
        self._state = state

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_state": self.state}

    @property
    def guard(self) -> Guard | None:
        """With `eps`: what looks at its error have found, and how many more cells it opens for that."""
        return self._guard if self._state is None else self._state.guard

    def _keep(self, saved: Saved) -> None:
        """Put these rows back unless the operation that is under way comes to its end."""
        assert self._state is not None
        self._state = self._state.but(undo=(*self._state.undo, *saved))

    # The next ones need no rows, so they do not end what is under way.

    @property
    def length(self) -> int:
        """How many keys are stored."""
        return 0 if self._state is None else self._state.length

    @property
    def entries(self) -> int:
        """Of the batch."""
        return 0 if self.state is None else len(self.state.sinks)

    @property
    def closed(self) -> int:
        """How many of them are in closed segments."""
        return 0 if self._state is None else self._state.closed

    @property
    def cells(self) -> int:
        """How many cells a query scores, per head."""
        return 0 if self._state is None else self._state.cells

    @property
    def probes(self) -> int:
        """How many of them it opens, at most."""
        return self.opening.most

    @property
    def opening(self) -> Opening:
        """Which of them it opens."""
        return self._opening(self.closed, self.cells)

    @property
    def _are_on_gpu(self) -> bool:
        """Whether the keys of cells are: those that are offloaded have to be moved when they are read."""
        return self._state is not None and not self.offload and self._state.sinks.is_cuda

    def _opening(self, closed: int, cells: int, factor: int | None = None) -> Opening:
        """`factor`: times the usual number, as far as there are cells; None: that of the guard."""
        usual, factor = self._usual_probes(closed, cells), self._factor if factor is None else factor
        enough = usual if factor == 1 else max(usual, min(cells, usual * factor))
        if self.min_weight is None or enough >= cells:
            return Opening(enough)
        times = TIMES_BY_WEIGHT if self.method.probes is None else 1
        return Opening(min(cells, times * enough), math.log(self.min_weight) - 2 * math.log(factor))

    def _usual_probes(self, closed: int, cells: int) -> int:
        return self.method.probes or default_cache_probes(closed, cells, self._are_on_gpu)

    @property
    def _factor(self) -> int:
        return 1 if self.guard is None else self.guard.factor

    def is_due(self, new: int = 0) -> bool:
        """Whether the step that finds `new` keys more than there are now looks at its error."""
        if self.guard is None or not self.guard.is_due(self.length + new):
            return False
        # The step itself may close the first segment.
        return self.closed > 0 or self.length + new > self.sizes.next_close(0)

    def look_next(self, keys: int = 0) -> None:
        """Let the next step look at its error, or the first one with so many keys."""
        if self.state is not None and self.guard is not None:
            self.state = self.state.but(guard=self.guard._replace(next_look=keys))

    def unguarded(self) -> CellStore:
        """A copy that shares memory with this one, opens as many cells, and looks at nothing: for a step that is captured."""
        made = copy.copy(self)
        made.look_next(sys.maxsize)
        return made

    @property
    def summary(self) -> str:
        """What it holds, in words."""
        return f"{self.length} keys, {self.closed} of them in {self.cells} cells per head"

    @property
    def keys(self) -> Tensor | None:
        """`[batch, heads, length, dim]` in the order in which they came: a copy, to look at."""
        state = self.state
        return None if state is None else state.in_order(state.keys)

    @property
    def values(self) -> Tensor | None:
        """Likewise."""
        state = self.state
        return None if state is None else state.in_order(state.values)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by what they are for: "keys" and "values" (with room to grow), "order" (where sorted keys came from), "moments".

        With `offload` also "offloaded": keys and values in CPU memory, which "keys" and "values" then leave out, and "resident":
        those of them that are on the device as well, and which they are.
        """
        state = self._state
        if state is None:
            return {}
        found = {name: getattr(state, name).nbytes for name in ("keys", "values", "order")}
        found["moments"] = state.tables.nbytes
        if self.offload:
            found["offloaded"] = sum(x.offloaded.nbytes for x in (state.keys, state.values) if x.offloaded)
            found["resident"] = 0 if state.resident is None else state.resident.nbytes
        return found

    @property
    def found_resident(self) -> float | None:
        """Of the keys in offloaded cells that were opened, the share that was found on the device (`resident`), counted in pieces
        of up to 16 keys since it was last empty. None if nothing was counted. This waits for the device."""
        pool = None if self._state is None or self._state.resident is None else self._state.resident.pool
        looked, found = (0, 0) if pool is None else pool.counts.sum(0).tolist()
        return found / looked if looked else None

    def _sizes(self, on_gpu: bool) -> CacheSizes:
        cells = self.method
        return CacheSizes.of(cells.segment, cells.cell_size, cells.window, cells.sinks, self.group_from, on_gpu)

    def append(self, key: Tensor, value: Tensor, counts: Tensor | None = None) -> None:
        """Add keys and values `[batch, heads, new, dim]`; `counts` `[batch, new]` is False for padding."""
        check_new(key, value, counts)
        key, value, state = key.detach(), value.detach(), self.state
        if state is None:
            self.sizes = self._sizes(key.is_cuda)
            state = self._empty_state(key, value).but(guard=self._guard)
        check_alike(key, value, state.keys.storage, state.values.storage)
        self._state = state.append(key, value, counts)

    def _empty_state(self, key: Tensor, value: Tensor) -> CacheState:
        """For keys and values like these."""
        return CacheState(key, value, self.sizes, self.method.partition, offload=self.offload, resident=self.resident)

    def reserve(self, keys: int) -> None:
        """Make room for this many more keys, so that appending them moves nothing."""
        check_positive("keys", keys, least=0, most=MOST)
        state = self._require_state()
        if backends.runs_triton(state.sinks.device):
            state.pool(self.probes)
        self._state = state.but(keys=state.keys.reserve(keys), values=state.values.reserve(keys))

    def mark(self, counts: Tensor | None) -> None:
        """Say which of all stored keys are padding: False in `counts` `[batch, length]`. None: none of them.

        This may not change for keys that a query has attended to.
        """
        state = self._require_state()
        padding = None
        if counts is not None or state.key_padding is not None:
            padding = checked_padding(counts, state.key_padding, state.no_padding, state.settled)
        self._state = state.settle_padding(padding, self._keep)

    def crop(self, length: int) -> None:
        """Keep the first `length` keys. Closed segments that reach into the window of the next key are opened again."""
        self.check_crop(length)
        state = self.state
        if state is not None:
            guard = state.guard and state.guard._replace(next_look=min(state.guard.next_look, length))
            self._state = state.crop(length, self._most_closed(length), self._keep).but(guard=guard)

    def check_crop(self, length: int) -> None:
        """Raise unless the store can be cropped to this length."""
        check_length(length, self.length)
        state = self.state
        if state is not None:
            kept = max(bound for bound in state.bounds if bound <= self._most_closed(length))
            if kept < state.memory_length:
                raise ValueError(f"cannot go back to {length} keys: the first {state.memory_length} belong to a memory")

    def select(self, entries: Tensor) -> None:
        """Keep these batch entries, in this order; an entry may be taken several times."""
        state = self.state
        if state is not None:
            chosen = checked_entries(entries, len(state.sinks), state.sinks.device)
            if chosen is not None:
                self._state = state.select(chosen)

    def repeat(self, times: int) -> None:
        """Repeat every batch entry, with its copies next to each other."""
        check_positive("times", times, most=MOST)
        if self._state is not None:
            sinks = self._state.sinks
            self.select(torch.arange(len(sinks), device=sinks.device).repeat_interleave(times))

    @torch.no_grad()
    def close(self, prepared: Prepared | None = None, query: Tensor | None = None) -> None:
        """Close all segments that the next query sees through cells. `attend` does this by itself.

        `query` `[batch, heads, rows, dim]`: those of the latest keys, which attended elsewhere, such as the rows of a prompt. The
        last 64 of each head say what matters to a query: keys are grouped accordingly, from now on; see `stretch`.
        `prepared`: what a causal call of `Cells` over all stored keys has grouped already; its longest spans become segments.
        """
        state = self._require_state()
        if query is not None:
            check_query(query, state.keys.storage, state.length, None)
            state = state.seen_by(query) if query.shape[2] else state
        if prepared is not None and self.wants_cells(state.length) and state.key_padding is None:
            with torch.autocast(state.sinks.device.type, enabled=False):
                state = self._adopt(state, prepared)
        self._state = self._close_before(state, state.length).offload_closed()

    def wants_cells(self, keys: int) -> bool:
        """Whether `close` could take over the cells of a prompt of so many keys."""
        if self._state is None or self.closed or type(self.method.partition) is not KMeans:
            return False
        return not self.regroup and takes_over(self.sizes, keys)

    def _adopt(self, state: CacheState, prepared: Prepared) -> CacheState:
        """With the longest spans of a call closed, and one segment after them, up to where it would have ended without them."""
        end = self.sizes.next_end(0, state.length)
        for known in known_segments(prepared, self.sizes, state.length):
            segment = slice(state.closed, known.end)
            state = state.close_next(known.end, self._keep, known.halved(state.keys.view(segment).flatten(0, 1)))
        return state.close_next(end, self._keep) if 0 < state.closed < end else state

    @torch.no_grad()
    def _close_before(self, state: CacheState, position: int) -> CacheState:
        """With all segments closed that a query at this position sees through cells."""
        while (end := self._next_end(state, position)) > state.closed:
            with torch.autocast(state.sinks.device.type, enabled=False):
                state = state.close_next(end, self._keep)
        return state

    def _next_end(self, state: CacheState, position: int) -> int:
        """Where the segment ends that is open, for a query at this position; where it begins if it stays open."""
        return self.sizes.next_end(state.closed, position)

    def _next_close(self, state: CacheState) -> int:
        """The first position whose query finds the segment closed that is open."""
        return self.sizes.next_close(state.closed)

    def _most_closed(self, position: int) -> int:
        """How many keys a query at this position may see through cells."""
        return max(0, position - self.sizes.window)

    @torch.no_grad()
    def attend(self, query: Tensor, scale: float | None = None, near: Near | None = None) -> Tensor:
        """Attention of queries `[batch, heads, rows, dim]`, those of the latest `rows` keys. Each sees the keys up to its own.

        `near`: how many rows at a time, such as those of a chunk of a prompt, attend to keys that are in no closed segment yet.
        """
        state = self._require_state()
        self._check_rows(state, query, scale)
        rows, first = query.shape[2], state.length - query.shape[2]
        if not len(query):  # all entries of the batch have been selected away
            return query.new_empty((*query.shape[:3], state.values.storage.shape[3]))
        scale = scale_or_default(query, scale)
        if state.settled < state.length:
            state = state.but(settled=state.length)
        if rows == 1 and query.device.type == "cpu":  # Most calls are steps of one token, and these are what a host waits for.
            state, output = self._attend_single(state, query, first, scale)
        elif near is not None and self._is_chunk(state, rows):
            state, output = self._attend_chunk(state, query, first, scale, near)
        else:
            state, output = self._attend_in_blocks(state, query, first, scale)
        state = state.offload_closed()
        guard = state.guard
        looks = rows == 1 and guard is not None and state.closed > 0 and guard.is_due(state.length)
        if rows and (self.audit or looks):
            exact = self._exact_rows(state, query, output, first, scale)
            error = exact.error(output)
        if looks:
            output, error, guard = self._within_eps(state, query, output, error, exact, scale)
        self._state = state if guard is state.guard else state.but(guard=guard)
        if rows and self.audit:
            self.errors.append(error)
        return output

    def _check_rows(self, state: CacheState, query: Tensor, scale: float | None) -> None:
        """Raise unless these, times scale, can be the queries of the latest keys."""
        check_query(query, state.keys.storage, state.length, scale)
        first = state.length - query.shape[2]
        if query.shape[2] and state.closed > self._most_closed(first):
            raise ValueError(
                f"the query at position {first} comes too late: a segment that it reads key by key is already closed; attend "
                "right after appending its key"
            )

    def _exact_rows(self, state: CacheState, query: Tensor, output: Tensor, first: int, scale: float) -> ExactRows:
        with torch.autocast(query.device.type, enabled=False):
            keys, values = (state.in_order(x) for x in (state.keys, state.values))
            queries = scaled_queries(query, state.heads, scale)
            return exact_rows(queries, keys, values, state.key_padding, output, first)

    def _within_eps(
        self, state: CacheState, query: Tensor, output: Tensor, error: StepError, exact: ExactRows, scale: float
    ) -> tuple[Tensor, StepError, Guard]:
        """The step with as many cells opened as eps asks for, its error, and what is opened from now on."""
        guard = state.guard
        assert guard is not None
        cells, factor = state.cells, guard.factor
        opening = self._opening(state.closed, cells)
        # Not "more than eps": an error that is no number is none to be content with.
        while not error.pooled <= guard.eps and not opening.takes_all(cells):
            factor *= 2
            opening = self._opening(state.closed, cells, factor)
            with _without_autocast(query.device):
                found = self._attend_rows(state, query, exact.first, scale, factor)
            output = found.to(query.dtype).view(output.shape)
            error = exact.error(output)
        if factor == guard.factor > 1 and error.pooled < guard.eps / 4:
            factor //= 2
        share = 0.0  # Only where more is read than before does it matter.
        if factor > guard.factor:
            share = (state.length - state.closed + self._opened_keys(state, query, exact.first, scale, opening)) / state.length
        return output, error, guard.looked(state.length, error.pooled, factor, share)

    def opened_keys(self, query: Tensor, scale: float | None = None) -> float:
        """How many keys rows `[batch, heads, rows, dim]`, those of the latest keys, read in the cells that they open.

        The mean over rows and heads of keys, by what is closed now. Nothing changes, and a guard looks at nothing.
        """
        state = self._require_state()
        check_query(query, state.keys.storage, state.length, scale)
        first = state.length - query.shape[2]
        if first < state.closed:
            raise ValueError(f"the query at position {first} comes too late: its key is in a closed segment")
        return self._opened_keys(state, query, first, scale_or_default(query, scale), self.opening)

    @torch.no_grad()
    def _opened_keys(self, state: CacheState, query: Tensor, first: int, scale: float, opening: Opening) -> float:
        if opening.lowest == -math.inf:  # As many keys as cells have on average.
            return state.closed * min(1.0, opening.most / max(1, state.cells))
        counted = ReadKeys()
        with _without_autocast(query.device):
            cached_attention(state, scaled_queries(query, state.heads, scale), first, query.shape[2], opening, counted)
        return counted.mean

    # The next three return the state with all segments closed that rows from position `first` on see through cells, and the
    # output of the rows.

    def _attend_single(self, state: CacheState, query: Tensor, first: int, scale: float) -> tuple[CacheState, Tensor]:
        if first >= self._next_close(state):
            state = self._close_before(state, first)
        with _without_autocast(query.device):
            found = self._attend_rows(state, query, first, scale)
        return state, found.to(query.dtype).view(*query.shape[:3], -1)

    def _attend_in_blocks(self, state: CacheState, query: Tensor, first: int, scale: float) -> tuple[CacheState, Tensor]:
        rows, start = query.shape[2], 0
        output = query.new_empty((*query.shape[:3], state.values.storage.shape[3]))
        while start < rows:
            state = self._close_before(state, first + start)
            stop = min(rows, self._next_close(state) - first)
            step = self._rows_at_a_time(state, query.shape[0] * query.shape[1])
            # A value that is not finite, times a weight of zero, would be NaN in rows that do not see it: take single rows.
            if stop - start > 1 and not self._are_finite(state, slice(state.closed, first + stop)):
                step = 1
            for row in range(start, stop, step):
                block = slice(row, min(row + step, stop))
                with _without_autocast(query.device):
                    found = self._attend_rows(state, query[:, :, block], first + row, scale)
                output[:, :, block] = found.view(output[:, :, block].shape)
            start = stop
        return state, output

    def _are_finite(self, state: CacheState, keys: slice) -> bool:
        """Whether the values of these keys are, which are in no closed segment."""
        return bool(state.values.view(keys).isfinite().all())

    def _attend_chunk(self, state: CacheState, query: Tensor, first: int, scale: float, near: Near) -> tuple[CacheState, Tensor]:
        """By `near` to the keys after the last segment that the first row finds closed, and through cells to all before."""
        state = self._close_before(state, first)
        with _without_autocast(query.device):
            keys, values = (x.view(slice(state.closed, state.length)) for x in (state.keys, state.values))
            output, lse = near(keys, values)
            if state.closed:
                probes, cells = self._chunk_sizes(state)
                past, past_lse = attend_to_closed(state, query, scale, probes, self.method.partition, cells)
                output = merged(output, past, lse, past_lse, query.dtype)
        return self._close_before(state.seen_by(query), state.length), output

    def _chunk_sizes(self, state: CacheState) -> tuple[int, int | None]:
        """How many cells a row of a chunk opens, and of how many; None: of those that there are.

        On a GPU, by default, both are those of a row of a prompt: its head opens cells for itself alone, and there each pair of a
        row and a cell costs time, however few keys it has. The guard opens as many times more.
        """
        if self.method.probes is not None or not backends.runs_triton(state.sinks.device):
            probes = self._usual_probes(state.closed, state.cells)
            return max(probes, min(state.cells, probes * self._factor)), None
        size = self.method.cell_size or default_cell_size(state.closed, causal=True, on_gpu=True)
        cells = min(state.cells, max(1, state.closed // size))
        probes = default_probes(state.closed, max(1, state.closed // cells), causal=True, on_gpu=True)
        return min(cells, probes * self._factor), cells

    def _is_chunk(self, state: CacheState, rows: int) -> bool:
        """Whether so many rows are worth going through all keys for their sake."""
        return rows >= max(LEAST_CHUNK, state.length // CHUNK_SHARE) and state.key_padding is None and self.watch is None

    def _attend_rows(self, state: CacheState, query: Tensor, first: int, scale: float, factor: int | None = None) -> Tensor:
        """Attention of rows from position `first` on, which all see the same closed segments. `factor`: as in `_opening`."""
        opening = self._opening(state.closed, state.cells, factor)
        if backends.runs_triton(query.device) and self.watch is None:
            from nearfield.cells.cache import decode

            # The kernels see all stored keys, so they can only serve the latest row.
            if first + 1 == state.length and decode.unsupported(state, query, opening.most) is None:
                # The kernels need contiguous rows, and these may be a part of a larger tensor.
                rows = query.reshape(-1, query.shape[1] // state.heads, query.shape[3]).contiguous()
                with backends.device_guard(query.device):
                    return decode.decode(state, rows, scale, opening)
        queries = scaled_queries(query, state.heads, scale)
        return cached_attention(state, queries, first, query.shape[2], opening, self.watch)

    def _rows_at_a_time(self, state: CacheState, heads: int) -> int:
        """How many rows to serve together, so that score tables and gathered keys stay within `BLOCK_BYTES`."""
        cells = state.cells
        opened = min(state.closed, 2 * self._opening(state.closed, cells).most * state.closed // max(1, cells))
        columns = state.keys.storage.shape[3] + state.values.storage.shape[3]
        scores = cells + state.length - state.closed + opened
        return max(1, BLOCK_BYTES // (heads * (16 * scores + 8 * opened * columns)))

    def _require_state(self) -> CacheState:
        state = self.state
        if state is None:
            raise ValueError("nothing is stored yet; append keys and values first")
        return state


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Where autocast is off, nothing: to switch it off takes as long as three operations."""
    return torch.autocast(device.type, enabled=False) if torch.is_autocast_enabled(device.type) else nullcontext()


def check_resident(resident: object, offload: bool) -> None:
    """Raise unless so many offloaded keys can stay on the device."""
    check_positive("resident", resident, optional=True, least=0)
    if resident is not None and not offload:
        raise ValueError(f"resident={resident!r} is for offload=True; without it all keys are on the device")


def check_method(method: object) -> None:
    """Raise unless this is `Cells(...)` without samples and without blocks of rows."""
    if not isinstance(method, Cells):
        raise TypeError(
            f"a cell cache attends by Cells(...), got {method!r}; for TopK(...) and LazyGumbel(...) there are hf.CellCache and "
            "nearfield.knn.store.IndexStore"
        )
    if method.samples:
        raise ValueError(f"a cell cache draws no samples, got {method!r}; leave samples out")
    if method.share is not None and method.share > 1:
        raise ValueError(f"a cell cache opens cells for each query by itself, got {method!r}; leave share out")
    check_positive("sinks", method.sinks, least=0, most=MOST_SINKS)
