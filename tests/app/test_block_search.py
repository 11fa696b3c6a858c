"""The search for block sizes, with a card that takes as long as a formula says, and a clock that is told what that costs."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import pytest

pytest.importorskip("triton")

from nearfield.app.blocks.search import MARGIN, Found, Place, Trial, search
from nearfield.app.deadline import Deadline
from nearfield.cells.triton.candidates import by_promise, distance, neighbours
from nearfield.cells.triton.tiles import TileSizes

PLACE = Place("near_dq", "half", 64, 128)
START = TileSizes(64, 4, 2, 32)
Cost = Callable[[Place, TileSizes], float]


class Clock:
    """Seconds pass when somebody says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class FakeBench:
    """Compiles one trial after the other, in `compiling` seconds each, and times each in `timing` seconds."""

    def __init__(self, cost: Cost, compiling: float = 0.0, timing: float = 0.0) -> None:
        self.cost, self.compiling, self.timing, self.clock = cost, compiling, timing, Clock()
        self.started: list[Trial] = []
        self.timed: list[Trial] = []
        self.elsewhere: list[Trial] = []
        self.broken: set[TileSizes] = set()
        """do not compile"""
        self.too_large: set[TileSizes] = set()
        """compile, but do not fit"""
        self.too_large_elsewhere: set[TileSizes] = set()
        self._queue: deque[Trial] = deque()

    def start(self, trial: Trial) -> None:
        self.started.append(trial)
        self._queue.append(trial)

    def finished(self, seconds: float) -> tuple[Trial, bool] | None:
        if self.compiling > seconds or not self._queue:
            self.clock.now += seconds
            return None
        self.clock.now += self.compiling
        trial = self._queue.popleft()
        return trial, trial.blocks not in self.broken

    def milliseconds(self, trial: Trial) -> float | None:
        self.clock.now += self.timing
        self.timed.append(trial)
        return None if trial.blocks in self.too_large else self.cost(trial.place, trial.blocks)

    def runs(self, trial: Trial) -> bool:
        self.elsewhere.append(trial)
        return trial.blocks not in self.too_large_elsewhere

    def search(self, seconds: float = 1e6, places: tuple[Place, ...] = (PLACE,), at_a_time: int = 3) -> list[Found]:
        starts = {place: (START, self.cost(place, START)) for place in places}
        return search(starts, self, Deadline.after(seconds, self.clock), at_a_time)


def far_from(best: TileSizes) -> Cost:
    """A time that grows by a tenth with every step away from `best`."""
    return lambda place, blocks: 1.0 + 0.1 * distance(place.kernel, blocks, best)


def only(fast: TileSizes, milliseconds: float) -> Cost:
    return lambda _, blocks: milliseconds if blocks == fast else 1.0


NEAR = neighbours("near_dq", START)[0]


@pytest.mark.parametrize(
    "best", [START, NEAR, TileSizes(128, 8, 1, 64), TileSizes(32, 4, 1, 128), TileSizes(16, 8, 4, 16)], ids=str
)
def test_the_fastest_is_found(best: TileSizes) -> None:
    """Also where it is on no list, step by step."""
    bench = FakeBench(far_from(best))
    (found,) = bench.search()
    assert (found.place, found.before, found.after) == (PLACE, START, best)
    assert found.changed == (best != START)
    assert found.milliseconds == pytest.approx(1.0)
    assert found.milliseconds_before == pytest.approx(1.0 + 0.1 * distance("near_dq", START, best))
    first = [trial.blocks for trial in bench.started if not trial.elsewhere]
    assert len(first) == len(set(first))
    assert START not in first


def test_of_two_that_are_fast_the_faster_one_is_taken() -> None:
    """Whichever is timed first; the difference may be smaller than the margin."""
    close = by_promise("near_dq", "half", 64, START)
    for first, second in ((0.90, 0.89), (0.89, 0.90)):
        times = {close[0]: first, close[1]: second}
        (found,) = FakeBench(lambda _, blocks, times=times: times.get(blocks, 1.0)).search()
        assert found.milliseconds == 0.89
        assert times[found.after] == 0.89


@pytest.mark.parametrize(("milliseconds", "taken"), [(1.001 / MARGIN, False), (0.999 / MARGIN, True)])
def test_a_small_difference_changes_nothing(milliseconds: float, taken: bool) -> None:
    bench = FakeBench(only(NEAR, milliseconds))
    (found,) = bench.search()
    assert found.changed == taken
    assert bool(bench.elsewhere) == taken, "nor does it take more time"
    assert 1.01 < MARGIN < 1.1


def test_what_was_fast_once_is_timed_again() -> None:
    seen: dict[TileSizes, int] = {}

    def cost(_: Place, blocks: TileSizes) -> float:
        seen[blocks] = seen.get(blocks, 0) + 1
        return 1.0 if blocks != NEAR else 0.5 if seen[blocks] == 1 else 0.99

    (found,) = FakeBench(cost).search()
    assert seen[NEAR] == 2
    assert not found.changed
    assert found.milliseconds == 1.0


def test_a_card_that_is_faster_for_a_while_changes_nothing() -> None:
    """What was there before is timed again, too."""
    calls = 0

    def cost(_: Place, blocks: TileSizes) -> float:
        nonlocal calls
        calls += 1
        return 1.0 if calls == 1 else 0.5

    (found,) = FakeBench(cost).search()
    assert not found.changed


@pytest.mark.parametrize("how", ["broken", "too_large", "too_large_elsewhere"])
def test_what_does_not_compile_or_fit_is_left_out(how: str) -> None:
    second = TileSizes(128, 8, 1, 64)
    bench = FakeBench(lambda _, blocks: 0.5 if blocks == NEAR else 0.7 if blocks == second else 1.0)
    getattr(bench, how).add(NEAR)
    (found,) = bench.search()
    assert found.after == second
    assert NEAR in [trial.blocks for trial in bench.started]
    assert (NEAR in [trial.blocks for trial in bench.timed]) == (how != "broken")
    assert (NEAR in [trial.blocks for trial in bench.elsewhere]) == (how == "too_large_elsewhere")


def test_nothing_is_taken_that_was_not_tried_elsewhere() -> None:
    bench = FakeBench(far_from(TileSizes(128, 8, 1, 64)))
    (found,) = bench.search()
    assert found.after in [trial.blocks for trial in bench.elsewhere]
    assert all(trial.elsewhere for trial in bench.elsewhere)
    assert not any(trial.elsewhere for trial in bench.timed)


@pytest.mark.parametrize("seconds", [0.0, 0.5, 7.0, 40.0])
def test_it_ends_in_time_with_what_it_has(seconds: float) -> None:
    best = TileSizes(16, 8, 4, 16)
    bench = FakeBench(far_from(best), compiling=1.0, timing=0.25)
    begun = bench.clock.now
    (found,) = bench.search(seconds)
    # What runs when the time is up is timed to its end: two times at most.
    assert bench.clock.now - begun <= seconds + 0.5
    assert found.changed == (seconds >= 7.0)
    assert found.after != best or seconds == 40.0
    if not seconds:
        assert not bench.started
    if found.changed:
        assert found.milliseconds < found.milliseconds_before


def test_what_is_close_comes_first() -> None:
    bench = FakeBench(lambda *_: 1.0)
    bench.search()
    steps = [distance("near_dq", trial.blocks, START) for trial in bench.started]
    assert steps[0] == 1
    assert steps == sorted(steps)
    assert len(steps) > 10


def test_kernels_that_take_most_of_the_time_come_first_and_are_tried_most() -> None:
    short, long = PLACE._replace(kernel="near_fwd"), PLACE._replace(kernel="near_dkv")
    bench = FakeBench(lambda place, _: 4.0 if place == long else 1.0, timing=1.0)
    bench.search(seconds=10, places=(short, long), at_a_time=1)
    tried = [trial.place for trial in bench.started]
    assert tried[0] == long
    assert tried.count(long) >= 3 * tried.count(short) > 0


def test_as_many_are_compiled_at_a_time_as_asked() -> None:
    bench = FakeBench(lambda *_: 1.0)
    waiting = []
    finished = bench.finished

    def counted(seconds: float) -> tuple[Trial, bool] | None:
        waiting.append(len(bench._queue))
        return finished(seconds)

    bench.finished = counted  # type: ignore[method-assign]
    bench.search(at_a_time=4)
    assert waiting[0] == max(waiting) == 4
    assert waiting[-1] == 1, "all of them came back"


def test_a_part_of_the_time_is_a_part_of_what_is_left() -> None:
    clock = Clock()
    deadline = Deadline.after(10, clock)
    clock.now += 4
    half = deadline.part(0.5)
    assert (deadline.left, half.left) == (6, 3)
    clock.now += 4
    assert (deadline.left, half.left) == (2, 0)
