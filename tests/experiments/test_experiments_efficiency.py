"""The experiment on efficiency: what is measured again, how growth is fitted, and that verdicts follow the numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

from rich.console import Console
from scipy import stats

import nearfield as nf
from experiments import isolate, runner
from experiments.devices import dtype_on
from experiments.efficiency import EXPERIMENT, methods, plan, tell
from experiments.efficiency.draw import draw, label
from experiments.efficiency.methods import METHODS, NAMES, output_megabytes, prepare
from experiments.efficiency.plan import LENGTHS, made_with, measured
from experiments.efficiency.tell import compared, exponents, faster_than_naive, faster_than_sdpa, memory, million
from experiments.experiment import Row, Rows
from experiments.growth import extrapolated, fitted
from experiments.isolate import Rounds
from experiments.row_errors import mean_error
from experiments.settings import Settings
from experiments.timing import hopeless, stale
from experiments.timing_words import stops

QUIET = Console(quiet=True)
SIZES = (10_000, 20_000, 50_000, 100_000)


def ran(method: str, causal: bool, n: int, seconds: float, megabytes: float = 100.0) -> Row:
    row: Row = {"method": method, "causal": causal, "n": n, "k": None, "dtype": "float32", "status": "ok", "seconds": seconds}
    return row | {"fastest": seconds, "slowest": seconds, "rounds": 3, "megabytes": megabytes, "load": 1.0, "error": 0.01}


def stopped(method: str, causal: bool, n: int, status: str, predicted: float | None = None, limit: float = 8.0) -> Row:
    row: Row = {"method": method, "causal": causal, "n": n, "k": None, "dtype": "float32", "status": status, "limit": limit}
    return row | {"predicted": predicted, "tried": predicted is None}


def all_of(n: int = 20_000, **seconds: float) -> Rows:
    """All methods at one length, with and without a mask; a second each where no other time is given."""
    return [ran(m, causal, n, seconds.get(m.replace("-", "_"), 1.0)) for m in METHODS for causal in (True, False)]


@pytest.mark.parametrize(
    ("sqrt", "fourth", "verdict"),
    [(0.5, 0.5, "confirmed"), (0.5, 2.0, "partly"), (2.0, 2.0, "refuted"), (0.97, 0.97, "refuted"), (0.94, 0.94, "confirmed")],
)
def test_faster_means_by_more_than_the_margin(sqrt: float, fourth: float, verdict: str) -> None:
    rows = all_of(topk_sqrt=sqrt, topk_fourth=fourth)
    assert faster_than_naive(rows).verdict == verdict
    assert faster_than_sdpa(rows).verdict == "beyond"
    for finding in (faster_than_naive(rows), faster_than_sdpa(rows)):
        assert ("slower" in finding.evidence) == (fourth > 1.05)
        assert bool(finding.why) == (verdict != "confirmed")


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.5, "2x as fast as"), (0.97, "is as fast as"), (1.03, "is as fast as"), (2.0, "2x slower")]
)
def test_times_within_the_margin_are_alike(seconds: float, words: str) -> None:
    assert words in compared(all_of(cells=seconds), "cells", "sdpa", True)


def test_speed_is_judged_at_the_longest_common_length_and_not_without_one() -> None:
    rows = (
        all_of(10_000, naive=0.1)
        + all_of(20_000, naive=9.0)
        + [stopped("naive", causal, 50_000, "memory") for causal in (True, False)]
    )
    assert faster_than_naive(rows).verdict == "confirmed"
    assert faster_than_naive([row for row in rows if row["method"] != "naive"]).verdict == "untested"


def growing(sqrt: float, fourth: float, sizes: tuple[int, ...] = SIZES, noise: float = 1.0) -> Rows:
    """Times that grow with these powers; `noise` is a factor on every other one."""
    powers = {"topk-sqrt": sqrt, "topk-fourth": fourth}
    return [
        ran(m, causal, n, (n / sizes[0]) ** powers.get(m, 2.0) * noise ** (i % 2))
        for i, n in enumerate(sizes)
        for m in METHODS
        for causal in (True, False)
    ]


@pytest.mark.parametrize(
    ("sqrt", "fourth", "verdict"),
    [(1.5, 1.6, "confirmed"), (1.5, 2.0, "partly"), (2.0, 2.0, "refuted"), (1.76, 2.1, "refuted"), (1.8, 1.9, "untested")],
)
def test_the_verdict_on_scaling_follows_the_fits(sqrt: float, fourth: float, verdict: str) -> None:
    finding = exponents(growing(sqrt, fourth))
    assert finding.verdict == verdict
    assert ("is quadratic. Less needs an index" in finding.why) == (verdict in ("partly", "refuted"))
    assert ("scores all pairs" in finding.why) == (verdict == "confirmed")
    assert f"Between the last two lengths the exponent is {sqrt:.2f} for" in finding.evidence
    assert ("Left open" in finding.evidence) == (1.75 < sqrt < 2)
    assert f"n^{{{sqrt:.2f} ± 0.00}}" in finding.evidence


def test_noise_does_not_make_a_quadratic_method_sub_quadratic() -> None:
    """A slow round at a short length tilts the fit below the threshold; its margin tells."""
    rows = growing(2.0, 2.0, (10_000, 20_000, 50_000))
    rows = [row | {"seconds": 2.2 * row["seconds"]} if row["n"] == 10_000 else row for row in rows]
    fit = fitted([row for row in rows if row["method"] == "topk-sqrt" and row["causal"]])
    assert fit is not None
    assert fit.exponent < 1.75 < fit.exponent + fit.margin
    finding = exponents(rows)
    assert (finding.verdict, finding.why) == ("untested", "")
    assert "Left open" in finding.evidence


def test_scaling_is_not_judged_by_fewer_than_three_long_lengths() -> None:
    short = [row | {"seconds": row["seconds"] / 300} for row in growing(1.5, 1.5)]  # below 10 ms at the first two lengths
    for rows in (growing(1.5, 1.5, (10_000, 20_000)), short):
        finding = exponents(rows)
        assert finding.verdict == "untested"
        assert not finding.why
    assert exponents([row for row in growing(1.5, 1.5) if row["n"] > 10_000]).verdict == "confirmed"


def test_a_fit_finds_power_factor_and_margin() -> None:
    rows = [row for row in growing(1.5, 2.0) if row["method"] == "topk-sqrt" and row["causal"]]
    short = [ran("topk-sqrt", True, 500, 1e9), ran("topk-sqrt", True, 5_000, 0.009)]
    fit = fitted([*short, *rows, stopped("topk-sqrt", True, 200_000, "time")])
    assert fit is not None
    assert fit.exponent == pytest.approx(1.5)
    assert fit.margin == pytest.approx(0.0, abs=1e-6)
    assert fit.at(1_000_000) == pytest.approx(1000.0)
    x, y = [0.0, 1.0, 2.0, 3.0], [0.0, 1.2, 1.8, 3.0]  # slope 0.96, residuals 0.06, 0.18, -0.18, 0.06 off the line
    noisy = fitted([ran("naive", True, round(10_000 * math.exp(a)), math.exp(b)) for a, b in zip(x, y, strict=True)])
    assert noisy is not None
    assert noisy.exponent == pytest.approx(0.96, abs=1e-3)
    assert noisy.margin == pytest.approx(stats.t.ppf(0.975, 2) * math.sqrt(0.072 / 2 / 5), abs=5e-3)


MEMORY = [
    ([ran("naive", True, 20_000, 1, 5000), stopped("naive", True, 50_000, "memory", 30_000.0)], True),
    ([ran("naive", True, 20_000, 1, 5000), ran("naive", True, 50_000, 1, 6000)], False),
    ([ran("naive", True, 20_000, 1, 5000), stopped("naive", True, 50_000, "time")], None),
]
TOPK_MEMORY = [
    ([ran("topk-sqrt", True, 50_000, 1, 5000), stopped("topk-sqrt", True, 100_000, "memory")], True),
    (
        [ran("topk-sqrt", True, n, 1, n / 100) for n in (20_000, 50_000)] + [stopped("topk-sqrt", True, 100_000, "time", 1e3)],
        False,
    ),
]


@pytest.mark.parametrize(("naive", "naive_stops"), MEMORY)
@pytest.mark.parametrize(("topk", "topk_stops"), TOPK_MEMORY)
def test_the_verdict_on_memory_follows_the_stops(naive: Rows, naive_stops: bool | None, topk: Rows, topk_stops: bool) -> None:
    finding = memory(naive + topk)
    known = [case for case in (naive_stops, topk_stops) if case is not None]
    assert finding.verdict == ("confirmed" if all(known) else "partly" if any(known) else "refuted")
    assert bool(finding.why) == (not topk_stops)
    assert ("1000 MB at 100,000" in finding.evidence) == (not topk_stops)


def test_memory_is_not_judged_by_short_lengths() -> None:
    assert memory(all_of(512)).verdict == "untested"


def at_a_million(*statuses: str) -> Rows:
    """Cells get there; the paper's methods, with and without a mask, as is said, "tried" where memory was not only predicted."""
    rows = growing(2.0, 2.0) + [ran("cells", causal, 1_000_000, 60.0, 5000) for causal in (True, False)]
    cases = [(m, causal) for m in ("topk-sqrt", "topk-fourth") for causal in (True, False)]
    for (m, causal), status in zip(cases, statuses, strict=True):
        predicted = None if "tried" in status else 1e6
        stop = stopped(m, causal, 1_000_000, status.removeprefix("tried "), predicted, 100.0)
        rows.append(ran(m, causal, 1_000_000, 90.0) if status == "ok" else stop)
    return rows


@pytest.mark.parametrize(
    ("statuses", "verdict", "reached"),
    [
        (("ok", "ok", "ok", "ok"), "confirmed", "4"),
        (("time", "time", "ok", "ok"), "partly", "2"),
        (("memory", "memory", "memory", "ok"), "partly", "1"),
        (("time", "time", "time", "time"), "untested", "none"),
        (("memory", "memory", "memory", "memory"), "untested", "none"),
        (("tried memory", "memory", "tried memory", "tried memory"), "untested", "none"),
        (("tried memory",) * 4, "refuted", "none"),
    ],
)
def test_the_verdict_on_a_million_follows_who_gets_there(statuses: tuple[str, ...], verdict: str, reached: str) -> None:
    finding = million(at_a_million(*statuses))
    assert finding.verdict == verdict
    assert f"{reached} of 4 runs" in finding.evidence
    assert ("10,000 s and" in finding.evidence) == ("time" in statuses)  # (10^6 / 10^4)^2, by the fit
    assert ("time runs out" in finding.why) == ("time" in statuses)
    assert "Cells (causal): in 60 s" in finding.evidence


def test_a_million_is_not_judged_where_it_was_not_asked_for() -> None:
    assert million(all_of(512)).verdict == "untested"


def test_all_limits_are_named() -> None:
    rows = [stopped("sdpa", True, 1000, "time", limit=x) for x in (100.0, 60.0, 100.0)]
    assert "60 or 100 s for a call" in stops(rows)
    assert "60 or 100 s and 8 GB for a call" in stops([*rows, stopped("naive", True, 1000, "memory")])
    assert stops(all_of()) == "No limit was reached."


def test_memory_grows_with_the_output_and_what_a_block_needs() -> None:
    """Blocks of 100 MB at any length, beside an output that grows."""
    sure = output_megabytes(1, torch.float32)
    assert output_megabytes(1_000_000, torch.bfloat16) == pytest.approx(1220.7, abs=0.1)
    rows = [ran("topk-sqrt", True, n, 1.0, 100 + sure * n) for n in (20_000, 50_000)]
    assert extrapolated(rows, 1_000_000, "megabytes", sure) == pytest.approx(100 + sure * 1e6)
    falling = [ran("topk-sqrt", True, 20_000, 2.0, 300.0), ran("topk-sqrt", True, 50_000, 1.0, 200.0)]
    assert extrapolated(falling, 100_000, "megabytes") == pytest.approx(200.0)
    assert extrapolated(falling, 100_000, "seconds") == pytest.approx(2.0)
    row = measured(Settings(time_limit=1e-9), "topk-sqrt", True, 1_000_000, rows)
    assert row["status"] == "time"


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        ((8.0, 10.0), "memory"),  # twice as much memory as there is, all the time that there is
        ((15.0, 4.0), "time"),
        ((1.0, 4.0), "memory"),
        ((20.0, 4.0), "time"),
        ((8.0, 20.0), "memory"),
        ((20.0, 20.0), None),
    ],
)
def test_the_limit_that_is_passed_further_is_named(limits: tuple[float, float], status: str | None) -> None:
    """16 GB and 10 s are expected."""
    rows = [ran("naive", True, n, 10 * (n / 40_000) ** 2, 16 * 1024 * (n / 40_000) ** 2) for n in (10_000, 20_000)]
    settings = Settings(memory_limit=limits[0], time_limit=limits[1])
    found = hopeless(settings, 40_000, rows, output_megabytes(1, torch.float32))
    assert (found or {}).get("status") == status
    if found is not None:
        assert found["predicted"] == pytest.approx(10.0 if status == "time" else 16 * 1024, rel=0.05)


STOPS = [stopped("sdpa", True, 1000, "time", limit=60.0), stopped("naive", True, 1000, "memory", limit=8.0)]


@pytest.mark.parametrize(
    ("limits", "again"),
    [
        ({}, [False, False]),
        ({"time_limit": 100.0}, [True, False]),
        ({"memory_limit": 16.0}, [False, True]),
        ({"time_limit": 30.0}, [False, False]),
    ],
)
def test_raised_limits_are_tried_again_and_the_same_are_not(limits: dict[str, float], again: list[bool]) -> None:
    settings = replace(Settings(time_limit=60.0, memory_limit=8.0), **limits)
    assert [stale([row], settings) for row in STOPS] == again
    assert not stale([ran("sdpa", True, 1000, 1.0)], settings)
    unit = next(unit for unit in plan(settings) if unit.key == "sdpa, causal, n=5000")
    assert unit.stale([STOPS[0]]) == again[0]


def test_other_sizes_have_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings()
    units = {unit.key: unit.digest for unit in plan(settings)}
    assert len(units) == 2 * len(METHODS) * len(LENGTHS)
    assert all(units.values())
    assert units == {unit.key: unit.digest for unit in plan(replace(settings, time_limit=1.0, memory_limit=1.0, seed=5))}
    assert made_with(replace(settings, device="cuda"), "sdpa", 5000) != units["sdpa, causal, n=5000"]
    module = import_module("experiments.efficiency.plan")
    for name, value in (("HEADS", 4), ("DIM", 32), ("SPREAD", 2.0), ("JUDGED_ROWS", 8), ("ON_CPU", Rounds(1, 1.0))):
        with monkeypatch.context() as changed:
            changed.setattr(module, name, value)
            assert not set(units.values()) & {unit.digest for unit in plan(settings)}, name
    with monkeypatch.context() as changed:
        changed.setattr(
            module, "recipe", lambda method, n: nf.Cells(probes=1) if method == "cells" else methods.recipe(method, n)
        )
        differs = {unit.key for unit in plan(settings) if unit.digest != units[unit.key]}
        assert differs == {key for key in units if key.startswith("cells")}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("causal", [True, False])
def test_errors_are_in_units_of_the_values(method: str, causal: bool) -> None:
    call, judge = prepare(method, 300, causal, 0, "cpu")
    error = judge(call())["error"]
    if method in ("naive", "sdpa"):
        assert error < 1e-6
    else:
        assert error < {"topk-sqrt": 0.4, "topk-fourth": 0.8, "cells": 0.02}[method]
        assert error > 0


def test_an_error_is_the_same_whatever_the_size_of_the_values() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, 2, 64, 8, generator=generator) for _ in range(3))
    right = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    off = right + value.square().sum(-1).mean().sqrt() * torch.eye(8)[0] / 4
    assert mean_error(off, query, key, value, False, 0) == pytest.approx(0.25, rel=1e-3)
    assert mean_error(3 * off, query, key, 3 * value, False, 0) == pytest.approx(0.25, rel=1e-3)
    half = [x.bfloat16() for x in (query, key, value)]
    rounded = torch.nn.functional.scaled_dot_product_attention(*(x.float() for x in half))
    assert mean_error(rounded, *half, causal=False, seed=0) < 1e-6


def test_a_gpu_computes_in_half_precision_and_a_cpu_does_not() -> None:
    assert (dtype_on("cpu"), dtype_on("cuda"), dtype_on("cuda:1")) == (torch.float32, torch.bfloat16, torch.bfloat16)


def test_rows_hold_the_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    found = isolate.Measured("ok", [3.0, 1.0, 2.0, 9.0, 2.5], 10.0, {"error": 0.1})
    asked: dict[str, Any] = {}
    monkeypatch.setattr(isolate, "apart", lambda *_, **how: asked.update(how) or found)
    row = measured(Settings(), "sdpa", True, 5000, [])
    assert (row["seconds"], row["fastest"], row["slowest"], row["rounds"]) == (2.5, 1.0, 9.0, 5)
    assert (row["dtype"], row["error"]) == ("float32", 0.1)
    assert (asked["warm_up"], asked["rounds"].patience) == (False, 30.0)
    assert measured(Settings(device="cuda"), "sdpa", True, 5000, [])["dtype"] == "bfloat16"
    assert (asked["warm_up"], asked["rounds"].patience) == (True, 5.0)


def test_a_run_is_told_drawn_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(quick=True, out=tmp_path)
    section = runner.run(EXPERIMENT, settings, QUIET)
    assert "float32" in section.here
    assert all("over the rms norm of the values; float32" in table.title for table in section.tables)
    assert not any("later" in text for text in (section.paper, section.here))
    monkeypatch.setattr(isolate, "here", lambda *_, **__: pytest.fail("measured again"))
    runner.run(EXPERIMENT, settings, QUIET)


def test_every_method_has_one_name_and_the_paper_s_marks_have_its_colour() -> None:
    assert [label(m) for m in METHODS] == ["naive", "SDPA", "TopK, k = $n^{1/2}$", "TopK, k = $n^{1/4}$", "Cells"]
    assert list(tell(growing(2.0, 2.0)).tables[0].head[1:]) == list(NAMES.values())
    axis = draw(growing(2.0, 2.0))["efficiency"].axes[0]
    diamonds = [line.get_color() for line in axis.lines if line.get_marker() == "D"]
    labels = [text.get_color() for text in axis.texts if text.get_text().startswith("paper: ")]
    assert diamonds == labels
    assert len(labels) == 3
