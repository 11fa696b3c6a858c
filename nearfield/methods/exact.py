"""Exact attention: torch's own scaled_dot_product_attention behind the interface of every other method."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nearfield.kernels import reference
from nearfield.methods.base import Call, Outcome, row_blocks
from nearfield.problem import Problem, Rows
from nearfield.sampling import Seeds


@dataclass(frozen=True)
class Exact:
    """`F.scaled_dot_product_attention`: every key near. The only method that honours an arbitrary `attn_mask`.

    Time O(Lq * Lk * dim). Example:
        >>> q, k, v = torch.randn(3, 1, 2, 8, 4).unbind(0)
        >>> torch.allclose(nearfield.attention(q, k, v, method=Exact()), F.scaled_dot_product_attention(q, k, v))
        True
    """

    def run(self, problem: Problem, call: Call) -> Outcome:
        with _seeded(call.seeds, problem):
            output = _sdpa(problem)
        batch, kv_heads = problem.key.shape[:2]
        output = output.reshape(batch * kv_heads, -1, output.shape[-1])
        lse = stderr = None
        if call.diagnostics:
            lse = _lse(problem)
            stderr = torch.zeros_like(lse)
        return Outcome(output, lse, stderr, {"keys_per_query": _mean_visible(problem)})


def _sdpa(problem: Problem) -> Tensor:
    query, key, value, mask, causal = problem.query, problem.key, problem.value, problem.attn_mask, problem.is_causal
    scale = problem.scale
    if scale <= 0.0:
        # Torch's CPU kernel multiplies the -inf of a causal mask by the scale: NaN for 0, +inf for a negative one.
        query, scale = query * (-1.0 if scale else 0.0), -scale or 1.0
    if causal and mask is not None:
        position = torch.arange(key.shape[2], device=key.device)
        mask, causal = mask & (position <= torch.arange(query.shape[2], device=key.device)[:, None]), False

    def attend(query: Tensor, mask: Tensor | None, gqa: bool) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, mask, problem.dropout_p, causal, scale=scale, enable_gqa=gqa)

    group = problem.group_size
    fused = query.shape[3] == value.shape[3] and not problem.dropout_p and (mask is None or not mask.requires_grad)
    if group == 1 or fused or query.device.type != "cpu":
        return attend(query, mask, group > 1)
    # Where torch has no fused kernel for a CPU it repeats the keys in memory for grouped queries; one call per member of
    # the group does not. (Nor does the fused one, and it sums the gradients of a group in float32.)
    members = query.unflatten(1, (-1, group)).unbind(2)
    if mask is None or mask.shape[1] == 1:
        masks = [mask] * group
    else:
        masks = list(mask.unflatten(1, (-1, group)).unbind(2))
    return torch.stack([attend(q, m, False) for q, m in zip(members, masks, strict=True)], 2).flatten(1, 2)


_default_generator = threading.Lock()
"""Held while torch's default generator is on loan, so that concurrent calls do not take each other's numbers."""


@contextmanager
def _seeded(seeds: Seeds, problem: Problem) -> Iterator[None]:
    """SDPA draws its dropout from torch's default generator: lend it our seed and give the generator back as it was."""
    if problem.dropout_p == 0.0:
        yield
        return
    device = problem.query.device
    # Taken before the fork: a number drawn inside it would be drawn again by the next call.
    seed = seeds.base
    with _default_generator, torch.random.fork_rng(devices=[device] if device.type == "cuda" else [], device_type="cuda"):
        if device.type == "cuda":
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        else:
            # Not torch.manual_seed, which seeds the generators of all devices.
            torch.default_generator.manual_seed(seed)
        yield


@torch.no_grad()
def _lse(problem: Problem) -> Tensor:
    """Log-normalisers `[batch, rows]`, blocked; SDPA does not return them."""
    if problem.attn_mask is not None and problem.key_padding is None:
        return _masked_lse(problem)
    rows = problem.rows.detach()
    lse = rows.queries.new_empty(rows.visible.shape)
    for block in row_blocks(rows.queries, 4 * max(1, rows.length) * rows.queries.element_size()):
        lse[:, block] = exact_rows(rows.at(block))[1]
    return lse


def _masked_lse(problem: Problem) -> Tensor:
    mask = problem.attn_mask
    assert mask is not None
    compute = torch.promote_types(problem.query.dtype, torch.float32)
    bias = torch.zeros((), device=mask.device).masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else mask
    key = problem.key.repeat_interleave(problem.group_size, 1).to(compute)
    logits = (problem.query.to(compute) * problem.scale) @ key.transpose(-1, -2) + bias.to(compute)
    return logits.logsumexp(-1).reshape(key.shape[0] * problem.key.shape[1], -1)


def exact_rows(rows: Rows) -> tuple[Tensor, Tensor]:
    """Output and log-normaliser of all given rows, densely."""
    return reference.exact_attention(rows.queries, rows.keys, rows.values, rows.visible)


def _mean_visible(problem: Problem) -> float:
    if problem.attn_mask is not None and problem.key_padding is None:
        return float(problem.key.shape[2])
    return float(problem.rows.visible.double().mean())
