"""The search over all block sizes, with a card that takes as long as a formula says."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from nearfield.cells.triton import tuning
from nearfield.cells.triton.tiles import TileSizes
from nearfield.kernels import cards


class Compilers:
    """All but eight warps compile."""

    def __init__(self, device: torch.device, workers: int) -> None:
        self.done: list[Any] = []

    def __enter__(self) -> Compilers:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def start(self, label: Any, job: Any) -> None:
        assert {blocks[job.kernel] for _, blocks in job.work} == {label.blocks}
        self.done.append((label, label.blocks.warps != 8))

    def finished(self, seconds: float) -> Any:
        return self.done.pop()


class Timer:
    """Few rows and keys are fast; one stage does not fit."""

    def __init__(self, device: torch.device, length: int, rounds: int) -> None:
        assert length == 65536

    def milliseconds(self, setting: Any, tried: Mapping[str, TileSizes]) -> dict[str, float] | None:
        ((kernel, blocks),) = tried.items()
        assert blocks.warps != 8
        return None if blocks.stages == 1 else {kernel: 1e-3 * blocks.rows * blocks.keys}


def test_the_fastest_is_written_and_the_rest_stays(
    load: Callable[[str], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tune = load("tune_gpu")
    monkeypatch.setattr(tune, "Compilers", Compilers)
    monkeypatch.setattr(tune, "Timer", Timer)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *device: "A card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setenv("NEARFIELD_CACHE", str(tmp_path))
    monkeypatch.delenv(cards.SWITCH, raising=False)
    out = tmp_path / "tuning.json"
    asked = ["--kernels", "near_fwd", "route", "--dims", "64", "--dtypes", "bfloat16", "--cell-sizes", "64", "256"]
    monkeypatch.setattr("sys.argv", ["tune_gpu.py", *asked, "--out", str(out)])
    caches = tuning.forget, cards.class_of.cache_clear
    for clear in caches:
        clear()
    tune.main()
    found, shipped = json.loads(out.read_text())["cards"], tuning._tables("tuning.json")["cards"]
    derived = tuning._tables("derived.json")["classes"]["8.6"]
    monkeypatch.undo()
    for clear in caches:
        clear()
    assert found["NVIDIA H200"] == shipped["NVIDIA H200"]
    blocks = found["A card"]["blocks"]
    before = derived["blocks"]["near_fwd"]["half, 64"]
    assert blocks["near_fwd"]["half, 64"] == {**before, "64": [64, 4, 2, 32, 32, 64], "256": [64, 4, 2, 32, 32, 64]}
    assert blocks["route"]["half, 64"]["128"] == [32, 4, 3, 64, 32, 64]
    blocks["near_fwd"]["half, 64"], blocks["route"]["half, 64"] = before, derived["blocks"]["route"]["half, 64"]
    assert blocks == derived["blocks"]
    assert found["A card"]["decode"] == derived["decode"]
