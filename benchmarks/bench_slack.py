"""The slack c of every index, on random rows: how far the best key that it leaves out lies above the worst one that it returns.

python benchmarks/bench_slack.py            # writes results/slack.json, in a minute
python benchmarks/bench_slack.py --quick    # small sizes, nothing written

Lazy draws with an index of slack c look at e^c times as many keys as with a true top k, if c is known, and are wrong if it is
taken to be smaller. k = sqrt(n), inner products over sqrt(dim). "Read" is the share of all keys that a search scores.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from record import command_line, each, show, table

import nearfield as nf
from nearfield.synthetic import make

LENGTH, DIM, ROWS = 16_384, 64, 299
FAMILIES = ("clustered", "gaussian")


def indices(n: int) -> dict[str, nf.Index]:
    lists = math.isqrt(n)
    return {
        "KMeansIndex": nf.KMeansIndex(),
        "CellIndex": nf.CellIndex(),
        "ConcentricLSH": nf.ConcentricLSH(),
        "Faiss IVF, 8 lists": nf.FaissIndex(f"IVF{lists},Flat", nprobe=8),
        "Faiss HNSW": nf.FaissIndex("HNSW32"),
    }


def slack_of(name: str, index: nf.Index, family: str, n: int, rows: int) -> dict[str, Any]:
    query, key, _ = make(family, 1, 1, n, DIM, seed=0)
    k = math.isqrt(n)
    generator = torch.Generator().manual_seed(0)
    found = nf.index.slack(index, keys=key[0], queries=query[0], k=k, rows=rows, generator=generator)
    some = query[0][:, found.chosen[0]] / math.sqrt(DIM)
    _, near, scored = index.build(key[0]).find(some, k)
    best = (some @ key[0].mT).topk(k).indices
    recall = torch.stack([torch.isin(one, own).double().mean() for one, own in zip(best[0], near[0], strict=True)])
    return {
        "family": family,
        "index": name,
        "n": n,
        "k": k,
        "rows": found.per_row.numel(),
        "median": found.quantile(0.5),
        "largest": found.largest,
        "bounds": found.share,
        "recall": float(recall.mean()),
        "read": None if scored is None else float(scored.double().mean()) / n,
    }


def measure(quick: bool) -> dict[str, Any]:
    n, rows = (1024, 20) if quick else (LENGTH, ROWS)
    cases = [(family, *case) for family in FAMILIES for case in indices(n).items()]
    found = [slack_of(name, index, family, n, rows) for family, name, index in each(cases, lambda case: f"{case[0]}, {case[1]}")]
    shown = table("keys", "index", "c, median", "largest", "e^c", "recall", "read", title="slack", words=("keys", "index"))
    for row in found:
        read = "" if row["read"] is None else f"{row['read']:.1%}"
        largest = row["largest"]
        shown.add_row(
            row["family"],
            row["index"],
            f"{row['median']:.2f}",
            f"{largest:.2f}",
            f"{math.exp(largest):.1f}",
            f"{row['recall']:.3f}",
            read,
        )
    show(shown)
    return {"dim": DIM, "rows": found}


def main() -> None:
    command_line(__doc__, "slack", measure)


if __name__ == "__main__":
    main()
