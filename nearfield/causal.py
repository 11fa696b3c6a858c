"""Causal masks that begin elsewhere than at the first key: torch's biases, and an offset."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def resolve(
    attn_mask: Any, is_causal: bool, offset: int | None, query: Tensor, key: Tensor, has_window: bool = False
) -> tuple[Tensor | None, bool, int]:
    """The arguments `attn_mask`, `is_causal` and `offset` of a call, with a bias of torch's as what it means; checked.

    `has_window`: an offset may come without a causal mask, as it moves windows too. Row i of a causal mask sees the keys
    j <= i + offset: 0 for `causal_upper_left`, Lk - Lq for `causal_lower_right`.
    """
    # By name: importing the class loads the compiler, which takes seconds.
    if type(attn_mask).__name__ != "CausalBias":
        if offset is None:
            return attn_mask, is_causal, 0
        if not is_causal and not has_window:
            raise ValueError(
                f"offset={offset} shifts a causal mask: row i sees the keys j <= i + offset; pass is_causal=True as well (or a "
                "window_size), or leave offset out"
            )
        return attn_mask, is_causal, offset
    if is_causal or offset is not None:
        given = "is_causal=True" if is_causal else f"offset={offset!r}"
        raise ValueError(f"attn_mask is a causal bias, which says all about causality by itself; leave out {given}")
    asked, got = (attn_mask.seq_len_q, attn_mask.seq_len_kv), (query.shape[-2], key.shape[-2])
    if asked != got:
        raise ValueError(
            f"attn_mask is a causal bias for {asked[0]} queries and {asked[1]} keys, got {got[0]} and {got[1]}; make it with "
            "torch.nn.attention.bias.causal_lower_right(query.shape[-2], key.shape[-2])"
        )
    return None, True, asked[1] - asked[0] if attn_mask.variant.name == "LOWER_RIGHT" else 0
