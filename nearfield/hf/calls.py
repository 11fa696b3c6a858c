"""How the call of a layer is served: by the method where it knows such masks, else exactly, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from nearfield.attention import attention
from nearfield.chunks import BLOCK_BYTES
from nearfield.exact import Exact
from nearfield.hf.masks import LazyMask, Pattern
from nearfield.problem import Method, is_traced

ENOUGH = 0.5
"""The share of the keys that must be asked by queries of their own for a method to serve the end of a sequence."""

SHORTEST_BLOCK = 256
"""Rows of a block within a sliding window, at least."""


@dataclass(frozen=True)
class LayerCall:
    """What a layer asks for, mask apart: `[batch, heads, length, dim]`, keys and values with as many heads or fewer."""

    query: Tensor
    key: Tensor
    value: Tensor
    method: Method | None = None
    scale: float | None = None
    dropout: float = 0.0

    @property
    def rows(self) -> int:
        return self.query.shape[2]

    @property
    def keys(self) -> int:
        return self.key.shape[2]

    def at(self, rows: slice, keys: slice, entries: slice = slice(None)) -> LayerCall:
        """The same for some rows, keys and batch entries."""
        key, value = self.key[entries, :, keys], self.value[entries, :, keys]
        return replace(self, query=self.query[entries, :, rows], key=key, value=value)

    def by_method(self, is_causal: bool, counts: Tensor | None = None) -> Tensor:
        mask = None if counts is None else counts[:, None, None, :].to(self.query.device)
        return attention(
            self.query,
            self.key,
            self.value,
            mask,
            self.dropout,
            is_causal,
            self.scale,
            enable_gqa=True,
            method=self.method,
        )

    def exactly(self, mask: Tensor | None) -> Tensor:
        """torch's SDPA with any mask. Query heads that share keys become rows, so that no kernel repeats the keys in memory."""
        batch, heads, rows, _ = self.query.shape
        kv_heads = self.key.shape[1]
        group = heads // kv_heads
        query = self.query.reshape(batch, kv_heads, group * rows, -1)
        if mask is not None:
            mask = _folded(mask.to(self.query.device), kv_heads, group)
        output = F.scaled_dot_product_attention(query, self.key, self.value, mask, self.dropout, scale=self.scale)
        return output.reshape(batch, heads, rows, -1)


def _folded(mask: Tensor, kv_heads: int, group: int) -> Tensor:
    """A mask `[batch, heads or 1, rows or 1, keys]` for queries `[batch, kv_heads, group * rows, dim]`."""
    if group == 1 or mask.shape[1] == mask.shape[2] == 1:
        return mask
    if mask.shape[1] == 1:
        return mask.repeat(1, 1, group, 1)
    return mask.unflatten(1, (kv_heads, group)).flatten(2, 3)


class Mask(Protocol):
    """What exact attention has to know of a mask."""

    @property
    def keys(self) -> int: ...

    @property
    def reach(self) -> int | None: ...

    @property
    def entries(self) -> int: ...

    def seen_by(self, rows: slice) -> slice: ...

    def show(self, rows: slice, keys: slice) -> Tensor | None: ...


@dataclass(frozen=True)
class GivenMask:
    """A mask that somebody has already made: `[batch or 1, heads or 1, rows or 1, keys]`, boolean or added to the logits."""

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

    def seen_by(self, rows: slice) -> slice:
        return slice(0, self.keys)

    def show(self, rows: slice, keys: slice) -> Tensor:
        mask = self.tensor[..., keys]
        return mask if mask.shape[2] == 1 else mask[:, :, rows]


@dataclass(frozen=True)
class BiasedMask:
    """A mask, and a bias `[batch or 1, heads, rows, keys]` added to the logits that it lets through."""

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

    def seen_by(self, rows: slice) -> slice:
        return self.mask.seen_by(rows)

    def show(self, rows: slice, keys: slice) -> Tensor:
        bias = self.bias[:, :, rows, keys] if self.bias.shape[2] > 1 else self.bias[..., keys]
        shown = self.mask.show(rows, keys)
        if shown is None:
            return bias
        shown = shown.to(bias.device)
        return bias.masked_fill(~shown, -torch.inf) if shown.dtype == torch.bool else bias + shown


def serve(call: LayerCall, mask: LazyMask | Tensor | None, is_causal: bool, bias: Tensor | None = None) -> Tensor:
    """Attention of a layer, `[batch, heads, rows, dim]`.

    Args:
        mask: None: row i sees keys 0..i if `is_causal` and there is more than one row, else all, as Transformers has it for SDPA.
        bias: added to the logits; then attention is exact.
    """
    if isinstance(mask, Tensor):
        return _masked(call, mask, bias)
    lazy = mask if mask is not None else _implied(call, is_causal)
    if tuple(lazy.shape[2:]) != (call.rows, call.keys):
        raise ValueError(
            f"the mask was made for {lazy.shape[2]} queries and {lazy.shape[3]} keys, and the layer has {call.rows} and "
            f'{call.keys}; use attn_implementation="sdpa" with this model'
        )
    call = call.at(slice(None), slice(0, lazy.keys))
    return _served(call, lazy) if bias is None else exact(call, BiasedMask(lazy, bias))


def _masked(call: LayerCall, mask: Tensor, bias: Tensor | None) -> Tensor:
    """A mask that is a tensor: key padding is for the method, any other is not."""
    if mask.dim() != 4 or mask.shape[3] != call.keys:
        raise ValueError(
            f"a mask must be [batch, heads or 1, {call.rows} or 1, {call.keys}] for {call.rows} queries and {call.keys} keys, "
            f"got {tuple(mask.shape)}"
        )
    if bias is None and call.rows > 1 and mask.dtype == torch.bool and mask.shape[1] == mask.shape[2] == 1:
        return call.by_method(False, mask[:, 0, 0])
    given = GivenMask(mask if mask.dtype == torch.bool else mask.to(call.query.dtype))
    return exact(call, given if bias is None else BiasedMask(given, bias))


def _implied(call: LayerCall, is_causal: bool) -> LazyMask:
    batch, _, rows, _ = call.query.shape
    if is_causal and rows > 1:
        seen = min(rows, call.keys)
        return LazyMask(batch, rows, seen, Pattern(after=0), key_length=call.keys, device=call.query.device)
    return LazyMask(batch, rows, call.keys, Pattern(), device=call.query.device)


def _served(call: LayerCall, mask: LazyMask) -> Tensor:
    if mask.pattern.sequence_of is not None and len(mask.pattern.others) == 0 and not is_traced():
        return _by_sequence(call, mask)
    # A single query does not repay any preparation of the keys.
    if call.rows > 1 and mask.is_open:
        return call.by_method(False, mask.counts)
    if call.rows > 1 and mask.is_causal and mask.shift == 0 and mask.keys == call.rows:
        return call.by_method(True, mask.counts)
    if mask.is_causal and call.rows + mask.shift == mask.keys and _repays(call):
        return _end_of_sequence(call, mask.counts)
    return exact(call, mask)


def _repays(call: LayerCall) -> bool:
    """Whether to let the method serve queries at the end of the keys, with as many made up that stand before them."""
    return call.rows >= ENOUGH * call.keys and not isinstance(call.method, Exact)


def _end_of_sequence(call: LayerCall, counts: Tensor | None) -> Tensor:
    """Causal attention of the last rows: methods align at the first key, so rows of zeros go before and are dropped again."""
    before = call.keys - call.rows
    return replace(call, query=F.pad(call.query, (0, 0, before, 0))).by_method(True, counts)[:, :, before:]


def _by_sequence(call: LayerCall, mask: LazyMask) -> Tensor:
    """Packed sequences, each by itself."""
    entries = []
    for entry, sequences in enumerate(mask.sequences()):
        here = slice(entry, entry + 1)
        parts = [_served(call.at(rows, rows, here), mask.of_sequence(entry, rows)) for rows in sequences]
        entries.append(torch.cat(parts, 2))
    return torch.cat(entries)


def exact(call: LayerCall, mask: Mask) -> Tensor:
    """Exact attention with any mask, which exists for a bounded number of rows at a time."""
    parts = []
    for rows in _blocks(call, mask):
        keys = mask.seen_by(rows)
        parts.append(call.at(rows, keys).exactly(mask.show(rows, keys)))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 2)


def _blocks(call: LayerCall, mask: Mask) -> Iterator[slice]:
    """Ranges of rows, such that the mask of a range (in float32, repeated for query heads that share keys) is of bounded size."""
    group = call.query.shape[1] // call.key.shape[1]
    per_row = 4 * group * mask.entries
    step = max(1, BLOCK_BYTES // max(1, per_row * mask.keys))
    if mask.reach is not None and mask.reach < mask.keys:
        # As many rows as they see keys: half of the block is then within the window.
        wanted = max(SHORTEST_BLOCK, mask.reach)
        step = min(wanted, max(1, BLOCK_BYTES // (per_row * (wanted + mask.reach))))
    if call.rows <= step:
        yield slice(0, call.rows)
        return
    for start in range(0, call.rows, step):
        yield slice(start, min(start + step, call.rows))
