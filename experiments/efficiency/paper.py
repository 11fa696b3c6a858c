"""The paper's own numbers: MacBook Air, M3, 8 GB; one batch entry, 10 heads, d = 64."""

from __future__ import annotations

from typing import NamedTuple


class Mark(NamedTuple):
    method: str
    n: int
    seconds: float
    then: str
    """what the paper says of the next length"""


MARKS = (
    Mark("naive", 20_000, 810.0, "out of memory"),
    Mark("topk-sqrt", 50_000, 4320.0, "out of memory"),
    Mark("topk-fourth", 100_000, 2080.0, ""),
)
"""The last length of each method, read off its figure."""
