"""`CellStore`: the keys and values of one layer, which grow token by token, and attention to them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.cells.cache.attention import cached_attention, scaled_queries
from nearfield.cells.cache.state import CacheState
from nearfield.cells.method import Cells
from nearfield.cells.sizes import CacheSizes, default_cache_probes
from nearfield.chunks import BLOCK_BYTES
from nearfield.kernels import backends
from nearfield.kernels.reference import rms_norm, weighted_softmax


class CellStore:
    """The keys and values of one layer. A query reads some of them, and a few numbers about all others.

    Keys come in segments of consecutive keys. A query reads the running segment, the window before it and the first `sinks` keys
    one by one. A segment that has left the window is closed: its keys are grouped into cells, once, and from then on a query sees
    them as in `Cells`. It opens the `probes` best cells of all closed segments, and takes the others into account through their
    moments (count, centroid, variances, mean value, and one covariance of values and keys per head). Unless its length is given,
    a segment takes in all keys that have left the window when it is closed, such as those of a prompt.

    Args:
        method: `Cells(...)`. The cache uses its segment (None: all keys that are there, at least 1,024, from 8,192 keys on 11
            sqrt(n)), cell_size (None: 16 up to 8,192 keys, then sqrt(n / 32)), probes (None: cells of 3.5 sqrt(n) keys, at least
            20 cells), window (None: 16; a number of keys, which is not rounded to whole segments), sinks and partition. There are
            no samples, and queries at different positions do not open cells together.
        audit: compare every call of `attend` with exact attention over all stored keys, and keep the errors in `errors`.
        offload: keep keys and values of closed segments in CPU memory, pinned if the others are on a GPU. The moments of cells
            and the keys in no closed segment stay on the device. A step moves the keys and values of the cells it opens, and the
            first ones. Results are the same. Reordering batch entries copies all that is on the CPU; reading `keys` or
            `values`, or an audit, copies all of it to the device.

    Query heads that share keys open cells together: what decides is the largest share of its weights that any of them may have in
    a cell. With all cells opened, the result is exact attention. A step takes three products per cell and two per key that it
    reads: for a prompt of n keys, from 8,192 on, about 35 sqrt(n) of them.

    Example:
        >>> from nearfield.cells.cache import CellStore
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
        """one for every call of `attend` while `audit` was set"""
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
        """`[batch, heads, length, dim]` in the order in which they came: a copy, to look at."""
        return None if self.state is None else self.state.in_order(self.state.keys)

    @property
    def values(self) -> Tensor | None:
        """Likewise."""
        return None if self.state is None else self.state.in_order(self.state.values)

    @property
    def nbytes(self) -> dict[str, int]:
        """Bytes by what they are for: "keys" and "values" (with room to grow), "order" (where sorted keys came from), "moments".

        With `offload` also "offloaded": keys and values in CPU memory, which "keys" and "values" then leave out.
        """
        state = self.state
        if state is None:
            return {}
        found = {name: getattr(state, name).nbytes for name in ("keys", "values", "order")}
        found["moments"] = state.tables.nbytes
        if self.offload:
            found["offloaded"] = sum(x.offloaded.nbytes for x in (state.keys, state.values) if x.offloaded)
        return found

    def append(self, key: Tensor, value: Tensor, counts: Tensor | None = None) -> None:
        """Add keys and values `[batch, heads, new, dim]`; `counts` `[batch, new]` is False for padding."""
        _check_new(key, value, counts)
        key, value = key.detach(), value.detach()
        if self.state is None:
            self.state = CacheState(key, value, self.sizes, self.method.partition, offload=self.offload)
        _check_alike(self.state, key, value)
        self.state.append(key, value, counts)
        if counts is not None:
            self.mark(self.state.key_padding)

    def reserve(self, keys: int) -> None:
        """Make room for this many more keys, so that appending them moves nothing."""
        state = self._require_state()
        state.keys.reserve(keys)
        state.values.reserve(keys)

    def mark(self, counts: Tensor | None) -> None:
        """Say which of all stored keys are padding: False in `counts` `[batch, length]`. None: none of them.

        This may not change for keys that a query has attended to.
        """
        state = self._require_state()
        # A copy: the kernels need contiguous rows, and the caller may change the mask later.
        counts = None if counts is None or bool(counts.all()) else counts.to(state.sinks.device, copy=True).contiguous()
        if counts is not None and counts.shape != state.no_padding.shape:
            raise ValueError(f"counts must be {tuple(state.no_padding.shape)}, got {tuple(counts.shape)}")
        if counts is not None or state.key_padding is not None:
            before, now = (state.no_padding if x is None else x for x in (state.key_padding, counts))
            if not torch.equal(before[:, : state.settled], now[:, : state.settled]):
                raise ValueError(
                    "the mask hides keys that it showed before, or shows keys that it hid: a cell cache can serve padding, which "
                    "does not change, but no sliding window; give CellCache the config of the model, or use DynamicCache"
                )
        state.settle_padding(counts)

    def crop(self, length: int) -> None:
        """Keep the first `length` keys. Closed segments that reach into the window of the next key are opened again."""
        if not 0 <= length <= self.length:
            raise ValueError(f"length must be between 0 and {self.length}, the number of stored keys, got {length}")
        if self.state is not None:
            most_closed = self._most_closed(length)
            if max(bound for bound in self.state.bounds if bound <= most_closed) < self.state.memory_length:
                raise ValueError(f"cannot go back to {length} keys: the first {self.state.memory_length} belong to a memory")
            self.state.crop(length, most_closed)

    def select(self, entries: Tensor) -> None:
        """Keep these batch entries, in this order; an entry may be taken several times."""
        if self.state is None:
            return
        entries = torch.as_tensor(entries, device=self.state.sinks.device)
        entries = entries.nonzero()[:, 0] if entries.dtype == torch.bool else entries
        if not torch.equal(entries, torch.arange(len(self.state.sinks), device=entries.device)):
            self.state.select(entries)

    def repeat(self, times: int) -> None:
        """Repeat every batch entry, with its copies next to each other."""
        if self.state is not None:
            device = self.state.sinks.device
            self.select(torch.arange(len(self.state.sinks), device=device).repeat_interleave(times))

    def close(self) -> None:
        """Close all segments that the next query sees through cells. `attend` does this by itself."""
        state = self._require_state()
        self._close_before(state, self.length)
        state.offload_closed()

    @torch.no_grad()
    def _close_before(self, state: CacheState, position: int) -> None:
        """Close all segments that a query at this position sees through cells."""
        while (end := self.sizes.next_end(state.closed, position)) > state.closed:
            with torch.autocast(state.sinks.device.type, enabled=False):
                state.close_next(end)

    def _most_closed(self, position: int) -> int:
        """How many keys a query at this position may see through cells."""
        return max(0, position - self.sizes.window)

    @torch.no_grad()
    def attend(self, query: Tensor, scale: float | None = None) -> Tensor:
        """Attention of queries `[batch, heads, rows, dim]`, those of the latest `rows` keys. Each sees the keys up to its own."""
        state = self._require_state()
        _check_query(state, query)
        rows, first = query.shape[2], state.length - query.shape[2]
        state.settle_padding(state.key_padding)
        scale = query.shape[3] ** -0.5 if scale is None else scale
        output = query.new_empty((*query.shape[:3], state.values.storage.shape[3]))
        if rows and state.closed > self._most_closed(first):
            raise ValueError(
                f"the query at position {first} comes too late: a segment that it reads key by key is already closed; attend "
                "right after appending its key"
            )
        start = 0
        while start < rows:
            self._close_before(state, first + start)
            stop = min(rows, self.sizes.next_close(state.closed) - first)
            step = self._rows_at_a_time(state, query.shape[0] * query.shape[1])
            # A value that is not finite, times a weight of zero, would be NaN in rows that do not see it: take single rows.
            if stop - start > 1 and not bool(state.values.view(slice(state.closed, first + stop)).isfinite().all()):
                step = 1
            for row in range(start, stop, step):
                block = slice(row, min(row + step, stop))
                with torch.autocast(query.device.type, enabled=False):
                    found = self._attend_rows(state, query[:, :, block], first + row, scale)
                output[:, :, block] = found.view(output[:, :, block].shape)
            start = stop
        state.offload_closed()
        if rows and self.audit:
            with torch.autocast(query.device.type, enabled=False):
                self.errors.append(step_error(state, scaled_queries(query, state.heads, scale), output, first))
        return output

    def _attend_rows(self, state: CacheState, query: Tensor, first: int, scale: float) -> Tensor:
        """Attention of rows from position `first` on, which all see the same closed segments."""
        if backends.runs_triton(query.device):
            from nearfield.cells.cache import decode

            # The kernels see all stored keys, so they can only serve the latest row.
            if first + 1 == state.length and decode.unsupported(state, query, self.probes) is None:
                # The kernels need contiguous rows, and these may be a part of a larger tensor.
                rows = query.reshape(-1, query.shape[1] // state.heads, query.shape[3]).contiguous()
                with backends.device_guard(query.device):
                    return decode.decode(state, rows, scale, self.probes, self.sizes.most_open(state.closed))
        return cached_attention(state, scaled_queries(query, state.heads, scale), first, query.shape[2], self.probes)

    def _rows_at_a_time(self, state: CacheState, heads: int) -> int:
        """How many rows to serve together, so that score tables and gathered keys stay within `BLOCK_BYTES`."""
        opened = min(state.closed, 2 * self.probes * state.closed // max(1, self.cells))
        columns = state.keys.storage.shape[3] + state.values.storage.shape[3]
        scores = self.cells + state.length - state.closed + opened
        return max(1, BLOCK_BYTES // (heads * (16 * scores + 8 * opened * columns)))

    def _require_state(self) -> CacheState:
        if self.state is None:
            raise ValueError("nothing is stored yet; append keys and values first")
        return self.state


def check_method(method: object) -> None:
    """Raise unless this is `Cells(...)` without samples and without blocks of rows."""
    if not isinstance(method, Cells):
        raise TypeError(f"a cell cache attends by Cells(...), got {method!r}")
    if method.samples:
        raise ValueError(f"a cell cache draws no samples, got {method!r}; leave samples out")
    if method.share is not None and method.share > 1:
        raise ValueError(f"a cell cache opens cells for each query by itself, got {method!r}; leave share out")


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
    for name, new, stored in (("key", key, state.keys.storage), ("value", value, state.values.storage)):
        if new.dtype != stored.dtype or new.device != stored.device:
            raise TypeError(f"{name} is {new.dtype} on {new.device}, but the store holds {stored.dtype} on {stored.device}")
        if (*new.shape[:2], new.shape[3]) != (*stored.shape[:2], stored.shape[3]):
            raise ValueError(
                f"{name} must be [{stored.shape[0]}, {stored.shape[1]}, new, {stored.shape[3]}] like what is stored, got "
                f"{tuple(new.shape)}"
            )


def _check_query(state: CacheState, query: Tensor) -> None:
    batch, heads, _, dim = state.keys.storage.shape
    if query.dim() != 4 or query.shape[0] != batch or query.shape[3] != dim or query.shape[1] % heads:
        raise ValueError(
            f"query must be [{batch}, a multiple of {heads}, rows, {dim}] for the stored keys, got {tuple(query.shape)}"
        )
    if query.shape[2] > state.length:
        raise ValueError(f"there are {query.shape[2]} queries for {state.length} keys; append the keys of the queries first")


@dataclass(frozen=True)
class StepError:
    """How far the rows of one call of `attend` were from exact attention: `[batch, heads, rows]` each."""

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
    """The error of `output` `[batch, query heads, rows, dim]` for `scaled_queries` of rows from position `first` on."""
    batch, query_heads, rows, _ = output.shape
    group = query_heads // state.heads
    keys, values = (state.in_order(x).flatten(0, 1) for x in (state.keys, state.values))
    hidden = state.hidden_mask(slice(0, state.length), first, rows, group)
    exact = _exact_attention(queries, keys, values, hidden).view_as(output)
    norm = rms_norm(values, None if state.key_padding is None else state.key_padding.repeat_interleave(state.heads, 0))
    norm = norm.view(batch, state.heads, 1).repeat_interleave(group, 1)
    off = (output.to(exact.dtype) - exact).norm(dim=-1)
    return StepError(first, off / exact.norm(dim=-1).clamp(min=torch.finfo(off.dtype).tiny), off / norm)


def _exact_attention(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """Head by head, because there may be many keys."""
    found = []
    for head, query in enumerate(queries):
        logits = query @ keys[head].to(query.dtype).T
        if hidden is not None:
            logits.masked_fill_(hidden[head if len(hidden) > 1 else 0], -torch.inf)
        found.append(weighted_softmax(logits, None)[0] @ values[head].to(query.dtype))
    return torch.stack(found)
