"""The keys of one span into cells on a GPU, by the kernels of the engine: for caches, which close a segment at a time."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from nearfield import kernels
from nearfield.kernels.cells_gpu import entry_parts
from nearfield.kernels.cells_plan import CellSettings
from nearfield.kernels.triton.assign import kmeans
from nearfield.kernels.triton.common import dense
from nearfield.kernels.triton.layout import Layout, layout_of
from nearfield.kernels.triton.limit import limit_sizes


def group_keys(keys: Tensor, cells: int, iterations: int, seed: int) -> Tensor:
    """The cells of the keys `[heads, n, dim]`, `[heads, n]`, at most `cells` of them: see `cells_assign.group_keys`."""
    heads, length, _ = keys.shape
    keys, layout = dense(keys), _layout(length, cells, keys.device)
    found = torch.empty(heads, 1, length, dtype=torch.int32, device=keys.device)
    with kernels.on(keys.device):
        for some in entry_parts(heads):
            kmeans(keys[some], layout, iterations, seed, found[some])
            limit_sizes(found[some], layout)
    return found[:, 0]


# Not among the layouts of the engine: segments get longer and longer, and only the layers of a model ask for the same one.
@lru_cache(maxsize=4)
def _layout(length: int, cells: int, device: torch.device) -> Layout:
    # Not a whole number of keys per cell, where that is what it takes to have just so many cells.
    cell_size = max(1.0, length / cells)
    none = {"segment": 0, "window": 0, "sinks": 0, "branching": 0, "unfold": 0, "samples": 0}
    settings = CellSettings(group=1, cell_size=cell_size, probes=1, **none)  # type: ignore[arg-type]
    return layout_of.__wrapped__(length, settings, device)
