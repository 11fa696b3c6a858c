"""What each query of a call sees, in a few numbers and vectors; made into booleans only for the rows that are looked at."""

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
"""One of Transformers' mask functions: (batch, head, query position, key position) to booleans."""


@dataclass(frozen=True)
class Pattern:
    """A mask function taken apart. A query at position p sees a key at position j where all of this holds:

    p - before <= j <= p + after (no bound where None), both are in one packed sequence, and `others` are all true.
    """

    before: int | None = None
    after: int | None = None
    sequence_of: Tensor | None = None
    """`[batch, length]`, the number of the packed sequence that a position belongs to"""
    others: tuple[MaskFunction, ...] = ()

    def __and__(self, other: Pattern) -> Pattern:
        others = self.others + other.others
        if self.sequence_of is not None and other.sequence_of is not None:
            raise ValueError("a mask has two divisions into packed sequences")
        sequence_of = other.sequence_of if self.sequence_of is None else self.sequence_of
        return Pattern(_least(self.before, other.before), _least(self.after, other.after), sequence_of, others)


def _least(one: int | None, other: int | None) -> int | None:
    if one is None or other is None:
        return other if one is None else one
    return min(one, other)


def recognise(function: MaskFunction) -> Pattern:
    """Take a mask function apart. What is not one of Transformers' own stays whole, as one of `others`: slower, not wrong.

    The compiler does not let us look into functions that were made while it traces: there, all but the two plainest stay whole.
    """
    masking_utils = _compat.masking_utils()
    if function is masking_utils.causal_mask_function:
        return Pattern(after=0)
    if function is masking_utils.bidirectional_mask_function:
        return Pattern()
    if is_traced() or getattr(function, "__module__", None) != masking_utils.__name__:
        return Pattern(others=(function,))
    inside = _compat.closed_over(function)
    match function.__qualname__.partition(".")[0], inside:
        case "and_masks", {"mask_functions": functions}:
            pattern = Pattern()
            for part in functions:
                pattern = pattern & recognise(part)
            return pattern
        case "sliding_window_overlay", {"sliding_window": int(window)}:
            return Pattern(before=window - 1)
        case "sliding_window_bidirectional_overlay", {"sliding_window": int(window)}:
            return Pattern(before=window, after=window)
        case "chunked_overlay", {"chunk_size": int(size)}:
            return Pattern(before=size - 1, after=size - 1, others=(function,))
        case "packed_sequence_mask_function", {"packed_sequence_mask": Tensor() as sequence_of}:
            return Pattern(sequence_of=sequence_of)
    return Pattern(others=(function,))


class LazyMask(BlockMask):
    """The mask of one forward pass: row i stands at key i + shift and sees what `pattern` and `counts` let it see.

    It is a `BlockMask` only in name: of all that is not a tensor, Transformers hands those on to the layers untouched. None of
    the tables of a `BlockMask` exist.

    Attributes:
        queries, keys: how many there are; keys behind the last one that any query sees (of a static cache) are not counted.
        key_length: of the keys that the layers will be given.
        shift: the position of the first query minus that of the first key; a tensor where it cannot be looked at.
        counts: `[batch, keys]`, False where a key is padding; None where all count.
    """

    def __init__(
        self,
        batch: int,
        queries: int,
        keys: int,
        pattern: Pattern,
        shift: int | Tensor = 0,
        counts: Tensor | None = None,
        *,
        key_length: int | None = None,
        positions: tuple[int | Tensor, int] = (0, 0),
        use_vmap: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        self.batch, self.queries, self.keys = batch, queries, keys
        self.key_length = keys if key_length is None else key_length
        self.pattern, self.shift, self.counts = pattern, shift, counts
        self.positions = positions
        """of the first query and the first key, as `pattern.others` count them"""
        self.use_vmap, self.device = use_vmap, device

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
        """Itself: what it shows is put where the layer wants it."""
        return self

    def __repr__(self) -> str:
        counts = None if self.counts is None else tuple(self.counts.shape)
        return f"LazyMask({self.queries} queries, {self.keys} keys, {self.pattern}, shift={self.shift}, counts={counts})"

    __str__ = __repr__

    def __getitem__(self, index: Any) -> Any:
        raise TypeError(
            f"this model slices its attention masks, and nearfield's are not tensors; got [{index}]. "
            'Use attn_implementation="sdpa" with this model.'
        )

    @property
    def is_causal(self) -> bool:
        """Whether each row sees all keys up to its own (that count), and nothing else holds."""
        return self._is_band and self.pattern.before is None and self.pattern.after == 0 and isinstance(self.shift, int)

    @property
    def is_open(self) -> bool:
        """Whether every row sees all keys (that count)."""
        return self._is_band and self.pattern.before is None and self.pattern.after is None

    @property
    def _is_band(self) -> bool:
        return self.pattern.sequence_of is None and len(self.pattern.others) == 0

    @property
    def reach(self) -> int | None:
        """How many keys a row sees at most, where less than all."""
        before, after = self.pattern.before, self.pattern.after
        return None if before is None or after is None else before + 1 + after

    @property
    def entries(self) -> int:
        """How many different masks there are along the batch, at most."""
        return 1 if self._is_band and self.counts is None else self.batch

    def seen_by(self, rows: slice) -> slice:
        """The keys that any of these rows may see; at least one."""
        if not isinstance(self.shift, int):
            return slice(0, self.keys)
        before, after = self.pattern.before, self.pattern.after
        start = 0 if before is None else min(max(0, rows.start + self.shift - before), self.keys - 1)
        stop = self.keys if after is None else min(self.keys, rows.stop + self.shift + after)
        return slice(start, max(stop, start + 1))

    def show(self, rows: slice, keys: slice) -> Tensor | None:
        """Booleans `[batch or 1, 1, rows, keys]`; None where all is seen."""
        parts = [*self._band(rows, keys), *self._same_sequence(rows, keys)]
        if self.counts is not None:
            parts.append(self.counts[:, None, None, keys])
        # Not a comprehension: the compiler would make a program for each length of one.
        for function in self.pattern.others:
            parts.append(self._other(function, rows, keys))
        shown = None
        for part in parts:
            shown = part if shown is None else shown & part
        return shown

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
        """The packed sequences of each batch entry, as ranges of rows. Looks at values."""
        assert self.pattern.sequence_of is not None
        ranges = []
        for numbers in self.pattern.sequence_of.tolist():
            starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1]]
            ranges.append([slice(start, stop) for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True)])
        return ranges

    def of_sequence(self, entry: int, rows: slice) -> LazyMask:
        """The mask of one packed sequence by itself."""
        length = rows.stop - rows.start
        counts = None if self.counts is None else self.counts[entry : entry + 1, rows]
        pattern = Pattern(self.pattern.before, self.pattern.after)
        return LazyMask(1, length, length, _bounded(pattern, length, length, 0), 0, counts, device=self.device)


def _bounded(pattern: Pattern, queries: int, keys: int, shift: int) -> Pattern:
    """Without bounds that no row and no key of a call can reach."""
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
    """The mask function that Transformers calls, once per forward pass and kind of layer.

    Returns:
        None where the layers' own `is_causal` says it all; a boolean tensor, as for SDPA, for a single query, whose mask is as
        small as any description of it; else a `LazyMask`.
    """
    function = mask_function or _compat.masking_utils().causal_mask_function
    if q_length == 1:
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
    shift = _looked_at(q_offset - kv_offset)
    keys = kv_length
    if isinstance(shift, int):
        pattern = _bounded(pattern, q_length, kv_length, shift)
        if pattern.after is not None:
            keys = max(1, min(kv_length, q_length + shift + pattern.after))
    counts = _counts(attention_mask, batch_size, keys, kv_offset)
    mask = LazyMask(
        batch_size,
        q_length,
        keys,
        pattern,
        shift,
        counts,
        key_length=kv_length,
        positions=(q_offset, kv_offset),
        use_vmap=use_vmap,
        device=device,
    )
    starts_together = isinstance(shift, int) and shift == 0
    if allow_is_causal_skip and counts is None and mask.is_causal and starts_together:
        return None
    if allow_is_bidirectional_skip and counts is None and mask.is_open:
        return None
    return mask


def _looked_at(number: int | Tensor) -> int | Tensor:
    """As a plain integer, where one may look: the length of a static cache is kept as a tensor."""
    return number if isinstance(number, int) or is_traced() or not isinstance(number, Tensor) else int(number)


def _counts(attention_mask: Tensor | None, batch: int, keys: int, first_key: int) -> Tensor | None:
    """`[batch, keys]` of what the tokenizer calls attention mask, None if all count; keys that it does not know of yet do not."""
    if attention_mask is None:
        return None
    counts = attention_mask.to(torch.bool).expand(batch, -1)[:, first_key : first_key + keys]
    counts = torch.nn.functional.pad(counts, (0, keys - counts.shape[1]))
    return None if not is_traced() and bool(counts.all()) else counts
