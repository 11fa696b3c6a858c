"""Any Faiss index behind the library's contract, causal search included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nearfield.index.base import PADDING, BuiltIndex, gathered_scores
from nearfield.index.candidates import best_of_lists, row_chunks
from nearfield.index.mips import lift_keys, lift_queries

GATHERED_SCALARS_PER_PASS = 1 << 23
"""Key coordinates gathered at a time when the scores of Faiss's answers are recomputed (32 MB)."""


@dataclass(frozen=True)
class FaissIndex:
    """Keys in a Faiss index built by `faiss.index_factory(dim, factory)`, one per batch entry, float32 on the CPU.

    Scores are exact inner products recomputed from the ids Faiss returns (its own are distances for "l2" and approximate for
    compressed indices). Faiss may find fewer than k keys (an IVF probes only `nprobe` lists); the rest is padding. No bound
    on missed keys is known: `cutoffs` is None.

    Faiss has no mask per query. For causal search the visible prefix [0, v) of a row is cut into aligned blocks of
    `leaf * 2^t` keys, one per binary digit of v // leaf (the decomposition of a Fenwick tree), each with an index of its own,
    built when first needed and searched with all the rows that use it; the last v % leaf keys are scored exactly. A block holds only
    keys visible to the rows that search it, so no key of the future has any influence, not even through trained centroids.

    Args:
        factory: Faiss factory string, such as "Flat", "HNSW32" or "IVF256,Flat". Where there are fewer keys than lists, or than
            the 256 a product quantiser is trained on, the index is "Flat" instead.
        metric: "ip": inner product. "l2": Euclidean, on keys lifted to equal norm (`nearfield.index.mips`), for index
            types that know no inner product.
        nprobe: lists probed by an IVF index; None: Faiss's default of 1.
        leaf: keys of the smallest block.

    Cost: build as Faiss; the first causal search builds log2(length / leaf) more levels, each over all keys.

    >>> keys = torch.randn(1, 1000, 16, generator=torch.Generator().manual_seed(0))
    >>> scores, ids = FaissIndex("Flat").build(keys).search(keys[:, :5], k=3)    # doctest: +SKIP
    >>> ids[0, :, 0].tolist()                                                    # doctest: +SKIP
    [0, 1, 2, 3, 4]
    """

    factory: str
    metric: str = "ip"
    nprobe: int | None = None
    leaf: int = 4096

    def __post_init__(self) -> None:
        if not isinstance(self.factory, str) or not self.factory:
            raise ValueError(f"factory must be a Faiss factory string such as 'IVF256,Flat', got {self.factory!r}")
        if self.metric not in ("ip", "l2"):
            raise ValueError(f"metric must be 'ip' or 'l2', got {self.metric!r}")
        for name in ("nprobe", "leaf"):
            value = getattr(self, name)
            if value is None and name == "nprobe":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer{' or None' if name == 'nprobe' else ''}, got {value!r}")

    def build(self, keys: Tensor) -> BuiltFaiss:
        return BuiltFaiss(keys, self)


class BuiltFaiss(BuiltIndex):
    def __init__(self, keys: Tensor, recipe: FaissIndex) -> None:
        super().__init__(keys)
        self.recipe = recipe
        with _faiss() as faiss:
            try:
                index = faiss.index_factory(self.keys.shape[2] + (recipe.metric == "l2"), recipe.factory)
            except RuntimeError as error:
                raise ValueError(f"factory {recipe.factory!r} is not one Faiss can build here: {error}") from error
            if recipe.nprobe is not None and _lists(faiss, index) is None:
                raise ValueError(f"nprobe must be None for factory {recipe.factory!r}, which has no lists; got {recipe.nprobe!r}")
        points = self.keys.float().cpu()
        self._points = (lift_keys(points) if recipe.metric == "l2" else points).contiguous()
        self._blocks: dict[tuple[int, int, int], Any] = {}
        for entry in range(self.keys.shape[0]):
            self._block(entry, 0, self.length)

    def _block(self, entry: int, start: int, stop: int) -> Any:
        """The Faiss index of keys start..stop-1 of one batch entry; ids count from `start`."""
        name = (entry, start, stop)
        if name not in self._blocks and stop > start:
            points = self._points[entry, start:stop].numpy()
            with _faiss() as faiss:
                metric = faiss.METRIC_INNER_PRODUCT if self.recipe.metric == "ip" else faiss.METRIC_L2
                index = faiss.index_factory(points.shape[1], self.recipe.factory, metric)
                if not index.is_trained and len(points) < max(256, _lists(faiss, index) or 0):
                    index = faiss.index_factory(points.shape[1], "Flat", metric)
                elif self.recipe.nprobe is not None:
                    faiss.extract_index_ivf(index).nprobe = self.recipe.nprobe
                index.train(points)
                index.add(points)
            self._blocks[name] = index
        return self._blocks.get(name)

    def _search(self, queries: Tensor, k: int, visible: Tensor) -> tuple[Tensor, Tensor]:
        batch, rows, _ = queries.shape
        asked = queries.float().cpu()
        asked = (lift_queries(asked) if self.recipe.metric == "l2" else asked).contiguous()
        seen = visible.cpu()
        ids = torch.full((batch, rows, k), PADDING)
        # Faiss searches one index at a time, so there is no way around a loop over batch entries.
        for one in range(batch):
            whole = (seen[one] == self.length).nonzero().squeeze(1)
            ids[one, whole] = self._ask(asked[one, whole], k, one, 0, self.length)
        ids = ids.to(queries.device)
        scores = _rescore(queries, self.keys, ids)
        entry, row = (visible < self.length).nonzero(as_tuple=True)
        if entry.numel():
            found = self._search_prefixes(queries[entry, row], asked, (entry, row), k, visible[entry, row])
            scores[entry, row], ids[entry, row] = found
        return scores, ids

    def _search_prefixes(
        self, queries: Tensor, asked: Tensor, where: tuple[Tensor, Tensor], k: int, visible: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Top k of the first `visible` keys for rows `[rows, dim]` found at `where` = (entry, row)."""
        leaf, entry = self.recipe.leaf, where[0]
        first = visible // leaf * leaf
        start = (entry * self.length + first)[:, None]
        scores, ids, _ = best_of_lists(queries, self.keys, entry, None, start, (visible - first)[:, None], k)
        blocks = (visible // leaf).cpu()
        for level in range(int(blocks.amax()).bit_length()):
            has = ((blocks >> level) & 1).bool().nonzero().squeeze(1)
            size = leaf << level
            begin = (blocks[has] >> (level + 1)) << (level + 1)
            owner = entry.cpu()[has]
            near = torch.full((has.shape[0], k), PADDING)
            groups, member = torch.unique(torch.stack([owner, begin], 1), dim=0, return_inverse=True)
            for group, (one, block) in enumerate(groups.tolist()):
                mine = (member == group).nonzero().squeeze(1)
                points = asked[one, where[1].cpu()[has[mine]]]
                near[mine] = self._ask(points, k, one, block * leaf, block * leaf + size)
            has, near = has.to(queries.device), near.to(queries.device)
            found = _rescore(queries[has, None], self.keys, near[:, None], entry[has])[:, 0]
            both, both_ids = torch.cat([scores[has], found], 1), torch.cat([ids[has], near], 1)
            best, at = both.topk(k, dim=1)
            scores[has], ids[has] = best, both_ids.gather(1, at)
        return scores, ids

    def _ask(self, points: Tensor, k: int, entry: int, start: int, stop: int) -> Tensor:
        """Ids `[rows, k]` from one Faiss index; its label -1 becomes `PADDING`."""
        ids = torch.full((points.shape[0], k), PADDING)
        index = self._block(entry, start, stop)
        if index is None or points.shape[0] == 0:
            return ids
        kept = min(k, stop - start)
        with _faiss():
            _, labels = index.search(points.contiguous().numpy(), kept)
        found = torch.from_numpy(labels)
        ids[:, :kept] = torch.where(found < 0, PADDING, found + start)
        return ids


def _rescore(queries: Tensor, keys: Tensor, ids: Tensor, entry: Tensor | None = None) -> Tensor:
    """Inner products of `ids`, sorted largest first *in place* together with the ids.

    `[batch, rows, k]`; with `entry`, row i of the batch belongs to batch entry `entry[i]` of the keys.
    """
    scores = queries.new_empty(ids.shape)
    for entries, part in row_chunks(ids.shape[0], ids.shape[1], ids.shape[2] * queries.shape[2], GATHERED_SCALARS_PER_PASS):
        some = ids[entries, part]
        if entry is None:
            raw = gathered_scores(queries[entries, part], keys[entries], some)
        else:
            flat = torch.where(some == PADDING, PADDING, some + (entry[entries] * keys.shape[1])[:, None, None])
            rows = queries[entries, part].reshape(1, -1, queries.shape[2])
            raw = gathered_scores(rows, keys.reshape(1, -1, keys.shape[2]), flat.view(1, -1, ids.shape[2])).view(some.shape)
        # Rounding and compression may leave Faiss's order slightly off.
        scores[entries, part], at = raw.sort(dim=-1, descending=True, stable=True)
        ids[entries, part] = some.gather(-1, at)
    return scores


def _lists(faiss: Any, index: Any) -> int | None:
    """How many inverted lists an index has; None where it is of another kind."""
    try:
        return int(faiss.extract_index_ivf(index).nlist)
    except RuntimeError:
        return None


@contextmanager
def _faiss() -> Iterator[Any]:
    """The module, with torch's number of threads as it was: loading and using Faiss's OpenMP changes it."""
    threads = torch.get_num_threads()
    try:
        import faiss
    except ImportError as error:
        raise ImportError("FaissIndex needs Faiss: pip install nearfield[faiss]") from error
    try:
        yield faiss
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

