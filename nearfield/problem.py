"""What a method is given: inputs, checked once at the boundary; and the contracts that methods and gradients fulfil."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor

from nearfield import _compat, bands, causal
from nearfield.bands import Band, Window
from nearfield.checks import check_scalars, check_softcap
from nearfield.results import Outcome
from nearfield.sampling import Dropout, Seeds

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

T = TypeVar("T")


def once(make: Callable[[Any], T]) -> T:
    """A property that is computed once. Up to Python 3.11 `functools.cached_property` takes a lock, which cannot be traced."""
    name = make.__name__

    def get(self: Any) -> T:
        if is_traced():  # A traced program must not write to __dict__; the compiler merges equal expressions by itself.
            return make(self)
        if name not in self.__dict__:
            self.__dict__[name] = make(self)
        return self.__dict__[name]

    return cast(T, property(get, doc=make.__doc__))


@dataclass(frozen=True)
class Rows:
    """All query rows of a problem, grouped by the keys they attend to.

    Batch and key-value heads become one `batch` axis. The query heads that share a key-value head follow each other
    along `rows`, so grouped-query attention repeats no key. Keys hidden by a padding mask are gone: row r of batch b
    sees exactly the first `visible[b, r]` keys, be it because of causality, padding or both.

    `Problem.rows` has them in float32 (float64 for float64 inputs) with the queries already multiplied by the scale,
    `Problem.grouped` as they came.
    """

    queries: Tensor
    """`[batch, rows, dim]`"""
    keys: Tensor
    """`[batch, length, dim]`"""
    values: Tensor
    """`[batch, length, value_dim]`"""
    visible: Tensor
    """`[batch, rows]`, int64"""
    first: Tensor | None = None
    """`[batch, rows]`, int64: in a window with bounds on both sides a row sees `visible` keys from this one on; None: from the
    first one on, as in all rows but those of `windows.in_blocks`"""

    @property
    def count(self) -> int:
        return self.queries.shape[0] * self.queries.shape[1]

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    @once
    def causal_offset(self) -> Tensor:
        """`visible` as `BuiltIndex.search` takes it: row i sees the keys j <= i + causal_offset."""
        return self.visible - 1 - torch.arange(self.visible.shape[1], device=self.visible.device)

    def numbers(self, block: slice) -> Tensor:
        """The numbers of a range of rows among those of all batch entries: `[batch, range]`, row r of entry b is b * rows + r."""
        batch, count = self.visible.shape
        first = torch.arange(batch, device=self.visible.device)[:, None] * count
        return first + torch.arange(block.start, block.stop, device=self.visible.device)

    def at(self, block: slice) -> Rows:
        """A range of rows, with the same keys."""
        first = None if self.first is None else self.first[:, block]
        return replace(self, queries=self.queries[:, block], visible=self.visible[:, block], first=first)

    def detach(self) -> Rows:
        return replace(self, queries=self.queries.detach(), keys=self.keys.detach(), values=self.values.detach())


@dataclass(frozen=True)
class Problem:
    """The checked inputs of one attention call, as `[batch, heads, length, dim]`."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None
    """the mask as SDPA would take it, boolean or additive; None: no mask"""
    key_padding: Tensor | None
    """`[batch, kv_heads, key_length]`, True where a key counts; None: no mask, or one that is not key padding"""
    dropout_p: float
    is_causal: bool
    """row i sees the keys j <= i + offset"""
    scale: float
    poison: Tensor | None
    """`[batch, heads, query_length]`: NaN for rows that see a non-finite input, 1 elsewhere; None: all inputs are finite"""
    leading: tuple[int, ...]
    """the dimensions of the query before length and dim, as the caller gave them"""
    sync: bool = True
    """whether values may be looked at, which waits for a GPU"""
    offset: int = 0
    """where the causal mask begins; 0 without one"""
    softcap: float = 0.0
    """logits z count as softcap tanh(z / softcap); 0: as they are"""
    sink: Tensor | None = None
    """`[heads]`, float32 or float64: logits that count in the denominator alone"""
    least_keys: int = 0
    """`rows` have at least so many keys, the last ones hidden: those of the problem that this is a part of"""
    window: Window | None = None
    """(left, right): row i sees the keys from i + offset - left to i + offset + right, or to the last one where right is -1.
    There is always a left bound, and `is_causal` is False: the window says it all"""
    places: Tensor | None = None
    """`[query_length]`: where rows of a causal mask stand, in place of i + offset; None: there. Not every method reads it"""
    is_part: bool = False
    """rows of a window, put together so that they see the same keys: they stand at different places all the same, so that none
    of them may have a say in what another one reads, with a mask or without"""

    @property
    def band(self) -> Band | None:
        """Which keys a row sees by its place; None: all of them."""
        if self.window is None:
            return Band(None, self.offset) if self.is_causal else None
        left, right = self.window
        return Band(self.offset - left, self.offset + right if right >= 0 else None)

    @property
    def reach(self) -> int:
        """How many keys a row sees at most."""
        length = self.key.shape[2]
        return length if self.window is None or self.window[1] < 0 else min(length, sum(self.window) + 1)

    @property
    def has_general_mask(self) -> bool:
        """Whether there is a mask beyond key padding: one that differs from query to query, or that is added to the logits."""
        return self.attn_mask is not None and self.key_padding is None

    @property
    def has_plain_logits(self) -> bool:
        """Whether a row is the softmax of its logits, without a cap and without a sink."""
        return not self.softcap and self.sink is None

    @once
    def row_sinks(self) -> Tensor | None:
        """The sinks in the layout of `Rows`, `[batch * kv_heads, group * length]`; None: there are none."""
        if self.sink is None:
            return None
        batch, heads, length, _ = self.query.shape
        return self.sink[None, :, None].expand(batch, heads, length).reshape(batch * self.key.shape[1], -1)

    @property
    def group_size(self) -> int:
        """Query heads per key-value head."""
        return self.query.shape[1] // max(1, self.key.shape[1])

    @property
    def needs_grad(self) -> bool:
        return needs_grad(self.query, self.key, self.value) or (self.sink is not None and needs_grad(self.sink))

    @property
    def out_shape(self) -> tuple[int, ...]:
        return (*self.leading, self.query.shape[2], self.value.shape[3])

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute: no rows, no columns, or (where values may be looked at) no key that counts."""
        no_rows = math.prod(self.query.shape[:3]) == 0
        if no_rows or self.value.numel() == 0:
            return True
        return self.key_padding is not None and self._may_sync and not bool(self.key_padding.any())

    @property
    def _may_sync(self) -> bool:
        return self.sync and not is_traced()

    def by_row(self, x: Tensor) -> Tensor:
        """From `[batch, heads, length, ...]` to the layout of `Rows`, `[batch * kv_heads, group * length, ...]`."""
        return x.reshape(*self.visible.shape, *x.shape[3:])

    def by_head(self, rows: Tensor) -> Tensor:
        """From the layout of `Rows`, `[batch * kv_heads, group * length, ...]`, to `[batch, heads, length, ...]`."""
        return rows.reshape(*self.query.shape[:3], *rows.shape[2:])

    def like_inputs(self, x: Tensor) -> Tensor:
        """From `[batch, heads, length, ...]` to the leading dimensions of the inputs."""
        return x.reshape(*self.leading, *x.shape[2:])

    @property
    def compute_dtype(self) -> torch.dtype:
        """The dtype of all arithmetic: float32, or float64 for float64 inputs."""
        return torch.promote_types(self.query.dtype, torch.float32)

    @once
    def visible(self) -> Tensor:
        """How many keys each row sees, `[batch * kv_heads, group * length]`. A general mask is not taken into account."""
        groups, length = self.key.shape[0] * self.key.shape[1], self.key.shape[2]
        if self.window is not None:
            return self._visible_in_window
        if self.is_causal:
            visible = self._causal_visible
            visible = (visible if self.group_size == 1 else visible.repeat(self.group_size)).expand(groups, -1)
        else:
            rows = self.group_size * self.query.shape[2]
            visible = torch.full((1, 1), length, device=self.key.device).expand(groups, rows)
        if self.key_padding is None:
            return visible
        counts = self.key_padding.reshape(groups, length)
        seen = torch.cat([counts.new_zeros(groups, 1, dtype=torch.long), counts.cumsum(1)], 1)
        return seen.gather(1, visible)

    @property
    def _causal_visible(self) -> Tensor:
        """`[query_length]`: how many keys a row of a causal mask sees, padding apart."""
        queries, length = self.query.shape[2], self.key.shape[2]
        if self.places is not None:
            return (self.places + 1).clamp(0, length)
        visible = torch.arange(1 + self.offset, queries + 1 + self.offset, device=self.key.device)
        if self.offset < 0 or queries + self.offset > length:
            visible = visible.clamp_(0, length)
        return visible

    @property
    def _visible_in_window(self) -> Tensor:
        assert self.band is not None
        groups, length = self.key.shape[0] * self.key.shape[1], self.key.shape[2]
        start, stop = self.band.ends(self.query.shape[2], length, self.key.device)
        if self.key_padding is None:
            visible = (stop - start).expand(groups, -1)
        else:
            seen = torch.nn.functional.pad(self.key_padding.reshape(groups, length).cumsum(1), (1, 0))
            visible = seen[:, stop] - seen[:, start]
        return visible.repeat(1, self.group_size)

    @once
    def kept_keys(self) -> Tensor:
        """Which of the keys those of `rows` are, `[batch * kv_heads, length]`, where there is key padding."""
        assert self.key_padding is not None
        counts = self.key_padding.flatten(0, 1)
        # How many keys are left depends on values. Where these may not be looked at, the number of all keys is a bound.
        kept = max(self.least_keys, int(counts.sum(1).max())) if self._may_sync else counts.shape[1]
        return counts.logical_not().to(torch.int8).argsort(dim=1, stable=True)[:, :kept]

    @once
    def grouped(self) -> Rows:
        """The rows as they came: in the dtype of the inputs, the queries not yet multiplied by the scale."""
        if self.window is not None:
            raise ValueError(
                f"window={self.window}: rows in a window do not see the first keys alone, so Problem.rows and Problem.grouped do "
                "not describe them; a method that says any_window reads Problem.query, key, value and band"
            )
        batch, kv_heads, length, dim = self.key.shape
        groups = batch * kv_heads
        queries = self.query.reshape(groups, self.visible.shape[1], dim)
        keys = self.key.reshape(groups, length, dim)
        values = self.value.reshape(groups, length, self.value.shape[3])
        if self.key_padding is not None:
            order = self.kept_keys
            hidden = self.key_padding.reshape(groups, length).gather(1, order).logical_not()[..., None]
            keys = keys.gather(1, order[..., None].expand(-1, -1, dim)).masked_fill(hidden, 0)
            values = values.gather(1, order[..., None].expand(-1, -1, values.shape[-1])).masked_fill(hidden, 0)
        return Rows(queries, keys, values, self.visible)

    @once
    def rows(self) -> Rows:
        """The rows in `compute_dtype`, the queries multiplied by the scale."""
        rows = self.grouped
        queries, keys, values = (x.to(self.compute_dtype) for x in (rows.queries, rows.keys, rows.values))
        return Rows(queries * self.scale, keys, values, self.visible)


def with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and a positive scale with the same product."""
    return (query, scale) if scale > 0 else (query * (-1.0 if scale else 0.0), -scale or 1.0)


def needs_grad(*tensors: Tensor) -> bool:
    """Whether gradients of some of them are wanted."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def is_traced() -> bool:
    """Whether tensors may have no values to look at: under torch.compile or inside a transform of torch.func."""
    return torch.compiler.is_compiling() or _compat.in_functorch_transform()


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    offset: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    window_size: Window | None = None,
) -> Problem:
    """Check the arguments of an attention call and make a `Problem`. Raises before any work and looks at no value."""
    _check_tensors(query, key, value)
    is_causal, enable_gqa = check_scalars(dropout_p, is_causal, scale, enable_gqa, offset, softcap)
    # One that bounds nothing still says where rows stand.
    has_window, window_size = window_size is not None, bands.check_window(window_size)
    attn_mask, is_causal, offset = causal.resolve(attn_mask, is_causal, offset, query, key, has_window)
    if attn_mask is not None and not isinstance(attn_mask, Tensor):
        raise TypeError(f"attn_mask must be a torch.Tensor or None, got {type(attn_mask).__name__}")
    leading = query.shape[:-2]
    query, key, value = (_four_dims(x) for x in (query, key, value))
    heads, kv_heads = query.shape[1], key.shape[1]
    if heads != kv_heads and not enable_gqa:
        remedy = _layout_hint(query, key) or "pass enable_gqa=True for grouped-query attention"
        raise ValueError(f"query has {heads} heads and key has {kv_heads}; {remedy}")
    if heads % kv_heads if kv_heads else heads:
        hint = _layout_hint(query, key)
        raise ValueError(
            f"with enable_gqa=True query heads ({heads}) must be a multiple of key heads ({kv_heads}){'; ' * bool(hint)}{hint}"
        )
    if attn_mask is not None:
        attn_mask = _check_mask(attn_mask, leading, query, key)
    check_range("scale", scale, query, "multiply the queries by a part of it, or pass float64 inputs")
    check_range("softcap", softcap, query, "a cap far above all logits is none: leave it out")
    softcap = check_softcap(softcap)
    sink = None if s_aux is None else check_sink(s_aux, query)
    query, key, value = to_autocast_dtype(query, key, value)

    padding = None
    if attn_mask is not None:
        attn_mask = attn_mask if attn_mask.dtype == torch.bool else attn_mask.to(query.dtype)
        padding = _as_key_padding(attn_mask, query, key)
        if (is_causal or window_size is not None) and padding is None:
            given, part, instead = "is_causal=True", "causal part", "is_causal=False"
            if window_size is not None:
                given, part, instead = f"window_size={window_size}", "window", "window_size=None"
            raise ValueError(
                f"{given} can be combined only with a boolean key-padding attn_mask, broadcastable from "
                f"[batch, 1, 1, key_length]; got {attn_mask.dtype} of shape {tuple(attn_mask.shape)}. "
                f"Put the {part} into the mask and pass {instead}."
            )
        if padding is not None:
            # A hidden key must not matter even if it holds NaN.
            hidden = padding.logical_not()[..., None]
            key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    window, is_causal, offset = bands.resolve(window_size, is_causal, offset, query.shape[2], key.shape[2])
    return Problem(
        query=query,
        key=key,
        value=value,
        attn_mask=attn_mask,
        key_padding=padding,
        dropout_p=float(dropout_p),
        is_causal=is_causal,
        scale=1.0 / math.sqrt(query.shape[-1]) if scale is None and query.shape[-1] else float(scale or 0.0),
        poison=None,
        leading=tuple(leading),
        offset=offset,
        softcap=softcap,
        sink=sink,
        window=window,
    )


def _check_tensors(query: Tensor, key: Tensor, value: Tensor) -> None:
    named = {"query": query, "key": key, "value": value}
    for name, x in named.items():
        if not isinstance(x, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, got {type(x).__name__}")
        if x.is_nested:
            raise TypeError(
                f"{name} is a nested tensor; pad it and hide the padding: pass query.to_padded_tensor(0.0), the same "
                f"of key and value, and attn_mask=(positions < lengths[:, None])[:, None, None, :]{_jagged_hint(query)}"
            )
        check_dense(name, x)
        if x.dtype not in DTYPES:
            raise TypeError(f"{name} must be float64, float32, float16 or bfloat16, got {x.dtype}")
        if x.dim() < 2:
            raise ValueError(f"{name} must have shape [..., length, dim], got {tuple(x.shape)}")
    for name, x in (("key", key), ("value", value)):
        if x.dtype != query.dtype:
            raise TypeError(f"query and {name} must have the same dtype, got {query.dtype} and {x.dtype}")
        if x.device != query.device:
            raise ValueError(f"query and {name} must be on the same device, got {query.device} and {x.device}")
        if x.dim() != query.dim():
            raise ValueError(f"query and {name} must have the same number of dimensions, got {query.dim()} and {x.dim()}")
    if query.is_meta:
        raise ValueError("query, key and value are on the device meta and hold no numbers; for shapes alone trace the call")
    shapes = {name: tuple(x.shape) for name, x in named.items()}
    if query.shape[-1] != key.shape[-1]:
        raise ValueError(f"query and key must have the same last dimension, got {shapes['query']} and {shapes['key']}")
    if key.shape[:-1] != value.shape[:-1]:
        raise ValueError(f"key and value must agree in all but the last dimension, got {shapes['key']} and {shapes['value']}")
    if query.dim() > 3 and query.shape[:-3] != key.shape[:-3]:
        raise ValueError(f"query and key must have the same batch dimensions, got {shapes['query']} and {shapes['key']}")


def _jagged_hint(query: Tensor) -> str:
    """What else to write where not all inputs are jagged: `attention` takes these before anything is checked here."""
    if query.is_nested and query.layout == torch.jagged:
        return ""
    return "; or pass all three to `attention` as jagged ones, made with layout=torch.jagged"


def _layout_hint(query: Tensor, key: Tensor) -> str:
    """What to write where heads that cannot be grouped are more likely lengths; otherwise nothing."""
    heads, kv_heads = query.shape[1], key.shape[1]
    if not kv_heads or heads % kv_heads == 0 or query.shape[2] != key.shape[2] or key.shape[2] >= kv_heads:
        return ""
    return (
        f"inputs are [batch, heads, length, dim]: if {heads} and {kv_heads} are lengths, and there are {key.shape[2]} heads, "
        "pass query.transpose(1, 2), key.transpose(1, 2) and value.transpose(1, 2)"
    )


def _four_dims(x: Tensor) -> Tensor:
    """`[..., heads, length, dim]` as `[batch, heads, length, dim]`."""
    if x.dim() < 4:
        return x[(None,) * (4 - x.dim())]
    return x.flatten(0, -4)


def to_autocast_dtype(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors in the dtype of autocast, where it is on. As in torch, it leaves float64 alone."""
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device) or tensors[0].dtype == torch.float64:
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) for x in tensors)


def check_dense(name: str, x: Tensor) -> None:
    if x.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor, got one of layout {x.layout}; pass {name}.to_dense()")


def check_range(name: str, value: object, query: Tensor, remedy: str) -> None:
    """Raise for a number that the dtype of the arithmetic does not hold. Other numbers that are wrong are not looked at here."""
    dtype = torch.promote_types(query.dtype, torch.float32)
    if isinstance(value, int | float) and torch.finfo(dtype).max < abs(value) < math.inf:
        raise ValueError(f"{name}={value!r} is infinite in {dtype}, in which a call with {query.dtype} computes; {remedy}")


def check_sink(s_aux: object, query: Tensor) -> Tensor:
    """The sinks of a call in the dtype of its arithmetic. `query`: `[any, heads, ...]`."""
    if not isinstance(s_aux, Tensor) or not s_aux.is_floating_point() or s_aux.layout != torch.strided:
        got = f"{s_aux.dtype}, {s_aux.layout}" if isinstance(s_aux, Tensor) else type(s_aux).__name__
        raise TypeError(f"s_aux must be a dense tensor of floating point numbers, one logit for each query head, got {got}")
    if s_aux.shape != query.shape[1:2]:
        raise ValueError(
            f"s_aux must have shape ({query.shape[1]},), one logit for each query head, got {tuple(s_aux.shape)}; sinks that are "
            "keys, as in Cells(sinks=...), are another thing"
        )
    if s_aux.device != query.device:
        raise ValueError(f"query and s_aux must be on the same device, got {query.device} and {s_aux.device}")
    return s_aux.to(torch.promote_types(query.dtype, torch.float32))


def _check_mask(mask: Tensor, leading: torch.Size, query: Tensor, key: Tensor) -> Tensor:
    if mask.layout != torch.strided:
        raise TypeError(f"attn_mask must be a dense tensor, got one of layout {mask.layout}; pass attn_mask.to_dense()")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        shown = "attn_mask[:, None, None, :].bool()" if _is_padding_in_2d(mask, query, key) else "attn_mask.bool()"
        raise TypeError(
            f"attn_mask must be boolean or floating point, got {mask.dtype}; if 1 means that a key counts, pass {shown}"
        )
    if mask.dtype not in (torch.bool, query.dtype):
        raise TypeError(f"a float attn_mask must have the dtype of query, got {mask.dtype} and {query.dtype}")
    if mask.device != query.device:
        raise ValueError(f"query and attn_mask must be on the same device, got {query.device} and {mask.device}")
    full = (*leading, query.shape[2], key.shape[2])
    try:
        mask.expand(full)
    except RuntimeError:
        hint = ""
        if _is_padding_in_2d(mask, query, key):
            hint = "; for a key-padding mask [batch, key_length] pass attn_mask[:, None, None, :]"
        elif mask.shape[-1] == key.shape[1] != key.shape[2]:
            hint = (
                f"; inputs are [batch, heads, length, dim]: if there are {key.shape[1]} keys and {key.shape[2]} heads, pass "
                "query.transpose(1, 2), key.transpose(1, 2) and value.transpose(1, 2)"
            )
        raise ValueError(f"attn_mask must be broadcastable to {full}, got {tuple(mask.shape)}{hint}") from None
    mask = mask[(None,) * (len(full) - mask.dim())]
    return _four_dims(mask) if mask.dim() <= 4 else mask.expand(*leading[:-1], *mask.shape[-3:]).flatten(0, -4)


def _is_padding_in_2d(mask: Tensor, query: Tensor, key: Tensor) -> bool:
    """Whether a mask has the shape `[batch, key_length]`, and no other that attention takes."""
    return mask.shape == (key.shape[0], key.shape[2]) and key.shape[0] not in (1, query.shape[2])


def _as_key_padding(mask: Tensor, query: Tensor, key: Tensor) -> Tensor | None:
    """`[batch, kv_heads, key_length]` if the mask hides the same keys from every query, else None."""
    batch, kv_heads, length, _ = key.shape
    same_for_rows = mask.shape[2] == 1
    same_for_group = mask.shape[1] == 1 or kv_heads == query.shape[1]
    if mask.dtype != torch.bool or not same_for_rows or not same_for_group:
        return None
    return mask[:, :, 0].expand(batch, kv_heads, length)


def isolate_non_finite(problem: Problem, raise_instead: bool) -> Problem:
    """Replace NaN and inf in the inputs by 0, and note in `poison` which rows of the output see one. Waits for a GPU.

    Without this a NaN in one key would spread, through an index or a block of a kernel, to rows that never see that key.
    `raise_instead`: raise ValueError where there is one, unless the call is traced.
    """
    inputs = {name: getattr(problem, name).detach() for name in ("query", "key", "value")}
    traced = is_traced()
    if raise_instead and not traced and problem.sink is not None and not bool((problem.sink.detach() < torch.inf).all()):
        raise ValueError("s_aux has NaN or inf; a head without a sink has -inf")
    # A sum is finite only if all its terms are: one cheap pass for the usual case.
    if not traced and bool(torch.stack([x.sum(dtype=problem.compute_dtype) for x in inputs.values()]).isfinite().all()):
        return problem
    finite = {name: x.isfinite().all(-1) for name, x in inputs.items()}
    bad = list(finite)
    if not traced:
        bad = [name for name, rows in finite.items() if not rows.all()]
        if not bad:
            return problem
        if raise_instead:
            raise ValueError(f"check_finite=True: NaN or inf in {' and '.join(bad)}")
    batch, heads, length = finite["query"].shape
    bad_key = (finite["key"] & finite["value"]).logical_not().repeat_interleave(problem.group_size, 1)
    allowed: Tensor | None = None
    if problem.band is not None:
        start, stop = problem.band.ends(length, bad_key.shape[2], bad_key.device)
        if problem.places is not None:
            start, stop = torch.zeros_like(stop), problem._causal_visible
        so_far = torch.nn.functional.pad(bad_key.cumsum(2), (1, 0))
        spoiled = so_far[:, :, stop] > so_far[:, :, start]
    elif problem.has_general_mask:
        assert problem.attn_mask is not None
        allowed = problem.attn_mask if problem.attn_mask.dtype == torch.bool else problem.attn_mask > -torch.inf
        spoiled = (allowed & bad_key[:, :, None, :]).any(-1).expand(batch, heads, length)
    else:
        spoiled = bad_key.any(2, keepdim=True).expand(batch, heads, length)
    # A row that sees no key is zero, whatever its query.
    sees = problem.visible.reshape(batch, heads, length) > 0
    if allowed is not None and "query" in bad:
        sees = sees & allowed.any(-1)
    spoiled = spoiled | (finite["query"].logical_not() & sees)
    clean = {name: getattr(problem, name).masked_fill(finite[name].logical_not()[..., None], 0) for name in finite}
    return replace(problem, **clean, poison=torch.ones_like(spoiled, dtype=problem.query.dtype).masked_fill(spoiled, torch.nan))


@dataclass(frozen=True)
class Call:
    """What a method is asked for, apart from the problem itself."""

    seeds: Seeds
    """the source of all randomness"""
    backend: str = "auto"
    """one of `nearfield.kernels.backends.BACKENDS`"""
    gradient: Gradient | None = None
    """how to differentiate; None: the method's own way"""
    diagnostics: bool = False
    """whether `lse`, `stderr` and `info` of the outcome are wanted"""
    return_lse: bool = False
    """whether `lse` of the outcome is wanted, with a gradient"""
    signature: Hashable = None
    """what calls like this one have in common: see `kernels.ready`; None: there is nothing to remember"""
    groups: list[Any] | None = None
    """where a method may leave keys that it has grouped into cells, a `cells.trial.Prepared`, for others; None: nobody asks"""


class Method(Protocol):
    """A way to compute attention. Subclass it for a method of your own: only `run` has no default.

    Example:
        >>> class Mean(nearfield.Method):
        ...     def run(self, problem, call):
        ...         rows = problem.rows  # queries times scale, without the keys that padding hides
        ...         mean = rows.values.mean(1, keepdim=True).expand(*rows.visible.shape, -1)
        ...         lse = rows.visible.log()
        ...         return nearfield.Outcome(problem.by_head(mean), problem.by_head(lse))
        >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind(0)
        >>> nearfield.attention(q, k, v, method=Mean()).shape
        torch.Size([1, 2, 8, 4])
    """

    any_mask: bool = False
    """whether `run` honours masks beyond key padding"""
    any_logits: bool = False
    """whether `run` honours `Problem.softcap` and `Problem.sink`"""
    any_window: bool = False
    """whether `run` honours `Problem.window`, which then has bounds on both sides; if not, `nearfield.windows` hands it rows that
    see the same keys, without one"""
    gives_lse: bool = False
    """whether `run` returns an `lse` that can be differentiated, where `Call.return_lse` asks for it"""
    drops_pairs: bool = False
    """whether `run`, asked for a `gradient`, drops by `sampling.pair_dropout`: only then can the gradient drop the same pairs"""

    def run(self, problem: Problem, call: Call) -> Outcome:
        """Attention of all rows of `problem`. The result depends on `problem` and `call` alone."""
        ...

    def is_async(self, problem: Problem, backend: str) -> bool:
        """Whether `run` never waits for a GPU and copes with NaN and inf by itself. The caller then does not look for them."""
        return False


class Gradient(Protocol):
    """A way to compute the backward pass, chosen independently of the method. Any object with `estimate` is one."""

    def estimate(
        self, rows: Rows, grad_output: Tensor, seeds: Seeds, dropout: Dropout | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of `rows.queries`, `rows.keys` and `rows.values`.

        `dropout` is passed where pairs were dropped in the forward pass; without this argument there is no dropout.
        """
        ...
