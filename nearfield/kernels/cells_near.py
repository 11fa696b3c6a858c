"""The near field on a CPU: opened cells, met tile by tile."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.kernels.cells_head import Block, Head
from nearfield.kernels.dense import LARGE
from nearfield.kernels.tiles import Stack, products, rows_of_a_tile, stacks

HEADROOM = 30.0
"""How far a logit may exceed a row's reference (in powers of e) before its sums are formed again around a better one."""


def near(head: Head, block: Block, opened: Tensor, ref: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Numerator `[rows, value_dim]`, mass and reference `[rows]` over the keys of the opened cells.

    Sums are formed around `ref`, which should not exceed the largest logit: the logit of an opened centroid never does, and
    usually comes close. Rows for which it was too low are done again around their largest logit.
    """
    height = rows_of_a_tile(opened.numel() / max(1, head.fine.cells))
    numerator, mass, above = _sums(head, block.numbers, opened, ref, height)
    low = ((above > HEADROOM) | (ref.abs() > LARGE)).logical_and_(above > -torch.inf).nonzero()[:, 0]
    if len(low):
        numbers = torch.cat([block.numbers[low], block.numbers[-1:]])
        _, _, top = _sums(head, numbers, opened[low], torch.zeros_like(ref[low]), height)
        ref = ref.index_copy(0, low, top)
        again, again_mass, _ = _sums(head, numbers, opened[low], top, height, apart=True)
        numerator.index_copy_(0, low, again)
        mass.index_copy_(0, low, again_mass)
    return numerator, mass, ref


def _sums(
    head: Head, numbers: Tensor, opened: Tensor, ref: Tensor, height: int, apart: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Numerator and mass around `ref`, and by how much the largest logit exceeds it.

    `apart`: subtract the reference from finished logits, so that the largest of them comes out as exactly 0 whatever its size.
    """
    rows = len(opened)
    numerator = ref.new_zeros(rows + 1, head.values.shape[1])
    mass, top = ref.new_zeros(rows + 1), ref.new_full((rows + 1,), -torch.inf)
    base = torch.cat([-ref, ref.new_zeros(1)])
    for stack in stacks(opened, head.fine.starts, head.keys.shape[1], height):
        row, shape = stack.rows.view(-1), (*stack.rows.shape, -1)
        number = numbers.index_select(0, row)
        keys, values, position = tile_members(head, stack)
        queries = head.queries.index_select(0, number).to(head.compute).view(shape)
        plus = base.index_select(0, row).view(shape)
        logits = products(queries, keys, torch.zeros_like(plus) if apart else plus, head.scale)
        if apart:
            logits.add_(plus)
        if stack.missing is not None:
            logits.masked_fill_(stack.missing[:, None], -torch.inf)
        top.scatter_reduce_(0, row, logits.amax(-1).view(-1), "amax")
        weight = logits.exp_()
        mass.index_add_(0, row, weight.sum(-1).view(-1))
        keep = head.keep(number.view(shape), position[:, None])
        output = torch.bmm(weight if keep is None else weight.mul_(keep), values)
        numerator.index_add_(0, row, output.flatten(0, 1))
    return numerator[:rows], mass[:rows], top[:rows]


def tile_members(head: Head, stack: Stack) -> tuple[Tensor, Tensor, Tensor]:
    """Keys and values of the cells of a stack `[tiles, width, ...]`, and their positions `[tiles, width]`."""
    position = head.fine.order[stack.members]
    keys, values = head.members(position.view(-1))
    return keys.view(*position.shape, -1), values.view(*position.shape, -1), position
