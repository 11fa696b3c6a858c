"""The kernels in Triton compile for a Hopper card, and fit on it, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SHARED = 227 * 1024
"""Bytes of shared memory that a block may take on such a card."""
FORWARD = {"_local", "_nearest", "_means", "_moments", "_products", "_route", "_far", "_near", "_merge"}
BACKWARD = {"_local_queries", "_near_queries", "_far_queries", "_far_cells", "_tilt", "_spread", "_local_keys", "_near_keys"}


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
    script = Path(__file__).with_name("compile_kernels.py")
    environment = os.environ | {"PYTHONPATH": str(script.parent.parent), "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(script), str(dim), dtype, kind, str(probes)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    taken = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _ in taken} >= FORWARD | BACKWARD
    assert {name: size for name, size in taken if int(size) > SHARED} == {}
