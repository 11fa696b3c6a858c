"""Answers to RULER of several runs, put together."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from nearfield.app.ruler.record import Key, Record
from nearfield.app.ruler.ways import WAYS

ABOUT = {"model": "one", "seed": 42, "versions": {"wonderwords": "3.0.1"}}
WHERE = {"gpu": "some", "dtype": "bfloat16", "date": "today"} | dict.fromkeys(
    ("nearfield", "torch", "transformers", "python"), "1"
)


def run(folder: Path, task: str, score: float, **about: Any) -> Path:
    """What a run of one task has written."""
    folder.mkdir()
    made = Record(folder / "answers.jsonl", {**ABOUT, **about}, {way.name: way.digest for way in WAYS.values()})
    for way in ("exact", "default"):
        found = {"score": score, "keys_read": 10.0, "prompt_tokens": 100, "reading": 0.1, "writing": 0.1}
        made.add(Key("raw", 4096, task, 0, way), {**found, "way_sha256": WAYS[way].digest})
    (folder / "ruler.json").write_text(json.dumps({"environment": WHERE, **ABOUT, **about, "ways": {}, "scores": []}))
    return folder


def test_answers_of_several_runs_are_those_of_one(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [run(tmp_path / "a", "vt", 100.0), run(tmp_path / "b", "qa_1", 50.0), run(tmp_path / "c", "vt", 0.0)]
    script, both = load("ruler_merge"), tmp_path / "both"
    monkeypatch.setattr("sys.argv", ["ruler_merge.py", str(both), *map(str, runs)])
    script.main()
    made = Record(both / "answers.jsonl", ABOUT)
    assert {(key.task, key.way): found["score"] for key, found in made.answers.items()} == {
        ("vt", "exact"): 100.0,
        ("vt", "default"): 100.0,
        ("qa_1", "exact"): 50.0,
        ("qa_1", "default"): 50.0,
    }
    told = json.loads((both / "ruler.json").read_text())
    assert told["environment"] == WHERE
    assert told["model"] == "one"
    assert next(row["mean"] for row in told["scores"] if row["way"] == "exact" and row["task"] is None) == 75.0
    assert (both / "ruler.html").exists()
    with pytest.raises(ValueError, match="is there already"):
        script.merge(both, runs)
    with pytest.raises(SystemExit):
        script.main()


def test_a_run_that_goes_on_is_left_as_it_is(
    load: Callable[[str], Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    going = run(tmp_path / "a", "vt", 100.0) / "answers.jsonl"
    with going.open("a") as file:
        file.write('{"template": "raw", "len')
    before = going.read_bytes()
    made = load("ruler_merge").merge(tmp_path / "both", [going.parent])
    assert len(made.answers) == 2
    assert going.read_bytes() == before
    assert "1 damaged answers are left out" in capsys.readouterr().out


def test_a_folder_without_answers_is_refused(load: Callable[[str], Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"answers\.jsonl does not exist"):
        load("ruler_merge").merge(tmp_path / "both", [tmp_path])
    assert not any(tmp_path.iterdir())


def test_runs_of_different_models_are_refused(load: Callable[[str], Any], tmp_path: Path) -> None:
    runs = [run(tmp_path / "a", "vt", 100.0), run(tmp_path / "b", "qa_1", 50.0, model="two")]
    with pytest.raises(ValueError, match="model two, not one"):
        load("ruler_merge").merge(tmp_path / "both", runs)
    told = json.loads((runs[1] / "ruler.json").read_text())
    (runs[1] / "ruler.json").write_text(json.dumps(told | {"environment": WHERE | {"gpu": "another"}}))
    with pytest.raises(ValueError, match=r"several kinds of GPU \(another, some\)"):
        load("ruler_merge").merge(tmp_path / "both", runs)
    assert not (tmp_path / "both").exists()
