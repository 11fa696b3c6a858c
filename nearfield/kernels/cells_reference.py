"""The specification of the cells engine: dense, plain torch, one head at a time, differentiable by autograd.

What was decided (which key lives in which cell, which cells a row opened, what it drew) comes in as plain tensors; everything
else is arithmetic. A row attends to

- near keys, with logit z_j: the sinks, the keys after its last closed segment, and all keys of the cells it opened;
- every cell that it sees and did not open, with mass n_c e^{z(mu_c)} (1 + u_c / 4)^2 and value v_c + X q, where
  u_c = sum_i q_i^2 var_{c,i} and X is the covariance of values and keys inside cells, pooled over the segments the row sees
  (a Gaussian cell would have e^{u_c / 2}, which agrees to second order and runs away where a cell is not Gaussian);
- with two levels: coarse cells in the same way, or, of those it unfolded, their fine cells.

Drawn keys correct the far field: with F its mass, g_c the mass of one key by its cell, key j drawn with probability g_c / F and l
draws per row, both sums get + 1/l sum_t (key_t - cell_t) F / g_c, which makes them unbiased. The factors F / (l g_c) are part of
the plan: gradients do not run through them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.kernels.cells_plan import MOST_SPREAD, MOST_SQUARE, CellPlan


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    closed: Tensor,
    segment: int,
    plan: CellPlan,
    cells: tuple[int, int],
    keep: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Output `[rows, value_dim]` and log-normaliser `[rows]` of queries (times scale) `[rows, dim]`.

    Row r sees the first `visible[r]` keys, those before `closed[r]` through their cells: of s closed segments those of the spans
    that the bits of s name, so a key of segment g through its cell at the height of the first bit in which g and s differ, or the
    largest height there is.
    `keep`: dropout factors, 0 or 1 / (1 - p), for every (row, key) `[rows, n]` and (row, cell) `[rows, cells + coarse cells]`.
    `cells`: how many fine and coarse cells there are.
    """
    rows, length = len(queries), len(keys)
    position = torch.arange(length, device=keys.device)
    spans = _through(position, closed, segment, len(plan.cell_of))
    inside = spans & (plan.cell_of >= 0)
    opened = spans & _any_equal(plan.cell_of.reshape(-1), plan.opened).view(rows, *plan.cell_of.shape)
    near = (position < visible[:, None]) & (~inside.any(1) | opened.any(1))
    logit = (queries @ keys.T).masked_fill(~near, -torch.inf)

    levels = [(plan.cell_of, plan.opened)]
    if plan.unfolded.shape[1]:
        levels.append((plan.coarse_of, plan.unfolded))
    logits, tables, tilts, factors = [logit], [], [], []
    # A key is there once for each height.
    each_key, each_value = keys.repeat(len(plan.cell_of), 1), values.repeat(len(plan.cell_of), 1)
    sees = spans.flatten(1)
    for level, (of_height, taken) in enumerate(levels):
        if cells[level] == 0:
            continue
        cell = torch.arange(cells[level], device=keys.device)
        cell_of = of_height.reshape(-1)
        member = (cell_of[:, None] == cell).to(keys.dtype)
        size = member.sum(0)
        share = member / size.clamp(min=1)
        centroid, value = share.T @ each_key, share.T @ each_value
        off_key, off_value = each_key - member @ centroid, each_value - member @ value
        variance = (share.T @ off_key.square()).clamp(max=MOST_SQUARE)
        mask = (sees.to(keys.dtype) @ member > 0) & ~_any_equal(cell, taken)
        if len(levels) == 2 and level == 0:
            # Only the fine cells of unfolded coarse ones stand for themselves.
            parent = torch.full((len(cell),), -1, device=keys.device).scatter_reduce(
                0, cell_of.clamp(min=0), plan.coarse_of.reshape(-1), "amax"
            )
            mask = mask & _any_equal(parent, plan.unfolded)
        spread = (queries.square().clamp(max=MOST_SQUARE) @ variance.T).clamp(max=MOST_SPREAD)
        second_order = queries @ centroid.T + size.clamp(min=1).log() + 2 * torch.log1p(spread / 4)
        logits.append(second_order.masked_fill(~mask, -torch.inf))
        tables.append(value)
        tilt = torch.zeros(rows, values.shape[1], dtype=values.dtype, device=values.device)
        for edge in closed.unique().tolist():
            pooled = sees[closed == edge][0] & (cell_of >= 0)
            matrix = (off_value * pooled[:, None]).T @ off_key / pooled.sum().clamp(min=1)
            tilt = torch.where((closed == edge)[:, None], queries @ matrix.T, tilt)
        tilts.append(tilt)
        # A drawn key takes its factor away from the cell it stands for.
        home = torch.where(spans, of_height, -1).amax(1).gather(1, plan.drawn.clamp(min=0))
        stands = (plan.drawn >= 0) & (home >= 0)
        share_of = plan.log_factor.exp() * stands / size.clamp(min=1)[home.clamp(min=0)]
        used = torch.zeros(rows, len(cell), dtype=keys.dtype, device=keys.device).scatter_add(1, home.clamp(min=0), share_of)
        factors.append(1 - used * mask)
    key_factor = torch.ones_like(logit)
    picked = torch.gather(queries @ keys.T, 1, plan.drawn.clamp(min=0)) + plan.log_factor
    picked = picked.masked_fill(plan.drawn < 0, -torch.inf)
    logits.append(picked)
    everything = torch.cat(logits, 1)
    top = everything.detach().amax(1, keepdim=True).clamp(min=torch.finfo(everything.dtype).min)
    mass = (everything - top).exp() * torch.cat([key_factor, *factors, torch.ones_like(picked)], 1)
    total = mass.sum(1, keepdim=True)
    blind = visible == 0
    weight = mass / total.masked_fill(blind[:, None], 1.0)
    lse = (total.masked_fill(blind[:, None], 1.0).log() + top).masked_fill(blind[:, None], -torch.inf)[:, 0]

    parts = weight.split([x.shape[1] for x in logits], 1)
    drawn_weight = parts[-1]
    if keep is not None:
        on_keys, on_cells = keep
        kept = (on_keys, *on_cells.split([x.shape[1] for x in logits[1:-1]], 1))
        parts = tuple(part * factor for part, factor in zip(parts[:-1], kept, strict=True))
        drawn_weight = drawn_weight * on_keys.gather(1, plan.drawn.clamp(min=0))
    else:
        parts = parts[:-1]
    output = parts[0] @ values + torch.einsum("rt,rtd->rd", drawn_weight, values[plan.drawn.clamp(min=0)])
    for part, value, tilt in zip(parts[1:], tables, tilts, strict=True):
        output = output + part @ value + part.sum(1, keepdim=True) * tilt
    return output, lse


def _through(position: Tensor, closed: Tensor, segment: int, heights: int) -> Tensor:
    """`[rows, heights, n]`: whether a row sees a key through its cell at a height."""
    before = position < closed[:, None]
    if not segment:
        return before[:, None]
    differ = (position // segment) ^ (closed[:, None] // segment)
    height = (torch.frexp(differ.double()).exponent - 1).clamp(max=heights - 1)
    return before[:, None] & (height[:, None] == torch.arange(heights, device=position.device)[:, None])


def _any_equal(ids: Tensor, chosen: Tensor) -> Tensor:
    """`[rows, len(ids)]`: whether a row's chosen numbers `[rows, k]` include the id (-1 never does)."""
    found = torch.zeros(len(chosen), len(ids), dtype=torch.bool, device=ids.device)
    for column in chosen.T:
        found |= (ids == column[:, None]) & (column >= 0)[:, None]
    return found
