"""From inner products to distances: keys and queries with one more coordinate."""

from __future__ import annotations

import torch
from torch import Tensor


def lift_keys(keys: Tensor, norm: Tensor | None = None) -> Tensor:
    """Append a coordinate so that all keys of a batch entry have the same norm R.

        k' = [k, sqrt(R^2 - ||k||^2)],   R = max_j ||k_j||,   ||k'|| = R

    With q' = [q, 0] (`lift_queries`) this leaves q'.k' = q.k and makes ||q' - k'||^2 = ||q||^2 + R^2 - 2 q.k, so the nearest
    lifted keys are the keys of largest inner product.

    The paper (Appendix on concentric LSH, reduction of MIPS to kNN) prints a norm of sqrt(M); what the reduction needs is
    R >= max ||k||. The argument of the root is clamped at 0: for the longest key it is a rounding error of either sign. A
    single very long key makes R^2 dwarf all differences, and float32 then loses neighbours; so an index that can rank by inner
    product does that instead.

    Args:
        keys: `[..., length, dim]`. Half precision is converted to float32.
        norm: R, broadcastable to `[..., length]`, at least the norm of each key it applies to. None: the largest norm.

    Returns:
        `[..., length, dim + 1]`. Cost O(length dim).

    >>> lift_keys(torch.tensor([[3.0, 4.0], [0.0, 3.0]]))
    tensor([[3., 4., 0.],
            [0., 3., 4.]])
    """
    keys = keys if keys.dtype == torch.float64 else keys.float()
    squared = keys.square().sum(-1)
    if norm is None:
        limit = squared.amax(-1, keepdim=True) if keys.shape[-2] else squared.new_zeros(*squared.shape[:-1], 1)
    else:
        limit = norm.to(keys.dtype).square()
    return torch.cat([keys, (limit - squared).clamp(min=0).sqrt().unsqueeze(-1)], dim=-1)


def lift_queries(queries: Tensor) -> Tensor:
    """Append a zero: q' = [q, 0], so that q'.k' = q.k for lifted keys k'. `[..., dim]` becomes `[..., dim + 1]`.

    >>> lift_queries(torch.tensor([1.0, 2.0]))
    tensor([1., 2., 0.])
    """
    queries = queries if queries.dtype == torch.float64 else queries.float()
    return torch.nn.functional.pad(queries, (0, 1))
