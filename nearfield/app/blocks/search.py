"""Which block sizes to try next, and which to take."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from nearfield.app.deadline import Deadline
from nearfield.cells.triton.candidates import by_promise
from nearfield.cells.triton.tiles import TileSizes

MARGIN = 1.03
"""Other block sizes must be faster by this factor, so that noise changes nothing."""


class Place(NamedTuple):
    """What has block sizes of its own."""

    kernel: str
    kind: str
    """of dtype, see `measured.KINDS`"""
    dim: int
    cell_size: int


class Trial(NamedTuple):
    place: Place
    blocks: TileSizes
    elsewhere: bool = False
    """whether it is about other passes than those that are timed"""


class Found(NamedTuple):
    place: Place
    before: TileSizes
    after: TileSizes
    milliseconds_before: float
    milliseconds: float

    @property
    def changed(self) -> bool:
        return self.after != self.before


class Bench(Protocol):
    """Compiles and times. A trial is compiled while others are timed."""

    def start(self, trial: Trial) -> None:
        """Begin to compile it."""

    def finished(self, seconds: float) -> tuple[Trial, bool] | None:
        """One that was started, and whether it compiles; None: there is none within this time."""

    def milliseconds(self, trial: Trial) -> float | None:
        """None: it does not fit on the card."""

    def runs(self, trial: Trial) -> bool:
        """Whether it fits elsewhere, too."""


@dataclass
class _State:
    """What is known of a place."""

    start: TileSizes
    milliseconds_before: float
    best: TileSizes
    milliseconds: float
    tried: set[TileSizes] = field(default_factory=set)


def search(
    starts: Mapping[Place, tuple[TileSizes, float]],
    bench: Bench,
    deadline: Deadline,
    at_a_time: int,
    report: Callable[[str], None] = lambda said: None,
) -> list[Found]:
    """The fastest block sizes of each place that were found in time.

    Places that take most of the time are tried most: the next trial is that of the place with the largest time per trial so far,
    and of its sizes the closest to the best. What is faster is tried elsewhere, then timed again next to what was there before,
    and taken if it is faster still.

    Args:
        starts: current block sizes, and their milliseconds.
        at_a_time: how many trials are compiled at a time.
    """
    states = {place: _State(blocks, took, blocks, took, {blocks}) for place, (blocks, took) in starts.items()}
    waiting = 0
    while deadline.left:
        while waiting < at_a_time and (trial := _next(states)) is not None:
            states[trial.place].tried.add(trial.blocks)
            bench.start(trial)
            waiting += 1
        done = bench.finished(deadline.left) if waiting else None
        if done is None:
            break
        waiting -= 1
        trial, compiles = done
        state = states[trial.place]
        if not compiles:
            continue
        report(trial.place.kernel)
        if trial.elsewhere:
            if bench.runs(trial):
                _compare(state, trial, bench)
        elif _is_faster(state, bench.milliseconds(trial)):
            bench.start(trial._replace(elsewhere=True))
            waiting += 1
    return [Found(place, x.start, x.best, x.milliseconds_before, x.milliseconds) for place, x in states.items()]


def _next(states: Mapping[Place, _State]) -> Trial | None:
    for place in sorted(states, key=lambda place: -states[place].milliseconds / len(states[place].tried)):
        state = states[place]
        for blocks in by_promise(place.kernel, place.kind, place.dim, state.best):
            if blocks not in state.tried:
                return Trial(place, blocks)
    return None


def _is_faster(state: _State, took: float | None) -> bool:
    return took is not None and MARGIN * took < state.milliseconds_before and took < state.milliseconds


def _compare(state: _State, trial: Trial, bench: Bench) -> None:
    """Time both again, one after the other: cards are not equally fast all the time."""
    before, after = (bench.milliseconds(Trial(trial.place, blocks)) for blocks in (state.start, trial.blocks))
    if before is None or after is None or MARGIN * after >= before:
        return
    if after / before < state.milliseconds / state.milliseconds_before:
        state.best, state.milliseconds = trial.blocks, after
        state.milliseconds_before = before
