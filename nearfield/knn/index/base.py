"""The contract of every index: build it once on a set of keys, then search it, causally or not."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from nearfield import _compat
from nearfield.checks import check_positive
from nearfield.kernels import backends
from nearfield.kernels.backends import full_precision

CausalOffset = int | Tensor | None

PADDING = -1
"""The id that fills up a row with fewer than k keys. It names no key, and its score is -inf."""


class Found(NamedTuple):
    """What a search found, and what that took."""

    scores: Tensor
    """`[batch, rows, k]`"""
    ids: Tensor
    """`[batch, rows, k]`"""
    scored: Tensor | None = None
    """`[batch, rows]`: how many keys were scored, a key that was scored again counted again; None: the index does not say"""


class Searchable(Protocol):
    """What `Index.build` returns: it can search one set of keys."""

    def search(self, queries: Tensor, k: int, causal_offset: Tensor, /) -> tuple[Tensor, Tensor]:
        """For every row up to k keys of large inner product, in any order.

        Args:
            queries: `[batch, rows, dim]`.
            k: how many keys per row.
            causal_offset: `[batch, rows]`. Row i sees the keys j <= i + causal_offset and no others.

        Returns:
            inner products and key ids, both `[batch, rows, k]`. The id -1 (`PADDING`) fills up a row with fewer than k keys.
        """
        ...


class Index(Protocol):
    """A recipe for finding the k keys of largest inner product. Any object with this method is one.

    Example:
        >>> class Newest:
        ...     def __init__(self, keys=None):
        ...         self.keys = keys
        ...     def build(self, keys):
        ...         return Newest(keys)
        ...     def search(self, queries, k, causal_offset):
        ...         newest = torch.arange(queries.shape[1]) + causal_offset
        ...         ids = (newest[..., None] - torch.arange(k)).clamp(min=-1)
        ...         near = self.keys[torch.arange(len(ids))[:, None, None], ids]
        ...         return torch.einsum("brd,brkd->brk", queries, near), ids
        >>> q, k, v = torch.randn(3, 1, 1, 100, 8).unbind(0)
        >>> nearfield.attention(q, k, v, is_causal=True, method=nearfield.TopK(k=4, index=Newest())).shape
        torch.Size([1, 1, 100, 8])
    """

    def build(self, keys: Tensor) -> Searchable:
        """The index of keys `[batch, length, dim]`."""
        ...


@dataclass(frozen=True)
class Cutoffs:
    """Upper bounds for the keys outside a near set, group by group: what lazy Gumbel sampling needs to be exact.

    `bounds[b, r, c]` is at least `q_r . k_j` for every key j of group c that row r sees and that is not in its near set.
    The groups cover all keys, near keys included. Within a group the keys are listed in ascending order, so that a causal row
    sees the first `counts[b, r, c]` of them.
    """

    bounds: Tensor
    """`[batch, rows, groups]`"""
    counts: Tensor
    """`[batch, rows, groups]`: how many keys of the group the row sees"""
    starts: Tensor
    """`[batch, groups]`: where each group begins in `order`"""
    order: Tensor
    """`[batch, length]`: key ids, group by group"""

    @classmethod
    def one_group(cls, bounds: Tensor, visible: Tensor, length: int) -> Cutoffs:
        """One bound per row, `[batch, rows]`, for all of the `visible` keys that are not near."""
        batch, device = bounds.shape[0], bounds.device
        return cls(
            bounds=bounds[..., None],
            counts=visible[..., None],
            starts=torch.zeros(batch, 1, dtype=torch.long, device=device),
            order=torch.arange(length, device=device).expand(batch, -1),
        )

    def upper_bound(self) -> Tensor:
        """The largest bound of a group with a visible key, `[batch, rows]`; -inf where there is none."""
        return self.bounds.masked_fill(self.counts == 0, -torch.inf).amax(-1)


class BuiltIndex(ABC):
    """An index over one set of keys. It keeps a reference to them and refuses to answer once they have been changed in place.

    A subclass defines `_search`, whose answers are not checked. If it also knows how large the inner products of the keys it
    leaves out can be, it defines `_cutoffs`, and lazy Gumbel draws are exact with it. If it counts the keys that it scores, it
    returns a `Found`.

    Example:
        >>> from nearfield.knn.index import BuiltIndex, Cutoffs, gathered_scores
        >>> class BuiltNewest(BuiltIndex):
        ...     def _search(self, queries, k, visible):
        ...         ids = (visible[..., None] - 1 - torch.arange(k)).clamp(min=-1)
        ...         return gathered_scores(queries, self.keys, ids), ids
        ...     def _cutoffs(self, queries, ids, visible):
        ...         longest = self.keys.norm(dim=-1).amax(1, keepdim=True)
        ...         return Cutoffs.one_group(queries.norm(dim=-1) * longest, visible, self.length)
        >>> class Newest:
        ...     def build(self, keys):
        ...         return BuiltNewest(keys)
        >>> q, k, v = torch.randn(3, 1, 1, 100, 8).unbind(0)
        >>> method = nearfield.LazyGumbel(draws=8, index=Newest())
        >>> nearfield.estimate(q, k, v, method=method).info["certified"]
        True
    """

    scans = False
    """whether looking at all keys is what it is for"""
    least_seen = 1024
    """rows that see no more keys than that may as well look at all of them"""
    advice = "Use ExactIndex(), or an index that suits these keys."
    """what to do where it looks at all keys although it should not"""

    def __init__(self, keys: Tensor) -> None:
        if keys.dim() != 3:
            raise ValueError(f"keys must have shape [batch, length, dim], got {tuple(keys.shape)}")
        if not keys.is_floating_point():
            raise TypeError(f"keys must be floating point, got {keys.dtype}")
        self._source = keys.detach()
        # None for inference tensors: they cannot be changed in place outside inference mode either.
        self._version = _compat.version_of(keys)
        self.keys = self._source if keys.dtype == torch.float64 else self._source.float()

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    @property
    def groups(self) -> int:
        """About how many groups `cutoffs` has, for planning memory."""
        return 1

    def search(self, queries: Tensor, k: int, causal_offset: CausalOffset = None) -> tuple[Tensor, Tensor]:
        """The k visible keys of largest inner product, largest first.

        Args:
            queries: `[batch, rows, dim]`.
            k: how many keys per row.
            causal_offset: None (a row sees every key), or an int or a tensor broadcastable to `[batch, rows]`:
                row i sees the keys j <= i + causal_offset.

        Returns:
            scores and ids, both `[batch, rows, k]`. Where a row has fewer than k visible keys, or an approximate index
            found fewer, the score is -inf and the id is `PADDING`.
        """
        return self.find(queries, k, causal_offset)[:2]

    def find(self, queries: Tensor, k: int, causal_offset: CausalOffset = None) -> Found:
        """`search`, with how many keys were scored for it."""
        self._check(queries)
        check_positive("k", k)
        with full_precision(queries):
            return Found(*self._search(queries.detach().to(self.keys.dtype), k, self.visible(queries, causal_offset)))

    def cutoffs(self, queries: Tensor, ids: Tensor, causal_offset: CausalOffset = None) -> Cutoffs | None:
        """Bounds for the keys that `search` left out, or None where this index knows none.

        `ids` must be what `search` returned for the same queries and the same `causal_offset`.
        """
        self._check(queries)
        with full_precision(queries):
            return self._cutoffs(queries.detach().to(self.keys.dtype), ids, self.visible(queries, causal_offset))

    def upper_bound(self, queries: Tensor, ids: Tensor, causal_offset: CausalOffset = None) -> Tensor | None:
        """A number at least as large as `q . k_j` for every visible key j that is not in `ids`, `[batch, rows]`.

        None where this index knows none; -inf where nothing is left out. `ids` as for `cutoffs`.
        """
        cutoffs = self.cutoffs(queries, ids, causal_offset)
        return None if cutoffs is None else cutoffs.upper_bound()

    def visible(self, queries: Tensor, causal_offset: CausalOffset) -> Tensor:
        """How many keys each row sees, `[batch, rows]`: always the first ones, so that a count says which."""
        batch, rows, _ = queries.shape
        if causal_offset is None:
            return torch.full((1, 1), self.length, device=queries.device).expand(batch, rows)
        last = torch.arange(rows, device=queries.device) + causal_offset
        return (last + 1).clamp(0, self.length).expand(batch, rows)

    def _check(self, queries: Tensor) -> None:
        if self._version is not None and _compat.version_of(self._source) != self._version:
            raise RuntimeError("the keys were changed in place after this index was built; call build(keys) again")
        if queries.dim() != 3 or queries.shape[0] != self.keys.shape[0] or queries.shape[2] != self.keys.shape[2]:
            raise ValueError(
                f"queries must have shape [batch, rows, dim] to go with keys {tuple(self.keys.shape)}, got {tuple(queries.shape)}"
            )

    @abstractmethod
    def _search(self, queries: Tensor, k: int, visible: Tensor) -> tuple[Tensor, Tensor] | Found:
        """What `search` or `find` returns, for checked queries in the dtype of `self.keys`.

        Row r of batch entry b sees the first `visible[b, r]` keys; `visible` is int64 `[batch, rows]`.
        """

    def _cutoffs(self, queries: Tensor, ids: Tensor, visible: Tensor) -> Cutoffs | None:
        """What `cutoffs` returns; arguments as for `_search`."""
        return None


def build_index(index: Index, keys: Tensor) -> BuiltIndex:
    """`index.build(keys)` as a `BuiltIndex`. The answers of any other object that can search are checked."""
    keys = keys.detach()
    built = index.build(keys)
    if isinstance(built, BuiltIndex):
        return built
    if isinstance(built, type) or not callable(getattr(built, "search", None)):
        raise TypeError(f"{index!r}.build must return an object with search(queries, k, causal_offset), got {built!r}")
    return _CheckedIndex(keys, index, built)


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class _CheckedIndex(BuiltIndex):
    """What a user's index has built. It knows no bounds on the keys it leaves out."""

    def __init__(self, keys: Tensor, index: Index, built: Searchable) -> None:
        super().__init__(keys)
        self._index, self._built = index, built

    def _search(self, queries: Tensor, k: int, visible: Tensor) -> tuple[Tensor, Tensor]:
        offset = visible - 1 - torch.arange(queries.shape[1], device=queries.device)
        answer = self._built.search(queries, k, offset)
        if not isinstance(answer, tuple | list) or len(answer) != 2 or not all(isinstance(x, Tensor) for x in answer):
            raise TypeError(f"search of {self._index!r} must return two tensors, scores and ids, got {answer!r}")
        scores, ids = answer
        shape = (*queries.shape[:2], k)
        if scores.shape != shape or ids.shape != shape or ids.dtype not in _INTEGERS:
            raise ValueError(
                f"search of {self._index!r} must return scores and integer ids of shape {shape}, got scores of shape "
                f"{tuple(scores.shape)} and {ids.dtype} ids of shape {tuple(ids.shape)}"
            )
        scores, ids = scores.to(self.keys), ids.to(self.keys.device, torch.long)
        if bool(((ids < PADDING) | (ids >= visible[..., None])).any()):
            raise ValueError(
                f"search of {self._index!r} returned keys that a row does not see; row i sees the keys up to "
                f"i + causal_offset, and the id {PADDING} fills up a row with fewer than k"
            )
        ordered = ids.sort(-1).values
        if bool(((ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] != PADDING)).any()):
            raise ValueError(f"search of {self._index!r} returned a key twice in one row")
        return scores.masked_fill(ids == PADDING, -torch.inf), ids


def smallest_near_score(queries: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """The smallest inner product of a near set, `[batch, rows]`; -inf where the set is padded (it holds every visible key)."""
    return gathered_scores(queries, keys, ids).amin(-1)


def gathered_scores(queries: Tensor, keys: Tensor, ids: Tensor, backend: str = "auto") -> Tensor:
    """`q_r . k_{ids[r, t]}` for ids `[batch, rows, t]`; -inf where the id is `PADDING`."""
    batch, rows, width = ids.shape
    scores = backends.pair_kernels(backend, keys.device).pair_scores(
        queries.flatten(0, 1), keys.flatten(0, 1), flat_ids(ids, keys.shape[1])
    )
    return scores.view(batch, rows, width).masked_fill(ids == PADDING, -torch.inf)


def flat_ids(ids: Tensor, length: int) -> Tensor:
    """Ids `[batch, rows, t]` as places in the keys of all batch entries laid end to end, `[batch * rows, t]`.

    `PADDING` becomes the first key of its batch entry: a place that is safe to read. What is read there must not count.
    """
    start = torch.arange(ids.shape[0], dtype=torch.long, device=ids.device) * length
    return (ids.clamp(min=0) + start[:, None, None]).flatten(0, 1)


def lift_keys(keys: Tensor, norm: Tensor | None = None) -> Tensor:
    """Append a coordinate so that all keys of a batch entry have the same norm R.

        k' = [k, sqrt(R^2 - ||k||^2)],   R = max_j ||k_j||,   ||k'|| = R

    With q' = [q, 0] (`lift_queries`) this leaves q'.k' = q.k and makes ||q' - k'||^2 = ||q||^2 + R^2 - 2 q.k, so the nearest
    lifted keys are the keys of largest inner product.

    The paper (Appendix on concentric LSH, reduction of MIPS to kNN) prints a norm of sqrt(M); what the reduction needs is
    R >= max ||k||. The argument of the root is clamped at 0: for the longest key it is a rounding error of either sign. A
    single very long key makes R^2 dwarf all differences, and float32 then loses neighbours; so an index that can rank by inner
    product does that instead.

    Args:
        keys: `[..., length, dim]`. Half precision is converted to float32.
        norm: R, broadcastable to `[..., length]`, at least the norm of each key it applies to. None: the largest norm.

    Returns:
        `[..., length, dim + 1]`. Cost O(length dim).

    >>> lift_keys(torch.tensor([[3.0, 4.0], [0.0, 3.0]]))
    tensor([[3., 4., 0.],
            [0., 3., 4.]])
    """
    keys = keys if keys.dtype == torch.float64 else keys.float()
    squared = keys.square().sum(-1)
    if norm is None:
        limit = squared.amax(-1, keepdim=True) if keys.shape[-2] else squared.new_zeros(*squared.shape[:-1], 1)
    else:
        limit = norm.to(keys.dtype).square()
    return torch.cat([keys, (limit - squared).clamp(min=0).sqrt().unsqueeze(-1)], dim=-1)


def lift_queries(queries: Tensor) -> Tensor:
    """Append a zero: q' = [q, 0], so that q'.k' = q.k for lifted keys k'. `[..., dim]` becomes `[..., dim + 1]`.

    >>> lift_queries(torch.tensor([1.0, 2.0]))
    tensor([1., 2., 0.])
    """
    queries = queries if queries.dtype == torch.float64 else queries.float()
    return torch.nn.functional.pad(queries, (0, 1))


def default_k(k: int | None, length: int) -> int:
    """How many of `length` keys are near: k, or ceil(sqrt(length)) where it is None (the paper's choice)."""
    return min(length, math.isqrt(max(0, length - 1)) + 1 if k is None else k)
