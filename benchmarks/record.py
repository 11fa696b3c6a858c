"""What every benchmark shares: the environment, timing side by side, peak memory, and where results go."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import queue as queue_module
import statistics
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import nearfield

RESULTS = Path(__file__).parent / "results"
FIGURES = Path(__file__).parent.parent / "docs" / "figures"


def environment() -> dict[str, str | int | None]:
    return {
        "nearfield": nearfield.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": _processor(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor()


def write(name: str, results: Any) -> Path:
    """Save results with their environment as `results/<name>.json`."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"environment": environment(), "results": results}, indent=2) + "\n")
    return path


def read(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())["results"]


def command_line(doc: str | None, name: str, measure: Callable[[bool], Any], plot: Callable[[Any], None] | None = None) -> None:
    """What every benchmark does when it is run: measure, save, draw. `--quick` measures little and saves nothing."""
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
    """Seconds of each function, interleaved, so that a slow spell of the machine falls on all; one untimed round if `warm`."""
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


def peak_memory(task: Callable[..., Callable[[], object]], *arguments: object) -> float:
    """Megabytes that `task(*arguments)()` needs beyond what `task(*arguments)` (its inputs) already holds, in a fresh process."""
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_measure_peak, args=(queue, torch.get_num_threads(), task, arguments))
    process.start()
    while True:
        try:
            megabytes: float = queue.get(timeout=1)
        except queue_module.Empty:
            if process.is_alive():
                continue
            raise MemoryError(f"the process of {task.__name__}{arguments} ended with code {process.exitcode}") from None
        process.join()
        return megabytes


def _measure_peak(queue: Any, threads: int, task: Callable[..., Callable[[], object]], arguments: tuple[object, ...]) -> None:
    torch.set_num_threads(threads)
    call = task(*arguments)
    # Start the high-water mark anew: what came before (imports, making the inputs) does not count.
    Path("/proc/self/clear_refs").write_text("5")
    before = _high_water()
    call()
    queue.put(_high_water() - before)


def _high_water() -> float:
    """Largest resident size so far, in megabytes (Linux)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024
