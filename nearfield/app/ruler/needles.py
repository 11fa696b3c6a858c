"""Where the needles of a prompt are, and which heads opened them while they wrote the answer."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from nearfield.app.ruler.answers import read
from nearfield.app.ruler.prompts import Prompt
from nearfield.app.ruler.ways import Way
from nearfield.cells.cache import OpenedKeys
from nearfield.hf.cache import CellLayer

STEPS = 32
"""Tokens of an answer that are looked at, at most: what was asked for comes first."""


@dataclass(frozen=True)
class Opened:
    """What the heads of all layers that have cells did, in some steps of an answer."""

    layers: list[int]
    steps: int
    opened: list[list[int]]
    """by layer and head: in so many steps it opened a cell with a key of a needle"""
    looked: list[list[int]]
    """by layer and head: and gave the needles at least a fifth of its weights"""


def places(prompt: Prompt, tokenizer: Any) -> list[int]:
    """The positions of all tokens of all needles that are asked for; none where a task has no needles."""
    spans = [match.span() for pattern in _patterns(prompt) for match in re.finditer(pattern, prompt.text)]
    if not spans or not getattr(tokenizer, "is_fast", False):
        return []
    found = tokenizer(prompt.text, add_special_tokens=prompt.template == "raw", return_offsets_mapping=True, verbose=False)
    offsets = found["offset_mapping"]
    return [i for i, (first, stop) in enumerate(offsets) if any(first < b and a < stop for a, b in spans)]


def _patterns(prompt: Prompt) -> list[str]:
    """What the generators write around what they ask for."""
    if prompt.task.startswith("niah"):
        return [rf"One of the special magic \w+ for \S+ is: {re.escape(value)}\." for value in prompt.outputs]
    if prompt.task == "vt":
        return [rf"VAR {re.escape(name)} = (?:VAR )?\w+" for name in prompt.outputs]
    return []


@torch.no_grad()
def opened_by_heads(model: Any, way: Way, prompt: Sequence[int], answer: Sequence[int], wanted: Sequence[int]) -> Opened | None:
    """Read a prompt again and write the first tokens of an answer again, counting what is opened.

    Counting takes a slower path than an answer does, so an answer itself is not counted. None: no layer has cells.
    """
    ids = torch.tensor(prompt, device=model.device)
    cache = way.adopt(read(model, way, ids).cache, model.config)
    positions = torch.tensor(wanted, dtype=torch.int64)
    watches = {i: OpenedKeys(positions) for i, layer in enumerate(cache.layers) if isinstance(layer, CellLayer)}
    cache.watch(watches)
    steps = [prompt[-1], *answer[:-1]][:STEPS]
    with way.writing(model, len(prompt)):
        for token in steps:
            model(input_ids=torch.tensor([[token]], device=model.device), past_key_values=cache, use_cache=True)
    served = {layer: one for layer, one in watches.items() if one.rows}
    if not served:
        return None
    return Opened(
        list(served),
        max(one.rows for one in served.values()),
        [one.opened.tolist() for one in served.values()],
        [one.looked.tolist() for one in served.values()],
    )
