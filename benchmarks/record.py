"""What all benchmarks share: timing side by side, peak memory, progress, tables, and where results go."""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import queue as queue_module
import re
import statistics
import time
from collections.abc import Callable, Collection, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from torch.profiler import ProfilerActivity, profile

from nearfield.app.environment import environment

T = TypeVar("T")

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parent.parent / "docs" / "figures"


def write(name: str, results: Any) -> Path:
    """Save results with their environment as `results/<name>.json`."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(compact({"environment": environment(), "results": results}))
    return path


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def merge(name: str, section: str, results: Any) -> Path:
    """Save one section of `results/<name>.json` with its own environment; the other sections stay as they are."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    sections = json.loads(path.read_text()) if path.exists() else {}
    sections[section] = {"environment": environment(), "results": results}
    path.write_text(compact(sections))
    return path


def compact(results: Any) -> str:
    """Indented, with lists of numbers on one line."""
    text = json.dumps(results, indent=2)
    return (
        re.sub(r"\[[-+\d.eE,\s]+\]", lambda found: re.sub(r"\s+", " ", found[0]).replace("[ ", "[").replace(" ]", "]"), text)
        + "\n"
    )


def read_sections(name: str) -> dict[str, Any]:
    """The results of each section that `merge` has saved."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        raise SystemExit(f"{path} does not exist yet: measure before drawing")
    return {section: saved["results"] for section, saved in json.loads(path.read_text()).items()}


def each(items: Collection[T], describe: Callable[[T], str]) -> Iterator[T]:
    """The items one by one, with a progress bar that describes the current one."""
    columns = (BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, disable=not items) as progress:
        bar = progress.add_task("", total=len(items))
        for item in items:
            progress.update(bar, description=describe(item))
            yield item
            progress.advance(bar)
        progress.update(bar, description="")


def table(*titles: str, title: str | None = None, words: Collection[str] = ()) -> Table:
    """A table of numbers; the columns named in `words` are aligned left."""
    columns = [Column(name, justify="left" if name in words else "right") for name in titles]
    return Table(*columns, title=title, box=SIMPLE_HEAD, pad_edge=False)


def show(found: Table) -> None:
    """Print a table in full: a narrow terminal wraps its lines, and rich does not cut its numbers."""
    console = Console()
    console.width = max(console.width, 150)
    console.print(found)


def command_line(doc: str | None, name: str, measure: Callable[[bool], Any], plot: Callable[[Any], None] | None = None) -> None:
    """Run a benchmark: measure, save, draw. `--quick` measures little and saves nothing."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    parser.add_argument("--plot-only", action="store_true", help="draw the figure from the saved results")
    arguments = parser.parse_args()
    if not arguments.plot_only:
        results = measure(arguments.quick)
        if arguments.quick:
            return
        print("written:", write(name, results))
    if plot is not None:
        FIGURES.mkdir(parents=True, exist_ok=True)
        plot(read(name))


def side_by_side(functions: dict[str, Callable[[], object]], rounds: int, warm: bool = True) -> dict[str, list[float]]:
    """Seconds of each function, in turn, so that a slow spell of the machine hits all of them; one untimed round if `warm`."""
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for function in functions.values() if warm else ():
        function()
    for _ in range(rounds):
        for name, function in functions.items():
            start = time.perf_counter()
            function()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def median_ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over rounds of ours / theirs."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def exponent(sizes: list[int], seconds: list[float]) -> float:
    """Slope of log seconds against log n, least squares."""
    x, y = [math.log(n) for n in sizes], [math.log(s) for s in seconds]
    mean = statistics.fmean(x)
    return sum((a - mean) * b for a, b in zip(x, y, strict=True)) / sum((a - mean) ** 2 for a in x)


def peak_memory(task: Callable[..., Callable[[], object]], *arguments: object) -> float:
    """Megabytes that `task(*arguments)()` needs, beyond the inputs that `task(*arguments)` has made, in a fresh process."""
    return in_fresh_process(_peak_of, task, *arguments)


def peak_allocated(call: Callable[[], object]) -> float:
    """Most megabytes that torch's tensors took while `call()` ran, its result included: exact, unlike the size of the heap."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        result = call()
    assert recorded.profiler is not None
    changes = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    del result
    return max(accumulate((event.nbytes() for event in changes), initial=0)) / 2**20


def in_fresh_process(function: Callable[..., T], *arguments: object) -> T:
    """`function(*arguments)`, computed in a new process with as many threads as this one. Both must be picklable."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_answer, args=(queue, torch.get_num_threads(), function, arguments))
    process.start()
    while True:
        alive = process.is_alive()  # before the queue, where the last answer of a process stays after its end
        try:
            answer: T = queue.get(timeout=1)
        except queue_module.Empty:
            if alive:
                continue
            names = (function.__name__, *(getattr(argument, "__name__", argument) for argument in arguments))
            raise MemoryError(f"the process of {names} ended with code {process.exitcode}") from None
        process.join()
        return answer


def _answer(queue: Any, threads: int, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(threads)
    queue.put(function(*arguments))


def _peak_of(task: Callable[..., Callable[[], object]], *arguments: object) -> float:
    call = task(*arguments)
    before = restart_high_water()
    call()
    return high_water() - before


def restart_high_water() -> float:
    """Reset the high-water mark, so that imports and inputs do not count. Returns where it starts."""
    Path("/proc/self/clear_refs").write_text("5")
    return high_water()


def high_water() -> float:
    """Largest resident size so far, in megabytes (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
