"""One head of the cells engine in torch: its cells, its blocks of rows, and sums that can be merged."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import InitVar, dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from nearfield.cells.far_field import finite
from nearfield.cells.moments import CellTable, SeenCells, tabulate
from nearfield.cells.partition import Partition, asks_queries, build_cells
from nearfield.cells.partition.by_queries import latest_squares, sizes_of, strewn_squares
from nearfield.cells.sizes import CellSizes
from nearfield.cells.spans import Piece, Span, Spans, blocks_of_rows, closed_keys, pieces, row_blocks_of
from nearfield.chunks import row_blocks
from nearfield.sampling import dropout_factors

LEAST_BLOCK_BYTES, MOST_BLOCK_BYTES = 4 << 20, 256 << 20
"""What a block of rows may take, whatever the size of the inputs."""

LEAST_SCORES, MOST_SCORES = 1 << 18, 1 << 20
"""Entries of a score table, whatever the size of the inputs: 1 to 4 MB in float32."""

BYTES_PER_LOCAL_WEIGHT = 32
"""What one weight takes, with its intermediate results, where torch's own kernel does not serve."""


@dataclass
class Head:
    """One key-value head with the rows that attend to it, and what forward and backward pass have in common."""

    queries: Tensor
    """`[group * length, dim]`, in the dtype of the inputs and not yet multiplied by the scale"""
    keys: Tensor
    """`[n, dim]`"""
    values: Tensor
    """`[n, value_dim]`"""
    visible: Tensor
    """`[group * length]`: how many keys each row sees; the same for every member of the group"""
    cell_of: Tensor
    """as in `CellPlan`"""
    sizes: CellSizes
    scale: float
    dropout_p: float = 0.0
    seed: int = 0
    first_row: int = 0
    """the number of its first row among the rows of all heads; what a row draws depends on its number"""
    order: Tensor | None = None
    """`[group * length]`: as in `CellPlan`; None: not known yet, or rows are in their own order"""
    softcap: float = 0.0
    """see `Problem.softcap`"""
    known_table: InitVar[CellTable | None] = None
    """its table, where it was made for the same keys, values and cells already, of as many segments as these rows see or more"""
    block_of: Tensor = field(init=False)
    """`[group * length]`: the block with which each row opens cells"""
    pieces: list[Piece] = field(init=False)
    spans: Spans = field(init=False)
    table: CellTable = field(init=False)

    def __post_init__(self, known_table: CellTable | None) -> None:
        self.cut_into_blocks(self.order)
        self.pieces = pieces(self.visible_at, self.sizes)
        if known_table is not None:
            # There are as many spans as segments. A table may have more of them than these rows see.
            self.spans = Spans(len(known_table.spans) - 1, self.sizes.span_levels)
            self.table = known_table
            return
        self.spans = Spans(max((piece.segments for piece in self.pieces), default=0), self.sizes.span_levels)
        edges = edges_of(self.spans, self.sizes, self.segment_length, self.cell_of)
        self.table = tabulate(self.keys, self.values, self.cell_of, edges)

    def cut_into_blocks(self, order: Tensor | None) -> None:
        """Let rows open cells together in this order."""
        self.order = order if order is None else order.long()
        self.block_of = blocks_of_rows(len(self.queries), self.sizes, self.queries.device, self.order)

    def seen_by(self, piece: Piece) -> SeenCells:
        """The cells that a piece sees."""
        return self.table.seen([span.number for span in self.spans.seen(piece.segments)])

    def homes(self, piece: Piece) -> Tensor:
        """`[closed]`: the cell through which a piece sees each key; -1: none."""
        size = piece.closed // max(1, piece.segments)
        spans = self.spans.seen(piece.segments)
        return torch.cat([self.cell_of[span.level, span.first * size : (span.first + span.segments) * size] for span in spans])

    @property
    def length(self) -> int:
        """How many positions have queries."""
        return len(self.queries) // self.sizes.group

    @property
    def visible_at(self) -> Tensor:
        """`[length]`: how many keys the rows at each position see."""
        return self.visible[: self.length]

    @property
    def segment_length(self) -> int:
        """Keys per segment; all that are seen, where attention is not causal."""
        return self.sizes.segment or (int(self.visible_at.max()) if self.length else 0)

    @property
    def compute(self) -> torch.dtype:
        """The dtype of arithmetic."""
        return torch.promote_types(self.queries.dtype, torch.float32)

    def blocks(self) -> Iterator[RowBlock]:
        """All rows in parts that tear no block of rows that open cells together.

        A part takes no more than half the memory of one input, within the bounds above.
        """
        sizes, wide = self.sizes, self.values.shape[1]
        # Few rows meet many keys where the others are on other ranks; in small blocks they would fill few tiles.
        budget = min(MOST_BLOCK_BYTES, max(LEAST_BLOCK_BYTES, max(self.queries.numel(), self.keys.numel()) * 2))
        # Two accumulators, the (row, cell) pairs with what it takes to sort them, and draws.
        per_row = 8 * wide + 40 * sizes.probes + sizes.samples * (16 * wide + 64)
        positions = max(64, budget // (per_row * sizes.group))
        for found in row_blocks_of(self.pieces, -(-positions // sizes.share) * sizes.share):
            yield RowBlock(self, found)

    @property
    def scores_per_pass(self) -> int:
        """Entries of one table of scores, rows by cells. Several such tables exist at a time."""
        return min(MOST_SCORES, max(LEAST_SCORES, self.queries.numel() // 8))

    @property
    def serves_fused(self) -> bool:
        """Whether torch's own kernel serves the keys that are seen one by one."""
        return (
            self.dropout_p == 0.0 == self.softcap
            and self.keys.shape[1] == self.values.shape[1]
            and self.keys.device.type == "cpu"
        )

    def members(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at some positions, in the dtype of arithmetic."""
        keys, values = self.keys.index_select(0, own), self.values.index_select(0, own)
        return keys.to(self.compute), values.to(self.compute)

    def scaled(self, numbers: Tensor) -> Tensor:
        """The queries with these numbers, times scale, in the dtype of arithmetic."""
        return self.queries.index_select(0, numbers).to(self.compute).mul_(self.scale)

    def keep(self, rows: Tensor, items: Tensor) -> Tensor | None:
        """Dropout factors of (row, item) pairs, broadcast together. Item j is key j, item n + c is cell c. None: no dropout."""
        if self.dropout_p == 0.0:
            return None
        return dropout_factors(self.dropout_p, self.compute, self.seed, rows + self.first_row, items)


class RowBlock:
    """Some rows of a head: pieces of positions, for all members of the group."""

    def __init__(self, head: Head, found: list[Piece]) -> None:
        self.head = head
        self.pieces = found
        group = head.sizes.group
        positions = [torch.arange(p.start, p.stop, device=head.keys.device) for p in found]
        member = torch.arange(group, device=head.keys.device)[:, None] * head.length
        self.rows = torch.cat([(member + p).reshape(-1) for p in positions])
        """`[rows]`: the numbers of the rows in the head, piece by piece and member by member, in the order of the plan"""
        if head.order is not None and len(head.order):
            self.rows = self.rows - self.rows % head.length + head.order.index_select(0, self.rows)
        self.ranges = []
        start = 0
        for piece in found:
            self.ranges.append(slice(start, start + group * piece.length))
            start += group * piece.length
        self.numbers = torch.cat([self.rows, self.rows.new_zeros(1)])
        """`[rows + 1]`: the same, and at the end a row that fills up tiles"""

    def scaled(self, part: slice | Tensor) -> Tensor:
        """The queries of some rows, times scale."""
        return self.head.scaled(self.rows[part])

    def __len__(self) -> int:
        return len(self.rows)

    def far_pieces(self) -> Iterator[tuple[Piece, slice]]:
        """The pieces that see cells, with their rows in this block."""
        return ((piece, part) for piece, part in zip(self.pieces, self.ranges, strict=True) if piece.segments)


class Partial:
    """Sums over what each row has attended to so far: numerator e^-ref sum w v and mass e^-ref sum w."""

    def __init__(self, rows: int, like: Tensor) -> None:
        self.numerator = like.new_zeros(rows, like.shape[1])
        self.mass = like.new_zeros(rows)
        self.ref = like.new_full((rows,), -torch.inf)

    def add(self, rows: slice | Tensor, numerator: Tensor, ref: Tensor, mass: Tensor | None = None) -> None:
        """Add sums around `ref` for some rows. `mass` None: 1, so the numerator is an output and `ref` its log-normaliser."""
        old = self.ref[rows]
        new = torch.maximum(old, ref)
        base = finite(new)
        before, now = (old - base).exp(), (ref - base).exp()
        self.numerator[rows] = self.numerator[rows] * before[:, None] + numerator * now[:, None]
        self.mass[rows] = self.mass[rows] * before + (now if mass is None else now * mass)
        self.ref[rows] = new

    def finish(self) -> tuple[Tensor, Tensor]:
        """Output and log-normaliser; a row that sees nothing is zero."""
        blind = self.mass <= 0
        output = self.numerator / self.mass.masked_fill(blind, 1.0)[:, None]
        return output.masked_fill(blind[:, None], 0.0), (self.mass.log() + self.ref).masked_fill(blind, -torch.inf)


class LocalRun(NamedTuple):
    """Some positions of a piece, for all members of the group, and keys that they see one by one."""

    rows: slice | Tensor
    """rows of the block"""
    shape: tuple[int, int, int]
    """(members of the group, positions, -1): the shape as which to view them"""
    own: Tensor
    """`[keys]`: the positions of the keys"""
    causal: bool
    """whether the r-th position sees the first r + 1 of these keys only"""
    seen: Tensor | None
    """`[positions, keys]`: which position sees which key; None: as `causal` says"""


def local_runs(block: RowBlock) -> Iterator[LocalRun]:
    """What the rows of a block see key by key: the sinks, and the keys after their last closed segment."""
    head, group = block.head, block.head.sizes.group
    for piece, part in zip(block.pieces, block.ranges, strict=True):
        whole = (group, piece.length, -1)
        for own, causal, seen in _local_keys(head, piece):
            if seen is None and head.serves_fused:
                yield LocalRun(part, whole, own, causal, None)
                continue
            # The table of all weights may be large: make it for some rows at a time.
            for some in row_blocks((group, piece.length), BYTES_PER_LOCAL_WEIGHT * len(own)):
                numbers = torch.arange(part.start, part.stop, device=own.device).view(whole[:2])[:, some].reshape(-1)
                table = None if seen is None else seen[some]
                if causal:
                    reach = torch.arange(some.start, some.stop, device=own.device)[:, None]
                    table = torch.arange(len(own), device=own.device) <= reach
                yield LocalRun(numbers, (group, some.stop - some.start, -1), own, False, table)


def _local_keys(head: Head, piece: Piece) -> Iterator[tuple[Tensor, bool, Tensor | None]]:
    """The fields `own`, `causal` and `seen` of the runs of a whole piece."""
    device = head.keys.device
    sinks = torch.arange(min(head.sizes.sinks, piece.closed), device=device)
    if not head.sizes.segment:
        if len(sinks):
            yield sinks, False, None
        return
    seen = head.visible_at[piece.start : piece.stop]
    last = int(seen[-1])
    first = int(seen[0]) - 1
    if first >= piece.closed and torch.equal(seen, torch.arange(first + 1, first + 1 + len(seen), device=device)):
        # The r-th position of the piece sees the keys up to first + r.
        before = torch.cat([sinks, torch.arange(piece.closed, first, device=device)])
        if len(before):
            yield before, False, None
        yield torch.arange(first, last, device=device), True, None
    else:
        if len(sinks):
            yield sinks, False, None
        own = torch.arange(piece.closed, last, device=device)
        if len(own):
            yield own, False, own < seen[:, None]


def edges_of(spans: Spans, sizes: CellSizes, segment: int, cell_of: Tensor) -> list[int]:
    """`[spans + 1]`: the first cell of each span of segments of so many keys, and the number of all cells."""
    edges = spans.edges(sizes.cells_in(segment))
    if not sizes.segment and len(edges) > 1:
        # A partition from elsewhere may have made more of them.
        edges[-1] = max(edges[-1], int(cell_of.max()) + 1)
    return edges


def sizes_of_queries(queries: Tensor, visible: Tensor, sizes: CellSizes, partition: Partition) -> Tensor | None:
    """`[segments, dim]`: how large the queries of a head `[group * length, dim]` are when each segment is closed, for `assign`.

    None where the partition does not ask. Without a mask there is one segment.
    """
    if not asks_queries(partition):
        return None
    members = queries.unflatten(0, (sizes.group, -1))
    if not sizes.segment:
        rows = torch.arange(members.shape[1], device=queries.device)
        return sizes_of(strewn_squares(members, rows, len(rows)))
    closed = int(closed_keys(visible, sizes, sizes.group).max()) if len(visible) else 0
    ends = range(sizes.segment, closed + 1, sizes.segment)
    return sizes_of(latest_squares(members, visible[: members.shape[1]], ends))


def assign(
    keys: Tensor,
    visible: Tensor,
    sizes: CellSizes,
    partition: Partition,
    only: Collection[Span] | None = None,
    queries: Tensor | None = None,
) -> Tensor:
    """The cells of each key of a head `[n, dim]`: `[span_levels, n]`, -1 where it is in none.

    Keys are grouped span by span, and only those that some row sees through cells. Nothing about a cell depends on later keys.
    `only`: these spans; None: all. `queries` `[segments, dim]`: see `sizes_of_queries`.
    """
    cell_of = torch.full((sizes.span_levels, len(keys)), -1, dtype=torch.int64, device=keys.device)
    closed = int(closed_keys(visible, sizes, sizes.group).max()) if len(visible) else 0
    if closed == 0:
        return cell_of
    segment = sizes.segment or closed
    spans = Spans(closed // segment, sizes.span_levels)
    per_segment = sizes.cells_in(segment)
    first_cell = spans.edges(per_segment)
    compute = torch.promote_types(keys.dtype, torch.float32)
    for level, group in groupby(spans.all, key=attrgetter("level")):
        own = [span for span in group if only is None or span in only]
        if not own:
            continue
        places = [slice(span.first * segment, (span.first + span.segments) * segment) for span in own]
        copies = [keys[place].to(compute)[None] for place in places]
        parts = copies[0] if len(copies) == 1 else torch.cat(copies)
        # Keys may have columns of zeros more.
        large = None if queries is None else queries[[span.first + span.segments - 1 for span in own]]
        large = large if large is None else pad(large, (0, keys.shape[1] - large.shape[1]))
        cells = build_cells(partition, parts, per_segment << level, large)
        for span, place, cell in zip(own, places, cells, strict=True):
            cell_of[level, place] = cell + first_cell[span.number]
    cell_of[:, : sizes.sinks] = -1
    return cell_of
