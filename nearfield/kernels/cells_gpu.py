"""The cells engine on a GPU, forward: what to launch, on what, in which order."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.kernels.cells_plan import CellSettings
from nearfield.kernels.triton.assign import kmeans
from nearfield.kernels.triton.common import dense
from nearfield.kernels.triton.far import far
from nearfield.kernels.triton.group import group
from nearfield.kernels.triton.layout import Layout, layout_of
from nearfield.kernels.triton.limit import limit_sizes
from nearfield.kernels.triton.local import local
from nearfield.kernels.triton.merge import merge
from nearfield.kernels.triton.near import near, near_blocks
from nearfield.kernels.triton.route import route
from nearfield.kernels.triton.tables import moments_of, tabulate

LEAST_BYTES = 4 << 20
BEYOND = 0.48
"""Everything that is made on the way should take no more than this part of inputs and output, or `LEAST_BYTES`."""
BEYOND_TRAINED = 1.0
"""The same where a gradient will be asked for: what is made in the backward pass, the gradients alone, takes as much."""
PAIRS = 1 / 12
"""What of this (row, cell) pairs may take while they are grouped."""
LEAST = 0.09
"""Partial results get this much at least: with too few rows at a time, tiles are half empty."""
LEAST_ROWS = 1024
"""Rows that are looked at together even if they do not fit."""
MOST_ENTRIES = 32768
"""What the second axis of a grid takes."""


def assign(
    keys: Tensor, visible: Tensor, settings: CellSettings, layout: Layout, iterations: int, seed: int, cell_of: Tensor
) -> None:
    """Fills in `cell_of` `[entries, heights, n]`: the cells of each key, -1 where it is in none."""
    cell_of.fill_(-1)
    kmeans(keys, layout, iterations, seed, cell_of)
    limit_sizes(cell_of, layout)
    cell_of[:, :, : settings.sinks] = -1
    if not settings.segment:
        beyond = torch.arange(keys.shape[1], device=keys.device) >= visible.amax(1, keepdim=True)
        cell_of.masked_fill_(beyond[:, None], -1)


def forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    settings: CellSettings,
    scale: float,
    iterations: int,
    seed: int,
    output: Tensor,
    lse: Tensor,
    cell_of: Tensor,
    opened: Tensor,
    beyond: float,
) -> None:
    """Fills in the output and log-normaliser of queries `[entries, group * length, dim]`, cells of keys and opened cells.

    `beyond`: see `room_for`.
    """
    if len(queries) > MOST_ENTRIES:
        for some in entry_parts(len(queries)):
            inputs = queries[some], keys[some], values[some], visible[some]
            forward(*inputs, settings, scale, iterations, seed, output[some], lse[some], cell_of[some], opened[some], beyond)
        return
    queries, scale = upright(queries, scale)
    queries, keys, values = (dense(x) for x in (queries, keys, values))
    visible = visible.to(torch.int32).contiguous()
    entries, rows, _ = queries.shape
    layout = layout_for(keys, settings)
    # First, and not last: it keeps the device busy while the many small kernels that make cells are started.
    local(queries, keys, values, visible, layout, settings, scale, output, lse)
    assign(keys, visible, settings, layout, iterations, seed, cell_of)
    tables = tabulate(keys, values, moments_of(keys, values, cell_of, layout), layout)
    room = room_for((queries, keys, values, output), (cell_of, opened, visible, *vars(tables).values()), beyond)
    counts = torch.zeros(entries, tables.cells, dtype=torch.int32, device=keys.device)
    for some, part in parts_of(entries, rows, 4 * layout.words, room.parts):
        query, sees, own_tables = queries[some, part], visible[some, part], tables.of(some)
        marks = route(query, sees, own_tables, layout, settings, scale, opened[some, part], counts[some])
        far(query, sees, own_tables, layout, settings, scale, marks, output[some, part], lse[some, part])
        del marks
    value_dim, size = values.shape[2], near_blocks(queries, values, settings).rows
    per_row = settings.probes * (value_dim * queries.element_size() + 4)
    for slab in slabs_of(entries, rows, settings.probes, per_row, room):
        own, part = slab.entries, slab.rows
        query, key, value, found, own_tables = queries[own, part], keys[own], values[own], opened[own, part], tables.of(own)
        groups = group(found, own_tables, size, counts[own].view(-1) if part == slice(0, rows) else None)
        into, ends = output[own, part], lse[own, part]
        for some in slab.parts:
            parts = queries.new_empty((some.stop - some.start, *found.shape[1:], value_dim))
            parts_lse = torch.empty(parts.shape[:3], device=queries.device)
            near(query, key, value, own_tables, settings, groups, some, scale, parts, parts_lse)
            merge(parts, parts_lse, found[some], into[some], ends[some])
            del parts


def layout_for(keys: Tensor, settings: CellSettings) -> Layout:
    """The layout of such keys; it stays for good if a graph is being captured, which will read it."""
    layout = layout_of(keys.shape[1], settings, keys.device)
    if keys.is_cuda and torch.cuda.is_current_stream_capturing():
        layout.keep()
    return layout


def upright(queries: Tensor, scale: float) -> tuple[Tensor, float]:
    """The same products with a positive scale, as kernels want it."""
    return (queries, scale) if scale > 0 else (queries * (-1.0 if scale else 0.0), -scale or 1.0)


def entry_parts(entries: int) -> Iterator[slice]:
    """All entries, in as few parts as a grid takes."""
    for first in range(0, entries, MOST_ENTRIES):
        yield slice(first, min(first + MOST_ENTRIES, entries))


class Room(NamedTuple):
    """Bytes for what is made on the way."""

    parts: int
    """partial results: the output of each opened cell by itself"""
    pairs: int
    """(row, cell) pairs, grouped"""


def room_for(inputs: tuple[Tensor, ...], held: tuple[Tensor, ...], beyond: float) -> Room:
    """Room that, with what is held already, comes to `beyond` of inputs and output, unless that would be very little."""
    total, ours = (sum(x.numel() * x.element_size() for x in tensors) for tensors in (inputs, held))
    pairs = int(PAIRS * beyond * total)
    return Room(max(LEAST_BYTES, int(LEAST * total), int(beyond * total) - pairs - ours), pairs)


def parts_of(entries: int, rows: int, per_row: int, bytes: int) -> Iterator[tuple[slice, slice]]:
    """Entries, and rows of theirs, for which so many bytes each fit. Rows stay together where they can: tiles are then full."""
    some = max(1, min(entries, bytes // max(1, per_row * rows)))
    step = rows if some > 1 else max(LEAST_ROWS, bytes // per_row // LEAST_ROWS * LEAST_ROWS)
    for first in range(0, entries, some):
        for start in range(0, rows, step):
            yield slice(first, min(first + some, entries)), slice(start, min(start + step, rows))


class Slab(NamedTuple):
    """What is grouped together: all rows of some entries, or some rows of one."""

    entries: slice
    rows: slice
    parts: list[slice]
    """Entries of it whose partial results fit at a time."""


def slabs_of(entries: int, rows: int, slots: int, per_row: int, room: Room) -> Iterator[Slab]:
    parts = list(parts_of(entries, rows, per_row, room.parts))
    for some, part in parts:
        if part != slice(0, rows):
            yield Slab(some, part, [slice(0, 1)])
    whole = [some for some, part in parts if part == slice(0, rows)]
    together = max(1, room.pairs // max(1, 4 * rows * slots * (whole[0].stop if whole else 1)))
    for start in range(0, len(whole), together):
        own = whole[start : start + together]
        first = own[0].start
        yield Slab(slice(first, own[-1].stop), slice(0, rows), [slice(x.start - first, x.stop - first) for x in own])
