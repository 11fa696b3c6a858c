"""Characters as numbers: the text to train on, the text to judge by, and windows of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from experiments.corpus import Corpus

TRAINED = 0.9
"""The part of a text that is trained on; the rest is for validation."""


@dataclass(frozen=True)
class Text:
    symbols: str
    """every character of the text, sorted; its place is its number"""
    train: Tensor
    validation: Tensor
    """numbers, `[length]`"""

    def characters(self, ids: Tensor) -> str:
        return "".join(self.symbols[i] for i in ids.tolist())


def numbered(corpus: Corpus, longest: int, device: str) -> Text:
    """The text on `device`; ValueError if it is too short for windows of `longest` characters."""
    symbols = "".join(sorted(set(corpus.text)))
    number = {symbol: i for i, symbol in enumerate(symbols)}
    ids = torch.tensor([number[symbol] for symbol in corpus.text], dtype=torch.long)
    split = int(TRAINED * len(ids))
    if len(ids) - split < longest + 2:
        least = int((longest + 2) / (1 - TRAINED)) + 1
        raise ValueError(
            f"{corpus.name} has {len(ids):,} characters, and a context of {longest:,} needs {least:,}; "
            "give a longer text with --text"
        )
    return Text(symbols, ids[:split].to(device), ids[split:].to(device))


def windows(ids: Tensor, context: int, count: int) -> Tensor:
    """`[count, context + 1]`: evenly spaced windows, the first and the last character among them."""
    starts = torch.linspace(0, len(ids) - context - 1, count).long().to(ids.device)
    return at(ids, starts, context)


def at(ids: Tensor, starts: Tensor, context: int) -> Tensor:
    """`[starts, context + 1]`: what is read, and one character on, what is to be said."""
    return ids[starts[:, None] + torch.arange(context + 1, device=ids.device)]
