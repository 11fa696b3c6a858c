"""The far field on a CPU: score the cells, choose which to open, sum up the others, and correct the sums by drawn keys."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.kernels.cells_head import Block, Head, Partial, pair_kernels
from nearfield.kernels.cells_plan import MOST_SPREAD, MOST_SQUARE, ROUTE_SPREADS
from nearfield.kernels.tiles import Stack, products, stacks
from nearfield.partition.cells import CellTable, SeenCells
from nearfield.sampling import hashed_uniform

GROUP = 8
"""Cells per group where the best ones are found in two steps."""
FEW_SCORES = 1 << 15
"""Below, one step is faster."""

CHILDREN_PER_PASS = 1 << 22
"""Entries of one block of the (row, fine cell) score table of two levels: more rows share the work of a coarse cell."""


@dataclass(frozen=True)
class Strata:
    """Cells of one level that some rows leave closed, with their masses (0 for those that do not count)."""

    table: CellTable
    weight: Tensor
    """`[rows, cells]`: mass e^-top"""
    top: Tensor
    """`[rows]`"""
    tilt: Tensor
    """`[rows, value_dim]`: what X q adds to every value"""
    ids: Tensor
    """`[rows, cells]`: their numbers; `[cells]` where they are the same for all rows"""
    keep: Tensor | None
    value: Tensor | None = None
    """`[cells, value_dim]`: their values, where they are the same for all rows"""

    def sums(self, weight: Tensor) -> Tensor:
        """Sum of weight times value over the cells of a row, `[rows, value_dim]`."""
        weight = weight if self.keep is None else weight * self.keep
        tilt = weight.sum(1, keepdim=True) * self.tilt
        if self.value is not None:
            return tilt.addmm_(weight, self.value)
        return tilt.add_(pair_kernels(weight.device).pair_sums(weight, self.table.value, self.ids))

    def number(self, place: Tensor) -> Tensor:
        """The numbers of the cells at some columns."""
        return self.ids[place] if self.ids.dim() == 1 else self.ids.gather(1, place)


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

    def run(self) -> Tensor:
        """Returns the largest logit of an opened centroid, `[rows]`; -inf where nothing is opened."""
        ref = self.total.ref.new_full((len(self.block),), -torch.inf)
        two_levels = self.head.coarse is not None
        for piece, part in self.block.far_pieces():
            table, taken = (self.head.coarse, self.unfolded) if two_levels else (self.head.fine, self.opened)
            assert table is not None
            seen = self.head.seen_by(piece, table)
            for rows in row_parts(part, len(seen), self.head.scores_per_pass):
                cells = self._dense(seen, rows, table, taken, ref)
                # Draws need the strata of both levels side by side.
                if self.draws is None or not two_levels:
                    self._sum_up(rows, [cells])
        if two_levels:
            assert self.head.coarse is not None
            edges = child_edges(self.head)
            for piece, part in self.block.far_pieces():
                seen, fine = self.head.seen_by(piece, self.head.coarse), self.head.seen_by(piece, self.head.fine)
                # Of the cells that this piece sees: a later one must not change the width of its tables.
                most = max(1, int(edges.diff()[seen.ids].max()))
                for rows in row_parts(part, self.unfolded.shape[1] * most, CHILDREN_PER_PASS):
                    children = Children.score(self.head, self.block.rows[rows], self.unfolded[rows], edges, most)
                    strata = [self._fine(fine, rows, children, ref)]
                    if self.draws is not None:
                        strata.append(self._dense(seen, rows, self.head.coarse, self.unfolded, None))
                    self._sum_up(rows, strata)
        return ref

    def _dense(self, seen: SeenCells, rows: slice, table: CellTable, taken: Tensor, ref: Tensor | None) -> Strata:
        """All cells that a piece sees. Chooses which of them to take, unless `ref` is None: then they are already taken."""
        queries = self.block.scaled(rows)
        first, spread = moments(queries, seen)
        if ref is not None:
            best = choose(first, spread, taken.shape[1])
            taken[rows, : best.shape[1]] = seen.ids[best.clamp(min=0)].masked_fill_(best < 0, -1)
            ref[rows] = largest(first, best)
        else:
            best = seen.columns(taken[rows])
        weight, top = masses(first, spread, best, seen.size)
        keep = cell_keep(self.head, self.block, rows, table, seen.ids)
        return Strata(table, weight, top, queries @ seen.cross.T, seen.ids, keep, seen.value)

    def _fine(self, seen: SeenCells, rows: slice, children: Children, ref: Tensor) -> Strata:
        """The fine cells of what was unfolded; opens the best of them."""
        first, spread, ids = children.first, children.spread, children.ids
        table = self.head.fine
        best = choose(first, spread, self.opened.shape[1])
        cells = ids.gather(1, best.clamp(min=0))
        self.opened[rows, : best.shape[1]] = cells.masked_fill(best < 0, -1)
        ref[rows] = largest(first, best)
        keep = cell_keep(self.head, self.block, rows, table, ids)
        weight, top = masses(first, spread, best, table.size[ids])
        return Strata(table, weight, top, self.block.scaled(rows) @ seen.cross.T, ids, keep)

    def _sum_up(self, rows: slice, strata: list[Strata]) -> None:
        if self.draws is not None:
            self.total.add(rows, *self.draws.correct(rows, strata))
            return
        for level in strata:
            self.total.add(rows, level.sums(level.weight), level.top, level.weight.sum(1))


class Draws:
    """Drawn far keys of one block of rows: a correction that makes both sums unbiased, and a standard error.

    A key is drawn with probability g_c / F (its cell in proportion to the cell's mass, the key evenly inside it), so one draw
    estimates the mass of the far field by F e^z / g_c, and its numerator by that of the cells plus F (e^z v / g_c - value of c).
    """

    def __init__(self, head: Head, block: Block) -> None:
        self.head, self.block = head, block
        samples, like = head.settings.samples, head.fine.centroid
        self.drawn = torch.full((len(block), samples), -1, dtype=torch.int64, device=like.device)
        self.log_factor = like.new_full((len(block), samples), -torch.inf)
        self.log_mass = like.new_full((len(block),), -torch.inf)
        """log F"""
        self.log_share = torch.full_like(self.log_factor, -torch.inf)
        """log of F e^z / (l g_c)"""
        self.value = like.new_zeros(len(block), samples, head.values.shape[1])
        self.stand_in = torch.zeros_like(self.value)

    def correct(self, rows: slice, strata: list[Strata]) -> tuple[Tensor, Tensor, Tensor]:
        """Numerator, reference and mass of the far field after correction."""
        head, samples = self.head, self.drawn.shape[1]
        queries, numbers = self.block.scaled(rows), self.block.rows[rows]
        top = torch.stack([level.top for level in strata]).amax(0)
        weight = torch.cat([level.weight * (level.top - finite(top)).exp_()[:, None] for level in strata], 1)
        ladder = weight.double().cumsum(1)
        mass = ladder[:, -1]
        some = (mass > 0)[:, None]
        if not bool(some.any()):
            return torch.zeros_like(self.value[rows, 0]), top, torch.zeros_like(top)
        draw = torch.arange(samples, device=numbers.device)
        counters = (numbers + head.first_row)[:, None]
        point = (1.0 - hashed_uniform(head.seed, counters, -1 - draw)) * mass[:, None]
        last = (weight.shape[1] - 1 - weight.flip(1).gt(0).int().argmax(1))[:, None]
        place = torch.minimum(torch.searchsorted(ladder, point), last)

        numerator = torch.zeros_like(self.value[rows, 0])
        stand_in = torch.zeros_like(self.value[rows])
        first, size = torch.zeros_like(place), torch.ones_like(place)
        offset = 0
        for level in strata:
            width = level.weight.shape[1]
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
            size = torch.where(here, level.table.size[number].long(), size)
            offset += width
        step = hashed_uniform(head.seed, counters, -1 - samples - draw)
        inside = (step * size).long().clamp(max=(size - 1).clamp(min=0))
        drawn = head.fine.order[torch.where(some, first + inside, 0)]

        log_mass = mass.log().to(top.dtype) + top
        log_key = (weight.gather(1, place) / size.clamp(min=1)).log() + top[:, None]
        z = torch.einsum("rd,rtd->rt", queries, head.keys[drawn].to(head.compute))
        log_factor = (log_mass[:, None] - log_key - math.log(samples)).masked_fill(~some, -torch.inf)
        log_share = z + log_factor
        value = head.values[drawn].to(head.compute)
        keep = head.keep(numbers[:, None], drawn)
        value = value if keep is None else value * keep[..., None]
        self.drawn[rows] = drawn.masked_fill(~some, -1)
        self.log_factor[rows], self.log_mass[rows], self.log_share[rows] = log_factor, log_mass, log_share
        self.value[rows], self.stand_in[rows] = value, stand_in
        # A drawn key may weigh far more than all that its cell was thought to: sums are formed around the largest term.
        ref = torch.maximum(top, log_share.amax(1))
        share = (log_share - finite(ref)[:, None]).exp_()
        left = numerator - mass.to(top.dtype)[:, None] * stand_in.mean(1)
        numerator = left * (top - finite(ref)).exp_()[:, None] + torch.einsum("rt,rtd->rd", share, value)
        return numerator.masked_fill(~some, 0.0), ref, share.sum(1)

    def stderr(self, output: Tensor, lse: Tensor) -> Tensor:
        """Delta method: spread over the draws of F/Z ((e^z v / g - value of c) - O (e^z / g - 1)), as a norm over the columns."""
        samples = self.drawn.shape[1]
        of_key = samples * (self.log_share - finite(lse)[:, None]).exp()
        of_cell = (self.log_mass - finite(lse)).exp()
        off_key, off_cell = self.value - output[:, None], self.stand_in - output[:, None]
        term = of_key[..., None] * off_key - of_cell[:, None, None] * off_cell
        return (term.var(1).sum(-1) / samples).sqrt()


@dataclass(frozen=True)
class Children:
    """The fine cells of the coarse cells that each row unfolded: `[rows, unfold * most children]`, -inf where there is none."""

    first: Tensor
    spread: Tensor
    ids: Tensor

    @staticmethod
    def score(head: Head, numbers: Tensor, unfolded: Tensor, edges: Tensor, most: int) -> Children:
        """`numbers` `[rows]`: of the rows in the head; `edges`, `most`: where the children of a coarse cell are, and how many."""
        rows, slots = unfolded.shape
        numbers = torch.cat([numbers, numbers[:1]])
        first = head.fine.centroid.new_full((rows * slots + 1, most), -torch.inf)
        spread = torch.zeros_like(first)
        for stack in stacks(unfolded, edges, head.keys.shape[1], page_size=max(1, head.fine.cells), with_pairs=True):
            one, two = child_moments(head, numbers, stack)
            assert stack.pairs is not None
            pairs, wide = stack.pairs.view(-1), min(most, one.shape[2])
            first[:, :wide].index_copy_(0, pairs, one[..., :wide].flatten(0, 1))
            spread[:, :wide].index_copy_(0, pairs, two[..., :wide].flatten(0, 1))
        coarse = unfolded.clamp(min=0)
        own = (edges[coarse + 1] - edges[coarse] - 1).clamp(min=0)
        # Where there is no child any cell of the row's own will do: it has no weight, but its value is multiplied with that.
        ids = edges[coarse][..., None] + torch.arange(most, device=edges.device).minimum(own[..., None])
        ids = ids.clamp_(max=head.fine.cells - 1)
        return Children(first[:-1].view(rows, -1), spread[:-1].view(rows, -1), ids.view(rows, -1))


def child_edges(head: Head) -> Tensor:
    """`[coarse cells + 1]`: the fine cells of each coarse one. Both tables list the keys in an order in which they nest."""
    fine, coarse = head.fine, head.coarse
    assert coarse is not None
    edges = torch.searchsorted(fine.starts[:-1].contiguous(), coarse.starts)
    # Empty cells at the end of a span are its own: the next one in this order may be an earlier one in time.
    edges[coarse.spans] = torch.tensor(fine.spans, device=edges.device)
    # Empty coarse cells at the beginning of a span have found those as well.
    return edges.cummax(0).values


def child_moments(head: Head, numbers: Tensor, stack: Stack) -> tuple[Tensor, Tensor]:
    """`moments` of the fine cells that are the members of a stack, `[tiles, rows, width]` each."""
    queries = head.scaled(numbers.index_select(0, stack.rows.view(-1))).view(*stack.rows.shape, -1)
    void = head.fine.void[stack.members]
    if stack.missing is not None:
        void = void.masked_fill(stack.missing, -torch.inf)
    first = products(queries, head.fine.centroid[stack.members], void[:, None])
    return first, _cut(products(squares(queries), head.fine.variance[stack.members]))


def row_parts(part: slice, cost: int, budget: int) -> Iterator[slice]:
    """Ranges of rows whose score tables stay within a budget of entries."""
    step = max(32, budget // max(1, cost) // 32 * 32)
    for start in range(part.start, part.stop, step):
        yield slice(start, min(start + step, part.stop))


def moments(queries: Tensor, seen: SeenCells) -> tuple[Tensor, Tensor]:
    """q.mu_c (-inf for empty cells) and u_c = sum_i q_i^2 var_{c,i} for the cells that rows see, `[rows, cells]` each."""
    first = torch.addmm(seen.void, queries, seen.centroid.T)
    return first, _cut(squares(queries) @ seen.variance.T)


def squares(queries: Tensor) -> Tensor:
    return queries.square().clamp_(max=MOST_SQUARE)


def _cut(spread: Tensor) -> Tensor:
    # Looking is much cheaper than cutting.
    return spread.clamp_(max=MOST_SPREAD) if spread.numel() and float(spread.amax()) > MOST_SPREAD else spread


def choose(first: Tensor, spread: Tensor, count: int) -> Tensor:
    """The columns of the `count` largest scores of each row; -1 where there are fewer cells."""
    best, column = best_of(torch.add(first, spread.sqrt(), alpha=ROUTE_SPREADS), count)
    return column.masked_fill_(best == -torch.inf, -1)


def best_of(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest numbers of each row, or all if there are fewer, and their columns."""
    rows, cells = scores.shape
    groups = cells // GROUP
    if groups < 2 * count or scores.numel() < FEW_SCORES:
        best = scores.topk(min(count, cells), sorted=False)
        return best.values, best.indices
    # The best of `count` cells are among the `count` groups with the best maxima; a strided group is a column, quick to reduce.
    strided = scores[:, : groups * GROUP].view(rows, GROUP, groups)
    group = strided.amax(1).topk(count, sorted=False).indices
    column = (group[:, None] + groups * torch.arange(GROUP, device=group.device)[:, None]).view(rows, -1)
    rest = torch.arange(groups * GROUP, cells, device=group.device).expand(rows, -1)
    column = torch.cat([column, rest], 1)
    best = scores.gather(1, column).topk(count, sorted=False)
    return best.values, column.gather(1, best.indices)


def largest(first: Tensor, best: Tensor) -> Tensor:
    """The largest q.mu_c among the cells at the columns `best`; -inf where there are none."""
    return first.gather(1, best.clamp(min=0)).masked_fill_(best < 0, -torch.inf).amax(1)


def masses(first: Tensor, spread: Tensor, taken: Tensor, size: Tensor) -> tuple[Tensor, Tensor]:
    """e^-top n_c e^{q.mu_c} (1 + u_c / 4)^2, zero for cells at the columns `taken`, and top: `[rows, cells]` and `[rows]`.

    Overwrites `first`.
    """
    # A row with an empty slot (-1) has taken every cell there is, so that the first one is taken, or empty, as well.
    first.scatter_(1, taken.clamp(min=0)[:, : first.shape[1]], -torch.inf)
    top = first.amax(1)
    weight = first.sub_(finite(top)[:, None]).exp_()
    return weight.mul_((0.25 * spread).add_(1.0).square_()).mul_(size), top


def finite(top: Tensor) -> Tensor:
    """The same, with 0 for -inf, so that it can be subtracted."""
    return top.masked_fill(top == -torch.inf, 0.0)


def cell_keep(head: Head, block: Block, rows: slice, table: CellTable, ids: Tensor) -> Tensor | None:
    """Dropout factors of (row, cell) pairs: cells are items counted on from the last key, fine ones first."""
    if head.dropout_p == 0.0:
        return None
    shift = len(head.keys) + (0 if table is head.fine else head.fine.cells)
    return head.keep(block.rows[rows, None], ids + shift)
