"""The kernels in Triton compile for every class of cards, and fit on them, on a machine that has none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from nearfield import _compat
from nearfield.cells.triton.limits import WIDE_FLOAT32_BYTES
from nearfield.kernels import cards

SCRIPT = Path(__file__).parents[3] / "benchmarks" / "compile_kernels.py"
TENSOR_COLUMNS = 512
"""of tensor memory, where there is any"""
FORWARD = {
    "_nearest",
    "_means",
    "_settle",
    "_scan",
    "_place",
    "_moments",
    "_products",
    "_route",
    "_attend_rows",
    "_near_fwd",
    "_merge",
}
TOGETHER = {"_best_cells", "_vote", "_left_closed", "_list_keys", "_attend"}
BACKWARD = {"_local_dq", "_near_dq", "_far_dq", "_far_dmoments", "_far_dcross", "_moments_dkv", "_local_dkv", "_near_dkv"}
STEP = {"score_cells", "choose_and_read_open_end", "find_slots", "read_cells", "merge_parts"}
CHOSEN_KEYS = {"_pair_scores", "_pair_sums", "_pair_scatter"}
PAGES = {"write_pages", "group_blocks", "score_pages", "choose_pages", "read_pages", "merge_pages", "read_prompts"}
OTHERS = {"_exact_rows", "_level_sums", "_halve", "_merge_two", "_sizes_of_queries"}
ALL = FORWARD | TOGETHER | BACKWARD | STEP | CHOSEN_KEYS | PAGES | OTHERS


def compiled(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parent.parent), "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def assert_all_fit(found: list[dict[str, Any]], name: str) -> None:
    assert {one["kernel"] for one in found} >= ALL
    assert {one["kernel"]: one["shared"] for one in found if one["shared"] > cards.SHARED[name]} == {}
    assert {one["kernel"]: one["columns"] for one in found if one["columns"] > TENSOR_COLUMNS} == {}
    dependent = _compat.has_dependent_launch() and cards.capability_of(name) >= cards.LEAST_DEPENDENT
    waiting = (STEP - {"score_cells"}) | {"choose_pages", "read_pages", "merge_pages"}
    assert {one["kernel"] for one in found if one["waits"]} == (waiting if dependent else set())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "dim"),
    [
        *product(cards.SHARED, ("bfloat16", "float32"), (64, 128)),
        *((name, "bfloat16", 256) for name in cards.SHARED),
        *((name, "float32", 256) for name in cards.SHARED if cards.SHARED[name] >= WIDE_FLOAT32_BYTES),
        *((name, "float16", 128) for name in cards.SHARED),
    ],
)
def test_kernels_compile_and_fit(name: str, dtype: str, dim: int, tmp_path: Path) -> None:
    assert_all_fit(compiled(tmp_path, name, "--dims", str(dim), "--dtypes", dtype), name)


@pytest.mark.slow
def test_kernels_compile_and_fit_where_there_is_least_memory(tmp_path: Path) -> None:
    """One dtype and dimension of `test_kernels_compile_and_fit` in one version; `make test-kernels` runs it alone."""
    found = compiled(tmp_path, "8.6", "--dims", "64", "--dtypes", "bfloat16", "--quick")
    assert_all_fit(found, "8.6")
    assert [one["stack"] for one in found if one["kernel"] == "_means_of_many"] == [0]


@pytest.mark.long
def test_versions_without_dependent_launch_never_see_the_name() -> None:
    """They look up every name in a kernel, also those in branches that are not compiled."""
    script = """
import triton.language.extra.cuda as cuda
del cuda.gdc_wait, cuda.gdc_launch_dependents
from nearfield.cells.triton import decode, resident
from nearfield.kernels import launch
assert not launch.HAS_PDL
for function in (launch.wait_for_previous, launch.launch_dependents):
    assert "cuda" not in function.src.partition(":")[2], function.src
kernels = decode.score_cells, decode.choose_and_read_open_end, resident.find_slots, decode.read_cells, decode.merge_parts
for kernel in kernels:
    assert "cuda" not in kernel.jitted.src and kernel.jitted.cache_key
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
