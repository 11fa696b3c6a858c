"""The model of what sharded keys cost."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def cost(load: Callable[[str], Any]) -> Any:
    return load("distributed_cost")


def test_times_between_and_beyond_what_was_measured(cost: Any) -> None:
    points = {100: 1.0, 400: 4.0, 800: 16.0}  # slopes of 1 and 2
    assert [cost.along(points, n) for n in (100, 400, 800)] == [1.0, 4.0, 16.0]
    for n, expected in ((200, 2.0), (50, 0.5), (1600, 64.0)):
        assert cost.along(points, n) == pytest.approx(expected)
    assert cost.along(points, 1600, slope=3.0) == pytest.approx(128.0)


def test_what_ranks_receive(cost: Any) -> None:
    shape, times = cost.Shape("", 32, 8), {"exact": {1024: 1.0, 2048: 4.0}, "cells": {1024: 1.0, 2048: 2.0}}
    one, eight, many = (cost.prompt(shape, 2048, gpus, cost.Links(), times) for gpus in (1, 8, 64))
    assert sum(one["received"].values()) == 0 == one["exchange_ms"]
    # Keys and values of two bytes: those of the other seven eighths.
    assert eight["received"]["keys and values"] == 7 / 8 * 2048 * 8 * 128 * 2 * 2
    assert eight["exact_ms"] * 8 == one["exact_ms"] == 4.0 * 32 / 8
    # A fifth of a pass is grouping keys, which query heads share.
    assert one["cells_ms"] == pytest.approx(2.0 * (0.2 + 0.8 * 4))
    assert eight["exchange_ms"] == pytest.approx(1000 * sum(eight["received"].values()) / 450e9)
    assert many["exchange_ms"] == pytest.approx(1000 * sum(many["received"].values()) / 400e9)


def test_latency_grows_with_nodes(cost: Any) -> None:
    links = cost.Links()
    assert [links.latency(gpus) for gpus in (1, 8, 64, 512)] == [0.0, 0.01, pytest.approx(0.035), pytest.approx(0.06)]
    assert cost.step(cost.Shape("", 32, 8), 4096, 8, links, {256: 1.0, 512: 2.0}) == {"cells_ms": 2.0, "exchange_ms": 0.02}


def test_the_results_are_those_of_the_model(cost: Any) -> None:
    found = cost.record.read("distributed_cost")
    assert cost.Links(**found["links"]) == cost.Links()
    times, steps = cost.measured(), cost.steps_measured()
    shapes = {shape.name: shape for shape in cost.SHAPES}
    for row in found["prompts"]:
        own = cost.prompt(shapes[row["shape"]], row["n"], row["gpus"], cost.Links(), times)
        assert math.isclose(own["cells_ms"], row["cells_ms"])
        assert math.isclose(own["exchange_ms"], row["exchange_ms"])
    for row in found["steps"]:
        assert math.isclose(
            cost.step(shapes[row["shape"]], row["n"], row["gpus"], cost.Links(), steps)["cells_ms"], row["cells_ms"]
        )
