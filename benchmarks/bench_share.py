"""Errors of rows that open cells together without a mask, by how many keys they open, next to rows by themselves.

python benchmarks/bench_share.py            # writes results/share.json: 4 minutes on one core
python benchmarks/bench_share.py --quick    # one small size, nothing written

One head of 64, float32, cells of the sizes that a GPU has by default, on a CPU. Blocks of 128 rows, in the order of their best
cells or (`consecutive`) as they come. An error is the mean over 512 rows of ||output - exact|| / ||exact||, and over seeds.
"""

from __future__ import annotations

import math
import statistics
from itertools import product
from typing import Any

import torch
from record import command_line, each, show, table
from torch import Tensor

import nearfield as nf
from nearfield.cells.operator import Given, Recipe, cells_attention
from nearfield.cells.partition import to_plain
from nearfield.cells.planned import planned_attention
from nearfield.cells.sizes import SHARE, CellSizes, default_cell_size, default_probes
from nearfield.synthetic import QKV, make

DIM, ROWS, RUN = 64, 512, 128
KINDS = ("strewn", "runs", "gaussian", "local")
LENGTHS, SEEDS = (8192, 16_384, 32_768), 3
BUDGETS = (54, 108, 150)
"""Keys that a block opens, in units of n^(1/4)."""
CONSECUTIVE = 108


def inputs(kind: str, n: int, seed: int) -> QKV:
    """A family of nearfield.synthetic; `strewn` is its `clustered`, and in `runs` 128 keys in a row come from one cluster."""
    if kind != "runs":
        return make({"strewn": "clustered"}.get(kind, kind), 1, 1, n, DIM, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    few = round(math.sqrt(n))

    def normal(rows: int) -> Tensor:
        return torch.randn(rows, DIM, generator=generator)

    def pick() -> Tensor:
        return torch.randint(few, (-(-n // RUN),), generator=generator).repeat_interleave(RUN)[:n]

    centres, values, own, wanted = normal(few), normal(few), pick(), pick()
    query = 7.0 / math.sqrt(DIM) * centres[wanted] + 0.3 * normal(n)
    key, value = centres[own] + 0.3 * normal(n), values[own] + 0.5 * normal(n)
    return query[None, None], key[None, None], value[None, None]


def errors(tensors: QKV) -> dict[str, float]:
    """By how rows open cells."""
    query, key, value = (x[0] for x in tensors)
    n = key.shape[1]
    rows = torch.randperm(n, generator=torch.Generator().manual_seed(1))[:ROWS]
    logits = query[0, rows].double() @ key[0].double().T / math.sqrt(DIM)
    exact = logits.softmax(-1) @ value[0].double()
    cell_size = default_cell_size(n, on_gpu=True)
    visible, seed = torch.full((1, n), n), torch.tensor(0)

    def of(share: int, probes: int, in_order: bool = True) -> float:
        sizes = CellSizes(1, 0, 0, 16, cell_size, min(probes, n // cell_size), 0, 1, share)
        recipe = Recipe(sizes, DIM**-0.5, 0.0, *to_plain(nf.KMeans(iterations=2)), "torch")
        call = query, key, value, visible, seed, recipe
        result = cells_attention(*call)
        if not in_order:
            result = planned_attention(*call, Given(result.cell_of, order=torch.arange(n)[None]))
        return float(((result.output[0, rows] - exact).norm(dim=1) / exact.norm(dim=1)).mean())

    budgets = {budget: max(1, round(budget * n**0.25 / cell_size)) for budget in (*BUDGETS, CONSECUTIVE)}
    found = {"row by row": of(1, default_probes(n, cell_size, on_gpu=True))}
    found |= {f"in order, {budget}": of(SHARE, budgets[budget]) for budget in BUDGETS}
    return {**found, f"consecutive, {CONSECUTIVE}": of(SHARE, budgets[CONSECUTIVE], in_order=False)}


def measure(quick: bool) -> list[dict[str, Any]]:
    lengths, seeds = ((1024,), 1) if quick else (LENGTHS, SEEDS)
    results = []
    for kind, n in each(list(product(KINDS, lengths)), lambda case: f"{case[0]}, {case[1]:,} keys"):
        found = [errors(inputs(kind, n, seed)) for seed in range(seeds)]
        results.append({"kind": kind, "n": n, "errors": {way: statistics.mean(x[way] for x in found) for way in found[0]}})
    shown = table("inputs", "n", *results[0]["errors"], title="mean relative error, no mask", words=("inputs",))
    for one in results:
        shown.add_row(one["kind"], f"{one['n']:,}", *(f"{error:.5f}" for error in one["errors"].values()))
    show(shown)
    return results


def main() -> None:
    command_line(__doc__, "share", measure)


if __name__ == "__main__":
    main()
