"""Attention by cells: the default engine."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nearfield import kernels
from nearfield.checks import check_positive
from nearfield.kernels.cells_plan import CellSettings, closed_keys
from nearfield.methods.base import Call, Outcome
from nearfield.operators import CellsResult, Recipe, cells_attention
from nearfield.partition import BY_NAME
from nearfield.partition.base import Partition
from nearfield.partition.kmeans import KMeans
from nearfield.problem import Problem, is_traced

TWO_LEVELS = 1 << 21
"""From so many keys on two levels pay."""
UNFOLD = 32
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_COLUMNS, MOST_SEGMENTS, MOST_PROBES, MOST_CELLS = 256, 4096, 160, 32768
"""What the kernels in Triton serve at most."""
MOST_HEIGHTS = 8
"""Causal: closed segments are joined into spans of at most 2^7."""


@dataclass(frozen=True)
class Cells:
    """Keys grouped into small cells; a row opens the best few and sees the others through their moments.

    With q the query times scale and, per cell c, n_c keys around a centroid mu_c with variances var_c and mean value v_c:

    1. a row opens the `probes` cells of largest score q.mu_c + 1.5 sqrt(u_c), u_c = sum_i q_i^2 var_{c,i}; all keys of an opened
       cell are near;
    2. every other cell counts with mass n_c e^{q.mu_c} (1 + u_c / 4)^2 and value v_c + X q, X the covariance of values and keys
       inside cells, pooled over all cells: right to second order, and tame where a cell is far from Gaussian;
    3. optionally `samples` far keys per row are drawn, with the far field as control variate: numerator and denominator become
       unbiased, and their spread is a standard error.

    Causal: keys come in segments of consecutive keys. A row sees its own segment (and a window before it) key by key, and the
    segments before that through the cells of 1, 2, 4, 8, ... of them that are grouped together (13 closed segments are 8, 4 and
    1), so that cells are tighter than those of single segments; no number that it uses depends on a later key or query.

    Args:
        cell_size: keys per cell; None: by the number of keys (16 at 8k, 64 at 32k, 128 at 131k; on a GPU 32, 64, 128).
        probes: cells opened per row; None: by the number of keys.
        samples: far keys drawn per row: 0, or at least 2.
        window: causal only: latest keys that are always near, rounded up to whole segments beyond a row's own.
        sinks: first keys, near for every row.
        partition: `KMeans()`, `Blocks()` or `HashBuckets()`.
        segment: causal only: keys per segment; None: by the number of keys.
        branching: fine cells per coarse cell for two levels, 0 for one; None: two levels from two million keys on (not on GPUs).
        unfold: with two levels, coarse cells per row whose fine cells are scored; None: 32.

    Cost for n queries and keys with cells of about sqrt(n): O(n^1.5 dim) time, O(n dim) memory, forward and backward. Gradients
    are the exact gradients of the estimator, what was opened and drawn held fixed.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 2000, 64).unbind(0)
        >>> out = nearfield.attention(q, k, v, is_causal=True, method=Cells(cell_size=16, probes=32))
    """

    cell_size: int | None = None
    probes: int | None = None
    samples: int = 0
    window: int | None = None
    sinks: int = 16
    # A class as factory is beyond torch.compile.
    partition: Partition = field(default_factory=lambda: KMeans())
    segment: int | None = None
    branching: int | None = None
    unfold: int | None = None

    def __post_init__(self) -> None:
        check_positive("cell_size", self.cell_size, optional=True)
        check_positive("probes", self.probes, optional=True)
        check_positive("samples", self.samples, least=0)
        if self.samples == 1:
            raise ValueError("samples must be 0 or at least 2 (a standard error needs two draws), got 1")
        check_positive("window", self.window, optional=True, least=0)
        check_positive("sinks", self.sinks, least=0)
        check_positive("segment", self.segment, optional=True)
        check_positive("branching", self.branching, optional=True, least=0)
        check_positive("unfold", self.unfold, optional=True)
        if type(self.partition) not in BY_NAME.values():
            raise TypeError(f"partition must be a {'(), '.join(BY_NAME)}(), got {self.partition!r}")

    def run(self, problem: Problem, call: Call) -> Outcome:
        if self.window is not None and not problem.is_causal:
            raise ValueError(f"window={self.window} needs is_causal=True: without a mask there are no latest keys")
        rows = problem.grouped
        settings = self.settings(problem)
        random = bool(self.samples or problem.dropout_p)
        seed = call.seeds.tensor() if random else torch.zeros((), dtype=torch.int64)
        backend = self._backend(problem, settings, call)
        options = dataclasses.astuple(self.partition)
        trained = torch.is_grad_enabled() and any(x.requires_grad for x in (problem.query, problem.key, problem.value))
        recipe = Recipe(settings, problem.scale, problem.dropout_p, type(self.partition).__name__, options, backend, trained)
        shape = problem.query.shape[:3] if backend == "triton" and trained and _lies_transposed(problem.query) else ()
        result = cells_attention(rows.queries, rows.keys, rows.values, rows.visible, seed, recipe, shape)
        if not call.diagnostics:
            return Outcome(result.output)
        info = {"keys_per_query": _keys_per_query(result, rows.visible, settings), **settings._asdict()}
        stderr = result.stderr if self.samples else None
        return Outcome(result.output, result.lse, stderr, info, "triton" if backend == "triton" else "")

    def never_waits(self, query: Tensor, value: Tensor, dropout: bool) -> bool:
        """Whether a call is served by kernels that leave non-finite inputs where they are, and nobody waits for them."""
        if not kernels.runs_triton(query.device) or self._misses(query, value, dropout) is not None:
            return False
        length = value.shape[-2]
        cell_size = self.cell_size or default_cell_size(length, on_gpu=True)
        probes = self.probes or default_probes(length, cell_size, causal=True, on_gpu=True)
        return _exceeds(length, self.segment or default_segment(length, on_gpu=True), cell_size, probes) is None

    def _misses(self, query: Tensor, value: Tensor, dropout: bool) -> str | None:
        """What the kernels in Triton cannot do of this; None: they can do it all."""
        if query.dtype not in TRITON_DTYPES:
            return f"{query.dtype}"
        if max(query.shape[-1], value.shape[-1]) > MOST_COLUMNS:
            return f"more than {MOST_COLUMNS} columns"
        if type(self.partition) is not KMeans:
            return f"{self.partition!r}"
        if dropout:
            return "dropout"
        if self.samples:
            return f"samples={self.samples}"
        return f"branching={self.branching}" if self.branching else None

    def _backend(self, problem: Problem, settings: CellSettings, call: Call) -> str:
        if call.backend in ("reference", "cpu"):
            return "reference" if call.backend == "reference" else "torch"
        misses = self._misses(problem.query, problem.value, bool(problem.dropout_p))
        misses = misses or _exceeds(problem.key.shape[2], settings.segment, settings.cell_size, settings.probes)
        if call.backend == "triton" and misses is not None:
            raise ValueError(f"the kernels in Triton do not serve {misses}; backend='auto' takes others")
        wanted = call.backend == "triton" or kernels.runs_triton(problem.query.device)
        return "triton" if wanted and misses is None else "torch"

    def settings(self, problem: Problem) -> CellSettings:
        """The sizes of a call, with the defaults for its shape filled in."""
        length = problem.key.shape[2]
        causal = problem.is_causal
        on_gpu = kernels.runs_triton(problem.key.device)
        segment = (self.segment or default_segment(length, on_gpu)) if causal else 0
        cell_size = self.cell_size or default_cell_size(length, causal, on_gpu)
        branching = default_branching(length, on_gpu) if self.branching is None else self.branching
        sizes = CellSettings(problem.group_size, segment, 0, self.sinks, cell_size, branching, 1, 1, self.samples)
        fine, coarse = sizes.per_segment(segment or length)
        segments = length // segment if causal else 1
        return sizes._replace(
            window=-(-(self.window or 0) // segment) if causal else 0,
            probes=max(1, min(self.probes or default_probes(length, cell_size, causal, on_gpu), segments * fine)),
            unfold=max(1, min(self.unfold or UNFOLD, segments * coarse)) if branching else 0,
            heights=_heights(length, segment) if causal else 1,
        )


def _lies_transposed(query: Tensor) -> bool:
    """Whether queries lie in memory as a model's projection makes them, `[batch, length, heads, dim]`."""
    return query.shape[1] > 1 and query.stride(1) < query.stride(2)


def _exceeds(length: int, segment: int, cell_size: int, probes: int) -> str | None:
    """Which limit of the kernels in Triton, if any; `segment` is 0 without a mask."""
    if segment and length // segment > MOST_SEGMENTS:
        return f"more than {MOST_SEGMENTS} segments; use a larger segment"
    if probes > MOST_PROBES:
        return f"more than {MOST_PROBES} probes; use larger cells"
    return f"more than {MOST_CELLS} cells; use larger ones" if length // cell_size > MOST_CELLS else None


# How the defaults were chosen is told, with the measurements, in docs/cells.md.


def default_cell_size(length: int, causal: bool = False, on_gpu: bool = False) -> int:
    """A power of two: 512 cells at first, from 16k keys on about 4 sqrt(length); causal up to twice as many from 64k keys on.

    On a GPU near sqrt(length) / 2.5: 64 at 32k, 128 at 131k, 512 at a million.
    """
    if on_gpu:
        return 2 ** max(4, round(math.log2(math.sqrt(max(1, length)) / 2.5)))
    cells = max(512.0, 4.0 * math.sqrt(length))
    size = 2 ** max(2, math.ceil(math.log2(max(1.0, length / cells))))
    return max(64, size // 2) if causal and size > 64 else size


def default_probes(length: int, cell_size: int, causal: bool = False, on_gpu: bool = False) -> int:
    """As many as it takes to have 54 length^(1/4) near keys: 512 of 8k, 724 of 32k, 1,024 of 131k; at least 8.

    On a GPU half as many without a mask: 512 of 131k, in at least 4 cells. A causal row sees several spans, and needs more.
    """
    few = on_gpu and not causal
    return max(4 if few else 8, round((27 if few else 54) * length**0.25 / cell_size))


def default_segment(length: int, on_gpu: bool = False) -> int:
    """A power of two near 11 sqrt(length): 1,024 at 8k, 2,048 at 32k, 4,096 at 131k. On a GPU half of that."""
    return 2 ** max(6, round(math.log2((5.6 if on_gpu else 11) * math.sqrt(max(1, length)))))


def _heights(length: int, segment: int) -> int:
    """As many as it takes to have one span of all segments. A traced program should serve all lengths, so it has them all."""
    return MOST_HEIGHTS if is_traced() else max(1, min(MOST_HEIGHTS, (length // segment).bit_length()))


def default_branching(length: int, on_gpu: bool = False) -> int:
    """Two levels pay where scores are dear: not on a GPU."""
    return 16 if length >= TWO_LEVELS and not on_gpu else 0


def _keys_per_query(result: CellsResult, visible: Tensor, settings: CellSettings) -> float:
    """Keys that are near, plus those drawn, averaged over the rows."""
    near = 0.0
    for entry in range(len(visible)):
        cell_of = result.cell_of[entry].flatten().long()
        opened = result.opened[entry].long()
        size = torch.bincount(cell_of + 1, minlength=max(2, int(opened.max()) + 2) if opened.numel() else 2)[1:]
        inside = torch.where(opened >= 0, size[opened.clamp(min=0)], 0).sum(1)
        closed = closed_keys(visible[entry], settings)
        near += float((inside + (visible[entry] - closed) + closed.clamp(max=settings.sinks)).double().mean())
    drawn = float((result.drawn >= 0).sum(-1).double().mean()) if settings.samples else 0.0
    return near / max(1, len(visible)) + drawn
