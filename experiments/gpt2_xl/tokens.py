"""Text as tokens, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TESTED = 0.1
"""The share of a text, at its end, that no model is trained on."""


@dataclass(frozen=True)
class Vocabulary:
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


BYTES = Vocabulary(
    lambda text: list(text.encode()),
    lambda ids: b"".join(bytes([i]) if i < 256 else "\N{REPLACEMENT CHARACTER}".encode() for i in ids).decode(errors="replace"),
)
"""For random weights, which know no words: the same with or without a model that brings a tokenizer."""


def vocabulary_of(tokenizer: Any) -> Vocabulary:
    """Of a model with real weights."""
    return Vocabulary(
        lambda text: tokenizer(text, verbose=False)["input_ids"],
        lambda ids: tokenizer.decode(list(ids), skip_special_tokens=True),
    )


def split(text: str, vocabulary: Vocabulary, n: int, windows: int) -> tuple[Tensor, Tensor]:
    """Tokens to train on, and the held-out ones after them, at most `windows` times `n`."""
    ids = torch.tensor(vocabulary.encode(text))
    cut = int(len(ids) * (1 - TESTED))
    if cut <= n:
        raise ValueError(f"the text has {len(ids):,} tokens, and windows of {n:,} are wanted; give a longer one with --text")
    return ids[:cut], ids[cut:][: windows * n]


def windows_of(ids: Tensor, n: int, seed: int, device: str) -> Iterator[Tensor]:
    """Windows `[1, n]` at random places, the same ones for the same seed."""
    order = torch.Generator().manual_seed(seed)
    while True:
        first = int(torch.randint(len(ids) - n, (), generator=order))
        yield ids[None, first : first + n].to(device)
