"""Section of bench_cache.py: one new token against a long cache on a GPU, next to exact attention of the same token.

8 heads of keys, 32 query heads, 128 columns, bfloat16; a prompt that was closed as one segment, and half a running segment after
it. Every way is captured in a CUDA graph. Before each replay other data goes through the GPU's cache, as other layers of a model
would send theirs.
"""

from __future__ import annotations

import functools
import math
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from gpu_timing import BACKENDS, CUDA, DEVICE, captured, card, clustered, wait, wall
from record import each, table
from rich.table import Table
from torch import Tensor
from torch.nn.attention import sdpa_kernel

import nearfield as nf
from nearfield.cells.cache.store import CellStore

HEADS, GROUP, DIM = 8, 4, 128
LENGTHS = (32_768, 131_072, 262_144, 1_048_576)
ROUNDS = 50
FLUSH_BYTES = 256 << 20
TOPIC, TOPICAL = 2048, 16
"""2,048 tokens in a row are about one topic, and a topic is 16 clusters."""
SETTINGS = {"Cells()": (nf.Cells(), False), "Cells(probes=64)": (nf.Cells(probes=64), False), "offloaded": (nf.Cells(), True)}
"""By name: the method, and whether keys and values of closed segments are in CPU memory."""
FAMILIES = ("topical", "strewn")

Step = Callable[[], Tensor]


def decode(quick: bool) -> dict[str, Any]:
    plan = [(length, family) for length in ((2048,) if quick else LENGTHS) for family in FAMILIES]
    rows = []
    for length, family in each(plan, lambda item: f"decode, {item[0]:,} keys, {item[1]}"):
        rows += _at(length, family, 4 if quick else ROUNDS)
    return {"card": card(), "heads": HEADS, "query_heads": HEADS * GROUP, "dim": DIM, "rows": rows}


def inputs(length: int, family: str) -> tuple[Tensor, Tensor, Tensor]:
    """A query per query head, and keys and values in clusters, which are `strewn` over the whole length or come by topic.

    The query heads of a group look for different clusters: of one topic, or any if they are strewn.
    """
    query, key, value = clustered(length, DIM, HEADS)
    if family == "topical":
        generator = torch.Generator(DEVICE).manual_seed(1)
        few = max(TOPICAL, round(math.sqrt(length)))
        topics = torch.randint(few, (-(-length // TOPIC), TOPICAL), generator=generator, device=DEVICE)
        for head in range(HEADS):
            centres, values = torch.randn(2, few, DIM, generator=generator, device=DEVICE)
            which = torch.randint(TOPICAL, (length,), generator=generator, device=DEVICE)
            own = topics[torch.arange(length, device=DEVICE) // TOPIC, which]
            noise = torch.randn(2, length, DIM, generator=generator, device=DEVICE)
            key[0, head], value[0, head] = centres[own] + 0.3 * noise[0], values[own] + 0.5 * noise[1]
            asked = centres[topics[len(topics) // 3, :GROUP]]
            query[0, head, -GROUP:] = 7.0 / math.sqrt(DIM) * asked + 0.3 * noise[0, :GROUP]
    return query[:, :, -GROUP:].reshape(1, HEADS * GROUP, 1, DIM).contiguous(), key, value


def _at(length: int, family: str, rounds: int) -> list[dict[str, Any]]:
    query, key, value = inputs(length, family)
    tried: dict[str, float] = {}
    exact: dict[str, Step] = {}
    for name, call in exact_ways(query, key, value).items():
        step = graphed(call)
        if step is not None:
            exact[name], tried[name] = step, min(timed({name: step}, 5)[name])
    best = min(tried, key=tried.__getitem__)
    truth = exactly(query, key, value)
    found = []
    for label, (method, offload) in SETTINGS.items():
        # A query that comes again and again would find all of its cells on the card.
        store = CellStore(method, offload=offload, resident=0 if offload else None, group_from=0)
        start = wall(functools.partial(_fill, store, key, value))
        step = graphed(functools.partial(store.attend, query))
        if step is None:
            raise RuntimeError("a step could not be captured")
        runs = timed({best: exact[best], "cells": step}, rounds)
        eager = statistics.median(wall(functools.partial(store.attend, query)) for _ in range(rounds))
        off = (step().float() - truth).norm(dim=-1) / truth.norm(dim=-1)
        found.append(
            {
                "n": length,
                "family": family,
                "method": label,
                "probes": store.probes,
                "cells": store.cells,
                "open_end": length - store.closed,
                "exact": best,
                "exact_tried_ms": tried,
                "exact_ms": statistics.median(runs[best]),
                "ms": statistics.median(runs["cells"]),
                "runs_ms": runs,
                "exact_over_cells": statistics.median(runs[best]) / statistics.median(runs["cells"]),
                "without_graph_ms": eager,
                "close_seconds": start / 1e3,
                "mean_relative_error": float(off.mean()),
                "max_relative_error": float(off.max()),
                "bytes": {name: size / 2**20 for name, size in store.nbytes.items()},
            }
        )
        del store, step
        wait()
    return found


def _fill(store: CellStore, key: Tensor, value: Tensor) -> None:
    """Store a prompt, and then the keys of half a segment of steps."""
    prompt = key.shape[2] - store.sizes.length(key.shape[2]) // 2
    store.append(key[:, :, :prompt], value[:, :, :prompt])
    store.close()
    store.append(key[:, :, prompt:], value[:, :, prompt:])


def exact_ways(query: Tensor, key: Tensor, value: Tensor) -> dict[str, Step]:
    """One token by SDPA's backends, heads that share keys as heads and as rows of one head, and by two matrix products."""
    rows = query.view(1, HEADS, GROUP, DIM)
    ways: dict[str, Step] = {}

    def by_heads() -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)

    def by_rows() -> Tensor:
        return F.scaled_dot_product_attention(rows, key, value).reshape(query.shape)

    def products() -> Tensor:
        weight = torch.softmax((rows @ key.transpose(2, 3)).float() / math.sqrt(DIM), -1)
        return (weight.to(value.dtype) @ value).reshape(query.shape)

    for name in BACKENDS if CUDA else ():
        ways |= {f"{name}, heads": _with(name, by_heads), f"{name}, rows": _with(name, by_rows)}
    return {**(ways or {"heads": by_heads, "rows": by_rows}), "products": products}


def _with(backend: str, call: Step) -> Step:
    def step() -> Tensor:
        with sdpa_kernel(BACKENDS[backend]):
            return call()

    return step


def exactly(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """In float32, head by head."""
    found = []
    for head in range(HEADS):
        rows = query[0, head * GROUP : (head + 1) * GROUP, 0].float()
        weight = torch.softmax(rows @ key[0, head].float().T / math.sqrt(DIM), -1)
        found.append(weight @ value[0, head].float())
    return torch.cat(found)[None, :, None]


def graphed(call: Step) -> Step | None:
    """The call as a replayed graph; None if a backend refuses it. Without a GPU, the call itself."""
    if not CUDA:
        return call
    try:
        with warnings.catch_warnings():  # Torch warns of every reason why a backend cannot be used.
            warnings.simplefilter("ignore")
            return captured(call)
    except RuntimeError as error:
        print("refused:", str(error).split("\n")[0])
        return None


def timed(calls: dict[str, Step], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each call, interleaved. Before each call other data goes through the GPU's cache."""
    if not CUDA:
        return {name: [wall(call) for _ in range(rounds)] for name, call in calls.items()}
    others = torch.zeros(FLUSH_BYTES // 4, device=DEVICE)
    found: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            others.amax()
            start.record()
            call()
            end.record()
            end.synchronize()
            found[name].append(start.elapsed_time(end))
    return found


def show_decode(results: dict[str, Any]) -> Table:
    title = f"one token, {results['query_heads']} query heads over {results['heads']} of keys, {results['dim']} columns, bfloat16"
    names = (
        "keys",
        "clusters",
        "method",
        "probes",
        "exact",
        "exact, us",
        "us",
        "exact / cells",
        "no graph, us",
        "error, mean",
        "worst",
    )
    found = table(*names, title=title, words=("clusters", "method", "exact"))
    for row in results["rows"]:
        found.add_row(
            f"{row['n']:,}",
            row["family"],
            row["method"],
            str(row["probes"]),
            row["exact"],
            *(f"{1e3 * row[name]:.1f}" for name in ("exact_ms", "ms")),
            f"{row['exact_over_cells']:.1f}",
            f"{1e3 * row['without_graph_ms']:.0f}",
            *(f"{row[name]:.2%}" for name in ("mean_relative_error", "max_relative_error")),
        )
    return found
