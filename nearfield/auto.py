"""Auto: the fastest method for a shape and a device whose error is known to be within a tolerance."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nearfield import _compat, crossover, windows
from nearfield.cells.method import Cells, check_share, is_captured
from nearfield.cells.trial import Prepared
from nearfield.checks import check_fraction, check_positive
from nearfield.exact import Exact
from nearfield.pilot import UNITS, Ahead, Choice, fingerprint, run_pilot
from nearfield.problem import Call, Method, Problem, is_traced
from nearfield.results import Outcome

EPS = 0.1
"""The default tolerance."""

LONG = 16_384
"""From so many keys on, exact attention where nobody has measured cells is worth a word."""

LOOK_TIMES = {("cpu", False): 2, ("cpu", True): 1, ("cuda", False): 8, ("cuda", True): 2}
"""From so many times the crossover length on, causal or not, a pilot is worth its time: exact attention takes about five times as
long as the pilot, or more. On a GPU it waits for the card and starts many small kernels, which take milliseconds."""


def look_times(device: torch.device, is_causal: bool) -> int:
    return LOOK_TIMES[device.type if device.type == "cuda" else "cpu", is_causal]


_log = logging.getLogger("nearfield")


@dataclass(frozen=True)
class Auto:
    """Exact attention, or `Cells` where they are faster and known to be within `eps` of it. The default method.

    Up to a crossover length that was measured for the device and the dtype, causal and not (`nearfield bench --calibrate`
    measures it on your machine), it is torch's SDPA. So it is with a mask beyond key padding, with `gradient=`, and in a window
    with bounds on both sides (with `check=False`, unless the window is longer than the crossover length). Beyond, a
    pilot looks before anything runs: keys are grouped into cells, 128 random rows are computed exactly and with several budgets,
    and the smallest budget that is within eps serves all rows, once and with the same cells. If there is none among those that
    are faster than exact attention, the result *is* exact attention.

    What is promised, for any data, with confidence 95% over the choice of rows (each budget gets its share of the 5%):

    - `unit="output"`: leaving out at most 5% of all rows, the pooled relative error sqrt(sum ||o - o*||^2 / sum ||o*||^2) is at
      most eps. `Audit.pooled_bound` is that error with its safety margin, `Audit.pooled` the error of the audited rows.
    - `unit="values"`: at least 95% of all rows have ||o - o*|| <= eps times the rms norm of the values.

    The rows of all heads count together, so those beyond eps may lie in one head, unless `per_head` is set. The budget is a
    property of the call: its choice looks at rows and keys of all positions, causal or not. Nothing else does: given the budget,
    no causal row depends on a later key. Without `generator=` the places that are looked at depend on the inputs alone, so a call
    repeats bit for bit. Gradients are those of what ran. With dropout, the pilot looks at attention without it. What each budget
    would have done is in `estimate(...).info["steps"]`.

    Where nothing can be looked at (torch.compile, torch.func, CUDA graph capture) it is exact attention. `nearfield.plan` makes a
    method to use there.

    Args:
        eps: the tolerance, between 0 and 1; None: 0.1.
        crossover: the number of keys from which on cells may be used, in place of the measured one. On a GPU it is meant for
            eight heads; with fewer heads it takes more keys. With `check` it takes twice as many on a CPU without a mask; on a
            GPU eight times as many, causal twice.
        share: that of its cells, see `Cells`.
        unit: of eps, `"output"` or `"values"`.
        per_head: every head is within eps by itself, at a confidence of 95% for all of them; those that are not get exact
            attention. Heads that share keys do so together. At least 128 rows of each head are looked at.
        check: False: no pilot and no promise. `Cells()` beyond the crossover length, whatever their error.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 2048, 64).unbind(0)
        >>> est = nearfield.estimate(q, k, v, method=Auto(eps=0.05, crossover=256))
        >>> est.info["chosen"], bool(est.info["steps"][0]["pooled"] > 0.05)
        (Exact(), True)
    """

    eps: float | None = None
    crossover: int | None = None
    share: int | None = None
    unit: str = "output"
    per_head: bool = False
    check: bool = True

    any_mask = True
    any_logits = True
    any_window = True
    gives_lse = True
    drops_pairs = True

    def __post_init__(self) -> None:
        if self.eps is not None:
            check_fraction("eps", self.eps)
        check_positive("crossover", self.crossover, optional=True)
        check_share(self.share)
        if self.unit not in UNITS:
            raise ValueError(f'unit must be "output" (the rms norm of the output) or "values", got {self.unit!r}')
        for name in ("per_head", "check"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} must be True or False, got {getattr(self, name)!r}")
        if not self.check and (self.eps is not None or self.per_head):
            raise ValueError(f"check=False promises no error; got eps={self.eps!r} and per_head={self.per_head}: leave them out")

    def run(self, problem: Problem, call: Call) -> Outcome:
        if call.gradient is not None or self.prefers_exact(problem):
            if self.crossover is None and not is_traced() and problem.window is None:
                tell_if_unmeasured(problem.query, problem.key, problem.is_causal)
            return _run_chosen(Exact(), problem, call)
        if not self.check:
            return _run_chosen(self.cells, problem, call)
        if _cannot_look(problem):
            tell(
                "traced",
                "exact attention ran under torch.compile, torch.func or the capture of a CUDA graph, where the error of cells "
                "cannot be looked at; make a method before, plan = nearfield.plan(q, k, v), and pass method=plan",
            )
            return _run_chosen(Exact(), problem, call)
        ahead = Ahead(problem, call)
        choice = self.choose(problem, call, ahead.begin)
        if isinstance(choice.method, Exact) and choice.steps:
            tell(
                "pilot",
                f"exact attention ran for {problem.key.shape[2]} keys: with cells, the error would have been {choice.best:.2g} "
                f"at best, and eps is {self.tolerance}; nearfield.explain(q, k, v) says more, and "
                "method=nearfield.Auto(eps=...) allows more",
            )
        outcome = ahead.outcome(choice)
        if not call.diagnostics:
            return outcome
        info = {"chosen": choice.method, "steps": choice.steps, "audit": choice.audit}
        return replace(outcome, info={**outcome.info, **info})

    def choose(self, problem: Problem, call: Call, meanwhile: Callable[[Prepared], None] = lambda prepared: None) -> Choice:
        """What the pilot of a call finds. `meanwhile`: see `run_pilot`."""
        generator = call.seeds.repeated(-2, seed=fingerprint(problem))
        promise = self.tolerance, self.unit, self.limit(problem)
        return run_pilot(self.cells, problem, call, *promise, generator, self.per_head, meanwhile)

    def without_looking(self, problem: Problem) -> Method:
        """What it is for inputs of such a shape where nobody can look at all of them, as over ranks."""
        if self.prefers_exact(problem):
            return Exact()
        if not self.check:
            return self.cells
        tell(
            "ranks",
            "exact attention ran over ranks, which do not look at the error of cells together; make a method before, "
            "plan = nearfield.plan(q, k, v), and pass method=plan",
        )
        return Exact()

    def is_async(self, problem: Problem, backend: str) -> bool:
        if problem.window is not None:
            return problem.query.is_cuda and self.prefers_exact(problem)
        looks = self.check and not _cannot_look(problem) and not self._is_short(problem)
        return not looks and self.cells.is_async(problem, backend)

    @property
    def cells(self) -> Cells:
        """What it uses beyond the crossover length, with the default budget."""
        return Cells(share=self.share)

    @property
    def tolerance(self) -> float:
        """What eps means if it is not given."""
        return EPS if self.eps is None else self.eps

    def limit(self, problem: Problem) -> float:
        """The crossover length."""
        if self.crossover is not None:
            return self.crossover
        return crossover.length(problem.query.device, problem.query.dtype, problem.is_causal)

    def _is_short(self, problem: Problem) -> bool:
        return is_exact_faster(problem.query, problem.key, problem.is_causal, self.crossover, self.check)

    def prefers_exact(self, problem: Problem) -> bool:
        """Whether it is exact attention without looking at values."""
        if problem.window is not None:
            # A pilot looks at parts of the keys, and its promise is about all of them.
            return self.check or problem.reach < self.limit(problem)
        return problem.has_general_mask or self._is_short(problem)


def _run_chosen(method: Method, problem: Problem, call: Call) -> Outcome:
    in_parts = problem.window is not None and not method.any_window
    outcome = windows.run(method, problem, call) if in_parts else method.run(problem, call)
    if not call.diagnostics:
        return outcome
    return replace(outcome, info={**outcome.info, "chosen": method, "steps": [], "audit": None})


def _cannot_look(problem: Problem) -> bool:
    """Whether there are no values to look at, or nothing may wait for them."""
    return is_traced() or is_captured(problem.query)


def is_exact_faster(query: Tensor, key: Tensor, is_causal: bool, limit: float | None = None, checked: bool = True) -> bool:
    """Whether SDPA is faster than cells. `limit`: the crossover length, in place of the measured one. `checked`: with a pilot."""
    length, queries = key.shape[2], query.shape[2]
    if limit is None:
        limit = crossover.length(query.device, query.dtype, is_causal)
    if checked:
        limit = look_times(query.device, is_causal) * limit
    # Cells group all keys before the first query is answered. Few queries do not repay that.
    if length < limit or queries < limit / 4:
        return True
    # With little work, starting the many kernels of cells takes longer than running them.
    return query.is_cuda and query.shape[0] * query.shape[1] * queries * length < crossover.heads(query.device) * limit**2


def tell_if_unmeasured(query: Tensor, key: Tensor, is_causal: bool) -> None:
    """Log that many keys got exact attention, if the reason is that nobody has measured cells here."""
    length = key.shape[2]
    if length >= LONG and not crossover.is_measured(query.device, query.dtype, is_causal):
        tell(
            "unmeasured",
            f"exact attention ran for {length} keys: nobody has measured from which length on cells are faster on "
            f"{crossover.device_name(query.device)} with {crossover.dtype_name(query.dtype)}; `nearfield bench --calibrate` does",
        )


_TOLD: set[str] = set()


@_compat.constant_for_compile
def tell(kind: str, message: str) -> None:
    """Log, once in a process for each kind of reason, that exact attention ran where cells were to be expected, and why."""
    if kind not in _TOLD:
        _TOLD.add(kind)
        _log.warning(message)
