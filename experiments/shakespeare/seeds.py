"""What several seeds say together: a mean with half their range, and whether a difference is larger than what seeds make."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import mean

from experiments.experiment import Verdict, judged
from experiments.words import number, percent, signed

ALONE = 0.02
"""What seeds are taken to make where there is one: it cannot tell."""
MARGIN = 0.01
"""A gap that changes by a percentage point counts as changed, as does an error that changes by 1%, if seeds make no more."""


def made(values: Sequence[float]) -> float:
    """What seeds make of a number: its range over them, from the least to the largest."""
    return max(values) - min(values) if len(values) > 1 else ALONE


def larger(values: Sequence[float], size: float) -> bool | None:
    """Whether the mean is larger than `size`, above or below zero; None: it is closer to that than what seeds make."""
    if any(math.isinf(x) for x in values):
        return True
    beyond = abs(mean(values)) - size
    return True if beyond > made(values) else False if -beyond >= made(values) else None


def direction(values: Sequence[float]) -> int | None:
    """Of a change: 1 up, -1 down, 0 hardly any; None: seeds make more than that."""
    if abs(mean(values)) > max(made(values), MARGIN):
        return 1 if mean(values) > 0 else -1
    return 0 if made(values) <= MARGIN else None


def verdict(holds: Sequence[bool | None]) -> Verdict:
    """With a case that is open, nothing is confirmed or refuted."""
    known = [hold for hold in holds if hold is not None]
    if len(known) == len(holds):
        return judged(known)
    return "partly" if any(known) else "untested"


def rule(fewest: int, most: int) -> str:
    """For comparisons that rest on so many seeds."""
    alone = f"a difference of up to {percent(ALONE)} does not count"
    if most == 1:
        return f"One seed was run, which cannot tell what seeds make: {alone}."
    said = "A difference counts only if its mean over seeds is larger than the range over seeds, from the least to the largest"
    return f"{said}; where one seed was run, {alone}." if fewest == 1 else f"{said}."


def too_close(seeds: int) -> str:
    """Why a case is open."""
    return f"One seed was run, and less than {percent(ALONE)} does not count." if seeds == 1 else "Seeds make more than that."


def counted(seeds: int) -> str:
    return "one seed" if seeds == 1 else f"{seeds} seeds"


def numbers(values: Sequence[float]) -> str:
    """The mean, with half the range over seeds where there are several."""
    return _over(values, number, lambda half: f"{half:.2g}")


def percents(values: Sequence[float]) -> str:
    return _over(values, percent, percent)


def changes(values: Sequence[float]) -> str:
    return _over(values, signed, percent)


def span(values: Sequence[int]) -> str:
    """1,500, or 1,250 to 1,500."""
    low, high = min(values), max(values)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _over(values: Sequence[float], say: Callable[[float], str], say_half: Callable[[float], str]) -> str:
    if len(values) == 1 or not all(math.isfinite(x) for x in values) or max(values) == min(values):
        return say(mean(values))
    return f"{say(mean(values))} ± {say_half(made(values) / 2)}"
