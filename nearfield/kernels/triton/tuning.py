"""Block sizes by kernel and head dimension: forward, the best of a few that were timed; backward, a first guess."""

from __future__ import annotations

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


# By kernel and head dimension up to; float32 takes half the rows.
TABLE: dict[tuple[str, int], Blocks] = {
    ("route", 64): Blocks(64, 4, 2),
    ("route", 128): Blocks(64, 4, 2),
    ("route", 256): Blocks(32, 4, 1),
    ("near", 64): Blocks(128, 8, 2),
    ("near", 128): Blocks(64, 4, 2),
    ("near", 256): Blocks(32, 4, 1, 32),
    ("far", 64): Blocks(64, 4, 1),
    ("far", 128): Blocks(128, 8, 2),
    ("far", 256): Blocks(32, 4, 1, 32),
    ("near_keys", 64): Blocks(64, 4, 2),
    ("near_keys", 128): Blocks(64, 8, 1),
    ("near_keys", 256): Blocks(32, 8, 1, 32),
    ("near_queries", 64): Blocks(64, 4, 2),
    ("near_queries", 128): Blocks(64, 8, 1),
    ("near_queries", 256): Blocks(32, 8, 1, 32),
    ("far_queries", 64): Blocks(64, 4, 1),
    ("far_queries", 128): Blocks(64, 8, 1),
    ("far_queries", 256): Blocks(16, 4, 1, 32),
    ("far_cells", 64): Blocks(64, 4, 1, 64),
    ("far_cells", 128): Blocks(64, 8, 1, 64),
    ("far_cells", 256): Blocks(16, 8, 1, 32),
    ("local_keys", 64): Blocks(64, 4, 2),
    ("local_keys", 128): Blocks(64, 8, 1),
    ("local_keys", 256): Blocks(32, 8, 1, 32),
}


def blocks_for(kernel: str, dim: int, dtype: torch.dtype) -> Blocks:
    """The block sizes of `kernel` for the larger of the head dimensions."""
    size = 64 if dim <= 64 else 128 if dim <= 128 else 256
    found = TABLE[kernel, size]
    return found._replace(rows=max(16, found.rows // 2), stages=1) if dtype == torch.float32 else found
