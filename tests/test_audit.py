"""The audit: what it reports is right for the rows it looked at, and its promise for the others holds."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from by_hand import attention64, causal_mask, inputs, seeded
from scipy import stats
from torch import Tensor

import nearfield as nf
from nearfield.audit import pooled_bound, run_audit
from nearfield.problem import Call, Problem, check
from nearfield.results import Outcome

ALPHA = 1e-6


@dataclass(frozen=True)
class Off(nf.Method):
    """Exact attention, each row off by a known multiple of the rms norm of its values."""

    errors: Tensor

    def run(self, problem: Problem, call: Call) -> Outcome:
        exact = nf.Exact().run(problem, call)
        scale = problem.value.double().square().sum(-1).mean(-1).sqrt().reshape(-1, 1)
        shift = torch.zeros_like(exact.output)
        shift[..., 0] = (self.errors.view(len(scale), -1) * scale).view(exact.output.shape[:3])
        return Outcome(exact.output + shift, exact.lse)


@pytest.mark.parametrize(("rows", "quantile"), [(59, 0.95), (299, 0.99), (1, 0.05), (14, 0.8)])
def test_fields(rows: int, quantile: float) -> None:
    q, k, v = inputs(2, 2, queries=100, dim=4)
    audit = nf.estimate(q, k, v, method=nf.TopK(k=4), audit=rows, generator=seeded(0)).audit
    assert audit is not None
    assert audit.rows == rows
    assert audit.confidence == 0.95
    assert audit.quantile == pytest.approx(0.05 ** (1 / rows))
    assert audit.quantile == pytest.approx(quantile, abs=0.01)
    assert audit.quantile >= quantile or rows == 14, "so many rows promise at least that"
    assert audit.additive_errors.shape == audit.relative_errors.shape == (rows,)
    assert audit.additive == float(audit.additive_errors.max())
    assert audit.relative == float(audit.relative_errors.max())
    assert f"{audit.quantile:.1%} of the rows" in str(audit)
    assert "95%" in str(audit)


def test_rows_for_a_quantile_and_back() -> None:
    assert nf.audit_rows(0.95, 0.95) == 59
    assert nf.audit_rows(0.99, 0.95) == 299


def test_no_audit_unless_asked_for() -> None:
    assert nf.estimate(*inputs(1, 1, queries=10)).audit is None


@pytest.mark.parametrize("size", [5, 20, 59])
def test_coverage(size: int) -> None:
    """How often the promise holds over many audits, against the exact probability, which must be at least what is promised."""
    total, repetitions = 400, 1500
    errors = torch.rand(total, generator=seeded(1), dtype=torch.float64)
    q, k, v = inputs(1, 2, queries=total // 2, dim=2, dtype=torch.float64)
    problem = check(q, k, v)
    output = nf.attention(q, k, v, method=Off(errors))
    kept, largest = 0, []
    for repetition in range(repetitions):
        audit = run_audit([(problem, output)], size, seeded(repetition))
        # The largest audited error is that of an audited row, up to the rounding of a norm.
        kept += int((errors <= audit.additive + 1e-9).sum()) >= audit.quantile * total
        largest.append(audit.additive)
    # The promise fails if all audited rows are among those of too small a rank.
    too_small = math.ceil(0.05 ** (1 / size) * total) - 1
    probability = float(1 - stats.hypergeom(total, too_small, size).pmf(size))
    assert probability >= 0.95
    law = stats.binom(repetitions, probability)
    assert law.ppf(ALPHA / 2) <= kept <= law.isf(ALPHA / 2), f"{kept / repetitions} for {probability}"
    assert len(set(largest)) > 3, "another generator audits other rows"


@pytest.mark.parametrize("heads", [2, 6])
def test_audit_of_all_rows_is_the_largest_error(heads: int) -> None:
    errors = torch.rand(2 * heads * 20, generator=seeded(1), dtype=torch.float64)
    q, k, v = inputs(2, heads, queries=20, dim=4, kv_heads=2, dtype=torch.float64)
    for size in (2 * heads * 20, 10**6):
        audit = nf.estimate(q, k, v, enable_gqa=True, method=Off(errors), audit=size, generator=seeded(0)).audit
        assert audit is not None
        assert (audit.rows, audit.quantile, audit.confidence) == (2 * heads * 20, 1.0, 1.0)
        torch.testing.assert_close(audit.additive_errors, errors)
        assert audit.additive == pytest.approx(float(errors.max()))


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "gqa": {"kv_heads": 2},
    "padded": {"attn_mask": torch.rand(2, 1, 1, 30, generator=seeded(3)) < 0.6},
    "padded-causal-gqa": {
        "attn_mask": torch.rand(2, 1, 1, 30, generator=seeded(4)) < 0.6,
        "is_causal": True,
        "kv_heads": 2,
    },
    "scale": {"scale": -0.3},
    "long-keys": {"keys": 70},
    "short-keys": {"keys": 12, "is_causal": True},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", CASES)
def test_errors_are_those_of_the_rows(name: str, dtype: torch.dtype) -> None:
    """Every row audited, compared with exact attention by hand: additive in units of the rms norm of visible values."""
    case = {"kv_heads": 4, "keys": 30} | CASES[name]
    q, k, v = inputs(2, 4, queries=30, keys=case.pop("keys"), dim=4, kv_heads=case.pop("kv_heads"), dtype=dtype)
    v = v * torch.tensor([1.0, 5.0], dtype=dtype)[:, None, None, None]
    est = nf.estimate(q, k, v, **case, enable_gqa=True, method=nf.TopK(k=2, tail=1), audit=10**6, generator=seeded(0))
    mask = case.get("attn_mask")
    exact = attention64(q, k, v, mask, case.get("is_causal", False), case.get("scale"))
    off = (est.output.double() - exact).norm(dim=-1)
    square = v.double().square().sum(-1)
    counted = torch.ones_like(square) if mask is None else mask[:, :, 0].expand_as(square).double()
    unit = ((square * counted).sum(-1) / counted.sum(-1)).sqrt().repeat_interleave(4 // v.shape[1], 1)
    assert est.audit is not None
    # The audit computes in float32 at least: its own rounding, relative to errors of order 1.
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    additive, relative = est.audit.additive_errors.double(), est.audit.relative_errors.double()
    torch.testing.assert_close(additive, (off / unit[..., None]).flatten(), atol=tolerance, rtol=tolerance)
    direct = torch.where(off < 1e-12, 0.0, off / exact.norm(dim=-1)).flatten()
    seen = exact.norm(dim=-1).flatten() > 1e-2
    torch.testing.assert_close(relative[seen], direct[seen], atol=100 * tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["bool", "float", "bool-per-head"])
def test_exact_with_a_general_mask(kind: str) -> None:
    q, k, v = inputs(2, 4, queries=6, keys=9, dim=4, kv_heads=2)
    allowed = torch.rand(1, 4 if kind == "bool-per-head" else 1, 6, 9, generator=seeded(5)) < 0.6
    mask = torch.randn(6, 9, generator=seeded(6)) if kind == "float" else allowed
    audit = nf.estimate(q, k, v, mask, enable_gqa=True, audit=48, generator=seeded(0)).audit
    assert audit is not None
    assert audit.additive < 1e-5

    @dataclass(frozen=True)
    class Forgetful(nf.Exact):
        """Ignores the mask: the audit must notice."""

        def run(self, problem: Problem, call: Call) -> Outcome:
            return super().run(check(problem.query, problem.key, problem.value, enable_gqa=True), call)

    audit = nf.estimate(q, k, v, mask, enable_gqa=True, method=Forgetful(), audit=48, generator=seeded(0)).audit
    assert audit is not None
    exact = attention64(q, k, v, mask)
    unit = v.double().square().sum(-1).mean(-1).sqrt().repeat_interleave(2, 1)
    off = (attention64(q, k, v) - exact).norm(dim=-1) / unit[..., None]
    torch.testing.assert_close(audit.additive_errors.double(), off.flatten(), atol=1e-5, rtol=1e-5)


def test_exact_methods_have_no_error() -> None:
    q, k, v = inputs(2, 4, queries=40, dim=8, kv_heads=2)
    mask = torch.rand(2, 1, 1, 40, generator=seeded(7)) < 0.5
    for method in (nf.Exact(), nf.TopK(k=40), nf.TopK(k=10, tail=30)):
        est = nf.estimate(q, k, v, mask, is_causal=True, enable_gqa=True, method=method, audit=59, generator=seeded(0))
        assert est.audit is not None
        assert est.audit.additive < 1e-6


def test_rows_at_a_time_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(1, 2, queries=40, dim=4)
    whole = nf.estimate(q, k, v, method=nf.TopK(k=4), audit=30, generator=seeded(0)).audit
    monkeypatch.setattr("nearfield.audit.BLOCK_BYTES", 1)
    parts = nf.estimate(q, k, v, method=nf.TopK(k=4), audit=30, generator=seeded(0)).audit
    assert whole is not None
    assert parts is not None
    torch.testing.assert_close(parts.additive_errors, whole.additive_errors)


def test_audit_needs_no_gradient_and_leaves_one() -> None:
    leaves = [x.requires_grad_() for x in inputs(1, 1, queries=10)]
    est = nf.estimate(*leaves, method=nf.TopK(k=3, tail=2), audit=5, generator=seeded(0))
    assert est.audit is not None
    assert not est.audit.additive_errors.requires_grad
    est.output.sum().backward()
    assert all(x.grad is not None for x in leaves)


def test_audit_does_not_change_the_estimate() -> None:
    tensors = inputs(1, 2, queries=30)
    plain = nf.estimate(*tensors, method=nf.TopK(k=3, tail=2), generator=seeded(0))
    audited = nf.estimate(*tensors, method=nf.TopK(k=3, tail=2), audit=20, generator=seeded(0))
    assert torch.equal(plain.output, audited.output)


def test_dropout_is_refused() -> None:
    with pytest.raises(ValueError, match=r"audit compares with attention without dropout; got audit=5 and dropout_p=0\.1"):
        nf.estimate(*inputs(1, 1, queries=10), dropout_p=0.1, audit=5)


@pytest.mark.parametrize("size", [-1, 2.0, True, "59", None])
def test_wrong_sizes(size: Any) -> None:
    with pytest.raises(ValueError, match=f"audit must be a non-negative integer, got {size!r}"):
        nf.estimate(*inputs(1, 1, queries=10), audit=size)


def test_causal_rows_are_compared_with_causal_attention() -> None:
    """A method that forgets the causal mask is caught."""

    class Sees(nf.Method):
        def run(self, problem: Problem, call: Call) -> Outcome:
            return nf.Exact().run(check(problem.query, problem.key, problem.value), call)

    q, k, v = inputs(1, 1, queries=20, dtype=torch.float64)
    audit = nf.estimate(q, k, v, is_causal=True, method=Sees(), audit=20).audit
    assert audit is not None
    unit = v.square().sum(-1).mean().sqrt()
    off = (attention64(q, k, v) - attention64(q, k, v, causal_mask(20, 20))).norm(dim=-1) / unit
    torch.testing.assert_close(audit.additive_errors, off.flatten(), atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("law", ["alike", "heavy", "two-kinds"])
def test_pooled_bound_holds_as_often_as_it_says(law: str) -> None:
    """Over many audits of rows drawn with replacement; what it says is restated here."""
    total, size, repetitions = 4000, 64, 600
    exact = torch.rand(total, generator=seeded(0), dtype=torch.float64) + 0.5
    error = 0.1 * torch.rand(total, generator=seeded(1), dtype=torch.float64)
    if law == "heavy":
        error = error / torch.rand(total, generator=seeded(2), dtype=torch.float64)
    elif law == "two-kinds":
        error[: total // 10] += 1.0
        exact[total // 2 :] *= 8.0
    failed = 0
    for repetition in range(repetitions):
        rows = torch.randint(total, (size,), generator=seeded(repetition))
        bound = pooled_bound(error[rows], exact[rows])
        excess = error.square() - bound**2 * exact.square()
        kept = excess <= excess[rows].max() + 1e-12
        few = int(kept.sum()) < 0.025 ** (1 / size) * total
        failed += few or float(error[kept].square().sum()) > bound**2 * float(exact[kept].square().sum()) * (1 + 1e-9)
    assert failed <= stats.binom(repetitions, 0.05).isf(ALPHA)


def test_pooled_bound_by_hand() -> None:
    """Five rows, of which the share t of the others with the smallest excess is counted as the worst."""
    error, exact = torch.tensor([0.3, 0.1, 0.2, 0.05, 0.1]), torch.tensor([1.0, 2.0, 1.0, 3.0, 1.5])
    bound = pooled_bound(error, exact, 0.3)
    others, share = 4, math.sqrt(-math.log(0.35) / 8)
    excess = sorted((error.double().square() - bound**2 * exact.double().square()).tolist(), reverse=True)
    left = (1 - share) * others
    mean = sum(x * min(1.0, max(0.0, left - i)) for i, x in enumerate(excess[1:])) / others + share * excess[0]
    assert abs(mean) < 1e-8
    assert bound > float(error.norm() / exact.norm())


def test_pooled_bound_at_its_limits() -> None:
    some, none = torch.rand(128, generator=seeded(0)) + 0.5, torch.zeros(128)
    assert pooled_bound(none, some) == 0.0
    assert pooled_bound(some, none) == math.inf
    assert pooled_bound(some[:2], some[:2]) == math.inf, "two rows tell nothing"
    assert pooled_bound(some / 0, some) == math.inf
    assert 1.0 <= pooled_bound(some, some) <= 1.001
    assert pooled_bound(some, some.flip(0)) <= 1.5


def test_pooled_error_of_all_rows_is_that_of_the_output() -> None:
    errors = torch.rand(2 * 40, generator=seeded(1), dtype=torch.float64)
    q, k, v = inputs(1, 2, queries=40, dim=4, dtype=torch.float64)
    est = nf.estimate(q, k, v, method=Off(errors), audit=80, generator=seeded(0))
    assert est.audit is not None
    exact = attention64(q, k, v)
    assert est.audit.pooled == est.audit.pooled_bound == pytest.approx(float((est.output - exact).norm() / exact.norm()))
    some = nf.estimate(q, k, v, method=Off(errors), audit=60, generator=seeded(0)).audit
    assert some is not None
    assert some.pooled < some.pooled_bound < math.inf
    assert f"{some.pooled:.3g} of the rms norm of the output" in str(some)
