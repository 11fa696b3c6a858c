"""Causal search and growth for indices that learn from their keys, without a trace of the future.

Centroids, radii or hash widths that were learned from all keys tell a row about keys it must not see: they decide which of the
visible keys it finds. So a causal row never searches an index over all keys. The prefix [0, v) that it sees is cut into aligned
blocks of `leaf * 2^t` keys, one for every 1 among the binary digits of v // leaf (as in a Fenwick tree). Each block has an
index of its own, built when first needed and searched by all rows that use the block; the last v % leaf keys are scored
exactly. All rows that search a block see every key in it.

Growth needs no more than that. What was learned from the first keys, the base, serves all rows that see these; the keys behind
it, the rest, are scored exactly. When there are more than sqrt(length) of the rest, the base takes them in without learning
anew: k-means puts them into the nearest cells, a hash table into their buckets. When half as many keys were added or removed as
it has learned from, it learns anew. So a key costs, amortised, with n keys and B(n) the cost to build: O(B(n) / n) to learn, what
a build spends on one key to be taken in, and O(sqrt(n) log n) to keep lists in order. For k-means with the default cells all of
that is O(sqrt(n) (dim + log n)). Blocks of the causal search stay, as their keys do not change.
"""

from __future__ import annotations

import copy
import math
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.checks import MOST
from nearfield.knn.index.base import PADDING, BuiltIndex, Cutoffs, Found, smallest_near_score
from nearfield.knn.index.exact import BuiltExact
from nearfield.knn.index.file import Learned

LEAF = 1024

LEAST_REST = 64
"""So many keys are scored exactly before it is worth taking them in."""


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
    """Base class of indices that can search all of their keys: it adds the search of a prefix, and growth.

    What a subclass learns are attributes. It sets them and never writes into them, so that copies of an index may share them.
    """

    bounded = False
    """whether `_cutoffs_all` knows bounds"""

    def __init__(self, keys: Tensor, leaf: int = LEAF) -> None:
        super().__init__(keys)
        # A block beyond all keys is none, and tensors know no numbers beyond 64 bits.
        self._leaf = min(leaf, MOST)
        self.least_seen = max(self.least_seen, self._leaf)
        self._blocks: dict[tuple[int, int], PrefixBuilt] = {}
        self._base: PrefixBuilt | None = None
        """what serves the first keys; None: this index, and all keys"""
        self._learned = self.length
        """how many keys it has learned from"""
        self._changes = 0
        """how many keys were added and removed since"""

    @abstractmethod
    def _search_all(self, queries: Tensor, k: int) -> Found:
        """As `_search`, for rows that see every key; k is at most the number of keys."""

    @abstractmethod
    def _anew(self, keys: Tensor) -> PrefixBuilt: ...

    def _build_block(self, keys: Tensor) -> PrefixBuilt:
        """An index of the same kind over a block of the keys."""
        return self._anew(keys)

    @abstractmethod
    def _take_in(self, start: int) -> None:
        """Serve the keys from `start` on as well, by what was learned from others."""

    @abstractmethod
    def _leave_out(self, kept: Tensor) -> None:
        """Serve no keys but the `kept` ones, ids of those so far in ascending order."""

    def _cutoffs_all(self, queries: Tensor, k: int, smallest: Tensor) -> Cutoffs:
        """Bounds for rows that see every key, given the smallest score `[batch, rows]` of their near sets."""
        raise NotImplementedError

    def _over(self, keys: Tensor) -> PrefixBuilt:
        """This index with other keys, which has to learn what that means. It shares everything with this one."""
        other = copy.copy(self)
        other._hold(keys)
        # A base must not keep the space that its keys were in before.
        other._blocks, other._base, other._room = {}, None, None
        return other

    def _with_added(self, keys: Tensor) -> PrefixBuilt:
        base, count = self._base or self, keys.shape[1]
        changes = self._changes + count - self.length
        if 2 * changes >= self._learned:
            return self._anew(keys)
        if count - base.length <= max(LEAST_REST, math.isqrt(base.length)):
            return self._with_rest(keys)
        grown = self._over(keys)
        grown._take_in(base.length)
        grown._changes = changes
        grown._blocks = self._blocks_over(keys, count)
        return grown

    def _with_rest(self, keys: Tensor) -> PrefixBuilt:
        base = self._base or self
        other = base._over(keys)
        if base.length < keys.shape[1]:
            other._base = base._over(keys[:, : base.length])
        other._changes = max(0, self._changes + keys.shape[1] - self.length)
        other._blocks = self._blocks_over(keys, keys.shape[1])
        return other

    def _with_first(self, keys: Tensor) -> PrefixBuilt:
        if keys.shape[1] >= (self._base or self).length:
            return self._with_rest(keys)
        return self._with_kept(keys, torch.arange(keys.shape[1], device=keys.device))

    def _blocks_over(self, keys: Tensor, same: int) -> dict[tuple[int, int], PrefixBuilt]:
        """The blocks of the first `same` keys."""
        return {name: block._over(keys[:, slice(*name)]) for name, block in self._blocks.items() if name[1] <= same}

    def _with_kept(self, keys: Tensor, kept: Tensor) -> PrefixBuilt:
        base, count = self._base or self, keys.shape[1]
        changes = self._changes + self.length - count
        if 2 * changes >= self._learned:
            return self._anew(keys)
        within = kept[: int((kept < base.length).sum())]
        smaller = base._over(keys[:, : len(within)])
        smaller._leave_out(within)
        left = smaller
        if len(within) < count:
            left = smaller._over(keys)
            left._base = smaller
        left._changes = changes
        # Behind the first key that is gone, blocks have other keys than before.
        same = int((kept == torch.arange(count, device=kept.device)).sum())
        left._blocks = self._blocks_over(keys, same)
        return left

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
        first = (self._base or self).length
        whole = (visible >= first) & (visible > 0)
        if first and bool(whole.any()):
            yield _Part(0, first, whole, complete=True)
        rest = whole & (visible > first)
        if first < self.length and bool(rest.any()):
            yield _Part(first, self.length, rest, complete=False)
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
        base = self._base or self
        if name == (0, base.length):
            return base
        if name not in self._blocks:
            self._blocks[name] = self._build_block(self.keys[:, part.start : part.stop])
        return self._blocks[name]

    def _state(self) -> dict[str, Tensor]:
        base = self._base or self
        found = {"counts": torch.tensor([base.length, self._learned, self._changes], device="cpu")}
        parts = {"base": base} | {f"blocks.{start}-{stop}": block for (start, stop), block in self._blocks.items()}
        return found | {f"{part}.{name}": x for part, index in parts.items() for name, x in index._lessons().items()}

    @abstractmethod
    def _lessons(self) -> dict[str, Tensor]:
        """What was learned from the keys that it serves by itself, without growth and without blocks."""


def restored(
    keys: Tensor,
    learned: Learned,
    base_of: Callable[[Tensor, Learned], PrefixBuilt],
    block_of: Callable[[Tensor, Learned], PrefixBuilt],
) -> PrefixBuilt:
    """The index of keys `[batch, length, dim]` that had this `_state`; `base_of` and `block_of` make one of its `_lessons`."""
    length = keys.shape[1]
    first, seen, changes = learned.take("counts", (3,), torch.int64).tolist()
    learned.check("counts", 0 <= first <= length and seen >= 0 and changes >= 0)
    base = base_of(keys[:, :first] if first < length else keys, learned.part("base"))
    base._learned, base._changes = seen, changes
    built = base
    if first < length:
        built = base._over(keys)
        built._base = base
    blocks = learned.part("blocks")
    for name in blocks.names():
        ends = re.fullmatch(r"([0-9]{1,18})-([0-9]{1,18})", name)
        start, stop = (int(x) for x in ends.groups()) if ends else (0, 0)
        blocks.check(name, start < stop <= length)
        built._blocks[start, stop] = block_of(built.keys[:, start:stop], blocks.part(name))
    return built
