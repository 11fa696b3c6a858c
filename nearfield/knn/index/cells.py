"""The cells of `Cells` as an index: spans of k-means cells for causal rows too, without a table of all scores."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nearfield.cells.far_field import moments, open_best
from nearfield.cells.moments import CellTable, tabulate
from nearfield.cells.partition.kmeans import KMeans, nearest
from nearfield.cells.sizes import CellSizes, default_cell_size, default_segment, span_levels
from nearfield.cells.spans import Spans, closed_keys
from nearfield.cells.torch.head import assign
from nearfield.cells.triton.limits import unsupported
from nearfield.checks import MOST, check_generator_seed, check_positive
from nearfield.chunks import row_chunks
from nearfield.kernels import backends
from nearfield.kernels.backends import full_precision
from nearfield.knn.index.base import PADDING, CausalOffset, Found
from nearfield.knn.index.candidates import best_of_lists
from nearfield.knn.index.file import Learned
from nearfield.knn.index.prefixes import PrefixBuilt, restored

if TYPE_CHECKING:
    from nearfield.knn.index.cells_triton import KernelCells

OVER, LEAST_OVER, SHORT = 8, 4, 32_768
"""A row opens cells with `OVER` times as many keys as it wants. Without a mask this falls with the fifth root of the length, from
`SHORT` keys on, to `LEAST_OVER`: an exchange of recall for time. A causal row sees several spans, each with cells of its own."""

LEAST_PROBES = 8

SCORES_PER_PASS = 1 << 21
"""Entries of one block of the (row, cell) score table in torch."""

MASKS = {False: "all", True: "causal"}
"""The rows for which kernels make cells, in a file: those that see all keys, and others."""


@dataclass(frozen=True)
class CellIndex:
    """The cells of `nearfield.Cells` as an index: for every row the best k keys of the cells with the largest scores.

    A causal row sees the past as spans of closed segments, each with k-means cells made of its own keys alone, and the keys of
    its own segment one by one. So nothing it finds depends on a later key, and all rows share what is built: a search costs
    about as much with a mask as without. A row scores its cells as `Cells` does (q.mu_c + 3 sqrt(u_c)), then every key of those
    it opens. Where the Triton kernels run, (row, cell) pairs are scored in tiles, and no table of all scores is made. There a
    forward pass of `TopK` with this index reads half precision as it is and keeps nothing: docs/gpu.md has its time and memory.

    It knows no bound on the keys that it leaves out, so `cutoffs` is None. With keys added or removed, rows that see all keys it
    has learned from search cells that take keys in, as those of `KMeansIndex` do (`nearfield.knn.index.prefixes`), in torch on
    any device. Spans for rows that see fewer are made anew, when such rows come.

    Args:
        cell_size: keys per cell; None: by the length, as `Cells`.
        probes: cells that a row opens; None: as many as hold eight times k keys, at least 8 (without a mask fewer from
            32,768 keys on: four times k at a million).
        segment: causal: keys per segment; None: by the length, as `Cells`.
        iterations: of k-means; None: those of `Cells`.
        seed: of k-means. The same seed gives the same index; the global generator is not used.

    Cost, with c keys per cell: build O(length^2 / c dim) for k-means, times log2(length / segment) with a mask; search
    O(rows (length / c + probes c + segment) dim): length^1.5 with the defaults. Memory O(length dim) and a block of rows.

    >>> keys = torch.randn(1, 1000, 16, generator=torch.Generator().manual_seed(0))
    >>> scores, ids = CellIndex().build(keys).search(keys[:, :5], k=3)
    >>> ids[0, :, 0].tolist()
    [0, 1, 2, 3, 4]
    """

    cell_size: int | None = None
    probes: int | None = None
    segment: int | None = None
    iterations: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive("cell_size", self.cell_size, optional=True)
        check_positive("probes", self.probes, optional=True)
        check_positive("segment", self.segment, optional=True)
        check_positive("iterations", self.iterations, optional=True, least=0)
        check_generator_seed("seed", self.seed)

    def build(self, keys: Tensor) -> BuiltCells:
        with full_precision(keys):
            return BuiltCells(keys, self)

    def _restored(self, keys: Tensor, learned: Learned) -> BuiltCells:
        def made(some: Tensor, part: Learned) -> BuiltCells:
            return BuiltCells(some, self, part)

        built = restored(keys, learned, made, made)
        assert isinstance(built, BuiltCells)
        built._restore_spans(learned)
        return built

    def sizes(self, length: int, k: int, causal: bool, on_gpu: bool) -> CellSizes:
        """The sizes of a search for k of `length` keys."""
        size = min(self.cell_size or default_cell_size(length, causal, on_gpu), MOST)
        segment = min(self.segment or default_segment(length, on_gpu), MOST) if causal else 0
        over = OVER if causal or length <= SHORT else max(LEAST_OVER, OVER * (SHORT / length) ** 0.2)
        probes = min(self.probes or max(LEAST_PROBES, math.ceil(over * k / size)), MOST)
        levels = span_levels(length, segment) if causal else 1
        return CellSizes(
            group=1, segment=segment, window=0, sinks=0, cell_size=size, probes=probes, samples=0, span_levels=levels
        )


def unsupported_search(length: int, sizes: CellSizes, *tensors: Tensor) -> str | None:
    """What the kernels cannot serve of a search of `length` keys with these sizes; None: they serve it."""
    segments = length // sizes.segment if sizes.segment else 1
    return unsupported(*tensors, segments=segments, probes=sizes.probes, cells=length // sizes.cell_size)


class BuiltCells(PrefixBuilt):
    """What is built for rows that see all keys, and for others, when it is first asked for."""

    advice = "Use a smaller k or fewer probes."
    kind = CellIndex

    def __init__(self, keys: Tensor, recipe: CellIndex, learned: Learned | None = None) -> None:
        super().__init__(keys)
        self.recipe = recipe
        self._whole: list[_EntryCells] = []
        """by batch entry, cells for rows that see everything; empty: not made yet. Shared by all copies with the same base."""
        self._spans: list[_EntryCells] = []
        """likewise for causal rows, of all keys"""
        self._by_triton: dict[bool, KernelCells] = {}
        self._cell_of: dict[bool, Tensor] = {}
        """the cells of keys as the kernels have made them, `[batch, levels, length]`"""
        self._has_changed = False
        """whether keys were added or removed: kernels can take none in"""
        if learned is not None:
            self._restore(learned)

    def _state(self) -> dict[str, Tensor]:
        kernels = {f"kernels.{MASKS[causal]}": cell_of for causal, cell_of in self._cell_of.items()}
        return super()._state() | kernels | {f"spans.{name}": x for name, x in _tables(self._spans).items()}

    def _lessons(self) -> dict[str, Tensor]:
        found = {"changed": torch.tensor(self._has_changed, device="cpu")} | _tables(self._whole)
        if self._whole:
            found["made"] = torch.tensor([self._whole[0].cell_size, self._whole[0].made_of], device="cpu")
        return found

    def _restore(self, learned: Learned) -> None:
        self._has_changed = bool(learned.take("changed", (), torch.bool))
        if "made" not in learned.names():
            return
        cell_size, made_of = learned.take("made", (2,), torch.int64).tolist()
        learned.check("made", cell_size > 0 and made_of > 0)
        sizes = replace(self.recipe, cell_size=cell_size).sizes(made_of, 1, False, False)
        self._whole = [_EntryCells.restored(*x, sizes, made_of) for x in self._keys_and_parts(learned)]

    def _restore_spans(self, learned: Learned) -> None:
        """And what kernels have made."""
        batch, length, _ = self.keys.shape
        part = learned.part("spans")
        if part.names():
            sizes = self.recipe.sizes(length, 1, True, False)
            self._spans = [_EntryCells.restored(*x, sizes, length) for x in self._keys_and_parts(part)]
        part = learned.part("kernels")
        for causal, name in MASKS.items():
            if name in part.names():
                sizes = self.recipe.sizes(length, 1, causal, True)
                cell_of = part.take(name, (batch, sizes.span_levels, length), torch.int32)
                cells = _spans(length, sizes)[1][-1]
                part.check(name, bool(((cell_of >= -1) & (cell_of < cells)).all()))
                self._cell_of[causal] = cell_of

    def _keys_and_parts(self, learned: Learned) -> list[tuple[Tensor, Learned]]:
        return [(keys, learned.part(str(entry))) for entry, keys in enumerate(self.keys)]

    def _anew(self, keys: Tensor) -> BuiltCells:
        return BuiltCells(keys, self.recipe)

    def _over(self, keys: Tensor) -> BuiltCells:
        other = super()._over(keys)
        assert isinstance(other, BuiltCells)
        other._spans, other._by_triton, other._cell_of, other._has_changed = [], {}, {}, True
        return other

    def _take_in(self, start: int) -> None:
        self._whole = [cells.grown(keys, start) for cells, keys in self._cells_and_keys()]

    def _leave_out(self, kept: Tensor) -> None:
        self._whole = [cells.kept(keys, kept) for cells, keys in self._cells_and_keys()]
        if self._whole and self._whole[0].cell_size > self.recipe.sizes(self.length, 1, False, False).cell_size:
            # So few keys have smaller cells, which find more: these are made when asked for.
            self._whole = []

    def _cells_and_keys(self) -> list[tuple[_EntryCells, Tensor]]:
        """By batch entry; none where no cells were made yet: they will be made of all keys."""
        return list(zip(self._whole, self.keys, strict=True)) if self._whole else []

    def search(self, queries: Tensor, k: int, causal_offset: CausalOffset = None) -> tuple[Tensor, Tensor]:
        # The kernels leave them in the order of their cells.
        scores, ids, _ = self.find(queries, k, causal_offset)
        scores, place = scores.sort(stable=True, descending=True)
        return scores, ids.gather(-1, place)

    def find(self, queries: Tensor, k: int, causal_offset: CausalOffset = None) -> Found:
        """See `BuiltIndex`; in any order."""
        self._check(queries)
        check_positive("k", k)
        visible = self.visible(queries, causal_offset)
        with full_precision(queries):
            return self._search(queries.detach(), k, visible)

    def _search(self, queries: Tensor, k: int, visible: Tensor) -> Found:
        if not (queries.shape[0] and queries.shape[1] and self.length):
            scores = torch.full((*queries.shape[:2], k), -torch.inf, dtype=self.keys.dtype, device=queries.device)
            return Found(scores, torch.full_like(scores, PADDING, dtype=torch.int64), visible)
        causal = bool((visible < (self._base or self).length).any())
        if self._base is not None and not causal:
            # Those of the base by its cells, and the others one by one.
            return super()._search(queries.to(self.keys.dtype), k, visible)
        near = min(k, self.length)
        if (causal or not self._has_changed) and backends.runs_triton(queries.device):
            sizes = self.recipe.sizes(self.length, near, causal, True)
            if self._unsupported(sizes) is None:
                return self._by_kernels(queries, k, visible, sizes)
        found = zip(*self._in_torch(queries.to(self.keys.dtype), k, visible, causal), strict=True)
        return Found(*(torch.stack(x) for x in found))

    def _search_all(self, queries: Tensor, k: int) -> Found:
        return self._search(queries, k, self.visible(queries, None))

    def _in_torch(self, queries: Tensor, k: int, visible: Tensor, causal: bool) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        made = self._spans if causal else self._whole
        near = min(k, self.length)
        if not made:
            sizes = self.recipe.sizes(self.length, near, causal, False)
            made.extend([_EntryCells.of(keys, sizes, self.recipe) for keys in self.keys])
        # The number of cells stays. With keys added they are larger, and with keys removed smaller: then more of them are opened.
        sizes = replace(self.recipe, cell_size=made[0].cell_size).sizes(self.length, near, causal, False)
        sizes = sizes._replace(probes=math.ceil(sizes.probes * max(1.0, made[0].made_of / self.length)))
        for cells, keys, rows, seen in zip(made, self.keys, queries, visible, strict=True):
            yield cells.find(keys, rows, k, seen, sizes)

    def _unsupported(self, sizes: CellSizes) -> str | None:
        """What the kernels cannot serve."""
        return unsupported_search(self.length, sizes, self._source)

    def _by_kernels(self, queries: Tensor, k: int, visible: Tensor, sizes: CellSizes) -> Found:
        from nearfield.knn.index.cells_triton import KernelCells

        # How cells are made does not depend on how many are opened.
        causal = sizes.segment > 0
        if causal not in self._by_triton:
            # The kernels read half precision as it is.
            keys = self._source.flatten(0, -3)
            known = causal in self._cell_of
            shape = (len(keys), sizes.span_levels, self.length)
            cell_of = self._cell_of[causal] if known else torch.empty(shape, dtype=torch.int32, device=keys.device)
            self._by_triton[causal] = KernelCells(keys, sizes, self.recipe.iterations, self.recipe.seed, cell_of, known)
            self._cell_of[causal] = cell_of
        return self._by_triton[causal].find(queries, k, visible, sizes)


@dataclass(frozen=True)
class _EntryCells:
    """The cells of the keys of one batch entry, in torch."""

    cell_size: int
    """keys per cell, when these were made"""
    made_of: int
    """how many keys there were then"""
    table: CellTable
    spans: Spans
    order: Tensor
    """keys cell by cell, and behind them all keys in their order, for those of a row's own segment"""
    sizes: Tensor
    """`[cells + 1]`: how many keys; the last, which is also number -1, has none"""

    @staticmethod
    def of(keys: Tensor, sizes: CellSizes, recipe: CellIndex) -> _EntryCells:
        length = len(keys)
        everything = torch.full((1,), length, device=keys.device)
        cell_of = assign(keys, everything, sizes, KMeans(recipe.iterations, recipe.seed))
        spans, edges = _spans(length, sizes)
        if not sizes.segment and len(edges) > 1:
            edges[-1] = max(edges[-1], int(cell_of.max()) + 1)
        return _EntryCells._listed(keys, cell_of, edges, spans, sizes.cell_size, length)

    @staticmethod
    def _listed(keys: Tensor, cell_of: Tensor, edges: list[int], spans: Spans, cell_size: int, made_of: int) -> _EntryCells:
        # No values are needed: a single column of zeros stands for them.
        table = tabulate(keys, keys.new_zeros(len(keys), 1), cell_of, edges)
        return _EntryCells._with(keys, table, spans, cell_size, made_of)

    @staticmethod
    def _with(keys: Tensor, table: CellTable, spans: Spans, cell_size: int, made_of: int) -> _EntryCells:
        order = torch.cat([table.order, torch.arange(len(keys), device=keys.device)])
        return _EntryCells(cell_size, made_of, table, spans, order, torch.nn.functional.pad(table.starts.diff(), (0, 1)))

    @staticmethod
    def restored(keys: Tensor, learned: Learned, sizes: CellSizes, made_of: int) -> _EntryCells:
        """Those that had these `_tables`, of `made_of` keys with these `sizes` when they were made."""
        (length, dim), dtype = keys.shape, keys.dtype
        spans, edges = _spans(made_of, sizes)
        if sizes.segment:
            order = learned.take("order", (None,), torch.int64)
            learned.check("order", bool(((order >= 0) & (order < length)).all()))
        else:
            # Every key has a cell, by which it is found when keys are added or removed.
            order = learned.permutation("order", (length,), torch.int64)
        starts = learned.take("starts", (None,), torch.int64)
        held = starts.diff()
        ends = (int(starts[0]), int(starts[-1])) if len(starts) else None
        learned.check("starts", ends == (0, len(order)) and bool((held >= 0).all()))
        cells = len(held)
        if not sizes.segment:
            edges[-1] = max(edges[-1], cells)
        learned.check("starts", cells == edges[-1])
        centroid, variance = (learned.take(name, (cells, dim), dtype) for name in ("centroid", "variance"))
        size = held.to(dtype)
        table = CellTable(
            size=size,
            log_exists=torch.zeros_like(size).masked_fill_(held == 0, -torch.inf),
            centroid=centroid,
            variance=variance,
            value=size.new_zeros(cells, 1),
            order=order,
            cell=torch.arange(cells, device=keys.device).repeat_interleave(held),
            starts=starts,
            spans=edges,
            cross=size.new_zeros(len(edges) - 1, 1, dim),
        )
        return _EntryCells._with(keys, table, spans, sizes.cell_size, made_of)

    def _cell_of(self) -> Tensor:
        """`[keys]`: the cell of each, where all are in a single span."""
        return torch.empty_like(self.table.cell).scatter_(0, self.table.order, self.table.cell)

    def grown(self, keys: Tensor, start: int) -> _EntryCells:
        """Of these keys, of which those from `start` on are new. A new key goes to the nearest cell; one span. O(n dim)."""
        # Differences of squares lose precision far from the origin, as in `lloyd`.
        offset = self.table.centroid.mean(0, keepdim=True)[None]
        joined, _ = nearest(keys[None, start:], self.table.centroid - offset, offset)
        return self._with_cells(keys, torch.cat([self._cell_of(), joined[0]]))

    def kept(self, keys: Tensor, kept: Tensor) -> _EntryCells:
        """Of these keys, those with the ids `kept` so far; one span."""
        return self._with_cells(keys, self._cell_of()[kept])

    def _with_cells(self, keys: Tensor, cell_of: Tensor) -> _EntryCells:
        return self._listed(keys, cell_of[None], self.table.spans, self.spans, self.cell_size, self.made_of)

    def find(self, keys: Tensor, queries: Tensor, k: int, visible: Tensor, sizes: CellSizes) -> tuple[Tensor, Tensor, Tensor]:
        """The best k of the keys of this entry for rows `[rows, dim]` that see the first `visible` `[rows]` of them."""
        device, rows = queries.device, len(queries)
        closed = closed_keys(visible, sizes)
        probes = min(sizes.probes, self.table.cells)
        opened = torch.full((rows, probes), -1, dtype=torch.int64, device=device)
        for edge in closed.unique().tolist():
            segments = edge // sizes.segment if sizes.segment else int(edge > 0)
            if not segments:
                continue
            seen = self.table.seen([span.number for span in self.spans.seen(segments)])
            own = (closed == edge).nonzero()[:, 0]
            for _, part in row_chunks(1, len(own), len(seen), SCORES_PER_PASS):
                some = own[part]
                best = open_best(*moments(queries[some], seen), probes)
                opened[some, : best.shape[1]] = seen.ids[best.clamp(min=0)].masked_fill_(best < 0, -1)
        starts = torch.cat([self.table.starts[opened.clamp(min=0)], (len(self.table.order) + closed)[:, None]], 1)
        counts = torch.cat([self.sizes[opened], (visible - closed)[:, None]], 1)
        entry = torch.zeros(rows, dtype=torch.int64, device=device)
        return best_of_lists(queries, keys[None], entry, self.order, starts, counts, k)


def _tables(entries: Sequence[_EntryCells]) -> dict[str, Tensor]:
    """What was learned from the keys of each batch entry."""
    names = ("order", "starts", "centroid", "variance")
    return {f"{number}.{name}": getattr(cells.table, name) for number, cells in enumerate(entries) for name in names}


def _spans(length: int, sizes: CellSizes) -> tuple[Spans, list[int]]:
    """The spans of the closed segments of so many keys, and the first cell of each."""
    closed = int(closed_keys(torch.tensor([length], device="cpu"), sizes))
    segment = sizes.segment or max(1, closed)
    spans = Spans(closed // segment, sizes.span_levels)
    return spans, spans.edges(sizes.cells_in(segment))
