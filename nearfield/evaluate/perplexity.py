"""The loss of a language model at every token of a text, in one pass of any length, with any method of attention."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nearfield.blocks import BLOCK_BYTES, row_blocks
from nearfield.hf import register
from nearfield.methods.base import Method

NAME = "nearfield-eval"
HEAD_BYTES = 4 * BLOCK_BYTES
"""Of logits over the vocabulary, in float32, that exist at a time."""


@contextmanager
def attending(model: Any, method: Method | Mapping[int | str, Method]) -> Iterator[None]:
    """Let the layers of a model attend by `method` (see `nearfield.hf.register`), and then as they did before.

    Not one inside the other: there is one name for all methods.
    """
    before = model.config._attn_implementation
    if before == NAME:
        raise RuntimeError("attending() is at work already; leave it first")
    register(NAME, method)
    try:
        model.set_attn_implementation(NAME)
        yield
    finally:
        model.set_attn_implementation(before)
        register(NAME)  # let go of the method


@torch.no_grad()
def token_losses(model: Any, ids: Tensor, tick: Callable[[], None] | None = None) -> Tensor:
    """-log p(token) of every token of `ids` `[1, n]` but the first: `[n - 1]`, float64, on the CPU.

    The n x vocabulary logits never exist at once: the model runs without its head, and the head on some positions at a time.

    Args:
        tick: called after each layer.
    """
    states = final_states(model, ids, tick)
    found = []
    for block in row_blocks((1, ids.shape[1] - 1), bytes_of_logits(model)):
        logits = head(model, states[:, block], ids)
        following = ids[0, block.start + 1 : block.stop + 1]
        found.append(F.cross_entropy(logits[0].float(), following, reduction="none").cpu().double())
    return torch.cat(found)


def final_states(model: Any, ids: Tensor, tick: Callable[[], None] | None = None) -> Tensor:
    """What the head of the model is given, `[1, n, width]`."""
    with _told(model, tick):
        states: Tensor = model.base_model(ids, use_cache=False).last_hidden_state
    return states


def bytes_of_logits(model: Any) -> int:
    """Memory per token, in units of which `row_blocks` gives out `BLOCK_BYTES`: the head has `HEAD_BYTES`."""
    words: int = model.get_output_embeddings().weight.shape[0]
    return max(1, 2 * 4 * words * BLOCK_BYTES // HEAD_BYTES)


def head(model: Any, states: Tensor, ids: Tensor) -> Tensor:
    """Logits of some hidden states, by all that the model does after its layers: some scale or cap what their head says.

    So the whole model runs on one token, and goes on with these states where its layers end.
    """

    def instead(_module: Any, _given: Any, output: Any) -> Any:
        output.last_hidden_state = states
        return output

    hook = model.base_model.register_forward_hook(instead)
    try:
        logits: Tensor = model(ids[:, :1], use_cache=False).logits
    finally:
        hook.remove()
    return logits


@contextmanager
def _told(model: Any, tick: Callable[[], None] | None) -> Iterator[None]:
    layers = [part for part in model.modules() if getattr(part, "layer_idx", None) is not None]
    hooks = [part.register_forward_hook(lambda *_: tick()) for part in layers] if tick else []
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def ticks_per_pass(model: Any) -> int:
    """How often a pass calls `tick`."""
    return sum(getattr(part, "layer_idx", None) is not None for part in model.modules())


@dataclass(frozen=True)
class Perplexity:
    """Of one text, and how it compares with exact attention."""

    perplexity: float
    excess: float
    """perplexity / exact perplexity - 1"""
    stderr: float
    """of the excess: the spread of the differences from token to token, as if these were independent"""


def compared(losses: Tensor, exact: Tensor) -> Perplexity:
    """Paired: both are losses of the same tokens. What is not a number is infinite: no tolerance allows for it."""
    difference = losses - exact
    excess = float(difference.mean().exp().nan_to_num(nan=math.inf, posinf=math.inf)) - 1
    spread = float(difference.std()) / math.sqrt(len(difference)) if len(difference) > 1 else 0.0
    return Perplexity(float(losses.mean().exp().nan_to_num(nan=math.inf, posinf=math.inf)), excess, (1 + excess) * spread)
