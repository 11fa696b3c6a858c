"""benchmarks/bench_generate.py and bench_generate_gpu.py: every section runs in its quick form, without a card or a model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import model

RunSection = Callable[..., dict[str, Any]]


@pytest.fixture
def section(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunSection:
    """The rows that a section of the benchmark on a GPU writes, by case."""
    bench = load("bench_generate_gpu")
    monkeypatch.setattr(load("generate_models"), "ROUNDS", 1)
    monkeypatch.setattr(load("generate_models"), "STEPS", 2)
    monkeypatch.setattr(load("generate_prefill"), "MOST_ROUNDS", 1)
    monkeypatch.setattr(load("record"), "RESULTS", tmp_path)  # --out sets it: this puts it back

    def run(name: str, *arguments: str) -> dict[str, Any]:
        monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--section", name, "--out", str(tmp_path), *arguments])
        bench.main()
        saved = json.loads((tmp_path / "generate_gpu.json").read_text())
        return {row["case"]: row for row in saved[name]["results"]["rows"]}

    return run


def test_decoding(section: RunSection) -> None:
    assert section("decode", "--only", "tiny-2048").keys() == {"tiny-2048"}
    rows = section("decode", "--only", "tiny-1536x2")
    assert rows.keys() == {"tiny-2048", "tiny-1536x2"}  # What is not measured again stays.
    row = rows["tiny-1536x2"]
    assert row["ms"].keys() == {"exact", "cells", "no attention"}
    assert row["ratio"] == row["ms"]["exact"] / row["ms"]["cells"]
    assert row["keys_read"] < 1536 // 2


def test_decoding_with_offload(section: RunSection) -> None:
    row = section("decode", "--only", "tiny-2048-offload", "--resident", "64")["tiny-2048-offload"]
    assert row["ms"].keys() == {"exact", "cells", "nothing kept", "on the card", "no attention"}
    assert row["resident"] == 64
    assert row["found_resident"] == [None, None]  # Kernels alone keep cells on a card.


def test_reading_prompts(section: RunSection) -> None:
    rows = section("prefill")
    row, chunks = rows["tiny-600"], rows["tiny-600-chunks"]
    assert row["ms"].keys() == row["next_ms"].keys() == {"sdpa", "default", "cells", "shared"}
    assert row["ratio"]["cells"] == row["ms"]["sdpa"] / row["ms"]["cells"]
    assert chunks["ms"].keys() == {"default", "cells", "default, chunks", "cells, chunks"}
    assert not row["failed"]


def test_requests_get_what_they_get_alone(section: RunSection) -> None:
    row = section("requests")["tiny-3x300-1500"]
    assert row["lengths"] == [300, 671, 1500]
    assert row["ms"].keys() == {"cells", "padded", "transformers"}
    assert row["cache_gb"]["cells"] < 0.8 * row["cache_gb"]["padded"]
    assert set(row["alone"]["same_tokens"].values()) == {1.0}
    assert max(row["alone"]["logits_off"].values()) < 1e-5


def test_exact_attention_does_not_see_padding(load: Callable[[str], Any]) -> None:
    models = load("generate_models")
    key, value = torch.randn(2, 2, 2, 50, 16)
    mask = torch.arange(50) >= torch.tensor([20, 0])[:, None]
    attention = models.ExactAttention([(key, value)], group=2, mask=mask[:, None, None])
    query, new = torch.randn(2, 4, 1, 16), torch.randn(2, 2, 1, 16)
    layer = torch.nn.Module()
    layer.layer_idx = 0  # type: ignore[assignment]
    found = attention(layer, query, new, new, None, scaling=0.25)[0]
    key[0, :, :20] = torch.nan
    whole = torch.cat([key[:1, :, 20:-1], new[:1]], 2), torch.cat([value[:1, :, 20:-1], new[:1]], 2)
    expected = torch.nn.functional.scaled_dot_product_attention(query[:1], *whole, scale=0.25, enable_gqa=True)
    torch.testing.assert_close(found[:1], expected.transpose(1, 2))


def test_the_step_that_closes_a_segment_is_among_those_that_are_timed(section: RunSection) -> None:
    row = section("closing")["tiny-1536"]
    assert row["segment"] == 1024
    # It comes after as many others as are timed before it.
    assert row["closing_ms"] == row["runs_ms"][30]
    assert row["largest_other_ms"] == max(row["runs_ms"][:30] + row["runs_ms"][31:])


def test_a_real_model(section: RunSection) -> None:
    row = section("qwen")["tiny-1100"]
    assert row["errors"].keys() == {"default", "cells", "shared"}
    assert 0 < row["errors"]["cells"]["mean"] <= row["errors"]["cells"]["worst_layer"] <= row["errors"]["cells"]["worst"] < 0.1
    assert row["step"]["ratio"] == row["step"]["ms"]["exact"] / row["step"]["ms"]["cells"]


def test_names_of_cases(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "--list"])
    load("bench_generate_gpu").main()
    shown = capsys.readouterr().out
    assert "8b-262144-offload" in shown
    assert "prefill: 1b-4096" in shown
    monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--only", "9b"])
    with pytest.raises(SystemExit):
        load("bench_generate_gpu").main()
    assert "tiny-600-chunks" in capsys.readouterr().err


def test_the_benchmark_on_a_cpu(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(load("record"), "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["bench", "--quick", "--only", "smollm2", "overhead", "--out", str(tmp_path)])
    load("bench_generate").main()
    saved = {name: found["results"] for name, found in json.loads((tmp_path / "generate.json").read_text()).items()}
    rows = saved["smollm2"]["rows"]
    assert [(row["keys"], row["read"]) for row in rows] == [(1500, 1500), (2048, 1500)]
    for row in rows:
        assert row["seconds"].keys() == row["processor_seconds"].keys() == {"cells", "static", "dynamic"}
        assert 0 < row["error"]["mean"] <= row["error"]["worst_layer"] <= row["error"]["worst"] < 0.1
        assert row["keys_read"] < row["keys"] // 2
    found = saved["overhead"]
    assert found["beyond_dynamic"] == found["microseconds_per_layer"]["cells"] - found["microseconds_per_layer"]["dynamic"]
    assert 50 < found["operations_of_attend"] < 150


def test_a_longer_cache_repeats_the_prompt_at_later_positions(load: Callable[[str], Any]) -> None:
    """Without noise, keys of a text that comes twice are those of a model that has no other way to tell the two."""
    prompt = load("generate_prompt")
    small = model("llama", num_hidden_layers=1, max_position_embeddings=1024)
    ids = torch.arange(20)[None] % 10
    twice = prompt.read(small, torch.cat([ids, ids], 1))
    # The first layer sees tokens and positions alone.
    found = prompt._grown(small, twice[0][0][:, :, :20], 40, torch.Generator().manual_seed(0), turned=True)
    off = (found - twice[0][0]).float()
    size = prompt.NOISE * twice[0][0][:, :, :20].std(2, keepdim=True)
    assert torch.equal(found[:, :, :20], twice[0][0][:, :, :20])
    assert 0.5 < float((off[:, :, 20:] / size).square().mean().sqrt()) < 2
    longer = prompt.extended(small, [(x[:, :, :20], y[:, :, :20]) for x, y in twice], 33)
    assert longer[0][0].shape[2] == longer[0][1].shape[2] == 33
