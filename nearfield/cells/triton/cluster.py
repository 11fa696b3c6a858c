"""Cells on a GPU: k-means over all spans at once, a limit to the size of cells, and keys sorted by cell."""

from __future__ import annotations

from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from nearfield.cells.partition.kmeans import MOST_TIMES_THE_MEAN
from nearfield.cells.triton.layout import Layout, PackedCells, Sample
from nearfield.cells.triton.tuning import blocks_for
from nearfield.kernels.launch import Kernel, cdiv, dot_dtype, dot_type, padded, precision, strides


@Kernel
def _pack_cells(cell_of, where, packed, per_entry, cells, last, shift, cell_entry, CHOSEN: tl.constexpr, BP: tl.constexpr):
    """Cells as `PackedCells` says; only those at `where`, if CHOSEN."""
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    there = lane < per_entry
    place = lane
    if CHOSEN:
        place = tl.load(where + lane, mask=there, other=0).to(tl.int64)
    cell = tl.load(cell_of + entry * cell_entry + place, mask=there, other=-1)
    key = tl.where(cell >= 0, cell + entry.to(tl.int32) * cells, last) - shift
    tl.store(packed + entry * per_entry + lane, key.to(packed.dtype.element_ty), mask=there)


@Kernel
def _members(places, where, packed, position, cell, total, per_entry, length, shift, BP: tl.constexpr):
    lane = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    there = lane < total
    place = tl.load(where + tl.load(places + lane, mask=there, other=0) % per_entry, mask=there, other=0)
    tl.store(position + lane, place % length, mask=there)
    tl.store(cell + lane, tl.load(packed + lane, mask=there, other=0).to(tl.int32) + shift, mask=there)


def sort_by_cell(packed: Tensor, layout: Layout, entries: int) -> tuple[Tensor, Tensor, Tensor]:
    """Packed cells in order, where each of them was, and where each cell begins (last: where those without a cell do)."""
    found, places = packed.view(-1).sort(stable=True)
    return found, places, torch.searchsorted(found, layout.packed_cells(entries), out_int32=True)


def pack_cells(cell_of: Tensor, layout: Layout, where: Tensor | None = None) -> Tensor:
    """Cells `[entries, ...]`, -1 for none, as `PackedCells` says; only those at the places `where` of each entry, if given."""
    entries = cell_of.shape[0]
    per_entry = cell_of[0].numel() if where is None else where.shape[0]
    packing = PackedCells(entries * layout.cells)
    packed = torch.empty(entries, per_entry, dtype=packing.dtype, device=cell_of.device)
    if per_entry:
        _pack_cells[(cdiv(per_entry, 1024), entries)](
            cell_of=cell_of,
            where=cell_of if where is None else where,
            packed=packed,
            per_entry=per_entry,
            cells=layout.cells,
            last=packing.last,
            shift=packing.shift,
            cell_entry=cell_of.stride(0),
            CHOSEN=where is not None,
            BP=1024,
            num_warps=4,
        )
    return packed


def members_of(cell_of: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Positions of keys cell by cell, their cells, and where each cell begins, of `cell_of` `[entries, span_levels, n]`."""
    entries, _, length = cell_of.shape
    where = layout.members
    packed, places, starts = sort_by_cell(pack_cells(cell_of, layout, where), layout, entries)
    total = entries * where.shape[0]
    position, cell = (torch.empty(total, dtype=torch.int32, device=cell_of.device) for _ in range(2))
    shift = PackedCells(entries * layout.cells).shift
    if total:
        _members[(cdiv(total, 1024),)](
            places=places,
            where=where,
            packed=packed,
            position=position,
            cell=cell,
            total=total,
            per_entry=where.shape[0],
            length=length,
            shift=shift,
            BP=1024,
            num_warps=4,
        )
    return position, cell, starts


POINTS = 128
"""Points of a sample that a program prepares."""

WIDTH_KEYS = 1024
"""Keys of a sample from which the width of each coordinate is measured."""


@Kernel
def _widths(
    keys,
    position,
    sample_first,
    offset,
    weight,
    spans,
    dim,
    key_entry,
    key_row,
    MOST: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
):
    """Mean and root mean square of each coordinate, over some keys of one span."""
    span, entry = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BD)
    wide = column < dim
    first = tl.load(sample_first + span)
    last = tl.minimum(tl.load(sample_first + span + 1), first + MOST)
    total = tl.zeros([BP, BD], tl.float32)
    square = tl.zeros([BP, BD], tl.float32)
    for start in range(first, last, BP):
        lane = start + tl.arange(0, BP)
        there = lane < last
        own = tl.load(position + lane, mask=there, other=0).to(tl.int64)
        x = tl.load(
            keys + entry * key_entry + own[:, None] * key_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0
        ).to(tl.float32)
        total += x
        square += x * x
    count = tl.maximum(last - first, 1).to(tl.float32)
    into = (entry * spans + span) * dim + column
    tl.store(offset + into, tl.sum(total, 0) / count, mask=wide)
    tl.store(weight + into, tl.sqrt(tl.sum(square, 0) / count), mask=wide)


@Kernel
def _prepare(
    keys,
    position,
    sample_first,
    chunk_span,
    chunk_number,
    offset,
    weight,
    points,
    spans,
    dim,
    key_entry,
    key_row,
    point_entry,
    BP: tl.constexpr,
    BD: tl.constexpr,
):
    """The keys of a sample, centred and weighted."""
    chunk, entry = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    span = tl.load(chunk_span + chunk)
    column = tl.arange(0, BD)
    wide = column < dim
    lane = tl.load(sample_first + span) + tl.load(chunk_number + chunk) * BP + tl.arange(0, BP)
    there = lane < tl.load(sample_first + span + 1)
    mask = there[:, None] & wide[None, :]
    own = tl.load(position + lane, mask=there, other=0).to(tl.int64)
    x = tl.load(keys + entry * key_entry + own[:, None] * key_row + column[None, :], mask=mask, other=0.0).to(tl.float32)
    shift = tl.load(offset + (entry * spans + span) * dim + column, mask=wide, other=0.0)
    stretch = tl.load(weight + (entry * spans + span) * dim + column, mask=wide, other=0.0)
    x = ((x - shift[None, :]) * stretch[None, :]).to(points.dtype.element_ty)
    tl.store(points + entry * point_entry + lane.to(tl.int64)[:, None] * dim + column[None, :], x, mask=mask)


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
    found,
    cells,
    spans,
    dim,
    point_entry,
    point_row,
    found_entry,
    found_level,
    shift,
    PREPARED: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """For a block of points, the cell c of their span with the largest x.c - |c|^2 / 2, where x = (point - offset) * weight.

    PREPARED: points are already of this form, and their cells are packed, see `PackedCells`.
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
    x = tl.load(points + point[:, None] * point_row + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
    if not PREPARED:
        shift = tl.load(offset + (entry * spans + span) * dim + column, mask=wide, other=0.0)
        stretch = tl.load(weight + (entry * spans + span) * dim + column, mask=wide, other=0.0)
        x = ((x.to(tl.float32) - shift[None, :]) * stretch[None, :]).to(DT)
    first, last = tl.load(cell_edges + span), tl.load(cell_edges + span + 1)
    best = tl.full([BP], -float("inf"), tl.float32)
    chosen = tl.zeros([BP], tl.int32) + first
    for start in range(first, last, BC):
        cell = start + tl.arange(0, BC)
        real = cell < last
        place = entry * cells + cell
        c = tl.load(centroids + place[None, :] * dim + column[:, None], mask=real[None, :] & wide[:, None], other=0.0)
        score = tl.dot(x, c, input_precision=IP) - tl.load(half + place, mask=real, other=float("inf"))[None, :]
        top = tl.max(score, 1)
        winner = tl.argmax(score, 1).to(tl.int32) + start
        chosen = tl.where(top > best, winner, chosen)
        best = tl.maximum(top, best)
    # Comparisons with NaN are false: stay inside the span.
    chosen = tl.minimum(chosen, last - 1)
    if PREPARED:
        chosen += (entry * cells).to(tl.int32) - shift
    level = tl.load(span_level + span).to(tl.int64)
    tl.store(found + entry * found_entry + level * found_level + point, chosen.to(found.dtype.element_ty), mask=there)


@partial(Kernel, do_not_specialize=("turn",))
def _means(
    points,
    order,
    starts,
    sample_first,
    span_of_cell,
    cell_edges,
    centroids,
    half,
    cells,
    dim,
    size,
    turn,
    BP: tl.constexpr,
    BD: tl.constexpr,
):
    """The mean of the points of one cell. An empty cell starts again at a point of the sample, a different one in every turn."""
    number = tl.program_id(0).to(tl.int64)
    entry, cell = number // cells, number % cells
    column = tl.arange(0, BD)
    wide = column < dim
    first, last = tl.load(starts + number), tl.load(starts + number + 1)
    total = tl.zeros([BP, BD], tl.float32)
    for start in range(first, last, BP):
        lane = start + tl.arange(0, BP)
        there = lane < last
        own = tl.load(order + lane, mask=there, other=0).to(tl.int64)
        x = tl.load(points + own[:, None] * dim + column[None, :], mask=there[:, None] & wide[None, :], other=0.0)
        total += x.to(tl.float32)
    span = tl.load(span_of_cell + cell)
    begin = tl.load(sample_first + span)
    count = tl.load(sample_first + span + 1) - begin
    own_cells = tl.load(cell_edges + span + 1) - tl.load(cell_edges + span)
    again = begin + (turn * own_cells + cell - tl.load(cell_edges + span)) % count
    other = tl.load(points + (entry * size + again) * dim + column, mask=wide, other=0.0).to(tl.float32)
    mean = tl.where(last > first, tl.sum(total, 0) / tl.maximum(last - first, 1).to(tl.float32), other)
    mean = mean.to(centroids.dtype.element_ty)
    tl.store(centroids + number * dim + column, mean, mask=wide)
    rounded = mean.to(tl.float32)
    tl.store(half + number, tl.sum(rounded * rounded, 0) / 2)


def kmeans(keys: Tensor, layout: Layout, iterations: int, seed: int, found: Tensor) -> None:
    """Fills in `found` `[entries, span_levels, n]`: the cell of each key `[entries, n, dim]` in every span that has it.

    Coordinates are weighted by their root mean square, as in `partition.KMeans`. Unlike there, all cells are made in one step,
    from 16 keys per cell rather than 32, and an empty cell starts again at some key of the sample.
    """
    entries, _, dim = keys.shape
    sample = layout.sample(seed)
    size, spans, device = sample.size, len(layout.spans.all), keys.device
    if not spans:
        return
    offset, weight = (torch.empty(entries, spans, dim, device=device) for _ in range(2))
    points = torch.empty(entries, size, dim, dtype=dot_dtype(keys.dtype), device=device)
    common = {"BD": padded(dim), "num_warps": 4 if dim <= 128 else 8}
    _widths[(spans, entries)](
        keys=keys,
        position=sample.position,
        sample_first=sample.first,
        offset=offset,
        weight=weight,
        spans=spans,
        dim=dim,
        **strides(key=keys),
        MOST=WIDTH_KEYS,
        BP=64,
        **common,
    )
    chunk_span, chunk_number = sample.chunks(POINTS)
    _prepare[(chunk_span.shape[0], entries)](
        keys=keys,
        position=sample.position,
        sample_first=sample.first,
        chunk_span=chunk_span,
        chunk_number=chunk_number,
        offset=offset,
        weight=weight,
        points=points,
        spans=spans,
        dim=dim,
        **strides(key=keys),
        point_entry=points.stride(0),
        BP=POINTS,
        **common,
    )
    centroids = _Centroids(layout, sample, points, offset, weight, common)
    for turn in range(1, iterations + 1):
        centroids.move(turn)
    centroids.assign(keys, found)


class _Centroids:
    """The centroids of all spans, moved by one iteration of k-means at a time."""

    def __init__(
        self,
        layout: Layout,
        sample: Sample,
        points: Tensor,
        offset: Tensor,
        weight: Tensor,
        common: dict[str, int],
    ) -> None:
        self.layout, self.sample, self.points = layout, sample, points
        self.offset, self.weight, self.common = offset, weight, common
        entries, _, self.dim = points.shape
        self.centroids = points.new_empty((entries, layout.cells, self.dim))
        self.half = torch.empty(entries, layout.cells, device=points.device)
        self.blocks = blocks_for("nearest", self.dim, points.dtype, points.device)
        self.packing = PackedCells(entries * layout.cells)
        self.assigned = torch.empty(entries, sample.size, dtype=self.packing.dtype, device=points.device)
        # All cells are empty, and start at the first points of the sample.
        nothing = torch.zeros(entries * layout.cells + 1, dtype=torch.int32, device=points.device)
        self._means(nothing, nothing, 0)

    def move(self, turn: int) -> None:
        """Each point goes to its nearest centroid, and each centroid to the mean of its points."""
        self._nearest(self.points, self.sample.ranges, self.sample.chunks(self.blocks.rows), self.assigned, 0, True)
        _, order, starts = sort_by_cell(self.assigned, self.layout, self.points.shape[0])
        self._means(order, starts, turn)

    def _means(self, order: Tensor, starts: Tensor, turn: int) -> None:
        _means[(self.packing.last,)](
            points=self.points,
            order=order,
            starts=starts,
            sample_first=self.sample.first,
            span_of_cell=self.layout.span_of_cell,
            cell_edges=self.layout.cell_edges,
            centroids=self.centroids,
            half=self.half,
            cells=self.layout.cells,
            dim=self.dim,
            size=self.sample.size,
            turn=turn,
            BP=16,
            BD=self.common["BD"],
            num_warps=2,
        )

    def assign(self, keys: Tensor, found: Tensor) -> None:
        """Fills in the cell of each key: that of its nearest centroid."""
        self._nearest(keys, self.layout.key_ranges, self.layout.chunks(self.blocks.rows), found, found.stride(1), False)

    def _nearest(
        self, points: Tensor, ranges: Tensor, chunks: tuple[Tensor, Tensor], found: Tensor, found_level: int, prepared: bool
    ) -> None:
        chunk_span, chunk_number = chunks
        _nearest[(chunk_span.shape[0], points.shape[0])](
            points=points,
            point_ranges=ranges,
            chunk_span=chunk_span,
            chunk_number=chunk_number,
            offset=self.offset,
            weight=self.weight,
            centroids=self.centroids,
            half=self.half,
            cell_edges=self.layout.cell_edges,
            span_level=self.layout.span_level,
            found=found,
            cells=self.layout.cells,
            spans=len(self.layout.spans.all),
            dim=self.dim,
            **strides(point=points),
            found_entry=found.stride(0),
            found_level=found_level,
            shift=self.packing.shift,
            PREPARED=prepared,
            BP=self.blocks.rows,
            BC=self.blocks.keys,
            BD=self.common["BD"],
            DT=dot_type(points.dtype),
            IP=precision(points.dtype),
            num_warps=self.blocks.warps,
            num_stages=self.blocks.stages,
        )


KEYS = 1024
"""Keys that a program counts or moves."""


@Kernel
def _sizes(cell_of, sizes, per_entry, cells, cell_entry, BP: tl.constexpr):
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    cell = tl.load(cell_of + entry * cell_entry + lane, mask=lane < per_entry, other=-1)
    tl.atomic_add(sizes + entry * cells + cell, 1, mask=cell >= 0, sem="relaxed")


@Kernel
def _hosts(sizes, parts, begins, host, cell_edges, key_ranges, cells, times, BC: tl.constexpr):
    """For each cell of a span that is too large: how many parts are cut off, and the small cells that take them in."""
    span, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, last = tl.load(cell_edges + span), tl.load(cell_edges + span + 1)
    keys = tl.load(key_ranges + 2 * span + 1) - tl.load(key_ranges + 2 * span)
    mean = (keys + last - first - 1) // (last - first)
    sizes += entry * cells
    parts += entry * cells
    begins += entry * cells
    host += entry * cells
    largest = 0
    for start in range(first, last, BC):
        cell = start + tl.arange(0, BC)
        largest = tl.maximum(largest, tl.max(tl.load(sizes + cell, mask=cell < last, other=0), 0))
    if largest > times * mean:
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


@Kernel
def _move(cell_of, parts, begins, host, per_entry, length, cells, cell_entry, BP: tl.constexpr):
    """A hash of its position sends each key of a cut cell to one of the parts: equal keys may come at equal distances."""
    entry = tl.program_id(1).to(tl.int64)
    lane = tl.program_id(0).to(tl.int64) * BP + tl.arange(0, BP)
    here = cell_of + entry * cell_entry + lane
    cell = tl.load(here, mask=lane < per_entry, other=-1)
    there = cell >= 0
    count = tl.load(parts + entry * cells + cell, mask=there, other=0)
    mixed = (lane % length * 2654435761 >> 16) & 65535
    part = (mixed % (count + 1)).to(tl.int32)
    moved = there & (part > 0)
    begin = tl.load(begins + entry * cells + cell, mask=moved, other=0)
    tl.store(here, tl.load(host + entry * cells + begin + part - 1, mask=moved, other=0), mask=moved)


def limit_cell_sizes_(cell_of: Tensor, layout: Layout) -> None:
    """Cuts cells of `cell_of` `[entries, span_levels, n]` that have more than eight times the mean number of keys, in place.

    Unlike on a CPU, the small cells that take in a part keep their own keys.
    """
    entries, levels, length = cell_of.shape
    if not layout.cells:
        return
    device, total = cell_of.device, (entries, layout.cells)
    sizes, parts = (torch.zeros(total, dtype=torch.int32, device=device) for _ in range(2))
    begins, host = (torch.empty(total, dtype=torch.int32, device=device) for _ in range(2))
    grid = (cdiv(levels * length, KEYS), entries)
    _sizes[grid](
        cell_of=cell_of,
        sizes=sizes,
        per_entry=levels * length,
        cells=layout.cells,
        cell_entry=cell_of.stride(0),
        BP=KEYS,
        num_warps=4,
    )
    _hosts[(len(layout.spans.all), entries)](
        sizes=sizes,
        parts=parts,
        begins=begins,
        host=host,
        cell_edges=layout.cell_edges,
        key_ranges=layout.key_ranges,
        cells=layout.cells,
        times=MOST_TIMES_THE_MEAN,
        BC=256,
        num_warps=1,
    )
    _move[grid](
        cell_of=cell_of,
        parts=parts,
        begins=begins,
        host=host,
        per_entry=levels * length,
        length=length,
        cells=layout.cells,
        cell_entry=cell_of.stride(0),
        BP=KEYS,
        num_warps=4,
    )
