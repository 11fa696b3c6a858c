"""Exact attention of some rows to the same keys, by torch's own kernel where it applies."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield import _compat
from nearfield.cells.far_field import finite
from nearfield.kernels.dense import cap_slope, capped
from nearfield.kernels.reference import weighted_softmax

LARGE = 1e5
"""Beyond this, rounding may move a logit by a few hundredths or more."""


def dense_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    causal: bool = False,
    keep: Tensor | None = None,
    seen: Tensor | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Output `[group, rows, value_dim]` and log-normaliser of queries (times scale) `[group, rows, dim]` over keys `[keys, dim]`.

    `causal`: row r sees keys 0..r. `seen` `[rows, keys]`: which row sees which key. `keep` `[group, rows, keys]`: for dropout.
    `softcap`: see `Problem.softcap`.
    """
    if not softcap and _fused(keys, values, keep, seen):
        shape = (1, len(queries), -1, -1)
        output, lse = _compat.cpu_flash(queries[None], keys.expand(shape), values.expand(shape), 0.0, causal, scale=1.0)
        return output[0], lse.view(queries.shape[:2])
    weight, lse = weighted_softmax(_logits(queries, keys, causal, seen, softcap), None)
    return (weight if keep is None else weight * keep) @ values, lse


def dense_attention_backward(
    output_grad: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    output: Tensor,
    lse: Tensor,
    causal: bool = False,
    keep: Tensor | None = None,
    seen: Tensor | None = None,
    softcap: float = 0.0,
    delta: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of queries, keys and values through these keys, given the output and lse of *all* that a row attends to.

    With that lse, each weight is the final one, whatever else a row attends to. `delta`: what is taken off the gradients of the
    weights; None: the inner product of the output and its gradient, which torch's kernel takes.
    """
    extreme = is_extreme(lse)
    if delta is None and not softcap and _fused(keys, values, keep, seen) and not extreme:
        shape = (1, len(queries), -1, -1)
        query_grad, key_grad, value_grad = _compat.cpu_flash_backward(
            output_grad[None],
            queries[None],
            keys.expand(shape),
            values.expand(shape),
            output[None],
            lse[None],
            0.0,
            causal,
            scale=1.0,
        )
        return query_grad[0], key_grad[0].sum(0), value_grad[0].sum(0)
    logits = _logits(queries, keys, causal, seen, softcap)
    slope = cap_slope(logits, softcap) if softcap else None
    logits = logits - finite(lse)[..., None]
    weight = (logits.clamp(max=0.0) if extreme else logits).exp()
    kept = weight if keep is None else weight * keep
    value_grad = torch.einsum("grk,grd->kd", kept, output_grad)
    weight_grad = output_grad @ values.T
    if keep is not None:
        weight_grad = weight_grad * keep
    delta = (output_grad * output).sum(-1) if delta is None else delta
    logit_grad = weight * (weight_grad - delta[..., None])
    if slope is not None:
        logit_grad = logit_grad * slope
    return logit_grad @ keys, torch.einsum("grk,grd->kd", logit_grad, queries), value_grad


def is_extreme(lse: Tensor) -> bool:
    """Whether logits may be so large that, because of their rounding, e^(z - lse) exceeds 1 by much or overflows."""
    return bool(((lse.abs() > LARGE) & lse.isfinite()).any())


def _fused(keys: Tensor, values: Tensor, keep: Tensor | None, seen: Tensor | None) -> bool:
    """Whether torch's own kernel applies: on a CPU, some keys, as wide as their values, no dropout, no mask but a causal one."""
    return keys.device.type == "cpu" and keep is None and seen is None and keys.shape[1] == values.shape[1] and len(keys) > 0


def _logits(queries: Tensor, keys: Tensor, causal: bool, seen: Tensor | None, softcap: float) -> Tensor:
    logits = capped(queries @ keys.T, softcap)
    if causal:
        seen = torch.ones(logits.shape[1:], dtype=torch.bool, device=keys.device).tril()
    return logits if seen is None else logits.masked_fill(~seen, -torch.inf)
