"""The error of a step: the same rows with exact attention over all stored keys."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.cells.cache.attention import by_head, cached_attention
from nearfield.cells.cache.state import CacheState
from nearfield.cells.method import Cells
from nearfield.cells.sizes import CacheSizes, default_cache_probes
from nearfield.chunks import BLOCK_BYTES
from nearfield.kernels import backends
from nearfield.kernels.reference import rms_norm, weighted_softmax


@dataclass(frozen=True)
class StepError:
    """How far the rows of one call were from exact attention. `[batch, heads, rows]` each."""

    first: int
    """the position of the first row"""
    relative: Tensor
    """||estimate - exact|| / ||exact||"""
    additive: Tensor
    """||estimate - exact||, in units of the rms norm of the values"""

    def __str__(self) -> str:
        return (
            f"rows from {self.first} on: relative error {float(self.relative.mean()):.3g} on average, at most "
            f"{float(self.relative.max()):.3g}"
        )


def step_error(state: CacheState, queries: Tensor, output: Tensor, first: int) -> StepError:
    """The error of `output` `[batch, query heads, rows, dim]` for queries (times scale) `[batch * heads, group * rows, dim]`."""
    batch, query_heads, rows, _ = output.shape
    group = query_heads // state.heads
    keys, values = (state.in_order(x).flatten(0, 1) for x in (state.keys, state.values))
    hidden = state.hidden(slice(0, state.length), first, rows, group)
    exact = _exact(queries, keys, values, hidden).view_as(output)
    norm = rms_norm(values, None if state.counts is None else state.counts.repeat_interleave(state.heads, 0))
    norm = norm.view(batch, state.heads, 1).repeat_interleave(group, 1)
    off = (output.to(exact.dtype) - exact).norm(dim=-1)
    return StepError(first, off / exact.norm(dim=-1).clamp(min=torch.finfo(off.dtype).tiny), off / norm)


def _exact(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """Exact attention, head by head: there may be many keys."""
    found = []
    for head, query in enumerate(queries):
        logits = query @ keys[head].to(query.dtype).T
        if hidden is not None:
            logits.masked_fill_(hidden[head if len(hidden) > 1 else 0], -torch.inf)
        found.append(weighted_softmax(logits, None)[0] @ values[head].to(query.dtype))
    return torch.stack(found)


class CellStore:
    """The keys and values of one layer, appended as they come; a query reads some of them and a few numbers about the others.

    Keys come in segments of consecutive keys. The running segment, the window before it and the first `sinks` keys are read one
    by one. A segment that leaves the window is closed: it is grouped into cells, once, and from then on a query sees it as in
    `Cells`. It opens the `probes` best cells of all closed segments and sums up the others through their moments (count,
    centroid, variances, mean value, and one covariance of values and keys per head). All keys that
    are there when a segment is closed become part of it, those of a prompt for example, unless its length is given.

    Args:
        method: `Cells(...)`: segment (None: all keys that are there, at least 1,024, from 8,192 keys on 11 sqrt(n)), cell_size
            (None: 16 up to 8,192 keys, then sqrt(n / 32)), probes (None: cells of 3.5 sqrt(n) keys, at least 20 cells), window
            (as many keys as it says, not rounded to whole segments; None: 16), sinks and partition. Draws and two levels are not
            for steps.
        audit: compare every call of `attend` with exact attention over all stored keys, and keep the errors in `errors`.
        offload: keep keys and values of closed segments in memory of the CPU, pinned if the others are on a GPU. The moments of
            cells and the running segment stay on the device, and a step moves the keys and values of the cells it opens and the
            first ones, nothing else. Results are the same. To reorder batch entries copies all that was put away, and to look at
            `keys` and `values`, or to audit, brings all of it over.

    Query heads that share keys open cells together: the best share that a cell has for any of them decides. With everything
    opened the result is exact attention. A step takes three products per cell and two per near key: for a prompt of n keys,
    from 8,192 on, some 35 sqrt(n) of them.

    Example:
        >>> from nearfield.cache import CellStore
        >>> store = CellStore(nearfield.Cells(segment=32, cell_size=4, probes=4))
        >>> store.append(k, v)
        >>> store.attend(q[:, :, -1:]).shape
        torch.Size([1, 2, 1, 8])
    """

    def __init__(self, method: Cells | None = None, *, audit: bool = False, offload: bool = False) -> None:
        self.method = Cells() if method is None else method
        check_method(self.method)
        self.audit, self.offload = audit, offload
        self.sizes = CacheSizes.of(self.method.segment, self.method.cell_size, self.method.window, self.method.sinks)
        self.errors: list[StepError] = []
        """of the calls of `attend` while `audit` was set"""
        self.state: CacheState | None = None
        """None before the first key"""

    @property
    def length(self) -> int:
        """How many keys are stored."""
        return 0 if self.state is None else self.state.length

    @property
    def closed(self) -> int:
        """How many of them are in closed segments."""
        return 0 if self.state is None else self.state.closed

    @property
    def cells(self) -> int:
        """How many cells a query scores, per head."""
        return 0 if self.state is None else len(self.state.tables)

    @property
    def probes(self) -> int:
        """How many of them it opens."""
        return self.method.probes or default_cache_probes(self.closed, self.cells)

    @property
    def keys(self) -> Tensor | None:
        """`[batch, heads, length, dim]` in the order in which they came: a copy, for looking at."""
        return None if self.state is None else self.state.in_order(self.state.keys)

    @property
    def values(self) -> Tensor | None:
        return None if self.state is None else self.state.in_order(self.state.values)

    @property
    def nbytes(self) -> dict[str, int]:
        """Memory by what it is for: keys and values (with room to grow), moments of cells, and where sorted keys came from.

        And "offloaded": keys and values in memory of the CPU, which are not counted again.
        """
        state = self.state
        if state is None:
            return {}
        parts = {name: getattr(state, name).nbytes for name in ("keys", "values", "order")}
        away = {"offloaded": sum(x.away.nbytes for x in (state.keys, state.values) if x.away)} if self.offload else {}
        return {**parts, "moments": state.tables.nbytes, **away}

    def append(self, key: Tensor, value: Tensor, counts: Tensor | None = None) -> None:
        """Add keys `[batch, heads, new, dim]` and values; `counts` `[batch, new]` is False for padding."""
        _check_new(key, value, counts)
        key, value = key.detach(), value.detach()
        if self.state is None:
            self.state = CacheState(key, value, self.sizes, self.method.partition, offload=self.offload)
        _check_alike(self.state, key, value)
        self.state.append(key, value, counts)
        if counts is not None:
            self.mark(self.state.counts)

    def reserve(self, keys: int) -> None:
        """Have room for so many more keys, so that appending them moves nothing."""
        state = self._there()
        state.keys.reserve(keys)
        state.values.reserve(keys)

    def mark(self, counts: Tensor | None) -> None:
        """Say which of all stored keys count, `[batch, length]`; None: all. Of those that were attended to none may change."""
        state = self._there()
        # A copy: the kernels count on whole rows, and a mask may be changed by who made it.
        counts = None if counts is None or bool(counts.all()) else counts.to(state.sinks.device, copy=True).contiguous()
        if counts is not None and counts.shape != state.all_count.shape:
            raise ValueError(f"counts must be {tuple(state.all_count.shape)}, got {tuple(counts.shape)}")
        if counts is not None or state.counts is not None:
            before, now = (state.all_count if x is None else x for x in (state.counts, counts))
            if not torch.equal(before[:, : state.marked], now[:, : state.marked]):
                raise ValueError(
                    "the mask hides keys that it showed before, or shows some that were hidden: a cell cache knows padding, "
                    "which stays as it is, and no sliding window; give CellCache the config of the model, or use DynamicCache"
                )
        state.mark(counts)

    def crop(self, length: int) -> None:
        """Keep the first `length` keys. A closed segment that the next key would find open is opened again."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be between 0 and {self.length}, the number of stored keys, got {length}")
        if self.state is not None:
            most = self._most_closed(length)
            if max(bound for bound in self.state.bounds if bound <= most) < self.state.remembered:
                raise ValueError(f"cannot go back to {length} keys: the first {self.state.remembered} belong to a memory")
            self.state.back_to(most, length)

    def select(self, entries: Tensor) -> None:
        """Keep these batch entries, in this order; one may be taken several times."""
        if self.state is None:
            return
        entries = torch.as_tensor(entries, device=self.state.sinks.device)
        entries = entries.nonzero()[:, 0] if entries.dtype == torch.bool else entries
        if not torch.equal(entries, torch.arange(len(self.state.sinks), device=entries.device)):
            self.state.select(entries)

    def repeat(self, times: int) -> None:
        """Every batch entry several times, one after the other."""
        if self.state is not None:
            device = self.state.sinks.device
            self.select(torch.arange(len(self.state.sinks), device=device).repeat_interleave(times))

    def close(self) -> None:
        """Close all segments that the next key does not read one by one. `attend` does so by itself."""
        state = self._there()
        self._close_before(state, self.length)
        state.put_away()

    @torch.no_grad()
    def _close_before(self, state: CacheState, position: int) -> None:
        """All segments that a query at this position sees through cells."""
        while (end := self.sizes.next_end(state.closed, position)) > state.closed:
            with torch.autocast(state.sinks.device.type, enabled=False):
                state.close(end)

    def _most_closed(self, position: int) -> int:
        """How many keys a query at this position may see through cells."""
        return max(0, position - self.sizes.window)

    @torch.no_grad()
    def attend(self, query: Tensor, scale: float | None = None) -> Tensor:
        """Attention of the queries `[batch, heads, rows, dim]` of the latest `rows` keys, each to its own and all before it."""
        state = self._there()
        _check_query(state, query)
        rows, first = query.shape[2], state.length - query.shape[2]
        state.mark(state.counts)
        scale = query.shape[3] ** -0.5 if scale is None else scale
        output = query.new_empty((*query.shape[:3], state.values.storage.shape[3]))
        if rows and state.closed > self._most_closed(first):
            raise ValueError(
                f"the query at position {first} comes after the segment it belongs to was closed; attend right after appending "
                "its key"
            )
        start = 0
        while start < rows:
            self._close_before(state, first + start)
            stop = min(rows, self.sizes.next_close(state.closed) - first)
            step = self._rows_at_a_time(state, query.shape[0] * query.shape[1])
            # A weight of zero times a value that is not finite would be NaN in rows that do not see it: then row by row.
            if stop - start > 1 and not bool(state.values.part(slice(state.closed, first + stop)).isfinite().all()):
                step = 1
            for row in range(start, stop, step):
                block = slice(row, min(row + step, stop))
                with torch.autocast(query.device.type, enabled=False):
                    found = self._attend(state, query[:, :, block], first + row, scale)
                output[:, :, block] = found.view(output[:, :, block].shape)
            start = stop
        state.put_away()
        if rows and self.audit:
            with torch.autocast(query.device.type, enabled=False):
                self.errors.append(step_error(state, by_head(query, state.heads, scale), output, first))
        return output

    def _attend(self, state: CacheState, query: Tensor, first: int, scale: float) -> Tensor:
        """Of rows from position `first` on, which see the same closed segments."""
        if backends.runs_triton(query.device):
            from nearfield.cells.cache import decode

            # The kernels see all keys that are there: they are for the latest row.
            if first + 1 == state.length and decode.unsupported(state, query, self.probes) is None:
                # A copy where the queries are a part of a larger tensor: the kernels count on whole rows.
                rows = query.reshape(-1, query.shape[1] // state.heads, query.shape[3]).contiguous()
                with backends.device_guard(query.device):
                    return decode.decode(state, rows, scale, self.probes, self.sizes.most_open(state.closed))
        return cached_attention(state, by_head(query, state.heads, scale), first, query.shape[2], self.probes)

    def _rows_at_a_time(self, state: CacheState, heads: int) -> int:
        """How many positions, so that score tables and gathered keys stay within bounds."""
        near = min(state.closed, 2 * self.probes * state.closed // max(1, self.cells))
        columns = state.keys.storage.shape[3] + state.values.storage.shape[3]
        return max(1, BLOCK_BYTES // (heads * (16 * (self.cells + state.length - state.closed + near) + 8 * near * columns)))

    def _there(self) -> CacheState:
        if self.state is None:
            raise ValueError("nothing is stored yet; append keys and values first")
        return self.state


def check_method(method: object) -> None:
    """`Cells(...)` without what steps do not have."""
    if not isinstance(method, Cells):
        raise TypeError(f"a cell cache attends by Cells(...), got {method!r}")
    if method.samples:
        raise ValueError(f"a cell cache draws no samples, got {method!r}; leave samples out")


def _check_new(key: Tensor, value: Tensor, counts: Tensor | None) -> None:
    if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"key and value must be [batch, heads, new, dim], alike up to dim, got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    if not key.is_floating_point() or key.dtype != value.dtype or key.device != value.device:
        raise TypeError(
            f"key and value must have one floating dtype and device, got {key.dtype} on {key.device} and {value.dtype} on "
            f"{value.device}"
        )
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        raise ValueError("a cell cache has no gradients: call the model under torch.no_grad(), or without a cache")
    if counts is not None and (counts.dtype != torch.bool or counts.shape != (key.shape[0], key.shape[2])):
        raise ValueError(
            f"counts must be boolean and [{key.shape[0]}, {key.shape[2]}], got {counts.dtype} and {tuple(counts.shape)}"
        )


def _check_alike(state: CacheState, key: Tensor, value: Tensor) -> None:
    for name, given, there in (("key", key, state.keys.storage), ("value", value, state.values.storage)):
        if given.dtype != there.dtype or given.device != there.device:
            raise TypeError(f"{name} is {given.dtype} on {given.device}, and what is stored is {there.dtype} on {there.device}")
        if (*given.shape[:2], given.shape[3]) != (*there.shape[:2], there.shape[3]):
            raise ValueError(
                f"{name} must be [{there.shape[0]}, {there.shape[1]}, new, {there.shape[3]}] as what is stored, got "
                f"{tuple(given.shape)}"
            )


def _check_query(state: CacheState, query: Tensor) -> None:
    batch, heads, _, dim = state.keys.storage.shape
    if query.dim() != 4 or query.shape[0] != batch or query.shape[3] != dim or query.shape[1] % heads:
        raise ValueError(
            f"query must be [{batch}, a multiple of {heads}, rows, {dim}] for the stored keys, got {tuple(query.shape)}"
        )
    if query.shape[2] > state.length:
        raise ValueError(f"there are {query.shape[2]} queries for {state.length} keys; append the keys of the queries first")
