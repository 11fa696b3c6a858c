"""Attention by cells: the default engine."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import InitVar, dataclass, field
from typing import Any

import torch
from torch import Tensor

from nearfield.cells import sizes as defaults
from nearfield.cells.operator import CellsResult, Recipe, cells_attention
from nearfield.cells.partition import Partition, check_partition, make_known, to_plain, without_queries
from nearfield.cells.partition.kmeans import KMeans
from nearfield.cells.planned import planned_attention
from nearfield.cells.sinks import beside_sinks, sunk_attention
from nearfield.cells.sizes import CellSizes, MemoryPolicy
from nearfield.cells.spans import blocks_of_rows, closed_keys
from nearfield.cells.trial import MOST_ENTRIES, Prepared, prepare
from nearfield.cells.triton.limits import unsupported
from nearfield.checks import MOST, check_positive
from nearfield.kernels import backends
from nearfield.kernels.ready import Ready, remember
from nearfield.problem import Call, Problem, is_traced
from nearfield.results import Outcome


@dataclass(frozen=True)
class Cells:
    """Groups keys into small cells. A row opens the best few of them and sees the others through their moments.

    With q the query times scale and, per cell c, n_c keys around a centroid mu_c with variances var_c and mean value v_c:

    1. A row opens the `probes` cells of largest score q.mu_c + 3 sqrt(u_c), u_c = sum_i q_i^2 var_{c,i}. All keys of an opened
       cell are near. With `share`, a block of rows opens the same cells, those with most votes of its rows: consecutive rows, or
       without a mask rows in the order of their best cells.
    2. Every other cell counts with mass n_c e^{q.mu_c} (1 + u_c / 4)^2 and value v_c + X q, X the covariance of values and keys
       inside cells, pooled over all cells. This is right to second order, and stays moderate where a cell is far from Gaussian.
    3. Optionally, `samples` far keys per row are drawn, with the far field as control variate. Numerator and denominator become
       unbiased, and the spread over the draws gives a standard error.

    Causal: keys come in segments of consecutive keys. A row sees its own segment (and a window before it) key by key. It sees
    the closed segments before that through cells, for which 1, 2, 4, 8, ... segments are grouped together (13 closed segments as
    8, 4 and 1): such cells are tighter than those of single segments. No number that a row uses depends on a later key or query;
    with `share` above 1, the choice of cells depends on all queries of a block, and still on nothing after the block.

    Args:
        cell_size: keys per cell; None: by the number of keys (16 at 8k, 64 at 32k, 128 at 131k; on a GPU 32, 64, 128).
        probes: cells opened per row, or per block of rows; None: by the number of keys.
        samples: far keys drawn per row, at most as many as there are keys: 0, or at least 2.
        window: causal only: how many of the latest keys are always near, rounded up to whole segments beyond a row's own. All
            others go on to count, through cells; `window_size` of `attention` hides them.
        sinks: how many of the first keys are near for every row. In a `window_size` with bounds on both sides they are the first
            of the keys that a block of rows has in common, and where keys are served in reverse order the last ones.
        partition: `KMeans()`, `Blocks()`, `HashBuckets()`, or a `Partition` of your own.
        segment: causal only: keys per segment; None: by the number of keys.
        share: how many queries of a head open cells together: 1 (each by itself), 16, 32, 64, 128 or 256. With a causal mask they
            are consecutive, counted from the first query of a call; without one they are put in the order of their best cells
            first. None: 1; without a mask 128 where the Triton kernels run, there are 1,024 queries or more, and `probes` is not
            given.

    Cost for n queries and keys with cells of about sqrt(n): O(n^1.5 dim) time, O(n dim) memory, forward and backward. Gradients
    are the exact gradients of the estimator; which cells were opened and which keys drawn is held fixed. With `samples`, so
    are the factors by which drawn keys count (one over the chance to draw them), though these depend on queries and keys.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 2000, 64).unbind(0)
        >>> out = nearfield.attention(q, k, v, is_causal=True, method=Cells(cell_size=16, probes=32))
    """

    cell_size: int | None = None
    probes: int | None = None
    samples: int = 0
    window: int | None = None
    sinks: int = 16
    # torch.compile cannot trace a class as the factory.
    partition: Partition = field(default_factory=lambda: KMeans())
    segment: int | None = None
    share: int | None = None
    branching: InitVar[None] = None
    unfold: InitVar[None] = None

    any_mask = False
    any_logits = True
    any_window = False
    gives_lse = True
    drops_pairs = False  # far keys are dropped together, cell by cell

    def __post_init__(self, branching: None, unfold: None) -> None:
        for name, value in (("branching", branching), ("unfold", unfold)):
            if value is not None:
                raise TypeError(
                    f"Cells has taken no {name} since version 0.2: there is one level of cells; leave out {name}={value!r}"
                )
        check_positive("cell_size", self.cell_size, optional=True)
        check_positive("probes", self.probes, optional=True)
        check_positive("samples", self.samples, least=0)
        if self.samples == 1:
            raise ValueError("samples must be 0 or at least 2 (a standard error needs two draws), got 1")
        check_positive("window", self.window, optional=True, least=0)
        check_positive("sinks", self.sinks, least=0)
        check_positive("segment", self.segment, optional=True)
        check_share(self.share)
        check_partition("partition", self.partition)
        make_known(self.partition)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For copies, whose partition may be a new object."""
        self.__dict__.update(state)
        make_known(self.partition)

    def run(self, problem: Problem, call: Call) -> Outcome:
        if self.window is not None and not problem.is_causal:
            raise ValueError(f"window={self.window} needs is_causal=True: without it there are no latest keys")
        if call.groups is not None and problem.key.shape[:2].numel() <= MOST_ENTRIES:
            prepared = self.prepare(problem, call)
            call.groups.append(prepared)
            return self.run_prepared(problem, call, prepared)
        rows = problem.grouped
        recipe = self.recipe(problem, call)
        if recipe.engine == "triton" and call.signature is not None and not is_captured(problem.query):
            return Outcome(_ready(problem, recipe, call.signature)(problem.query, problem.key, problem.value))
        seed = self._seed(problem, call, recipe)
        inputs = rows.queries, rows.keys, rows.values, rows.visible, seed
        sinks = problem.row_sinks
        if sinks is None:
            return self._outcome(problem, call, recipe, cells_attention(*inputs, recipe, call.return_lse))
        recipe = recipe._replace(memory=recipe.memory._replace(heads=0))
        return self._outcome(problem, call, recipe, sunk_attention(*inputs, sinks, recipe, call.return_lse))

    def prepare(self, problem: Problem, call: Call) -> Prepared:
        """What a call with any number of probes begins with: see `run_prepared`."""
        rows = problem.grouped
        return prepare(rows.queries, rows.keys, rows.values, rows.visible, self.recipe(problem, call), problem.row_sinks)

    def run_prepared(self, problem: Problem, call: Call, prepared: Prepared) -> Outcome:
        """`run`, bit for bit, with keys that were grouped for a call that may differ in `probes`."""
        rows = problem.grouped
        recipe = self.recipe(problem, call)
        # Outputs of planned calls are laid out head by head.
        recipe = recipe._replace(memory=recipe.memory._replace(heads=0))
        seed = self._seed(problem, call, recipe)
        inputs = rows.queries, rows.keys, rows.values, rows.visible, seed
        tables = prepared.kernel_tables or prepared.tables
        sinks = problem.row_sinks
        result = planned_attention(*inputs, recipe, prepared.given, tables, call.return_lse or sinks is not None)
        return self._outcome(problem, call, recipe, result if sinks is None else beside_sinks(result, sinks))

    def recipe(self, problem: Problem, call: Call) -> Recipe:
        sizes = self.sizes(problem)
        engine = self._engine(problem, sizes, call.backend)
        memory = MemoryPolicy.of(problem) if engine == "triton" else MemoryPolicy()
        partition = without_queries(self.partition) if problem.is_part else self.partition
        return Recipe(sizes, problem.scale, problem.dropout_p, *to_plain(partition), engine, memory, problem.softcap)

    def _seed(self, problem: Problem, call: Call, recipe: Recipe) -> Tensor:
        random = bool(self.samples or problem.dropout_p)
        return call.seeds.tensor() if random else _no_seed(problem.query, recipe.engine)

    def _outcome(self, problem: Problem, call: Call, recipe: Recipe, result: CellsResult) -> Outcome:
        output = result.output if recipe.memory.heads else problem.by_head(result.output)
        if not call.diagnostics:
            return Outcome(output, problem.by_head(result.lse) if call.return_lse else None)
        sizes = recipe.sizes
        info = {"keys_per_query": _keys_per_query(result, problem.grouped.visible, sizes), **sizes._asdict()}
        if recipe.engine == "triton":
            info["backend"] = "triton"
        stderr = problem.by_head(result.stderr) if self.samples else None
        return Outcome(output, problem.by_head(result.lse), stderr, info)

    def is_async(self, problem: Problem, backend: str) -> bool:
        """True where the Triton kernels run: they confine NaN and inf to the rows that see them, and nothing waits for them."""
        device = problem.query.device
        if not backends.runs_triton(device) or not backends.prefers_triton(backend, device):
            return False
        return self._unsupported(problem, self.sizes(problem)) is None

    def engine(self, problem: Problem, backend: str) -> str:
        """Which engine runs: see `Recipe.engine`."""
        return self._engine(problem, self.sizes(problem), backend)

    def _engine(self, problem: Problem, sizes: CellSizes, backend: str) -> str:
        device = problem.query.device
        if not backends.prefers_triton(backend, device):
            return "reference" if backend == "reference" else "torch"
        return "triton" if backends.choose_triton(backend, device, self._unsupported(problem, sizes)) else "torch"

    def _unsupported(self, problem: Problem, sizes: CellSizes) -> str | None:
        length = problem.key.shape[2]
        return unsupported(
            problem.query,
            problem.value,
            partition=self.partition,
            dropout=problem.dropout_p,
            samples=self.samples,
            softcap=problem.softcap,
            segments=length // sizes.segment if sizes.segment else 1,
            probes=sizes.probes,
            cells=length // sizes.cell_size,
        )

    def sizes(self, problem: Problem) -> CellSizes:
        """The sizes of a call: those given, and defaults for its shape."""
        if self.share is None and self._may_share(problem):
            shared = self._sizes(problem, defaults.SHARE)
            if self._unsupported(problem, shared) is None:
                return shared
        return self._sizes(problem, self.share or 1)

    def _may_share(self, problem: Problem) -> bool:
        """Whether rows might open cells together without being told to. Where `probes` is given, it is meant for each row."""
        if problem.is_causal or problem.is_part or self.probes is not None or not backends.runs_triton(problem.key.device):
            return False
        return problem.query.shape[2] >= defaults.LEAST_QUERIES

    def _sizes(self, problem: Problem, share: int) -> CellSizes:
        length, causal = problem.key.shape[2], problem.is_causal
        given = (self.cell_size, self.probes, self.segment) if causal else (self.cell_size, self.probes)
        if isinstance(length, torch.SymInt) and None in given:
            raise ValueError(
                f"{self!r} chooses sizes by the number of keys, which is not known here; to export with a dynamic length "
                f"give cell_size, probes{' and segment' if causal else ''}: Cells(cell_size=32, probes=16"
                f"{', segment=512' if causal else ''})"
            )
        on_gpu = backends.runs_triton(problem.key.device)
        # Sizes beyond all keys mean all of them. Operators take numbers of 64 bits.
        given_segment, given_size, sinks = (x if x is None else min(x, MOST) for x in (self.segment, self.cell_size, self.sinks))
        segment = (given_segment or defaults.default_segment(length, on_gpu)) if causal else 0
        cell_size = given_size or defaults.default_cell_size(length, causal, on_gpu)
        samples = self.samples if isinstance(length, torch.SymInt) else min(self.samples, max(2, length))
        probes = self.probes or defaults.default_probes(length, cell_size, causal, on_gpu, share)
        sizes = CellSizes(problem.group_size, segment, 0, sinks or 0, cell_size, probes, samples, share=share)
        if not causal:
            return sizes._replace(probes=max(1, min(probes, sizes.cells_in(length))))
        # A traced program serves all lengths, so it has all levels.
        levels = defaults.MOST_SPAN_LEVELS if is_traced() else defaults.span_levels(length, segment)
        most = length // segment * sizes.cells_in(segment)
        return sizes._replace(
            probes=max(1, min(probes, most)), window=-(-min(self.window or 0, MOST) // segment), span_levels=levels
        )


def _no_seed(query: Tensor, engine: str) -> Tensor:
    """Stands for a seed where nothing is random. A graph that `torch.compile` captures takes no tensors of the host."""
    return torch.zeros((), dtype=torch.int64, device=query.device if engine == "triton" and is_traced() else "cpu")


def is_captured(x: Tensor) -> bool:
    """Whether a graph is being captured: a tensor that is made now belongs to it."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def _ready(problem: Problem, recipe: Recipe, call: Hashable) -> Ready:
    """What makes calls like this one, remembered."""
    from nearfield.cells.ready import ReadyCells

    found = ReadyCells(problem, recipe)
    remember(call, found)
    return found


def check_share(share: object) -> None:
    """A power of two, so that blocks are made of whole pools, and parts of the work of whole blocks."""
    if share is not None and (isinstance(share, bool) or not isinstance(share, int) or share not in defaults.SHARES):
        raise ValueError(
            f"share must be 1 (each query opens cells by itself) or a power of two from 16 to 256, got {share!r}; "
            "use share=64, or leave share out"
        )


def _keys_per_query(result: CellsResult, visible: Tensor, sizes: CellSizes) -> float:
    """How many keys a row reads one by one, near ones and drawn ones, averaged over the rows."""
    near = 0.0
    block_of = blocks_of_rows(visible.shape[1], sizes, visible.device, result.order.long())
    for entry in range(len(visible)):
        cell_of = result.cell_of[entry].flatten().long()
        opened = result.opened[entry].long()
        size = torch.bincount(cell_of + 1, minlength=max(2, int(opened.max()) + 2) if opened.numel() else 2)[1:]
        inside = torch.where(opened >= 0, size[opened.clamp(min=0)], 0).sum(1)[block_of[entry] if sizes.ordered else block_of]
        closed = closed_keys(visible[entry], sizes, sizes.group)
        near += float((inside + (visible[entry] - closed) + closed.clamp(max=sizes.sinks)).double().mean())
    drawn = float((result.drawn >= 0).sum(-1).double().mean()) if sizes.samples else 0.0
    return near / max(1, len(visible)) + drawn
