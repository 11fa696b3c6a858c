"""The far-field formula of `cells/far_field.py`, in Triton. Nothing else in this folder writes it again.

Logits and masses are to base 2. `first` is q.mu_c and `spread` is u_c, for a tile of rows and cells in either order.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nearfield.cells import far_field
from nearfield.kernels.launch import LOG2E

ROUTE_SPREADS = tl.constexpr(far_field.ROUTE_SPREADS)
MOST_SPREAD = tl.constexpr(far_field.MOST_SPREAD)
MOST_WIDE_SPREAD = tl.constexpr(far_field.ROUTE_SPREADS**2 * far_field.MOST_SPREAD)
MOST_SQUARE = tl.constexpr(far_field.MOST_SQUARE)

VOID = tl.constexpr(-1e30)
"""The score of a cell that must not be opened, or what is added to it. Not -inf: the difference of two of those is NaN."""

MOST_SCORE = tl.constexpr(3e38)
"""Scores beyond this one are cut off: their last bits hold a column, which would make NaN of infinity."""

LEAST_SCORE = tl.constexpr(VOID.value / 2)
"""Cells with a score above this one may be opened."""

NOT_FINITE = tl.constexpr(3e38)
"""In place of log2 n_c where a member of the cell is not finite, so that the cell outweighs everything else in a row."""


@triton.jit
def squares(query, scale, DT: tl.constexpr):
    """(scale q)^2, cut off: their products with variances are spreads."""
    scaled = query.to(tl.float32) * scale
    return tl.minimum(scaled * scaled, MOST_SQUARE).to(DT)


@triton.jit
def cell_moments(query, square, centroid, variance, cell, column, wide, dim, FULL: tl.constexpr, IP: tl.constexpr):
    """q.mu_c and u_c of a tile of cells. FULL: no columns are missing."""
    at = cell[None, :] * dim + column[:, None]
    if FULL:
        mean, var = tl.load(centroid + at), tl.load(variance + at)
    else:
        mean, var = (
            tl.load(centroid + at, mask=wide[:, None], other=0.0),
            tl.load(variance + at, mask=wide[:, None], other=0.0),
        )
    return tl.dot(query, mean, input_precision=IP), tl.dot(square, var, input_precision=IP)


@triton.jit
def cut_off(spread):
    """u_c, from the variance of a cell's logits."""
    return tl.minimum(spread, MOST_SPREAD)


@triton.jit
def cell_score(first, spread, exists):
    """s_c, from q.mu_c times scale; `exists` is 0, or `VOID` where there is no such cell."""
    return first + tl.sqrt(spread) * ROUTE_SPREADS + exists


@triton.jit
def wide_cell_score(first, wide_spread):
    """The same of a cell that exists, from ROUTE_SPREADS^2 u_c. x * rsqrt(x) is faster than sqrt(x)."""
    spread = tl.minimum(wide_spread, MOST_WIDE_SPREAD) + 1e-30
    return first + spread * tl.rsqrt(spread)


@triton.jit
def boost_root(spread):
    """sqrt(b(u))"""
    return 1.0 + 0.25 * cut_off(spread)


@triton.jit
def boost(spread):
    """b(u)"""
    root = boost_root(spread)
    return root * root


@triton.jit
def cell_logit(first, scale, log2_size):
    """log2 of n_c e^{q.mu_c}, divided by 2^x if `log2_size` is log2 n_c - x."""
    return first * (scale * LOG2E) + log2_size


@triton.jit
def cell_mass_roots(logit, spread):
    """m_c / sqrt(b(u_c)), and sqrt(b(u_c)): their product is m_c, and half of the first is d m_c / du_c."""
    root = boost_root(spread)
    return tl.exp2(logit) * root, root


@triton.jit
def log2_cell_mass(logit, spread):
    """log2 m_c"""
    return logit + 2.0 * tl.log2(boost_root(spread))


@triton.jit
def boost_backward(root_grad, spread):
    """The gradient of u_c, from the first of `cell_mass_roots` times the gradient of m_c; 0 where u_c was cut off."""
    return tl.where(spread < MOST_SPREAD, 0.5 * root_grad, 0.0)
