"""A few rows with several budgets, all from the same scores: what opening more cells would do. Internal.

Keys are grouped once. A row scores its cells once, which ranks them; with a budget of p it opens the first p. Its logits are
computed once for all keys it sees: summed up they are exact attention, and the part of them that lies in opened cells is what a
budget adds to the far field. The arithmetic is that of `cells/reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nearfield.cells.far_field import POOL, finite, log_boost, moments, score, votes
from nearfield.cells.moments import CellTable, SeenCells
from nearfield.cells.operator import Given, Recipe, empty_results, head_of, wide
from nearfield.cells.partition import from_plain
from nearfield.cells.partition.kmeans import KERNEL_ITERATIONS, KMeans
from nearfield.cells.spans import Spans, blocks_of_rows, closed_keys
from nearfield.cells.torch.forward import by_best_cell
from nearfield.cells.torch.head import assign
from nearfield.chunks import BLOCK_BYTES
from nearfield.kernels import backends
from nearfield.problem import with_positive_scale

if TYPE_CHECKING:
    from nearfield.cells.triton.moments import Tables


@dataclass(frozen=True)
class Prepared:
    """What calls have in common that differ in their budgets alone: the cells of keys, their moments, and the order of rows."""

    queries: Tensor
    """`[batch, group * length, dim]`; this and the next three as `operator.forward` takes them"""
    keys: Tensor
    values: Tensor
    visible: Tensor
    recipe: Recipe
    given: Given
    spans: Sequence[Spans]
    """of each entry of the batch"""
    tables: Sequence[CellTable] = ()
    """of each entry; none where kernels in Triton made the cells"""
    kernel_tables: Tables | None = None

    def seen(self, entry: int, segments: int) -> SeenCells:
        """The cells that a row with so many closed segments sees."""
        numbers = [span.number for span in self.spans[entry].seen(segments)]
        if self.kernel_tables is None:
            return self.tables[entry].seen(numbers)
        return _seen_by_kernels(self.kernel_tables, self.spans[entry], numbers, entry, segments, self.cells_per_segment)

    def of(self, entries: list[int]) -> Prepared:
        """Those of some entries, for a call: no rows of theirs are tried any more."""
        order = self.given.order
        given = Given(self.given.cell_of[entries], order=None if order is None else order[entries])
        return replace(self, given=given, tables=[self.tables[x] for x in entries] if self.tables else ())

    @property
    def cells_per_segment(self) -> int:
        sizes = self.recipe.sizes
        return sizes.cells_in(sizes.segment or self.keys.shape[1])

    def homes(self, entry: int, closed: int) -> Tensor:
        """`[closed]`: the cell through which a row that sees so many keys through cells sees each of them; -1: none."""
        size = self.recipe.sizes.segment or closed
        spans, cell_of = self.spans[entry].seen(closed // size), self.given.cell_of[entry]
        return torch.cat([cell_of[x.level, x.first * size : (x.first + x.segments) * size] for x in spans]).long()


@torch.no_grad()
def prepare(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, recipe: Recipe) -> Prepared:
    """Groups keys and, where rows open cells in an order, orders rows: as a call does that is given neither."""
    cell_of, _, order = empty_results(queries, keys, values, recipe.sizes, recipe.engine)[3:6]
    partition, sizes = from_plain(recipe.partition, recipe.options), recipe.sizes
    if recipe.engine == "triton":
        assert isinstance(partition, KMeans)  # see `cells.triton.limits`
        layout_spans, kernel_tables = _prepare_by_kernels(queries, keys, values, visible, recipe, partition, cell_of, order)
        given = Given(cell_of, order=order if sizes.ordered else None)
        all_spans = [layout_spans] * len(keys)
        return Prepared(queries, keys, values, visible, recipe, given, all_spans, kernel_tables=kernel_tables)
    heads = []
    for entry in range(len(queries)):
        key = wide(keys[entry])
        cell_of[entry] = assign(key, visible[entry], sizes, partition)
        no_seed = torch.zeros((), dtype=torch.int64)
        heads.append(head_of(recipe, queries, key, values, visible, cell_of[entry].long(), no_seed, entry))
        if sizes.ordered:
            order[entry] = by_best_cell(heads[-1])
    given = Given(cell_of, order=order if sizes.ordered else None)
    tables = [x.table for x in heads]
    return Prepared(queries, keys, values, visible, recipe, given, [x.spans for x in heads], tables)


@torch.no_grad()
def try_budgets(prepared: Prepared, entry: int, numbers: Tensor, budgets: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Exact attention of some rows of an entry, `[rows, value_dim]`, and by cells with each budget, `[budgets, rows, value_dim]`.

    `numbers` `[rows]`: rows of the group, in any order and with repetitions. `budgets`: ascending numbers of cells to open.
    """
    sizes, values = prepared.recipe.sizes, prepared.values
    compute = torch.promote_types(values.dtype, torch.float32)
    exact = values.new_empty(len(numbers), values.shape[2], dtype=compute)
    found = exact.new_empty(len(budgets), *exact.shape)
    closed = closed_keys(prepared.visible[entry], sizes, sizes.group)[numbers]
    for edge in closed.unique().tolist():
        own = (closed == edge).nonzero()[:, 0]
        most = int(prepared.visible[entry][numbers[own]].max())
        for some in own.split(max(1, BLOCK_BYTES // max(1, 24 * most))):
            exact[some], found[:, some] = _try_rows(prepared, entry, numbers[some], edge, most, budgets, compute)
    return exact, found


def _try_rows(
    prepared: Prepared, entry: int, numbers: Tensor, closed: int, most: int, budgets: Sequence[int], compute: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`try_budgets` for rows that see the same cells, and at most `most` keys."""
    sizes, device = prepared.recipe.sizes, prepared.keys.device
    queries = _scaled(prepared, entry, numbers, compute)
    keys, values = (x[entry, :most].to(compute) for x in (prepared.keys, prepared.values))
    logits = queries @ keys.T
    unseen = torch.arange(most, device=device) >= prepared.visible[entry][numbers][:, None]
    logits.masked_fill_(unseen, -torch.inf)
    top = logits.amax(1) if most else logits.new_full((len(numbers),), -torch.inf)
    # The number of budgets that do not open a key's cell; 0 for the keys that are near without it.
    level = torch.zeros(len(numbers), most, dtype=torch.uint8, device=device)
    if closed:
        seen = prepared.seen(entry, closed // sizes.segment if sizes.segment else 1)
        first, spread = moments(wide(queries), seen)
        rating = score(first, spread) if sizes.share == 1 else _votes(prepared, entry, numbers, seen, compute)
        best = rating.topk(min(budgets[-1], len(seen)), dim=1).indices
        needed = torch.arange(1, best.shape[1] + 1, device=device).repeat(len(best), 1)
        if sizes.share > 1 and prepared.kernel_tables is not None:
            # The lists of a block have room for so many cells of mean size.
            mean = -(-(sizes.segment or prepared.keys.shape[1]) // prepared.cells_per_segment)
            needed = torch.maximum(needed, (seen.size[best].cumsum(1) / mean).ceil().long())
        too_small = torch.bucketize(needed, torch.tensor([*budgets], device=device)).to(torch.uint8)
        of_cell = torch.full_like(rating, len(budgets), dtype=torch.uint8).scatter_(1, best, too_small)
        home = seen.columns(prepared.homes(entry, closed))
        padded = torch.cat([of_cell, of_cell.new_zeros(len(numbers), 1)], 1)
        level[:, :closed] = padded.index_select(1, torch.where(home < 0, len(seen), home))[:, :most]
        log_mass = first + seen.size.log() + log_boost(spread)
        top = torch.maximum(top, log_mass.amax(1))
        masses = (log_mass - finite(top)[:, None]).exp()
        mean_value = seen.value[:, : values.shape[1]]
        tilt = (wide(queries) @ seen.cross.T)[:, : values.shape[1]]
    weights = logits.sub_(finite(top)[:, None]).exp_()
    total, all_mass = weights @ values, weights.sum(1)
    outputs = []
    numerator, mass = torch.zeros_like(total), torch.zeros_like(all_mass)
    for budget in range(len(budgets)):
        opened = weights * (level == budget)
        numerator, mass = numerator + opened @ values, mass + opened.sum(1)
        if closed:
            far = masses * (of_cell > budget)
            share = far.sum(1)
            outputs.append(_ratio(numerator + far @ mean_value + share[:, None] * tilt, mass + share))
        else:
            outputs.append(_ratio(numerator, mass))
    return _ratio(total, all_mass), torch.stack(outputs)


def _scaled(prepared: Prepared, entry: int, numbers: Tensor, compute: torch.dtype) -> Tensor:
    return prepared.queries[entry][numbers].to(compute) * prepared.recipe.scale


def _ratio(numerator: Tensor, mass: Tensor) -> Tensor:
    """Their ratio; zero for a row that sees nothing."""
    blind = mass <= 0
    return (numerator / mass.masked_fill(blind, 1.0)[:, None]).masked_fill(blind[:, None], 0.0)


def _votes(prepared: Prepared, entry: int, numbers: Tensor, seen: SeenCells, compute: torch.dtype) -> Tensor:
    """The votes that each row's block gives to cells, `[rows, cells]`: see `far_field.votes`."""
    sizes, order = prepared.recipe.sizes, prepared.given.order
    length = prepared.queries.shape[1] // sizes.group
    own_order = None if order is None else order[entry].long()
    blocks = blocks_of_rows(prepared.queries.shape[1], sizes, numbers.device, own_order)[numbers]
    member = numbers // length
    place = (blocks - member * -(-length // sizes.share))[:, None] * sizes.share + torch.arange(
        sizes.share, device=numbers.device
    )
    there = place < length
    rows = member[:, None] * length + place.clamp(max=length - 1)
    rows = rows if own_order is None else member[:, None] * length + own_order[rows]
    queries = _scaled(prepared, entry, rows.flatten(), compute).view(*rows.shape, -1) * there[..., None]
    counts = there.view(len(numbers), -1, POOL).sum(2)
    means = queries.view(*counts.shape, POOL, -1).sum(2) / counts.clamp(min=1)[..., None]
    return votes(*moments(wide(means.flatten(0, 1)), seen), seen.size, counts > 0)


def _prepare_by_kernels(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    recipe: Recipe,
    partition: KMeans,
    cell_of: Tensor,
    order: Tensor,
) -> tuple[Spans, Tables]:
    """Fills in the cells of keys and the order of rows. Returns the spans of an entry and the moments of all entries."""
    from nearfield.cells.triton.forward import cells_of, layout_for, order_for
    from nearfield.cells.triton.layout import as_read
    from nearfield.kernels.launch import dense

    with backends.device_guard(queries.device):
        queries, scale = with_positive_scale(queries, recipe.scale)
        queries, keys, values = (dense(x) for x in (queries, keys, values))
        layout = layout_for(keys, recipe.sizes)
        iterations = partition.iterations_or(KERNEL_ITERATIONS)
        tables = cells_of(keys, values, as_read(visible), recipe.sizes, layout, iterations, partition.seed, cell_of)
        if recipe.sizes.ordered:
            order_for(queries, tables, layout, recipe.sizes, scale, order)
    return layout.spans, tables


def _seen_by_kernels(tables: Tables, spans: Spans, numbers: list[int], entry: int, segments: int, per_segment: int) -> SeenCells:
    """The cells of some spans, as `CellTable.seen` has them."""
    edges = spans.edges(per_segment)
    ranges = [slice(edges[number], edges[number + 1]) for number in numbers]
    ids = torch.cat([torch.arange(x.start, x.stop, device=tables.centroid.device) for x in ranges])
    column = torch.full((tables.cells,), -1, device=ids.device)
    column[ids] = torch.arange(len(ids), device=ids.device)
    size = torch.exp2(tables.log2_size[entry][ids]).round()
    log_exists = torch.zeros_like(size).masked_fill(size == 0, -torch.inf)
    centroid, variance, value = (wide(x[entry][ids].float()) for x in (tables.centroid, tables.variance, tables.value))
    pooled = int(tables.pooled[entry, segments])
    cross = wide(wide(tables.cross[entry, segments].float()).T).T
    return SeenCells(size, log_exists, centroid, variance, value, numbers, ranges, ids, column, pooled, cross)
