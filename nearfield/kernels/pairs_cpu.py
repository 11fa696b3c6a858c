"""The pair kernels of `reference.py` without gathered copies of rows, which are what takes time on a CPU."""

from __future__ import annotations

import functools
import warnings

import torch
import torch.nn.functional as F
from torch import Tensor


@functools.cache
def _acknowledge_sparse_csr() -> None:
    """Torch warns once per process that its CSR layout is in beta and unchecked. Have it do so here, silenced."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one = torch.ones(1, device="cpu")
        torch.sparse_csr_tensor(one.long().cumsum(0).repeat(2) - 1, one.long() - 1, one[:0], (1, 1), check_invariants=False)


def pair_scores(rows: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    count, width = ids.shape
    if width >= len(table):
        # More pairs than products, as ids repeat: the sparse routine refuses these, and the dense one is cheaper.
        return (rows @ table.T).gather(1, ids)
    _acknowledge_sparse_csr()
    pattern = torch.sparse_csr_tensor(
        torch.arange(count + 1, device=ids.device) * width,
        ids.reshape(-1),
        rows.new_zeros(count * width),
        (count, table.shape[0]),
        check_invariants=False,
    )
    return torch.sparse.sampled_addmm(pattern, rows.contiguous(), table.contiguous().T, beta=0.0).values().view(count, width)


def pair_sums(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    if ids.shape[1] == 0:
        return table.new_zeros(ids.shape[0], table.shape[1])
    return F.embedding_bag(ids, table, per_sample_weights=weights.contiguous(), mode="sum")


def pair_scatter_(out: Tensor, weights: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    if ids.numel() == 0:
        return out
    # Pairs sorted by place are bags of rows. A stable sort fixes the order of summation, and with it every bit.
    place, order = ids.reshape(-1).sort(stable=True)
    place, size = place.unique_consecutive(return_counts=True)
    source = order.div(ids.shape[1], rounding_mode="floor")
    bags = F.embedding_bag(source, rows, size.cumsum(0) - size, per_sample_weights=weights.reshape(-1)[order], mode="sum")
    return out.index_add_(0, place, bags)
