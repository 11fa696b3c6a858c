"""A GPT in the manner of GPT-2: characters in, logits of the next character out. Its attention can be exchanged."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.shakespeare.methods import attend
from experiments.shakespeare.sizes import Sizes
from nearfield.problem import Method

Watch = Callable[[Tensor, Tensor, Tensor, Tensor], None]
"""is shown query, key, value and output of every layer"""
SLOWEST = 1e4
"""The pair of numbers that rotary positions turn least turns about this many times more slowly than the first."""


class Rotary(nn.Module):
    """Turns each pair of numbers of a query or key in proportion to its place: their product knows how far apart they are."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        pairs = sizes.width // sizes.heads // 2
        angle = torch.arange(sizes.context)[:, None] * SLOWEST ** (-torch.arange(pairs) / pairs)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., length, dim]`, in its own precision; the pair i is x[i] and x[i + dim / 2]."""
        length = x.shape[-2]
        cos, sin = self.cos[:length], self.sin[:length]
        first, second = x.float().chunk(2, -1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], -1).to(x.dtype)


class Attention(nn.Module):
    """Causal attention by `method`. Dropout acts on what comes out: not every method can drop single weights."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.turn = Rotary(sizes) if sizes.rotary else None
        self.qkv = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)
        self.method: Method | None = None
        self.watch: Watch | None = None

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.turn is not None:
            query, key = self.turn(query), self.turn(key)
        output = attend(query, key, value, self.method)
        if self.watch is not None:
            self.watch(query, key, value, output)
        return self.out(output.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention, then a layer four times as wide; each after a norm, and added to what came in."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.norm, self.norm_wide = nn.LayerNorm(sizes.width, bias=False), nn.LayerNorm(sizes.width, bias=False)
        self.attention = Attention(sizes)
        self.up = nn.Linear(sizes.width, 4 * sizes.width, bias=False)
        self.down = nn.Linear(4 * sizes.width, sizes.width, bias=False)
        self.dropout = nn.Dropout(sizes.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm(x)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm_wide(x)))))


class GPT(nn.Module):
    def __init__(self, sizes: Sizes, symbols: int) -> None:
        super().__init__()
        self.symbol = nn.Embedding(symbols, sizes.width)
        self.position = None if sizes.rotary else nn.Embedding(sizes.context, sizes.width)
        self.dropout = nn.Dropout(sizes.dropout)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width, bias=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        for block in self.blocks:
            for last in (block.attention.out, block.down):  # two per layer are added up: their sum stays of order one
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * sizes.layers))

    def forward(self, ids: Tensor) -> Tensor:
        """`[batch, length]` -> `[batch, length, symbols]`. What an embedding says is also how a character is recognised."""
        x = self.symbol(ids)
        if self.position is not None:
            x = x + self.position.weight[: ids.shape[1]]
        x = self.dropout(x)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.symbol.weight)

    def loss(self, ids: Tensor) -> Tensor:
        """Mean of -log p(next character) over windows `[batch, length + 1]`."""
        return F.cross_entropy(self(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())

    def attend_with(self, method: Method | None) -> None:
        for block in self.blocks:
            block.attention.method = method

    def show(self, watch: Watch | None) -> None:
        """Let `watch` see every attention from now on; None: nobody."""
        for block in self.blocks:
            block.attention.watch = watch

    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters())


def precision(device: torch.device) -> torch.autocast:
    """bfloat16 on a GPU, float32 elsewhere. Every weight is used once in a pass, so that nothing is gained by keeping casts."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)
