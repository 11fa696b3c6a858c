"""The benchmark of ranks: measures on one rank in this process, and jobs that are ended, gone on with and shown."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from nearfield.distributed import Ranks


@pytest.fixture
def alone() -> Iterator[Ranks]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(dist.group.WORLD)
    dist.destroy_process_group()


@pytest.fixture
def bench(load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    found = load("bench_distributed")
    monkeypatch.setattr(found.record, "RESULTS", tmp_path)
    return found


@pytest.mark.parametrize("method", ["cells", "exact"])
@pytest.mark.parametrize("section", ["prompts", "training"])
def test_prompts_and_training(section: str, method: str, bench: Any, alone: Ranks) -> None:
    found = bench.of_prompt(bench.Job(section, method, 600, 1, 1, "cpu"), alone)
    assert found["seconds"].keys() == found["cpu_seconds"].keys() == found["sent"].keys() == {method}
    assert len(found["seconds"][method]) == bench.TURNS
    assert min(found["seconds"][method]) > 0
    # One rank has nobody to send anything to.
    assert found["sent"][method] == {}
    once = bench.of_prompt(bench.Job(section, method, 600, 1, 1, "cpu", turns=1), alone)
    assert len(once["seconds"][method]) == 1


def test_steps(bench: Any, alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "STEPS", 3)
    found = bench.of_steps(bench.Job("steps", "cells", 9000, 1, 1, "cpu"), alone)
    assert {name: len(seconds) for name, seconds in found["seconds"].items()} == {"global": 3, "local": 3, "ideal": 3}
    assert 0 < found["probes"] < found["cells"] < 9000 == found["held"] - 4
    assert torch.tensor(list(found["seconds"].values())).min() > 0


def test_turns_end_when_they_have_taken_long_enough(bench: Any, alone: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "ENOUGH", 1e-9)
    assert len(bench.timed(lambda: None, alone, 3, "cpu").seconds) == 1


def test_bytes_by_formula(bench: Any) -> None:
    # Three others get the shares of keys and values of two heads of 64 columns in float32.
    once = 3 * 251 * 2 * 2 * 64 * 4
    sections = {"prompts": (1, 1), "training": (3, 2), "steps": (1, 1)}
    for section, (ring, gathered) in sections.items():
        found = bench.formulas(bench.Job(section, "cells", 1001, 4, 2, "cpu"))
        assert found == {"ring": ring * once, "all_gather": gathered * once}


def test_what_is_measured(bench: Any) -> None:
    jobs = bench.jobs_of(bench.SECTIONS, (262_144, 1_048_576), (1, 8), 2, "cpu")
    keys = [job.key for job in jobs]
    assert len(set(keys)) == len(keys)
    by_cells = [
        f"{section}/cells/{n}/{ranks}x2" for n in (262_144, 1_048_576) for section in bench.SECTIONS[:3] for ranks in (1, 8)
    ]
    assert [key for key in keys if "/cells/" in key] == by_cells
    # Exact attention of a million keys would take hours, and torch's own is of more than one rank.
    assert set(keys) - set(by_cells) == {f"prompts/{x}" for x in ("exact/262144/1x2", "exact/262144/8x2", "torch/262144/8x2")}
    on_gpu = bench.jobs_of(bench.SECTIONS, (262_144,), (1,), 2, "cuda", exact=False, trace="trace.json.gz")
    assert [job.key for job in on_gpu] == [f"{section}/cells/262144/1 cuda" for section in bench.SECTIONS]
    given = bench.jobs_of(["prompts"], (262_144,), (8, 4, 2, 1), 2, "cpu", exact=False, turns=1)
    assert [(job.ranks, job.turns) for job in given] == [(8, 1), (4, 1), (2, 1), (1, 1)]


def test_a_call_ends_in_time_and_the_next_one_goes_on(bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = bench.jobs_of(["prompts"], (600,), (1, 2), 1, "cpu", exact=False)
    rest: list[float] = []

    def run_job(job: Any, most: float) -> dict[str, Any] | None:
        rest.append(most)
        return {"seconds": {"cells": [1.0]}, "sent": {"cells": {}}} if job.ranks in able else None

    monkeypatch.setattr(bench, "run_job", run_job)
    able = {1}
    assert [*bench.measure(jobs, 5, True)] == ["prompts/cells/600/1x1"]
    saved = json.loads((tmp_path / "distributed.json").read_text())
    assert [*saved] == ["prompts/cells/600/1x1"]
    assert saved["prompts/cells/600/1x1"]["results"]["seconds"] == {"cells": [1.0]}
    assert saved["prompts/cells/600/1x1"]["environment"]["cpus"] == bench.CORES
    # What has a call to itself and does not end in time never will.
    found = bench.measure(jobs, 5, True)
    assert found["prompts/cells/600/2x1"]["error"] == "takes longer than 5 minutes"
    assert len(rest) == 3
    assert bench.measure(jobs, 5, True) == found
    assert len(rest) == 3
    # Nothing is begun when the time is over.
    assert bench.measure(jobs, 0, False) == {}
    assert len(rest) == 3


@pytest.mark.long
def test_jobs_are_processes_that_can_be_ended(bench: Any) -> None:
    job = bench.Job("training", "cells", 601, 2, 1, "cpu")
    assert bench.run_job(job, 0.0) is None
    found = bench.run_job(job, math.inf)
    assert found["sent"]["cells"]["gradients of keys"] == 302 * 2 * 64 * 4  # pieces of 151 tokens
    with pytest.raises(ChildProcessError, match="a rank has failed"):
        bench.run_job(job._replace(method="torch", section="nothing"))


def test_times_that_streams_have_in_common(bench: Any) -> None:
    million = 1_000_000
    spans = {7: [(0, 10), (10, 20), (15, 30), (50, 60)], 9: [(25, 35), (58, 59)], 11: [(34, 40)]}
    found = bench.overlap({stream: [(a * million, b * million) for a, b in own] for stream, own in spans.items()})
    assert found == {"arithmetic_ms": 40.0, "exchange_ms": 16.0, "both_ms": 6.0}


@pytest.mark.parametrize("name", ["trace.json", "trace.json.gz"])
def test_streams_of_a_trace(name: str, bench: Any, tmp_path: Path) -> None:
    """Only what a GPU does counts: no annotations around it, and nothing of the CPU."""
    rows: list[tuple[str, str, int, float, float]] = [
        ("kernel", "flash", 7, 1000.5, 10.25),
        ("gpu_memcpy", "Memcpy DtoD", 7, 1010.75, 4.25),
        ("gpu_memset", "Memset", 9, 1004.0, 1.5),
        ("kernel", "ncclDevKernel_AllGather", 9, 1008.0, 4.0),
        ("gpu_user_annotation", "nccl:all_gather", 9, 1000.0, 90.0),
        ("user_annotation", "nccl:all_gather", 7, 1000.0, 90.0),
        ("cpu_op", "aten::mm", 7, 1000.0, 90.0),
    ]
    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": kind, "name": what, "pid": 0, "tid": stream, "ts": start, "dur": took}
        for kind, what, stream, start, took in rows
    ]
    events.append({"ph": "M", "name": "process_name", "pid": 0, "tid": 0, "args": {"name": "python"}})
    text, path = json.dumps({"traceEvents": events}).encode(), tmp_path / name
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    found = bench.streams_of(path)
    assert found == {7: [(1_000_500, 1_010_750), (1_010_750, 1_015_000)], 9: [(1_004_000, 1_005_500), (1_008_000, 1_012_000)]}
    assert bench.overlap(found) == {"arithmetic_ms": 0.0145, "exchange_ms": 0.0055, "both_ms": 0.0055}


def test_a_trace_of_the_profiler_is_read(bench: Any, tmp_path: Path) -> None:
    """Of a CPU it names no stream of a GPU."""
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        torch.ones(3).sum()
    recorded.export_chrome_trace(str(tmp_path / "trace.json"))
    assert bench.streams_of(tmp_path / "trace.json") == {}
    with pytest.raises(SystemExit, match="names no stream"):
        bench.overlap({})


def test_the_tables(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for ranks, seconds in ((2, [8.0, 10.0, 9.0]), (4, [6.0])):
        job = bench.Job("prompts", "cells", 1001, ranks, 2, "cpu")
        times = {"seconds": {"cells": seconds}, "cpu_seconds": {"cells": [4 / ranks]}, "sent": {"cells": {"keys": 5_000_000}}}
        rows.append(job._asdict() | times | {"by_formula": bench.formulas(job), "cpus": 16})
    rows.append(rows[1] | {"method": "torch", "error": "not here"})
    del rows[2]["seconds"]
    of_steps = {"global": [0.3], "ideal": [0.2]}
    steps = {"section": "steps", "seconds": of_steps, "cpu_seconds": of_steps, "sent": {"global": {}}}
    rows += [rows[0] | steps, rows[0] | {"section": "profile", "overlap": {"both_ms": 3.0, "exchange_ms": 4.0}}]
    assert bench.efficiency(rows, rows[1], "cells") == 9 * 2 / (6 * 4)
    assert bench.efficiency(rows, rows[1], "cells", "cpu_seconds") == 1
    assert bench.efficiency(rows, rows[0], "cells") is None
    for section in bench.SECTIONS:
        bench.show(rows, section)
    shown = capsys.readouterr().out
    for told in ("0.75", "1.50", "torch, 1,001 keys, 4 ranks: not here", "arithmetic goes on in 75% of it"):
        assert told in shown
