"""The command line: the plan's numbers, the demo's table and picture, and what they say when something is missing."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from nearfield.app.cli import app
from nearfield.paper.budgets import FORMS

PNG = b"\x89PNG\r\n\x1a\n"


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_plan_prints_every_theorem_printed_and_corrected() -> None:
    code, printed = invoke("plan", "--n", "131072", "--eps", "0.05", "--delta", "0.01")
    assert code == 0
    for theorem in FORMS:
        assert theorem in printed
    for number in ("69,062", "23,123", "3,205,180", "163,856", "13,600", "4,252", "10,225"):
        assert number in printed


@pytest.mark.parametrize("n", ["1", "2", "1048576", "1000000000"])
def test_plan_cuts_no_number(n: str) -> None:
    code, printed = invoke("plan", "--n", n)
    assert code == 0
    assert "…" not in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--eps", "2"), "eps must lie strictly between 0 and 1, got 2.0"),
        (("--n", "0"), "n must be an integer of at least 1, got 0"),
        (("--delta", "0"), "delta must lie strictly between 0 and 1, got 0.0"),
    ],
)
def test_plan_refuses_bad_arguments(arguments: tuple[str, ...], message: str) -> None:
    code, printed = invoke("plan", *arguments)
    assert code == 2
    assert message in " ".join(printed.split())


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


def test_demo_refuses_an_unknown_family() -> None:
    code, printed = invoke("demo", "--family", "nope")
    assert code == 2
    assert "family must be one of" in " ".join(printed.split())
