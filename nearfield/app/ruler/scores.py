"""Scores with intervals, and how they compare with those of exact attention on the same prompts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearfield.app.ruler.record import Key

LEVEL = 1.959964
"""Of a standard normal variable, for 95%."""

GRAIN = 2520
"""Scores are fractions of up to ten things to find; this many parts express all of them."""


@dataclass(frozen=True)
class Score:
    """A mean score from 0 to 100."""

    answers: int
    parts: int
    """tasks at a length that it is the mean of"""
    mean: float
    low: float
    high: float
    """of a 95% interval"""
    loss: float | None
    """mean score of exact attention less that of this way, over prompts that both have answered; None: there are none"""
    p: float | None
    """of a loss or gain at least so large, if neither way were better: the paired test of `sign_flips`"""
    keys: float
    """read by a token of the answer, mean"""
    share: float
    """of all keys there are"""
    reading: float
    writing: float
    """seconds for a prompt and for an answer, mean"""


@dataclass(frozen=True)
class Place:
    """What a score is of; a task or a length of None: all of them, each with the same weight."""

    template: str
    way: str
    length: int | None
    task: str | None


def wilson(mean: float, answers: int) -> tuple[float, float]:
    """A 95% interval for a mean of so many scores in [0, 1].

    Wilson's for a proportion. Scores between 0 and 1 vary less than those that are 0 or 1 and have the same mean, so it holds for
    them too, and is a little wide.
    """
    z = LEVEL**2 / answers
    middle, width = mean + z / 2, LEVEL * math.sqrt(mean * (1 - mean) / answers + z / (4 * answers))
    return max(0.0, (middle - width) / (1 + z)), min(1.0, (middle + width) / (1 + z))


def averaged(parts: Sequence[tuple[float, float, float]]) -> tuple[float, float, float]:
    """Mean, low and high of the mean of independent parts (mean, low, high): each side's distances add up in squares."""
    mean, count = sum(part[0] for part in parts) / len(parts), len(parts)
    below = math.sqrt(sum((middle - low) ** 2 for middle, low, _ in parts)) / count
    above = math.sqrt(sum((high - middle) ** 2 for middle, _, high in parts)) / count
    return mean, mean - below, mean + above


def sign_flips(differences: Sequence[float]) -> float:
    """P(|sum of differences with random signs| >= |sum|), exactly: a paired test that needs no assumption about scores.

    Differences are of scores from 0 to 100. If neither way were better, each difference were as likely with the other sign.
    """
    parts = [round(x / 100 * GRAIN) for x in differences if round(x / 100 * GRAIN)]
    if not parts:
        return 1.0
    unit = math.gcd(*parts)
    steps = [abs(x) // unit for x in parts]
    seen, total = abs(sum(parts)) // unit, sum(steps)
    # chance[i]: of the sum 2 i - total.
    chance = np.zeros(total + 1)
    chance[0], reached = 1.0, 0
    for step in steps:
        grown = np.zeros(total + 1)
        grown[: reached + 1] = chance[: reached + 1] / 2
        grown[step : step + reached + 1] += chance[: reached + 1] / 2
        chance, reached = grown, reached + step
    sums = 2 * np.arange(total + 1) - total
    return min(1.0, float(chance[np.abs(sums) >= seen].sum()))


def summarised(answers: Mapping[Key, Mapping[str, Any]]) -> dict[Place, Score]:
    """Scores by way, length and task, and of all tasks at a length, of a task at all lengths, and of everything."""
    grouped: dict[Place, dict[tuple[int, str], dict[int, Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for key, found in answers.items():
        for length in (key.length, None):
            for task in (key.task, None):
                grouped[Place(key.template, key.way, length, task)][key.length, key.task][key.sample] = found
    scores = {}
    for place, strata in grouped.items():
        exact = grouped.get(Place(place.template, "exact", place.length, place.task), {})
        scores[place] = _score(strata, {} if place.way == "exact" else exact)
    return scores


Strata = Mapping[tuple[int, str], Mapping[int, Mapping[str, Any]]]


def _score(strata: Strata, exact: Strata) -> Score:
    parts, losses, differences = [], [], []
    for which, found in strata.items():
        mean = _mean(one["score"] for one in found.values()) / 100
        parts.append((mean, *wilson(mean, len(found))))
        paired = [exact[which][i]["score"] - one["score"] for i, one in found.items() if which in exact and i in exact[which]]
        if paired:
            losses.append(_mean(paired))
            differences += paired
    every = [one for found in strata.values() for one in found.values()]
    mean, low, high = averaged(parts)
    return Score(
        len(every),
        len(parts),
        100 * mean,
        100 * low,
        100 * high,
        _mean(losses) if losses else None,
        sign_flips(differences) if losses else None,
        _mean(one["keys_read"] for one in every),
        _mean(one["keys_read"] / one["prompt_tokens"] for one in every),
        _mean(one["reading"] for one in every),
        _mean(one["writing"] for one in every),
    )


def _mean(numbers: Iterable[float]) -> float:
    found = list(numbers)
    return sum(found) / len(found)
