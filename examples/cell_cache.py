"""Decode with a cache that retrieves: one layer, many keys, a new token at a time; exact attention next to it.

python examples/cell_cache.py                                  # seconds on two cores
python examples/cell_cache.py --keys 16384,262144 --steps 64 --threads 2

Keys and queries have structure (`nearfield.synthetic`, "clustered"), as those of trained models have. A token reads the latest
keys, the first ones, and a few cells of 16 keys or more; of all other cells it reads a few numbers. `hf.CellCache` is this for
all layers of a Transformers model (examples/long_document.py). On a CPU, one thread is the default: the work of a step is so
small that several threads would mostly wait for each other.
"""

from __future__ import annotations

import statistics
import time

import torch
import torch.nn.functional as F
from example_options import Parser, count, device_name, usual_device
from rich.console import Console
from rich.table import Table

from nearfield.app.arguments import counts
from nearfield.cells.cache import CellStore
from nearfield.synthetic import make


def decode(keys: int, steps: int, heads: int, dim: int, place: str) -> tuple[float, float, float, int]:
    """Median milliseconds of a step with exact attention and with cells, the mean relative error, and the number of cells."""
    query, key, value = (x.to(place) for x in make("clustered", 1, 4 * heads, keys + steps, dim, kv_heads=heads))
    store = CellStore()
    store.append(key[:, :, :keys], value[:, :, :keys])  # the prompt
    store.attend(query[:, :, keys - 1 : keys])  # groups the prompt into cells, once
    seconds: list[tuple[float, float]] = []
    errors = []
    for step in range(keys, keys + steps):
        new = slice(step, step + 1)
        _wait(place)
        start = time.perf_counter()
        exact = F.scaled_dot_product_attention(query[:, :, new], key[:, :, : step + 1], value[:, :, : step + 1], enable_gqa=True)
        _wait(place)
        middle = time.perf_counter()
        store.append(key[:, :, new], value[:, :, new])
        found = store.attend(query[:, :, new])
        _wait(place)
        seconds.append((middle - start, time.perf_counter() - middle))
        errors.append(float((found - exact).norm() / exact.norm()))
    exact_ms, cells_ms = (1e3 * statistics.median(times) for times in zip(*seconds, strict=True))
    return exact_ms, cells_ms, sum(errors) / steps, store.cells


def _wait(place: str) -> None:
    if place.startswith("cuda"):
        torch.cuda.synchronize()


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--keys", default="32768,131072", help="of the prompt, one or several numbers")
    parser.add_argument("--steps", type=count, default=32, help="new tokens")
    parser.add_argument("--heads", type=count, default=2, help="of keys; there are four times as many of queries")
    parser.add_argument("--dim", type=count, default=64, help="of a head")
    parser.add_argument("--threads", type=count, default=1, help="on a CPU")
    parser.add_argument("--device", type=device_name, default=usual_device())
    options = parser.parse_args()
    try:
        lengths = counts("--keys", options.keys)
    except ValueError as error:
        parser.error(str(error))
    torch.set_num_threads(options.threads)
    table = Table(
        "keys",
        "cells",
        "SDPA, ms",
        "cells, ms",
        "SDPA / cells",
        "error",
        title=f"A step on {options.device}, {options.threads} thread(s)",
    )
    console, lost = Console(), []
    for keys in lengths:
        with console.status(f"{keys:,} keys"):
            exact, ours, error, cells = decode(keys, options.steps, options.heads, options.dim, options.device)
        table.add_row(f"{keys:,}", f"{cells:,}", f"{exact:.2f}", f"{ours:.2f}", f"{exact / ours:.2f}", f"{error:.2%}")
        if ours > exact:
            lost.append(f"{keys:,}")
    console.print(table)
    console.print("error: distance from exact attention over its norm, mean over the steps.")
    if lost:
        console.print(f"The cache LOSES at {' and '.join(lost)} keys: exact attention is faster there. It is for long contexts.")
    else:
        console.print("The cache wins at all of these lengths.")


if __name__ == "__main__":
    main()
