"""A key-value cache that a new token searches: it reads the cells it opens, and of all others only their moments.

In reading order: `steps` (what all stores of keys share), `buffers` (tensors that grow), `segments` (how a segment becomes
cells), `resident` (which offloaded cells are on the card), `state` (what a store holds), `heavy` (which keys are looked at most),
`guard` (a look at the error now and then), `attention` (of some rows to it, in PyTorch), `decode` (the same for the latest row,
by Triton kernels), `store` (what a user calls) and `graph` (a step in a CUDA graph).
"""

from __future__ import annotations

from nearfield.cells.cache.graph import StepGraph
from nearfield.cells.cache.guard import Guard
from nearfield.cells.cache.heavy import HeavyKeys, OpenedKeys, ReadKeys
from nearfield.cells.cache.steps import StepError
from nearfield.cells.cache.store import CellStore

__all__ = ["CellStore", "Guard", "HeavyKeys", "OpenedKeys", "ReadKeys", "StepError", "StepGraph"]
