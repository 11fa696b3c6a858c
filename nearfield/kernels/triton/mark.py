"""Opened cells as bits, one for every column of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.kernels.cells_plan import CellSettings
from nearfield.kernels.triton.common import cdiv
from nearfield.kernels.triton.launch import Kernel
from nearfield.kernels.triton.layout import Layout
from nearfield.kernels.triton.route import closed_segments


@triton.jit
def is_marked(words, there, lane, BC: tl.constexpr):
    """Whether cells are marked, for a tile of 32 or 64 columns whose first word is at `words`, row by row."""
    word = tl.load(words, mask=there, other=0)[:, None]
    if BC == 64:
        more = tl.load(words + 1, mask=there, other=0)
        word = tl.where((lane < 32)[None, :], word, more[:, None])
    return (word & (1 << (lane % 32))[None, :]) != 0


@Kernel
def _mark(
    opened,
    visible,
    span_of,
    span_cell,
    column,
    marks,
    rows,
    opened_entry,
    visible_entry,
    slots,
    words,
    spans,
    segment,
    window,
    segments,
    CAUSAL: tl.constexpr,
    BM: tl.constexpr,
):
    entry = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    there = row < rows
    opened += entry * opened_entry
    visible += entry * visible_entry
    marks += entry * rows * words
    sees = tl.load(visible + row, mask=there, other=0).to(tl.int32)
    closed = closed_segments(sees, segment, window, segments, CAUSAL)
    for slot in range(slots):
        cell = tl.load(opened + row * slots + slot, mask=there, other=-1)
        real = cell >= 0
        span = tl.load(span_of + cell, mask=real, other=0)
        place = tl.load(column + closed * spans + span, mask=real, other=0) + cell - tl.load(span_cell + span, mask=real, other=0)
        # A row is one thread's own: no one else writes to its words.
        here = marks + row * words + place // 32
        word = tl.load(here, mask=real, other=0)
        tl.store(here, word | (1 << (place % 32)).to(tl.int32), mask=real)


def mark(opened: Tensor, visible: Tensor, layout: Layout, settings: CellSettings) -> Tensor:
    """`[entries, rows, words]`: 1 where the row opened the cell of the column."""
    entries, rows, slots = opened.shape
    marks = torch.zeros(entries, rows, layout.words, dtype=torch.int32, device=opened.device)
    _mark[(cdiv(rows, 128), entries)](
        opened,
        visible,
        layout.span_of,
        layout.span_cell,
        layout.column,
        marks,
        rows,
        opened.stride(0),
        visible.stride(0),
        slots,
        layout.words,
        len(layout.spans.all),
        layout.segment,
        settings.window,
        layout.segments,
        CAUSAL=settings.segment > 0,
        BM=128,
        num_warps=4,
    )
    return marks
