"""The notebooks run from top to bottom with small sizes, and are kept without outputs."""

from __future__ import annotations

import contextlib
import io
import json
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

pytest.importorskip("transformers")

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == kind]


@pytest.mark.long
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cell by cell in one namespace, as a kernel would; this needs no Jupyter."""
    monkeypatch.setenv("NEARFIELD_NOTEBOOK_LENGTH", "256")
    namespace: dict[str, Any] = {"__name__": "__main__"}
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        for cell in cells(path, "code"):
            exec(compile("".join(cell["source"]), f"{path.name}, {cell['id']}", "exec"), namespace)
    assert len(said.getvalue().splitlines()) >= 10
    assert "nan" not in said.getvalue()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_has_no_outputs(path: Path) -> None:
    notebook = json.loads(path.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(ids) == len(set(ids))
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells(path, "code"))


def test_the_paper_has_every_algorithm_beside_a_theorem() -> None:
    (paper,) = (path for path in NOTEBOOKS if path.stem == "the_paper_in_one_hour")
    text = "\n".join("".join(cell["source"]) for cell in cells(paper, "markdown"))
    headings = " ".join(line for line in text.splitlines() if line.startswith("## "))
    for number in range(1, 10):
        assert f"{number}" in headings.replace("Theorem 8", "").replace("Lemma 9", ""), number
    for result in ("Theorem 4", "Theorem 5", "Lemma 6", "Theorem 8", "Theorems 10, 29 and 32"):
        assert result in text
