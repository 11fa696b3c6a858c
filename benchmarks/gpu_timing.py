"""What the sections of bench_gpu.py share: inputs made on the card, SDPA's backends, CUDA events, peak memory, the card.

Without a card everything runs on the CPU, timed by the clock and without memory: enough to try the benchmark out.
"""

from __future__ import annotations

import importlib.metadata
import math
import subprocess
import time
import warnings
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import nearfield as nf

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPE = torch.bfloat16
HEADS = 8
DEFAULT, SHARED, FAST, ACCURATE = nf.Cells(), nf.Cells(share=128), nf.Cells(probes=4), nf.Cells(probes=20)
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
HOPELESS, LONG_MS = 2.0, 20.0
"""A backend so many times slower than the best one is not tried again at longer inputs, once the best takes `LONG_MS`."""
LEAST_ROUNDS, MOST_ROUNDS, BUDGET_MS = 3, 20, 500.0

T = TypeVar("T")
QKV = tuple[Tensor, Tensor, Tensor]
Call = Callable[[], object]


def clustered(n: int, dim: int, heads: int = HEADS, seed: int = 0, run: int = 1, group: int = 1) -> QKV:
    """The family `clustered` of nearfield.synthetic in bfloat16, `[1, heads, n, dim]`, made where it is used.

    The library's own is made on the CPU, which takes minutes for a million keys. Head by head, so that float32 copies stay small.
    `run` keys in a row come from one cluster, and so do as many queries; each head of keys has `group` heads of queries.
    """
    sizes = (heads * group, heads, heads)
    inputs = tuple(torch.empty(1, count, n, dim, dtype=DTYPE, device=DEVICE) for count in sizes)
    generator = torch.Generator(DEVICE).manual_seed(seed)
    few = max(1, round(math.sqrt(n)))

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, dim, generator=generator, device=DEVICE)

    def pick() -> Tensor:
        return torch.randint(few, (-(-n // run),), generator=generator, device=DEVICE).repeat_interleave(run)[:n]

    for head in range(heads):
        centres, values, own = normal(few), normal(few), pick()
        for member in range(head * group, (head + 1) * group):
            inputs[0][0, member] = 7.0 / math.sqrt(dim) * centres[pick()] + 0.3 * normal(n)
        inputs[1][0, head] = centres[own] + 0.3 * normal(n)
        inputs[2][0, head] = values[own] + 0.5 * normal(n)
    return inputs[0], inputs[1], inputs[2]


def usual(causal: bool) -> dict[str, nf.Cells]:
    """What is compared at every length. Without a mask, rows open cells together by default."""
    return {"default": DEFAULT, "shared": SHARED} if causal else {"default": DEFAULT}


def methods(causal: bool) -> dict[str, nf.Cells]:
    """What is compared at one length."""
    return usual(causal) | {"fast": FAST, "accurate": ACCURATE}


def backends() -> tuple[str, ...]:
    """The backends that SDPA can be made to use here."""
    return tuple(BACKENDS) if CUDA else ("cpu",)


def sdpa(backend: str, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    if backend not in BACKENDS:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)
    with sdpa_kernel(BACKENDS[backend]):
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)


def fastest(calls: dict[str, Call]) -> tuple[str, dict[str, float]]:
    """The fastest of several ways to compute the same thing, and the milliseconds of each; those that raise are left out.

    Of each way the best of five calls counts (of a long one a single call), after a first one that is not timed.
    """
    found: dict[str, float] = {}
    refused: list[str] = []
    for name, call in calls.items():
        try:
            with warnings.catch_warnings():  # torch warns once for every reason why a backend cannot be used
                warnings.simplefilter("ignore")
                call()
                found[name] = elapsed(call)
                if found[name] < LONG_MS:
                    found[name] = min(found[name], *(elapsed(call) for _ in range(4)))
        except RuntimeError as error:
            refused.append(f"{name}: {error}")
    if not found:
        raise RuntimeError("no backend of SDPA took these inputs: " + "; ".join(refused))
    return min(found, key=found.__getitem__), found


def hopeful(tried: dict[str, float]) -> tuple[str, ...]:
    """Those worth trying at longer inputs."""
    best = min(tried.values())
    return tuple(name for name, ms in tried.items() if best < LONG_MS or ms < HOPELESS * best)


def wait() -> None:
    if CUDA:
        torch.cuda.synchronize()


def elapsed(call: Call) -> float:
    """Milliseconds of one call that finds the card idle, by CUDA events: launches that the card has to wait for count."""
    wait()
    if not CUDA:
        return wall(call)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def wall(call: Call) -> float:
    """Milliseconds by the clock, until the card is done."""
    wait()
    start = time.perf_counter()
    call()
    wait()
    return 1e3 * (time.perf_counter() - start)


def interleaved(calls: dict[str, Call], budget_ms: float = BUDGET_MS) -> dict[str, list[float]]:
    """Milliseconds of each call, one after the other in every round: 3 to 20 rounds, as many as fit. Each was called before.

    Every timed call follows an untimed one of the same kind: how fast a card runs depends on what it has just done (power,
    caches), and users make the same call again and again.
    """

    def timed(call: Call) -> float:
        call()
        return elapsed(call)

    found = {name: [timed(call)] for name, call in calls.items()}
    rounds = int(budget_ms / sum(runs[0] for runs in found.values()))
    for _ in range(max(LEAST_ROUNDS, min(MOST_ROUNDS, rounds)) - 1):
        for name, call in calls.items():
            found[name].append(timed(call))
    return found


def captured(call: Callable[[], T]) -> Callable[[], T]:
    """A function that replays the call from a CUDA graph. It returns the same tensors each time, with new contents."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()

    return partial(_replayed, graph, output, call)


def _replayed(graph: torch.cuda.CUDAGraph, output: T, reads: Callable[[], T]) -> T:
    """`reads`: the graph reads what this refers to, so it has to stay."""
    graph.replay()
    return output


def peak_megabytes(call: Call, inputs: Collection[Tensor]) -> dict[str, float] | None:
    """What was allocated at most while `call` ran: `total` with its inputs, `beyond_inputs` without; None without a card.

    `held` had been allocated before by others (tables kept from earlier calls, workspaces of libraries) and is in neither;
    `allocated` is everything, what torch.cuda.max_memory_allocated() says.
    """
    if not CUDA:
        return None
    wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    wait()
    most = torch.cuda.max_memory_allocated()
    own = sum(x.nbytes for x in inputs)
    found = {"total": most - before + own, "beyond_inputs": most - before, "held": before - own, "allocated": most}
    return {name: size / 2**20 for name, size in found.items()}


def card() -> dict[str, Any]:
    """What `record.environment` does not say."""
    if not CUDA:
        return {"gpu": None}
    return {
        "gpu": torch.cuda.get_device_name(),
        "multiprocessors": torch.cuda.get_device_properties(0).multi_processor_count,
        "driver": _smi("driver_version"),
        "most_megahertz": _smi("clocks.max.sm"),
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
        "triton": importlib.metadata.version("triton"),
    }


def _smi(field: str) -> str | None:
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return None
