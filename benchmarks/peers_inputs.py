"""Inputs of bench_peers_gpu.py, and errors against exact attention in float64."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import real
import torch
from gpu_timing import DEVICE, DTYPE, QKV, clustered
from torch import Tensor

KINDS = ("real", "strewn", "runs")
RUN = 128
"""Keys in a row that come from one cluster in inputs of the kind `runs`; in `strewn` each key draws its own."""
LARGE = 0.3


def made(kind: str, n: int, dim: int, heads: int, group: int = 1) -> QKV:
    """sqrt(n) clusters of keys, queries near one of them: all over the place, or in runs, which favour contiguous blocks."""
    return clustered(n, dim, heads, run={"strewn": 1, "runs": RUN}[kind], group=group)


def captured(folder: Path, only: int | None = None) -> Iterator[tuple[str, QKV]]:
    """The layers that gpu_capture.py has saved (or the first `only` of them), cut to a multiple of 128 tokens.

    Cutting changes no row that stays: none of them sees a later key.
    """
    paths = sorted(folder.glob("layer_*.pt"))
    if not paths:
        raise FileNotFoundError(f"{folder} holds no layer_00.pt, ...; gpu_capture.py makes them")
    for path in paths[:only]:
        ((_, *tensors),) = real.saved(folder, [int(path.stem.removeprefix("layer_"))])
        n = tensors[0].shape[2] // RUN * RUN
        query, key, value = (x[:, :, :n].to(DEVICE, DTYPE).contiguous() for x in tensors)
        yield path.stem, (query, key, value)


def some_rows(n: int, count: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(1))[:count].to(DEVICE)


@torch.no_grad()
def exact_rows(inputs: QKV, rows: Tensor) -> Tensor:
    """Causal attention at these positions, `[heads, rows, dim]`, in float64 and head by head."""
    query, key, value = (x.detach()[0] for x in inputs)
    group = len(query) // len(key)
    later = torch.arange(key.shape[1], device=key.device) > rows[:, None]
    found = []
    for head, some in enumerate(query[:, rows]):
        logits = some.double() @ key[head // group].double().T / math.sqrt(key.shape[2])
        found.append(logits.masked_fill_(later, -torch.inf).softmax(-1) @ value[head // group].double())
    return torch.stack(found)


def row_errors(output: Tensor, exact: Tensor, rows: Tensor) -> dict[str, float]:
    """Of ||output - exact|| / ||exact|| over rows of all heads: the mean, the median, and the share of large ones.

    Rows with numbers that are not finite count as large, and not in the mean and the median.
    """
    off = (output.detach()[0][:, rows].double() - exact).norm(dim=-1) / exact.norm(dim=-1)
    fine = off.isfinite()
    known = off[fine] if fine.any() else off.new_full((1,), math.inf)
    return {
        "rows": off.numel(),
        "mean": float(known.mean()),
        "median": float(known.median()),
        "large": float((~fine | (off > LARGE)).double().mean()),
        "not_finite": float((~fine).double().mean()),
    }
