"""The cells of `Cells` as an index: spans of k-means cells for causal rows too, without a table of all scores."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nearfield.cells.far_field import moments, open_best
from nearfield.cells.moments import CellTable, tabulate
from nearfield.cells.partition.kmeans import KMeans
from nearfield.cells.sizes import CellSizes, default_cell_size, default_segment, span_levels
from nearfield.cells.spans import Spans, closed_keys
from nearfield.cells.torch.head import assign
from nearfield.cells.triton.limits import unsupported
from nearfield.checks import check_integer, check_positive
from nearfield.chunks import row_chunks
from nearfield.kernels import backends
from nearfield.kernels.backends import full_precision
from nearfield.knn.index.base import PADDING, BuiltIndex, CausalOffset, Found
from nearfield.knn.index.candidates import best_of_lists
from nearfield.knn.index.file import Learned

if TYPE_CHECKING:
    from nearfield.knn.index.cells_triton import KernelCells

OVER, OVER_CAUSAL = 4, 8
"""A row opens cells with so many times as many keys as it wants. A causal row sees several spans, each with cells of its own for
the same keys."""

LEAST_PROBES = 8

SCORES_PER_PASS = 1 << 21
"""Entries of one block of the (row, cell) score table in torch."""


MASKS = {False: "all", True: "causal"}
"""The rows for which cells are made, in a file: those that see all keys, and others."""


@dataclass(frozen=True)
class CellIndex:
    """The cells of `nearfield.Cells` as an index: for every row the best k keys of the cells with the largest scores.

    A causal row sees the past as spans of closed segments, each with k-means cells made of its own keys alone, and the keys of
    its own segment one by one. So nothing it finds depends on a later key, and all rows share what is built: a search costs
    about as much with a mask as without. A row scores its cells as `Cells` does (q.mu_c + 3 sqrt(u_c)), then every key of those
    it opens. Where the Triton kernels run, (row, cell) pairs are scored in tiles, and no table of all scores is made; these
    kernels were tested in Triton's interpreter and compiled, and have not been timed on a card.

    It knows no bound on the keys that it leaves out, so `cutoffs` is None. With keys added or removed it is made anew.

    Args:
        cell_size: keys per cell; None: by the length, as `Cells`.
        probes: cells that a row opens; None: as many as hold four times k keys (with a causal mask eight times), at least 8.
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
        check_integer("seed", self.seed)

    def build(self, keys: Tensor) -> BuiltCells:
        with full_precision(keys):
            return BuiltCells(keys, self)

    def _restored(self, keys: Tensor, learned: Learned) -> BuiltCells:
        built = BuiltCells(keys, self)
        built._restore(learned)
        return built

    def sizes(self, length: int, k: int, causal: bool, on_gpu: bool) -> CellSizes:
        """The sizes of a search for k of `length` keys."""
        size = self.cell_size or default_cell_size(length, causal, on_gpu)
        segment = (self.segment or default_segment(length, on_gpu)) if causal else 0
        over = OVER_CAUSAL if causal else OVER
        probes = self.probes or max(LEAST_PROBES, math.ceil(over * k / size))
        levels = span_levels(length, segment) if causal else 1
        return CellSizes(
            group=1, segment=segment, window=0, sinks=0, cell_size=size, probes=probes, samples=0, span_levels=levels
        )


class BuiltCells(BuiltIndex):
    """What is built for rows that see all keys, and for others, when it is first asked for."""

    advice = "Use a smaller k or fewer probes."
    kind = CellIndex

    def __init__(self, keys: Tensor, recipe: CellIndex) -> None:
        super().__init__(keys)
        self.recipe = recipe
        self._in_torch: dict[bool, list[_EntryCells]] = {}
        self._by_triton: dict[bool, KernelCells] = {}
        self._cell_of: dict[bool, Tensor] = {}
        """the cells of keys as the kernels have made them, `[batch, levels, length]`"""

    def _state(self) -> dict[str, Tensor]:
        found = {f"kernels.{MASKS[causal]}": cell_of for causal, cell_of in self._cell_of.items()}
        for causal, entries in self._in_torch.items():
            for number, cells in enumerate(entries):
                table = {name: getattr(cells.table, name) for name in ("order", "starts", "centroid", "variance")}
                found |= {f"torch.{MASKS[causal]}.{number}.{name}": x for name, x in table.items()}
        return found

    def _restore(self, learned: Learned) -> None:
        batch, length, _ = self.keys.shape
        for causal, name in MASKS.items():
            if name in learned.part("torch").names():
                sizes, part = self.recipe.sizes(length, 1, causal, False), learned.part("torch").part(name)
                parts = (part.part(str(number)) for number in range(batch))
                self._in_torch[causal] = [_EntryCells.restored(*x, sizes) for x in zip(self.keys, parts, strict=True)]
            part = learned.part("kernels")
            if name in part.names():
                sizes = self.recipe.sizes(length, 1, causal, True)
                cell_of = part.take(name, (batch, sizes.span_levels, length), torch.int32)
                cells = _spans(length, sizes)[1][-1]
                part.check(name, bool(((cell_of >= -1) & (cell_of < cells)).all()))
                self._cell_of[causal] = cell_of

    def _anew(self, keys: Tensor) -> BuiltCells:
        return BuiltCells(keys, self.recipe)

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
        causal = bool((visible < self.length).any())
        near = min(k, self.length)
        if backends.runs_triton(queries.device):
            sizes = self.recipe.sizes(self.length, near, causal, True)
            if self._unsupported(sizes) is None:
                return self._by_kernels(queries, k, visible, sizes)
        sizes = self.recipe.sizes(self.length, near, causal, False)
        if causal not in self._in_torch:
            self._in_torch[causal] = [_EntryCells.of(keys, sizes, self.recipe) for keys in self.keys]
        made = zip(self._in_torch[causal], queries.to(self.keys.dtype), visible, strict=True)
        found = [cells.find(rows, k, seen, sizes) for cells, rows, seen in made]
        return Found(*(torch.stack(x) for x in zip(*found, strict=True)))

    def _unsupported(self, sizes: CellSizes) -> str | None:
        """What the kernels cannot serve."""
        segments = self.length // sizes.segment if sizes.segment else 1
        return unsupported(self._source, segments=segments, probes=sizes.probes, cells=self.length // sizes.cell_size)

    def _by_kernels(self, queries: Tensor, k: int, visible: Tensor, sizes: CellSizes) -> Found:
        from nearfield.knn.index.cells_triton import KernelCells

        # How cells are made does not depend on how many are opened.
        causal = sizes.segment > 0
        if causal not in self._by_triton:
            # The kernels read half precision as it is.
            keys = self._source.flatten(0, -3)
            made = KernelCells(keys, sizes, self.recipe.iterations, self.recipe.seed, self._cell_of.get(causal))
            self._by_triton[causal], self._cell_of[causal] = made, made.cell_of
        return self._by_triton[causal].find(queries, k, visible, sizes)


@dataclass(frozen=True)
class _EntryCells:
    """The cells of the keys of one batch entry, in torch."""

    keys: Tensor
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
        # No values are needed: a single column of zeros stands for them.
        return _EntryCells._with(keys, tabulate(keys, keys.new_zeros(length, 1), cell_of, edges), spans)

    @staticmethod
    def _with(keys: Tensor, table: CellTable, spans: Spans) -> _EntryCells:
        order = torch.cat([table.order, torch.arange(len(keys), device=keys.device)])
        return _EntryCells(keys, table, spans, order, torch.nn.functional.pad(table.starts.diff(), (0, 1)))

    @staticmethod
    def restored(keys: Tensor, learned: Learned, sizes: CellSizes) -> _EntryCells:
        (length, dim), dtype = keys.shape, keys.dtype
        spans, edges = _spans(length, sizes)
        order, starts = (learned.take(name, (None,), torch.int64) for name in ("order", "starts"))
        learned.check("order", bool(((order >= 0) & (order < length)).all()))
        held = starts.diff()
        ends = (int(starts[0]), int(starts[-1])) if len(starts) else None
        learned.check("starts", ends == (0, len(order)) and bool((held >= 0).all()))
        cells = len(held)
        if not sizes.segment and len(edges) > 1:
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
        return _EntryCells._with(keys, table, spans)

    def find(self, queries: Tensor, k: int, visible: Tensor, sizes: CellSizes) -> tuple[Tensor, Tensor, Tensor]:
        """The best k keys of rows `[rows, dim]` that see the first `visible` `[rows]` keys."""
        device, rows = queries.device, len(queries)
        closed = closed_keys(visible, sizes)
        opened = torch.full((rows, sizes.probes), -1, dtype=torch.int64, device=device)
        for edge in closed.unique().tolist():
            segments = edge // sizes.segment if sizes.segment else int(edge > 0)
            if not segments:
                continue
            seen = self.table.seen([span.number for span in self.spans.seen(segments)])
            own = (closed == edge).nonzero()[:, 0]
            for _, part in row_chunks(1, len(own), len(seen), SCORES_PER_PASS):
                some = own[part]
                best = open_best(*moments(queries[some], seen), sizes.probes)
                opened[some, : best.shape[1]] = seen.ids[best.clamp(min=0)].masked_fill_(best < 0, -1)
        starts = torch.cat([self.table.starts[opened.clamp(min=0)], (len(self.table.order) + closed)[:, None]], 1)
        counts = torch.cat([self.sizes[opened], (visible - closed)[:, None]], 1)
        entry = torch.zeros(rows, dtype=torch.int64, device=device)
        return best_of_lists(queries, self.keys[None], entry, self.order, starts, counts, k)


def _spans(length: int, sizes: CellSizes) -> tuple[Spans, list[int]]:
    """The spans of the closed segments of so many keys, and the first cell of each."""
    closed = int(closed_keys(torch.tensor([length], device="cpu"), sizes))
    segment = sizes.segment or max(1, closed)
    spans = Spans(closed // segment, sizes.span_levels)
    return spans, spans.edges(sizes.cells_in(segment))
