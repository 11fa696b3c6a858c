"""K-means: keys that are close to each other share a cell."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.checks import check_flag, check_positive, check_seed
from nearfield.chunks import row_chunks

ITERATIONS, KERNEL_ITERATIONS = 5, 2
"""Lloyd iterations by default: in torch, and in the Triton kernels of a call, where each one is a noticeable part of it."""

DIRECT_CELLS = 256
"""Up to this many cells k-means runs directly. More are made in two steps: large cells first, then their parts."""


@dataclass(frozen=True)
class KMeans:
    """Cells by k-means on the keys, coordinates weighted by their root mean square.

    What should be small inside a cell is the spread of logits, not of keys, and queries are large where keys are large. On real
    language data this weighting reduces the error by a third. `by_queries` weights coordinates by how large queries are, which
    helps where they are large elsewhere, as in models that are sharp.

    A few Lloyd iterations are enough: cells need to be tight, not optimal. Beyond 256 cells, the keys are first split into
    about sqrt(cells) large cells, and each of those, in proportion to its size, into small ones. This takes
    O(length sqrt(cells) dim) instead of O(length cells dim).

    Args:
        iterations: Lloyd iterations, on a sample of 32 keys per cell; None: 5 on a CPU, and 2 in the Triton kernels of a GPU. A
            cache groups its keys once for many steps, and takes 5 on either.
        seed: for the choice of the first centroids.
        by_queries: whether coordinates are weighted by the root mean square of queries: with a causal mask of the 64 latest that
            see no more than the keys that are grouped, so that nothing depends on a later query; without one of 64 from all
            over, padding among them. Where no query is known, in windows with bounds on both sides, and in classes that are made
            from this one, the keys serve. A cache does this anyhow, if it knows the queries of its prompt.

    >>> keys = torch.randn(1, 1000, 16, generator=torch.Generator().manual_seed(0))
    >>> KMeans().build(keys, 50).shape
    torch.Size([1, 1000])
    """

    iterations: int | None = None
    seed: int = 0
    by_queries: bool = False

    def __post_init__(self) -> None:
        check_positive("iterations", self.iterations, optional=True, least=0)
        check_seed("seed", self.seed)
        object.__setattr__(self, "by_queries", check_flag("by_queries", self.by_queries))

    def iterations_or(self, default: int) -> int:
        return default if self.iterations is None else self.iterations

    def build(self, keys: Tensor, cells: int, sizes: Tensor | None = None) -> Tensor:
        """See `Partition.build`. `sizes` `[batch, dim]`: of queries, see `by_queries.sizes_of`; None: nothing is known."""
        length = keys.shape[1]
        cells = min(cells, max(1, length))
        weight = torch.linalg.vector_norm(keys, dim=1, keepdim=True) / math.sqrt(max(1, length))
        if sizes is not None:
            sizes = sizes[:, None].to(weight.dtype)
            weight = torch.where((sizes > 0.0).any(-1, keepdim=True), sizes, weight)
        if cells <= DIRECT_CELLS or len(keys) == 0:
            return self._lloyd(keys, cells, weight)
        return torch.stack([self._in_two_steps(*entry, cells) for entry in zip(keys, weight, strict=True)])

    def _lloyd(self, keys: Tensor, cells: int, weight: Tensor) -> Tensor:
        return lloyd(keys, cells, self.iterations_or(ITERATIONS), 32 * cells, self.seed, weight)

    def _in_two_steps(self, keys: Tensor, weight: Tensor, cells: int) -> Tensor:
        length = keys.shape[0]
        parents = math.isqrt(cells)
        parent = self._lloyd(keys[None], parents, weight[None])[0]
        members = parent.argsort(stable=True)
        counts = torch.bincount(parent, minlength=parents).tolist()
        # Every parent gets one cell, the others are shared out by size: never more than `cells` in all.
        spare = cells - parents
        assigned = torch.empty_like(parent)
        first, taken = 0, 0
        for count in counts:
            if count:
                own = members[first : first + count]
                parts = min(count, 1 + spare * count // length)
                assigned[own] = self._lloyd(keys[own][None], parts, weight[None])[0] + taken
                first, taken = first + count, taken + parts
        return assigned


SCORES_PER_PASS = 1 << 19
"""Numbers in one block of the table of keys by centroids, copies of the keys included: 2 MB in float32."""


def lloyd(
    keys: Tensor, cells: int, iterations: int, sample: int | None = None, seed: int = 0, weight: Tensor | None = None
) -> Tensor:
    """The cell of each key, `[batch, length]`: Lloyd's algorithm on a sample, then every key joins its nearest centroid.

    `weight` `[batch, 1, dim]`: factors of the coordinates in distances.
    """
    batch, length, dim = keys.shape
    if length == 0:
        return torch.zeros(batch, 0, dtype=torch.int64, device=keys.device)
    picked = sample_of(length, cells, max(cells, sample or 64 * cells), torch.Generator("cpu").manual_seed(seed)).to(keys.device)
    # Distances are computed as differences of squares, which lose precision far from the origin: centre the keys first.
    offset = keys.mean(1, keepdim=True)
    seen = keys[:, picked] - offset
    if weight is not None:
        seen = seen * weight
    centroids = seen[:, :cells].clone()
    for _ in range(iterations):
        assigned, distance = nearest(seen, centroids)
        middles, sizes = means(seen, assigned, centroids)
        # An empty cell starts again at one of the keys that are farthest from their centroids.
        empty = sizes == 0
        far = distance.topk(cells, dim=1).indices.gather(1, (empty.cumsum(1) - 1).clamp(min=0))
        centroids = torch.where(empty[..., None], seen.gather(1, far[..., None].expand(-1, -1, dim)), middles)
    return nearest(keys, centroids, offset, weight)[0]


def sample_of(length: int, cells: int, size: int, generator: torch.Generator) -> Tensor:
    """Positions of `size` of `length` keys (or of all, if there are fewer); k-means starts at the first `cells` <= `length`.

    These are drawn from stretches of equal length, one from each: keys near each other are often alike, and centroids that start
    among keys of one kind leave others without any. The rest is drawn from everywhere.
    """
    drawn = torch.randperm(length, generator=generator, device="cpu")
    within = torch.rand(cells, generator=generator, dtype=torch.float64, device="cpu")
    # In any order: the kernels measure widths on the first few of them, which should be from everywhere.
    stretch = torch.randperm(cells, generator=generator, device="cpu")
    first, beyond = stretch * length // cells, (stretch + 1) * length // cells
    start = first + (within * (beyond - first)).long()
    others = torch.ones(length, dtype=torch.bool, device="cpu")
    others[start] = False
    return torch.cat([start, drawn[others[drawn]]])[:size]


def nearest(
    points: Tensor, centroids: Tensor, offset: Tensor | None = None, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The nearest centroid of each point (minus `offset`, times `weight`), `[batch, n]`, and its squared distance."""
    batch, n, _ = points.shape
    assigned = torch.empty(batch, n, dtype=torch.int64, device=points.device)
    distance = points.new_empty(batch, n)
    half = centroids.square().sum(-1) / 2
    for entries, part in row_chunks(batch, n, centroids.shape[1] + 3 * points.shape[2], SCORES_PER_PASS):
        some = points[entries, part]
        some = some if offset is None else some - offset[entries]
        some = some if weight is None else some * weight[entries]
        score = torch.baddbmm(half[entries, None], some, centroids[entries].transpose(1, 2), beta=-1)
        best, assigned[entries, part] = score.max(dim=-1)
        distance[entries, part] = some.square().sum(-1) - 2 * best
    return assigned, distance


def means(points: Tensor, assigned: Tensor, default: Tensor) -> tuple[Tensor, Tensor]:
    """The mean of each cell, `[batch, cells, dim]`, or `default` where it is empty; and its size, `[batch, cells]`."""
    batch, cells, dim = default.shape
    flat = (assigned + torch.arange(batch, device=points.device)[:, None] * cells).reshape(-1)
    sizes = torch.bincount(flat, minlength=batch * cells).view(batch, cells)
    sums = points.new_zeros(batch * cells, dim).index_add_(0, flat, points.reshape(-1, dim)).view(batch, cells, dim)
    return torch.where(sizes[..., None] > 0, sums / sizes.clamp(min=1)[..., None], default), sizes


MOST_TIMES_THE_MEAN = 8
"""No cell has more than this many times the mean number of keys."""


def limit_sizes(keys: Tensor, assigned: Tensor, cells: int) -> Tensor:
    """The cells `[batch, n]` of keys `[batch, n, dim]`, none with more than eight times the mean number of keys.

    Larger ones are cut into parts. These take the place of the smallest cells, whose keys go to the nearest other cell.
    """
    length = keys.shape[1]
    most = MOST_TIMES_THE_MEAN * -(-length // cells)
    numbers = torch.arange(len(keys), device=keys.device)[:, None] * cells
    sizes = torch.bincount((assigned + numbers).reshape(-1), minlength=len(keys) * cells).view(-1, cells)
    limited = assigned
    for entry in (sizes.amax(1) > most).nonzero()[:, 0].tolist():
        if limited is assigned:
            limited = assigned.clone()
        limited[entry] = _limited(keys[entry], assigned[entry], sizes[entry], most)
    return limited


def _limited(keys: Tensor, assigned: Tensor, sizes: Tensor, most: int) -> Tensor:
    cells, length = len(sizes), len(keys)
    # Beyond the first part of each cell, there can be no more parts than this.
    spare = sizes.argsort(stable=True)[: length // most]
    is_spare = torch.zeros(cells, dtype=torch.bool, device=keys.device)
    is_spare[spare] = True
    displaced = is_spare[assigned].nonzero()[:, 0]
    if len(displaced):
        centroids, _ = means(keys[None], assigned[None], keys.new_full((1, cells, keys.shape[1]), torch.inf))
        others = (~is_spare & (sizes > 0)).nonzero()[:, 0]
        found, _ = nearest(keys[displaced][None], centroids[:, others])
        assigned = assigned.index_copy(0, displaced, others[found[0]])
    order = assigned.argsort(stable=True)
    cell = assigned[order]
    count = torch.bincount(cell, minlength=cells)
    part = (torch.arange(length, device=keys.device) - (count.cumsum(0) - count)[cell]) // most
    extra = (count - 1).clamp(min=0) // most
    place = (extra.cumsum(0) - extra)[cell] + part - 1
    return assigned.index_copy(0, order, torch.where(part > 0, spare[place.clamp(min=0)], cell))
