"""How a model reads a text into a cell cache: as one sequence, or chunk by chunk, with positions that start again."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import DynamicCache

from nearfield import _compat
from nearfield.checks import check_positive
from nearfield.hf.cache import CellCache, CellLayer
from nearfield.hf.register import AttentionFunction, in_one_dtype

POSITIONS = ("running", "restart")

KNOWN = 8192
"""Positions of a model that does not say how many it knows."""

CHUNK, GAP = 4096, 1024
"""Where positions start again, at most: half and an eighth of what the model knows."""

RELATIVE = ("default", "linear", "llama3", "yarn")
"""Rotary embeddings by which only differences of positions matter, however large the positions are."""


@dataclass(frozen=True)
class Reading:
    """How a text was read.

    Attributes:
        positions: "running" or "restart".
        chunk: how many tokens were read at a time.
        gap: positions between the chunks and a question. Heads that look at the latest few tokens should find the question's own
            there, and not the end of every chunk.
        sharpness: what keys were multiplied with after they were read, sinks excepted: log(tokens) / log(known positions), as
            attention to more keys than the model knows would be flatter than what it was trained on.
    """

    positions: str
    chunk: int
    gap: int = 0
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        if self.positions not in POSITIONS:
            raise ValueError(f"positions must be one of {', '.join(POSITIONS)}, got {self.positions!r}")
        check_positive("chunk", self.chunk)
        check_positive("gap", self.gap, least=0)
        if not isinstance(self.sharpness, float) or not 1.0 <= self.sharpness < math.inf:
            raise ValueError(f"sharpness must be a number of at least 1, got {self.sharpness!r}")


def plan_reading(config: Any, length: int, sinks: int, positions: str | None, chunk: int | None) -> Reading:
    """How to read so many tokens with a model of this configuration; None: as suits it."""
    known = getattr(config, "max_position_embeddings", None) or KNOWN
    # An eighth is left for question and answer.
    room = known - known // 8
    if positions is None:
        positions = "running" if length <= room else "restart"
    if positions == "running":
        return Reading(positions, length if chunk is None else chunk)
    gap = min(GAP, known // 8)
    chunk = max(1, min(CHUNK, known // 2)) if chunk is None else chunk
    found = Reading(positions, chunk, gap, max(1.0, math.log(length) / math.log(max(2, known))))
    if not _is_relative(getattr(config, "rope_parameters", None)):
        raise ValueError(
            f"positions can only start again in models with rotary embeddings ({', '.join(RELATIVE)}), got {config.model_type} "
            f"and a text of {length} tokens; read less of it, or positions='running' if the model knows so many"
        )
    if not sinks < chunk <= room - sinks - gap:
        raise ValueError(
            f"chunk must be more than {sinks} and at most {room - sinks - gap}, got {chunk}: the model knows {known} positions, "
            f"of which {sinks} are for sinks, {gap} are a gap, and an eighth is for question and answer"
        )
    return found


def _is_relative(rope: Any) -> bool:
    if not rope:
        return False
    kinds = [rope] if "rope_type" in rope else list(rope.values())  # or one for each kind of layer
    return all(
        isinstance(kind, Mapping) and kind.get("rope_type") in RELATIVE and "llama_4_scaling_beta" not in kind for kind in kinds
    )


def check_reader(model: Any) -> None:
    """A model that can read into a cell cache, and ask it later. Where positions start again, reading alone would not tell."""
    if model.training:
        raise ValueError("the model is in training mode, in which it may drop what it reads; call model.eval() first")
    name = _compat.attention_name(model)
    if not isinstance(AttentionInterface().get(name), AttentionFunction):
        raise ValueError(
            f"the model attends by {name!r}, and only attention registered by nearfield can read a memory: hf.register(); "
            'model.set_attn_implementation("nearfield")'
        )


def read_text(model: Any, tokens: Tensor, cache: CellCache, reading: Reading, progress: Callable[[int], None] | None) -> None:
    """Fill an empty cache with a text `[1, length]`; `progress` is told how many tokens have been read.

    Where no chunk attends to others, what they have in common is found when all of them are there: they become one segment.
    """
    for start in range(0, tokens.shape[1], reading.chunk):
        own = slice(start, start + reading.chunk)
        if reading.positions == "running":
            model.base_model(tokens[:, own], past_key_values=cache)
        else:
            _read_chunk(model, tokens, own, cache, reading)
        if progress is not None:
            progress(min(own.stop, tokens.shape[1]))
    for layer in cache.layers:
        if isinstance(layer, CellLayer):
            layer.store.close()


def _read_chunk(model: Any, tokens: Tensor, own: slice, cache: CellCache, reading: Reading) -> None:
    """A chunk by itself, after the first tokens of the text.

    All chunks have the same positions, the last of them `gap` before those of a question, which are counted on from the length of
    the text as always: where only differences matter, positions could as well be those from 0 on. Heads rest on the first tokens
    of what they read, so that each chunk read from its own start would have such tokens, and together they would outweigh all
    else. So the first tokens of the text come before every chunk, and are kept once.
    """
    stores = [layer.store for layer in cache.layers if isinstance(layer, CellLayer)]
    sinks = stores[0].sizes.sinks
    shared = sinks if own.start else 0
    given = torch.cat([tokens[:, :shared], tokens[:, own]], 1)
    first = tokens.shape[1] - reading.gap - sinks - reading.chunk
    positions = torch.arange(first, first + given.shape[1], device=given.device)[None]
    seen: Any = DynamicCache(config=model.config)
    model.base_model(given, past_key_values=seen, position_ids=positions)
    for store, layer in zip(stores, seen.layers, strict=True):
        key, value = in_one_dtype(layer.keys, layer.values)
        key[:, :, sinks:] *= reading.sharpness
        store.append(key[:, :, shared:], value[:, :, shared:])
