"""Whether what was counted can be luck."""

from __future__ import annotations

import math

LUCK = 1e-3
"""What is less likely than this is not taken for luck."""


def at_least(count: int, trials: int, share: float) -> float:
    """The probability that `count` trials or more fail, where each fails with probability `share`."""
    return math.fsum(math.comb(trials, i) * share**i * (1 - share) ** (trials - i) for i in range(count, trials + 1))
