"""What to compare: methods at budgets, for prompts and for answers; and the choice of a budget for each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

import torch
from torch import Tensor

from nearfield.auto import Auto
from nearfield.cells.method import Cells
from nearfield.cells.sizes import CacheSizes
from nearfield.checks import check_positive
from nearfield.chunks import row_blocks
from nearfield.problem import Call, Method, Problem
from nearfield.results import Outcome


@dataclass(frozen=True)
class PastTopK:
    """Causal attention to a row's own segment, the first `sinks` keys, and the `k` heaviest keys of its past.

    Segment and sinks are those of `Cells`, so that the two differ only in how they treat the past. All logits are computed: this
    is what a perfect index would give, at the cost of exact attention. It is for comparisons only.
    """

    k: int
    segment: int = 1024
    sinks: int = 16

    any_mask = False
    any_logits = False
    any_window = False
    gives_lse = False
    drops_pairs = False

    def __post_init__(self) -> None:
        check_positive("k", self.k)
        check_positive("segment", self.segment)
        check_positive("sinks", self.sinks, least=0)

    def run(self, problem: Problem, call: Call) -> Outcome:
        if not problem.is_causal:
            raise ValueError("PastTopK needs is_causal=True: without it there is no past")
        rows = problem.rows
        output = rows.values.new_empty(*rows.visible.shape, rows.values.shape[2])
        lse = rows.values.new_empty(rows.visible.shape)
        read = 0
        for block in row_blocks(rows.visible.shape, 16 * rows.length):
            part = rows.at(block)
            # A block may cross the end of a head, so only a maximum over its rows says which keys they see.
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
        by_head = problem.by_head(output), problem.by_head(lse)
        return Outcome(*by_head, None, {"keys_per_query": read / max(1, rows.visible.numel()), "k": self.k})

    def is_async(self, problem: Problem, backend: str) -> bool:
        return False

    def _closed(self, visible: Tensor) -> Tensor:
        """How many keys come before the segment of each row."""
        return (visible - 1).clamp(min=0) // self.segment * self.segment


SEGMENT, SINKS, CELL_SIZE = 1024, 16, 16

BUDGETS = (0.04, 0.07, 0.10)

LADDER = (0.01, 0.02, 0.04, 0.07, 0.10, 0.15, 0.25)
"""Budgets to choose from for each layer."""

KINDS = ("cells", "topk", "auto")

FEWEST_TOKENS = 256


@dataclass(frozen=True)
class Setting:
    """A method at a budget, or methods by layer."""

    kind: str
    method: Method | Mapping[int | str, Method]
    budget: float | None = None
    """the share of the past keys to read; None: the method decides"""

    @property
    def label(self) -> str:
        return self.kind if self.budget is None else f"{self.kind}, {percent(self.budget)}"


def percent(share: float) -> str:
    """`7%`, `0.4%`."""
    return f"{100 * share:.3g}%"


@dataclass(frozen=True)
class Geometry:
    """The sizes of a comparison: what every row reads exactly, and how many keys a cell has.

    A row reads its own segment and the first keys (sinks) exactly. Its *past* is everything before its segment, sinks apart. The
    last rows of a text have a long past and the first ones little, but `probes` is the same for all rows: `share` says which part
    of all pasts together they read.
    """

    tokens: int
    segment: int = SEGMENT
    sinks: int = SINKS
    cell_size: int = CELL_SIZE

    name: ClassVar[str] = "eval"
    """of files of results"""
    remedy: ClassVar[str] = "A larger --tolerance or --cell-size 8 may help."
    """where nothing but exact attention is within a tolerance"""
    budget: ClassVar[str] = "budget, of the past"

    def __post_init__(self) -> None:
        if self.tokens < 2 * self.segment:
            raise ValueError(
                f"{self.tokens:,} tokens leave no past beyond a segment of {self.segment:,}; give a longer text, or a segment of "
                f"at most {self.tokens // 2:,}"
            )
        if self.sinks >= self.segment:
            raise ValueError(f"sinks must be fewer than the {self.segment:,} keys of a segment, got {self.sinks:,}")

    @property
    def sizes(self) -> dict[str, float]:
        """By their names in files."""
        return {"tokens": self.tokens, "segment": self.segment, "sinks": self.sinks, "past_keys_mean": self.past}

    @property
    def legend(self) -> str:
        """What a table of results needs to be understood."""
        return (
            f"{self.tokens:,} tokens. A row reads its own segment of {self.segment:,} keys and the first {self.sinks} exactly; a "
            f"budget is the share of its past, {self.past:,.0f} keys on average, that it reads besides. topk reads as many keys "
            "as cells, the heaviest ones, and drops the rest (a perfect index). Excess: of perplexity over that of exact "
            "attention, ± its standard error. Error: relative error of an output row, mean over rows."
        )

    def _pasts(self) -> list[tuple[int, int]]:
        """(rows, keys of their past) for each segment that has a past."""
        starts = range(self.segment, self.tokens, self.segment)
        return [(min(self.segment, self.tokens - start), start - self.sinks) for start in starts]

    @property
    def past(self) -> float:
        """Keys of the past, mean over the rows that have one."""
        pasts = self._pasts()
        return sum(rows * past for rows, past in pasts) / sum(rows for rows, _ in pasts)

    def share(self, keys: float) -> float:
        """The share of all past keys that is read if each row reads up to `keys` of its own past."""
        pasts = self._pasts()
        return sum(rows * min(keys, past) for rows, past in pasts) / sum(rows * past for rows, past in pasts)

    def probes(self, budget: float) -> int:
        """How many cells to open, at least one, to read about `budget` of the past."""
        if not 0.0 < budget <= 1.0:
            raise ValueError(f"a budget must be more than 0% and at most 100%, got {percent(budget)}")
        most = -(-self._pasts()[-1][1] // self.cell_size)
        return min(range(1, most + 1), key=lambda probes: abs(self.share(probes * self.cell_size) - budget))

    def cells(self, budget: float) -> Setting:
        probes = self.probes(budget)
        return Setting("cells", Cells(self.cell_size, probes, segment=self.segment, sinks=self.sinks), budget)

    def topk(self, budget: float) -> Setting:
        """As many past keys as `cells` reads at this budget."""
        keys = self.probes(budget) * self.cell_size
        return Setting("topk", PastTopK(keys, self.segment, self.sinks), budget)

    def settings(self, kinds: Sequence[str], budgets: Sequence[float]) -> list[Setting]:
        """All kinds at all budgets; `auto` (what `hf.register()` does) has none."""
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown:
            raise ValueError(f"methods must be among {', '.join(KINDS)}; got {', '.join(unknown)}")
        found = []
        for kind in dict.fromkeys(kinds):
            if kind == "auto":
                found.append(Setting("auto", Auto()))
            else:
                found += [self.cells(budget) if kind == "cells" else self.topk(budget) for budget in sorted(set(budgets))]
        return found


WRITTEN, MOST_WRITTEN = 512, 1000
"""Tokens of an answer. With more of them than that, a cache would close a segment while it is measured."""

FEWEST_GROUPED = CacheSizes.of(None, None, None, SINKS, group_from=0).next_close(0)
"""Keys of a prompt: with fewer of them, a cache has no cells."""


@dataclass(frozen=True)
class AnswerGeometry:
    """The sizes of a comparison of answers: a prompt that is read exactly, and `written` tokens, each a step that reads a cache.

    A budget is the share of the prompt's keys that are in the cells which a step opens.
    """

    tokens: int
    written: int = WRITTEN

    name: ClassVar[str] = "cache"
    remedy: ClassVar[str] = "A larger --tolerance, or larger budgets on the --ladder, may help."
    budget: ClassVar[str] = "budget, of the prompt's keys"

    def __post_init__(self) -> None:
        if not 1 <= self.written <= MOST_WRITTEN:
            raise ValueError(f"written must be 1 to {MOST_WRITTEN:,} tokens, got {self.written:,}")
        if self.prompt < FEWEST_GROUPED:
            raise ValueError(
                f"{self.tokens:,} tokens, {self.written:,} of them an answer, leave a prompt of {max(0, self.prompt):,}, but a "
                f"cache has cells from {FEWEST_GROUPED:,} on; give more tokens, or fewer of them as an answer"
            )

    @property
    def prompt(self) -> int:
        """Keys of the prompt. The step that reads its last token is the first of the answer."""
        return self.tokens - self.written - 1

    @property
    def all_keys(self) -> float:
        """Keys that a step sees, mean over the answer."""
        return self.prompt + (self.written + 1) / 2

    @property
    def sizes(self) -> dict[str, float]:
        return {"tokens": self.tokens, "written": self.written}

    @property
    def legend(self) -> str:
        return (
            f"The last {self.written:,} of {self.tokens:,} tokens, as steps of an answer; all before are read exactly. A budget "
            "is the share of the prompt's keys that are in the cells which a step opens; `default` is `CellCache()`, and small "
            "cells have half as many keys. Keys: those that a step reads; the moments of a cell count as one and a half. Excess: "
            "of perplexity over that of exact attention, ± its standard error. Error: relative error of a step. Many steps are "
            "served at a time here, so their time says little about that of one."
        )

    def settings(self, budgets: Sequence[float]) -> list[Setting]:
        """Cells of the size that a cache gives them, and of half that size, at all budgets; each method once."""
        found: dict[Cells, Setting] = {}
        for kind, size in (("cells", None), ("small cells", half_cell_size(self.prompt))):
            for budget in sorted(set(budgets)):
                if not 0.0 < budget <= 1.0:
                    raise ValueError(f"a budget must be more than 0% and at most 100%, got {percent(budget)}")
                method = Cells(size, max(1, round(budget * _cells_of(self.prompt, size))))
                found.setdefault(method, Setting(kind, method, budget))
        return list(found.values())


def half_cell_size(keys: int) -> int:
    """Half as many keys as a cell of a cache has after a prompt of so many keys."""
    return max(4, round(keys / _cells_of(keys) / 2))


def _cells_of(keys: int, cell_size: int | None = None) -> int:
    """How many cells a cache makes of a prompt."""
    return CacheSizes.of(None, cell_size, None, SINKS).cells(0, keys)


def usual_segment(tokens: int) -> int:
    """1,024; for short texts an eighth, rounded down to a power of two, so that there is a past at all."""
    if tokens < FEWEST_TOKENS:
        raise ValueError(f"a text must have at least {FEWEST_TOKENS} tokens, got {tokens}; give a longer one")
    return min(SEGMENT, 1 << (tokens // 8).bit_length() - 1)


TRIALS = 7
"""The most mixtures whose perplexity is measured."""


@dataclass(frozen=True)
class Mixture:
    """A rung of the ladder for each layer."""

    rungs: tuple[int, ...]
    """for each layer, an index into the ladder; -1: exact"""
    keys: float
    """read per query, mean over the layers that a method serves"""
    predicted: float
    """excess of the loss, up to a factor common to all mixtures"""


@dataclass(frozen=True)
class Trial:
    """A mixture, and its measured effect."""

    mixture: Mixture
    excess: float
    """of perplexity, in the worst text"""


@dataclass(frozen=True)
class Ladder:
    """The cost and the effect of each rung in each layer.

    The effect of a rung is the squared error that it makes in a layer, times how much the loss suffers from errors there. Effects
    of layers are assumed to add up, and only rungs on the lower convex hull of (keys, effect) are used. So there is one best
    order in which to make layers cheaper: by the effect per saved key.
    """

    effects: Tensor
    """`[rungs, layers]`; NaN for layers that no method serves"""
    keys: Tensor
    """`[rungs, layers]`, read per query; NaN likewise"""
    all_keys: float
    """keys that exact attention reads per query"""

    def mixture(self, rungs: Sequence[int]) -> Mixture:
        """The cost and the predicted effect of these rungs."""
        served = [layer for layer in range(self.keys.shape[1]) if bool(self.keys[:, layer].isfinite().any())]
        points = [self._point(layer, rungs[layer]) for layer in served]
        return Mixture(tuple(rungs), sum(keys for keys, _ in points) / max(1, len(served)), sum(effect for _, effect in points))

    def mixtures(self) -> list[Mixture]:
        """From exact attention in all layers to the cheapest rung in all layers, one step in one layer at a time."""
        layers = self.keys.shape[1]
        moves = []
        for layer in range(layers):
            hull = self._hull(layer)
            for place, (before, after) in enumerate(pairwise(hull)):
                (keys, effect), (fewer, more) = self._point(layer, before), self._point(layer, after)
                moves.append(((more - effect) / (keys - fewer), place, layer, after))
        rungs = [-1] * layers
        found = [self.mixture(rungs)]
        for _, _, layer, rung in sorted(moves):
            rungs[layer] = rung
            found.append(self.mixture(rungs))
        return found

    def _point(self, layer: int, rung: int) -> tuple[float, float]:
        return (self.all_keys, 0.0) if rung < 0 else (float(self.keys[rung, layer]), float(self.effects[rung, layer]))

    def _hull(self, layer: int) -> list[int]:
        """Rungs from exact to the cheapest; each step has a larger effect per saved key than the one before."""
        usable = [rung for rung in range(len(self.keys)) if self._point(layer, rung)[0] < self.all_keys]
        hull = [-1]
        for rung in sorted(usable, key=lambda rung: self._point(layer, rung), reverse=True):
            while len(hull) > 1 and self._slope(layer, hull[-2], hull[-1]) >= self._slope(layer, hull[-2], rung):
                hull.pop()
            hull.append(rung)
        return hull

    def _slope(self, layer: int, one: int, other: int) -> float:
        (keys, effect), (fewer, more) = self._point(layer, one), self._point(layer, other)
        return (more - effect) / (keys - fewer) if keys > fewer else float("inf")


def choose_budgets(
    ladder: Ladder,
    tolerance: float,
    verify: Callable[[tuple[int, ...]], float],
    known: Sequence[Trial] = (),
    trials: int = TRIALS,
) -> tuple[Trial, list[Trial]]:
    """The cheapest mixture whose measured excess is within `tolerance`, and all mixtures that were tried.

    Predictions put the mixtures in an order; measurements decide how far to go. Between a mixture that passed and one that
    failed, the next to try is where the predictions, scaled to the measurements so far, meet the tolerance. Exact attention in
    all layers always passes.

    Args:
        verify: measures the excess of a mixture, in the worst text.
        known: mixtures that have been measured already, such as one rung for all layers.
    """
    path = ladder.mixtures()
    done = [Trial(path[0], 0.0), *known]
    good, bad = 0, len(path)
    for trial in range(trials):
        if bad - good <= 1:
            break
        guess = _guess(path, done, tolerance)
        # Every other time halve what is left, so that poor predictions cost only a few passes.
        middle = min(max(guess, good + 1), bad - 1) if trial % 2 == 0 else (good + bad) // 2
        done.append(Trial(path[middle], verify(path[middle].rungs)))
        good, bad = (middle, bad) if done[-1].excess <= tolerance else (good, middle)
    return min((trial for trial in done if trial.excess <= tolerance), key=lambda trial: trial.mixture.keys), done


def _guess(path: Sequence[Mixture], done: Sequence[Trial], tolerance: float) -> int:
    """The cheapest mixture whose scaled prediction is within tolerance. The trial closest to tolerance sets the scale."""
    usable = [trial for trial in done if trial.excess > 0.0 and trial.mixture.predicted > 0.0]
    closest = min(usable, key=lambda trial: abs(trial.excess - tolerance), default=None)
    scale = 1.0 if closest is None else closest.excess / closest.mixture.predicted
    return max(place for place, mixture in enumerate(path) if place == 0 or scale * mixture.predicted <= tolerance)
