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

    def found(nearfield: dict[str, Any] | None, engine: dict[str, Any] = CHUNKS, **others: Any) -> dict[str, Any]:
        asked = {"model": str(MODEL), "text": str(text), "nearfield": nearfield, "engine": engine, **others}
        name = json.dumps(asked, sort_keys=True)
        if name not in known:
            given, out = folder / f"{len(known)}.json", folder / f"{len(known)}.out.json"
            given.write_text(name)
            command = [sys.executable, str(Path(__file__).with_name("engine.py")), str(given), str(out)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)
            if others.get("fails"):
                assert done.returncode != 0
                known[name] = {"error": done.stderr}
            else:
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
    """Requests grow until there are no blocks left, one is preempted, and goes on when others have ended."""
    scarce = {**CHUNKS, "num_gpu_blocks_override": 25}
    found = run(FEW, scarce, tokens=90)
    assert found["preemptions"] > 0
    assert found["seen"]["furthest"] == 0
    roomy = run(FEW, tokens=90)
    assert roomy["preemptions"] == 0
    assert found["tokens"] == roomy["tokens"]
    # A control: where cells are written only the first time that a block fills, the same look finds them wrong.
    assert run(FEW, scarce, tokens=90, once=True)["seen"]["furthest"] > 0.1


def test_the_engine_in_another_process(run: Run) -> None:
    prompts = [[[0, 7], [100, 150], [0, 300], [1000, 1310]]]
    assert run(FEW, processes=True, prompts=prompts)["tokens"][0] == run(FEW)["tokens"][0]


def test_the_way_of_a_card(run: Run) -> None:
    """Two layers with random weights, since kernels are interpreted: tokens are those of the way of a CPU."""
    pytest.importorskip("triton")
    small = {**CHUNKS, "hf_overrides": {"num_hidden_layers": 2}, "load_format": "dummy"}
    for settings in (FEW, {**FEW, "prefill": "exact"}):
        found, expected = (run(settings, small, tokens=3, prompts=[[[0, 7], [0, 120]]], card=card) for card in (True, False))
        assert found["tokens"] == expected["tokens"]
        assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-4)


@pytest.mark.parametrize(
    ("settings", "engine", "told"),
    [
        ({"probe": 3}, {}, "must have some of"),
        ({"probes": 0}, {}, "probes must be"),
        ({}, {"block_size": 512, "max_model_len": 1024}, "at most 256, got 512"),
        ({}, {"kv_cache_dtype": "fp8"}, "fp8"),
        (
            {},
            {"hf_overrides": {"sliding_window": 64, "architectures": ["MistralForCausalLM"], "model_type": "mistral"}},
            "liding window",
        ),
    ],
)
def test_settings_that_cannot_be_end_the_start(settings: dict[str, Any], engine: dict[str, Any], told: str, run: Run) -> None:
    assert told in run(settings, {**CHUNKS, **engine}, fails=True)["error"]
