"""experiments/isolate.py: one call in a process of its own. Kept apart because that process imports this file."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from experiments import isolate


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
