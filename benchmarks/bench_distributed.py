"""Keys that are shared out over ranks: prompts, training and steps of a cache, on the processes of one machine.

python benchmarks/bench_distributed.py                             # on 16 cores; writes results/distributed.json
python benchmarks/bench_distributed.py --ranks 1 8 --lengths 1048576 --section steps
python benchmarks/bench_distributed.py --device cuda --ranks 1     # NCCL with one rank: the same way through the code
python benchmarks/bench_distributed.py --quick                     # small sizes, nothing written

Each number of ranks is a job of its own, processes with two threads each that talk over gloo. Inputs are `synthetic.make`'s
clusters; each rank makes all of them and keeps its own. A time is that of the slowest rank, the median of several turns. Bytes
are those that a rank has sent (`Ranks.sent`); beside them stand those of ring attention and of a plain all-gather, by formula,
which are the same. torch's own `context_parallel` is tried beside ours; where it does not run, its error is noted.

Efficiency is the time of one rank over R times that of R ranks. A step is compared with an ideal: all ranks at once, each with a
store of its own that has its share of keys and opens its share of cells, and nothing is exchanged.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
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

DIM, HEADS, KV_HEADS = 64, 2, 2
STEP_HEADS, STEP_KV_HEADS = 8, 2
STEPS, TURNS = 20, 3
LONG = 500_000
"""From so many keys on, one turn."""
SECTIONS = ("prompts", "training", "steps")


class Job(NamedTuple):
    """What all ranks of a job measure."""

    section: str
    n: int
    ranks: int
    threads: int
    device: str
    exact: bool
    """exact attention too"""

    @property
    def key(self) -> str:
        return f"{self.section}/{self.n}/{self.ranks}" + ("" if self.device == "cpu" else f"/{self.device}")


def timed(call: Callable[[], Any], ranks: Ranks, turns: int) -> tuple[list[float], Any]:
    """Seconds of each turn, until the slowest rank is done, and what the last one gave."""
    seconds, found = [], None
    for _ in range(turns):
        dist.barrier(group=ranks.group)
        start = time.perf_counter()
        found = call()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        slowest = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        slowest = slowest if ranks_on_cpu(ranks) else slowest.cuda()
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=ranks.group)
        seconds.append(float(slowest))
    return seconds, found


def ranks_on_cpu(ranks: Ranks) -> bool:
    return dist.get_backend(ranks.group) == "gloo"


def inputs(family: str, n: int, heads: int, kv_heads: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    query, key, value = (x.to(device) for x in nf.synthetic.make(family, 1, heads, n, DIM, kv_heads=kv_heads, dtype=dtype))
    return query, key, value


def of_prompt(job: Job, ranks: Ranks) -> dict[str, Any]:
    """Forward, or forward and backward, of cells and of exact attention."""
    trains = job.section == "training"
    own = [
        shard(x, ranks, 2).contiguous().requires_grad_(trains) for x in inputs("clustered", job.n, HEADS, KV_HEADS, job.device)
    ]
    methods: dict[str, nf.Method] = {"cells": nf.Cells()} | ({"exact": nf.Exact()} if job.exact else {})
    turns = 1 if job.n >= LONG else TURNS
    found: dict[str, Any] = {"tokens": [own[0].shape[2]], "seconds": {}, "sent": {}}

    def run(method: nf.Method, rows: int | None = None) -> Tensor:
        output = nf.attention(*(x[:, :, :rows] for x in own), is_causal=True, method=method, mesh=ranks)
        if trains:
            output.sum().backward()
            for x in own:
                x.grad = None
        return output.detach()

    for name, method in methods.items():
        if turns == 1:
            run(method, 1024)  # what is loaded and compiled at a first call
        ranks.sent.clear()
        found["seconds"][name], _ = timed(lambda method=method: run(method), ranks, turns)
        found["sent"][name] = {what: count // turns for what, count in ranks.sent.items()}
    if job.exact and ranks.size > 1:
        found |= torchs_own(own, ranks, trains)
    return found


def torchs_own(own: list[Tensor], ranks: Ranks, trains: bool) -> dict[str, Any]:
    """torch's `context_parallel` on the same inputs, or why it does not run."""
    from torch.distributed.device_mesh import DeviceMesh

    try:
        from torch.distributed.tensor.experimental import context_parallel

        mesh = DeviceMesh.from_group(ranks.group, own[0].device.type)
        # It cuts whole sequences itself; made of shares in order, they are as long, which is what time depends on.
        whole = [torch.cat([x.detach()] * ranks.size, 2).requires_grad_(trains) for x in own]
        with context_parallel(mesh, buffers=[x.detach() for x in whole], buffer_seq_dims=[2, 2, 2]):
            parts = [x.detach().requires_grad_(trains) for x in own]

            def run() -> None:
                output = F.scaled_dot_product_attention(*parts, is_causal=True)
                if trains:
                    output.sum().backward()

            seconds, _ = timed(run, ranks, 1)
    except Exception as error:  # whatever it is: that is the result
        return {"torch": {"error": f"{type(error).__name__}: {error}".splitlines()[0][:300]}}
    return {"torch": {"seconds": seconds}}


def of_steps(job: Job, ranks: Ranks) -> dict[str, Any]:
    """Steps of a cache, chosen by all ranks together and by each for itself; and the ideal."""
    # Keys that are alike come one after the other, so that cutting them in blocks makes good cells, quickly.
    query, key, value = inputs("local", job.n, STEP_HEADS, STEP_KV_HEADS, job.device)
    found: dict[str, Any] = {"seconds": {}, "sent": {}}
    for balance in ("global", "local"):
        store = ShardedStore(nf.Cells(partition=nf.Blocks()), ranks, balance=balance)
        store.append(key, value)
        store.close()
        ranks.sent.clear()
        found["seconds"][balance] = steps_of(store, query, key, value, ranks)
        found["sent"][balance] = {what: count // (STEPS + 1) for what, count in ranks.sent.items()}
        found["cells"], found["probes"], found["held"] = store.cells, store.probes, store.held
    first = job.n * ranks.rank // ranks.size
    share = slice(first, job.n * (ranks.rank + 1) // ranks.size)
    alone = nf.Cells(partition=nf.Blocks(), probes=max(1, found["probes"] // ranks.size))
    own = CellStore(alone, group_from=0)
    own.append(key[:, :, share], value[:, :, share])
    own.close()
    found["seconds"]["ideal"] = steps_of(own, query, key, value, ranks)
    return found


def steps_of(store: CellStore, query: Tensor, key: Tensor, value: Tensor, ranks: Ranks) -> list[float]:
    """Seconds of each step; the first one, which closes what is left to close, is not counted."""

    def step() -> None:
        store.append(key[:, :, -1:], value[:, :, -1:])
        store.attend(query[:, :, -1:])

    return timed(step, ranks, STEPS + 1)[0][1:]


def work(rank: int, job: Job, place: str, pipe: Any) -> None:
    """One process of a job."""
    torch.set_num_threads(job.threads)
    if job.device == "cuda":
        torch.cuda.set_device(rank)
    backend = "gloo" if job.device == "cpu" else "nccl"
    dist.init_process_group(backend, init_method=place, rank=rank, world_size=job.ranks, timeout=timedelta(minutes=20))
    ranks = Ranks(dist.group.WORLD)
    found = (of_steps if job.section == "steps" else of_prompt)(job, ranks)
    if rank == 0:
        pipe.send(found)
    dist.barrier()
    dist.destroy_process_group()


def run_job(job: Job) -> dict[str, Any]:
    """What rank 0 has measured. The times are those of all ranks, the bytes its own."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        place = f"file://{Path(folder) / 'meeting'}"
        processes = [context.Process(target=work, args=(rank, job, place, there)) for rank in range(job.ranks)]
        for process in processes:
            process.start()
        there.close()
        try:
            found: dict[str, Any] = here.recv()
        except EOFError:
            sys.exit(f"{job.key}: a rank has failed; its error is above")
        finally:
            for process in processes:
                process.join()
    return found | {"n": job.n, "ranks": job.ranks, "threads": job.threads} | formulas(job)


def formulas(job: Job) -> dict[str, Any]:
    """Bytes that a rank sends of keys and values in a forward pass, in ring attention and where they are gathered."""
    if job.section == "steps":
        return {}
    size = 4 if job.device == "cpu" else 2
    return {"by_formula": (job.ranks - 1) * -(-job.n // job.ranks) * KV_HEADS * 2 * DIM * size}


def show(rows: list[dict[str, Any]], section: str) -> None:
    """Times, efficiency and bytes."""
    first = {(row["n"], name): statistics.median(x) for row in rows if row["ranks"] == 1 for name, x in row["seconds"].items()}
    titles = ("what", "keys", "ranks", "seconds", "efficiency", "MB sent", "MB by formula")
    shown = record.table(*titles, title=section, words=titles[:1])
    for row in rows:
        for name, seconds in row["seconds"].items():
            own, one = statistics.median(seconds), first.get((row["n"], name))
            told = "" if one is None or section == "steps" else f"{one / own / row['ranks']:.2f}"
            sent = sum(row["sent"].get(name, {}).values()) / 1e6
            formula = f"{row['by_formula'] / 1e6:.3g}" if "by_formula" in row else ""
            shown.add_row(name, f"{row['n']:,}", str(row["ranks"]), f"{own:.4g}", told, f"{sent:.3g}", formula)
        if "seconds" in row.get("torch", {}):
            shown.add_row("torch's own", f"{row['n']:,}", str(row["ranks"]), f"{row['torch']['seconds'][0]:.4g}", "", "", "")
    record.show(shown)
    for error in sorted({row["torch"]["error"] for row in rows if "error" in row.get("torch", {})}):
        print(f"torch's own context_parallel does not run here: {error}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--section", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2, 4, 8))
    parser.add_argument("--lengths", nargs="+", type=int, default=(262_144, 1_048_576))
    parser.add_argument("--threads", type=int, default=2, help="of each rank")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--no-exact", action="store_true", help="leave out exact attention, which takes the square of the length")
    parser.add_argument("--quick", action="store_true", help="small sizes, nothing written")
    options = parser.parse_args()
    sizes = (2048,) if options.quick else tuple(options.lengths)
    counts = (1, 2) if options.quick else tuple(options.ranks)
    for section in options.section:
        jobs = [
            Job(section, n, ranks, options.threads, options.device, not options.no_exact and n < LONG)
            for n in sizes
            for ranks in counts
        ]
        rows = []
        for job in record.each(jobs, lambda job: job.key):
            rows.append(run_job(job))
            if not options.quick:
                record.merge("distributed", job.key, rows[-1])
        show(rows, section)


if __name__ == "__main__":
    main()
