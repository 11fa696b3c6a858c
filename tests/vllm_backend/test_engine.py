"""The backend inside of vLLM, where that is installed: `make test-vllm`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nearfield.vllm import installed

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "smollm2-135m"
ALL = {"exact_below": 0, "probes": 100_000, "window": 16, "prefill": "cells"}
FEW = {**ALL, "probes": 6}
CHUNKS = {"max_num_batched_tokens": 96}

pytestmark = [
    pytest.mark.skipif(installed() is None, reason="vLLM is not installed: make test-vllm"),
    pytest.mark.skipif(not MODEL.exists(), reason=f"there is no model in {MODEL}: make smollm2"),
]

Run = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """What engine.py finds with these settings. The same settings run once."""
    folder = tmp_path_factory.mktemp("engine")
    text = folder / "text.txt"
    from nearfield import synthetic

    text.write_text(Path(synthetic.__file__).read_text() * 3 + (ROOT / "CHANGELOG.md").read_text())
    known: dict[str, dict[str, Any]] = {}

    def found(nearfield: dict[str, Any] | None, engine: dict[str, Any] = CHUNKS, once: bool = False) -> dict[str, Any]:
        asked = {"model": str(MODEL), "text": str(text), "nearfield": nearfield, "engine": engine, "once": once}
        name = json.dumps(asked, sort_keys=True)
        if name not in known:
            given, out = folder / f"{len(known)}.json", folder / f"{len(known)}.out.json"
            given.write_text(name)
            command = [sys.executable, str(Path(__file__).with_name("engine.py")), str(given), str(out)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
            assert done.returncode == 0, done.stderr[-3000:]
            known[name] = json.loads(out.read_text())
        return known[name]

    return found


def logprobs(found: dict[str, Any]) -> list[float]:
    """Those of all tokens of all requests."""
    return [own for prompts in found["logprobs"] for tokens in prompts for own in tokens]


def test_tokens_are_those_of_vllm_where_all_cells_are_opened(run: Run) -> None:
    ours, stock = run(ALL), run(None)
    assert (ours["backend"], stock["backend"]) == ("CellsImpl", "CPUAttentionBackendImpl")
    assert ours["tokens"] == stock["tokens"]
    assert ours["cached"] == stock["cached"]
    assert ours["cached"][1] == [288, 192, 192]
    assert ours["seen"]["blocks"] > 1000
    assert ours["seen"]["furthest"] == 0


def test_chunks_and_cached_blocks_change_nothing(run: Run) -> None:
    pieces = run(FEW)
    whole = run(FEW, {"max_num_batched_tokens": 1024, "enable_prefix_caching": False})
    assert sum(map(sum, pieces["cached"])) > 0
    assert sum(map(sum, whole["cached"])) == 0
    assert pieces["tokens"] == whole["tokens"]
    assert logprobs(pieces) == pytest.approx(logprobs(whole), abs=1e-3)
    assert logprobs(pieces) != pytest.approx(logprobs(run(None)), abs=1e-2)


def test_cells_are_right_where_blocks_are_used_again(run: Run) -> None:
    scarce = {**CHUNKS, "num_gpu_blocks_override": 26}
    found = run(FEW, scarce)
    assert found["preemptions"] > 0
    assert found["seen"]["furthest"] == 0
    # A control: where cells are written only the first time that a block fills, the same look finds them wrong.
    assert run(FEW, scarce, once=True)["seen"]["furthest"] > 0.1
