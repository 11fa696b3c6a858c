"""benchmarks/bench_cache.py: it runs in its quick form, and a store holds what lists of keys hold, whatever is done to it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
from few_keys import few_keys

pytest.importorskip("transformers")

from hf_models import model, tokenizer_of_letters

import nearfield


@pytest.fixture
def bench(load: Callable[[str], Any]) -> Any:
    return load("bench_cache")


@pytest.fixture
def operations(load: Callable[[str], Any]) -> Any:
    return load("cache_operations")


def test_sections_run_quickly(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model("llama", max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    tokenizer_of_letters().save_pretrained(tmp_path / "model")
    arguments = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--device", "cpu", "--quick"]
    sections = ["steps", "appends", "operations", "decode"]
    monkeypatch.setattr(sys, "argv", ["bench_cache.py", *arguments, "--only", *sections])
    assert bench.main() == 0
    shown = capsys.readouterr().out
    assert "the last 48 of 320 tokens, one by one" in shown
    assert "60 random operations, 1 seeds, checked against" in shown
    saved = json.loads((tmp_path / "out" / "cache.json").read_text())
    assert list(saved) == sections

    (row,) = saved["steps"]["results"]["rows"]
    read = row["read"]
    assert row["excess"] == pytest.approx(row["perplexity"] / row["exact_perplexity"] - 1)
    assert abs(row["excess"]) < 0.05
    assert row["tokens_per_second"] > 0
    # The running segment, a window of 16 keys, the first 16, and 4 cells for each of 2 query heads, which may be the same.
    assert 16 + 16 + 4 < read["rows"] <= read["rows_by_query_head"] < 16 + 80 + 8 * 8 * 16
    assert 272 < read["exact_rows"] < 320
    assert read["exact_over_rows"] == pytest.approx(read["exact_rows"] / read["rows"])
    assert read["bytes_of_a_row"] == 2 * 8 * 4
    # 12 to 16 cells, with start, size, `log_exists`, centroid, variances and value.
    assert 12 * 4 * (3 + 3 * 8) <= read["bytes_of_moments"] <= 16 * 4 * (3 + 3 * 8)

    appended = saved["appends"]["results"]
    assert [row["n"] for row in appended["rows"]] == [2048, 4096]
    assert appended["rows"][-1]["cells"] == 192
    assert all(1 < row["bytes_over_keys"] < 1.6 for row in appended["rows"])
    assert saved["operations"]["results"]["failed"] == {}

    decoded = saved["decode"]["results"]["rows"]
    assert [(row["family"], row["method"]) for row in decoded] == [
        (family, method) for family in ("topical", "strewn") for method in ("Cells()", "Cells(probes=64)", "offloaded")
    ]
    for row in decoded:
        assert row["mean_relative_error"] <= row["max_relative_error"] < 0.02
        assert row["exact_over_cells"] == pytest.approx(row["exact_ms"] / row["ms"])
        assert ("offloaded" in row["bytes"]) == (row["method"] == "offloaded")


def test_a_store_that_differs_from_lists_is_a_failure(
    bench: Any, operations: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def differs(*_: object) -> None:
        raise AssertionError("off by one")

    monkeypatch.setattr(operations, "run_trial", differs)
    monkeypatch.setattr(sys, "argv", ["bench_cache.py", "--quick", "--only", "operations", "--out", str(tmp_path)])
    assert bench.main() == 1
    assert "operations, seed 0: off by one" in capsys.readouterr().out
    assert json.loads((tmp_path / "cache.json").read_text())["operations"]["results"]["failed"] == {"0": "off by one"}


def test_all_sections_are_there(bench: Any) -> None:
    for section in bench.SECTIONS:
        measure, tabulated = bench.measures(section)
        assert callable(measure)
        assert callable(tabulated)


def test_it_says_why_it_does_nothing(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_cache.py", "--quick", "--model", "nothing"])
    bench.main()
    assert "make smollm2" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(3))
def test_a_store_is_as_good_as_lists(seed: int, operations: Any) -> None:
    done = operations.run_trial(seed, 250)
    assert set(done) == set(operations.WEIGHTS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(20))
def test_a_store_is_as_good_as_lists_for_long(seed: int, operations: Any) -> None:
    assert sum(operations.run_trial(seed, operations.OPERATIONS).values()) > 1900


def test_a_store_whose_segments_grow_is_as_good_as_lists(operations: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    few_keys(monkeypatch, end_multiple=16)
    monkeypatch.setattr(operations, "METHODS", (nearfield.Cells(probes=10**6, sinks=5, window=3),))
    monkeypatch.setattr(operations, "MOST_KEYS", 800)
    assert sum(operations.run_trial(0, 400).values()) > 350


def test_a_difference_is_noticed(operations: Any, tmp_path: Path) -> None:
    trial = operations.Trial(0, tmp_path)
    while trial.store.closed == 0:
        trial.append()
    trial.check()
    state = trial.store.state
    state.order.filled[:, :, [6, 7]] = state.order.filled[:, :, [7, 6]]
    with pytest.raises(AssertionError, match="differ from the lists"):
        trial.check()
    state.tables.start.filled[:] = 0
    with pytest.raises(AssertionError, match="is off by"):
        trial.append()
