"""What is shown of the search: a bar with the time that is left, and a table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from nearfield import crossover
from nearfield.app.blocks.compilers import Compilers
from nearfield.app.blocks.find import find
from nearfield.app.blocks.search import Found
from nearfield.app.blocks.times import Timer
from nearfield.app.deadline import Deadline
from nearfield.cells.triton import measured
from nearfield.cells.triton.candidates import RANGES
from nearfield.cells.triton.tiles import TileSizes


def find_blocks(
    console: Console, device: torch.device, dtypes: Sequence[torch.dtype], compilers: Compilers, deadline: Deadline
) -> list[Found]:
    """The fastest block sizes of the kernels. Prints a table, and saves what is faster than before."""
    with bar(console, deadline) as say:
        found = find(dtypes, Timer(device), compilers, deadline, say)
    if found:
        console.print(table_of(found, f"Block sizes, {crossover.place(device)}"))
    if any(x.changed for x in found):
        console.print(f"saved to {measured.cache_file()}", highlight=False, soft_wrap=True)
    else:
        console.print("no block sizes are faster" if found else "no time for block sizes (--minutes gives more)", highlight=False)
    return found


class TimeLeft(ProgressColumn):
    """Goes down by itself: the search says nothing while it waits for a compiler."""

    def __init__(self, deadline: Deadline) -> None:
        super().__init__()
        self.deadline = deadline

    def render(self, task: Task) -> Text:
        return Text(f"{self.deadline.left:.0f} s left")


@contextmanager
def bar(console: Console, deadline: Deadline) -> Iterator[Callable[[str], None]]:
    """Shows the time, and what it is told."""
    total = deadline.left
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeLeft(deadline), console=console) as progress:
        task = progress.add_task("", total=total)
        yield lambda said: progress.update(task, description=said, completed=total - deadline.left)


def table_of(found: Sequence[Found], title: str) -> Table:
    table = Table("kernel", "dtype", "dimension", "cells of", "before", "after", box=SIMPLE_HEAD, title=title)
    for name in ("ms before", "ms after", "speed-up"):
        table.add_column(name, justify="right")
    for x in found:
        kernel, kind, dim, cell_size = x.place
        after = f"-> {words(kernel, x.after)}" if x.changed else "as before"
        times = f"{x.milliseconds_before:.3f}", f"{x.milliseconds:.3f}", f"{x.milliseconds_before / x.milliseconds:.2f}"
        table.add_row(kernel, kind, str(dim), str(cell_size), words(kernel, x.before), after, *times)
    return table


def words(kernel: str, blocks: TileSizes) -> str:
    """`64 rows, 32 keys, 4 warps, 2 stages`: what the kernel reads."""
    return ", ".join(f"{getattr(blocks, field)} {field}" for field in (*RANGES[kernel], "warps", "stages"))
