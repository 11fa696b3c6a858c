"""Texts that a model is to answer questions about: their tokens in one row, and passages to cite."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nearfield.app.evaluate.models import read_text

STRIDE, BLOCKS = 16, 4
"""A passage has this many blocks of so many tokens."""

EXCERPT = 240
"""Characters to show of a passage."""

CITED = 3
"""Passages to cite, at most."""

LEAST, LEAST_SHARE = 2, 0.05
"""Times that heads have looked into a passage which is cited, and their share of all; what is less may be chance."""


@dataclass(frozen=True)
class Citation:
    """A passage that heads looked at while they wrote an answer."""

    document: str
    """its file's name"""
    line: int
    """where it begins; the first is 1"""
    position: float
    """how far into the document, from 0 to 1"""
    looks: int
    """times that a head gave a key in it a large part of its weights, over all layers, heads and tokens of the answer"""
    share: float
    """of all such looks into the documents"""
    excerpt: str


@dataclass(frozen=True)
class Document:
    """Some tokens of a row that are one text."""

    name: str
    first: int
    stop: int
    skipped: int = 0
    """empty lines that the text begins with; the row has none of them"""


class Documents:
    """Texts as one row of tokens, each after a line with its name."""

    def __init__(self, tokenizer: Any, texts: dict[str, str]) -> None:
        self.tokenizer = tokenizer
        found, self.listed = beginning(tokenizer), []
        for name, text in texts.items():
            first = len(found)
            found += _ids(tokenizer, f"{name}\n\n{text.strip()}\n\n")
            skipped = text[: len(text) - len(text.lstrip())].count("\n")
            self.listed.append(Document(name, first, len(found), skipped))
        self.tokens = torch.tensor([found], dtype=torch.int64)
        """`[1, length]`"""

    @cached_property
    def _lines(self) -> list[int]:
        """How many line ends come before each block of `STRIDE` tokens of the row."""
        row = self.tokens[0].tolist()
        blocks = [row[i : i + STRIDE] for i in range(0, len(row), STRIDE)]
        counts = torch.tensor([0, *(text.count("\n") for text in self.tokenizer.batch_decode(blocks))])
        return counts.cumsum(0).tolist()

    def _line_ends(self, token: int) -> int:
        """How many come before this token of the row."""
        block = token // STRIDE
        return self._lines[block] + str(self.tokenizer.decode(self.tokens[0, STRIDE * block : token])).count("\n")

    def cite(self, looks: Tensor) -> list[Citation]:
        """The passages that were looked at most, for `looks` `[length]`: how often heads looked at each token."""
        total = int(looks.sum())
        found: list[Citation] = []
        left = torch.nn.functional.pad(looks, (0, -len(looks) % STRIDE)).view(-1, STRIDE).sum(1)
        while len(found) < CITED:
            sums = torch.nn.functional.pad(left, (0, BLOCKS - 1)).unfold(0, BLOCKS, 1).sum(1)
            best = int(sums.argmax()) if len(sums) else 0
            if not len(sums) or int(sums[best]) < max(LEAST, LEAST_SHARE * total):
                break
            # Of passages with the same sum, the one in whose middle the looks are.
            best = max(0, best - int((left[best : best + BLOCKS].flip(0) == 0).long().cumprod(0).sum()) // 2)
            found.append(self._citation(best, int(left[best : best + BLOCKS].sum()), total))
            left[best : best + BLOCKS] = 0
        return found

    def _citation(self, block: int, looks: int, total: int) -> Citation:
        first, stop = STRIDE * block, STRIDE * (block + BLOCKS)
        # A passage that begins in the last block of a document may belong to the next one.
        middle = min((first + stop) // 2, self.tokens.shape[1] - 1)
        owner = next((x for x in self.listed if x.first <= middle < x.stop), self.listed[0])
        first, stop = max(first, owner.first), min(stop, owner.stop)
        # The name has a line of its own, and the empty one after it.
        line = max(1, self._line_ends(first) - self._line_ends(owner.first) - 1) + owner.skipped
        text = " ".join(self.tokenizer.decode(self.tokens[0, first:stop], skip_special_tokens=True).split())
        excerpt = text if len(text) <= EXCERPT else text[: EXCERPT - 1].rstrip() + "…"
        position = (first - owner.first) / (owner.stop - owner.first)
        return Citation(owner.name, line, position, looks, looks / total, excerpt)


def read_documents(paths: list[Path]) -> dict[str, str]:
    """The texts of files by name. Raises ValueError, with the reason, for a file that is no text or is given twice."""
    texts: dict[str, str] = {}
    places: set[Path] = set()
    for path in paths:
        text = read_text(path)
        if not text.strip():
            raise ValueError(f"--document {path} is empty; give a text to read")
        if path.resolve() in places:
            raise ValueError(f"--document {path} is given twice")
        places.add(path.resolve())
        texts[next(name for name in (path.name, str(path), str(path.resolve())) if name not in texts)] = text
    return texts


def beginning(tokenizer: Any) -> list[int]:
    """The token that this tokenizer puts before every text, if it has one."""
    first = tokenizer("a")["input_ids"][:1]
    return first if first == [tokenizer.bos_token_id] else []


def _ids(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
