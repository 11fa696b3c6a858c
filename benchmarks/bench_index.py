"""Query cost of the indices against the number of keys n, clustered keys, k = sqrt(n): time per query, recall, fitted exponent.

python benchmarks/bench_index.py            # writes results/index.json and docs/figures/index.png
python benchmarks/bench_index.py --quick    # two small sizes, nothing written
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from record import FIGURES, command_line, exponent, side_by_side
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import nearfield as nf

SIZES = (4096, 16_384, 65_536, 262_144)
DIM, QUERIES, JUDGED = 64, 2048, 256
SEED = 11


def indices(n: int) -> dict[str, Any]:
    cells = math.ceil(math.sqrt(n))
    return {
        "exact": nf.ExactIndex(),
        "k-means": nf.KMeansIndex(probes=8),
        "concentric LSH": nf.ConcentricLSH(),
        "Faiss IVF": nf.FaissIndex(f"IVF{cells},Flat", nprobe=8),
    }


def inputs(n: int, noise: float) -> tuple[Tensor, Tensor]:
    """About sqrt(n) clusters of sqrt(n) keys: centres N(0, 1), within a cluster sd 0.3. Queries are keys plus noise."""
    generator = torch.Generator().manual_seed(SEED + n)
    centres = torch.randn(math.isqrt(n), DIM, generator=generator)
    keys = centres[torch.randint(len(centres), (n,), generator=generator)] + 0.3 * torch.randn(n, DIM, generator=generator)
    chosen = keys[torch.randint(n, (QUERIES,), generator=generator)]
    return keys[None], (chosen + noise * torch.randn(QUERIES, DIM, generator=generator))[None]


def recall(found: Tensor, keys: Tensor, queries: Tensor, k: int) -> float:
    true = (queries[0, :JUDGED] @ keys[0].T).topk(k).indices
    hits = torch.zeros(JUDGED, keys.shape[1] + 1, dtype=torch.bool).scatter_(1, found[0, :JUDGED] % (keys.shape[1] + 1), True)
    return float(hits.gather(1, true).double().mean())


def measure(quick: bool) -> dict[str, Any]:
    sizes = (1024, 2048) if quick else SIZES
    rows = []
    with Progress() as progress:
        bar = progress.add_task("", total=2 * len(sizes))
        for noise in (0.1, 0.3):
            for n in sizes:
                progress.update(bar, description=f"n = {n}, query noise {noise}")
                k = math.ceil(math.sqrt(n))
                keys, queries = inputs(n, noise)
                built, build_seconds = {}, {}
                for name, index in indices(n).items():
                    start = time.perf_counter()
                    built[name] = index.build(keys)
                    build_seconds[name] = time.perf_counter() - start
                seconds = side_by_side({name: _search(b, queries, k) for name, b in built.items()}, rounds=3)
                for name, b in built.items():
                    rows.append(
                        {
                            "index": name,
                            "n": n,
                            "k": k,
                            "query_noise": noise,
                            "recall": recall(b.search(queries, k)[1], keys, queries, k),
                            "build_seconds": build_seconds[name],
                            "microseconds_per_query": statistics.median(seconds[name]) / QUERIES * 1e6,
                        }
                    )
                progress.advance(bar)
    fitted = {}
    for noise in (0.1, 0.3):
        for name in indices(sizes[0]):
            mine = [row for row in rows if row["index"] == name and row["query_noise"] == noise]
            fitted[f"{name}, query noise {noise}"] = exponent(
                [row["n"] for row in mine], [row["microseconds_per_query"] for row in mine]
            )
    results = {"dim": DIM, "queries": QUERIES, "rows": rows, "exponents": fitted}
    show(results)
    return results


def _search(built: Any, queries: Tensor, k: int) -> Any:
    return lambda: built.search(queries, k)


def show(results: dict[str, Any]) -> None:
    table = Table("index", "query noise", "n", "recall", "us / query", "build, s")
    for row in results["rows"]:
        table.add_row(
            row["index"],
            f"{row['query_noise']}",
            f"{row['n']:,}",
            f"{row['recall']:.3f}",
            f"{row['microseconds_per_query']:.0f}",
            f"{row['build_seconds']:.2f}",
        )
    Console().print(table)
    for name, value in results["exponents"].items():
        print(f"{name}: time per query ~ n^{value:.2f}")


def plot(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    for name in dict.fromkeys(row["index"] for row in results["rows"]):
        mine = [row for row in results["rows"] if row["index"] == name and row["query_noise"] == 0.1]
        sizes = [row["n"] for row in mine]
        slope = results["exponents"][f"{name}, query noise 0.1"]
        left.plot(sizes, [row["microseconds_per_query"] for row in mine], "o-", label=f"{name}: $n^{{{slope:.2f}}}$")
        right.plot(sizes, [row["recall"] for row in mine], "o-")
    left.set(xscale="log", yscale="log", xlabel="keys", title="microseconds per query, k = sqrt(n)")
    right.set(xscale="log", xlabel="keys", title="recall", ylim=(0.5, 1.01))
    right.axhline(0.9, color="grey", linestyle=":", linewidth=1)
    for axis in (left, right):
        axis.set_xticks(sizes, [f"{n // 1024}k" for n in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    left.legend(fontsize=8)
    figure.savefig(FIGURES / "index.png", dpi=150)


if __name__ == "__main__":
    command_line(__doc__, "index", measure, plot)
