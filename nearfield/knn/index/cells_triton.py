"""The search of `CellIndex` on a GPU: pairs of rows and opened cells are scored in tiles, and each row keeps its best k keys."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells.partition.kmeans import KMeans
from nearfield.cells.sizes import CellSizes
from nearfield.cells.spans import closed_keys
from nearfield.cells.triton.forward import cells_of, layout_for
from nearfield.cells.triton.layout import as_read
from nearfield.cells.triton.memory import MOST_ENTRIES, Units
from nearfield.cells.triton.moments import moments_of, tabulate
from nearfield.cells.triton.near import block_at, group, position_of, unit_at
from nearfield.cells.triton.route import route
from nearfield.kernels import backends
from nearfield.kernels.launch import Kernel, cdiv, dense, next_power_of_2, padded, precision, strides
from nearfield.knn.index.base import Found

SCORES_BYTES = 1 << 29
"""What the scores of a part of the rows may take."""

ROWS, WARPS = 64, 4
"""Rows of a tile, and how many warps work at it."""

LEAST_SELECTED, MOST_SELECTED = 512, 16384
"""Scores that a program holds at a time."""

MOST_HELD, FEW = 64, 8
"""Scores that a thread holds at a time while they are counted, and while they are written down."""

GUESSES, HALVINGS = 8, 40
"""The k-th score of a row is bracketed by so many steps in proportion to how many scores lie on either side, then by halving the
interval, and after so many steps in all by halving what numbers there are in it: 32 of these tell any two apart."""


@partial(Kernel, do_not_specialize=("unit", "width"))
def _score_cells(
    queries,
    keys,
    order,
    blocks,
    pair,
    offset,
    scores,
    places,
    unit,
    width,
    unit_rows,
    units_per_entry,
    dim,
    query_entry,
    query_row,
    key_entry,
    key_row,
    rows,
    SLOTS: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    IP: tl.constexpr,
):
    """Inner products of up to BM rows of a unit with the keys of a cell that they have opened, and which keys these are."""
    begin, end, start_key, stop_key = block_at(blocks, tl.program_id(1))
    if begin >= end:
        return
    entry, first_row = unit_at(unit, units_per_entry, unit_rows)
    queries += entry * query_entry
    keys += entry * key_entry
    lane = begin + tl.arange(0, BM)
    there = lane < end
    own = tl.load(pair + tl.minimum(lane, end - 1)).to(tl.int64)
    row = first_row + own // SLOTS
    column = tl.arange(0, BD)
    wide = column < dim
    query = tl.load(queries + row[:, None] * query_row + column[None, :], mask=wide[None, :], other=0.0)
    # Scores of a row follow each other, cell by cell.
    place = (own // SLOTS) * width + tl.load(offset + (entry * rows + first_row) * SLOTS + own)
    for key_at in range(start_key, stop_key, BN):
        member = key_at + tl.arange(0, BN)
        position = position_of(order, key_at, stop_key, BN)
        key = tl.load(keys + position[:, None] * key_row + column[None, :], mask=wide[None, :], other=0.0)
        found = tl.dot(query, tl.trans(key), input_precision=IP)
        at = place[:, None] + (member - start_key)[None, :]
        mask = there[:, None] & (member < stop_key)[None, :]
        tl.store(scores + at, found, mask=mask)
        tl.store(places + at, tl.broadcast_to(position.to(tl.int32)[None, :], [BM, BN]), mask=mask)


@partial(Kernel, do_not_specialize=("unit", "width"))
def _score_own(
    queries,
    keys,
    visible,
    closed,
    total,
    scores,
    places,
    unit,
    width,
    unit_rows,
    units_per_entry,
    dim,
    query_entry,
    query_row,
    key_entry,
    key_row,
    rows,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
    IP: tl.constexpr,
):
    """Inner products of BM rows with the keys after their last closed segment. They follow those of the cells."""
    entry, first_row = unit_at(unit, units_per_entry, unit_rows)
    local = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    row = first_row + local
    there = (local < unit_rows) & (row < rows)
    # A tile without rows reads nothing; a first key near 2^31 would wrap around in a pipelined loop.
    low = tl.load(closed + entry * rows + row, mask=there, other=1 << 30)
    high = tl.load(visible + entry * rows + row, mask=there, other=0)
    begin = tl.load(total + entry * rows + row, mask=there, other=0)
    column = tl.arange(0, BD)
    wide = column < dim
    mask = there[:, None] & wide[None, :]
    query = tl.load(queries + entry * query_entry + row[:, None] * query_row + column[None, :], mask=mask, other=0.0)
    first, last = tl.min(low, 0), tl.max(high, 0)
    for key_at in range(first, last, BN):
        position = (key_at + tl.arange(0, BN)).to(tl.int64)
        at = keys + entry * key_entry + position[:, None] * key_row + column[None, :]
        key = tl.load(at, mask=(position < last)[:, None] & wide[None, :], other=0.0)
        found = tl.dot(query, tl.trans(key), input_precision=IP)
        seen = there[:, None] & (position[None, :] >= low[:, None]) & (position[None, :] < high[:, None])
        place = local[:, None] * width + begin[:, None] + position[None, :] - low[:, None]
        tl.store(scores + place, found, mask=seen)
        tl.store(places + place, tl.broadcast_to(position.to(tl.int32)[None, :], [BM, BN]), mask=seen)


@triton.jit
def ordered(score):
    """The bits of a float32 as an int32 of the same order."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 2147483647)


@triton.jit
def number(code):
    """The float32 whose `ordered` bits these are."""
    return (code ^ ((code >> 31) & 2147483647)).to(tl.float32, bitcast=True)


@triton.jit
def codes(scores, start, many, BT: tl.constexpr, BE: tl.constexpr):
    """Those of BT * BE scores `[BT, BE]`, BE for each thread; the least there is beyond the end, which no score but a NaN has."""
    at = start + tl.arange(0, BT)[:, None] + tl.arange(0, BE)[None, :] * BT
    score = tl.load(scores + at, mask=at < many, other=0.0)
    return tl.where(at < many, ordered(score), -2147483648)


@triton.jit
def total_of(numbers):
    """The sum of all: first within threads, then across."""
    return tl.sum(tl.sum(numbers, 1), 0)


@partial(Kernel, do_not_specialize=("unit", "width", "longer_than"))
def _select(
    scores,
    places,
    count,
    best,
    ids,
    unit,
    width,
    unit_rows,
    units_per_entry,
    rows,
    k,
    longer_than,
    GUESSES: tl.constexpr,
    HALVINGS: tl.constexpr,
    ONE: tl.constexpr,
    BT: tl.constexpr,
    BE: tl.constexpr,
    FEW: tl.constexpr,
):
    """The k largest scores of a row, and their keys, in any order; padding where there are fewer.

    Of rows with at most BT * BE scores, and more than `longer_than`; without ONE also of all that have more. Threads
    have columns of the scores for themselves, so that most of the counting is done without the others.
    """
    BW: tl.constexpr = BT * BE
    entry, first_row = unit_at(unit, units_per_entry, unit_rows)
    local = tl.program_id(0).to(tl.int64)
    many = tl.load(count + entry * rows + first_row + local)
    most_held = BW if ONE else many
    if (many <= longer_than) | (many > most_held):
        return
    scores += local * width
    places += local * width
    best += local * k
    ids += local * k
    lane = tl.arange(0, BT)[:, None] + tl.arange(0, BE)[None, :] * BT
    few = tl.arange(0, BT)[:, None] + tl.arange(0, FEW)[None, :] * BT
    kept = codes(scores, 0, many, BT, BE)
    least = tl.min(tl.min(tl.where(lane < many, kept, 2147483647), 1), 0)
    most = tl.max(tl.max(kept, 1), 0)
    if not ONE:
        for start in range(BW, many, BW):
            more = codes(scores, start, many, BT, BE)
            least = tl.minimum(least, tl.min(tl.min(tl.where(start + lane < many, more, 2147483647), 1), 0))
            most = tl.maximum(most, tl.max(tl.max(more, 1), 0))
    # At least k scores reach `low`, fewer reach `high`; with k of them, or nothing in between, `low` is the bound.
    low = least
    high = most + 1
    reach_low = many
    reach_high = 0
    step = 0
    while (reach_low > k) & (low + 1 < high):
        share = (reach_low - k).to(tl.float32) / (reach_low - reach_high).to(tl.float32)
        share = tl.where(step < GUESSES, tl.minimum(tl.maximum(share, 0.02), 0.98), 0.5)
        guess = ordered(number(low) * (1 - share) + number(high) * share)
        guess = tl.where(step < HALVINGS, guess, (low >> 1) + (high >> 1) + (low & high & 1))
        middle = tl.minimum(tl.maximum(guess, low + 1), high - 1)
        reach = total_of((kept >= middle).to(tl.int32))
        if not ONE:
            for start in range(BW, many, BW):
                reach += total_of((codes(scores, start, many, BT, BE) >= middle).to(tl.int32))
        enough = reach >= k
        low = tl.where(enough, middle, low)
        reach_low = tl.where(enough, reach, reach_low)
        high = tl.where(enough, high, middle)
        reach_high = tl.where(enough, reach_high, reach)
        step += 1
    # Where more than k reach it there is nothing in between: those at it are all equal, and some of them are taken.
    bound = tl.where(reach_low > k, high, low)
    room = k - reach_high
    filled = 0
    level = 0
    for start in range(0, many, BT * FEW):
        at = start + few
        score = tl.load(scores + at, mask=at < many, other=0.0)
        code = ordered(score)
        above = (at < many) & (code >= bound)
        equal = (at < many) & (code >= low) & (code < bound)
        # Both counts in one number: neither is above 2^15.
        one = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        own = tl.sum(one, 1)
        counted = (tl.cumsum(own, 0) - own)[:, None] + tl.cumsum(one, 1)
        rank = level + (counted >> 16)
        taken = above | (equal & (rank <= room))
        place = filled + (counted & 65535) + tl.minimum(rank, room) - tl.minimum(level, room) - 1
        key = tl.load(places + at, mask=taken, other=0)
        tl.store(best + place, score, mask=taken)
        tl.store(ids + place, key.to(ids.dtype.element_ty), mask=taken)
        all_of_them = tl.sum(own, 0)
        filled += (all_of_them & 65535) + tl.minimum(level + (all_of_them >> 16), room) - tl.minimum(level, room)
        level += all_of_them >> 16
    for start in range(filled, k, BT):
        at = start + tl.arange(0, BT)
        tl.store(best + at, tl.full([BT], -float("inf"), tl.float32), mask=at < k)
        tl.store(ids + at, tl.full([BT], -1, ids.dtype.element_ty), mask=at < k)


class Candidates(NamedTuple):
    """Which keys the rows of a call score."""

    opened: Tensor
    """`[entries, rows, probes]`, int32: cells; -1: none"""
    offset: Tensor
    """`[entries, rows, probes]`, int32: how many keys a row scores before those of this cell"""
    closed: Tensor
    """`[entries, rows]`, int32, as those below: a row's own keys begin here"""
    visible: Tensor
    total: Tensor
    """keys of opened cells"""
    scored: Tensor
    """all keys that are scored"""
    units: Units
    scores: Tensor
    """`[rows of a unit, most keys]`"""
    places: Tensor
    """`[rows of a unit, most keys]`, int32: which keys these are"""
    fewest: int
    """keys that any row scores"""


class KernelCells:
    """The cells of keys `[entries, n, dim]` as the kernels of `Cells` make them."""

    def __init__(
        self,
        keys: Tensor,
        sizes: CellSizes,
        iterations: int | None,
        seed: int,
        cell_of: Tensor | None = None,
        known: bool = False,
    ) -> None:
        """`cell_of` `[entries, levels, n]`, int32: the cells of each key go there, or are there if they are `known`."""
        self.keys = dense(keys)
        self.layout = layout_for(self.keys, sizes)
        entries, length, _ = keys.shape
        if entries > MOST_ENTRIES:
            raise ValueError(f"at most {MOST_ENTRIES} heads times batch entries can be searched together, got {entries}")
        # No values are needed, and a single column is the least there is.
        value = self.keys[..., :1]
        if cell_of is None:
            cell_of = torch.empty(entries, sizes.span_levels, length, dtype=torch.int32, device=keys.device)
        with backends.device_guard(keys.device):
            if known:
                found = moments_of(self.keys, value, cell_of, self.layout)
                self.tables = tabulate(self.keys, value, cell_of, found, self.layout)
            else:
                everything = torch.full((entries, 1), length, dtype=torch.int32, device=keys.device)
                partition = KMeans(iterations, seed)
                self.tables = cells_of(None, self.keys, value, everything, sizes, self.layout, partition, cell_of)

    def find(self, queries: Tensor, k: int, visible: Tensor, sizes: CellSizes) -> Found:
        """The best k keys of queries `[entries, rows, dim]`; row r sees the first `visible[., r]` keys."""
        queries = dense(queries.to(self.keys.dtype))
        entries, rows, _ = queries.shape
        best = torch.empty(entries, rows, k, dtype=torch.float32, device=queries.device)
        ids = torch.empty(entries, rows, k, dtype=torch.int64, device=queries.device)
        with backends.device_guard(queries.device):
            candidates = self.candidates(queries, visible, sizes)
            for unit in range(candidates.units.total):
                entry, part = candidates.units.slices(slice(unit, unit + 1))
                self.search(queries, sizes, candidates, unit, best[entry.start, part], ids[entry.start, part])
        return Found(best, ids, candidates.scored.long())

    def candidates(self, queries: Tensor, visible: Tensor, sizes: CellSizes) -> Candidates:
        """The cells that rows open, and room for the scores of a part of the rows."""
        entries, rows, _ = queries.shape
        device, cells = queries.device, self.tables.cells
        opened = torch.full((entries, rows, sizes.probes), -1, dtype=torch.int32, device=device)
        held = torch.zeros_like(opened)
        if cells:
            route(queries, as_read(visible), self.tables, self.layout, sizes, 1.0, opened)
            starts = self.tables.starts
            first = torch.arange(0, entries * cells, cells, dtype=torch.int32, device=device)
            numbers = opened.clamp(min=0) + first[:, None, None]
            held = starts.diff().int()[numbers].masked_fill_(opened < 0, 0)
        closed = closed_keys(visible, sizes)
        total = held.sum(-1)
        count = total + visible - closed
        fewest, most = torch.stack(count.aminmax()).tolist()
        width = max(1, most)
        size = min(rows, max(ROWS, SCORES_BYTES // (8 * width) // ROWS * ROWS))
        return Candidates(
            opened,
            held.cumsum(-1, dtype=torch.int32) - held,
            closed.int().contiguous(),
            visible.int().contiguous(),
            total.int(),
            count.int(),
            Units(entries, rows, size, 1),
            torch.empty(size, width, dtype=torch.float32, device=device),
            torch.empty(size, width, dtype=torch.int32, device=device),
            fewest,
        )

    def search(self, queries: Tensor, sizes: CellSizes, candidates: Candidates, unit: int, best: Tensor, ids: Tensor) -> None:
        """The best of what the rows of one unit score, and their ids, into `[rows of the unit, k]`."""
        slots, dim, units = sizes.probes, queries.shape[2], candidates.units
        width, (count, k) = candidates.scores.shape[1], best.shape
        found = {"scores": candidates.scores, "places": candidates.places}
        where = {"unit": unit, "width": width, "unit_rows": units.size, "units_per_entry": units.per_entry}
        across = strides(query=queries, key=self.keys)
        # Float32 takes twice the room, and three products in place of one.
        wide = queries.dtype == torch.float32
        tile = {"BM": ROWS, "BN": 32 if wide else 64, "BD": padded(dim), "IP": precision(queries.dtype)}
        options = {"num_warps": WARPS, "num_stages": 1 if wide else 3}
        if self.tables.cells:
            groups = group(candidates.opened, self.tables.starts, self.tables.cells, units, slice(unit, unit + 1), ROWS)
            _score_cells[(groups.blocks.shape[1], 1)](
                queries=queries,
                keys=self.keys,
                order=self.tables.order,
                blocks=groups.blocks,
                pair=groups.pair,
                offset=candidates.offset,
                **found,
                **where,
                dim=dim,
                **across,
                rows=units.rows,
                SLOTS=slots,
                **tile,
                **options,
            )
        if sizes.segment:
            _score_own[(cdiv(count, ROWS),)](
                queries=queries,
                keys=self.keys,
                visible=candidates.visible,
                closed=candidates.closed,
                total=candidates.total,
                **found,
                **where,
                dim=dim,
                **across,
                rows=units.rows,
                **tile,
                **options,
            )
        # Short rows and long ones by themselves, each held whole; of the longest the rest is read again at each step.
        sizes_held = _powers(candidates.fewest, width)
        for shorter, held in zip((-1, *sizes_held), sizes_held, strict=False):
            warps = max(1, held // (32 * MOST_HELD))
            _select[(count,)](
                **found,
                count=candidates.scored,
                best=best,
                ids=ids,
                **where,
                rows=units.rows,
                k=k,
                longer_than=shorter,
                GUESSES=GUESSES,
                HALVINGS=HALVINGS,
                ONE=held < sizes_held[-1] or width <= held,
                BT=32 * warps,
                BE=held // (32 * warps),
                FEW=min(FEW, held // (32 * warps)),
                num_warps=warps,
            )


def _powers(fewest: int, most: int) -> list[int]:
    """Numbers of scores to hold for rows of so many: powers of 2, up to `MOST_SELECTED`."""
    first, last = (min(MOST_SELECTED, next_power_of_2(x)) for x in (max(fewest, LEAST_SELECTED), max(most, LEAST_SELECTED)))
    return [2**x for x in range(first.bit_length() - 1, last.bit_length())]
