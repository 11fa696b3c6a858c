"""The pilot: before a call runs, a few of its rows tell how many cells they need. One run then serves all rows.

Keys are grouped once. Random rows are computed exactly and with several budgets, all from the same scores (`cells.trial`). The
smallest budget whose error is within the tolerance is used for all rows, with the same cells. If there is none among those that
would be faster than exact attention, the call is exact attention.

A pilot is many small operations, which a host takes longer to start than a GPU to do, and then it waits for their result. So on a
GPU the run that calls like this one have chosen lately begins before (`Ahead`). If the pilot then chooses the same, its time is
hidden; if not, what was begun is dropped: the result is the same, only later.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nearfield.audit import CONFIDENCE, audit_rows, summary, value_norm_of_rows
from nearfield.cells import sizes as defaults
from nearfield.cells.method import Cells
from nearfield.cells.sizes import CellSizes
from nearfield.cells.trial import MOST_ENTRIES, Prepared, try_budgets
from nearfield.exact import Exact
from nearfield.kernels import backends
from nearfield.kernels.backends import full_precision
from nearfield.problem import Call, Problem
from nearfield.results import Audit, Outcome

UNITS = ("values", "output")

BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}
"""What a number of each dtype is as an integer."""

ROWS = 128
"""How many rows a pilot looks at, with replacement; at least as many of every head, where each has to be within the tolerance."""

MOST_BUDGETS = 8
"""How many budgets are tried at most. Each may be the one that passes, so each gets its share of the 5%."""

GROWTH = 2
"""Each budget opens this many times as many cells as the one before. The first opens half of the default."""

MOST_NEAR = 0.3
"""Opening more than this share of the keys is no faster than exact attention."""

AT_CROSSOVER = 0.7
"""About the time of cells at the crossover length, exact attention being 1. That is the first power of two at which they are
faster by 1.05, so it lies between a half and 0.95."""


STREAK = 4
"""After so many calls in a row that chose the same, the next one is likely to. A wrong guess takes a run, and a right one saves
the few milliseconds of a pilot."""

MOST_KNOWN = 128
"""Kinds of calls whose choices are remembered."""


@dataclass(frozen=True)
class Choice:
    """What a pilot found."""

    method: Cells | Exact
    """what runs; with `exact_heads`, for the other heads"""
    steps: list[dict[str, Any]]
    """one for each budget: what it was and its errors"""
    audit: Audit | None
    """of the method that runs; None for exact attention; with `per_head`, of the worst head that gets cells, and of each"""
    prepared: Prepared | None = None
    exact_heads: tuple[int, ...] = ()
    """key-value heads that get exact attention; all of their query heads do"""

    @property
    def best(self) -> float:
        """The smallest error that some budget had; infinity where none was tried."""
        return min((step["error"] for step in self.steps), default=float("inf"))


def expected_time(sizes: CellSizes, length: int, limit: float, on_gpu: bool) -> float:
    """About how long cells take, exact attention being 1.

    A row scores the cells it sees and reads the keys it opens; each was seen to take about as long as the other, on a CPU. What
    that is worth in exact attention follows from the crossover length `limit`, for which it is known with the default sizes.
    """
    causal = sizes.segment > 0
    share = 0.5 if causal else 1.0
    size = defaults.default_cell_size(int(limit), causal, on_gpu)
    probes = defaults.default_probes(int(limit), size, causal, on_gpu, sizes.share)
    at_limit = share * limit / size + probes * size
    here = share * length / sizes.cell_size + sizes.probes * sizes.cell_size
    return AT_CROSSOVER * here / at_limit * limit / length


def faster_budgets(sizes: CellSizes, length: int, limit: float, on_gpu: bool) -> list[int]:
    """The budgets that a pilot tries: half the default, the default, twice that, ... as long as they are faster than exact."""
    seen = length / (2 if sizes.segment else 1)
    found: list[int] = []
    if not length or math.isinf(limit):
        return found
    budget = max(1, sizes.probes // GROWTH)
    while len(found) < MOST_BUDGETS:
        too_slow = expected_time(sizes._replace(probes=budget), length, limit, on_gpu) > 1.0
        if too_slow or budget * sizes.cell_size > MOST_NEAR * seen:
            break
        found.append(budget)
        budget = sizes.probes if budget < sizes.probes else GROWTH * budget
    return found


def draw_rows(problem: Problem, generator: torch.Generator, per_head: bool, budgets: int = 1) -> Tensor:
    """The numbers of random rows, over batch, heads and positions, drawn with replacement: `[runs, rows]`, ascending in a run.

    `per_head`: one run for each query head, with more rows where there are many of them, so that what is left out stays 5% for
    each; else one for all.
    """
    batch, heads, length, _ = problem.query.shape
    if not per_head:
        return torch.randint(batch * heads * length, (1, ROWS), generator=generator).sort().values
    miss = (1.0 - CONFIDENCE) / (heads * budgets) / 2
    place = torch.randint(batch * length, (heads, max(ROWS, audit_rows(0.95, 1.0 - miss))), generator=generator).sort().values
    return (place // length * heads + torch.arange(heads)[:, None]) * length + place % length


def fingerprint(problem: Problem) -> int:
    """A seed from the last row of every head: equal inputs are looked at in the same places, and others in others."""
    last = torch.cat([x.detach()[:, :, -1].flatten() for x in (problem.query, problem.key)])
    return int(last.view(BITS[last.dtype]).long().sum()) % (1 << 62)


@torch.no_grad()
def run_pilot(
    cells: Cells,
    problem: Problem,
    call: Call,
    eps: float,
    unit: str,
    limit: float,
    generator: torch.Generator,
    per_head: bool,
    meanwhile: Callable[[Prepared], None] = lambda prepared: None,
) -> Choice:
    """The smallest budget that is within eps on random rows, or exact attention.

    `meanwhile`: is called when keys are grouped. What it starts on a GPU runs while the host prepares to look at rows.
    """
    sizes = cells.sizes(problem)
    on_gpu = backends.runs_triton(problem.key.device)
    budgets = faster_budgets(sizes, problem.key.shape[2], limit, on_gpu)
    # Kernels have room for so many cells. To open more, another engine would have to group keys again.
    engine = cells.engine(problem, call.backend)
    budgets = [x for x in budgets if with_budget(cells, sizes, x).engine(problem, call.backend) == engine]
    if not budgets or problem.key.shape[:2].numel() > MOST_ENTRIES:
        return Choice(Exact(), [], None)
    # A copy: the rows that a problem keeps would have no gradients if they were made here.
    problem = replace(problem)
    with full_precision(problem.query):
        prepared = cells.prepare(problem, call)
        if call.groups is not None:
            call.groups.append(prepared)
        meanwhile(prepared)
        numbers = draw_rows(problem, generator, per_head, len(budgets))
        by_budget: list[list[Audit]] = []
        with_values = unit == "values" or call.diagnostics
        for found in _audits(problem, prepared, numbers, budgets, with_values):
            by_budget.append(found)
            if not call.diagnostics and all(_error(audit, unit) <= eps for audit in found):
                # Nobody asks what more cells would do.
                break
    budgets = budgets[: len(by_budget)]
    audits = [list(run) for run in zip(*by_budget, strict=True)]
    methods = [with_budget(cells, sizes, budget) for budget in budgets]
    errors = [[_error(audit, unit) for audit in run] for run in audits]
    steps = [_step(methods[i], [run[i] for run in audits], [run[i] for run in errors]) for i in range(len(budgets))]
    needs = [next((i for i, error in enumerate(run) if error <= eps), None) for run in errors]
    group = problem.group_size
    # Query heads that share keys also share their cells, so they get exact attention together.
    failed = {head // group for head, need in enumerate(needs) if need is None}
    fine = [need for head, need in enumerate(needs) if need is not None and head // group not in failed]
    if not fine:
        return Choice(Exact(), steps, None)
    chosen = max(fine)
    # More cells are hardly ever worse; where they are, for a head that passed with fewer, it is exact attention as well.
    failed |= {head // group for head, run in enumerate(errors) if run[chosen] > eps}
    if len(failed) == len(errors) // (group if per_head else 1):
        return Choice(Exact(), steps, None)
    worst = max(range(len(audits)), key=lambda run: -1.0 if run // group in failed else errors[run][chosen])
    audit = audits[worst][chosen]
    if per_head:
        audit = replace(audit, heads=tuple(run[chosen] for run in audits))
    return Choice(methods[chosen], steps, audit, prepared, tuple(sorted(failed)))


def with_budget(cells: Cells, sizes: CellSizes, budget: int) -> Cells:
    """The same cells, so many of them opened. Rows that open cells together by default go on doing so."""
    return (
        cells if budget == sizes.probes else replace(cells, probes=budget, share=sizes.share if sizes.share > 1 else cells.share)
    )


def _audits(
    problem: Problem, prepared: Prepared, numbers: Tensor, budgets: Sequence[int], with_values: bool
) -> Iterator[list[Audit]]:
    """What each budget does to the rows of each run, one budget after the other; `numbers` `[runs, rows]`.

    Without `with_values`, errors in units of the values are NaN: on a GPU, to go through all values takes its time.
    """
    looks = len(budgets) * len(numbers)
    exact, found = try_budgets(prepared, numbers.flatten(), budgets)
    error, whole = torch.linalg.vector_norm(found - exact, dim=-1), torch.linalg.vector_norm(exact, dim=-1)
    unit = value_norm_of_rows(problem, numbers.flatten()) if with_values else torch.full_like(whole, torch.nan)
    # On a GPU, this is where it is waited for. A few hundred numbers are summed up faster here.
    norms = torch.cat([error, whole[None], unit[None].to(whole.dtype)]).cpu().view(-1, *numbers.shape)
    for own in norms[:-2]:
        yield [summary(*run, looks) for run in zip(own, norms[-2], norms[-1], strict=True)]


def _error(audit: Audit, unit: str) -> float:
    """What has to be within the tolerance."""
    return audit.additive if unit == "values" else audit.pooled_bound


def _step(method: Cells, audits: list[Audit], errors: list[float]) -> dict[str, Any]:
    worst = max(range(len(audits)), key=lambda run: errors[run])
    audit = audits[worst]
    names = ("additive", "relative", "pooled", "pooled_bound", "rows")
    step = {"method": repr(method), "error": errors[worst], **{name: getattr(audit, name) for name in names}}
    return step if len(audits) == 1 else {**step, "errors": errors}


def run_choice(choice: Choice, problem: Problem, call: Call) -> Outcome:
    """All rows, once, by what the pilot chose."""
    if not isinstance(choice.method, Cells):
        return choice.method.run(problem, call)
    assert choice.prepared is not None
    if not choice.exact_heads:
        return choice.method.run_prepared(problem, call, choice.prepared)
    kv_heads = problem.key.shape[1]
    others = [head for head in range(kv_heads) if head not in choice.exact_heads]
    entries = [batch * kv_heads + head for batch in range(problem.key.shape[0]) for head in others]
    by_cells = choice.method.run_prepared(_of_heads(problem, others), call, choice.prepared.of(entries))
    exactly = Exact().run(_of_heads(problem, [*choice.exact_heads]), call)
    place = torch.tensor([*_query_heads(problem, others), *_query_heads(problem, choice.exact_heads)]).argsort()

    def joined(ours: Tensor, theirs: Tensor) -> Tensor:
        return torch.cat([ours, theirs.to(ours.dtype)], 1).index_select(1, place.to(ours.device))

    output = joined(by_cells.output, exactly.output)
    if by_cells.lse is None or exactly.lse is None:
        return Outcome(output)
    lse = joined(by_cells.lse, exactly.lse)
    if not call.diagnostics:
        return Outcome(output, lse)
    info = {**by_cells.info, "exact_heads": _query_heads(problem, choice.exact_heads)}
    share = len(others) / kv_heads
    near = share * by_cells.info["keys_per_query"] + (1.0 - share) * exactly.info["keys_per_query"]
    return Outcome(output, lse, None, {**info, "keys_per_query": near})


def _query_heads(problem: Problem, kv_heads: Sequence[int]) -> list[int]:
    group = problem.group_size
    return [head * group + member for head in kv_heads for member in range(group)]


def _of_heads(problem: Problem, kv_heads: list[int]) -> Problem:
    """The same problem for some key-value heads, with their query heads."""
    heads, device = _query_heads(problem, kv_heads), problem.query.device
    own, all_own = torch.tensor(kv_heads, device=device), torch.tensor(heads, device=device)
    mask, padding, poison = problem.attn_mask, problem.key_padding, problem.poison
    return replace(
        problem,
        query=problem.query.index_select(1, all_own),
        key=problem.key.index_select(1, own),
        value=problem.value.index_select(1, own),
        attn_mask=mask if mask is None or mask.shape[1] == 1 else mask.index_select(1, all_own),
        key_padding=None if padding is None else padding.index_select(1, own),
        poison=None if poison is None else poison.index_select(1, all_own),
        least_keys=problem.grouped.keys.shape[1],
        sink=None if problem.sink is None else problem.sink.index_select(0, all_own),
    )


class Likely(NamedTuple):
    """What runs: see `Choice`."""

    method: Cells | Exact
    exact_heads: tuple[int, ...]


_SEEN: OrderedDict[Hashable, tuple[Likely, int]] = OrderedDict()
"""The last choice of calls with the same `Call.signature`, and how often in a row it was made."""
_LOCK = threading.Lock()


def likely(signature: Hashable) -> Likely | None:
    """What calls like this one have chosen the last times; None where they differ, or are too few."""
    with _LOCK:
        seen = _SEEN.get(signature) if signature is not None else None
    return seen[0] if seen is not None and seen[1] >= STREAK else None


def remember(signature: Hashable, choice: Choice) -> None:
    if signature is None:
        return
    made = Likely(choice.method, choice.exact_heads)
    with _LOCK:
        before, times = _SEEN.pop(signature, (None, 0))
        _SEEN[signature] = made, times + 1 if before == made else 1
        while len(_SEEN) > MOST_KNOWN:
            _SEEN.popitem(last=False)


def forget() -> None:
    with _LOCK:
        _SEEN.clear()


@dataclass
class Ahead:
    """A call that is run while its pilot looks: what is likely, if anything is, and what came of it."""

    problem: Problem
    call: Call
    own: Call = field(init=False)
    likely: Likely | None = field(init=False)
    grads: bool = field(init=False)
    begun: Outcome | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        # A run that draws would change what the next one draws. Diagnostics wait for the GPU.
        plain = not self.problem.dropout_p and not self.call.diagnostics
        self.likely = likely(self.call.signature) if plain else None
        self.grads = torch.is_grad_enabled()
        self.own = replace(self.call, signature=None)  # Each call looks at its own error.

    def begin(self, prepared: Prepared) -> None:
        """Start what is likely, with the cells that the pilot has made. The pilot has turned gradients off."""
        if self.likely is None:
            return
        method, exact_heads = self.likely
        try:
            with torch.set_grad_enabled(self.grads):
                self.begun = run_choice(Choice(method, [], None, prepared, exact_heads), self.problem, self.own)
        except torch.OutOfMemoryError:  # The pilot may choose what needs less.
            self.begun = None

    def outcome(self, choice: Choice) -> Outcome:
        """What the pilot chose, which may have been begun."""
        remember(self.call.signature, choice)
        begun, self.begun = self.begun, None
        if begun is not None and self.likely == (choice.method, choice.exact_heads):
            return begun
        del begun  # its memory is needed
        return run_choice(choice, self.problem, self.own)
