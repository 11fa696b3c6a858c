"""From lists of candidates to the top k, for every index made of inverted lists.

Such an index keeps key ids in an `order`, list after list, and answers a query by naming a few ranges of it. This module turns
those ranges into scores and winners. Scoring row by row would gather every candidate key for every row. Instead, rows that open
the same list share the gather: (row, list) pairs are sorted by list and cut into tiles, and each tile is one small matrix
product of a few queries with a run of keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.knn.index.base import PADDING, row_table

SCORES_PER_PASS = 1 << 22
"""Entries of the padded score table of one pass over some rows (16 MB in float32, plus ids where duplicates are removed)."""

SCALARS_PER_PRODUCT = 1 << 20
"""Gathered queries and keys of one batched matrix product (4 MB): small enough for the cache, large enough to be worth a call."""

MARKS_PER_PASS = 1 << 25
"""Bytes of the table that finds duplicates."""


def best_of_lists(
    queries: Tensor,
    keys: Tensor,
    entry: Tensor,
    order: Tensor | None,
    starts: Tensor,
    counts: Tensor,
    k: int,
    table: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The k largest inner products of each row with the keys of its lists.

    Args:
        queries: `[rows, dim]`.
        keys: `[batch, length, dim]`.
        entry: `[rows]`, the batch entry of each row.
        order: flat, key ids within their batch entry. None: the identity, where position `entry * length + id` holds `id`.
        starts, counts: int64 `[rows, slots]`, the ranges of `order` that are a row's candidates; count 0 for an unused slot.
            Ranges with the same start must belong to the same batch entry.
        k: how many winners per row.
        table: `[slots]`, of a small integer dtype: the hash table of each slot. A key may then be in one list of every table,
            and still counts once. None: no key is in two lists.

    Returns:
        scores and ids `[rows, k]`, largest first, padded with -inf and `PADDING`, and the number of distinct candidates `[rows]`.

    Cost O(candidates * dim), in passes over some rows at a time, which bound the extra memory. All offsets are int64.
    """
    rows = queries.shape[0]
    scores = queries.new_full((rows, k), -torch.inf)
    ids = torch.full((rows, k), PADDING, device=queries.device)
    found = counts.sum(-1)
    run = _run_length(counts)
    widths = ((counts + (run - 1)) // run).sum(-1)
    # Rows of similar width share a pass, or the widest row would set the padding of all.
    by_width = torch.argsort(widths, descending=True, stable=True)
    sorted_widths = widths[by_width].cpu()
    first = 0
    while first < rows and int(sorted_widths[first]) > 0:
        width = int(sorted_widths[first])
        chosen = by_width[first : first + max(1, SCORES_PER_PASS // (width * run))]
        first += chosen.shape[0]
        part = _Pass(queries[chosen], keys, entry[chosen], order, starts[chosen], counts[chosen], run, width)
        part.score()
        if table is not None:
            found[chosen] = part.drop_duplicates(table)
        scores[chosen], ids[chosen] = part.winners(k)
    return scores, ids, found


def _run_length(counts: Tensor) -> int:
    """Keys per tile: about the length of a typical list, so that neither padding nor the number of tiles dominates."""
    used = int((counts > 0).sum())
    typical = int(counts.sum()) // used if used else 1
    return min(128, max(8, 1 << max(0, typical - 1).bit_length()))


class _Pass:
    """Some rows, with their lists cut into runs of at most `run` keys; row i has at most `width` runs."""

    def __init__(
        self,
        queries: Tensor,
        keys: Tensor,
        entry: Tensor,
        order: Tensor | None,
        starts: Tensor,
        counts: Tensor,
        run: int,
        width: int,
    ) -> None:
        self.queries, self.keys, self.entry, self.order, self.run, self.width = queries, keys, entry, order, run, width
        device, rows = queries.device, queries.shape[0]
        runs = (counts + (run - 1)) // run
        pair = runs.reshape(-1)
        self.total = int(pair.sum())
        parent = torch.repeat_interleave(torch.arange(pair.shape[0], device=device), pair, output_size=self.total)
        # The number of each run within its list, and its place within its row.
        nth = torch.arange(self.total, device=device) - (pair.cumsum(0) - pair)[parent]
        self.row = parent // counts.shape[1]
        within_row = (runs.cumsum(1) - runs).reshape(-1)[parent] + nth
        self.slot = parent % counts.shape[1]
        self.start = starts.reshape(-1)[parent] + nth * run
        self.count = (counts.reshape(-1)[parent] - nth * run).clamp(max=run)
        self.place = self.row * width + within_row
        self.scores = torch.full((rows * width + 1, run), -torch.inf, dtype=queries.dtype, device=device)
        self.run_start = torch.zeros(rows * width, dtype=torch.int64, device=device)
        self.run_start[self.place] = self.start
        self.run_count = torch.zeros(rows * width, dtype=torch.int64, device=device)
        self.run_count[self.place] = self.count

    def score(self) -> None:
        """Fill the score table tile by tile; the queries of a tile share a run of keys."""
        device, run, dim = self.queries.device, self.run, self.queries.shape[1]
        start, by_start = torch.sort(self.start, stable=True)
        _, group, sizes = torch.unique_consecutive(start, return_inverse=True, return_counts=True)
        # Half the typical group, so that little of a tile is empty.
        side = min(64, 1 << max(0, (self.total // sizes.shape[0]).bit_length() - 1))
        tiles_of = (sizes + (side - 1)) // side
        member = torch.arange(self.total, device=device) - (sizes.cumsum(0) - sizes)[group]
        tile = (tiles_of.cumsum(0) - tiles_of)[group] + member // side
        seat = tile * side + member % side
        tiles = int(tiles_of.sum())
        sink = self.scores.shape[0] - 1
        # Empty seats read row 0 and write to the sink.
        seat_row = torch.zeros(tiles * side, dtype=torch.int64, device=device)
        seat_row[seat] = self.row[by_start]
        seat_place = torch.full((tiles * side,), sink, dtype=torch.int64, device=device)
        seat_place[seat] = self.place[by_start]
        seat_count = torch.zeros(tiles * side, dtype=torch.int64, device=device)
        seat_count[seat] = self.count[by_start]
        tile_start = torch.zeros(tiles, dtype=torch.int64, device=device)
        tile_start[tile] = start
        flat_keys, between = row_table(self.keys)
        base = self.entry * between
        step = max(1, SCALARS_PER_PRODUCT // ((side + run) * dim + side * run))
        steps = torch.arange(run, device=device)
        for first in range(0, tiles, step):
            seats = slice(first * side, (first + step) * side)
            tile_rows = seat_row[seats].view(-1, side)
            positions = tile_start[first : first + step, None] + steps
            # Beyond the end of its list a run reads whatever follows; those scores are masked.
            which = self._ids(positions, tile_rows[:, 0]) + base[tile_rows[:, 0], None]
            near = flat_keys.index_select(0, which.reshape(-1)).view(-1, run, dim)
            rows = self.queries.index_select(0, tile_rows.reshape(-1)).view(-1, side, dim)
            products = torch.bmm(rows, near.transpose(1, 2)).view(-1, run)
            products.masked_fill_(steps >= seat_count[seats, None], -torch.inf)
            self.scores.index_copy_(0, seat_place[seats], products)

    def _ids(self, positions: Tensor, row: Tensor) -> Tensor:
        """The key ids at `positions` `[..., m]` of the order, for the given rows `[...]`."""
        length = self.keys.shape[1]
        if self.order is None:
            return (positions - (self.entry[row] * length).unsqueeze(-1)).clamp(0, length - 1)
        return self.order[positions.clamp(max=self.order.shape[0] - 1)].long()

    def drop_duplicates(self, table: Tensor) -> Tensor:
        """Mask all but one copy of each key of a row; returns the number of distinct keys per row."""
        device, rows, length = self.queries.device, self.queries.shape[0], self.keys.shape[1]
        table_of_run = torch.zeros(rows * self.width, dtype=table.dtype, device=device)
        table_of_run[self.place] = table[self.slot]
        steps = torch.arange(self.run, device=device)
        distinct = torch.zeros(rows, dtype=torch.int64, device=device)
        step = min(rows, max(1, MARKS_PER_PASS // ((length + 1) * table.element_size())))
        # Not initialised: an entry is read only after this pass wrote it, so the cost depends on candidates, not on `length`.
        marks = torch.empty(step, length + 1, dtype=table.dtype, device=device)
        for first in range(0, rows, step):
            last = min(rows, first + step)
            runs = slice(first * self.width, last * self.width)
            valid = steps < self.run_count[runs, None]
            here = torch.arange(first, last, device=device).repeat_interleave(self.width)
            ids = self._ids(self.run_start[runs, None] + steps, here).masked_fill_(~valid, length).view(last - first, -1)
            own_table = table_of_run[runs, None].expand(-1, self.run).reshape(last - first, -1)
            # A table lists a key once, so (table, key) is unique, and the mark that is left names a single copy.
            marks.scatter_(1, ids, own_table)
            keep = (marks[: last - first].gather(1, ids) == own_table) & valid.view(last - first, -1)
            distinct[first:last] = keep.sum(1)
            self.scores[runs].view(last - first, -1).masked_fill_(~keep, -torch.inf)
        return distinct

    def winners(self, k: int) -> tuple[Tensor, Tensor]:
        """The k largest scores of each row and their key ids."""
        rows, width = self.queries.shape[0], self.width * self.run
        kept = min(k, width)
        best, position = self.scores[:-1].view(rows, width).topk(kept, dim=-1)
        here = torch.arange(rows, device=best.device)[:, None]
        where = here * self.width + position // self.run
        ids = self._ids((self.run_start[where] + position % self.run), here.squeeze(1))
        missing = (position % self.run >= self.run_count[where]) | (best == -torch.inf)
        ids = ids.masked_fill(missing, PADDING)
        best = best.masked_fill(missing, -torch.inf)
        if kept < k:
            best = torch.nn.functional.pad(best, (0, k - kept), value=-torch.inf)
            ids = torch.nn.functional.pad(ids, (0, k - kept), value=PADDING)
        return best, ids
