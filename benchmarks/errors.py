"""Errors of attention rows, summarised in the same few numbers everywhere.

Relative: ||estimate - exact|| / ||exact||. Additive: ||estimate - exact|| in units of the rms norm of the values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

import nearfield as nf

Summary = dict[str, float]


def summary(relative: Tensor, additive: Tensor) -> Summary:
    return {
        "rows": relative.numel(),
        "mean_relative": float(relative.mean()),
        "p95_relative": float(relative.flatten().double().quantile(0.95)),
        "max_relative": float(relative.max()),
        "max_additive": float(additive.max()),
    }


def of_audit(audit: nf.Audit | None) -> Summary:
    assert audit is not None
    return summary(audit.relative_errors, audit.additive_errors)


def of_all_rows(output: Tensor, exact: Tensor, value: Tensor) -> Summary:
    """Errors of all rows of the output `[..., length, dim]` of one head."""
    error = (output - exact).norm(dim=-1)
    return summary(error / exact.norm(dim=-1), error / value.square().sum(-1).mean().sqrt())


def of_random_rows(
    output: Tensor, query: Tensor, key: Tensor, value: Tensor, rows: int, seed: int, is_causal: bool = False
) -> tuple[Summary, Tensor]:
    """Errors of random rows of an output `[1, heads, length, dim]`, and their additive errors.

    This audit shares neither code nor random numbers with the library's own, and copies nothing: it takes one row at a time.
    """
    heads, length, dim = query.shape[1:]
    group = heads // key.shape[1]
    chosen = torch.randperm(heads * length, generator=torch.Generator().manual_seed(seed))[:rows].tolist()
    norm = [float(head.norm()) / math.sqrt(length) for head in value[0]]
    relative, additive = torch.empty(len(chosen)), torch.empty(len(chosen))
    for i, row in enumerate(chosen):
        head, position = divmod(row, length)
        seen = slice(0, position + 1 if is_causal else length)
        logits = key[0, head // group, seen] @ query[0, head, position] / math.sqrt(dim)
        weights = logits.double().softmax(0).float()
        exact = weights @ value[0, head // group, seen]
        error = (output[0, head, position] - exact).norm()
        relative[i], additive[i] = error / exact.norm(), error / norm[head // group]
    return summary(relative, additive), additive


HEADINGS = ("mean rel.", "p95 rel.", "max add.")
"""Headings of the columns that `written` fills."""


def exact_rows(query: Tensor, key: Tensor, value: Tensor, rows: int) -> Tensor:
    """The last rows of causal attention, `[1, heads, rows, dim]`, float32."""
    group, length = query.shape[1] // key.shape[1], key.shape[2]
    keys, values = (x.repeat_interleave(group, 1).float() for x in (key, value))
    logits = query[:, :, -rows:].float() @ keys.mT / query.shape[3] ** 0.5
    place = torch.arange(length, device=key.device)
    return logits.masked_fill_(place > place[-rows:, None], -torch.inf).softmax(-1) @ values


def written(errors: Summary) -> tuple[str, ...]:
    return f"{errors['mean_relative']:.4f}", f"{errors['p95_relative']:.4f}", f"{errors['max_additive']:.4f}"
