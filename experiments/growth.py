"""How time and memory grow with the length: by a fit to what was measured, and for the next length."""

from __future__ import annotations

import math
from typing import NamedTuple

from experiments.experiment import Row, Rows

FLOORS = {"seconds": 0.01, "megabytes": 10.0}
"""Fits begin after the last length whose call takes less: fixed costs, as of starting kernels, would weigh too much."""
STUDENT = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45)
"""Standard errors that 95% of all fits are off at most, by the number of lengths beyond two: there are at most 8."""
POWERS = {"seconds": (1.0, 2.0), "megabytes": (0.0, 2.0)}
"""Every method reads all keys and none does more than score all pairs; memory may be that of a block, whatever the length."""
SUBQUADRATIC = 1.75
"""Half-way from the 3/2 of the paper's theorem to 2: an exponent below this, with its margin, counts as sub-quadratic."""


class Fit(NamedTuple):
    """A power law, by least squares of logarithms."""

    exponent: float
    margin: float
    """either way, with 95% confidence"""
    last: Row
    """the longest length of those fitted"""
    what: str = "seconds"

    def __str__(self) -> str:
        return f"n^{{{self.exponent:.2f} ± {self.margin:.2f}}}"

    def at(self, n: int) -> float:
        """Beyond the last length, and from what was measured there: on a bent line that is nearer than the fitted one."""
        least, most = POWERS[self.what]
        return self.last[self.what] * (n / self.last["n"]) ** min(most, max(least, self.exponent))


def fitted(rows: Rows, what: str = "seconds") -> Fit | None:
    """Seconds, or megabytes, of one method against its lengths, in their order; none where fewer than three are long enough to
    count."""
    rows = [row for row in rows if row["status"] == "ok"]
    short = [i for i, row in enumerate(rows) if row[what] < FLOORS[what]]
    rows = rows[short[-1] + 1 :] if short else rows
    if len(rows) < 3:
        return None
    x, y = [math.log(row["n"]) for row in rows], [math.log(row[what]) for row in rows]
    middle, height = sum(x) / len(x), sum(y) / len(y)
    width = sum((a - middle) ** 2 for a in x)
    exponent = sum((a - middle) * (b - height) for a, b in zip(x, y, strict=True)) / width
    left = sum((b - height - exponent * (a - middle)) ** 2 for a, b in zip(x, y, strict=True))
    free = len(x) - 2
    return Fit(exponent, STUDENT[free - 1] * math.sqrt(left / free / width), rows[-1], what)


def extrapolated(before: Rows, n: int, what: str, sure: float = 0.0) -> float | None:
    """The next value by the power law through the last two lengths that ran. Where there is but one, time is taken as quadratic;
    memory is not guessed, for a call that asks for too much fails at once.

    A method that was tried and stopped at a shorter length will not get further: infinity.

    Args:
        sure: the part of the value that every key is known to add, as the output does to memory; the power is that of the rest.
    """
    ran = [row for row in before if row["status"] == "ok"]
    name = "memory" if what == "megabytes" else "time"
    if any(row["status"] == name and row["tried"] for row in before):
        return math.inf
    if not ran or (what == "megabytes" and len(ran) == 1):
        return None
    rest, power = max(ran[-1][what] - sure * ran[-1]["n"], 0.0), 2.0
    if len(ran) > 1:
        shorter = max(ran[-2][what] - sure * ran[-2]["n"], 1e-9)
        power = math.log(max(rest, 1e-9) / shorter) / math.log(ran[-1]["n"] / ran[-2]["n"])
        least, most = POWERS[what]
        power = min(most, max(least, power))
    return sure * n + rest * (n / ran[-1]["n"]) ** power


def is_below(fit: Fit) -> bool | None:
    """Whether an exponent is sub-quadratic, True, or quadratic, False; None where its margin leaves it open, or excludes both."""
    low, high = fit.exponent - fit.margin, fit.exponent + fit.margin
    if high < SUBQUADRATIC:
        return True
    return False if low >= SUBQUADRATIC and high >= 2 else None
