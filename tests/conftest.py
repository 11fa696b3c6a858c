"""One hypothesis profile for all tests, patient threads, poisoned memory, and who runs which test."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from quick_interpreter import make_quick

# Read when torch is loaded. Threads that spin while they wait would keep the cores from the other test processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

# Read when kernels are defined. Without a GPU they run, slowly, in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
    make_quick()

# Derandomised: a failure here is a change in the code, never the luck of the draw.
settings.register_profile(
    "nearfield", derandomize=True, max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
# For the inner loop: `make test-fast` sets HYPOTHESIS_PROFILE.
settings.register_profile("fast", settings.get_profile("nearfield"), max_examples=40)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "nearfield"))


@pytest.fixture(autouse=True)
def same_draws_every_time() -> None:
    """A test that draws from torch's own generators draws the same numbers, whichever tests ran before it."""
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def nothing_is_remembered() -> None:
    """A test that changes a kernel, or counts launches, gets nothing that an earlier test has recorded."""
    for name in ("ready", "replay"):
        module = sys.modules.get(f"nearfield.kernels.{name}")
        if module is not None:
            module.forget()


@pytest.fixture
def lazy_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are drawn lazily, by the index they are given, also where there are so few keys that it costs more."""
    for cost in ("POINT_COST", "SEARCH_COST", "SCAN_COST", "BUILD_COST", "LEAST_KEYS"):
        monkeypatch.setattr(f"nearfield.paper.lazy.{cost}", 0)
    for share in ("PILOT_SHARE", "MOST_SPENT"):
        monkeypatch.setattr(f"nearfield.paper.lazy.{share}", 1)


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fresh memory holds NaN, so that whatever a kernel leaves unwritten shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        assert bool(torch.empty(3).isnan().all())
        assert bool(torch.zeros(1).new_empty(3).isnan().all())
        assert bool(torch.empty_like(torch.zeros(3)).isnan().all())
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shard", default="1/1", help="run one part of several, such as 2/8: for processes side by side on one GPU")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if not torch.cuda.is_available() and "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    number, parts = (int(x) for x in config.getoption("--shard").split("/"))
    if parts > 1:
        # Each kind dealt out by itself, so that all parts have as many GPU tests.
        kinds = [[item for item in items if ("gpu" in item.keywords) == on_gpu] for on_gpu in (True, False)]
        items[:] = [item for kind in kinds for item in kind[number - 1 :: parts]]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ten thousand collected tests stay to the end: the garbage collector need not look through them, and seldom at the rest."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 20, 50)


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()  # or libraries report, at exit, what they think has leaked


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file that defines module fixtures go to one process, which builds them once; others to whoever is free.

    The marker `xdist_group` would say the same, but pytest-xdist 3.8 does not see it with pytest 9.2.
    """
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class Places(list[str]):
        """It is asked for the place of every test, and would look through ten thousand of them."""

        def __init__(self, names: Sequence[str]) -> None:
            super().__init__(names)
            self.places = {name: i for i, name in enumerate(names)}

        def index(self, name: str, *_: Any) -> int:
            return self.places[name]

    @cache
    def builds_once(file: str) -> bool:
        return 'scope="module"' in (config.rootpath / file).read_text(encoding="utf-8")

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if builds_once(file) else nodeid

        def add_node_collection(self, node: Any, collection: Sequence[str]) -> None:
            super().add_node_collection(node, collection)
            if node in self.registered_collections:
                self.registered_collections[node] = Places(collection)

        def mark_test_complete(self, node: Any, item_index: int, duration: float = 0) -> None:
            # After every test it looks through all that a process was ever given: what is done is taken out of that.
            work, scope = self.assigned_work[node], self._split_scope(self.registered_collections[node][item_index])
            super().mark_test_complete(node, item_index, duration)
            if all(work[scope].values()):
                del work[scope]

    return ByFile(config, log)
