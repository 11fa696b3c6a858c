"""The audit: recompute random rows exactly, and bound the error of all rows by theirs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from nearfield.checks import check_fraction, check_positive
from nearfield.chunks import BLOCK_BYTES
from nearfield.kernels import backends, reference
from nearfield.kernels.backends import full_precision
from nearfield.kernels.dense import capped, sink_share
from nearfield.kernels.limits import unsupported
from nearfield.problem import Problem
from nearfield.results import Audit

CONFIDENCE = 0.95

MOST_ROWS = 1024
"""How many rows a kernel is given at a time."""


@torch.no_grad()
def run_audit(parts: Sequence[tuple[Problem, Tensor]], size: int, generator: torch.Generator, per_head: bool = False) -> Audit:
    """Compare `size` random rows of an output with exact attention. It may come in parts, each with the problem it solves.

    If more than a fraction 1 - q of the rows had an error above the largest audited one, s rows drawn at random would all
    miss them with probability at most q^s. So with confidence 1 - q^s a fraction q of the rows is no worse. The rows of all parts
    are drawn together, each with the same probability.

    `per_head`: as many rows of each head, over all batch entries. They speak for their head, and together for all rows: with bad
    fractions f_h, all are missed with probability prod_h (1 - f_h)^s, at most (1 - mean f_h)^(s heads).
    """
    shapes = [problem.query.shape[:3] for problem, _ in parts]
    ends = list(accumulate(shape.numel() for shape in shapes))
    if per_head:
        chosen = _rows_of_heads(shapes, size, generator)
    else:
        chosen = torch.randperm(ends[-1], generator=generator, device=generator.device)[:size].sort().values
    norms, heads = [], []
    for (problem, output), (_, count, length), first, last in zip(parts, shapes, [0, *ends], ends, strict=False):
        here = chosen[(chosen >= first) & (chosen < last)] - first
        norms.append(_norms(problem, output, here))
        heads.append(here // max(1, length) % max(1, count))
    error, whole, unit = (torch.cat(x) for x in zip(*norms, strict=True))
    everything = len(chosen) == ends[-1]
    found = summary(error, whole, unit, everything=everything)
    if not per_head:
        return found
    head = torch.cat(heads).to(error.device)
    own = (head == number for number in range(shapes[0][1]))
    # As many rows are drawn of each head, so all of one are there where all of all are.
    each = [(error[mine], whole[mine], unit[mine]) for mine in own]
    return replace(found, heads=tuple(summary(*norms, everything=everything) for norms in each))


def _rows_of_heads(shapes: Sequence[torch.Size], size: int, generator: torch.Generator) -> Tensor:
    """`size` random rows of each head, numbered over parts, batch, heads and positions, in ascending order."""
    device, first, by_head = generator.device, 0, []
    for shape in shapes:
        numbers = torch.arange(first, first + shape.numel(), device=device).view(shape)
        by_head.append(numbers.transpose(0, 1).flatten(1))
        first += shape.numel()
    rows = torch.cat(by_head, 1)
    found = [own[torch.randperm(len(own), generator=generator, device=device)[:size]] for own in rows]
    return torch.cat(found).sort().values if found else rows.flatten()


def _norms(problem: Problem, output: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of the errors of some rows, of what they should be, and of the values of their head: `[rows]` each."""
    size = len(chosen)
    exact = problem.value.new_zeros(size, problem.value.shape[3], dtype=problem.compute_dtype)
    with full_precision(problem.query):
        for part in torch.arange(size, device=chosen.device).split(_rows_at_a_time(problem)) if size else ():
            exact[part] = _exact_rows(problem, chosen[part])
    got = output.detach().reshape(problem.query.shape[:3].numel(), -1)[chosen] if exact.numel() else exact
    error, whole = torch.linalg.vector_norm(got.to(exact.dtype) - exact, dim=-1), torch.linalg.vector_norm(exact, dim=-1)
    return error, whole, value_norm_of_rows(problem, chosen)


def summary(error: Tensor, size_of_exact: Tensor, unit: Tensor, looks: int = 1, everything: bool = False) -> Audit:
    """What rows that were drawn at random say about all rows: see `run_audit`.

    Their errors, what they should be and the values of their head are given by their norms. `everything`: they are all rows.
    `looks`: how many such summaries there may be until one passes. Each of them then claims less, so that the promise holds for
    all.
    """
    size, miss = len(error), (1.0 - CONFIDENCE) / looks
    additive, relative = error / unit, torch.where(error == 0, error, error / size_of_exact)
    pooled = _pooled(error, size_of_exact)
    return Audit(
        rows=size,
        quantile=1.0 if everything else audit_quantile(size, 1.0 - miss),
        confidence=1.0 if everything else CONFIDENCE,
        additive=float(additive.max()) if size else 0.0,
        relative=float(relative.max()) if size else 0.0,
        additive_errors=additive,
        relative_errors=relative,
        pooled=pooled,
        pooled_bound=pooled if everything else pooled_bound(error, size_of_exact, 1.0 - miss),
    )


def _pooled(error: Tensor, size: Tensor) -> float:
    off, whole = float(error.double().square().sum()), float(size.double().square().sum())
    return math.sqrt(off / whole) if whole else (math.inf if off else 0.0)


def pooled_bound(error: Tensor, size: Tensor, confidence: float = CONFIDENCE) -> float:
    """A bound on the pooled relative error of all rows but a few, from rows that were drawn at random, for any data and method.

    `error`, `size` `[s]`: the norms of the errors and of the exact rows. Let d = error^2 - eps^2 size^2, D the largest d drawn, G
    all rows whose d is at most D, and a half of 1 - confidence. G is a fraction a^(1/s) of all rows or more, but with probability
    a. Given D, the other s - 1 rows are drawn from G. By the inequality of Dvoretzky, Kiefer, Wolfowitz and Massart, their
    distribution is nowhere more than t = sqrt(ln(1/a) / (2 (s - 1))) too low, but with probability a. So the mean of d over G is
    at most what it is for the sample if the share t of it with the smallest d had D. Where that is not positive, the pooled error
    of G is at most eps. The smallest such eps is returned; infinity where there is none.

    It is larger than the pooled error of the sample: for 128 rows of similar errors, by a tenth to a half.
    """
    check_fraction("confidence", confidence)
    off, whole = error.double().square().cpu(), size.double().square().cpu()
    miss = (1.0 - confidence) / 2
    share = math.sqrt(-math.log(miss) / (2 * (len(off) - 1))) if len(off) > 1 else 1.0
    if share >= 1.0 or not bool(torch.isfinite(off).all() and torch.isfinite(whole).all()):
        return math.inf
    others = len(off) - 1
    weight = ((1.0 - share) * others - torch.arange(others, dtype=torch.float64)).clamp(0.0, 1.0) / others
    weight = torch.cat([weight.new_tensor([share]), weight])
    # Weights fall with the rank, so the weighted sum of the ranked d is convex in eps^2. It is positive where the mean of d is 0.
    # Newton's method, which begins there and so below its root, climbs to it and ends where the ranks no longer change.
    both = torch.stack([off, whole])
    above, below = both.sum(1).tolist()
    square = -1.0
    while True:
        if above == 0.0:
            return 0.0
        if below == 0.0:
            return math.inf
        if above / below <= square:
            return math.sqrt(square)
        square = above / below
        rank = torch.sub(off, whole, alpha=square).argsort(descending=True)
        above, below = (both[:, rank] @ weight).tolist()


def _rows_at_a_time(problem: Problem) -> int:
    """How many rows to recompute at a time. Each gathers the keys and values of its head, unless a kernel reads them in place."""
    if _read_in_place(problem):
        return MOST_ROWS
    per_row = (problem.key[0, 0].numel() + problem.value[0, 0].numel() + problem.key.shape[2]) * 8
    return max(1, BLOCK_BYTES // max(1, per_row))


def _read_in_place(problem: Problem) -> bool:
    """Whether a kernel recomputes the rows, and reads keys and values where they lie."""
    missing = unsupported(problem.query, problem.value)
    return _sees_first_keys(problem) and backends.choose_triton("auto", problem.key.device, missing)


def _sees_first_keys(problem: Problem) -> bool:
    """Whether a row is the softmax over the first so many keys, as `Problem.rows` has them."""
    return not problem.has_general_mask and problem.has_plain_logits and problem.window is None


def _exact_rows(problem: Problem, chosen: Tensor) -> Tensor:
    """Exact attention of some rows, numbered over batch, heads and positions: `[rows, value_dim]`."""
    _, heads, length, _ = problem.query.shape
    if problem.key.shape[2] == 0:
        return problem.query.new_zeros(len(chosen), problem.value.shape[3], dtype=problem.compute_dtype)
    entry, head, position = chosen // (heads * length), chosen // length % heads, chosen % length
    if not _sees_first_keys(problem):
        return _exact_masked_rows(problem, entry, head, position)
    group = entry * problem.key.shape[1] + head // problem.group_size
    place = head % problem.group_size * length + position
    if _read_in_place(problem):
        from nearfield.kernels.exact_rows import exact_rows

        raw = problem.grouped
        with backends.device_guard(raw.keys.device):
            return exact_rows(raw.queries, raw.keys, raw.values, raw.visible, group, place, problem.scale)
    rows = problem.rows
    output, _ = reference.exact_attention(
        rows.queries[group, place][:, None], rows.keys[group], rows.values[group], rows.visible[group, place][:, None]
    )
    return output[:, 0]


def _exact_masked_rows(problem: Problem, entry: Tensor, head: Tensor, position: Tensor) -> Tensor:
    compute = problem.compute_dtype
    kv = head // problem.group_size
    logits = torch.einsum("rd,rnd->rn", problem.query[entry, head, position].to(compute), problem.key[entry, kv].to(compute))
    logits = capped(logits * problem.scale, problem.softcap)
    if problem.attn_mask is not None:
        logits = reference.masked(logits, problem.attn_mask.expand(*problem.query.shape[:3], -1)[entry, head, position])
    if problem.band is not None:
        logits = reference.masked(
            logits, problem.band.sees(position[:, None], torch.arange(logits.shape[1], device=logits.device))
        )
    weights, lse = reference.weighted_softmax(logits, None)
    if problem.sink is not None:
        weights = weights * sink_share(lse, problem.sink[head])[0][:, None]
    return torch.einsum("rn,rnd->rd", weights, problem.value[entry, kv].to(compute))


def value_norm_of_rows(problem: Problem, rows: Tensor) -> Tensor:
    """`value_norm` for the heads of some rows, numbered over batch, heads and positions."""
    norm = value_norm(problem)
    return norm[rows.to(norm.device) // max(1, problem.query.shape[2] * problem.group_size)] if len(rows) else norm[:0]


def value_norm(problem: Problem) -> Tensor:
    """The root mean square norm of the values that count, for each key-value head: `[batch * kv_heads]`."""
    return reference.rms_norm(problem.value, problem.key_padding).reshape(-1)


def audit_rows(quantile: float = 0.95, confidence: float = 0.95) -> int:
    """How many rows to recompute so that the worst of them bounds this quantile of the errors of all rows, at this confidence.

    All s rows lie below the quantile p with probability at most p^s, so s = ceil(ln(1 - confidence) / ln p), for any data and any
    method.

    >>> audit_rows(0.95, 0.95), audit_rows(0.99, 0.95)
    (59, 299)
    """
    check_fraction("quantile", quantile)
    check_fraction("confidence", confidence)
    return max(1, math.ceil(math.log1p(-confidence) / math.log(quantile) * (1 - 4e-16)))  # less the rounding error


def audit_quantile(rows: int, confidence: float = 0.95) -> float:
    """The quantile of the errors of all rows that the worst of `rows` audited ones bounds: (1 - confidence)^(1 / rows)."""
    check_positive("rows", rows)
    check_fraction("confidence", confidence)
    return math.exp(math.log1p(-confidence) / rows)
