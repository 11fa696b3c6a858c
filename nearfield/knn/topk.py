"""kNN attention: find the k nearest keys of every row, draw a few of the others, and attend to these alone.

A planner decides which keys a block of rows attends to, and with what weight (`Plan`), before any attention arithmetic.
`weighted_attention` then computes the softmax over planned keys and its gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nearfield.checks import check_fraction, check_index, check_positive, refuse_double_backward
from nearfield.chunks import row_blocks
from nearfield.exact import Exact
from nearfield.kernels import backends
from nearfield.kernels.backends import full_precision
from nearfield.kernels.dense import cap_slope, capped, sink_share, sink_weight
from nearfield.kernels.reference import exact_attention, weighted_softmax
from nearfield.knn import fused
from nearfield.knn.index.base import PADDING, BuiltIndex, Index, default_k, flat_ids, gathered_scores, row_table
from nearfield.knn.index.cells import CellIndex
from nearfield.knn.index.exact import ExactIndex
from nearfield.knn.index.own import build_index, check_built
from nearfield.knn.index.tally import Tally
from nearfield.knn.operator import Settings, implement, make_known, number_of, traced_attention
from nearfield.knn.tail import RowsMet, TailPromise, tail_factor
from nearfield.problem import Call, Problem, Rows
from nearfield.results import Outcome
from nearfield.sampling import Dropout, Seeds, pair_dropout, skip, without_replacement


@dataclass(frozen=True)
class Plan:
    """A weighted set of keys per row: attention is softmax(logits + log_weight) over them.

    A key that is certain to be in the set has weight 1. A drawn key has one over its inclusion probability, which makes
    numerator and denominator of the softmax unbiased. All tensors are `[batch, rows, width]`.
    """

    ids: Tensor
    """`PADDING` where the row has fewer keys"""
    logits: Tensor
    """-inf where the id is `PADDING`"""
    log_weight: Tensor | None = None
    keep: Tensor | None = None
    """dropout: 0 or 1 / (1 - p), applied to the normalised weights"""
    near: int | None = None
    """how many of the columns are near keys (weight 1), before the drawn ones; None: all"""
    left_out: Tensor | None = None
    """`[batch, rows]`: how many visible keys the drawn ones stand for"""


@dataclass(frozen=True)
class TopK:
    """kNN attention: the top `k` keys are near; `tail` others, drawn without replacement, stand for the rest.

    With S the near set of a row that sees n keys, T the drawn keys and l = min(tail, n - k):

        O = (sum_S e^z v + (n-k)/l sum_T e^z v) / (sum_S e^z + (n-k)/l sum_T e^z)       (paper, Theorem on the simpler estimator)

    `tail=0` leaves the other keys out, as classic kNN attention does; its exact error is p_far (O_near - O_far). With
    k * tail >= 2 (1 + 2 eps/3) (n-k) eps^-2 ln(4/delta) an entry is within eps/(1-eps) max|v - O| with probability
    1 - delta (`nearfield.budget`, theorem "tail"; the paper asks for more). With `eps` and `delta` the sizes follow from that.

    Args:
        k: near keys per row; None: ceil(sqrt(Lk)), or what `eps` and `delta` ask for. Keys that padding hides do not count in
            Lk, unless torch.compile traces the call, where nobody knows how many these are.
        tail: drawn keys per row; None: 0, or what `eps` and `delta` ask for.
        index: finds the near keys; a built-in index or your own (`nearfield.Index`). It is built in every call, unless it is
            built already: `KMeansIndex().build(key)` is searched as it is, and must have the keys of the call.
        eps, delta: the promise above, for rows that see all keys (a row that sees fewer needs less). If neither k nor tail is
            given, both are the same: only their product counts, so this reads the fewest keys, and the searches of indices that
            can vouch for their answers do not depend on k. If one is given it stays, and the other follows. If both are given
            and do not keep the promise, the call raises ValueError. Where the promise asks for all keys, attention is exact.
        joint: False: the promise holds for each entry by itself, each with probability 1 - delta. True: for all entries of the
            call at once, which is the condition with 2 delta / (rows (value_dim + 1)) for delta.

    With `eps` and `delta`, `estimate` says in `info` which k and tail were chosen, what was promised (`promise`, before dropout),
    and for which share of the rows the condition is known to hold by what was seen (`promise_met`): with k replaced by Z_S e^-U,
    where Z_S is the sum of e^score of the near keys and U the index's upper bound for the scores of the others. `ExactIndex`
    finds the true top k and meets it everywhere. With an index that knows no bounds, only rows that read all their keys meet it.

    Cost: the search of the index, plus O(rows * (k + tail) * dim). Memory is bounded: rows are taken in blocks, and the
    backward pass plans each block again. A plan is stored only if it is the only one and no larger than the inputs. Gradients
    are the exact gradients of the estimator.

    Example:
        >>> q, k, v = torch.randn(3, 1, 4, 1000, 64).unbind(0)
        >>> out = nearfield.attention(q, k, v, is_causal=True, method=TopK(k=32, tail=32))
        >>> info = nearfield.estimate(q, k, v, method=TopK(eps=0.4, delta=0.1)).info
        >>> info["k"], info["tail"], info["promise_met"]
        (215, 215, 1.0)
    """

    k: int | None = None
    tail: int | None = None
    # torch.compile cannot trace a class as the factory.
    index: Index = field(default_factory=lambda: ExactIndex())
    eps: float | None = None
    delta: float | None = None
    joint: bool = False

    any_mask = False
    any_logits = True
    any_window = False
    gives_lse = True
    drops_pairs = True

    def __post_init__(self) -> None:
        check_positive("k", self.k, optional=True)
        check_positive("tail", self.tail, optional=True, least=0)
        check_index("index", self.index)
        make_known(self.index)
        if (self.eps is None) != (self.delta is None):
            raise ValueError(f"eps and delta make one promise: give both or neither, got eps={self.eps!r}, delta={self.delta!r}")
        if self.eps is None:
            if self.joint:
                raise ValueError("joint=True needs a promise; give eps and delta, or leave joint out")
            return
        check_fraction("eps", self.eps)
        check_fraction("delta", self.delta)
        if self.tail == 0:
            raise ValueError(f"tail=0 leaves keys out and promises nothing; leave it out, or eps={self.eps!r} and delta")

    def __setstate__(self, state: dict[str, Any]) -> None:
        """For copies, whose index may be a new object."""
        self.__dict__.update(state)
        make_known(self.index)

    def run(self, problem: Problem, call: Call) -> Outcome:
        rows = problem.grouped
        promise = self._promise()
        k, tail = self._sizes(rows, promise)
        if k == rows.length:
            check_built(self.index, rows.keys)
            exact = Exact().run(problem, call)
            promised = {} if promise is None else {"promise": "exact: the promise asks for all keys", "promise_met": 1.0}
            return Outcome(exact.output, exact.lse, exact.stderr, {**exact.info, "k": rows.length, "tail": 0, **promised})
        if torch.compiler.is_compiling() and not call.diagnostics:
            return self._run_traced(problem, call, k, tail)
        sizes = fused.served_sizes(self.index, problem, call, rows, k, tail)
        if sizes is not None:
            assert isinstance(self.index, CellIndex)
            return Outcome(problem.by_head(fused.attend_by_cells(rows, problem.scale, self.index, sizes, k, tail, call.seeds)))
        rows = problem.rows
        backend = backends.pairs_backend(call.backend, rows.keys, rows.values)
        built = build_index(self.index, rows.keys)
        met = None
        if promise is not None and call.diagnostics:
            met = RowsMet(tail_factor(promise.eps, promise.entry_delta(rows.count, rows.values.shape[-1])))
        dropout = pair_dropout(problem.dropout_p, call.seeds)
        planner = _Planner(
            rows.detach(), built, k, tail, dropout, call, _gathers(backend), Tally(built), Tally(built), met, problem.softcap
        )
        output, lse, error = weighted_attention(
            rows.queries, rows.keys, rows.values, planner, call.backend, call.diagnostics and tail > 0, problem.row_sinks
        )
        planner.searches.warn(built)
        if not call.diagnostics:
            return Outcome(problem.by_head(output), problem.by_head(lse) if call.return_lse else None)
        near = rows.visible.clamp(max=k)
        used = near + (rows.visible - near).clamp(max=tail)
        info = {"keys_used": float(used.double().mean()), "k": k, "tail": tail, "backend": backend, **planner.tally.info()}
        if promise is not None and met is not None:
            info |= {"promise": promise.says(share := met.share()), "promise_met": share}
        stderr = problem.by_head(error) if tail else None
        return Outcome(problem.by_head(output), problem.by_head(lse), stderr, info)

    def _run_traced(self, problem: Problem, call: Call, k: int, tail: int) -> Outcome:
        """As an operator: a search looks at values."""
        rows = problem.rows
        random = bool(tail or problem.dropout_p)
        seed = call.seeds.tensor() if random else torch.zeros((), dtype=torch.int64)
        settings = Settings(k, tail, problem.dropout_p, number_of(self.index), call.backend, problem.needs_grad, problem.softcap)
        inputs = rows.queries, rows.keys, rows.values, rows.visible, seed, problem.row_sinks
        output, lse = traced_attention(*inputs, settings)
        return Outcome(problem.by_head(output), problem.by_head(lse))

    def _sizes(self, rows: Rows, promise: TailPromise | None) -> tuple[int, int]:
        """Near and drawn keys per row."""
        if promise is None:
            return default_k(self.k, rows.length), min(self.tail or 0, rows.length)
        return promise.sizes(rows.length, rows.count, rows.values.shape[-1], self.k, self.tail)

    def is_async(self, problem: Problem, backend: str) -> bool:
        return False

    def _promise(self) -> TailPromise | None:
        return None if self.eps is None or self.delta is None else TailPromise(self.eps, self.delta, self.joint)

    def attend_rows(self, rows: Rows, built: BuiltIndex, k: int, call: Call) -> Tensor:
        """Output `[batch, rows, value_dim]` of rows with `k` near keys each, by an index of their keys that is there already."""
        most, tail = int(rows.visible.max()), min(self.tail or 0, rows.length)
        promise = self._promise()
        if promise is not None:
            k, tail = self._sizes(rows, promise)
        if k >= most:
            output = rows.values.new_empty(*rows.visible.shape, rows.values.shape[2])
            for block in row_blocks(rows.visible.shape, 4 * most * rows.queries.element_size(), rows.queries.is_cuda):
                part = rows.at(block)
                output[:, block], _ = exact_attention(part.queries, part.keys[:, :most], part.values[:, :most], part.visible)
            return output
        backend = backends.pairs_backend(call.backend, rows.keys, rows.values)
        planner = _Planner(rows, built, k, tail, None, call, _gathers(backend), Tally(built), Tally(built))
        output, _, _ = weighted_attention(rows.queries, rows.keys, rows.values, planner, call.backend)
        planner.searches.warn(built)
        return output


def _gathers(backend: str) -> bool:
    """Whether the kernels gather rows into memory. The reference does, and replaces Triton where additions need a fixed order."""
    return torch.are_deterministic_algorithms_enabled() if backend == "triton" else backend == "reference"


@dataclass(frozen=True)
class _Planner:
    """Plans any block of rows. Asked again, as by the backward pass, it makes the same plan."""

    rows: Rows
    built: BuiltIndex | None
    """None: the keys of all plans are known, see `plan_of`"""
    k: int
    tail: int
    dropout: Dropout | None
    call: Call
    gathers: bool
    """whether kernels gather rows into memory"""
    tally: Tally
    """keys that were looked at so far"""
    searches: Tally
    """those of them that the index looked at, if it says"""
    met: RowsMet | None = None
    """rows whose promise is known to hold; None: none was made, or nobody asks"""
    softcap: float = 0.0
    """see `Problem.softcap`: the nearest keys are the same, since a cap keeps the order of logits"""
    found: Tensor | None = None
    """`[batch, rows, k + tail]`: where to note the keys of plans; None: nowhere"""

    def blocks(self) -> Iterable[slice]:
        dim = self.rows.queries.shape[-1]
        on_gpu = self.rows.queries.device.type != "cpu"
        # About ten words per pair, plus a gathered key and value.
        words = 10 + (2 * dim if self.gathers else 0)
        return row_blocks(self.rows.visible.shape, (self.k + self.tail) * words * self.rows.queries.element_size(), on_gpu)

    def plan(self, block: slice) -> Plan:
        assert self.built is not None
        rows = self.rows.at(block)
        logits, ids, scored = self.built.find(rows.queries, self.k, rows.causal_offset)
        near = (ids != PADDING).sum(-1)
        drawn_at_most = (rows.visible - near).clamp(max=self.tail)
        self.tally.add((near if scored is None else scored) + drawn_at_most, rows.visible)
        if scored is not None:
            self.searches.add(scored, rows.visible)
        if self.met is not None and self.met.open:
            bound = self.built.upper_bound(rows.queries, ids, rows.causal_offset)
            bound = bound if bound is None else capped(bound, self.softcap)
            self.met.add(self._capped(logits), bound, rows.visible - near, self.tail)
        if self.tail:
            drawn = self._draw_tail(ids, rows.visible - near, block)
            drawn_logits = gathered_scores(rows.queries, rows.keys, drawn, self.call.backend)
            ids, logits = torch.cat([ids, drawn], -1), torch.cat([logits, drawn_logits], -1)
        if self.found is not None:
            self.found[:, block] = ids
        return self._weighted(ids, logits, rows.visible, block)

    def plan_of(self, ids: Tensor, block: slice) -> Plan:
        """The plan whose keys these are."""
        rows = self.rows.at(block)
        return self._weighted(ids, gathered_scores(rows.queries, rows.keys, ids, self.call.backend), rows.visible, block)

    def _weighted(self, ids: Tensor, logits: Tensor, visible: Tensor, block: slice) -> Plan:
        """A plan of `k` near keys and `tail` drawn ones, whose logits are not capped yet."""
        logits = self._capped(logits)
        if not self.tail:
            return Plan(ids, logits, keep=self._keep(ids, block))
        near, drawn = ids.split([self.k, self.tail], -1)
        left_out = visible - (near != PADDING).sum(-1)
        count = (drawn != PADDING).sum(-1)
        weight = (left_out.to(logits.dtype) / count.clamp(min=1)).clamp(min=1).log()
        zero = torch.zeros_like(near, dtype=logits.dtype)
        log_weight = torch.cat([zero, weight[..., None].expand_as(drawn)], -1)
        return Plan(ids, logits, log_weight, self._keep(ids, block), near=self.k, left_out=left_out)

    def _capped(self, logits: Tensor) -> Tensor:
        """The logits under the cap; -inf, where there is no key, stays."""
        return capped(logits, self.softcap).masked_fill(logits == -torch.inf, -torch.inf) if self.softcap else logits

    def _draw_tail(self, near: Tensor, left_out: Tensor, block: slice) -> Tensor:
        """`tail` keys per row, without replacement, from the visible keys that are not near."""
        generator = self.call.seeds.generator(block.start)
        ranks = without_replacement(left_out.reshape(-1), self.tail, generator)
        # Padding goes beyond every key: it sorts last and pushes no rank up.
        taken = near.masked_fill(near == PADDING, 2 * self.rows.length).flatten(0, 1).sort(-1).values
        return skip(ranks, taken).view(*near.shape[:2], self.tail)

    def _keep(self, ids: Tensor, block: slice) -> Tensor | None:
        """The dropout factors of (row, key) pairs; None: no dropout."""
        if self.dropout is None:
            return None
        return self.dropout.factors(self.rows.numbers(block)[..., None], ids, self.rows.queries.dtype)


def weighted_attention(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    planner: _Planner,
    backend: str = "auto",
    stderr: bool = False,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attention of queries `[batch, rows, dim]` over the planned keys: output, log-normaliser and standard error.

    The logits come with the plan. Queries, keys and values get the exact gradient of the estimator. The standard error
    is zero where nothing was drawn, and everywhere unless `stderr` is set. `sinks` `[batch, rows]`: see `Problem.row_sinks`.
    """
    return _WeightedAttention.apply(queries, keys, values, planner, backend, stderr, sinks)


class _WeightedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        planner: _Planner,
        backend: str,
        stderr: bool,
        sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kernel = backends.pair_kernels(backend, queries.device)
        output = values.new_empty(*queries.shape[:2], values.shape[2])
        lse = queries.new_empty(queries.shape[:2])
        error = queries.new_zeros(queries.shape[:2])
        table, step = row_table(values)
        squares = table.square().sum(-1) if stderr else table.new_empty(0)
        blocks = list(planner.blocks())
        kept: tuple[Tensor | None, ...] = ()
        for block in blocks:
            plan = planner.plan(block)
            weights, lse[:, block] = _weights(plan, sinks, block)
            applied = weights if plan.keep is None else weights * plan.keep
            rows = kernel.pair_sums(applied.flatten(0, 1), table, flat_ids(plan.ids, step))
            output[:, block] = rows.unflatten(0, weights.shape[:2])
            if stderr and plan.left_out is not None:
                error[:, block] = _standard_error(kernel, plan, weights, output[:, block], table, squares, step)
            parts = (plan.ids, plan.logits, plan.log_weight, plan.keep)
            if len(blocks) == 1 and any(ctx.needs_input_grad) and _bytes(*parts) <= _bytes(queries, keys, values):
                kept = parts
        ctx.save_for_backward(queries, keys, values, sinks, *kept)
        ctx.softcap = planner.softcap
        # A planner keeps the inputs alive, so it stays only where it is needed again.
        ctx.planner, ctx.kernel = None if kept else planner, kernel
        ctx.mark_non_differentiable(error)
        return output, lse, error

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_lse: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        refuse_double_backward()
        with full_precision(grad_output):
            queries, keys, values, sinks, *kept = ctx.saved_tensors
            plans = _plans(ctx.planner, kept, queries.shape[1])
            grads = _weighted_backward(ctx.kernel, queries, keys, values, sinks, plans, ctx.softcap, grad_output, grad_lse)
            return (*grads[:3], None, None, None, grads[3])


def _weights(plan: Plan, sinks: Tensor | None, block: slice) -> tuple[Tensor, Tensor]:
    """The weights of the planned keys of a block, and the log-normalisers, beside the sinks of its rows."""
    weights, lse = weighted_softmax(plan.logits, plan.log_weight)
    if sinks is None:
        return weights, lse
    share, total = sink_share(lse, sinks[:, block])
    return weights * share[..., None], total


def _bytes(*tensors: Tensor | None) -> int:
    return sum(x.numel() * x.element_size() for x in tensors if x is not None)


def _plans(planner: _Planner | None, kept: Sequence[Tensor | None], rows: int) -> Iterator[tuple[slice, Plan]]:
    """The blocks of the forward pass with their plans: the one that was kept, or all of them made again."""
    if planner is None:
        ids, logits, log_weight, keep = kept
        assert ids is not None
        assert logits is not None
        yield slice(0, rows), Plan(ids, logits, log_weight, keep)
        return
    for block in planner.blocks():
        yield block, planner.plan(block)


def _weighted_backward(
    kernel: ModuleType,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    sinks: Tensor | None,
    plans: Iterable[tuple[slice, Plan]],
    softcap: float,
    grad_output: Tensor,
    grad_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of queries, keys, values and sinks."""
    key_table, value_table = keys.flatten(0, 1), values.flatten(0, 1)
    # Laid out as the operator of compiled programs says it is.
    grad_queries = torch.empty_like(queries, memory_format=torch.contiguous_format)
    grad_sinks = None if sinks is None else torch.empty_like(sinks, memory_format=torch.contiguous_format)
    grad_keys, grad_values = torch.zeros_like(key_table), torch.zeros_like(value_table)
    for block, plan in plans:
        ids = flat_ids(plan.ids, keys.shape[1])
        by_row, lse = _weights(plan, sinks, block)
        weights = by_row.flatten(0, 1)
        query_rows, upstream = queries[:, block].flatten(0, 1), grad_output[:, block].flatten(0, 1)

        grad_weights = kernel.pair_scores(upstream, value_table, ids)
        applied = weights
        if plan.keep is not None:
            keep = plan.keep.flatten(0, 1)
            applied, grad_weights = weights * keep, grad_weights * keep
        delta = (weights * grad_weights).sum(-1) - grad_lse[:, block].flatten()
        grad_logits = weights * (grad_weights - delta[:, None])
        if softcap:
            grad_logits = grad_logits * cap_slope(plan.logits, softcap).flatten(0, 1)
        if sinks is not None and grad_sinks is not None:
            # A sink is a key with value zero.
            grad_sinks[:, block] = -sink_weight(lse, sinks[:, block]) * delta.view_as(lse)

        grad_queries[:, block] = kernel.pair_sums(grad_logits, key_table, ids).view_as(queries[:, block])
        kernel.pair_scatter_(grad_keys, grad_logits, query_rows, ids)
        kernel.pair_scatter_(grad_values, applied, upstream, ids)
    return grad_queries, grad_keys.view_as(keys), grad_values.view_as(values), grad_sinks


def _standard_error(
    kernel: ModuleType, plan: Plan, weights: Tensor, output: Tensor, table: Tensor, squares: Tensor, step: int
) -> Tensor:
    """Standard error of a row by the delta method, as a norm over the columns.

    With p_t the weights of the l drawn keys, the error is to first order the deviation of the mean of r_t = l p_t (v_t - output)
    from its expectation. Drawing without replacement from `left_out` keys multiplies the variance by 1 - l / left_out.
    """
    assert plan.left_out is not None
    drawn = plan.ids[..., plan.near :]
    share = weights[..., plan.near :]
    count = (drawn >= 0).sum(-1).to(share.dtype)
    flat = flat_ids(drawn, step)
    along = kernel.pair_scores(output.flatten(0, 1), table, flat).view(share.shape)
    square = squares[flat].view(share.shape) - 2 * along + output.square().sum(-1, keepdim=True)
    mean = kernel.pair_sums(share.flatten(0, 1), table, flat).view(output.shape) - share.sum(-1, keepdim=True) * output
    spread = count.square() * (share.square() * square.clamp(min=0)).sum(-1) - count * mean.square().sum(-1).where(count > 1, 0)
    variance = spread.clamp(min=0) / (count - 1).clamp(min=1) / count.clamp(min=1)
    return (variance * (1 - count / plan.left_out.clamp(min=1)).clamp(min=0)).sqrt()


def _traced_planner(rows: Rows, seed: Tensor, settings: Settings, built: BuiltIndex | None, found: Tensor) -> _Planner:
    """The planner of a call that is a part of a traced program: the same one as outside of it, given the same seed."""
    seeds = Seeds.given(seed, rows.queries.device)
    gathers = _gathers(backends.pairs_backend(settings.backend, rows.keys, rows.values))
    dropout, call = pair_dropout(settings.dropout_p, seeds), Call(seeds, settings.backend)
    return _Planner(
        rows,
        built,
        settings.k,
        settings.tail,
        dropout,
        call,
        gathers,
        Tally(built),
        Tally(built),
        softcap=settings.softcap,
        found=found if settings.keep else None,
    )


def _traced_forward(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    seed: Tensor,
    sinks: Tensor | None,
    settings: Settings,
) -> tuple[Tensor, ...]:
    width = settings.k + settings.tail if settings.keep else 0
    ids = queries.new_empty(*visible.shape, width, dtype=torch.int64)
    built = build_index(settings.known_index(), keys)
    planner = _traced_planner(Rows(queries, keys, values, visible), seed, settings, built, ids)
    output, lse, _ = weighted_attention(queries, keys, values, planner, settings.backend, sinks=sinks)
    planner.searches.warn(built)
    return output, lse, ids


def _traced_backward(
    grad_output: Tensor,
    grad_lse: Tensor,
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    visible: Tensor,
    seed: Tensor,
    sinks: Tensor | None,
    ids: Tensor,
    settings: Settings,
) -> tuple[Tensor, ...]:
    planner = _traced_planner(Rows(queries, keys, values, visible), seed, settings, None, ids)
    plans = ((block, planner.plan_of(ids[:, block], block)) for block in planner.blocks())
    kernel = backends.pair_kernels(settings.backend, queries.device)
    upstream = grad_output, grad_lse
    *grads, grad_sinks = _weighted_backward(kernel, queries, keys, values, sinks, plans, settings.softcap, *upstream)
    return (*grads, queries.new_empty(0) if grad_sinks is None else grad_sinks)


implement(_traced_forward, _traced_backward)
