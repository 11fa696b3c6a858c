"""The units of the efficiency experiment."""

from __future__ import annotations

from experiments.devices import dtype_on, on_cpu
from experiments.digest import digest
from experiments.efficiency.methods import (
    DIM,
    HEADS,
    METHODS,
    SPREAD,
    near_keys,
    output_megabytes,
    prepare,
    recipe,
)
from experiments.experiment import Done, Row, Rows, Unit
from experiments.isolate import Rounds
from experiments.row_errors import JUDGED_ROWS
from experiments.settings import Settings
from experiments.timing import stale, timed

LENGTHS = (5_000, 10_000, 20_000, 50_000, 100_000, 200_000, 500_000, 1_000_000)
QUICK_LENGTHS = (256, 512)
ON_CPU, ON_GPU = Rounds(5, 30.0, least=3), Rounds(10, 5.0)


def plan(settings: Settings) -> list[Unit]:
    """Lengths from short to long; each knows how the shorter ones of its method went."""
    lengths = QUICK_LENGTHS if settings.quick else LENGTHS
    return [unit(settings, method, causal, n, lengths) for n in lengths for causal in (True, False) for method in METHODS]


def unit(settings: Settings, method: str, causal: bool, n: int, lengths: tuple[int, ...]) -> Unit:
    def measure(done: Done) -> Rows:
        before = [done[name_of(method, causal, m)][0] for m in lengths if m < n]
        return [measured(settings, method, causal, n, before)]

    return Unit(name_of(method, causal, n), measure, lambda rows: stale(rows, settings), made_with(settings, method, n))


def name_of(method: str, causal: bool, n: int) -> str:
    return f"{method}, {'causal' if causal else 'no mask'}, n={n}"


def made_with(settings: Settings, method: str, n: int) -> str:
    """The digest of all that rows depend on, but for the seed, the device and the limits."""
    inputs = (HEADS, DIM, SPREAD, str(dtype_on(settings.device)))
    return digest(inputs, JUDGED_ROWS, rounds_on(settings.device), method, recipe(method, n))


def measured(settings: Settings, method: str, causal: bool, n: int, before: Rows) -> Row:
    """Time and memory of one method at one length."""
    dtype = dtype_on(settings.device)
    row: Row = {"method": method, "causal": causal, "n": n, "k": near_keys(method, n), "dtype": str(dtype).removeprefix("torch.")}
    arguments = (method, n, causal, settings.seed, settings.device)
    return timed(settings, row, before, output_megabytes(1, dtype), prepare, arguments, rounds_on(settings.device))


def rounds_on(device: str) -> Rounds:
    """Time on a GPU is dear, and calls are short there."""
    return ON_CPU if on_cpu(device) else ON_GPU
