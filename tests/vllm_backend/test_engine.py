"""The backend inside of vLLM, where that is installed: `make test-vllm`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from nearfield.vllm import installed

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "models" / "smollm2-135m"
ALL = {"exact_below": 0, "probes": 100_000, "window": 16, "prefill": "cells"}
FEW = {**ALL, "probes": 6}
CHUNKS = {"max_num_batched_tokens": 96}
# Two layers with random weights, where a whole model takes too long.
SMALL = {**CHUNKS, "hf_overrides": {"num_hidden_layers": 2}, "load_format": "dummy"}

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


def test_blocks_of_the_usual_size_in_two_byte_numbers(run: Run) -> None:
    """Rows from 512 on read the second block through cells."""
    usual = {"dtype": "bfloat16", "block_size": None, "max_model_len": 1024}
    rounds = [[[0, 7], [0, 560]], [[0, 540]]]
    ours, stock = (run(given, usual, prompts=rounds, tokens=4) for given in ({**ALL, "window": 1}, None))
    assert ours["cached"] == [[0, 0], [512]]
    assert ours["seen"]["blocks"] > 0
    assert ours["seen"]["furthest"] == 0
    assert ours["tokens"] == stock["tokens"]
    assert logprobs(ours) == pytest.approx(logprobs(stock), abs=0.3)


def test_without_cells_there_are_as_many_blocks_as_in_vllm(run: Run) -> None:
    """Which is the default on a CPU."""
    found, cells, stock = run({}, quick=True), run(FEW), run(None)
    assert found["tokens"] == stock["tokens"]
    assert found["blocks"] == stock["blocks"]
    assert 0.9 < cells["blocks"] / stock["blocks"] < 0.96


def test_chunks_and_cached_blocks_change_nothing(run: Run) -> None:
    pieces = run(FEW)
    whole = run(FEW, {"max_num_batched_tokens": 1024, "enable_prefix_caching": False})
    assert sum(map(sum, pieces["cached"])) > 0
    assert sum(map(sum, whole["cached"])) == 0
    assert pieces["tokens"] == whole["tokens"]
    # So near for these prompts: in others, rounding may decide between two cells that score alike.
    assert logprobs(pieces) == pytest.approx(logprobs(whole), abs=1e-3)
    assert logprobs(pieces) != pytest.approx(logprobs(run(None)), abs=1e-2)


@pytest.mark.parametrize("prefill", ["cells", "exact"])
def test_the_next_turn_of_a_chat(prefill: str, run: Run) -> None:
    """Blocks that an answer has filled are in the cache, computed through cells. Where nothing is in the cache their tokens are a
    part of the next prompt: only where prompts are read by cells too is that the same."""
    turns = [[[0, 140]], [[0, 150, 200]], [[0, 150, 200]]]
    settings = {**FEW, "probes": 1, "prefill": prefill}
    found = run(settings, prompts=turns, tokens=40, forgets=2, quick=True)
    assert found["cached"] == [[0], [160], [0]]
    _, (cached,), (anew,) = found["logprobs"]
    if prefill == "cells":
        assert found["tokens"][1] == found["tokens"][2]
        assert cached == pytest.approx(anew, abs=1e-3)
    else:
        assert cached != pytest.approx(anew, abs=1e-3)


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
    """Kernels are interpreted: tokens are those of the way of a CPU."""
    pytest.importorskip("triton")
    for settings in (FEW, {**FEW, "prefill": "exact"}):
        found, expected = (run(settings, SMALL, tokens=3, prompts=[[[0, 7], [0, 120]]], card=card) for card in (True, False))
        assert found["tokens"] == expected["tokens"]
        assert logprobs(found) == pytest.approx(logprobs(expected), abs=1e-4)


@contextmanager
def server(folder: Path, *options: str) -> Iterator[str]:
    """The address of a server as docs/vllm.md starts it on a CPU. It ends in any case, at the latest after five minutes."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address, log = f"http://127.0.0.1:{port}", folder / "server.log"
    usual = ("--model", str(MODEL), "--host", "127.0.0.1", "--port", str(port), "--attention-config", '{"backend": "CUSTOM"}')
    command = ["timeout", "300", sys.executable, "-m", "vllm.entrypoints.openai.api_server", *usual, *options]
    asked = {"NEARFIELD_VLLM_CPU": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(folder), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as out:
        process = subprocess.Popen(command, cwd=folder, env=os.environ | asked, stdout=out, stderr=subprocess.STDOUT)
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait()


def test_a_server_with_compiled_layers(run: Run, tmp_path: Path) -> None:
    """Answers over HTTP are those of an engine whose layers are not compiled, also where the prompt is in the cache."""
    expected = run(FEW, SMALL, prompts=[[[0, 200]]], tokens=6, quick=True)
    options = {
        "--dtype": "float32",
        "--max-model-len": "512",
        "--block-size": "32",
        "--max-num-seqs": "4",
        "--load-format": "dummy",
        "--hf-overrides": json.dumps(SMALL["hf_overrides"]),
        "--additional-config": json.dumps({"nearfield": FEW}),
    }
    asked = {"model": str(MODEL), "prompt": expected["prompts"][0][0], "max_tokens": 6, "temperature": 0, "logprobs": 1}
    body = json.dumps({**asked, "ignore_eos": True, "return_token_ids": True}).encode()
    with server(tmp_path, *(part for option in options.items() for part in option)) as address:
        for _ in range(2):
            request = urllib.request.Request(f"{address}/v1/completions", body, {"Content-Type": "application/json"})
            with urllib.request.urlopen(request, timeout=120) as answer:
                (found,) = json.load(answer)["choices"]
            assert found["token_ids"] == expected["tokens"][0][0]
            assert found["logprobs"]["token_logprobs"] == pytest.approx(expected["logprobs"][0][0], abs=1e-4)
    assert (tmp_path / "torch_compile_cache").exists()


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
