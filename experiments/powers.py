"""Numbers of near keys that are a power of the length."""

from __future__ import annotations

import math


def power(n: int, exponent: float) -> int:
    """n^exponent, rounded up; 10,000^{1/4} is 10, and not 11 for the last bits of a float."""
    return math.ceil(round(n**exponent, 6))
