"""In which order rows are cut into blocks that open cells together, where there is no mask: by their best cells."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from nearfield.cells.sizes import CellSizes
from nearfield.cells.triton.cluster import fill_share, sort_by_count_
from nearfield.cells.triton.far_field import ROUTE_SPREADS, VOID, squares
from nearfield.cells.triton.layout import COLUMNS, Layout
from nearfield.cells.triton.memory import MOST_ENTRIES
from nearfield.cells.triton.moments import Tables
from nearfield.cells.triton.share import scores_of
from nearfield.cells.triton.tuning import blocks_for
from nearfield.kernels.launch import Kernel, cdiv, dot_type, next_power_of_2, padded, precision, strides


@Kernel
def _best_cells(
    queries,
    centroid,
    variance,
    log_exists,
    best,
    sizes,
    rows,
    cells,
    group,
    dim,
    query_entry,
    query_row,
    scale,
    FULL: tl.constexpr,
    TILES: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
    BD: tl.constexpr,
    DT: tl.constexpr,
    IP: tl.constexpr,
):
    """The cell of largest score of each row. Besides: no cell has rows yet."""
    entry = tl.program_id(1).to(tl.int64)
    fill_share(sizes + entry * group * cells, group * cells, 0, 1024)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    there = row < rows
    column = tl.arange(0, BD)
    wide = column < dim
    centroid += entry * cells * dim
    variance += entry * cells * dim
    log_exists += entry * cells
    query = tl.load(
        queries + entry * query_entry + row[:, None] * query_row + column[None, :],
        mask=there[:, None] & wide[None, :],
        other=0.0,
    )
    square = squares(query, scale * ROUTE_SPREADS, DT)
    lane = tl.arange(0, BC)
    # Every lane keeps its own best score, with the number of its tile in the last bits.
    top = tl.full([BM, BC], -float("inf"), tl.float32)
    for start in range(0, cells, BC):
        cell = start + lane
        exists = tl.load(log_exists + cell, mask=cell < cells, other=VOID)
        score = scores_of(query, square, centroid, variance, cell, column, wide, dim, cells, scale, FULL, IP) + exists[None, :]
        score = ((score.to(tl.int32, bitcast=True) & -TILES) | start // BC).to(tl.float32, bitcast=True)
        top = tl.maximum(top, score)
    # Of equals the first. A row whose scores are all NaN is among those of the first cell.
    place = (top.to(tl.int32, bitcast=True) & (TILES - 1)) * BC + lane[None, :]
    winner = tl.min(tl.where(top == tl.max(top, 1)[:, None], place, 1 << 30), 1)
    tl.store(best + entry * rows + row, tl.minimum(winner, cells - 1), mask=there)


def order_rows(queries: Tensor, tables: Tables, layout: Layout, sizes: CellSizes, scale: float, order: Tensor) -> None:
    """Fills in `order` `[entries, rows]`: the positions of rows, member by member of the group, by the cells of largest score.

    Rows with the same cell stay in their own order. `layout`: of the rows of a head, as if they were keys.
    """
    entries, rows, dim = queries.shape
    if not tables.cells:
        order.copy_(torch.arange(rows, device=order.device) % (rows // sizes.group))
        return
    best = torch.empty(entries * sizes.group, 1, rows // sizes.group, dtype=torch.int32, device=queries.device)
    held = torch.empty(entries * sizes.group, tables.cells, dtype=torch.int32, device=queries.device)
    blocks = blocks_for("route", dim, queries.dtype, queries.device)
    _best_cells[(cdiv(rows, blocks.rows), entries)](
        queries=queries,
        centroid=tables.centroid,
        variance=tables.variance,
        log_exists=tables.log_exists,
        best=best,
        sizes=held,
        rows=rows,
        cells=tables.cells,
        group=sizes.group,
        dim=dim,
        **strides(query=queries),
        scale=scale,
        FULL=dim == padded(dim),
        TILES=next_power_of_2(cdiv(tables.cells, COLUMNS)),
        BM=blocks.rows,
        BC=COLUMNS,
        BD=padded(dim),
        DT=dot_type(queries.dtype),
        IP=precision(queries.dtype),
        num_warps=blocks.warps,
        num_stages=blocks.stages,
    )
    places = order.view(len(best), -1)
    step = min(MOST_ENTRIES, (2**31 - 1) // best.shape[2])
    for first in range(0, len(best), step):
        some = slice(first, first + step)
        sort_by_count_(best[some], held[some], layout, places[some])
