"""Answers to several prompts at a time, by a rule or exactly: the likeliest tokens, on a GPU with the step in a CUDA graph."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from nearfield.app.peers.cache import PeerCache, PeerLayer
from nearfield.app.peers.rules import Notes
from nearfield.hf.cache import joined_windows
from nearfield.hf.model_step import last_logits, looking_positions
from nearfield.kernels import backends

from transformers.cache_utils import Cache, DynamicLayer  # isort: skip

_log = logging.getLogger("nearfield")

ROOM = 128
"""Tokens of an answer that there is room for at first: as many as the longest answers of RULER have."""
ALIGNED = 64
"""Keys have room for a multiple of so many: a GPU has slower products for rows of another length."""


def with_room(length: int, more: int) -> int:
    """How many keys a layer of `length` keys has memory for, to take so many more."""
    return -(-(length + more) // ALIGNED) * ALIGNED


class Place:
    """Where the next token goes, the same for all layers: the host's number, and the device's `[1]`, which a graph reads.

    `missing`: how much padding each entry of the batch has before it.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.length = max(lengths)
        self.missing = [self.length - length for length in lengths]
        self.tensor = torch.tensor([self.length], device=device)
        self._counts: Tensor | None = None

    def counts(self, width: int) -> Tensor | None:
        """`[batch, width]`: False for padding; None: there is none."""
        if not any(self.missing):
            return None
        if self._counts is None or self._counts.shape[1] != width:
            self._counts = (torch.arange(width) >= torch.tensor(self.missing)[:, None]).to(self.tensor.device)
        return self._counts

    def select(self, entries: Sequence[int]) -> None:
        self.missing, self._counts = [self.missing[entry] for entry in entries], None


class AnswerLayer(DynamicLayer):
    """Keys and values `[batch, kv_heads, length, dim]` of several prompts, padded on the left, with room for their answers."""

    def __init__(self, layers: Sequence[PeerLayer], place: Place) -> None:
        super().__init__()
        self.place = place
        first: Any = layers[0]
        self.lazy_initialization(first.keys, first.values)
        room = with_room(place.length, ROOM) - place.length
        self.keys, self.values = (
            torch.cat([F.pad(getattr(x, name), (0, 0, n, room)) for x, n in zip(layers, place.missing, strict=True)])
            for name in ("keys", "values")
        )
        self.budget = max(x.budget for x in layers)
        self.notes = joined_notes([x.notes for x in layers], place.missing)

    @property
    def counts(self) -> Tensor | None:
        assert self.keys is not None
        return self.place.counts(self.keys.shape[2])

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Writes at `place`, which whoever calls the model moves afterwards."""
        assert self.keys is not None
        assert self.values is not None
        at = self.place.tensor + torch.arange(key_states.shape[2], device=key_states.device)
        self.keys.index_copy_(2, at, key_states)
        self.values.index_copy_(2, at, value_states)
        found: Any = self.keys.view_as(self.keys)
        found.peer = self
        return found, self.values

    def get_seq_length(self) -> int:
        return self.place.length

    def reserve(self, more: int) -> None:
        assert self.keys is not None
        assert self.values is not None
        has = self.keys.shape[2]
        if self.place.length + more > has:
            room = with_room(self.place.length, max(ROOM, more)) - has
            self.keys, self.values = (F.pad(x, (0, 0, 0, room)) for x in (self.keys, self.values))

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.notes = {name: x[indices] for name, x in self.notes.items()}


def joined_notes(notes: Sequence[Notes], missing: Sequence[int]) -> Notes:
    """Those of a batch. Padding is in no cluster, and none of it is kept; clusters that others have more of are empty."""
    found = {}
    for name in notes[0]:
        own = [one[name] for one in notes]
        if name.startswith("key"):
            own = [F.pad(x, (n, 0), value=-1 if x.dtype == torch.int64 else False) for x, n in zip(own, missing, strict=True)]
        else:
            most = max(x.shape[2] for x in own)
            own = [F.pad(x, (0, 0, 0, most - x.shape[2])) for x in own]
        found[name] = torch.cat(own)
    return found


class AnswerCache(Cache):
    """The keys and values of prompts that were read by themselves, as one batch that is padded on the left."""

    def __init__(self, caches: Sequence[PeerCache]) -> None:
        layers: list[Any] = caches[0].layers
        device = next(layer.keys.device for layer in layers if layer.keys is not None)
        self.place = Place([cache.get_seq_length() for cache in caches], device)
        super().__init__(layers=[self._joined([cache.layers[i] for cache in caches], i) for i in range(len(layers))])

    def _joined(self, layers: Sequence[Any], number: int) -> Any:
        if isinstance(layers[0], PeerLayer):
            return AnswerLayer(layers, self.place)
        return joined_windows(layers, number, self.place.length)

    def batch_select_indices(self, indices: Tensor) -> None:
        super().batch_select_indices(indices)
        self.place.select(indices.tolist())

    def reserve(self, more: int) -> None:
        """Make room for so many more tokens."""
        for layer in self.layers:
            if isinstance(layer, AnswerLayer):
                layer.reserve(more)


@torch.no_grad()
def write(model: Any, cache: AnswerCache, prompts: Sequence[Tensor], count: int) -> list[Tensor]:
    """Prompts `[length]`, of which the cache has all tokens but the last, each with the `count` tokens that follow it."""
    cache.reserve(count)
    ids = torch.stack([x[-1:] for x in prompts])
    positions = torch.tensor([[len(x) - 1] for x in prompts], device=ids.device)
    last = last_logits(model.forward)

    def step() -> None:
        found = model(input_ids=ids, position_ids=positions, past_key_values=cache, use_cache=True, **last)
        ids.copy_(found.logits[:, -1].argmax(-1, keepdim=True))
        positions.add_(1)
        cache.place.tensor.add_(1)

    run = _captured(step, [ids, positions, cache.place.tensor]) if _is_capturable(model, cache) else step
    tokens = ids.new_empty(count, len(prompts))
    for number in range(count):
        run()
        cache.place.length += 1
        tokens[number] = ids[:, 0]
    return [torch.cat([prompt, own]) for prompt, own in zip(prompts, tokens.T, strict=True)]


def _is_capturable(model: Any, cache: AnswerCache) -> bool:
    is_ours = all(isinstance(layer, AnswerLayer) for layer in cache.layers)
    return model.device.type == "cuda" and is_ours and not looking_positions(model)


def _captured(step: Callable[[], None], state: Sequence[Tensor]) -> Callable[[], None]:
    """The step in a CUDA graph, or the step itself where that fails. `state`: what it changes besides keys and values."""
    device = state[0].device
    kept = [x.clone() for x in state]
    graph, side, here = torch.cuda.CUDAGraph(), torch.cuda.Stream(device), torch.cuda.current_stream(device)
    try:
        with backends.device_guard(device):
            side.wait_stream(here)
            with torch.cuda.stream(side):
                step()
            here.wait_stream(side)
            with torch.cuda.graph(graph):
                step()
        return graph.replay
    except RuntimeError as error:
        _log.warning("a model's step could not be captured in a CUDA graph, and goes on without: %s", error)
        return step
    finally:
        for x, before in zip(state, kept, strict=True):
            x.copy_(before)
