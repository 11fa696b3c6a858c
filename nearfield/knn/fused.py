"""Top-k attention over cells on a GPU: rows are searched, drawn for and summed up a part at a time, and no plan is kept.

The same estimator as `weighted_attention`, without gradients: half precision is read as it is, and nothing is copied.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from nearfield.cells.sizes import CellSizes
from nearfield.kernels import backends
from nearfield.knn.index.base import Index
from nearfield.knn.index.cells import BuiltCells, CellIndex, unsupported_search
from nearfield.knn.index.tally import Tally
from nearfield.problem import Call, Problem, Rows
from nearfield.sampling import Seeds, without_replacement

ROWS_TOGETHER = 1 << 19
"""Keys whose cells are made at a time, and rows that choose cells at a time: whole heads, or a part of one."""

DRAWS_TOGETHER = 1 << 24
"""Keys that are drawn at a time."""

MOST_SORTED = 4096
"""Near keys of a row that a program sorts."""


def served_sizes(index: Index, problem: Problem, call: Call, rows: Rows, k: int, tail: int) -> CellSizes | None:
    """The sizes of a call that this module computes: a plain forward pass with cells that are made for it, where Triton runs."""
    device = problem.key.device
    if type(index) is not CellIndex or call.diagnostics or call.return_lse:
        return None
    if problem.needs_grad or problem.dropout_p or problem.scale <= 0 or not problem.has_plain_logits:
        return None
    if not (backends.prefers_triton(call.backend, device) and backends.runs_triton(device)) or (tail and k > MOST_SORTED):
        return None
    sizes = index.sizes(rows.length, k, bool((rows.visible < rows.length).any()), True)
    return sizes if unsupported_search(rows.length, sizes, rows.keys, rows.values) is None else None


def attend_by_cells(rows: Rows, scale: float, index: CellIndex, sizes: CellSizes, k: int, tail: int, seeds: Seeds) -> Tensor:
    """Attention `[batch, rows, value_dim]` of rows as they came, over their best k keys and `tail` others.

    Cost: that of the search, and O((k + tail) dim) a row to read what was found; with a tail also O(k log^2 k + k tail) to
    tell drawn keys from near ones. Memory: `SCORES_BYTES` of the search, k numbers a row for a part of the rows, and cells of
    at most `ROWS_TOGETHER` keys.
    """
    from nearfield.kernels.launch import dense
    from nearfield.knn.attend_triton import attend_rows, tail_ids
    from nearfield.knn.index.cells_triton import KernelCells

    batch, count = rows.visible.shape
    output = rows.values.new_empty(batch, count, rows.values.shape[2])
    tally = Tally(None)
    with backends.device_guard(rows.keys.device):
        for entries in _parts(batch, ROWS_TOGETHER // max(1, rows.length)):
            keys, values = dense(rows.keys[entries]), dense(rows.values[entries])
            cells = KernelCells(keys, sizes, index.iterations, index.seed)
            for some in _parts(count, min(ROWS_TOGETHER, DRAWS_TOGETHER // max(1, tail)) // len(keys)):
                queries, visible = rows.queries[entries, some].contiguous(), rows.visible[entries, some]
                candidates = cells.candidates(queries, visible, sizes)
                tally.add(candidates.scored, visible)
                near = candidates.scored.clamp(max=k)
                left_out = visible - near
                ranks = None
                if tail:
                    generator = seeds.generator(entries.start * count + some.start)
                    ranks = without_replacement(left_out.flatten(), tail, generator).view(*left_out.shape, tail)
                units = candidates.units
                best = torch.empty(units.size, k, dtype=torch.float32, device=keys.device)
                ids = torch.empty(units.size, k, dtype=torch.int32, device=keys.device)
                for unit in range(units.total):
                    entry, part = units.slices(slice(unit, unit + 1))
                    at, many = entry.start, part.stop - part.start
                    found = best[:many], ids[:many]
                    cells.search(queries, sizes, candidates, unit, *found)
                    drawn = None if ranks is None else tail_ids(ranks[at, part], found[1])
                    into = output[entries.start + at, some][part]
                    attend_rows(queries[at, part], keys[at], values[at], *found, drawn, left_out[at, part], scale, into)
    tally.warn(BuiltCells)
    return output


def _parts(count: int, size: int) -> Iterator[slice]:
    """Ranges that cover 0 to `count`, of at most `size` and at least one."""
    for start in range(0, count, max(1, size)):
        yield slice(start, min(start + max(1, size), count))
