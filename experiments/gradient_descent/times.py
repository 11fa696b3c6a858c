"""Seconds of a gradient, all estimators in turn: what else the machine does falls on each of them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping

import torch

from experiments.experiment import Row, Rows
from experiments.gradient_descent.descend import point_of, start
from experiments.gradient_descent.estimators import Dice, timed
from experiments.words import middle


def times(count: int, loss: str, rounds: int, seed: int) -> Rows:
    """At the start of a descent. `load`: of the machine before the first round, on average over a minute."""
    load = os.getloadavg()[0]
    inputs, target = start(count, seed)
    _, point = point_of(inputs, loss, target)

    def call(name: str) -> Callable[[], object]:
        estimator = timed(count)[name]
        return lambda: estimator(point, Dice.cast(seed))

    about: Row = {"kind": "time", "N": count, "rounds": rounds, "threads": torch.get_num_threads(), "load": load}
    taken = in_turn({name: call(name) for name in timed(count)}, rounds)
    return [
        {**about, "estimator": name, "seconds": middle(each), "fastest": min(each), "slowest": max(each)}
        for name, each in taken.items()
    ]


def in_turn(calls: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every call in every round, after a round that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            if turn:
                taken[name].append(time.perf_counter() - begin)
    return taken
