"""FlexAttention over chosen blocks of 128 x 128: a baseline of bench_peers_gpu.py, and a kernel for peers that choose blocks.

The blocks of a row of blocks are those with the largest product of mean query and mean key; the diagonal one and the first are
always among them. This choice sees the queries of a whole block, so it is not strictly causal.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128


class Blocks(NamedTuple):
    """The blocks below the diagonal that each row of blocks reads; it reads the one on the diagonal in any case."""

    counts: Tensor
    """`[batch, heads, rows of blocks]`"""
    indices: Tensor
    """`[batch, heads, rows of blocks, width]`: the first `counts` of each row are meant"""


def kept_blocks(count: int, share: float, device: torch.device | str) -> Tensor:
    """How many blocks each of `count` rows of blocks reads: its share of those it sees, the first and its own at least."""
    seen = torch.arange(1, count + 1, device=device)
    # In float64 0.1 * 10 may be a little over 1.
    return torch.minimum((seen * share - 1e-9).ceil().long().clamp(min=2), seen)


def by_pooled(query: Tensor, key: Tensor, share: float) -> Blocks:
    """The blocks with the largest product of the means, in all `share` of those that a row of blocks sees."""
    means = [x.unflatten(2, (-1, BLOCK)).mean(3, dtype=torch.float32) for x in (query, key)]
    scores = means[0] @ means[1].mT
    count = scores.shape[-1]
    place = torch.arange(count, device=scores.device)
    scores.masked_fill_(place >= place[:, None], -torch.inf)
    scores[..., 1:, 0] = torch.inf
    counts = kept_blocks(count, share, scores.device) - 1
    most = min(count, max(1, math.ceil(share * count)))
    indices = scores.topk(most, -1).indices.int()
    return Blocks(counts.int().expand(scores.shape[:-1]), indices)


def by_mask(mask: Tensor) -> Blocks:
    """The blocks where a mask `[batch, heads, rows, columns]` is true and that lie below the diagonal."""
    count = mask.shape[-1]
    below = mask.tril(-1)
    # Each true entry goes to the next free place of its row, all others to a place that is cut off.
    slots = torch.where(below, below.cumsum(-1) - 1, count)
    columns = torch.arange(count, device=mask.device, dtype=torch.int32).expand(mask.shape)
    indices = torch.zeros(*mask.shape[:-1], count + 1, dtype=torch.int32, device=mask.device).scatter_(-1, slots, columns)
    return Blocks(below.sum(-1, dtype=torch.int32), indices[..., :count].contiguous())


def dense(blocks: Blocks) -> Tensor:
    """The mask `[batch, heads, rows, columns]` of all blocks that are read."""
    rows = blocks.counts.shape[-1]
    width = blocks.indices.shape[-1]
    meant = torch.arange(width, device=blocks.counts.device) < blocks.counts[..., None]
    columns = torch.where(meant, blocks.indices, rows).long()
    found = torch.zeros(*blocks.counts.shape, rows + 1, dtype=torch.bool, device=blocks.counts.device)
    found.scatter_(-1, columns, True)
    return found[..., :rows] | torch.eye(rows, dtype=torch.bool, device=found.device)


def share_read(blocks: Blocks, n: int) -> float:
    """The keys that an average row reads by those that it sees."""
    rows = blocks.counts.shape[-1]
    own = n * (BLOCK + 1) / 2  # in blocks on the diagonal
    read = float(blocks.counts.double().sum(-1).mean()) * BLOCK * BLOCK + own
    assert n == rows * BLOCK
    return read / (n * (n + 1) / 2)


def attend(query: Tensor, key: Tensor, value: Tensor, blocks: Blocks) -> Tensor:
    """Causal softmax attention over these blocks alone; inputs `[batch, heads, n, dim]`, n a multiple of 128."""
    if query.is_cuda:
        return _compiled()(query, key, value, block_mask=block_mask(blocks, query.shape[2], backward=query.requires_grad))
    # Without a GPU the function is not compiled, and then it looks at the mask of single keys only.
    kept = dense(blocks)

    def chosen(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return (row >= column) & kept[batch, head, row // BLOCK, column // BLOCK]

    mask = block_mask(blocks, query.shape[2], backward=False, mask_mod=chosen)
    return flex_attention(query, key, value, block_mask=mask)


def causal(batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
    return row >= column


def block_mask(blocks: Blocks, n: int, backward: bool, mask_mod: Any = causal) -> BlockMask:
    """What FlexAttention needs. Its backward pass reads the blocks column by column as well, which takes longer to prepare."""
    rows = n // BLOCK
    own = torch.arange(rows, dtype=torch.int32, device=blocks.counts.device).expand(blocks.counts.shape)[..., None]
    # torch takes the width of these lists for the number of columns, so that they are as wide as if all blocks were read.
    diagonal, full = _widen(own, rows), _widen(blocks.indices, rows)
    more: dict[str, Any] = {"compute_q_blocks": backward} if "compute_q_blocks" in _parameters() else {}
    return BlockMask.from_kv_blocks(
        torch.ones_like(blocks.counts).contiguous(),
        diagonal,
        blocks.counts.contiguous(),
        full,
        BLOCK_SIZE=BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(n, n),
        **more,
    )


def _widen(indices: Tensor, width: int) -> Tensor:
    return torch.nn.functional.pad(indices, (0, width - indices.shape[-1])).contiguous()


@functools.cache
def _parameters() -> frozenset[str]:
    return frozenset(inspect.signature(BlockMask.from_kv_blocks).parameters)


@functools.cache
def _compiled() -> Any:
    """Compiled for each shape anew: as many as there are lengths, dimensions and peers that use it."""
    import torch._dynamo.config as config

    for name in ("recompile_limit", "cache_size_limit"):
        if hasattr(config, name):
            setattr(config, name, 256)
            break
    return torch.compile(flex_attention, dynamic=False)
