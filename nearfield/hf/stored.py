"""Handles that a cell cache gives to a layer in place of keys and values. Computing with one raises an error that says why."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nearfield import _compat
from nearfield.cells.cache.store import CellStore, Near
from nearfield.hf.calls import LayerCall, serve
from nearfield.hf.masks import LazyMask
from nearfield.hf.requests import RequestStores
from nearfield.knn.store import IndexStore

_ALLOWED = {
    getattr(Tensor, name).__get__
    for name in ("shape", "dtype", "device", "layout", "ndim", "is_cuda", "is_cpu", "requires_grad", "is_sparse")
} | {Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.__len__, Tensor.is_floating_point, Tensor.get_device}
"""What a handle answers: nothing that needs numbers."""


class UnreadableError(RuntimeError):
    """Something other than nearfield's attention has computed with the keys or values of a `CellCache`."""


class StoredKeys(Tensor):
    """A handle for the keys (or values) `[batch, heads, length, dim]` of a store: shape, dtype and device, but no numbers.

    Attributes:
        store: where the numbers are.
        latest: the keys (or values) that the layer has just appended, `[batch, heads, rows, dim]`.
    """

    store: CellStore | IndexStore | RequestStores
    latest: Tensor

    @staticmethod
    def __new__(cls, store: CellStore | IndexStore | RequestStores, latest: Tensor) -> StoredKeys:
        shape = (*latest.shape[:2], store.length, latest.shape[3])
        made: StoredKeys = _compat.wrapper_tensor(cls, shape, latest.dtype, latest.device)
        made.store, made.latest = store, latest
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"StoredKeys(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ALLOWED:
            with _compat.without_torch_function():
                return func(*args, **(kwargs or {}))
        return refuse(func)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return refuse(func)


def refuse(func: Any) -> Any:
    # Not a TypeError, which Python may take as a hint to try the other operand.
    raise UnreadableError(
        f"{getattr(func, '__name__', func)} was called on the keys or values of a CellCache, which only attention registered by "
        'nearfield can read: hf.register(); model.set_attn_implementation("nearfield"). If the model itself changes them before '
        "attending, use Transformers' DynamicCache"
    )


REMEDY = "use Transformers' DynamicCache with this model"


def serve_stored(call: LayerCall, mask: LazyMask | Tensor | None, is_causal: bool, bias: Tensor | None = None) -> Tensor:
    """Attention of a layer, `[batch, heads, rows, dim]`: the prompt by the method, later tokens by the cache.

    `call.key` and `call.value` are handles; the keys and values of these rows have just been stored.
    """
    key, value = call.key, call.value
    if not isinstance(key, StoredKeys) or not isinstance(value, StoredKeys):
        raise TypeError(f"this model takes only keys or only values from its cache; {REMEDY}")
    if bias is not None:
        raise ValueError(f"this model adds a position bias to its logits, which a cell cache cannot do; {REMEDY}")
    if call.softcap or call.sinks is not None:
        asked = "soft-capped logits (softcap)" if call.softcap else "attention sinks that are parameters (s_aux)"
        raise ValueError(f"this model asks for {asked}, which a cell cache does not have; {REMEDY}")
    if call.dropout:
        raise ValueError(f"a cell cache has no dropout, got {call.dropout}; call model.eval() first")
    store = key.store
    is_prompt = store.length == call.rows
    padding = _only_padding(mask, call, store.length, is_prompt)
    if padding is not None and len(padding) != len(key):
        padding = padding.expand(len(key), -1)
    store.mark(padding)
    if not is_prompt:
        if call.rows > 1 and isinstance(store, CellStore) and getattr(call.causal_method, "gives_lse", False):
            return store.attend(call.query, call.scale, _near(call))
        return store.attend(call.query, call.scale)
    prompt = replace(call, key=key.latest, value=value.latest)
    is_plain = padding is None and _is_causal_prompt(mask, call.rows, is_causal)
    if is_plain and isinstance(store, CellStore) and store.wants_cells(call.rows):
        found = prompt.causally(keep_cells=True)
        store.close(found.prepared, call.query)
        return found.output
    output = serve(prompt, mask, is_causal)
    if isinstance(store, CellStore):
        store.close(query=call.query)
    else:
        store.close()
    return output


def _near(call: LayerCall) -> Near:
    """How the rows of a chunk attend to keys that are not in cells yet: by the registered method."""

    def near(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        found = replace(call, key=keys, value=values).causally(keys.shape[2] - call.rows, return_lse=True)
        assert found.lse is not None
        return found.output, found.lse

    return near


def _is_causal_prompt(mask: LazyMask | Tensor | None, rows: int, is_causal: bool) -> bool:
    """Whether each of so many rows sees the keys up to its own, and no others."""
    if mask is None:
        return is_causal and rows > 1
    if isinstance(mask, Tensor) or mask.pattern.sequence_of is not None or mask.pattern.others:
        return False
    return rows > 1 and mask.is_causal and bool(mask.shift == 0) and mask.keys == rows


def _only_padding(mask: LazyMask | Tensor | None, call: LayerCall, length: int, is_prompt: bool) -> Tensor | None:
    """`[batch, length]`, False for padding; None if there is none. Raises if the mask hides more than padding and the future."""
    if mask is None:
        if call.rows > 1 and not is_prompt:
            raise ValueError(f"a cell cache with {length - call.rows} keys before the queries needs a mask, got none; {REMEDY}")
        return None
    if mask.shape[3] != length:
        raise ValueError(
            f"the mask is for {mask.shape[3]} keys, but the cache has {length}; pass an attention_mask for all tokens, "
            "including those in the cache"
        )
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[2] != 1:
            raise ValueError(
                f"a cell cache takes padding only, got a mask of {mask.dtype} and shape {tuple(mask.shape)}; pass an "
                f"attention_mask [batch, length], or {REMEDY}"
            )
        return mask[:, 0, 0]
    if mask.pattern.before is not None:
        raise ValueError("this layer has a sliding window: make the cache with CellCache(config=model.config)")
    if not is_prompt and not (mask.is_causal and mask.shift + call.rows == length):
        raise ValueError(f"a cell cache serves causal attention with padding, got {mask}; {REMEDY}")
    return mask.key_padding
