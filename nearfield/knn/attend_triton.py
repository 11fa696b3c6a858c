"""The attention of rows to keys that were found one by one, and which keys are drawn for those that were not."""

from __future__ import annotations

from functools import partial

import torch
import triton.language as tl
from torch import Tensor

from nearfield.kernels.launch import LOG2E, Kernel, next_power_of_2, padded

NUMBERS = 2048
"""Numbers of values that a program, which is one warp, reads at a time."""

WARPS = 4
"""Those that sort the near keys of a row."""

COMPARED = 8192
"""Near keys times drawn ones that a program compares at a time."""

BEYOND = 1 << 30
"""More than any id."""


@partial(Kernel, do_not_specialize=())
def _skip_near(ids, ranks, drawn, k, tail, BEYOND: tl.constexpr, BK: tl.constexpr, BT: tl.constexpr):
    """`nearfield.sampling.skip` for the near keys of a row in any order."""
    row = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, BK)
    near = tl.load(ids + row * k + lane, mask=lane < k, other=-1).to(tl.int32)
    below = tl.sort(tl.where(near < 0, BEYOND, near)) - lane
    for start in range(0, tail, BT):
        at = start + tl.arange(0, BT)
        rank = tl.load(ranks + row * tail + at, mask=at < tail, other=-1).to(tl.int32)
        pushed = rank + tl.sum((below[None, :] <= rank[:, None]).to(tl.int32), 1)
        tl.store(drawn + row * tail + at, tl.where(rank < 0, -1, pushed), mask=at < tail)


@partial(Kernel, do_not_specialize=("scale",))
def _attend_found(
    queries,
    keys,
    values,
    best,
    ids,
    drawn,
    left_out,
    output,
    scale,
    k,
    tail,
    dim,
    value_dim,
    query_row,
    key_row,
    value_row,
    output_row,
    BT: tl.constexpr,
    BD: tl.constexpr,
    BV: tl.constexpr,
):
    """Softmax and sum over the near keys of a row, whose scores are known, and over its drawn ones."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BV)[None, :]
    wide = column < value_dim
    highest = tl.full([BT], -float("inf"), tl.float32)
    for start in range(0, k, BT):
        at = start + tl.arange(0, BT)
        highest = tl.maximum(highest, tl.load(best + row * k + at, mask=at < k, other=-float("inf")))
    top = tl.max(highest, 0) * scale
    top = tl.where(top == -float("inf"), 0.0, top)
    # Sums over every BT-th key; these are added up at the end.
    total = tl.zeros([BT], tl.float32)
    acc = tl.zeros([BT, BV], tl.float32)
    for start in range(0, k, BT):
        at = start + tl.arange(0, BT)
        key = tl.load(ids + row * k + at, mask=at < k, other=-1)
        real = key >= 0
        weight = tl.exp2(tl.load(best + row * k + at, mask=real, other=-float("inf")) * scale - top)
        value = tl.load(values + key.to(tl.int64)[:, None] * value_row + column, mask=real[:, None] & wide, other=0.0)
        total += weight
        acc += weight[:, None] * value.to(tl.float32)
    if tail > 0:
        left = tl.load(left_out + row)
        # A drawn key stands for as many as were left out for each that was drawn.
        shift = tl.log2(tl.maximum(left, 1).to(tl.float32) / tl.maximum(tl.minimum(left, tail), 1).to(tl.float32))
        inner = tl.arange(0, BD)[None, :]
        query = tl.load(queries + row * query_row + inner, mask=inner < dim, other=0.0).to(tl.float32)
        for start in range(0, tail, BT):
            at = start + tl.arange(0, BT)
            key = tl.load(drawn + row * tail + at, mask=at < tail, other=-1)
            real = key >= 0
            place = key.to(tl.int64)[:, None]
            other = tl.load(keys + place * key_row + inner, mask=real[:, None] & (inner < dim), other=0.0)
            value = tl.load(values + place * value_row + column, mask=real[:, None] & wide, other=0.0)
            logit = tl.where(real, tl.sum(query * other.to(tl.float32), 1) * scale + shift, -float("inf"))
            # It may be larger than those that were found.
            now = tl.maximum(top, tl.max(logit, 0))
            before = tl.exp2(top - now)
            weight = tl.exp2(logit - now)
            total = total * before + weight
            acc = acc * before + weight[:, None] * value.to(tl.float32)
            top = now
    norm = tl.sum(total, 0)
    found = tl.sum(acc, 0)[None, :] / tl.where(norm == 0.0, 1.0, norm)
    tl.store(output + row * output_row + column, found.to(output.dtype.element_ty), mask=wide)


def tail_ids(ranks: Tensor, ids: Tensor) -> Tensor:
    """The `ranks[r, t]`-th keys, int32, that are not among `ids[r]`, which are distinct and in any order; -1 stays -1."""
    (rows, tail), k = ranks.shape, ids.shape[1]
    drawn = torch.empty(rows, tail, dtype=torch.int32, device=ids.device)
    if drawn.numel():
        width = next_power_of_2(k)
        _skip_near[(rows,)](
            ids=ids,
            ranks=ranks,
            drawn=drawn,
            k=k,
            tail=tail,
            BEYOND=BEYOND,
            BK=width,
            BT=min(next_power_of_2(tail), max(1, COMPARED // width)),
            num_warps=WARPS,
        )
    return drawn


def attend_rows(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    best: Tensor,
    ids: Tensor,
    drawn: Tensor | None,
    left_out: Tensor,
    scale: float,
    output: Tensor,
) -> None:
    """Attention of queries `[rows, dim]` to near keys `ids` with inner products `best`, and to drawn ones, into `output`.

    `drawn` `[rows, tail]` stand for `left_out` `[rows]` keys; None: these are left out. The id -1 is none.
    """
    (rows, k), dim, value_dim = ids.shape, keys.shape[1], values.shape[1]
    if not output.numel():
        return
    _attend_found[(rows,)](
        queries=queries,
        keys=keys,
        values=values,
        best=best,
        ids=ids,
        drawn=ids if drawn is None else drawn,
        left_out=left_out,
        output=output,
        scale=scale * LOG2E.value,
        k=k,
        tail=0 if drawn is None else drawn.shape[1],
        dim=dim,
        value_dim=value_dim,
        query_row=queries.stride(0),
        key_row=keys.stride(0),
        value_row=values.stride(0),
        output_row=output.stride(0),
        BT=max(4, NUMBERS // padded(value_dim)),
        BD=padded(dim),
        BV=padded(value_dim),
        num_warps=1,
    )
