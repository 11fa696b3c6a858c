"""Block sizes by kernel, head dimension, dtype and cell size: measured by `benchmarks/tune_gpu.py`, kept in tuning.json."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import NamedTuple

import torch


class Blocks(NamedTuple):
    """How a kernel is launched."""

    rows: int
    """rows (queries, or pairs) of a block"""
    warps: int
    stages: int
    keys: int = 64
    """keys, or cells, that it meets at a time"""


_TRIED: dict[str, Blocks] = {}


def blocks_for(kernel: str, dim: int, dtype: torch.dtype, cell_size: int = 0) -> Blocks:
    """The block sizes of `kernel` for the larger of the head dimensions; of the cell sizes that were measured, the closest."""
    return _TRIED.get(kernel) or _measured(kernel, dim, dtype, cell_size)


@functools.cache
def _measured(kernel: str, dim: int, dtype: torch.dtype, cell_size: int) -> Blocks:
    size = 64 if dim <= 64 else 128 if dim <= 128 else 256
    kind = "float32" if dtype == torch.float32 else "half"
    found = [(int(of), blocks) for of, blocks in _table()[kernel][f"{kind}, {size}"].items()]
    wanted = math.log2(max(1, cell_size))
    return Blocks(*min(found, key=lambda one: abs(math.log2(max(1, one[0])) - wanted))[1])


@functools.cache
def _table() -> dict[str, dict[str, dict[str, list[int]]]]:
    return json.loads(resources.files("nearfield.cells.triton").joinpath("tuning.json").read_text())["blocks"]


@contextmanager
def trying(kernel: str, blocks: Blocks) -> Iterator[None]:
    """Other block sizes for one kernel, for the script that measures them."""
    before = dict(_TRIED)
    _TRIED[kernel] = blocks
    try:
        yield
    finally:
        _TRIED.clear()
        _TRIED.update(before)
