"""A user's own index works wherever a built-in one does, and its answers are checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from by_hand import gradients, inputs, seeded
from laws import assert_frequencies
from own_indices import Answer, BuiltWithBounds, BuiltWithoutBounds, OwnIndex, OwnSearch, Subclassed
from torch import Tensor

import nearfield as nf
from nearfield.knn.index import PADDING, ExactIndex
from nearfield.knn.index.own import build_index
from nearfield.paper.lazy import prepare
from nearfield.problem import Rows

pytestmark = pytest.mark.usefixtures("lazy_draws")

PLAIN = {"own": OwnIndex(), "subclassed": Subclassed(BuiltWithoutBounds), "bounded": Subclassed(BuiltWithBounds)}


@pytest.mark.parametrize("name", PLAIN)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("tail", [0, 4])
def test_topk_with_an_own_index(tail: int, causal: bool, name: str) -> None:
    """Output, normaliser and gradients are those of the index that answers the same, to the last bit."""
    tensors = inputs(2, 4, queries=24, dim=4, kv_heads=2)
    mask = torch.rand(2, 1, 1, 24, generator=seeded(1)) < 0.8
    upstream = torch.randn(2, 4, 24, 4, generator=seeded(2))

    def run(index: Any) -> list[Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            method = nf.TopK(5, tail, index)
            return nf.attention(q, k, v, mask, 0.2, causal, enable_gqa=True, method=method, generator=seeded(3))

        output, grads = gradients(call, tensors, upstream)
        est = nf.estimate(*tensors, mask, 0.0, causal, enable_gqa=True, method=nf.TopK(5, tail, index), generator=seeded(3))
        return [output, *grads, est.output, est.lse]

    for mine, true in zip(run(PLAIN[name]), run(ExactIndex()), strict=True):
        assert torch.equal(mine, true)


@pytest.mark.parametrize("causal", [False, True])
def test_lazy_gumbel_with_an_own_index(causal: bool) -> None:
    """Without bounds the draws are those of the printed cutoff; with the bounds of the exact index they are its own."""
    tensors = inputs(2, 2, queries=24, dim=4)
    upstream = torch.randn(2, 2, 24, 4, generator=seeded(2))

    def run(index: Any, certify: bool = True) -> tuple[bool, Tensor, list[Tensor]]:
        method = nf.LazyGumbel(draws=9, k=5, index=index, certify=certify)
        est = nf.estimate(*tensors, is_causal=causal, method=method, generator=seeded(3))

        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return nf.attention(q, k, v, is_causal=causal, method=method, generator=seeded(3))

        return est.info["certified"], est.output, list(gradients(call, tensors, upstream)[1])

    certified, output, grads = run(OwnIndex())
    assert not certified
    assert torch.equal(output, run(ExactIndex(), certify=False)[1])
    for mine, true in zip(grads, run(Subclassed(BuiltWithoutBounds))[2], strict=True):
        assert torch.equal(mine, true)
    certified, output, grads = run(Subclassed(BuiltWithBounds))
    assert certified
    _, expected, expected_grads = run(ExactIndex())
    assert torch.equal(output, expected)
    for mine, true in zip(grads, expected_grads, strict=True):
        assert torch.equal(mine, true)


def test_lazy_draws_with_an_own_index_are_exact() -> None:
    """Its near set is the true top k, so the smallest near score bounds all other keys."""
    queries, keys = torch.randn(1, 2, 3, generator=seeded(50)), torch.randn(1, 120, 3, generator=seeded(51))
    rows = Rows(queries, keys, keys, torch.tensor([[120, 60]]))
    lazy = prepare(rows, build_index(OwnIndex(), rows.keys), 11)
    assert not bool(lazy.certified.any())
    assert not bool(lazy.dense.any())
    drawn = lazy.draw_each(60_000, seeded(0)).ids
    logits = (rows.queries @ rows.keys.mT)[0].double()
    for row, seen in enumerate((120, 60)):
        expected = torch.nn.functional.pad(logits[row, :seen].softmax(0), (0, 120 - seen))
        assert_frequencies(drawn[row].bincount(minlength=120), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_with_an_own_index(causal: bool) -> None:
    q, k, v = inputs(2, 2, queries=12, dim=3)
    g, options = torch.randn(2, 2, 12, 3, generator=seeded(1)), {"is_causal": causal}

    def runs(index: Any) -> Iterator[Iterable[Tensor]]:
        near = {"k": 3, "index": index}
        for walk in (nf.gradients.RandomWalk(4, **near), nf.gradients.PrintedWalk(0.9, 0.9, walks=4, **near)):
            yield nf.gradients.estimate(q, k, v, g, walk, **options, generator=seeded(2))
        for form in ("signed", "shifted"):
            yield [nf.gradients.estimate_product(q, k, g, 5, form=form, **near, **options, generator=seeded(3))]
        yield [nf.gradients.approx_pos_prod(q, k, g.abs(), 5, **near, **options, generator=seeded(4))]

    own = OwnIndex()
    for mine, true in zip(runs(own), runs(Subclassed(BuiltWithoutBounds)), strict=True):
        assert all(map(torch.equal, mine, true))
        assert own.calls, "the index that was given is not asked"
        own.calls.clear()
    for mine, true in zip(runs(Subclassed(BuiltWithBounds)), runs(ExactIndex()), strict=True):
        assert all(map(torch.equal, mine, true))


@pytest.mark.parametrize("causal", [False, True])
def test_what_an_own_index_is_told(causal: bool) -> None:
    own = OwnIndex()
    leaves = [x.requires_grad_() for x in inputs(1, 2, queries=6, keys=9, dim=3, kv_heads=1)]
    nf.attention(*leaves, is_causal=causal, enable_gqa=True, method=nf.TopK(2, index=own)).sum().backward()
    nf.attention(*leaves, is_causal=causal, enable_gqa=True, gradient=nf.gradients.RandomWalk(2, index=own)).sum().backward()
    assert len(own.calls) == 3  # walks ask some rows, here all, before the others
    for queries, keys, offset in own.calls:
        assert not queries.requires_grad
        assert not keys.requires_grad
        assert queries.shape == (1, 12, 3)
        assert keys.shape == (1, 9, 3)
        assert offset.shape == (1, 12)
        last = torch.arange(6).repeat(2) if causal else torch.full((12,), 8)
        assert torch.equal(torch.arange(12) + offset, last[None])


def test_an_own_index_may_answer_in_its_own_way() -> None:
    """Other integers, any number where a row is padded, any order."""
    keys, queries = torch.randn(2, 40, 4, generator=seeded(60)), torch.randn(2, 20, 4, generator=seeded(61))
    scores, ids = build_index(ExactIndex(), keys).search(queries, 6, 0)
    assert bool((ids == PADDING).any())

    def loose(scores: Tensor, ids: Tensor) -> Answer:
        return scores.double().masked_fill(ids == PADDING, 7.0), ids.int()

    found = build_index(OwnIndex(loose), keys).search(queries, 6, 0)
    assert torch.equal(found[0], scores)
    assert torch.equal(found[1], ids)
    turned = nf.TopK(6, 4, OwnIndex(lambda scores, ids: (scores.flip(-1), ids.flip(-1))))
    tensors = inputs(1, 2, queries=30, dim=4, dtype=torch.float64)
    torch.testing.assert_close(
        nf.attention(*tensors, is_causal=True, method=turned, generator=seeded(0)),
        nf.attention(*tensors, is_causal=True, method=nf.TopK(6, 4), generator=seeded(0)),
    )


def a_hidden_key(scores: Tensor, ids: Tensor) -> Answer:
    ids[:, 3, 0] = 4
    return scores, ids


def a_key_twice(scores: Tensor, ids: Tensor) -> Answer:
    ids[:, 7, 2] = ids[:, 7, 0]
    return scores, ids


WRONG: dict[str, tuple[Callable[[Tensor, Tensor], Any], type[Exception], str]] = {
    "few scores": (lambda scores, ids: (scores[..., :-1], ids), ValueError, r"of shape \(2, 9, 3\), got .* \(2, 9, 2\)"),
    "few ids": (lambda scores, ids: (scores, ids[:, :-1]), ValueError, r"of shape \(2, 9, 3\), got .* \(2, 8, 3\)"),
    "no batch": (lambda scores, ids: (scores[0], ids[0]), ValueError, r"of shape \(2, 9, 3\), got .* \(9, 3\)"),
    "float ids": (lambda scores, ids: (scores, ids.float()), ValueError, "integer ids .* got .* torch.float32 ids"),
    "boolean ids": (lambda scores, ids: (scores, ids > 0), ValueError, "integer ids .* got .* torch.bool ids"),
    "the future": (a_hidden_key, ValueError, "keys that a row does not see"),
    "no such key": (lambda scores, ids: (scores, ids - 1), ValueError, "keys that a row does not see"),
    "a key twice": (a_key_twice, ValueError, "a key twice"),
    "ids alone": (lambda scores, ids: ids, TypeError, "two tensors, scores and ids, got"),
    "lists": (lambda scores, ids: (scores.tolist(), ids.tolist()), TypeError, "two tensors, scores and ids, got"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_of_an_own_index(name: str) -> None:
    change, error, message = WRONG[name]
    tensors = inputs(2, 1, queries=9, dim=4)
    for method in (nf.TopK(3, index=OwnIndex(change)), nf.LazyGumbel(draws=3, k=3, index=OwnIndex(change))):
        with pytest.raises(error, match=rf"OwnIndex\(.*{message}"):
            nf.attention(*tensors, is_causal=True, method=method)


@pytest.mark.parametrize("built", [None, torch.zeros(3), OwnSearch], ids=["nothing", "a tensor", "a class"])
def test_an_own_index_that_builds_something_else(built: Any) -> None:
    class Careless:
        def build(self, keys: Tensor) -> Any:
            return built

    with pytest.raises(
        TypeError, match=r"Careless object.*\.build must return an object with search\(queries, k, causal_offset\)"
    ):
        nf.attention(*inputs(1, 1, queries=9, dim=4), method=nf.TopK(3, index=Careless()))
