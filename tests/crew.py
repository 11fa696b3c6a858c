"""Processes that run functions together, as ranks of torch.distributed: started once for many tests."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

PATIENCE = 300
"""Seconds until a test that waits for its ranks fails."""


class Crew:
    """So many processes, each with a group of the first 1, 2, ... of them.

    Args:
        size: how many.
        timeout: seconds after which a collective fails.
    """

    def __init__(self, size: int, timeout: float = 60) -> None:
        self.folder = tempfile.TemporaryDirectory()
        context = multiprocessing.get_context("spawn")
        place = f"file://{Path(self.folder.name) / 'meeting'}"
        self.pipes, self.processes, self.calls = [], [], 0
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, size, place, timeout, there), daemon=True)
            process.start()
            there.close()  # so that the end of the process is the end of the pipe
            self.pipes.append(here)
            self.processes.append(process)

    def start(self, function: Callable[..., Any], *args: Any, ranks: int | None = None) -> None:
        """Call `function(group, *args)` on the first ranks; it has to be one of a module."""
        ranks = len(self.pipes) if ranks is None else ranks
        self.calls += 1
        for pipe in self.pipes[:ranks]:
            pipe.send((self.calls, function, ranks, args))

    def outcome(self, rank: int) -> tuple[bool, Any]:
        """Whether the call succeeded on this rank, and its result, or what was raised, as text."""
        while self.pipes[rank].poll(PATIENCE):
            try:
                call, is_right, found = self.pipes[rank].recv()
            except EOFError:
                return False, f"rank {rank} is gone"
            if call == self.calls:  # and no late answer to an earlier one
                return is_right, found
        return False, f"rank {rank} has not answered for {PATIENCE} s"

    def run(self, function: Callable[..., Any], *args: Any, ranks: int | None = None) -> list[Any]:
        """`function(group, *args)` on the first ranks: the result of each."""
        self.start(function, *args, ranks=ranks)
        outcomes = [self.outcome(rank) for rank in range(len(self.pipes) if ranks is None else ranks)]
        for rank, (is_right, found) in enumerate(outcomes):
            assert is_right, f"on rank {rank}: {found}"
        return [found for _, found in outcomes]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


@cache
def crew() -> Crew:
    """Four ranks, for all tests of this process."""
    made = Crew(4)
    atexit.register(made.close)
    return made


def _serve(rank: int, size: int, place: str, timeout: float, pipe: Connection) -> None:
    os.environ.setdefault("TRITON_INTERPRET", "1")
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    # To start takes as long as it takes, also on a machine that is busy.
    dist.init_process_group("gloo", init_method=place, rank=rank, world_size=size, timeout=timedelta(seconds=PATIENCE))
    groups = {ranks: dist.new_group(range(ranks), timeout=timedelta(seconds=timeout)) for ranks in range(1, size + 1)}
    while True:
        try:
            call, function, ranks, args = pipe.recv()
        except EOFError:
            return
        torch.manual_seed(0)
        try:
            pipe.send((call, True, function(groups[ranks], *args)))
        except BaseException:  # also an interrupt: whoever started the test is told, and the next one can run
            pipe.send((call, False, traceback.format_exc()))
