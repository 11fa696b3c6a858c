"""`nearfield bench --calibrate`: find, on this machine, the length from which on cells beat exact attention."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from nearfield import crossover
from nearfield.attention import attention, estimate
from nearfield.cells.method import Cells
from nearfield.synthetic import make

LENGTHS = tuple(2**k for k in range(12, 18))

MARGIN = 1.05
"""Cells have to be faster by this factor, so that noise does not make `Auto` slower than SDPA."""


def usual_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """What people compute attention in on a device."""
    both = (torch.float32, torch.bfloat16)
    return (*both, torch.float16) if device.type == "cuda" else both


def calibrate(device: torch.device, dtype: torch.dtype = torch.float32, rounds: int = 3) -> dict[str, float]:
    """The crossover length of every kind of call; prints a table and keeps it in the cache."""
    console = _console()
    table = Table("kind", "keys", "SDPA, s", "Cells, s", "SDPA / Cells", box=SIMPLE_HEAD, title=_title(device, dtype))
    lengths: dict[str, float] = {}
    with Progress(console=console) as progress:
        bar = progress.add_task("", total=len(crossover.KINDS) * len(LENGTHS))
        for number, kind in enumerate(crossover.KINDS):
            lengths[kind] = math.inf
            for place, length in enumerate(LENGTHS):
                progress.update(bar, description=f"{kind}, {length:,} keys", completed=number * len(LENGTHS) + place)
                exact, cells = _seconds(length, device, dtype, kind, rounds)
                table.add_row(kind, f"{length:,}", f"{exact:.3g}", f"{cells:.3g}", f"{exact / cells:.2f}")
                if exact > MARGIN * cells:
                    lengths[kind] = length
                    break
        progress.update(bar, completed=len(crossover.KINDS) * len(LENGTHS))
    console.print(table)
    path = crossover.keep(device, dtype, lengths)
    console.print(f"kept in {path}", highlight=False, soft_wrap=True)
    return lengths


def compare(device: torch.device, length: int, dtype: torch.dtype = torch.float32, rounds: int = 3) -> None:
    """Every kind of call at one length: exact attention and cells side by side, with the audited error of cells."""
    console = _console()
    title = f"{length:,} keys, {_title(device, dtype)}"
    table = Table("kind", "SDPA, s", "Cells, s", "SDPA / Cells", "error", "from", box=SIMPLE_HEAD, title=title)
    with Progress(console=console) as progress:
        for kind in progress.track(crossover.KINDS, description=f"{length:,} keys"):
            causal = kind.endswith("causal")
            exact, cells = _seconds(length, device, dtype, kind, rounds)
            query, key, value = (x.to(device, dtype) for x in make("clustered", 1, crossover.heads(device), length, 64))
            audit = estimate(query, key, value, is_causal=causal, method=Cells(), audit=59).audit
            assert audit is not None
            known = crossover.length(device, dtype, causal)
            start = f"{known:,.0f} keys" if known < float("inf") else "not measured"
            table.add_row(kind, f"{exact:.3g}", f"{cells:.3g}", f"{exact / cells:.2f}", f"{audit.additive:.2g}", start)
    console.print(table)
    console.print(
        "error: 95% of the rows are within this of exact attention, with confidence 95%, in units of the rms norm of the values. "
        "from: where the default method changes from SDPA to cells.",
        highlight=False,
    )


def _seconds(length: int, device: torch.device, dtype: torch.dtype, kind: str, rounds: int) -> tuple[float, float]:
    """Median seconds of exact attention and of cells, taken in turn."""
    training, causal = kind.startswith("training"), kind.endswith("causal")
    query, key, value = (
        x.to(device, dtype).requires_grad_(training) for x in make("clustered", 1, crossover.heads(device), length, 64)
    )

    def exact() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    def cells() -> Tensor:
        return attention(query, key, value, is_causal=causal, method=Cells())

    def timed(call: Callable[[], Tensor]) -> float:
        _wait(device)
        start = time.perf_counter()
        output = call()
        if training:
            torch.autograd.grad(output.sum(), (query, key, value))
        _wait(device)
        return time.perf_counter() - start

    timed(exact)
    timed(cells)
    pairs = [(timed(exact), timed(cells)) for _ in range(rounds)]
    return statistics.median(a for a, _ in pairs), statistics.median(b for _, b in pairs)


def _title(device: torch.device, dtype: torch.dtype) -> str:
    return f"{crossover.place(device)}, {crossover.dtype_name(dtype)}"


def _console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=110)  # a file has no width; the default of 80 would cut the table


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
