"""Far keys drawn from closed cells: they make both sums of the far field unbiased, and give a standard error."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.cells.far_field import finite
from nearfield.cells.moments import SeenCells
from nearfield.cells.torch.head import Head, RowBlock
from nearfield.kernels.dense import capped
from nearfield.sampling import hashed_uniform


@dataclass(frozen=True)
class ClosedCells:
    """The cells that some rows see, with their masses: 0 for those that a row has opened."""

    seen: SeenCells
    weight: Tensor
    """`[rows, cells]`: m_c e^-top"""
    top: Tensor
    """`[rows]`"""
    tilt: Tensor
    """`[rows, value_dim]`: X q, which is added to every value"""
    keep: Tensor | None
    """`[rows, cells]`: dropout factors"""
    slope: Tensor | None = None
    """`[rows, cells]`: by how much less X q counts under a soft cap; None: there is none"""

    def numerator(self, weight: Tensor) -> Tensor:
        """The sum of weight times value over the cells of each row, after dropout: `[rows, value_dim]`."""
        weight = weight if self.keep is None else weight * self.keep
        tilted = weight if self.slope is None else weight * self.slope
        return (tilted.sum(1, keepdim=True) * self.tilt).addmm_(weight, self.seen.value)


class Draws:
    """The far keys that one block of rows draws.

    A key is drawn with probability g_c / F: its cell in proportion to the cell's mass, then the key uniformly inside it. So one
    draw estimates the mass of the far field by F e^z / g_c, and its numerator by that of the cells plus
    F (e^z v / g_c - value of c).
    """

    def __init__(self, head: Head, block: RowBlock) -> None:
        self.head, self.block = head, block
        samples, like = head.sizes.samples, head.table.centroid
        self.drawn = torch.full((len(block), samples), -1, dtype=torch.int64, device=like.device)
        self.log_factor = like.new_full((len(block), samples), -torch.inf)
        self.log_mass = like.new_full((len(block),), -torch.inf)
        """log F"""
        self.log_share = torch.full_like(self.log_factor, -torch.inf)
        """log of F e^z / (l g_c)"""
        self.value = like.new_zeros(len(block), samples, head.values.shape[1])
        """the values of drawn keys, after dropout"""
        self.stand_in = torch.zeros_like(self.value)
        """the values of their cells, after dropout"""

    def correct(self, rows: slice, cells: ClosedCells) -> tuple[Tensor, Tensor, Tensor]:
        """Draw keys for some rows. Returns numerator, reference and mass of the far field with the correction."""
        head, samples, table = self.head, self.drawn.shape[1], self.head.table
        queries, numbers = self.block.scaled(rows), self.block.rows[rows]
        top, weight = cells.top, cells.weight
        cumulative = weight.double().cumsum(1)
        mass = cumulative[:, -1]
        some = (mass > 0)[:, None]
        if not bool(some.any()):
            return torch.zeros_like(self.value[rows, 0]), top, torch.zeros_like(top)
        draw = torch.arange(samples, device=numbers.device)
        counters = (numbers + head.first_row)[:, None]
        point = (1.0 - hashed_uniform(head.seed, counters, -1 - draw)) * mass[:, None]
        last = (weight.shape[1] - 1 - weight.flip(1).gt(0).int().argmax(1))[:, None]
        column = torch.minimum(torch.searchsorted(cumulative, point), last)
        cell = cells.seen.ids[column]
        tilt = cells.tilt[:, None] if cells.slope is None else cells.tilt[:, None] * cells.slope.gather(1, column)[..., None]
        stand_in = table.value[cell] + tilt
        if cells.keep is not None:
            stand_in = stand_in * cells.keep.gather(1, column)[..., None]
        numerator = cells.numerator(weight)
        size = table.size[cell].long()
        step = hashed_uniform(head.seed, counters, -1 - samples - draw)
        inside = (step * size).long().clamp(max=(size - 1).clamp(min=0))
        drawn = table.order[torch.where(some, table.starts[cell] + inside, 0)]

        log_mass = mass.log().to(top.dtype) + top
        log_key = (weight.gather(1, column) / size.clamp(min=1)).log() + top[:, None]
        z = capped(torch.einsum("rd,rtd->rt", queries, head.keys[drawn].to(head.compute)), head.softcap)
        log_factor = (log_mass[:, None] - log_key - math.log(samples)).masked_fill(~some, -torch.inf)
        log_share = z + log_factor
        value = head.values[drawn].to(head.compute)
        keep = head.keep(numbers[:, None], drawn)
        value = value if keep is None else value * keep[..., None]
        self.drawn[rows] = drawn.masked_fill(~some, -1)
        self.log_factor[rows], self.log_mass[rows], self.log_share[rows] = log_factor, log_mass, log_share
        self.value[rows], self.stand_in[rows] = value, stand_in
        # A drawn key may weigh far more than its cell was estimated to. So sums are formed around the largest term.
        ref = torch.maximum(top, log_share.amax(1))
        share = (log_share - finite(ref)[:, None]).exp_()
        left = numerator - mass.to(top.dtype)[:, None] * stand_in.mean(1)
        numerator = left * (top - finite(ref)).exp_()[:, None] + torch.einsum("rt,rtd->rd", share, value)
        return numerator.masked_fill(~some, 0.0), ref, share.sum(1)

    def stderr(self, output: Tensor, lse: Tensor) -> Tensor:
        """Standard error of a row by the delta method, as a norm over the columns.

        It is the spread over the draws of F/Z ((e^z v / g - value of c) - O (e^z / g - 1)).
        """
        samples = self.drawn.shape[1]
        of_key = samples * (self.log_share - finite(lse)[:, None]).exp()
        of_cell = (self.log_mass - finite(lse)).exp()
        off_key, off_cell = self.value - output[:, None], self.stand_in - output[:, None]
        term = of_key[..., None] * off_key - of_cell[:, None, None] * off_cell
        return (term.var(1).sum(-1) / samples).sqrt()
