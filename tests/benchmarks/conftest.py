"""How tests import a benchmark, which is a script."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearfield.cells import sizes


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """The module of a benchmark, by its name."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module


@pytest.fixture(autouse=True)
def _group_few_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quick runs have too few keys for the default, from which on a cache groups them."""
    monkeypatch.setattr(sizes, "GROUP_FROM", 0)
    monkeypatch.setattr(sizes, "GROUP_FROM_ON_GPU", 0)
