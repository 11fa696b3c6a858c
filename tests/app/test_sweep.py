"""`nearfield bench`: all sizes are measured, the losing ones too, and the sentence at the end is true of the table."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from nearfield import crossover
from nearfield.app import sweep
from nearfield.app.cli import app

PNG = b"\x89PNG\r\n\x1a\n"


def case(kind: str, length: int, exact: float, cells: float, error: float = 0.1) -> sweep.Case:
    return sweep.Case(torch.float32, 1, 64, length, kind, exact, cells, error)


def test_every_size_is_measured(tmp_path: Path) -> None:
    out = tmp_path / "bench.png"
    result = CliRunner().invoke(app, ["bench", "--length", "300,100", "--heads", "1,2", "--dim", "8,16", "--out", str(out)])
    assert result.exit_code == 0, result.output
    for heads in ("1 head of 8", "1 head of 16", "2 heads of 8", "2 heads of 16"):
        assert f"{heads}, float32" in result.output
    for kind in crossover.KINDS:
        assert sum(f" {kind}  " in line for line in result.output.splitlines()) >= 8
    words = " ".join(result.output.split())
    assert "of 32 cases" in words or "in all 32 cases" in words
    assert out.read_bytes().startswith(PNG)


def test_the_times_and_errors_are_those_of_the_case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def compare(inputs: Any, kind: str, rounds: int) -> tuple[float, float]:
        seen.append((*inputs[0].shape, inputs[0].dtype, kind, rounds))
        return float(inputs[0].shape[2]), 200.0

    monkeypatch.setattr(sweep, "compare", compare)
    sizes = sweep.Sizes([100, 400], [2], [8], [torch.float64])
    found = sweep.run(torch.device("cpu"), sizes, tmp_path / "bench.svg")
    assert seen == [(1, 2, n, 8, torch.float64, kind, sweep.ROUNDS) for n in (100, 400) for kind in crossover.KINDS]
    assert [x.gain for x in found] == [0.5] * 4 + [2.0] * 4
    assert all(0 <= x.error < 0.1 for x in found)
    assert (tmp_path / "bench.svg").read_text().count("2 heads of 8, float64") >= 1


def test_what_was_measured_before_an_interrupt_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([(2.0, 1.0)])

    def compare(*_: Any) -> tuple[float, float]:
        for one in times:
            return one
        raise KeyboardInterrupt

    monkeypatch.setattr(sweep, "compare", compare)
    sizes = sweep.Sizes([64], [1], [8], [torch.float32])
    found = sweep.run(torch.device("cpu"), sizes, tmp_path / "bench.png")
    assert [one.gain for one in found] == [2.0]
    assert (tmp_path / "bench.png").exists()
    with pytest.raises(KeyboardInterrupt):
        sweep.run(torch.device("cpu"), sizes, tmp_path / "bench.png")


def test_the_sentence_tells_of_the_best_and_of_the_worst() -> None:
    found = [case("forward", 64, 1.0, 4.0, 0.9), case("forward", 256, 3.0, 2.0, 0.02), case("training", 256, 5.0, 2.0, 0.3)]
    assert sweep.sentence(found) == (
        "Cells were faster than SDPA in 2 of 3 cases, most in training, 256 keys, 1 head of 64, float32 (2.50 times as fast), "
        "least in forward, 64 keys, 1 head of 64, float32 (0.25 times as fast), "
        "with an error of at most 0.3 where they were faster."
    )
    assert "least" not in sweep.sentence(found[1:])
    assert sweep.sentence(found[:1]).startswith("SDPA was faster in all 1 cases; closest came forward, 64 keys")


def test_without_matplotlib_there_is_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "matplotlib" else find(name, *rest))
    result = CliRunner().invoke(app, ["bench", "--length", "64", "--out", str(tmp_path / "bench.png")])
    assert result.exit_code == 0, result.output
    assert "nearfield[plots]" in result.output
    assert not (tmp_path / "bench.png").exists()


def test_what_is_measured_by_default() -> None:
    cpu, card = torch.device("cpu"), torch.device("cuda")
    assert sweep.usual_lengths(cpu) == [2048, 4096, 8192, 16384]
    assert sweep.usual_lengths(card)[-1] == 131072
    assert (sweep.usual_dtype(cpu), sweep.usual_dtype(card)) == (torch.float32, torch.bfloat16)
