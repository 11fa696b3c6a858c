"""The methods of bench_peers_gpu.py behind one interface: here ours and FlexAttention over blocks, in `peers_others` the rest."""

from __future__ import annotations

import itertools
from typing import Any, ClassVar

import peers_flex
import torch
from gpu_timing import QKV
from torch import Tensor

import nearfield as nf

Arguments = dict[str, Any]

OURS: list[tuple[str, Arguments]] = [
    ("Cells(probes=2)", {"probes": 2}),
    ("Cells(probes=4)", {"probes": 4}),
    ("Cells(probes=8)", {"probes": 8}),
    ("Cells(probes=16)", {"probes": 16}),
    ("Cells(probes=32)", {"probes": 32}),
    ("Cells(share=128, probes=4)", {"share": 128, "probes": 4}),
    ("Cells(share=128, probes=8)", {"share": 128, "probes": 8}),
    ("Cells(share=128, probes=16)", {"share": 128, "probes": 16}),
    ("Cells(share=128, probes=32)", {"share": 128, "probes": 32}),
    ("Cells(share=128, probes=64)", {"share": 128, "probes": 64}),
]
"""Five budgets row by row, and five shared by blocks of rows. One that the library does not know is reported and left out."""
SHARES = (0.05, 0.1, 0.2)
TARGET = 0.05
"""About this share of the keys that it sees is read by a row in the second setting of each peer."""


class Peer:
    """One method: `attend` computes causal attention from inputs in its own layout, by the arguments of one of its `settings`."""

    name: ClassVar[str]
    heads_first: ClassVar[bool] = True
    """inputs and outputs are `[1, heads, n, dim]`; otherwise `[1, n, heads, dim]`"""
    takes_groups: ClassVar[bool] = False
    """several heads of queries may have one head of keys; for others keys and values are repeated"""
    group: ClassVar[int] = 1
    """it needs so many heads of queries for each head of keys"""
    trains: ClassVar[bool] = False

    def settings(self, n: int) -> dict[str, Arguments]:
        """By label: what its authors recommend, and what reads about `TARGET` of the visible keys."""
        raise NotImplementedError

    def everything(self, n: int) -> Arguments:
        """With these arguments it reads all keys, so that it has to agree with exact attention."""
        raise NotImplementedError

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        raise NotImplementedError

    def fitted(self, inputs: QKV, arguments: Arguments) -> Arguments:
        """The arguments for these inputs, where they depend on what is in them. Not timed."""
        return arguments

    def share(self, inputs: QKV, arguments: Arguments) -> float | None:
        """Keys that an average row reads by those that it sees, None where it cannot be told. Inputs are in its own layout."""
        return None

    def own_layout(self, inputs: QKV) -> QKV:
        """New tensors where the layout or the number of heads differs."""
        query, key, value = inputs
        group = query.shape[1] // key.shape[1]
        if group > 1 and not self.takes_groups:
            key, value = (x.repeat_interleave(group, 1) for x in (key, value))
        if self.heads_first:
            return query, key, value
        return tuple(x.transpose(1, 2).contiguous() for x in (query, key, value))  # type: ignore[return-value]

    def usual_layout(self, output: Tensor) -> Tensor:
        return output if self.heads_first else output.transpose(1, 2)


class Ours(Peer):
    name = "nearfield"
    takes_groups = True
    trains = True

    def settings(self, n: int) -> dict[str, Arguments]:
        return dict(OURS)

    def everything(self, n: int) -> Arguments:
        return {"cell_size": 16, "probes": n}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        return nf.attention(query, key, value, is_causal=True, enable_gqa=True, method=nf.Cells(**arguments))

    def share(self, inputs: QKV, arguments: Arguments) -> float | None:
        found = nf.estimate(*inputs, is_causal=True, enable_gqa=True, method=nf.Cells(**arguments))
        return float(found.info["keys_per_query"]) / ((inputs[1].shape[2] + 1) / 2)


class PooledBlocks(Peer):
    name = "FlexAttention"
    trains = True

    def settings(self, n: int) -> dict[str, Arguments]:
        return {f"pooled blocks, {share:.0%}": {"share": share} for share in SHARES}

    def everything(self, n: int) -> Arguments:
        return {"share": 1.0}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, **arguments: Any) -> Tensor:
        return peers_flex.attend(query, key, value, self._blocks(query, key, **arguments))

    def share(self, inputs: QKV, arguments: Arguments) -> float | None:
        return peers_flex.share_read(self._blocks(*inputs[:2], **arguments), inputs[0].shape[2])

    @torch.no_grad()
    def _blocks(self, query: Tensor, key: Tensor, share: float) -> peers_flex.Blocks:
        return peers_flex.by_pooled(query, key, share)


def share_of_blocks(n: int, block: int, most: int) -> float:
    """Of a method whose rows read at most `most` blocks of keys, their own among them up to the row itself."""
    read = 0.0
    for number in range(-(-n // block)):
        rows = min(block, n - number * block)
        read += rows * (min(number, most - 1) * block + (rows + 1) / 2)
    return read / (n * (n + 1) / 2)


def blocks_for(n: int, block: int, share: float = TARGET) -> int:
    """The fewest blocks with which `share_of_blocks` reaches `share`."""
    return next(most for most in itertools.count(1) if most * block >= n or share_of_blocks(n, block, most) >= share)
