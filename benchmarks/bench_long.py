"""TopK with a k-means index against SDPA at long lengths, one head of 64, no mask: time, error, and where it is faster.

python benchmarks/bench_long.py            # writes results/long.json
python benchmarks/bench_long.py --quick    # two small sizes, nothing written
"""

from __future__ import annotations

import math
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from record import command_line, median_ratio, side_by_side
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import nearfield as nf
from nearfield.synthetic import make

SIZES = (4096, 16_384, 65_536, 131_072)
FAMILY = "clustered"


def measure(quick: bool) -> list[dict[str, Any]]:
    sizes = (1024, 2048) if quick else SIZES
    results = []
    table = Table("n", "SDPA, s", "TopK, s", "TopK + tail, s", "SDPA / TopK", "SDPA / TopK + tail", "errors")
    with Progress() as progress:
        bar = progress.add_task("", total=len(sizes))
        for n in sizes:
            progress.update(bar, description=f"n = {n}")
            query, key, value = make(FAMILY, 1, 1, n, 64, seed=0)
            k = math.ceil(math.sqrt(n))
            methods = {"topk": nf.TopK(k, index=nf.KMeansIndex()), "topk_tail": nf.TopK(k, tail=k, index=nf.KMeansIndex())}

            def call(name: str, query: Any = query, key: Any = key, value: Any = value, methods: Any = methods) -> torch.Tensor:
                if name == "sdpa":
                    return F.scaled_dot_product_attention(query, key, value)
                return nf.attention(query, key, value, method=methods[name], generator=torch.Generator().manual_seed(0))

            exact = call("sdpa")
            errors = {name: float(((call(name) - exact).norm(dim=-1) / exact.norm(dim=-1)).mean()) for name in methods}
            names = ("sdpa", *methods)
            seconds = side_by_side({name: (lambda name=name: call(name)) for name in names}, rounds=3, warm=False)
            ratios = {name: median_ratio(seconds["sdpa"], seconds[name]) for name in methods}
            results.append(
                {
                    "n": n,
                    "k": k,
                    "family": FAMILY,
                    "seconds": seconds,
                    "sdpa_over": ratios,
                    "mean_relative_error": errors,
                }
            )
            table.add_row(
                f"{n:,}",
                *(f"{statistics.median(seconds[name]):.2f}" for name in names),
                *(f"{ratios[name]:.2f}" for name in methods),
                ", ".join(f"{error:.3f}" for error in errors.values()),
            )
            progress.advance(bar)
    Console().print(table)
    return results


if __name__ == "__main__":
    command_line(__doc__, "long", measure)
