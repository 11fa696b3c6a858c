"""What MInference's vertical-slash kernel is told to read: columns (keys for all later rows) and slashes (keys at a distance).

Its package turns these into lists for each block of 64 rows with a compiled extension. Here a Triton kernel does so.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

LAST = 64
"""The choice looks at the attention of so many rows, the last ones."""
FIRST_KEYS, LATEST_KEYS = 30, 100
"""Columns and slashes that are always read."""
BEYOND = 2**31 - 1


def chosen(query: Tensor, key: Tensor, columns: int, slashes: int) -> tuple[Tensor, Tensor]:
    """The columns and slashes with the largest weight in the last rows, `[batch, heads, count]` each."""
    n = key.shape[2]
    last = min(LAST, n)
    logits = (query[:, :, -last:] @ key.mT).float() / math.sqrt(query.shape[3])
    place = torch.arange(n, device=key.device)
    weights = logits.masked_fill_(place > place[-last:, None], -torch.inf).softmax(-1)
    along = weights.sum(2)
    along[..., :FIRST_KEYS] = torch.inf
    # Entry (j, i) of this view is the weight of key i + j - (last - 1) in row i: key and row are n - 1 - j apart.
    padded = torch.nn.functional.pad(weights, (last - 1, 0)).contiguous()
    wide = n + last - 1
    size, stride = (*weights.shape[:2], n, last), (padded.stride(0), padded.stride(1), 1, wide + 1)
    across = padded.as_strided(size, stride).sum(-1)
    across[..., -LATEST_KEYS:] = torch.inf
    most = [min(n, max(count, least)) for count, least in ((columns, FIRST_KEYS), (slashes, LATEST_KEYS))]
    return along.topk(most[0], -1).indices, n - 1 - across.topk(most[1], -1).indices


@triton.jit
def _lists(
    vertical,
    slash,
    block_count,
    block_offset,
    column_count,
    column_index,
    V,
    S,
    ROWS,
    BLOCK: tl.constexpr,
    BEYOND_ALL: tl.constexpr,
):
    row = tl.program_id(0)
    head = tl.program_id(1)
    end = (row + 1) * BLOCK
    place = (head * ROWS + row).to(tl.int64)
    blocks = block_offset + place * S
    columns = column_index + place * V
    vertical += head * V
    slash += head * S
    count_blocks = 0
    count_columns = 0
    next_column = 0
    covered = 0
    column = tl.load(vertical)
    for i in range(S):
        distance = tl.load(slash + i)
        start = tl.maximum(end - distance - BLOCK, 0)
        if (distance < end) & (start + BLOCK > covered):
            begin = tl.maximum(start, covered)
            while column < begin:
                if column >= covered:
                    tl.store(columns + count_columns, column)
                    count_columns += 1
                next_column += 1
                column = tl.load(vertical + next_column, mask=next_column < V, other=BEYOND_ALL)
            tl.store(blocks + count_blocks, begin)
            count_blocks += 1
            covered = begin + BLOCK
    tl.store(block_count + place, count_blocks)
    tl.store(column_count + place, count_columns)


def convert_vertical_slash_indexes(
    seqlens: Tensor, vertical: Tensor, slash: Tensor, context_size: int, block_size_M: int = 64, block_size_N: int = 64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each block of rows: how many blocks of keys and where they begin, and how many single keys and which.

    `vertical` is sorted upwards, `slash` downwards and ends with 0, both int32 `[batch, heads, count]`. A block of rows reads,
    for each slash, the keys that its rows see at this distance, as blocks that do not overlap; and the columns outside of these.
    """
    if block_size_M != block_size_N:
        raise ValueError(f"blocks must be square, got {block_size_M} x {block_size_N}")
    batch, heads = slash.shape[:2]
    rows = -(-context_size // block_size_M)

    def lists(*width: int) -> Tensor:
        return torch.zeros(batch, heads, rows, *width, dtype=torch.int32, device=slash.device)

    count, blocks = lists(), lists(slash.shape[2])
    singles, columns = lists(), lists(vertical.shape[2])
    _lists[(rows, batch * heads)](
        vertical.contiguous(),
        slash.contiguous(),
        count,
        blocks,
        singles,
        columns,
        vertical.shape[2],
        slash.shape[2],
        rows,
        BLOCK=block_size_M,
        BEYOND_ALL=BEYOND,
        num_warps=1,
    )
    return count, blocks, singles, columns


def share_read(query: Tensor, key: Tensor, columns: int, slashes: int, block: int = 64) -> float:
    """The keys that an average row reads by those that it sees; later keys inside of its blocks do not count."""
    n = key.shape[2]
    vertical, slash = (x.int() for x in chosen(query, key, columns, slashes))
    count, starts, singles, _ = convert_vertical_slash_indexes(
        torch.tensor([n]), vertical.sort(-1).values, slash.sort(-1, descending=True).values, n, block, block
    )
    rows = torch.arange(count.shape[2], device=count.device)[:, None] * block
    meant = torch.arange(starts.shape[3], device=count.device) < count[..., None]
    read = float(singles.double().sum()) * block
    for head_starts, head_meant in zip(starts.flatten(0, 1), meant.flatten(0, 1), strict=True):
        # Row i of the block at `rows` sees `ahead` + i keys of a block of keys that begins at `start`, 0 to all of them.
        ahead = (rows + 1 - head_starts).clamp(1 - block, block)
        seen = torch.where(ahead > 0, block**2 - _triangle(block - ahead), _triangle(block - 1 + ahead))
        read += float(torch.where(head_meant, seen, 0).double().sum())
    return read / (math.prod(key.shape[:2]) * n * (n + 1) / 2)


def _triangle(side: Tensor) -> Tensor:
    return side * (side + 1) // 2
