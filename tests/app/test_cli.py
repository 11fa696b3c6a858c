"""The command line: the numbers of the plan, the table and plot of the demo, and what is said if a package is missing."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import nearfield
from nearfield.app import calibrate
from nearfield.app.cli import app
from nearfield.kernels import backends
from nearfield.paper.budgets import FORMS

PNG = b"\x89PNG\r\n\x1a\n"


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_plan_says_what_hashing_takes() -> None:
    code, printed = invoke("plan", "--n", "8192", "--near", "0.9", "--far", "0.5")
    assert code == 0
    words = " ".join(printed.split())
    assert "10 hashes in each of 843 tables at 2 radii, 8,430 projections per query, 13,488 bytes per key" in words
    code, printed = invoke("plan", "--near", "0.5", "--far", "0.9")
    assert code == 2
    assert "--far must be less than --near" in printed.replace("\n", " ")


def test_plan_prints_every_theorem_printed_and_corrected() -> None:
    code, printed = invoke("plan", "--n", "131072", "--eps", "0.05", "--delta", "0.01")
    assert code == 0
    for theorem in FORMS:
        assert theorem in printed
    for number in ("69,062", "23,123", "3,205,180", "163,856", "13,600", "4,252", "10,225", "69,788,430,626"):
        assert number in printed


@pytest.mark.parametrize("n", ["1", "2", "1048576", "1000000000"])
def test_plan_cuts_no_number(n: str) -> None:
    code, printed = invoke("plan", "--n", n)
    assert code == 0
    assert "…" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--eps", "2"), "eps must be a number between 0 and 1, got 2.0"),
        (("--n", "0"), "n must be a positive integer, got 0"),
        (("--delta", "0"), "delta must be a number between 0 and 1, got 0.0"),
        (("--near", "2"), "--near must be a cosine between -1 and 1, got 2"),
        (("--far", "-1"), "--far must be a cosine between -1 and 1, got -1"),
    ],
)
def test_plan_refuses_bad_arguments(arguments: tuple[str, ...], message: str) -> None:
    code, printed = invoke("plan", *arguments)
    assert code == 2
    assert message in " ".join(printed.split())


def test_explain_says_what_would_run_and_why() -> None:
    code, printed = invoke("explain", "--n", "32768", "--heads", "1", "--dim", "8")
    assert code == 0
    lines = [" ".join(line.split()) for line in printed.splitlines()]
    assert lines[0] == "call 1 head of 32,768 queries and 32,768 keys, dimension 8, float32 on cpu, no mask"
    assert "method exact attention or cells" in lines
    code, printed = invoke("explain", "--n", "300", "--heads", "2", "--dim", "8", "--family", "clustered", "--causal")
    assert code == 0
    assert "method Exact()" in " ".join(printed.split())
    code, printed = invoke("explain", "--family", "nope")
    assert code == 2
    assert "--family must be among gaussian" in " ".join(printed.split())


@pytest.mark.long
def test_demo_shows_a_table_and_saves_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "demo.png"
    before = torch.random.get_rng_state()
    code, printed = invoke("demo", "--length", "256", "--out", str(out))
    assert code == 0
    assert out.read_bytes().startswith(PNG)
    for method in ("exact", "top 16", "top 16 + 16", "k-means", "LSH", "Gumbel"):
        assert method in printed
    assert "59 random rows" in printed
    assert torch.equal(before, torch.random.get_rng_state())


def test_demo_without_matplotlib_still_shows_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec

    def hide(name: str, *rest: Any) -> Any:
        return None if name in ("matplotlib", "faiss") else find(name, *rest)

    monkeypatch.setattr(importlib.util, "find_spec", hide)
    code, printed = invoke("demo", "--length", "64", "--out", str(tmp_path / "demo.png"))
    assert code == 0
    assert "nearfield[plots]" in printed
    assert "top 8" in printed
    assert "Faiss" not in printed
    assert not (tmp_path / "demo.png").exists()


# Missing packages.

WITHOUT = """
import sys
from importlib.machinery import PathFinder

class Without(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {names} else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]
"""


def run_without(names: set[str], folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh Python in which these packages are not installed."""
    (folder / "sitecustomize.py").write_text(WITHOUT.format(names=names))
    path = os.pathsep.join([str(folder), str(Path(nearfield.__file__).parents[1])])
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path}, check=False)


NEEDS = "the nearfield command needs typer and rich: pip install 'nearfield[cli]'"


@pytest.mark.long
def test_the_command_says_what_it_needs(tmp_path: Path) -> None:
    result = run_without({"typer"}, tmp_path, "-m", "nearfield", "plan")
    assert (result.returncode, result.stdout, result.stderr) == (1, "", NEEDS + "\n")


@pytest.mark.long
def test_the_library_needs_torch_and_numpy_only(tmp_path: Path) -> None:
    """What needs more says in one line which extra that is."""
    code = """
import runpy, torch, nearfield
from nearfield import hf
from nearfield.app.environment import environment
from nearfield.app.evaluate.models import load_model
q = torch.zeros(1, 1, 40, 4)
assert nearfield.attention(q, q, q, method=nearfield.Cells()).shape == q.shape
assert environment()["nearfield"] == nearfield.__version__
for call in (nearfield.FaissIndex("Flat").build, hf.register, load_model, lambda _: hf.CellCache, lambda _: hf.Memory):
    try:
        call(q[0])
    except ImportError as error:
        print(error)
runpy.run_module("nearfield.app.cli", run_name="__main__")
"""
    extras = {"typer", "rich", "matplotlib", "faiss", "transformers", "triton", "scipy"}
    result = run_without(extras, tmp_path, "-c", code)
    assert (result.returncode, result.stderr) == (1, NEEDS + "\n")
    named = [re.findall(r"pip install '?nearfield\[(\w+)\]'?$", line) for line in result.stdout.splitlines()]
    assert named == [["faiss"], *[["transformers"]] * 4]


@pytest.mark.parametrize("command", ["eval", "remember"])
def test_commands_for_models_say_that_they_need_transformers(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "nearfield.hf.memory", raising=False)
    monkeypatch.delitem(sys.modules, "nearfield.hf.cache", raising=False)
    (tmp_path / "text.txt").write_text("words")
    more = ("--out", str(tmp_path / "out"))
    code, printed = invoke(command, "model", str(tmp_path / "text.txt"), "--device", "cpu", *more)
    assert code == 1
    assert printed.count("\n") == 1
    assert "pip install 'nearfield[transformers]'" in printed


def test_gguf_files_need_a_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "model.gguf").touch()
    (tmp_path / "text.txt").write_text("words")
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "gguf" else find(name, *rest))
    code, printed = invoke("eval", str(tmp_path / "model.gguf"), str(tmp_path / "text.txt"), "--device", "cpu")
    assert (code, printed) == (1, ".gguf files need the package gguf: pip install 'nearfield[real]'\n")


def test_the_title_says_where_the_triton_kernels_do_not_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfield.crossover.place", lambda device: "cuda, some card")
    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    device = torch.device("cuda")
    assert calibrate.describe(device, torch.bfloat16) == "cuda, some card, bfloat16"
    assert calibrate.describe(device, torch.float64).endswith("do not serve torch.float64: cells run in plain torch)")
    monkeypatch.setattr(backends, "runs_triton", lambda device: False)
    assert "do not serve this GPU" in calibrate.describe(device, torch.bfloat16)
    assert "Triton" not in calibrate.describe(torch.device("cpu"), torch.float64)
