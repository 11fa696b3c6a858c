"""Any object that builds something that can search, as a `BuiltIndex`: its answers are checked."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.knn.index.base import INTEGERS, PADDING, BuiltIndex, Index, Searchable


def build_index(index: Index, keys: Tensor) -> BuiltIndex:
    """`index.build(keys)` as a `BuiltIndex`. The answers of any other object that can search are checked.

    Example:
        >>> from nearfield.knn.index import build_index
        >>> class Newest:
        ...     def build(self, keys):
        ...         self.keys = keys
        ...         return self
        ...     def search(self, queries, k, causal_offset):
        ...         newest = torch.arange(queries.shape[1]) + causal_offset
        ...         ids = (newest[..., None] - torch.arange(k)).clamp(min=-1)
        ...         near = self.keys[torch.arange(len(ids))[:, None, None], ids]
        ...         return torch.einsum("brd,brkd->brk", queries, near), ids
        >>> q, k, v = torch.randn(3, 1, 2, 100, 8).unbind(0)
        >>> built = build_index(Newest(), k)
        >>> nearfield.attention(q, k, v, method=nearfield.TopK(k=4, index=built)).shape
        torch.Size([1, 2, 100, 8])
    """
    keys = keys.detach().flatten(0, -3) if keys.dim() >= 3 else keys.detach()
    built = index.build(keys)
    if isinstance(built, BuiltIndex):
        return built
    if isinstance(built, type) or not callable(getattr(built, "search", None)):
        raise TypeError(f"{index!r}.build must return an object with search(queries, k, causal_offset), got {built!r}")
    return _CheckedIndex(keys, index, built)


def check_built(index: Index, keys: Tensor) -> None:
    """Raises if the index is built already and has other keys: also for calls that turn out to need no index."""
    if isinstance(index, BuiltIndex):
        index.build(keys)


class _CheckedIndex(BuiltIndex):
    """What a user's index has built. It knows no bounds on the keys it leaves out."""

    def __init__(self, keys: Tensor, index: Index, built: Searchable) -> None:
        super().__init__(keys)
        self._index, self._built = index, built

    def _anew(self, keys: Tensor) -> BuiltIndex:
        return build_index(self._index, keys)

    def _search(self, queries: Tensor, k: int, visible: Tensor) -> tuple[Tensor, Tensor]:
        offset = visible - 1 - torch.arange(queries.shape[1], device=queries.device)
        answer = self._built.search(queries, k, offset)
        if not isinstance(answer, tuple | list) or len(answer) != 2 or not all(isinstance(x, Tensor) for x in answer):
            raise TypeError(f"search of {self._index!r} must return two tensors, scores and ids, got {answer!r}")
        scores, ids = answer
        shape = (*queries.shape[:2], k)
        if scores.shape != shape or ids.shape != shape or ids.dtype not in INTEGERS:
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
