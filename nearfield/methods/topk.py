"""Top-k attention: the k heaviest keys exactly, the rest by a few drawn ones or not at all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nearfield import kernels
from nearfield.blocks import near_keys, row_blocks
from nearfield.checks import check_positive, check_strategy
from nearfield.gradients.weighted import weighted_attention
from nearfield.index.base import PADDING, BuiltIndex, Index, gathered_scores
from nearfield.index.exact import ExactIndex
from nearfield.methods.base import Call, Outcome
from nearfield.methods.exact import Exact
from nearfield.plan import Plan
from nearfield.problem import Problem, Rows
from nearfield.sampling import hashed_uniform, skip, without_replacement


@dataclass(frozen=True)
class TopK:
    """kNN attention: top `k` keys near; `tail` others, drawn without replacement, stand for the far field.

    With S the near set of a row that sees n keys, T the drawn ones and l = min(tail, n - k):

        O = (sum_S e^z v + (n-k)/l sum_T e^z v) / (sum_S e^z + (n-k)/l sum_T e^z)       (paper, Theorem on the simpler estimator)

    `tail=0` leaves the far field out, as classic kNN attention does; its exact error is p_far (O_near - O_far). With
    k * tail >= 2 (1 + 2 eps/3) (n-k) eps^-2 ln(4/delta) an entry is within eps/(1-eps) max|v - O| with probability
    1 - delta (`nearfield.budget`, theorem "tail"; the paper asks for more).

    Args:
        k: near keys per row; None: ceil(sqrt(Lk)).
        tail: drawn keys per row.
        index: what finds the near keys.

    Cost: the index's search, plus O(rows * (k + tail) * dim). Memory is bounded: rows are taken in blocks, and the
    backward pass plans each block again instead of storing it, unless there is but one and its plan is no larger than the
    inputs. Gradients are the exact gradients of the estimator.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 64).unbind(0)
        >>> out = nearfield.attention(q, k, v, is_causal=True, method=TopK(k=32, tail=32))
    """

    k: int | None = None
    tail: int = 0
    index: Index = field(default_factory=ExactIndex)

    def __post_init__(self) -> None:
        check_positive("k", self.k, optional=True)
        check_positive("tail", self.tail, least=0)
        check_strategy("index", self.index, "build", "an index such as ExactIndex()")

    def run(self, problem: Problem, call: Call) -> Outcome:
        rows = problem.rows
        k = near_keys(self.k, rows.length)
        if k == rows.length:
            exact = Exact().run(problem, call)
            return Outcome(exact.output, exact.lse, exact.stderr, {**exact.info, "k": rows.length, "tail": 0})
        in_triton = kernels.pairs_in_triton(call.backend, rows.keys, rows.values)
        built = self.index.build(rows.keys.detach())
        planner = _TopKPlanner(rows.detach(), built, k, self.tail, problem.dropout_p, call, _gathers(in_triton, rows, call))
        output, lse, error = weighted_attention(
            rows.queries, rows.keys, rows.values, planner, call.backend, stderr=call.diagnostics and self.tail > 0
        )
        if not call.diagnostics:
            return Outcome(output)
        near = rows.visible.clamp(max=k)
        used = near + (rows.visible - near).clamp(max=self.tail)
        info = {"keys_per_query": float(used.double().mean()), "k": k, "tail": self.tail}
        return Outcome(output, lse, error if self.tail else None, info, "triton" if in_triton else "")


def _gathers(in_triton: bool, rows: Rows, call: Call) -> bool:
    """Whether the reference kernels serve the call; Triton's leave it to them to add in a fixed order."""
    if in_triton:
        return torch.are_deterministic_algorithms_enabled()
    return kernels.name(call.backend, rows.keys.device) == "reference"


@dataclass(frozen=True)
class _TopKPlanner:
    rows: Rows
    built: BuiltIndex
    k: int
    tail: int
    dropout_p: float
    call: Call
    gathers: bool
    """whether kernels hold gathered rows"""

    def blocks(self) -> Iterable[slice]:
        dim = self.rows.queries.shape[-1]
        on_gpu = self.rows.queries.device.type != "cpu"
        # About ten words per pair, and gathered rows.
        words = 10 + (2 * dim if self.gathers else 0)
        return row_blocks(self.rows.visible.shape, (self.k + self.tail) * words * self.rows.queries.element_size(), on_gpu)

    def plan(self, block: slice) -> Plan:
        rows = self.rows.at(block)
        logits, ids = self.built.search(rows.queries, self.k, rows.causal_offset)
        if not self.tail:
            return Plan(ids, logits, keep=self._keep(ids, block))
        left_out = rows.visible - (ids != PADDING).sum(-1)
        drawn = self._draw_tail(ids, left_out, block)
        count = (drawn != PADDING).sum(-1)
        drawn_logits = gathered_scores(rows.queries, rows.keys, drawn, self.call.backend)
        weight = (left_out.to(logits.dtype) / count.clamp(min=1)).clamp(min=1).log()
        log_weight = torch.cat([torch.zeros_like(logits), weight[..., None].expand_as(drawn_logits)], -1)
        ids, logits = torch.cat([ids, drawn], -1), torch.cat([logits, drawn_logits], -1)
        return Plan(ids, logits, log_weight, self._keep(ids, block), near=self.k, left_out=left_out)

    def _draw_tail(self, near: Tensor, left_out: Tensor, block: slice) -> Tensor:
        """`tail` keys per row, without replacement, from the visible keys that are not near."""
        generator = self.call.seeds.generator(block.start)
        ranks = without_replacement(left_out.reshape(-1), self.tail, generator)
        # Padding sorts last: beyond every key, so that it pushes no rank up.
        taken = near.masked_fill(near == PADDING, 2 * self.rows.length).flatten(0, 1).sort(-1).values
        return skip(ranks, taken).view(*near.shape[:2], self.tail)

    def _keep(self, ids: Tensor, block: slice) -> Tensor | None:
        """Dropout mask, a function of (row, key), so that forward and backward see the same one."""
        if self.dropout_p == 0.0:
            return None
        device, count = ids.device, self.rows.visible.shape[1]
        batch = torch.arange(ids.shape[0], device=device)[:, None] * count
        row = torch.arange(block.start, block.stop, device=device)
        draw = hashed_uniform(self.call.seeds.base, (batch + row)[..., None], ids)
        return (draw >= self.dropout_p).to(self.rows.queries.dtype) / (1.0 - self.dropout_p)
