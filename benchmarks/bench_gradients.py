"""The Monte-Carlo gradients: error of D^Q, D^K and D^V against n, walks and eps, and their cost next to the exact formulas.

python benchmarks/bench_gradients.py            # writes results/gradients.json and docs/figures/gradients.png
python benchmarks/bench_gradients.py --quick    # small sizes, nothing written
"""

from __future__ import annotations

import math
import statistics
import time
from typing import Any

import torch
from record import FIGURES, command_line
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import nearfield as nf
from nearfield.paper.gradients import Gradients, PrintedWalk, RandomWalk

DIM = 64
SEEDS = 3


def inputs(n: int, dim: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    return [torch.randn(1, 1, n, dim, generator=generator) for _ in range(4)]


def relative(estimate: Tensor, exact: Tensor) -> float:
    return float((estimate - exact).norm() / exact.norm())


def run(n: int, dim: int, walk: RandomWalk | PrintedWalk, seeds: int) -> dict[str, Any]:
    """Relative error (Frobenius) of each gradient, root mean square over seeds, and seconds next to the exact formulas'."""
    query, key, value, upstream = inputs(n, dim)
    exact = nf.gradients.exact(query, key, value, upstream)
    start = time.perf_counter()
    nf.gradients.exact(query, key, value, upstream)
    exact_seconds = time.perf_counter() - start
    errors: dict[str, list[float]] = {name: [] for name in Gradients._fields}
    seconds = []
    for seed in range(seeds):
        generator = torch.Generator().manual_seed(seed)
        start = time.perf_counter()
        got = nf.gradients.estimate(query, key, value, upstream, walk, generator=generator)
        seconds.append(time.perf_counter() - start)
        for name in errors:
            errors[name].append(relative(getattr(got, name), getattr(exact, name)))
    return {
        "n": n,
        "dim": dim,
        "walk": repr(walk),
        "relative_error": {name: statistics.fmean(e * e for e in values) ** 0.5 for name, values in errors.items()},
        "seconds": statistics.median(seconds),
        "exact_seconds": exact_seconds,
    }


def run_weighted(n: int, dim: int, k: int) -> dict[str, Any]:
    """The same for the default gradient of TopK: k near keys exactly, k drawn ones for the rest."""
    query, key, value, upstream = (x.requires_grad_() for x in inputs(n, dim))
    exact = nf.gradients.exact(query, key, value, upstream)
    method = nf.TopK(k, tail=k)
    start = time.perf_counter()
    output = nf.attention(query, key, value, method=method, generator=torch.Generator().manual_seed(0))
    got = torch.autograd.grad(output, (query, key, value), upstream.detach())
    seconds = time.perf_counter() - start
    errors = {name: relative(a, b) for name, a, b in zip(Gradients._fields, got, exact, strict=True)}
    return {"n": n, "dim": dim, "walk": repr(method), "relative_error": errors, "seconds": seconds, "exact_seconds": None}


WALKS = {256: (8, 32, 128, 512), 1024: (8, 32, 128, 512), 4096: (8, 32, 128), 16_384: (8, 32)}
"""By n. On flat inputs a draw looks at sqrt(n) keys, so many walks from many rows take long."""
PRINTED = ((32, 8, 0.5), (32, 8, 0.2), (32, 8, 0.1), (128, 8, 0.2), (256, 8, 0.2))


def measure(quick: bool) -> dict[str, Any]:
    shared = [(n, count) for n, counts in WALKS.items() for count in counts if not quick or n * count <= 8192]
    printed = PRINTED[:1] if quick else PRINTED
    results: dict[str, Any] = {"shared": [], "weighted": [], "printed": [], "shared_on_printed_sizes": []}
    with Progress() as progress:
        bar = progress.add_task("", total=len(shared) + len(printed))
        for n, count in shared:
            progress.update(bar, description=f"n = {n}, {count} walks per row")
            results["shared"].append({"walks": count, **run(n, DIM, RandomWalk(walks=count), SEEDS)})
            if count == 32:
                results["weighted"].append({"walks": 32, **run_weighted(n, DIM, 16)})
            progress.advance(bar)
        for n, dim, eps in printed:
            progress.update(bar, description=f"as printed, n = {n}, eps = {eps}")
            results["printed"].append({"eps": eps, **run(n, dim, PrintedWalk(eps=eps), SEEDS)})
            results["shared_on_printed_sizes"].append({"walks": 128, **run(n, dim, RandomWalk(walks=128), SEEDS)})
            progress.advance(bar)
    show(results)
    return results


def show(results: dict[str, Any]) -> None:
    for form, rows in results.items():
        table = Table("n", "d", "parameter", "D^Q", "D^K", "D^V", "seconds", "exact, s", title=f"relative error, {form}")
        for row in rows:
            parameter = f"{row['walks']} walks" if "walks" in row else f"eps = {row['eps']}"
            errors = [f"{row['relative_error'][name]:.3g}" for name in ("query", "key", "value")]
            table.add_row(
                f"{row['n']:,}",
                f"{row['dim']}",
                parameter,
                *errors,
                f"{row['seconds']:.3f}",
                f"{row['exact_seconds'] or math.nan:.3f}",
            )
        Console().print(table)


def plot(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(11, 3.5), constrained_layout=True)
    shared = results["shared"]
    for n in dict.fromkeys(row["n"] for row in shared):
        mine = [row for row in shared if row["n"] == n]
        axes[0].plot([row["walks"] for row in mine], [row["relative_error"]["key"] for row in mine], "o-", label=f"n = {n:,}")
    axes[0].set(xscale="log", yscale="log", xlabel="walks per row", title="relative error of $D^K$, shared walks")
    axes[0].legend(fontsize=8)
    for name, label in (("query", "$D^Q$"), ("key", "$D^K$"), ("value", "$D^V$")):
        mine = [row for row in shared if row["walks"] == 32]
        line = axes[1].plot([row["n"] for row in mine], [row["relative_error"][name] for row in mine], "o-", label=label)
        drawn = results["weighted"]
        axes[1].plot(
            [row["n"] for row in drawn], [row["relative_error"][name] for row in drawn], "s--", color=line[0].get_color()
        )
    axes[1].set(xscale="log", yscale="log", xlabel="n", title="32 walks per row (solid), TopK(16, 16) (dashed)")
    axes[1].legend(fontsize=8)
    for key, label in (("printed", "as printed"), ("shared_on_printed_sizes", "128 shared walks")):
        rows = results[key]
        axes[2].scatter([row["seconds"] for row in rows], [row["relative_error"]["key"] for row in rows], label=label)
    axes[2].set(xscale="log", yscale="log", xlabel="seconds", title="relative error of $D^K$, n = 32 to 256, d = 8")
    axes[2].legend(fontsize=8)
    for axis in axes:
        axis.title.set_fontsize(10)
        axis.axhline(1, color="grey", linestyle=":", linewidth=1)
        axis.grid(alpha=0.3)
    figure.savefig(FIGURES / "gradients.png", dpi=150)


if __name__ == "__main__":
    command_line(__doc__, "gradients", measure, plot)
