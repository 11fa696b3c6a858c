"""Indices as a user may bring them, all of which answer as the exact one does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from nearfield.knn.index import BuiltIndex, Cutoffs, ExactIndex

Answer = tuple[Tensor, Tensor]


def as_it_is(scores: Tensor, ids: Tensor) -> Answer:
    return scores, ids


@dataclass(frozen=True)
class OwnIndex:
    """What a user may bring: no base class, just `build`, and `search` on what it returns. It answers as the exact index does."""

    change: Callable[[Tensor, Tensor], Any] = as_it_is
    """makes another answer of the right one"""
    calls: list[tuple[Tensor, ...]] = field(default_factory=list, compare=False, repr=False)
    """queries, keys and causal offsets of every search"""

    def build(self, keys: Tensor) -> OwnSearch:
        return OwnSearch(self, keys)


class OwnSearch:
    def __init__(self, index: OwnIndex, keys: Tensor) -> None:
        self.index, self.keys = index, keys

    def search(self, queries: Tensor, number: int, offset: Tensor) -> Any:
        self.index.calls.append((queries, self.keys, offset))
        return self.index.change(*ExactIndex().build(self.keys).search(queries, number, offset))


class BuiltWithoutBounds(BuiltIndex):
    def _search(self, queries: Tensor, k: int, visible: Tensor) -> Answer:
        return ExactIndex().build(self.keys)._search(queries, k, visible)


class BuiltWithBounds(BuiltWithoutBounds):
    def _cutoffs(self, queries: Tensor, ids: Tensor, visible: Tensor) -> Cutoffs:
        return ExactIndex().build(self.keys)._cutoffs(queries, ids, visible)


@dataclass(frozen=True)
class Subclassed:
    """The other thing a user may bring: an index that builds a subclass of `BuiltIndex`."""

    kind: type[BuiltIndex]

    def build(self, keys: Tensor) -> BuiltIndex:
        return self.kind(keys)


@dataclass(frozen=True)
class Skipping:
    """An index that misses the `missed` best keys of every row and returns the next ones. It knows no bounds."""

    missed: int
    keys: Tensor | None = None

    def build(self, keys: Tensor) -> Skipping:
        return Skipping(self.missed, keys)

    def search(self, queries: Tensor, k: int, causal_offset: Tensor) -> Answer:
        assert self.keys is not None
        scores, ids = ExactIndex().build(self.keys).search(queries, k + self.missed, causal_offset)
        return scores[..., self.missed :], ids[..., self.missed :]
