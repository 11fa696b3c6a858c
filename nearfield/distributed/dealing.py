"""Keys grouped into cells once, by all ranks together: who groups what, and which keys have to come for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from nearfield.cells.operator import Recipe, wide
from nearfield.cells.partition import Partition, from_plain
from nearfield.cells.partition.kmeans import KERNEL_ITERATIONS, KMeans
from nearfield.cells.spans import Span, Spans
from nearfield.cells.torch.head import assign
from nearfield.kernels import backends

COST = 1.2
"""Grouping s segments together takes about s^1.2 times as long as one: 2^5 of them were measured to take 59 times as long."""


@dataclass(frozen=True)
class Share:
    """What a rank groups of one entry, which is a key-value head of a batch entry: some of its spans."""

    entry: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Dealt:
    """Which rank groups which keys.

    Whole entries go round. What is left where their number is no multiple of that of the ranks is dealt out span by span, the
    largest first, each to whoever has least to do; kernels in Triton group all spans of an entry in one go, so there only
    whole entries are dealt out.
    """

    recipe: Recipe
    closed: tuple[int, ...]
    """how many keys of each entry some row sees through cells"""
    length: int
    ranks: int

    @cached_property
    def by_kernels(self) -> bool:
        return self.recipe.engine == "triton"

    def segment(self, entry: int) -> int:
        """Keys of a segment; all that are seen, where attention is not causal."""
        return self.recipe.sizes.segment or self.closed[entry]

    def spans(self, entry: int) -> Spans:
        segment = self.segment(entry)
        return Spans(self.closed[entry] // segment if segment else 0, self.recipe.sizes.span_levels)

    @cached_property
    def shares(self) -> list[list[Share]]:
        """Those of each rank."""
        entries = len(self.closed)
        whole = entries if self.by_kernels else entries - entries % self.ranks
        found = [
            [Share(entry, tuple(self.spans(entry).all)) for entry in range(rank, whole, self.ranks)] for rank in range(self.ranks)
        ]
        # K-means takes a little longer for a key of a longer span, which has more cells.
        units = [(span.segments**COST, entry, span) for entry in range(whole, entries) for span in self.spans(entry).all]
        work = [0.0] * self.ranks
        left: list[dict[int, list[Span]]] = [{} for _ in range(self.ranks)]
        for cost, entry, span in sorted(units, key=lambda unit: (-unit[0], unit[1], unit[2].number)):
            rank = min(range(self.ranks), key=lambda one: (work[one], one))
            work[rank] += cost
            left[rank].setdefault(entry, []).append(span)
        for rank, own in enumerate(left):
            found[rank] += [Share(entry, tuple(spans)) for entry, spans in sorted(own.items())]
        return found

    def ranges(self, share: Share) -> list[tuple[int, slice]]:
        """The level and the keys of what is grouped, as its cell numbers travel."""
        if self.by_kernels:
            return [(level, slice(0, self.length)) for level in range(self.recipe.sizes.span_levels)]
        segment = self.segment(share.entry)
        return [(x.level, slice(x.first * segment, (x.first + x.segments) * segment)) for x in share.spans]

    def keys(self, share: Share) -> list[slice]:
        """Which keys have to come for it, in order."""
        if self.by_kernels:
            return [slice(0, self.length)]
        found: list[slice] = []
        for own in sorted((own for _, own in self.ranges(share)), key=lambda own: own.start):
            if found and own.start <= found[-1].stop:
                found[-1] = slice(found[-1].start, max(found[-1].stop, own.stop))
            else:
                found.append(own)
        return found

    @cached_property
    def most(self) -> int:
        """How many cell numbers the rank with most of them has."""
        return max(sum(keys.stop - keys.start for x in shares for _, keys in self.ranges(x)) for shares in self.shares)

    @cached_property
    def partition(self) -> Partition:
        return from_plain(self.recipe.partition, self.recipe.options)

    @cached_property
    def ends(self) -> range:
        """How many keys there are when each segment ends that may be closed, of any entry; none without a mask."""
        segment, window = self.recipe.sizes.segment, self.recipe.sizes.window
        return range(segment, (max(0, (self.length - 1) // segment - window)) * segment + 1, segment) if segment else range(0)

    def group(self, rank: int, keys: Tensor, visible: Tensor, queries: Tensor | None = None) -> Tensor:
        """`[most]`, int32: the cells of the keys that a rank groups, range by range; what is behind them is undefined.

        `keys` `[shares, n, dim]`, `visible` `[shares, rows]`: of the entries of its shares. Without a mask rows of an entry see
        the same keys, so that one row will do. `queries` `[entries, segments, dim]`: of all entries, how large queries are when
        each of `ends` is reached.
        """
        found = torch.full((self.most,), -1, dtype=torch.int32, device=keys.device)
        shares = self.shares[rank]
        large = [None if queries is None else queries[share.entry] for share in shares]
        cells = self._by_kernels(keys, visible, large) if self.by_kernels and shares else None
        used = 0
        for number, share in enumerate(shares):
            if cells is None:
                sizes = self.recipe.sizes._replace(group=1, share=1)
                cell_of = assign(wide(keys[number]), visible[number], sizes, self.partition, share.spans, large[number])
            else:
                cell_of = cells[number]
            for level, own in self.ranges(share):
                found[used : used + own.stop - own.start] = cell_of[level, own]
                used += own.stop - own.start
        return found

    def _by_kernels(self, keys: Tensor, visible: Tensor, queries: list[Tensor | None]) -> Tensor:
        """`[shares, span_levels, n]`"""
        from nearfield.cells.triton.cluster import kmeans
        from nearfield.cells.triton.forward import layout_for
        from nearfield.cells.triton.layout import as_read
        from nearfield.cells.triton.memory import entry_parts
        from nearfield.kernels.launch import dense

        partition, sizes = self.partition, self.recipe.sizes
        assert isinstance(partition, KMeans)  # see `cells.triton.limits`
        cells = torch.empty(len(keys), sizes.span_levels, self.length, dtype=torch.int32, device=keys.device)
        keys, visible, layout = dense(keys), as_read(visible), layout_for(keys, sizes)
        iterations = partition.iterations_or(KERNEL_ITERATIONS)
        # Which of `ends` each span ends with, found on the device: nobody waits for it.
        last = (layout.key_ranges[1::2] // max(1, layout.segment) - 1).long()
        given = [x[last].float() for x in queries if x is not None]
        with backends.device_guard(keys.device):
            for some in entry_parts(len(keys)):
                beyond = None if sizes.segment else visible[some]
                weights = torch.stack(given[some]) if given else None
                kmeans(keys[some], layout, iterations, partition.seed, beyond, cells[some], weights)
        return cells

    def together(self, found: Sequence[Tensor]) -> Tensor:
        """`[entries, span_levels, n]`: the cells of all keys, from what `group` has found on each rank."""
        shape = len(self.closed), self.recipe.sizes.span_levels, self.length
        cells = torch.full(shape, -1, dtype=torch.int32, device=found[0].device)
        for shares, numbers in zip(self.shares, found, strict=True):
            used = 0
            for share in shares:
                for level, keys in self.ranges(share):
                    cells[share.entry, level, keys] = numbers[used : used + keys.stop - keys.start]
                    used += keys.stop - keys.start
        return cells
