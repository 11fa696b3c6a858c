"""Attention written out a second time, slowly and in float64, for tests to compare with. Shares no code with the package."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

QKV = tuple[Tensor, Tensor, Tensor]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(
    *lead: int,
    queries: int,
    keys: int | None = None,
    dim: int = 8,
    value_dim: int | None = None,
    kv_heads: int | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> QKV:
    """Gaussian query `[*lead, queries, dim]`, key and value `[*lead, keys, ...]` with `kv_heads` in place of the heads."""
    generator = seeded(seed)
    lead_kv = (*lead[:-1], kv_heads) if kv_heads is not None else lead

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    length = queries if keys is None else keys
    return normal(*lead, queries, dim), normal(*lead_kv, length, dim), normal(*lead_kv, length, value_dim or dim)


def causal_mask(queries: int, keys: int) -> Tensor:
    """Row i sees keys 0..i."""
    return torch.arange(keys) <= torch.arange(queries)[:, None]


def spans_seen(segments: int, levels: int) -> list[tuple[int, int]]:
    """(level, first segment) of the spans that so many closed segments are seen as, by their binary digits.

    As many spans of the largest length as fit, then one of 2^p segments for each digit 1 of the rest, at place p, from the left.
    """
    longest = 2 ** (levels - 1)
    whole, rest = divmod(segments, longest)
    found = [(levels - 1, number * longest) for number in range(whole)]
    digits = f"{rest:b}"
    for column, digit in enumerate(digits):
        if digit == "1":
            found.append((len(digits) - 1 - column, whole * longest + int(digits[:column].ljust(len(digits), "0") or "0", 2)))
    return found


def all_spans(segments: int, levels: int) -> list[tuple[int, int]]:
    """Those that are seen by so many closed segments or fewer, short ones first, then as they follow each other."""
    return sorted({span for seen in range(segments + 1) for span in spans_seen(seen, levels)})


def logits64(query: Tensor, key: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None) -> Tensor:
    """scale Q K^T in float64 with -inf where a row does not see a key; `mask` boolean or additive."""
    if query.dim() > 2:
        key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    logits = scale * (query.double() @ key.double().mT)
    if causal:
        logits = logits.masked_fill(~causal_mask(*logits.shape[-2:]), -torch.inf)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.double()
    return logits


def softmax64(logits: Tensor) -> Tensor:
    """Softmax over the last axis, zeros where a row sees no key."""
    blind = (logits == -torch.inf).all(-1, keepdim=True)
    return logits.masked_fill(blind, 0.0).softmax(-1).masked_fill(blind, 0.0)


def attention64(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    if query.dim() > 2:
        value = value.repeat_interleave(query.shape[-3] // value.shape[-3], -3)
    return softmax64(logits64(query, key, mask, causal, scale)) @ value.double()


def gradients(function: Any, tensors: QKV, upstream: Tensor) -> tuple[Tensor, QKV]:
    """Output of `function(query, key, value)` and the gradients of its inner product with `upstream`."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    output = function(*leaves)
    found = torch.autograd.grad(output, leaves, upstream.to(output.dtype))
    return output.detach(), (found[0], found[1], found[2])


def pairs(shape: tuple[int, int, int, int], dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """Rows `[f, d]`, table `[n, d]`, ids `[f, t]` with repeats within and across rows, weights `[f, t]` with zeros."""
    count, width, length, dim = shape
    generator = seeded(1)
    rows, table = (torch.randn(x, dim, generator=generator).to(device, dtype) for x in (count, length))
    ids = torch.randint(length, (count, width), generator=generator)
    if width > 1:
        ids[:, 1] = ids[:, 0]
    weights = torch.randn(count, width, generator=generator)
    weights[:, ::3] = 0
    return rows, table, ids.to(device), weights.to(device, dtype)
