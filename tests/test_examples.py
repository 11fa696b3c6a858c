"""The examples run offline, without a model and with one, and print what they promise."""

from __future__ import annotations

import json
import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

pytest.importorskip("transformers")

from hf_models import VOCABULARY, model

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What an example prints."""

    def run(script: str, *arguments: object) -> str:
        monkeypatch.setenv("COLUMNS", "150")
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_prefill(run: Callable[..., str]) -> None:
    shown = run("prefill.py", "--tokens", 600)
    assert "600 tokens" in shown
    for name in ("sdpa", "nearfield", "nearfield-cells"):
        assert f"│ {name} " in shown


def test_finetune(run: Callable[..., str]) -> None:
    shown = run("finetune.py", "--tokens", 300, "--steps", 3)
    assert "3 steps of 300 tokens" in shown
    apart = float(shown.partition("the same step: ")[2].split()[0])
    assert apart < 0.05


def test_train_walks(run: Callable[..., str], tmp_path: Path) -> None:
    shown = run("train_walks.py", "--steps", 3, "--context", 24, "--k", 24, "--walks", 8, "--out", tmp_path)
    assert "3 steps" in shown
    found = json.loads((tmp_path / "train_walks.json").read_text())
    exact, near, walks = (x["losses"] for x in found["runs"].values())
    assert exact == pytest.approx(near, abs=1e-3)  # all keys are near
    assert exact[0] == pytest.approx(walks[0], abs=1e-5)  # the same weights and the same batch
    assert exact != walks
    assert (tmp_path / "train_walks.png").read_bytes().startswith(b"\x89PNG")


def test_the_page_has_the_losses_of_the_committed_run() -> None:
    page = (ROOT / "docs" / "gradients.md").read_text()
    runs = json.loads((ROOT / "benchmarks" / "results" / "train_walks.json").read_text())["runs"].values()
    assert len(runs) == 3
    for run in runs:
        middle, last = (sum(run["losses"][stop - 20 : stop]) / 20 for stop in (300, 500))
        assert f"| {middle:.3f} | {last:.3f} | {run['held_out']:.3f} | {run['cpu_seconds']:.3f} |" in page


def test_generate_with_a_model_and_a_config(run: Callable[..., str], tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    import nearfield as nf
    from nearfield.hf.config import LayerConfig, write_config

    model("llama", max_position_embeddings=512).save_pretrained(tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({"?": 0, **{f"w{i}": i + 1 for i in range(VOCABULARY - 1)}}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text(" ".join(f"w{i * i % 89}" for i in range(300)))
    write_config(tmp_path / "config.json", LayerConfig({"default": nf.Cells(4, 1000, segment=32)}, 2))
    given = ("--text", tmp_path / "text.txt", "--config", tmp_path / "config.json", "--tokens", 200, "--new", 6)
    shown = run("generate.py", tmp_path / "model", *given)
    assert "a prompt of 200 tokens" in shown
    assert shown.count("the first 6 of 6") == 2  # all cells are opened: as exact as SDPA
    assert "nearfield: '" in shown
