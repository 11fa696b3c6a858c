"""The moments of cells, each summed up by one rank and then gathered: who sums up which, and what goes over."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from nearfield.cells.moments import CellTable, TableGradient, sum_up_, without_moments
from nearfield.distributed.group import Ranks


class Part(NamedTuple):
    """Consecutive cells of a table."""

    cells: slice
    spans: slice
    """in which they are; the first and the last one may have cells in other parts too"""

    def of(self, x: CellTable | TableGradient) -> list[Tensor]:
        """What belongs to these cells, as views."""
        return [x.centroid[self.cells], x.variance[self.cells], x.value[self.cells], x.cross[self.spans]]


def parts_of(table: CellTable, count: int) -> list[Part]:
    """So many parts with about as many members each: that is how long it takes to sum them up."""
    wanted = torch.arange(1, count, device=table.starts.device) * len(table.order) // count
    inner = torch.searchsorted(table.starts, wanted).clamp(max=table.cells).tolist()
    found = []
    for first, last in pairwise([0, *inner, table.cells]):
        spans = slice(bisect_right(table.spans, first) - 1, bisect_left(table.spans, last)) if first < last else slice(0, 0)
        found.append(Part(slice(first, last), spans))
    return found


@dataclass(frozen=True)
class Tables:
    """The tables of some entries, alike on all ranks, and the part of each rank in each of them."""

    ranks: Ranks
    every: list[CellTable]
    parts: list[list[Part]]
    """`[entries][ranks]`"""

    @staticmethod
    def made(
        ranks: Ranks, keys: Sequence[Tensor], values: Sequence[Tensor], cells: Iterable[Tensor], edges: Sequence[list[int]]
    ) -> Tables:
        """As `tabulate` makes them of the keys and values of all ranks `[n, dim]`, which have to be here already."""
        every = [without_moments(*entry) for entry in zip(keys, values, cells, edges, strict=True)]
        found = Tables(ranks, every, [parts_of(table, ranks.size) for table in every])
        for table, parts, key, value in zip(every, found.parts, keys, values, strict=True):
            sum_up_(table, key, value, parts[ranks.rank].cells)
        most = found._most()
        if most == 0:
            return found
        gathered = ranks.gather("moments", found._flat(every, ranks.rank, most))
        found._clear(every, ranks.rank)  # all ranks add up in the same order
        for rank, numbers in enumerate(gathered):
            found._put(every, rank, numbers)
        return found

    def summed_(self, grads: Sequence[TableGradient]) -> None:
        """Put what all ranks together have found in the place of what this one has found of its own parts."""
        most = self._most()
        if most == 0:
            return
        dealt = torch.stack([self._flat(grads, rank, most) for rank in range(self.ranks.size)])
        found = self.ranks.start_sum("gradients of moments", dealt).wait()
        self._clear(grads, self.ranks.rank)
        self._put(grads, self.ranks.rank, found)

    def _most(self) -> int:
        """How many numbers the rank with the largest parts has."""
        own = [
            [sum(x.numel() for x in part.of(table)) for part in parts]
            for table, parts in zip(self.every, self.parts, strict=True)
        ]
        return max(map(sum, zip(*own, strict=True)), default=0)

    def _flat(self, tables: Sequence[CellTable | TableGradient], rank: int, most: int) -> Tensor:
        """`[most]`: the parts of a rank one after the other, and zeros."""
        found = tables[0].centroid.new_zeros(most)
        numbers = torch.cat(
            [x.reshape(-1) for table, parts in zip(tables, self.parts, strict=True) for x in parts[rank].of(table)]
        )
        found[: len(numbers)] = numbers
        return found

    def _put(self, tables: Sequence[CellTable | TableGradient], rank: int, numbers: Tensor) -> None:
        """The other way round, into zeros: what ranks have a part in together is summed up."""
        places = self._of(tables, rank)
        sizes = [place.numel() for place in places]
        for place, own in zip(places, numbers[: sum(sizes)].split(sizes), strict=True):
            place.add_(own.view_as(place))

    def _clear(self, tables: Sequence[CellTable | TableGradient], rank: int) -> None:
        for place in self._of(tables, rank):
            place.zero_()

    def _of(self, tables: Sequence[CellTable | TableGradient], rank: int) -> list[Tensor]:
        """The parts of a rank, as views."""
        return [x for table, parts in zip(tables, self.parts, strict=True) for x in parts[rank].of(table)]
