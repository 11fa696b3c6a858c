"""`StepGraph`: append a key and attend, captured in a CUDA graph, so that a step is one launch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from nearfield.cells.cache.segments import PER_CELL
from nearfield.cells.cache.state import CacheState
from nearfield.cells.cache.store import CellStore
from nearfield.kernels import backends


class StepGraph:
    """`step()` appends `key` and `value` `[batch, heads, 1, dim]` and returns the attention of `query`.

    Before each step, the caller writes the next key, value and query into these tensors. The output is a tensor that the next
    step overwrites.

    The device counts the keys, so that one graph serves all steps until the next segment is closed, or the room that it was given
    is full. Then it is captured again, as it is when anything else has moved the tensors that it reads. Keys may be appended and
    cropped between steps.
    """

    def __init__(self, store: CellStore, key: Tensor, value: Tensor, query: Tensor, scale: float | None = None) -> None:
        if not backends.runs_triton(key.device) or key.shape[2] != 1 or query.shape[2] != 1:
            raise ValueError(
                f"a graph takes one key at a time, on a GPU that runs the Triton kernels; got {tuple(key.shape)} on {key.device}"
            )
        self.store, self.scale = store, scale
        self.inputs = key, value, query
        with backends.device_guard(key.device):
            self._capture(check_capturable(store, query))

    def __call__(self) -> Tensor:
        state = check_capturable(self.store, self.inputs[2])
        with backends.device_guard(state.sinks.device):
            if self.store.is_due(1):
                return self._look()
            in_time = state.length < self.store.sizes.next_close(state.closed)
            if not in_time or not state.has_room or self._reads(state) != self._captured[2]:
                state = self._capture(state)
            graph, output, _ = self._captured
            state.sync_device_length()
            state.device_length.known = None  # until it is certain what has run
            graph.replay()
        # What the graph wrote lies behind the keys of the state: only this counts it.
        grown = state.advanced(1)
        grown.device_length.known = grown.length
        self.store.state = grown
        return output

    def _reads(self, state: CacheState) -> list[Any]:
        return [*captured_reads(state), self.store.opening]

    def _look(self) -> Tensor:
        """A step that is compared with exact attention, which no graph does."""
        key, value, query = self.inputs
        trial = copy.copy(self.store)
        trial.append(key, value)
        found = trial.attend(query, self.scale)
        self.store.state = trial._require_state()
        self._captured[1].copy_(found)
        return self._captured[1]

    def _capture(self, state: CacheState) -> CacheState:
        """Capture a step. Returns the state in which the store is then: with the segments closed that the step needs closed."""
        store, (key, value, query) = self.store, self.inputs
        store.close()
        store.reserve(store.sizes.room(store.closed, store.length))
        state = check_capturable(store, query)
        # Steps of copies, which share memory with the store: it does not notice what they write behind its keys.
        # One outside of the graph first: it compiles the kernels, and the device learns the number of keys.
        side = torch.cuda.Stream(key.device)
        side.wait_stream(torch.cuda.current_stream(key.device))
        with torch.cuda.stream(side):
            trial = store.unguarded()
            trial.append(key, value)
            trial.attend(query, self.scale)
            state.sync_device_length()
        torch.cuda.current_stream(key.device).wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            trial = store.unguarded()
            trial.append(key, value)
            output = trial.attend(query, self.scale)
        self._captured = graph, output, self._reads(state)
        return state


def check_capturable(store: CellStore, query: Tensor) -> CacheState:
    """The state of a store whose steps can be captured in a graph. Raises ValueError on any other."""
    from nearfield.cells.cache import decode

    state = store.state
    if state is None or state.key_padding is not None or store.audit or store.watch is not None:
        raise ValueError("a graph needs a store with keys, without padding, that is neither audited nor watched")
    if not isinstance(state, CacheState):
        raise ValueError("keys are shared out over ranks, and what these exchange is in no graph; call store.append and attend")
    missing = decode.unsupported(state, query, store.probes)
    if missing is not None:
        raise ValueError(f"the Triton kernels do not serve {missing}; call store.append and store.attend instead")
    return state


def captured_reads(state: CacheState) -> list[Any]:
    """What a captured step reads, and where it is in memory: the graph is valid as long as this stays the same."""
    tables = state.tables
    tensors = [
        state.keys.storage,
        state.values.storage,
        state.keys.base,
        state.values.base,
        state.sinks,
        tables.cross,
        tables.pooled,
        state.device_length.tensor,
    ]
    tensors += [getattr(tables, name).storage for name in PER_CELL]
    tensors += state.resident.pool if state.resident is not None and state.resident.pool is not None else ()
    return [tuple(state.bounds), *((x.data_ptr(), x.shape) for x in tensors if x is not None)]
