"""Numbers of near keys that are a power of the length."""

from __future__ import annotations

import math


def power(n: int, exponent: float) -> int:
    """n^exponent, rounded up; 3,125^{1/5} is 5, and not 6 for the last bit of a float."""
    return math.ceil(round(n**exponent, 6))
