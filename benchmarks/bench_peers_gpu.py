"""Speed, error and memory of attention methods side by side on a GPU: causal, bfloat16, batch 1, against SDPA's fastest backend.

python benchmarks/bench_peers_gpu.py --peers FOLDER --captured FOLDER    # everything: results/peers.json, docs/figures/peers.png
python benchmarks/bench_peers_gpu.py --only forward --lengths 131072 --dims 64 --kinds strewn
python benchmarks/bench_peers_gpu.py --minutes 9 --resume                # what is not in the file yet, for nine minutes
python benchmarks/bench_peers_gpu.py --quick                             # tiny sizes, on a CPU too; written only with --out
python benchmarks/bench_peers_gpu.py --plot-only                         # the figure from the saved results

forward            8 heads; time, memory, error and share of keys                    at most 7 minutes on an H200, all lengths
training           8 heads, forward and backward, of those that have gradients       9 minutes
grouped            16 heads of queries for one of keys, which NSA needs              6 minutes
grouped_training   the same with backward                                            9 minutes

These are guesses, without the time that kernels take to compile, once.

Inputs: `strewn` and `runs` are made (peers_inputs.py), `real` are layers that gpu_capture.py has saved, at their own length.
Peers are installed packages, or lie in the folder --peers, whose subfolders are packages or repositories; those that are missing
are named. First each peer has to agree with exact attention when it reads all keys; one that does not is marked. A peer that
fails is written down with its reason, and the others run; if it breaks the card's context, the benchmark starts anew behind it.
Every kind of input is written as soon as it is measured.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import peers_find
import peers_measure
import peers_plot
import torch
from gpu_timing import CUDA, card
from peers_inputs import KINDS, captured, made
from peers_measure import BrokenCard, Entry, Result
from peers_methods import Peer
from peers_others import PEERS
from record import FIGURES, RESULTS, merge, read_sections, show, table
from rich.table import Table

LENGTHS, DIMS, HEADS, ROWS = (32_768, 131_072, 262_144), (64, 128), 8, 512
QUICK_LENGTHS, QUICK_DIMS, QUICK_HEADS, QUICK_ROWS = ((2048,), (64,), 8, 64) if CUDA else ((256,), (16,), 2, 32)
RESTARTS = 16
SELF_TESTS = "self_tests"


class Mode(NamedTuple):
    training: bool
    grouped: bool
    seconds: dict[int, int]
    """of one kind of input with all peers, by the longest length that it holds for; compiling takes as long again at first"""


MODES = {
    "forward": Mode(False, False, {32_768: 12, 131_072: 25, 262_144: 60}),
    "training": Mode(True, False, {32_768: 12, 131_072: 30, 262_144: 90}),
    "grouped": Mode(False, True, {32_768: 10, 131_072: 20, 262_144: 60}),
    "grouped_training": Mode(True, True, {32_768: 10, 131_072: 30, 262_144: 90}),
}


class Task(NamedTuple):
    """One kind of input in one mode."""

    mode: str
    kind: str
    n: int
    dim: int

    @property
    def section(self) -> str:
        return f"{self.mode}/{self.n}/{self.dim}"

    @property
    def seconds(self) -> int:
        known = MODES[self.mode].seconds
        one = next((known[n] for n in sorted(known) if self.n <= n), max(known.values()))
        return 5 * one if self.kind == "real" and not MODES[self.mode].training else one


class Book:
    """The results so far, in the file where there is one."""

    def __init__(self, path: Path | None, about: dict[str, Any]) -> None:
        self._path = path
        self._about = about
        exists = path is not None and path.with_suffix(".json").exists()
        self.sections: dict[str, Any] = read_sections(str(path)) if exists else {}

    def put(self, section: str, part: str, found: Any) -> None:
        """`part` of a section; its other parts stay as they are."""
        self.sections.setdefault(section, {"parts": {}})["parts"][part] = found
        self.sections[section] |= self._about
        if self._path is not None:
            merge(str(self._path), section, self.sections[section])

    def part(self, section: str, part: str) -> dict[str, Any]:
        found: dict[str, Any] = self.sections.get(section, {}).get("parts", {}).get(part, {})
        return found


def main() -> None:
    options = _options()
    if not (CUDA or options.quick or options.plot_only):
        print("skipped: there is no CUDA device (--quick runs small sizes on the CPU)")
        return
    saves = options.plot_only or options.out is not None or not options.quick
    # Absolute: record.py would put a relative path below its own folder.
    path = (options.out or RESULTS).absolute() / "peers"
    path.parent.mkdir(parents=True, exist_ok=True)
    failed: list[str] = [] if options.plot_only else _run(options, path if saves else None)
    if saves and (options.plot_only or path.with_suffix(".json").exists()):
        figures = options.out or FIGURES
        figures.mkdir(parents=True, exist_ok=True)
        peers_plot.plot(read_sections(str(path)), figures)
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=MODES, default=list(MODES), metavar="MODE", help="of " + ", ".join(MODES))
    parser.add_argument("--lengths", nargs="+", type=int, help=f"default: {LENGTHS}; real inputs have their own")
    parser.add_argument("--dims", nargs="+", type=int, help=f"default: {DIMS}; real inputs have their own")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), metavar="KIND", help="of " + ", ".join(KINDS))
    parser.add_argument("--methods", nargs="+", metavar="NAME", help="peers whose names contain one of these")
    parser.add_argument("--peers", type=Path, help="folder in which peers lie that are not installed")
    parser.add_argument("--captured", type=Path, help="folder with real inputs that gpu_capture.py has saved")
    parser.add_argument("--minutes", type=float, help="start nothing that is not expected to end within so many")
    parser.add_argument("--resume", action="store_true", help="leave out what the file has already")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written unless --out says where")
    parser.add_argument("--plot-only", action="store_true", help="draw the figure from the saved results")
    parser.add_argument("--out", type=Path, help="folder for peers.json and peers.png")
    parser.add_argument("--restarts", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(options: argparse.Namespace, path: Path | None) -> list[str]:
    """Measure what is asked for. Returns what failed as a whole; peers that fail are in the results."""
    start = time.monotonic()
    if options.peers is not None:
        peers_find.look_in(options.peers)
    wanted = [peer for peer in PEERS if not options.methods or any(name in peer.name for name in options.methods)]
    peers, missing = peers_find.errors_of((peer.name, peer) for peer in wanted)
    for name, why in missing.items():
        print(f"missing: {name} ({why})")
    book = Book(
        path, {"card": card(), "missing": missing, "sources": _sources(options.peers), "dtype": "bfloat16", "causal": True}
    )
    tasks = _tasks(options)
    print(
        f"{len(tasks)} kinds of input, about {sum(task.seconds for task in tasks) / 60:.0f} minutes, and as long again to compile"
    )
    left: list[str] = []
    failed: list[str] = []
    try:
        _test(peers, {(task.dim, MODES[task.mode].training) for task in tasks}, book, options)
        left, failed = _measure(tasks, peers, book, options, start)
    except BrokenCard as broken:
        if path is None or not broken.results or options.restarts >= RESTARTS:
            return [f"the card's context broke: {broken.results}"]
        print(f"the card's context broke: {', '.join(broken.results)}; starting anew", flush=True)
        more = ("--resume", "--restarts", str(options.restarts + 1))
        minutes = () if options.minutes is None else ("--minutes", str(options.minutes - (time.monotonic() - start) / 60))
        os.execv(sys.executable, [sys.executable, *sys.argv, *more, *minutes])
    if left:
        print(f"not begun within {options.minutes} minutes: {', '.join(left)}; --resume goes on with them")
    return failed


def _sources(folder: Path | None) -> list[str]:
    """What the folder of the peers says about where they come from."""
    path = folder / "README" if folder is not None else None
    return path.read_text(encoding="utf-8").splitlines() if path is not None and path.exists() else []


def _tasks(options: argparse.Namespace) -> list[Task]:
    """The cheap ones first."""
    lengths = options.lengths or (QUICK_LENGTHS if options.quick else LENGTHS)
    dims = options.dims or (QUICK_DIMS if options.quick else DIMS)
    kinds = [kind for kind in options.kinds if kind != "real"]
    found = [Task(mode, kind, n, dim) for n in sorted(lengths) for mode in options.only for dim in dims for kind in kinds]
    if "real" in options.kinds:
        if options.captured is None:
            print("no --captured: real inputs are left out")
        else:
            ((_, inputs),) = captured(options.captured, only=1)
            n, dim = inputs[0].shape[2:]
            found = [Task(mode, "real", n, dim) for mode in options.only if not MODES[mode].grouped] + found
    return found


def _test(peers: dict[str, Peer], cases: set[tuple[int, bool]], book: Book, options: argparse.Namespace) -> None:
    """Test every peer in every case; the results are marked, but nobody is left out except who breaks the card."""
    for dim, training in sorted(cases):
        part = f"{'training' if training else 'forward'}/{dim}"
        found = dict(book.part(SELF_TESTS, part)) if options.resume else {}
        for name, peer in peers.items():
            if name in found or (training and not peer.trains):
                continue
            try:
                found[name] = peers_measure.self_test(peer, dim, training, n=peers_measure.TESTED if CUDA else 256)
            except Exception as error:  # what a peer raises is a finding about it
                found[name] = {"passed": False, "failed": peers_measure.reason(error), "broke": peers_measure.broken()}
            book.put(SELF_TESTS, part, found)
            if found[name].get("broke"):
                raise BrokenCard({name: found[name]})
        off = [f"{name} ({_why(result)})" for name, result in found.items() if not result["passed"]]
        print(
            f"all keys read = exact attention, {part}: {len(found) - len(off)} of {len(found)}; not: {', '.join(off) or 'none'}"
        )


def _why(result: Result) -> str:
    return str(result.get("failed") or f"error {result['error']:.2g}, gradients {result.get('gradient_errors')}")


def _measure(
    tasks: list[Task], peers: dict[str, Peer], book: Book, options: argparse.Namespace, start: float
) -> tuple[list[str], list[str]]:
    """Measure one task after the other. Returns those for which no time was left, and those that failed."""
    failed: list[str] = []
    tried: dict[Any, tuple[str, ...]] = {}
    for number, task in enumerate(tasks):
        left = [f"{task.section} {task.kind}" for task in tasks[number:]]
        if options.minutes is not None and time.monotonic() - start + task.seconds > 60 * options.minutes:
            return left, failed
        entries = _entries(task, peers, book)
        known = book.part(task.section, task.kind) if options.resume else {}
        entries = [entry for entry in entries if entry.label not in known.get("methods", {})]
        if not entries:
            continue
        print(f"{task.section}, {task.kind}: {len(entries)} methods, {time.monotonic() - start:.0f} s so far", flush=True)
        try:
            sdpa, methods, about = _one(task, entries, options, tried)
        except BrokenCard as broken:
            if broken.results:
                methods = known.get("methods", {}) | broken.results
                book.put(task.section, task.kind, {"about": {}, "sdpa": known.get("sdpa"), "methods": methods})
            raise
        except Exception as error:  # such as no memory for the inputs themselves: the next task may have enough
            failed.append(f"{left[0]}: {peers_measure.reason(error)}")
            continue
        finally:
            if CUDA and not peers_measure.broken():
                torch.cuda.empty_cache()
        found = {"about": about, "sdpa": sdpa, "methods": known.get("methods", {}) | methods}
        book.put(task.section, task.kind, found)
        show(tabulate(task, found, _marked(book, task)))
    return [], failed


def _entries(task: Task, peers: dict[str, Peer], book: Book) -> list[Entry]:
    """Every setting of the peers that can do this, but for those who have broken the card in their test."""
    mode = MODES[task.mode]
    part = book.part(SELF_TESTS, f"{'training' if mode.training else 'forward'}/{task.dim}")
    able = {
        name: peer
        for name, peer in peers.items()
        if (peer.trains or not mode.training)
        and (peer.group > 1 or name == "nearfield" if mode.grouped else peer.group == 1)
        and not part.get(name, {}).get("broke")
    }
    return peers_measure.entries_of(able, task.n)


def _one(
    task: Task, entries: list[Entry], options: argparse.Namespace, tried: dict[Any, tuple[str, ...]]
) -> tuple[Result, dict[str, Result], dict[str, Any]]:
    """SDPA, the methods, and what is to be said about the inputs. Of real layers the mean; in training of the first layer."""
    mode = MODES[task.mode]
    rows = QUICK_ROWS if options.quick else ROWS

    def told(label: str) -> None:
        print(f"  {label}", flush=True)

    if task.kind == "real":
        layers = [
            (name, peers_measure.measure(inputs, entries, mode.training, rows, told=told))
            for name, inputs in captured(options.captured, only=1 if mode.training else None)
        ]
        both = [peers_measure.averaged([found[place] for _, found in layers]) for place in range(2)]
        return (
            both[0],
            both[1],
            {"layers": [name for name, _ in layers], "per_layer": [_errors(found) for _, (_, found) in layers]},
        )
    heads, group = (1, 16) if mode.grouped else (QUICK_HEADS if options.quick else HEADS, 1)
    inputs = made(task.kind, task.n, task.dim, heads, group)
    shape = (task.mode, task.dim)
    sdpa, methods = peers_measure.measure(inputs, entries, mode.training, rows, tried.get(shape), told)
    tried[shape] = tuple(sdpa["hopeful"])
    return sdpa, methods, {"heads": [heads * group, heads]}


def _errors(methods: dict[str, Result]) -> dict[str, float]:
    return {name: found["errors"]["mean"] for name, found in methods.items() if "errors" in found}


def _marked(book: Book, task: Task) -> set[str]:
    """Peers that did not pass their test."""
    part = book.part(SELF_TESTS, f"{'training' if MODES[task.mode].training else 'forward'}/{task.dim}")
    return {name for name, result in part.items() if not result["passed"]}


def tabulate(task: Task, found: dict[str, Any], marked: set[str]) -> Table:
    sdpa = found["sdpa"]
    title = f"{task.mode}, {task.n:,} keys, d = {task.dim}, {task.kind}; SDPA: {sdpa['backend']}"
    columns = ("ms", "x SDPA", "error", "over 30%", "share", "memory / SDPA", "first, s")
    rows = table("method", *columns, "note", title=title, words=("method", "note"))
    exact = sdpa.get("errors", {})
    rows.add_row("SDPA", f"{sdpa['ms']:.2f}", "1", *_two(exact), "100%", "1", "", "")
    for name, one in found["methods"].items():
        if "failed" in one:
            rows.add_row(name, *[""] * len(columns), one["failed"][:60])
            continue
        share = "" if one["share"] is None else f"{one['share']:.1%}"
        memory = "" if one["memory_over_sdpa"] is None else f"{one['memory_over_sdpa']:.2f}"
        note = "not exact when it reads all keys" if one["peer"] in marked else ""
        times = f"{one['ms']:.2f}", f"{one['speedup']:.2f}"
        rows.add_row(name, *times, *_two(one.get("errors", {})), share, memory, f"{one['first_call_seconds']:.1f}", note)
    return rows


def _two(errors: dict[str, float]) -> tuple[str, str]:
    return (f"{errors['mean']:.4f}", f"{errors['large']:.1%}") if errors else ("", "")


if __name__ == "__main__":
    main()
