"""The partitions that tests run over, and keys for them."""

from __future__ import annotations

from typing import Any

import torch
from by_hand import seeded
from torch import Tensor

import nearfield as nf

PARTITIONS: dict[str, Any] = {
    "kmeans": nf.KMeans(),
    "kmeans-by-queries": nf.KMeans(by_queries=True),
    "kmeans-first-guess": nf.KMeans(iterations=0, seed=3),
    "blocks": nf.Blocks(),
    "hash": nf.HashBuckets(),
    "hash-one-bit": nf.HashBuckets(bits=1, seed=5),
}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)
