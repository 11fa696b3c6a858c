"""A step on a GPU: how what a store holds goes into the kernels of `kernels/triton/decode.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.cells.cache.attention import RECENT
from nearfield.cells.cache.state import CacheState
from nearfield.cells.far_field import MOST_SPREAD, MOST_SQUARE, ROUTE_SPREADS
from nearfield.cells.triton.decode import gather, look, select, unite
from nearfield.cells.triton.far_field import VOID
from nearfield.cells.triton.limits import unsupported_step
from nearfield.kernels.launch import HAS_EARLY, cdiv, next_power_of_2, padded, precision

STEPS = 8
"""Cuts into four: cells whose scores differ by less than a 65,536th of the range of all are as good as each other."""

GRAIN = 16
"""Cells in a row, of which the best one says whether any of them is looked at when cells are selected."""

MOST_COMPARED = 1 << 16
"""Scores that one program compares."""

MOST_PROGRAMS, LEAST_TILE = 65_000, 16
"""On the second axis of a grid, and what each reads."""


class Tiles(NamedTuple):
    """Rows of what a program reads, and its warps: many small programs hide each other's waiting."""

    near: int = 64
    near_tiles: int = 4
    """that a program reads"""
    cells: int = 32
    far: int = 64
    opened: int = 64
    warps: int = 4
    columns: int = 32
    """of a part that a program unites"""


COMPARED = 2048
"""Scores per warp, where cells are compared"""

TILES = Tiles()


def tiles_for(dim: int, dtype: torch.dtype) -> Tiles:
    """Smaller where rows are wide, or shared memory would not do."""
    factor = max(1, padded(dim) * dtype.itemsize // 256)
    smaller = {name: max(16, getattr(TILES, name) // factor) for name in ("near", "cells", "far", "opened")}
    return TILES._replace(**smaller)


def unsupported(state: CacheState, query: Tensor, probes: int) -> str | None:
    """What the kernels cannot serve of a query `[batch, heads, rows, dim]` to these keys; None: they serve it."""
    cells, group = len(state.tables), query.shape[1] // state.heads
    if state.sizes.most_open(state.closed) > MOST_PROGRAMS * LEAST_TILE:
        return f"segments of more than {MOST_PROGRAMS * LEAST_TILE} keys"
    compared = next_power_of_2(group) * max(_candidates(cells, probes), cells // GRAIN)
    return unsupported_step(query, state.keys.storage, state.values.storage, cells, compared, MOST_COMPARED)


def _candidates(cells: int, probes: int) -> int:
    """How many cells are compared to find the best ones."""
    return GRAIN * next_power_of_2(max(1, min(probes, cdiv(cells, GRAIN))))


def decode(state: CacheState, queries: Tensor, scale: float, probes: int, most_near: int) -> Tensor:
    """Output `[batch * heads, group, value_dim]` of queries `[batch * heads, group, dim]`, of the latest key.

    `most_near`: how many keys outside of closed segments there may be; a graph that is captured serves all numbers up to it.
    """
    entries, group, dim = queries.shape
    keys, values, tables = state.keys, state.values, state.tables
    value_dim, cells = values.storage.shape[3], len(tables)
    probes = min(probes, cells)
    tiles = tiles_for(max(dim, value_dim), queries.dtype)
    open_end = state.length - state.closed
    if keys.offset != values.offset:
        raise RuntimeError(f"keys from {keys.offset} on are here, and values from {values.offset} on: the store is broken")
    if open_end > most_near:
        raise ValueError(f"{open_end} keys are in no closed segment, and there may be {most_near}")
    is_captured = queries.is_cuda and torch.cuda.is_current_stream_capturing()
    near = cdiv(most_near if is_captured else open_end, tiles.near * tiles.near_tiles)
    most_cells = tiles.cells * cdiv(cells, tiles.cells)
    far = cdiv(most_cells, tiles.far)
    readers = min(probes * cdiv(state.closed, tiles.opened * max(1, cells)), MOST_PROGRAMS)
    part_count = near + 1 + far + readers
    device = queries.device
    parts = torch.empty(entries * group, part_count, value_dim, device=device)
    part_lse = torch.empty(entries * group, part_count, device=device)
    members = next_power_of_2(group)
    scores, masses = torch.empty(2, entries, max(1, most_cells), members, device=device)
    cell_tiles = most_cells // tiles.cells
    cell_lse = torch.empty(entries * group, max(1, cell_tiles), device=device)
    late_lse = torch.empty(entries * group, device=device)
    grain_top = torch.empty(entries * group, max(1, most_cells // GRAIN), device=device)
    output = queries.new_empty(entries, group, value_dim)
    bases = [buffer.storage if buffer.base is None else buffer.base for buffer in (keys, values)]
    strides = [x.stride(i) if len(x) > 1 or i else 0 for x in bases for i in (0, 1)]
    sizes = (state.heads, group, dim, value_dim, keys.storage.stride(1), values.storage.stride(1), *strides, keys.offset)
    cell_entry, mean_entry = tables.size.storage.stride(1), tables.value.storage.stride(1)
    kind = {"IP": precision(tables.value.storage.dtype), "HAS_BASE": keys.base is not None}
    padding = state.sinks if state.counts is None else state.counts.view(torch.int8)
    padding_entry = 0 if state.counts is None else state.counts.stride(0)
    shape = {"BR": max(16, next_power_of_2(group)), "BD": padded(dim), "BV": padded(value_dim)}
    early = HAS_EARLY and queries.is_cuda
    overlapped = {"EARLY": True, "launch_pdl": True} if early else {"EARLY": False}
    look[(entries, cell_tiles + 2)](
        queries,
        keys.storage,
        values.storage,
        *bases,
        state.sinks,
        padding,
        tables.centroid.storage,
        tables.variance.storage,
        tables.log_exists.storage,
        tables.size.storage,
        state.count,
        parts,
        part_lse,
        scores,
        masses,
        cell_lse,
        late_lse,
        grain_top,
        *sizes,
        cell_tiles,
        padding_entry,
        state.sizes.sinks,
        cell_entry,
        tables.centroid.storage.stride(1),
        state.closed,
        cells,
        most_cells,
        part_count,
        near,
        scale,
        BL=RECENT,
        BC=tiles.cells,
        **shape,
        BS=max(16, next_power_of_2(state.sizes.sinks)),
        BG=members,
        GRAIN=GRAIN,
        **kind,
        HAS_COUNTS=state.counts is not None,
        SPREADS=ROUTE_SPREADS,
        MOST_SQ=MOST_SQUARE,
        MOST_SPREAD=MOST_SPREAD,
        VOID=VOID,
        EARLY=early,
        num_warps=tiles.warps,
    )
    opened, grain_list = torch.empty(2, entries, max(1, probes), dtype=torch.int32, device=device)
    candidates = _candidates(most_cells, probes)
    select[(entries, 1 + near)](
        scores,
        masses,
        late_lse,
        cell_lse,
        grain_top,
        grain_list,
        opened,
        queries,
        keys.storage,
        values.storage,
        padding,
        state.count,
        parts,
        part_lse,
        *sizes[:6],
        keys.offset,
        padding_entry,
        state.closed,
        most_cells,
        part_count,
        near,
        cell_tiles,
        probes,
        scale,
        PER=tiles.near_tiles,
        BK=tiles.near,
        **shape,
        STEPS=STEPS,
        VOID=VOID,
        GRAIN=GRAIN,
        BG=members,
        BT=next_power_of_2(cell_tiles),
        BN=next_power_of_2(most_cells // GRAIN),
        BP=candidates // GRAIN,
        HAS_CELLS=cells > 0,
        HAS_COUNTS=state.counts is not None,
        IP=kind["IP"],
        **overlapped,
        num_warps=max(tiles.warps, min(16, candidates * members // COMPARED)),
    )
    if cells:
        gather[(entries, readers + far)](
            queries,
            keys.storage,
            values.storage,
            *bases,
            tables.value.storage,
            tables.start.storage,
            tables.size.storage,
            masses,
            opened,
            parts,
            part_lse,
            *sizes,
            cell_entry,
            mean_entry,
            most_cells,
            part_count,
            near + 1,
            probes,
            far,
            readers,
            cells,
            scale,
            BG=members,
            BP=next_power_of_2(probes),
            BK=tiles.opened,
            BC=tiles.far,
            **shape,
            **kind,
            **overlapped,
            num_warps=tiles.warps,
        )
    columns = min(tiles.columns, padded(value_dim))
    unite[(entries * group, cdiv(value_dim, columns))](
        parts,
        part_lse,
        queries,
        tables.cross,
        tables.pooled,
        output,
        group,
        dim,
        value_dim,
        part_count,
        near + 1,
        far,
        scale,
        PARTS=next_power_of_2(part_count),
        BP=min(128, next_power_of_2(part_count)),
        BD=padded(dim),
        BV=columns,
        **overlapped,
        num_warps=4,
    )
    return output
