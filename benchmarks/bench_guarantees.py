"""How often the (eps, delta) promises fail, over many seeds, next to how often they may.

Every method runs with exactly the sizes that its theorem asks for, on inputs chosen to be hard for it: values of two kinds,
between which the softmax is undecided, have the largest variance that the promise allows for.

    python benchmarks/bench_guarantees.py             # 1,000 seeds, writes benchmarks/results/guarantees.json
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

import nearfield as nf


@dataclass(frozen=True)
class Case:
    """A method with its sizes, inputs, and the error that it promises for every entry of the output."""

    name: str
    eps: float
    delta: float
    query: Tensor
    key: Tensor
    value: Tensor
    method: nf.LazyGumbel | nf.TopK
    promise: Tensor
    """`[Lq, columns]`"""
    joint: bool
    """whether the promise is for all entries at once (one bad entry breaks it) or for each entry by itself"""
    says: str


@dataclass(frozen=True)
class Measured:
    name: str
    method: str
    promise: str
    eps: float
    delta: float
    seeds: int
    failures: int
    rate: float
    """failures / seeds; for a promise per entry, those of the worst entry"""
    largest_error: float
    """in units of the promise, over all seeds and entries"""


def undecided(rows: int, keys: int, columns: int, spread: float, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys with logits of standard deviation `spread`, and values -1 or 1 at random."""
    generator = torch.Generator().manual_seed(seed)
    dim = 4
    query, key = (torch.randn(n, dim, generator=generator, dtype=torch.float64) for n in (rows, keys))
    value = torch.randint(0, 2, (keys, columns), generator=generator).double() * 2 - 1
    return query * spread, key, value


def cases() -> list[Case]:
    made = []
    eps, delta = 0.3, 0.1
    for name, rows, columns, spread in (("one entry", 1, 1, 0.3), ("a matrix", 4, 3, 1.0)):
        query, key, value = undecided(rows, 64, columns, spread)
        weights = (query @ key.T / math.sqrt(query.shape[-1])).softmax(-1)
        second_moment = eps * (weights @ value.square()).sqrt()
        spread_of_values = eps * (value.amax(0) - value.amin(0)).expand(rows, -1)
        median = nf.LazyGumbel(eps=eps, delta=delta, estimator="median")
        says = "|O^ - O| <= eps (sum_j P_ij V_jc^2)^(1/2) for all entries at once"
        made.append(Case(f"LazyGumbel, median, {name}", eps, delta, query, key, value, median, second_moment, True, says))
        mean = nf.LazyGumbel(eps=eps, delta=delta, estimator="mean")
        says = "|O^ - O| <= eps range(V_:c) for all entries at once"
        made.append(Case(f"LazyGumbel, mean, {name}", eps, delta, query, key, value, mean, spread_of_values, True, says))
    for name, spread, joint in (("flat logits", 0.0, False), ("a matrix", 1.0, False), ("all entries", 1.0, True)):
        query, key, value = undecided(2, 1024, 2, spread, seed=1)
        exact = nf.attention(query, key, value)
        promise = eps / (1 - eps) * (value[None] - exact[:, None]).abs().amax(1)
        topk = nf.TopK(eps=eps, delta=delta, joint=joint)
        says = f"|O^ - O| <= eps/(1-eps) max_j |V_jc - O_ic| for {'all entries at once' if joint else 'each entry'}"
        made.append(Case(f"TopK with a sampled tail, {name}", eps, delta, query, key, value, topk, promise, joint, says))
    return made


def measure(case: Case, seeds: int, track: Callable[[Iterable[int], str], Iterable[int]] = lambda seeds, name: seeds) -> Measured:
    """Run the case once per seed and count the broken promises."""
    exact = nf.attention(case.query, case.key, case.value)
    broken = torch.zeros_like(case.promise)
    failures, largest = 0, 0.0
    for seed in track(range(seeds), case.name):
        generator = torch.Generator().manual_seed(seed)
        output = nf.attention(case.query, case.key, case.value, method=case.method, generator=generator)
        error = (output - exact).abs() / case.promise
        broken += error > 1
        failures += bool((error > 1).any())
        largest = max(largest, float(error.max()))
    if not case.joint:
        failures = int(broken.max())
    return Measured(
        name=case.name,
        method=repr(case.method),
        promise=case.says,
        eps=case.eps,
        delta=case.delta,
        seeds=seeds,
        failures=failures,
        rate=failures / seeds,
        largest_error=largest,
    )


def main() -> None:
    from record import write
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1000)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    table = Table("case", "eps", "allowed", "measured", "largest error / promise")
    measured = []
    with Progress() as progress:
        for case in cases():
            result = measure(case, arguments.seeds, lambda seeds, name: progress.track(list(seeds), description=name))
            measured.append(result)
            table.add_row(case.name, f"{case.eps}", f"{case.delta}", f"{result.rate:.4f}", f"{result.largest_error:.2f}")
    Console().print(table)
    write("guarantees", [asdict(result) for result in measured])


if __name__ == "__main__":
    main()
