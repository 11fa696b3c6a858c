"""Tokens as text, while they come: whole characters only, and nothing of what a stop string may begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class Words:
    """Text of tokens that come one by one.

    Attributes:
        text: what was given out so far, all of it once `end` was called.
        stopped: whether a stop string has come. Nothing of it, or after it, is in `text`.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str], heard: Callable[[str], None]) -> None:
        self._tokenizer, self._stop, self._heard = tokenizer, tuple(stop), heard
        self._tokens: list[int] = []
        self._start, self._shown = 0, 0
        """Tokens from `_start` on are decoded together, those before `_shown` are in the text already."""
        self._held = ""
        self.text = ""
        self.stopped = False

    def add(self, token: int) -> None:
        self._tokens.append(token)
        # A token by itself may lose the space before it, or be a part of a character: it is decoded together with those before.
        before, now = (self._decode(self._tokens[self._start : stop]) for stop in (self._shown, None))
        if len(now) > len(before) and not now.endswith("\ufffd"):
            self._start, self._shown = self._shown, len(self._tokens)
            self._give(now[len(before) :])

    def end(self) -> None:
        """Give out what is left: the beginning of a stop string, or of a character, that did not come."""
        before, now = (self._decode(self._tokens[self._start : stop]) for stop in (self._shown, None))
        if not self.stopped:
            self._give(now[len(before) :])
            self._out(self._held)

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _give(self, more: str) -> None:
        if self.stopped:
            return
        self._held += more
        found = [place for word in self._stop if (place := self._held.find(word)) >= 0]
        if found:
            self.stopped = True
            self._held = self._held[: min(found)]
            self._out(self._held)
            return
        self._out(self._held[: len(self._held) - self._may_begin_a_stop()])

    def _may_begin_a_stop(self) -> int:
        """How many characters at the end are the beginning of a stop string."""
        lengths = [n for word in self._stop for n in range(1, len(word)) if self._held.endswith(word[:n])]
        return max(lengths, default=0)

    def _out(self, text: str) -> None:
        self._held = self._held[len(text) :]
        if text:
            self.text += text
            self._heard(text)
