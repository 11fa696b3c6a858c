"""Time and peak memory of one call under limits, in a process of its own.

The memory limit is the kernel's (RLIMIT_DATA): a call that asks for more fails at once, as it would on a machine that has no
more. Where there is no such limit (not Linux) only the time is limited.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

Prepare = Callable[..., tuple[Callable[[], Any], Callable[[Any], dict[str, Any]]]]
"""Makes inputs and returns the call to be timed, and a function that judges what it returned."""
GIGABYTE = 1 << 30
COMPILING, JUDGING = 60.0, 5.0
"""Seconds that the kernels of a call may take to compile, and that judging its output usually may take."""


@dataclass(frozen=True)
class Rounds:
    """How often a call is timed: `least` times however long it takes, and up to `most` times as long as another one is likely
    to keep their sum within `patience` seconds."""

    most: int = 3
    patience: float = 6.0
    least: int = 1

    def go_on(self, seconds: Sequence[float]) -> bool:
        """Whether a call that took these times is timed once more."""
        return len(seconds) < self.least or (len(seconds) < self.most and sum(seconds) + seconds[-1] <= self.patience)


USUAL = Rounds()


@dataclass(frozen=True)
class Measured:
    status: str
    """"ok", "memory" or "time": what ran out"""
    seconds: list[float] = field(default_factory=list)
    megabytes: float | None = None
    """peak, beyond what was there before the call"""
    judged: dict[str, Any] = field(default_factory=dict)


def here(
    prepare: Prepare,
    *arguments: Any,
    memory_limit: float | None = None,
    step: Callable[[], None] = lambda: None,
    warm_up: bool = False,
    rounds: Rounds = USUAL,
) -> Measured:
    """Measure in this process.

    Args:
        memory_limit: in bytes, for good.
        step: called when the inputs are made, and after each of the calls up to the first that is timed.
        warm_up: the first call is not timed.
    """
    call, judge = prepare(*arguments)
    before = _restart_peak()
    if memory_limit is not None:
        _limit_memory(memory_limit)
    step()
    try:
        output, spent = _timed(call)
        megabytes = _peak() - before
        step()
        judged = judge(output)
        del output  # or the next call had less memory than this one
        seconds = [spent]
        if warm_up:
            seconds = [_timed(call)[1]]
            step()
        while rounds.go_on(seconds):
            seconds.append(_timed(call)[1])
    except (RuntimeError, MemoryError) as error:
        if not _out_of_memory(error):
            raise
        return Measured("memory")
    return Measured("ok", seconds, max(0.0, megabytes), judged)


def apart(
    prepare: Prepare,
    *arguments: Any,
    time_limit: float,
    memory_limit: float,
    warm_up: bool = False,
    rounds: Rounds = USUAL,
    judging: float = JUDGING,
) -> Measured:
    """Measure in a new process, which is ended when the first timed call, or the others on average, take too long.

    Args:
        time_limit: in seconds.
        memory_limit: in gigabytes.
        warm_up: call once before, in as much time again and what it takes to compile kernels.
        judging: seconds that judging its output may take.
    """
    context = multiprocessing.get_context("spawn")
    receive, send = context.Pipe(duplex=False)
    asked = (torch.get_num_threads(), memory_limit, warm_up, rounds, prepare, arguments)
    process = context.Process(target=_serve, args=(send, *asked), daemon=True)
    process.start()
    send.close()
    try:
        receive.recv()  # the inputs are made
        answer = None
        for wait in [time_limit + COMPILING, judging + time_limit] if warm_up else [time_limit]:
            if not receive.poll(wait):
                return Measured("time")
            answer = receive.recv()
            if answer is not None:  # it ended before its time: out of memory
                return answer
        if not receive.poll(judging + rounds.most * time_limit):
            return Measured("time")
        answer = receive.recv()
    except EOFError:
        process.join()
        if process.exitcode == -9:  # the kernel ended it, which it does for memory
            return Measured("memory")
        raise RuntimeError(
            f"the process that measured {arguments} ended with code {process.exitcode}; its message is above"
        ) from None
    finally:
        if process.is_alive():
            process.terminate()
        process.join()
    return answer if answer.status != "ok" or statistics.median(answer.seconds) <= time_limit else Measured("time")


def _serve(
    send: Connection,
    threads: int,
    memory_limit: float,
    warm_up: bool,
    rounds: Rounds,
    prepare: Prepare,
    arguments: tuple[Any, ...],
) -> None:
    torch.set_num_threads(threads)
    limits: dict[str, Any] = {"memory_limit": memory_limit * GIGABYTE, "warm_up": warm_up, "rounds": rounds}
    send.send(here(prepare, *arguments, **limits, step=lambda: send.send(None)))


def _timed(call: Callable[[], Any]) -> tuple[Any, float]:
    if not torch.cuda.is_initialized():
        start = time.perf_counter()
        return call(), time.perf_counter() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    output = call()
    last.record()
    torch.cuda.synchronize()
    return output, first.elapsed_time(last) / 1000


def _restart_peak() -> float:
    """Start the high-water mark anew and return where it starts, in megabytes."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    elif Path("/proc/self/clear_refs").exists():
        # What making the inputs has freed would be used again, and not be counted.
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> float:
    if torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated() / 2**20
    if Path("/proc/self/status").exists():
        return _status("VmHWM") / 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # bytes where there is no /proc


def _limit_memory(extra: float) -> None:
    """Let this process have `extra` bytes more than it has now."""
    if torch.cuda.is_initialized():
        total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_allocated() + extra) / total))
    elif Path("/proc/self/status").exists():
        import resource

        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (int(_status("VmData") * 1024 + extra), hard))


def _status(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1])


def _out_of_memory(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in text or "bad_alloc" in text
