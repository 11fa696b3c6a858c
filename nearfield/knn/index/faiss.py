"""Any Faiss index behind the contract of this library, causal search included."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor

from nearfield.checks import check_positive
from nearfield.chunks import row_chunks
from nearfield.kernels.backends import full_precision
from nearfield.knn.index.base import PADDING, Found, gathered_scores
from nearfield.knn.index.file import Learned
from nearfield.knn.index.lift import lift_keys, lift_queries
from nearfield.knn.index.prefixes import PrefixBuilt, restored

GATHERED_SCALARS_PER_PASS = 1 << 23
"""Key coordinates gathered at a time when the scores of Faiss's answers are recomputed (32 MB)."""


@dataclass(frozen=True)
class FaissIndex:
    """Keys in a Faiss index from `faiss.index_factory(dim, factory)`: one per batch entry, in float32, on the CPU.

    Scores are exact inner products, recomputed for the ids that Faiss returns (its own scores are distances for "l2", and
    approximate for compressed indices). Faiss may find fewer than k keys (an IVF probes only `nprobe` lists); padding fills
    the rest. It knows no bound on the keys it misses, so `cutoffs` is None.

    Faiss has no mask per query. Causal rows search indices made of visible keys only, block by block
    (`nearfield.knn.index.prefixes`).

    Args:
        factory: Faiss factory string, such as "Flat", "HNSW32" or "IVF256,Flat". With fewer keys than lists, or fewer than the
            256 that train a product quantiser, the index is "Flat" instead.
        metric: "ip" for inner products, or "l2" for Euclidean distances between keys lifted to equal norm
            (`nearfield.knn.index.lift.lift_keys`), for index types without inner products.
        nprobe: lists probed by an IVF index; None: 1, the default of Faiss.
        leaf: keys of the smallest block of a causal search.

    Cost: that of Faiss to build; the first causal search builds log2(length / leaf) more levels, each over all keys.

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
        check_positive("nprobe", self.nprobe, optional=True)
        check_positive("leaf", self.leaf)

    def build(self, keys: Tensor) -> BuiltFaiss:
        with full_precision(keys):
            return BuiltFaiss(keys, self)

    def _restored(self, keys: Tensor, learned: Learned) -> PrefixBuilt:
        def made(some: Tensor, part: Learned) -> BuiltFaiss:
            return BuiltFaiss(some, self, part)

        return restored(keys, learned, made, made)


class BuiltFaiss(PrefixBuilt):
    kind = FaissIndex

    def __init__(self, keys: Tensor, recipe: FaissIndex, learned: Learned | None = None) -> None:
        super().__init__(keys, recipe.leaf)
        self.recipe = recipe
        self.scans = recipe.factory == "Flat"
        if learned is None:
            self._learn()
        else:
            self._restore(learned)

    def _lessons(self) -> dict[str, Tensor]:
        # What `faiss.write_index` would write to a file: `faiss.deserialize_index` reads it.
        with _faiss() as faiss:
            return {f"faiss-{number}": torch.from_numpy(faiss.serialize_index(x)) for number, x in enumerate(self._indices)}

    def _restore(self, learned: Learned) -> None:
        batch, length, dim = self.keys.shape
        lifted = self.recipe.metric == "l2"
        self._indices = []
        with _faiss() as faiss:
            for name in (f"faiss-{number}" for number in range(batch)):
                stored = learned.take(name, (None,), torch.uint8, on_cpu=True)
                try:
                    index = faiss.deserialize_index(stored.numpy())
                except RuntimeError as error:
                    raise ValueError(
                        f"{learned.where} cannot be read by Faiss {faiss.__version__}: {error}; use the version that wrote it, "
                        "or build the index again"
                    ) from error
                metric = faiss.METRIC_L2 if lifted else faiss.METRIC_INNER_PRODUCT
                learned.check(name, (index.d, index.ntotal, index.metric_type) == (dim + lifted, length, metric))
                self._indices.append(index)

    def _learn(self) -> None:
        points = self.keys.float().cpu()
        points = (lift_keys(points) if self.recipe.metric == "l2" else points).contiguous()
        with _faiss() as faiss:
            # Faiss searches one index at a time, hence the loop over batch entries.
            self._indices = [self._build_one(faiss, entry.numpy()) for entry in points]

    def _take_in(self, start: int) -> None:
        if self.recipe.metric == "l2":
            # Keys are lifted to the norm of the longest one, which may be new.
            return self._learn()
        more = self.keys[:, start:].float().cpu().contiguous()
        with _faiss() as faiss:
            self._indices = [faiss.clone_index(index) for index in self._indices]
            for index, points in zip(self._indices, more, strict=True):
                index.add(points.numpy())

    def _leave_out(self, kept: Tensor) -> None:
        # Not every kind of index can forget.
        self._learn()

    def _build_one(self, faiss: Any, points: Any) -> Any:
        metric = faiss.METRIC_INNER_PRODUCT if self.recipe.metric == "ip" else faiss.METRIC_L2
        try:
            index = faiss.index_factory(points.shape[1], self.recipe.factory, metric)
        except RuntimeError as error:
            raise ValueError(f"Faiss cannot build factory {self.recipe.factory!r}: {error}") from error
        lists = _lists(faiss, index)
        if self.recipe.nprobe is not None:
            if lists is None:
                raise ValueError(
                    f"nprobe must be None for factory {self.recipe.factory!r}, which has no lists; got {self.recipe.nprobe!r}"
                )
            faiss.extract_index_ivf(index).nprobe = self.recipe.nprobe
        if not index.is_trained and len(points) < max(256, lists or 0):
            index = faiss.index_factory(points.shape[1], "Flat", metric)
        if len(points):
            index.train(points)
            index.add(points)
        return index

    def _anew(self, keys: Tensor) -> BuiltFaiss:
        return BuiltFaiss(keys, self.recipe)

    def _search_all(self, queries: Tensor, k: int) -> Found:
        asked = queries.float().cpu()
        asked = (lift_queries(asked) if self.recipe.metric == "l2" else asked).contiguous()
        labels: list[Any] = []
        scored: list[float] = []
        with _faiss() as faiss:
            for index, rows in zip(self._indices, asked, strict=True):
                before = _comparisons(faiss)
                labels.append(index.search(rows.numpy(), k)[1])
                compared = (_comparisons(faiss) - before) / len(rows)
                scored.append(float(index.ntotal) if _is_flat(faiss, index) else compared)
        ids = torch.from_numpy(numpy.stack(labels)).to(queries.device)
        # The label of Faiss for "not found" happens to be -1 as well; do not rely on it.
        ids = torch.where(ids < 0, PADDING, ids)
        scores = queries.new_empty(ids.shape)
        for entries, part in row_chunks(ids.shape[0], ids.shape[1], k * queries.shape[2], GATHERED_SCALARS_PER_PASS):
            scores[entries, part] = gathered_scores(queries[entries, part], self.keys[entries], ids[entries, part])
        # Faiss ranked by its own scores, which rounding and compression make slightly different.
        scores, at = scores.sort(dim=-1, descending=True, stable=True)
        # The mean over the rows is all that Faiss tells, and that of lists and graphs of one kind only.
        count = torch.tensor(scored, device=ids.device).round().long().clamp(max=self.length)
        told = count[:, None].expand(ids.shape[:2]) if min(scored) > 0 else None
        return Found(scores, ids.gather(-1, at), told)


def _comparisons(faiss: Any) -> int:
    """How many keys lists (IVF) and graphs (HNSW) have compared with queries so far, in this process: other threads count too."""
    return int(faiss.cvar.indexIVF_stats.ndis) + int(faiss.cvar.hnsw_stats.ndis)


def _is_flat(faiss: Any, index: Any) -> bool:
    return type(faiss.downcast_index(index)).__name__.startswith("IndexFlat")


def _lists(faiss: Any, index: Any) -> int | None:
    """How many inverted lists an index has; None for other kinds of index."""
    try:
        return int(faiss.extract_index_ivf(index).nlist)
    except RuntimeError:
        return None


@contextmanager
def _faiss() -> Iterator[Any]:
    """The module. Afterwards torch has as many threads as before: the OpenMP of Faiss changes that number."""
    threads = torch.get_num_threads()
    try:
        import faiss
    except ImportError as error:
        raise ImportError("FaissIndex needs Faiss: pip install 'nearfield[faiss]'") from error
    try:
        yield faiss
    finally:
        if torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
