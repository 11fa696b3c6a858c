"""What the searches of a call took, added up; and a warning where an index was no better than looking at everything."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.knn.index.base import BuiltIndex

LEAST_SEEN = 1024
"""Rows that see no more keys than that may as well look at all of them."""

MOST_SCANS = 0.1
"""Share of the other rows that may, before there is a warning."""


@dataclass
class Tally:
    """Counts of keys and rows."""

    scored: float = 0.0
    """keys that were looked at, for all rows together"""
    rows: int = 0
    long_rows: int = 0
    """those that see more than `LEAST_SEEN` keys"""
    scans: int = 0
    """those of them that looked at all they see"""

    def add(self, scored: Tensor, visible: Tensor) -> None:
        """Rows that scored so many of the keys they see; both tensors of the same shape."""
        long = visible > LEAST_SEEN
        counts = torch.stack([torch.minimum(scored, visible).sum(), long.sum(), (long & (scored >= visible)).sum()]).tolist()
        self.scored += counts[0]
        self.rows += visible.numel()
        self.long_rows += int(counts[1])
        self.scans += int(counts[2])

    def info(self) -> dict[str, float]:
        return {"keys_per_query": self.scored / max(1, self.rows), "full_scans": self.scans / max(1, self.long_rows)}

    def warn(self, built: BuiltIndex | None) -> None:
        """Says so if an index that should not has looked at everything for many rows."""
        if built is None or built.scans or self.scans <= MOST_SCANS * self.long_rows:
            return
        warnings.warn(
            f"{type(built).__name__} looked at all keys for {self.scans / self.long_rows:.0%} of the queries, which costs more "
            f"than ExactIndex(). {built.advice}",
            UserWarning,
            stacklevel=2,
        )
