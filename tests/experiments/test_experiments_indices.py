"""The experiment on indices: what is measured, and that verdicts follow the numbers."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

from rich.console import Console

import nearfield as nf
from experiments import runner
from experiments.experiment import Row, Rows
from experiments.indices import EXPERIMENT, methods
from experiments.indices.methods import NAMES, TAIL, recall, recipe
from experiments.indices.plan import LENGTHS, Series, series_on
from experiments.indices.tell import against_sdpa, found_at, million, scaling, tell
from experiments.settings import Settings

SIZES = LENGTHS[:4]


def ran(series: Series, n: int, seconds: float, found: float = 1.0) -> Row:
    row: Row = {**series._asdict(), "n": n, "k": 1, "tail": 0, "heads": 1, "dtype": "float32", "status": "ok"}
    row |= {"seconds": seconds, "fastest": seconds, "slowest": seconds, "rounds": 3, "megabytes": 5.0, "load": 1.0}
    return row | {"error": 0.1, "recall": None if series.method == "sdpa" else found}


def growing(power: float, found: float = 1.0, sizes: tuple[int, ...] = SIZES, **powers: float) -> Rows:
    """Times that grow with a power; exact attention and exact search with the square."""
    powers = {"sdpa": 2.0, "exact": 2.0, **powers}
    return [
        ran(series, n, (n / sizes[0]) ** powers.get(series.method.removesuffix(TAIL), power), found)
        for n in sizes
        for series in series_on("cpu")
    ]


@pytest.mark.parametrize(
    ("power", "powers", "verdict"),
    [(1.5, {}, "confirmed"), (2.0, {}, "refuted"), (1.5, {"lsh": 2.0}, "partly"), (1.85, {}, "untested")],
)
def test_the_verdict_on_scaling_is_that_of_indices_that_do_not_scan(power: float, powers: dict[str, float], verdict: str) -> None:
    finding = scaling(growing(power, **powers))
    assert finding.verdict == verdict
    assert "exact search n^{2.00 ± 0.00}" in finding.evidence


@pytest.mark.parametrize(("found", "verdict"), [(0.95, "confirmed"), (0.94, "refuted")])
def test_a_near_set_counts_as_found_by_its_recall(found: float, verdict: str) -> None:
    assert found_at(growing(1.5, found)).verdict == verdict


def test_one_index_that_gets_to_a_million_is_enough() -> None:
    assert million(growing(1.5)).verdict == "untested"
    rows = growing(1.5, sizes=LENGTHS)
    late = {"status": "time", "limit": 60.0, "predicted": 99.0, "tried": False}
    stopped = [row | late if row["n"] == 10**6 and row["method"] != "kmeans" else row for row in rows]
    assert million(stopped).verdict == "confirmed"
    assert "3 of" in million(stopped).evidence
    none = [row | late if row["n"] == 10**6 else row for row in rows]
    assert million(none).verdict == "untested"
    assert "out of time (predicted)" in str(tell(none).tables)


def test_faster_from_a_length_on_means_at_all_longer_ones() -> None:
    rows = growing(1.5)
    assert f"faster from {SIZES[1]:,} on" in against_sdpa(rows).evidence, "times at the first length are equal"
    bumpy = [row | {"seconds": 1e9} if row["n"] == SIZES[-1] and row["method"] == "kmeans" else row for row in rows]
    said = against_sdpa(bumpy).evidence.split("k-means")[1].split(";")[0]
    assert "faster from" not in said


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


def test_methods_have_the_tail_that_their_name_says() -> None:
    assert recipe("sdpa", 10_000) is None
    for name in NAMES.keys() - {"sdpa"}:
        plain, drawn = recipe(name, 10_000), recipe(f"{name}{TAIL}", 10_000)
        assert isinstance(plain, nf.TopK)
        assert isinstance(drawn, nf.TopK)
        assert (plain.k, plain.tail, drawn.k, drawn.tail) == (100, 0, 100, 100)
        assert plain.index == drawn.index


@pytest.mark.long
def test_a_run_is_told_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = [Series("sdpa", "clustered", False), Series("kmeans", "clustered", True), Series("lsh", "uniform", False)]
    monkeypatch.setattr(import_module("experiments.indices.plan"), "series_on", lambda device: chosen)
    section = runner.run(EXPERIMENT, Settings(quick=True, out=tmp_path), Console(quiet=True))
    assert "one head of 64, float32" in section.here
    assert (tmp_path / "figures" / "indices.png").exists()
    assert (tmp_path / "indices.json").exists()
