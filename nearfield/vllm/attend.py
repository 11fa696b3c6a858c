"""Attention over pages, in PyTorch: exact for the first block, the latest keys and opened cells, by moments for all others.

What a row reads through cells depends on its position alone: block b, of keys b * size to (b + 1) * size - 1, if all of them are
`window` or more places before the row. So where all rows attend this way, nothing depends on how a prompt was cut into chunks, on
what else is in a batch, and on which blocks were there already; but for rounding, which now and then decides between two cells
that score alike. Where prompts are read exactly, their rows read all keys instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield._compat import cpu_flash
from nearfield.attention import attention
from nearfield.cells.cache.attention import RECENT, best_shares, from_rows, opened_places, scaled_queries, score_cells, to_rows
from nearfield.cells.cache.segments import FlatTables
from nearfield.cells.far_field import best_columns
from nearfield.cells.sizes import default_cache_probes
from nearfield.chunks import BLOCK_BYTES
from nearfield.exact import Exact
from nearfield.kernels.backends import full_precision
from nearfield.vllm.pages import PageLayout

MOST_SCORED_SPREAD = 64.0
"""Spreads are cut off here in scores, as in a cache whose keys are grouped as queries are large: cells of one block are so small
that a large spread means what it says, and heads that look for a single key lose it where 9 is the most (docs/vllm.md)."""
READ_ONCE = 2
"""All keys are read together where rows would read so many times as many one by one."""


@dataclass(frozen=True)
class Reach:
    """What rows read key by key."""

    window: int
    """latest keys, the row's own included, that are never behind cells"""
    exact_below: int
    """rows that see fewer keys than this read all of them"""
    probes: int | None
    """cells that a row opens; None: as many as a `CellCache` on a GPU would"""

    def first_near(self, position: int, size: int) -> int:
        """Blocks 1 to this one, which is left out, are behind cells for a row at this position."""
        if position + 1 < self.exact_below:
            return 1
        return max(1, (position + 1 - self.window) // size)

    def last_alike(self, position: int, size: int) -> int:
        """The last position whose row has as many blocks behind cells as this one has."""
        changes = max(self.exact_below, self.window + 2 * size) - 1
        if position < changes:
            return changes - 1
        return self.window + (self.first_near(position, size) + 1) * size - 2

    def opened(self, cells: int, keys: int) -> int:
        """How many of these cells, which have so many keys, a row opens."""
        wanted = default_cache_probes(keys, cells, True) if self.probes is None else self.probes
        return min(cells, wanted)


class Rows(NamedTuple):
    """Consecutive rows of a request that see the same blocks through cells."""

    query: Tensor
    """`[rows, query heads, dim]`"""
    first: int
    """the position of the first one"""
    near: int
    """the first block after the first one that they read key by key"""


def attend(query: Tensor, pages: Tensor, layout: PageLayout, blocks: Tensor, length: int, reach: Reach, scale: float) -> Tensor:
    """`[rows, query heads, value_dim]`, of the last rows `[rows, query heads, dim]` of a request with `length` keys.

    `blocks`: the pages of its blocks, in order.
    """
    found = [_through_cells(rows, pages, layout, blocks, reach, scale) for rows in _alike(query, layout, length, reach)]
    return torch.cat(found) if found else query.new_empty(0, query.shape[1], layout.value_dim)


def _alike(query: Tensor, layout: PageLayout, length: int, reach: Reach) -> Iterator[Rows]:
    """Rows that see the same blocks through cells, some at a time where score tables would grow large."""
    count, begin = len(query), length - len(query)
    start = 0
    while start < count:
        position = begin + start
        near = reach.first_near(position, layout.size)
        stop = min(count, reach.last_alike(position, layout.size) + 1 - begin)
        if near > 1:
            stop = min(stop, start + _rows_at_a_time(query.shape[1], layout, near, begin + stop, reach))
        yield Rows(query[start:stop], position, near)
        start = stop


def _rows_at_a_time(heads: int, layout: PageLayout, near: int, length: int, reach: Reach) -> int:
    cells, keys = (near - 1) * layout.cells, (near - 1) * layout.size
    opened = 2 * reach.opened(cells, keys) * layout.size // layout.cells
    columns = 2 * cells + max(opened, keys) + length - keys
    return max(1, BLOCK_BYTES // (4 * (heads * columns + layout.heads * opened * (layout.dim + layout.value_dim))))


def _through_cells(rows: Rows, pages: Tensor, layout: PageLayout, blocks: Tensor, reach: Reach, scale: float) -> Tensor:
    count, stop = len(rows.query), rows.first + len(rows.query)
    size, heads = layout.size, layout.heads
    if rows.near == 1:
        if count == 1 and layout.dim == layout.value_dim:
            return _one_exactly(rows.query, pages, layout, blocks, stop, scale)
        keys, values = _held(pages, layout, blocks[: -(-stop // size)], stop)
        inputs = rows.query.transpose(0, 1)[None], keys[None].to(rows.query.dtype), values[None].to(rows.query.dtype)
        output = attention(*inputs, is_causal=True, scale=scale, enable_gqa=True, method=Exact(), offset=rows.first)
        return output[0].transpose(0, 1)
    with full_precision(rows.query):
        queries = scaled_queries(rows.query.transpose(0, 1)[None], heads, scale)
        group = queries.shape[1] // count
        near_blocks = torch.cat([blocks[:1], blocks[rows.near : -(-stop // size)]])
        keys, values = _held(pages, layout, near_blocks, size + stop - rows.near * size)
        place = torch.arange(keys.shape[1], device=keys.device)
        position = torch.where(place < size, place, place + (rows.near - 1) * size)
        own = torch.arange(rows.first, stop, device=keys.device)[:, None]
        near_logits = torch.bmm(queries, keys.to(queries.dtype).transpose(1, 2))
        near_logits.masked_fill_((position > own).repeat(group, 1), -torch.inf)

        behind = blocks[1 : rows.near]
        flat, order = _tables(pages, layout, behind)
        scores, far_logits = score_cells(flat, queries)
        normaliser = None
        if group > 1:
            is_read = (position < size) | (position > own - RECENT)
            seen = near_logits.masked_fill(~is_read.repeat(group, 1), -torch.inf)
            normaliser = torch.logaddexp(far_logits.logsumexp(2), seen.logsumexp(2))
        cells = scores.shape[2]
        probes = reach.opened(cells, len(behind) * size)
        _, opened = best_columns(best_shares(scores, normaliser, count), probes)
        taken = opened.view(heads, 1, count, -1).expand(-1, group, -1, -1).reshape(heads, group * count, -1)
        far_logits.scatter_(2, taken, -torch.inf)

        # Rows that read more keys in all than there are have them read once, and what they did not open is hidden.
        read_once = count * probes >= READ_ONCE * cells
        if read_once:
            open_logits, open_values = _all_logits(queries, pages, layout, behind, order, flat, opened, count)
        else:
            open_logits, open_values = _open_logits(queries, pages, layout, behind, order, flat, opened, count)
        parts = near_logits, open_logits, far_logits
        weights = torch.cat(parts, 2).softmax(2).split([part.shape[2] for part in parts], 2)
        output = torch.bmm(weights[0], values.to(queries.dtype)).baddbmm_(weights[2], flat.value)
        if read_once:
            output.baddbmm_(weights[1], open_values)
        else:
            output.add_(from_rows(torch.bmm(to_rows(weights[1], count), open_values), heads))
    return output.view(heads * group, count, -1).transpose(0, 1).to(rows.query.dtype)


def _one_exactly(query: Tensor, pages: Tensor, layout: PageLayout, blocks: Tensor, length: int, scale: float) -> Tensor:
    """One row `[1, query heads, dim]` that sees all keys, in pages as they lie: each block by itself, and then merged."""
    heads, size = layout.heads, layout.size
    full, rest = divmod(length, size)
    # All keys are seen, so their order does not matter, and the queries of a group are rows.
    parts = [(slice(*run), size) for run in _runs(blocks[:full].sort().values.tolist())]
    if rest:
        last = int(blocks[full])
        parts.append((slice(last, last + 1), rest))
    grouped = query.view(1, heads, -1, layout.dim)
    outputs, lses = [], []
    for run, count in parts:
        keys, values = (x[:, :, :count].to(query.dtype) for x in (layout.keys(pages[run]), layout.values(pages[run])))
        if layout.by_columns:  # The kernel takes rows.
            keys = keys.contiguous()
        found = cpu_flash(grouped.expand(len(keys), -1, -1, -1), keys, values, scale=scale)
        outputs.append(found[0])
        lses.append(found[1])
    weights = torch.cat(lses).softmax(0)
    return (torch.cat(outputs) * weights[..., None]).sum(0).view(1, -1, layout.value_dim).to(query.dtype)


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    """The ranges that sorted numbers are made of."""
    starts = [i for i, number in enumerate(numbers) if i == 0 or numbers[i - 1] != number - 1]
    return [(numbers[start], numbers[stop - 1] + 1) for start, stop in pairwise([*starts, len(numbers)])]


def _open_logits(
    queries: Tensor, pages: Tensor, layout: PageLayout, blocks: Tensor, order: Tensor, flat: FlatTables, opened: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """Logits `[heads, group * rows, any]` of the keys that each row has opened, and their values `[heads * rows, any, ...]`."""
    heads = layout.heads
    places, missing = opened_places(flat, opened, heads)
    found = _gathered(pages, layout, blocks, order, places.view(heads, -1))
    keys, values = (x.view(heads * rows, -1, x.shape[2]).to(queries.dtype) for x in found)
    logits = torch.bmm(to_rows(queries, rows), keys.transpose(1, 2)).masked_fill_(missing[:, None], -torch.inf)
    return from_rows(logits, heads), values


def _all_logits(
    queries: Tensor, pages: Tensor, layout: PageLayout, blocks: Tensor, order: Tensor, flat: FlatTables, opened: Tensor, rows: int
) -> tuple[Tensor, Tensor]:
    """`_open_logits` of all keys, -inf where a row has not opened them; values are those of all rows `[heads, keys, ...]`."""
    heads, cells = flat.size.shape
    places = torch.arange(order.shape[1], device=order.device).expand(heads, -1)
    keys, values = (x.to(queries.dtype) for x in _gathered(pages, layout, blocks, order, places))
    is_open = torch.zeros(heads, rows, cells, dtype=torch.bool, device=order.device)
    is_open.scatter_(2, opened.view(heads, rows, -1), True)
    cell = torch.searchsorted((flat.start + flat.size.long()).contiguous(), places.contiguous(), right=True)
    hidden = ~is_open.gather(2, cell[:, None].expand(-1, rows, -1))
    group = queries.shape[1] // rows
    return torch.bmm(queries, keys.transpose(1, 2)).masked_fill_(hidden.repeat(1, group, 1), -torch.inf), values


def _held(pages: Tensor, layout: PageLayout, blocks: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` keys and values of some blocks, `[heads, count, ...]`. What is behind them was never written."""
    held = pages.new_empty(layout.heads, len(blocks), *pages.shape[2:])
    for head, into in enumerate(held):
        torch.index_select(pages[:, head], 0, blocks, out=into)
    keys, values = (x.flatten(1, 2)[:, :count] for x in (layout.keys(held), layout.values(held)))
    return keys, values


def _tables(pages: Tensor, layout: PageLayout, blocks: Tensor) -> tuple[FlatTables, Tensor]:
    """The cells of some blocks, as a cache has them, and which key is at each place: `[heads, keys]`."""
    centroid, variance, value, stop, order = (x[blocks].transpose(0, 1) for x in layout.summaries(pages))
    first = torch.arange(len(blocks), device=pages.device)[:, None] * layout.size
    stop = stop.long()
    size = stop.diff(dim=2, prepend=torch.zeros_like(stop[..., :1]))
    compute = torch.promote_types(pages.dtype, torch.float32)
    counts = size.flatten(1).to(compute)
    flat = FlatTables(
        start=(stop - size + first).flatten(1),
        size=counts,
        log_exists=torch.zeros_like(counts).masked_fill_(counts == 0, -torch.inf),
        centroid=centroid.flatten(1, 2).to(compute),
        variance=variance.flatten(1, 2).to(compute),
        value=value.flatten(1, 2).to(compute),
        log_size=counts.log()[:, None],
        covariance=counts.new_zeros(()),
        most_spread=MOST_SCORED_SPREAD,
    )
    return flat, (order.long() + first).flatten(1)


def _gathered(pages: Tensor, layout: PageLayout, blocks: Tensor, order: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values at these places `[heads, any]` of sorted blocks."""
    key = order.gather(1, places)
    head = torch.arange(len(key), device=key.device)[:, None]
    at = blocks[key // layout.size], head, key % layout.size
    return layout.keys(pages)[at], layout.values(pages)[at]
