"""Concentric LSH with the sizes of its theory: is the near key found, what does it cost, and do draws over it follow the softmax?

python benchmarks/bench_lsh.py            # writes results/lsh.json and docs/figures/lsh.png
python benchmarks/bench_lsh.py --quick    # two small sizes, nothing written

`sizes`: tables, hashes and projections per query of `nearfield.lsh_budget`, next to the n products of a full scan.
`found`: keys on the unit sphere, for each query one key planted at the cosine S1 exactly; the share of queries whose key is
    found, with the promised number of tables and with a part of it, next to what the promise and the law of the tables say.
`draws`: Algorithm 5 (LazyGumbel over concentric LSH): total variation between 4,000 draws and the softmax, next to that of
    draws from the softmax itself, and keys scored for 64 draws; for tight clusters of keys of nearly equal norm, as the theory
    assumes them, and for loose ones of any norm.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from record import FIGURES, command_line, each, show, table
from torch import Tensor

import nearfield as nf

PAIRS = ((0.95, 0.3), (0.9, 0.5), (0.8, 0.4), (0.5, 0.1))
LENGTHS = (256, 1024, 4096, 16_384, 65_536, 262_144, 1_048_576, 4_194_304)
S1, S2 = PAIRS[0]
DIM = 32
SHARES = (1.0, 0.25, 0.0625)
"""Shares of the promised number of tables."""
ROWS, DRAWS, FEW = 8, 4_000, 64


def sizes() -> list[dict[str, Any]]:
    found = []
    for s1, s2 in PAIRS:
        for n in LENGTHS:
            asked = nf.lsh_budget(n, s1, s2)
            found.append(
                {
                    "s1": s1,
                    "s2": s2,
                    "n": n,
                    "rho": asked.rho,
                    "tables": asked.tables,
                    "hashes": asked.hashes,
                    "rungs": asked.rungs,
                    "projections": asked.projections,
                    "bytes_per_key": asked.bytes_per_key,
                    "promise": asked.promise,
                }
            )
    return found


def planted(n: int, queries: int, cosine: float, seed: int) -> tuple[Tensor, Tensor]:
    """Keys `[1, n, dim]` on the unit sphere, mean zero (each has its opposite), and queries `[1, queries, dim]`.

    Query i has exactly this cosine with key i; the norms of the keys are all 1, so the reduction of MIPS to kNN adds nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    half = torch.nn.functional.normalize(torch.randn(n // 2, DIM, generator=generator, dtype=torch.float64), dim=-1)
    keys = torch.cat([half, -half])
    near = keys[:queries]
    across = torch.randn(queries, DIM, generator=generator, dtype=torch.float64)
    across = torch.nn.functional.normalize(across - (across * near).sum(-1, keepdim=True) * near, dim=-1)
    return keys[None], (cosine * near + math.sqrt(1 - cosine**2) * across)[None]


def found(n: int, seeds: int) -> list[dict[str, Any]]:
    """How often `search` finds the planted key. The search stops at the first radius with a candidate: k is 1."""
    promised = nf.ConcentricLSH.from_theory(n, S1, S2)
    asked = nf.lsh_budget(n, S1, S2)
    queries = n // 2
    rows = []
    for share in SHARES:
        tables = max(1, round(share * promised.tables))
        hits, scored, scans = 0, 0, 0
        for seed in range(seeds):
            keys, rows_of = planted(n, queries, S1, seed)
            # One candidate is enough: the promise is about the near key, and a full scan would find it anyway.
            index = replace(promised, tables=tables, seed=seed, enough=1 / math.sqrt(n))
            answer = index.build(keys).find(rows_of, 1)
            full = answer.scored[0] >= n if answer.scored is not None else torch.zeros(queries, dtype=torch.bool)
            hits += int(((answer.ids[0, :, 0] == torch.arange(queries)) & ~full).sum())
            scans += int(full.sum())
            scored += int(answer.scored.sum()) if answer.scored is not None else 0
        rows.append(
            {
                "n": n,
                "share_of_tables": share,
                "tables": tables,
                "hashes": asked.hashes,
                "queries": seeds * queries,
                "found": hits,
                "full_scans": scans,
                "promised_failure_rate": asked.delta,
                "failures_by_the_law_of_one_rung": (1 - asked.p1**asked.hashes) ** tables,
                "scored_per_query": scored / (seeds * queries),
                "projections": tables * asked.hashes,
            }
        )
    return rows


def clusters(n: int, kind: str) -> tuple[Tensor, Tensor]:
    """About sqrt(n) clusters of sqrt(n) keys, and some queries near keys."""
    generator = torch.Generator().manual_seed(n)
    noise = {"tight": 0.1, "loose": 0.3}[kind]
    centres = torch.randn(math.isqrt(n), DIM, generator=generator)
    if kind == "tight":
        centres = math.sqrt(DIM) * torch.nn.functional.normalize(centres, dim=-1)
    keys = centres[torch.randint(len(centres), (n,), generator=generator)] + noise * torch.randn(n, DIM, generator=generator)
    return keys, 3 * (keys[:ROWS] + 0.1 * torch.randn(ROWS, DIM, generator=generator))


def draws(n: int, kind: str) -> list[dict[str, Any]]:
    """Draws of a few rows by several indices. With the identity for values, the mean of the draws is their frequencies."""
    keys, queries = clusters(n, kind)
    softmax = (queries @ keys.T / math.sqrt(DIM)).softmax(-1)
    drawn = torch.multinomial(softmax, DRAWS, replacement=True, generator=torch.Generator().manual_seed(0))
    frequencies = torch.zeros_like(softmax).scatter_add_(1, drawn, torch.full(drawn.shape, 1 / DRAWS))
    noise = float((frequencies - softmax).abs().sum(-1).mean() / 2)
    indices = {
        "exact": nf.ExactIndex(),
        "k-means": nf.KMeansIndex(),
        "LSH, default sizes": nf.ConcentricLSH(),
        "LSH, sizes of the theory": nf.ConcentricLSH.from_theory(n, S1, S2),
        "LSH, a tenth of the tables": replace(made := nf.ConcentricLSH.from_theory(n, S1, S2), tables=max(1, made.tables // 10)),
    }
    rows = []
    for name, index in indices.items():
        method = nf.LazyGumbel(draws=DRAWS, estimator="mean", index=index, always_lazy=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # full scans are told in the table
            est = nf.estimate(queries, keys, torch.eye(n), method=method, generator=torch.Generator().manual_seed(1))
            few = nf.estimate(queries, keys, torch.eye(n), method=replace(method, draws=FEW))
            ids = index.build(keys[None]).find(queries[None] / math.sqrt(DIM), math.isqrt(n - 1) + 1)
        true = softmax.topk(ids.ids.shape[-1]).indices
        same = (ids.ids[0, :, :, None] == true[:, None, :]).any(1).double().mean()
        rows.append(
            {
                "n": n,
                "clusters": kind,
                "index": name,
                "certified": est.info["certified"],
                "dense_rows": est.info["dense_rows"],
                "recall": float(same),
                "total_variation": float((est.output - softmax).abs().sum(-1).mean() / 2),
                "total_variation_of_the_softmax_itself": noise,
                "keys_per_query": few.info["keys_per_query"],
                "scored_by_the_search": float(ids.scored.double().mean()) if ids.scored is not None else None,
            }
        )
    return rows


def measure(quick: bool) -> dict[str, Any]:
    lengths = (256, 512) if quick else (256, 1024, 4096)
    seeds = {256: 40, 512: 10, 1024: 10, 4096: 3}
    results: dict[str, Any] = {"s1": S1, "s2": S2, "dim": DIM, "sizes": sizes(), "found": [], "draws": []}
    for n in each(lengths, lambda n: f"near keys found, n = {n:,}"):
        results["found"] += found(n, 2 if quick else seeds[n])
    for kind in each(("tight", "loose"), lambda kind: f"draws, {kind} clusters"):
        results["draws"] += draws(256 if quick else 2048, kind)
    report(results)
    return results


def report(results: dict[str, Any]) -> None:
    shown = table("S1, S2", "n", "rho", "hashes", "tables", "projections / n", "bytes per key", title="sizes for 1 - 1/n^2")
    for row in results["sizes"]:
        work = f"{row['projections'] / row['n']:.3g}"
        name = f"{row['s1']}, {row['s2']}"
        numbers = (f"{row['n']:,}", f"{row['rho']:.2f}", f"{row['hashes']}", f"{row['tables']:,}", work)
        shown.add_row(name, *numbers, f"{row['bytes_per_key']:,}")
    show(shown)
    shown = table(
        "n", "tables", "missed", "of", "promised", "one rung alone", "scored", "projections", "full scans", title="near keys"
    )
    for row in results["found"]:
        shown.add_row(
            f"{row['n']:,}",
            f"{row['tables']}",
            f"{row['queries'] - row['found'] - row['full_scans']:,}",
            f"{row['queries']:,}",
            f"{row['promised_failure_rate']:.2g}" if row["share_of_tables"] == 1 else "-",
            f"{row['failures_by_the_law_of_one_rung']:.2g}",
            f"{row['scored_per_query']:.0f}",
            f"{row['projections']:,}",
            f"{row['full_scans']:,}",
        )
    show(shown)
    titles = ("index", "n", "clusters", "certified", "dense rows", "recall", "TV", "of the softmax", "keys per query")
    shown = table(*titles, title="Algorithm 5", words=("index",))
    for row in results["draws"]:
        numbers = (
            f"{row['recall']:.3f}",
            f"{row['total_variation']:.4f}",
            f"{row['total_variation_of_the_softmax_itself']:.4f}",
            f"{row['keys_per_query']:.0f}",
        )
        shown.add_row(row["index"], f"{row['n']}", row["clusters"], f"{row['certified']}", f"{row['dense_rows']}", *numbers)
    show(shown)


def plot(results: dict[str, Any], folder: Path = FIGURES) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, middle, right) = pyplot.subplots(1, 3, figsize=(14, 4.2), constrained_layout=True)
    for pair in PAIRS:
        rows = [row for row in results["sizes"] if (row["s1"], row["s2"]) == pair]
        left.plot(
            [row["n"] for row in rows], [row["projections"] / row["n"] for row in rows], marker=".", label=f"S1, S2 = {pair}"
        )
    left.axhline(1, color="black", linestyle="--", linewidth=1)
    left.annotate("a full scan", (LENGTHS[0], 1), (0, 3), textcoords="offset points", fontsize=8)
    left.set(xscale="log", yscale="log", xlabel="n", ylabel="projections per query / n", title="hashing alone, for 1 - 1/n^2")
    left.legend(fontsize=8)
    for n in sorted({row["n"] for row in results["found"]}):
        rows = [row for row in results["found"] if row["n"] == n]
        missed = [(row["queries"] - row["found"] - row["full_scans"]) / row["queries"] for row in rows]
        tables = [row["tables"] for row in rows]
        (line,) = middle.plot(tables, [max(x, 1e-8) for x in missed], marker="o", linestyle="", label=f"n = {n:,}")
        middle.plot(tables, [row["failures_by_the_law_of_one_rung"] for row in rows], color=line.get_color(), linestyle=":")
        middle.axhline(rows[0]["promised_failure_rate"], color=line.get_color(), linewidth=0.7)
    title = "near keys missed (at the bottom: none)"
    middle.set(xscale="log", yscale="log", xlabel="tables", ylabel="share of queries", title=title, ylim=(5e-9, 1))
    middle.legend(fontsize=8, title="solid: promised; dotted: (1 - p1^m)^L", title_fontsize=8)
    for place, name in enumerate(dict.fromkeys(row["index"] for row in results["draws"])):
        rows = [row for row in results["draws"] if row["index"] == name]
        for row, marker in zip(rows, "o^", strict=True):
            x, y = row["keys_per_query"] / row["n"], row["total_variation"]
            right.plot(x, y, marker, color=f"C{place}", label=name if marker == "o" else None, alpha=0.8)
    for row, line in zip({row["clusters"]: row for row in results["draws"]}.values(), ("-", "--"), strict=True):
        level = row["total_variation_of_the_softmax_itself"]
        right.axhline(level, color="black", linestyle=line, linewidth=0.7, label=f"draws from the softmax, {row['clusters']}")
    right.set(yscale="log", xlabel=f"keys scored / n, {FEW} draws", ylabel=f"total variation to the softmax, {DRAWS:,} draws")
    right.set_title("Algorithm 5; o: tight clusters, ^: loose")
    right.legend(fontsize=7, loc="upper right")
    for axes in (left, middle, right):
        axes.grid(alpha=0.3)
    figure.savefig(folder / "lsh.png", dpi=130)
    pyplot.close(figure)


def main() -> None:
    command_line(__doc__, "lsh", measure, plot)


if __name__ == "__main__":
    main()
