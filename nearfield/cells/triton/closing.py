"""The cells of a closed segment on a GPU: where their keys are, and their moments."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.cells.triton.forward import one_span_layout
from nearfield.cells.triton.moments import covariances, moments_of
from nearfield.kernels import backends
from nearfield.kernels.launch import dense


class SegmentTables(NamedTuple):
    """See `cells.cache.segments.ClosedSegment`."""

    order: Tensor
    start: Tensor
    size: Tensor
    centroid: Tensor
    variance: Tensor
    value: Tensor
    cross: Tensor


def tabulate_segment(keys: Tensor, values: Tensor, cell_of: Tensor, outside: int, cells: int) -> SegmentTables:
    """Of keys `[heads, segment, dim]` in cells `cell_of` `[heads, segment]`, int32. The first `outside` keys are in none: -1."""
    heads, length, _ = keys.shape
    keys, values, layout = dense(keys), dense(values), one_span_layout(length, cells, keys.device)
    cell_of = cell_of[:, None].contiguous()
    with backends.device_guard(keys.device):
        moments = moments_of(keys, values, cell_of, layout)
        cross, pooled, *_ = covariances(keys, values, cell_of, moments, layout)
    # Numbers of cells, and places of keys, continue from head to head.
    inside = length - outside
    starts = moments.starts.view(-1)[: heads * cells + 1].long()
    head = torch.arange(heads, device=keys.device)[:, None]
    first = torch.arange(outside, device=keys.device).expand(heads, -1)
    order = torch.cat([first, moments.order[: heads * inside].view(heads, inside)], 1)
    start = starts[:-1].view(heads, cells) - head * inside + outside
    return SegmentTables(
        order,
        start,
        starts.diff().view(heads, cells),
        moments.centroid,
        moments.low_variance,
        moments.value,
        cross[:, 1] * pooled[:, 1, None, None],
    )
