"""The experiment on indices: what is measured, what is left out and said to be, and that verdicts follow the numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

from rich.console import Console

import nearfield as nf
from experiments import isolate, runner
from experiments.experiment import Row, Rows
from experiments.indices import EXPERIMENT, methods, plan
from experiments.indices.draw import draw
from experiments.indices.methods import INPUTS, NAMES, TAIL, inputs_of, recall, recipe
from experiments.indices.plan import LENGTHS, Series, is_due, measured, series_on
from experiments.indices.tell import against_sdpa, both, found_at, gaps, million, scaling, space, table, tell
from experiments.settings import Settings
from experiments.store import read

QUIET = Console(quiet=True)
SIZES = LENGTHS[:4]
CELLS = Series("cells", "clustered", False)
LEFT = {"status": "left", "limit": 400.0}
LATE = {"status": "time", "limit": 60.0, "predicted": 99.0, "tried": False}


def ran(series: Series, n: int, seconds: float, megabytes: float, found: float = 1.0, device: str = "cpu") -> Row:
    row: Row = {**series._asdict(), "n": n, "k": 1, "tail": 0, "heads": 1, "dtype": "float32", "device": device, "status": "ok"}
    row |= {"seconds": seconds, "fastest": seconds, "slowest": seconds, "rounds": 3, "megabytes": megabytes, "load": 1.0}
    return row | {"error": 0.1, "recall": None if series.method == "sdpa" else found}


def growing(power: float, found: float = 1.0, sizes: tuple[int, ...] = SIZES, device: str = "cpu", **powers: float) -> Rows:
    """Times that grow with a power, memory with it over 3/2; exact attention and exact search with the square."""
    powers = {"sdpa": 2.0, "exact": 2.0, **powers}
    rows = []
    for n in sizes:
        for series in (one for group in series_on(device) for one in group):
            seconds = (n / sizes[0]) ** powers.get(series.method.removesuffix(TAIL), power)
            rows.append(ran(series, n, seconds, 20 * seconds ** (2 / 3), found, device))
    return rows


@pytest.mark.parametrize(
    ("power", "powers", "verdict"),
    [(1.5, {}, "confirmed"), (2.0, {}, "refuted"), (1.5, {"lsh": 2.0}, "partly"), (1.85, {}, "untested")],
)
def test_the_verdict_on_scaling_is_that_of_indices_that_do_not_scan(power: float, powers: dict[str, float], verdict: str) -> None:
    rows = growing(power, **powers)
    finding = scaling(rows)
    assert finding.verdict == verdict
    assert "exact search n^{2.00 ± 0.00}" in finding.evidence
    assert f"cells n^{{{power:.2f} ± 0.00}}" in finding.evidence
    assert ("Left open: k-means (clusters, no mask)" in finding.evidence) == (verdict == "untested")
    assert both(rows).verdict == verdict


@pytest.mark.parametrize("power", [1.5, 2.0])
def test_noise_is_no_verdict(power: float) -> None:
    """Times off by a factor of four, by turns: the margin reaches both sides of the threshold."""
    rows = [row | {"seconds": row["seconds"] * 4.0 ** (SIZES.index(row["n"]) % 2)} for row in growing(power)]
    assert scaling(rows).verdict == both(rows).verdict == "untested"
    assert "none of 25 stay below" in scaling(rows).evidence
    short = growing(power, sizes=SIZES[:2])
    assert scaling(short).verdict == both(short).verdict == "untested"
    assert "nothing to fit" in scaling(short).evidence


@pytest.mark.parametrize(("noisy", "verdict"), [(("lsh",), "confirmed"), (("cells", "kmeans", "ivf", "hnsw"), "untested")])
def test_a_few_fits_among_many_that_are_open_are_no_verdict(noisy: tuple[str, ...], verdict: str) -> None:
    rows = [
        row | {"seconds": row["seconds"] * 4.0 ** (SIZES.index(row["n"]) % 2)} if row["method"].startswith(noisy) else row
        for row in growing(1.5)
    ]
    assert scaling(rows).verdict == both(rows).verdict == verdict
    assert f"The exponents of {5 * len(noisy)} are left open" in both(rows).evidence


def test_space_is_judged_by_memory_and_not_by_time() -> None:
    rows = growing(1.5)
    assert space(rows).verdict == "confirmed"
    assert "cells n^{1.00 ± 0.00}" in space(rows).evidence
    quadratic = [row | {"megabytes": (row["n"] / 1000) ** 2} for row in rows]
    assert (space(quadratic).verdict, scaling(quadratic).verdict) == ("refuted", "confirmed")
    assert space([row | {"megabytes": 9.0} for row in rows]).verdict == "untested", "too little to tell from nothing"


@pytest.mark.parametrize(("found", "verdict"), [(0.95, "confirmed"), (0.94, "refuted")])
def test_a_near_set_counts_as_found_by_its_recall(found: float, verdict: str) -> None:
    rows = growing(1.5, found)
    assert found_at(rows).verdict == verdict
    assert both(rows).verdict == verdict, "fast, and the near set missed, is not both"
    assert scaling(rows).verdict == "confirmed"
    known = [row | {"recall": found if row["n"] == SIZES[-1] else 0.5} for row in rows]
    assert found_at(known).verdict == verdict, "the longest length counts"


def test_one_index_that_gets_to_a_million_is_enough_if_it_finds_the_near_set() -> None:
    assert million(growing(1.5)).verdict == "untested"
    rows = growing(1.5, sizes=LENGTHS)
    stopped = [row | LATE if row["n"] == 10**6 and row["method"] != "kmeans" else row for row in rows]
    assert million(stopped).verdict == "confirmed"
    assert "3 of 30 runs" in million(stopped).evidence
    assert million([row | {"recall": 0.3} for row in stopped]).verdict == "partly"
    none = [row | LATE if row["n"] == 10**6 else row for row in rows]
    assert million(none).verdict == "untested"
    assert "out of time (predicted)" in str(tell(none).tables)


def test_faster_from_a_length_on_means_at_all_longer_ones() -> None:
    rows = growing(1.5)
    assert f"cells 5.5x at {SIZES[-1]:,} (faster from {SIZES[1]:,} on)" in against_sdpa(rows).evidence
    bumpy = [row | {"seconds": 1e9} if row["n"] == SIZES[-1] and row["method"] == "kmeans" else row for row in rows]
    said = against_sdpa(bumpy).evidence.split("k-means")[1].split(",")[0]
    assert "faster from" not in said


def test_what_was_not_measured_is_named() -> None:
    rows = growing(1.5, sizes=LENGTHS)
    assert gaps(rows) == ""
    assert gaps(growing(1.5, device="cuda")) == (
        "Faiss IVF, Faiss HNSW and concentric LSH search on a CPU and are not run on a GPU."
    )
    late = [row | LEFT if row["n"] >= 300_000 and row["method"] == "cells" and row["kind"] == "uniform" else row for row in rows]
    assert gaps(late) == "Not begun within the 400 s of the whole run: cells (no structure) from 300,000 on."
    assert ["cells", "1,000,000", "1", "0", "left out", "–", "–", "–"] in table(late, ("uniform", False)).body
    lacking = [row | {"status": "missing"} if row["method"].startswith(("ivf", "hnsw")) else row for row in rows]
    assert gaps(lacking) == "Not run, for Faiss is not installed: Faiss HNSW and Faiss IVF."
    for some in (late, lacking):
        assert gaps(some) in tell(some).here
        assert draw(some)["indices"].axes
    assert scaling(lacking).verdict == "confirmed"


def measure(*, over: bool = False, **limits: Any) -> Row:
    before = [ran(CELLS, n, 1e-3 * n, 10.0) for n in LENGTHS[:2]]
    return measured(Settings(**limits), CELLS, LENGTHS[2], before, lambda: over)


def test_limits_stop_a_call_and_the_whole_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = isolate.Measured("ok", [3.0, 1.0, 2.0], 10.0, {"error": 0.1, "recall": 0.9})
    monkeypatch.setattr(isolate, "apart", lambda *_, **__: found)
    assert [measure(time_limit=200.0)[what] for what in ("status", "seconds", "recall")] == ["ok", 2.0, 0.9]
    late = measure(time_limit=99.0)
    assert (late["status"], late["limit"], late["predicted"]) == ("time", 99.0, pytest.approx(100.0))
    left = measure(over=True, total_limit=400.0)
    assert (left["status"], left["limit"]) == ("left", 400.0)
    settings = Settings(time_limit=99.0)
    assert [is_due([row], settings) for row in (late, left)] == [False, True]
    assert is_due([late], replace(settings, time_limit=100.0))


def test_a_missing_faiss_is_a_gap_until_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "find_spec", lambda name: None)
    rows = [measured(Settings(), Series(name, "clustered", False), 10_000, [], lambda: False) for name in ("ivf", f"hnsw{TAIL}")]
    assert [row["status"] for row in rows] == ["missing", "missing"]
    assert not is_due(rows[:1], Settings())
    monkeypatch.setattr(methods, "find_spec", lambda name: name)
    assert is_due(rows[:1], Settings())


@pytest.mark.parametrize(("device", "lengths", "count"), [("cpu", LENGTHS, 33), ("cuda", LENGTHS[1:], 18)])
def test_every_case_is_planned_once_and_the_short_ones_first(device: str, lengths: tuple[int, ...], count: int) -> None:
    keys = [unit.key for unit in plan(Settings(device=device))]
    assert len(keys) == len(set(keys)) == count * len(lengths)
    for group in series_on(device):
        for series in group:
            places = [keys.index(series.name(n)) for n in lengths]
            assert places == sorted(places)
    assert keys[-1].startswith("kmeans+tail")
    assert any(key.startswith("lsh") for key in keys) == (device == "cpu")
    assert {key.split(",")[0] for key in keys} >= {"sdpa", "exact", "kmeans", "cells", "cells+tail"}


def test_recall_is_that_of_the_index(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key = torch.randn(2, 2, 400, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    for causal in (False, True):
        assert recall("exact", query, key, causal, 0) == 1.0
        assert 0.05 < (recall("kmeans", query, key, causal, 0) or 0) <= 1.0
    assert recall("sdpa", query, key, False, 0) is None

    class First:
        """Finds the first keys, whatever is asked."""

        def build(self, keys: torch.Tensor) -> Any:
            return self

        def search(self, queries: torch.Tensor, k: int, offset: Any) -> tuple[torch.Tensor, torch.Tensor]:
            ids = torch.arange(k).expand(*queries.shape[:2], k)
            return ids.float(), ids

    monkeypatch.setattr(methods, "index_of", lambda name, n: First())
    assert (recall("kmeans", query, key, False, 0) or 0) < 0.2


@pytest.mark.parametrize("kind", INPUTS)
def test_heads_hold_the_same_pairs_of_keys_and_values_in_other_orders(kind: str) -> None:
    one, many = inputs_of(kind, 1, 50, 0, "cpu"), inputs_of(kind, 3, 50, 0, "cpu")
    assert all(x.shape == (1, 3, 50, 64) for x in many)
    rows = {tuple(row) for row in torch.cat(one[1:], -1)[0, 0].tolist()}
    for head in range(3):
        assert torch.equal(many[0][0, head], one[0][0, 0]) == torch.equal(many[1][0, head], one[1][0, 0]) == (head == 0)
        assert {tuple(row) for row in torch.cat([x[0, head] for x in many[1:]], -1).tolist()} == rows


def test_methods_have_the_tail_that_their_name_says() -> None:
    assert recipe("sdpa", 10_000) is None
    for name in NAMES.keys() - {"sdpa"}:
        plain, drawn = recipe(name, 10_001), recipe(f"{name}{TAIL}", 10_001)
        assert isinstance(plain, nf.TopK)
        assert isinstance(drawn, nf.TopK)
        assert (plain.k, plain.tail, drawn.k, drawn.tail) == (101, 0, 101, 32)
        assert plain.index == drawn.index


@pytest.mark.long
def test_a_run_is_told_drawn_and_goes_on_with_what_was_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = Settings(quick=True, out=tmp_path)
    begun: list[Any] = []
    real: Callable[..., Any] = isolate.here
    monkeypatch.setattr(isolate, "here", lambda *asked, **how: begun.append(asked) or real(*asked, **how))
    section = runner.run(EXPERIMENT, replace(settings, total_limit=1e-9), QUIET)
    assert not begun
    assert "Not begun within the 1e-09 s of the whole run: SDPA (clusters, no mask) from 512 on" in section.here
    section = runner.run(EXPERIMENT, settings, QUIET)
    assert len(begun) == len(import_module("experiments.indices.plan").QUICK_SERIES) * 2
    assert "one head of 64, float32" in section.here
    assert "Not begun" not in section.here
    assert (tmp_path / "figures" / "indices.png").exists()
    rows = [row for unit in read(tmp_path / "indices.json")["units"].values() for row in unit["rows"]]
    assert all(row["recall"] > 0.1 for row in rows if row["method"] != "sdpa")
    runner.run(EXPERIMENT, settings, QUIET)
    assert len(begun) == len(rows), "nothing is measured again"
