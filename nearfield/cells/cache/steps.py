"""What all stores of keys share: checks of what is appended and asked for, which keys a row sees, and the error of a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.checks import check_integer, check_scale
from nearfield.kernels.reference import rms_norm, weighted_softmax
from nearfield.problem import DTYPES, check_dense, check_range


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
    exact = exact_attention(queries, keys.flatten(0, 1), values.flatten(0, 1), hidden)[0].view_as(like)
    norm = rms_norm(values.flatten(0, 1), None if key_padding is None else key_padding.repeat_interleave(heads, 0))
    return ExactRows(first, exact, norm.view(batch, heads, 1).repeat_interleave(group, 1))


def exact_attention(queries: Tensor, keys: Tensor, values: Tensor, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log-normaliser. Head by head, because there may be many keys."""
    found, lse = [], []
    for head, query in enumerate(queries):
        logits = query @ keys[head].to(query.dtype).T
        if hidden is not None:
            logits.masked_fill_(hidden[head if len(hidden) > 1 else 0], -torch.inf)
        weight, own_lse = weighted_softmax(logits, None)
        found.append(weight @ values[head].to(query.dtype))
        lse.append(own_lse)
    return torch.stack(found), torch.stack(lse)


def hidden_mask(
    key_padding: Tensor | None,
    heads: int,
    keys: slice,
    first: int,
    rows: int,
    group: int,
    device: torch.device,
    positions: Tensor | None = None,
) -> Tensor | None:
    """True where a row does not see a key: `[batch * heads or 1, group * rows, keys]`; None: all rows see all keys.

    Rows are at the positions from `first` on, and the keys must be in the order in which they came. `positions` `[keys]` are
    theirs; None: they are where they lie.
    """
    hidden = None
    if rows > 1:
        own = torch.arange(first, first + rows, device=device)[:, None]
        at = torch.arange(keys.start, keys.stop, device=device) if positions is None else positions
        hidden = (at > own)[None]
    if key_padding is not None:
        padding = ~key_padding[:, keys].repeat_interleave(heads, 0)[:, None]
        hidden = padding if hidden is None else padding | hidden
    return None if hidden is None else hidden.repeat(1, group, 1)


def check_numbers(name: str, x: object) -> None:
    """Raise unless this is a dense tensor that holds numbers."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
    if x.is_nested:
        raise TypeError(f"{name} is a nested tensor; pass a dense one, and say by counts what is padding")
    check_dense(name, x)
    if x.is_meta:
        raise ValueError(f"{name} is on the device meta and holds no numbers; pass tensors that do")


def check_counts(counts: Tensor, batch: int, keys: int) -> None:
    """Raise unless this is a mask of so many keys of each batch entry."""
    check_numbers("counts", counts)
    if counts.dtype != torch.bool or counts.shape != (batch, keys):
        remedy = "" if counts.dtype == torch.bool else "; if 1 means that a key counts, pass counts.bool()"
        raise ValueError(f"counts must be boolean and [{batch}, {keys}], got {counts.dtype} and {tuple(counts.shape)}{remedy}")


def check_new(key: Tensor, value: Tensor, counts: Tensor | None) -> None:
    """Raise unless these can be appended to a store that is empty."""
    for name, x in (("key", key), ("value", value)):
        check_numbers(name, x)
    if key.dim() != 4 or value.dim() != 4 or key.shape[:3] != value.shape[:3]:
        raise ValueError(
            f"key and value must be [batch, heads, new, dim], alike up to dim, got {tuple(key.shape)} and {tuple(value.shape)}"
        )
    for number, what in ((1, "head"), (3, "column")):
        if not key.shape[number]:
            raise ValueError(f"keys must have at least one {what}, got {tuple(key.shape)}; they are [batch, heads, new, dim]")
    if key.dtype not in DTYPES or key.dtype != value.dtype or key.device != value.device:
        raise TypeError(
            f"key and value must have one floating dtype and device, got {key.dtype} on {key.device} and {value.dtype} on "
            f"{value.device}"
        )
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        raise ValueError("this cache has no gradients: call the model under torch.no_grad(), or without a cache")
    if counts is not None:
        check_counts(counts, key.shape[0], key.shape[2])


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


def check_query(query: Tensor, stored_key: Tensor, length: int, scale: float | None) -> None:
    """Raise unless these queries, times scale, can be those of the latest keys of so many.

    Arithmetic is in float64 if keys are, else in float32: queries must ask for the same.
    """
    check_numbers("query", query)
    if query.dtype not in DTYPES:
        raise TypeError(f"query must be a tensor of floating point numbers of 16, 32 or 64 bits, got {query.dtype}")
    dtype, device = stored_key.dtype, stored_key.device
    if (query.dtype == torch.float64) != (dtype == torch.float64) or query.device != device:
        raise TypeError(
            f"query is {query.dtype} on {query.device}, but the store holds {dtype} on {device}; "
            f"pass query.to({str(device)!r}, {dtype})"
        )
    # Steps come here, with a small scale: what is fine at a glance takes no time.
    if scale is not None and not (type(scale) is float and abs(scale) <= 1.0):
        check_scale("scale", scale)
        check_range("scale", scale, query, "multiply the queries by a part of it, or pass float64 inputs")
    shape = query.shape
    batch, heads, _, dim = stored_key.shape
    if len(shape) != 4 or shape[0] != batch or shape[3] != dim or shape[1] % heads:
        raise ValueError(f"query must be [{batch}, a multiple of {heads}, rows, {dim}] for the stored keys, got {tuple(shape)}")
    if shape[2] > length:
        raise ValueError(f"there are {shape[2]} queries for {length} keys; append the keys of the queries first")


def scale_or_default(query: Tensor, scale: float | None) -> float:
    """`scale` as a float: torch takes no integer beyond 64 bits. None: 1 / sqrt(dim)."""
    return max(1, query.shape[3]) ** -0.5 if scale is None else float(scale)


def checked_padding(counts: Tensor | None, before: Tensor | None, nothing: Tensor, settled: int) -> Tensor | None:
    """What a store is told about padding, `counts` `[batch, length]` or None, as a tensor of its own; None if there is none.

    Raises if it differs from what was said `before` about the first `settled` keys, which queries have attended to. `nothing`
    says that there is no padding: True everywhere.
    """
    if counts is not None:
        check_counts(counts, *nothing.shape)
    # A copy: kernels need contiguous rows, and the caller may change the mask later.
    counts = None if counts is None or bool(counts.all()) else counts.to(nothing.device, copy=True).contiguous()
    if counts is not None or before is not None:
        then, now = (nothing if x is None else x for x in (before, counts))
        if not torch.equal(then[:, :settled], now[:, :settled]):
            raise ValueError(
                "the mask hides keys that it showed before, or shows keys that it hid: this cache can serve padding, which "
                "does not change, but no sliding window; give CellCache the config of the model, or use DynamicCache"
            )
    return counts


def checked_entries(entries: Tensor, batch: int, device: torch.device) -> Tensor | None:
    """The batch entries that are to be kept, by number; None: all of them, in the order in which they are.

    They are given by number, or as a mask `[batch]`.
    """
    if not isinstance(entries, Tensor):
        try:
            entries = torch.as_tensor(entries, device=device)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"entries must be numbers of batch entries, got {entries!r}: {error}") from error
    check_numbers("entries", entries)
    is_mask = entries.dtype == torch.bool
    wrong = entries.shape != (batch,) if is_mask else entries.dim() != 1
    # An empty list has become a tensor of floats.
    if wrong or (entries.numel() and (entries.is_floating_point() or entries.is_complex())):
        raise ValueError(
            f"entries must be integers [any], the numbers of batch entries, or a boolean mask [{batch}], got {entries.dtype} and "
            f"{tuple(entries.shape)}"
        )
    entries = entries.to(device)
    entries = entries.nonzero()[:, 0] if is_mask else entries.long()
    if entries.numel() and not 0 <= int(entries.min()) <= int(entries.max()) < batch:
        raise ValueError(f"entries must be from 0 to {batch - 1}, got {int(entries.min())} to {int(entries.max())}")
    return None if torch.equal(entries, torch.arange(batch, device=device)) else entries


def check_length(length: int, stored: int) -> None:
    """Raise unless a store of so many keys can be cropped to this length."""
    check_integer("length", length)
    if not 0 <= length <= stored:
        raise ValueError(f"length must be between 0 and {stored}, the number of stored keys, got {length}")
