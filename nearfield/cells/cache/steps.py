"""What all stores of keys share: checks of what is appended and asked for, which keys a row sees, and the error of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.kernels.reference import rms_norm, weighted_softmax


@dataclass(frozen=True)
class StepError:
    """How far the rows of one call of `attend` were from exact attention: `[batch, heads, rows]` each."""

    first: int
    """the position of the first row"""
    relative: Tensor
    """||estimate - exact|| / ||exact||"""
    additive: Tensor
    """||estimate - exact||, in units of the rms norm of the values"""
    pooled: float
    """||estimate - exact|| over all heads and rows together, in units of ||exact||, of the worst batch entry"""

    def __str__(self) -> str:
        return (
            f"rows from {self.first} on: relative error {float(self.relative.mean()):.3g} on average, at most "
            f"{float(self.relative.max()):.3g}"
        )


class ExactRows(NamedTuple):
    """What the rows of a call should have been."""

    first: int
    output: Tensor
    """`[batch, query heads, rows, dim]`"""
    norm: Tensor
    """`[batch, query heads, 1]`: the rms norm of the values"""

    def error(self, output: Tensor) -> StepError:
        """How far an output of the same shape is from it."""
        off, size = (output.to(self.output.dtype) - self.output).norm(dim=-1), self.output.norm(dim=-1)
        least = torch.finfo(off.dtype).tiny
        pooled = off.flatten(1).norm(dim=1) / size.flatten(1).norm(dim=1).clamp(min=least)
        return StepError(self.first, off / size.clamp(min=least), off / self.norm, float(pooled.max()) if len(pooled) else 0.0)


def exact_rows(queries: Tensor, keys: Tensor, values: Tensor, key_padding: Tensor | None, like: Tensor, first: int) -> ExactRows:
    """Exact attention of `scaled_queries` of rows from position `first` on, in the shape of `like` `[batch, query heads, rows,
    dim]`.

    Keys and values are `[batch, heads, length, dim]` in the order in which they came; `key_padding` `[batch, length]` is False
    for padding.
    """
    batch, query_heads, rows, _ = like.shape
    heads, length = keys.shape[1:3]
    group = query_heads // heads
    hidden = hidden_mask(key_padding, heads, slice(0, length), first, rows, group, keys.device)
    exact = _exact_attention(queries, keys.flatten(0, 1), values.flatten(0, 1), hidden).view_as(like)
    norm = rms_norm(values.flatten(0, 1), None if key_padding is None else key_padding.repeat_interleave(heads, 0))
    return ExactRows(first, exact, norm.view(batch, heads, 1).repeat_interleave(group, 1))


def _exact_attention(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> Tensor:
    """Head by head, because there may be many keys."""
    found = []
    for head, query in enumerate(queries):
        logits = query @ keys[head].to(query.dtype).T
        if hidden is not None:
            logits.masked_fill_(hidden[head if len(hidden) > 1 else 0], -torch.inf)
        found.append(weighted_softmax(logits, None)[0] @ values[head].to(query.dtype))
    return torch.stack(found)


def hidden_mask(
    key_padding: Tensor | None, heads: int, keys: slice, first: int, rows: int, group: int, device: torch.device
) -> Tensor | None:
    """True where a row does not see a key: `[batch * heads or 1, group * rows, keys]`; None: all rows see all keys.

    Rows are at the positions from `first` on, and the keys must be in the order in which they came.
    """
    hidden = None
    if rows > 1:
        own = torch.arange(first, first + rows, device=device)[:, None]
        hidden = (torch.arange(keys.start, keys.stop, device=device) > own)[None]
    if key_padding is not None:
        padding = ~key_padding[:, keys].repeat_interleave(heads, 0)[:, None]
        hidden = padding if hidden is None else padding | hidden
    return None if hidden is None else hidden.repeat(1, group, 1)


def check_new(key: Tensor, value: Tensor, counts: Tensor | None) -> None:
    """Raise unless these can be appended to a store that is empty."""
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
        raise ValueError("this cache has no gradients: call the model under torch.no_grad(), or without a cache")
    if counts is not None and (counts.dtype != torch.bool or counts.shape != (key.shape[0], key.shape[2])):
        raise ValueError(
            f"counts must be boolean and [{key.shape[0]}, {key.shape[2]}], got {counts.dtype} and {tuple(counts.shape)}"
        )


def check_alike(key: Tensor, value: Tensor, stored_key: Tensor, stored_value: Tensor) -> None:
    """Raise unless these go with what is stored."""
    for name, new, stored in (("key", key, stored_key), ("value", value, stored_value)):
        if new.dtype != stored.dtype or new.device != stored.device:
            raise TypeError(f"{name} is {new.dtype} on {new.device}, but the store holds {stored.dtype} on {stored.device}")
        if (*new.shape[:2], new.shape[3]) != (*stored.shape[:2], stored.shape[3]):
            raise ValueError(
                f"{name} must be [{stored.shape[0]}, {stored.shape[1]}, new, {stored.shape[3]}] like what is stored, got "
                f"{tuple(new.shape)}"
            )


def check_query(query: Tensor, stored_key: Tensor, length: int) -> None:
    """Raise unless these queries can be those of the latest keys of so many."""
    batch, heads, _, dim = stored_key.shape
    if query.dim() != 4 or query.shape[0] != batch or query.shape[3] != dim or query.shape[1] % heads:
        raise ValueError(
            f"query must be [{batch}, a multiple of {heads}, rows, {dim}] for the stored keys, got {tuple(query.shape)}"
        )
    if query.shape[2] > length:
        raise ValueError(f"there are {query.shape[2]} queries for {length} keys; append the keys of the queries first")


def checked_padding(counts: Tensor | None, before: Tensor | None, nothing: Tensor, settled: int) -> Tensor | None:
    """What a store is told about padding, `counts` `[batch, length]` or None, as a tensor of its own; None if there is none.

    Raises if it differs from what was said `before` about the first `settled` keys, which queries have attended to. `nothing`
    says that there is no padding: True everywhere.
    """
    # A copy: kernels need contiguous rows, and the caller may change the mask later.
    counts = None if counts is None or bool(counts.all()) else counts.to(nothing.device, copy=True).contiguous()
    if counts is not None and counts.shape != nothing.shape:
        raise ValueError(f"counts must be {tuple(nothing.shape)}, got {tuple(counts.shape)}")
    if counts is not None or before is not None:
        then, now = (nothing if x is None else x for x in (before, counts))
        if not torch.equal(then[:, :settled], now[:, :settled]):
            raise ValueError(
                "the mask hides keys that it showed before, or shows keys that it hid: this cache can serve padding, which "
                "does not change, but no sliding window; give CellCache the config of the model, or use DynamicCache"
            )
    return counts


def checked_entries(entries: Tensor, batch: int, device: torch.device) -> Tensor | None:
    """The batch entries that are to be kept, by number; None: all of them, in the order in which they are."""
    entries = torch.as_tensor(entries, device=device)
    entries = entries.nonzero()[:, 0] if entries.dtype == torch.bool else entries
    if entries.numel() and not 0 <= int(entries.min()) <= int(entries.max()) < batch:
        raise ValueError(f"entries must be from 0 to {batch - 1}, got {int(entries.min())} to {int(entries.max())}")
    return None if torch.equal(entries, torch.arange(batch, device=device)) else entries


def check_length(length: int, stored: int) -> None:
    if not 0 <= length <= stored:
        raise ValueError(f"length must be between 0 and {stored}, the number of stored keys, got {length}")
