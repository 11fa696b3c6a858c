"""What keys that are sharded over GPUs cost, by a model: where would communication take longer than arithmetic?

python benchmarks/distributed_cost.py                      # prints tables, writes results/distributed_cost.json
python benchmarks/distributed_cost.py --nic 25 --gpus 8 64 # other links, nothing written

Nothing here is measured but the times of one H200 (results/gpu.json and results/cache.json): causal attention of 8 heads of 128
columns, and a step of a cache. Beyond the lengths in there, exact attention goes on with the square of the length, cells with the
slope of their last two lengths. Links are what data sheets say, and are reached in full.

Prompts. Every rank gathers keys and values of all others, group of heads by group of heads (`nearfield.distributed`), and does
its share of the rows. With R ranks, n tokens and two bytes a number it receives

    (R - 1) / R  n  kv_heads  (2 dim 2 + 4 levels) bytes                      keys and values, and the cell of each key by level

in a layer, half as much again for gradients twice over: K and V once more, and dK and dV. Kernels sum up the moments of all cells
on each rank, so none are received. Ring attention receives as many bytes of keys and values, in R - 1 parts. A ring of GPUs over
several nodes uses all network cards of a node side by side, so its speed is that of the slower of a GPU's link inside a node and
all cards of a node together.

Answers. A step scores and reads its share on each rank, and then waits for collectives of a few kilobytes: their latency counts.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import asdict, dataclass
from typing import Any

import record

from nearfield.cells.sizes import MOST_SPAN_LEVELS, default_segment, span_levels

MEASURED_HEADS, DIM = 8, 128
PARTITION = 0.2
"""The share of grouping keys in a causal pass of cells, of one query head per head of keys: `parts` of results/gpu.json."""
LENGTHS = (131_072, 1_048_576, 8_388_608)
GPUS = (8, 64, 512)
COLLECTIVES = 2
"""Of a step in each layer: best scores, with normalisers, and outputs."""


@dataclass(frozen=True)
class Links:
    """What connects the GPUs, one way."""

    nvlink: float = 450.0
    """GB/s of a GPU inside a node"""
    nic: float = 50.0
    """GB/s of a GPU's own network card"""
    node: int = 8
    """GPUs in a node"""
    inside_us: float = 10.0
    """latency of a small collective inside a node"""
    across_us: float = 25.0
    """the same over several nodes of a rack; grows with their logarithm"""

    def ring(self, gpus: int) -> float:
        """Bytes per second that a GPU of a ring receives."""
        return 1e9 * (self.nvlink if gpus <= self.node else min(self.nvlink, self.nic * self.node))

    def latency(self, gpus: int) -> float:
        """Milliseconds."""
        if gpus == 1:
            return 0.0
        nodes = -(-gpus // self.node)
        return (self.inside_us + (self.across_us * math.log2(nodes) / math.log2(8) if nodes > 1 else 0.0)) / 1000


@dataclass(frozen=True)
class Shape:
    """A layer of a model."""

    name: str
    heads: int
    kv_heads: int


SHAPES = (Shape("8B", 32, 8), Shape("70B", 64, 8))


def along(points: dict[int, float], n: int, slope: float | None = None) -> float:
    """Between measured points on straight lines in logarithms; beyond the last one with `slope`, or with that before it."""
    known = sorted(points)
    after = next((i for i, length in enumerate(known) if length >= n), len(known))
    if after < len(known) and known[after] == n:
        return points[n]
    low, high = known[max(0, min(after, len(known) - 1) - 1)], known[max(1, min(after, len(known) - 1))]
    own = math.log(points[high] / points[low]) / math.log(high / low)
    if after == len(known) and slope is not None:
        own = slope
    return points[high] * (n / high) ** own


def measured(section: str = "forward") -> dict[str, dict[int, float]]:
    """Milliseconds of one H200, by length: 8 heads of 128 columns under a causal mask."""
    rows = [x for x in record.read_sections("gpu")[section]["rows"] if x["causal"] and x["dim"] == DIM]
    exact = {x["n"]: x["exact"]["ms"] for x in rows if not x["exact"]["extrapolated"]}
    return {"exact": exact, "cells": {x["n"]: x["ours"]["default"]["ms"] for x in rows}}


def prompt(shape: Shape, n: int, gpus: int, links: Links, times: dict[str, dict[int, float]]) -> dict[str, Any]:
    """One layer of a prompt: milliseconds of arithmetic of one rank, of what it receives, and its bytes."""
    rows = shape.heads / MEASURED_HEADS
    keys = shape.kv_heads / MEASURED_HEADS
    cells = along(times["cells"], n)
    levels = min(MOST_SPAN_LEVELS, span_levels(n, default_segment(n, on_gpu=True)))
    others = (gpus - 1) / gpus * n * shape.kv_heads
    received = {"keys and values": others * 2 * DIM * 2, "cells": others * 4 * levels}
    return {
        "exact_ms": along(times["exact"], n, slope=2.0) * rows / gpus,
        "cells_ms": cells * (PARTITION * keys + (1 - PARTITION) * rows) / gpus,
        "received": received,
        "exchange_ms": 1000 * sum(received.values()) / links.ring(gpus),
    }


def step(shape: Shape, n: int, gpus: int, links: Links, times: dict[int, float]) -> dict[str, float]:
    """One layer of a step: milliseconds of arithmetic of a rank, and of collectives."""
    return {
        "cells_ms": along(times, n // gpus) * shape.kv_heads / MEASURED_HEADS,
        "exchange_ms": COLLECTIVES * links.latency(gpus),
    }


def steps_measured() -> dict[int, float]:
    """Milliseconds of a step of 8 heads of keys, 32 query heads, in a graph, by length."""
    rows = record.read_sections("cache")["decode"]["rows"]
    return {x["n"]: x["ms"] for x in rows if x["family"] == "topical" and x["method"] == "Cells()"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    usual = Links()
    for name, told in (("nvlink", "GB/s inside a node"), ("nic", "GB/s of a GPU's network card")):
        parser.add_argument(f"--{name}", type=float, default=getattr(usual, name), help=f"{told}, one way (%(default)s)")
    parser.add_argument("--node", type=int, default=usual.node, help="GPUs in a node (%(default)s)")
    parser.add_argument("--gpus", type=int, nargs="+", default=GPUS)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    options = parser.parse_args()
    links = Links(options.nvlink, options.nic, options.node)
    times, step_times = measured(), steps_measured()
    prompts, steps = [], []
    for shape in SHAPES:
        for n in options.lengths:
            for gpus in options.gpus:
                place = {"shape": shape.name, "n": n, "gpus": gpus}
                prompts.append(place | prompt(shape, n, gpus, links, times))
                steps.append(place | step(shape, n, gpus, links, step_times))
    show(prompts, steps)
    if links == usual and tuple(options.gpus) == GPUS and tuple(options.lengths) == LENGTHS:
        record.write("distributed_cost", {"links": asdict(links), "prompts": prompts, "steps": steps})


def show(prompts: list[dict[str, Any]], steps: list[dict[str, Any]]) -> None:
    titles = ("layer of", "tokens", "GPUs", "exact, ms", "cells, ms", "exchange, ms", "longer with cells")
    shown = record.table(*titles, title="a layer of a prompt, modelled", words=titles[:1])
    for row in prompts:
        longer = "exchange" if row["exchange_ms"] > row["cells_ms"] else "arithmetic"
        numbers = (f"{row[name]:.3g}" for name in ("exact_ms", "cells_ms", "exchange_ms"))
        shown.add_row(row["shape"], f"{row['n']:,}", str(row["gpus"]), *numbers, longer)
    record.show(shown)
    titles = ("layer of", "keys", "GPUs", "cells, ms", "exchange, ms")
    shown = record.table(*titles, title="a layer of a step, modelled", words=titles[:1])
    for row in steps:
        shown.add_row(row["shape"], f"{row['n']:,}", str(row["gpus"]), f"{row['cells_ms']:.3f}", f"{row['exchange_ms']:.3f}")
    record.show(shown)


if __name__ == "__main__":
    main()
