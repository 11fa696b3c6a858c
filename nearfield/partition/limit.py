"""A limit to the size of cells: keys that are alike would otherwise share one, and a row that opens it would see them all."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.partition.lloyd import means, nearest

MOST_TIMES_THE_MEAN = 8


def limit_sizes(keys: Tensor, assigned: Tensor, cells: int) -> Tensor:
    """The same cells `[batch, n]` of keys `[batch, n, dim]`, none with more than eight times the mean number of keys.

    Larger ones are cut into parts, which take the place of the smallest cells; the keys of those go to the nearest other cell.
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
    # No more parts than this can be needed beyond the first one of each cell.
    spare = sizes.argsort(stable=True)[: length // most]
    is_spare = torch.zeros(cells, dtype=torch.bool, device=keys.device)
    is_spare[spare] = True
    homeless = is_spare[assigned].nonzero()[:, 0]
    if len(homeless):
        centroids, _ = means(keys[None], assigned[None], keys.new_full((1, cells, keys.shape[1]), torch.inf))
        others = (~is_spare & (sizes > 0)).nonzero()[:, 0]
        found, _ = nearest(keys[homeless][None], centroids[:, others])
        assigned = assigned.index_copy(0, homeless, others[found[0]])
    order = assigned.argsort(stable=True)
    cell = assigned[order]
    count = torch.bincount(cell, minlength=cells)
    part = (torch.arange(length, device=keys.device) - (count.cumsum(0) - count)[cell]) // most
    extra = (count - 1).clamp(min=0) // most
    place = (extra.cumsum(0) - extra)[cell] + part - 1
    return assigned.index_copy(0, order, torch.where(part > 0, spare[place.clamp(min=0)], cell))
