"""K-means cells: what points the same way lives together."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.checks import check_integer, check_positive
from nearfield.partition.lloyd import lloyd

DIRECT_CELLS = 128
"""Up to so many cells k-means runs directly; more are made in two steps, large cells first and then their parts."""


@dataclass(frozen=True)
class KMeans:
    """Cells by k-means on the keys.

    A few Lloyd iterations are enough: cells need to be tight, not optimal. From some hundred cells on the keys are first split
    into about sqrt(cells) large cells and each of those, in proportion to its size, into small ones: O(length sqrt(cells) dim)
    instead of O(length cells dim).

    Args:
        iterations: Lloyd iterations, on a sample of 32 keys per cell.
        seed: of the first centroids.

    >>> keys = torch.randn(1, 1000, 16, generator=torch.Generator().manual_seed(0))
    >>> KMeans().build(keys, 50).shape
    torch.Size([1, 1000])
    """

    iterations: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive("iterations", self.iterations, least=0)
        check_integer("seed", self.seed)

    def build(self, keys: Tensor, cells: int) -> Tensor:
        cells = min(cells, max(1, keys.shape[1]))
        if cells <= DIRECT_CELLS:
            return self._lloyd(keys, cells)
        return torch.stack([self._in_two_steps(entry, cells) for entry in keys]) if len(keys) else self._lloyd(keys, cells)

    def _lloyd(self, keys: Tensor, cells: int) -> Tensor:
        return lloyd(keys, cells, self.iterations, 32 * cells, self.seed)[1]

    def _in_two_steps(self, keys: Tensor, cells: int) -> Tensor:
        length = keys.shape[0]
        parents = math.isqrt(cells)
        parent = self._lloyd(keys[None], parents)[0]
        members = parent.argsort(stable=True)
        sizes = torch.bincount(parent, minlength=parents).tolist()
        # Every parent gets one cell, the others go by size: never more than `cells` in all.
        spare = cells - parents
        assigned = torch.empty_like(parent)
        first, taken = 0, 0
        for size in sizes:
            if size:
                own = members[first : first + size]
                parts = min(size, 1 + spare * size // length)
                inside = self._lloyd(keys[own][None], parts)[0]
                assigned[own] = inside + taken
                first, taken = first + size, taken + parts
        return assigned
