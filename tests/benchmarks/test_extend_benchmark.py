"""The benchmark that extends a model runs in its quick form, and writes where it is told to."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")


def test_the_benchmark_of_longer_texts_runs(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bench = load("bench_extend_gpu")
    monkeypatch.setattr(bench.record, "RESULTS", bench.record.RESULTS)
    monkeypatch.setattr(sys, "argv", ["bench_extend_gpu", "--quick", "--out", str(tmp_path)])
    bench.main()
    shown = capsys.readouterr().out
    assert "512 positions" in shown
    assert "2 steps of" in shown
    saved = json.loads((tmp_path / "extend_gpu.json").read_text())["cells"]
    assert saved["results"]["stopped"] is None
    assert set(saved["results"]["after"]) == {"exact", "cells"}
    assert saved["environment"]["torch"]
    assert (tmp_path / "extend.png").read_bytes().startswith(b"\x89PNG")


def test_texts_to_train_on_are_of_other_packages(load: Callable[[str], Any]) -> None:
    bench = load("bench_extend_gpu")
    assert not set(bench.TRAINED) & set(bench.HELD_OUT)
    roots = [{str(path) for path in bench.sources(package)} for package in (*bench.TRAINED, *bench.HELD_OUT)]
    assert all(roots)
    assert len(set.union(*roots)) == sum(map(len, roots))
