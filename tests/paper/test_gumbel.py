"""The LazyGumbel method keeps its promise, says how it worked, and is differentiated by random walks."""

from __future__ import annotations

import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import assert_mean, seeded
from torch import Tensor

import nearfield as nf
from nearfield.paper import gumbel

pytestmark = pytest.mark.usefixtures("lazy_draws")

INDICES = {"exact": nf.ExactIndex(), "k-means": nf.KMeansIndex(cells=6, probes=1)}


def load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


guarantees = load(Path(__file__).parents[2] / "benchmarks" / "bench_guarantees.py")


def inputs(seed: int, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = seeded(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def weights_of(
    query: Tensor, key: Tensor, mask: Tensor | None = None, causal: bool = False, scale: float | None = None
) -> Tensor:
    """The softmax matrix in float64, keys repeated for grouped queries, zero in rows that see nothing."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1).double()
    logits = query.double() @ key.mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool)
    if causal:
        seen = seen.tril()
    if mask is not None:
        seen = seen & mask
    return logits.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()


def assert_promise(output: Tensor, weights: Tensor, value: Tensor, method: nf.LazyGumbel, rounding: float = 1e-6) -> None:
    value = value.repeat_interleave(weights.shape[1] // value.shape[1], 1).double()
    if method.estimator == "median":
        unit = (weights @ value.square()).sqrt()
    else:
        unit = value.amax(-2, keepdim=True) - value.amin(-2, keepdim=True)
    assert bool(((output.double() - weights @ value).abs() <= method.eps * unit + rounding).all())


@pytest.mark.parametrize(
    ("index", "estimator", "causal"),
    [
        ("exact", "median", False),
        ("exact", "mean", True),
        ("k-means", "mean", False),
        ("k-means", "median", True),
    ],
)
def test_matches_exact_attention_within_the_promise(index: str, estimator: Any, causal: bool) -> None:
    q, k, v = inputs(0, (2, 2, 40, 6), (2, 2, 40, 6), (2, 2, 40, 3), dtype=torch.float32)
    method = nf.LazyGumbel(eps=0.15, delta=0.01, index=INDICES[index], estimator=estimator)
    output = nf.attention(q, k, v, is_causal=causal, method=method, generator=seeded(1))
    assert output.shape == v.shape
    assert output.dtype == torch.float32
    assert_promise(output, weights_of(q, k, causal=causal), v, method)
    if causal:
        torch.testing.assert_close(output[:, :, 0], v[:, :, 0])


@pytest.mark.parametrize("scale", [None, 0.1, 1.3])
def test_scale(scale: float | None) -> None:
    q, k, v = inputs(1, (1, 1, 3, 9), (1, 1, 50, 9), (1, 1, 50, 2))
    method = nf.LazyGumbel(eps=0.03, delta=0.01, estimator="mean")
    output = nf.attention(q, k, v, scale=scale, method=method, generator=seeded(2))
    assert_promise(output, weights_of(q, k, scale=scale), v, method)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("index", INDICES)
def test_grouped_queries_and_padding(index: str, causal: bool) -> None:
    q, k, v = inputs(2, (2, 4, 20, 5), (2, 2, 20, 5), (2, 2, 20, 3))
    mask = torch.rand(2, 1, 1, 20, generator=seeded(3)) > 0.4
    mask[1, ..., :2] = False  # two causal rows see nothing
    method = nf.LazyGumbel(eps=0.15, delta=0.01, index=INDICES[index])
    est = nf.estimate(q, k, v, mask, is_causal=causal, enable_gqa=True, method=method, generator=seeded(4))
    weights = weights_of(q, k, mask, causal)
    assert_promise(est.output, weights, v, method)
    empty = weights.sum(-1) == 0
    assert bool(empty.any()) == causal
    assert bool((est.output[empty] == 0).all())
    assert bool((est.lse[empty] == -torch.inf).all())
    assert bool(est.lse[~empty].isfinite().all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    q, k, v = inputs(3, (1, 2, 8, 8), (1, 2, 70, 8), (1, 2, 70, 4), dtype=dtype)
    method = nf.LazyGumbel(eps=0.1, delta=0.01)
    output = nf.attention(q, k, v, method=method, generator=seeded(5))
    assert output.dtype == dtype
    assert_promise(output, weights_of(q, k), v, method, rounding=0.02)


def test_extreme_logits_and_one_key() -> None:
    q, k, v = inputs(4, (1, 1, 20, 4), (1, 1, 30, 4), (1, 1, 30, 2), dtype=torch.float32)
    output = nf.attention(q * 1e4, k, v, method=nf.LazyGumbel(draws=50), generator=seeded(6))
    torch.testing.assert_close(output, nf.attention(q * 1e4, k, v), atol=1e-5, rtol=1e-5)
    one = nf.attention(q, k[:, :, :1], v[:, :, :1], method=nf.LazyGumbel(draws=50), generator=seeded(6))
    torch.testing.assert_close(one, v[:, :, :1].expand_as(one))


CASES = {case.name: case for case in guarantees.cases()}


@pytest.mark.long
@pytest.mark.parametrize("runs", [250, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_the_promise_fails_less_often_than_delta(name: str, runs: int) -> None:
    measured = guarantees.measure(CASES[name], runs)
    assert measured.rate < measured.delta
    assert measured.largest_error > 0


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("LazyGumbel, mean, one entry", nf.LazyGumbel(estimator="mean", draws=2)),
        ("LazyGumbel, median, a matrix", nf.LazyGumbel(draws=11)),
        ("TopK with a sampled tail, flat logits", nf.TopK(k=1, tail=1)),
    ],
)
def test_the_promise_breaks_with_too_few_draws(name: str, method: Any) -> None:
    measured = guarantees.measure(replace(CASES[name], method=method), 100)
    assert measured.rate > measured.delta


def repeated(seed: int, copies: int, *shapes: tuple[int, int]) -> list[Tensor]:
    """The same problem `copies` times along the batch: independent replicates in one call."""
    return [x.expand(copies, 1, *x.shape) for x in inputs(seed, *shapes)]


def test_the_mean_is_unbiased() -> None:
    q, k, v = repeated(5, 4000, (3, 4), (40, 4), (40, 2))
    output = nf.attention(q, k, v, method=nf.LazyGumbel(estimator="mean", draws=4), generator=seeded(7))
    assert_mean(output[:, 0], (weights_of(q[:1], k[:1]) @ v[:1])[0, 0])


@pytest.mark.parametrize("index", INDICES)
@pytest.mark.parametrize("draws", [4, 20])
def test_the_normaliser_is_unbiased(draws: int, index: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfield.paper.lazy.GIVE_UP_SHARE", 1e9)
    q, k, v = repeated(6, 4000, (3, 4), (40, 4), (40, 2))
    method = nf.LazyGumbel(estimator="mean", draws=draws, k=10, index=INDICES[index], always_lazy=True)
    est = nf.estimate(q, k, v, method=method, generator=seeded(8))
    assert est.info["dense_rows"] == 0
    exact = (q[0, 0] @ k[0, 0].mT / 2).logsumexp(-1)
    assert_mean((est.lse[:, 0] - exact).exp(), 1.0)


def test_the_standard_error_is_calibrated() -> None:
    q, k, v = repeated(7, 4000, (3, 4), (40, 4), (40, 2))
    exact = (weights_of(q[:1], k[:1]) @ v[:1])[0, 0]
    est = nf.estimate(q, k, v, method=nf.LazyGumbel(estimator="mean", draws=12), generator=seeded(9))
    square = (est.output[:, 0] - exact).square().sum(-1)
    assert est.stderr is not None
    assert_mean(est.stderr[:, 0].square() - square, 0.0)
    q, k, v = q[:500], k[:500], v[:500]
    est = nf.estimate(q, k, v, method=nf.LazyGumbel(eps=0.5, delta=0.1), generator=seeded(10))
    square = (est.output[:, 0] - exact).square().sum(-1)
    assert est.stderr is not None
    ratio = (square.mean(0) / est.stderr[:, 0].square().mean(0)).sqrt()
    # The factor for a median is that of many normal groups; with a few dozen skewed ones it is right within a tenth.
    assert bool(((ratio > 0.85) & (ratio < 1.1)).all()), ratio


def test_dropout_acts_on_the_weights_and_not_on_the_draws() -> None:
    # One key has all the mass: dropping it leaves nothing, keeping it doubles the value, whatever the number of draws.
    q = torch.ones(500, 1, 4, 2)
    k, v = torch.zeros(500, 1, 9, 2), torch.ones(500, 1, 9, 1)
    k[:, :, 3] = 100.0
    output = nf.attention(q, k, v, dropout_p=0.5, method=nf.LazyGumbel(draws=30), generator=seeded(11))
    assert set(output.reshape(-1).tolist()) == {0.0, 2.0}
    assert_mean(output.reshape(-1), 1.0)
    # Heads, batch entries and rows have masks of their own.
    assert len(set(map(tuple, (output[:, 0, :, 0] > 0).tolist()))) == 16


def test_dropout_is_unbiased_and_repeatable() -> None:
    q, k, v = repeated(8, 4000, (3, 4), (40, 4), (40, 2))
    method = nf.LazyGumbel(estimator="mean", draws=6)
    output = nf.attention(q, k, v, dropout_p=0.3, method=method, generator=seeded(12))
    assert_mean(output[:, 0], (weights_of(q[:1], k[:1]) @ v[:1])[0, 0])
    again = nf.attention(q, k, v, dropout_p=0.3, method=method, generator=seeded(12))
    assert torch.equal(output, again)


def test_info() -> None:
    q, k, v = inputs(9, (1, 2, 30, 5), (1, 2, 120, 5), (1, 2, 120, 3), dtype=torch.float32)

    def info(method: nf.LazyGumbel) -> dict[str, Any]:
        return nf.estimate(q, k, v, method=method, generator=seeded(13)).info

    assert info(nf.LazyGumbel(draws=9))["certified"] is True
    assert info(nf.LazyGumbel(draws=9, index=nf.KMeansIndex()))["certified"] is True
    assert info(nf.LazyGumbel(draws=9, index=nf.ConcentricLSH()))["certified"] is False
    assert info(nf.LazyGumbel(draws=9, certify=False))["certified"] is False
    plain = info(nf.LazyGumbel(eps=0.3, delta=0.1))
    asked = nf.budget(60, 0.3, 0.1, d=3, theorem="median-of-means", form="tight")
    assert (plain["k"], plain["draws"], plain["groups"]) == (11, asked.draws, asked.groups)
    assert plain["dense_rows"] == 0
    # E[m] <= (n - k) / (k + 1) for every row.
    assert 0 < plain["evaluated_per_draw"] < 109 / 12
    assert info(nf.LazyGumbel(draws=9, k=500))["evaluated_per_draw"] == 0


def test_draws_overrides_the_budget() -> None:
    q, k, v = inputs(10, (1, 1, 3, 4), (1, 1, 30, 4), (1, 1, 30, 2))
    for draws, groups in ((1, 1), (2, 1), (3, 3), (4, 3), (1000, 11)):
        info = nf.estimate(q, k, v, method=nf.LazyGumbel(eps=0.2, delta=0.1, draws=draws), generator=seeded(0)).info
        assert info["draws"] <= draws
        assert info["draws"] % info["groups"] == 0
        assert info["groups"] == groups


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eps": 0.0}, "eps"),
        ({"eps": 1.0}, "eps"),
        ({"eps": float("nan")}, "eps"),
        ({"delta": -0.1}, "delta"),
        ({"delta": 2}, "delta"),
        ({"k": 0}, "k must"),
        ({"k": 2.5}, "k must"),
        ({"draws": 0}, "draws"),
        ({"draws": True}, "draws"),
        ({"draws": 2**24 + 1}, "draws must be at most 16777216, got 16777217"),
        ({"draws": 2**31 - 1}, "draws must be at most 16777216, got 2147483647"),
        ({"estimator": "mode"}, "estimator"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nf.LazyGumbel(**arguments)


@pytest.mark.parametrize("estimator", ["median", "mean"])
def test_a_promise_that_asks_for_too_many_draws(estimator: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gumbel, "MOST_DRAWS", 50)
    q, k, v = inputs(10, (1, 1, 3, 4), (1, 1, 30, 4), (1, 1, 30, 2))
    message = r"eps=0.1 and delta=0.2 ask for [0-9,]* draws of each row, and there can be 50; raise eps"
    with pytest.raises(ValueError, match=message):
        nf.attention(q, k, v, method=nf.LazyGumbel(eps=0.1, delta=0.2, estimator=estimator))
    method = nf.LazyGumbel(eps=0.1, delta=0.2, estimator=estimator, draws=3)
    assert nf.estimate(q, k, v, method=method, generator=seeded(0)).info["draws"] == 3


def test_the_generator_decides_everything() -> None:
    q, k, v = inputs(11, (2, 2, 10, 4), (2, 2, 40, 4), (2, 2, 40, 2))
    method = nf.LazyGumbel(draws=7)
    before = torch.get_rng_state()
    one, two, other = (nf.attention(q, k, v, method=method, generator=seeded(s)) for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("method", [nf.LazyGumbel(draws=5), nf.TopK(k=3, tail=5)], ids=["LazyGumbel", "TopK"])
def test_heads_and_batch_entries_draw_apart(method: Any) -> None:
    q, k, v = (x.expand(3, 4, -1, -1) for x in inputs(12, (1, 1, 6, 4), (1, 1, 60, 4), (1, 1, 60, 2)))
    output = nf.attention(q, k, v, method=method, generator=seeded(3)).reshape(12, -1)
    assert len({tuple(row) for row in output.tolist()}) == 12
    # and so do the queries of one head
    q = q[:, :, :1].expand(-1, -1, 6, -1)
    output = nf.attention(q, k, v, method=method, generator=seeded(3))[0, 0]
    assert len({tuple(row) for row in output.tolist()}) == 6


def test_blocks_of_rows_draw_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfield.chunks.BLOCK_BYTES", 1)
    q, k, v = inputs(13, (1, 1, 1, 4), (1, 1, 60, 4), (1, 1, 60, 2))
    output = nf.attention(q.expand(-1, -1, 8, -1), k, v, method=nf.LazyGumbel(draws=75), generator=seeded(3))[0, 0]
    assert len({tuple(row) for row in output.tolist()}) == 8
    method = nf.LazyGumbel(eps=0.2, delta=0.05)
    q = inputs(14, (1, 1, 8, 4))[0]
    assert_promise(nf.attention(q, k, v, method=method, generator=seeded(4)), weights_of(q, k), v, method)


@pytest.mark.parametrize("causal", [False, True])
def test_the_gradient_is_that_of_random_walks(causal: bool) -> None:
    q, k, v, g = inputs(15, (2, 3, 12, 4), (2, 3, 12, 4), (2, 3, 12, 2), (2, 3, 12, 2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    index = nf.KMeansIndex(cells=3)
    nf.attention(*leaves, is_causal=causal, method=nf.LazyGumbel(draws=9, k=5, index=index), generator=seeded(5)).backward(g)
    walk = nf.gradients.RandomWalk(k=5, index=index)
    expected = nf.gradients.estimate(q, k, v, g, walk, is_causal=causal, generator=seeded(5))
    for leaf, grad in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, grad)


def test_another_gradient_can_be_asked_for() -> None:
    q, k, v, g = inputs(16, (1, 1, 12, 4), (1, 1, 12, 4), (1, 1, 12, 2), (1, 1, 12, 2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    walk = nf.gradients.RandomWalk(walks=3)
    nf.attention(*leaves, method=nf.LazyGumbel(draws=9), gradient=walk, generator=seeded(6)).backward(g)
    for leaf, grad in zip(leaves, nf.gradients.estimate(q, k, v, g, walk, generator=seeded(6)), strict=True):
        torch.testing.assert_close(leaf.grad, grad)


def test_audit_of_a_sampled_estimate() -> None:
    q, k, v = inputs(18, (1, 2, 100, 8), (1, 2, 100, 8), (1, 2, 100, 4), dtype=torch.float32)
    est = nf.estimate(q, k, v, is_causal=True, method=nf.LazyGumbel(eps=0.2, delta=0.1), audit=59, generator=seeded(7))
    assert est.audit is not None
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    worst = ((est.output - exact).norm(dim=-1) / v.square().sum(-1).mean(-1, keepdim=True).sqrt()).max()
    assert est.audit.additive <= float(worst) * 1.001
