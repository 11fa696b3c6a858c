"""The paper's own numbers: MacBook Air, M3, 8 GB; one batch entry, 10 heads, d = 64."""

from __future__ import annotations

from typing import NamedTuple


class Mark(NamedTuple):
    method: str
    n: int
    seconds: float
    then: str = ""
    """what it says of longer inputs"""

    def said(self, where: str = "") -> str:
        """Its time, where, and what then."""
        return f"{self.seconds:,.0f} s{where}" + (f", then {self.then}" if self.then else "")


MARKS = (
    Mark("naive", 20_000, 810.0, "out of memory"),
    Mark("topk-sqrt", 50_000, 4320.0),
    Mark("topk-fourth", 100_000, 2080.0),
)
"""The longest length of each method that it has a time for."""
HANDLED = 1_000_000
"""The length that its text says is handled."""
