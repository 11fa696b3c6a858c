"""How a job of ranks ends: with nothing of its group left."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"

ENDS = """
import runpy, sys, weakref
import torch.distributed as dist

groups, destroy = [], dist.destroy_process_group

def destroyed():
    groups.append(weakref.ref(dist.group.WORLD))
    destroy()

dist.destroy_process_group = destroyed
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
print("left:", sum(group() is not None for group in groups), "of", len(groups))
"""


@pytest.mark.parametrize("given", [("distributed_generate.py", "--keys", "1000", "--new", "1")], ids=lambda given: given[0])
def test_an_example_lets_go_of_its_group(given: tuple[str, ...]) -> None:
    """Threads of a group that something holds on to go on while Python ends. Now and then that aborted a rank of this example."""
    pytest.importorskip("transformers")
    job = {
        "RANK": "0",
        "LOCAL_RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_WORLD_SIZE": "1",
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": "0",
    }
    environment = os.environ | job | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(EXAMPLES)}
    command = [sys.executable, "-c", ENDS, str(EXAMPLES / given[0]), *given[1:]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    assert "left: 0 of 1" in done.stdout
