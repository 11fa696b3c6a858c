"""Tiles: dense products of some rows with the members of a cell, and the order in which they are made.

In a (row, cell) pair the row meets all members of the cell. Pairs are sorted by cell and cut into tiles of equally many rows.
Tiles whose cells are of about the same size are stacked, so that one batched matrix product serves hundreds of them. All tiles
have the same number of rows, and those of a cell the same number of columns, whichever other rows open it: a matrix product may
round a row differently when its shape changes, and a causal row must not change by a bit because of later queries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

PAGE = 256
"""Cells with more members than this are cut into pages of this size."""

GRAIN = 8
"""The columns of a tile are padded to a multiple of this."""

SCALARS_PER_PASS = 1 << 19
"""Scores and gathered numbers in one stack of tiles: 2 MB in float32."""


@dataclass(frozen=True)
class Stack:
    """Tiles of one shape."""

    rows: Tensor
    """`[tiles, tile_rows]`: row numbers; where a tile is padded, the number of rows"""
    members: Tensor
    """`[tiles, width]`: the members of the cell, as places in `CellTable.order`; 0 where it has fewer"""
    missing: Tensor | None
    """`[tiles, width]`: where the cell has fewer members; None: nowhere"""


def stacks(chosen: Tensor, edges: Tensor, dim: int, tile_rows: int | None = None, page_size: int = PAGE) -> Iterator[Stack]:
    """The tiles of all pairs in `chosen` `[rows, slots]`: numbers of cells, -1 for none. Members of cell c begin at `edges[c]`.

    `tile_rows`: rows of a tile; None: by the number of pairs and cells. `dim`: columns of what is gathered for a row or a member.
    """
    rows, slots = chosen.shape
    cells = len(edges) - 1
    if chosen.numel() == 0 or cells == 0:
        return
    device = chosen.device
    flat = chosen.reshape(-1)
    pair = flat.to(torch.int16 if cells < 2**15 else torch.int32).sort(stable=True).indices
    count = torch.bincount(flat + 1, minlength=cells + 1)
    pair, count = pair[int(count[0]) :], count[1:]
    if len(pair) == 0:
        return
    row = pair.div(slots, rounding_mode="floor")
    first = count.cumsum(0) - count
    tile_rows = tile_rows or rows_of_a_tile(rows * slots / cells)

    size = edges.diff()
    pages = -(-size // page_size)
    page_cell = torch.arange(cells, device=device).repeat_interleave(pages)
    number = torch.arange(len(page_cell), device=device) - (pages.cumsum(0) - pages)[page_cell]
    page_start = edges[page_cell] + number * page_size
    held = (edges[page_cell + 1] - page_start).clamp(max=page_size)
    width = -(-held // GRAIN) * GRAIN
    by_width = width.argsort(stable=True)
    tiles = -(-count[page_cell[by_width]] // tile_rows)
    page = by_width.repeat_interleave(tiles)
    number = torch.arange(len(page), device=device) - (tiles.cumsum(0) - tiles).repeat_interleave(tiles)
    start = first[page_cell[page]] + number * tile_rows
    stop = (first + count)[page_cell[page]]
    in_tile = torch.arange(tile_rows, device=device)
    widths, runs = width[page].unique_consecutive(return_counts=True)
    done = 0
    for wide, run in zip(widths.tolist(), runs.tolist(), strict=True):
        step = max(1, SCALARS_PER_PASS // (tile_rows * (wide + 2 * dim)))
        in_page = torch.arange(wide, device=device)
        for begin in range(done, done + run, step):
            part = slice(begin, min(begin + step, done + run))
            place = start[part, None] + in_tile
            beyond = place >= stop[part, None]
            place.masked_fill_(beyond, 0)
            missing = in_page >= held[page[part], None]
            yield Stack(
                row[place].masked_fill_(beyond, rows),
                (page_start[page[part], None] + in_page).masked_fill_(missing, 0),
                missing if int(held[page[part]].min()) < wide else None,
            )
        done += run


def rows_of_a_tile(pairs_per_cell: float) -> int:
    """Tall tiles are faster, but the last one of each cell is half empty. Depends on sizes alone, never on data."""
    return 128 if pairs_per_cell >= 384 else 64 if pairs_per_cell >= 96 else 32


def products(left: Tensor, right: Tensor, plus: Tensor | None = None, scale: float = 1.0) -> Tensor:
    """scale * left right^T + plus, for left `[tiles, rows, dim]` and right `[tiles, width, dim]`: `[tiles, rows, width]`."""
    if plus is None:
        return torch.baddbmm(left[:1, :1, :1], left, right.transpose(1, 2), beta=0.0, alpha=scale)
    return torch.baddbmm(plus, left, right.transpose(1, 2), alpha=scale)
