"""The methods that are compared, each with k keys per query, or as near to that as it comes."""

from __future__ import annotations

from collections.abc import Callable

import nearfield as nf

CELL_SIZES = (8, 6, 12, 4, 10, 5, 7, 3, 2)
"""Tried in this order until one is close to k."""
CLOSE = 0.05


def top(k: int) -> nf.TopK:
    return nf.TopK(k)


def with_tail(k: int) -> nf.TopK:
    """Half of the k keys are sampled."""
    return nf.TopK(k - k // 2, tail=k // 2)


def cells(size: int, probes: int) -> nf.Cells:
    return nf.Cells(cell_size=size, probes=probes, sinks=0)


def fitted(k: int, keys: Callable[[int, int], float]) -> tuple[int, int]:
    """A size of cells and a number of them to open, whose measured keys per query, `keys(size, probes)`, come near to k.

    Cells that score high are smaller or larger than the others, so k over the size would be off. The first size within 5% is
    taken, or the nearest of all.
    """
    found: list[tuple[float, int, int]] = []
    for size in CELL_SIZES:
        tried: dict[int, float] = {}
        probes = max(1, round(k / size))
        while probes not in tried:
            tried[probes] = keys(size, probes)
            probes = max(1, round(probes * k / tried[probes]))
        off, probes = min((abs(count / k - 1), probes) for probes, count in tried.items())
        found.append((off, size, probes))
        if off <= CLOSE:
            return size, probes
    return min(found)[1:]
