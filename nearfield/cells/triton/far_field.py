"""The far-field formula, in Triton: the score, the mass and the derivative of a closed cell."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def closed_segments(visible, segment, window, segments, CAUSAL: tl.constexpr):
    """How many segments a row that sees `visible` keys sees through cells."""
    if CAUSAL:
        own = (visible - 1) // segment
        return tl.where(visible > 0, tl.minimum(tl.maximum(own - window, 0), segments), 0)
    else:
        return tl.where(visible > 0, 1, 0)


@triton.jit
def squares_of(query, scale, SPREADS: tl.constexpr, MOST_SQ: tl.constexpr, DT: tl.constexpr):
    """(spreads * scale * q)^2: its product with variances is the square of what a score adds to q.mu."""
    scaled = query.to(tl.float32) * (scale * SPREADS)
    return tl.minimum(scaled * scaled, MOST_SQ).to(DT)


@triton.jit
def cell_moments(query, square, centroid, variance, cell, real, column, wide, dim, IP: tl.constexpr):
    """q.mu and the squared spread of a tile of cells."""
    load = real[None, :] & wide[:, None]
    mean = tl.load(centroid + cell[None, :] * dim + column[:, None], mask=load, other=0.0)
    spread = tl.load(variance + cell[None, :] * dim + column[:, None], mask=load, other=0.0)
    return tl.dot(query, mean, input_precision=IP), tl.dot(square, spread, input_precision=IP)


VOID = -1e30
"""Added to the score of a cell that is not to be opened."""
