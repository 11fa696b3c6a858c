"""Models of Transformers whose answers, and prompts where a rule is for them too, read keys by a rule."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from nearfield import _compat
from nearfield.app.peers.rules import Notes, Rows, Rule, budget_of, exact
from nearfield.cells.cache.store import CellStore
from nearfield.cells.partition.by_queries import LATEST

# Last: without Transformers, nearfield.hf says what to install.
from nearfield.hf import cache as _cache  # noqa: F401  isort: skip
from transformers import AttentionInterface, AttentionMaskInterface  # isort: skip
from transformers.cache_utils import DynamicCache, DynamicLayer  # isort: skip
from transformers.integrations.sdpa_attention import sdpa_attention_forward  # isort: skip
from transformers.masking_utils import sdpa_mask  # isort: skip

NAME = "nearfield-peer"
OBSERVED = 32
"""How many of the last queries of a prompt rules look at, where they look at any."""
KEPT = max(OBSERVED, LATEST)
"""How many are kept: a `CellCache` looks at more."""
LOGITS = 1 << 27
"""So many logits are made at a time where a prompt is read by a rule."""


class PeerLayer(DynamicLayer):
    """Keys and values of one layer, the last queries of the prompt, and what a rule has noted."""

    def __init__(self) -> None:
        super().__init__()
        self.queries: Tensor | None = None
        self.notes: Notes = {}
        self.noted: dict[Rule, Notes] = {}
        """by rules whose notes are the same for every budget; shared by the copies that answer by a rule"""
        self.grouped: CellStore | None = None
        """the same keys in cells, as they were asked for last"""
        self.budget = 0
        self.scale = 1.0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        # Another object with the same numbers, which the layer does not hold: else old keys would live on in a circle.
        found: Any = keys.view_as(keys)
        found.peer = self
        return found, values


class PeerCache(DynamicCache):
    """A cache of `PeerLayer`s; layers with a window are those of Transformers, and are read exactly."""

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.layers = [PeerLayer() if type(layer) is DynamicLayer else layer for layer in self.layers]

    def by_rule(self, rule: Rule, share: float) -> PeerCache:
        """A cache with the same prompt that answers by a rule, with a share of its keys as the budget. This one stays."""
        made = copy.copy(self)
        made.layers = [copy.copy(layer) for layer in self.layers]
        for layer in made.layers:
            if isinstance(layer, PeerLayer):
                layer.budget = budget_of(share, layer.get_seq_length())
                layer.notes = self._notes(rule, layer)
        return made

    @staticmethod
    def _notes(rule: Rule, layer: Any) -> Notes:
        found = layer.noted.get(rule)
        if found is None:
            found = rule.notes(layer.queries[:, :, -OBSERVED:], layer.keys, layer.values, layer.scale, layer.budget)
            if not rule.notes_need_budget:
                layer.noted[rule] = found
        return found


class PeerAttention:
    """The attention function of such a model. `share`: of the prompt's keys that its rows read by the rule, half as many as an
    answer's tokens do, since a row sees half of them on average; None: prompts are read exactly."""

    def __init__(self, rule: Rule | None, share: float | None = None) -> None:
        self.rule, self.share = rule, share

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *args: Any, **options: Any
    ) -> tuple[Tensor, None]:
        layer: Any = getattr(key, "peer", None)
        scaling = options.get("scaling")
        scale = query.shape[3] ** -0.5 if scaling is None else float(scaling)
        place = getattr(layer, "place", None)
        if place is not None:  # of an `AnswerCache`
            rows = Rows(query, key, value, scale, layer.counts, module.layer_idx, place.tensor[:, None])
            found = exact(rows) if self.rule is None else self.rule.attend(rows, layer.budget, layer.notes)
            return found.transpose(1, 2).contiguous(), None
        is_prompt = query.shape[2] == key.shape[2]
        if layer is not None and is_prompt:
            layer.queries, layer.scale = query[:, :, -KEPT:].clone(), scale
        by_rule = layer is not None and self.rule is not None and (not is_prompt or self.share is not None)
        if not by_rule:
            return sdpa_attention_forward(module, query, key, value, mask, *args, **options)
        assert layer is not None
        assert self.rule is not None
        if is_prompt:
            assert self.share is not None
            budget = budget_of(self.share / 2, key.shape[2])
            found = prompt_by_rule(self.rule, query, key, value, scale, budget, module.layer_idx)
        else:
            counts = None if mask is None else mask[:, 0, -1].bool()
            found = self.rule.attend(Rows(query, key, value, scale, counts, module.layer_idx), layer.budget, layer.notes)
        return found.transpose(1, 2).contiguous(), None


def prompt_by_rule(rule: Rule, query: Tensor, key: Tensor, value: Tensor, scale: float, budget: int, layer: int = 0) -> Tensor:
    """Causal attention of a prompt without padding, `[batch, heads, length, dim]`, some rows at a time."""
    length = key.shape[2]
    step = max(16, LOGITS // (query.shape[0] * query.shape[1] * length))
    found = []
    for start in range(0, length, step):
        stop = min(length, start + step)
        rows = Rows(query[:, :, start:stop], key[:, :, :stop], value[:, :, :stop], scale, layer=layer)
        found.append(rule.attend(rows, budget, {}))
    return torch.cat(found, 2)


def _mask(*args: Any, **options: Any) -> Tensor | None:
    """None for the single row of a step: it sees all keys there are, and padding is known to the cache."""
    return None if options.get("q_length") == 1 else sdpa_mask(*args, **options)


@contextmanager
def by_peer(model: Any, rule: Rule | None, share: float | None = None) -> Iterator[None]:
    """Let the layers of a model attend by a rule where they have a `PeerCache`, and afterwards as they did before."""
    before = _compat.attention_name(model)
    AttentionInterface.register(NAME, PeerAttention(rule, share))
    AttentionMaskInterface.register(NAME, _mask)
    model.set_attn_implementation(NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)
