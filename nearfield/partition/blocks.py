"""Contiguous blocks: what stands together lives together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """Cells of consecutive keys, all of the same size up to one key. Costs nothing, and ignores what the keys are.

    This is what block-sparse attention does. On real language data its error is several times that of `KMeans`.

    >>> Blocks().build(torch.zeros(1, 6, 2), 3)
    tensor([[0, 0, 1, 1, 2, 2]])
    """

    def build(self, keys: Tensor, cells: int) -> Tensor:
        batch, length, _ = keys.shape
        return (torch.arange(length, device=keys.device) * cells // max(1, length)).expand(batch, length)
