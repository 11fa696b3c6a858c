"""benchmarks/cache_memory.py: it runs in its quick form, and knows a number that was found from one that was not."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

pytest.importorskip("transformers")

from hf_models import model, tokenizer_of_letters

import nearfield
from nearfield.app.evaluate.measure import attending

TEXT = "\n\n".join(f"Once upon a time {i} of {7 * i % 90} went to the market, and came back." for i in range(60))


@pytest.fixture
def bench(load: Callable[[str], Any]) -> Any:
    return load("cache_memory")


@pytest.fixture
def tokenizer() -> Any:
    return tokenizer_of_letters()


def test_it_runs_quickly(bench: Any, tokenizer: Any) -> None:
    options = argparse.Namespace(quick=True, tokens=None, cases=None)
    results = bench.memory(model("llama", max_position_embeddings=512), tokenizer, {"tale": TEXT}, options)
    assert (results["cases"], results["tokens"], results["chunk"]) == (2, 512, 128)
    assert results["both"] <= min(results["found"], results["control"]) <= 2
    for row in results["by_case"]:
        assert row["depth"] < row["tokens"] < 512
        assert row["bytes"] > row["tokens"] * 2 * 2 * 2 * 8 * 4
        assert min(row[what] for what in ("read_s", "save_s", "load_s", "ask_s")) > 0
    assert bench.show_memory(results).row_count == 1


def test_a_number_is_found_if_it_is_what_the_model_says(bench: Any, tokenizer: Any, tmp_path: Path) -> None:
    net = model("llama", max_position_embeddings=512)
    ids = bench.ids_of(tokenizer, TEXT)[:, :400]
    given = (net, tokenizer, ids, "The market is")
    last = (nearfield.Cells(segment=32), 128, tmp_path / "memory")
    with attending(net, nearfield.Exact()):
        row = bench.ask_memory(*given, torch.tensor([5, 6, 7]), *last)
        said = bench.ids_of(tokenizer, row["said"])[0]
        assert len(said) == 3
        assert bench.ask_memory(*given, said, *last)["found"]
        assert not bench.ask_memory(*given, said + 1, *last)["found"]
        greedy = net.generate(ids, max_new_tokens=3, do_sample=False)
        assert bench.completes(net, greedy, 3)
        greedy[0, -1] += 1
        assert not bench.completes(net, greedy, 3)
