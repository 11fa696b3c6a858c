"""K-means inverted lists (IVF): open the cells whose centroids score best, score their keys exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.index.base import BuiltIndex, Cutoffs, smallest_near_score
from nearfield.index.candidates import best_of_lists, row_chunks

ROUTE_SCORES_PER_PASS = 1 << 21
"""Entries of one block of the (row, cell) score table: 8 MB in float32 and 16 MB for what is sorted along with it."""


@dataclass(frozen=True)
class KMeansIndex:
    """Cells by k-means; a query opens the `probes` cells of largest q.mu_c and scores every visible key in them.

    A row goes on opening cells, in the order of their centroids' scores, until min(k, visible) visible keys are covered, so it
    always gets that many. Inside a cell keys are listed in ascending order: what a causal row sees of a cell is a prefix.

    The keys a row leaves out are bounded by the ball around their cell (Cauchy-Schwarz): q.k <= q.mu_c + ||q|| r_c, with
    r_c the largest distance of a key of the cell to its centroid. This is what lazy Gumbel sampling needs to stay exact with an
    approximate near set (paper, lazy Gumbel sampling; there the smallest near score stands in for the bound, which
    holds only if the near set is the true top k).

    Centroids are means over all keys, so in a causal search *which* visible keys a row finds depends on later keys too.
    Nothing else does: scores and ids are of visible keys, and the bounds hold.

    Args:
        cells: number of cells; None: ceil(sqrt(length)).
        probes: cells opened per row, at least.
        iterations: Lloyd iterations on the sample.
        sample: keys the iterations look at; None: 64 per cell.
        seed: of the first centroids; the same seed gives the same index, and the global generator is not used.

    Cost: build O(length cells dim); search O(rows (cells + probes length / cells) dim), n^1.5 for n rows with the default cells.

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

    def __post_init__(self) -> None:
        for name, least, optional in (("cells", 1, True), ("probes", 1, False), ("iterations", 0, False), ("sample", 1, True)):
            value = getattr(self, name)
            if value is None and optional:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}{' or None' if optional else ''}, got {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"seed must be an integer, got {self.seed!r}")

    def build(self, keys: Tensor) -> BuiltKMeans:
        return BuiltKMeans(keys, self)


class BuiltKMeans(BuiltIndex):
    """Centroids `[batch, cells, dim]`, radii `[batch, cells]`, and keys listed cell by cell."""

    def __init__(self, keys: Tensor, recipe: KMeansIndex) -> None:
        super().__init__(keys)
        batch, length, dim = self.keys.shape
        self.probes = recipe.probes
        self.cells = max(1, min(length, recipe.cells or math.ceil(math.sqrt(length))))
        centroids, assigned = _partition(self.keys, self.cells, recipe)
        self.centroids = centroids
        shifts = torch.arange(batch, device=keys.device)[:, None] * self.cells
        sizes = torch.bincount((assigned + shifts).reshape(-1), minlength=batch * self.cells).view(batch, self.cells)
        self.sizes = sizes
        self.starts = sizes.cumsum(1) - sizes
        # Stable: ascending key ids inside each cell.
        by_cell, self.order = torch.sort(assigned, dim=1, stable=True)
        self.ranked = by_cell * length + self.order
        """cell * length + id, ascending: one binary search finds how much of a cell a causal row sees"""
        self.radii = self.keys.new_zeros(batch, self.cells)
        self.longest = self.keys.new_zeros(batch)
        for entries, part in row_chunks(batch, length, dim, 1 << 22):
            near = self.keys[entries, part]
            own = centroids[entries].gather(1, assigned[entries, part, None].expand(-1, -1, dim))
            distance = (near - own).norm(dim=-1)
            self.radii[entries] = self.radii[entries].scatter_reduce(1, assigned[entries, part], distance, "amax")
            self.longest[entries] = torch.maximum(self.longest[entries], near.norm(dim=-1).amax(1))

    def _search(self, queries: Tensor, k: int, visible: Tensor) -> tuple[Tensor, Tensor]:
        batch, rows, _ = queries.shape
        scores = queries.new_empty(batch, rows, k)
        ids = torch.empty(batch, rows, k, dtype=torch.int64, device=queries.device)
        for entries, part in row_chunks(batch, rows, self.cells, ROUTE_SCORES_PER_PASS):
            cells, counts = self._route(queries[entries, part], k, visible[entries, part], entries)
            shape = counts.shape
            entry = torch.arange(batch, device=queries.device)[entries, None].expand(shape[:2])
            starts = self.starts[entries].gather(1, cells.view(shape[0], -1)).view(shape) + entry[..., None] * self.length
            flat = queries[entries, part].reshape(-1, queries.shape[-1])
            entry, starts, counts = entry.reshape(-1), starts.view(-1, shape[2]), counts.view(-1, shape[2])
            seen = visible[entries, part].reshape(-1)
            best, near, _ = best_of_lists(flat, self.keys, entry, self.order.view(-1), starts, counts, k)
            everything = (seen <= k) & (seen > 0)
            if bool(everything.any()):
                # One list of all visible keys instead of every cell, nearly empty.
                entry, seen = entry[everything], seen[everything, None]
                first = entry[:, None] * self.length
                best[everything], near[everything], _ = best_of_lists(flat[everything], self.keys, entry, None, first, seen, k)
            scores[entries, part], ids[entries, part] = best.view(*shape[:2], k), near.view(*shape[:2], k)
        return scores, ids

    def _route(self, queries: Tensor, k: int, visible: Tensor, entries: slice) -> tuple[Tensor, Tensor]:
        """The cells each row opens and how many of their keys it sees, `[batch, rows, slots]`; count 0 where nothing is opened.

        Rows with at most k visible keys open nothing here: they are to take all they see.
        """
        length, starts, sizes = self.length, self.starts[entries], self.sizes[entries]
        route = torch.bmm(queries, self.centroids[entries].transpose(1, 2))
        if length == 0:
            return torch.zeros_like(route, dtype=torch.int64), torch.zeros_like(route, dtype=torch.int64)
        first = self.order[entries].gather(1, starts.clamp(max=length - 1)).masked_fill(sizes == 0, length)
        route.masked_fill_(first[:, None, :] >= visible[..., None], -torch.inf)
        least = min(self.probes, self.cells)
        cells = route.topk(least, dim=-1).indices
        counts = self._seen(cells, visible, entries)
        partial = visible > k
        short = partial & (counts.sum(-1) < k)
        counts = counts * partial[..., None]
        if not bool(short.any()):
            return cells, counts
        # Some rows need more cells: sort all of them, for those rows alone.
        entry, row = short.nonzero(as_tuple=True)
        ranked = route[entry, row].argsort(dim=-1, descending=True, stable=True)
        seen = self._seen_flat(ranked, visible[entry, row], entry + (entries.start or 0))
        before = seen.cumsum(-1) - seen
        seen = seen * ((before < k) | (torch.arange(self.cells, device=seen.device) < least))
        slots = max(least, int((seen > 0).sum(-1).amax()))
        # The opened cells come first, except for cells of which the row sees nothing; those rank last.
        cells = torch.nn.functional.pad(cells, (0, slots - least))
        counts = torch.nn.functional.pad(counts, (0, slots - least))
        cells[entry, row], counts[entry, row] = ranked[:, :slots], seen[:, :slots]
        return cells, counts

    def _seen(self, cells: Tensor, visible: Tensor, entries: slice) -> Tensor:
        """How many keys of the given cells `[batch, rows, slots]` each row sees."""
        shape = cells.shape
        flat = cells.reshape(shape[0], -1)
        wanted = (cells * self.length + visible[..., None]).view(shape[0], -1)
        return (torch.searchsorted(self.ranked[entries], wanted) - self.starts[entries].gather(1, flat)).view(shape)

    def _seen_flat(self, cells: Tensor, visible: Tensor, entry: Tensor) -> Tensor:
        """The same for rows `[rows, slots]` of different batch entries: the entry leads the composite key."""
        span = self.cells * self.length
        ranked = (self.ranked + torch.arange(self.ranked.shape[0], device=cells.device)[:, None] * span).view(-1)
        found = torch.searchsorted(ranked, entry[:, None] * span + cells * self.length + visible[:, None])
        return found - entry[:, None] * self.length - self.starts[entry].gather(1, cells)

    def _cutoffs(self, queries: Tensor, ids: Tensor, visible: Tensor) -> Cutoffs:
        batch, rows, dim = queries.shape
        k = ids.shape[-1]
        bounds = queries.new_empty(batch, rows, self.cells)
        counts = torch.empty(batch, rows, self.cells, dtype=torch.int64, device=queries.device)
        all_cells = torch.arange(self.cells, device=queries.device)
        for entries, part in row_chunks(batch, rows, self.cells, ROUTE_SCORES_PER_PASS):
            some, seen = queries[entries, part], visible[entries, part]
            opened_cells, opened_counts = self._route(some, k, seen, entries)
            counts[entries, part] = self._seen(all_cells.expand(*seen.shape, -1), seen, entries)
            norm = some.norm(dim=-1, keepdim=True)
            longest = self.longest[entries, None, None]
            ball = torch.baddbmm(norm * self.radii[entries, None], some, self.centroids[entries].transpose(1, 2))
            bound = torch.minimum(ball, norm * longest)
            # All visible keys of an opened cell were scored: what is left of it is below the near set.
            kept = smallest_near_score(some, self.keys[entries], ids[entries, part])[..., None]
            hits = torch.zeros_like(bound).scatter_add_(-1, opened_cells, (opened_counts > 0).to(bound.dtype))
            bound = torch.where(hits > 0, kept, bound)
            # Each inner product above is off by at most dim * eps * ||q|| max||k||, and there are a few of them.
            bound = bound + norm * longest * (8 * dim * torch.finfo(bound.dtype).eps)
            bounds[entries, part] = bound.masked_fill(seen[..., None] <= k, -torch.inf)
        return Cutoffs(bounds, counts, self.starts, self.order)


def _partition(keys: Tensor, cells: int, recipe: KMeansIndex) -> tuple[Tensor, Tensor]:
    """Lloyd's algorithm on a sample, then every key to its nearest centroid.

    Returns the centroids, means of their keys, `[batch, cells, dim]` and the cell of each key `[batch, length]`.
    """
    batch, length, dim = keys.shape
    if length == 0:
        return keys.new_zeros(batch, cells, dim), torch.zeros(batch, 0, dtype=torch.int64, device=keys.device)
    generator = torch.Generator().manual_seed(recipe.seed)
    picked = torch.randperm(length, generator=generator)[: max(cells, recipe.sample or 64 * cells)].to(keys.device)
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
