"""Arguments are checked before any work: what is wrong is said in one line, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import nearfield
from nearfield.app import arguments, demo, sweep
from nearfield.app.cli import app

COMMANDS = ("plan", "demo", "bench", "eval", "tune", "remember", "ask")


def invoke(*given: object, columns: int = 80) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*map(str, given)], prog_name="nearfield", terminal_width=columns)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_the_version() -> None:
    assert invoke("--version") == (0, f"nearfield {nearfield.__version__}\n")


@pytest.mark.parametrize("columns", [40, 80, 200])
def test_help_lines_are_not_cut(columns: int) -> None:
    code, printed = invoke("--help", columns=columns)
    assert code == 0
    assert "..." not in printed.partition("Commands:")[2]
    words = " ".join(printed.split())
    assert "as printed and as corrected." in words
    assert "language model's perplexity within a tolerance." in words
    assert max(map(len, printed.splitlines())) <= columns
    assert invoke(columns=columns) == (0, printed)  # no command is a question, not a mistake
    for command in COMMANDS:
        code, printed = invoke(command, "--help", columns=columns)
        assert code == 0
        assert max(map(len, printed.splitlines())) <= columns


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("nope",), "nearfield: No such command 'nope'; see nearfield --help"),
        (("bench", "--nope"), "No such option: --nope"),
        (("demo", "--out", "{tmp}/no/x.png"), "--out must be a file in an existing folder"),
        (("demo", "--out", "{tmp}"), "--out must end in .png, .svg, .pdf or another kind of picture"),
        (("demo", "--out", "{tmp}/x.txt"), "--out must end in .png"),
        (("demo", "--out", "{tmp}/" + 300 * "x" + ".png"), "cannot be written (File name too long)"),
        (("demo", "--length", "0"), "Invalid value for '--length'"),
        (("demo", "--length", 10**12), "GiB; give less"),
        (("demo", "--family", "nope"), "--family must be among gaussian"),
        (("demo", "--seed", "-1"), "--seed must be at least 0"),
        (("bench", "--out", "{tmp}/no/x.png"), "--out must be a file in an existing folder"),
        (("bench", "--length", "1e4"), "--length must be positive integers, such as 64 or 64,128; got '1e4'"),
        (("bench", "--length", ","), "--length must be positive integers"),
        (("bench", "--length", 10**12), "GiB; give less"),
        (("bench", "--heads", "0"), "--heads must be positive integers"),
        (("bench", "--dim", "64,-1"), "--dim must be positive integers, such as 64 or 64,128; got '-1'"),
        (("bench", "--device", "warp"), "--device must be a device of this machine"),
        (("bench", "--device", "meta"), "--device must be a device that computes"),
        (("bench", "--dtype", "int8"), "--dtype must be one of"),
        (("bench", "--calibrate", "--heads", "3"), "--heads 3 has no meaning with --calibrate"),
        (("eval", "m", "{tmp}/nope.txt"), "nope.txt is not a text file in UTF-8"),
        (("eval", "m", "{text}", "--methods", "cells,warp"), "--methods must be among cells, topk, auto; got warp"),
        (("eval", "m", "{text}", "--budgets", "0"), "--budgets must be shares above 0"),
        (("eval", "m", "{text}", "--ladder", "1,x"), "--ladder must be between 0 and 100 per cent, got 'x'"),
        (("eval", "m", "{text}", "--tokens", "100"), "at least 256 tokens, got 100"),
        (("eval", "m", "{text}", "--segment", "5000"), "leave no past beyond a segment of 5,000"),
        (("eval", "m", "{text}", "--config", "{tmp}/nope.json"), "nope.json is not a file"),
        (("eval", "{tmp}/m", "{text}"), "there is no model at"),
        (("eval", "m", "{text}", "--out", "{text}/more"), "--out must be a folder that can be written"),
        (("tune", "m", "{text}", "--tolerance", "lots"), "--tolerance must be between 0 and 100 per cent, got 'lots'"),
        (("tune", "{tmp}/m.gguf", "{text}"), "there is no model at"),
        (("remember", "m", "{text}", "-o", "{tmp}/no/memory"), "--out must be a file in an existing folder"),
        (("remember", "m", "{text}"), "Missing option '--out'"),
        (("ask", "m", " ", "-m", "{text}"), "QUESTION must have at least one token, got ' '"),
        (("ask", "m", "what?", "-m", "{tmp}/memory"), "is not a file; `nearfield remember MODEL TEXT -o"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_before_any_work(
    given: tuple[object, ...], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (demo, sweep):
        monkeypatch.setattr(module, "make", lambda *x, **more: pytest.fail("work began"))
    monkeypatch.setattr("nearfield.app.evaluate.command.load_model", lambda *x: pytest.fail("work began"))
    monkeypatch.setattr("nearfield.app.remember.load_model", lambda *x: pytest.fail("work began"))
    text = tmp_path / "text.txt"
    text.write_text("some words")
    code, printed = invoke(*(str(word).replace("{tmp}", str(tmp_path)).replace("{text}", str(text)) for word in given))
    assert code == 2
    assert printed.count("\n") == 1, printed
    assert printed.startswith("nearfield")
    assert message in printed
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]
    assert text.read_text() == "some words"


def test_calibrating_needs_a_folder_that_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NEARFIELD_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("nearfield.app.calibrate.calibrate_all", lambda *x: pytest.fail("work began"))
    code, printed = invoke("bench", "--calibrate")
    assert code == 2
    assert "NEARFIELD_CACHE must be a folder that can be written" in printed


def test_what_can_be_written_stays_as_it_is(tmp_path: Path) -> None:
    kept = tmp_path / "kept.png"
    kept.write_text("as before")
    arguments.check_picture("--out", kept)
    arguments.check_picture("--out", tmp_path / "new.SVG")
    arguments.check_folder("--out", tmp_path)
    arguments.check_folder("--out", tmp_path / "one" / "two")
    assert kept.read_text() == "as before"
    assert os.listdir(tmp_path) == ["kept.png"]


def test_a_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of root's as well, who may write anywhere: there the system's answer is made up."""
    if hasattr(os, "geteuid") and os.geteuid() != 0:
        tmp_path.chmod(0o500)
    else:

        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(Path, "open", refuse)
        monkeypatch.setattr(tempfile, "TemporaryFile", refuse)
        monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(ValueError, match=r"cannot be written \(Permission denied\)"):
        arguments.check_file("--out", tmp_path / "x")
    with pytest.raises(ValueError, match="must be a folder that can be written"):
        arguments.check_folder("--out", tmp_path / "x")


@pytest.mark.parametrize("word", ["4__096", "_4", "4_", "0", "-1", "x", "\u0664"])
def test_what_is_no_number(word: str) -> None:
    with pytest.raises(ValueError, match="--length must be positive integers"):
        arguments.counts("--length", word)


def test_lists() -> None:
    assert arguments.counts("--length", "4_096, 64,64,") == [64, 4096]
    assert arguments.percents("--budgets", "4, 7%") == [0.04, 0.07]
    assert arguments.known("--methods", "topk,cells,topk", ("cells", "topk")) == ["topk", "cells"]
    assert arguments.dtype("bfloat16") == torch.bfloat16
    assert arguments.device("cpu") == torch.device("cpu")
