"""Layers of a model whose tokens are shared out over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearfield.attention import attention
from nearfield.distributed.context import Context, context_of
from nearfield.exact import Exact
from nearfield.hf.calls import LayerCall
from nearfield.hf.masks import LazyMask


def serve_sharded(call: LayerCall, mask: LazyMask | Tensor | None, mesh: Any, positions: Tensor | None, look: bool) -> Tensor:
    """Attention of a layer, `[batch, heads, rows, dim]`, of this rank's rows to the keys of all ranks.

    `positions`: those of this rank's tokens, where the layer is told. `look`: whether to see if they are right.
    """
    context = context_of(mesh)
    if context is None:
        raise ValueError(
            "this model attends over ranks (hf.register(mesh=...)), so it has to be called inside of "
            "nearfield.distributed.context_parallel(mesh, buffers=[input_ids, position_ids], buffer_seq_dims=[1, 1])"
        )
    if not isinstance(mask, LazyMask):
        got = type(mask).__name__
        raise ValueError(f"over ranks a model must leave its mask to nearfield, got {got}; pass attention_mask [batch, n]")
    pattern, padding = mask.pattern, mask.key_padding
    if len(pattern.others) or mask.shift != 0:
        raise ValueError(f"over ranks layers have causal masks, windows and padding alone, and no tokens before; got {mask}")
    if look:
        _check_tokens(positions, padding is not None, context)
    if pattern.sequence_of is not None and (positions is None or padding is not None):
        raise ValueError("over ranks packed sequences cannot be told from tokens that lie elsewhere; pass one sequence")
    is_causal = pattern.after == 0
    window = (pattern.before, 0 if is_causal else pattern.after)
    bounds = tuple(-1 if bound is None else bound for bound in window)
    has_window = pattern.before is not None or (pattern.after is not None and not is_causal)
    method = call.causal_method if is_causal else call.method
    return attention(
        call.query,
        call.key,
        call.value,
        None if padding is None else padding[:, None, None].to(call.query.device),
        call.dropout,
        is_causal,
        call.scale,
        enable_gqa=True,
        method=Exact() if has_window else method,
        softcap=call.softcap,
        s_aux=call.sinks,
        window_size=(bounds[0], bounds[1]) if has_window else None,
        mesh=mesh,
    )


def _check_tokens(positions: Tensor | None, is_padded: bool, context: Context) -> None:
    """Raise on all ranks where a model would give its tokens other positions than they have. It waits for a GPU."""
    if 0 in context.layout.counts:
        raise ValueError(
            f"a model needs a token on every rank, and {context.layout.length} tokens are shared out as {context.layout.counts}; "
            "call it on fewer ranks"
        )
    wanted = context.layout.places(context.ranks.rank, None if positions is None else positions.device)
    are_own = _are_own(positions, is_padded, wanted)
    context.ranks.agree("a layer of a model", position_ids="of its tokens" if are_own else "of other tokens")
    if not are_own:
        raise ValueError(
            "position_ids are not those of this rank's tokens, or the model does not hand them on; pass torch.arange(length)"
            "[None] to the model and make it one of the buffers of context_parallel. Over ranks there are no packed sequences"
        )


def _are_own(positions: Tensor | None, is_padded: bool, wanted: Tensor) -> bool:
    counted = torch.arange(len(wanted), device=wanted.device)  # what a model makes up that was given none
    if positions is None:
        return torch.equal(wanted, counted)
    if positions.shape[-1] != len(wanted):
        return False
    if is_padded or positions.dim() > 2:
        # Behind padding and in images tokens have other positions than places.
        return torch.equal(wanted, counted) or not torch.equal(positions, counted.expand_as(positions))
    return torch.equal(positions, wanted.expand_as(positions))
