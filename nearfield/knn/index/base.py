"""The contract of every index: build it once on a set of keys, then search it, causally or not; add keys and remove some."""

from __future__ import annotations

import copy
import dataclasses
import math
import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from nearfield import _compat
from nearfield.checks import check_positive
from nearfield.kernels import backends
from nearfield.kernels.backends import full_precision
from nearfield.knn.index.file import Contents, fingerprint, write_index
from nearfield.knn.index.room import Room

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

    It can be given wherever a recipe can: `TopK(index=built)` searches it as it is, in every call with these keys, and raises
    where the keys are others (`build`). It never changes. `add` and `remove` return another index, so that a backward pass, which
    plans anew, still finds the one of its forward pass.

    A subclass defines `_search`, whose answers are not checked. If it also knows how large the inner products of the keys it
    leaves out can be, it defines `_cutoffs`, and lazy Gumbel draws are exact with it. If it counts the keys that it scores, it
    returns a `Found`. If its constructor takes more than keys, it defines `_anew`, and `add` and `remove` build it anew.

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
    kind: ClassVar[type | None] = None
    """the recipe that can read what it has saved: of this class alone, and not of its subclasses"""
    recipe: Any
    """what has built it, where `kind` is given"""

    def __init__(self, keys: Tensor) -> None:
        if keys.dim() not in (3, 4):
            raise ValueError(f"keys must have shape [batch, length, dim] or [batch, heads, length, dim], got {tuple(keys.shape)}")
        if not keys.is_floating_point():
            raise TypeError(f"keys must be floating point, got {keys.dtype}")
        self.dtype = keys.dtype
        """of the keys as they were given; `keys` are float32, or float64 if these are"""
        self._room: Room | None = None
        self._hold(keys)

    def _hold(self, keys: Tensor) -> None:
        if keys.is_inference():
            # Nobody counts the changes of such tensors, so these must not reach the index.
            with torch.inference_mode(False):
                keys = keys.clone()
        self._source = keys.detach()
        self._version = _compat.version_of(keys)
        flat = self._source.flatten(0, -3)
        self.keys = flat if keys.dtype == torch.float64 else flat.float()

    def __deepcopy__(self, memo: dict[int, Any]) -> BuiltIndex:
        # The changes of a copy are counted anew.
        self._check_unchanged()
        made = copy.copy(self)
        memo[id(self)] = made
        made.__dict__ = {name: copy.deepcopy(x, memo) for name, x in self.__dict__.items()}
        made._version = _compat.version_of(made._source)
        return made

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of keys {tuple(self.keys.shape)}>"

    @property
    def length(self) -> int:
        return self.keys.shape[1]

    @property
    def groups(self) -> int:
        """About how many groups `cutoffs` has, for planning memory."""
        return 1

    def build(self, keys: Tensor) -> BuiltIndex:
        """This index, if `keys` are the keys it has; raises if they are not. Nothing is built.

        Keys in the same memory are the same, as long as torch has counted no change. (It does not count what is written through
        `.data`, NumPy or another library.) All others are compared number by number, which takes O(length dim).
        """
        self._check_unchanged()
        given = keys.detach().flatten(0, -3) if keys.dim() >= 3 else keys
        has = self.keys
        if given.shape != has.shape:
            raise ValueError(
                f"the index has keys of shape {tuple(has.shape)} and the call has keys {tuple(given.shape)}, [batch * key heads, "
                "length, dim] without those that a mask hides; build it of the keys of the call, or add and remove keys"
            )
        if torch.promote_types(given.dtype, torch.float32) != has.dtype:
            raise TypeError(f"the index has keys of {has.dtype} and the call has keys of {given.dtype}; build it of these keys")
        if given.device != has.device:
            raise ValueError(
                f"the index has keys on {has.device} and the call has keys on {given.device}; build it of these keys"
            )
        same_memory = given.data_ptr() == has.data_ptr() and given.stride() == has.stride() and given.dtype == has.dtype
        if not same_memory and not torch.equal(given.to(has.dtype), has):
            raise ValueError(
                "the keys of the call are not the keys of the index; build it of these keys, or add and remove keys. (A mask "
                "drops the keys it hides before the index sees them, and NaN and inf become 0.)"
            )
        return self

    def add(self, keys: Tensor, *, take_in: bool = True) -> BuiltIndex:
        """An index that has these keys behind its own; this one stays as it is.

        Args:
            keys: `[batch, heads, more, dim]` or `[batch * heads, more, dim]`, of the same dtype and on the same device.
            take_in: False: these keys are scored one by one, and nothing is learned from them before the next `add`. So rows that
                see only some of them find the others as they are (`nearfield.knn.store` needs that). An index without a structure
                of its own makes no difference.

        The new index has a copy of all keys, with free space behind them: to it, keys are added without copying, but for O(1)
        amortised a key. What else it costs depends on the index; see `nearfield.knn.index.prefixes`. An index without a structure
        (`ExactIndex`) has no other cost, and your own is built anew.

        Example:
            >>> built = nearfield.KMeansIndex().build(torch.randn(1, 2, 1000, 8))
            >>> built.add(torch.randn(1, 2, 24, 8)).length
            1024
        """
        self._check_unchanged()
        more = keys.detach().flatten(0, -3) if keys.dim() >= 3 else keys
        batch, _, dim = self.keys.shape
        if more.dim() != 3 or more.shape[0] != batch or more.shape[2] != dim:
            raise ValueError(f"keys to add must go with keys {tuple(self.keys.shape)}, got shape {tuple(keys.shape)}")
        if keys.dtype != self.dtype:
            raise TypeError(f"keys to add must have the dtype of this index, {self.dtype}, got {keys.dtype}")
        if keys.device != self.keys.device:
            raise ValueError(f"keys to add must be on the device of this index, {self.keys.device}, got {keys.device}")
        room = self._room or Room(self.keys, 2 * (self.length + more.shape[1]))
        room, everything = room.append(self.length, more)
        with torch.no_grad(), full_precision(keys):
            return self._like(self._with_added(everything) if take_in else self._with_rest(everything), room)

    def reserve(self, more: int) -> BuiltIndex:
        """This index, with free space for so many more keys: `add` does not copy before they are there."""
        check_positive("more", more, least=0)
        self._check_unchanged()
        if self._room is not None and self._room.has_space(self.length, more):
            return self
        room = Room(self.keys, self.length + more)
        with torch.no_grad(), full_precision(self.keys):
            return self._like(self._with_rest(room.table[:, : self.length]), room)

    def first(self, length: int) -> BuiltIndex:
        """An index of the first `length` keys, which are not copied; this one stays as it is.

        Cost: O(1), if no more than the keys that were added last are gone; else what `remove` takes beyond copying.
        """
        check_positive("length", length, least=0)
        if length > self.length:
            raise ValueError(f"length must be at most {self.length}, the number of keys, got {length}")
        self._check_unchanged()
        with torch.no_grad(), full_precision(self.keys):
            return self if length == self.length else self._like(self._with_first(self.keys[:, :length]), self._room)

    def remove(self, ids: Tensor | Sequence[int]) -> BuiltIndex:
        """An index without some of the keys, in all heads and batch entries; this one stays as it is.

        The other keys keep their order and are counted anew, as in `keys[:, :, kept]`. Attention pairs key j with value j and
        counts the keys it does not look at, so the caller removes the same rows of keys and values, and every id means what it
        says there. (Ids with gaps would need a mask in every draw and every count.)

        Args:
            ids: integers from 0 to length - 1, in any order.

        Cost: O(length dim), for it copies the keys that are left, so remove many at once; and what the index takes.

        Example:
            >>> keys = torch.randn(1, 2, 1000, 8)
            >>> kept = torch.arange(10, 1000)
            >>> built = nearfield.KMeansIndex().build(keys).remove(range(10))
            >>> built.build(keys[:, :, kept]) is built
            True
        """
        self._check_unchanged()
        chosen = torch.as_tensor(ids if isinstance(ids, Tensor) else list(ids), device=self.keys.device)
        if chosen.dim() != 1 or (chosen.numel() and chosen.dtype not in INTEGERS):
            raise ValueError(f"ids must be a list of integers, got {ids!r}")
        if chosen.numel() and not 0 <= int(chosen.min()) <= int(chosen.max()) < self.length:
            raise ValueError(f"ids must be from 0 to {self.length - 1}, got {int(chosen.min())} to {int(chosen.max())}")
        stays = torch.ones(self.length, dtype=torch.bool, device=self.keys.device)
        stays[chosen.long()] = False
        kept = stays.nonzero()[:, 0]
        with torch.no_grad(), full_precision(self.keys):
            return self._like(self._with_kept(self.keys[:, kept], kept))

    def save(self, path: str | os.PathLike[str], *, keys: bool = True) -> None:
        """Write all of it to one file, in the safetensors format; `nearfield.index.load` reads it.

        A file that was there is replaced in one step: if that fails or is interrupted, it stays as it was. The file has the
        settings of the index, what it has learned (a Faiss index in the format of Faiss), for causal rows too as far as they were
        searched, and what it needs to know to grow on.

        Args:
            path: the file, in a folder that exists.
            keys: whether the keys are in the file. If not, it has a fingerprint of them, and `load` must be given the keys.

        Your own index cannot be saved: save its keys, and build it of them again.

        Example:
            >>> import os, tempfile
            >>> keys = torch.randn(1, 2, 1000, 8)
            >>> path = os.path.join(tempfile.mkdtemp(), "memory.safetensors")
            >>> nearfield.KMeansIndex().build(keys).remove(range(10)).save(path)
            >>> nearfield.index.load(path).length
            990
        """
        kind = vars(type(self)).get("kind")
        if kind is None or type(self.recipe) is not kind:
            raise TypeError(
                f"only what the indices of nearfield have built can be saved, got {self!r}; save its keys, and build it of them "
                "again"
            )
        self._check_unchanged()
        write_index(
            path,
            Contents(
                kind=kind.__name__,
                settings=dataclasses.asdict(self.recipe),
                shape=tuple(self.keys.shape),
                dtype=self.dtype,
                held=self._source.dtype,
                fingerprint=fingerprint(self.keys),
                # Added keys have the dtype of the others, so this loses nothing.
                keys=self._source.flatten(0, -3).to(self.dtype) if keys else None,
                learned=self._state(),
            ),
        )

    def _state(self) -> dict[str, Tensor]:
        """What it has learned, by name: with its keys, all that its recipe needs to make another one like it."""
        return {}

    def _like(self, other: BuiltIndex, room: Room | None = None) -> BuiltIndex:
        other.dtype, other._room = self.dtype, room
        return other

    def _anew(self, keys: Tensor) -> BuiltIndex:
        """An index of the same kind over other keys."""
        return type(self)(keys)

    def _with_added(self, keys: Tensor) -> BuiltIndex:
        """An index of these keys, `[batch, all, dim]`, of which the first are those it has."""
        return self._anew(keys)

    def _with_rest(self, keys: Tensor) -> BuiltIndex:
        """The same, without learning from those it does not have."""
        return self._with_added(keys)

    def _with_kept(self, keys: Tensor, kept: Tensor) -> BuiltIndex:
        """An index of these keys, which are those with the ids `kept`, ascending."""
        return self._anew(keys)

    def _with_first(self, keys: Tensor) -> BuiltIndex:
        """An index of these keys, which are the first of those it has."""
        return self._with_kept(keys, torch.arange(keys.shape[1], device=keys.device))

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

    def _check_unchanged(self) -> None:
        if _compat.version_of(self._source) != self._version:
            raise RuntimeError("the keys were changed in place after this index was built; call build(keys) again")

    def _check(self, queries: Tensor) -> None:
        self._check_unchanged()
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


INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def smallest_near_score(queries: Tensor, keys: Tensor, ids: Tensor) -> Tensor:
    """The smallest inner product of a near set, `[batch, rows]`; -inf where the set is padded (it holds every visible key)."""
    return gathered_scores(queries, keys, ids).amin(-1)


def gathered_scores(queries: Tensor, keys: Tensor, ids: Tensor, backend: str = "auto") -> Tensor:
    """`q_r . k_{ids[r, t]}` for ids `[batch, rows, t]`; -inf where the id is `PADDING`."""
    batch, rows, width = ids.shape
    if keys.shape[1] == 0:
        return queries.new_full(ids.shape, -torch.inf)
    table, step = row_table(keys)
    scores = backends.pair_kernels(backend, keys.device).pair_scores(queries.flatten(0, 1), table, flat_ids(ids, step))
    return scores.view(batch, rows, width).masked_fill(ids == PADDING, -torch.inf)


def row_table(keys: Tensor) -> tuple[Tensor, int]:
    """Keys `[batch, length, dim]` as one table of rows, and how many rows after an entry the next one begins.

    Parts of a longer tensor, such as the keys of a block or of a `Room`, are not copied: between entries the table then has rows
    that are nobody's.
    """
    batch, length, dim = keys.shape
    step = keys.stride(0)
    if keys.is_contiguous() or dim == 0 or keys.stride()[1:] != (dim, 1) or step % dim or step < length * dim:
        return keys.flatten(0, 1), length
    return keys.as_strided(((batch - 1) * (step // dim) + length, dim), (dim, 1)), step // dim


def flat_ids(ids: Tensor, length: int) -> Tensor:
    """Ids `[batch, rows, t]` as places in the keys of all batch entries laid end to end, `[batch * rows, t]`.

    `PADDING` becomes the first key of its batch entry: a place that is safe to read. What is read there must not count.
    """
    start = torch.arange(ids.shape[0], dtype=torch.long, device=ids.device) * length
    return (ids.clamp(min=0) + start[:, None, None]).flatten(0, 1)


def default_k(k: int | None, length: int) -> int:
    """How many of `length` keys are near: k, or ceil(sqrt(length)) where it is None (the paper's choice)."""
    return min(length, math.ceil(math.sqrt(length)) if k is None else k)
