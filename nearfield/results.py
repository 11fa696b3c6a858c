"""What comes back from a method, from a gradient and from a call."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


@dataclass(frozen=True)
class Outcome:
    """What a method returns."""

    output: Tensor
    """`[batch, heads, length, value_dim]`, in any dtype: the caller casts it to that of the inputs"""
    lse: Tensor | None = None
    """`[batch, heads, length]`: log of the softmax normaliser; required if `Call.diagnostics` is set, and with a gradient
    if `Call.return_lse` is"""
    stderr: Tensor | None = None
    """`[batch, heads, length]`: estimated standard error of a row; None: the method estimates none"""
    info: dict[str, Any] = field(default_factory=dict)
    """how it was made; becomes part of `Estimate.info`"""


class Gradients(NamedTuple):
    """Gradients of a loss with respect to the three inputs of attention."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True)
class Audit:
    """Rows recomputed exactly, and what they say about all rows.

    With this `confidence`, at most a fraction `1 - quantile` of all rows has an error above `additive` (or `relative`). This
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
class Samples:
    """The result of `nearfield.sample`: keys drawn from every row's softmax."""

    ids: Tensor
    """`[..., heads, rows, draws]`, int64: the keys; -1 for a row that sees no key, or that sees NaN or inf"""
    looked_at: Tensor
    """`[..., heads, rows]`: m, the keys outside the near set that a draw looked at, summed over the draws; 0 for `dense` rows"""
    dense: Tensor
    """`[..., heads, rows]`, bool: the row was drawn from its full softmax, for which all of its keys were looked at"""
    certified: Tensor
    """`[..., heads, rows]`, bool: the draws follow the softmax exactly, by the bounds of the index or by the given slack"""


@dataclass(frozen=True)
class Estimate:
    """The result of `nearfield.estimate`."""

    output: Tensor
    """`[..., length, value_dim]`: what `attention` returns"""
    lse: Tensor
    """`[..., length]`: log of the (estimated) softmax normaliser; float32, or float64 for float64 inputs"""
    stderr: Tensor | None = None
    """`[..., length]`: estimated standard error of a row, as a norm over the columns; None: the method estimates none.
    It estimates the error and does not bound it."""
    audit: Audit | None = None
    """None: not asked for"""
    info: dict[str, Any] = field(default_factory=dict)
    """how the estimate was made: method, backend, keys per query, and what else the method reports"""
