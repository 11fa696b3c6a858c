"""What a run is asked for."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS = HERE / "results"
QUICK_RESULTS = HERE / "quick"
DEVICES = ("cpu", "cuda")


def place(results: Path, device: str) -> Path:
    """Where in a folder of results those of a device are: those of a GPU are a folder further down."""
    return results if device == "cpu" else results / device


@dataclass(frozen=True)
class Settings:
    quick: bool = False
    """small sizes, to see that everything runs"""
    seed: int = 0
    device: str = "cpu"
    time_limit: float = 60.0
    """seconds that one timed call may take (efficiency, indices)"""
    memory_limit: float = 8.0
    """gigabytes that one timed call may need beyond its inputs (efficiency, indices); 8 is what the paper's machine had"""
    total_limit: float = math.inf
    """seconds after which no further call or training is begun; the others are left to the next run (indices, shakespeare)"""
    out: Path | None = None
    text: Path | None = None
    """what to train on; None: tiny Shakespeare"""
    model: Path | None = None
    """folder or .gguf of a causal language model to fine-tune as well (gpt2-xl)"""
    jobs: int = 1
    """units at a time, each in a process of its own; what they share makes times meaningless, and none are kept (shakespeare)"""
    began: float = field(default_factory=time.perf_counter, compare=False, repr=False)
    """when the run of an experiment began: its processes share the clock"""

    @property
    def folder(self) -> Path:
        """Where results go. Small ones keep away from the full ones, and those of a GPU from those of a CPU."""
        usual = QUICK_RESULTS if self.quick else RESULTS
        return place(self.out or usual, self.device)

    def is_late(self) -> bool:
        return time.perf_counter() - self.began > self.total_limit

    def identity(self) -> dict[str, Any]:
        """What has to agree for saved results to be those of this run. Limits may change: what they stopped is tried again."""
        return {"quick": self.quick, "seed": self.seed, "device": self.device}
