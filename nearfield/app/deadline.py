"""How much time is left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Deadline:
    end: float
    clock: Callable[[], float] = time.monotonic

    @staticmethod
    def after(seconds: float, clock: Callable[[], float] = time.monotonic) -> Deadline:
        return Deadline(clock() + seconds, clock)

    @property
    def left(self) -> float:
        """Seconds; none below zero."""
        return max(0.0, self.end - self.clock())

    def part(self, share: float) -> Deadline:
        """A share of what is left, from now on."""
        return Deadline.after(share * self.left, self.clock)
