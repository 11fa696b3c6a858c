"""A few rows with several budgets, all from the same scores: what opening more cells would do. Internal.

Keys are grouped once. A row scores its cells once, which ranks them; with a budget of p it opens the first p. Its logits are
computed once for all keys it sees: summed up they are exact attention, and the part of them that lies in opened cells is what a
budget adds to the far field. The arithmetic is that of `cells/reference.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nearfield.cells.far_field import MOST_SPREAD, POOL, cap_moments, finite, log_boost, score, squares, votes
from nearfield.cells.moments import CellTable
from nearfield.cells.operator import Given, Recipe, empty_results, head_of, wide
from nearfield.cells.partition import from_plain
from nearfield.cells.partition.kmeans import KMeans
from nearfield.cells.spans import Spans, blocks_of_rows, closed_keys
from nearfield.cells.torch.forward import by_best_cell
from nearfield.cells.torch.head import assign, sizes_of_queries
from nearfield.chunks import BLOCK_BYTES, GPU_TIMES
from nearfield.kernels import backends
from nearfield.kernels.dense import capped, sink_share
from nearfield.problem import with_positive_scale

if TYPE_CHECKING:
    from nearfield.cells.triton.moments import Tables


KEY_BYTES, CELL_BYTES = 48, 16
"""What a row needs for each of its keys and cells while it is tried; kernels read keys in place."""


MOST_ENTRIES = 32768
"""With more heads over the batch, keys are not grouped in one go."""


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
    sinks: Tensor | None = None
    """`[batch, group * length]`: see `Problem.row_sinks`"""

    def of(self, entries: list[int]) -> Prepared:
        """Those of some entries, for a call: no rows of theirs are tried any more."""
        order = self.given.order
        given = Given(self.given.cell_of[entries], order=None if order is None else order[entries])
        tables = [self.tables[x] for x in entries] if self.tables else ()
        return replace(self, given=given, tables=tables, kernel_tables=None)

    @property
    def cells(self) -> int:
        """of an entry, at most"""
        tables = self.tables if self.kernel_tables is None else (self.kernel_tables,)
        return max((table.cells for table in tables), default=0) or 1

    @property
    def cells_per_segment(self) -> int:
        sizes = self.recipe.sizes
        return sizes.cells_in(sizes.segment or self.keys.shape[1])


@torch.no_grad()
def prepare(
    queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, recipe: Recipe, sinks: Tensor | None = None
) -> Prepared:
    """Groups keys and, where rows open cells in an order, orders rows: as a call does that is given neither."""
    cell_of, _, order = empty_results(queries, keys, values, recipe.sizes, recipe.engine)[3:6]
    partition, sizes = from_plain(recipe.partition, recipe.options), recipe.sizes
    if recipe.engine == "triton":
        assert isinstance(partition, KMeans)  # see `cells.triton.limits`
        layout_spans, kernel_tables = _prepare_by_kernels(queries, keys, values, visible, recipe, partition, cell_of, order)
        given = Given(cell_of, order=order if sizes.ordered else None)
        all_spans = [layout_spans] * len(keys)
        return Prepared(queries, keys, values, visible, recipe, given, all_spans, kernel_tables=kernel_tables, sinks=sinks)
    heads = []
    for entry in range(len(queries)):
        key = wide(keys[entry])
        asked = sizes_of_queries(queries[entry], visible[entry], sizes, partition)
        cell_of[entry] = assign(key, visible[entry], sizes, partition, queries=asked)
        no_seed = torch.zeros((), dtype=torch.int64)
        heads.append(head_of(recipe, queries, key, values, visible, cell_of[entry].long(), no_seed, entry))
        if sizes.ordered:
            order[entry] = by_best_cell(heads[-1])
    given = Given(cell_of, order=order if sizes.ordered else None)
    tables = [x.table for x in heads]
    return Prepared(queries, keys, values, visible, recipe, given, [x.spans for x in heads], tables, sinks=sinks)


@torch.no_grad()
def try_budgets(prepared: Prepared, numbers: Tensor, budgets: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Exact attention of some rows, `[rows, value_dim]`, and by cells with each budget, `[budgets, rows, value_dim]`.

    `numbers` `[rows]`: of rows over all entries, in any order and with repetitions, not on a GPU. `budgets`: ascending numbers of
    cells to open.
    """
    per_entry, (_, keys, width) = prepared.queries.shape[1], prepared.values.shape
    entries, of_row, counts = (numbers // per_entry).unique(return_inverse=True, return_counts=True)
    # The rows of each entry side by side; -1 where an entry has fewer than another.
    by_entry = of_row.argsort(stable=True)
    slot = torch.empty_like(of_row)
    slot[by_entry] = torch.arange(len(numbers)) - (counts.cumsum(0) - counts)[of_row[by_entry]]
    place = numbers.new_full((len(entries), int(counts.max())), -1)
    place[of_row, slot] = numbers % per_entry
    device, compute = prepared.values.device, torch.promote_types(prepared.values.dtype, torch.float32)
    # In one go: a GPU is waited for at each.
    columns, at = place.shape[1], of_row * place.shape[1] + slot
    entries, place, at = torch.cat([entries, place.flatten(), at]).to(device).split([len(entries), place.numel(), len(at)])
    place = place.view(-1, columns)
    exact = prepared.values.new_empty(*place.shape, width, dtype=compute)
    found = exact.new_empty(len(budgets), *exact.shape)
    by_kernels = prepared.kernel_tables is not None
    per_row = CELL_BYTES * prepared.cells * (1 + prepared.recipe.sizes.share // POOL) + (0 if by_kernels else KEY_BYTES * keys)
    rows_at_a_time = BLOCK_BYTES * (GPU_TIMES if place.is_cuda else 1) // per_row
    columns = max(1, min(columns, rows_at_a_time))
    # Entries that torch has grouped may differ in their spans, so they come one by one.
    step = max(1, rows_at_a_time // columns) if by_kernels else 1
    for first in range(0, len(entries), step):
        some = slice(first, first + step)
        for start in range(0, place.shape[1], columns):
            rows = slice(start, start + columns)
            exact[some, rows], found[:, some, rows] = _try_rows(prepared, entries[some], place[some, rows], budgets, compute)
    return exact.flatten(0, 1)[at], found.flatten(1, 2)[:, at]


def _try_rows(
    prepared: Prepared, entries: Tensor, place: Tensor, budgets: Sequence[int], compute: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`try_budgets` for rows `place` `[entries, rows]` of some entries; -1 is no row, and gets anything."""
    sizes, real = prepared.recipe.sizes, place >= 0
    place = place.clamp(min=0)
    queries = prepared.queries[entries[:, None], place].to(compute) * prepared.recipe.scale
    visible, of_block = (prepared.visible[entries[:, None], x] * real for x in (place, _first_of_block(prepared, place)))
    closed = closed_keys(of_block, sizes._replace(share=1))
    cells = _columns(prepared, entries, closed)
    of_cell = torch.zeros(*place.shape, 1, dtype=torch.uint8, device=place.device)
    if cells is not None:
        wide_queries = _padded(queries, cells.centroid)
        first, spread = cells.moments(wide_queries)
        rating = score(first, spread) if sizes.share == 1 else _votes(prepared, entries, place, cells, compute)
        of_cell = _levels(prepared, rating.masked_fill_(~cells.seen, -torch.inf), cells.size, budgets)
    rows = _Rows(entries, place, queries, visible, closed)
    sums = _sums if prepared.kernel_tables is None else _sums_by_kernel
    top, mass, numerator = sums(prepared, rows, cells, of_cell, len(budgets) + 1)
    exact = _output(prepared, rows, numerator.sum(2), mass.sum(2), top)
    mass, numerator = (x[:, :, :-1].cumsum(2).movedim(2, 0) for x in (mass, numerator))
    if cells is None:
        return exact, _output(prepared, rows, numerator, mass, top)
    slope = None
    if prepared.recipe.softcap:
        first, spread, slope = cap_moments(first, spread, prepared.recipe.softcap)
    log_mass = first + cells.size.log()[:, None] + log_boost(spread)
    all_top = torch.maximum(top, log_mass.amax(2))
    factor = (top - finite(all_top)).exp()
    masses = (log_mass - finite(all_top)[..., None]).exp()
    tilt = cells.cross @ wide_queries[..., None]
    closed_by = torch.arange(len(budgets), device=place.device)[:, None, None, None]
    far = masses * (of_cell > closed_by)
    share = far.sum(3)
    tilted = share if slope is None else (far * slope).sum(3)
    of_far = torch.addcmul(far @ cells.value, tilted[..., None], tilt[..., 0])[..., : numerator.shape[3]]
    return exact, _output(prepared, rows, numerator * factor[..., None] + of_far, mass * factor + share, all_top)


class _Rows(NamedTuple):
    """Rows of some entries, `[entries, rows]`."""

    entries: Tensor
    """`[entries]`"""
    place: Tensor
    queries: Tensor
    """`[entries, rows, dim]`, times the scale"""
    visible: Tensor
    closed: Tensor


def _sums(prepared: Prepared, rows: _Rows, cells: _Columns | None, of_cell: Tensor, levels: int) -> tuple[Tensor, Tensor, Tensor]:
    """The largest logit of each row, and relative to it the sums of weights `[entries, rows, levels]` and of weighted values.

    The level of a key is the number of budgets that do not open its cell; 0 for keys that are near without it.
    """
    most, entry = int(rows.visible.max()), int(rows.entries)
    keys, values = (x[entry, :most].to(rows.queries.dtype) for x in (prepared.keys, prepared.values))
    # Tables are `[keys, rows]`: what all rows need to know about a key lies side by side.
    logits = capped(keys @ rows.queries[0].T, prepared.recipe.softcap)
    position = torch.arange(most, device=logits.device)[:, None]
    logits.masked_fill_(position >= rows.visible, -torch.inf)
    top = logits.amax(0) if most else logits.new_full(rows.place.shape[1:], -torch.inf)
    weights = logits.sub_(finite(top)).exp_()
    level = torch.zeros_like(logits, dtype=torch.uint8)
    if cells is not None:
        padded = torch.cat([of_cell[0].T, of_cell.new_zeros(1, rows.place.shape[1])])
        home = cells.homes(prepared.given.cell_of[entry, :, :most])
        if cells.segment:
            level = padded.gather(0, home.masked_fill(position >= rows.closed, len(padded) - 1))
        else:
            level = padded.index_select(0, home[:, 0])
    parts = [weights.masked_fill(level != number, 0.0).T for number in range(levels)]
    mass, numerator = torch.stack([x.sum(1) for x in parts], 1), torch.stack([x @ values for x in parts], 1)
    return top[None], mass[None], numerator[None]


def _sums_by_kernel(
    prepared: Prepared, rows: _Rows, cells: _Columns | None, of_cell: Tensor, levels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`_sums`, which never has a table of keys."""
    from nearfield.cells.triton.trial import level_sums

    shape, scale = rows.place.shape, prepared.recipe.scale
    segments = torch.zeros_like(rows.closed) if cells is None else cells.segments
    entry = rows.entries[:, None].expand(shape)
    visible, closed, segments, entry, place = (x.flatten() for x in (rows.visible, rows.closed, segments, entry, rows.place))
    tensors = prepared.queries, prepared.keys, prepared.values, visible, closed, segments, entry, place, prepared.given.cell_of
    with backends.device_guard(place.device):
        of_rows = level_sums(*tensors, of_cell.flatten(0, 1), prepared.recipe.sizes.segment, scale, levels)
    top, mass, numerator = of_rows
    return top.view(shape), mass.unflatten(0, shape), numerator.unflatten(0, shape)


def _first_of_block(prepared: Prepared, place: Tensor) -> Tensor:
    """The rows with whose eyes rows look at closed segments: in causal calls, the first row of a block."""
    sizes = prepared.recipe.sizes
    return place - place % (prepared.queries.shape[1] // sizes.group) % sizes.share if sizes.segment else place


def _output(prepared: Prepared, rows: _Rows, numerator: Tensor, mass: Tensor, top: Tensor) -> Tensor:
    """The ratio of sums over keys, both relative to e^top, beside the sinks; zero for a row that sees nothing."""
    blind = mass <= 0
    output = (numerator / mass.masked_fill(blind, 1.0)[..., None]).masked_fill(blind[..., None], 0.0)
    if prepared.sinks is None:
        return output
    return output * sink_share(top + mass.log(), prepared.sinks[rows.entries[:, None], rows.place])[0][..., None]


def _padded(x: Tensor, like: Tensor) -> Tensor:
    """`x` with as many columns as `like`, see `wide`."""
    missing = like.shape[-1] - x.shape[-1]
    return torch.nn.functional.pad(x, (0, missing)) if missing else x


def _levels(prepared: Prepared, rating: Tensor, size: Tensor, budgets: Sequence[int]) -> Tensor:
    """How many budgets do not open each cell, `[entries, rows, cells]`."""
    sizes, device = prepared.recipe.sizes, rating.device
    best = rating.topk(min(budgets[-1], rating.shape[2]), dim=2).indices
    needed = torch.arange(1, best.shape[2] + 1, device=device).repeat(*best.shape[:2], 1)
    if sizes.share > 1 and prepared.kernel_tables is not None:
        # The lists of a block have room for so many cells of mean size.
        mean = -(-(sizes.segment or prepared.keys.shape[1]) // prepared.cells_per_segment)
        members = size[:, None].expand_as(rating).gather(2, best)
        needed = torch.maximum(needed, (members.cumsum(2) / mean).ceil().long())
    too_small = torch.bucketize(needed, torch.tensor([*budgets], device=device)).to(torch.uint8)
    return torch.full_like(rating, len(budgets), dtype=torch.uint8).scatter_(2, best, too_small)


def _votes(prepared: Prepared, entries: Tensor, place: Tensor, cells: _Columns, compute: torch.dtype) -> Tensor:
    """The votes that each row's block gives to cells, `[entries, rows, cells]`: see `far_field.votes`."""
    sizes, order = prepared.recipe.sizes, prepared.given.order
    length = prepared.queries.shape[1] // sizes.group
    own_order = None if order is None else order[entries].long()
    blocks = blocks_of_rows(prepared.queries.shape[1], sizes, place.device, own_order)
    blocks = blocks[place] if own_order is None else blocks.gather(1, place)
    member = place // length
    inside = torch.arange(sizes.share, device=place.device)
    places = (blocks - member * -(-length // sizes.share))[..., None] * sizes.share + inside
    there = places < length
    rows = member[..., None] * length + places.clamp(max=length - 1)
    if own_order is not None:
        rows = member[..., None] * length + own_order.gather(1, rows.flatten(1)).view(rows.shape)
    queries = prepared.queries[entries[:, None, None], rows].to(compute) * prepared.recipe.scale * there[..., None]
    counts = there.unflatten(2, (-1, POOL)).sum(3)
    means = queries.unflatten(2, (-1, POOL)).sum(3) / counts.clamp(min=1)[..., None]
    first, spread = cells.moments(_padded(means, cells.centroid).flatten(1, 2), counts.shape[2])
    return votes(first, spread, cells.size, counts > 0, prepared.recipe.softcap)


@dataclass(frozen=True)
class _Columns:
    """The cells of some entries, all of them, and which of them each of some rows sees."""

    size: Tensor
    """`[entries, cells]`"""
    centroid: Tensor
    """`[entries, cells, dim]`"""
    variance: Tensor
    value: Tensor
    """`[entries, cells, value_dim]`"""
    seen: Tensor
    """`[entries, rows, cells]`: not empty, and seen by the row"""
    cross: Tensor
    """`[entries, rows, value_dim, dim]`: the covariance of the cells that a row sees"""
    segments: Tensor
    """`[entries, rows]`: how many closed segments each row sees"""
    segment: int
    """keys of a segment"""

    def moments(self, queries: Tensor, repeat: int = 1) -> tuple[Tensor, Tensor]:
        """q.mu_c (-inf for cells that are not seen) and u_c, `[entries, rows, cells]`; for `repeat` queries of each row."""
        seen = self.seen if repeat == 1 else self.seen.repeat_interleave(repeat, 1)
        first = (queries @ self.centroid.mT).masked_fill_(~seen, -torch.inf)
        return first, (squares(queries) @ self.variance.mT).clamp_(max=MOST_SPREAD)

    def homes(self, cell_of: Tensor) -> Tensor:
        """`[keys, rows]`, of the one entry: the cell through which a row sees each key of those in segments that it sees closed.

        `cell_of` `[span_levels, keys]`. Without segments all rows see a key through the same cell: `[keys, 1]`.
        """
        keys, cell_of = cell_of.shape[1], cell_of.T.long()
        home = cell_of[:, :1]
        if self.segment:
            # A row sees a key through the longest of its spans that reaches the key.
            segment = torch.arange(-(-keys // self.segment), device=self.segments.device)[:, None]
            reached = torch.stack([segment < (self.segments[0] >> i << i) for i in range(cell_of.shape[1])])
            level = (reached.sum(0) - 1).clamp_(min=0).repeat_interleave(self.segment, 0)[:keys]
            home = cell_of.gather(1, level)
        return home.masked_fill(home < 0, self.size.shape[1])


def _columns(prepared: Prepared, entries: Tensor, closed: Tensor) -> _Columns | None:
    """The cells of some entries; None where there are none."""
    sizes, spans = prepared.recipe.sizes, prepared.spans[int(entries[0]) if prepared.tables else 0]
    if not spans.all:
        return None
    segments = closed // sizes.segment if sizes.segment else (closed > 0).long()
    sees_span = seen_spans(spans, segments)
    tables = prepared.kernel_tables
    if tables is None:
        table = prepared.tables[int(entries[0])]
        edges = table.spans
        size, centroid, variance, value = (x[None] for x in (table.size, table.centroid, table.variance, table.value))
        weight = sees_span.to(table.cross.dtype)
        pooled = (weight @ table.members.to(weight.dtype)).clamp(min=1)
        cross = (weight @ table.cross.flatten(1)).unflatten(2, table.cross.shape[1:]) / pooled[..., None, None]
    else:
        edges = spans.edges(prepared.cells_per_segment)
        size = torch.exp2(tables.log2_size[entries]).round()
        centroid, variance, value = (x[entries].float() for x in (tables.centroid, tables.variance, tables.value))
        cross = tables.cross[entries[:, None], segments].float()
    seen = sees_span[..., _span_of_cell(tuple(edges), closed.device)] & (size > 0)[:, None]
    return _Columns(size, centroid, variance, value, seen, cross, segments, sizes.segment)


@lru_cache(maxsize=64)
def _span_of_cell(edges: tuple[int, ...], device: torch.device) -> Tensor:
    """`[cells]`, from the first cell of each span."""
    counts = torch.tensor([last - first for first, last in pairwise(edges)])
    return torch.arange(len(counts)).repeat_interleave(counts).to(device)


@lru_cache(maxsize=64)
def _levels_and_starts(spans: Spans, device: torch.device) -> tuple[Tensor, Tensor]:
    """The level and the first segment of each span."""
    level, first = torch.tensor([(span.level, span.first) for span in spans.all]).T.to(device)
    return level, first


def seen_spans(spans: Spans, segments: Tensor) -> Tensor:
    """`[..., spans]`: whether each span is among `spans.seen(segments)`, for many numbers of segments at a time."""
    level, first = _levels_and_starts(spans, segments.device)
    segments = segments[..., None]
    # One span for each set bit, which begins where those of the higher bits end; of the largest level, all that fit.
    is_bit = (segments >> level & 1 == 1) & (first == segments >> level + 1 << level + 1)
    return torch.where(level == spans.tallest, first + (1 << level) <= segments, is_bit)


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
        tables = cells_of(queries, keys, values, as_read(visible), recipe.sizes, layout, partition, cell_of)
        if recipe.sizes.ordered:
            order_for(queries, tables, layout, recipe.sizes, scale, order)
    return layout.spans, tables
