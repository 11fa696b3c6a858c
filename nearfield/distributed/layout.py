"""Which tokens of a sequence are on which rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """A sequence of `length` tokens on `size` ranks, in pieces of consecutive tokens."""

    length: int
    size: int

    def pieces(self, rank: int) -> tuple[slice, ...]:
        """Where in the sequence the tokens of a rank are, in their order. A piece may be empty."""
        raise NotImplementedError

    def on(self, rank: int) -> int:
        """How many tokens a rank has."""
        return sum(piece.stop - piece.start for piece in self.pieces(rank))

    @property
    def counts(self) -> list[int]:
        """How many tokens each rank has."""
        return [self.on(rank) for rank in range(self.size)]

    @property
    def most(self) -> int:
        """As many as the rank with most tokens has."""
        return max(self.counts)

    def places(self, rank: int, device: torch.device | None = None) -> Tensor:
        """`[tokens]`: where in the sequence each token of a rank is."""
        return torch.cat([torch.arange(piece.start, piece.stop, device=device) for piece in self.pieces(rank)])

    def within(self, rank: int, ranges: Sequence[slice]) -> list[tuple[slice, slice]]:
        """Which tokens of a rank are in some ranges of the sequence: as the rank counts them, and where in the sequence."""
        found, used = [], 0
        for piece in self.pieces(rank):
            for some in ranges:
                start, stop = max(piece.start, some.start), min(piece.stop, some.stop)
                if start < stop:
                    shift = used - piece.start
                    found.append((slice(start + shift, stop + shift), slice(start, stop)))
            used += piece.stop - piece.start
        return found

    def own(self, x: Tensor, dim: int, rank: int) -> Tensor:
        """The tokens of a rank, from a tensor with all of them along `dim`."""
        return torch.cat([x.narrow(dim, piece.start, piece.stop - piece.start) for piece in self.pieces(rank)], dim)

    def joined(self, parts: Tensor | list[Tensor], dim: int) -> Tensor:
        """All tokens in order along `dim`, from those of each rank `[size, ...]`, of which what is behind its tokens is left out.

        `dim` counts the dimensions of one part.
        """
        found: list[tuple[int, Tensor]] = []
        for rank, part in enumerate(parts):
            used = 0
            for piece in self.pieces(rank):
                count = piece.stop - piece.start
                found.append((piece.start, part.narrow(dim, used, count)))
                used += count
        return torch.cat([part for _, part in sorted(found, key=lambda place: place[0])], dim)

    def padded(self, x: Tensor, dim: int) -> Tensor:
        """The tokens of a rank along `dim` with zeros behind them, as many as the rank with most tokens has."""
        missing = self.most - x.shape[dim]
        if missing == 0:
            return x
        shape = list(x.shape)
        shape[dim] = missing
        return torch.cat([x, x.new_zeros(shape)], dim)

    def dealt(self, x: Tensor, dim: int) -> Tensor:
        """`[size, ...]`: the tokens of each rank, from a tensor with all of them along `dim`; zeros behind them."""
        parts = [self.own(x, dim, rank) for rank in range(self.size)]
        shape = list(x.shape)
        shape[dim] = self.most
        found = x.new_zeros((self.size, *shape))
        for place, part in zip(found, parts, strict=True):
            place.narrow(dim, 0, part.shape[dim]).copy_(part)
        return found


@dataclass(frozen=True)
class ZigZag(Layout):
    """An early and a late piece on each rank.

    The sequence is cut into 2 R pieces of ceil(n / 2R) tokens, the last ones shorter or empty. Rank r has the pieces r and
    2R - 1 - r, one after the other. Under a causal mask, late rows see many keys and early ones few: so all ranks have as much
    to do.
    """

    @property
    def piece(self) -> int:
        """Tokens of a piece that is whole."""
        return -(-self.length // (2 * self.size))

    def pieces(self, rank: int) -> tuple[slice, slice]:
        """Where in the sequence the tokens of a rank are; the second one comes later. Either may be empty."""
        starts = (min(self.length, number * self.piece) for number in (rank, 2 * self.size - 1 - rank))
        first, second = (slice(start, min(self.length, start + self.piece)) for start in starts)
        return first, second


@dataclass(frozen=True)
class Contiguous(Layout):
    """One piece of ceil(n / R) tokens on each rank, the last ones shorter or empty: the shards of a `DTensor`.

    Under a causal mask, the last rank has about twice as much to do as the mean.
    """

    def pieces(self, rank: int) -> tuple[slice, ...]:
        piece = -(-self.length // self.size)
        start = min(self.length, rank * piece)
        return (slice(start, min(self.length, start + piece)),)
