"""One hypothesis profile for all tests, patient threads, poisoned memory, and the rules for kernels and tests that need a GPU."""

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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
