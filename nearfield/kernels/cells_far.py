"""The far field on a CPU: score the cells, choose which to open, sum up the others, and correct the sums by drawn keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.kernels.cells_head import TILE_ROWS, Block, Head, Partial, by_cell, pair_kernels
from nearfield.kernels.cells_plan import CAP, Piece
from nearfield.partition.cells import CellTable
from nearfield.sampling import hashed_uniform

SCORES_PER_PASS = 1 << 20
"""Entries of one block of the (row, cell) score table: 4 MB in float32, which a core's cache still holds."""


@dataclass(frozen=True)
class Strata:
    """Cells of one level that some rows leave closed, with their logits (-inf for those that do not count)."""

    table: CellTable
    logits: Tensor
    """`[rows, cells]`"""
    tilt: Tensor
    """`[rows, value_dim]`: what X q adds to every value"""
    ids: Tensor | None = None
    """`[rows, cells]`: their numbers; None: 0, 1, 2, ..."""
    keep: Tensor | None = None

    def sums(self, weight: Tensor) -> Tensor:
        """Sum of weight times value over the cells of a row, `[rows, value_dim]`."""
        weight = weight if self.keep is None else weight * self.keep
        tilt = weight.sum(1, keepdim=True) * self.tilt
        if self.ids is None:
            return tilt.addmm_(weight, self.table.value[: weight.shape[1]])
        return tilt.add_(pair_kernels(weight.device).pair_sums(weight, self.table.value, self.ids))

    def number(self, place: Tensor) -> Tensor:
        """The numbers of the cells at some columns."""
        return place if self.ids is None else self.ids.gather(1, place)


@dataclass(frozen=True)
class Far:
    """The far field of one block of rows."""

    head: Head
    block: Block
    total: Partial
    opened: Tensor
    """`[rows, probes]`, filled in here"""
    unfolded: Tensor
    """`[rows, unfold]`, likewise"""
    draws: Draws | None

    def run(self) -> None:
        two_levels = self.head.coarse is not None
        for piece, part in self.block.far_pieces():
            table, taken = (self.head.coarse, self.unfolded) if two_levels else (self.head.fine, self.opened)
            assert table is not None
            for rows in row_parts(part, piece.segments * table.per_segment):
                cells = self._dense(piece, rows, table, taken, fresh=True)
                # Draws need the strata of both levels side by side.
                if self.draws is None or not two_levels:
                    self._sum_up(rows, [cells])
        if two_levels:
            children = Children.score(self.head, self.block, self.unfolded)
            for piece, part in self.block.far_pieces():
                for rows in row_parts(part, children.width):
                    strata = [self._fine(piece, rows, children)]
                    if self.draws is not None:
                        assert self.head.coarse is not None
                        strata.append(self._dense(piece, rows, self.head.coarse, self.unfolded, fresh=False))
                    self._sum_up(rows, strata)

    def _dense(self, piece: Piece, rows: slice, table: CellTable, taken: Tensor, fresh: bool) -> Strata:
        """All cells that a piece sees. `fresh`: choose which of them to take, else they are already taken."""
        cells = piece.segments * table.per_segment
        queries = self.block.queries[rows]
        first, spread = moments(queries, table, slice(0, cells))
        if fresh:
            best = choose(first + spread.sqrt(), taken.shape[1])
            taken[rows, : best.shape[1]] = best
        logits = far_logits(first, spread, taken[rows])
        keep = cell_keep(self.head, self.block, rows, table, torch.arange(cells, device=logits.device))
        return Strata(table, logits, queries @ table.cross[piece.segments].T, keep=keep)

    def _fine(self, piece: Piece, rows: slice, children: Children) -> Strata:
        """The fine cells of what was unfolded; opens the best of them."""
        first, spread, ids = children.first[rows], children.spread[rows], children.ids[rows]
        best = choose(first + spread.sqrt(), self.opened.shape[1])
        self.opened[rows, : best.shape[1]] = torch.where(best < 0, -1, ids.gather(1, best.clamp(min=0)))
        table = self.head.fine
        keep = cell_keep(self.head, self.block, rows, table, ids)
        return Strata(table, far_logits(first, spread, best), self.block.queries[rows] @ table.cross[piece.segments].T, ids, keep)

    def _sum_up(self, rows: slice, strata: list[Strata]) -> None:
        if self.draws is not None:
            self.total.add(rows, *self.draws.correct(rows, strata))
            return
        for level in strata:
            weight, top = exponentials(level.logits)
            self.total.add(rows, level.sums(weight), top, weight.sum(1))


class Draws:
    """Drawn far keys of one block of rows: a correction that makes both sums unbiased, and a standard error.

    A key is drawn with probability g_c / F (its cell in proportion to the cell's mass, the key evenly inside it), so one draw
    estimates the mass of the far field by F e^z / g_c, and its numerator by that of the cells plus F (e^z v / g_c - value of c).
    """

    def __init__(self, head: Head, block: Block) -> None:
        self.head, self.block = head, block
        samples, like = head.settings.samples, block.queries
        self.drawn = torch.full((len(block), samples), -1, dtype=torch.int64, device=like.device)
        self.log_factor = like.new_full((len(block), samples), -torch.inf)
        self.log_mass = like.new_full((len(block),), -torch.inf)
        self.ratio = like.new_ones(len(block), samples)
        self.excess = like.new_zeros(len(block), samples, head.values.shape[1])

    def correct(self, rows: slice, strata: list[Strata]) -> tuple[Tensor, Tensor, Tensor]:
        """Numerator, reference and mass of the far field after correction."""
        head, samples = self.head, self.drawn.shape[1]
        queries, numbers = self.block.queries[rows], self.block.rows[rows] + head.first_row
        logits = torch.cat([level.logits for level in strata], 1)
        weight, top = exponentials(logits)
        ladder = weight.double().cumsum(1)
        mass = ladder[:, -1]
        some = mass > 0
        draw = torch.arange(samples, device=numbers.device)
        point = (1.0 - hashed_uniform(head.seed, numbers[:, None], -1 - draw)) * mass[:, None]
        last = (weight.shape[1] - 1 - weight.flip(1).gt(0).int().argmax(1))[:, None]
        place = torch.minimum(torch.searchsorted(ladder, point), last)

        numerator = torch.zeros_like(self.excess[rows, 0])
        stand_in = torch.zeros_like(self.excess[rows])
        first, size = torch.zeros_like(place), torch.ones_like(place)
        offset = 0
        for level in strata:
            width = level.logits.shape[1]
            here = (place >= offset) & (place < offset + width)
            column = (place - offset).clamp(0, width - 1)
            number = level.number(column)
            value = level.table.value[number] + level.tilt[:, None]
            if level.keep is not None:
                value = value * level.keep.gather(1, column)[..., None]
            numerator += level.sums(weight[:, offset : offset + width])
            stand_in = torch.where(here[..., None], value, stand_in)
            # A coarse cell is a run of fine ones: both tables begin its keys at the same place of the order.
            first = torch.where(here, level.table.starts[number], first)
            size = torch.where(here, level.table.size[number], size)
            offset += width
        step = hashed_uniform(head.seed, numbers[:, None], -1 - samples - draw)
        inside = (step * size).long().clamp(max=(size - 1).clamp(min=0))
        drawn = head.fine.order[(first + inside).clamp(max=len(head.fine.order) - 1)]

        log_mass = mass.log().to(top.dtype) + top
        log_key = logits.gather(1, place) - size.clamp(min=1).to(top.dtype).log()
        z = pair_kernels(queries.device).pair_scores(queries, head.keys.to(head.compute), drawn)
        log_factor = (log_mass[:, None] - log_key - math.log(samples)).masked_fill(~some[:, None], -torch.inf)
        ratio = torch.where(some[:, None], (z - log_key).exp(), 1.0)
        value = head.values[drawn].to(head.compute)
        keep = head.keep(numbers[:, None] - head.first_row, drawn)
        kept = value if keep is None else value * keep[..., None]
        self.drawn[rows] = drawn.masked_fill(~some[:, None], -1)
        self.log_factor[rows], self.log_mass[rows], self.ratio[rows] = log_factor, log_mass, ratio
        self.excess[rows] = torch.where(some[:, None, None], ratio[..., None] * kept - stand_in, 0.0)
        # Numerators are sums over e^-top; the mean correction is one of F = mass e^top.
        numerator = numerator + mass.to(top.dtype)[:, None] * self.excess[rows].mean(1)
        return numerator, top, torch.where(some, mass.to(top.dtype) * ratio.mean(1), 0.0)

    def stderr(self, output: Tensor, lse: Tensor) -> Tensor:
        """Delta method: spread over the draws of F/Z ((e^z v / g - value of c) - O (e^z / g - 1)), as a norm over the columns."""
        share = (self.log_mass - lse).masked_fill(self.log_mass == -torch.inf, -torch.inf).exp()
        term = share[:, None, None] * (self.excess - output[:, None] * (self.ratio - 1)[..., None])
        samples = term.shape[1]
        return (term.var(1).sum(-1) / samples).sqrt()


@dataclass(frozen=True)
class Children:
    """The fine cells of the coarse cells that each row unfolded: `[rows, unfold * most children]`, -inf where there is none."""

    first: Tensor
    spread: Tensor
    ids: Tensor
    width: int

    @staticmethod
    def score(head: Head, block: Block, unfolded: Tensor) -> Children:
        rows, slots = unfolded.shape
        edges = child_edges(head)
        most = max(1, int(edges.diff().max())) if len(edges) > 1 else 1
        first = block.queries.new_full((rows * slots + 1, most), -torch.inf)
        spread = torch.zeros_like(first)
        for cell, pairs, row in tiles(head, unfolded):
            own = slice(int(edges[cell]), int(edges[cell + 1]))
            one, two = moments(block.queries[row], head.fine, own)
            first[pairs, : one.shape[1]], spread[pairs, : one.shape[1]] = one, two
        ids = edges[unfolded.clamp(min=0)][..., None] + torch.arange(most, device=edges.device)
        ids = ids.clamp(max=max(0, head.fine.cells - 1))
        return Children(first[:-1].view(rows, -1), spread[:-1].view(rows, -1), ids.view(rows, -1), slots * most)


def child_edges(head: Head) -> Tensor:
    """`[coarse cells + 1]`: the fine cells of each coarse one. Both tables list the keys in an order in which they nest."""
    assert head.coarse is not None
    return torch.searchsorted(head.fine.starts[:-1].contiguous(), head.coarse.starts)


def tiles(head: Head, chosen: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """For every cell that `chosen` `[rows, slots]` names: the cell, its flat pairs, and their rows."""
    table = head.fine if head.coarse is None else head.coarse
    pairs, row, edges = by_cell(chosen, table.cells, TILE_ROWS if head.settings.segment else 1)
    for cell in range(table.cells):
        if edges[cell] < edges[cell + 1]:
            run = slice(edges[cell], edges[cell + 1])
            yield cell, pairs[run], row[run]


def row_parts(part: slice, cost: int) -> Iterator[slice]:
    """Ranges of rows whose score tables stay within `SCORES_PER_PASS`."""
    step = max(32, SCORES_PER_PASS // max(1, cost) // 32 * 32)
    for start in range(part.start, part.stop, step):
        yield slice(start, min(start + step, part.stop))


def moments(queries: Tensor, table: CellTable, cells: slice) -> tuple[Tensor, Tensor]:
    """log n_c + q.mu_c and u_c = sum_i q_i^2 var_{c,i} for a range of cells, `[rows, cells]` each."""
    first = torch.addmm(table.log_size[cells], queries, table.centroid[cells].T)
    return first, queries.square() @ table.variance[cells].T


def choose(scores: Tensor, count: int) -> Tensor:
    """The columns of the `count` largest finite scores of each row; -1 where there are fewer."""
    best = scores.topk(min(count, scores.shape[1]), sorted=False)
    return best.indices.masked_fill(best.values == -torch.inf, -1)


def far_logits(first: Tensor, spread: Tensor, taken: Tensor) -> Tensor:
    """Second-order logits of cells, -inf for those at the columns `taken`."""
    logits = first + (0.5 * spread).clamp_(max=CAP)
    # A row with an empty slot (-1) has taken every cell there is, so that the first one is taken, or empty, as well.
    return logits.scatter_(1, taken.clamp(min=0)[:, : logits.shape[1]], -torch.inf)


def exponentials(logits: Tensor) -> tuple[Tensor, Tensor]:
    """e^(logits - top) and top, the largest of each row; zeros where all are -inf."""
    top = logits.amax(1)
    return (logits - top.masked_fill(top == -torch.inf, 0.0)[:, None]).exp_(), top


def cell_keep(head: Head, block: Block, rows: slice, table: CellTable, ids: Tensor) -> Tensor | None:
    """Dropout factors of (row, cell) pairs: cells are items counted on from the last key, fine ones first."""
    if head.dropout_p == 0.0:
        return None
    shift = len(head.keys) + (0 if table is head.fine else head.fine.cells)
    return head.keep(block.rows[rows, None], ids + shift)
