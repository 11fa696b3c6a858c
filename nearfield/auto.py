"""Auto: the fastest method for a shape and a device, or one that meets an error tolerance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from nearfield import crossover
from nearfield.audit import CONFIDENCE, audit_rows, run_audit
from nearfield.cells.method import Cells, check_share
from nearfield.checks import check_fraction, check_positive
from nearfield.exact import Exact
from nearfield.problem import Call, Method, Problem, is_traced
from nearfield.results import Outcome

STEPS = 4
"""How many budgets are tried, at most, before exact attention."""

GROWTH = 3
"""Each budget opens this many times as many cells as the one before."""

MOST_NEAR = 0.3
"""Opening more than this share of the keys is no faster than exact attention."""

QUANTILE = 0.95
"""The share of all rows that is promised to be within eps."""


@dataclass(frozen=True)
class Auto:
    """Exact attention where that is fastest, `Cells` where they are; with `eps`, a result that is known to be within it.

    Without `eps`: torch's SDPA up to a crossover length that was measured for the device and the dtype, causal and not
    (`nearfield bench --calibrate` measures it on your machine), and `Cells()` beyond. With a mask beyond key padding, or with
    `gradient=`, it is always exact attention.

    With `eps`: run `Cells`, recompute random rows exactly, and open more cells until all of these rows are within eps of exact
    attention (in units of the rms norm of the values). If no budget that could be faster than exact attention achieves that, the
    result *is* exact attention. Each audit looks at fresh rows, enough of them that the promise holds whichever audit is the one
    that passes: with confidence 95%, at least 95% of all rows are within eps. The rows of all heads count together, so those
    beyond eps may all lie in one head. The audits are in `estimate(...).info`.

    Args:
        eps: the tolerance, between 0 and 1; None: whatever `Cells()` gives.
        crossover: the number of keys from which on to use cells, in place of the measured one. On a GPU it is meant for eight
            heads; with fewer heads it takes more keys.
        share: that of its cells, see `Cells`.

    Example:
        >>> q, k, v = torch.randn(3, 1, 2, 300, 64).unbind(0)
        >>> est = nearfield.estimate(q, k, v, method=Auto(eps=0.05, crossover=256))
        >>> est.info["chosen"], est.info["audit"].additive <= 0.05
        (Exact(), True)
    """

    eps: float | None = None
    crossover: int | None = None
    share: int | None = None

    any_mask = True
    any_logits = True
    gives_lse = True
    drops_pairs = True

    def __post_init__(self) -> None:
        if self.eps is not None:
            check_fraction("eps", self.eps)
        check_positive("crossover", self.crossover, optional=True)
        check_share(self.share)

    def run(self, problem: Problem, call: Call) -> Outcome:
        if self._prefers_exact(problem, call):
            return _run_chosen(Exact(), problem, call)
        if self.eps is None:
            return _run_chosen(self._cells, problem, call)
        if is_traced():
            raise RuntimeError(
                f"Auto(eps={self.eps}) looks at its own error and cannot be traced; use Cells(...) under torch.compile and vmap"
            )
        if problem.dropout_p:
            raise ValueError(f"Auto(eps={self.eps}) compares with attention without dropout; got dropout_p={problem.dropout_p}")
        # Each call looks at its own error.
        return self._within_eps(problem, replace(call, signature=None))

    def is_async(self, problem: Problem, backend: str) -> bool:
        return self.eps is None and self._cells.is_async(problem, backend)

    @property
    def _cells(self) -> Cells:
        return Cells(share=self.share)

    def _prefers_exact(self, problem: Problem, call: Call) -> bool:
        if call.gradient is not None or problem.has_general_mask:
            return True
        return is_exact_faster(problem.query, problem.key, problem.is_causal, self.crossover)

    def _within_eps(self, problem: Problem, call: Call) -> Outcome:
        assert self.eps is not None
        # Any of several audits may be the one that passes, so each gets its share of the 5%.
        rows = audit_rows(QUANTILE, 1.0 - (1.0 - CONFIDENCE) / STEPS)
        steps: list[dict[str, Any]] = []
        method: Cells | Exact = self._cells
        while True:
            if isinstance(method, Cells) and (len(steps) == STEPS or _near_share(method, problem) > MOST_NEAR):
                method = Exact()
            outcome = method.run(problem, call)
            generator = call.seeds.generator(-2 - len(steps))
            audit = run_audit(problem, outcome.output.to(problem.query.dtype), rows, generator, looks=STEPS)
            steps.append({"method": repr(method), "additive": audit.additive, "relative": audit.relative, "rows": audit.rows})
            if isinstance(method, Exact) or audit.additive <= self.eps:
                return replace(outcome, info={**outcome.info, "chosen": method, "steps": steps, "audit": audit})
            sizes = method.sizes(problem)
            # Rows that open cells together by default go on doing so.
            method = replace(method, probes=GROWTH * sizes.probes, share=sizes.share if sizes.share > 1 else method.share)


def _run_chosen(method: Method, problem: Problem, call: Call) -> Outcome:
    outcome = method.run(problem, call)
    if not call.diagnostics:
        return outcome
    return replace(outcome, info={**outcome.info, "chosen": method, "steps": [], "audit": None})


def is_exact_faster(query: Tensor, key: Tensor, is_causal: bool, limit: float | None = None) -> bool:
    """Whether SDPA is faster than cells. `limit`: the crossover length, in place of the measured one."""
    length, queries = key.shape[2], query.shape[2]
    limit = crossover.length(query.device, query.dtype, is_causal) if limit is None else limit
    # Cells group all keys before the first query is answered. Few queries do not repay that.
    if length < limit or queries < limit / 4:
        return True
    # With little work, starting the many kernels of cells takes longer than running them.
    return query.is_cuda and query.shape[0] * query.shape[1] * queries * length < crossover.heads(query.device) * limit**2


def _near_share(method: Cells, problem: Problem) -> float:
    """About what share of the keys a row would open."""
    sizes = method.sizes(problem)
    seen = problem.key.shape[2] / (2 if problem.is_causal else 1)
    return sizes.probes * sizes.cell_size / max(1.0, seen)
