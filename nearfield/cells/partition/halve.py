"""Cells cut in two: smaller ones without another k-means over all keys."""

from __future__ import annotations

import torch
from torch import Tensor

POWER_STEPS, LLOYD_STEPS = 3, 2
"""How often the direction in which a cell is widest is improved, and then the two halves."""


def halve(keys: Tensor, cell_of: Tensor, cells: int) -> Tensor:
    """Cell c becomes cells 2c and 2c + 1. Keys `[heads, n, dim]`; `cell_of` `[heads, n]`, -1 where a key is in none, stays -1.

    A cell is cut across the direction in which its keys are spread most, found by power iteration from the coordinate of largest
    variance; then each half takes the keys that are nearer to its mean. Nothing is random. O(n dim) a head. Keys that are all
    alike stay together, and one half is empty.
    """
    found = torch.full_like(cell_of, -1)
    for own, cell, into in zip(keys, cell_of, found, strict=True):
        member = (cell >= 0).nonzero()[:, 0]
        into[member] = _halve_head(own[member], cell[member].long(), cells).to(into.dtype)
    return found


def _halve_head(keys: Tensor, cell: Tensor, cells: int) -> Tensor:
    compute = torch.promote_types(keys.dtype, torch.float32)
    keys = keys.to(compute)

    def summed(x: Tensor) -> Tensor:
        return x.new_zeros(cells, *x.shape[1:]).index_add_(0, cell, x)

    size = torch.bincount(cell, minlength=cells).to(compute)[:, None]
    off = keys - (summed(keys) / size.clamp(min=1))[cell]
    widest = summed(off.square()).argmax(1)
    way = torch.nn.functional.one_hot(widest, keys.shape[1]).to(compute)
    for _ in range(POWER_STEPS):
        way = torch.nn.functional.normalize(summed(off * (off * way[cell]).sum(1, keepdim=True)), dim=1)
    # A key is in the second half where off.way > limit. Deviations from the mean of a cell sum to zero, so the sum over one half
    # is minus that over the other, and tells both means.
    limit = way.new_zeros(cells)
    for _ in range(LLOYD_STEPS):
        second = ((off * way[cell]).sum(1) > limit[cell]).to(compute)[:, None]
        total, count = summed(off * second), summed(second)
        # One mean less the other; nothing where a half is empty.
        share = torch.where((count > 0) & (count < size), 1.0, 0.0)
        first_share, second_share = share / (size - count).clamp(min=1), share / count.clamp(min=1)
        way = total * (first_share + second_share)
        limit = 0.5 * (total.square().sum(1) * (second_share.square() - first_share.square())[:, 0])
    return 2 * cell + ((off * way[cell]).sum(1) > limit[cell])
