"""Processes that compile kernels ahead of the one that runs them: what they compile, Triton keeps on disk."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import warnings
from collections.abc import Hashable, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch

from nearfield import _compat
from nearfield.app.blocks.passes import Pass, launches_of
from nearfield.app.deadline import Deadline
from nearfield.cells.triton.tiles import TileSizes
from nearfield.cells.triton.tuning import trying_all

MOST_WORKERS = 16

PARTS = 4
"""All kernels of a pass are that many jobs for each process: some take much longer than others."""


def workers_here() -> int:
    """All cores but one, which times what is compiled."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_WORKERS, cores - 1))


Work = tuple[Pass, dict[str, TileSizes]]
"""A pass, and the block sizes of every kernel in it."""


class Job(NamedTuple):
    """Kernels to compile."""

    work: tuple[Work, ...]
    """all kernels of these passes"""
    kernel: str = ""
    """only this one"""
    part: int = 0
    parts: int = 1
    """of all kernels, every so many"""


def compile_kernels(job: Job) -> bool:
    """Whether all of them compile."""
    launched = []
    for one, blocks in job.work:
        with trying_all(blocks):
            launched += launches_of(one)
    names = list(dict.fromkeys(x.kernel.__name__ for x in launched))
    mine = {f"_{job.kernel}"} if job.kernel else set(names[job.part :: job.parts])
    for x in launched:
        if x.kernel.__name__ not in mine:
            continue
        try:
            x.kernel.jitted.warmup(*x.arguments, grid=x.grid, **x.options)
        except Exception as error:
            if not _compat.is_kernel_failure(error):
                raise
            return False
    return True


class Compilers:
    """Jobs go in under a label, and come out when they are done. Ends its processes when it is left, whatever they do then."""

    def __init__(self, device: torch.device, workers: int) -> None:
        self.workers = workers
        self._pool = multiprocessing.get_context("spawn").Pool(workers, _start, (device.index or 0,))
        self._done: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        self._expected: dict[int, Hashable] = {}
        """labels of what somebody waits for, by the number of the job"""
        self._started = 0

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.terminate()
        self._pool.join()

    def start(self, label: Hashable, job: Job) -> None:
        number = self._started = self._started + 1
        self._expected[number] = label

        def done(result: Any) -> None:
            self._done.put((number, result))

        self._pool.apply_async(compile_kernels, (job,), callback=done, error_callback=done)

    def finished(self, seconds: float) -> tuple[Hashable, bool] | None:
        """One that is done, and whether it compiles; None: nothing was within this time."""
        deadline = Deadline.after(seconds)
        while self._expected:
            try:
                number, result = self._done.get(timeout=max(deadline.left, 1e-3))
            except queue.Empty:
                return None
            if number in self._expected:
                if isinstance(result, BaseException):
                    raise result
                return self._expected.pop(number), result
        return None

    def forget(self) -> None:
        """Nobody waits any longer for what was started."""
        self._expected.clear()

    def compile_all(self, work: Sequence[Work], deadline: Deadline) -> bool:
        """All kernels of these passes, shared out among the processes; whether that was done in time."""
        parts = PARTS * self.workers
        for part in range(parts):
            self.start(part, Job(tuple(work), part=part, parts=parts))
        for _ in range(parts):
            if self.finished(deadline.left) is None:
                self.forget()
                return False
        return True


def _start(device: int) -> None:
    torch.set_num_threads(1)
    # The process that starts these hears of both, and ends them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    # The first card is the current one anyway, and saying so would take memory of it.
    if device:
        torch.cuda.set_device(device)
