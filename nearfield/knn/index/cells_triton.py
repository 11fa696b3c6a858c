"""The search of `CellIndex` on a GPU: pairs of rows and opened cells are scored in tiles, and each row keeps its best k keys."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells.partition.kmeans import KERNEL_ITERATIONS
from nearfield.cells.sizes import CellSizes
from nearfield.cells.spans import closed_keys
from nearfield.cells.triton.forward import cells_of, layout_for
from nearfield.cells.triton.layout import as_read
from nearfield.cells.triton.memory import MOST_ENTRIES, Units
from nearfield.cells.triton.moments import moments_of, tabulate
from nearfield.cells.triton.near import block_at, group, position_of, unit_at
from nearfield.cells.triton.route import route
from nearfield.kernels import backends
from nearfield.kernels.launch import Kernel, cdiv, dense, next_power_of_2, padded, precision
from nearfield.knn.index.base import PADDING, Found

SCORES_BYTES = 1 << 29
"""What the scores of a part of the rows may take."""

ROWS, WARPS = 64, 4
"""Rows of a tile, and how many warps work at it."""

MOST_SELECTED = 8192
"""Scores that a program holds at a time."""

STEPS = 32
"""Halvings that tell any two float32 numbers apart."""


@partial(Kernel, do_not_specialize=("unit", "width"))
def _score_cells(
    queries,
    keys,
    order,
    blocks,
    pair,
    offset,
    scores,
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
    """Inner products of up to BM rows of a unit with the keys of a cell that they have opened."""
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
        at = scores + place[:, None] + (member - start_key)[None, :]
        tl.store(at, found, mask=there[:, None] & (member < stop_key)[None, :])


@partial(Kernel, do_not_specialize=("unit", "width"))
def _score_own(
    queries,
    keys,
    visible,
    closed,
    total,
    scores,
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
    low = tl.load(closed + entry * rows + row, mask=there, other=2147483647)
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


@triton.jit
def ordered(score):
    """The bits of a float32 as an int32 of the same order."""
    bits = score.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 2147483647)


@triton.jit
def codes(scores, start, many, BW: tl.constexpr):
    """Those of BW scores; the least there is beyond the end, which no score but a NaN has."""
    at = start + tl.arange(0, BW)
    score = tl.load(scores + at, mask=at < many, other=0.0)
    return tl.where(at < many, ordered(score), -2147483648)


@partial(Kernel, do_not_specialize=("unit", "width"))
def _select(
    scores,
    order,
    starts,
    opened,
    offset,
    closed,
    total,
    count,
    best,
    ids,
    unit,
    width,
    unit_rows,
    units_per_entry,
    rows,
    cells,
    k,
    SLOTS: tl.constexpr,
    STEPS: tl.constexpr,
    ONE: tl.constexpr,
    BW: tl.constexpr,
):
    """The k largest scores of a row, and their keys, in the order in which they were scored; padding where there are fewer."""
    entry, first_row = unit_at(unit, units_per_entry, unit_rows)
    local = tl.program_id(0).to(tl.int64)
    row = entry * rows + first_row + local
    many = tl.load(count + row)
    behind = tl.load(total + row)
    own = tl.load(closed + row)
    scores += local * width
    lane = tl.arange(0, BW)
    # The largest number that k scores reach, by halving: all bits of it, so that it is the k-th score itself.
    kept = codes(scores, 0, many, BW)
    low = -2147483648
    for step in range(STEPS):
        # Half of the way up from `low`: 2^31 at first, which is one bit more than a positive number has.
        middle = tl.where(step == 0, 0, low + (1 << (31 - tl.maximum(step, 1))))
        reach = tl.sum((kept >= middle).to(tl.int32), 0)
        if not ONE:
            for start in range(BW, many, BW):
                reach += tl.sum((codes(scores, start, many, BW) >= middle).to(tl.int32), 0)
        low = tl.where(reach >= k, middle, low)
    above = tl.sum((kept > low).to(tl.int32), 0)
    if not ONE:
        for start in range(BW, many, BW):
            above += tl.sum((codes(scores, start, many, BW) > low).to(tl.int32), 0)
    room = k - above
    filled = 0
    level = 0
    for start in range(0, many, BW):
        at = start + lane
        real = at < many
        score = tl.load(scores + at, mask=real, other=0.0)
        code = codes(scores, start, many, BW)
        equal = real & (code == low)
        # Of those that are equal to the k-th, the first ones.
        rank = level + tl.cumsum(equal.to(tl.int32), 0)
        taken = (real & (code > low)) | (equal & (rank <= room))
        place = filled + tl.cumsum(taken.to(tl.int32), 0) - 1
        member = tl.zeros([BW], tl.int32)
        for slot in range(SLOTS):
            cell = tl.load(opened + row * SLOTS + slot)
            first = tl.load(offset + row * SLOTS + slot)
            base = tl.load(starts + entry * cells + tl.maximum(cell, 0)) - first
            member = tl.where((cell >= 0) & (at >= first), base + at, member)
        inside = at < behind
        key = tl.load(order + member, mask=taken & inside, other=0).to(tl.int32)
        key = tl.where(inside, key, own + at - behind)
        tl.store(best + row * k + place, score, mask=taken)
        tl.store(ids + row * k + place, key.to(tl.int64), mask=taken)
        filled += tl.sum(taken.to(tl.int32), 0)
        level += tl.sum(equal.to(tl.int32), 0)
    for start in range(0, k, BW):
        at = start + lane
        empty = (at >= filled) & (at < k)
        tl.store(best + row * k + at, tl.full([BW], -float("inf"), tl.float32), mask=empty)
        tl.store(ids + row * k + at, tl.full([BW], -1, tl.int64), mask=empty)


class KernelCells:
    """The cells of keys `[entries, n, dim]` as the kernels of `Cells` make them."""

    def __init__(self, keys: Tensor, sizes: CellSizes, iterations: int | None, seed: int, cell_of: Tensor | None = None) -> None:
        """`cell_of` `[entries, levels, n]`: the cell of each key, if they are known."""
        self.keys = dense(keys)
        self.layout = layout_for(self.keys, sizes)
        entries, length, _ = keys.shape
        if entries > MOST_ENTRIES:
            raise ValueError(f"at most {MOST_ENTRIES} heads times batch entries can be searched together, got {entries}")
        # No values are needed, and a single column is the least there is.
        value = self.keys[..., :1]
        if cell_of is not None:
            self.cell_of = cell_of
            with backends.device_guard(keys.device):
                found = moments_of(self.keys, value, cell_of, self.layout)
                self.tables = tabulate(self.keys, value, cell_of, found, self.layout)
            return
        self.cell_of = torch.empty(entries, sizes.span_levels, length, dtype=torch.int32, device=keys.device)
        everything = torch.full((entries, 1), length, dtype=torch.int32, device=keys.device)
        iterations = KERNEL_ITERATIONS if iterations is None else iterations
        with backends.device_guard(keys.device):
            self.tables = cells_of(self.keys, value, everything, sizes, self.layout, iterations, seed, self.cell_of)

    def find(self, queries: Tensor, k: int, visible: Tensor, sizes: CellSizes) -> Found:
        """The best k keys of queries `[entries, rows, dim]`; row r sees the first `visible[., r]` keys."""
        queries = dense(queries.to(self.keys.dtype))
        entries, rows, _ = queries.shape
        device = queries.device
        best = torch.empty(entries, rows, k, dtype=torch.float32, device=device)
        ids = torch.full((entries, rows, k), PADDING, dtype=torch.int64, device=device)
        cells, slots = self.tables.cells, sizes.probes
        opened = torch.full((entries, rows, slots), -1, dtype=torch.int32, device=device)
        with backends.device_guard(device):
            if cells:
                route(queries, as_read(visible), self.tables, self.layout, sizes, 1.0, opened)
            closed = closed_keys(visible, sizes)
            numbers = opened.clamp(min=0) + torch.arange(entries, device=device)[:, None, None] * cells
            starts = self.tables.starts
            held = (starts[numbers + 1] - starts[numbers]).masked_fill_(opened < 0, 0) if cells else torch.zeros_like(opened)
            total = held.sum(-1)
            count = total + visible - closed
            tensors = {
                "offset": (held.cumsum(-1) - held).int(),
                "closed": closed.int().contiguous(),
                "visible": visible.int().contiguous(),
                "total": total.int(),
                "count": count.int(),
            }
            width = int(count.max())
            size = min(rows, max(ROWS, SCORES_BYTES // (4 * max(1, width)) // ROWS * ROWS))
            units = Units(entries, rows, size, 1)
            scores = torch.empty(size, max(1, width), dtype=torch.float32, device=device)
            for unit in range(units.total):
                self._part(queries, sizes, opened, units, unit, scores, tensors, best, ids)
        return Found(best, ids, count)

    def _part(
        self,
        queries: Tensor,
        sizes: CellSizes,
        opened: Tensor,
        units: Units,
        unit: int,
        scores: Tensor,
        tensors: dict[str, Tensor],
        best: Tensor,
        ids: Tensor,
    ) -> None:
        """The rows of one unit: all their scores, and the best of them."""
        cells, slots, dim = self.tables.cells, sizes.probes, queries.shape[2]
        width, k = scores.shape[1], best.shape[2]
        where = {"unit": unit, "width": width, "unit_rows": units.size, "units_per_entry": units.per_entry}
        strides = {
            "query_entry": queries.stride(0),
            "query_row": queries.stride(1),
            "key_entry": self.keys.stride(0),
            "key_row": self.keys.stride(1),
        }
        # Float32 takes twice the room, and three products in place of one.
        wide = queries.dtype == torch.float32
        tile = {"BM": ROWS, "BN": 32 if wide else 64, "BD": padded(dim), "IP": precision(queries.dtype)}
        options = {"num_warps": WARPS, "num_stages": 1 if wide else 3}
        if cells:
            groups = group(opened, self.tables.starts, cells, units, slice(unit, unit + 1), ROWS)
            _score_cells[(groups.blocks.shape[1], 1)](
                queries=queries,
                keys=self.keys,
                order=self.tables.order,
                blocks=groups.blocks,
                pair=groups.pair,
                offset=tensors["offset"],
                scores=scores,
                **where,
                dim=dim,
                **strides,
                rows=units.rows,
                SLOTS=slots,
                **tile,
                **options,
            )
        if sizes.segment:
            _score_own[(cdiv(units.size, ROWS),)](
                queries=queries,
                keys=self.keys,
                visible=tensors["visible"],
                closed=tensors["closed"],
                total=tensors["total"],
                scores=scores,
                **where,
                dim=dim,
                **strides,
                rows=units.rows,
                **tile,
                **options,
            )
        first = unit % units.per_entry * units.size
        _select[(min(units.size, units.rows - first),)](
            scores=scores,
            order=self.tables.order,
            starts=self.tables.starts,
            opened=opened,
            offset=tensors["offset"],
            closed=tensors["closed"],
            total=tensors["total"],
            count=tensors["count"],
            best=best,
            ids=ids,
            **where,
            rows=units.rows,
            cells=cells,
            k=k,
            SLOTS=slots,
            STEPS=STEPS,
            ONE=width <= MOST_SELECTED,
            BW=min(MOST_SELECTED, max(16, next_power_of_2(width))),
            num_warps=4 if width <= 1024 else 8 if width <= 4096 else 16,
        )
