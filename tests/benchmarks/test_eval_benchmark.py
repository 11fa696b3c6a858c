"""benchmarks/bench_language.py runs in its quick form, and needles are where it says."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import model, tokenizer_of_letters


@pytest.fixture
def bench(load: Callable[[str], Any]) -> Any:
    return load("bench_language")


@pytest.fixture
def tokenizer() -> Any:
    return tokenizer_of_letters()


def test_all_sections_run_quickly(
    bench: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model("llama", max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "out"), "--device", "cpu", "--quick"]
    monkeypatch.setattr(sys, "argv", ["bench_language.py", *arguments, "--only", "needle", "perplexity", "prefill", "finetune"])
    bench.main()
    shown = capsys.readouterr().out
    assert "numbers found of 2, 512 tokens" in shown
    assert "cells, 10%" in shown
    saved = json.loads((tmp_path / "out" / "language.json").read_text())
    assert set(saved) == {"needle", "perplexity", "prefill", "finetune"}
    assert [row["method"] for row in saved["prefill"]["results"]["rows"]] == ["Cells()", "Cells(probes=4)", "Cells(probes=20)"]
    tuned = saved["finetune"]["results"]["runs"]
    assert {name: len(run["losses"]) for name, run in tuned.items()} == {"sdpa": 3, "cells": 3, "sdpa_other_order": 3}
    assert tuned["sdpa"]["losses"][0] == pytest.approx(tuned["cells"]["losses"][0], abs=0.05)
    needle = saved["needle"]["results"]
    assert list(needle["told"]) == ["once", "twice"]
    assert all(needle["cases"] == len(one["by_case"]) == 2 for one in needle["told"].values())
    labels = [one["label"] for one in saved["perplexity"]["results"]["settings"]]
    assert labels == ["exact", "cells, 10%", "topk, 10%"]
    assert saved["perplexity"]["results"]["where"]["device"] == "cpu"


@pytest.mark.parametrize("case", range(5))
def test_needles_are_hidden_before_the_last_segment(case: int, bench: Any, tokenizer: Any) -> None:
    paragraphs = [bench.ids_of(tokenizer, f"{'abc ' * (5 + i % 7)}\n\n")[0] for i in range(40)]
    ids, answer, depth = bench.hidden(tokenizer, paragraphs, 600, 128, random.Random(case))
    assert ids.shape == (1, 600)
    text = "".join(tokenizer.convert_ids_to_tokens(ids[0].tolist()))
    needle, _, rest = text[depth:].partition(".")
    assert needle.startswith("The secret code of ")
    assert depth + len(needle) < 512
    assert text.endswith(needle)  # the question and the number
    assert answer == bench.DIGITS + 1
    assert not torch.equal(ids, bench.hidden(tokenizer, paragraphs, 600, 128, random.Random(case + 1))[0])
    assert rest.count("The secret code") == 1


def test_the_reference_is_prose(bench: Any) -> None:
    paragraphs = bench.reference_prose().split("\n\n")
    assert len(paragraphs) == len(set(paragraphs)) > 100
    assert all(part.endswith(".") and "::=" not in part for part in paragraphs)
    assert sum(map(len, paragraphs)) > 60_000


def test_it_says_why_it_does_nothing(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["bench_language.py"])
    bench.main()
    assert "there is no CUDA device (--device cpu" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["bench_language.py", "--quick", "--model", "nothing"])
    bench.main()
    assert "make smollm2" in capsys.readouterr().out
