"""Block sizes by card, kernel, head dimension, dtype and cell size.

A card that `benchmarks/tune_gpu.py` was run on has a measured table, in tuning.json. Others have that of their class, see
`kernels.cards`, in derived.json: nobody has timed it, but `benchmarks/fit_tiles.py` has seen it compile within what a card of the
class has. Cards of class 9.0 have what was measured on an H200.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import resources
from typing import Any, NamedTuple

import torch

from nearfield.kernels import cards, replay
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
    columns: int = 64
    """of values, where a program takes a part of them"""


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


MEASURED_CLASSES = {"9.0": "NVIDIA H200"}
"""Classes that have the table of one of their cards."""

_TRIED: dict[str, TileSizes] = {}


def blocks_for(kernel: str, dim: int, dtype: torch.dtype, device: torch.device, cell_size: int = 0) -> TileSizes:
    """The block sizes of `kernel` for the larger of the head dimensions; of the cell sizes that were measured, the closest."""
    return _TRIED.get(kernel) or _kept(kernel, dim, dtype, device, cell_size, cards.imposed_class())


def fitting_warps(warps: int, *dims: int) -> int:
    """At most four where some rows are narrow: Triton lets eight read beyond a tile of 16 columns (seen in 3.6)."""
    return warps if min(map(padded, dims)) >= 64 else min(4, warps)


@functools.cache
def _kept(kernel: str, dim: int, dtype: torch.dtype, device: torch.device, cell_size: int, imposed: str) -> TileSizes:
    size = 64 if dim <= 64 else 128 if dim <= 128 else 256
    kind = "float32" if dtype == torch.float32 else "half"
    found = [(int(of), blocks) for of, blocks in table_for(device, imposed)["blocks"][kernel][f"{kind}, {size}"].items()]
    wanted = math.log2(max(1, cell_size))
    return TileSizes(*min(found, key=lambda one: abs(math.log2(max(1, one[0])) - wanted))[1])


def decode_tiles(dim: int, dtype: torch.dtype, device: torch.device) -> DecodeTiles:
    """Tiles of a step, for the larger of the head dimensions. Smaller where rows are wide, to fit in shared memory."""
    return _kept_for_steps(dim, dtype, device, cards.imposed_class())


@functools.cache
def _kept_for_steps(dim: int, dtype: torch.dtype, device: torch.device, imposed: str) -> DecodeTiles:
    tiles = DecodeTiles(**table_for(device, imposed)["decode"])
    factor = max(1, padded(dim) * dtype.itemsize // 256)
    return tiles._replace(**{name: max(16, getattr(tiles, name) // factor) for name in ("open_end", "cells", "far", "opened")})


def table_for(device: torch.device, imposed: str = "") -> dict[str, Any]:
    """What was measured on such a card; else the table of its class, or of the class that is imposed. See `cards.class_of`."""
    measured = _tables("tuning.json")["cards"]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and not imposed else ""
    if name in measured:
        return measured[name]
    of = cards.class_of(device, imposed)
    return measured[MEASURED_CLASSES[of]] if of in MEASURED_CLASSES else _tables("derived.json")["classes"][of]


@functools.cache
def _tables(file: str) -> dict[str, dict[str, Any]]:
    return json.loads(resources.files("nearfield.cells.triton").joinpath(file).read_text())


@contextmanager
def trying(kernel: str, blocks: TileSizes) -> Iterator[None]:
    """Other block sizes for one kernel, for the script that measures them."""
    before = dict(_TRIED)
    _TRIED[kernel] = blocks
    replay.forget()
    try:
        yield
    finally:
        _TRIED.clear()
        _TRIED.update(before)
        replay.forget()
