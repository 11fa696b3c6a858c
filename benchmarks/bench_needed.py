"""How many near keys does a row need? `nearfield.needed_k` on queries and keys of a real model.

python benchmarks/bench_needed.py --text TEXT                    # writes results/needed.json and docs/figures/needed.png
python benchmarks/bench_needed.py --captured FOLDER [--quick]    # inputs that real.py has saved; quick: two layers, no files

Causal, all layers and heads, some rows of the last 1,024 of each head, tail = ceil(sqrt(n)). For each row: the smallest k whose
corrected condition holds, by its own scores. Next to it: sqrt(n), the paper's choice, and the k that is enough for any scores.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

import real
import torch
from record import each, show, table
from torch import Tensor

import nearfield as nf

LAST = 1024
EPS = (0.1, 0.3)
DELTA = 0.1
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


def needed_rows(query: Tensor, key: Tensor, rows: int, eps: float, tail: int) -> Tensor:
    """`[heads, rows]`: what rows spread evenly over the last ones of a causal call `[1, heads, n, dim]` need.

    A row at position p sees the first p + 1 keys, so it is a call of its own over these, without a mask.
    """
    tokens = query.shape[2]
    last = min(LAST, tokens)
    positions = torch.arange(tokens - last + last // rows - 1, tokens, last // rows)
    found = [
        nf.needed_k(query[:, :, p : p + 1], key[:, :, : p + 1], eps, DELTA, tail=tail, enable_gqa=True)[0, :, 0]
        for p in positions.tolist()
    ]
    return torch.stack(found, 1)


def measure(layers: Collection[tuple[int, Tensor, Tensor, Tensor]], rows: int) -> dict[str, Any]:
    found: dict[float, list[Tensor]] = {eps: [] for eps in EPS}
    numbers, tokens = [], 0
    for layer, query, key, _ in each(layers, lambda item: f"layer {item[0]}"):
        numbers.append(layer)
        tokens = query.shape[2]
        for eps in EPS:
            found[eps].append(needed_rows(query, key, rows, eps, math.isqrt(tokens - 1) + 1))
    root = math.isqrt(tokens - 1) + 1
    return {
        "tokens": tokens,
        "layers": numbers,
        "rows_per_head": rows,
        "delta": DELTA,
        "tail": root,
        "promises": [_summary(eps, torch.stack(found[eps]), tokens, root) for eps in EPS],
    }


def _summary(eps: float, needed: Tensor, tokens: int, root: int) -> dict[str, Any]:
    """`needed` is `[layers, heads, rows]`."""
    flat = needed.flatten().double()
    worst = nf.needed_k(torch.zeros(1, 1), torch.zeros(tokens, 1), eps, DELTA, tail=root)
    equal = nf.budget(tokens, eps, DELTA)
    heads = needed.flatten(0, 1).double()
    return {
        "eps": eps,
        "any_scores_with_this_tail": int(worst),
        "any_scores_with_tail_k": equal.k,
        "rows": flat.numel(),
        "mean": float(flat.mean()),
        "quantiles": {f"{q:g}": float(flat.quantile(q)) for q in QUANTILES},
        "rows_content_with_sqrt_n": float((flat <= root).double().mean()),
        "heads_content_with_sqrt_n": float((heads.amax(-1) <= root).double().mean()),
        "rows_content_with_tail_k": float((flat <= (equal.k or 0)).double().mean()),
        "saved_by_knowing": 1 - float(flat.mean()) / int(worst),
        "needed": needed.tolist(),
    }


def report(results: dict[str, Any]) -> None:
    names = [f"{float(q):.0%}" for q in results["promises"][0]["quantiles"]]
    title = f"k that rows need, n = {results['tokens']:,}, tail = {results['tail']}, delta = {results['delta']}"
    shown = table("eps", *names, "mean", "any scores", "rows content with sqrt(n)", "heads", title=title)
    for row in results["promises"]:
        shown.add_row(
            f"{row['eps']}",
            *(f"{x:,.0f}" for x in row["quantiles"].values()),
            f"{row['mean']:,.0f}",
            f"{row['any_scores_with_this_tail']:,}",
            f"{row['rows_content_with_sqrt_n']:.1%}",
            f"{row['heads_content_with_sqrt_n']:.1%}",
        )
    show(shown)


def plot(results: dict[str, Any], folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    root, tokens = results["tail"], results["tokens"]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    for row, colour in zip(results["promises"], ("tab:red", "tab:blue"), strict=True):
        needed = torch.tensor(row["needed"], dtype=torch.float64)
        ordered = needed.flatten().sort().values
        share = torch.arange(1, len(ordered) + 1) / len(ordered)
        left.step(ordered, share, where="post", color=colour, label=f"eps = {row['eps']}")
        left.axvline(row["any_scores_with_this_tail"], color=colour, linestyle=":")
        spread = needed.flatten(1).quantile(torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64), dim=1)
        right.plot(results["layers"], spread[1], color=colour, marker=".", label=f"eps = {row['eps']}, median")
        right.fill_between(results["layers"], spread[0], spread[2], color=colour, alpha=0.2, linewidth=0)
    left.axvline(root, color="black", linestyle="--")
    right.axhline(root, color="black", linestyle="--")
    left.annotate(f"sqrt(n) = {root}", (root, 1), (3, -10), textcoords="offset points", fontsize=8)
    right.annotate(f"sqrt(n) = {root}", (results["layers"][0], root), (0, 3), textcoords="offset points", fontsize=8)
    left.set(xscale="log", xlabel="k that a row needs (dotted: enough for any scores)", ylabel="share of rows", ylim=(0, 1.02))
    left.set_title(f"all rows, n = {tokens:,}, tail = {root}, delta = {results['delta']}")
    right.set(
        yscale="log", xlabel="layer", ylabel="k that a row needs", title="by layer: median, and from 10% to 90% of the rows"
    )
    left.legend(loc="upper left")
    right.legend(loc="lower left", fontsize=8)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    figure.savefig(folder / "needed.png", dpi=130)
    pyplot.close(figure)


def main() -> None:
    real.command_line(__doc__, "needed", 16, LAST, measure, report, plot)


if __name__ == "__main__":
    main()
