"""K-means inverted lists (IVF): open the cells whose centroids score best, score their keys exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from nearfield.cells.partition.kmeans import lloyd, means, nearest
from nearfield.checks import check_generator_seed, check_positive
from nearfield.chunks import row_chunks
from nearfield.kernels.backends import full_precision
from nearfield.knn.index.base import Cutoffs, Found
from nearfield.knn.index.candidates import best_of_lists
from nearfield.knn.index.file import Learned
from nearfield.knn.index.prefixes import LEAF, PrefixBuilt, restored

ROUTE_SCORES_PER_PASS = 1 << 21
"""Entries of one block of the (row, cell) score table: 8 MB in float32, and 16 MB of ids that are sorted along."""


@dataclass(frozen=True)
class KMeansIndex:
    """Cells by k-means: a query opens the `probes` cells of largest q.mu_c and scores every visible key in them.

    A row keeps opening cells, in the order of the scores of their centroids, until they hold k keys, so it always finds that
    many. Causal rows search cells made of visible keys only, block by block (`nearfield.knn.index.prefixes`).

    The keys that a row leaves out are bounded by the ball around their cell (Cauchy-Schwarz): q.k <= q.mu_c + ||q|| r_c, with
    r_c the largest distance from a key of the cell to its centroid. With this bound lazy Gumbel sampling is exact although the
    near set is approximate. (The paper uses the smallest near score instead, a bound only if the near set is the true top k.)

    Args:
        cells: number of cells; None: ceil(sqrt(length)). A block of a causal search has ceil(sqrt(block)).
        probes: least number of cells opened per row.
        iterations: Lloyd iterations on the sample.
        sample: how many keys the iterations use; None: 64 per cell.
        seed: seed of the first centroids. The same seed gives the same index; the global generator is not used.
        leaf: keys of the smallest block of a causal search.

    Cost: build O(length cells dim); search O(rows (cells + probes length / cells) dim), which is n^1.5 for n rows with the
    default cells. Causal search takes log2(length / leaf) times as much of either.

    >>> keys = torch.randn(1, 1000, 16, generator=torch.Generator().manual_seed(0))
    >>> scores, ids = KMeansIndex(probes=4).build(keys).search(keys[:, :5], k=3)
    >>> ids.shape
    torch.Size([1, 5, 3])
    """

    cells: int | None = None
    probes: int = 8
    iterations: int = 8
    sample: int | None = None
    seed: int = 0
    leaf: int = LEAF

    def __post_init__(self) -> None:
        check_positive("cells", self.cells, optional=True)
        check_positive("probes", self.probes)
        check_positive("iterations", self.iterations, least=0)
        check_positive("sample", self.sample, optional=True)
        check_positive("leaf", self.leaf)
        check_generator_seed("seed", self.seed)

    def cells_of(self, length: int) -> int:
        """How many cells so many keys have."""
        return max(1, min(length, self.cells or math.ceil(math.sqrt(length))))

    def build(self, keys: Tensor) -> BuiltKMeans:
        with full_precision(keys):
            return BuiltKMeans(keys, self)

    def _restored(self, keys: Tensor, learned: Learned) -> PrefixBuilt:
        def made(recipe: KMeansIndex, some: Tensor, part: Learned) -> BuiltKMeans:
            return BuiltKMeans(some, recipe, learned=part)

        return restored(keys, learned, partial(made, self), partial(made, self._of_blocks()))

    def _of_blocks(self) -> KMeansIndex:
        # sqrt(block) cells, not a share of `cells`: a share would depend on how many keys are still to come.
        return replace(self, cells=None)


class BuiltKMeans(PrefixBuilt):
    """Centroids `[batch, cells, dim]`, radii `[batch, cells]`, and keys listed cell by cell."""

    advice = "Use fewer probes, more cells or a smaller k."

    bounded = True
    kind = KMeansIndex

    def __init__(self, keys: Tensor, recipe: KMeansIndex, cells: int | None = None, learned: Learned | None = None) -> None:
        super().__init__(keys, recipe.leaf)
        batch, length, dim = self.keys.shape
        self.recipe = recipe
        if learned is not None:
            self._restore(learned)
            return
        self.cells = cells or recipe.cells_of(length)
        assigned = lloyd(self.keys, self.cells, recipe.iterations, recipe.sample, recipe.seed)
        self.centroids, _ = means(self.keys, assigned, self.keys.new_zeros(batch, self.cells, dim))
        self.radii = self.keys.new_zeros(batch, self.cells)
        self.longest = self.keys.new_zeros(batch)
        self._measure(self.keys, assigned)
        self._list(assigned)

    def _lessons(self) -> dict[str, Tensor]:
        learned = ("centroids", "radii", "longest", "sizes", "order")
        return {name: getattr(self, name) for name in learned}

    def _restore(self, learned: Learned) -> None:
        (batch, length, dim), dtype = self.keys.shape, self.keys.dtype
        self.centroids = learned.take("centroids", (batch, None, dim), dtype)
        self.cells = self.centroids.shape[1]
        self.radii = learned.take("radii", (batch, self.cells), dtype)
        self.longest = learned.take("longest", (batch,), dtype)
        self.sizes = learned.take("sizes", (batch, self.cells), torch.int64)
        learned.check("sizes", self.cells > 0 and bool((self.sizes >= 0).all()) and bool((self.sizes.sum(1) == length).all()))
        self.starts = self.sizes.cumsum(1) - self.sizes
        self.order = learned.permutation("order", (batch, length), torch.int64)

    def _measure(self, keys: Tensor, assigned: Tensor) -> None:
        """Widen the balls of cells to these keys."""
        batch, length, dim = keys.shape
        self.radii, self.longest = self.radii.clone(), self.longest.clone()
        for entries, part in row_chunks(batch, length, dim, 1 << 22) if length else ():
            near = keys[entries, part]
            own = self.centroids[entries].gather(1, assigned[entries, part, None].expand(-1, -1, dim))
            distance = (near - own).norm(dim=-1)
            self.radii[entries] = self.radii[entries].scatter_reduce(1, assigned[entries, part], distance, "amax")
            self.longest[entries] = torch.maximum(self.longest[entries], near.norm(dim=-1).amax(1))

    def _list(self, assigned: Tensor) -> None:
        """List the keys cell by cell, by the cell of each key."""
        batch = len(assigned)
        shifts = torch.arange(batch, device=assigned.device)[:, None] * self.cells
        self.sizes = torch.bincount((assigned + shifts).reshape(-1), minlength=batch * self.cells).view(batch, self.cells)
        self.starts = self.sizes.cumsum(1) - self.sizes
        # Stable: ascending key ids inside each cell.
        self.order = assigned.argsort(dim=1, stable=True)

    def _assigned(self) -> Tensor:
        """The cell of each listed key, `[batch, listed]`."""
        place = torch.arange(self.order.shape[1], device=self.order.device).expand_as(self.order).contiguous()
        cell = torch.searchsorted(self.starts + self.sizes, place, right=True)
        return torch.empty_like(self.order).scatter_(1, self.order, cell)

    def _take_in(self, start: int) -> None:
        more = self.keys[:, start:]
        # Differences of squares lose precision far from the origin, as in `lloyd`.
        offset = self.centroids.mean(1, keepdim=True)
        joined, _ = nearest(more, self.centroids - offset, offset)
        self._measure(more, joined)
        self._list(torch.cat([self._assigned(), joined], 1))

    def _leave_out(self, kept: Tensor) -> None:
        # Balls stay as large as they were: they hold every key that is left.
        self._list(self._assigned()[:, kept])

    def _anew(self, keys: Tensor) -> BuiltKMeans:
        # As many cells as it should have when it learns again: with too few, one cell would hold keys of several kinds.
        length = keys.shape[1]
        return BuiltKMeans(keys, self.recipe, min(max(1, length), self.recipe.cells_of(length + length // 2)))

    def _build_block(self, keys: Tensor) -> BuiltKMeans:
        return BuiltKMeans(keys, self.recipe._of_blocks())

    @property
    def groups(self) -> int:
        # Causal rows add the cells of smaller blocks, about 4 sqrt(length) in all, and leaves.
        return self.cells + 4 * math.isqrt(self.length) + self.length // self.recipe.leaf

    def _search_all(self, queries: Tensor, k: int) -> Found:
        batch, rows, _ = queries.shape
        scores = queries.new_empty(batch, rows, k)
        ids = torch.empty(batch, rows, k, dtype=torch.int64, device=queries.device)
        scored = ids.new_empty(batch, rows)
        for entries, part in row_chunks(batch, rows, self.cells, ROUTE_SCORES_PER_PASS):
            cells, counts = self._route(queries[entries, part], k, entries)
            shape = counts.shape
            entry = torch.arange(batch, device=queries.device)[entries, None].expand(shape[:2])
            starts = self.starts[entries].gather(1, cells.view(shape[0], -1)).view(shape) + entry[..., None] * self.length
            best, near, found = best_of_lists(
                queries[entries, part].reshape(-1, queries.shape[-1]),
                self.keys,
                entry.reshape(-1),
                self.order.view(-1),
                starts.view(-1, shape[2]),
                counts.view(-1, shape[2]),
                k,
            )
            scores[entries, part], ids[entries, part] = best.view(*shape[:2], k), near.view(*shape[:2], k)
            scored[entries, part] = found.view(shape[:2])
        return Found(scores, ids, scored)

    def _route(self, queries: Tensor, k: int, entries: slice) -> tuple[Tensor, Tensor]:
        """The cells that each row opens and how many keys they hold, `[batch, rows, slots]`; a count of 0: not opened."""
        sizes = self.sizes[entries]
        route = torch.bmm(queries, self.centroids[entries].transpose(1, 2))
        route.masked_fill_(sizes[:, None, :] == 0, -torch.inf)
        # Where keys were removed, or are still to come, cells are many and small: open as many more.
        least = min(self.recipe.probes, self.cells)
        least = min(math.ceil(least * max(1.0, self.cells / self.recipe.cells_of(self.length))), self.cells)

        def size_of(cells: Tensor) -> Tensor:
            return sizes[:, None, :].expand(*cells.shape[:2], -1).gather(-1, cells)

        cells = route.topk(least, dim=-1).indices
        counts = size_of(cells)
        if bool((counts.sum(-1) >= k).all()):
            return cells, counts
        # Some row needs more cells than the others: rank them all and open as many as it takes.
        cells = route.argsort(dim=-1, descending=True, stable=True)
        counts = size_of(cells)
        before = counts.cumsum(-1) - counts
        counts = counts * ((before < k) | (torch.arange(self.cells, device=counts.device) < least))
        slots = max(1, int((counts > 0).sum(-1).max()))
        return cells[..., :slots].contiguous(), counts[..., :slots].contiguous()

    def _cutoffs_all(self, queries: Tensor, k: int, smallest: Tensor) -> Cutoffs:
        batch, rows, dim = queries.shape
        bounds = queries.new_empty(batch, rows, self.cells)
        for entries, part in row_chunks(batch, rows, self.cells, ROUTE_SCORES_PER_PASS):
            some = queries[entries, part]
            opened_cells, opened_counts = self._route(some, k, entries)
            norm = some.norm(dim=-1, keepdim=True)
            longest = self.longest[entries, None, None]
            ball = torch.baddbmm(norm * self.radii[entries, None], some, self.centroids[entries].transpose(1, 2))
            bound = torch.minimum(ball, norm * longest)
            # All keys of an opened cell were scored, so those left out are below the near set.
            hits = torch.zeros_like(bound).scatter_add_(-1, opened_cells, (opened_counts > 0).to(bound.dtype))
            bound = torch.where(hits > 0, smallest[entries, part, None], bound)
            # Each inner product above is off by at most dim * eps * ||q|| max||k||; there are a few of them.
            bounds[entries, part] = bound + norm * longest * (8 * dim * torch.finfo(bound.dtype).eps)
        counts = self.sizes[:, None, :].expand(batch, rows, -1)
        return Cutoffs(bounds, counts, self.starts, self.order)
