"""One hypothesis profile for all tests, patient threads, poisoned memory, and who runs which test."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Read when torch is loaded. Threads that spin while they wait would keep the cores from the other test processes.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import torch

# Read when kernels are defined. Without a GPU they run, slowly, in Triton's interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Derandomised: a failure here is a change in the code, never the luck of the draw.
settings.register_profile(
    "nearfield", derandomize=True, max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("nearfield")


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
        # What a module builds once is built by one process: `--dist loadgroup` sends its tests to the same one.
        fixtures = item._fixtureinfo.name2fixturedefs.values()  # type: ignore[attr-defined]
        if any(found[-1].scope == "module" for found in fixtures):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    number, _, parts = config.getoption("--shard").partition("/")
    # By file and function: cases of one test share what Triton compiles.
    names = list(dict.fromkeys(item.nodeid.partition("[")[0] for item in items))
    chosen = set(names[int(number) - 1 :: int(parts)])
    items[:] = [item for item in items if item.nodeid.partition("[")[0] in chosen]
