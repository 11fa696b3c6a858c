"""`nearfield bench`: time cells against exact attention, and find the length from which they are faster on this machine."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from rich.box import SIMPLE_HEAD
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

from nearfield import crossover
from nearfield.app import wide_console
from nearfield.attention import attention, estimate
from nearfield.cells.method import Cells
from nearfield.cells.triton.limits import unsupported
from nearfield.kernels import backends
from nearfield.synthetic import make

LENGTHS = tuple(2**k for k in range(12, 18))

DIM, WIDTH = 64, 110

MARGIN = 1.05
"""Cells must be faster by this factor, so that noise does not make `Auto` slower than SDPA."""


def usual_dtypes(device: torch.device) -> tuple[torch.dtype, ...]:
    """The dtypes that are common on a device."""
    both = (torch.float32, torch.bfloat16)
    return (*both, torch.float16) if device.type == "cuda" else both


def calibrate(device: torch.device, dtype: torch.dtype = torch.float32, rounds: int = 3) -> dict[str, float]:
    """The crossover length of every kind of call. Prints a table, and saves the lengths for `Auto`."""
    console = wide_console(WIDTH)
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
    console.print(f"saved to {path}", highlight=False, soft_wrap=True)
    return lengths


def compare(device: torch.device, length: int, dtype: torch.dtype = torch.float32, rounds: int = 3) -> None:
    """Exact attention and cells side by side for every kind of call at one length, with the audited error of cells."""
    console = wide_console(WIDTH)
    title = f"{length:,} keys, {_title(device, dtype)}"
    table = Table("kind", "SDPA, s", "Cells, s", "SDPA / Cells", "error", "cells from", box=SIMPLE_HEAD, title=title)
    with Progress(console=console) as progress:
        for kind in progress.track(crossover.KINDS, description=f"{length:,} keys"):
            causal = kind.endswith("causal")
            exact, cells = _seconds(length, device, dtype, kind, rounds)
            query, key, value = (x.to(device, dtype) for x in make("clustered", 1, crossover.heads(device), length, DIM))
            audit = estimate(query, key, value, is_causal=causal, method=Cells(), audit=59).audit
            assert audit is not None
            known = crossover.length(device, dtype, causal)
            start = f"{known:,.0f} keys" if known < math.inf else "not measured"
            table.add_row(kind, f"{exact:.3g}", f"{cells:.3g}", f"{exact / cells:.2f}", f"{audit.additive:.2g}", start)
    console.print(table)
    console.print(
        "error: with 95% confidence, 95% of the rows are this close to exact attention, in units of the rms norm of the values. "
        "cells from: the length at which the default method changes from SDPA to cells.",
        highlight=False,
    )


def _seconds(length: int, device: torch.device, dtype: torch.dtype, kind: str, rounds: int) -> tuple[float, float]:
    """Median seconds of exact attention and of cells, measured in turn."""
    training, causal = kind.startswith("training"), kind.endswith("causal")
    query, key, value = (
        x.to(device, dtype).requires_grad_(training) for x in make("clustered", 1, crossover.heads(device), length, DIM)
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
    """The device and the dtype, and whether a GPU runs without the Triton kernels: its times then say little about cells."""
    title = f"{crossover.place(device)}, {crossover.dtype_name(dtype)}"
    if device.type != "cuda":
        return title
    missing = "this GPU" if not backends.runs_triton(device) else unsupported(torch.empty(0, DIM, dtype=dtype))
    return title if missing is None else f"{title} (the Triton kernels do not serve {missing}: cells run in plain torch)"


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
