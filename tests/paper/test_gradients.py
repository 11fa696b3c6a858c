"""Gradients: the exact formulas against autograd, the estimators against the exact formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laws import assert_mean, seeded
from torch import Tensor

import nearfield as nf
from nearfield.paper.gradients import PrintedWalk, RandomWalk, approx_pos_prod, estimate_product
from nearfield.paper.walks import Walker, positive_product, printed_dk, printed_dq, shifted_product
from nearfield.problem import check
from nearfield.results import Gradients

pytestmark = pytest.mark.usefixtures("lazy_draws")

INDICES = {"exact": nf.ExactIndex(), "k-means": nf.KMeansIndex(cells=3, probes=1)}


def inputs(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = seeded(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def by_autograd(query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, **options: Any) -> Gradients:
    leaves = [x.detach().clone().requires_grad_() for x in (query, key, value)]
    F.scaled_dot_product_attention(*leaves, **options).backward(upstream)
    return Gradients(*(leaf.grad for leaf in leaves))  # type: ignore[misc]


def assert_close(one: Gradients, two: Gradients) -> None:
    for name, a, b in zip(Gradients._fields, one, two, strict=True):
        torch.testing.assert_close(a, b, msg=lambda text, name=name: f"gradient of {name}: {text}")


def copies(count: int, *tensors: Tensor) -> list[Tensor]:
    """The same problem along the batch: independent replicates in one call."""
    return [x.expand(count, *x.shape) for x in tensors]


def assert_unbiased(estimated: Gradients, exact: Gradients) -> None:
    """`estimated` has replicates along its first axis."""
    for sample, expected in zip(estimated, exact, strict=True):
        assert_mean(sample, expected)


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("queries", "keys", "dim", "value_dim"), [(9, 9, 4, 4), (5, 11, 3, 6), (11, 5, 6, 3), (1, 1, 2, 2), (40, 40, 8, 1)]
)
def test_exact_formulas(queries: int, keys: int, dim: int, value_dim: int, causal: bool, scale: float | None) -> None:
    q, k, v, g = inputs(0, (2, 3, queries, dim), (2, 3, keys, dim), (2, 3, keys, value_dim), (2, 3, queries, value_dim))
    mask = torch.ones(queries, keys, dtype=torch.bool).tril() if causal else None
    expected = by_autograd(q, k, v, g, attn_mask=mask, scale=scale)
    assert_close(nf.gradients.exact(q, k, v, g, is_causal=causal, scale=scale), expected)


def test_exact_formulas_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nf.gradients, "BLOCK_ELEMENTS", 70)
    q, k, v, g = inputs(1, (2, 23, 4), (2, 10, 4), (2, 10, 3), (2, 23, 3))
    assert_close(nf.gradients.exact(q, k, v, g), by_autograd(q, k, v, g))


def test_upstream_of_the_wrong_shape() -> None:
    q, k, v, g = inputs(2, (1, 1, 6, 4), (1, 1, 6, 4), (1, 1, 6, 2), (1, 1, 6, 4))
    for call in (nf.gradients.exact, lambda *x: nf.gradients.estimate(*x, RandomWalk())):
        with pytest.raises(ValueError, match="grad_output"):
            call(q, k, v, g)


@pytest.mark.parametrize("walks", [2, 5])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("index", INDICES)
def test_random_walks_are_unbiased(index: str, causal: bool, walks: int) -> None:
    q, k, v, g = inputs(5, (10, 3), (10, 3), (10, 2), (10, 2))
    walk = RandomWalk(walks=walks, k=3, index=INDICES[index])
    q_, k_, v_, g_ = copies(5000, q[None], k[None], v[None], g[None])
    found = nf.gradients.estimate(q_, k_, v_, g_, walk, is_causal=causal, scale=0.9, generator=seeded(walks))
    exact = nf.gradients.exact(q[None], k[None], v[None], g[None], is_causal=causal, scale=0.9)
    assert_unbiased(found, exact)


@pytest.mark.parametrize("causal", [False, True])
def test_random_walks_with_grouped_queries_and_padding(causal: bool) -> None:
    q, k, v, g = inputs(6, (4, 7, 3), (2, 7, 3), (2, 7, 2), (4, 7, 2))
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    leaves = [x.requires_grad_() for x in copies(4000, q, k, v)]
    output = nf.attention(
        *leaves, mask.view(1, 1, 1, 7), is_causal=causal, enable_gqa=True, gradient=RandomWalk(walks=3), generator=seeded(7)
    )
    found = torch.autograd.grad(output, leaves, g.expand(4000, -1, -1, -1))
    seen = mask & torch.ones(7, 7, dtype=torch.bool).tril() if causal else mask.expand(7, 7)
    first = 1 if causal else 0  # the first causal row sees nothing
    exact = by_autograd(q[:, first:], k, v, g[:, first:], attn_mask=seen[first:], enable_gqa=True)
    full_query = torch.cat([torch.zeros(4, first, 3, dtype=torch.float64), exact.query], 1)
    torch.testing.assert_close(output[0], F.scaled_dot_product_attention(q, k, v, seen, enable_gqa=True).nan_to_num())
    assert_unbiased(Gradients(*found), Gradients(full_query, exact.key, exact.value))


def root_mean_square_errors(walks: int) -> Tensor:
    q, k, v, g = inputs(8, (1, 30, 4), (1, 30, 4), (1, 30, 3), (1, 30, 3))
    exact = nf.gradients.exact(q, k, v, g)
    found = nf.gradients.estimate(*copies(200, q, k, v, g), RandomWalk(walks=walks), generator=seeded(8))
    return torch.stack([(a - b).square().mean().sqrt() for a, b in zip(found, exact, strict=True)])


def test_the_error_falls_with_the_square_root_of_the_walks() -> None:
    few, more, many = (root_mean_square_errors(walks) for walks in (8, 32, 128))
    assert bool((few / more - 2).abs().max() < 0.3)
    assert bool((more / many - 2).abs().max() < 0.3)


def test_walks_in_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfield.chunks.BLOCK_BYTES", 1)
    q, k, v, g = inputs(9, (1, 6, 2), (1, 6, 2), (1, 6, 2), (1, 6, 2))
    found = nf.gradients.estimate(*copies(3000, q, k, v, g), RandomWalk(walks=2), is_causal=True, generator=seeded(9))
    assert_unbiased(found, nf.gradients.exact(q, k, v, g, is_causal=True))


def test_walks_are_repeatable() -> None:
    q, k, v, g = inputs(10, (2, 9, 3), (2, 9, 3), (2, 9, 2), (2, 9, 2))
    before = torch.get_rng_state()
    one, two, other = (nf.gradients.estimate(q, k, v, g, RandomWalk(walks=4), generator=seeded(s)) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("walks", [0, 1, -3, 2.0, True])
def test_random_walk_checks_its_arguments(walks: Any) -> None:
    with pytest.raises(ValueError, match="walks"):
        RandomWalk(walks=walks)


def softmax_matrix(query: Tensor, key: Tensor, causal: bool) -> Tensor:
    logits = query @ key.mT / query.shape[-1] ** 0.5
    if causal:
        logits = logits.masked_fill(~torch.ones(logits.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    return logits.softmax(-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("form", ["signed", "shifted", "positive"])
def test_products_are_unbiased(form: str, causal: bool) -> None:
    q, k, x = inputs(11, (8, 3), (8, 3), (8, 2))
    x = x.abs() if form == "positive" else x
    repeated = copies(5000, q[None], k[None], x[None])
    if form == "positive":
        found = approx_pos_prod(*repeated, 6, is_causal=causal, generator=seeded(11))
    else:
        found = estimate_product(*repeated, 6, form=form, is_causal=causal, generator=seeded(11))
    assert found.shape == (5000, 1, 8, 2)
    assert_mean(found, softmax_matrix(q, k, causal).T @ x)


@pytest.mark.parametrize("walks", [3, 12])
def test_variance_of_signed_walks(walks: int) -> None:
    q, k, x = inputs(12, (8, 3), (8, 3), (8, 2))
    weights = softmax_matrix(q, k, causal=False)
    exact = weights.T @ x
    variance = (x.abs().sum(0) * (weights.T @ x.abs()) - exact.square()) / walks
    found = estimate_product(*copies(20_000, q[None], k[None], x[None]), walks, generator=seeded(walks))
    assert_mean((found[:, 0] - exact).square(), variance)


def test_the_printed_shift_costs_many_times_the_variance() -> None:
    q, k, x = inputs(13, (256, 4), (256, 4), (256, 2))
    exact = softmax_matrix(q, k, causal=False).T @ x
    spread = {}
    for form in ("signed", "shifted"):
        found = estimate_product(*copies(60, q[None], k[None], x[None]), 256, form=form, generator=seeded(13))
        spread[form] = float((found[:, 0] - exact).square().mean())
    assert 15 < spread["shifted"] / spread["signed"] < 60


def test_columns_of_zeros() -> None:
    q, k, x = inputs(14, (2, 8, 3), (2, 6, 3), (2, 8, 3))
    x[..., 1] = 0
    x[1] = 0
    found = estimate_product(q, k, x, 50, generator=seeded(14))
    assert found.shape == (2, 6, 3)
    assert bool((found[0, :, [0, 2]] != 0).any())
    assert not bool(found[0, :, 1].any())
    assert not bool(found[1].any())
    assert not bool(estimate_product(q, k, torch.zeros_like(x), 50, generator=seeded(14)).any())


def test_every_walk_arrives_somewhere() -> None:
    q, k, x = inputs(15, (3, 8, 3), (3, 6, 3), (3, 8, 2))
    found = approx_pos_prod(q, k, x.abs(), 40, generator=seeded(15))
    torch.testing.assert_close(found.sum(1), x.abs().sum(1))


def test_products_check_their_arguments() -> None:
    q, k, x = inputs(16, (8, 3), (6, 3), (8, 2))
    with pytest.raises(ValueError, match="x >= 0"):
        approx_pos_prod(q, k, x, 5)
    with pytest.raises(ValueError, match="form"):
        estimate_product(q, k, x, 5, form="positive")
    with pytest.raises(ValueError, match="walks"):
        estimate_product(q, k, x, 0)
    with pytest.raises(ValueError, match="Lq, columns"):
        estimate_product(q, k, x[:5], 5)


def printed_case(causal: bool, count: int, seed: int = 17) -> tuple[Walker, Tensor, Gradients]:
    """A walker over `count` copies of one problem, its upstream gradient, and the exact gradients of one copy's `Rows`."""
    q, k, v, g = inputs(seed, (1, 1, 8, 2), (1, 1, 8, 2), (1, 1, 8, 2), (1, 1, 8, 2))
    exact = nf.gradients.exact(q, k, v, g, is_causal=causal, scale=1.0)
    rows = check(*(x.expand(count, -1, -1, -1) for x in (q, k, v)), is_causal=causal, scale=1.0).rows
    return Walker(rows, nf.ExactIndex(), 3, 1), g[0].expand(count, -1, -1), exact


@pytest.mark.parametrize("causal", [False, True])
def test_printed_dq_is_unbiased(causal: bool) -> None:
    # One group: the median of means of skewed draws is biased, their mean is not.
    walker, upstream, exact = printed_case(causal, 5000)
    assert_mean(printed_dq(walker, upstream, 1, 3, seeded(18)), exact.query[0, 0])


@pytest.mark.parametrize("causal", [False, True])
def test_printed_dk_is_unbiased(causal: bool) -> None:
    walker, upstream, exact = printed_case(causal, 4000)
    row_sums = positive_product(walker, torch.ones_like(upstream[..., :1]), 20, seeded(19))
    assert_mean(printed_dk(walker, upstream, 10, 1, 3, row_sums, seeded(20)), exact.key[0, 0])


@pytest.mark.parametrize("causal", [False, True])
def test_printed_dv_is_unbiased(causal: bool) -> None:
    walker, upstream, exact = printed_case(causal, 4000)
    row_sums = positive_product(walker, torch.ones_like(upstream[..., :1]), 20, seeded(19))
    assert_mean(shifted_product(walker, upstream, 5, seeded(21), row_sums), exact.value[0, 0])


def test_a_step_from_the_wrong_row_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The printed D^K draws the inner key from row i. Its expectation is far from the gradient."""
    monkeypatch.setattr("nearfield.paper.walks.WALKS_AT_A_TIME", 1 << 30)
    walker, upstream, exact = printed_case(False, 4000)
    count = walker.rows.visible.shape[1]
    honest = walker.step
    row_sums = positive_product(walker, torch.ones_like(upstream[..., :1]), 20, seeded(19))

    def from_row_i(source: Tensor, generator: torch.Generator) -> Tensor:
        if len(source) != 4000 * 8 * 2 * 10:
            return honest(source, generator)
        entry = source // count
        key = torch.arange(len(source)) // (2 * 10) % 8
        return honest(entry * count + key, generator)

    walker.step = from_row_i  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match="standard errors"):
        assert_mean(printed_dk(walker, upstream, 10, 1, 3, row_sums, seeded(20)), exact.key[0, 0])


@pytest.mark.parametrize("causal", [False, True])
def test_printed_walks_approach_the_gradient(causal: bool) -> None:
    q, k, v, g = inputs(22, (1, 2, 9, 2), (1, 2, 9, 2), (1, 2, 9, 3), (1, 2, 9, 3))
    exact = nf.gradients.exact(q, k, v, g, is_causal=causal)
    found = nf.gradients.estimate(
        q, k, v, g, PrintedWalk(eps=0.1, delta=0.5, walks=40_000), is_causal=causal, generator=seeded(22)
    )
    # D^K converges slowly: a walk hits the entry it is meant for once in n times. The zero vector would have error 1.
    for a, b, limit in zip(found, exact, (0.15, 0.8, 0.15), strict=True):
        assert float((a - b).norm() / b.norm()) < limit


def test_printed_walks_train_through_attention() -> None:
    q, k, v, g = inputs(23, (1, 2, 6, 2), (1, 1, 6, 2), (1, 1, 6, 2), (1, 2, 6, 2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    walk = PrintedWalk(eps=0.1, delta=0.5, walks=40_000)
    nf.attention(*leaves, is_causal=True, enable_gqa=True, gradient=walk, generator=seeded(23)).backward(g)
    exact = by_autograd(q, k, v, g, is_causal=True, enable_gqa=True)
    for leaf, expected, limit in zip(leaves, exact, (0.15, 0.8, 0.15), strict=True):
        assert leaf.grad is not None
        assert float((leaf.grad - expected).norm() / expected.norm()) < limit


def test_the_printed_table_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfield.paper.walks.TABLE_BYTES", 2 * 8 * 2 * 2 * 8 - 1)
    q, k, v, g = inputs(24, (1, 8, 2), (1, 8, 2), (1, 8, 2), (1, 8, 2))
    with pytest.raises(ValueError, match="use RandomWalk"):
        nf.gradients.estimate(q, k, v, g, PrintedWalk(eps=0.9, walks=2), generator=seeded(0))
    monkeypatch.setattr("nearfield.paper.walks.TABLE_BYTES", 2 * 8 * 2 * 2 * 8)
    nf.gradients.estimate(q, k, v, g, PrintedWalk(eps=0.9, walks=2), generator=seeded(0))


@pytest.mark.parametrize("arguments", [{"eps": 0.0}, {"eps": 1.5}, {"delta": 0.0}, {"walks": 0}, {"k": 0}, {"k": 1.5}])
def test_printed_walk_checks_its_arguments(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(arguments))):
        PrintedWalk(**arguments)


def train(gradient: nf.gradients.Gradient | None, method: Any = None) -> list[float]:
    """Losses of 30 steps of gradient descent on q, k and v."""
    start = inputs(25, (1, 2, 32, 4), (1, 2, 32, 4), (1, 2, 32, 3), (1, 2, 32, 3))
    parameters, target = [x.clone().requires_grad_() for x in start[:3]], start[3]
    losses = []
    generator = seeded(25)
    for _ in range(30):
        output = nf.attention(*parameters, is_causal=True, method=method, gradient=gradient, generator=generator)
        loss = (nf.attention(*parameters, is_causal=True) - target).square().mean()
        losses.append(float(loss.detach()))
        upstream = 2 * (output.detach() - target) / target.numel()
        for parameter, grad in zip(parameters, torch.autograd.grad(output, parameters, upstream), strict=True):
            parameter.data -= 8.0 * grad
    return losses


def test_training_with_random_walks_follows_exact_gradients() -> None:
    exact, walked = train(None), train(RandomWalk(walks=64))
    assert exact[-1] < 0.75 * exact[0]
    assert exact[0] - walked[-1] > 0.9 * (exact[0] - exact[-1])


def test_training_lazy_gumbel_attention() -> None:
    exact, sampled = train(None), train(None, nf.LazyGumbel(draws=64, estimator="mean"))
    assert exact[0] - sampled[-1] > 0.8 * (exact[0] - exact[-1])


@pytest.mark.parametrize(
    ("method", "gradient"),
    [
        (nf.TopK(k=3, tail=2), None),
        (nf.LazyGumbel(draws=5), None),
        (None, RandomWalk(walks=3)),
        (None, PrintedWalk(eps=0.9, walks=3)),
    ],
    ids=["TopK", "LazyGumbel", "RandomWalk", "PrintedWalk"],
)
def test_double_backward_is_refused(method: Any, gradient: Any) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(26, (1, 1, 6, 2), (1, 1, 6, 2), (1, 1, 6, 2)))
    output = nf.attention(q, k, v, method=method, gradient=gradient, generator=seeded(0))
    with pytest.raises(NotImplementedError, match="double backward"):
        torch.autograd.grad(output.sum(), (q, k, v), create_graph=True)


@pytest.mark.parametrize("gradient", [None, RandomWalk(walks=4)], ids=["own", "RandomWalk"])
def test_the_forward_pass_of_exact_attention_is_not_touched(gradient: Any) -> None:
    q, k, v = (x.requires_grad_() for x in inputs(28, (1, 2, 6, 2), (1, 2, 6, 2), (1, 2, 6, 2)))
    output = nf.attention(q, k, v, is_causal=True, gradient=gradient, generator=seeded(0))
    torch.testing.assert_close(output, F.scaled_dot_product_attention(q, k, v, is_causal=True))


def test_rows_that_see_nothing_have_no_gradient() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(29, (2, 1, 5, 2), (2, 1, 5, 2), (2, 1, 5, 2)))
    mask = torch.tensor([[True] * 5, [False] * 5]).view(2, 1, 1, 5)
    for gradient in (RandomWalk(walks=4), PrintedWalk(eps=0.9, walks=4)):
        output = nf.attention(q, k, v, mask, gradient=gradient, generator=seeded(0))
        for grad in torch.autograd.grad(output.sum(), (q, k, v)):
            assert bool(grad[0].isfinite().all())
            assert not bool(grad[1].any())
