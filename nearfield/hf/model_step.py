"""A step of a whole model in a CUDA graph: one launch for each token, whatever lies between the layers' attention."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from nearfield._compat import compiled_steps
from nearfield.cells.cache.attention import Opening
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


EMPTY = "a request has no keys yet"
_LOCK = threading.Lock()


class Captured(NamedTuple):
    graph: torch.cuda.CUDAGraph
    logits: Tensor
    reads: list[tuple[Any, ...]]
    openings: list[Opening]


class ModelStep:
    """`step(ids, positions)`: the logits `[batch, 1, vocabulary]` after one more token of each entry, `[batch, 1]`.

    The step is captured in a CUDA graph: the model's layers, the keys that they append, and their attention. One graph serves all
    steps until a segment is closed, or anything else moves what it reads; then it is captured again. The logits are a tensor that
    the next step overwrites.

    `compile`: what lies between the attention of two layers is compiled by torch.compile, so that it takes fewer kernels.
    """

    def __init__(self, model: Any, cache: CellCache, compile: bool = False) -> None:
        self.model, self.cache = model, cache
        self.forward = compiled_steps(model.forward) if compile else model.forward
        self._captured: Captured | None = None
        self.captures = 0
        """how often it was captured"""

    def is_ready(self, ids: Tensor) -> bool:
        """Whether the graph that was captured serves the next step."""
        captured = self._captured
        if captured is None or ids.shape != self.ids.shape:
            return False
        return all(map(_serves, stores_of(self.cache), captured.reads, captured.openings))

    def prepare(self, ids: Tensor, positions: Tensor) -> None:
        """Capture a graph for the next step. If that fails, nothing has happened to the cache."""
        self.cache.check_torn()
        self._captured = None  # Its memory is needed.
        with backends.device_guard(ids.device):
            self._captured = self._capture(ids, positions)

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        if not self.is_ready(ids):
            self.prepare(ids, positions)
        return self.replay(ids, positions)

    def replay(self, ids: Tensor, positions: Tensor) -> Tensor:
        """The step, by the graph that is ready for it."""
        self.cache.check_torn()
        with backends.device_guard(ids.device):
            captured = self._captured
            assert captured is not None
            self.ids.copy_(ids)
            self.positions.copy_(positions)
            stores = stores_of(self.cache)
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

    def _capture(self, ids: Tensor, positions: Tensor) -> Captured:
        self.ids, self.positions = ids.clone(), positions.clone()
        stores = stores_of(self.cache)
        for store in stores:
            store.close()
            store.reserve(store.sizes.room(store.closed, store.length))
        options: dict[str, Any] = {"input_ids": self.ids, "position_ids": self.positions, "past_key_values": self.cache}
        options["use_cache"] = True
        options |= last_logits(self.forward)
        # Outside of the graph first: it compiles kernels, and the device learns the number of keys.
        side, here = torch.cuda.Stream(ids.device), torch.cuda.current_stream(ids.device)
        side.wait_stream(here)
        try:
            with torch.cuda.stream(side), _on_trial(self.cache):
                self.forward(**options)
        finally:
            here.wait_stream(side)
        for store in stores:
            _state(store).sync_device_length()
        graph = torch.cuda.CUDAGraph()  # with memory of its own: that of the last one went with it
        with _on_trial(self.cache), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            logits = self.forward(**options).logits
        self.captures += 1
        return Captured(graph, logits, [_reads(_state(store)) for store in stores], [store.opening for store in stores])


def last_logits(forward: Any) -> dict[str, int]:
    """The option that lets a model compute the logits of the last token alone, where it has one."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(forward).parameters else {}


def looking_positions(model: Any) -> list[str]:
    """The kinds of rotary positions, if some of them depend on the length of the text; else none."""
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    ropes = [rope] if "rope_type" in rope else [x for x in rope.values() if isinstance(x, dict)]  # one for each kind of layer
    kinds = {str(x.get("rope_type", "default")) for x in ropes}
    return [] if kinds.isdisjoint(LOOKING) else sorted(kinds)


def _reads(state: CacheState) -> tuple[Any, ...]:
    """What a captured step reads: while these are the same objects, they lie where they lay."""
    keys, values = state.keys, state.values
    pool = None if state.resident is None else state.resident.pool
    return keys.storage, values.storage, keys.base, values.base, state.sinks, state.tables, state.device_length.tensor, pool


def _serves(store: CellStore, reads: tuple[Any, ...], opening: Opening) -> bool:
    """Whether a graph that was captured for `reads`, and opens such cells, is right for the next step of a store."""
    state = store.state
    if state is None or store.audit or store.watch is not None or store.is_due(1) or store.opening != opening:
        return False
    in_time = state.length < store.sizes.next_close(state.closed)
    has_moved = any(x is not y for x, y in zip(_reads(state), reads, strict=True))
    return state.has_room and in_time and state.key_padding is None and not has_moved


def _state(store: CellStore) -> CacheState:
    assert store.state is not None
    return store.state


@contextmanager
def _on_trial(cache: CellCache) -> Iterator[None]:
    """Steps of copies, which share memory with the stores: these do not notice what is written behind their keys."""
    layers = [layer for layer in cache.layers if isinstance(layer, CellLayer)]
    stores = [layer.store for layer in layers]
    for layer in layers:
        if isinstance(layer.store, RequestStores):
            layer.store = layer.store.on_trial()
        else:
            layer.store = layer.store.unguarded() if isinstance(layer.store, CellStore) else copy.copy(layer.store)
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


def _guarded(cache: CellCache) -> list[CellStore]:
    """The stores that look at their error now and then, in a step without a graph."""
    layers = [getattr(layer, "store", None) for layer in cache.layers]
    stores = [store for own in layers for store in (own.stores if isinstance(own, RequestStores) else [own])]
    return [store for store in stores if isinstance(store, CellStore) and store.guard is not None]


def why_not(model: Any, cache: CellCache, mask: Tensor | None = None) -> str | None:
    """What keeps the next step of a model from being captured; None: nothing. With a mask, this waits for the device."""
    device = model.device
    if not backends.runs_triton(device):
        return f"the model is on {device}, where no Triton kernels run"
    if any(x.device != device for x in model.parameters()):
        return "the model is on several devices"
    looking = looking_positions(model)
    if looking:
        return f"its positions ({', '.join(looking)}) look at the length of the text at every step"
    try:
        stores = stores_of(cache)
    except TypeError:
        return "a layer of its cache has a window, or an index"
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    for store in stores:
        if store.state is None:
            return EMPTY
        like = store.state.keys.storage
        query = like.new_empty(1, 1, 1, like.shape[3]).expand(like.shape[0], heads, 1, -1)
        try:
            check_capturable(store, query)
        except ValueError as error:
            return str(error)
    if mask is None:
        return None
    first = cache.layers[0].store  # type: ignore[union-attr]
    expected = first.counts(1).to(mask.device) if isinstance(first, RequestStores) else torch.ones_like(mask, dtype=torch.bool)
    return None if torch.equal(mask.bool(), expected) else "its attention_mask hides keys"


@contextmanager
def stepping(model: Any, cache: CellCache, graph: bool | None, compile: bool = False) -> Iterator[None]:
    """`model(...)` with one new token per entry, and this cache, goes by a graph where it can. `graph`: None if it need not."""
    forward, step = model.forward, ModelStep(model, cache, compile)
    asked = "compile=True" if compile else "graph=True"
    told: set[str] = set()
    failed: str | None = None

    def tell(reason: str) -> None:
        # The first step of a request without keys is never captured, and those after it may be.
        if graph and reason != EMPTY:
            raise ValueError(f"{asked}, but {reason}; leave it out, and steps are served without a graph")
        if reason not in told:
            _log.info("steps are served without a CUDA graph: %s", reason)
            told.add(reason)

    @functools.wraps(forward)
    def stepped(*args: Any, **options: Any) -> Any:
        nonlocal failed
        ids = options.get("input_ids")
        if args or options.get("past_key_values") is not cache or ids is None or ids.dim() != 2 or ids.shape[1] != 1:
            return forward(*args, **options)
        guarded = _guarded(cache)
        if any(store.is_due(1) for store in guarded):
            for store in guarded:  # all in one step, so that most others are left to the graph
                store.look_next()
            return forward(**options)
        reason = failed or _unknown(options)
        # With many requests, to ask takes as long as a few kernels, so each step asks once.
        if reason is None and not step.is_ready(ids):
            reason = why_not(model, cache, options.get("attention_mask") if step.captures == 0 else None)
            try:
                if reason is None:
                    step.prepare(ids, options["position_ids"])
            except RuntimeError as error:
                if graph:
                    raise
                failed = f"capturing one failed ({error})"
                _log.warning("a model's step could not be captured in a CUDA graph, and goes on without: %s", error)
                return forward(**options)
        if reason is not None:
            tell(reason)
            return forward(**options)
        logits: Any = step.replay(ids, options["position_ids"]).clone()
        return CausalLMOutputWithPast(logits=logits, past_key_values=cache)

    obstacle = None if backends.runs_triton(model.device) else why_not(model, cache)
    with _LOCK:
        own = model.__dict__.get("forward")  # of this model alone: somebody else has put it there
        if hasattr(own, "nearfield_step"):
            obstacle = "this model is generating by a graph already"
        if obstacle is None:
            stepped.nearfield_step = step  # type: ignore[attr-defined]
            model.forward = stepped
    if obstacle is not None:
        tell(obstacle)
    try:
        yield
    finally:
        if obstacle is None:
            with _LOCK:
                del model.forward
                if own is not None:
                    model.forward = own


def _unknown(options: dict[str, Any]) -> str | None:
    """What a step is given, or asked for, that a graph does not know; None: nothing."""
    ids, positions = options["input_ids"], options.get("position_ids")
    if positions is None or positions.shape != ids.shape:
        return "the step has no position_ids [batch, 1]"
    others = {name for name, value in options.items() if value is not None and value is not False}
    others -= IGNORED | {"input_ids", "position_ids", "past_key_values"}
    return f"the step has {', '.join(sorted(others))}" if others else None
