"""What an attention estimate is: an output, its log-normaliser, what is known of its error, and how it was made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Audit:
    """Rows recomputed exactly, and what they say about all rows.

    With `confidence`, at most a fraction `1 - quantile` of all rows has an error above `additive` (or `relative`). This
    holds for any data and any method, because the audited rows are chosen at random after the estimate was made. It
    bounds the share of bad rows, not every single row.
    """

    rows: int
    """how many rows were recomputed"""
    quantile: float
    confidence: float
    additive: float
    """largest audited ||estimate - exact||, in units of the rms norm of the values"""
    relative: float
    """largest audited ||estimate - exact|| / ||exact||"""
    additive_errors: Tensor
    """`[rows]`"""
    relative_errors: Tensor
    """`[rows]`"""

    def __str__(self) -> str:
        return (
            f"with confidence {self.confidence:.0%}, {self.quantile:.1%} of the rows are within {self.additive:.3g} "
            f"of exact attention (in units of the rms value norm; relative {self.relative:.3g})"
        )


@dataclass(frozen=True)
class Estimate:
    """The result of `nearfield.estimate`."""

    output: Tensor
    """`[..., length, value_dim]`, what `attention` returns"""
    lse: Tensor
    """`[..., length]`, log of the (estimated) softmax normaliser; float32, or float64 for float64 inputs"""
    stderr: Tensor | None = None
    """`[..., length]`, estimated standard error of a row, as a norm over the columns; None where the method has none.
    An estimate of the error, not a bound."""
    audit: Audit | None = None
    info: dict[str, Any] = field(default_factory=dict)
    """how the estimate was made: method, keys per query, and what the method has to say"""
