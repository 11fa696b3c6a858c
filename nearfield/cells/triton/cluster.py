"""Cells on a GPU: k-means over all spans at once, a limit to the size of cells, and keys sorted by cell."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells.partition.kmeans import MOST_TIMES_THE_MEAN
from nearfield.cells.triton.layout import Layout, PackedCells
from nearfield.cells.triton.tuning import blocks_for
from nearfield.kernels.launch import Kernel, cdiv, dot_dtype, dot_type, next_power_of_2, padded, precision, strides
from nearfield.kernels.tensors import fill_, zeros


@Kernel
def _pack_cells(cell_of, packed, per_entry, cells, last, shift, cell_entry, BP: tl.constexpr):
    """Cells as `PackedCells` says."""
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    there = lane < per_entry
    cell = tl.load(cell_of + entry * cell_entry + lane, mask=there, other=-1)
    key = tl.where(cell >= 0, cell + entry.to(tl.int32) * cells, last) - shift
    tl.store(packed + entry * per_entry + lane, key.to(packed.dtype.element_ty), mask=there)


def sort_by_cell(packed: Tensor, layout: Layout, entries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed cells in order, where each of them was, and where each cell begins (last: where those without a cell do)."""
    found, places = packed.view(-1).sort(stable=True)
    return found, places, torch.searchsorted(found, layout.packed_cells(entries), out_int32=True)


def pack_cells(cell_of: Tensor, layout: Layout) -> Tensor:
    """Cells `[entries, ...]`, -1 for none, as `PackedCells` says."""
    entries, per_entry = cell_of.shape[0], cell_of[0].numel()
    packing = PackedCells(entries * layout.cells)
    packed = torch.empty(entries, per_entry, dtype=packing.dtype, device=cell_of.device)
    if per_entry:
        _pack_cells[(cdiv(per_entry, 1024), entries)](
            cell_of=cell_of,
            packed=packed,
            per_entry=per_entry,
            cells=layout.cells,
            last=packing.last,
            shift=packing.shift,
            cell_entry=cell_of.stride(0),
            BP=1024,
            num_warps=4,
        )
    return packed


KEYS = 1024
"""Keys of a span that a program counts or moves."""


@triton.jit
def keys_at(chunk, chunk_span, chunk_number, key_ranges, span_level, length, BP: tl.constexpr):
    """The span of a chunk of keys, their positions, which of them there are, and their places in a flat `[span_levels, n]`."""
    span = tl.load(chunk_span + chunk)
    position = tl.load(key_ranges + 2 * span) + tl.load(chunk_number + chunk) * BP + tl.arange(0, BP)
    there = position < tl.load(key_ranges + 2 * span + 1)
    return span, position, there, tl.load(span_level + span).to(tl.int64) * length + position


@Kernel
def _settle(
    cell_of,
    parts,
    begins,
    host,
    sizes,
    chunk_span,
    chunk_number,
    key_ranges,
    span_level,
    cell_edges,
    chunk_edges,
    tally,
    length,
    cells,
    per_entry,
    cell_entry,
    CUT: tl.constexpr,
    TALLY: tl.constexpr,
    BP: tl.constexpr,
):
    """CUT: keys of cells that are too large go where `_hosts` said, by their position: always the same ones of the same cell.

    TALLY: how many keys of a chunk are in each cell of its span; unless CUT, also the sizes of cells.
    """
    chunk, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    span, position, there, place = keys_at(chunk, chunk_span, chunk_number, key_ranges, span_level, length, BP)
    here = cell_of + entry * cell_entry + place
    cell = tl.load(here, mask=there, other=-1)
    inside = cell >= 0
    if CUT:
        count = tl.load(parts + entry * cells + cell, mask=inside, other=0)
        mixed = (position.to(tl.int64) * 2654435761 >> 16) & 65535
        part = (mixed % (count + 1)).to(tl.int32)
        moved = inside & (part > 0)
        begin = tl.load(begins + entry * cells + cell, mask=moved, other=0)
        into = tl.load(host + entry * cells + begin + part - 1, mask=moved, other=0)
        tl.store(here, into, mask=moved)
        tl.atomic_add(sizes + entry * cells + cell, -1, mask=moved, sem="relaxed")
        tl.atomic_add(sizes + entry * cells + into, 1, mask=moved, sem="relaxed")
        cell = tl.where(moved, into, cell)
    if TALLY:
        edge, last = tl.load(cell_edges + span), tl.load(cell_edges + span + 1)
        tally += entry * per_entry + tl.load(chunk_edges + chunk)
        for start in range(0, last - edge, BP):
            lane = start + tl.arange(0, BP)
            tl.store(tally + lane, tl.zeros([BP], tl.int32), mask=lane < last - edge)
        tl.debug_barrier()
        tl.atomic_add(tally + cell - edge, 1, mask=inside, sem="relaxed")
        if not CUT:
            tl.atomic_add(sizes + entry * cells + cell, 1, mask=inside, sem="relaxed")


@Kernel
def _scan(
    sizes,
    tally,
    tile_span,
    tile_cell,
    cell_edges,
    chunk_edges,
    span_chunks,
    members,
    starts,
    cells,
    entries,
    per_entry,
    SAME: tl.constexpr,
    BC: tl.constexpr,
    BS: tl.constexpr,
):
    """Where each cell begins, and in it the keys of each chunk, for a tile of cells of one span.

    `members`: SAME: where those of each entry begin; otherwise how many each has.
    """
    tile, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    span, first = tl.load(tile_span + tile), tl.load(tile_cell + tile)
    edge, last = tl.load(cell_edges + span), tl.load(cell_edges + span + 1)
    sizes += entry * cells
    tally += entry * per_entry
    before = tl.zeros([BS], tl.int32)
    for start in range(0, first, BS):
        cell = start + tl.arange(0, BS)
        before += tl.load(sizes + cell, mask=cell < first, other=0)
    if SAME:
        begin = tl.load(members + entry)
    else:
        begin = 0
        for start in range(0, entry.to(tl.int32), BS):
            other = start + tl.arange(0, BS)
            begin += tl.sum(tl.load(members + other, mask=other < entry, other=0), 0)
    cell = first + tl.arange(0, BC)
    real = cell < last
    size = tl.load(sizes + cell, mask=real, other=0)
    end = begin + tl.sum(before, 0) + tl.cumsum(size, 0)
    number = entry * cells + cell
    tl.store(starts + number, end - size, mask=real)
    tl.store(starts + number + 1, end, mask=real & (number == entries * cells - 1))
    here = end - size
    for chunk in range(tl.load(span_chunks + span), tl.load(span_chunks + span + 1)):
        at = tally + tl.load(chunk_edges + chunk) + cell - edge
        count = tl.load(at, mask=real, other=0)
        tl.store(at, here, mask=real)
        here += count


@Kernel
def _place(
    cell_of,
    chunk_span,
    chunk_number,
    key_ranges,
    span_level,
    cell_edges,
    chunk_edges,
    tally,
    order,
    length,
    per_entry,
    cell_entry,
    BP: tl.constexpr,
    BS: tl.constexpr,
):
    """The keys of a chunk go to the places of their cells, in their own order, BS of them at a time."""
    chunk, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    span = tl.load(chunk_span + chunk)
    first = tl.load(key_ranges + 2 * span) + tl.load(chunk_number + chunk) * BP
    last = tl.minimum(first + BP, tl.load(key_ranges + 2 * span + 1))
    cell_of += entry * cell_entry + tl.load(span_level + span).to(tl.int64) * length
    tally += entry * per_entry + tl.load(chunk_edges + chunk) - tl.load(cell_edges + span)
    number = tl.arange(0, BS)
    for start in range(first, last, BS):
        position = start + number
        cell = tl.load(cell_of + position, mask=position < last, other=-1)
        # Once more: a tile has it along its columns too.
        same = tl.load(cell_of + position, mask=position < last, other=-1)[None, :] == cell[:, None]
        earlier = tl.sum((same & (number[None, :] < number[:, None])).to(tl.int32), 1)
        inside = cell >= 0
        # What those before have added is in the second cache, and not in the first.
        into = tl.load(tally + cell, mask=inside, other=0, cache_modifier=".cg")
        tl.store(order + into + earlier, position, mask=inside)
        tl.debug_barrier()
        tl.atomic_add(tally + cell, 1, mask=inside, sem="relaxed")
        tl.debug_barrier()


@Kernel
def _count_members(sizes, held, cells, BC: tl.constexpr):
    """How many members an entry has."""
    entry = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BC], tl.int32)
    for start in range(0, cells, BC):
        cell = start + tl.arange(0, BC)
        total += tl.load(sizes + entry * cells + cell, mask=cell < cells, other=0)
    tl.store(held + entry, tl.sum(total, 0))


def _held(sizes: Tensor) -> Tensor:
    """`[entries]`: how many members each entry has."""
    entries, cells = sizes.shape
    held = torch.empty(entries, dtype=torch.int32, device=sizes.device)
    _count_members[(entries,)](sizes=sizes, held=held, cells=cells, BC=1024, num_warps=4)
    return held


def members_of(cell_of: Tensor, sizes: Tensor | None, layout: Layout) -> tuple[Tensor, Tensor]:
    """Positions of keys cell by cell, ascending in each, and where each cell begins, of `cell_of` `[entries, span_levels, n]`.

    `sizes` `[entries, cells]`: how many keys each has, as `kmeans` returns them; cells that are too large are then cut in place,
    see `limit_cell_sizes_`. None: cells stay as they are. A counting sort: chunks of keys count their cells, and what earlier
    chunks and cells have counted says where their keys go.
    """
    entries, device, cells = len(cell_of), cell_of.device, layout.cells
    assert entries * layout.members < 2**31
    order = torch.empty(entries * layout.members, dtype=torch.int32, device=device)
    if not cells:
        return order, fill_(torch.empty(1, dtype=torch.int32, device=device), 0)
    tally = torch.empty(entries, layout.tallies(KEYS)[2], dtype=torch.int32, device=device)
    if sizes is None:
        sizes = zeros(entries, cells, dtype=torch.int32, device=device)
        _settle_cells(cell_of, sizes, layout, None, tally)
        held = None if layout.causal else _held(sizes)
    else:
        # Without a mask there is one span.
        hosts, held_by_span = _host_cells(sizes, layout)
        held = None if layout.causal else held_by_span
        _settle_cells(cell_of, sizes, layout, hosts, tally)
    return order, _place_by_cell(cell_of, sizes, tally, held, layout, order)


def sort_by_count_(cell_of: Tensor, sizes: Tensor, layout: Layout, order: Tensor) -> None:
    """Fills in `order` with the positions of `cell_of` `[entries, 1, n]`, entry by entry, cell by cell, ascending in each.

    Every position has a cell. `sizes` `[entries, cells]` are zeros, and become the numbers of members.
    """
    tally = torch.empty(len(cell_of), layout.tallies(KEYS)[2], dtype=torch.int32, device=cell_of.device)
    _settle_cells(cell_of, sizes, layout, None, tally)
    _place_by_cell(cell_of, sizes, tally, None, layout, order)


def _place_by_cell(cell_of: Tensor, sizes: Tensor, tally: Tensor, held: Tensor | None, layout: Layout, order: Tensor) -> Tensor:
    """Fills in `order`, see `members_of`, and returns where each cell begins.

    `tally`: how many keys of each chunk each cell has; overwritten. `held`: how many members each entry has;
    None: all keys but sinks.
    """
    entries, cells = sizes.shape
    starts = torch.empty(entries * cells + 1, dtype=torch.int32, device=sizes.device)
    chunk_span, chunk_number = layout.chunks(KEYS)
    chunk_edges, span_chunks, per_entry = layout.tallies(KEYS)
    tile_span, tile_cell = layout.cell_tiles(128)
    _scan[(tile_span.shape[0], entries)](
        sizes=sizes,
        tally=tally,
        tile_span=tile_span,
        tile_cell=tile_cell,
        cell_edges=layout.cell_edges,
        chunk_edges=chunk_edges,
        span_chunks=span_chunks,
        members=layout.first_members(entries) if held is None else held,
        starts=starts,
        cells=cells,
        entries=entries,
        per_entry=per_entry,
        SAME=held is None,
        BC=128,
        BS=1024,
        num_warps=4,
    )
    _place[(chunk_span.shape[0], entries)](
        cell_of=cell_of,
        chunk_span=chunk_span,
        chunk_number=chunk_number,
        key_ranges=layout.key_ranges,
        span_level=layout.span_level,
        cell_edges=layout.cell_edges,
        chunk_edges=chunk_edges,
        tally=tally,
        order=order,
        length=cell_of.shape[2],
        per_entry=per_entry,
        cell_entry=cell_of.stride(0),
        BP=KEYS,
        BS=64,
        num_warps=2,
    )
    return starts


POINTS = 128
"""Points of a sample that a program prepares."""

MANY_CELLS, FEW_CELLS, LISTED = 256, 32, 2048
"""From so many cells of one span on, a program takes the means of a few, and lists its points out of so many at a time."""

MOST_BYTES = 256
"""of a point, for that"""

WIDTH_KEYS = 512
"""Keys of a sample from which the width of each coordinate is measured."""


@triton.jit
def fill_share(x, count, value, B: tl.constexpr):
    """Fills in a program's share of `count` numbers, which all programs of an entry have together."""
    share = tl.cdiv(tl.cdiv(count, tl.num_programs(0)), B) * B
    first = tl.program_id(0) * share
    for start in range(first, tl.minimum(first + share, count), B):
        lane = start + tl.arange(0, B)
        tl.store(x + lane, tl.full([B], value, tl.int32), mask=lane < count)


@Kernel
def _prepare(
    keys,
    position,
    sample_first,
    chunk_span,
    chunk_number,
    cell_edges,
    given,
    offset,
    weight,
    points,
    centroids,
    half,
    found,
    sizes,
    spans,
    cells,
    dim,
    key_entry,
    key_row,
    point_entry,
    found_entry,
    places,
    GIVEN: tl.constexpr,
    MOST: tl.constexpr,
    BP: tl.constexpr,
    BW: tl.constexpr,
    BD: tl.constexpr,
    BF: tl.constexpr,
):
    """The keys of a sample minus their mean, times their root mean square, both coordinate by coordinate over some keys of the
    span; GIVEN: times the weights of the span in `given`, unless all of these are zero. The first of them are where centroids
    start. Besides: no key is in a cell yet, and no cell has keys."""
    chunk, entry = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    fill_share(found + entry * found_entry, places, -1, BF)
    fill_share(sizes + entry * cells, cells, 0, BF)
    span = tl.load(chunk_span + chunk)
    number = tl.load(chunk_number + chunk)
    column = tl.arange(0, BD)
    wide = column < dim
    first, last = tl.load(sample_first + span), tl.load(sample_first + span + 1)
    keys += entry * key_entry
    total = tl.zeros([BW, BD], tl.float32)
    square = tl.zeros([BW, BD], tl.float32)
    measured = tl.minimum(last, first + MOST)
    for start in range(first, measured, BW):
        lane = start + tl.arange(0, BW)
        there = lane < measured
        own = tl.load(position + lane, mask=there, other=0).to(tl.int64)
        x = tl.load(keys + own[:, None] * key_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
        x = x.to(tl.float32)
        total += x
        square += x * x
    count = tl.maximum(measured - first, 1).to(tl.float32)
    shift, stretch = tl.sum(total, 0) / count, tl.sqrt(tl.sum(square, 0) / count)
    into = (entry * spans + span) * dim + column
    if GIVEN:
        other = tl.load(given + into, mask=wide, other=0.0)
        stretch = tl.where(tl.max(other, 0) > 0.0, other, stretch)
    if number == 0:
        tl.store(offset + into, shift, mask=wide)
        tl.store(weight + into, stretch, mask=wide)
    lane = first + number * BP + tl.arange(0, BP)
    there = lane < last
    mask = there[:, None] & wide[None, :]
    own = tl.load(position + lane, mask=there, other=0).to(tl.int64)
    x = tl.load(keys + own[:, None] * key_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
    x = tl.where(wide[None, :], (x - shift[None, :]) * stretch[None, :], 0.0).to(points.dtype.element_ty)
    tl.store(points + entry * point_entry + lane.to(tl.int64)[:, None] * dim + column[None, :], x, mask=mask)
    cell = tl.load(cell_edges + span) + lane - first
    starts = there & (cell < tl.load(cell_edges + span + 1))
    into = entry * cells + cell
    tl.store(centroids + into[:, None] * dim + column[None, :], x, mask=starts[:, None] & wide[None, :])
    x = x.to(tl.float32)
    tl.store(half + into, tl.sum(x * x, 1) / 2, mask=starts)


@Kernel
def _nearest(
    points,
    point_ranges,
    chunk_span,
    chunk_number,
    offset,
    weight,
    centroids,
    half,
    cell_edges,
    span_level,
    visible,
    found,
    sizes,
    cells,
    spans,
    dim,
    point_entry,
    point_row,
    found_entry,
    found_level,
    visible_entry,
    sinks,
    PREPARED: tl.constexpr,
    LIMITED: tl.constexpr,
    FULL: tl.constexpr,
    TILES: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """For a block of points, the cell c of their span with the largest x.c - |c|^2 / 2, where x = (point - offset) * weight.

    FULL: no columns are missing. PREPARED: points are already of this form. Otherwise they are keys: sinks and (LIMITED) what the
    first row does not see are left out, and the members of each cell are counted.
    """
    chunk, entry = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    span = tl.load(chunk_span + chunk)
    begin = tl.load(point_ranges + 2 * span)
    point = begin + tl.load(chunk_number + chunk) * BP + tl.arange(0, BP)
    there = point < tl.load(point_ranges + 2 * span + 1)
    point = point.to(tl.int64)
    column = tl.arange(0, BD)
    wide = column < dim
    points += entry * point_entry
    mask = there[:, None] if FULL else there[:, None] & wide[None, :]
    x = tl.load(points + point[:, None] * point_row + column[None, :], mask=mask, other=0.0)
    if not PREPARED:
        shift = tl.load(offset + (entry * spans + span) * dim + column, mask=wide, other=0.0)
        stretch = tl.load(weight + (entry * spans + span) * dim + column, mask=wide, other=0.0)
        x = ((x.to(tl.float32) - shift[None, :]) * stretch[None, :]).to(DT)
    first, last = tl.load(cell_edges + span), tl.load(cell_edges + span + 1)
    centroids += entry * cells * dim
    half += entry * cells
    lane = tl.arange(0, BC)
    # Every lane keeps its own best score, with the number of its tile in the last bits: comparing lanes for every tile would take
    # longer than the product.
    best = tl.full([BP, BC], -float("inf"), tl.float32)
    for start in range(first, last, BC):
        cell = start + lane
        at = centroids + tl.minimum(cell, last - 1)[:, None] * dim + column[None, :]
        c = tl.load(at) if FULL else tl.load(at, mask=wide[None, :], other=0.0)
        below = tl.load(half + cell, mask=cell < last, other=1e30)
        score = tl.dot(x, tl.trans(c), input_precision=IP) - below[None, :]
        score = ((score.to(tl.int32, bitcast=True) & -TILES) | (start - first) // BC).to(tl.float32, bitcast=True)
        best = tl.maximum(best, score)
    top = tl.max(best, 1)
    # Of equals the first. Comparisons with NaN are false: stay inside the span.
    place = (best.to(tl.int32, bitcast=True) & (TILES - 1)) * BC + lane[None, :]
    winner = first + tl.min(tl.where(best == top[:, None], place, 1 << 30), 1)
    winner = tl.minimum(winner, last - 1)
    level = tl.load(span_level + span).to(tl.int64)
    if not PREPARED:
        # These are in no cell.
        there = there & (point >= sinks)
        if LIMITED:
            there = there & (point < tl.load(visible + entry * visible_entry))
        tl.atomic_add(sizes + entry * cells + winner, 1, mask=there, sem="relaxed")
    tl.store(found + entry * found_entry + level * found_level + point, winner, mask=there)


@triton.jit
def add_points(total, count, points, assigned, lane, there, cell, column, wide, dim, DT: tl.constexpr, IP: tl.constexpr):
    """Add points to the sums and counts of their cells: a product of zeros and ones with the points."""
    own = tl.load(assigned + lane, mask=there, other=-1)
    x = tl.load(points + lane[:, None] * dim + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    inside = (own[None, :] == cell[:, None]).to(DT)
    return tl.dot(inside, x, total, input_precision=IP), count + tl.sum(inside.to(tl.float32), 1)


@triton.jit
def store_means(total, count, points, first, last, centroids, half, entry, cell, edge, last_cell, cells, column, wide, dim, turn):
    """An empty cell starts again at a point of the sample, a different one in every turn."""
    again = first + (turn * (last_cell - edge) + cell - edge) % (last - first)
    real = cell < last_cell
    other = tl.load(points + again[:, None] * dim + column[None, :], mask=real[:, None] & wide[None, :], other=0.0)
    mean = tl.where((count > 0)[:, None], total / tl.maximum(count, 1.0)[:, None], other.to(tl.float32))
    mean = mean.to(centroids.dtype.element_ty)
    into = entry * cells + cell
    tl.store(centroids + into[:, None] * dim + column[None, :], mean, mask=real[:, None] & wide[None, :])
    rounded = mean.to(tl.float32)
    tl.store(half + into, tl.sum(rounded * rounded, 1) / 2, mask=real)


@partial(Kernel, do_not_specialize=("turn",))
def _means(
    points,
    assigned,
    sample_first,
    tile_span,
    tile_cell,
    cell_edges,
    centroids,
    half,
    cells,
    dim,
    size,
    turn,
    BP: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """The means of a tile of cells, over all points of their span."""
    tile, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    span, start_cell = tl.load(tile_span + tile), tl.load(tile_cell + tile)
    edge, last_cell = tl.load(cell_edges + span), tl.load(cell_edges + span + 1)
    cell = start_cell + tl.arange(0, BC)
    column = tl.arange(0, BD)
    wide = column < dim
    first, last = tl.load(sample_first + span), tl.load(sample_first + span + 1)
    points += entry * size * dim
    assigned += entry * size
    total = tl.zeros([BC, BD], tl.float32)
    count = tl.zeros([BC], tl.float32)
    for start in range(first, last, BP):
        lane = start + tl.arange(0, BP)
        total, count = add_points(total, count, points, assigned, lane, lane < last, cell, column, wide, dim, DT, IP)
    store_means(total, count, points, first, last, centroids, half, entry, cell, edge, last_cell, cells, column, wide, dim, turn)


@partial(Kernel, do_not_specialize=("turn",))
def _means_of_many(
    points,
    assigned,
    listed,
    cell_edges,
    centroids,
    half,
    cells,
    dim,
    size,
    turn,
    BS: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """`_means` for one span of many cells: of BS points at a time, those in a program's own cells are listed first.

    So a point is multiplied with a few cells and not with all of them. `listed` `[entries, programs, BS]` is memory to work in.
    """
    tile, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    edge, last_cell = tl.load(cell_edges), tl.load(cell_edges + 1)
    first_cell = edge + tile * BC
    cell = first_cell + tl.arange(0, BC)
    column = tl.arange(0, BD)
    wide = column < dim
    points += entry * size * dim
    assigned += entry * size
    listed += (entry * tl.num_programs(0) + tile) * BS
    total = tl.zeros([BC, BD], tl.float32)
    count = tl.zeros([BC], tl.float32)
    for start in range(0, size, BS):
        lane = start + tl.arange(0, BS)
        own = tl.load(assigned + lane, mask=lane < size, other=-1)
        mine = (own >= first_cell) & (own < first_cell + BC)
        rank = tl.cumsum(mine.to(tl.int32), 0)
        found = tl.max(rank, 0)
        tl.debug_barrier()  # All threads have read the list before.
        tl.store(listed + rank - 1, lane, mask=mine)
        tl.debug_barrier()  # All threads have written their part of it.
        for at in range(0, found, BP):
            number = at + tl.arange(0, BP)
            member = tl.load(listed + number, mask=number < found, other=0)
            total, count = add_points(total, count, points, assigned, member, number < found, cell, column, wide, dim, DT, IP)
    store_means(total, count, points, 0, size, centroids, half, entry, cell, edge, last_cell, cells, column, wide, dim, turn)


def kmeans(
    keys: Tensor,
    layout: Layout,
    iterations: int,
    seed: int,
    visible: Tensor | None,
    found: Tensor,
    weights: Tensor | None = None,
) -> Tensor:
    """Fills in `found` `[entries, span_levels, n]`: the cell of each key `[entries, n, dim]` in every span that has it; -1: none.

    Keys before `layout.sinks`, and those that the first row of `visible` `[entries, rows]` does not see, are in no cell. Returns
    how many keys each cell has, `[entries, cells]`, int32. Coordinates are weighted by their root mean square, as in
    `partition.KMeans`, or by `weights` `[entries, spans, dim]` where these are not all zero. Unlike there, all cells are made in
    one step, from 16 keys per cell rather than 32, and an empty cell starts again at some key of the sample.
    """
    entries, _, dim = keys.shape
    sample = layout.sample(seed)
    size, spans, device = sample.size, len(layout.spans.all), keys.device
    sizes = torch.empty(entries, layout.cells, dtype=torch.int32, device=device)
    if not spans:
        fill_(found, -1)
        return fill_(sizes, 0)
    assert found[0].is_contiguous()
    offset, weight = (torch.empty(entries, spans, dim, dtype=torch.float32, device=device) for _ in range(2))
    points = torch.empty(entries, size, dim, dtype=dot_dtype(keys.dtype), device=device)
    centroids = points.new_empty((entries, layout.cells, dim))
    half = torch.empty(entries, layout.cells, dtype=torch.float32, device=device)
    chunk_span, chunk_number = sample.chunks(POINTS)
    _prepare[(chunk_span.shape[0], entries)](
        keys=keys,
        position=sample.position,
        sample_first=sample.first,
        chunk_span=chunk_span,
        chunk_number=chunk_number,
        cell_edges=layout.cell_edges,
        given=offset if weights is None else weights,
        offset=offset,
        weight=weight,
        points=points,
        centroids=centroids,
        half=half,
        found=found,
        sizes=sizes,
        spans=spans,
        cells=layout.cells,
        dim=dim,
        **strides(key=keys),
        point_entry=points.stride(0),
        found_entry=found.stride(0),
        places=found.stride(0),
        GIVEN=weights is not None,
        MOST=WIDTH_KEYS,
        BP=POINTS,
        BW=64,
        BD=padded(dim),
        BF=1024,
        num_warps=4 if dim <= 128 else 8,
    )
    tuned = blocks_for("nearest", dim, points.dtype, device)
    averaged = blocks_for("means", dim, points.dtype, device)
    tile_span, tile_cell = layout.cell_tiles(averaged.rows)
    assigned = torch.empty(entries, size, dtype=torch.int32, device=device)

    def nearest(points: Tensor, ranges: Tensor, chunks: tuple[Tensor, Tensor], into: Tensor, level: int, prepared: bool) -> None:
        chunk_span, chunk_number = chunks
        _nearest[(chunk_span.shape[0], entries)](
            points=points,
            point_ranges=ranges,
            chunk_span=chunk_span,
            chunk_number=chunk_number,
            offset=offset,
            weight=weight,
            centroids=centroids,
            half=half,
            cell_edges=layout.cell_edges,
            span_level=layout.span_level,
            visible=found if visible is None else visible,
            found=into,
            sizes=sizes,
            cells=layout.cells,
            spans=spans,
            dim=dim,
            **strides(point=points),
            found_entry=into.stride(0),
            found_level=level,
            visible_entry=0 if visible is None else visible.stride(0),
            sinks=layout.sinks,
            PREPARED=prepared,
            LIMITED=visible is not None,
            FULL=dim == padded(dim),
            TILES=next_power_of_2(cdiv(layout.most_cells, tuned.keys)),
            BP=tuned.rows,
            BC=tuned.keys,
            BD=padded(dim),
            DT=dot_type(points.dtype),
            IP=precision(points.dtype),
            num_warps=tuned.warps,
            num_stages=tuned.stages,
        )

    programs = cdiv(layout.cells, FEW_CELLS)
    # Wider points do not fit into registers beside the list.
    has_many = spans == 1 and layout.cells >= MANY_CELLS and padded(dim) * points.element_size() <= MOST_BYTES
    listed = torch.empty(entries, programs if has_many else 0, LISTED, dtype=torch.int32, device=device)
    for turn in range(1, iterations + 1):
        nearest(points, sample.ranges, sample.chunks(tuned.rows), assigned, 0, True)
        if has_many:
            _means_of_many[(programs, entries)](
                points=points,
                assigned=assigned,
                listed=listed,
                cell_edges=layout.cell_edges,
                centroids=centroids,
                half=half,
                cells=layout.cells,
                dim=dim,
                size=size,
                turn=turn,
                BS=LISTED,
                BP=64,
                BC=FEW_CELLS,
                BD=padded(dim),
                DT=dot_type(points.dtype),
                IP=precision(points.dtype),
                num_warps=4,
            )
            continue
        _means[(tile_span.shape[0], entries)](
            points=points,
            assigned=assigned,
            sample_first=sample.first,
            tile_span=tile_span,
            tile_cell=tile_cell,
            cell_edges=layout.cell_edges,
            centroids=centroids,
            half=half,
            cells=layout.cells,
            dim=dim,
            size=size,
            turn=turn,
            BP=averaged.keys,
            BC=averaged.rows,
            BD=padded(dim),
            DT=dot_type(points.dtype),
            IP=precision(points.dtype),
            num_warps=averaged.warps,
            num_stages=averaged.stages,
        )
    nearest(keys, layout.key_ranges, layout.chunks(tuned.rows), found, found.stride(1), False)
    return sizes


@Kernel
def _hosts(sizes, parts, begins, host, held, cell_edges, key_ranges, cells, times, BC: tl.constexpr):
    """For each cell of a span that is too large: how many parts are cut off, and the small cells that take them in. Besides, how
    many members a span has."""
    span, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, last = tl.load(cell_edges + span), tl.load(cell_edges + span + 1)
    keys = tl.load(key_ranges + 2 * span + 1) - tl.load(key_ranges + 2 * span)
    mean = (keys + last - first - 1) // (last - first)
    sizes += entry * cells
    parts += entry * cells
    begins += entry * cells
    host += entry * cells
    largest = 0
    total = 0
    for start in range(first, last, BC):
        cell = start + tl.arange(0, BC)
        size = tl.load(sizes + cell, mask=cell < last, other=0)
        largest = tl.maximum(largest, tl.max(size, 0))
        total += tl.sum(size, 0)
        tl.store(parts + cell, tl.zeros([BC], tl.int32), mask=cell < last)
    tl.store(held + entry * tl.num_programs(0) + span, total)
    if largest > times * mean:
        # What was stored above lane by lane is stored again below.
        tl.debug_barrier()
        # Of n keys in m cells no more than m / 8 parts are cut off, and at least as many cells are no larger than the mean.
        free = first
        given = first
        for cell in range(first, last):
            size = tl.load(sizes + cell)
            wanted = tl.where(size > times * mean, (size - 1) // (times * mean), 0)
            begin = given
            while (given < begin + wanted) & (free < last):
                if tl.load(sizes + free) <= mean:
                    tl.store(host + given, free)
                    given += 1
                free += 1
            tl.store(parts + cell, given - begin)
            tl.store(begins + cell, begin)


def _host_cells(sizes: Tensor, layout: Layout) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    """Which cells take in parts of those that are too large, see `_hosts`; `[entries, spans]`: how many members spans have."""
    entries, cells = sizes.shape
    parts, begins, host = torch.empty(3, entries, cells, dtype=torch.int32, device=sizes.device).unbind(0)
    held = torch.empty(entries, len(layout.spans.all), dtype=torch.int32, device=sizes.device)
    _hosts[(len(layout.spans.all), entries)](
        sizes=sizes,
        parts=parts,
        begins=begins,
        host=host,
        held=held,
        cell_edges=layout.cell_edges,
        key_ranges=layout.key_ranges,
        cells=cells,
        times=MOST_TIMES_THE_MEAN,
        BC=256,
        num_warps=1,
    )
    return (parts, begins, host), held


def _settle_cells(
    cell_of: Tensor, sizes: Tensor, layout: Layout, hosts: tuple[Tensor, Tensor, Tensor] | None, tally: Tensor | None
) -> None:
    """Cuts cells as `hosts` says, if it is given, and fills in `tally`, if it is; `sizes` are kept up to date."""
    chunk_span, chunk_number = layout.chunks(KEYS)
    chunk_edges, _, per_entry = layout.tallies(KEYS)
    parts, begins, host = (sizes,) * 3 if hosts is None else hosts
    _settle[(chunk_span.shape[0], len(cell_of))](
        cell_of=cell_of,
        parts=parts,
        begins=begins,
        host=host,
        sizes=sizes,
        chunk_span=chunk_span,
        chunk_number=chunk_number,
        key_ranges=layout.key_ranges,
        span_level=layout.span_level,
        cell_edges=layout.cell_edges,
        chunk_edges=chunk_edges,
        tally=sizes if tally is None else tally,
        length=cell_of.shape[2],
        cells=layout.cells,
        per_entry=per_entry,
        cell_entry=cell_of.stride(0),
        CUT=hosts is not None,
        TALLY=tally is not None,
        BP=KEYS,
        num_warps=4,
    )


def limit_cell_sizes_(cell_of: Tensor, sizes: Tensor, layout: Layout) -> None:
    """Cuts cells of `cell_of` `[entries, span_levels, n]` that have more than eight times the mean number of keys, in place.

    `sizes` `[entries, cells]` is kept up to date. Unlike on a CPU, the small cells that take in a part keep their own keys.
    """
    if layout.cells:
        hosts, _ = _host_cells(sizes, layout)
        _settle_cells(cell_of, sizes, layout, hosts, None)
