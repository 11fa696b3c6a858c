"""Numbers as the report writes them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence


def middle(values: Iterable[float]) -> float:
    return statistics.median(values)


def percent(x: float) -> str:
    """Two digits that count: 12%, 1.2%, 0.0012%."""
    return f"{100 * x:.0f}%" if abs(x) >= 0.0995 else f"{float(f'{100 * x:.2g}'):g}%"


def seconds(x: float) -> str:
    return f"{x:,.0f} s" if x >= 10 else f"{x:.2g} s" if x >= 0.1 else f"{1000 * x:.2g} ms"


def megabytes(x: float) -> str:
    return f"{x / 1024:.1f} GB" if x >= 1024 else f"{x:.0f} MB"


def times(x: float) -> str:
    """A factor: 12x, 1.2x."""
    return f"{x:,.0f}x" if x >= 9.95 else f"{x:.2g}x"


def number(x: float | None) -> str:
    """Three digits; a dash where there is none."""
    return "–" if x is None else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def listed(words: Sequence[str]) -> str:
    """a, b and c"""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "none"
