"""The kernels in Triton compile for a Hopper card, and fit on it, on a machine that has none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from nearfield import _compat

SHARED = 227 * 1024
"""Bytes of shared memory that a block may take on such a card."""
FORWARD = {"_nearest", "_means", "_moments", "_products", "_route", "_attend_rows", "_near_fwd", "_merge"}
BACKWARD = {"_local_dq", "_near_dq", "_far_dq", "_far_dmoments", "_far_dcross", "_moments_dkv", "_local_dkv", "_near_dkv"}
STEP = {"score_cells", "choose_and_read_open_end", "read_cells", "merge_parts"}
CHOSEN_KEYS = {"_pair_scores", "_pair_sums", "_pair_scatter"}


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
    assert {name for name, _, waits in kernels if waits == "True"} == (
        STEP - {"score_cells"} if _compat.has_dependent_launch() else set()
    )


@pytest.mark.long
def test_versions_without_dependent_launch_never_see_the_name() -> None:
    """They look up every name in a kernel, also those in branches that are not compiled."""
    script = """
import triton.language.extra.cuda as cuda
del cuda.gdc_wait, cuda.gdc_launch_dependents
from nearfield.cells.triton import decode
from nearfield.kernels import launch
assert not launch.HAS_PDL
for function in (launch.wait_for_previous, launch.launch_dependents):
    assert "cuda" not in function.src.partition(":")[2], function.src
for kernel in (decode.score_cells, decode.choose_and_read_open_end, decode.read_cells, decode.merge_parts):
    assert "cuda" not in kernel.jitted.src and kernel.jitted.cache_key
"""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
