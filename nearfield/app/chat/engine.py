"""A model that answers a chat about documents: the prompt, the answer word by word, and what it looked at."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nearfield.app.chat.documents import Citation, Documents, beginning
from nearfield.app.chat.words import Words
from nearfield.app.evaluate.models import generation_config
from nearfield.cells.cache import HeavyKeys
from nearfield.hf.cache import CellCache
from nearfield.hf.memory import KNOWN_POSITIONS, Memory

PROMPT_CHUNK = 256
"""Tokens of a prompt to read between two looks at whether to go on."""

AUDITED = range(0, 64, 16)
"""Steps of an answer that are compared with exact attention over all keys, which costs more than the step itself."""

COLDEST = 1e-20
"""Temperatures below it count as 0: what is left of any logits is the likeliest token, and some divided by them are infinite."""

WATCH_EVERY = {"cuda": 4}
"""Every how many steps heavy keys are counted. On a GPU that takes a slower path; elsewhere it costs next to nothing."""


class Unanswerable(ValueError):
    """A chat that this model cannot go on with."""


class TooLong(Unanswerable):
    """A prompt that leaves no room for an answer."""


@dataclass(frozen=True)
class Message:
    role: str
    content: str


@dataclass(frozen=True)
class Sampling:
    """How to choose tokens, and when to stop. A temperature of 0, or below `COLDEST`, takes the likeliest token."""

    max_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class AttentionError:
    """Of attention in the audited steps: ||estimate - exact|| / ||exact|| of an output row."""

    steps: int
    mean: float
    """over steps, layers and heads"""
    worst: float
    """of all heads of all layers, the one with the largest mean over steps"""


@dataclass(frozen=True)
class Answer:
    text: str
    finish: str
    """ "stop": the model or a stop string has ended it; "length": a limit on tokens; "cut": it was told to stop"""
    prompt_tokens: int
    """of the documents and the chat"""
    tokens: int
    seconds: float
    """until the first token"""
    rate: float | None
    """tokens per second after that, without the audited steps; None: too few"""
    error: AttentionError | None
    """None: nothing was read through cells"""
    citations: list[Citation]


@dataclass
class Session:
    """What is kept of a chat between two answers, so that only what is new has to be read."""

    cache: CellCache | None = None
    tokens: list[int] = field(default_factory=list)
    """those in the cache, without the documents"""

    def forget(self) -> None:
        self.cache, self.tokens = None, []


def never() -> bool:
    return False


class Engine:
    """A model with its documents. One answer at a time."""

    def __init__(self, model: Any, tokenizer: Any, documents: Documents | None, memory: Memory | None) -> None:
        self.model, self.tokenizer = model, tokenizer
        self.documents = documents
        self.memory = None if memory is None else memory.to(model.device)
        known = getattr(model.config.get_text_config(), "max_position_embeddings", None) or KNOWN_POSITIONS
        if memory is None:
            self.room = known
        elif memory.reading.positions == "running":
            self.room = known - memory.tokens.shape[1]
        else:
            self.room = known // 8
        """tokens that a chat may have, with its answer"""

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a chat that the model is to go on with. Raises `Unanswerable` if the model's template refuses it."""
        text, is_chat = self._rendered(messages), bool(getattr(self.tokenizer, "chat_template", None))
        first = beginning(self.tokenizer)
        found = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        if self.memory is not None:
            # The documents begin with this token already.
            return found[len(first) :] if first and found[: len(first)] == first else found
        return found if is_chat else first + found

    def _rendered(self, messages: Sequence[Message]) -> str:
        if not getattr(self.tokenizer, "chat_template", None):
            return "\n".join(message.content for message in messages)
        from jinja2 import TemplateError

        turns = [{"role": message.role, "content": message.content} for message in messages]
        try:
            return str(self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except TemplateError as error:
            raise Unanswerable(f"the chat template of this model refuses these messages: {error}") from error

    def answer(
        self,
        messages: Sequence[Message],
        sampling: Sampling,
        heard: Callable[[str], None],
        should_stop: Callable[[], bool] = never,
        session: Session | None = None,
    ) -> Answer:
        """Answer the last message. `heard` gets the text as it comes; `should_stop` is asked before every token.

        A session is used again by the next answer. If this one fails or is interrupted, it forgets everything.
        """
        prompt = self.prompt(messages)
        if not prompt:
            raise Unanswerable("the chat has no tokens; say something")
        if len(prompt) >= self.room:
            raise TooLong(f"the chat has {len(prompt)} tokens, but there is room for {self.room} with the answer")
        kept = Session() if session is None else session
        before, held = kept.cache, kept.tokens
        kept.forget()
        cache, known = self._cache(before, held, prompt)
        heavy = HeavyKeys(0 if self.memory is None else self.memory.tokens.shape[1])
        every = WATCH_EVERY.get(self.model.device.type, 1)
        listener = _Listener(cache, heavy, Words(self.tokenizer, sampling.stop, heard), should_stop, every)
        with torch.no_grad():
            found = self._generate(prompt, known, cache, sampling, listener)
        cache.audit = False
        cache.watch(None)
        listener.words.end()
        if found:
            # The last token was chosen, but not read.
            kept.cache, kept.tokens = cache, prompt + found[:-1]
        return self._answer(prompt, found, sampling, listener)

    def _cache(self, cache: CellCache | None, held: list[int], prompt: list[int]) -> tuple[CellCache, int]:
        """A cache, and how many tokens of the prompt it holds: those that it shares with what it `held`, but never all."""
        pairs = zip(held, prompt[:-1], strict=False)
        shared = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(held), len(prompt) - 1))
        if cache is not None and shared:
            if shared < len(held):
                cache.crop(shared - len(held))
            return cache, shared
        if self.memory is None:
            return CellCache(config=self.model.config), 0
        return self.memory.cache(device=self.model.device), 0

    def _generate(self, prompt: list[int], known: int, cache: CellCache, sampling: Sampling, listener: _Listener) -> list[int]:
        """Read what the cache does not hold of the prompt, and generate; the new tokens, none if it was stopped before."""
        device = self.model.device
        for start in range(known, len(prompt) - 1, PROMPT_CHUNK):
            if listener.should_stop():
                listener.is_cut = True
                return []
            more = prompt[start : min(start + PROMPT_CHUNK, len(prompt) - 1)]
            self.model.base_model(torch.tensor([more], device=device), past_key_values=cache)
        given = torch.tensor([prompt])
        if self.memory is not None:
            given = torch.cat([self.memory.tokens, given], 1)
        given = given.to(device)
        listener.begin()
        with _seeded(sampling.seed, device):
            found = self.model.generate(
                given,
                attention_mask=torch.ones_like(given),
                past_key_values=cache,
                generation_config=self._options(sampling, len(prompt)),
                stopping_criteria=[listener],
            )
        return list(found[0, given.shape[1] :].tolist())

    def _options(self, sampling: Sampling, prompt: int) -> Any:
        """Options of `generate`. What a model's own configuration says of penalties would count words of the documents."""
        options: dict[str, Any] = {"do_sample": sampling.temperature >= COLDEST}
        if options["do_sample"]:
            options |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": 0}
        return generation_config(self.model, self.tokenizer, min(sampling.max_tokens, self.room - prompt), **options)

    def _answer(self, prompt: list[int], found: list[int], sampling: Sampling, listener: _Listener) -> Answer:
        words, documents = listener.words, 0 if self.memory is None else self.memory.tokens.shape[1]
        ends = self._options(sampling, len(prompt)).eos_token_id
        has_ended = bool(found) and found[-1] in (ends if isinstance(ends, list) else [ends])
        finish = "stop" if words.stopped or has_ended else "cut" if listener.is_cut else "length"
        citations = self.documents.cite(listener.heavy.counts) if self.documents else []
        return Answer(
            words.text,
            finish,
            documents + len(prompt),
            len(found),
            listener.first_after,
            listener.rate,
            listener.error,
            citations,
        )


class _Listener:
    """Called by `generate` with all tokens after each step: passes words on, says when to stop, and what to look at next."""

    def __init__(self, cache: CellCache, heavy: HeavyKeys, words: Words, should_stop: Callable[[], bool], every: int) -> None:
        self.cache, self.heavy, self.words, self.should_stop = cache, heavy, words, should_stop
        self._every = every
        self.is_cut = False
        self.first_after = 0.0
        self._steps: list[tuple[float, bool]] = []
        """seconds of each step, and whether it was audited"""
        self._started = self._last = time.perf_counter()
        self._before = {layer: len(errors) for layer, errors in cache.errors.items()}

    def begin(self) -> None:
        """Before the first step of an answer."""
        self._last = time.perf_counter()
        self._set()

    def __call__(self, tokens: Tensor, scores: Any, **_: Any) -> Tensor:
        self.words.add(int(tokens[0, -1]))
        now = time.perf_counter()
        if not self._steps:
            self.first_after = now - self._started
        self._steps.append((now - self._last, self.cache.audit))
        self._last = now
        self.is_cut = self.should_stop()
        self._set()
        return torch.full((1,), self.is_cut or self.words.stopped, device=tokens.device)

    def _set(self) -> None:
        """What to look at in the next step."""
        step = len(self._steps)
        self.cache.audit = step in AUDITED
        self.cache.watch(self.heavy if step % self._every == 0 else None)

    @property
    def rate(self) -> float | None:
        times = [seconds for seconds, is_audited in self._steps[1:] if not is_audited]
        return len(times) / sum(times) if times and sum(times) > 0 else None

    @property
    def error(self) -> AttentionError | None:
        found = {layer: steps[self._before.get(layer, 0) :] for layer, steps in self.cache.errors.items()}
        heads = [torch.stack([step.relative[0, :, -1] for step in steps]).float() for steps in found.values() if steps]
        if not heads:
            return None
        by_head = torch.cat(heads, 1)
        return AttentionError(len(by_head), float(by_head.mean()), float(by_head.mean(0).max()))


@contextmanager
def _seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Sampling from a seed, or from where torch is. With a seed, torch is afterwards where it was."""
    if seed is None:
        yield
        return
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
