"""Plan: which keys a block of rows attends to and with what weight, decided before any attention arithmetic."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Plan:
    """A weighted set of keys per row: attention is softmax(logits + log_weight) over them.

    A key that is certain to be in the set has weight 1; one that was drawn has one over its inclusion probability, so
    that numerator and denominator of the softmax are unbiased. All tensors are `[batch, rows, width]`.
    """

    ids: Tensor
    """`PADDING` where the row has fewer keys"""
    logits: Tensor
    """-inf where the id is `PADDING`"""
    log_weight: Tensor | None = None
    keep: Tensor | None = None
    """dropout: 0 or 1 / (1 - p), applied to the normalised weights"""
    near: int | None = None
    """how many of the columns are near (weight 1), the others were drawn; None: all"""
    left_out: Tensor | None = None
    """`[batch, rows]`: how many visible keys the drawn ones stand for"""


class Planner(Protocol):
    """Makes the plan of any block of rows, the same one however often it is asked (the backward pass asks again)."""

    def blocks(self) -> Iterable[slice]:
        """Ranges of rows, over all batch entries, that fit into memory one at a time."""
        ...

    def plan(self, block: slice) -> Plan: ...
