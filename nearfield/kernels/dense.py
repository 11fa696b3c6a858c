"""Exact attention in plain torch, for logits that torch's own kernels do not know: soft caps and sinks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from nearfield.kernels.reference import log_normaliser, masked


def capped(logits: Tensor, softcap: float) -> Tensor:
    """softcap tanh(logits / softcap); 0: the logits as they are."""
    return (logits / softcap).tanh().mul(softcap) if softcap else logits


def cap_slope(logits: Tensor, softcap: float) -> Tensor:
    """The derivative of `capped` where it has given these logits: 1 - (logits / softcap)^2; 0 for keys that are hidden."""
    slope = 1.0 - (logits / softcap).square()
    return slope.masked_fill(logits == -torch.inf, 0.0)


def sink_share(lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """What a sink of logit `sink` leaves to the keys, Z / (Z + e^sink) with Z = e^lse, and the log-normaliser with the sink."""
    # Where both are -inf their difference is NaN. Neither it nor its gradient may be used.
    blind = lse == -torch.inf
    none = blind & (sink == -torch.inf)
    share = torch.sigmoid(torch.where(blind, -torch.inf, lse - sink))
    return share, torch.where(none, -torch.inf, torch.logaddexp(lse.masked_fill(none, 0.0), sink))


def sink_weight(lse: Tensor, sink: Tensor) -> Tensor:
    """e^(sink - lse), the weight of a sink beside which the log-normaliser is `lse`; 0 where there is nothing at all."""
    gap = sink - lse.masked_fill(lse == -torch.inf, torch.inf)
    # Beside a sink of +inf no key counts, and the difference is NaN.
    return gap.masked_fill(sink == torch.inf, 0.0).exp()


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    recompute: bool = False,
) -> Tensor:
    """Attention `[batch, heads, rows, value_dim]` in the dtype of the inputs; heads of keys and values may be fewer.

    `mask`: as SDPA takes it. `sink` `[heads]`: logits that count in the denominator alone. Arithmetic in float32 or more. A table
    of rows times keys is made: the caller takes a bounded number of rows at a time. `recompute`: it is not kept for the backward
    pass, but made again. Rows that see no key are zero.
    """
    if recompute and torch.is_grad_enabled():
        return checkpoint(dense_attention, query, key, value, mask, scale, softcap, sink, dropout_p, use_reentrant=False)
    compute = torch.promote_types(query.dtype, torch.float32)
    logits = dense_logits(query, key, mask, scale, softcap)
    # Only numbers that are added can hide a row with a gradient: that of -inf - (-inf) is NaN.
    lse = logits.logsumexp(-1) if mask is None or mask.dtype == torch.bool else log_normaliser(logits)
    if sink is not None:
        lse = sink_share(lse, sink.to(compute)[:, None])[1]
    weights = (logits - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
    # The rounding error of a large normaliser is common to all weights of a row. Without a sink their sum is known.
    if sink is None:
        weights = weights / weights.sum(-1, keepdim=True).masked_fill((lse == -torch.inf)[..., None], 1.0)
    weights = F.dropout(weights, dropout_p) if dropout_p else weights
    batch, kv_heads = key.shape[:2]
    output = weights.reshape(batch, kv_heads, -1, weights.shape[3]) @ value.to(compute)
    return output.reshape(*query.shape[:3], value.shape[3]).to(query.dtype)


def dense_logits(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, softcap: float) -> Tensor:
    """`[batch, heads, rows, keys]`: scaled, capped, and then masked."""
    compute = torch.promote_types(query.dtype, torch.float32)
    batch, kv_heads = key.shape[:2]
    queries = query.to(compute).reshape(batch, kv_heads, -1, query.shape[3]) * scale
    logits = capped((queries @ key.to(compute).mT).reshape(*query.shape[:3], key.shape[2]), softcap)
    return logits if mask is None else masked(logits, mask)
