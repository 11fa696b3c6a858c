"""How many near keys does each row need? The paper's open question about k, answered by the scores themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.checks import check_fraction, check_positive, general_mask_error
from nearfield.chunks import row_blocks
from nearfield.kernels.backends import full_precision
from nearfield.kernels.reference import exact_logits
from nearfield.knn.index.base import default_k
from nearfield.knn.tail import needed_sizes, tail_factor
from nearfield.problem import check

BYTES_PER_SCORE = 64
"""What one score of a row takes while it is sorted and summed up, in float64."""


@torch.no_grad()
def needed_k(
    query: Tensor,
    key: Tensor,
    eps: float,
    delta: float,
    *,
    tail: int | None = None,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """The smallest k with which `TopK(k, tail)` promises (eps, delta) in each row, if it finds the true top k.

    `TopK(eps=, delta=)` chooses a k that is enough for any scores, even for flat ones. A row with sharp scores needs fewer: with
    z_(1) >= z_(2) >= ... its sorted scores and Z_k the sum of e^z over the first k, the corrected theorem
    (thm:simpler_expectation) holds for

        Z_k e^{-z_(k+1)} tail >= 2 (1 + 2 eps/3) (n - k) eps^-2 ln(4/delta),

    where n is the number of keys that the row sees. The worst case is Z_k e^{-z_(k+1)} = k. From k = n - tail on the estimate
    is exact.

    Args:
        query, key: `[..., heads, Lq, dim]` and `[..., kv_heads, Lk, dim]`, as in `nearfield.attention`.
        eps, delta: an entry is within eps/(1-eps) max|V - O| with probability 1 - delta, each entry by itself.
        tail: sampled keys per row; None: ceil(sqrt(Lk)).
        attn_mask: a boolean key-padding mask. The other arguments are those of `nearfield.attention`.

    Returns:
        int64 `[..., heads, Lq]`: between 1 and the number of keys that the row sees; 0 where it sees none.

    Cost: all scores, O(Lq Lk (dim + log Lk)), some rows at a time. This is for looking into a model, not for serving it.

    Example:
        >>> flat = needed_k(0 * q, k, eps=0.5, delta=0.1, tail=16)
        >>> sharp = needed_k(30 * q, k, eps=0.5, delta=0.1, tail=16)
        >>> int(flat.max()), bool(sharp.double().mean() < 10)
        (46, True)
    """
    check_fraction("eps", eps)
    check_fraction("delta", delta)
    check_positive("tail", tail, optional=True, least=0)
    problem = check(query, key, key, attn_mask, 0.0, is_causal, scale, enable_gqa)
    if problem.has_general_mask:
        assert problem.attn_mask is not None
        raise general_mask_error("needed_k", problem.attn_mask, "Leave out the keys that a row must not see.")
    rows = problem.rows
    drawn = default_k(None, key.shape[-2]) if tail is None else tail
    factor = tail_factor(eps, delta)
    needed = torch.zeros_like(rows.visible)
    with full_precision(rows.queries):
        for block in row_blocks(rows.visible.shape, BYTES_PER_SCORE * max(1, rows.length)):
            part = rows.at(block)
            if rows.length:
                logits = exact_logits(part.queries, part.keys, part.visible)
                needed[:, block] = needed_sizes(logits, part.visible, drawn, factor)
    return problem.like_inputs(problem.by_head(needed))
