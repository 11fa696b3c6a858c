"""One hypothesis profile for all tests, and the rule for tests that need a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

# Derandomised: a failure here is a change in the code, never the luck of the draw.
settings.register_profile(
    "nearfield", derandomize=True, max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("nearfield")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
