"""`nearfield.sample`: keys follow the softmax of their row, and what is said about a row is true."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from laws import assert_frequencies, assert_mean, seeded
from own_indices import OwnIndex, Skipping
from torch import Tensor

import nearfield as nf

DRAWS = 20_000
CERTIFYING = {
    "exact": nf.ExactIndex(),
    "k-means": nf.KMeansIndex(cells=5, probes=1),
    "k-means in blocks": nf.KMeansIndex(cells=5, probes=1, leaf=16),
}


def inputs(seed: int, heads: int, kv_heads: int, queries: int, keys: int, batch: int = 1, dim: int = 3) -> tuple[Tensor, Tensor]:
    generator = seeded(seed)
    shapes = ((batch, heads, queries, dim), (batch, kv_heads, keys, dim))
    query, key = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return 1.5 * query, key


def softmax_of(query: Tensor, key: Tensor, causal: bool = False, mask: Tensor | None = None, scale: float = 3**-0.5) -> Tensor:
    """`[batch, heads, rows, keys]`, zero where a row sees nothing."""
    logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT * scale
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool)
    seen = seen.tril() if causal else seen
    return logits.masked_fill(~(seen if mask is None else seen & mask), -torch.inf).softmax(-1).nan_to_num()


def assert_law(ids: Tensor, weights: Tensor) -> None:
    for drawn, expected in zip(ids.flatten(0, -2), weights.flatten(0, -2), strict=True):
        assert_frequencies(drawn.bincount(minlength=len(expected)), expected)


@pytest.mark.usefixtures("lazy_draws")
@pytest.mark.parametrize("index", CERTIFYING)
@pytest.mark.parametrize("causal", [False, True])
def test_keys_follow_the_softmax(index: str, causal: bool) -> None:
    query, key = inputs(0, heads=4, kv_heads=2, queries=64 if causal else 3, keys=64)
    draws = 2000 if causal else DRAWS
    found = nf.sample(query, key, draws, CERTIFYING[index], is_causal=causal, enable_gqa=True, k=12, generator=seeded(1))
    assert found.ids.shape == (*query.shape[:3], draws)
    assert bool(found.certified.all())
    assert float(found.dense.double().mean()) < 0.6, "few rows are drawn lazily"
    assert int(found.looked_at.sum()) > 0
    assert_law(found.ids, softmax_of(query, key, causal))


def test_few_keys_are_drawn_from_the_full_softmax() -> None:
    query, key = inputs(1, heads=2, kv_heads=2, queries=3, keys=40, batch=2)
    found = nf.sample(query, key, DRAWS, scale=0.4, generator=seeded(2))
    assert bool(found.dense.all())
    assert bool(found.certified.all())
    assert not bool(found.looked_at.any())
    assert_law(found.ids, softmax_of(query, key, scale=0.4))
    lazy = nf.sample(query, key, DRAWS, scale=0.4, k=10, always_lazy=True, generator=seeded(2))
    assert not bool(lazy.dense.any())
    assert_law(lazy.ids, softmax_of(query, key, scale=0.4))


@pytest.mark.parametrize("always_lazy", [False, True])
def test_padding_keeps_the_names_of_keys(always_lazy: bool) -> None:
    query, key = inputs(2, heads=2, kv_heads=1, queries=30, keys=30, batch=2)
    mask = torch.rand(2, 1, 1, 30, generator=seeded(3)) > 0.4
    mask[1, ..., :2] = False
    weights = softmax_of(query, key, True, mask)
    how: dict[str, Any] = {"attn_mask": mask, "is_causal": True, "enable_gqa": True, "always_lazy": always_lazy}
    found = nf.sample(query, key, 2000, k=4, generator=seeded(4), **how)
    empty = weights.sum(-1) == 0
    assert 0 < int(empty.sum()) < empty.numel()
    assert bool((found.ids[empty] == -1).all())
    assert not bool(found.dense[empty].any())
    assert not bool(found.looked_at[empty].any())
    assert bool(found.certified.all())
    assert_law(found.ids[~empty][None], weights[~empty][None])


@pytest.mark.usefixtures("lazy_draws")
def test_far_keys_looked_at() -> None:
    query, key = (x.expand(500, -1, -1, -1) for x in inputs(3, heads=1, kv_heads=1, queries=3, keys=100))
    found = nf.sample(query, key, 40, k=10, generator=seeded(5))
    near = (query[0, 0] @ key[0, 0].mT * 3**-0.5).topk(10).values
    expected = 90 * torch.sigmoid(near[:, -1] - near.logsumexp(-1))
    assert_mean(found.looked_at[:, 0] / 40, expected)


@pytest.mark.usefixtures("lazy_draws")
def test_the_keys_are_those_that_lazy_gumbel_averages() -> None:
    query, key = inputs(4, heads=4, kv_heads=2, queries=5, keys=70)
    value = torch.eye(70, dtype=key.dtype).expand(1, 2, -1, -1)
    method = nf.LazyGumbel(draws=30, k=9, estimator="mean", index=CERTIFYING["k-means"])
    output = nf.attention(query, key, value, enable_gqa=True, method=method, generator=seeded(6))
    ids = nf.sample(query, key, 30, CERTIFYING["k-means"], enable_gqa=True, k=9, generator=seeded(6)).ids
    counts = torch.zeros(*ids.shape[:3], 70, dtype=key.dtype).scatter_add_(
        -1, ids, torch.ones(1, dtype=key.dtype).expand(ids.shape)
    )
    torch.testing.assert_close(output, counts / 30)


def test_the_generator_decides_everything() -> None:
    query, key = inputs(5, heads=2, kv_heads=2, queries=6, keys=80)
    before = torch.get_rng_state()
    one, two, other = (nf.sample(query, key, 9, generator=seeded(s), always_lazy=True).ids for s in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    nf.sample(query, key, 9)
    assert not torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("always_lazy", [False, True])
def test_rows_draw_apart(always_lazy: bool) -> None:
    query, key = inputs(8, heads=2, kv_heads=1, queries=1, keys=60, batch=3)
    query, key = query[:1, :1].expand(3, 2, 5, -1), key[:1].expand(3, -1, -1, -1)
    found = nf.sample(query, key, 20, enable_gqa=True, always_lazy=always_lazy, generator=seeded(9))
    assert bool(found.dense.all()) != always_lazy
    assert len(set(map(tuple, found.ids.flatten(0, -2).tolist()))) == 30


@pytest.mark.usefixtures("lazy_draws")
@pytest.mark.parametrize("index", [OwnIndex(), Skipping(0), nf.ConcentricLSH()], ids=["own", "skipping", "LSH"])
def test_rows_are_certified_one_by_one(index: nf.Index) -> None:
    """Where nobody bounds the keys left out, only rows that leave none out are certain."""
    query, key = inputs(6, heads=1, kv_heads=1, queries=40, keys=40)
    found = nf.sample(query, key, 3, index, is_causal=True, k=10)
    complete = (torch.arange(40) < 10).expand(1, 1, -1)
    assert torch.equal(found.certified, complete | found.dense)
    assert not bool(found.certified.all())
    assert bool(nf.sample(query, key, 3, index, is_causal=True, k=10, slack=1.0).certified.all())
    assert not bool(nf.sample(query, key, 3, k=10, certify=False).certified.all())


def test_shapes_and_dtypes() -> None:
    assert nf.sample(torch.randn(5, 4), torch.randn(9, 4), 2).ids.shape == (5, 2)
    found = nf.sample(torch.randn(2, 3, 1, 5, 4), torch.randn(2, 3, 1, 9, 4), 2)
    assert found.ids.shape == (2, 3, 1, 5, 2)
    assert found.ids.dtype == torch.long
    assert found.looked_at.shape == found.dense.shape == found.certified.shape == (2, 3, 1, 5)
    assert nf.sample(torch.randn(5, 4).bfloat16(), torch.randn(9, 4).bfloat16(), 2).ids.max() < 9
    none = nf.sample(torch.randn(5, 4), torch.randn(0, 4), 2)
    assert none.ids.tolist() == [[-1, -1]] * 5
    assert none.certified.tolist() == [True] * 5
    assert nf.sample(torch.randn(0, 4), torch.randn(9, 4), 2).ids.shape == (0, 2)
    learned = nf.sample(torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True), 2)
    assert not learned.ids.requires_grad


def test_rows_that_see_nan_are_not_drawn() -> None:
    query, key = inputs(7, heads=1, kv_heads=1, queries=8, keys=8)
    key[0, 0, 5, 1] = torch.nan
    found = nf.sample(query, key, 4, is_causal=True)
    spoiled = torch.arange(8) >= 5
    assert torch.equal((found.ids[0, 0] == -1).all(-1), spoiled)
    assert torch.equal(found.certified[0, 0], ~spoiled)
    assert not bool(found.dense[0, 0, 5:].any())
    with pytest.raises(ValueError, match="check_finite"):
        nf.sample(query, key, 4, is_causal=True, check_finite=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"draws": 0}, ValueError, "^draws must"),
        ({"draws": 2.0}, ValueError, "^draws must"),
        ({"k": -1}, ValueError, "^k must"),
        ({"slack": -0.1}, ValueError, "^slack must"),
        ({"slack": float("inf")}, ValueError, "^slack must"),
        ({"slack": float("nan")}, ValueError, "^slack must"),
        ({"slack": True}, ValueError, "^slack must"),
        ({"index": nf.ExactIndex}, TypeError, "^index must"),
        ({"scale": float("nan")}, ValueError, "^scale must"),
        ({"generator": 3}, TypeError, "^generator must"),
        ({"backend": "fast"}, ValueError, "^backend must"),
        (
            {"attn_mask": torch.ones(5, 9, dtype=torch.bool)},
            ValueError,
            r"^sample honours only .*masks.*bool of shape \(.*5, 9\)",
        ),
        ({"attn_mask": torch.zeros(1, 9)}, ValueError, r"^sample honours only .*masks.*got torch\.float"),
        ({"query": [1.0]}, TypeError, "^query must"),
        ({"query": torch.ones(5, 4, dtype=torch.int)}, TypeError, "^query must"),
        ({"key": None}, TypeError, "^key must"),
        ({"key": torch.randn(9, 3)}, ValueError, "^query and key must"),
        ({"key": torch.randn(9)}, ValueError, "^key must"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    given = {"query": torch.randn(5, 4), "key": torch.randn(9, 4), "draws": 2, **arguments}
    with pytest.raises(error, match=message):
        nf.sample(**given)
