"""Shares and distances in words."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from experiments.gradient_descent.select import typical
from experiments.words import percent


def reached(share: float) -> str:
    """Of the fall of the exact descent."""
    return "–" if math.isnan(share) else "diverges" if share == -math.inf else percent(share)


def off(gap: float) -> str:
    """Of the exact descent's loss, in parts of its fall."""
    return "–" if math.isnan(gap) else "diverges" if gap == math.inf else percent(gap)


def between(values: Sequence[float], said: Callable[[float], str]) -> str:
    """Median (smallest to largest)."""
    if not values:
        return "–"
    whole = f" ({said(min(values))} to {said(max(values))})" if len(values) > 1 else ""
    return said(typical(values)) + whole
