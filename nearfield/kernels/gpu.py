"""The pair kernels of `reference.py` on a GPU, in Triton, and the reference itself for what those do not serve."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.kernels import reference

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_COLUMNS = 256


def misses(*tables: Tensor) -> str | None:
    """What the kernels in Triton cannot do of tables (and rows) like these; None: they serve them."""
    for table in tables:
        if table.dtype not in DTYPES:
            return f"{table.dtype}"
        if table.shape[-1] > MOST_COLUMNS:
            return f"more than {MOST_COLUMNS} columns"
    return None


def pair_scores(rows: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    if misses(rows, table):
        return reference.pair_scores(rows, table, ids)
    from nearfield.kernels.triton import pairs

    with torch.cuda.device_of(table):
        return pairs.scores(rows, table, ids)


def pair_sums(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    if misses(table) or weights.dtype not in DTYPES:
        return reference.pair_sums(weights, table, ids)
    from nearfield.kernels.triton import pairs

    with torch.cuda.device_of(table):
        return pairs.sums(weights, table, ids)


def pair_scatter_(out: Tensor, weights: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    # The kernel adds atomically, that is in any order, and to rows whose columns lie side by side.
    served = out.dtype == torch.float32 and out.stride(-1) == 1 and not misses(rows) and weights.dtype in DTYPES
    if not served or torch.are_deterministic_algorithms_enabled():
        return reference.pair_scatter_(out, weights, rows, ids)
    from nearfield.kernels.triton import pairs

    with torch.cuda.device_of(out):
        return pairs.scatter_(out, weights, rows, ids)
