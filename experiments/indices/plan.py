"""The units of the experiment on indices."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from experiments.devices import dtype_on, on_cpu
from experiments.digest import digest
from experiments.experiment import Done, Row, Rows, Unit
from experiments.indices.methods import DIM, PROBES, RECALL_ROWS, TAIL, heads_on, is_missing, methods_on, prepare, recipe
from experiments.isolate import Rounds
from experiments.row_errors import JUDGED_ROWS
from experiments.settings import Settings
from experiments.timing import stale, timed

LENGTHS = (10_000, 30_000, 100_000, 300_000, 1_000_000)
ON_GPU_LENGTHS = LENGTHS[1:]
"""Calls of 10,000 keys are too short there to be fitted."""
SHORT = 100_000
QUICK_LENGTHS = (512, 1024)
ON_CPU, ON_GPU = Rounds(3, 10.0), Rounds(5, 5.0)
JUDGING = 60.0
"""Seconds: recall builds another index, and a GPU compiles its kernels for one head."""


class Series(NamedTuple):
    """What is measured length after length."""

    method: str
    kind: str
    causal: bool

    def name(self, n: int) -> str:
        return f"{self.method}, {self.kind}, {'causal' if self.causal else 'no mask'}, n={n}"


QUICK_SERIES = (
    Series("sdpa", "clustered", False),
    Series(f"cells{TAIL}", "clustered", True),
    Series("ivf", "clustered", False),
    Series("kmeans", "uniform", False),
)


def series_on(device: str) -> list[list[Series]]:
    """In groups: our own indices and SDPA on clusters, other indices there, inputs without structure, the tails of the others."""
    methods = methods_on(device)
    ours = [name for name in ("cells", f"cells{TAIL}", "sdpa", "kmeans") if name.removesuffix(TAIL) in methods]
    others = [name for name in methods if name not in ours]
    tails = [f"{name}{TAIL}" for name in (*others, "kmeans")]
    parts = [[Series(name, "clustered", causal) for name in names for causal in (False, True)] for names in (ours, others, tails)]
    return [parts[0], parts[1], [Series(name, "uniform", False) for name in methods], parts[2]]


def plan(settings: Settings) -> list[Unit]:
    """Those that matter most first, for the whole run may have a limit: on a CPU short lengths of all groups, then, on a GPU at
    once, group after group, and the tails of the others at last.

    In every group lengths from short to long; each knows how the shorter ones of its series went.
    """

    def units(groups: list[list[Series]], lengths: tuple[int, ...]) -> list[Unit]:
        return [unit(settings, series, n, settings.is_late) for group in groups for n in lengths for series in group]

    if settings.quick:
        methods = methods_on(settings.device)
        return units([[series for series in QUICK_SERIES if series.method.removesuffix(TAIL) in methods]], lengths_of(settings))
    *first, last = series_on(settings.device)
    lengths = lengths_of(settings)
    short = tuple(n for n in lengths if n <= SHORT and on_cpu(settings.device))
    everything = [series for group in first for series in group]
    return [*units([everything], short), *units(first, lengths[len(short) :]), *units([last], lengths)]


def unit(settings: Settings, series: Series, n: int, is_over: Callable[[], bool]) -> Unit:
    def measure(done: Done) -> Rows:
        shorter = [done[series.name(m)][0] for m in lengths_of(settings) if m < n]
        return [measured(settings, series, n, shorter, is_over)]

    sizes = (heads_on(settings.device), DIM, JUDGED_ROWS, RECALL_ROWS, PROBES, str(dtype_on(settings.device)))
    made_with = digest(*sizes, rounds_on(settings.device), series, recipe(series.method, n))
    return Unit(series.name(n), measure, lambda rows: is_due(rows, settings), made_with)


def measured(settings: Settings, series: Series, n: int, before: Rows, is_over: Callable[[], bool]) -> Row:
    """Time, memory, error and recall; or why there are none: a limit was passed ("time", "memory"), it was not begun in the time
    of the whole run ("left"), or what it needs is not installed ("missing")."""
    chosen, dtype = recipe(series.method, n), dtype_on(settings.device)
    row: Row = {**series._asdict(), "n": n, "k": chosen and chosen.k, "tail": chosen and chosen.tail}
    row |= {"heads": heads_on(settings.device), "dtype": str(dtype).removeprefix("torch."), "device": settings.device}
    if is_missing(series.method):
        return row | {"status": "missing"}
    if is_over():
        return row | {"status": "left", "limit": settings.total_limit}
    per_key = row["heads"] * DIM * dtype.itemsize / 2**20
    arguments = (series.method, series.kind, n, series.causal, settings.seed, settings.device)
    return timed(settings, row, before, per_key, prepare, arguments, rounds_on(settings.device), JUDGING)


def is_due(rows: Rows, settings: Settings) -> bool:
    """Whether rows are to be measured again: what was left or missing, and what a lower limit stopped."""
    (row,) = rows
    if row["status"] == "missing":
        return not is_missing(row["method"])
    return row["status"] == "left" or stale(rows, settings)


def lengths_of(settings: Settings) -> tuple[int, ...]:
    return QUICK_LENGTHS if settings.quick else LENGTHS if on_cpu(settings.device) else ON_GPU_LENGTHS


def rounds_on(device: str) -> Rounds:
    return ON_CPU if on_cpu(device) else ON_GPU
