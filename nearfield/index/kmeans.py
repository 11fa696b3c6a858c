"""K-means inverted lists (IVF): open the cells whose centroids score best, score their keys exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearfield.checks import check_integer, check_positive
from nearfield.index.base import Cutoffs
from nearfield.index.candidates import best_of_lists, row_chunks
from nearfield.index.prefixes import LEAF, PrefixBuilt
from nearfield.precision import full_precision

ROUTE_SCORES_PER_PASS = 1 << 21
"""Entries of one block of the (row, cell) score table: 8 MB in float32 and 16 MB for what is sorted along with it."""


@dataclass(frozen=True)
class KMeansIndex:
    """Cells by k-means; a query opens the `probes` cells of largest q.mu_c and scores every visible key in them.

    A row goes on opening cells, in the order of their centroids' scores, until k keys are covered, so it always gets that many.
    Causal rows search cells made of visible keys only, block by block (`nearfield.index.prefixes`).

    The keys a row leaves out are bounded by the ball around their cell (Cauchy-Schwarz): q.k <= q.mu_c + ||q|| r_c, with
    r_c the largest distance of a key of the cell to its centroid. This is what lazy Gumbel sampling needs to stay exact with an
    approximate near set (paper, lazy Gumbel sampling; there the smallest near score stands in for the bound, which
    holds only if the near set is the true top k).

    Args:
        cells: number of cells; None: ceil(sqrt(length)). The blocks of a causal search have ceil(sqrt(block)).
        probes: cells opened per row, at least.
        iterations: Lloyd iterations on the sample.
        sample: keys the iterations look at; None: 64 per cell.
        seed: of the first centroids; the same seed gives the same index, and the global generator is not used.
        leaf: keys of the smallest block of a causal search.

    Cost: build O(length cells dim); search O(rows (cells + probes length / cells) dim), n^1.5 for n rows with the default cells;
    causal search: log2(length / leaf) times as much of either.

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
        check_integer("seed", self.seed)

    def build(self, keys: Tensor) -> BuiltKMeans:
        with full_precision(keys):
            return BuiltKMeans(keys, self)


class BuiltKMeans(PrefixBuilt):
    """Centroids `[batch, cells, dim]`, radii `[batch, cells]`, and keys listed cell by cell."""

    bounded = True

    def __init__(self, keys: Tensor, recipe: KMeansIndex) -> None:
        super().__init__(keys, recipe.leaf)
        batch, length, dim = self.keys.shape
        self.recipe = recipe
        self.cells = max(1, min(length, recipe.cells or math.ceil(math.sqrt(length))))
        centroids, assigned = _partition(self.keys, self.cells, recipe)
        self.centroids = centroids
        shifts = torch.arange(batch, device=keys.device)[:, None] * self.cells
        self.sizes = torch.bincount((assigned + shifts).reshape(-1), minlength=batch * self.cells).view(batch, self.cells)
        self.starts = self.sizes.cumsum(1) - self.sizes
        # Stable: ascending key ids inside each cell.
        self.order = assigned.argsort(dim=1, stable=True)
        self.radii = self.keys.new_zeros(batch, self.cells)
        self.longest = self.keys.new_zeros(batch)
        for entries, part in row_chunks(batch, length, dim, 1 << 22) if length else ():
            near = self.keys[entries, part]
            own = centroids[entries].gather(1, assigned[entries, part, None].expand(-1, -1, dim))
            distance = (near - own).norm(dim=-1)
            self.radii[entries] = self.radii[entries].scatter_reduce(1, assigned[entries, part], distance, "amax")
            self.longest[entries] = torch.maximum(self.longest[entries], near.norm(dim=-1).amax(1))

    def _build_block(self, keys: Tensor) -> BuiltKMeans:
        # sqrt(block) cells, whatever was asked for all keys: a share of that would depend on how many keys are still to come.
        return BuiltKMeans(keys, replace(self.recipe, cells=None))

    @property
    def groups(self) -> int:
        # Causal rows add, per level of blocks, about 1.4 times as many cells as the next larger one, and a leaf.
        return self.cells + 4 * math.isqrt(self.length) + self.length // self.recipe.leaf

    def _search_all(self, queries: Tensor, k: int) -> tuple[Tensor, Tensor]:
        batch, rows, _ = queries.shape
        scores = queries.new_empty(batch, rows, k)
        ids = torch.empty(batch, rows, k, dtype=torch.int64, device=queries.device)
        for entries, part in row_chunks(batch, rows, self.cells, ROUTE_SCORES_PER_PASS):
            cells, counts = self._route(queries[entries, part], k, entries)
            shape = counts.shape
            entry = torch.arange(batch, device=queries.device)[entries, None].expand(shape[:2])
            starts = self.starts[entries].gather(1, cells.view(shape[0], -1)).view(shape) + entry[..., None] * self.length
            best, near, _ = best_of_lists(
                queries[entries, part].reshape(-1, queries.shape[-1]),
                self.keys,
                entry.reshape(-1),
                self.order.view(-1),
                starts.view(-1, shape[2]),
                counts.view(-1, shape[2]),
                k,
            )
            scores[entries, part], ids[entries, part] = best.view(*shape[:2], k), near.view(*shape[:2], k)
        return scores, ids

    def _route(self, queries: Tensor, k: int, entries: slice) -> tuple[Tensor, Tensor]:
        """The cells each row opens and how many keys they hold, `[batch, rows, slots]`; count 0 where nothing is opened."""
        sizes = self.sizes[entries]
        route = torch.bmm(queries, self.centroids[entries].transpose(1, 2))
        route.masked_fill_(sizes[:, None, :] == 0, -torch.inf)
        least = min(self.recipe.probes, self.cells)

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
            # All keys of an opened cell were scored: what is left of it is below the near set.
            hits = torch.zeros_like(bound).scatter_add_(-1, opened_cells, (opened_counts > 0).to(bound.dtype))
            bound = torch.where(hits > 0, smallest[entries, part, None], bound)
            # Each inner product above is off by at most dim * eps * ||q|| max||k||, and there are a few of them.
            bounds[entries, part] = bound + norm * longest * (8 * dim * torch.finfo(bound.dtype).eps)
        counts = self.sizes[:, None, :].expand(batch, rows, -1)
        return Cutoffs(bounds, counts, self.starts, self.order)


def _partition(keys: Tensor, cells: int, recipe: KMeansIndex) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm on a sample, then every key to its nearest centroid.

    Returns the centroids, means of their keys, `[batch, cells, dim]` and the cell of each key `[batch, length]`.
    """
    batch, length, dim = keys.shape
    if length == 0:
        return keys.new_zeros(batch, cells, dim), torch.zeros(batch, 0, dtype=torch.int64, device=keys.device)
    generator = torch.Generator("cpu").manual_seed(recipe.seed)
    picked = torch.randperm(length, generator=generator, device="cpu")[: max(cells, recipe.sample or 64 * cells)].to(keys.device)
    # Distances are differences of squares: take the common offset out of them first.
    offset = keys.mean(1, keepdim=True)
    sample = keys[:, picked] - offset
    centroids = sample[:, :cells].clone()
    for _ in range(recipe.iterations):
        assigned, distance = _nearest(sample, centroids)
        means, sizes = _means(sample, assigned, centroids)
        # An empty cell starts again at one of the keys that are worst served.
        empty = sizes == 0
        far = distance.topk(cells, dim=1).indices.gather(1, (empty.cumsum(1) - 1).clamp(min=0))
        centroids = torch.where(empty[..., None], sample.gather(1, far[..., None].expand(-1, -1, dim)), means)
    assigned, _ = _nearest(keys, centroids, offset)
    centroids, _ = _means(keys, assigned, centroids + offset)
    return centroids, assigned


def _nearest(points: Tensor, centroids: Tensor, offset: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The nearest centroid of each point (less `offset`) `[batch, n]`, and its squared distance."""
    batch, n, _ = points.shape
    assigned = torch.empty(batch, n, dtype=torch.int64, device=points.device)
    distance = points.new_empty(batch, n)
    half = centroids.square().sum(-1) / 2
    for entries, part in row_chunks(batch, n, centroids.shape[1], ROUTE_SCORES_PER_PASS):
        some = points[entries, part] if offset is None else points[entries, part] - offset[entries]
        score = torch.baddbmm(half[entries, None], some, centroids[entries].transpose(1, 2), beta=-1)
        best, assigned[entries, part] = score.max(dim=-1)
        distance[entries, part] = some.square().sum(-1) - 2 * best
    return assigned, distance


def _means(points: Tensor, assigned: Tensor, default: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each cell `[batch, cells, dim]` (`default` where it is empty) and its size `[batch, cells]`."""
    batch, cells, dim = default.shape
    flat = (assigned + torch.arange(batch, device=points.device)[:, None] * cells).reshape(-1)
    sizes = torch.bincount(flat, minlength=batch * cells).view(batch, cells)
    sums = points.new_zeros(batch * cells, dim).index_add_(0, flat, points.reshape(-1, dim)).view(batch, cells, dim)
    return torch.where(sizes[..., None] > 0, sums / sizes.clamp(min=1)[..., None], default), sizes
