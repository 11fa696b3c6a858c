"""How the call of a layer is served whose keys are in a cell cache."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nearfield.cache.handle import StoredKeys
from nearfield.hf.calls import LayerCall, serve
from nearfield.hf.masks import LazyMask

REMEDY = "use Transformers' DynamicCache with this model"


def serve_stored(call: LayerCall, mask: LazyMask | Tensor | None, is_causal: bool, bias: Tensor | None = None) -> Tensor:
    """Attention of a layer, `[batch, heads, rows, dim]`: a prompt by the method, what comes later by the cache.

    `call.key` and `call.value` are handles, and what they stand for has just been stored.
    """
    key, value = call.key, call.value
    if not isinstance(key, StoredKeys) or not isinstance(value, StoredKeys):
        raise TypeError(f"this model takes only keys or only values from its cache; {REMEDY}")
    if bias is not None:
        raise ValueError(f"this model adds a position bias to its logits, which a cell cache does not know; {REMEDY}")
    if call.dropout:
        raise ValueError(f"a cell cache has no dropout, got {call.dropout}; call model.eval() first")
    store = key.store
    is_prompt = store.length == call.rows
    counts = _counts(mask, call, store.length, is_prompt)
    if counts is not None and len(counts) != len(key):
        counts = counts.expand(len(key), -1)
    store.mark(counts)
    if not is_prompt:
        return store.attend(call.query, call.scale)
    output = serve(replace(call, key=key.latest, value=value.latest), mask, is_causal)
    store.close()
    return output


def _counts(mask: LazyMask | Tensor | None, call: LayerCall, length: int, is_prompt: bool) -> Tensor | None:
    """`[batch, length]` of the keys that count, None if all do. Raises on masks that say more than that."""
    if mask is None:
        if call.rows > 1 and not is_prompt:
            raise ValueError(f"a cell cache with {length - call.rows} keys before the queries needs a mask, got none; {REMEDY}")
        return None
    if mask.shape[3] != length:
        raise ValueError(
            f"the mask is for {mask.shape[3]} keys, and the cache has {length}; pass an attention_mask for all tokens, also "
            "those in the cache"
        )
    if isinstance(mask, Tensor):
        if mask.dtype != torch.bool or mask.shape[1] != 1 or mask.shape[2] != 1:
            raise ValueError(
                f"a cell cache knows padding only, got a mask of {mask.dtype} and shape {tuple(mask.shape)}; pass an "
                f"attention_mask [batch, length], or {REMEDY}"
            )
        return mask[:, 0, 0]
    if mask.pattern.before is not None:
        raise ValueError("this layer has a sliding window: make the cache with CellCache(config=model.config)")
    if not is_prompt and not (mask.is_causal and mask.shift + call.rows == length):
        raise ValueError(f"a cell cache serves causal attention with padding, got {mask}; {REMEDY}")
    return mask.counts
