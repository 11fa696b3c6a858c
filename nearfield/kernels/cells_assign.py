"""Which key lives in which cell, segment by segment."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.kernels.cells_plan import CellSettings, closed_keys
from nearfield.partition.base import Partition
from nearfield.partition.lloyd import lloyd, means

COARSE_ITERATIONS = 3


def assign(keys: Tensor, visible: Tensor, settings: CellSettings, partition: Partition) -> tuple[Tensor, Tensor]:
    """The fine and the coarse cell of each key of a head `[n, dim]`, -1 for those in none; no coarse ones with one level.

    Keys are grouped per segment that some row sees closed, each segment by itself: nothing about a cell depends on later keys.
    Coarse cells group the centroids of fine ones, and fine cells are numbered coarse cell by coarse cell.
    """
    length, dim = keys.shape
    fine_of = torch.full((length,), -1, dtype=torch.int64, device=keys.device)
    coarse_of = fine_of.clone() if settings.branching else fine_of[:0]
    closed = int(closed_keys(visible, settings).max()) if len(visible) else 0
    if closed == 0:
        return fine_of, coarse_of
    size = settings.segment or closed
    fine, coarse = settings.per_segment(size)
    parts = keys[:closed].to(torch.promote_types(keys.dtype, torch.float32)).view(-1, size, dim)
    assigned = partition.build(parts, fine)
    segment = torch.arange(len(parts), device=keys.device)[:, None]
    if coarse:
        centroid, _ = means(parts, assigned, parts.new_zeros(len(parts), fine, dim))
        parent = lloyd(centroid, coarse, COARSE_ITERATIONS, fine)
        rank = parent.argsort(dim=1, stable=True).argsort(dim=1)
        coarse_of[:closed] = (parent.gather(1, assigned) + segment * coarse).view(-1)
        assigned = rank.gather(1, assigned)
        coarse_of[: settings.sinks] = -1
    fine_of[:closed] = (assigned + segment * fine).view(-1)
    fine_of[: settings.sinks] = -1
    return fine_of, coarse_of
