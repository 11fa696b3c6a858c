"""Layers of a model whose tokens are shared out over ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearfield.attention import over_ranks
from nearfield.distributed.context import Context, context_of
from nearfield.exact import Exact
from nearfield.hf.calls import LayerCall
from nearfield.hf.masks import LazyMask, Pattern


def serve_sharded(
    call: LayerCall,
    mask: LazyMask | Tensor | None,
    mesh: Any,
    positions: Tensor | None,
    layer: int | None,
    wrong: Exception | None = None,
) -> Tensor:
    """Attention of a layer, `[batch, heads, rows, dim]`, of this rank's rows to the keys of all ranks.

    `positions`: those of this rank's tokens, where the layer is told. `layer`: its number, if it has one. `wrong`: what is wrong
    with its call already, to be raised when the other ranks have been told.
    """
    context = context_of(mesh)
    if context is not None and 0 in context.layout.counts:  # on all ranks, of which some may not get here
        raise ValueError(
            f"a model needs a token on every rank, and {context.layout.length} tokens are shared out as {context.layout.counts}; "
            "call it on fewer ranks"
        )
    is_causal, window, padding = False, None, None
    if wrong is None:
        try:
            # All layers are told the same positions.
            checked = _checked(mask, context, positions, look=not layer)
            padding, is_causal, window = checked.key_padding, checked.pattern.after == 0, _window(checked.pattern)
        except ValueError as error:
            wrong = error
    method = call.causal_method if is_causal else call.method
    output: Tensor = over_ranks(
        mesh,
        call.query,
        call.key,
        call.value,
        None if padding is None else padding[:, None, None].to(call.query.device),
        method if window is None else Exact(),
        is_causal,
        call.scale,
        True,  # query heads may share keys
        None,
        call.softcap,
        call.sinks,
        window,
        alone={"dropout_p": call.dropout},
        layer=layer,
        wrong=wrong,
    )
    return output


def _checked(mask: LazyMask | Tensor | None, context: Context | None, positions: Tensor | None, look: bool) -> LazyMask:
    """The mask of a layer, if it can be served. `look`: whether to see if positions are right, which waits for a GPU."""
    if context is None:
        raise ValueError(
            "this model attends over ranks (hf.register(mesh=...)), so it has to be called inside of "
            "nearfield.distributed.context_parallel(mesh, buffers=[input_ids, position_ids], buffer_seq_dims=[1, 1])"
        )
    if not isinstance(mask, LazyMask):
        got = type(mask).__name__
        raise ValueError(f"over ranks a model must leave its mask to nearfield, got {got}; pass attention_mask [batch, n]")
    pattern, is_padded = mask.pattern, mask.key_padding is not None
    if len(pattern.others) or mask.shift != 0:
        raise ValueError(f"over ranks layers have causal masks, windows and padding alone, and no tokens before; got {mask}")
    if look:
        wanted = context.layout.places(context.ranks.rank, None if positions is None else positions.device)
        if not _are_own(positions, is_padded, wanted):
            raise ValueError(
                "position_ids are not those of this rank's tokens, or the model does not hand them on; pass torch.arange(length)"
                "[None] to the model and make it one of the buffers of context_parallel. Over ranks there are no packed sequences"
            )
    if pattern.sequence_of is not None and (positions is None or is_padded):
        raise ValueError("over ranks packed sequences cannot be told from tokens that lie elsewhere; pass one sequence")
    return mask


def _window(pattern: Pattern) -> tuple[int, int] | None:
    """As `attention` takes it."""
    is_causal = pattern.after == 0
    if pattern.before is None and (pattern.after is None or is_causal):
        return None
    before, after = (-1 if bound is None else bound for bound in (pattern.before, pattern.after))
    return before, after


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
