"""Errors of rows against exact ones, in units of the values."""

from __future__ import annotations

import math

import torch
from torch import Tensor

JUDGED_ROWS = 32
UNIT = "the rms norm of the values"


def mean_error(output: Tensor, query: Tensor, key: Tensor, value: Tensor, causal: bool, seed: int) -> float:
    """Mean of ||estimate - exact|| over a few random rows, in units of the rms norm of the values (as `error_vs_k`).

    Exact rows are computed one by one in float32, from the inputs as the method saw them.
    """
    _, heads, length, dim = query.shape
    rows = torch.randint(heads * length, (JUDGED_ROWS,), generator=torch.Generator().manual_seed(seed)).tolist()
    total = 0.0
    for row in rows:
        head, position = divmod(row, length)
        seen = slice(0, position + 1 if causal else length)
        scores = key[0, head, seen].float() @ query[0, head, position].float() / math.sqrt(dim)
        exact = scores.double().softmax(0).float() @ value[0, head, seen].float()
        total += float((output[0, head, position].float() - exact).norm())
    return total / len(rows) / rms_norm(value)


def rms_norm(value: Tensor) -> float:
    """Of rows; head by head, for a long input is not to be copied as a whole."""
    squares = [float(head.float().square().sum(-1).mean()) for head in value[0]]
    return math.sqrt(sum(squares) / len(squares))
