"""The specification of the kernels: plain torch, on any device and in any dtype.

Pairs are given as `ids[f, t]`: row f meets row `ids[f, t]` of a table. Ids are never negative; a pair that must not
count has weight zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pair_scores(rows: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """The inner product of each pair: rows `[f, d]`, table `[n, d]`, ids `[f, t]` -> `[f, t]`."""
    return torch.einsum("fd,ftd->ft", rows, table[ids])


def pair_sums(weights: Tensor, table: Tensor, ids: Tensor) -> Tensor:
    """The weighted sum over the pairs of a row: weights `[f, t]`, table `[n, d]`, ids `[f, t]` -> `[f, d]`."""
    return torch.einsum("ft,ftd->fd", weights, table[ids])


def pair_scatter_(out: Tensor, weights: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
    """The transpose of `pair_sums`: adds rows `[f, d]`, times the weights of their pairs, to the rows `ids` of out `[n, d]`."""
    return out.index_add_(0, ids.reshape(-1), (weights[..., None] * rows[:, None, :]).reshape(-1, rows.shape[-1]))


def weighted_softmax(logits: Tensor, log_weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """softmax(logits + log_weight) over the last axis, and its log-normaliser.

    A row without any key (all logits -inf) gets weights zero and normaliser -inf, as a fully masked row of SDPA does.
    """
    shifted = logits if log_weight is None else logits + log_weight
    lse = shifted.logsumexp(-1)
    blind = lse == -torch.inf
    weights = (shifted - lse.masked_fill(blind, 0.0)[..., None]).exp()
    # A normaliser of 1e4 is rounded to 1e-3, so all weights are off by one common factor. Divide it out.
    return weights / weights.sum(-1).masked_fill(blind, 1.0)[..., None], lse


def log_normaliser(logits: Tensor) -> Tensor:
    """The logarithm of the sum of e^logits over the last axis; -inf, with a gradient of zero, for a row without any key."""
    blind = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(blind, 0.0).logsumexp(-1).masked_fill(blind[..., 0], -torch.inf)


def masked(logits: Tensor, mask: Tensor) -> Tensor:
    """Logits under a mask as SDPA takes it: boolean, False where a key is hidden, or a number to add."""
    return logits.masked_fill(mask.logical_not(), -torch.inf) if mask.dtype == torch.bool else logits + mask


def rms_norm(values: Tensor, counts: Tensor | None = None) -> Tensor:
    """The root mean square norm of values `[..., n, dim]`: `[...]`. `counts` `[..., n]`: False for values that are zero and not
    to be counted."""
    square = values.to(torch.promote_types(values.dtype, torch.float32)).square().sum(-1)
    mean = square.sum(-1) / (max(1, square.shape[-1]) if counts is None else counts.sum(-1).clamp(min=1))
    return mean.sqrt().clamp(min=torch.finfo(mean.dtype).tiny)


def largest(scores: Tensor, k: int, size: int, sorted: bool = True) -> tuple[Tensor, Tensor]:
    """`scores.topk(k)` along the last axis, in two stages: the k best are in the k groups of `size` columns with the best maxima.

    A group is every `groups`-th column, so that the maxima vectorise. Only the members of those k groups are compared one by one.
    """
    length = scores.shape[-1]
    groups = length // size
    body = scores[..., : groups * size].unflatten(-1, (size, groups))
    chosen = body.amax(-2).topk(k, sorted=False).indices
    column = (chosen[..., None, :] + groups * torch.arange(size, device=scores.device)[:, None]).flatten(-2)
    if groups * size < length:
        rest = torch.arange(groups * size, length, device=scores.device)
        column = torch.cat([column, rest.expand(*column.shape[:-1], -1)], -1)
    best = scores.gather(-1, column).topk(k, sorted=sorted)
    return best.values, column.gather(-1, best.indices)


def exact_logits(queries: Tensor, keys: Tensor, visible: Tensor) -> Tensor:
    """The inner products of rows `[b, r, d]` with keys `[b, n, d]`; -inf beyond the first `visible[b, r]` keys."""
    return hidden_beyond(queries @ keys.transpose(1, 2), visible)


def hidden_beyond(logits: Tensor, visible: Tensor) -> Tensor:
    """Logits `[b, r, n]` with -inf beyond the first `visible[b, r]` keys."""
    return logits.masked_fill(torch.arange(logits.shape[-1], device=logits.device) >= visible[..., None], -torch.inf)


def exact_attention(queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
    """Dense softmax attention of rows `[b, r, d]` over the first `visible[b, r]` keys: output and log-normaliser."""
    weights, lse = weighted_softmax(exact_logits(queries, keys, visible), None)
    return weights @ values, lse
