"""Masks as a few numbers and vectors, turned into booleans only for the rows at hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from nearfield import _compat
from nearfield.problem import is_traced

MaskFunction = Callable[..., Any]
"""A mask function of Transformers: from (batch, head, query position, key position) to booleans."""


@dataclass(frozen=True)
class Pattern:
    """A mask function taken apart. A query at position p sees a key at position j if all of these hold:

    p - before <= j <= p + after (None: no bound), both are in the same packed sequence, and all of `others` are true.
    """

    before: int | None = None
    after: int | None = None
    sequence_of: Tensor | None = None
    """`[batch, length]`: the number of the packed sequence that a position belongs to"""
    others: tuple[MaskFunction, ...] = ()

    def __and__(self, other: Pattern) -> Pattern:
        others = self.others + other.others
        if self.sequence_of is not None and other.sequence_of is not None:
            raise ValueError("a mask cannot divide the tokens into packed sequences twice")
        sequence_of = other.sequence_of if self.sequence_of is None else self.sequence_of
        return Pattern(_smaller(self.before, other.before), _smaller(self.after, other.after), sequence_of, others)


def _smaller(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def recognise(function: MaskFunction) -> Pattern:
    """Take a mask function apart. One that is not Transformers' own stays whole, as one of `others`: slower, but right.

    While torch.compile traces, functions cannot be looked into, and all but the two simplest stay whole.
    """
    masking_utils = _compat.masking_utils()
    if function is masking_utils.causal_mask_function:
        return Pattern(after=0)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if is_traced():
        return Pattern(others=(function,))
    match _compat.mask_function_parts(function):
        case "and", functions:
            pattern = Pattern()
            for part in functions:
                pattern = pattern & recognise(part)
            return pattern
        case "window", width:
            return Pattern(before=width - 1)
        case "both sides", reach:
            return Pattern(before=reach, after=reach)
        case "chunks", size:
            return Pattern(before=size - 1, after=size - 1, others=(function,))
        case "packed", sequence_of:
            return Pattern(sequence_of=sequence_of)
    return Pattern(others=(function,))


class LazyMask(BlockMask):
    """The mask of one forward pass: row i stands at key i + shift and sees what `pattern` and `key_padding` let it see.

    It is a `BlockMask` in name only, and has none of its tables: a `BlockMask` is the one mask besides tensors that Transformers
    hands on to the layers untouched.

    Attributes:
        queries, keys: how many there are. Keys after the last one that any query sees (in a static cache) are left out.
        key_length: how many keys the layers will be given.
        shift: position of the first query minus position of the first key; a tensor if its value cannot be looked at.
        key_padding: `[batch, keys]`, False for padding; None if there is none.
        positions: of the first query and the first key, as `pattern.others` count them.
    """

    def __init__(
        self,
        batch: int,
        queries: int,
        keys: int,
        pattern: Pattern,
        shift: int | Tensor = 0,
        key_padding: Tensor | None = None,
        *,
        key_length: int | None = None,
        positions: tuple[int | Tensor, int] = (0, 0),
        use_vmap: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.batch, self.queries, self.keys = batch, queries, keys
        self.key_length = keys if key_length is None else key_length
        self.pattern, self.shift, self.key_padding = pattern, shift, key_padding
        self.positions, self.use_vmap, self.device = positions, use_vmap, device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.batch, 1, self.queries, self.key_length

    @property
    def ndim(self) -> int:
        return 4

    def dim(self) -> int:
        return 4

    def contiguous(self) -> LazyMask:
        return self

    def to(self, *args: Any, **kwargs: Any) -> LazyMask:
        """Itself: the layer moves what it gets from `dense`."""
        return self

    def __repr__(self) -> str:
        padding = None if self.key_padding is None else tuple(self.key_padding.shape)
        return f"LazyMask({self.queries} queries, {self.keys} keys, {self.pattern}, shift={self.shift}, key_padding={padding})"

    __str__ = __repr__

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"this model slices its attention mask ([{index}]), but nearfield's masks are not tensors; "
            'use attn_implementation="sdpa" with this model'
        )

    @property
    def is_causal(self) -> bool:
        """Whether each row sees all keys up to its own, padding apart."""
        return self._is_band and self.pattern.before is None and self.pattern.after == 0 and isinstance(self.shift, int)

    @property
    def is_full(self) -> bool:
        """Whether every row sees all keys, padding apart."""
        return self._is_band and self.pattern.before is None and self.pattern.after is None

    @property
    def _is_band(self) -> bool:
        return self.pattern.sequence_of is None and len(self.pattern.others) == 0

    @property
    def reach(self) -> int | None:
        """How many keys a row sees at most; None: all of them."""
        before, after = self.pattern.before, self.pattern.after
        return None if before is None or after is None else before + 1 + after

    @property
    def entries(self) -> int:
        """How many masks along the batch may differ."""
        return 1 if self._is_band and self.key_padding is None else self.batch

    def keys_of(self, rows: slice) -> slice:
        """The range of keys that these rows may see; at least one key."""
        if not isinstance(self.shift, int):
            return slice(0, self.keys)
        before, after = self.pattern.before, self.pattern.after
        start = 0 if before is None else min(max(0, rows.start + self.shift - before), self.keys - 1)
        stop = self.keys if after is None else min(self.keys, rows.stop + self.shift + after)
        return slice(start, max(stop, start + 1))

    def dense(self, rows: slice, keys: slice) -> Tensor | None:
        """Booleans `[batch or 1, 1, rows, keys]`; None if all rows see all keys."""
        parts = [*self._band(rows, keys), *self._same_sequence(rows, keys)]
        if self.key_padding is not None:
            parts.append(self.key_padding[:, None, None, keys])
        # No comprehension: torch.compile would compile one program for each length of the list.
        for function in self.pattern.others:
            parts.append(self._other(function, rows, keys))
        mask = None
        for part in parts:
            mask = part if mask is None else mask & part
        return mask

    def _band(self, rows: slice, keys: slice) -> list[Tensor]:
        before, after = self.pattern.before, self.pattern.after
        if before is None and after is None:
            return []
        place = torch.arange(rows.start, rows.stop, device=self.device)[:, None] + self.shift
        key = torch.arange(keys.start, keys.stop, device=self.device)
        bounds = []
        if after is not None:
            bounds.append(key <= place + after)
        if before is not None:
            bounds.append(key >= place - before)
        return [bound[None, None] for bound in bounds]

    def _same_sequence(self, rows: slice, keys: slice) -> list[Tensor]:
        if self.pattern.sequence_of is None:
            return []
        here = self.pattern.sequence_of
        return [(here[:, rows, None] == here[:, None, keys])[:, None]]

    def _other(self, function: MaskFunction, rows: slice, keys: slice) -> Tensor:
        first_query, first_key = self.positions
        return _compat.masking_utils().sdpa_mask(
            batch_size=self.batch,
            q_length=rows.stop - rows.start,
            kv_length=keys.stop - keys.start,
            q_offset=first_query + rows.start,
            kv_offset=first_key + keys.start,
            mask_function=function,
            allow_is_causal_skip=False,
            use_vmap=self.use_vmap,
            device=self.device,
        )

    def sequences(self) -> list[list[slice]]:
        """The packed sequences of each batch entry, as ranges of rows. This looks at values, so it waits for a GPU."""
        assert self.pattern.sequence_of is not None
        ranges = []
        for numbers in self.pattern.sequence_of.tolist():
            starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1]]
            ranges.append([slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True)])
        return ranges

    def of_sequence(self, entry: int, rows: slice) -> LazyMask:
        """The mask of one packed sequence by itself."""
        length = rows.stop - rows.start
        padding = None if self.key_padding is None else self.key_padding[entry : entry + 1, rows]
        pattern = _without_idle_bounds(Pattern(self.pattern.before, self.pattern.after), length, length, 0)
        return LazyMask(1, length, length, pattern, 0, padding, device=self.device)


def _without_idle_bounds(pattern: Pattern, queries: int, keys: int, shift: int) -> Pattern:
    """The pattern without bounds that hide nothing in a call of this size."""
    before, after = pattern.before, pattern.after
    if before is not None and before >= queries - 1 + shift:
        before = None
    if after is not None and after >= keys - 1 - shift:
        after = None
    return Pattern(before, after, pattern.sequence_of, pattern.others)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    use_vmap: bool = False,
    device: torch.device | str = "cpu",
    **unused: Any,
) -> LazyMask | Tensor | None:
    """The function that Transformers calls for a mask, once per forward pass and kind of layer.

    Returns:
        None if the layers' own `is_causal` says it all; for a single query a boolean tensor, as for SDPA, since its mask is as
        small as any description of it; else a `LazyMask`.
    """
    function = mask_function or _compat.masking_utils().causal_mask_function
    if q_length == 1:
        # Transformers leaves out a mask that hides nothing too, but not while a CUDA graph is captured.
        if allow_is_causal_skip and attention_mask is None and _sees_all(function, q_offset, kv_length, kv_offset):
            return None
        return _compat.masking_utils().sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip,
            use_vmap=use_vmap,
            device=device,
        )
    pattern = recognise(function)
    shift = _as_int(q_offset - kv_offset)
    keys = kv_length
    if isinstance(shift, int):
        pattern = _without_idle_bounds(pattern, q_length, kv_length, shift)
        if pattern.after is not None:
            keys = max(1, min(kv_length, q_length + shift + pattern.after))
    padding = _key_padding(attention_mask, batch_size, keys, kv_offset)
    mask = LazyMask(
        batch_size,
        q_length,
        keys,
        pattern,
        shift,
        padding,
        key_length=kv_length,
        positions=(q_offset, kv_offset),
        use_vmap=use_vmap,
        device=device,
    )
    starts_together = isinstance(shift, int) and shift == 0
    if allow_is_causal_skip and padding is None and mask.is_causal and starts_together:
        return None
    if allow_is_bidirectional_skip and padding is None and mask.is_full:
        return None
    return mask


def make_sharded_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction | None = None,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **unused: Any,
) -> LazyMask:
    """`make_mask` where other ranks have other tokens of the sequence: a bound hides something even if it is longer than all
    tokens here, and a rank without padding says so."""
    pattern = recognise(mask_function or _compat.masking_utils().causal_mask_function)
    padding = None if attention_mask is None else attention_mask.to(torch.bool).expand(batch_size, -1)
    shift = _as_int(q_offset - kv_offset)
    return LazyMask(batch_size, q_length, kv_length, pattern, shift, padding, device=device)


def _sees_all(function: MaskFunction, q_offset: int | Tensor, kv_length: int, kv_offset: int) -> bool:
    """Whether a single query sees every key, which is known without looking at a tensor."""
    shift = q_offset - kv_offset
    if not isinstance(shift, int):
        return False
    return _without_idle_bounds(recognise(function), 1, kv_length, shift) == Pattern()


def _as_int(number: int | Tensor) -> int | Tensor:
    """A plain integer, if the value may be looked at: a static cache keeps its length in a tensor."""
    return number if isinstance(number, int) or is_traced() or not isinstance(number, Tensor) else int(number)


def _key_padding(attention_mask: Tensor | None, batch: int, keys: int, first_key: int) -> Tensor | None:
    """`[batch, keys]`, False for padding, from what a tokenizer calls attention mask; None if there is no padding.

    Keys that the attention mask is too short for have not been written yet, and are hidden like padding.
    """
    if attention_mask is None:
        return None
    padding = attention_mask.to(torch.bool).expand(batch, -1)[:, first_key : first_key + keys]
    padding = torch.nn.functional.pad(padding, (0, keys - padding.shape[1]))
    return None if not is_traced() and bool(padding.all()) else padding
