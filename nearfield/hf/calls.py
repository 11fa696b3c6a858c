"""How the attention call of a layer is served: by the method if it knows the mask, else exactly, some rows at a time."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from nearfield._compat import sdpa
from nearfield.attention import CausalResult, attention, causal_attention
from nearfield.auto import Auto
from nearfield.chunks import BLOCK_BYTES
from nearfield.exact import Exact, window_rows
from nearfield.hf.masks import LazyMask, Pattern
from nearfield.kernels.dense import dense_attention
from nearfield.knn.store import can_search
from nearfield.problem import Method, is_traced, needs_grad

_log = logging.getLogger(__name__)

LEAST_SHARE = 0.5
"""A method serves the last rows of a sequence if there are at least this many of them per key."""


@dataclass(frozen=True)
class LayerCall:
    """A layer's call without its mask. Tensors are `[batch, heads, length, dim]`; keys and values may have fewer heads."""

    query: Tensor
    key: Tensor
    value: Tensor
    method: Method | None = None
    scale: float | None = None
    dropout: float = 0.0
    prefill: Method | None = None
    """what serves causal calls in place of `method`, where no gradient is wanted; None: `method`"""
    has_window: bool = False
    """whether the layer has a sliding window, in which rows attend exactly whatever their cache is"""
    softcap: float | None = None
    sinks: Tensor | None = None
    """`[heads]`: the `s_aux` of `attention`"""

    @property
    def rows(self) -> int:
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        return self.key.shape[2]

    def at(self, rows: slice, keys: slice, entries: slice = slice(None)) -> LayerCall:
        """The same call for some rows, keys and batch entries."""
        key, value = self.key[entries, :, keys], self.value[entries, :, keys]
        return replace(self, query=self.query[entries, :, rows], key=key, value=value)

    @property
    def prefills(self) -> bool:
        """Whether `prefill` serves causal rows."""
        return self.prefill is not None and not needs_grad(self.query, self.key, self.value)

    def by_method(self, is_causal: bool, key_padding: Tensor | None = None, offset: int | None = None) -> Tensor:
        """Attention by the method; `key_padding` `[batch, keys]` is False for padding, `offset` as in `attention`."""
        mask = None if key_padding is None else key_padding[:, None, None, :].to(self.query.device)
        return attention(
            self.query,
            self.key,
            self.value,
            mask,
            self.dropout,
            is_causal,
            self.scale,
            enable_gqa=True,
            method=self.prefill if is_causal and self.prefills else self.method,
            offset=offset,
            softcap=self.softcap,
            s_aux=self.sinks,
        )

    @property
    def causal_method(self) -> Method:
        """What serves causal rows."""
        return (self.prefill if self.prefills else self.method) or Auto()

    def causally(self, offset: int = 0, return_lse: bool = False, keep_cells: bool = False) -> CausalResult:
        """Causal attention by the method, without padding."""
        given = self.query, self.key, self.value, self.scale, self.causal_method
        return causal_attention(*given, offset, return_lse, keep_cells)

    def exactly(self, mask: Tensor | None) -> Tensor:
        """Exact attention with any mask, by torch's SDPA where that knows the logits."""
        if not self.softcap and self.sinks is None:
            return self._by_sdpa(mask)
        scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
        given = [self.query, self.key, self.value, *([] if self.sinks is None else [self.sinks])]
        return dense_attention(
            self.query,
            self.key,
            self.value,
            mask if mask is None else mask.to(self.query.device),
            scale,
            self.softcap or 0.0,
            self.sinks,
            self.dropout,
            recompute=needs_grad(*given) and not is_traced(),
        )

    def _by_sdpa(self, mask: Tensor | None) -> Tensor:
        """torch's SDPA with any mask. Query heads that share keys become rows, so that no kernel repeats the keys in memory."""
        batch, heads, rows, _ = self.query.shape
        kv_heads = self.key.shape[1]
        group = heads // kv_heads
        query = self.query.reshape(batch, kv_heads, group * rows, -1)
        if mask is not None:
            mask = _heads_as_rows(mask.to(self.query.device), kv_heads, group)
        output = sdpa(query, self.key, self.value, mask, self.dropout, scale=self.scale)
        return output.reshape(batch, heads, rows, -1)


def _heads_as_rows(mask: Tensor, kv_heads: int, group: int) -> Tensor:
    """A mask `[batch, heads or 1, rows or 1, keys]` for queries `[batch, kv_heads, group * rows, dim]`."""
    if group == 1 or mask.shape[1] == mask.shape[2] == 1:
        return mask
    if mask.shape[1] == 1:
        return mask.repeat(1, 1, group, 1)
    return mask.unflatten(1, (kv_heads, group)).flatten(2, 3)


class Mask(Protocol):
    """What exact attention needs to know about a mask; see `LazyMask`."""

    @property
    def keys(self) -> int: ...

    @property
    def reach(self) -> int | None: ...

    @property
    def entries(self) -> int: ...

    def keys_of(self, rows: slice) -> slice: ...

    def dense(self, rows: slice, keys: slice) -> Tensor | None: ...


@dataclass(frozen=True)
class TensorMask:
    """A mask that the caller has made: `[batch or 1, heads or 1, rows or 1, keys]`, boolean or added to the logits."""

    tensor: Tensor

    @property
    def keys(self) -> int:
        return self.tensor.shape[3]

    @property
    def reach(self) -> int | None:
        return None

    @property
    def entries(self) -> int:
        return self.tensor.shape[0] * self.tensor.shape[1]

    def keys_of(self, rows: slice) -> slice:
        return slice(0, self.keys)

    def dense(self, rows: slice, keys: slice) -> Tensor:
        mask = self.tensor[..., keys]
        return mask if mask.shape[2] == 1 else mask[:, :, rows]


@dataclass(frozen=True)
class BiasedMask:
    """A mask, and a bias `[batch or 1, heads, rows, keys]` that is added to the logits."""

    mask: Mask
    bias: Tensor

    @property
    def keys(self) -> int:
        return self.mask.keys

    @property
    def reach(self) -> int | None:
        return self.mask.reach

    @property
    def entries(self) -> int:
        return self.bias.shape[0] * self.bias.shape[1]

    def keys_of(self, rows: slice) -> slice:
        return self.mask.keys_of(rows)

    def dense(self, rows: slice, keys: slice) -> Tensor:
        bias = self.bias[:, :, rows, keys] if self.bias.shape[2] > 1 else self.bias[..., keys]
        mask = self.mask.dense(rows, keys)
        if mask is None:
            return bias
        mask = mask.to(bias.device)
        return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask


def serve(call: LayerCall, mask: LazyMask | Tensor | None, is_causal: bool, bias: Tensor | None = None) -> Tensor:
    """Attention of a layer, `[batch, heads, rows, dim]`.

    Args:
        mask: None means what it means to Transformers for SDPA: row i sees keys 0..i if `is_causal` and there is more than one
            row, else all keys.
        bias: added to the logits; attention is then exact.
    """
    if isinstance(mask, Tensor):
        return _serve_tensor_mask(call, mask, bias)
    lazy = mask if mask is not None else _default_mask(call, is_causal)
    if tuple(lazy.shape[2:]) != (call.rows, call.keys):
        raise ValueError(
            f"the mask was made for {lazy.shape[2]} queries and {lazy.shape[3]} keys, but the layer has {call.rows} and "
            f'{call.keys}; use attn_implementation="sdpa" with this model'
        )
    call = call.at(slice(None), slice(0, lazy.keys))
    return _serve_lazy_mask(call, lazy) if bias is None else exact(call, BiasedMask(lazy, bias))


def _serve_tensor_mask(call: LayerCall, mask: Tensor, bias: Tensor | None) -> Tensor:
    """Key padding goes to the method, any other mask to exact attention."""
    if mask.dim() != 4 or mask.shape[3] != call.keys:
        raise ValueError(
            f"a mask must be [batch, heads or 1, {call.rows} or 1, {call.keys}] for {call.rows} queries and {call.keys} keys, "
            f"got {tuple(mask.shape)}"
        )
    if bias is None and call.rows > 1 and mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1:
        return call.by_method(False, mask[:, 0, 0])
    if bias is None and mask.shape[1] == mask.shape[2] == 1:
        _tell_if_searchable(call)
    given = TensorMask(mask if mask.dtype == torch.bool else mask.to(call.query.dtype))
    return exact(call, given if bias is None else BiasedMask(given, bias))


def _default_mask(call: LayerCall, is_causal: bool) -> LazyMask:
    batch, _, rows, _ = call.query.shape
    if is_causal and rows > 1:
        seen = min(rows, call.keys)
        return LazyMask(batch, rows, seen, Pattern(after=0), key_length=call.keys, device=call.query.device)
    return LazyMask(batch, rows, call.keys, Pattern(), device=call.query.device)


def _serve_lazy_mask(call: LayerCall, mask: LazyMask) -> Tensor:
    if mask.pattern.sequence_of is not None and len(mask.pattern.others) == 0 and not is_traced():
        return _serve_packed(call, mask)
    # Preparing the keys does not pay for a single query.
    if call.rows > 1 and mask.is_full:
        return call.by_method(False, mask.key_padding)
    if call.rows > 1 and mask.is_causal and mask.shift == 0 and mask.keys == call.rows:
        return call.by_method(True, mask.key_padding)
    if mask.is_causal and call.rows + mask.shift == mask.keys and _are_enough_rows(call):
        return call.by_method(True, mask.key_padding, mask.keys - call.rows)
    _tell_if_searchable(call)
    return exact(call, mask)


def _tell_if_searchable(call: LayerCall) -> None:
    """Say so where rows that follow others are exact attention, although their method could search."""
    if can_search(call.method) and call.rows < call.keys and not call.has_window and not is_traced():
        tell_exact()


@functools.cache
def tell_exact() -> None:
    """Say, once in a process, that single tokens are exact attention although the registered method looks at few keys."""
    _log.warning(
        "tokens after the prompt attend exactly, not by the registered TopK or LazyGumbel, because their cache has no index; to "
        "decode by the method, pass past_key_values=hf.CellCache(config=model.config) to generate()"
    )


def _are_enough_rows(call: LayerCall) -> bool:
    """Whether it pays to let the method serve the last rows of a sequence: it may have to prepare all keys for them."""
    return call.rows >= LEAST_SHARE * call.keys and not isinstance(call.method, Exact)


def _serve_packed(call: LayerCall, mask: LazyMask) -> Tensor:
    """Each packed sequence by itself."""
    entries = []
    for entry, sequences in enumerate(mask.sequences()):
        here = slice(entry, entry + 1)
        parts = [_serve_lazy_mask(call.at(rows, rows, here), mask.of_sequence(entry, rows)) for rows in sequences]
        entries.append(torch.cat(parts, 2))
    return torch.cat(entries)


def exact(call: LayerCall, mask: Mask) -> Tensor:
    """Exact attention with any mask, of which only a bounded number of rows exists at a time."""
    parts = []
    for rows in _blocks(call, mask):
        keys = mask.keys_of(rows)
        parts.append(call.at(rows, keys).exactly(mask.dense(rows, keys)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _blocks(call: LayerCall, mask: Mask) -> Iterator[slice]:
    """Ranges of rows for which the mask, in float32 and repeated for query heads that share keys, is of bounded size."""
    group = call.query.shape[1] // call.key.shape[1]
    per_row = 4 * group * mask.entries
    if call.softcap or call.sinks is not None:
        # The weights of all heads are tables too.
        per_row = max(per_row, 16 * call.query.shape[0] * call.query.shape[1])
    step = max(1, BLOCK_BYTES // max(1, per_row * mask.keys))
    if mask.reach is not None and mask.reach < mask.keys:
        wanted = window_rows(mask.reach, call.query.is_cuda)
        step = min(wanted, max(1, BLOCK_BYTES // (per_row * (wanted + mask.reach))))
    if call.rows <= step:
        yield slice(0, call.rows)
        return
    for start in range(0, call.rows, step):
        yield slice(start, min(start + step, call.rows))
