"""Answers of a model to prompts, one way at a time: the likeliest token, until the model or a limit ends the answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearfield import _compat
from nearfield.app.evaluate.measure import attending
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


@torch.no_grad()
def answer(model: Any, tokenizer: Any, way: Way, prompts: Sequence[Sequence[int]], most: int) -> list[Answer]:
    """Answer prompts with up to `most` tokens each. Each prompt is read by itself; the answers are written together."""
    config = generation_config(model, tokenizer, most)
    given = [torch.tensor(ids, device=model.device) for ids in prompts]
    ends = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    with reading(model, way):
        caches, seconds = [], []
        for ids in given:
            start = _now(model)
            caches.append(read(model, way, ids))
            seconds.append(_now(model) - start)
        keys = [way.keys_read(cache) for cache in caches]
        start = _now(model)
        with writing(model, way):
            cache = caches[0] if len(caches) == 1 else way.join(caches, model.config)
            caches.clear()
            found = way.continued(model, given, cache, config)
        each = (_now(model) - start) / len(given)
    answers = []
    for ids, whole, read_keys, before in zip(given, found, keys, seconds, strict=True):
        tokens = _ended(whole[len(ids) :], ends)
        answers.append(Answer(tokens, tokenizer.decode(tokens, skip_special_tokens=True), read_keys, before, each))
    return answers


def read(model: Any, way: Way, ids: Tensor) -> Any:
    """A cache that has all tokens of a prompt `[length]` but the last."""
    cache = way.cache(model.config)
    read_prompt(model, ids[:-1], cache)
    return cache


@contextmanager
def reading(model: Any, way: Way) -> Iterator[None]:
    """Attend as a way reads prompts."""
    with nullcontext() if way.prefill is None else attending(model, way.prefill):
        yield


@contextmanager
def writing(model: Any, way: Way) -> Iterator[None]:
    """Attend as a way writes answers; inside of `reading`."""
    if way.decode is None:
        yield
        return
    before = _compat.attention_name(model)
    model.set_attn_implementation(way.decode)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _ended(tokens: Tensor, ends: Sequence[int | None]) -> list[int]:
    """Up to the first token that ends a text, with it; in a batch, padding follows."""
    found: list[int] = tokens.tolist()
    return next((found[: place + 1] for place, token in enumerate(found) if token in ends), found)


def _now(model: Any) -> float:
    if model.device.type == "cuda":
        torch.cuda.synchronize(model.device)
    return time.perf_counter()
