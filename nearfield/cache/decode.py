"""A step on a GPU: how what a store holds goes into the kernels of `kernels/triton/decode.py`."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.cache.held import Held
from nearfield.kernels.cells_plan import MOST_SPREAD, MOST_SQUARE, ROUTE_SPREADS
from nearfield.kernels.triton.common import cdiv, next_power_of_2, padded, precision
from nearfield.kernels.triton.decode import gather, look, select, unite
from nearfield.kernels.triton.tables import VOID
from nearfield.methods.cells import TRITON_DTYPES

STEPS = 8
"""Cuts into four: cells whose scores differ by less than a 65,536th of the range of all are as good as each other."""
MOST_CELLS, MOST_COLUMNS, MOST_GROUP = 1 << 16, 256, 64


class Tiles(NamedTuple):
    """Rows of what a program reads, and its warps: many small programs hide each other's waiting."""

    near: int = 32
    cells: int = 32
    far: int = 64
    opened: int = 64
    warps: int = 4


TILES = Tiles()


def tiles_for(dim: int, dtype: torch.dtype) -> Tiles:
    """Smaller where rows are wide, or shared memory would not do."""
    factor = max(1, dim * dtype.itemsize // 256)
    near, cells, far, opened = (max(16, size // factor) for size in TILES[:4])
    return Tiles(near, cells, far, opened, TILES.warps)


def serves(held: Held, query: Tensor) -> bool:
    """Whether the kernels know this `[batch, heads, rows, dim]`: one row, and no more of anything than they have room for."""
    _, heads, rows, dim = query.shape
    columns, group = max(dim, held.values.room.shape[3]), heads // held.heads
    fits = columns <= MOST_COLUMNS and group <= MOST_GROUP and len(held.tables) <= MOST_CELLS
    return rows == 1 and fits and query.dtype == held.keys.room.dtype and query.dtype in TRITON_DTYPES


def decode(held: Held, queries: Tensor, scale: float, probes: int, most_near: int) -> Tensor:
    """Output `[batch * heads, group, value_dim]` of queries `[batch * heads, group, dim]`, of the latest key.

    `most_near`: how many keys outside of closed segments there may be; a graph serves all numbers up to it.
    """
    entries, group, dim = queries.shape
    keys, values, tables, settings = held.keys, held.values, held.tables, held.settings
    value_dim, cells = values.room.shape[3], len(tables)
    probes = min(probes, cells)
    tiles = tiles_for(max(dim, value_dim), queries.dtype)
    if held.length - held.closed > most_near:
        raise ValueError(f"{held.length - held.closed} keys are in no closed segment, and there may be {most_near}")
    near = cdiv(most_near, tiles.near)
    most_cells = tiles.cells * cdiv(cells, tiles.cells)
    far = cdiv(most_cells, tiles.far)
    part_count = near + 1 + far + probes
    device = queries.device
    parts = torch.empty(entries * group, part_count, value_dim, device=device)
    part_lse = torch.empty(entries * group, part_count, device=device)
    scores, masses = torch.empty(2, entries * group, max(1, most_cells), device=device)
    cell_tiles = most_cells // tiles.cells
    cell_lse = torch.empty(entries * group, max(1, cell_tiles), device=device)
    output = queries.new_empty(entries, group, value_dim)
    bases = [buffer.room if buffer.base is None else buffer.base for buffer in (keys, values)]
    strides = [x.stride(i) if len(x) > 1 or i else 0 for x in bases for i in (0, 1)]
    sizes = (held.heads, group, dim, value_dim, keys.room.stride(1), values.room.stride(1), *strides, keys.offset)
    cell_entry, mean_entry = tables.size.room.stride(1), tables.value.room.stride(1)
    kind = {"IP": precision(tables.value.room.dtype), "HAS_BASE": keys.base is not None}
    shape = {"BR": max(16, next_power_of_2(group)), "BD": padded(dim), "BV": padded(value_dim)}
    look[(near + 1 + cell_tiles, entries)](
        queries,
        keys.room,
        values.room,
        *bases,
        held.sinks,
        held.sinks if held.counts is None else held.counts.view(torch.int8),
        tables.centroid.room,
        tables.variance.room,
        tables.void.room,
        tables.size.room,
        held.numbers,
        parts,
        part_lse,
        scores,
        masses,
        cell_lse,
        *sizes,
        cell_tiles,
        0 if held.counts is None else held.counts.stride(0),
        settings.sinks,
        cell_entry,
        tables.centroid.room.stride(1),
        most_cells,
        part_count,
        scale,
        NEAR=near,
        BK=tiles.near,
        BC=tiles.cells,
        **shape,
        BS=max(16, next_power_of_2(settings.sinks)),
        **kind,
        HAS_COUNTS=held.counts is not None,
        SPREADS=ROUTE_SPREADS,
        MOST_SQ=MOST_SQUARE,
        MOST_SPREAD=MOST_SPREAD,
        VOID=VOID,
        num_warps=tiles.warps,
    )
    if cells:
        opened = torch.empty(entries, probes, dtype=torch.int32, device=device)
        width = next_power_of_2(most_cells)
        select[(entries,)](
            scores,
            masses,
            part_lse,
            cell_lse,
            opened,
            group,
            most_cells,
            part_count,
            near + 1,
            cell_tiles,
            probes,
            STEPS=STEPS,
            VOID=VOID,
            BN=next_power_of_2(near + 1),
            BT=next_power_of_2(cell_tiles),
            BC=width,
            num_warps=max(4, min(32, width // 512)),
        )
        gather[(far + probes, entries)](
            queries,
            keys.room,
            values.room,
            *bases,
            tables.value.room,
            tables.start.room,
            tables.size.room,
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
            scale,
            FAR=far,
            BK=tiles.opened,
            BC=tiles.far,
            **shape,
            **kind,
            num_warps=tiles.warps,
            num_stages=1,
        )
    columns = min(32, padded(value_dim))
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
        BP=32,
        BD=padded(dim),
        BV=columns,
        num_warps=4,
    )
    return output
