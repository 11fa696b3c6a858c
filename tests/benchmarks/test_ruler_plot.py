"""RULER's picture and table: every way that has answered all tasks, beside exact attention."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("matplotlib")

from nearfield.app.ruler.record import Key
from nearfield.app.ruler.report import Results, as_json

TASKS = ("niah_multivalue", "vt")


def measured(length: int = 4096) -> dict[str, Any]:
    """Exact attention always answers, cells three times of four, Quest one task alone, and a shorter length nobody asks about."""
    found = {}
    for sample in range(4):
        for task in TASKS:
            for way, score, keys in (("exact", 100.0, 4000), ("cells-6", 100.0 * (sample > 0), 240), ("quest-6", 0.0, 240)):
                if way != "quest-6" or task == "vt":
                    entry = {"score": score, "keys_read": keys, "prompt_tokens": 4000, "reading": 0.1, "writing": 0.1}
                    found[Key("raw", length, task, sample, way)] = entry
                    found[Key("raw", 512, task, sample, way)] = {**entry, "score": 50.0}
    return as_json(Results.of(found), {"environment": {}})


def test_the_table_has_the_ways_that_have_answered_everything(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu_tables, results = load("gpu_tables"), load("ruler_plot").results
    monkeypatch.setattr(load("ruler_plot"), "results", lambda: results(tmp_path))
    assert gpu_tables.ruler() == ""
    (tmp_path / "ruler_qwen2.5-coder-1.5b.json").write_text(json.dumps(measured()))
    lines = gpu_tables.ruler().splitlines()
    assert lines[0].startswith("| model | way | keys read | answers | score | 95% | below exact | p | multivalue |")
    assert [line.split(" | ")[1] for line in lines[2:]] == ["`exact`", "`cells-6`"]
    assert "| `cells-6` | 6.0% | 8 | 75.0 | " in lines[3]
    assert " | +25.0 | 0.5 | 75 |  |  | 75 |" in lines[3]


def test_the_picture_is_drawn(load: Callable[[str], Any], tmp_path: Path) -> None:
    load("ruler_plot").plot({"qwen2.5-coder-1.5b": measured(), "other": measured()}, tmp_path / "ruler.png")
    assert (tmp_path / "ruler.png").stat().st_size > 10_000
