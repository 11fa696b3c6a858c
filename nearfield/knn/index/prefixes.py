"""Causal search for indices that learn from their keys, without a trace of the future.

Centroids, radii or hash widths that were learned from all keys tell a row about keys it must not see: they decide which of the
visible keys it finds. So a causal row never searches an index over all keys. The prefix [0, v) that it sees is cut into aligned
blocks of `leaf * 2^t` keys, one for every 1 among the binary digits of v // leaf (as in a Fenwick tree). Each block has an
index of its own, built when first needed and searched by all rows that use the block; the last v % leaf keys are scored
exactly. All rows that search a block see every key in it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.knn.index.base import PADDING, BuiltIndex, Cutoffs, Found, smallest_near_score
from nearfield.knn.index.exact import BuiltExact

LEAF = 1024


@dataclass(frozen=True)
class _Part:
    """Some rows and the block of keys that they search."""

    start: int
    stop: int
    uses: Tensor
    """`[batch, rows]`: which rows search the block"""
    complete: bool
    """whether they see the whole block, or only a prefix of it"""


class PrefixBuilt(BuiltIndex):
    """Base class of indices that can search all of their keys: it adds the search of a prefix."""

    bounded = False
    """whether `_cutoffs_all` knows bounds"""

    def __init__(self, keys: Tensor, leaf: int = LEAF) -> None:
        super().__init__(keys)
        self._leaf = leaf
        self.least_seen = max(self.least_seen, leaf)
        self._blocks: dict[tuple[int, int], PrefixBuilt] = {}

    @abstractmethod
    def _search_all(self, queries: Tensor, k: int) -> Found:
        """As `_search`, for rows that see every key; k is at most the number of keys."""

    @abstractmethod
    def _build_block(self, keys: Tensor) -> PrefixBuilt:
        """An index of the same kind over fewer keys."""

    def _cutoffs_all(self, queries: Tensor, k: int, smallest: Tensor) -> Cutoffs:
        """Bounds for rows that see every key, given the smallest score `[batch, rows]` of their near sets."""
        raise NotImplementedError

    def _search(self, queries: Tensor, k: int, visible: Tensor) -> Found:
        batch, rows, _ = queries.shape
        scores = queries.new_full((batch, rows, k), -torch.inf)
        ids = torch.full((batch, rows, k), PADDING, device=queries.device)
        total: Tensor | None = torch.zeros_like(visible)
        for part in self._parts(visible):
            columns = part.uses.any(0).nonzero()[:, 0]
            kept = min(k, part.stop - part.start)
            if part.complete:
                best, at, scored = self._block(part).search_all(queries[:, columns], kept)
            else:
                exact = BuiltExact(self.keys[:, part.start : part.stop])
                seen = (visible[:, columns] - part.start).clamp(0, exact.length)
                best, at, scored = exact._search(queries[:, columns], kept, seen)
            unused = part.uses[:, columns].logical_not()[..., None]
            if total is not None:
                total = None if scored is None else total.index_add(1, columns, scored * part.uses[:, columns])
            best = best.masked_fill(unused, -torch.inf)
            at = torch.where(best == -torch.inf, PADDING, at + part.start)
            best, at = torch.cat([scores[:, columns], best], -1), torch.cat([ids[:, columns], at], -1)
            scores[:, columns], keep = best.topk(k)
            ids[:, columns] = at.gather(-1, keep)
        return Found(scores, ids, total)

    def search_all(self, queries: Tensor, k: int) -> Found:
        """Search without a causal limit; k is at most the number of keys."""
        if queries.shape[0] * queries.shape[1] == 0:
            empty = queries.new_empty(*queries.shape[:2], k)
            return Found(empty, empty.long(), empty.long().sum(-1))
        return self._search_all(queries, k)

    def _cutoffs(self, queries: Tensor, ids: Tensor, visible: Tensor) -> Cutoffs | None:
        if not self.bounded:
            return None
        k = ids.shape[-1]
        smallest = smallest_near_score(queries, self.keys, ids)
        bounds, counts, starts, order = [], [], [], []
        listed = 0
        for part in self._parts(visible):
            if part.complete:
                # The same rows as in the search: they open the same cells, to the last bit.
                columns = part.uses.any(0).nonzero()[:, 0]
                kept = min(k, part.stop - part.start)
                inside = self._block(part)._cutoffs_all(queries[:, columns], kept, smallest[:, columns])
                shape = (*visible.shape, inside.bounds.shape[-1])
                bounds.append(smallest.new_zeros(shape).index_copy_(1, columns, inside.bounds))
                counts.append(visible.new_zeros(shape).index_copy_(1, columns, inside.counts) * part.uses[..., None])
                starts.append(inside.starts + listed)
                order.append(inside.order + part.start)
            else:
                # Every visible key of the leaf was scored, so those left out are below the near set.
                bounds.append(smallest[..., None])
                counts.append(((visible - part.start).clamp(min=0) * part.uses)[..., None])
                starts.append(torch.full((len(ids), 1), listed, device=ids.device))
                order.append(torch.arange(part.start, part.stop, device=ids.device).expand(len(ids), -1))
            listed += order[-1].shape[1]
        if not order:
            return Cutoffs(smallest[..., None], visible[..., None] * 0, visible.new_zeros(len(ids), 1), visible[:, :0])
        return Cutoffs(torch.cat(bounds, -1), torch.cat(counts, -1), torch.cat(starts, -1), torch.cat(order, -1))

    def _parts(self, visible: Tensor) -> Iterator[_Part]:
        """All blocks that some row searches."""
        whole = (visible == self.length) & (visible > 0)
        if bool(whole.any()):
            yield _Part(0, self.length, whole, complete=True)
        leaves = (visible // self._leaf).masked_fill(whole, 0)
        for level in range(int(leaves.max()).bit_length() if leaves.numel() else 0):
            has = ((leaves >> level) & 1).bool()
            begin = leaves >> (level + 1) << (level + 1)
            for first in begin[has].unique().tolist():
                start = first * self._leaf
                yield _Part(start, start + (self._leaf << level), has & (begin == first), complete=True)
        rest = (visible % self._leaf > 0) & whole.logical_not()
        for first in leaves[rest].unique().tolist():
            start = first * self._leaf
            yield _Part(start, min(start + self._leaf, self.length), rest & (leaves == first), complete=False)

    def _block(self, part: _Part) -> PrefixBuilt:
        name = (part.start, part.stop)
        if name == (0, self.length):
            return self
        if name not in self._blocks:
            self._blocks[name] = self._build_block(self.keys[:, part.start : part.stop])
        return self._blocks[name]
