"""Lazy Gumbel draws: time against drawing from full softmaxes, for few keys and for many with an index that is built once, keys
read against n, and what a wrong slack does to the law.

python benchmarks/bench_lazy.py            # writes results/lazy.json and docs/figures/lazy.png
python benchmarks/bench_lazy.py --quick    # small sizes, nothing written
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from record import FIGURES, command_line, each, median_ratio, show, side_by_side, table
from torch import Tensor

import nearfield as nf
from nearfield.paper.budgets import keys_read, sublinear_from
from nearfield.synthetic import make

SIZES, DRAWS = (1024, 4096, 16_384, 65_536, 262_144), (1, 16, 256, 4096)
SCORES = 1 << 22
"""Rows times keys of every timed call."""
MOST_POINTS = 1 << 22
"""Always lazy is not timed where its draws would look at more keys than that."""
LARGE, FEW_DRAWS, LARGE_ROWS = (65_536, 131_072, 262_144, 524_288, 1_048_576), (1, 4, 16, 64), 64
PROMISES = ((0.3, 0.1), (0.3, 0.01), (0.1, 0.1))
DIM, ROUNDS = 64, 15
EPS, DELTA = 0.3, 0.1
TOLD = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25)
"""Given slack, as a share of the true one."""


def dense(query: Tensor, key: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """What one would write without the library, with sums that are right for any number of keys."""
    ids = []
    for part in query.split(max(1, (1 << 20) // len(key))):
        sums = (part @ key.T / math.sqrt(DIM)).softmax(-1).cumsum(-1, dtype=torch.float64)
        points = (1 - torch.rand(len(part), draws, generator=generator, dtype=torch.float64)) * sums[:, -1:]
        ids.append(torch.searchsorted(sums, points))
    return torch.cat(ids)


def multinomial(query: Tensor, key: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """The same with torch.multinomial, which adds up in float32."""
    parts = query.split(max(1, (1 << 20) // len(key)))
    weights = ((part @ key.T / math.sqrt(DIM)).softmax(-1) for part in parts)
    return torch.cat([torch.multinomial(x, draws, replacement=True, generator=generator) for x in weights])


def speed(n: int, draws: int, rounds: int) -> dict[str, Any]:
    """One head of Gaussian queries and keys, logits of standard deviation one."""
    query, key, _ = make("gaussian", 1, 1, n, DIM, seed=0)
    rows = min(n, SCORES // n)
    q, k, generator = query[0, 0, :rows].contiguous(), key[0, 0], torch.Generator().manual_seed(n)
    calls: dict[str, Callable[[], object]] = {
        "dense": lambda: dense(q, k, draws, generator),
        "rule": lambda: nf.sample(q, k, draws, generator=generator),
        "multinomial": lambda: multinomial(q, k, draws, generator),
    }
    seconds = side_by_side(calls, rounds)
    ratios = {name: median_ratio(seconds[name], seconds["dense"]) for name in calls}
    if rows * draws * math.sqrt(n) <= MOST_POINTS:
        lazy = {"dense": calls["dense"], "always_lazy": lambda: nf.sample(q, k, draws, always_lazy=True, generator=generator)}
        apart = side_by_side(lazy, max(1, rounds // 3))
        seconds["always_lazy"], ratios["always_lazy"] = apart["always_lazy"], median_ratio(apart["always_lazy"], apart["dense"])
    lazy_rows = 1 - float(nf.sample(q, k, draws, generator=generator).dense.double().mean())
    return {"n": n, "draws": draws, "rows": rows, "lazy_rows": lazy_rows, "seconds": seconds, "ratio_to_dense": ratios}


def with_an_index(family: str, n: int, draws: tuple[int, ...], rows: int, rounds: int) -> list[dict[str, Any]]:
    """The same with a k-means index that is built once, before the clock runs."""
    query, key, _ = make(family, 1, 1, n, DIM, seed=0)
    q, k, generator = query[0, 0, :rows].contiguous(), key[0, 0], torch.Generator().manual_seed(n)
    start = time.perf_counter()
    index = nf.KMeansIndex().build(k[None])
    building = time.perf_counter() - start
    found = []
    for count in draws:
        calls: dict[str, Callable[[], object]] = {
            "dense": lambda count=count: dense(q, k, count, generator),
            "rule": lambda count=count: nf.sample(q, k, count, index, generator=generator),
        }
        seconds = side_by_side(calls, rounds)
        drawn = nf.sample(q, k, count, index, generator=generator)
        saved = (statistics.median(seconds["dense"]) - statistics.median(seconds["rule"])) / rows
        found.append(
            {
                "family": family,
                "n": n,
                "draws": count,
                "rows": rows,
                "certified": bool(drawn.certified.all()),
                "lazy_rows": 1 - float(drawn.dense.double().mean()),
                "building": building,
                "rows_to_earn_it": building / saved if saved > 0 else None,
                "seconds": seconds,
                "ratio_to_dense": median_ratio(seconds["rule"], seconds["dense"]),
            }
        )
    return found


def crossover(rows: list[dict[str, Any]]) -> dict[str, int | None]:
    """By number of draws, the first size from which on the rule is faster than dense sampling at every size."""
    found: dict[str, int | None] = {}
    for draws in dict.fromkeys(row["draws"] for row in rows):
        mine = [row for row in rows if row["draws"] == draws]
        slow = [at for at, row in enumerate(mine) if row["ratio_to_dense"] >= 1]
        first = slow[-1] + 1 if slow else 0
        found[str(draws)] = mine[first]["n"] if first < len(mine) else None
    return found


def promised(n: int, eps: float, delta: float, rounds: int) -> dict[str, Any]:
    """Algorithm 2 with the draws that (eps, delta) asks for, against as many draws and the same means in plain torch."""
    query, key, value = make("gaussian", 1, 1, n, DIM, seed=0)
    q, generator = query[:, :, : 16 if n > 100_000 else 64].contiguous(), torch.Generator().manual_seed(n)
    method = nf.LazyGumbel(eps=eps, delta=delta)
    info = nf.estimate(q, key, value, method=method, generator=generator).info
    draws, groups = info["draws"], info["groups"]

    def plain() -> Tensor:
        parts = q[0, 0].split(max(1, (1 << 24) // (draws * DIM)))
        ids = (dense(part, key[0, 0], draws, generator).view(len(part), groups, -1) for part in parts)
        return torch.cat([value[0, 0][x].mean(2).median(1).values for x in ids])

    calls: dict[str, Callable[[], object]] = {
        "dense": plain,
        "rule": lambda: nf.attention(q, key, value, method=method, generator=generator),
    }
    seconds = side_by_side(calls, rounds)
    ratio = median_ratio(seconds["rule"], seconds["dense"])
    return {"n": n, "eps": eps, "delta": delta, "draws": draws, "rows": q.shape[2], "seconds": seconds, "ratio_to_dense": ratio}


def reading(n: int) -> dict[str, Any]:
    """Algorithm 2 with k = sqrt(n) and the draws that (eps, delta) asks for, two rows."""
    query, key, value = make("gaussian", 1, 1, n, DIM, seed=1)
    sizes = nf.budget(n, EPS, DELTA, d=DIM, theorem="median-of-means", form="tight")
    assert sizes.draws is not None
    method = nf.LazyGumbel(eps=EPS, delta=DELTA, draws=sizes.draws, estimator="mean", always_lazy=True)
    info = nf.estimate(query[:, :, :2], key, value, method=method, generator=torch.Generator().manual_seed(n)).info
    looks = info["k"] + info["draws"] * info["evaluated_per_draw"]
    return {
        "n": n,
        "draws": info["draws"],
        "looks": looks,
        "distinct": info["keys_per_query"],
        "bound": keys_read(n, EPS, DELTA, d=DIM),
    }


@dataclass(frozen=True)
class Skipping:
    """An index that misses the best keys of a row, finds the next ones, and knows no bounds."""

    missed: int
    keys: Tensor | None = None

    def build(self, keys: Tensor) -> Skipping:
        return Skipping(self.missed, keys)

    def search(self, queries: Tensor, k: int, causal_offset: Tensor) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        scores, ids = nf.ExactIndex().build(self.keys).search(queries, k + self.missed, causal_offset)
        return scores[..., self.missed :], ids[..., self.missed :]


def told(share: float, draws: int, n: int = 512, k: int = 96, rows: int = 4) -> dict[str, Any]:
    """Distance of the drawn law from the softmax, and far keys per draw, where the given slack is a share of the true one."""
    generator = torch.Generator().manual_seed(5)
    q, key = 0.5 * torch.randn(rows, 3, generator=generator), torch.randn(n, 3, generator=generator)
    index, how = Skipping(32), {"k": k, "scale": 1.0, "generator": generator}
    true = nf.index.slack(index, keys=key, queries=q, k=k, rows=rows, scale=1.0).largest
    found = nf.sample(q, key, draws, index, slack=share * true, always_lazy=True, **how)
    assert not bool(found.dense.any())
    weights = (q @ key.T).double().softmax(-1)
    return {
        "share": share,
        "slack": share * true,
        "true_slack": true,
        "distance": distance(found.ids, weights),
        "noise": distance(nf.sample(q, key, draws, **how).ids, weights),
        "per_draw": float(found.looked_at.double().mean()) / draws,
        "bound": n / k * math.exp(share * true),
        "n": n,
        "k": k,
        "draws": draws,
    }


def distance(ids: Tensor, weights: Tensor) -> float:
    """Total variation between the frequencies of keys and the softmax, mean over rows."""
    counts = torch.stack([row.bincount(minlength=weights.shape[1]) for row in ids])
    return float((counts / ids.shape[1] - weights).abs().sum(-1).mean() / 2)


def measure(quick: bool) -> dict[str, Any]:
    sizes, draws, rounds = ((256, 512), (1, 16), 1) if quick else (SIZES, DRAWS, ROUNDS)
    cases = [(n, count) for n in sizes for count in draws]
    large, few, rows = ((2048, 4096), (1, 4), 8) if quick else (LARGE, FEW_DRAWS, LARGE_ROWS)
    families = [*(("clustered", n) for n in large), ("gaussian", large[len(large) // 2])]
    kept = (
        [(n, *promise) for n in (256,) for promise in PROMISES[:1]]
        if quick
        else [(n, *promise) for n in (1024, 16_384, 262_144) for promise in PROMISES]
    )
    with_index = [
        row
        for family, n in each(families, lambda case: f"{case[0]} keys with an index, n = {case[1]}")
        for row in with_an_index(family, n, few, rows, max(1, rounds // 2))
    ]
    results = {
        "dim": DIM,
        "eps": EPS,
        "delta": DELTA,
        "speed": [speed(n, count, rounds) for n, count in each(cases, lambda case: f"n = {case[0]}, {case[1]} draws")],
        "with_index": with_index,
        "crossover": crossover([row for row in with_index if row["family"] == "clustered"]),
        "promised": [
            promised(n, eps, delta, max(1, rounds // 3))
            for n, eps, delta in each(kept, lambda case: f"n = {case[0]}, eps = {case[1]}, delta = {case[2]}")
        ],
        "reading": [reading(n) for n in each(sizes[:1] if quick else sizes[:4], lambda n: f"keys read, n = {n}")],
        "sublinear_from": {str(eps): sublinear_from(eps, DELTA, d=DIM) for eps in (0.3, 0.1)},
        "slack": [
            told(share, 2_000 if quick else 200_000) for share in each(TOLD, lambda share: f"slack, {share:g} of the true one")
        ],
    }
    tell(results)
    return results


def tell(results: dict[str, Any]) -> None:
    found = table("n", "draws", "rows", "dense, ms", "rule / dense", "always lazy / dense", "multinomial / dense", "lazy rows")
    for row in results["speed"]:
        ratios = row["ratio_to_dense"]
        written = [f"{ratios[name]:.2f}" if name in ratios else "" for name in ("rule", "always_lazy", "multinomial")]
        milliseconds = 1e3 * statistics.median(row["seconds"]["dense"])
        found.add_row(
            f"{row['n']:,}", f"{row['draws']:,}", f"{row['rows']}", f"{milliseconds:.0f}", *written, f"{row['lazy_rows']:.0%}"
        )
    show(found)
    found = table("keys", "n", "draws", "dense, ms", "rule / dense", "lazy rows", "rows to earn the index", words=("keys",))
    for row in results["with_index"]:
        milliseconds = 1e3 * statistics.median(row["seconds"]["dense"])
        earned = "" if row["rows_to_earn_it"] is None else f"{row['rows_to_earn_it']:,.0f}"
        values = (f"{milliseconds:.0f}", f"{row['ratio_to_dense']:.2f}", f"{row['lazy_rows']:.0%}", earned)
        found.add_row(row["family"], f"{row['n']:,}", f"{row['draws']:,}", *values)
    show(found)
    print("faster than dense sampling from n =", results["crossover"])
    found = table("n", "eps", "delta", "draws", "dense, ms", "LazyGumbel / dense")
    for row in results["promised"]:
        values = (f"{1e3 * statistics.median(row['seconds']['dense']):.0f}", f"{row['ratio_to_dense']:.2f}")
        found.add_row(f"{row['n']:,}", f"{row['eps']:g}", f"{row['delta']:g}", f"{row['draws']:,}", *values)
    show(found)
    found = table("n", "draws", "looks / n", "bound / n", "different keys / n", title="keys read by Algorithm 2")
    for row in results["reading"]:
        shares = (f"{row[name] / row['n']:.2f}" for name in ("looks", "bound", "distinct"))
        found.add_row(f"{row['n']:,}", f"{row['draws']:,}", *shares)
    show(found)
    found = table("slack told", "distance", "noise", "far keys per draw", "(n/k) e^c", title="the law, by the slack that is told")
    for row in results["slack"]:
        values = (row["distance"], row["noise"], row["per_draw"], row["bound"])
        found.add_row(f"{row['slack']:.2f} ({row['share']:g} of the true one)", *(f"{x:.3g}" for x in values))
    show(found)


def plot(results: dict[str, Any]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, large, middle, right) = plt.subplots(1, 4, figsize=(17, 3.8), constrained_layout=True)
    for colour, draws in enumerate(dict.fromkeys(row["draws"] for row in results["speed"])):
        for name, style in (("rule", "o-"), ("always_lazy", "x:")):
            mine = [row for row in results["speed"] if row["draws"] == draws and name in row["ratio_to_dense"]]
            label = f"{draws:,} draws" if name == "rule" else None
            values = [row["ratio_to_dense"][name] for row in mine]
            left.plot([row["n"] for row in mine], values, style, color=f"C{colour}", label=label)
    left.axhline(1, color="grey", linewidth=1)
    left.set(xscale="log", yscale="log", xlabel="keys", title="time / dense sampling\n(dotted: always lazy)")
    for draws in dict.fromkeys(row["draws"] for row in results["with_index"]):
        mine = [row for row in results["with_index"] if row["draws"] == draws and row["family"] == "clustered"]
        large.plot([row["n"] for row in mine], [row["ratio_to_dense"] for row in mine], "o-", label=f"{draws:,} draws")
    large.axhline(1, color="grey", linewidth=1)
    large.set(xscale="log", yscale="log", xlabel="keys", title="time / dense sampling,\nclustered keys, an index built once")
    sizes = [row["n"] for row in results["reading"]]
    middle.plot(sizes, [row["looks"] / row["n"] for row in results["reading"]], "o", label="measured, eps = 0.3")
    for eps, first in results["sublinear_from"].items():
        sizes = [round(first * 10 ** (0.25 * power)) for power in range(-28, 5)]
        sizes = [n for n in sizes if n >= 1024]
        reads = [keys_read(n, float(eps), results["delta"], d=results["dim"]) / n for n in sizes]
        middle.plot(sizes, reads, label=f"bound, eps = {eps}: n = {first:.1e}")
    middle.axhline(1, color="grey", linewidth=1)
    middle.set(xscale="log", yscale="log", xlabel="keys", title="keys looked at / n,\nAlgorithm 2 with k = sqrt(n)")
    shares = [row["share"] for row in results["slack"]]
    right.plot(shares, [row["distance"] for row in results["slack"]], "o-", label="distance from the softmax")
    right.plot(shares, [row["noise"] for row in results["slack"]], ":", color="C0", label="noise of as many exact draws")
    right.set(xlabel="slack that is told / true slack", title="total variation, and far keys per draw", ylim=(0, None))
    far = right.twinx()
    far.plot(shares, [row["per_draw"] for row in results["slack"]], "s-", color="C1", label="far keys per draw")
    far.plot(shares, [row["bound"] for row in results["slack"]], "--", color="C1", label="(n/k) e^c")
    far.set(yscale="log")
    right.legend(
        *(a + b for a, b in zip(right.get_legend_handles_labels(), far.get_legend_handles_labels(), strict=True)),
        fontsize=7,
        loc="lower right",
        ncols=2,
    )
    for axis in (left, large, middle):
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    figure.savefig(FIGURES / "lazy.png", dpi=150)


def main() -> None:
    command_line(__doc__, "lazy", measure, plot)


if __name__ == "__main__":
    main()
