"""Cut work into parts of bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

BLOCK_BYTES = 64 << 20
"""What one block of rows may take on a CPU."""

GPU_TIMES = 8
"""On a GPU blocks may take this many times as much: small ones take as long to start as to compute."""


def row_blocks(shape: Sequence[int], bytes_per_row: int, on_gpu: bool = False, most: int | None = None) -> Iterator[slice]:
    """Ranges that cover the rows of `[batch, rows]`, each of about `BLOCK_BYTES` over all entries, and of at least one row.

    `most`: of so many rows at most.
    """
    batch, rows = shape
    step = max(1, BLOCK_BYTES * (GPU_TIMES if on_gpu else 1) // max(1, bytes_per_row * batch))
    step = step if most is None else min(step, most)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def row_chunks(batch: int, rows: int, row_cost: int, budget: int) -> Iterator[tuple[slice, slice]]:
    """Slices of batch and rows that cover `[batch, rows]`, of at most `budget // row_cost` rows: whole entries if they fit."""
    fit = max(1, budget // max(1, row_cost))
    if fit >= rows:
        step = max(1, fit // max(1, rows))
        for first in range(0, batch, step):
            yield slice(first, first + step), slice(0, rows)
    else:
        for entry in range(batch):
            for first in range(0, rows, fit):
                yield slice(entry, entry + 1), slice(first, first + fit)
