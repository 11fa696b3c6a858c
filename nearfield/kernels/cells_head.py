"""One head of the cells engine on a CPU: its tables, its blocks of rows, and sums that can be merged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType

import torch
from torch import Tensor

from nearfield.kernels import cpu, reference
from nearfield.kernels.cells_plan import CellSettings, Piece, Spans, pieces, row_blocks_of
from nearfield.partition.cells import CellTable, SeenCells, tabulate
from nearfield.sampling import hashed_uniform

LEAST_BLOCK_BYTES = 8 << 20
MOST_BLOCK_BYTES = 256 << 20
LEAST_SCORES = 1 << 18
MOST_SCORES = 1 << 20


@dataclass
class Head:
    """One key-value head with the rows that attend to it, and everything about it that does not depend on the pass."""

    queries: Tensor
    """`[group * length, dim]`, as the caller has them"""
    keys: Tensor
    values: Tensor
    visible: Tensor
    """`[group * length]`: the same for every member of the group"""
    cell_of: Tensor
    """as `coarse_of` in the `CellPlan`"""
    coarse_of: Tensor
    settings: CellSettings
    scale: float
    dropout_p: float = 0.0
    seed: int = 0
    first_row: int = 0
    """the number of its first row among the rows of all heads, for draws"""
    pieces: list[Piece] = field(init=False)
    fine: CellTable = field(init=False)
    coarse: CellTable | None = field(init=False)

    def __post_init__(self) -> None:
        self.seen = self.visible[: self.length]
        self.pieces = pieces(self.seen, self.settings)
        self.spans = Spans(max((piece.segments for piece in self.pieces), default=0))
        per_fine, per_coarse = self.settings.per_segment(self.segment_length)
        self.fine = tabulate(self.keys, self.values, self.cell_of, self.spans.edges(per_fine))
        self.coarse = None
        if per_coarse:
            self.coarse = tabulate(self.keys, self.values, self.coarse_of, self.spans.edges(per_coarse))

    def seen_by(self, piece: Piece, table: CellTable) -> SeenCells:
        """The cells that a piece sees."""
        return table.seen([span.number for span in self.spans.seen(piece.segments)])

    def homes(self, piece: Piece, cell_of: Tensor) -> Tensor:
        """`[closed]`: the cell through which a piece sees each key; -1: none."""
        size = piece.closed // max(1, piece.segments)
        spans = self.spans.seen(piece.segments)[::-1]
        return torch.cat([cell_of[span.height, span.first * size : (span.first + span.segments) * size] for span in spans])

    @property
    def length(self) -> int:
        return len(self.queries) // self.settings.group

    @property
    def segment_length(self) -> int:
        return self.settings.segment or (int(self.seen.max()) if len(self.seen) else 0)

    @property
    def compute(self) -> torch.dtype:
        return torch.promote_types(self.queries.dtype, torch.float32)

    def blocks(self) -> Iterator[Block]:
        """Blocks of rows. They take no more memory than half of one input does, within reason."""
        settings, wide = self.settings, self.values.shape[1]
        budget = min(MOST_BLOCK_BYTES, max(LEAST_BLOCK_BYTES, self.queries.numel() * 2))
        # Two accumulators, and the pairs with what sorting them takes.
        per_row = 8 * wide + 40 * settings.probes + settings.unfold * (40 + 4 * settings.branching)
        per_row += settings.samples * (16 * wide + 64)
        for found in row_blocks_of(self.pieces, max(64, budget // (per_row * settings.group))):
            yield Block(self, found)

    @property
    def scores_per_pass(self) -> int:
        """Entries of one block of the (row, cell) score table: 1 to 4 MB in float32, several of which are needed at a time."""
        return min(MOST_SCORES, max(LEAST_SCORES, self.queries.numel() // 8))

    def members(self, own: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at some positions, in the dtype of arithmetic."""
        keys, values = self.keys.index_select(0, own), self.values.index_select(0, own)
        return keys.to(self.compute), values.to(self.compute)

    def scaled(self, numbers: Tensor) -> Tensor:
        """Queries of the rows with these numbers, times scale, in the dtype of arithmetic."""
        return self.queries.index_select(0, numbers).to(self.compute).mul_(self.scale)

    def keep(self, rows: Tensor, items: Tensor) -> Tensor | None:
        """Dropout factors of (row, item) pairs, broadcast together; an item is a key, or a cell counted on from the last key."""
        if self.dropout_p == 0.0:
            return None
        draw = hashed_uniform(self.seed, rows + self.first_row, items)
        return (draw >= self.dropout_p).to(self.compute) / (1.0 - self.dropout_p)


class Block:
    """Some rows of a head: pieces of positions, for all members of the group."""

    def __init__(self, head: Head, found: list[Piece]) -> None:
        self.head = head
        self.pieces = found
        group = head.settings.group
        positions = [torch.arange(p.start, p.stop, device=head.keys.device) for p in found]
        member = torch.arange(group, device=head.keys.device)[:, None] * head.length
        self.rows = torch.cat([(member + p).reshape(-1) for p in positions])
        """`[rows]`: their numbers in the head; piece by piece, member by member"""
        self.ranges = []
        start = 0
        for piece in found:
            self.ranges.append(slice(start, start + group * piece.length))
            start += group * piece.length
        self.numbers = torch.cat([self.rows, self.rows.new_zeros(1)])
        """`[rows + 1]`: with one more, any, for tiles to fill up with"""

    def scaled(self, part: slice) -> Tensor:
        """Queries of some rows `[..., dim]`, times scale."""
        return self.head.scaled(self.rows[part])

    def __len__(self) -> int:
        return len(self.rows)

    def far_pieces(self) -> Iterator[tuple[Piece, slice]]:
        """The pieces that see cells, and their rows in this block."""
        return ((piece, part) for piece, part in zip(self.pieces, self.ranges, strict=True) if piece.segments)


class Partial:
    """Sums over what a row has attended to so far: numerator e^-ref sum w v, mass e^-ref sum w."""

    def __init__(self, rows: int, like: Tensor) -> None:
        self.numerator = like.new_zeros(rows, like.shape[1])
        self.mass = like.new_zeros(rows)
        self.ref = like.new_full((rows,), -torch.inf)

    def add(self, rows: slice, numerator: Tensor, ref: Tensor, mass: Tensor | None = None) -> None:
        """`mass` None: 1, that is the numerator is an output and `ref` its log-normaliser."""
        old = self.ref[rows]
        new = torch.maximum(old, ref)
        base = new.masked_fill(new == -torch.inf, 0.0)
        before, now = (old - base).exp(), (ref - base).exp()
        self.numerator[rows] = self.numerator[rows] * before[:, None] + numerator * now[:, None]
        self.mass[rows] = self.mass[rows] * before + (now if mass is None else now * mass)
        self.ref[rows] = new

    def finish(self) -> tuple[Tensor, Tensor]:
        """Output and log-normaliser; a row that sees nothing is zero."""
        blind = self.mass <= 0
        output = self.numerator / self.mass.masked_fill(blind, 1.0)[:, None]
        return output.masked_fill(blind[:, None], 0.0), (self.mass.log() + self.ref).masked_fill(blind, -torch.inf)


def local_runs(head: Head, piece: Piece) -> Iterator[tuple[Tensor, bool, Tensor | None]]:
    """What a piece sees key by key: key positions, whether the rows see them causally, or a table of who sees which."""
    device = head.keys.device
    always = torch.arange(min(head.settings.sinks, piece.closed), device=device)
    if not head.settings.segment:
        if len(always):
            yield always, False, None
        return
    seen = head.seen[piece.start : piece.stop]
    last = int(seen[-1])
    first = int(seen[0]) - 1
    if first >= piece.closed and torch.equal(seen, torch.arange(first + 1, first + 1 + len(seen), device=device)):
        # Row r of the piece sees the keys up to first + r, whatever padding came before.
        before = torch.cat([always, torch.arange(piece.closed, first, device=device)])
        if len(before):
            yield before, False, None
        yield torch.arange(first, last, device=device), True, None
    else:
        if len(always):
            yield always, False, None
        own = torch.arange(piece.closed, last, device=device)
        if len(own):
            yield own, False, own < seen[:, None]


def pair_kernels(device: torch.device) -> ModuleType:
    """Kernels for scattered (row, key) pairs."""
    return cpu if device.type == "cpu" else reference
