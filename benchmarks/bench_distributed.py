"""Keys that are shared out over ranks: prompts, training and steps of a cache, on the processes of one machine.

python benchmarks/bench_distributed.py                             # as this machine has cores; writes results/distributed.json
python benchmarks/bench_distributed.py --minutes 9                 # ends in time; the same again goes on from there
python benchmarks/bench_distributed.py --section steps --lengths 1048576 --ranks 1 8 --out /tmp/found
python benchmarks/bench_distributed.py --ranks 8 4 2 1 --turns 1   # measured in this order, each once
python benchmarks/bench_distributed.py --device cuda --ranks 1     # NCCL with one rank: the same code, and a profile
python benchmarks/bench_distributed.py --show                      # tables of what was measured
python benchmarks/bench_distributed.py --quick                     # small sizes, nothing written

Each case (a section, what attends, a length, a number of ranks) is a job of its own: processes with some threads each that talk
over gloo. Its result is written when it is there, with the machine, and a case that is written already is not run again. With
--minutes a call ends in time: a job that would go on for longer is ended. If it had the whole call to itself, that is a result.

Inputs are `synthetic.make`'s clusters; each rank makes all of them and keeps its own. A time is that of the slowest rank, the
median of several turns. Bytes are those that a rank has sent (`Ranks.sent`); beside them stand, by formula, those of ring
attention and of a plain all-gather, whose backward pass need not gather again, as all keys and values were kept. torch's own
`context_parallel` is tried beside ours; where it does not run, its error is noted.

Efficiency is the time of one rank over R times that of R ranks (or of as few as were measured, and their number); that of CPU is
of the time of processors, which on a machine that others use as well tells how much more there is to do. A step is compared with
an ideal: all ranks at once, each with a store of its own that has its share of keys and opens its share of cells, and nothing is
exchanged.

The profile, on GPUs, is of training with cells: how long streams other than that of arithmetic were busy (exchanges), and for
what part of that time arithmetic went on.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import record
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import nearfield as nf
from nearfield.cells.cache import CellStore
from nearfield.distributed import Ranks, ShardedStore, shard

NAME = "distributed"
DIM = 64
HEADS = {"cpu": 2, "cuda": 8}
"""Of queries, and as many of keys."""
STEP_HEADS, STEP_KV_HEADS = 8, 2
STEPS, TURNS = 20, 3
ENOUGH = 60
"""After so many seconds, no more turns."""
MOST_EXACT = {"prompts": 262_144, "training": 65_536}
"""Up to so many keys, exact attention too: its time grows with the square of the length."""
SECTIONS = ("prompts", "training", "steps", "profile")
CORES = os.cpu_count() or 1
THREADS = 2 if CORES >= 16 else 1
RANKS = tuple(ranks for ranks in (1, 2, 4, 8) if ranks * THREADS <= CORES)
LENGTHS = (262_144, 1_048_576) if CORES >= 16 else (65_536,)


class Job(NamedTuple):
    """What all ranks of a job measure."""

    section: str
    method: str
    """"cells", "exact" or "torch", its own context_parallel"""
    n: int
    ranks: int
    threads: int
    device: str
    trace: str = ""
    """where to write the profile"""
    turns: int = TURNS

    @property
    def key(self) -> str:
        ranks = f"{self.ranks}x{self.threads}" if self.device == "cpu" else f"{self.ranks} {self.device}"
        return f"{self.section}/{self.method}/{self.n}/{ranks}"


class Times(NamedTuple):
    """Of several turns, each of the slowest rank."""

    seconds: list[float]
    cpu_seconds: list[float]
    """of all threads of the rank: it counts no time in which others had the core, or in which the rank waited for others"""


def timed(call: Callable[[], Any], ranks: Ranks, turns: int, device: str) -> Times:
    """Of each turn, until the slowest rank is done."""
    found = Times([], [])
    while len(found.seconds) < turns and sum(found.seconds) < ENOUGH:
        slowest(ranks, 0.0)  # all begin together
        start, busy = time.perf_counter(), time.process_time()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds, cpu_seconds = slowest(ranks, time.perf_counter() - start, time.process_time() - busy)
        found.seconds.append(seconds)
        found.cpu_seconds.append(cpu_seconds)
    return found


def slowest(ranks: Ranks, *numbers: float) -> list[float]:
    """The largest of those of all ranks, which wait for each other."""
    found = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX, group=ranks.group)
    return found.tolist()


def inputs(family: str, n: int, heads: int, kv_heads: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    query, key, value = (x.to(device) for x in nf.synthetic.make(family, 1, heads, n, DIM, kv_heads=kv_heads, dtype=dtype))
    return query, key, value


def pass_of(job: Job, ranks: Ranks) -> Callable[[int | None], None]:
    """A forward pass, or a forward and a backward pass, of this rank's share; of its first rows alone where a number is given."""
    trains, heads = job.section != "prompts", HEADS[job.device]
    own = [shard(x, ranks, 2).contiguous().requires_grad_(trains) for x in inputs("clustered", job.n, heads, heads, job.device)]
    method: nf.Method = nf.Cells() if job.method == "cells" else nf.Exact()

    def run(rows: int | None = None) -> None:
        output = nf.attention(*(x[:, :, :rows] for x in own), is_causal=True, method=method, mesh=ranks)
        if trains:
            output.sum().backward()
            for x in own:
                x.grad = None

    return run


def of_prompt(job: Job, ranks: Ranks) -> dict[str, Any]:
    """Times and bytes of a prompt, or of a step of training."""
    if job.method == "torch":
        return torchs_own(job, ranks)
    run = pass_of(job, ranks)
    run(min(1024, job.n // ranks.size))  # what is loaded and compiled at a first call
    ranks.sent.clear()
    times = timed(partial(run, None), ranks, job.turns, job.device)
    return of_each({job.method: times}) | {"sent": {job.method: by_turn(ranks, len(times.seconds))}}


def of_each(times: Mapping[str, Times]) -> dict[str, Any]:
    """What was timed, by name."""
    return {what: {name: getattr(own, what) for name, own in times.items()} for what in Times._fields}


def by_turn(ranks: Ranks, turns: int) -> dict[str, int]:
    """Bytes that this rank has sent, by what they were."""
    return {what: count // turns for what, count in ranks.sent.items() if count}


def torchs_own(job: Job, ranks: Ranks) -> dict[str, Any]:
    """torch's `context_parallel` with as many tokens, or why it does not run."""
    from torch.distributed.device_mesh import DeviceMesh

    trains, heads = job.section != "prompts", HEADS[job.device]
    whole = [*inputs("clustered", job.n, heads, heads, job.device)]
    try:
        from torch.distributed.tensor.experimental import context_parallel

        mesh = DeviceMesh.from_group(ranks.group, job.device)
        with context_parallel(mesh, buffers=whole, buffer_seq_dims=[2, 2, 2]):
            own = [x.detach().requires_grad_(trains) for x in whole]

            def run() -> None:
                output = F.scaled_dot_product_attention(*own, is_causal=True)
                if trains:
                    output.sum().backward()

            times = timed(run, ranks, job.turns, job.device)
    except Exception as error:  # whatever it is: that is the result
        return {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}
    return of_each({"torch": times}) | {"sent": {}}


def of_steps(job: Job, ranks: Ranks) -> dict[str, Any]:
    """Steps of a cache, chosen by all ranks together and by each for itself; and the ideal."""
    # Keys that are alike come one after the other, so that cutting them in blocks makes good cells, quickly.
    query, key, value = inputs("local", job.n, STEP_HEADS, STEP_KV_HEADS, job.device)
    query = query[:, :, -1:].clone()  # the others take room
    found: dict[str, Any] = {"sent": {}}
    times: dict[str, Times] = {}
    for balance in ("global", "local"):
        store = ShardedStore(nf.Cells(partition=nf.Blocks()), ranks, balance=balance)
        store.append(key, value)
        store.close()
        ranks.sent.clear()
        times[balance] = steps_of(store, query, key, value, ranks, job.device)
        found["sent"][balance] = by_turn(ranks, STEPS + 1)
        found["cells"], found["probes"], found["held"] = store.cells, store.probes, store.held
        del store
    first = job.n * ranks.rank // ranks.size
    share = slice(first, job.n * (ranks.rank + 1) // ranks.size)
    alone = nf.Cells(partition=nf.Blocks(), probes=max(1, found["probes"] // ranks.size))
    own = CellStore(alone, group_from=0)
    own.append(key[:, :, share], value[:, :, share])
    own.close()
    times["ideal"] = steps_of(own, query, key, value, ranks, job.device)
    return of_each(times) | found


def steps_of(store: CellStore, query: Tensor, key: Tensor, value: Tensor, ranks: Ranks, device: str) -> Times:
    """Of each step; the first one, which closes what is left to close, is not counted."""

    def step() -> None:
        store.append(key[:, :, -1:], value[:, :, -1:])
        store.attend(query[:, :, -1:])

    seconds, cpu_seconds = timed(step, ranks, STEPS + 1, device)
    return Times(seconds[1:], cpu_seconds[1:])


def of_profile(job: Job, ranks: Ranks) -> dict[str, Any]:
    """What exchanges of a step of training take on a GPU, and how much of that time there is arithmetic too."""
    from torch.profiler import ProfilerActivity, profile

    run = pass_of(job, ranks)
    for _ in range(2):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        trace = job.trace or f"{folder}/trace.json"
        recorded.export_chrome_trace(trace)
        return {"overlap": overlap(streams_of(Path(trace)))}


def streams_of(trace: Path) -> dict[int, list[tuple[int, int]]]:
    """When each stream of a GPU began and ended to do something, in nanoseconds, by a trace of torch's profiler."""
    text = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    found: dict[int, list[tuple[int, int]]] = {}
    for event in json.loads(text)["traceEvents"]:
        # Annotations, such as those of NCCL, are on streams too, around what is done there.
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            start, stop = event["ts"], event["ts"] + event["dur"]
            found.setdefault(event["tid"], []).append((round(1000 * start), round(1000 * stop)))
    return found


def overlap(streams: Mapping[int, Iterable[tuple[int, int]]]) -> dict[str, float]:
    """Milliseconds of arithmetic (the stream that is busy for longest), of all other streams, and of both at a time.

    `streams`: when each began and ended to do something, in nanoseconds.
    """
    busy = {stream: joined(spans) for stream, spans in streams.items()}
    if not busy:
        raise SystemExit("the profile names no stream of a GPU")
    first = max(busy, key=lambda stream: length(busy[stream]))
    exchanges = joined(span for stream, spans in busy.items() if stream != first for span in spans)
    # What is in both is what they have together more than their union.
    both = length(busy[first]) + length(exchanges) - length(joined([*busy[first], *exchanges]))
    found = {"arithmetic_ms": length(busy[first]), "exchange_ms": length(exchanges), "both_ms": both}
    return {name: ns / 1e6 for name, ns in found.items()}


def joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same times, in spans that have none in common."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def length(spans: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in spans)


MEASURES: dict[str, Callable[[Job, Ranks], dict[str, Any]]] = {
    "prompts": of_prompt,
    "training": of_prompt,
    "steps": of_steps,
    "profile": of_profile,
}


def work(rank: int, job: Job, place: str, pipe: Any) -> None:
    """One process of a job."""
    torch.set_num_threads(job.threads)
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    # Gloo is there on GPUs too: for times, and for what ranks tell each other.
    backend = "gloo" if job.device == "cpu" else "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=job.ranks, timeout=timedelta(minutes=20))
    ranks = Ranks(dist.group.WORLD)
    found = MEASURES[job.section](job, ranks)
    if job.device == "cuda":
        found["gpu"] = torch.cuda.get_device_name()
    slowest(ranks, 0.0)
    if rank == 0:
        pipe.send(found)
    dist.destroy_process_group()


def run_job(job: Job, most: float = math.inf) -> dict[str, Any] | None:
    """What rank 0 has measured: times of all ranks, bytes of its own. None: it takes longer than `most` seconds."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    deadline = time.monotonic() + most
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{Path(folder) / 'meeting'}"
        processes = [context.Process(target=work, args=(rank, job, place, there)) for rank in range(job.ranks)]
        for process in processes:
            process.start()
        there.close()
        try:
            while not here.poll(0.2):
                if any(process.exitcode for process in processes):
                    raise EOFError
                if time.monotonic() > deadline:
                    return None
            found: dict[str, Any] = here.recv()
            for process in processes:
                process.join(30)
        except EOFError:
            raise ChildProcessError(f"{job.key}: a rank has failed; its error is above") from None
        finally:
            for process in processes:
                process.kill()
                process.join()
    return found


def formulas(job: Job) -> dict[str, int]:
    """Bytes that a rank would send of keys and values: in ring attention, and where they are gathered once and kept."""
    size = 4 if job.device == "cpu" else 2
    heads = STEP_KV_HEADS if job.section == "steps" else HEADS[job.device]
    once = (job.ranks - 1) * -(-job.n // job.ranks) * heads * 2 * DIM * size
    # A backward pass round a ring passes on keys, values, and their gradients.
    ring, gathered = (3, 2) if job.section in ("training", "profile") else (1, 1)
    return {"ring": ring * once, "all_gather": gathered * once}


def jobs_of(
    sections: Sequence[str],
    lengths: Sequence[int],
    counts: Sequence[int],
    threads: int,
    device: str,
    exact: bool = True,
    trace: str = "",
    turns: int = TURNS,
) -> list[Job]:
    """All cases, short ones first, and numbers of ranks in the order given."""
    found = []
    for n in lengths:
        for section in sections:
            if section == "profile" and device == "cpu":
                continue
            for ranks in counts:
                methods = ["cells"]
                if exact and n <= MOST_EXACT.get(section, 0):
                    methods += ["exact", "torch"] if ranks > 1 else ["exact"]
                found += [Job(section, method, n, ranks, threads, device, trace, turns) for method in methods]
    return found


def read() -> dict[str, dict[str, Any]]:
    """What was written before, by case, with its environment."""
    path = record.RESULTS / f"{NAME}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def measure(jobs: Sequence[Job], minutes: float, saves: bool) -> dict[str, Any]:
    """All results, those of these jobs among them. What was written before is not run again."""
    deadline = time.monotonic() + 60 * minutes
    found = {key: case["results"] for key, case in read().items()} if saves else {}
    left = [job for job in jobs if job.key not in found]
    for number, job in enumerate(record.each(left, lambda job: job.key)):
        rest = deadline - time.monotonic()
        try:
            row = run_job(job, rest) if rest > 0 else None
        except ChildProcessError as error:  # not written: the same again tries once more
            print(error)
            continue
        if row is None and (number or rest <= 0):
            print(f"left: {', '.join(job.key for job in left[number:])}; the same again goes on from there")
            break
        if row is None:
            row = {"error": f"takes longer than {minutes:g} minutes"}
        found[job.key] = job._replace(trace="")._asdict() | row | {"by_formula": formulas(job), "cpus": CORES}
        if saves:
            record.merge(NAME, job.key, found[job.key])
    return found


def efficiency(rows: Iterable[Mapping[str, Any]], row: Mapping[str, Any], name: str, what: str = "seconds") -> float | None:
    """Rank-seconds of the fewest ranks that were measured with this, over those of this many. None: these are the fewest."""
    alike = [
        x
        for x in rows
        if all(x[fact] == row[fact] for fact in ("section", "n", "threads", "device", "cpus")) and name in x.get("seconds", {})
    ]
    first = min(alike, key=lambda x: x["ranks"])
    if first["ranks"] == row["ranks"] or row["section"] == "steps":
        return None
    before, now = (statistics.median(x[what][name]) * x["ranks"] for x in (first, row))
    return before / now


def show(rows: Sequence[Mapping[str, Any]], section: str) -> None:
    """Times, efficiency and bytes."""
    own = [row for row in rows if row["section"] == section]
    titles = (
        "what",
        "keys",
        "ranks",
        "threads",
        "seconds",
        "efficiency",
        "of CPU",
        "times ideal",
        "MB sent",
        "in a ring",
        "gathered",
    )
    shown = record.table(*titles, title=section, words=titles[:1])
    for row in own:
        for name, seconds in row.get("seconds", {}).items():
            time_of = statistics.median(seconds)
            parts = [efficiency(rows, row, name, what) for what in Times._fields]
            ideal = row["seconds"].get("ideal")
            cells = [name, f"{row['n']:,}", str(row["ranks"]), str(row["threads"]), f"{time_of:.4g}"]
            cells += ["" if part is None else f"{part:.2f}" for part in parts]
            cells += [f"{time_of / statistics.median(ideal):.2f}" if ideal else ""]
            sent = f"{sum(row['sent'][name].values()) / 1e6:.3g}" if name in row["sent"] else ""
            beside = ["" if name == "ideal" else f"{x / 1e6:.3g}" for x in row["by_formula"].values()]
            shown.add_row(*cells, sent, *beside)
    if shown.rows:
        record.show(shown)
    for row in own:
        if "overlap" in row:
            both, exchange = row["overlap"]["both_ms"], row["overlap"]["exchange_ms"]
            part = f"{both / exchange:.0%}" if exchange else "none"
            print(f"{row['method']}, {row['n']:,} keys: exchanges take {exchange:.3g} ms; arithmetic goes on in {part} of it")
        if "error" in row:
            print(f"{row['method']}, {row['n']:,} keys, {row['ranks']} ranks: {row['error']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--ranks", nargs="+", type=int, help=f"in this order; default: {RANKS}, and on GPUs as many as there are")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, help="default: %(default)s")
    parser.add_argument("--threads", type=int, default=THREADS, help="of each rank (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--no-exact", action="store_true", help="leave out exact attention, which takes the square of the length")
    parser.add_argument("--turns", type=int, default=TURNS, help="of prompts and training, at most (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=math.inf, help="end after that")
    parser.add_argument("--out", type=Path, help=f"folder for {NAME}.json")
    parser.add_argument("--trace", default="", metavar="FILE", help="write the profile there (.json.gz), to look at")
    parser.add_argument("--show", action="store_true", help="show what was measured, and measure nothing")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    options = parser.parse_args()
    if options.out:
        options.out.mkdir(parents=True, exist_ok=True)
        record.RESULTS = options.out
    if options.turns < 1:
        parser.error("--turns must be at least 1")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("needs a GPU")
    counts = options.ranks or (RANKS if options.device == "cpu" else (torch.cuda.device_count(),))
    lengths = options.lengths
    if options.quick:
        counts, lengths = counts[:2], (2048,)
    if options.show:
        found = {key: case["results"] for key, case in read().items()}
    else:
        measured = options.threads, options.device, not options.no_exact, options.trace, options.turns
        jobs = jobs_of(options.section, lengths, counts, *measured)
        found = measure(jobs, options.minutes, saves=not options.quick)
    for section in options.section:
        show([*found.values()], section)


if __name__ == "__main__":
    main()
