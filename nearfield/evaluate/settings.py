"""What is compared: methods at budgets, a budget being the share of the past that a row reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nearfield.evaluate.peers import PastTopK
from nearfield.methods.auto import Auto
from nearfield.methods.base import Method
from nearfield.methods.cells import Cells

SEGMENT, SINKS, CELL_SIZE = 1024, 16, 16
BUDGETS = (0.04, 0.07, 0.10)
LADDER = (0.01, 0.02, 0.04, 0.07, 0.10, 0.15, 0.25)
"""Budgets that a layer may get."""
KINDS = ("cells", "topk", "auto")
FEWEST_TOKENS = 256


@dataclass(frozen=True)
class Setting:
    """A method at a budget, or methods by layer."""

    kind: str
    method: Method | Mapping[int | str, Method]
    budget: float | None = None
    """the share of the past keys that was asked for; None: the method decides"""

    @property
    def label(self) -> str:
        return self.kind if self.budget is None else f"{self.kind}, {percent(self.budget)}"


def percent(share: float) -> str:
    """`7%`, `0.4%`."""
    return f"{100 * share:.3g}%"


@dataclass(frozen=True)
class Geometry:
    """What every row reads exactly, and in how small pieces the rest is read.

    A row reads its own segment and the first keys (sinks) one by one; its *past* is all that comes before its segment, sinks
    apart. The last rows of a text have a long past, the first ones little: of the past of all rows together, fixed `probes` read
    the share that `share` tells.
    """

    tokens: int
    segment: int = SEGMENT
    sinks: int = SINKS
    cell_size: int = CELL_SIZE

    def __post_init__(self) -> None:
        if self.tokens < 2 * self.segment:
            raise ValueError(
                f"{self.tokens:,} tokens have no past beyond a segment of {self.segment:,}; give a longer text, or a segment of "
                f"at most {self.tokens // 2:,}"
            )
        if self.sinks >= self.segment:
            raise ValueError(f"sinks must be fewer than the {self.segment:,} keys of a segment, got {self.sinks:,}")

    def _pasts(self) -> list[tuple[int, int]]:
        """(rows, keys of their past) of each segment that has one."""
        starts = range(self.segment, self.tokens, self.segment)
        return [(min(self.segment, self.tokens - start), start - self.sinks) for start in starts]

    @property
    def past(self) -> float:
        """Keys of the past, mean over all rows that have one."""
        pasts = self._pasts()
        return sum(rows * past for rows, past in pasts) / sum(rows for rows, _ in pasts)

    def share(self, keys: float) -> float:
        """The share of all past keys that rows read when each reads up to `keys` of its own past."""
        pasts = self._pasts()
        return sum(rows * min(keys, past) for rows, past in pasts) / sum(rows * past for rows, past in pasts)

    def probes(self, budget: float) -> int:
        """Cells to open, at least one, so that rows read about `budget` of the past."""
        if not 0.0 < budget <= 1.0:
            raise ValueError(f"a budget must be more than 0% and at most 100%, got {percent(budget)}")
        most = -(-self._pasts()[-1][1] // self.cell_size)
        return min(range(1, most + 1), key=lambda probes: abs(self.share(probes * self.cell_size) - budget))

    def cells(self, budget: float) -> Setting:
        probes = self.probes(budget)
        return Setting("cells", Cells(self.cell_size, probes, segment=self.segment, sinks=self.sinks), budget)

    def topk(self, budget: float) -> Setting:
        """As many past keys as `cells` of the same budget."""
        keys = self.probes(budget) * self.cell_size
        return Setting("topk", PastTopK(keys, self.segment, self.sinks), budget)

    def settings(self, kinds: Sequence[str], budgets: Sequence[float]) -> list[Setting]:
        """All of the kinds at all of the budgets; `auto` (what `hf.register()` does) has none."""
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"methods must be of {', '.join(KINDS)}; got {', '.join(unknown)}")
        found = []
        for kind in dict.fromkeys(kinds):
            if kind == "auto":
                found.append(Setting("auto", Auto()))
            else:
                found += [self.cells(budget) if kind == "cells" else self.topk(budget) for budget in sorted(set(budgets))]
        return found


def usual_segment(tokens: int) -> int:
    """1,024; of short texts an eighth, rounded down to a power of two, so that there is a past at all."""
    if tokens < FEWEST_TOKENS:
        raise ValueError(f"a text of at least {FEWEST_TOKENS} tokens is needed, got {tokens}; give a longer one")
    return min(SEGMENT, 1 << (tokens // 8).bit_length() - 1)
