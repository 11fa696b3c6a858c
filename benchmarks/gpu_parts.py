"""Sections of bench_gpu.py: where the time of a pass goes, and how far near and far field are from what the card can do."""

from __future__ import annotations

import functools
import os
import statistics
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from gpu_keys import keys_of
from gpu_speed import DIMS, attend, gradients, with_grad
from gpu_timing import CUDA, DEFAULT, DEVICE, DTYPE, HEADS, SHARED, Call, captured, card, clustered, elapsed, wait, wall
from record import each, table
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

import nearfield as nf

LENGTH = 131_072
GROUPS = {
    "partition": (
        "_prepare",
        "_nearest",
        "_means",
        "_hosts",
        "_settle",
        "_scan",
        "_place",
        "_moments",
        "_products",
        "_weighted_sums",
    ),
    "route": ("_route", "_best_cells", "_vote", "_list_keys"),
    "near": ("_count_pairs", "_scan_counts", "_place_pairs", "_block_ranges", "_near_fwd", "_merge"),
    "own segment and far": ("_attend_rows",),
    "all of a block": ("_attend",),
    "backward: near": ("_near_dkv", "_near_dq"),
    "backward: far": ("_far_dq", "_far_dmoments", "_far_dcross", "_moments_dkv"),
    "backward: own segment": ("_local_dkv", "_local_dq"),
    "backward: rest": ("_delta", "_mark"),
}
GROUP_OF = {kernel: group for group, kernels in GROUPS.items() for kernel in kernels}
REST = "rest"
PROFILED, TIMED, LISTED = 3, 10, 30
SPECIAL_PER_CLOCK = 16
"""exp2, sqrt and the like that a multiprocessor computes in a clock, by the vendor's tables."""

Kernels = list[tuple[str, float]]


def parts(quick: bool) -> dict[str, Any]:
    """Device time by kernel, next to the time of whole calls and of a captured graph."""
    n, dims = (512, (16,)) if quick else (LENGTH, DIMS)
    plan = [(dim, what) for dim in dims for what in ("no mask", "causal", "causal, shared", "causal, training")]
    rows = []
    for dim, what in each(plan, lambda item: f"parts, d = {item[0]}, {item[1]}"):
        inputs = clustered(n, dim)
        call: Call = functools.partial(attend, inputs, what != "no mask", SHARED if "shared" in what else DEFAULT)
        if what == "causal, training":
            call = functools.partial(gradients, with_grad(inputs), torch.randn_like(inputs[0]), True, DEFAULT)
        call()
        row: dict[str, Any] = {"dim": dim, "what": what}
        row["event_ms"] = statistics.median(elapsed(call) for _ in range(TIMED))
        row["wall_ms"] = statistics.median(wall(call) for _ in range(TIMED))
        if CUDA:
            row |= by_group([kernels_of(call) for _ in range(PROFILED)])
            row["graph_ms"] = None if what == "causal, training" else graph_ms(call)
        rows.append(row)
    return {"n": n, "heads": HEADS, "dtype": str(DTYPE), "rows": rows}


def kernels_of(call: Call) -> Kernels:
    """(name, milliseconds) of everything that the card did, in order."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    wait()
    with profile(activities=[ProfilerActivity.CUDA]) as recorded:
        call()
        wait()
    assert recorded.profiler is not None
    events = [x for x in recorded.profiler.kineto_results.events() if x.device_type() == torch.autograd.DeviceType.CUDA]
    return [(x.name(), x.duration_ns() / 1e6) for x in sorted(events, key=lambda x: x.start_ns())]


def by_group(runs: list[Kernels]) -> dict[str, Any]:
    """Means over runs of a call: milliseconds in all, of each group, and of the kernels that take most.

    A kernel that is in no group counts with the next one that is, because it prepares it: torch's sorts before `_moments` belong
    to the partition, those before `_near_fwd` to the near field. Kernels with no such successor are the rest. `torch_ms` is how
    much of a group's time is spent in torch's kernels, `ms` is all of it.
    """
    groups: dict[str, dict[str, float]] = defaultdict(lambda: {"ms": 0.0, "torch_ms": 0.0})
    kernels: dict[str, dict[str, float]] = defaultdict(lambda: {"ms": 0.0, "calls": 0.0})
    for run in runs:
        group = REST
        for name, ms in reversed(run):
            group = GROUP_OF.get(name, group)
            groups[group]["ms"] += ms / len(runs)
            groups[group]["torch_ms"] += ms / len(runs) if not name.startswith("_") else 0.0
            kernels[name]["ms"] += ms / len(runs)
            kernels[name]["calls"] += 1 / len(runs)
    order = {group: dict(groups[group]) for group in (*GROUPS, REST) if group in groups}
    largest = sorted(kernels, key=lambda name: -kernels[name]["ms"])[:LISTED]
    return {
        "device_ms": sum(x["ms"] for x in order.values()),
        "groups": order,
        "kernels": [{"name": name[:120], **kernels[name]} for name in largest],
    }


def graph_ms(call: Call) -> float | str:
    """Milliseconds of a replay of the captured call, or why it cannot be captured."""
    try:
        replay = captured(call)
        replay()
        return statistics.median(elapsed(replay) for _ in range(TIMED))
    except RuntimeError as error:
        return str(error)


def show_parts(results: dict[str, Any]) -> Table:
    groups = [group for group in (*GROUPS, REST) if any(group in row.get("groups", {}) for row in results["rows"])]
    title = f"n = {results['n']:,}: milliseconds on the card (of which in kernels of torch)"
    found = table("d", "what", *groups, "kernels", "call", "clock", "graph", title=title, words=("what",))
    for row in results["rows"]:
        own = row.get("groups", {})
        graph = row.get("graph_ms")
        found.add_row(
            f"{row['dim']}",
            row["what"],
            *(f"{own[x]['ms']:.2f} ({own[x]['torch_ms']:.2f})" if x in own else "" for x in groups),
            f"{row['device_ms']:.2f}" if own else "",
            f"{row['event_ms']:.2f}",
            f"{row['wall_ms']:.2f}",
            f"{graph:.2f}" if isinstance(graph, float) else "failed" if graph else "",
        )
    return found


def floor(quick: bool, known: dict[str, Any] | None = None) -> dict[str, Any]:
    """The least time that three kernels of a causal pass could take on this card, next to what they do; `known`: see `parts`."""
    rate, bandwidth, special = matmul_rate(512 if quick else 8192), copy_bandwidth(1 << (20 if quick else 32)), special_rate()
    rows = []
    n, dims = (512, (16,)) if quick else (LENGTH, DIMS)
    for dim in each(dims, lambda dim: f"floor, d = {dim}"):
        inputs = clustered(n, dim)
        info = nf.estimate(*inputs, is_causal=True, method=DEFAULT).info
        measured = _measured(known, n, dim, functools.partial(attend, inputs, True, DEFAULT)) if CUDA else {}
        for kernel, count in (
            ("_near_fwd", near_work(n, dim, info)),
            ("_attend_rows", attend_work(n, dim, info)),
            ("_route", route_work(n, dim, info)),
        ):
            least = {"bytes_ms": 1e3 * count["bytes"] / bandwidth, "flops_ms": 1e3 * count["flops"] / rate}
            own: dict[str, Any] = {
                "dim": dim,
                "kernel": kernel,
                **count,
                **least,
                "floor_ms": max(least.values()),
            }
            own["special_ms"] = special and 1e3 * count["special"] / special
            ms = measured.get(kernel)
            rows.append(own | {"ms": ms, "over_floor": ms and ms / own["floor_ms"]})
    rates = {"bytes_per_second": bandwidth, "flops_per_second": rate, "special_functions_per_second": special}
    return {"n": n, "heads": HEADS, **rates, "rows": rows}


def near_work(n: int, dim: int, info: dict[str, Any]) -> dict[str, float]:
    """What `_near_fwd` has to do for R = heads * n rows that open P cells with K keys each in all, in bfloat16.

    flops: 2 d for a logit and 2 d for its value: 4 d K R
    bytes: queries, keys and values once, 6 d R; for every opened cell of a row the number of the pair, a normaliser (4 each)
        and a partial result (2 d): (2 d + 8) P R
    special functions: an exponential for each key, K R
    """
    seen = keys_of(n, info)
    rows = HEADS * n
    keys, cells = seen.opened * seen.share, info["probes"] * seen.share
    return {
        "flops": 4.0 * dim * keys * rows,
        "bytes": 6.0 * dim * rows + (2 * dim + 8) * cells * rows,
        "special": keys * rows,
    }


def attend_work(n: int, dim: int, info: dict[str, Any]) -> dict[str, float]:
    """What `_attend_rows` has to do for R = heads * n rows that see L keys one by one and C cells, in bfloat16.

    flops: 4 d for a key; 2 d each for the mean logit of a cell, its spread and its value, 2 d^2 for the covariance:
        (4 d L + 6 d C + 2 d^2) R
    bytes: queries, keys, values, results and normalisers once, (8 d + 4) R; a bit for each cell, C R / 8; once the tables of
        centroids, variances and values, 6 d heads n / cell_size
    special functions: an exponential for each key and each cell, (L + C) R
    """
    seen = keys_of(n, info)
    rows = HEADS * n
    cells = seen.closed / info["cell_size"]
    return {
        "flops": (4.0 * dim * seen.one_by_one + 6.0 * dim * cells + 2.0 * dim * dim) * rows,
        "bytes": (8.0 * dim + 4.0 + cells / 8) * rows + 6.0 * dim * HEADS * n / info["cell_size"],
        "special": (seen.one_by_one + cells) * rows,
    }


def route_work(n: int, dim: int, info: dict[str, Any]) -> dict[str, float]:
    """What `_route` has to do for R = heads * n rows that score C cells and list P of them, in bfloat16.

    flops: 2 d each for the mean logit of a cell and its spread: 4 d C R
    bytes: queries 2 d R, the list 4 P R, a bit for each cell C R / 8; once the tables, 4 d heads n / cell_size
    special functions: a root for each cell, C R
    """
    seen = keys_of(n, info)
    rows = HEADS * n
    cells = seen.closed / info["cell_size"]
    return {
        "flops": 4.0 * dim * cells * rows,
        "bytes": (2.0 * dim + 4.0 * info["probes"] * seen.share + cells / 8) * rows + 4.0 * dim * HEADS * n / info["cell_size"],
        "special": cells * rows,
    }


def _measured(known: dict[str, Any] | None, n: int, dim: int, call: Call) -> dict[str, float]:
    """Milliseconds of each kernel: from `parts` where it has been measured, else measured now."""
    if known and known["n"] == n:
        for row in known["rows"]:
            if (row["dim"], row["what"]) == (dim, "causal") and "kernels" in row:
                return {x["name"]: x["ms"] for x in row["kernels"]}
    call()
    return {x["name"]: x["ms"] for x in by_group([kernels_of(call) for _ in range(PROFILED)])["kernels"]}


def copy_bandwidth(size: int) -> float:
    """Bytes per second, read and written, of a copy of `size` bytes on the card."""
    source = torch.empty(size, dtype=torch.uint8, device=DEVICE).random_()
    target = torch.empty_like(source)
    return 2 * size / _seconds(lambda: target.copy_(source))


def matmul_rate(size: int) -> float:
    """Floating-point operations per second of a square product in bfloat16, on random numbers."""
    left, right = (torch.randn(size, size, device=DEVICE, dtype=DTYPE) for _ in range(2))
    return 2 * size**3 / _seconds(lambda: left @ right)


def _seconds(call: Callable[[], object]) -> float:
    for _ in range(3):
        call()
    return statistics.median(elapsed(call) for _ in range(TIMED)) / 1e3


def special_rate() -> float | None:
    """Exponentials and roots per second at the card's highest clock, by the vendor's figures; None without a card."""
    known = card()
    if not known.get("most_megahertz"):
        return None
    return SPECIAL_PER_CLOCK * known["multiprocessors"] * float(known["most_megahertz"]) * 1e6


def show_floor(results: dict[str, Any]) -> Table:
    measured = f"{results['bytes_per_second'] / 1e12:.2f} TB/s, {results['flops_per_second'] / 1e12:.0f} TFLOP/s"
    titles = ("d", "kernel", "MB", "GFLOP", "bytes, ms", "flops, ms", "floor, ms", "special, ms", "measured, ms")
    found = table(*titles, "measured / floor", title=f"n = {results['n']:,}; measured: {measured}", words=("kernel",))
    for row in results["rows"]:
        found.add_row(
            f"{row['dim']}",
            row["kernel"],
            f"{row['bytes'] / 1e6:,.0f}",
            f"{row['flops'] / 1e9:,.0f}",
            *(f"{row[name]:.3f}" for name in ("bytes_ms", "flops_ms", "floor_ms")),
            *(f"{row[name]:.2f}" if row[name] else "" for name in ("special_ms", "ms", "over_floor")),
        )
    return found
