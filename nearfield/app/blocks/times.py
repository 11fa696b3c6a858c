"""What each kernel of a pass takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

from nearfield import _compat
from nearfield.app.blocks.passes import Pass, Setting, ready
from nearfield.cells.triton.candidates import KERNELS
from nearfield.cells.triton.tiles import TileSizes
from nearfield.cells.triton.tuning import trying_all

LENGTH = 32768
"""Keys and queries of the passes that are timed."""
ROUNDS = 2

SYMBOL = {f"_{kernel}": kernel for kernel in KERNELS}


class Timer:
    """Device times by the profiler: kernels are timed inside whole passes, and nothing else on the host matters."""

    def __init__(self, device: torch.device, length: int = LENGTH, rounds: int = ROUNDS) -> None:
        self.device, self.length, self.rounds = device, length, rounds
        self._now: tuple[Setting, list[Callable[[], object]]] | None = None

    def milliseconds(self, setting: Setting, tried: Mapping[str, TileSizes]) -> dict[str, float] | None:
        """Of all kernels of a setting, some of them with other block sizes; None: one of these does not fit."""
        try:
            runs = self._runs(setting)
            with trying_all(tried):
                for run in runs:
                    run()
                torch.cuda.synchronize(self.device)
                with profile(activities=[ProfilerActivity.CUDA]) as trace:
                    for _ in range(self.rounds):
                        for run in runs:
                            run()
                    torch.cuda.synchronize(self.device)
        except Exception as error:
            if not _compat.is_kernel_failure(error):
                raise
            return None
        took = {SYMBOL[event.key]: event.self_device_time_total for event in trace.key_averages() if event.key in SYMBOL}
        return {kernel: microseconds / 1e3 / self.rounds for kernel, microseconds in took.items() if microseconds}

    def runs(self, passes: Sequence[Pass], tried: Mapping[str, TileSizes]) -> bool:
        """Whether passes run with these block sizes."""
        try:
            with trying_all(tried):
                for one in passes:
                    ready(one, self.device)()
                torch.cuda.synchronize(self.device)
        except Exception as error:
            if not _compat.is_kernel_failure(error):
                raise
            return False
        return True

    def _runs(self, setting: Setting) -> list[Callable[[], object]]:
        """The passes of a setting on inputs, which are kept for the next time that the same setting is asked for."""
        if self._now is None or self._now[0] != setting:
            self._now = None  # before the next ones are made: a card may have room for one only
            self._now = setting, [ready(one, self.device) for one in setting.passes(self.length)]
        return self._now[1]
