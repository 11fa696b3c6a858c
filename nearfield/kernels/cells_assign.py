"""Which key lives in which cell, span by span."""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter

import torch
from torch import Tensor

from nearfield.kernels.cells_plan import CellSettings, Spans, closed_keys
from nearfield.partition.base import Partition
from nearfield.partition.limit import limit_sizes
from nearfield.partition.lloyd import lloyd, means

COARSE_ITERATIONS = 3


def assign(keys: Tensor, visible: Tensor, settings: CellSettings, partition: Partition) -> tuple[Tensor, Tensor]:
    """The fine and the coarse cells of each key of a head `[n, dim]`: `[heights, n]`, -1 where it is in none.

    Keys are grouped span by span, of those that some row sees: nothing about a cell depends on later keys. Coarse cells group the
    centroids of fine ones, and fine cells are numbered coarse cell by coarse cell; no coarse ones with one level.
    """
    length = len(keys)
    fine_of = torch.full((settings.heights, length), -1, dtype=torch.int64, device=keys.device)
    coarse_of = fine_of.clone() if settings.branching else fine_of[:, :0]
    closed = int(closed_keys(visible, settings).max()) if len(visible) else 0
    if closed == 0:
        return fine_of, coarse_of
    size = settings.segment or closed
    spans = Spans(closed // size, settings.heights)
    per_fine, per_coarse = settings.per_segment(size)
    first_fine, first_coarse = spans.edges(per_fine), spans.edges(per_coarse)
    compute = torch.promote_types(keys.dtype, torch.float32)
    for height, group in groupby(spans.all, key=attrgetter("height")):
        own = list(group)
        places = [slice(span.first * size, (span.first + span.segments) * size) for span in own]
        copies = [keys[place].to(compute)[None] for place in places]
        parts = copies[0] if len(copies) == 1 else torch.cat(copies)  # not a copy where it need not be one
        fine, coarse = group_keys(parts, per_fine << height, settings.branching, partition)
        for span, place, cell in zip(own, places, fine, strict=True):
            fine_of[height, place] = cell + first_fine[span.number]
        if coarse is not None:
            for span, place, cell in zip(own, places, coarse, strict=True):
                coarse_of[height, place] = cell + first_coarse[span.number]
    fine_of[:, : settings.sinks] = -1
    coarse_of[:, : settings.sinks] = -1
    return fine_of, coarse_of


def group_keys(parts: Tensor, cells: int, branching: int, partition: Partition) -> tuple[Tensor, Tensor | None]:
    """The fine and coarse cells of the keys of some spans `[spans, length, dim]`, counted from 0 in each span."""
    assigned = limit_sizes(parts, partition.build(parts, cells), cells)
    if not branching:
        return assigned, None
    centroid, _ = means(parts, assigned, parts.new_zeros(len(parts), cells, parts.shape[2]))
    parent = lloyd(centroid, -(-cells // branching), COARSE_ITERATIONS, cells)
    order = parent.argsort(dim=1, stable=True)
    rank = order.argsort(dim=1)
    group = _runs(parent.gather(1, order), 2 * branching)
    assigned = rank.gather(1, assigned)
    return assigned, group.gather(1, assigned)


def _runs(labels: Tensor, most: int) -> Tensor:
    """Numbers the runs of equal labels in each sorted row `[batch, n]`, longer ones cut into parts of `most`."""
    place = torch.arange(labels.shape[1], device=labels.device).expand_as(labels)
    starts = torch.ones_like(labels, dtype=torch.bool)
    starts[:, 1:] = labels[:, 1:] != labels[:, :-1]
    begin = torch.where(starts, place, 0).cummax(1).values
    return ((place - begin) % most == 0).cumsum(1) - 1
