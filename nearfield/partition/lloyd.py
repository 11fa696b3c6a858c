"""Lloyd's k-means, on a batch of key sets at once."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.blocks import row_chunks

SCORES_PER_PASS = 1 << 19
"""Entries of one block of the (key, centroid) score table, with the keys themselves: 2 MB in float32."""


def lloyd(
    keys: Tensor, cells: int, iterations: int, sample: int | None = None, seed: int = 0, weight: Tensor | None = None
) -> Tensor:
    """Lloyd's algorithm on a sample, then every key to its nearest centroid: the cell of each key, `[batch, length]`.

    `weight` `[batch, 1, dim]`: what to multiply the coordinates with before distances are taken.
    """
    batch, length, dim = keys.shape
    if length == 0:
        return torch.zeros(batch, 0, dtype=torch.int64, device=keys.device)
    generator = torch.Generator("cpu").manual_seed(seed)
    picked = torch.randperm(length, generator=generator, device="cpu")[: max(cells, sample or 64 * cells)].to(keys.device)
    # Distances are differences of squares: take the common offset out of them first.
    offset = keys.mean(1, keepdim=True)
    seen = keys[:, picked] - offset
    if weight is not None:
        seen = seen * weight
    centroids = seen[:, :cells].clone()
    for _ in range(iterations):
        assigned, distance = nearest(seen, centroids)
        middles, sizes = means(seen, assigned, centroids)
        # An empty cell starts again at one of the keys that are worst served.
        empty = sizes == 0
        far = distance.topk(cells, dim=1).indices.gather(1, (empty.cumsum(1) - 1).clamp(min=0))
        centroids = torch.where(empty[..., None], seen.gather(1, far[..., None].expand(-1, -1, dim)), middles)
    return nearest(keys, centroids, offset, weight)[0]


def nearest(
    points: Tensor, centroids: Tensor, offset: Tensor | None = None, weight: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The nearest centroid of each point (less `offset`, times `weight`) `[batch, n]`, and its squared distance."""
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
    """The mean of each cell `[batch, cells, dim]` (`default` where it is empty) and its size `[batch, cells]`."""
    batch, cells, dim = default.shape
    flat = (assigned + torch.arange(batch, device=points.device)[:, None] * cells).reshape(-1)
    sizes = torch.bincount(flat, minlength=batch * cells).view(batch, cells)
    sums = points.new_zeros(batch * cells, dim).index_add_(0, flat, points.reshape(-1, dim)).view(batch, cells, dim)
    return torch.where(sizes[..., None] > 0, sums / sizes.clamp(min=1)[..., None], default), sizes
