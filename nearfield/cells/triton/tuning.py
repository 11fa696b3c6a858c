"""Block sizes by card, kernel, head dimension, dtype and cell size: measured by `benchmarks/tune_gpu.py`, kept in tuning.json."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any, NamedTuple

import torch

from nearfield.kernels.launch import padded


class TileSizes(NamedTuple):
    """How a kernel of a whole sequence is launched."""

    rows: int
    """rows (queries, or pairs) of a block"""
    warps: int
    stages: int
    keys: int = 64
    """keys, or cells, that it meets at a time"""
    cells: int = 32
    """cells, where it meets both"""


class DecodeTiles(NamedTuple):
    """What a program of a step reads at a time. Tiles are small: many small programs hide each other's waiting."""

    open_end: int
    """keys that are in no closed segment"""
    open_end_tiles: int
    """tiles of these per program"""
    cells: int
    """cells that are scored"""
    far: int
    """cells that stay closed"""
    opened: int
    """keys of opened cells"""
    columns: int
    """of values, where parts are merged"""
    warps: int


_TRIED: dict[str, TileSizes] = {}


def blocks_for(kernel: str, dim: int, dtype: torch.dtype, device: torch.device, cell_size: int = 0) -> TileSizes:
    """The block sizes of `kernel` for the larger of the head dimensions; of the cell sizes that were measured, the closest."""
    return _TRIED.get(kernel) or _measured(kernel, dim, dtype, device, cell_size)


@functools.cache
def _measured(kernel: str, dim: int, dtype: torch.dtype, device: torch.device, cell_size: int) -> TileSizes:
    size = 64 if dim <= 64 else 128 if dim <= 128 else 256
    kind = "float32" if dtype == torch.float32 else "half"
    found = [(int(of), blocks) for of, blocks in card_table(device)["blocks"][kernel][f"{kind}, {size}"].items()]
    wanted = math.log2(max(1, cell_size))
    return TileSizes(*min(found, key=lambda one: abs(math.log2(max(1, one[0])) - wanted))[1])


@functools.cache
def decode_tiles(dim: int, dtype: torch.dtype, device: torch.device) -> DecodeTiles:
    """Tiles of a step, for the larger of the head dimensions. Smaller where rows are wide, to fit in shared memory."""
    tiles = DecodeTiles(**card_table(device)["decode"])
    factor = max(1, padded(dim) * dtype.itemsize // 256)
    return tiles._replace(**{name: max(16, getattr(tiles, name) // factor) for name in ("open_end", "cells", "far", "opened")})


def card_table(device: torch.device) -> dict[str, Any]:
    """What was measured on such a card; for other cards, and in the interpreter, on the first card of the file."""
    cards = _tables()["cards"]
    return cards.get(torch.cuda.get_device_name(device) if device.type == "cuda" else "", next(iter(cards.values())))


@functools.cache
def _tables() -> dict[str, dict[str, Any]]:
    return json.loads(resources.files("nearfield.cells.triton").joinpath("tuning.json").read_text())


@contextmanager
def trying(kernel: str, blocks: TileSizes) -> Iterator[None]:
    """Other block sizes for one kernel, for the script that measures them."""
    before = dict(_TRIED)
    _TRIED[kernel] = blocks
    try:
        yield
    finally:
        _TRIED.clear()
        _TRIED.update(before)
