"""Memory of the passes on a GPU: how much there is, and how work is cut to fit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

LEAST_BYTES = 4 << 20

BEYOND = 0.48
"""Everything that is made on the way should take no more than this part of inputs and output, or `LEAST_BYTES`."""

BEYOND_TRAINED = 1.0
"""The same where a gradient will be asked for: what is made in the backward pass, the gradients alone, takes as much."""

PAIRS = 1 / 12
"""What of this (row, cell) pairs may take while they are grouped."""

LEAST = 0.09
"""Partial results get this much at least: with too few rows at a time, tiles are half empty."""

LEAST_ROWS = 1024
"""Rows that are looked at together even if they do not fit."""

MOST_ENTRIES = 32768
"""What the second axis of a grid takes."""


def entry_parts(entries: int) -> Iterator[slice]:
    """All entries, in as few parts as a grid takes."""
    for first in range(0, entries, MOST_ENTRIES):
        yield slice(first, min(first + MOST_ENTRIES, entries))


class Room(NamedTuple):
    """Bytes for what is made on the way."""

    parts: int
    """partial results: the output of each opened cell by itself"""
    pairs: int
    """(row, cell) pairs, grouped"""


def room_for(inputs: tuple[Tensor, ...], held: tuple[Tensor, ...], beyond: float) -> Room:
    """Room that, with what is held already, comes to `beyond` of inputs and output, unless that would be very little."""
    total, ours = (sum(x.numel() * x.element_size() for x in tensors) for tensors in (inputs, held))
    pairs = int(PAIRS * beyond * total)
    return Room(max(LEAST_BYTES, int(LEAST * total), int(beyond * total) - pairs - ours), pairs)


def parts_of(entries: int, rows: int, per_row: int, bytes: int) -> Iterator[tuple[slice, slice]]:
    """Entries, and rows of theirs, for which so many bytes each fit. Rows stay together where they can: tiles are then full."""
    some = max(1, min(entries, bytes // max(1, per_row * rows)))
    step = rows if some > 1 else max(LEAST_ROWS, bytes // per_row // LEAST_ROWS * LEAST_ROWS)
    for first in range(0, entries, some):
        for start in range(0, rows, step):
            yield slice(first, min(first + some, entries)), slice(start, min(start + step, rows))


class Slab(NamedTuple):
    """What is grouped together: all rows of some entries, or some rows of one."""

    entries: slice
    rows: slice
    parts: list[slice]
    """Entries of it whose partial results fit at a time."""


def slabs_of(entries: int, rows: int, slots: int, per_row: int, room: Room) -> Iterator[Slab]:
    parts = list(parts_of(entries, rows, per_row, room.parts))
    for some, part in parts:
        if part != slice(0, rows):
            yield Slab(some, part, [slice(0, 1)])
    whole = [some for some, part in parts if part == slice(0, rows)]
    together = max(1, room.pairs // max(1, 4 * rows * slots * (whole[0].stop if whole else 1)))
    for start in range(0, len(whole), together):
        own = whole[start : start + together]
        first = own[0].start
        yield Slab(slice(first, own[-1].stop), slice(0, rows), [slice(x.start - first, x.stop - first) for x in own])
