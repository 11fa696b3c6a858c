"""Many rows at a time, such as a chunk of a prompt, attend to closed segments: by the engine for whole sequences."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.cells.cache.segments import group_whole, last_started
from nearfield.cells.cache.state import CacheState
from nearfield.cells.operator import Given, Recipe
from nearfield.cells.partition import Partition, to_plain
from nearfield.cells.planned import planned_attention
from nearfield.cells.sizes import CellSizes, MemoryPolicy
from nearfield.cells.triton.limits import MOST_PROBES, unsupported
from nearfield.kernels import backends
from nearfield.kernels.backends import full_precision
from nearfield.kernels.limits import TRITON_DTYPES
from nearfield.merge import merge
from nearfield.problem import needs_grad


def attend_to_closed(
    state: CacheState, query: Tensor, scale: float, probes: int, partition: Partition, cells: int | None = None
) -> tuple[Tensor, Tensor]:
    """Output `[batch, heads, rows, value_dim]` and log-normaliser of queries that see all closed segments, through their cells.

    Outputs are in the dtype of arithmetic, as far as the engine has them so. `cells`: the cells of the cache are joined into so
    many first; None: each stays by itself.

    Each row opens its own `probes` cells: query heads that share keys do not open cells together here, as they do in a step. By
    kernels in Triton these are at most `MOST_PROBES`, unless all cells are to be opened.
    """
    batch, heads, rows, _ = query.shape
    # Rows of offloaded keys come over together: most cells are opened by one row or another.
    keys, values = (x.filled[:, :, : state.closed].flatten(0, 1) for x in (state.keys, state.values))
    queries = query.reshape(len(keys), -1, query.shape[3])
    cell_of = cells_in_place(state)
    if cells is None or cells >= len(state.tables):
        cells = len(state.tables)
    else:
        cell_of = _joined(state, cell_of, cells, partition)
    if probes < cells and backends.runs_triton(query.device):
        probes = min(probes, MOST_PROBES)
    # To get just these cells, the number of keys per cell may have to be a fraction.
    size: int = state.closed / cells  # type: ignore[assignment]
    sizes = CellSizes(heads // state.heads, 0, 0, min(state.sizes.sinks, state.closed), size, min(probes, cells), 0)
    missing = unsupported(queries, keys, values, probes=sizes.probes, cells=cells)
    engine = "triton" if backends.choose_triton("auto", query.device, missing) else "torch"
    recipe = Recipe(sizes, scale, 0.0, *to_plain(partition), engine, MemoryPolicy())
    visible = torch.full(queries.shape[:2], state.closed, device=query.device)
    seed = torch.zeros((), dtype=torch.int64)
    given = Given(cell_of[:, None])
    with full_precision(query):
        found = planned_attention(queries, keys, values, visible, seed, recipe, given)
    return found.output.view(batch, heads, rows, -1), found.lse.view(batch, heads, rows)


def merged(near: Tensor, past: Tensor, near_lse: Tensor, past_lse: Tensor, dtype: torch.dtype) -> Tensor:
    """Output in `dtype` over keys near by and keys of closed segments, from those over either, rounded once."""
    if backends.runs_triton(near.device) and _two_are_served(near, past, near_lse, past_lse, dtype):
        from nearfield.cells.triton.merge_two import merge_two

        return merge_two(near, past, near_lse, past_lse, dtype)
    wide = torch.promote_types(dtype, torch.float32)
    return merge([near.to(wide), past.to(wide)], [near_lse, past_lse])[0].to(dtype)


def _two_are_served(near: Tensor, past: Tensor, near_lse: Tensor, past_lse: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel merges them. What does not fit together is for `merge` to refuse."""
    fit = near.shape == past.shape and near_lse.shape == past_lse.shape == near.shape[:3]
    known = {near.dtype, past.dtype, dtype} <= {*TRITON_DTYPES} and near_lse.dtype == past_lse.dtype == torch.float32
    return fit and known and not needs_grad(near, past, near_lse, past_lse)


def _joined(state: CacheState, cell_of: Tensor, cells: int, partition: Partition) -> Tensor:
    """`cell_of` with cells that lie next to each other joined, by grouping their centroids."""
    joined = group_whole(state.tables.flat.centroid, cells, partition)
    return joined.int().gather(1, cell_of.clamp(min=0).long()).masked_fill_(cell_of < 0, -1)


def cells_in_place(state: CacheState) -> Tensor:
    """`[batch * heads, closed]`: the cell of the key at each place, -1 for one that is in none. Keys are sorted by cell."""
    start = state.tables.start.flat.long()
    cell, place = last_started(start, state.closed), torch.arange(state.closed, device=start.device)
    # Keys that are in no cell come first in their segment.
    end = torch.cat([start.new_full((len(start), 1), -1), start + state.tables.size.flat.long()], 1).gather(1, cell + 1)
    return cell.masked_fill_(place >= end, -1).int()
