"""The examples run offline, without a model and with one, and print what they promise."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import VOCABULARY, model

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., str]]:
    """What an example prints."""

    def run(script: str, *arguments: object) -> str:
        monkeypatch.setenv("COLUMNS", "150")
        monkeypatch.syspath_prepend(str(ROOT / "examples"))
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
        return capsys.readouterr().out

    threads = torch.get_num_threads()
    yield run
    torch.set_num_threads(threads)


def word_of(shown: str) -> None:
    """Whoever is faster, the example says so in the right words."""
    ratio = float(shown.partition("nearfield was ")[2].split()[0] if "nearfield was " in shown else 0.0)
    lost = float(shown.partition("it took ")[2].split()[0] if "LOSES" in shown else 0.0)
    assert (ratio >= 1.0) != (lost > 0.99)


def test_cell_cache(run: Callable[..., str]) -> None:
    shown = run("cell_cache.py", "--keys", "200,9000", "--steps", 3, "--heads", 1, "--dim", 16)
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == ["200", "9,000"]
    assert int(rows[1][1]) > 100  # the prompt is in cells
    assert all(float(row[5].rstrip("%")) < 5 for row in rows)
    lost = [row[0] for row in rows if float(row[4]) < 1.0]
    assert (f"LOSES at {' and '.join(lost)} keys" in shown) if lost else ("wins at all" in shown)


def test_train_long(run: Callable[..., str]) -> None:
    shown = run("train_long.py", "--tokens", 1500, "--steps", 2)
    assert "2 steps of 1,500 bytes" in shown
    assert float(shown.partition("the same step: ")[2].split()[0]) < 0.05
    word_of(shown)


def test_long_document(run: Callable[..., str], tmp_path: Path) -> None:
    save_model(tmp_path)
    given = ("--text", tmp_path / "text.txt", "--answer", 4, "--device", "cpu", "--memory", tmp_path / "memory")
    shown = run("long_document.py", tmp_path / "model", *given, "--ask", "w1 w2", "--ask", "w3")
    assert "300 tokens of text.txt, read in" in shown
    answers = [line for line in shown.splitlines() if line.startswith("w") and len(line.split()) == 4]
    assert len(answers) == 2
    assert shown.count("reading the text again for it would add") == 2
    again = run("long_document.py", tmp_path / "model", *given, "--ask", "w1 w2")
    assert "300 tokens from" in again
    assert answers[0] in again


def test_long_document_without_a_model_says_what_to_run(
    run: Callable[..., str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    import example_options

    monkeypatch.setattr(example_options, "ROOT", Path("nowhere"))
    with pytest.raises(SystemExit) as stopped:
        run("long_document.py")
    assert stopped.value.code == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "`make smollm2`" in said


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("cell_cache.py", "--keys", "0"), "--keys must be positive integers"),
        (("cell_cache.py", "--device", "warp"), "--device must be a device of this machine"),
        (("train_long.py", "--tokens", "-3"), "must be a positive integer, got '-3'"),
        (("train_long.py", "--tokens", "999999999"), "are more than a text of"),
        (("train_long.py", "--rate", "nan"), "must be a number above 0, got 'nan'"),
        (("long_document.py", "/nowhere/model"), "there is no model at /nowhere/model"),
        (("prefill.py", "--text", "/nowhere/text"), "is not a text file in UTF-8"),
        (("prefill.py", "--tokens", "many"), "must be a positive integer, got 'many'"),
        (("generate.py", "--config", "/nowhere/config.json"), "must be a file that exists"),
        (("finetune.py", "--steps", "0"), "must be a positive integer, got '0'"),
        (("train_walks.py", "--dropout", "1"), "must be at least 0 and less than 1, got '1'"),
        (("train_walks.py", "--out", "/proc/nowhere"), "must be a folder that can be written"),
        (("distributed_generate.py", "--keys", "9000"), "start it with torchrun"),
        (("distributed_generate.py", "--new", "0"), "must be a positive integer, got '0'"),
    ],
)
def test_silly_arguments_get_one_line(
    given: tuple[str, ...], message: str, run: Callable[..., str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        run(*given)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert message in said


def test_prefill(run: Callable[..., str]) -> None:
    shown = run("prefill.py", "--tokens", 600)
    assert "600 tokens" in shown
    for name in ("sdpa", "nearfield", "nearfield-cells"):
        assert f"│ {name} " in shown
    word_of(shown)


def test_distributed_prefill() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples" / "distributed_prefill.py"), "--device", "cpu"]
    sizes = ("--tokens", "301", "--heads", "1", "--dim", "16", "--rows", "20")
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "150", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, env=environment, check=False, timeout=240)
    assert done.returncode == 0, done.stderr
    assert "301 tokens on cpu" in done.stdout
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in done.stdout.splitlines() if line.startswith("│")]
    assert [row[0] for row in rows] == [f"{name}, {what}" for name in ("cells", "exact") for what in ("forward", "training")]
    assert all(float(row[5]) < 1e-5 for row in rows)
    assert all(float(row[4]) > 0 for row in rows)


def test_distributed_prefill_without_torchrun(run: Callable[..., str]) -> None:
    shown = run("distributed_prefill.py", "--tokens", 100, "--heads", 1, "--dim", 8, "--device", "cpu")
    assert "1 rank(s)" in shown
    assert not torch.distributed.is_initialized()


def test_finetune(run: Callable[..., str]) -> None:
    shown = run("finetune.py", "--tokens", 300, "--steps", 3)
    assert "3 steps of 300 tokens" in shown
    apart = float(shown.partition("the same step: ")[2].split()[0])
    assert apart < 0.05
    word_of(shown)


@pytest.mark.long
def test_distributed_generate() -> None:
    """Two ranks share the keys of a prompt, and generate the tokens of one process that loads all of them."""
    given = ["--nproc-per-node", "2", "distributed_generate.py", "--keys", "9000", "--new", "6"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "100", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", *given]
    done = subprocess.run(
        command, cwd=ROOT / "examples", env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in done.stdout.splitlines() if line.startswith("│")}
    assert rows["keys of a layer"] == "4,506, 4,500"  # new ones go to the rank that has the end of the prompt
    assert rows["tokens as in one process"] == "the first 6 of 6"
    assert float(rows["logits off by at most"]) < 1e-4
    # 2 layers, 2 heads of keys, each with 2 query heads and values of 64.
    assert rows["bytes sent per token: outputs"] == f"{2 * 4 * 65 * 4:,}"


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


def save_model(folder: Path) -> None:
    """A small random model with a tokenizer that knows the words w0, w1, ..., and a text of 300 of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model("llama", max_position_embeddings=512).save_pretrained(folder / "model")
    tokenizer = Tokenizer(models.WordLevel({"?": 0, **{f"w{i}": i + 1 for i in range(VOCABULARY - 1)}}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder / "model")
    (folder / "text.txt").write_text(" ".join(f"w{i * i % 89}" for i in range(300)))


def test_generate_with_a_model_and_a_config(run: Callable[..., str], tmp_path: Path) -> None:
    import nearfield as nf
    from nearfield.hf.config import LayerConfig, write_config

    save_model(tmp_path)
    write_config(tmp_path / "config.json", LayerConfig({"default": nf.Cells(4, 1000, segment=32)}, 2))
    given = ("--text", tmp_path / "text.txt", "--config", tmp_path / "config.json", "--tokens", 200, "--new", 6)
    shown = run("generate.py", tmp_path / "model", *given)
    assert "a prompt of 200 tokens" in shown
    assert shown.count("the first 6 of 6") == 2  # all cells are opened: as exact as SDPA
    assert "nearfield: '" in shown
