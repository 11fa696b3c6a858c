"""Import paths of version 0.1 still work, and say what they are called now."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import warnings

import pytest

import nearfield
from nearfield._moved import MOVED


@pytest.mark.parametrize("old", MOVED)
def test_old_paths_lead_to_the_same_things(old: str) -> None:
    sys.modules.pop(f"nearfield.{old}", None)
    with pytest.warns(DeprecationWarning, match=rf"^nearfield\.{old} is now nearfield\.{MOVED[old]}; "):
        module = importlib.import_module(f"nearfield.{old}")
    home = importlib.import_module(f"nearfield.{MOVED[old]}")
    public = [name for name, value in vars(home).items() if getattr(value, "__module__", None) == home.__name__]
    assert public or home.__name__.count(".") > 1, "something to compare"
    assert all(getattr(module, name) is getattr(home, name) for name in public)


def test_the_documented_names() -> None:
    sys.modules.pop("nearfield.cache", None)
    with pytest.warns(DeprecationWarning, match="nearfield.cells.cache"):
        from nearfield.cache import CellStore, StepError, StepGraph
    assert {x.__module__.rpartition(".")[0] for x in (CellStore, StepError, StepGraph)} == {"nearfield.cells.cache"}
    with pytest.raises(ImportError, match="Nothing"):
        from nearfield.cache import Nothing  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("nearfield.nothing")


def test_modules_are_still_attributes_of_the_package() -> None:
    for name in ("partition", "methods", "budgets"):
        sys.modules.pop(f"nearfield.{name}", None)
        vars(nearfield).pop(name, None)
        with pytest.warns(DeprecationWarning, match=f"nearfield.{name} is now"):
            assert getattr(nearfield, name).__name__ == f"nearfield.{name}"
    with pytest.raises(AttributeError, match="nothing"):
        nearfield.nothing  # noqa: B018


def test_a_short_name_that_stays() -> None:
    home = importlib.import_module("nearfield.knn.index")
    assert nearfield.index.slack is home.slack
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        short = importlib.import_module("nearfield.index")
    assert {name: getattr(short, name) for name in home.__all__} == {name: getattr(home, name) for name in home.__all__}
    assert set(dir(short)) >= set(home.__all__)


def test_new_paths_warn_of_nothing() -> None:
    code = (
        "import nearfield, nearfield.cells.cache, nearfield.hf, nearfield.paper.gradients, nearfield.knn.index, nearfield.index"
    )
    environment = os.environ | {"PYTHONPATH": os.path.dirname(os.path.dirname(nearfield.__file__))}
    options = ["-W", "error::DeprecationWarning:nearfield"]
    done = subprocess.run([sys.executable, *options, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
