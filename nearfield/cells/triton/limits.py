"""What the Triton kernels of the cells engine cannot serve, and why. Importing this does not import Triton."""

from __future__ import annotations

import torch
from torch import Tensor

from nearfield.cells.partition import Partition
from nearfield.cells.partition.kmeans import KMeans
from nearfield.kernels import cards, limits

MOST_SEGMENTS, MOST_PROBES, MOST_CELLS = 4096, 160, 32768
"""in a call on a whole sequence"""
MOST_STEP_CELLS, MOST_GROUP = 1 << 16, 64
"""in one step of a cache"""
MOST_COMPARED = 1 << 16
"""Scores that one program of a step compares."""
MOST_PROGRAMS, LEAST_TILE = 65_000, 16
"""Programs on the second axis of a grid, and the fewest keys that each reads."""

MOST_WIDE_FLOAT32, WIDE_FLOAT32_BYTES = 128, 163 << 10
"""Columns of float32 that a card serves with less shared memory per block than this: 16 rows of more do not fit."""
STEP_BYTES = 14
"""Shared memory that a step takes at most for each number of its queries, in float32. Other dtypes fit everywhere."""


def unsupported(
    *tensors: Tensor,
    partition: Partition | None = None,
    dropout: float = 0.0,
    samples: int = 0,
    softcap: float = 0.0,
    segments: int = 0,
    probes: int = 0,
    cells: int = 0,
) -> str | None:
    """What the kernels of whole sequences cannot serve, in words for an error; None: they serve it all.

    Used for calls, for benchmarks of calls, and for caches that group keys; arguments that do not matter are left out.
    """
    plain = limits.unsupported(*tensors)
    if plain is not None:
        return plain
    for x in tensors:
        if x.dtype == torch.float32 and x.shape[-1] > MOST_WIDE_FLOAT32 and cards.shared_memory(x.device) < WIDE_FLOAT32_BYTES:
            return f"float32 with more than {MOST_WIDE_FLOAT32} columns {_on_a_card(x.device)}"
    if partition is not None and type(partition) is not KMeans:
        return f"the partition {type(partition).__name__}"
    if dropout:
        return "dropout"
    if samples:
        return f"samples={samples}"
    if softcap:
        return f"softcap={softcap:g}"
    if segments > MOST_SEGMENTS:
        return f"more than {MOST_SEGMENTS} segments; use a larger segment"
    if probes > MOST_PROBES:
        return f"more than {MOST_PROBES} probes; use larger cells"
    return f"more than {MOST_CELLS} cells; use larger ones" if cells > MOST_CELLS else None


def unsupported_step(query: Tensor, keys: Tensor, values: Tensor, cells: int, compared: int, most_open: int) -> str | None:
    """The same for one step of a cache: a query `[batch, heads, rows, dim]` and its stored keys and values.

    `compared`: how many scores one program compares. `most_open`: how many keys may be in no closed segment.
    """
    plain = limits.unsupported(query, keys, values)
    if plain is not None:
        return plain
    if query.shape[2] != 1:
        return f"{query.shape[2]} queries at a time"
    if query.dtype != keys.dtype:
        return f"queries of {query.dtype} with keys of {keys.dtype}"
    group, columns = query.shape[1] // keys.shape[1], max(keys.shape[-1], values.shape[-1])
    if group > MOST_GROUP:
        return f"more than {MOST_GROUP} query heads per key-value head"
    numbers = max(16, _power_of_2(group)) * max(16, _power_of_2(columns))
    if query.dtype == torch.float32 and STEP_BYTES * numbers > cards.shared_memory(query.device):
        return f"float32 with {group} query heads per key-value head and {columns} columns {_on_a_card(query.device)}"
    if most_open > MOST_PROGRAMS * LEAST_TILE:
        return f"segments of more than {MOST_PROGRAMS * LEAST_TILE} keys"
    return f"{cells} cells" if cells > MOST_STEP_CELLS or compared > MOST_COMPARED else None


def _power_of_2(number: int) -> int:
    return 1 << max(0, number - 1).bit_length()


def _on_a_card(device: torch.device) -> str:
    return f"on a card with {cards.shared_memory(device) >> 10} KB of shared memory per block"
