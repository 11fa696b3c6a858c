"""Monte-Carlo gradients with dropout: those of the attention that this very forward pass dropped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from laws import assert_mean, seeded
from torch import Tensor

import nearfield as nf
from nearfield.paper.gradients import PrintedWalk, RandomWalk
from nearfield.paper.walks import Walker, positive_product, printed_dk, printed_dq, shared_walks, shifted_product, signed_product
from nearfield.problem import check
from nearfield.results import Gradients
from nearfield.sampling import Dropout, Seeds

pytestmark = pytest.mark.usefixtures("lazy_draws")

N, P = 7, 0.4


def inputs(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = seeded(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def dense(query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, seen: Tensor, keep: Tensor) -> Gradients:
    """Autograd of (softmax(Q K^T) keep) V, where the softmax is over what is seen. Rows that see nothing have no gradient."""
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    logits = (leaves[0] @ leaves[1].mT).masked_fill(~seen, -1e300)
    weights = logits.softmax(-1) * seen
    return Gradients(*torch.autograd.grad((weights * keep) @ leaves[2], leaves, upstream))


class Shared(Dropout):
    """The same mask for every entry of the batch, so that entries are replicates of one problem."""

    def factors(self, row: Tensor, key: Tensor, dtype: torch.dtype) -> Tensor:
        return super().factors(row % N, key, dtype)


MASK = Shared(P, Seeds(seeded(12), torch.device("cpu")))


def replicates(causal: bool, count: int) -> tuple[Walker, Tensor, Gradients]:
    """A walker over copies of one problem, its upstream gradient, and the gradients under `MASK` by autograd."""
    q, k, v, g = inputs(1, (N, 2), (N, 2), (N, 2), (N, 2))
    seen = torch.ones(N, N, dtype=torch.bool).tril() if causal else torch.ones(N, N, dtype=torch.bool)
    keep = MASK.factors(torch.arange(N)[:, None], torch.arange(N), q.dtype)
    assert 0.2 < float((keep == 0).double().mean()) < 0.6
    rows = check(*(x.expand(count, 1, -1, -1) for x in (q, k, v)), is_causal=causal, scale=1.0).rows
    return Walker(rows, nf.ExactIndex(), 3, 1), g.expand(count, -1, -1), dense(q, k, v, g, seen, keep)


def printed_query(walker: Walker, upstream: Tensor) -> Tensor:
    return printed_dq(walker, upstream, 1, 3, seeded(3), MASK)  # one group: the median of skewed draws is biased


def printed_key(walker: Walker, upstream: Tensor) -> Tensor:
    ones = torch.ones_like(upstream[..., :1])
    sums, kept = (positive_product(walker, ones, 20, seeded(4), mask) for mask in (None, MASK))
    return printed_dk(walker, upstream, 10, 1, 3, sums, seeded(5), kept, MASK)


def printed_value(walker: Walker, upstream: Tensor) -> Tensor:
    return shifted_product(walker, upstream, 5, seeded(6), dropout=MASK)


@pytest.mark.parametrize("causal", [False, True])
def test_shared_walks_are_unbiased_for_a_mask(causal: bool) -> None:
    walker, upstream, exact = replicates(causal, 5000)
    found = shared_walks(walker, upstream, 3, Seeds(seeded(2), upstream.device), MASK)
    for sample, expected in zip(found, exact, strict=True):
        assert_mean(sample, expected)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", Gradients._fields)
def test_printed_walks_are_unbiased_for_a_mask(name: str, causal: bool) -> None:
    estimators: dict[str, Callable[[Walker, Tensor], Tensor]]
    estimators = {"query": printed_query, "key": printed_key, "value": printed_value}
    walker, upstream, exact = replicates(causal, 3000)
    assert_mean(estimators[name](walker, upstream), getattr(exact, name))


CASES: dict[str, tuple[Any, Any]] = {
    "exact": (nf.Exact(), RandomWalk(walks=3, k=3)),
    "auto": (None, RandomWalk(walks=2)),
    "topk": (nf.TopK(k=3), RandomWalk(walks=3)),
    "gumbel, its own": (nf.LazyGumbel(draws=5), None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_mask_is_that_of_the_forward_pass(name: str) -> None:
    """Grouped queries, padding, causal rows. Every entry has a mask of its own, read off where values are unit vectors."""
    method, gradient = CASES[name]
    count = 600 if gradient is None else 3000  # its own are 64 walks
    q, k, v, g = (x.expand(count, -1, -1, -1) for x in inputs(7, (4, N, 3), (2, N, 3), (2, N, 2), (4, N, 2)))
    padding = torch.tensor([0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    units = torch.eye(N, dtype=torch.float64).expand(count, 2, N, N)

    def run(value: Tensor, method: Any, gradient: Any) -> tuple[Tensor, list[Tensor]]:
        leaves = [x.detach().requires_grad_() for x in (q, k, value)]
        options: dict[str, Any] = {"scale": 1.0, "enable_gqa": True, "generator": seeded(8)}
        return nf.attention(*leaves, padding.view(1, 1, 1, N), P, True, method=method, gradient=gradient, **options), leaves

    seen = padding & torch.ones(N, N, dtype=torch.bool).tril()
    weights = (q @ k.repeat_interleave(2, 1).mT).masked_fill(~seen, -1e300).softmax(-1) * seen
    left = run(units, nf.Exact(), RandomWalk())[0].detach()
    keep = torch.where(weights > 0, left / weights, 0.0)
    torch.testing.assert_close(keep, torch.where(left > 0, 1 / (1 - P), 0.0).double())
    dropped = float(((left == 0) & (weights > 0)).sum() / (weights > 0).sum())
    assert abs(dropped - P) < 0.02

    output, leaves = run(v, method, gradient)
    found = Gradients(*torch.autograd.grad(output, leaves, g))
    wide = [x.repeat_interleave(2, 1) for x in (k, v)]
    exact, plain = (self_grouped(dense(q, *wide, g, seen, factor)) for factor in (keep, torch.ones_like(keep)))
    if name in ("exact", "auto"):
        torch.testing.assert_close(output, (weights * keep) @ wide[1])
    for sample, expected, undropped in zip(found, exact, plain, strict=True):
        assert_mean(sample - expected, 0.0)
        # Over masks that average to one, the mean alone would not tell a walk that ignores them.
        assert_mean((sample - expected) * (expected - undropped), 0.0)


def self_grouped(grads: Gradients) -> Gradients:
    """The gradients of two query heads that share keys, summed up."""
    key, value = (x.unflatten(1, (2, 2)).sum(2) for x in (grads.key, grads.value))
    return Gradients(grads.query, key, value)


def test_methods_drop_the_same_pairs() -> None:
    q, k = inputs(9, (2, 3, 40, 4), (2, 3, 40, 4))
    units = torch.eye(40, dtype=torch.float64).expand(2, 3, 40, 40)

    def left(method: Any, p: float) -> Tensor:
        walk = RandomWalk(walks=2)
        return nf.attention(q, k, units, None, p, True, method=method, gradient=walk, generator=seeded(10)) > 0

    dropped = left(nf.Exact(), 0.0) & ~left(nf.Exact(), P)
    for method in (nf.TopK(k=9, tail=4), nf.LazyGumbel(draws=50, estimator="mean")):
        used = left(method, 0.0)
        assert 0.1 < float((used & dropped).sum() / used.sum()) < 0.9
        assert torch.equal(left(method, P), used & ~dropped), method


@pytest.mark.parametrize(
    "method", [nf.Exact(), nf.TopK(k=3), nf.LazyGumbel(draws=4000, estimator="mean")], ids=lambda x: type(x).__name__
)
def test_a_mask_does_not_depend_on_blocks_of_rows(method: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, g = inputs(12, (2, 1, N, 3), (2, 1, N, 3), (2, 1, N, N))
    units = torch.eye(N, dtype=torch.float64).expand(2, 1, N, N)

    def run() -> list[Tensor]:
        leaves = [x.detach().requires_grad_() for x in (q, k, units)]
        walk = RandomWalk(walks=20_000)
        output = nf.attention(*leaves, dropout_p=P, method=method, gradient=walk, generator=seeded(13))
        return [output, *torch.autograd.grad(output, leaves, g)]

    whole = run()
    monkeypatch.setattr("nearfield.chunks.BLOCK_BYTES", 1)
    for one, two in zip(whole, run(), strict=True):  # drawn anew, hence not the same
        assert float((one - two).detach().norm() / one.detach().norm()) < 0.2


@pytest.mark.parametrize("causal", [False, True])
def test_dropping_nothing_changes_nothing(causal: bool) -> None:
    walker, upstream, _ = replicates(causal, 3)
    none = Dropout(0.0, Seeds(seeded(5), upstream.device))
    pairs = [(shared_walks(walker, upstream, 4, Seeds(seeded(2), upstream.device), mask)) for mask in (None, none)]
    assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
    for product in (signed_product, shifted_product):
        assert torch.equal(product(walker, upstream, 9, seeded(3)), product(walker, upstream, 9, seeded(3), dropout=none))
    assert torch.equal(printed_dq(walker, upstream, 3, 4, seeded(3)), printed_dq(walker, upstream, 3, 4, seeded(3), none))
    sums = positive_product(walker, torch.ones_like(upstream[..., :1]), 20, seeded(4))
    one = printed_dk(walker, upstream, 5, 1, 3, sums, seeded(5))
    assert torch.equal(one, printed_dk(walker, upstream, 5, 1, 3, sums, seeded(5), sums, none))


def test_printed_walks_with_dropout_approach_the_gradient() -> None:
    q, k, v, g = inputs(22, (1, 1, 6, 2), (1, 1, 6, 2), (1, 1, 6, 2), (1, 1, 6, 2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    options: dict[str, Any] = {"dropout_p": P, "gradient": PrintedWalk(eps=0.1, delta=0.5, walks=20_000), "scale": 1.0}
    left = nf.attention(q, k, torch.eye(6, dtype=torch.float64).expand(1, 1, 6, 6), generator=seeded(22), **options)
    found = torch.autograd.grad(nf.attention(*leaves, generator=seeded(22), **options), leaves, g)
    keep = (left > 0) / (1 - P)
    assert 0.2 < float((keep == 0).double().mean()) < 0.6
    exact = dense(q, k, v, g, torch.ones(6, 6, dtype=torch.bool), keep)
    for a, b, limit in zip(found, exact, (0.15, 0.8, 0.15), strict=True):
        assert float((a - b).norm() / b.norm()) < limit


class Own:
    """Exact gradients, which know nothing of dropout."""

    def estimate(self, rows: nf.gradients.Rows, grad_output: Tensor, seeds: Seeds) -> Gradients:
        return nf.gradients.exact_gradients(rows, grad_output)


def test_what_cannot_know_the_mask_is_refused() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(11, (1, 2, 6, 2), (1, 2, 6, 2), (1, 2, 6, 2)))
    walk, own = RandomWalk(walks=2), Own()
    cases: list[tuple[Any, Any, str]] = [
        (nf.Cells(), walk, r"method=Cells\(.* does not say which pairs .* dropout_p=0.1. Use Exact\(\)"),
        (nf.Exact(), own, "its estimate has no argument named dropout; got dropout_p=0.1"),
    ]
    for method, gradient, message in cases:
        nf.attention(q, k, v, method=method, gradient=gradient).sum().backward()
        with pytest.raises(ValueError, match=message):
            nf.attention(q, k, v, dropout_p=0.1, method=method, gradient=gradient)
        nf.nn.Attention(4, 2, method=method, gradient=gradient)
        with pytest.raises(ValueError, match=message):
            nf.nn.Attention(4, 2, 0.1, method=method, gradient=gradient)
