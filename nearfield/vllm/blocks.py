"""Blocks that have just become full are grouped into cells: once, from their own keys alone."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.cells.cache.segments import close_segment
from nearfield.cells.partition import Partition
from nearfield.cells.partition.kmeans import KMeans
from nearfield.vllm.pages import PageLayout, Summary

GROUPED = KMeans(iterations=5)
"""What depends on nothing but the keys of a block: a block may be read by requests that have come after it was written."""


def write_keys(pages: Tensor, layout: PageLayout, key: Tensor, value: Tensor, slots: Tensor) -> None:
    """Put keys and values `[tokens, heads, dim]` at their slots, block * size + place; those at -1 go nowhere."""
    is_real = slots >= 0
    if not bool(is_real.all()):
        slots, key, value = slots[is_real], key[is_real], value[is_real]
    block, place = slots // layout.size, slots % layout.size
    layout.keys(pages)[block, :, place] = key.to(pages.dtype)
    layout.values(pages)[block, :, place] = value.to(pages.dtype)


def full_blocks(slots: Tensor, size: int) -> Tensor:
    """The blocks whose last slot is among these."""
    return slots[(slots >= 0) & (slots % size == size - 1)] // size


def write_cells(pages: Tensor, layout: PageLayout, blocks: Tensor, partition: Partition = GROUPED) -> None:
    """Group the keys of these blocks, and write their cells behind them."""
    if len(blocks):
        for part, found in zip(layout.summaries(pages), summarise(pages[blocks], layout, partition), strict=True):
            part[blocks] = found


def summarise(held: Tensor, layout: PageLayout, partition: Partition = GROUPED) -> Summary:
    """The cells of blocks `[blocks, heads, size, dim + value_dim]`."""
    shape, compute = held.shape[:2], torch.promote_types(held.dtype, torch.float32)
    keys, values = (x.flatten(0, 1).to(compute).contiguous() for x in (layout.keys(held), layout.values(held)))
    outside = torch.zeros((), dtype=torch.bool, device=held.device).expand(keys.shape[:2])
    # A block is grouped alike whatever others there are.
    found = close_segment(keys, values, None, outside, layout.cells, partition, first_outside=0)
    stop = (found.start + found.size.to(found.start.dtype)).to(torch.int16)
    moments = (x.to(torch.bfloat16) for x in (found.centroid, found.variance, found.value))
    return Summary(*(x.unflatten(0, shape) for x in (*moments, stop, found.order.to(torch.uint8))))
