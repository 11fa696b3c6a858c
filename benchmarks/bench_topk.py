"""TopK (exact index) against SDPA and against the paper's listing: time and peak memory; causal, 10 heads of 64, k = sqrt(n).

python benchmarks/bench_topk.py            # writes results/topk.json and docs/figures/topk.png
python benchmarks/bench_topk.py --quick    # two small sizes, nothing written
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from record import FIGURES, command_line, median_ratio, peak_memory, side_by_side
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import nearfield as nf

HEADS, DIM = 10, 64
SIZES = (2048, 4096, 8192, 10_000, 16_384, 32_768)
NAMES = {"sdpa": "SDPA", "topk": "TopK", "listing": "listing, dense top-k", "listing_by_row": "listing, top-k row by row"}
Search = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


def top_of_all(query: Tensor, key: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The listing does not define its `topk(..., masking=True)`. A kind reading: all scores at once, masked."""
    scores = query @ key.T
    future = torch.ones(scores.shape, dtype=torch.bool).triu(1)
    return torch.topk(scores.masked_fill(future, -torch.inf), k)


def top_by_row(query: Tensor, key: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The other reading, and what an index without a mask per query amounts to: each row searches the keys it sees."""
    scores = torch.full((len(query), k), -torch.inf)
    ids = torch.zeros(len(query), k, dtype=torch.long)
    for i in range(len(query)):
        found = torch.topk(key[: i + 1] @ query[i], min(k, i + 1))
        scores[i, : i + 1], ids[i, : i + 1] = found.values, found.indices
    return scores, ids


def listing(query: Tensor, key: Tensor, value: Tensor, k: int, search: Search) -> Tensor:
    """The forward pass of the paper's appendix, with its loops, mended only where it does not run."""
    batch, heads, length, dim = query.shape
    output = torch.zeros(batch, heads, length, dim)
    for b in range(batch):
        for h in range(heads):
            scores, chosen = search(query[b, h], key[b, h], k)
            scores = scores * (1 / math.sqrt(dim))
            largest = torch.max(scores, dim=1)[0]
            weights = torch.exp(scores - largest.unsqueeze(1))
            total = torch.sum(weights, dim=1).unsqueeze(1)
            sums = torch.bmm(weights.unsqueeze(1), value[b, h, chosen])
            output[b, h] = sums.squeeze(1) / total
    return output


def task(name: str, n: int) -> Callable[[], Tensor]:
    generator = torch.Generator().manual_seed(n)
    query, key, value = (torch.randn(1, HEADS, n, DIM, generator=generator) for _ in range(3))
    k = math.ceil(math.sqrt(n))
    calls: dict[str, Callable[[], Tensor]] = {
        "sdpa": lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True),
        "topk": lambda: nf.attention(query, key, value, is_causal=True, method=nf.TopK(k)),
        "listing": lambda: listing(query, key, value, k, top_of_all),
        "listing_by_row": lambda: listing(query, key, value, k, top_by_row),
    }
    return calls[name]


def measure(quick: bool) -> list[dict[str, object]]:
    sizes = (512, 1024) if quick else SIZES
    results = []
    ratios = ("TopK / SDPA", "dense listing / TopK", "row listing / TopK")
    table = Table("n", *(f"{name}, s" for name in NAMES.values()), *ratios, "peak MB of each")
    with Progress() as progress:
        bar = progress.add_task("", total=len(sizes))
        for n in sizes:
            progress.update(bar, description=f"n = {n}")
            calls = {name: task(name, n) for name in NAMES}
            if n <= 10_000:
                _, ours, *others = (call() for call in calls.values())
                for other in others:
                    # Only a near tie for the last of the k places may be decided differently.
                    differ = (ours - other).abs().amax(-1) > 1e-4
                    assert float(differ.double().mean()) < 1e-3, "one function, three programs"
            seconds = side_by_side(calls, rounds=7 if n <= 4096 else 3 if n <= 10_000 else 2 if n <= 16_384 else 1, warm=False)
            memory = {name: peak_memory(task, name, n) for name in NAMES}
            results.append(
                {
                    "n": n,
                    "k": math.ceil(math.sqrt(n)),
                    "seconds": seconds,
                    "topk_over_sdpa": median_ratio(seconds["topk"], seconds["sdpa"]),
                    "listing_over_topk": median_ratio(seconds["listing"], seconds["topk"]),
                    "listing_by_row_over_topk": median_ratio(seconds["listing_by_row"], seconds["topk"]),
                    "peak_megabytes": memory,
                }
            )
            table.add_row(
                f"{n:,}",
                *(f"{statistics.median(seconds[name]):.3f}" for name in NAMES),
                f"{results[-1]['topk_over_sdpa']:.2f}",
                f"{results[-1]['listing_over_topk']:.1f}",
                f"{results[-1]['listing_by_row_over_topk']:.1f}",
                ", ".join(f"{memory[name]:.0f}" for name in NAMES),
            )
            progress.advance(bar)
    Console().print(table)
    return results


def plot(results: list[dict[str, dict[str, list[float]]]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.6), constrained_layout=True)
    sizes = [row["n"] for row in results]
    for name, label in NAMES.items():
        left.plot(sizes, [statistics.median(row["seconds"][name]) for row in results], "o-", label=label)
        right.plot(sizes, [row["peak_megabytes"][name] for row in results], "o-", label=label)
    for axis, title in ((left, "seconds"), (right, "peak memory beyond the inputs, MB")):
        axis.set(xscale="log", yscale="log", xlabel="n", title=title)
        axis.set_xticks(sizes, [f"{n // 1000}k" for n in sizes], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    right.legend(fontsize=8, loc="upper left")
    figure.savefig(FIGURES / "topk.png", dpi=150)


if __name__ == "__main__":
    command_line(__doc__, "topk", measure, plot)
