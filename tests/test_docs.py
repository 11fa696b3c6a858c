"""Every example in the README, the guide and the docstrings runs as it stands."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import nearfield

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MODULES = sorted(module.name for module in pkgutil.walk_packages(nearfield.__path__, "nearfield."))


def python_blocks(page: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun tells a job of one rank."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_of_a_page(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    namespace: dict[str, object] = {}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), namespace)
    assert "Traceback" not in capsys.readouterr().out


def test_tables_are_made_of_the_results(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    tables = importlib.import_module("gpu_tables")
    names = [found["name"] for page in tables.PAGES for found in tables.PLACE.finditer((ROOT / page).read_text())]
    assert len(names) == len(set(names)) >= 11
    for page in tables.PAGES:
        text = (ROOT / page).read_text()
        assert tables.fresh(text) == text, f"{page}: benchmarks/gpu_tables.py writes its tables anew"


def test_the_pages_have_examples() -> None:
    assert sum(len(python_blocks(page)) for page in PAGES) >= 4


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()


NAMED = {name for name in re.findall(r"`((?:[a-z_]+\.)+\w+)`", ARCHITECTURE) if not name.endswith((".py", ".json", ".md"))}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_the_walk_of_a_call_names_what_there_is(name: str) -> None:
    if name.startswith(("cells.triton", "vllm.steps", "vllm.kernels")):
        pytest.importorskip("triton")
    if name.startswith("app.serve"):
        pytest.importorskip("starlette")
    assert resolve_name(f"nearfield.{name.removeprefix('nf.')}") is not None


def test_changes_name_files_that_exist_and_no_more_than_three() -> None:
    table = ARCHITECTURE.partition("## Where do I change")[2].splitlines()
    rows = [line.split("|")[2] for line in table if line.startswith("| ")]
    assert len(rows) == 13, "the head, and twelve changes"
    for row in rows[1:]:
        files = [name for name in re.findall(r"`([\w/]+\.(?:py|json))`", row) if not name.startswith("benchmarks/")]
        assert 1 <= len(files) <= 3, row
        for name in files:
            assert (ROOT / name).exists() or (ROOT / "nearfield" / name).exists(), name


@pytest.mark.usefixtures("job")
@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module(name: str) -> None:
    if name.startswith("nearfield.app.serve"):
        pytest.importorskip("starlette")
    if name in ("nearfield.vllm.backend", "nearfield.vllm.cpu_platform", "nearfield.vllm.stock"):
        pytest.importorskip("vllm.platforms")
    module = importlib.import_module(name)
    query, key, value, upstream = (torch.randn(1, 2, 64, 8, generator=torch.Generator().manual_seed(i)) for i in range(4))
    given = {"torch": torch, "F": F, "nearfield": nearfield, "q": query, "k": key, "v": value, "g": upstream}
    if name.startswith("nearfield.distributed"):
        given["mesh"] = dist.init_device_mesh("cpu", (1,))
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, extraglobs=given):
        runner.run(example)
    assert runner.failures == 0


def test_the_passes_name_kernels_that_exist() -> None:
    pytest.importorskip("triton")
    table = (ROOT / "docs" / "gpu.md").read_text().partition("## The passes")[2].partition("## ")[0]
    named = set(re.findall(r"`(_\w+)`", table))
    folders = (ROOT / "nearfield" / "cells" / "triton", ROOT / "nearfield" / "kernels")
    sources = "".join(path.read_text() for folder in folders for path in folder.glob("*.py"))
    there = set(re.findall(r"Kernel\b[^\n]*\ndef (_\w+)\(", sources))
    assert len(named) > 20
    assert named <= there, named - there
