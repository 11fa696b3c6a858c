"""The state of a store as tensors with names, for files, and back."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.cells.cache.state import CacheState
from nearfield.cells.partition import Partition
from nearfield.cells.sizes import CacheSizes

MOMENTS = {
    "start": "start",
    "size": "size",
    "void": "log_exists",
    "centroid": "centroid",
    "variance": "variance",
    "value": "value",
}
"""Moments of cells: the names of their tensors in a file, and of the attributes of `CacheTables`."""

SIZES, BY_QUERIES = "query_sizes", "by_queries"
"""How large queries are, without columns where that is not known; and whether all keys were grouped by it."""

TENSORS = ("keys", "values", "order", "sinks", *MOMENTS, "cross", "pooled", SIZES, BY_QUERIES)
"""Names of the tensors of a state."""


def tensors_of(state: CacheState) -> dict[str, Tensor]:
    """The tensors of a state under their names; they may share memory with it."""
    found = {"keys": state.keys.filled, "values": state.values.filled, "order": state.order.filled, "sinks": state.sinks}
    # On a GPU some moments are in bfloat16. A file is for all devices, and tables convert what they take.
    moments = {name: getattr(state.tables, attribute).filled for name, attribute in MOMENTS.items()}
    found |= {name: x.to(state.tables.cross.dtype) if x.is_floating_point() else x for name, x in moments.items()}
    found |= {"cross": state.tables.cross, "pooled": state.tables.pooled}
    found |= grouped_by_keys(state.keys.storage)
    if state.query_sizes is not None:
        found |= {SIZES: state.query_sizes, BY_QUERIES: torch.tensor([state.tables.by_queries])}
    return {name: x.contiguous() for name, x in found.items()}


def moved(tensors: dict[str, Tensor], device: torch.device | str | None) -> dict[str, Tensor]:
    """The tensors of a state on another device; what the host reads to make the state again stays where it is."""
    return {name: x if name == BY_QUERIES else x.to(device) for name, x in tensors.items()}


def grouped_by_keys(keys: Tensor) -> dict[str, Tensor]:
    """What says that nothing is known of queries, for keys `[batch, heads, length, dim]`."""
    sizes = keys.new_zeros((*keys.shape[:2], 0), dtype=torch.promote_types(keys.dtype, torch.float32))
    return {SIZES: sizes, BY_QUERIES: torch.tensor([False])}


def state_of(
    tensors: dict[str, Tensor],
    bounds: list[int],
    cell_bounds: list[int],
    sizes: CacheSizes,
    partition: Partition,
    in_place: bool = False,
    offload: bool = False,
) -> CacheState:
    """The state that these are the tensors of, with closed segments and their cells between these bounds.

    `in_place`: keys and values of closed segments stay where they are, and nobody writes to them.
    """
    keys, values = tensors["keys"], tensors["values"]
    closed = bounds[-1] if in_place else 0
    state = CacheState(keys, values, sizes, partition, memory_length=closed, offload=offload, resident=0 if offload else None)
    moments = {attribute: getattr(state.tables, attribute).append(tensors[name]) for name, attribute in MOMENTS.items()}
    return state.but(
        keys=state.keys.append(keys[:, :, closed:]),
        values=state.values.append(values[:, :, closed:]),
        order=state.order.append(tensors["order"]),
        tables=state.tables.but(
            **moments,
            cross=tensors["cross"].clone(),
            pooled=tensors["pooled"].clone(),
            by_queries=bool(tensors[BY_QUERIES].all()),
        ),
        sinks=tensors["sinks"].clone(),
        query_sizes=tensors[SIZES].clone() if tensors[SIZES].shape[2] else None,
        bounds=bounds,
        cell_bounds=cell_bounds,
        settled=keys.shape[2],
    )
