"""Partitions: each is a way to group keys into cells."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor

from nearfield.cells.partition.equal import Blocks, HashBuckets
from nearfield.cells.partition.kmeans import KMeans, limit_sizes
from nearfield.checks import check_has


class Partition(Protocol):
    """A way to group keys into cells. Any object with this method is one. It must not change once it is in use.

    Example:
        >>> class EveryOther:
        ...     def build(self, keys, cells):
        ...         return (torch.arange(keys.shape[1]) % cells).expand(keys.shape[:2])
        >>> q, k, v = torch.randn(3, 1, 2, 100, 8).unbind(0)
        >>> nearfield.attention(q, k, v, method=nearfield.Cells(cell_size=10, probes=2, partition=EveryOther())).shape
        torch.Size([1, 2, 100, 8])
    """

    def build(self, keys: Tensor, cells: int) -> Tensor:
        """The cell of each key, a number from 0 to `cells - 1`: `[batch, length, dim]` -> `[batch, length]`, int64.

        Each entry of the batch is grouped by itself, and the same keys always get the same cells. Some cells may stay empty.
        """
        ...


BUILT_IN: dict[str, type[Any]] = {kind.__name__: kind for kind in (KMeans, Blocks, HashBuckets)}

_OWN: dict[int, Callable[[], Partition | None]] = {}
"""Users' own partitions by `id`, since operators take only plain arguments."""


def check_partition(name: str, value: object) -> None:
    check_has(name, value, "build", f"a partition such as {'(), '.join(BUILT_IN)}()")


def is_built_in(partition: Partition) -> bool:
    return BUILT_IN.get(type(partition).__name__) is type(partition)


def asks_queries(partition: Partition) -> TypeGuard[KMeans]:
    """Whether `build_cells` should be told how large queries are. Partitions of one's own build from keys alone."""
    return type(partition) is KMeans and partition.by_queries


def without_queries(partition: Partition) -> Partition:
    """The same for rows that may not be asked."""
    return dataclasses.replace(partition, by_queries=False) if asks_queries(partition) else partition


def build_cells(partition: Partition, keys: Tensor, cells: int, sizes: Tensor | None = None) -> Tensor:
    """The cell of each key, `[batch, length]`, none with more than eight times the mean number of keys. `sizes`: see `KMeans`."""
    if sizes is not None:
        assert isinstance(partition, KMeans)  # see `asks_queries`
        found = partition.build(keys, cells, sizes)
    else:
        found = partition.build(keys, cells)
    if not is_built_in(partition):
        found = _checked(found, partition, keys, cells)
    return limit_sizes(keys, found, cells)


def _checked(found: object, partition: Partition, keys: Tensor, cells: int) -> Tensor:
    """What a user's partition has built; raises if that breaks the contract."""
    shape = tuple(keys.shape[:2])
    if not isinstance(found, Tensor):
        raise ValueError(f"{partition!r}.build must return a tensor of integers of shape {shape}, got {type(found).__name__}")
    if found.shape != shape or found.dtype == torch.bool or found.is_floating_point() or found.is_complex():
        raise ValueError(
            f"{partition!r}.build must return integers of shape {shape}, got {found.dtype} of shape {tuple(found.shape)}"
        )
    if found.numel():
        least, most = int(found.min()), int(found.max())
        if least < 0 or most >= cells:
            raise ValueError(f"{partition!r}.build must return cells from 0 to {cells - 1}, got {least} to {most}")
    return found.to(keys.device, torch.int64)


def make_known(partition: Partition) -> None:
    """Make a partition known to operators for as long as it exists. Called when it becomes part of a method."""
    if is_built_in(partition) or torch.compiler.is_compiling():
        return
    number = id(partition)
    try:
        _OWN[number] = weakref.ref(partition, lambda _: _OWN.pop(number, None))
    except TypeError:  # Some objects, such as those with __slots__, cannot be weakly referenced. They stay for good.
        _OWN[number] = lambda: partition


def to_plain(partition: Partition) -> tuple[str, tuple[int, ...]]:
    """A partition as an operator takes it: a name and integers, -1 for an option that is None."""
    if is_built_in(partition):
        options = dataclasses.astuple(partition)  # type: ignore[call-overload]
        return type(partition).__name__, tuple(-1 if option is None else int(option) for option in options)
    return "own", (id(partition),)


def from_plain(name: str, options: Sequence[int]) -> Partition:
    """The partition that `to_plain` was given."""
    if name != "own":
        return BUILT_IN[name](*(None if option == -1 else option for option in options))
    found = _OWN[options[0]]() if options[0] in _OWN else None
    if found is None:
        raise RuntimeError(
            "this partition is unknown or gone: make Cells(partition=...) outside of the compiled function, and keep it"
        )
    return found
