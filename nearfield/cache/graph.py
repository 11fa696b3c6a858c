"""A step in a CUDA graph: append a key and attend, again and again, without Python in between."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.cache.store import CellStore


class StepGraph:
    """`step()` appends `key` and `value` `[batch, heads, 1, dim]` and returns the attention of `query`, as they are by then.

    The caller writes the next key, value and query into these tensors. How many keys there are is counted on the device, so that
    one graph serves all steps up to the next segment that is closed; then it is captured again.
    """

    def __init__(self, store: CellStore, key: Tensor, value: Tensor, query: Tensor, scale: float | None = None) -> None:
        if not key.is_cuda or key.shape[2] != 1 or query.shape[2] != 1:
            raise ValueError(f"a graph takes one key at a time, on a GPU; got {tuple(key.shape)} on {key.device}")
        if store.held is None or store.held.counts is not None or store.audit:
            raise ValueError("a graph goes on with a store that has keys, without padding and without audit")
        self.store, self.scale = store, scale
        self.inputs = key, value, query
        self._capture()

    def __call__(self) -> Tensor:
        held = self.store.held
        assert held is not None
        if self.store.settings.closed_before(held.length) != self._segments:
            self._capture()
        self._graph.replay()
        held.replayed()
        return self.output

    def _capture(self) -> None:
        store, (key, value, query) = self.store, self.inputs
        length, held = store.length, store.held
        assert held is not None
        store.close()
        store.reserve(store.settings.length(held.segments))
        # Once as it is, so that everything is compiled and the numbers on the device are those of now.
        side = torch.cuda.Stream(key.device)
        side.wait_stream(torch.cuda.current_stream(key.device))
        with torch.cuda.stream(side):
            store.append(key, value)
            store.attend(query, self.scale)
            store.crop(length)
            held.numbers  # noqa: B018 (tells the device)
        torch.cuda.current_stream(key.device).wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            store.append(key, value)
            self.output = store.attend(query, self.scale)
        held.replayed(-1)  # captured, and not run
        self._segments = held.segments
