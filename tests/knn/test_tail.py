"""k from theory: the sizes that `TopK(eps, delta)` chooses, what it says about them, and the k that a row needs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from by_hand import inputs, logits64, seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import ALPHA
from scipy import stats
from torch import Tensor

import nearfield as nf
from nearfield.knn.index import BuiltIndex, Cutoffs, gathered_scores
from nearfield.knn.tail import TailPromise, tail_condition, tail_sizes


def info_of(method: nf.TopK, n: int = 600, rows: int = 3, **options: Any) -> dict[str, Any]:
    q, k, v = inputs(1, 2, queries=rows, keys=n, dim=4)
    return nf.estimate(q, k, v, method=method, generator=seeded(0), **options).info


def test_both_sizes_follow_from_the_promise() -> None:
    # k^2 + c k = 600 c, c = 2 * (1 + 1/3) * 4 * ln 40 = 39.35: k = 135.2
    info = info_of(nf.TopK(eps=0.5, delta=0.1))
    assert (info["k"], info["tail"]) == (136, 136)
    assert info["k"] == nf.budget(600, 0.5, 0.1).k
    assert info["keys_used"] == 2 * info["k"]
    assert info["promise"] == "|O^ - O| <= 1 max_j |V_jc - O_ic| for each entry, with probability 0.9"
    assert info["promise_met"] == 1.0


@pytest.mark.parametrize(("k", "tail"), [(60, None), (None, 60), (300, None), (None, 300)])
def test_a_given_size_stays_and_the_other_is_the_smallest(k: int | None, tail: int | None) -> None:
    info = info_of(nf.TopK(k=k, tail=tail, eps=0.5, delta=0.1))
    assert info["k"] == (k or info["k"])
    assert info["tail"] == (tail or info["tail"])
    assert tail_condition(600, 0.5, 0.1, info["k"], info["tail"])
    assert not tail_condition(600, 0.5, 0.1, info["k"] - (k is None), info["tail"] - (tail is None))


def test_given_sizes_that_keep_the_promise_stay_as_they_are() -> None:
    info = info_of(nf.TopK(k=200, tail=150, eps=0.5, delta=0.1))
    assert (info["k"], info["tail"]) == (200, 150)


def test_given_sizes_that_break_the_promise_are_an_error() -> None:
    # 39.35 * 400 / 200 = 78.7
    with pytest.raises(ValueError, match=r"k=200 and tail=78 do not promise eps=0.5 and delta=0.1 for 600 keys.*must be 79 or"):
        info_of(nf.TopK(k=200, tail=78, eps=0.5, delta=0.1))
    assert info_of(nf.TopK(k=200, tail=79, eps=0.5, delta=0.1))["promise_met"] == 1.0


def test_a_promise_that_asks_for_all_keys_is_exact() -> None:
    q, k, v = inputs(1, 2, queries=5, keys=60, dim=4)
    for method in (nf.TopK(eps=0.1, delta=0.1), nf.TopK(k=20, eps=0.1, delta=0.1), nf.TopK(tail=20, eps=0.1, delta=0.1)):
        est = nf.estimate(q, k, v, method=method)
        torch.testing.assert_close(est.output, nf.attention(q, k, v, method=nf.Exact()))
        assert (est.info["k"], est.info["tail"], est.info["promise_met"]) == (60, 0, 1.0)
        assert est.info["promise"].startswith("exact")


def test_all_entries_at_once_ask_for_more() -> None:
    # Three rows, two heads and four columns: 2 * 0.1 / (6 * 5) = 1/150 in place of 0.1.
    info = info_of(nf.TopK(eps=0.5, delta=0.1, joint=True))
    assert TailPromise(0.5, 0.1, joint=True).entry_delta(6, 4) == pytest.approx(1 / 150)
    assert info["k"] == nf.budget(600, 0.5, 1 / 150).k > nf.budget(600, 0.5, 0.1).k
    assert "for all entries at once" in info["promise"]
    assert nf.budget(600, 0.5, 0.1, d=4, form="joint").k == nf.budget(600, 0.5, 2 * 0.1 / (600 * 5)).k
    # For a single entry, both promises are the same.
    assert TailPromise(0.5, 0.1, joint=True).entry_delta(1, 1) == 0.1


def test_calls_without_a_promise_make_none() -> None:
    info = info_of(nf.TopK())
    assert (info["k"], info["tail"]) == (25, 0)
    assert "promise" not in info
    assert "promise_met" not in info


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"eps": 0.1}, r"give both or neither, got eps=0\.1, delta=None"),
        ({"delta": 0.1}, r"give both or neither, got eps=None, delta=0\.1"),
        ({"eps": 1.5, "delta": 0.1}, r"eps must be a number between 0 and 1, got 1\.5"),
        ({"eps": 0.5, "delta": 0}, r"delta must be .* got 0"),
        ({"eps": 0.5, "delta": 0.1, "tail": 0}, "tail=0 leaves keys out and promises nothing"),
        ({"joint": True}, "joint=True needs a promise"),
        ({"tail": -1}, "tail must be an integer of at least 0 or None, got -1"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nf.TopK(**arguments)


@given(st.integers(1, 10**6), st.floats(0.05, 0.9), st.floats(0.01, 0.5), st.integers(1, 10**5))
def test_a_given_tail_is_solved_for_k(n: int, eps: float, delta: float, tail: int) -> None:
    k, ell = tail_sizes(n, eps, delta, ell=tail)
    assert ell == tail
    assert 1 <= k <= n
    assert k == n or tail_condition(n, eps, delta, k, tail)
    assert k == 1 or not tail_condition(n, eps, delta, k - 1, tail)


class Chosen:
    """The k keys of smallest or largest inner product, with a true bound for the others, or with none."""

    def __init__(self, largest: bool, bounded: bool) -> None:
        self.largest, self.bounded = largest, bounded

    def build(self, keys: Tensor) -> BuiltIndex:
        recipe = self

        class Built(BuiltIndex):
            def _scores(self, queries: Tensor, visible: Tensor) -> tuple[Tensor, Tensor]:
                scores = queries @ self.keys.mT
                return scores, torch.arange(self.length) < visible[..., None]

            def _search(self, queries: Tensor, k: int, visible: Tensor) -> tuple[Tensor, Tensor]:
                scores, seen = self._scores(queries, visible)
                worst = -torch.inf if recipe.largest else torch.inf
                ids = scores.masked_fill(~seen, worst).topk(k, largest=recipe.largest).indices
                ids = ids.masked_fill(ids >= visible[..., None], -1)
                return gathered_scores(queries, self.keys, ids), ids

            def _cutoffs(self, queries: Tensor, ids: Tensor, visible: Tensor) -> Cutoffs | None:
                if not recipe.bounded:
                    return None
                scores, seen = self._scores(queries, visible)
                near = torch.zeros_like(scores, dtype=torch.int64).scatter_add(-1, ids.clamp(min=0), (ids >= 0).long()) > 0
                left = scores.masked_fill(~seen | near, -torch.inf).amax(-1)
                return Cutoffs.one_group(left, visible, self.length)

        return Built(keys)


def met_by_hand(q: Tensor, k: Tensor, near: int, tail: int, factor: float, largest: bool) -> float:
    met = []
    for row, scores in enumerate(logits64(q, k, causal=True)[0, 0]):
        ordered = scores[: row + 1].sort(descending=largest).values
        kept, rest = ordered[:near].exp().sum(), ordered[near:]
        met.append(len(rest) <= tail or bool(kept / rest.max().exp() * tail >= factor * len(rest)))
    return sum(met) / len(met)


@pytest.mark.parametrize("largest", [True, False])
def test_rows_meet_the_condition_by_what_was_seen(largest: bool) -> None:
    """With the k smallest scores the theorem's k is worth nothing: only rows with few keys, or nearly flat ones, meet it."""
    q, k, v = inputs(1, 1, queries=400, dim=4)
    sharp = torch.linspace(0.05, 1.5, 400)[torch.randperm(400, generator=seeded(1))]
    q = q * sharp[:, None]
    method = nf.TopK(eps=0.5, delta=0.1, index=Chosen(largest, bounded=True))
    info = nf.estimate(q, k, v, is_causal=True, method=method).info
    factor = 2 * (4 / 3) * 4 * math.log(40)
    expected = met_by_hand(q, k, info["k"], info["tail"], factor, largest)
    assert info["promise_met"] == pytest.approx(expected, abs=1e-9)
    if largest:
        assert expected == 1
        assert "known" not in info["promise"]
    else:
        alone = (info["k"] + info["tail"]) / 400
        assert alone < expected < 0.99
        assert f"known to hold for {expected:.1%} of the rows" in info["promise"]


def test_without_bounds_only_rows_that_read_everything_are_promised() -> None:
    q, k, v = inputs(1, 1, queries=400, dim=4)
    method = nf.TopK(eps=0.5, delta=0.1, index=Chosen(True, bounded=False))
    info = nf.estimate(q, k, v, is_causal=True, method=method).info
    assert info["promise_met"] == (info["k"] + info["tail"]) / 400 < 1


def test_the_backward_pass_does_not_count_again() -> None:
    calls = 0

    class Counting(Chosen):
        def build(self, keys: Tensor) -> BuiltIndex:
            built = super().build(keys)
            plain = built._cutoffs

            def cutoffs(*arguments: Tensor) -> Cutoffs | None:
                nonlocal calls
                calls += 1
                return plain(*arguments)

            built._cutoffs = cutoffs  # type: ignore[method-assign]
            return built

    q, k, v = (x.requires_grad_() for x in inputs(1, 1, queries=8, keys=700, dim=4))
    # A plan larger than the inputs is not kept, so the backward pass makes it again.
    nf.estimate(q, k, v, method=nf.TopK(eps=0.5, delta=0.1, index=Counting(True, True))).output.sum().backward()
    assert calls == 1
    nf.attention(q, k, v, method=nf.TopK(eps=0.5, delta=0.1, index=Counting(True, True)))
    assert calls == 1, "nobody asks"


def needed_by_hand(scores: Tensor, tail: int, eps: float, delta: float) -> int:
    """One row of scores, every k in turn."""
    ordered = scores.double().sort(descending=True).values
    n = len(ordered)
    for k in range(1, n):
        left = n - k
        if left <= tail:
            return k
        weight = (ordered[:k] - ordered[k]).exp().sum()
        if weight * tail >= 2 * (1 + 2 * eps / 3) * left / eps**2 * math.log(4 / delta):
            return k
    return n


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 60), st.floats(0.0, 8.0), st.integers(0, 40), st.floats(0.1, 0.9), st.booleans(), st.integers(0, 9))
def test_needed_k_by_hand(n: int, spread: float, tail: int, eps: float, causal: bool, seed: int) -> None:
    q, k, _ = inputs(2, 4, queries=7, keys=n, dim=3, kv_heads=2, seed=seed, dtype=torch.float64)
    q = q * spread
    got = nf.needed_k(q, k, eps, 0.1, tail=tail, is_causal=causal, enable_gqa=True)
    logits = logits64(q, k, causal=causal)
    assert got.shape == logits.shape[:-1]
    for place in range(got.numel()):
        row = place % 7
        seen = min(row + 1, n) if causal else n
        assert int(got.flatten()[place]) == needed_by_hand(logits.flatten(0, -2)[place][:seen], tail, eps, 0.1)


def test_needed_k_of_flat_rows_is_the_k_of_the_theorem() -> None:
    q, k = torch.zeros(1, 1, 1, 4), torch.randn(1, 1, 600, 4, generator=seeded(0))
    for tail in (40, 135, 300):
        assert int(nf.needed_k(q, k, 0.5, 0.1, tail=tail)) == tail_sizes(600, 0.5, 0.1, ell=tail)[0]
    assert int(nf.needed_k(q, k, 0.5, 0.1)) == tail_sizes(600, 0.5, 0.1, ell=25)[0]
    assert int(nf.needed_k(q, k, 0.5, 0.1, tail=0)) == 600


def test_needed_k_with_padding_is_that_of_the_keys_that_count() -> None:
    q, k, _ = inputs(2, 2, queries=30, dim=3, dtype=torch.float64)
    mask = torch.rand(2, 1, 1, 30, generator=seeded(1)) < 0.7
    mask[1, ..., :4] = False
    got = nf.needed_k(q, k, 0.5, 0.2, tail=3, attn_mask=mask, is_causal=True)
    assert bool((got[1, :, :4] == 0).all()), "these rows see nothing"
    for entry in range(2):
        for row in range(30):
            kept = mask[entry, 0, 0].nonzero()[:, 0]
            kept = kept[kept <= row]
            if len(kept):
                alone = nf.needed_k(q[entry : entry + 1, :, row : row + 1], k[entry : entry + 1, :, kept], 0.5, 0.2, tail=3)
                torch.testing.assert_close(got[entry, :, row], alone[0, :, 0])


def test_needed_k_in_small_blocks_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, _ = inputs(1, 2, queries=50, dim=3)
    whole = nf.needed_k(q, k, 0.5, 0.1, is_causal=True)
    monkeypatch.setattr("nearfield.chunks.BLOCK_BYTES", 50 * 64 * 2 * 3)
    torch.testing.assert_close(nf.needed_k(q, k, 0.5, 0.1, is_causal=True), whole)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": 2.0}, r"eps must be .* got 2\.0"),
        ({"delta": 0.0}, r"delta must be .* got 0\.0"),
        ({"tail": -1}, "tail must be .* got -1"),
        (
            {"attn_mask": torch.ones(8, 8, dtype=torch.bool).tril()},
            r"needed_k honours only .*masks.*bool of shape \(.*8, 8\)",
        ),
    ],
)
def test_bad_arguments_of_needed_k(change: dict[str, Any], message: str) -> None:
    q, k, _ = inputs(1, 1, queries=8, dim=3)
    with pytest.raises(ValueError, match=message):
        nf.needed_k(q, k, **{"eps": 0.5, "delta": 0.1} | change)


@pytest.mark.parametrize("spread", [0.0, 1.0, 3.0])
def test_the_needed_k_keeps_its_promise(spread: float) -> None:
    """2,000 estimates of one row with the k that it needs; values of two kinds have the largest variance."""
    eps, delta, tail, copies = 0.5, 0.2, 16, 2000
    generator = seeded(3)
    q = spread * torch.randn(1, 1, 1, 4, generator=generator)
    k = torch.randn(1, 1, 400, 4, generator=generator)
    v = torch.randint(0, 2, (1, 1, 400, 1), generator=generator).float() * 2 - 1
    near = int(nf.needed_k(q, k, eps, delta, tail=tail))
    assert near < 400 - tail
    exact = nf.attention(q, k, v, method=nf.Exact())
    many = [x.expand(copies, -1, -1, -1) for x in (q, k, v)]
    output = nf.attention(*many, method=nf.TopK(k=near, tail=tail), generator=seeded(4))
    bound = eps / (1 - eps) * float((v - exact).abs().max())
    failures = int(((output - exact).abs() > bound).sum())
    assert failures <= stats.binom.isf(ALPHA, copies, delta)
    assert float(output.std()) > 0
