"""The specification of the cells engine: dense, plain torch, one head at a time, differentiable by autograd.

The decisions (which key is in which cell, which cells a row opened, what it drew) come in as plain tensors. The rest is
arithmetic. A row attends to

- near keys, with logit z_j: the sinks, the keys after its last closed segment, and all keys of the cells it opened;
- every cell that it sees and did not open, with the mass m_c of `far_field` and value v_c + X q, where X is the covariance of
  values and keys inside cells, pooled over all cells that the row sees.

Drawn keys correct the far field. Let F be its mass, g_c = m_c / n_c the mass of one key of cell c, and l the number of draws of
a row. A key of cell c is drawn with probability g_c / F, and 1/l sum_t (key_t - cell_t) F / g_c is added to both sums, which
makes them unbiased. The factors F / (l g_c) are part of the plan: gradients do not run through them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearfield.cells.far_field import MOST_SPREAD, MOST_SQUARE, log_boost
from nearfield.kernels.dense import capped


@dataclass(frozen=True)
class CellPlan:
    """The decisions of one head, made before any attention arithmetic. Cells are numbered span by span: see `Spans`."""

    cell_of: Tensor
    """`[span_levels, n]`: the cell of each key in its span of each level; -1: none (it is a sink, or in no span of that level)"""
    opened: Tensor
    """`[blocks, probes]`: the cells whose keys are near for the rows of a block; -1: none. See `blocks_of_rows`."""
    order: Tensor
    """`[rows]`: the positions of rows in the order in which they are cut into blocks, member by member of the group; `[0]`: in
    their own order"""
    drawn: Tensor
    """`[rows, samples]`: the positions of drawn keys; -1: none"""
    log_factor: Tensor
    """`[rows, samples]`: log of F / (l g_c), the factor of a drawn key"""

    def by_row(self, blocks: Tensor) -> CellPlan:
        """The same with what each row has opened: `opened` `[rows, probes]`. `blocks` `[rows]`: the block of each row."""
        return replace(self, opened=self.opened.index_select(0, blocks))


def reference_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    closed: Tensor,
    segment: int,
    plan: CellPlan,
    cells: int,
    keep: tuple[Tensor, Tensor] | None = None,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Output `[rows, value_dim]` and log-normaliser `[rows]` of queries (times scale) `[rows, dim]`.

    Row r sees the first `visible[r]` keys, those before `closed[r]` through their cells. With s closed segments these are the
    cells of one span for each set bit of s: a key of segment g is seen through its cell at the level of the highest bit in which
    g and s differ, or at the largest level if that is lower.
    `plan`: row by row, see `CellPlan.by_row`. `cells`: how many cells there are. `keep`: dropout factors, 0 or 1 / (1 - p), for
    every (row, key) `[rows, n]` and (row, cell) `[rows, cells]`. `softcap`: 0, or the cap of the logits, which is
    linear around the logit of a centroid.
    """
    rows, length = len(queries), len(keys)
    position = torch.arange(length, device=keys.device)
    spans = _sees_through(position, closed, segment, len(plan.cell_of))
    inside = spans & (plan.cell_of >= 0)
    opened = spans & _any_equal(plan.cell_of.reshape(-1), plan.opened).view(rows, *plan.cell_of.shape)
    near = (position < visible[:, None]) & (~inside.any(1) | opened.any(1))
    all_logits = capped(queries @ keys.T, softcap)
    logits = [all_logits.masked_fill(~near, -torch.inf)]
    factors = [torch.ones_like(logits[0])]
    slope = keys.new_ones(rows, cells)
    mean_value, tilt = values[:0], torch.zeros(rows, values.shape[1], dtype=values.dtype, device=values.device)
    if cells:
        # Every key appears once per level of spans.
        each_key, each_value = keys.repeat(len(plan.cell_of), 1), values.repeat(len(plan.cell_of), 1)
        sees = spans.flatten(1)
        cell, cell_of = torch.arange(cells, device=keys.device), plan.cell_of.reshape(-1)
        member = (cell_of[:, None] == cell).to(keys.dtype)
        size = member.sum(0)
        share = member / size.clamp(min=1)
        centroid, mean_value = share.T @ each_key, share.T @ each_value
        off_key, off_value = each_key - member @ centroid, each_value - member @ mean_value
        variance = (share.T @ off_key.square()).clamp(max=MOST_SQUARE)
        mask = (sees.to(keys.dtype) @ member > 0) & ~_any_equal(cell, plan.opened)
        spread = (queries.square().clamp(max=MOST_SQUARE) @ variance.T).clamp(max=MOST_SPREAD)
        middle = queries @ centroid.T
        if softcap:
            slope = torch.cosh(middle / softcap).square().reciprocal()
        log_mass = capped(middle, softcap) + size.clamp(min=1).log() + log_boost(slope.square() * spread)
        logits.append(log_mass.masked_fill(~mask, -torch.inf))
        for edge in closed.unique().tolist():
            pooled = sees[closed == edge][0] & (cell_of >= 0)
            matrix = (off_value * pooled[:, None]).T @ off_key / pooled.sum().clamp(min=1)
            tilt = torch.where((closed == edge)[:, None], queries @ matrix.T, tilt)
        # The factor of a drawn key is subtracted from its cell.
        home = torch.where(spans, plan.cell_of, -1).amax(1).gather(1, plan.drawn.clamp(min=0))
        is_drawn = (plan.drawn >= 0) & (home >= 0)
        share_of = plan.log_factor.exp() * is_drawn / size.clamp(min=1)[home.clamp(min=0)]
        used = torch.zeros(rows, cells, dtype=keys.dtype, device=keys.device).scatter_add(1, home.clamp(min=0), share_of)
        factors.append(1 - used * mask)
    picked = torch.gather(all_logits, 1, plan.drawn.clamp(min=0)) + plan.log_factor
    logits.append(picked.masked_fill(plan.drawn < 0, -torch.inf))
    factors.append(torch.ones_like(picked))
    everything = torch.cat(logits, 1)
    top = everything.detach().amax(1, keepdim=True).clamp(min=torch.finfo(everything.dtype).min)
    mass = (everything - top).exp() * torch.cat(factors, 1)
    total = mass.sum(1, keepdim=True)
    blind = visible == 0
    weight = mass / total.masked_fill(blind[:, None], 1.0)
    lse = (total.masked_fill(blind[:, None], 1.0).log() + top).masked_fill(blind[:, None], -torch.inf)[:, 0]

    key_weight, cell_weight, drawn_weight = weight.split([length, len(mean_value), plan.drawn.shape[1]], 1)
    if keep is not None:
        on_keys, on_cells = keep
        key_weight, cell_weight = key_weight * on_keys, cell_weight * on_cells[:, : len(mean_value)]
        drawn_weight = drawn_weight * on_keys.gather(1, plan.drawn.clamp(min=0))
    output = key_weight @ values + torch.einsum("rt,rtd->rd", drawn_weight, values[plan.drawn.clamp(min=0)])
    tilted = (cell_weight * slope[:, : len(mean_value)]).sum(1, keepdim=True) * tilt
    return output + cell_weight @ mean_value + tilted, lse


def _sees_through(position: Tensor, closed: Tensor, segment: int, levels: int) -> Tensor:
    """`[rows, span_levels, n]`: whether a row sees a key through its cell at a level."""
    before = position < closed[:, None]
    if not segment:
        return before[:, None]
    differ = (position // segment) ^ (closed[:, None] // segment)
    level = (torch.frexp(differ.double()).exponent - 1).clamp(max=levels - 1)
    return before[:, None] & (level[:, None] == torch.arange(levels, device=position.device)[:, None])


def _any_equal(ids: Tensor, chosen: Tensor) -> Tensor:
    """`[rows, len(ids)]`: whether a row's chosen numbers `[rows, k]` include the id (-1 never does)."""
    found = torch.zeros(len(chosen), len(ids), dtype=torch.bool, device=ids.device)
    for column in chosen.T:
        found |= (ids == column[:, None]) & (column >= 0)[:, None]
    return found
