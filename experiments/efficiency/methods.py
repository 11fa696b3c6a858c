"""What is timed: naive attention, SDPA, top-k with the paper's two k, and cells; all on the same random inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import nearfield as nf
from experiments.devices import dtype_on
from experiments.powers import power
from experiments.row_errors import mean_error

HEADS, DIM = 10, 64
SPREAD = 1.0
"""Inputs are uniform in [-1, 1]. Time and memory hardly depend on it; errors do, and are the matter of `error_vs_k`."""
NAMES = {
    "naive": "naive",
    "sdpa": "SDPA",
    "topk-sqrt": "TopK, k = n^{1/2}",
    "topk-fourth": "TopK, k = n^{1/4}",
    "cells": "Cells",
}
METHODS = tuple(NAMES)
KNN = ("topk-sqrt", "topk-fourth")
"""The paper's."""


def output_megabytes(n: int, dtype: torch.dtype) -> float:
    return HEADS * DIM * n * dtype.itemsize / 2**20


def naive(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    """softmax(Q K^T / sqrt(d)) V with the whole matrix of one head at a time, as the paper's listing loops over heads."""
    output = torch.empty_like(query)
    for batch in range(query.shape[0]):
        for head in range(query.shape[1]):
            scores = query[batch, head] @ key[batch, head].T / math.sqrt(query.shape[-1])
            if causal:
                future = torch.ones(scores.shape, dtype=torch.bool, device=scores.device).triu_(1)
                scores.masked_fill_(future, -torch.inf)
            output[batch, head] = scores.softmax(-1) @ value[batch, head]
    return output


def near_keys(method: str, n: int) -> int | None:
    """k of the paper's two settings."""
    powers = {"topk-sqrt": 1 / 2, "topk-fourth": 1 / 4}
    return power(n, powers[method]) if method in powers else None


def recipe(method: str, n: int) -> nf.Cells | nf.TopK | None:
    """Of this library's methods."""
    k = near_keys(method, n)
    return nf.TopK(k) if k is not None else nf.Cells() if method == "cells" else None


def function(method: str, n: int, causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    if method == "naive":
        return lambda q, k, v: naive(q, k, v, causal)
    if method == "sdpa":
        return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal)
    chosen = recipe(method, n)
    return lambda q, k, v: nf.attention(q, k, v, is_causal=causal, method=chosen)


def prepare(
    method: str, n: int, causal: bool, seed: int, device: str
) -> tuple[Callable[[], Tensor], Callable[[Tensor], dict[str, Any]]]:
    """For `isolate`: the call, and the error of some of its rows."""
    generator = torch.Generator(device).manual_seed(seed)

    def uniform(length: int) -> Tensor:
        drawn = torch.rand((1, HEADS, length, DIM), generator=generator, device=device).mul_(2 * SPREAD).sub_(SPREAD)
        return drawn.to(dtype_on(device))

    def inputs(length: int) -> tuple[Tensor, ...]:
        return tuple(uniform(length) for _ in range(3))

    with torch.no_grad():
        function(method, 256, causal)(*inputs(256))  # threads are started, kernels compiled
        query, key, value = inputs(n)

    def call() -> Tensor:
        with torch.no_grad():
            return function(method, n, causal)(query, key, value)

    return call, lambda output: {"error": mean_error(output, query, key, value, causal, seed)}
