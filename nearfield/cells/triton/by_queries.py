"""How large queries are when each span is closed, on a GPU: see `partition.by_queries`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nearfield.cells.partition.by_queries import LATEST
from nearfield.cells.triton.layout import Layout
from nearfield.kernels.launch import Kernel, padded, strides


@triton.jit
def rows_that_see(visible, length, keys):
    """How many of `length` rows, which see ever more keys, see no more than so many."""
    first, last = 0, length
    while first < last:
        middle = (first + last) // 2
        if tl.load(visible + middle) <= keys:
            first = middle + 1
        else:
            last = middle
    return first


@Kernel
def _sizes_of_queries(
    queries,
    visible,
    key_ranges,
    sizes,
    spans,
    length,
    group,
    dim,
    query_entry,
    query_row,
    visible_entry,
    CAUSAL: tl.constexpr,
    BP: tl.constexpr,
    BD: tl.constexpr,
):
    """One span: root mean squares of the BP latest queries of each member of the group that see no more than its keys, up to a
    factor; without a mask, of BP queries from all over."""
    span, entry = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BD)
    wide = column < dim
    visible += entry * visible_entry
    if CAUSAL:
        end = tl.load(key_ranges + 2 * span + 1)
        first = rows_that_see(visible, length, tl.maximum(end - BP, 0))
        last = rows_that_see(visible, length, end)
    else:
        first, last = 0, tl.minimum(length, BP)
    total = tl.zeros([BP, BD], tl.float32)
    for start in range(first, last, BP):
        lane = start + tl.arange(0, BP)
        row = lane.to(tl.int64)
        if not CAUSAL:
            row = row * length // last
        mask = (lane < last)[:, None] & wide[None, :]
        for member in range(group):
            at = queries + entry * query_entry + (member * length + row)[:, None] * query_row + column[None, :]
            x = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            total += x * x
    size = tl.sqrt(tl.sum(total, 0))
    most = tl.max(size, 0)
    # NaN is not below anything, and not all of the maxima are kept where there is one.
    known = (tl.sum((size < float("inf")).to(tl.int32), 0) == BD) & (most > 0.0)
    size = tl.where(known, size / most, 0.0)
    tl.store(sizes + (entry * spans + span) * dim + column, size, mask=wide)


def sizes_of_queries(queries: Tensor, visible: Tensor, layout: Layout, group: int) -> Tensor:
    """`[entries, spans, dim]`, float32, for `kmeans`, from queries `[entries, group * length, dim]`.

    Zeros where nothing is known: no query sees some of the last keys of a span and none behind it, or one is not finite.
    """
    entries, rows, dim = queries.shape
    spans = len(layout.spans.all)
    sizes = torch.empty(entries, spans, dim, dtype=torch.float32, device=queries.device)
    if spans:
        _sizes_of_queries[(spans, entries)](
            queries=queries,
            visible=visible,
            key_ranges=layout.key_ranges,
            sizes=sizes,
            spans=spans,
            length=rows // group,
            group=group,
            dim=dim,
            **strides(query=queries),
            visible_entry=visible.stride(0),
            CAUSAL=layout.causal,
            BP=LATEST,
            BD=padded(dim),
            num_warps=4,
        )
    return sizes
