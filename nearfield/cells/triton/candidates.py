"""Which block sizes a kernel may have, and which of them are worth a try."""

from __future__ import annotations

import math

from nearfield.cells.triton.tiles import TileSizes

FORWARD = ("route", "near_fwd", "attend_rows", "nearest", "means")
TOGETHER = ("vote", "attend")
"""Kernels of rows that open cells together."""
BACKWARD = ("near_dkv", "near_dq", "far_dq", "far_dmoments", "local_dkv", "local_dq", "moments_dkv")
KERNELS = (*FORWARD, *TOGETHER, *BACKWARD)
"""Those that are searched for. Others have block sizes too, but take little time."""
DIMS = (64, 128, 256)
"""Head dimensions that have block sizes of their own."""

STAGES = (1, 4)
WARPS = {"vote": (2, 8)}
"""The fewest and the most; four and eight for other kernels."""
RANGES: dict[str, dict[str, tuple[int, int]]] = {
    "route": {"rows": (16, 128)},
    "near_fwd": {"rows": (16, 128), "keys": (16, 128)},
    "attend_rows": {"rows": (16, 128), "keys": (16, 64), "cells": (32, 64)},
    "nearest": {"rows": (16, 256), "keys": (32, 64)},
    "means": {"rows": (16, 64), "keys": (32, 512)},
    "vote": {"keys": (32, 256)},
    "attend": {"rows": (16, 128), "keys": (16, 128), "cells": (16, 64)},
    "near_dkv": {"rows": (16, 128), "keys": (16, 128)},
    "near_dq": {"rows": (16, 128), "keys": (16, 128)},
    "far_dq": {"rows": (16, 128), "keys": (32, 64)},
    "far_dmoments": {"rows": (16, 128), "keys": (16, 128)},
    "local_dkv": {"rows": (16, 128), "keys": (16, 128)},
    "local_dq": {"rows": (16, 128), "keys": (16, 64)},
    "moments_dkv": {"rows": (16, 64)},
}
"""The smallest and the largest of what a kernel reads, in powers of two. Products take 16 rows or more; marks of cells come 32 in
a word, and tiles of cells have 64 columns."""

# Rows, warps, stages, keys (and cells) of a block. What does not fit into shared memory is left out when it is tried.
CANDIDATES: dict[str, tuple[tuple[int, ...], ...]] = {
    "route": (
        (32, 4, 3, 64),
        (64, 4, 1, 64),
        (64, 4, 2, 64),
        (64, 4, 3, 64),
        (64, 8, 2, 64),
        (64, 8, 3, 64),
        (128, 8, 2, 64),
        (128, 8, 3, 64),
    ),
    "near_fwd": (
        *((64, 4, stages, keys) for stages in (2, 3) for keys in (32, 64)),
        *((128, 8, stages, keys) for stages in (2, 3) for keys in (32, 64)),
        *((128, 4, stages, keys) for stages in (2, 3) for keys in (32, 64)),
        (64, 4, 2, 128),
        (128, 8, 2, 128),
    ),
    "attend_rows": tuple(
        (rows, warps, stages, 64, cells)
        for rows, warps in ((64, 4), (128, 4), (128, 8))
        for stages in (2, 3)
        for cells in (32, 64)
    ),
    "attend": (
        *((128, 4, stages, 64, cells) for stages in (2, 3, 4) for cells in (32, 64)),
        *((128, 8, stages, keys, 32) for stages in (2, 3) for keys in (64, 128)),
        *((64, 4, stages, keys, 32) for stages in (2, 3) for keys in (64, 128)),
    ),
    "vote": tuple((16, warps, stages, keys) for warps in (2, 4) for stages in (1, 2, 3) for keys in (64, 128, 256)),
    "nearest": (
        *((128, 4, stages, keys) for stages in (2, 3) for keys in (32, 64)),
        *((64, 4, stages, keys) for stages in (2, 3) for keys in (32, 64)),
        *((256, 8, stages, keys) for stages in (2, 3) for keys in (32, 64)),
    ),
    "means": tuple((cells, 4, stages, points) for cells in (16, 32, 64) for stages in (2, 3) for points in (128, 256, 512)),
    "moments_dkv": ((32, 4, 1, 64), (32, 8, 1, 64), (64, 4, 1, 64), (64, 8, 1, 64)),
    "near_dkv": (
        (64, 4, 1, 64),
        (64, 4, 2, 64),
        (64, 4, 3, 64),
        (64, 8, 2, 64),
        (64, 8, 1, 128),
        (64, 8, 2, 128),
        (128, 8, 1, 64),
        (128, 8, 2, 64),
        (32, 4, 2, 64),
        (32, 4, 3, 64),
        (32, 8, 2, 128),
    ),
    "near_dq": (
        (64, 4, 1, 64),
        (64, 4, 2, 64),
        (64, 8, 1, 64),
        (64, 8, 2, 64),
        (64, 4, 1, 32),
        (64, 4, 2, 32),
        (128, 8, 1, 64),
        (128, 8, 2, 64),
        (128, 8, 1, 32),
        (64, 8, 1, 128),
    ),
    "far_dq": (
        *((64, warps, stages, keys) for warps in (4, 8) for stages in (1, 2) for keys in (32, 64)),
        *((32, 4, stages, keys) for stages in (1, 2) for keys in (32, 64)),
        (128, 8, 1, 32),
    ),
    "local_dq": (
        *((64, 4, stages, keys) for stages in (1, 2) for keys in (32, 64)),
        *((64, 8, stages, 64) for stages in (1, 2)),
        *((128, 8, stages, 64) for stages in (1, 2)),
    ),
    "far_dmoments": (
        (64, 4, 1, 64),
        (64, 4, 2, 64),
        (64, 8, 1, 64),
        (64, 8, 2, 64),
        (32, 4, 1, 64),
        (32, 4, 2, 64),
        (64, 4, 1, 32),
        (64, 4, 2, 32),
        (128, 8, 1, 64),
        (64, 8, 1, 128),
        (32, 8, 1, 128),
        (64, 4, 3, 32),
        (32, 4, 3, 32),
        (128, 4, 1, 32),
        (64, 8, 2, 32),
    ),
    "local_dkv": (
        (64, 4, 1, 64),
        (64, 4, 2, 64),
        (64, 4, 3, 64),
        (64, 8, 2, 64),
        (64, 8, 1, 128),
        (64, 8, 2, 128),
        (128, 8, 1, 64),
        (128, 8, 2, 64),
        (32, 4, 2, 64),
        (32, 4, 3, 64),
        (32, 8, 2, 128),
        (32, 8, 3, 128),
        (64, 8, 3, 128),
        (64, 4, 2, 128),
    ),
}
SMALL = (
    (16, 4, 1, 32),
    (32, 4, 1, 32),
    (32, 8, 1, 32),
    (32, 4, 2, 32),
    (16, 4, 1, 64),
    (16, 8, 1, 32),
    (16, 8, 1, 16),
    (32, 4, 1, 64),
    (32, 8, 1, 64),
    (64, 8, 1, 32),
)
"""For head dimensions beyond 128, and for float32."""


UNREAD = {"rows": 16, **TileSizes._field_defaults}
"""What stands for sizes that a kernel does not read, so that sizes which mean the same are the same."""


def is_allowed(kernel: str, blocks: TileSizes) -> bool:
    """Whether a kernel is right with these sizes; whether they fit on a card is another question."""
    if kernel not in RANGES or not STAGES[0] <= blocks.stages <= STAGES[1]:
        return False
    read = {"warps": WARPS.get(kernel, (4, 8)), **RANGES[kernel]}
    sizes = ((getattr(blocks, field), limits) for field, limits in read.items())
    return all(least <= size <= most and not size & (size - 1) for size, (least, most) in sizes)


def plain(kernel: str, blocks: TileSizes) -> TileSizes:
    """These sizes, without what the kernel does not read."""
    return blocks._replace(**{field: size for field, size in UNREAD.items() if field not in RANGES[kernel]})


def candidates(kernel: str, kind: str, dim: int) -> list[TileSizes]:
    """The sizes to try on any card, for one kind of dtype (see `measured.KINDS`) and head dimension."""
    listed = SMALL if dim > 128 or kind == "float32" else CANDIDATES[kernel]
    found = dict.fromkeys(plain(kernel, TileSizes(*sizes)) for sizes in listed)
    return [blocks for blocks in found if is_allowed(kernel, blocks)]


def neighbours(kernel: str, blocks: TileSizes) -> list[TileSizes]:
    """Half and twice of one size, or one stage more or less."""
    changed = [blocks._replace(stages=blocks.stages + step) for step in (-1, 1)]
    for field in ("warps", *RANGES[kernel]):
        size = getattr(blocks, field)
        changed += [blocks._replace(**{field: other}) for other in (size // 2, 2 * size)]
    return [plain(kernel, one) for one in changed if is_allowed(kernel, one)]


def by_promise(kernel: str, kind: str, dim: int, best: TileSizes) -> list[TileSizes]:
    """All that is worth a try, what is closest to the best so far first."""
    every = dict.fromkeys([*neighbours(kernel, best), *candidates(kernel, kind, dim)])
    return sorted((one for one in every if distance(kernel, one, best)), key=lambda one: distance(kernel, one, best))


def distance(kernel: str, one: TileSizes, other: TileSizes) -> float:
    """How many steps of `neighbours` lie between them."""
    doubled = sum(abs(math.log2(getattr(one, field) / getattr(other, field))) for field in ("warps", *RANGES[kernel]))
    return doubled + abs(one.stages - other.stages)
