"""Partitions: who lives together? Each one groups keys into cells."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from nearfield.cells.partition.equal import Blocks, HashBuckets
from nearfield.cells.partition.kmeans import KMeans, limit_sizes

BUILT_IN: dict[str, type[Any]] = {kind.__name__: kind for kind in (KMeans, Blocks, HashBuckets)}
_OWN: list[Partition] = []
"""Partitions of users that operators have been told of; a position in this list is their name."""


class Partition(Protocol):
    """A way to group keys into cells. Any object with this method is one; it must not change once it is in use.

    Example:
        >>> class EveryOther:
        ...     def build(self, keys, cells):
        ...         return (torch.arange(keys.shape[1]) % cells).expand(keys.shape[:2])
        >>> q, k, v = torch.randn(3, 1, 2, 100, 8).unbind(0)
        >>> nearfield.attention(q, k, v, method=nearfield.Cells(cell_size=10, probes=2, partition=EveryOther())).shape
        torch.Size([1, 2, 100, 8])
    """

    def build(self, keys: Tensor, cells: int) -> Tensor:
        """The cell of each key, a number below `cells`: `[batch, length, dim]` -> `[batch, length]`, int64.

        Each entry of the batch is grouped by itself, and the same keys always get the same cells. Some cells may stay empty.
        """
        ...


def check_partition(name: str, value: object) -> None:
    if isinstance(value, type) or not callable(getattr(value, "build", None)):
        raise TypeError(f"{name} must be a partition such as {'(), '.join(BUILT_IN)}(), got {value!r}")


def is_built_in(partition: Partition) -> bool:
    return BUILT_IN.get(type(partition).__name__) is type(partition)


def build_cells(partition: Partition, keys: Tensor, cells: int) -> Tensor:
    """The cell of each key, `[batch, length]`, none with more than eight times the mean number of keys."""
    found = partition.build(keys, cells)
    if not is_built_in(partition):
        if not isinstance(found, Tensor) or found.shape != keys.shape[:2] or found.is_floating_point():
            got = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            raise ValueError(f"{partition!r}.build must return integers of shape {tuple(keys.shape[:2])}, got {got}")
        if found.numel() and not 0 <= int(found.min()) <= int(found.max()) < cells:
            least, most = int(found.min()), int(found.max())
            raise ValueError(f"{partition!r}.build must return cells from 0 to {cells - 1}, got {least} to {most}")
        found = found.to(keys.device, torch.int64)
    return limit_sizes(keys, found, cells)


def to_plain(partition: Partition) -> tuple[str, tuple[int, ...]]:
    """A partition as what an operator takes: a name and integers."""
    if is_built_in(partition):
        return type(partition).__name__, dataclasses.astuple(partition)  # type: ignore[call-overload]
    for number, known in enumerate(_OWN):
        if known is partition or (type(known) is type(partition) and known == partition):
            return "own", (number,)
    _OWN.append(partition)
    return "own", (len(_OWN) - 1,)


def from_plain(name: str, options: Sequence[int]) -> Partition:
    return _OWN[options[0]] if name == "own" else BUILT_IN[name](*options)
