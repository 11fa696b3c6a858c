"""Answers of a model to prompts, one way at a time: the likeliest token, until the model or a limit ends the answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
    """by a token of it, mean over layers without a window"""
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
    way = way.source_for(model, len(ids)) or way
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
    most: int | Sequence[int],
    readings: Sequence[Reading] | None = None,
    is_final: Callable[[int, str], bool] | None = None,
    between: Callable[[], None] = lambda: None,
) -> list[Answer]:
    """Answer prompts with up to `most` tokens each. Each prompt is read by itself, unless that is done already (`readings`); the
    answers are written together.

    `is_final`: whether more tokens cannot change what is made of the answer to a prompt, by number; it may end then. `between` is
    called every now and then, and ends all of it by an exception.
    """
    limits = [most] * len(prompts) if isinstance(most, int) else list(most)
    given = [torch.tensor(ids, device=model.device) for ids in prompts]
    done = None if readings is None else list(readings)
    caches, seconds = [], []
    for ids in given:
        between()
        one = read(model, way, ids) if done is None else done.pop(0)
        start = _now(model)
        caches.append(way.adopt(one.cache, model.config))
        seconds.append(one.seconds + _now(model) - start)
        del one
    keys = [way.keys_read(cache) for cache in caches]
    start = _now(model)
    with way.writing(model, max(map(len, given))):
        try:
            cache = way.join(caches)
        except ValueError as error:
            if len(caches) == 1:
                raise
            raise ValueError(f"{error}; --batch 1 does so with every prompt") from error
        caches.clear()
        found = _written(model, tokenizer, way, given, limits, cache, is_final, between)
    each = (_now(model) - start) / len(given)
    return [
        Answer(tokens, tokenizer.decode(tokens, skip_special_tokens=True), read_keys, before, each)
        for tokens, read_keys, before in zip(found, keys, seconds, strict=True)
    ]


def _written(
    model: Any,
    tokenizer: Any,
    way: Way,
    prompts: Sequence[Tensor],
    limits: Sequence[int],
    cache: Any,
    is_final: Callable[[int, str], bool] | None,
    between: Callable[[], None],
) -> list[list[int]]:
    """The tokens of the answers, in rounds: between two of them, answers that are done leave the batch."""
    texts, count = list(prompts), 0
    going = list(range(len(prompts)))
    found: list[list[int]] = [[] for _ in prompts]
    for stop in sorted({*(x for x in way.rounds if x < max(limits)), max(limits)}):
        between()
        config = generation_config(model, tokenizer, stop - count)
        ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
        longer = way.continued(model, [texts[i] for i in going], cache, config)
        left = []
        for place, (i, ids) in enumerate(zip(going, longer, strict=True)):
            texts[i] = ids
            tokens = ids[len(prompts[i]) :].tolist()[: limits[i]]
            found[i] = _ended(tokens, ends)
            is_done = len(tokens) >= limits[i] or len(found[i]) < len(tokens) or found[i][-1] in ends
            if not is_done and is_final is not None:
                is_done = is_final(i, tokenizer.decode(found[i], skip_special_tokens=True))
            if not is_done:
                left.append(place)
        if not left:
            break
        if len(left) < len(going):
            cache.batch_select_indices(torch.tensor(left, device=model.device))
            going = [going[place] for place in left]
        count = stop
    return found


def _ended(tokens: list[int], ends: Sequence[int | None]) -> list[int]:
    """Up to the first token that ends a text, with it; in a batch, padding follows."""
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in ends), tokens)


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
