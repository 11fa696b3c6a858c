"""A step in a CUDA graph: append a key and attend, again and again, without Python in between."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from nearfield.cells.cache.segments import MOMENTS
from nearfield.cells.cache.state import CacheState
from nearfield.cells.cache.store import CellStore
from nearfield.kernels import backends


class StepGraph:
    """`step()` appends `key` and `value` `[batch, heads, 1, dim]` and returns the attention of `query`, as they are by then.

    The caller writes the next key, value and query into these tensors. How many keys there are is counted on the device, so that
    one graph serves all steps up to the next segment that is closed; then it is captured again. So it is if anything else has
    moved what it reads. Between steps keys may be appended and cropped.
    """

    def __init__(self, store: CellStore, key: Tensor, value: Tensor, query: Tensor, scale: float | None = None) -> None:
        if not key.is_cuda or key.shape[2] != 1 or query.shape[2] != 1:
            raise ValueError(f"a graph takes one key at a time, on a GPU; got {tuple(key.shape)} on {key.device}")
        self.store, self.scale = store, scale
        self.inputs = key, value, query
        with backends.device_guard(key.device):
            self._capture(check_step(store, query))

    def __call__(self) -> Tensor:
        state = check_step(self.store, self.inputs[2])
        with backends.device_guard(state.sinks.device):
            if state.length >= self.store.sizes.next_close(state.closed) or read_of(state) != self._read:
                self._capture(state)
            state.count  # noqa: B018 (tells the device)
            self._graph.replay()
        state.replayed()
        return self.output

    def _capture(self, state: CacheState) -> None:
        store, (key, value, query) = self.store, self.inputs
        length = store.length
        store.close()
        store.reserve(store.sizes.next_close(state.closed) - length)
        # Once as it is, so that everything is compiled and the numbers on the device are those of now.
        side = torch.cuda.Stream(key.device)
        side.wait_stream(torch.cuda.current_stream(key.device))
        with torch.cuda.stream(side):
            store.append(key, value)
            store.attend(query, self.scale)
            store.crop(length)
            state.count  # noqa: B018 (tells the device)
        torch.cuda.current_stream(key.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            store.append(key, value)
            self.output = store.attend(query, self.scale)
        state.replayed(-1)  # captured, and not run
        self._read = read_of(state)


def check_step(store: CellStore, query: Tensor) -> CacheState:
    """What a store holds, if a graph can go on with it."""
    from nearfield.cells.cache import decode

    state = store.state
    if state is None or state.counts is not None or store.audit:
        raise ValueError("a graph goes on with a store that has keys, without padding and without audit")
    missing = decode.unsupported(state, query, store.probes)
    if missing is not None:
        raise ValueError(f"the Triton kernels do not serve {missing}; call store.append and store.attend instead")
    return state


def read_of(state: CacheState) -> list[Any]:
    """What a step reads, and where: a graph is as good as that stays the same."""
    tables = state.tables
    tensors = [
        state.keys.storage,
        state.values.storage,
        state.keys.base,
        state.values.base,
        state.sinks,
        tables.cross,
        tables.pooled,
    ]
    tensors += [getattr(tables, name).storage for name in MOMENTS]
    return [tuple(state.bounds), *((x.data_ptr(), x.shape) for x in tensors if x is not None)]
