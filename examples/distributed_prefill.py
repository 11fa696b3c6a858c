"""Read and train on a long sequence that is shared out over ranks, and compare with one process.

torchrun --nproc-per-node 4 examples/distributed_prefill.py                    # within a minute on two cores
torchrun --nproc-per-node 8 examples/distributed_prefill.py --tokens 262144    # a card for each rank, where there are cards

Each rank holds its share of queries, keys and values, in zig-zag, and attends to the keys of all ranks: by cells, which all ranks
make together once, and exactly. Keys and queries have structure (`nearfield.synthetic`, "clustered"), as those of trained models
have. At the end rank 0 does the same by itself, once, and prints one table.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from example_options import Parser, count, usual_device
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from torch import Tensor

import nearfield as nf
from nearfield.distributed import Ranks, context_parallel, shard, unshard
from nearfield.synthetic import make

METHODS: dict[str, nf.Method] = {"cells": nf.Cells(), "exact": nf.Exact()}


@contextmanager
def joined_job(device: str) -> Iterator[str]:
    """This process as a rank of the job that torchrun has started, or of a job of one rank; the device of this rank."""
    alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    place = f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if device == "cuda" else device
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo", **alone)
    try:
        yield place
    finally:
        dist.destroy_process_group()


def step(inputs: list[Tensor], weight: Tensor, method: nf.Method, trained: bool, mesh: Any) -> list[Tensor]:
    """The output of the rows that are here, and if it is a step of training the gradients of the inputs."""
    leaves = [x.detach().requires_grad_(trained) for x in inputs]
    output = nf.attention(*leaves, is_causal=True, enable_gqa=True, method=method, mesh=mesh)
    return [output.detach(), *(torch.autograd.grad((output * weight).sum(), leaves) if trained else ())]


def timed(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], float]:
    start = time.perf_counter()
    found = run()
    if found[0].is_cuda:
        torch.cuda.synchronize()
    return found, time.perf_counter() - start


def apart(found: Tensor, wanted: Tensor) -> float:
    """The norm of the difference, in units of that of what one process found."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--tokens", type=count, default=12_288 if usual_device() == "cpu" else 262_144)
    parser.add_argument("--heads", type=count, default=2, help="of keys; there are twice as many of queries")
    parser.add_argument("--dim", type=count, default=64, help="of a head")
    parser.add_argument("--rows", type=count, default=256, help="how many random rows are compared")
    parser.add_argument("--device", choices=("cpu", "cuda"), default=usual_device())
    options = parser.parse_args()
    with joined_job(options.device) as place:
        compare(options, place)


def compare(options: Any, place: str) -> None:
    ranks = Ranks(dist.group.WORLD)
    is_first = ranks.rank == 0
    drawn = make("clustered", 1, 2 * options.heads, options.tokens, options.dim, kv_heads=options.heads)
    generator = torch.Generator().manual_seed(0)
    whole = [x.to(place) for x in (*drawn, torch.randn(drawn[0].shape, generator=generator))]
    rows = torch.randperm(options.tokens, generator=generator)[: options.rows].to(place)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    kinds = [(name, trained) for name in METHODS for trained in (False, True)]
    table = Table(
        Column("what", no_wrap=True),
        f"{ranks.size} rank(s), s",
        "one process, s",
        "times as fast",
        "MB sent by a rank",
        "apart",
        title=f"{options.tokens:,} tokens on {options.device}",
    )
    with Progress(*columns, console=Console(stderr=True)) if is_first else nullcontext() as progress:
        bar = progress.add_task("attending", total=2 * len(kinds)) if progress else None

        def done(what: str) -> None:
            if progress is not None and bar is not None:
                progress.update(bar, advance=1, description=what)

        for method in METHODS.values():  # what is loaded at a first call
            few = [shard(x[:, :, : 64 * ranks.size], ranks, 2) for x in whole]
            for mesh in (ranks, None) if is_first else (ranks,):
                step(few[:3], few[3], method, True, mesh)
        for name, trained in kinds:
            what = f"{name}, {'training' if trained else 'forward'}"
            own = [x.clone() for x in whole]
            dist.barrier()
            with context_parallel(ranks, buffers=own, buffer_seq_dims=[2] * 4, no_restore_buffers=set(own)):
                ranks.sent.clear()
                found, seconds = timed(lambda: step(own[:3], own[3], METHODS[name], trained, ranks))  # noqa: B023
                sent = sum(ranks.sent.values())
                dist.barrier()
                shown = [unshard(x, ranks, 2)[:, :, rows] for x in found]
            done(what)
            if is_first:
                wanted, alone = timed(lambda: step(whole[:3], whole[3], METHODS[name], trained, None))  # noqa: B023
                error = max(apart(x, y[:, :, rows]) for x, y in zip(shown, wanted, strict=True))
                numbers = f"{seconds:.2f}", f"{alone:.2f}", f"{alone / seconds:.2f}", f"{sent / 1e6:.2f}", f"{error:.1e}"
                table.add_row(what, *numbers)
            done(what)
        dist.barrier()
    if is_first:
        console = Console()
        console.print(table)
        console.print(
            f"Apart: the largest norm of a difference between ranks and one process, over {len(rows)} random rows of the output "
            "and, in training, of the gradients of queries, keys and values, in units of the norm of what one process found."
        )


if __name__ == "__main__":
    main()
