"""Draws are lazy here unless a test asks otherwise: at the sizes of tests, rows would be drawn from their full softmax."""

from __future__ import annotations

import pytest

from nearfield.paper import lazy

COSTS = {name: getattr(lazy, name) for name in ("POINT_COST", "SEARCH_COST", "LEAST_KEYS")}


@pytest.fixture(autouse=True)
def lazy_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in COSTS:
        monkeypatch.setattr(lazy, name, 0)


@pytest.fixture
def real_costs(lazy_draws: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What decides, outside of tests, how rows are drawn."""
    for name, cost in COSTS.items():
        monkeypatch.setattr(lazy, name, cost)
