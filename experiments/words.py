"""Numbers as the report writes them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence

ALIKE = 0.05
"""Times that differ by less count as the same."""
NOT_FINITE = "not finite"


def middle(values: Iterable[float]) -> float:
    return statistics.median(values)


def percent(x: float) -> str:
    """Two digits that count: 12%, 1.2%, 0.0012%."""
    if not math.isfinite(x):
        return NOT_FINITE
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
    if x is not None and not math.isfinite(x):
        return NOT_FINITE
    return "–" if x is None else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def fixed(x: float, digits: int = 2) -> str:
    return f"{x:.{digits}f}" if math.isfinite(x) else NOT_FINITE


def signed(x: float) -> str:
    """A change: +1.5%, −12%."""
    return (("+" if x >= 0 else "−") if math.isfinite(x) else "") + percent(abs(x))


def finite(x: float | None) -> float:
    """A number that was saved: those that are not finite were saved as none, and are larger than all others."""
    return math.inf if x is None else x


def change(new: float, old: float) -> float:
    """By how much a number has grown: 0.05 is 5%. Not finite where either is not."""
    return new / old - 1 if math.isfinite(old) else math.nan


def faster(seconds: float, other: float) -> bool:
    """Whether a time is shorter by more than counts as the same."""
    return other / seconds - 1 >= ALIKE


def listed(words: Sequence[str]) -> str:
    """a, b and c"""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else "none"


def sentence(text: str) -> str:
    """With a capital at its beginning."""
    return text[:1].upper() + text[1:]


def as_it_is(text: str) -> str:
    """A cell of a table that keeps its lines and is not marked up: it ends with one."""
    return text.strip("\n") + "\n"
