"""The block sizes of one kernel, and those of a step of a cache."""

from __future__ import annotations

from typing import NamedTuple


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
