"""Answers of a model to prompts, one way at a time: the likeliest token, until the model or a limit ends the answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.app.evaluate.models import generation_config
from nearfield.app.ruler.ways import Way
from nearfield.hf.generation import read_prompt


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    text: str
    keys_read: float
    """by a token of it, mean over layers"""
    reading: float
    """seconds until the prompt was read"""
    writing: float
    """seconds for the answer; those of a batch are shared out"""


class Reading(NamedTuple):
    """A prompt that was read, all tokens but the last."""

    cache: Any
    seconds: float


@torch.no_grad()
def read(model: Any, way: Way, ids: Tensor) -> Reading:
    """Read a prompt `[length]` as a way does, or its source."""
    way = way.source or way
    start = _now(model)
    cache = way.cache(model.config)
    with way.reading(model, len(ids)):
        read_prompt(model, ids[:-1], cache)
    return Reading(cache, _now(model) - start)


@torch.no_grad()
def answer(
    model: Any,
    tokenizer: Any,
    way: Way,
    prompts: Sequence[Sequence[int]],
    most: int,
    readings: Sequence[Reading] | None = None,
) -> list[Answer]:
    """Answer prompts with up to `most` tokens each. Each prompt is read by itself, unless that is done already (`readings`); the
    answers are written together."""
    config = generation_config(model, tokenizer, most)
    given = [torch.tensor(ids, device=model.device) for ids in prompts]
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    done = [read(model, way, ids) for ids in given] if readings is None else list(readings)
    caches, seconds = [], []
    while done:
        one = done.pop(0)
        start = _now(model)
        caches.append(way.adopt(one.cache, model.config))
        seconds.append(one.seconds + _now(model) - start)
    keys = [way.keys_read(cache) for cache in caches]
    start = _now(model)
    with way.writing(model, max(map(len, given))):
        cache = caches[0] if len(caches) == 1 else way.join(caches, model.config)
        caches.clear()
        found = way.continued(model, given, cache, config)
    each = (_now(model) - start) / len(given)
    answers = []
    for ids, whole, read_keys, before in zip(given, found, keys, seconds, strict=True):
        tokens = _ended(whole[len(ids) :], ends)
        answers.append(Answer(tokens, tokenizer.decode(tokens, skip_special_tokens=True), read_keys, before, each))
    return answers


def _ended(tokens: Tensor, ends: Sequence[int | None]) -> list[int]:
    """Up to the first token that ends a text, with it; in a batch, padding follows."""
    found: list[int] = tokens.tolist()
    return next((found[: place + 1] for place, token in enumerate(found) if token in ends), found)


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
