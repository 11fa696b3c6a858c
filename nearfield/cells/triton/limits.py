"""What the Triton kernels of the cells engine cannot serve, and why. Importing this does not import Triton."""

from __future__ import annotations

from torch import Tensor

from nearfield.cells.partition import Partition
from nearfield.cells.partition.kmeans import KMeans
from nearfield.kernels import limits

MOST_SEGMENTS, MOST_PROBES, MOST_CELLS = 4096, 160, 32768
"""in a call on a whole sequence"""
MOST_STEP_CELLS, MOST_GROUP = 1 << 16, 64
"""in one step of a cache"""
MOST_COMPARED = 1 << 16
"""Scores that one program of a step compares."""
MOST_PROGRAMS, LEAST_TILE = 65_000, 16
"""Programs on the second axis of a grid, and the fewest keys that each reads."""


def unsupported(
    *tensors: Tensor,
    partition: Partition | None = None,
    dropout: float = 0.0,
    samples: int = 0,
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
    if partition is not None and type(partition) is not KMeans:
        return f"the partition {type(partition).__name__}"
    if dropout:
        return "dropout"
    if samples:
        return f"samples={samples}"
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
    if query.shape[1] // keys.shape[1] > MOST_GROUP:
        return f"more than {MOST_GROUP} query heads per key-value head"
    if most_open > MOST_PROGRAMS * LEAST_TILE:
        return f"segments of more than {MOST_PROGRAMS * LEAST_TILE} keys"
    return f"{cells} cells" if cells > MOST_STEP_CELLS or compared > MOST_COMPARED else None
