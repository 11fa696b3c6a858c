"""Near sets that are only approximately the top k: draws are exact if the slack that is given is true."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws import assert_frequencies, assert_mean, seeded, total_variation
from own_indices import Skipping
from torch import Tensor

import nearfield as nf
from nearfield.knn.index.own import build_index
from nearfield.paper.lazy import LazyRows, prepare
from nearfield.problem import Rows

LENGTH, K, MISSED, DRAWS = 150, 30, 6, 60_000


def rows_with_slack() -> tuple[Rows, Tensor]:
    """Two rows, and the slack that an index has which misses their best keys."""
    generator = seeded(0)
    keys = torch.randn(1, LENGTH, 3, generator=generator, dtype=torch.float64)
    queries = 0.6 * torch.randn(1, 2, 3, generator=generator, dtype=torch.float64)
    ranked = (queries @ keys.mT).sort(-1, descending=True).values[0]
    return Rows(queries, keys, keys, torch.full((1, 2), LENGTH)), ranked[:, 0] - ranked[:, MISSED + K - 1]


def told(rows: Rows, slack: float | None) -> LazyRows:
    lazy = prepare(rows, build_index(Skipping(MISSED), rows.keys), K, slack=slack)
    assert not bool(lazy.dense.any())
    return lazy


def counts_of(rows: Rows, slack: float | None) -> list[Tensor]:
    lazy = told(rows, slack)
    return [drawn.bincount(minlength=LENGTH) for drawn in lazy.draw_each(DRAWS, seeded(1)).ids]


def test_draws_are_exact_with_the_true_slack_and_wrong_with_less() -> None:
    rows, true = rows_with_slack()
    weights = (rows.queries @ rows.keys.mT).softmax(-1)[0]
    largest = float(true.max())
    assert largest > 1.5, "this index is not bad enough to test anything"
    for counts, expected in zip(counts_of(rows, largest), weights, strict=True):
        assert_frequencies(counts, expected)
    worst = int(true.argmax())
    far = [total_variation(counts_of(rows, share * largest)[worst], weights[worst]) for share in (0.0, 0.5, 1.0)]
    # Noise alone: E TV <= sqrt(length / draws) / 2 = 0.025.
    assert far[0] > 0.1 > far[1] > 0.05
    assert far[2] < 0.025
    with pytest.raises(AssertionError, match="chi-square"):
        assert_frequencies(counts_of(rows, 0.5 * largest)[worst], weights[worst])


@pytest.mark.parametrize("slack", [0.0, 0.5, 1.5])
def test_far_keys_per_draw(slack: float) -> None:
    """E[m] = (n-k) e^U / (e^U + Z_S) with U = min_S z + c, and at most (n/k) e^c."""
    rows, _ = rows_with_slack()
    lazy = told(rows, slack)
    near = (rows.queries @ rows.keys.mT)[0].sort(-1, descending=True).values[:, MISSED : MISSED + K]
    closed = (LENGTH - K) * torch.sigmoid(near[:, -1] + slack - near.logsumexp(-1))
    torch.testing.assert_close(lazy.expected_evaluations(), closed)
    assert bool((closed <= LENGTH / K * torch.tensor(slack).exp()).all())
    evaluated = lazy.draw(torch.arange(2).repeat_interleave(20_000), seeded(2)).evaluated.double().view(2, -1)
    for row in range(2):
        assert_mean(evaluated[row], closed[row])


@pytest.mark.usefixtures("lazy_draws")
def test_who_certifies() -> None:
    query, key, value = torch.randn(3, 1, 2, 60, 4, generator=seeded(3)).unbind(0)

    def certified(index: nf.Index, **arguments: Any) -> tuple[bool, str | None]:
        method = nf.LazyGumbel(draws=5, index=index, **arguments)
        info = nf.estimate(query, key, value, method=method, generator=seeded(4)).info
        return info["certified"], info["certified_by"]

    for bounding in (nf.ExactIndex(), nf.KMeansIndex()):
        assert certified(bounding) == (True, "index")
        assert certified(bounding, slack=0.5) == (True, "index")
        assert certified(bounding, certify=False) == (False, None)
        assert certified(bounding, certify=False, slack=0.5) == (True, "slack")
    for other in (Skipping(1), nf.ConcentricLSH()):
        assert certified(other) == (False, None)
        assert certified(other, slack=0.0) == (True, "slack")
        assert certified(other, k=60) == (True, "full softmax") or isinstance(other, Skipping)


def test_rows_drawn_from_their_softmax_need_no_certificate() -> None:
    query, key, value = torch.randn(3, 1, 2, 60, 4, generator=seeded(3)).unbind(0)
    info = nf.estimate(query, key, value, method=nf.LazyGumbel(draws=5, index=Skipping(1), slack=0.5)).info
    assert (info["certified"], info["certified_by"], info["dense_rows"]) == (True, "full softmax", 120)


@pytest.mark.usefixtures("lazy_draws")
def test_an_index_with_bounds_is_believed_and_not_the_slack() -> None:
    query, key, value = torch.randn(3, 1, 2, 60, 4, generator=seeded(5)).unbind(0)

    def output(**arguments: Any) -> Tensor:
        return nf.attention(query, key, value, method=nf.LazyGumbel(draws=5, **arguments), generator=seeded(6))

    assert torch.equal(output(), output(slack=2.0))
    assert not torch.equal(output(certify=False), output(certify=False, slack=2.0))


@pytest.mark.usefixtures("lazy_draws")
def test_gradients_are_told_the_slack() -> None:
    generator = seeded(7)
    query, key, value, upstream = (torch.randn(1, 1, 40, 4, generator=generator) for _ in range(4))
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    method = nf.LazyGumbel(draws=5, k=8, index=Skipping(2), slack=1.0)
    nf.attention(*leaves, method=method, generator=seeded(8)).backward(upstream)

    def walked(slack: float | None) -> Any:
        walk = nf.gradients.RandomWalk(k=8, index=Skipping(2), slack=slack)
        return nf.gradients.estimate(query, key, value, upstream, walk, generator=seeded(8))

    for leaf, right, wrong in zip(leaves, walked(1.0), walked(None), strict=True):
        torch.testing.assert_close(leaf.grad, right)
        assert not torch.equal(right, wrong)


@pytest.mark.parametrize("slack", [-0.1, float("inf"), float("nan"), True, "1"])
@pytest.mark.parametrize("kind", [nf.LazyGumbel, nf.gradients.RandomWalk])
def test_slack_is_checked(kind: Any, slack: Any) -> None:
    with pytest.raises(ValueError, match=r"^slack must be a finite number"):
        kind(slack=slack)
