"""Break an operation off anywhere: at each line or instruction of ours that it executes, or at each operation of PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import nearfield

OURS = str(Path(nearfield.__file__).parent)


class Breaks:
    """Counts points at which an operation can be broken off, and breaks it off at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at, self.count = at, 0
        """None: only count"""

    def point(self, error: BaseException) -> None:
        self.count += 1
        if self.count - 1 == self.at:
            raise error


@contextmanager
def at_line(at: int | None, instructions: bool = False, within: tuple[str, ...] = ("",)) -> Iterator[Breaks]:
    """A KeyboardInterrupt before line number `at` of those executed, or before an instruction, which is where real ones come.

    `within`: only lines of files whose paths in the package begin so.
    """
    breaks, event = Breaks(at), "opcode" if instructions else "line"
    files = tuple(f"{OURS}/{name}" for name in within)

    def local(frame: FrameType, what: str, argument: Any) -> Any:
        if what == event:
            breaks.point(KeyboardInterrupt())
        return local

    def begin(frame: FrameType, what: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(files):
            return None
        frame.f_trace_opcodes = instructions
        return local

    before = sys.gettrace()
    sys.settrace(begin)
    try:
        yield breaks
    finally:
        sys.settrace(before)


def at_instruction(at: int | None) -> Any:
    return at_line(at, instructions=True)


def at_line_of_stores(at: int | None) -> Any:
    """Where what a store holds may change."""
    return at_line(at, within=("cells/cache", "knn/store", "knn/entries", "knn/index/room"))


class _Failing(TorchDispatchMode):
    def __init__(self, breaks: Breaks) -> None:
        super().__init__()
        self.breaks = breaks

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.breaks.point(torch.OutOfMemoryError("out of memory"))
        return func(*args, **(kwargs or {}))


@contextmanager
def at_allocation(at: int | None) -> Iterator[Breaks]:
    """Memory runs out in operation number `at` of PyTorch. Not all of them allocate; each of them might."""
    breaks = Breaks(at)
    with _Failing(breaks):
        yield breaks


Way = Callable[[int | None], Any]
ERRORS = KeyboardInterrupt, torch.OutOfMemoryError


def break_off(way: Way, at: int, operation: Callable[[], Any]) -> bool:
    """Whether it was broken off there. Any other error is passed on."""
    try:
        with way(at):
            operation()
    except ERRORS:
        return True
    return False


def points(way: Way, operation: Callable[[], Any], most: int | None = None) -> list[int]:
    """Where an operation can be broken off: all such points, or `most` of them, spread evenly."""
    with way(None) as breaks:
        operation()
    count = breaks.count
    assert count > 0
    if most is None or count <= most:
        return list(range(count))
    return sorted({i * (count - 1) // (most - 1) for i in range(most)})
