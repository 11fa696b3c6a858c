"""The benchmark of ranks, on one rank in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from nearfield.distributed import Ranks


@pytest.fixture
def alone() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.mark.parametrize("section", ["prompts", "training"])
def test_prompts_and_training(section: str, load: Callable[[str], Any], alone: Ranks) -> None:
    bench = load("bench_distributed")
    found = bench.of_prompt(bench.Job(section, 600, 1, 1, "cpu", True), alone)
    assert found["tokens"] == [600]
    assert found["seconds"].keys() == {"cells", "exact"}
    assert all(len(seconds) == bench.TURNS and min(seconds) > 0 for seconds in found["seconds"].values())
    # One rank has nobody to send anything to.
    assert {sum(sent.values()) for sent in found["sent"].values()} == {0}


def test_steps(load: Callable[[str], Any], alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = load("bench_distributed")
    monkeypatch.setattr(bench, "STEPS", 3)
    found = bench.of_steps(bench.Job("steps", 9000, 1, 1, "cpu", False), alone)
    assert {name: len(seconds) for name, seconds in found["seconds"].items()} == {"global": 3, "local": 3, "ideal": 3}
    assert 0 < found["probes"] < found["cells"] < 9000 == found["held"] - 4
    assert torch.tensor(list(found["seconds"].values())).min() > 0


def test_bytes_by_formula_and_the_table(load: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    bench = load("bench_distributed")
    job = bench.Job("prompts", 1001, 4, 2, "cpu", True)
    # Three others get the shares of keys and values of two heads of 64 columns in float32.
    assert bench.formulas(job) == {"by_formula": 3 * 251 * 2 * 2 * 64 * 4}
    rows = [
        {
            "n": 1001,
            "ranks": ranks,
            "seconds": {"cells": [8.0 / ranks, 10.0 / ranks, 9.0 / ranks]},
            "sent": {"cells": {"keys": 5e6}},
        }
        for ranks in (1, 4)
    ]
    bench.show([rows[0], rows[1] | {"by_formula": 2_000_000, "torch": {"error": "not here"}}], "prompts")
    shown = capsys.readouterr().out
    assert "1.00" in shown
    assert "not here" in shown
    assert "cells" in shown
