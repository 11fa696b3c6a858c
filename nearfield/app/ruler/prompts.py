"""Prompts of RULER: made once for a tokenizer, a length and a seed, and kept on disk."""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nearfield.app.remember import in_template
from nearfield.app.ruler import official
from nearfield.app.ruler.generators import Generators, NeverFits
from nearfield.app.ruler.official import NO_ROOM, Task
from nearfield.user_cache import replace_bytes

TEMPLATES = ("raw", "chat")
"""The prompt as it is, or as a turn of a chat in the model's template. Either way the answer begins with the official words."""

FORMAT = "nearfield-ruler-prompts 1"

MORE = 8
"""Tokens that are left free in chats: two texts may have a few tokens more together than apart."""


@dataclass(frozen=True)
class Prompt:
    task: str
    length: int
    """tokens that prompt and answer may have together"""
    template: str
    index: int
    text: str
    outputs: tuple[str, ...]
    """what the answer should have"""

    def encode(self, tokenizer: Any) -> list[int]:
        """Its tokens. A template has its own first token already."""
        return list(tokenizer(self.text, add_special_tokens=self.template == "raw", verbose=False)["input_ids"])


@dataclass
class Prompts:
    """Prompts for one tokenizer, kept in a folder.

    A file holds the samples of a task at a length, in one template, by one seed: a line of JSON that says so and has a digest of
    the rest, then one line for each, all compressed. A file that is damaged, or for something else, is made again. A larger
    number of samples begins with the same ones, so a file serves smaller numbers too.
    """

    folder: Path
    tokenizer: Any
    seed: int
    generators: Generators

    def __post_init__(self) -> None:
        self.fingerprint = tokenizer_digest(self.tokenizer)

    def get(
        self, task: Task, length: int, template: str, samples: int, told: Callable[[int], None] | None = None
    ) -> list[Prompt]:
        """Read them, or make and keep them. `told` hears the number of each sample that is made."""
        path = self.path(task, length, template)
        known = self._header(task, length, template)
        found = read(path, known)
        if found is None or len(found) < samples:
            found = self._make(task, length, template, samples, told)
            self._write(path, known, found)
        return [
            Prompt(task.name, length, template, number, one["text"], tuple(one["outputs"]))
            for number, one in enumerate(found[:samples])
        ]

    def path(self, task: Task, length: int, template: str) -> Path:
        return self.folder / self.fingerprint[:16] / f"{task.name}-{length}-{template}-{self.seed}.jsonl.xz"

    def _header(self, task: Task, length: int, template: str) -> dict[str, Any]:
        words = getattr(self.tokenizer, "chat_template", None) if template == "chat" else None
        return {
            "format": FORMAT,
            "versions": official.versions(),
            "tokenizer": self.fingerprint,
            "chat_template": None if words is None else hashlib.sha256(str(words).encode()).hexdigest(),
            "task": task.name,
            "length": length,
            "template": template,
            "seed": self.seed,
        }

    def _make(
        self, task: Task, length: int, template: str, samples: int, told: Callable[[int], None] | None
    ) -> list[dict[str, Any]]:
        taken = _tokens_of_template(self.tokenizer, template) + (task.tokens if task.kind == NO_ROOM else 0)
        while True:
            made = self._generated(task, length - taken, samples, told)
            found = [{"text": in_words(self.tokenizer, task, template, one["input"]), "outputs": one["outputs"]} for one in made]
            prompts = (Prompt(task.name, length, template, 0, one["text"], ()) for one in found)
            over = max(len(prompt.encode(self.tokenizer)) for prompt in prompts) + task.tokens - length
            if over <= 0:
                return found
            taken += over

    def _generated(self, task: Task, length: int, samples: int, told: Callable[[int], None] | None) -> list[dict[str, Any]]:
        try:
            return self.generators.make(task, length, samples, self.seed, told)
        except NeverFits:
            # The generators look for a size that fits, and go one size too far if a prompt on the way has this very length.
            return self.generators.make(task, length - 1, samples, self.seed, told)

    def _write(self, path: Path, header: dict[str, Any], found: list[dict[str, Any]]) -> None:
        body = "".join(json.dumps(one) + "\n" for one in found).encode()
        first = json.dumps({**header, "sha256": hashlib.sha256(body).hexdigest()}).encode() + b"\n"
        try:
            replace_bytes(path, lzma.compress(first + body, preset=1))
        except OSError as error:
            raise OSError(
                f"prompts cannot be kept in {path.parent} ({error.strerror}); free some space, or name another folder with "
                "--prompts. What was made and measured so far is kept: the same command goes on from there"
            ) from error


def read(path: Path, header: dict[str, Any]) -> list[dict[str, Any]] | None:
    """What a file holds; None if there is none, or it is damaged or for something else."""
    try:
        first, _, body = lzma.decompress(path.read_bytes()).partition(b"\n")
        known = json.loads(first)
        is_whole = known.pop("sha256", None) == hashlib.sha256(body).hexdigest()
        return [json.loads(line) for line in body.splitlines()] if is_whole and known == header else None
    except (OSError, lzma.LZMAError, EOFError, ValueError, AttributeError, TypeError):
        return None


def in_words(tokenizer: Any, task: Task, template: str, made: str) -> str:
    """The text of a prompt. In a chat, what the answer begins with comes after the turn that asks."""
    if template == "raw":
        return made
    # Up to its first blank; the generators fill in the rest, and put the verb into the singular.
    at = made.rindex(task.answer_prefix.partition("{")[0])
    return in_template(tokenizer, made[:at]) + made[at:]


def check_template(tokenizer: Any, template: str) -> None:
    """Raises if the model has no template for chats, and one is asked for."""
    if template == "chat" and not getattr(tokenizer, "chat_template", None):
        raise ValueError("--templates chat needs a model with a chat template, and this one has none; use --templates raw")


def tokenizer_digest(tokenizer: Any) -> str:
    """Of all that decides which tokens a text has."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules = sorted(tokenizer.get_vocab().items()) if backend is None else json.loads(backend.to_str())
    if isinstance(rules, dict):
        # Calls leave these behind, and texts are never cut or filled up here.
        rules |= {"truncation": None, "padding": None}
    first = tokenizer("a")["input_ids"]
    return hashlib.sha256(json.dumps([rules, first], sort_keys=True).encode()).hexdigest()


def _tokens_of_template(tokenizer: Any, template: str) -> int:
    """How many tokens come on top of those that the generators count."""
    alone = len(tokenizer("a", add_special_tokens=False)["input_ids"])
    if template == "raw":
        return len(tokenizer("a")["input_ids"]) - alone
    return len(tokenizer(in_template(tokenizer, "a"), add_special_tokens=False)["input_ids"]) - alone + MORE
