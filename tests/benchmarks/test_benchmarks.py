"""The benchmarks run in their quick form, which writes nothing, and what they compute is right."""

from __future__ import annotations

import ctypes
import gc
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import nearfield as nf
from nearfield.synthetic import make

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
WRITTEN = (*BENCHMARKS.glob("results/*.json"), *(BENCHMARKS.parent / "docs" / "figures").glob("*.png"))


@pytest.fixture
def run(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """What a benchmark prints. It must leave every result and figure as it was."""

    def run(name: str, *arguments: str) -> str:
        before = {path: path.stat().st_mtime_ns for path in WRITTEN}
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        load(name).main()
        assert before == {path: path.stat().st_mtime_ns for path in WRITTEN}
        printed = capsys.readouterr().out
        assert "written" not in printed
        return printed

    return run


def test_every_section_of_the_cells_benchmark_runs(run: Callable[..., str]) -> None:
    shown = run("bench_cells", "--quick")
    titles = (
        "forward, no mask",
        "forward and backward, causal",
        "time ~ n^",
        "paper (M3",
        "as many keys",
        "against F.scaled_dot",
    )
    for title in (*titles, "Auto(eps=0.05): honoured", "clustered, no mask; 200 rows"):
        assert title in shown, title


def test_the_benchmark_of_rows_that_open_cells_together_runs(run: Callable[..., str]) -> None:
    shown = run("bench_share", "--quick")
    for word in ("strewn", "runs", "gaussian", "local"):
        assert word in shown


def test_the_benchmark_of_sharp_models_runs(run: Callable[..., str]) -> None:
    shown = run("bench_sharp", "--quick")
    for word in ("keys, uncut", "queries", "the last 64 of 1,600 tokens"):
        assert word in shown
    shown = run("bench_sharp", "--quick", "--section", "reading")
    for word in ("usual, queries", "6%", "the last 399 of 1,600 tokens"):
        assert word in shown


def test_the_benchmark_of_blocks_runs(run: Callable[..., str]) -> None:
    shown = run("bench_blocks", "--quick", "--ways", "all/16/64", "256/16/64")
    for word in ("256/16/64", "tables", "the last 64 of 1,600 tokens"):
        assert word in shown


def test_the_benchmark_of_pages_runs(run: Callable[..., str]) -> None:
    """Rows of a small layer with few cells, all of which are opened: they are exact."""
    pytest.importorskip("triton")
    shown = run("bench_pages_gpu", "--quick")
    assert "steps/2x200" in shown
    assert "blocks/4" in shown
    assert "chunks/20x100" in shown
    assert " 0.000 " in shown


def test_the_benchmark_of_cells_that_a_cache_takes_over_runs(run: Callable[..., str]) -> None:
    shown = run("bench_adopted", "--quick")
    assert "local" in shown
    assert "taken over" in shown


def test_the_benchmark_of_the_default_runs(run: Callable[..., str]) -> None:
    shown = run("bench_default", "--quick")
    for word in ("randn", "clustered, causal", "exact", "pooled error"):
        assert word in shown


def test_the_benchmark_of_a_decoding_step_runs(load: Callable[[str], Any]) -> None:
    """With all keys near, or all cells opened, nothing is off; and a step costs time."""
    found = load("bench_decode").measure(True)
    assert [row["method"] for row in found["rows"]][:2] == ["exact", "Cells()"]
    assert {row["n"] for row in found["rows"]} == {1024}
    for row in found["rows"]:
        assert row["step_ms"] > 0
        assert row["mb"] >= 4
        assert row["error"] < (1e-5 if row["method"] in ("exact", "Cells()") else 3)


GPU_ONLY = ("default", "extend", "generate", "perplexity", "queries", "sizes", "topk")


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
@pytest.mark.parametrize("name", GPU_ONLY)
def test_what_needs_a_gpu_is_left_out_without_one(run: Callable[..., str], name: str) -> None:
    """`make bench` runs them all."""
    assert run(f"bench_{name}_gpu").startswith("skipped: there is no CUDA device (")


def test_the_benchmark_of_cells_for_queries_runs(load: Callable[[str], Any]) -> None:
    found = load("bench_queries_gpu").measure(512)
    assert 0 < found["error"]["queries"] < 0.1
    assert min(*found["prompt"].values(), *found["training"].values()) > 0


def test_the_benchmark_of_sizes_runs(run: Callable[..., str], load: Callable[[str], Any]) -> None:
    shown = run("bench_sizes_gpu", "--quick")
    assert "random: prompts" in shown
    assert "random: steps" in shown
    bench = load("bench_sizes_gpu")
    layer = ("one", *make("gaussian", 1, 2, 3000, 8, kv_heads=1))
    for section in bench.SECTIONS.values():
        errors = [row["error"] for row in section(layer, False)]
        assert min(errors) > 0
        assert errors[0] < errors[2], "of the same cells a third is opened"
    exact = F.scaled_dot_product_attention(*layer[1:], is_causal=True, enable_gqa=True)
    torch.testing.assert_close(bench.exact_rows(*layer[1:], 9), exact[:, :, -9:], atol=1e-5, rtol=1e-5)


def test_the_benchmark_of_the_default_on_a_gpu_runs_without_one(load: Callable[[str], Any]) -> None:
    bench = load("bench_default_gpu")
    query, key, value = make("clustered", 1, 1, 512, 16)
    found = bench.measure(bench.Case("clustered", (query, key, value), False), quick=True)
    assert "Cells" in found["always_ran"]
    assert 0 < found["pooled_errors"]["always"] == found["pooled_errors"]["cells"] <= 0.1
    assert found["ms"].keys() == {"sdpa", "default", "always", "cells"}


def test_the_benchmark_of_top_k_on_a_gpu_runs_without_one(load: Callable[[str], Any]) -> None:
    """With all keys near there is nothing to miss; the error of SDPA is that of rounding."""
    bench = load("bench_topk_gpu")
    found, _ = bench.measure(64, 2, True, ("cpu",))
    assert found["recall"] == 1
    assert found["k"] == 8 < found["scored"]
    assert found["methods"]["SDPA"]["errors"]["mean"] < 0.005
    assert found["methods"]["tail=32"]["errors"]["mean"] < found["methods"]["tail=0"]["errors"]["mean"]
    bench.show([found])


@pytest.mark.long
def test_the_benchmark_of_lazy_draws_runs(run: Callable[..., str]) -> None:
    shown = run("bench_lazy", "--quick")
    for word in ("rule / dense", "keys read by Algorithm 2", "(1 of the true one)"):
        assert word in shown


def test_the_benchmark_of_slack_runs(load: Callable[[str], Any]) -> None:
    bench = load("bench_slack")
    exact, few = (
        bench.slack_of("", index, "gaussian", 256, 10) for index in (nf.ExactIndex(), nf.KMeansIndex(cells=16, probes=1))
    )
    assert (exact["median"], exact["largest"], exact["recall"], exact["read"]) == (0.0, 0.0, 1.0, 1.0)
    assert 0 < few["median"] <= few["largest"]
    assert few["recall"] < 0.9 > few["read"]
    rows = json.loads((Path(__file__).parents[2] / "benchmarks/results/slack.json").read_text())["results"]["rows"]
    assert [(row["family"], row["index"]) for row in rows] == [
        (x, y) for x in bench.FAMILIES for y in bench.indices(bench.LENGTH)
    ]


def test_a_wrong_slack_shows_in_the_law(load: Callable[[str], Any]) -> None:
    told = load("bench_lazy").told
    half, true = told(0.5, 40_000), told(1.0, 40_000)
    # The distance of exact draws, by chance alone, is known within some 5%.
    assert half["distance"] > 1.1 * half["noise"]
    assert true["distance"] < 1.05 * true["noise"]
    assert all(0 < row["per_draw"] <= row["bound"] for row in (half, true))


@pytest.mark.slow
def test_sections_of_the_gpu_benchmark_that_train_run_without_one(
    load: Callable[[str], Any], run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("gpu_parts"), "TIMED", 1)
    shown = run("bench_gpu", "--quick", "--only", "training", "parts")
    for word in ("forward and backward; ", "causal, training"):
        assert word in shown, word


def test_the_benchmark_on_real_inputs_runs_on_saved_ones(run: Callable[..., str], tmp_path: Path) -> None:
    for layer in range(2):
        query, key, value = make("local", 1, 2, 2048, 16, kv_heads=1, seed=layer)
        torch.save({"q": query, "k": key, "v": value}, tmp_path / f"layer_{layer:02}.pt")
    shown = run("bench_real", "--captured", str(tmp_path), "--rows", "8", "--quick")
    assert "relative error, all layers, 2,048 tokens" in shown
    assert "without layer 0" in shown
    assert "routed per group" in shown


def test_the_benchmark_of_needed_keys_runs_on_saved_inputs(
    load: Callable[[str], Any], run: Callable[..., str], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    for layer in range(2):
        query, key, value = make("local", 1, 2, 300, 16, kv_heads=1, seed=layer)
        torch.save({"q": query, "k": key, "v": value}, tmp_path / f"layer_{layer:02}.pt")
    shown = run("bench_needed", "--captured", str(tmp_path), "--rows", "4", "--quick")
    assert "k that rows need, n = 300, tail = 18" in shown
    bench = load("bench_needed")
    results = bench.measure(list(load("real").saved(tmp_path)), rows=4)
    query, key, _ = (torch.load(tmp_path / "layer_01.pt")[name] for name in "qkv")
    whole = nf.needed_k(query, key, 0.3, bench.DELTA, tail=18, is_causal=True, enable_gqa=True)
    assert results["promises"][1]["needed"][1] == whole[0][:, 74::75].tolist()
    bench.plot(results, tmp_path)
    assert (tmp_path / "needed.png").stat().st_size > 10_000


@pytest.mark.long
def test_the_benchmark_of_hashing_by_theory_runs(
    load: Callable[[str], Any], run: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("bench_lsh"), "DRAWS", 100)
    shown = run("bench_lsh", "--quick")
    for word in ("sizes for 1 - 1/n^2", "near keys", "Algorithm 5", "LSH, sizes of the theory"):
        assert word in shown, word


def test_real_inputs_are_asked_for_where_there_are_none(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    real = load("bench_real")
    monkeypatch.setattr(sys, "argv", ["bench_real.py", "--model", str(tmp_path)])
    real.main()
    assert "make smollm2" in capsys.readouterr().out


def test_the_dense_cells_of_the_benchmark_are_the_librarys(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    real = load("bench_real")
    monkeypatch.setattr(real, "SETTINGS", real.SETTINGS[:1])
    layers = [(layer, *make("local", 1, 4, 4096, 16, kv_heads=2, seed=layer)) for layer in (0, 3)]
    results = real.measure(layers, rows=4)
    library, dense = results["settings"][0], results["routing"]["per head"]
    assert (library["cell_size"], library["probes"]) == (results["routing"]["cell_size"], results["routing"]["probes"])
    assert dense["all_layers"] == pytest.approx(library["all_layers"], rel=1e-3)
    assert dense["without_layer_0"] == pytest.approx(library["without_layer_0"], rel=1e-3)
    load("real_plot").plot(results, tmp_path)
    assert (tmp_path / "cells_real.png").stat().st_size > 10_000


def test_the_dense_cells_of_the_benchmark_open_as_many_keys_as_the_librarys(load: Callable[[str], Any]) -> None:
    real = load("bench_real")
    query, key, value = make("local", 1, 1, 4096, 16)
    past = 4096 - real.SEGMENT
    (group,) = real.groups(query, key, value, torch.arange(past, 4096))
    for cell_size, probes in real.SETTINGS:
        method = nf.Cells(cell_size=cell_size, probes=probes, segment=real.SEGMENT, sinks=real.SINKS)
        read = [
            rows * nf.estimate(query[:, :, :rows], key, value, is_causal=True, method=method).info["keys_per_query"]
            for rows in (past, 4096)
        ]
        # What the rows of the last segment read, minus their own segment and the sinks.
        opened = (read[1] - read[0]) / real.SEGMENT - (real.SEGMENT + 1) / 2 - real.SINKS
        assert float(real.routed(group, cell_size, probes)[1]) == pytest.approx(opened, rel=1e-4)


def test_audit_of_the_benchmarks_agrees_with_the_librarys(load: Callable[[str], Any]) -> None:
    errors = load("errors")
    query, key, value = make("sharp", 1, 4, 96, 16, kv_heads=2)
    found = nf.estimate(query, key, value, is_causal=True, enable_gqa=True, method=nf.TopK(8), audit=4 * 96)
    mine, additive = errors.of_random_rows(found.output, query, key, value, rows=4 * 96, seed=0, is_causal=True)
    assert mine == pytest.approx(errors.of_audit(found.audit), rel=1e-3)
    assert float(additive.max()) == pytest.approx(found.audit.additive, rel=1e-3)
    head = query[:, :1], key[:, :1], value[:, :1]
    found = nf.estimate(*head, method=nf.TopK(8), audit=96)
    all_rows = errors.of_all_rows(found.output, F.scaled_dot_product_attention(*head), head[2])
    assert all_rows == pytest.approx(errors.of_audit(found.audit), rel=1e-3)


def test_sections_are_merged_with_their_own_environment(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    record = load("record")
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    record.merge("some", "first", {"seconds": [1.5, 2e-7, -3]})
    path = record.merge("some", "second", {"n": 4})
    assert record.read_sections("some") == {"first": {"seconds": [1.5, 2e-7, -3]}, "second": {"n": 4}}
    assert '"seconds": [1.5, 2e-07, -3]' in path.read_text()
    assert all("torch" in section["environment"] for section in json.loads(path.read_text()).values())


def test_peak_memory_counts_what_a_call_needs(load: Callable[[str], Any]) -> None:
    speed, record = load("cells_speed"), load("record")
    for task in (speed.forward_task, speed.training_task):
        assert pickle.loads(pickle.dumps(task)) is task  # so that it can go to a fresh process
    # Not in a fresh process here: what other tests have left must neither be freed meanwhile, nor be there to be used again.
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    needed = record._peak_of(lambda n: lambda: torch.ones(n, 1 << 18), 64)
    assert 60 < needed < 80


def test_peak_allocated_is_exact(load: Callable[[str], Any]) -> None:
    record = load("record")

    def call() -> torch.Tensor:
        first = torch.ones(1 << 18)  # 1 MB
        second = torch.cat([first, first])  # 2 MB
        del first
        return second[:4] + 1

    assert record.peak_allocated(call) == pytest.approx(3.0, abs=0.01)


def test_crossover_and_exponent(load: Callable[[str], Any]) -> None:
    speed, record = load("cells_speed"), load("record")
    rows = [{"n": n, "sdpa_over_cells": n / 3000} for n in (1024, 2048, 4096, 8192)]
    assert speed.crossover(rows) == pytest.approx(3000)
    assert speed.crossover(rows[2:]) is None
    assert record.exponent([10, 20, 40], [7 * n**1.5 for n in (10, 20, 40)]) == pytest.approx(1.5)


def test_the_picture_is_drawn_from_results(load: Callable[[str], Any], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    off = {"mean_relative": 0.01, "p95_relative": 0.03}
    rows = [
        {"n": n, "seconds": {"sdpa": [n * n / 1e7], "cells": [n / 1e3]}, "sdpa_over_cells": n / 1e4, "errors": off}
        for n in (4096, 8192, 16_384, 65_536)
    ]
    long = [{"n": n, "seconds": [n / 1e3], "errors": off} for n in (65_536, 2**20)]
    times = {"rows": rows, "crossover": 1e4}
    sections = {"forward": times, "training": times, "scaling": {"rows": long, "exponent": 1.0}}
    load("cells_plot").plot(sections, tmp_path)
    assert (tmp_path / "cells.png").stat().st_size > 10_000
