"""The units of the experiment on indices."""

from __future__ import annotations

from typing import NamedTuple

from experiments.digest import digest
from experiments.efficiency.methods import dtype_on, on_cpu
from experiments.experiment import Done, Rows, Unit
from experiments.indices.methods import DIM, JUDGED_ROWS, PROBES, TAIL, heads_on, methods_on, prepare, recipe
from experiments.isolate import Rounds
from experiments.settings import Settings
from experiments.timing import stale, timed

LENGTHS = (10_000, 30_000, 100_000, 300_000, 1_000_000)
QUICK_LENGTHS = (512, 1024)
ON_CPU, ON_GPU = Rounds(5, 10.0), Rounds(5, 5.0)


class Series(NamedTuple):
    """What is measured length after length."""

    method: str
    kind: str
    causal: bool

    def name(self, n: int) -> str:
        return f"{self.method}, {self.kind}, {'causal' if self.causal else 'no mask'}, n={n}"


def series_on(device: str) -> list[Series]:
    """On clusters with and without a mask and a tail; on inputs without structure, where recall is in question, without."""
    methods = methods_on(device)
    tails = [f"{method}{TAIL}" for method in methods if method != "sdpa"]
    clustered = [Series(method, "clustered", causal) for causal in (False, True) for method in (*methods, *tails)]
    return [*clustered, *(Series(method, "uniform", False) for method in methods)]


def plan(settings: Settings) -> list[Unit]:
    """Lengths from short to long; each knows how the shorter ones of its series went."""
    lengths = QUICK_LENGTHS if settings.quick else LENGTHS
    return [unit(settings, series, n, lengths) for n in lengths for series in series_on(settings.device)]


def unit(settings: Settings, series: Series, n: int, lengths: tuple[int, ...]) -> Unit:
    def measure(done: Done) -> Rows:
        before = [done[series.name(m)][0] for m in lengths if m < n]
        chosen, dtype = recipe(series.method, n), dtype_on(settings.device)
        row = {**series._asdict(), "n": n, "k": chosen and chosen.k, "tail": chosen and chosen.tail}
        row |= {"heads": heads_on(settings.device), "dtype": str(dtype).removeprefix("torch.")}
        per_key = row["heads"] * DIM * dtype.itemsize / 2**20
        arguments = (series.method, series.kind, n, series.causal, settings.seed, settings.device)
        return [timed(settings, row, before, per_key, prepare, arguments, rounds_on(settings.device))]

    sizes = (heads_on(settings.device), DIM, JUDGED_ROWS, PROBES, str(dtype_on(settings.device)), rounds_on(settings.device))
    return Unit(series.name(n), measure, lambda rows: stale(rows, settings), digest(*sizes, series, recipe(series.method, n)))


def rounds_on(device: str) -> Rounds:
    return ON_CPU if on_cpu(device) else ON_GPU
