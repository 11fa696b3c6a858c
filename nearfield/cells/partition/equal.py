"""Cells of equal size: consecutive keys, or keys in the order of a hash."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.checks import check_positive, check_seed


@dataclass(frozen=True)
class Blocks:
    """Cells of consecutive keys, all of the same size up to one key. They cost nothing, and do not depend on the keys.

    This is what block-sparse attention does. On real language data its error is several times that of `KMeans`.

    >>> Blocks().build(torch.zeros(1, 6, 2), 3)
    tensor([[0, 0, 1, 1, 2, 2]])
    """

    def build(self, keys: Tensor, cells: int) -> Tensor:
        batch, length, _ = keys.shape
        return (torch.arange(length, device=keys.device) * cells // max(1, length)).expand(batch, length)


@dataclass(frozen=True)
class HashBuckets:
    """Cells of equal size along the order of a random hyperplane hash (SimHash) of the centred keys.

    The signs of a key are read as a Gray code, so that neighbours in the order differ in few signs, and the sorted list is cut
    into equal cells. One matrix product and a sort: cheaper than k-means, and coarser.

    Args:
        bits: signs per key, at most 30; 0: two more than it takes to tell the cells apart.
        seed: of the hyperplanes.

    >>> HashBuckets().build(torch.eye(4)[None], 2).sort().values
    tensor([[0, 0, 1, 1]])
    """

    bits: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive("bits", self.bits, least=0)
        if self.bits > 30:
            raise ValueError(f"bits must be at most 30, got {self.bits}")
        check_seed("seed", self.seed)

    def build(self, keys: Tensor, cells: int) -> Tensor:
        length, dim = keys.shape[1:]
        bits = self.bits or min(30, math.ceil(math.log2(max(2, cells))) + 2)
        generator = torch.Generator("cpu").manual_seed(self.seed)
        planes = torch.randn(dim, bits, generator=generator, device="cpu", dtype=torch.float64).to(keys)
        signs = ((keys - keys.mean(1, keepdim=True)) @ planes > 0).long()
        # The rank of a Gray code: each bit is the parity of the signs up to it.
        rank = signs.cumsum(-1) % 2
        code = (rank << torch.arange(bits - 1, -1, -1, device=keys.device)).sum(-1)
        place = code.argsort(dim=1, stable=True).argsort(dim=1)
        return place * cells // max(1, length)
