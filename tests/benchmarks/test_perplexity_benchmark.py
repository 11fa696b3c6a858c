"""benchmarks/bench_perplexity_gpu.py: all ways see the same tokens, and those that read every key are exact attention."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("transformers")

from hf_models import model, tokenizer_of_letters, tokens

from nearfield import Cells, Exact
from nearfield.app.peers.rules import RULES
from nearfield.app.ruler.ways import EXACT, RECORDED, WAYS, CellWay, PeerWay

TOKENS, WRITTEN = 400, 24
CLOSE: dict[str, float] = {"rtol": 0.0, "atol": 1e-5}


@pytest.fixture
def measure(load: Callable[[str], Any]) -> Any:
    return load("perplexity_measure")


@pytest.fixture(params=["llama", "gemma3"])
def small(request: pytest.FixtureRequest) -> Any:
    """One with plain layers, and one in which every other layer has a window."""
    return model(request.param, max_position_embeddings=1024)


def test_losses_of_some_rows_at_a_time(measure: Any, small: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokens(1, 100)
    with torch.no_grad():
        expected = F.cross_entropy(small(ids).logits[0, :-1], ids[0, 1:], reduction="none")
    monkeypatch.setitem(measure.HEAD_BYTES, "cpu", 7 * 4 * 97)
    torch.testing.assert_close(measure.reading_losses(small, ids, EXACT), expected.double(), **CLOSE)


def test_exact_rows_after_a_prompt_are_those_of_one_pass(measure: Any, small: Any) -> None:
    ids = tokens(2, TOKENS)
    prompts = measure.read_prompts(small, ids, WRITTEN)
    for number in (0, 1):
        found = measure.rows_losses(small, prompts, number, RECORDED, rows=10)
        assert found.shape == (WRITTEN,)
        torch.testing.assert_close(found, measure.reading_losses(small, ids[number][None], EXACT)[-WRITTEN:], **CLOSE)
        # The prompt is as it was, for the next way.
        assert prompts.caches[number].get_seq_length() == prompts.start == TOKENS - WRITTEN - 1


@pytest.mark.parametrize("rule", RULES)
def test_rows_by_a_rule_do_not_see_each_other(measure: Any, small: Any, rule: str) -> None:
    prompts = measure.read_prompts(small, tokens(1, TOKENS), WRITTEN)
    exact = measure.rows_losses(small, prompts, 0, RECORDED)
    everything = PeerWay("all", "", rule=RULES[rule], share=1.1)
    torch.testing.assert_close(measure.rows_losses(small, prompts, 0, everything), exact, **CLOSE)
    few = WAYS[f"{rule}-12"]
    together = measure.rows_losses(small, prompts, 0, few, rows=16)
    assert float((together - exact).abs().max()) > 1e-4
    torch.testing.assert_close(together, measure.rows_losses(small, prompts, 0, few, rows=1), **CLOSE)


def test_a_cell_cache_that_opens_everything_is_exact(measure: Any, small: Any) -> None:
    ids = tokens(2, TOKENS)
    prompts = measure.read_prompts(small, ids, WRITTEN)
    exact = torch.stack([measure.rows_losses(small, prompts, number, RECORDED) for number in (0, 1)])
    every = CellWay("every", "", Exact(), method=Cells(segment=64, cell_size=8, probes=1000))
    found, keys = measure.steps_losses(small, prompts, every)
    torch.testing.assert_close(found, exact, **CLOSE)
    assert TOKENS - WRITTEN <= keys <= TOKENS
    few = CellWay("few", "", Exact(), method=Cells(segment=64, cell_size=8, probes=2))
    found, keys = measure.steps_losses(small, prompts, few)
    assert keys < TOKENS / 2
    assert float((found - exact).abs().max()) > 1e-5
    # Texts of a batch have what they have alone.
    alone, _ = measure.steps_losses(small, measure.read_prompts(small, ids[1:], WRITTEN), few)
    torch.testing.assert_close(found[1:], alone, **CLOSE)


def test_keys_that_matter_are_counted_with_the_scale_of_the_model(measure: Any, small: Any) -> None:
    prompts = measure.read_prompts(small, tokens(2, TOKENS), WRITTEN)
    made = measure.cell_cache(small, prompts, WAYS["weight-0.4"])
    both = [(layer, read) for layer, read in zip(made.layers, prompts.caches[0].layers, strict=True) if hasattr(layer, "latest")]
    assert both
    for layer, read in both:
        query, scale = layer.latest
        assert scale == read.scale != 1.0
        assert query.shape[0] == 2


def test_keys_read(measure: Any) -> None:
    prompts = measure.Prompts(torch.zeros(1, 10_000 + 101), 100, [])
    assert measure.keys_of(EXACT, prompts) == 10_000 + 50.5
    assert measure.keys_of(WAYS["topk-6"], prompts) == 600
    assert measure.keys_of(WAYS["snapkv-6"], prompts) == 600 + 50.5
    assert measure.keys_of(WAYS["quest-6"], prompts) == 36 * 16 + 50.5  # the prompt is whole pages
    assert measure.keys_of(WAYS["moba-6"], prompts) == 8 * 64 + 16 + 50.5


def test_means_over_texts(measure: Any) -> None:
    exact = torch.rand(640, dtype=torch.float64)
    more = [torch.full_like(exact, 0.1), torch.full_like(exact, 0.3)]
    texts = [
        {"kind": kind, "ways": {"exact": measure.compared(exact, exact, 8), "way": measure.compared(exact + extra, exact, 8)}}
        for kind, extra in zip(("book", "code"), more, strict=True)
    ]
    found = measure.pooled(texts, "way")
    assert found["excess"] == pytest.approx(torch.tensor(0.2).expm1().item())
    assert found["perplexity"] / found["exact"] == pytest.approx(1 + found["excess"])
    assert found["excess_by_kind"]["code"] == pytest.approx(torch.tensor(0.3).expm1().item())
    assert found["stderr"] == pytest.approx(0, abs=1e-12)
    assert measure.pooled(texts, "exact")["excess"] == 0
    noise = torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert measure.stderr(noise) == pytest.approx(100_000**-0.5, rel=0.4)


def test_a_run_adds_to_the_one_before(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bench, tables, drawing = load("bench_perplexity_gpu"), load("gpu_tables"), load("perplexity_plot")
    monkeypatch.setattr(load("record"), "RESULTS", tmp_path)  # --out sets it: this puts it back
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    draw = drawing.plot
    monkeypatch.setattr(drawing, "plot", lambda *_: None)

    def run(*arguments: str) -> dict[str, Any]:
        given = ["--quick", "--name", "gemma-3-270m", "--tokens", "1200", "--out", str(tmp_path), *arguments]
        monkeypatch.setattr(sys, "argv", ["bench", *given])
        bench.main()
        saved = json.loads((tmp_path / "perplexity_gpu.json").read_text())
        return {name.removeprefix("gemma-3-270m/"): section["results"] for name, section in saved.items()}

    assert tables.table("perplexity read") == ""  # nothing was measured yet
    found = run("--section", "writing", "--written", "16", "--ways", "cells-12", "topk-12")
    assert found.keys() == {"writing"}
    found = run("--ways", "exact+cache", "quest-12", "cells", "--written", "16")
    written, read = found["writing"], found["reading"]
    ways = {"exact", "one pass", "exact+cache", "cells-12", "topk-12", "quest-12"}
    assert written["pooled"].keys() == written["same_texts"].keys() == ways
    assert written["pooled"]["topk-12"]["texts"] == 2
    assert abs(written["pooled"]["one pass"]["excess"]) < 1e-5
    assert len(written["pooled"]["topk-12"]["excess_by_position"]) == 8
    assert len(read["pooled"]["cells"]["excess_by_position"]) == 16
    assert tables.table("perplexity read").count("Gemma 3 270M") == 2
    assert tables.table("perplexity cache").count("Gemma 3 270M") == 1
    rows = tables.table("perplexity written").splitlines()[2:]
    assert [row.split("|")[2].strip() for row in rows] == ["cells", "exact top-k", "Quest"]
    draw(load("record").read_sections("perplexity_gpu"), tmp_path)
    assert (tmp_path / "perplexity.png").stat().st_size > 10_000
    # Of other tokens nothing is kept, and without time nothing is begun.
    found = run("--written", "20", "--section", "writing", "--ways", "moba-12")
    assert found["writing"]["pooled"].keys() == {"exact", "one pass", "moba-12"}
    assert found == run("--written", "20", "--minutes", "0")


def test_texts(load: Callable[[str], Any], tmp_path: Path) -> None:
    texts = load("perplexity_texts")
    (tmp_path / "book.txt").write_text("First line.\n" * 100 + "Later line.\n" * 200)
    found = texts.find(tokenizer_of_letters(), [tmp_path / "book.txt"], 50, 2)
    assert [text.name for text in found] == [f"{kind} {number}" for kind in texts.KINDS for number in (1, 2)]
    assert {text.ids.shape for text in found} == {(1, 50)}
    assert len({text.sha256 for text in found}) == 6
    again = texts.find(tokenizer_of_letters(), [tmp_path / "book.txt"], 50, 2)
    assert [text.sha256 for text in again] == [text.sha256 for text in found]
    texts.save(found, tmp_path / "texts.pt")
    begins = texts.load(tmp_path / "texts.pt", 40)
    assert [text.about["kind"] for text in begins] == [text.kind for text in found]
    assert all(torch.equal(short.ids, text.ids[:, :40]) for short, text in zip(begins, found, strict=True))
    with pytest.raises(ValueError, match="fewer than 60 tokens"):
        texts.load(tmp_path / "texts.pt", 60)
    with pytest.raises(ValueError, match="are needed"):
        texts.find(tokenizer_of_letters(), [tmp_path / "book.txt"], 5000, 2)


ROOT = Path(__file__).parents[2]


def test_the_readme_has_the_perplexity_that_was_measured() -> None:
    sections = json.loads((ROOT / "benchmarks/results/perplexity_gpu.json").read_text())
    text = (ROOT / "README.md").read_text()
    read, written = (sections[f"qwen2.5-coder-1.5b/{part}"]["results"]["pooled"] for part in ("reading", "writing"))
    for way, words in ((read["cells"], "higher"), (written["exact+cache"], "lower")):
        told = re.search(rf"([\d.]+)% ± ([\d.]+)% {words}", text)
        assert told is not None
        assert told.groups() == (f"{100 * abs(way['excess']):.2f}", f"{100 * way['stderr']:.2f}")
        assert (way["excess"] > 0) == (words == "higher")
    share = written["exact+cache"]["keys_read"] / written["exact"]["keys_read"]
    assert f"which reads {share:.0%} of the keys" in text
