"""A step of a whole model in a CUDA graph: one launch for each token, whatever lies between the layers' attention."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from nearfield.cells.cache.graph import check_capturable
from nearfield.cells.cache.state import CacheState
from nearfield.cells.cache.store import CellStore
from nearfield.hf.cache import CellCache, CellLayer
from nearfield.hf.requests import RequestStores
from nearfield.kernels import backends

_log = logging.getLogger("nearfield")

LOOKING = ("dynamic", "longrope")
"""Rotary positions that depend on how long the text is, which the host has to know."""

IGNORED = {"attention_mask", "use_cache", "return_dict", "logits_to_keep", "token_type_ids"}
"""What a model is given at a step besides its tokens, their positions and its cache, and what a graph has no use for: the cache
knows its padding, and all else is as it was when the graph was captured."""


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    reads: list[tuple[Any, ...]]


class ModelStep:
    """`step(ids, positions)`: the logits `[batch, 1, vocabulary]` after one more token of each entry, `[batch, 1]`.

    The step is captured in a CUDA graph: the model's layers, the keys that they append, and their attention. One graph serves all
    steps until a segment is closed, or anything else moves what it reads; then it is captured again. The logits are a tensor that
    the next step overwrites.
    """

    def __init__(self, model: Any, cache: CellCache) -> None:
        self.model, self.cache = model, cache
        self.forward = model.forward
        self._pool: Any = None
        self._captured: Captured | None = None
        self.captures = 0
        """how often it was captured"""

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        stores = stores_of(self.cache)
        with backends.device_guard(ids.device):
            if self._captured is None or not all(map(_serves, stores, self._captured.reads)) or ids.shape != self.ids.shape:
                self._captured = None
                self._capture(stores, ids, positions)
            captured = self._captured
            assert captured is not None
            self.ids.copy_(ids)
            self.positions.copy_(positions)
            states = [_state(store) for store in stores]
            for state in states:
                state.sync_device_length()
            for state in states:
                state.device_length.known = None  # until it is certain what has run
            captured.graph.replay()
        grown = [state.advanced(1) for state in states]
        with self.cache.in_one_go("a step"):
            for store, state in zip(stores, grown, strict=True):
                state.device_length.known = state.length
                store.state = state
        return captured.logits

    def _capture(self, stores: list[CellStore], ids: Tensor, positions: Tensor) -> None:
        self.ids, self.positions = ids.clone(), positions.clone()
        for store in stores:
            store.close()
            store.reserve(store.sizes.next_close(store.closed) - store.length)
        options: dict[str, Any] = {"input_ids": self.ids, "position_ids": self.positions, "past_key_values": self.cache}
        options["use_cache"] = True
        if "logits_to_keep" in inspect.signature(self.forward).parameters:
            options["logits_to_keep"] = 1
        # Outside of the graph first: it compiles kernels, and the device learns the number of keys.
        side, here = torch.cuda.Stream(ids.device), torch.cuda.current_stream(ids.device)
        side.wait_stream(here)
        with torch.cuda.stream(side), _on_trial(self.cache):
            self.forward(**options)
        here.wait_stream(side)
        for store in stores:
            _state(store).sync_device_length()
        self._pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        graph = torch.cuda.CUDAGraph()
        with _on_trial(self.cache), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            logits = self.forward(**options).logits
        self._captured = Captured(graph, logits, [_reads(_state(store)) for store in stores])
        self.captures += 1


def _reads(state: CacheState) -> tuple[Any, ...]:
    """What a captured step reads: while these are the same objects, they lie where they lay."""
    keys, values = state.keys, state.values
    return keys.storage, values.storage, keys.base, values.base, state.sinks, state.tables, state.device_length.tensor


def _serves(store: CellStore, reads: tuple[Any, ...]) -> bool:
    """Whether a graph that was captured for `reads` is right for the next step of a store."""
    state = _state(store)
    has_room = state.length - state.keys.offset < state.keys.storage.shape[2]
    in_time = state.length < store.sizes.next_close(state.closed)
    return has_room and in_time and state.key_padding is None and all(x is y for x, y in zip(_reads(state), reads, strict=True))


def _state(store: CellStore) -> CacheState:
    assert store.state is not None
    return store.state


@contextmanager
def _on_trial(cache: CellCache) -> Iterator[None]:
    """Steps of copies, which share memory with the stores: these do not notice what is written behind their keys."""
    layers = [layer for layer in cache.layers if isinstance(layer, CellLayer)]
    stores = [layer.store for layer in layers]
    for layer in layers:
        layer.store = layer.store.on_trial() if isinstance(layer.store, RequestStores) else copy.copy(layer.store)
    try:
        yield
    finally:
        for layer, store in zip(layers, stores, strict=True):
            layer.store = store


def stores_of(cache: CellCache) -> list[CellStore]:
    """All stores of a cache, layer by layer. Raises TypeError where a layer keeps its keys in some other way."""
    found: list[Any] = []
    for layer in cache.layers:
        store = getattr(layer, "store", None)
        found += store.stores if isinstance(store, RequestStores) else [store]
    if not all(isinstance(store, CellStore) for store in found):
        raise TypeError("every layer must have a CellStore")
    return found


def why_not(model: Any, cache: CellCache) -> str | None:
    """What keeps the steps of a model from being captured; None: nothing."""
    device = model.device
    if not backends.runs_triton(device):
        return f"the model is on {device}, where no Triton kernels run"
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    ropes = [rope] if "rope_type" in rope else [x for x in rope.values() if isinstance(x, dict)]  # one for each kind of layer
    kinds = {str(x.get("rope_type", "default")) for x in ropes}
    if not kinds.isdisjoint(LOOKING):
        return f"its positions ({', '.join(sorted(kinds))}) look at the length of the text at every step"
    try:
        stores = stores_of(cache)
    except TypeError:
        return "a layer of its cache has a window, or an index"
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    for store in stores:
        if store.state is None:
            return "the cache is empty"
        like = store.state.keys.storage
        try:
            check_capturable(store, like.new_empty(1, 1, 1, like.shape[3]).expand(like.shape[0], heads, 1, -1))
        except ValueError as error:
            return str(error)
    return None


@contextmanager
def stepping(model: Any, cache: CellCache, graph: bool | None) -> Iterator[None]:
    """`model(...)` with one new token per entry, and this cache, goes by a graph where it can. `graph`: None if it need not."""
    forward = model.forward
    step = ModelStep(model, cache)
    told = False

    @functools.wraps(forward)
    def stepped(*args: Any, **options: Any) -> Any:
        nonlocal told
        if args or not _is_step(options, cache):
            return forward(*args, **options)
        reason = why_not(model, cache) if step.captures == 0 else None
        if reason is None:
            logits: Any = step(options["input_ids"], options["position_ids"])
            return CausalLMOutputWithPast(logits=logits, past_key_values=cache)
        if graph:
            raise ValueError(f"graph=True, but {reason}; leave it out, and steps are served without a graph")
        if not told:
            _log.info("steps are served without a CUDA graph: %s", reason)
            told = True
        return forward(*args, **options)

    own = model.__dict__.get("forward")  # of this model alone: somebody else has put it there
    model.forward = stepped
    try:
        yield
    finally:
        del model.forward
        if own is not None:
            model.forward = own


def _is_step(options: dict[str, Any], cache: CellCache) -> bool:
    ids, positions = options.get("input_ids"), options.get("position_ids")
    if options.get("past_key_values") is not cache or not cache.get_seq_length() or ids is None or positions is None:
        return False
    others = {name for name, value in options.items() if value is not None and value is not False}
    others -= IGNORED | {"input_ids", "position_ids", "past_key_values"}
    return ids.dim() == 2 and ids.shape[1] == 1 and positions.shape == ids.shape and not others
