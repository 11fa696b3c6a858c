"""What the searches of a call took, added up; and a warning where an index was no better than looking at everything."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from nearfield.knn.index.base import BuiltIndex

MOST_SCANS = 0.1
"""Share of the rows that may look at all keys, of those that see more than `least_seen`, before there is a warning."""


class Tally:
    """How many keys rows have looked at, and for how many of those that see more than `least_seen` these were all."""

    def __init__(self, built: BuiltIndex | None) -> None:
        self.least_seen = (BuiltIndex if built is None else built).least_seen
        self.rows = 0
        self._counts: Tensor | None = None
        """keys, rows that see many of them, and those of these rows that looked at all; on the device until they are asked for"""

    def add(self, scored: Tensor, visible: Tensor) -> None:
        """Rows that scored so many of the keys they see; both tensors of the same shape."""
        long = visible > self.least_seen
        counts = torch.stack([torch.minimum(scored, visible).sum(), long.sum(), (long & (scored >= visible)).sum()])
        self.rows += visible.numel()
        self._counts = counts if self._counts is None else self._counts + counts

    def info(self) -> dict[str, float]:
        keys, _, _ = self._read()
        return {"keys_per_query": keys / max(1, self.rows), "full_scans": self._scans()}

    def warn(self, built: BuiltIndex | type[BuiltIndex] | None) -> None:
        """Says so if an index (or one of that kind) that should not has looked at everything for many rows."""
        if built is None or built.scans or (share := self._scans()) <= MOST_SCANS:
            return
        name = (built if isinstance(built, type) else type(built)).__name__
        warnings.warn(
            f"{name} looked at all keys for {share:.0%} of the queries: ExactIndex() does that at less cost. {built.advice}",
            UserWarning,
            stacklevel=2,
        )

    def _read(self) -> tuple[int, int, int]:
        keys, long, scans = (0, 0, 0) if self._counts is None else map(int, self._counts.tolist())
        return keys, long, scans

    def _scans(self) -> float:
        _, long, scans = self._read()
        return scans / max(1, long)
