"""experiments/isolate.py: one call in a process of its own. Kept apart because that process imports this file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import isolate
from experiments.isolate import Rounds


def needs(size: int, seconds: float) -> tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]:
    """A call that takes memory (bytes) and time."""

    def call() -> int:
        held = torch.ones(size // 4)
        time.sleep(seconds)
        return held.numel()

    return call, lambda count: {"count": count}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is limited on Linux only")
def test_a_call_is_measured_and_stopped_in_a_process_of_its_own() -> None:
    found = isolate.apart(needs, 1 << 26, 0.0, time_limit=20.0, memory_limit=1.0)
    assert found.status == "ok"
    assert found.judged == {"count": 1 << 24}
    assert 60 <= (found.megabytes or 0) <= 80
    assert isolate.apart(needs, 1 << 30, 0.0, time_limit=20.0, memory_limit=0.5).status == "memory"
    assert isolate.apart(needs, 1 << 10, 60.0, time_limit=0.1, memory_limit=0.5).status == "time"
    began = time.perf_counter()
    assert isolate.apart(needs, 1 << 10, 60.0, time_limit=0.1, memory_limit=0.5, rounds=Rounds(3, 600.0)).status == "time"
    assert time.perf_counter() - began < 30.0  # more rounds are no more patience with the first


def frees_before(pieces: int) -> tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]:
    """A call that takes as many pieces of 64 kB as making its inputs has freed."""

    def take() -> list[torch.Tensor]:
        return [torch.ones(1 << 14) for _ in range(pieces)]

    take()
    return take, lambda held: {"count": len(held)}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peaks are those of Linux")
def test_what_was_freed_before_a_call_counts_when_it_is_used_again() -> None:
    assert 60 <= (isolate.here(frees_before, 1024).megabytes or 0) <= 80


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is limited on Linux only")
def test_a_call_that_is_warmed_up_is_stopped_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolate, "COMPILING", 0.5)
    for size, seconds, status in (
        (1 << 10, 0.0, "ok"),
        (1 << 30, 0.0, "memory"),
        (1 << 10, 60.0, "time"),
        (1 << 10, 0.4, "time"),
    ):
        found = isolate.apart(needs, size, seconds, time_limit=0.2, memory_limit=0.5, warm_up=True)
        assert found.status == status


class Clock:
    """Calls that take so many seconds, one after the other."""

    def __init__(self, *spent: float) -> None:
        self.spent = list(spent)
        self.calls = 0

    def timed(self, call: Callable[[], Any]) -> tuple[Any, float]:
        self.calls += 1
        return call(), self.spent[self.calls - 1]


@pytest.mark.parametrize(
    ("spent", "warm_up", "counted"),
    [
        ((1.0, 3.0, 2.0, 1.5, 1.0), False, [1.0, 3.0, 2.0, 1.5]),  # no more than asked for
        ((12.0, 12.0), False, [12.0, 12.0]),  # a third would be too much
        ((16.0,), False, [16.0]),  # longer than half of the patience
        ((90.0, 1.0, 1.0, 1.0, 1.0), True, [1.0, 1.0, 1.0, 1.0]),  # the first is not counted
        ((1.0, 16.0), True, [16.0]),
    ],
)
def test_calls_are_timed_several_times_within_reason(
    spent: tuple[float, ...], warm_up: bool, counted: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, steps = Clock(*spent), list[int]()
    monkeypatch.setattr(isolate, "_timed", clock.timed)
    found = isolate.here(needs, 1 << 10, 0.0, warm_up=warm_up, rounds=Rounds(4, 30.0), step=lambda: steps.append(clock.calls))
    assert found.seconds == counted
    assert steps == ([0, 1, 2] if warm_up else [0, 1])


@pytest.mark.parametrize(("spent", "again"), [((100.0,), True), ((100.0, 90.0), True), ((100.0, 90.0, 1.0), False)])
def test_long_calls_are_timed_as_often_as_asked_for(spent: tuple[float, ...], again: bool) -> None:
    assert Rounds(5, 30.0, least=3).go_on(spent) == again
