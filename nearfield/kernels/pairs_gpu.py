"""The pair kernels of `reference.py` on a GPU: in Triton, or the reference itself where Triton does not serve."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.kernels import reference
from nearfield.kernels.limits import TRITON_DTYPES, unsupported


def pair_scores(rows: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    if unsupported(rows, table):
        return reference.pair_scores(rows, table, ids)
    from nearfield.kernels import pairs_triton

    with torch.cuda.device_of(table):
        return pairs_triton.scores(rows, table, ids)


def pair_sums(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    if unsupported(table) or weights.dtype not in TRITON_DTYPES:
        return reference.pair_sums(weights, table, ids)
    from nearfield.kernels import pairs_triton

    with torch.cuda.device_of(table):
        return pairs_triton.sums(weights, table, ids)


def pair_scatter_(out: Tensor, weights: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    # The kernel adds atomically, hence in any order, and to rows whose columns are contiguous.
    served = out.dtype == torch.float32 and out.stride(-1) == 1 and not unsupported(rows) and weights.dtype in TRITON_DTYPES
    if not served or torch.are_deterministic_algorithms_enabled():
        return reference.pair_scatter_(out, weights, rows, ids)
    from nearfield.kernels import pairs_triton

    with torch.cuda.device_of(out):
        return pairs_triton.scatter_(out, weights, rows, ids)
