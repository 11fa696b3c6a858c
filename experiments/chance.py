"""Whether what was counted can be luck."""

from __future__ import annotations

import math

LUCK = 1e-3
"""What is less likely than this is not taken for luck."""


def at_least(count: int, trials: int, share: float) -> float:
    """The probability that `count` trials or more fail, where each fails with probability `share`, in (0, 1)."""

    def exactly(i: int) -> float:
        ways = math.lgamma(trials + 1) - math.lgamma(i + 1) - math.lgamma(trials - i + 1)
        return math.exp(ways + i * math.log(share) + (trials - i) * math.log1p(-share))

    return math.fsum(exactly(i) for i in range(count, trials + 1))
