"""The exact index: score every visible key, keep the k best."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.kernels.reference import largest
from nearfield.knn.index.base import PADDING, BuiltIndex, Cutoffs, Found, smallest_near_score
from nearfield.knn.index.file import Learned

KEY_BLOCK = 1 << 15
"""Keys scored at a time."""


def _tile_size(device: torch.device) -> tuple[int, int]:
    """Scores and rows held at a time: 16 MB on a CPU, whose threads meet after every operation, and enough to fill a GPU.

    The rows are few because a causal tile scores every key that its last row sees.
    """
    return (1 << 22, 256) if device.type == "cpu" else (1 << 26, 2048)


@dataclass(frozen=True)
class ExactIndex:
    """Every inner product, block by block. Time O(rows * length * dim), memory O(1) beyond the answer.

    Example:
        >>> keys = torch.randn(2, 1000, 64)
        >>> scores, ids = ExactIndex().build(keys).search(keys[:, :5], k=3)
        >>> ids.shape
        torch.Size([2, 5, 3])
    """

    def build(self, keys: Tensor) -> BuiltExact:
        return BuiltExact(keys)

    def _restored(self, keys: Tensor, learned: Learned) -> BuiltExact:
        return BuiltExact(keys)


class BuiltExact(BuiltIndex):
    scans = True
    kind = ExactIndex
    recipe = ExactIndex()

    def _search(self, queries: Tensor, k: int, visible: Tensor) -> Found:
        batch, rows, _ = queries.shape
        scores = queries.new_full((batch, rows, k), -torch.inf)
        ids = torch.full((batch, rows, k), PADDING, device=queries.device)
        if batch == 0 or rows == 0 or self.length == 0:
            return Found(scores, ids, visible)
        key_block = min(self.length, max(KEY_BLOCK, 4 * k))
        tile_scores, most_rows = _tile_size(queries.device)
        tile_rows = max(1, min(tile_scores // key_block, most_rows, rows))
        tile_batch = max(1, tile_scores // (tile_rows * key_block))
        tile = queries.new_empty(min(tile_batch, batch) * tile_rows * key_block)
        for b in range(0, batch, tile_batch):
            for r in range(0, rows, tile_rows):
                here = (slice(b, b + tile_batch), slice(r, r + tile_rows))
                self._search_tile(queries[here], visible[here], self.keys[here[0]], scores[here], ids[here], key_block, tile)
        return Found(scores, ids, visible)

    @staticmethod
    def _search_tile(
        queries: Tensor, visible: Tensor, keys: Tensor, scores: Tensor, ids: Tensor, key_block: int, tile: Tensor
    ) -> None:
        """Fill `scores` and `ids` for one tile of rows, going over the keys block by block."""
        batch, rows, _ = queries.shape
        k = scores.shape[-1]
        fewest, most = (int(x) for x in torch.stack([visible.min(), visible.max()]).tolist())
        for start in range(0, most, key_block):
            stop = min(start + key_block, most)
            block = tile[: batch * rows * (stop - start)].view(batch, rows, stop - start)
            torch.bmm(queries, keys[:, start:stop].transpose(1, 2), out=block)
            if stop > fewest:
                edge = max(start, fewest)
                hidden = torch.arange(edge, stop, device=block.device) >= visible[..., None]
                block[..., edge - start :].masked_fill_(hidden, -torch.inf)
            best, at = _largest(block, min(k, stop - start))
            at = (at + start).masked_fill_(best == -torch.inf, PADDING)
            if start > 0:
                best, at = torch.cat([scores, best], -1), torch.cat([ids, at], -1)
                best, keep = best.topk(k)
                at = at.gather(-1, keep)
            scores[..., : best.shape[-1]] = best
            ids[..., : at.shape[-1]] = at

    def _cutoffs(self, queries: Tensor, ids: Tensor, visible: Tensor) -> Cutoffs:
        return Cutoffs.one_group(smallest_near_score(queries, self.keys, ids), visible, self.length)


def _largest(block: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`block.topk(k)`, in two stages where that is cheaper. Groups of sqrt(length / k) balance the two."""
    size = 1 << int(math.log2(max(1.0, block.shape[-1] / k)) / 2 + 0.5)
    return block.topk(k) if size < 4 else largest(block, k, size)
