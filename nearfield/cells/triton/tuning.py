"""Block sizes by card, kernel, head dimension, dtype and cell size.

What the user has measured (`nearfield bench --calibrate`, see `measured`) comes first. A card that `benchmarks/tune_gpu.py` was
run on has a measured table, in tuning.json. Others have that of their class, see `kernels.cards`, in derived.json: nobody has
timed it, but `benchmarks/fit_tiles.py` has seen it compile within what a card of the class has. Cards of class 9.0 have what was
measured on an H200.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from importlib import resources
from typing import Any

import torch

from nearfield.cells.triton import measured
from nearfield.cells.triton.tiles import DecodeTiles, TileSizes
from nearfield.kernels import cards, ready, replay
from nearfield.kernels.launch import padded

MEASURED_CLASSES = {"9.0": "NVIDIA H200"}
"""Classes that have the table of one of their cards."""

_TRIED: dict[str, TileSizes] = {}


def blocks_for(kernel: str, dim: int, dtype: torch.dtype, device: torch.device, cell_size: int = 0) -> TileSizes:
    """The block sizes of `kernel` for the larger of the head dimensions; of the cell sizes that were measured, the closest."""
    return _TRIED.get(kernel) or _kept(kernel, dim, dtype, device, cell_size, cards.imposed_class())


def all_blocks(dim: int, dtype: torch.dtype, device: torch.device, cell_size: int) -> dict[str, TileSizes]:
    """The same for every kernel."""
    return {kernel: blocks_for(kernel, dim, dtype, device, cell_size) for kernel in table_for(device)["blocks"]}


def fitting_warps(warps: int, *dims: int) -> int:
    """At most four where some rows are narrow: Triton lets eight read beyond a tile of 16 columns (seen in 3.6)."""
    return warps if min(map(padded, dims)) >= 64 else min(4, warps)


@functools.cache
def _kept(kernel: str, dim: int, dtype: torch.dtype, device: torch.device, cell_size: int, imposed: str) -> TileSizes:
    size = 64 if dim <= 64 else 128 if dim <= 128 else 256
    kind = measured.kind_of(dtype)
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
    """The user's block sizes where there are some, on top of what is shipped; of a class that is imposed, what is shipped."""
    table = shipped_for(device, imposed)
    if device.type != "cuda" or imposed:
        return table
    blocks = {kernel: dict(sizes) for kernel, sizes in table["blocks"].items()}
    for (kernel, where), sizes in measured.blocks_of(torch.cuda.get_device_name(device)).items():
        blocks[kernel][where] = blocks[kernel].get(where, {}) | sizes
    return table | {"blocks": blocks}


def shipped_for(device: torch.device, imposed: str = "") -> dict[str, Any]:
    """What was measured on such a card; else the table of its class, or of the class that is imposed. See `cards.class_of`."""
    known = _tables("tuning.json")["cards"]
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and not imposed else ""
    if name in known:
        return known[name]
    of = cards.class_of(device, imposed)
    return known[MEASURED_CLASSES[of]] if of in MEASURED_CLASSES else _tables("derived.json")["classes"][of]


def is_measured(device: torch.device) -> bool:
    """Whether the block sizes that are shipped for a card were measured on one of its name."""
    return torch.cuda.get_device_name(device) in _tables("tuning.json")["cards"]


@functools.cache
def _tables(file: str) -> dict[str, dict[str, Any]]:
    return json.loads(resources.files("nearfield.cells.triton").joinpath(file).read_text())


def keep(card: str, kind: str, found: dict[tuple[str, int, int], TileSizes]) -> None:
    """Keep what was measured on the user's card, see `measured.keep`, and use it from now on."""
    measured.keep(card, kind, found)
    forget()


def forget() -> None:
    """Look up all block sizes anew, and record all calls anew: those in this process use what has changed."""
    for cached in (measured.blocks_of, _kept, _kept_for_steps):
        cached.cache_clear()
    replay.forget()
    ready.forget()


def trying(kernel: str, blocks: TileSizes) -> AbstractContextManager[None]:
    """Other block sizes for one kernel, to measure them."""
    return trying_all({kernel: blocks})


@contextmanager
def trying_all(blocks: Mapping[str, TileSizes]) -> Iterator[None]:
    """The same for several kernels."""
    before = dict(_TRIED)
    _TRIED.update(blocks)
    replay.forget()
    try:
        yield
    finally:
        _TRIED.clear()
        _TRIED.update(before)
        replay.forget()
