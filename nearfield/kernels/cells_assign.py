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
    parts = keys[:closed].to(torch.promote_types(keys.dtype, torch.float32)).view(closed // size, size, dim)
    assigned = partition.build(parts, fine)
    segment = torch.arange(len(parts), device=keys.device)[:, None]
    if coarse:
        centroid, _ = means(parts, assigned, parts.new_zeros(len(parts), fine, dim))
        parent = lloyd(centroid, -(-fine // settings.branching), COARSE_ITERATIONS, fine)
        order = parent.argsort(dim=1, stable=True)
        rank = order.argsort(dim=1)
        group = _runs(parent.gather(1, order), 2 * settings.branching)
        assigned = rank.gather(1, assigned)
        coarse_of[:closed] = (group.gather(1, assigned) + segment * coarse).view(-1)
        coarse_of[: settings.sinks] = -1
    fine_of[:closed] = (assigned + segment * fine).view(-1)
    fine_of[: settings.sinks] = -1
    return fine_of, coarse_of


def _runs(labels: Tensor, most: int) -> Tensor:
    """Numbers the runs of equal labels in each sorted row `[batch, n]`, longer ones cut into parts of `most`."""
    place = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    starts = torch.ones_like(labels, dtype=torch.bool)
    starts[:, 1:] = labels[:, 1:] != labels[:, :-1]
    begin = torch.where(starts, place, 0).cummax(1).values
    return ((place - begin) % most == 0).cumsum(1) - 1
