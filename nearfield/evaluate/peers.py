"""What cells are compared with: the very best keys of the past, as many as cells read, and nothing for the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nearfield.blocks import row_blocks
from nearfield.checks import check_positive
from nearfield.methods.base import Call, Outcome
from nearfield.problem import Problem


@dataclass(frozen=True)
class PastTopK:
    """Causal attention to a row's own segment, the first `sinks` keys, and the `k` heaviest of the other keys before.

    Own segment and sinks are those of `Cells`, so that both differ in what they make of the past alone. All logits are computed:
    this is what a perfect index would give, at the price of exact attention. For comparisons only.
    """

    k: int
    segment: int = 1024
    sinks: int = 16

    def __post_init__(self) -> None:
        check_positive("k", self.k)
        check_positive("segment", self.segment)
        check_positive("sinks", self.sinks, least=0)

    def run(self, problem: Problem, call: Call) -> Outcome:
        if not problem.is_causal:
            raise ValueError("PastTopK needs is_causal=True: without a mask there is no past")
        rows = problem.rows
        output = rows.values.new_empty(*rows.visible.shape, rows.values.shape[2])
        lse = rows.values.new_empty(rows.visible.shape)
        read = 0
        for block in row_blocks(rows.visible.shape, 16 * rows.length):
            part = rows.at(block)
            # Blocks may reach over the end of a head, so that it takes all rows to know which keys they see.
            length, closed = max(1, int(part.visible.max())), self._closed(part.visible)
            logits = part.queries @ part.keys[:, :length].transpose(1, 2)
            position = torch.arange(length, device=logits.device)
            near = position < part.visible[..., None]
            past = slice(self.sinks, int(closed.max()))
            if past.start < past.stop:
                hidden = position[past] >= closed[..., None]
                found = logits[..., past].masked_fill(hidden, -torch.inf).topk(min(self.k, past.stop - past.start), sorted=False)
                near[..., past] &= hidden
                near[..., past] |= torch.zeros_like(hidden).scatter_(-1, found.indices, found.values > -torch.inf)
            read += int(near.sum())
            logits.masked_fill_(~near, -torch.inf)
            lse[:, block] = logits.logsumexp(-1)
            # A row that sees no key is zero.
            output[:, block] = logits.softmax(-1).nan_to_num_(0.0) @ part.values[:, :length]
        return Outcome(output, lse, None, {"keys_per_query": read / max(1, rows.visible.numel()), "k": self.k})

    def _closed(self, visible: Tensor) -> Tensor:
        """Keys before the segment that a row is in."""
        return (visible - 1).clamp(min=0) // self.segment * self.segment
