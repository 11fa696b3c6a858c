"""The cheapest setting of each layer, together as good as a tolerance asks for: predicted from errors, decided by perplexity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

TRIALS = 7
"""Mixtures whose perplexity is measured, at most."""


@dataclass(frozen=True)
class Mixture:
    """A rung of the ladder for each layer."""

    rungs: tuple[int, ...]
    """per layer, an index into the ladder; -1: exact"""
    keys: float
    """read per query, mean over the layers that can be replaced"""
    predicted: float
    """excess of the loss, up to a factor that is the same for all mixtures"""


@dataclass(frozen=True)
class Trial:
    """A mixture, and what it did."""

    mixture: Mixture
    excess: float
    """of perplexity, in the worst text"""


@dataclass(frozen=True)
class Ladder:
    """What each rung costs and spoils in each layer.

    The effect of a rung is the squared error that it makes in a layer times how much the loss suffers from errors there. Effects
    of layers are taken to add up, and of rungs only those on the lower convex hull of (keys, effect) are used: so there is one
    best order in which to make layers cheaper, by the effect that a saved key has.
    """

    effects: Tensor
    """`[rungs, layers]`; NaN where a layer cannot be replaced"""
    keys: Tensor
    """`[rungs, layers]`, read per query; NaN likewise"""
    all_keys: float
    """that exact attention reads"""

    def mixture(self, rungs: Sequence[int]) -> Mixture:
        """What it costs and what it should do."""
        served = [layer for layer in range(self.keys.shape[1]) if bool(self.keys[:, layer].isfinite().any())]
        points = [self._point(layer, rungs[layer]) for layer in served]
        return Mixture(tuple(rungs), sum(keys for keys, _ in points) / max(1, len(served)), sum(effect for _, effect in points))

    def mixtures(self) -> list[Mixture]:
        """From exact attention in all layers to the cheapest rung in all, one layer at a time."""
        layers = self.keys.shape[1]
        moves = []
        for layer in range(layers):
            hull = self._hull(layer)
            for place, (before, after) in enumerate(pairwise(hull)):
                (keys, effect), (fewer, more) = self._point(layer, before), self._point(layer, after)
                moves.append(((more - effect) / (keys - fewer), place, layer, after))
        rungs = [-1] * layers
        found = [self.mixture(rungs)]
        for _, _, layer, rung in sorted(moves):
            rungs[layer] = rung
            found.append(self.mixture(rungs))
        return found

    def _point(self, layer: int, rung: int) -> tuple[float, float]:
        return (self.all_keys, 0.0) if rung < 0 else (float(self.keys[rung, layer]), float(self.effects[rung, layer]))

    def _hull(self, layer: int) -> list[int]:
        """Rungs from exact to the cheapest, such that each step costs more per saved key than the one before."""
        usable = [rung for rung in range(len(self.keys)) if self._point(layer, rung)[0] < self.all_keys]
        hull = [-1]
        for rung in sorted(usable, key=lambda rung: self._point(layer, rung), reverse=True):
            while len(hull) > 1 and self._slope(layer, hull[-2], hull[-1]) >= self._slope(layer, hull[-2], rung):
                hull.pop()
            hull.append(rung)
        return hull

    def _slope(self, layer: int, one: int, other: int) -> float:
        (keys, effect), (fewer, more) = self._point(layer, one), self._point(layer, other)
        return (more - effect) / (keys - fewer) if keys > fewer else float("inf")


def choose(
    ladder: Ladder,
    tolerance: float,
    verify: Callable[[tuple[int, ...]], float],
    known: Sequence[Trial] = (),
    trials: int = TRIALS,
) -> tuple[Trial, list[Trial]]:
    """The cheapest mixture that was seen to stay within `tolerance`, and all that were tried.

    Predictions put mixtures in an order; how far to go perplexity decides. What is between a mixture that passed and one that did
    not is tried where the predictions, scaled to what has been measured so far, meet the tolerance. Exact attention in all layers
    always passes, and so do layers that are all alike (`known`) if they did.

    Args:
        verify: the excess of a mixture in the worst text.
    """
    path = ladder.mixtures()
    done = [Trial(path[0], 0.0), *known]
    good, bad = 0, len(path)
    for trial in range(trials):
        if bad - good <= 1:
            break
        guess = _guess(path, done, tolerance)
        # Every other time half of what is left, so that poor predictions cost a few passes and no more.
        middle = min(max(guess, good + 1), bad - 1) if trial % 2 == 0 else (good + bad) // 2
        done.append(Trial(path[middle], verify(path[middle].rungs)))
        good, bad = (middle, bad) if done[-1].excess <= tolerance else (good, middle)
    return min((trial for trial in done if trial.excess <= tolerance), key=lambda trial: trial.mixture.keys), done


def _guess(path: Sequence[Mixture], done: Sequence[Trial], tolerance: float) -> int:
    """The cheapest mixture whose prediction, scaled, is within tolerance; the scale is that of the trial closest to tolerance."""
    told = [trial for trial in done if trial.excess > 0.0 and trial.mixture.predicted > 0.0]
    closest = min(told, key=lambda trial: abs(trial.excess - tolerance), default=None)
    scale = 1.0 if closest is None else closest.excess / closest.mixture.predicted
    return max(place for place, mixture in enumerate(path) if place == 0 or scale * mixture.predicted <= tolerance)
