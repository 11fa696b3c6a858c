"""The kernels in Triton compile for a Hopper card, and fit on it, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from nearfield.kernels.launch import IS_NEW

SHARED = 227 * 1024
"""Bytes of shared memory that a block may take on such a card."""
FORWARD = {"_local", "_nearest", "_means", "_moments", "_products", "_route", "_far", "_near", "_merge"}
BACKWARD = {"_local_queries", "_near_queries", "_far_queries", "_far_cells", "_tilt", "_spread", "_local_keys", "_near_keys"}
STEP = {"look", "select", "gather", "unite"}
CHOSEN_KEYS = {"_scores", "_sums", "_scatter"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dim", "dtype", "kind", "probes"),
    [
        (64, "bfloat16", "causal", 4),
        (128, "float16", "plain", 40),
        (256, "bfloat16", "causal", 4),
        (128, "float32", "causal", 4),
        (256, "float32", "causal", 4),
    ],
)
def test_kernels_compile_and_fit(dim: int, dtype: str, kind: str, probes: int, tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "compile_kernels.py"
    environment = os.environ | {"PYTHONPATH": str(script.parent.parent), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(script), str(dim), dtype, kind, str(probes)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, *_ in kernels} >= FORWARD | BACKWARD | STEP | CHOSEN_KEYS
    assert {name: size for name, size, _ in kernels if int(size) > SHARED} == {}
    assert {name for name, _, waits in kernels if waits == "True"} == (STEP - {"look"} if IS_NEW else set())


def test_versions_without_early_starts_never_see_the_name() -> None:
    """They look up every name in a kernel, also those in branches that are not compiled."""
    script = """
import triton.language.extra.cuda as cuda
del cuda.gdc_wait, cuda.gdc_launch_dependents
from nearfield.kernels.triton import decode, early
assert not early.HAS_EARLY
for function in (early.wait_for_last, early.let_next_start):
    assert "cuda" not in function.src.partition(":")[2], function.src
for kernel in (decode.look, decode.select, decode.gather, decode.unite):
    assert "cuda" not in kernel.jitted.src and kernel.jitted.cache_key
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
