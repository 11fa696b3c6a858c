"""Lazy Gumbel sampling draws from the softmax, exactly, whatever the index missed, and looks at as many keys as it should."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import pytest
import torch
from laws import assert_follows, assert_frequencies, assert_mean, seeded, total_variation
from scipy import stats
from torch import Tensor

import nearfield as nf
from nearfield.knn.index import Cutoffs, Index
from nearfield.knn.index.own import build_index
from nearfield.paper.lazy import Draws, LazyRows, prepare
from nearfield.problem import Rows

DRAWS = 100_000
BAD_INDEX = nf.KMeansIndex(cells=5, probes=1)
BAD_BLOCKS = nf.KMeansIndex(cells=5, probes=1, leaf=16)


def random_rows(
    seed: int,
    batch: int = 1,
    count: int = 4,
    length: int = 200,
    dim: int = 3,
    causal: bool = False,
    dtype: torch.dtype = torch.float64,
) -> Rows:
    generator = seeded(seed)
    keys = torch.randn(batch, length, dim, generator=generator, dtype=torch.float64).to(dtype)
    queries = torch.randn(batch, count, dim, generator=generator, dtype=torch.float64).to(dtype)
    visible = torch.full((batch, count), length)
    if causal:
        visible = (torch.arange(count) * (length // max(1, count - 1))).clamp(min=1).expand(batch, -1)
    return Rows(queries, keys, keys, visible)


def softmax_of(rows: Rows) -> Tensor:
    """`[flat, length]`, float64."""
    hidden = torch.arange(rows.length) >= rows.visible[..., None]
    logits = rows.queries.double() @ rows.keys.double().mT
    return logits.masked_fill(hidden, -torch.inf).softmax(-1).flatten(0, 1)


def normaliser_of(rows: Rows) -> Tensor:
    hidden = torch.arange(rows.length) >= rows.visible[..., None]
    logits = rows.queries.double() @ rows.keys.double().mT
    return logits.masked_fill(hidden, -torch.inf).logsumexp(-1).flatten()


def prepared(rows: Rows, index: Index, k: int, certify: bool = True) -> LazyRows:
    return prepare(rows, build_index(index, rows.keys), k, certify)


def draw_each(lazy: LazyRows, draws: int, seed: int) -> tuple[Draws, Tensor]:
    """`draws` draws for every row, in shuffled order."""
    segment = torch.arange(len(lazy.near_ids)).repeat(draws)
    segment = segment[torch.randperm(len(segment), generator=seeded(seed))]
    return lazy.draw(segment, seeded(seed + 1)), segment


def assert_exact_draws(rows: Rows, lazy: LazyRows, seed: int, draws: int = DRAWS) -> None:
    drawn, segment = draw_each(lazy, draws, seed)
    for row, expected in enumerate(softmax_of(rows)):
        assert_frequencies(drawn.ids[segment == row].bincount(minlength=rows.length), expected)


class Sampled(NamedTuple):
    rows: Rows
    lazy: LazyRows
    drawn: Draws
    segment: Tensor

    def counts(self, row: int) -> Tensor:
        """How often each key was drawn."""
        return self.drawn.ids[self.segment == row].bincount(minlength=self.rows.length)


def assert_softmax(sampled: Sampled) -> None:
    for row, expected in enumerate(softmax_of(sampled.rows)):
        assert_frequencies(sampled.counts(row), expected)


@cache
def drawn_with_a_bad_index(seed: int, certify: bool = True, dtype: torch.dtype = torch.float64) -> Sampled:
    """`DRAWS` draws for each of four rows."""
    rows = random_rows(seed, dtype=dtype)
    lazy = prepared(rows, BAD_INDEX, 25, certify)
    assert lazy.certified.tolist() == [certify] * 4
    assert not bool(lazy.dense.any())
    return Sampled(rows, lazy, *draw_each(lazy, DRAWS, seed))


@pytest.mark.parametrize("k", [1, 5, 14, 60, 200])
def test_draws_with_a_true_top_k(k: int) -> None:
    rows = random_rows(0, count=2)
    lazy = prepared(rows, nf.ExactIndex(), k)
    assert bool(lazy.certified.all())
    assert k == 1 or not bool(lazy.dense.any())
    assert_exact_draws(rows, lazy, seed=k)


@pytest.mark.long
@pytest.mark.parametrize(("seed", "dtype"), [(3, torch.float64), (4, torch.float64), (3, torch.float32)])
def test_draws_with_a_bad_index_and_certified_bounds(seed: int, dtype: torch.dtype) -> None:
    sampled = drawn_with_a_bad_index(seed, dtype=dtype)
    expected = softmax_of(sampled.rows)
    missed = expected.topk(25).values.sum(-1) - expected.gather(1, sampled.lazy.near_ids).sum(-1)
    assert float(missed.max()) > 0.1, "this index is not bad enough to test anything"
    assert_softmax(sampled)


@pytest.mark.long
@pytest.mark.parametrize("seed", [3, 4])
def test_the_printed_cutoff_is_wrong_with_a_bad_index(seed: int) -> None:
    printed, certified = drawn_with_a_bad_index(seed, certify=False), drawn_with_a_bad_index(seed)
    expected = softmax_of(printed.rows)
    wrong, right = ([total_variation(x.counts(row), expected[row]) for row in range(4)] for x in (printed, certified))
    # Noise alone: E TV <= sqrt(length / draws) / 2 = 0.022.
    assert max(right) < 0.025
    assert max(wrong) > 0.04
    with pytest.raises(AssertionError, match="chi-square"):
        assert_softmax(printed)


def test_the_printed_cutoff_is_right_with_a_true_top_k() -> None:
    rows = random_rows(5, count=2)
    lazy = prepared(rows, nf.ExactIndex(), 14, certify=False)
    assert not bool(lazy.certified.any())
    assert_exact_draws(rows, lazy, seed=5)


@pytest.mark.parametrize("index", [nf.ExactIndex(), BAD_INDEX, BAD_BLOCKS], ids=["exact", "k-means", "k-means in blocks"])
def test_causal_draws(index: Index) -> None:
    rows = random_rows(2, count=5, length=160, causal=True)
    lazy = prepared(rows, index, 16)
    assert rows.visible[0].tolist() == [1, 40, 80, 120, 160]
    drawn, segment = draw_each(lazy, DRAWS, 7)
    for row, expected in enumerate(softmax_of(rows)):
        here = drawn.ids[segment == row]
        assert int(here.max()) < int(rows.visible[0, row])
        assert_frequencies(here.bincount(minlength=rows.length), expected)
    assert int(drawn.evaluated[segment == 0].max()) == 0


@pytest.mark.parametrize(("index", "k"), [(nf.ExactIndex(), 1), (nf.KMeansIndex(cells=2, probes=1), 2)], ids=["exact", "k-means"])
def test_dense_rows(index: Index, k: int) -> None:
    """Bounds so loose that drawing lazily would cost more than looking at every key."""
    rows = random_rows(4, count=3, length=40, dim=6, causal=True)
    rows = Rows(rows.queries * 4, rows.keys, rows.values, rows.visible)
    lazy = prepared(rows, index, k)
    assert rows.visible[0].tolist() == [1, 20, 40]
    assert lazy.dense[1:].tolist() == [k == 1, True]
    drawn, segment = draw_each(lazy, DRAWS, 8)
    for row, expected in enumerate(softmax_of(rows)):
        assert_frequencies(drawn.ids[segment == row].bincount(minlength=rows.length), expected)
        peak = drawn.peak[segment == row]
        assert_follows((normaliser_of(rows)[row] - peak).exp(), stats.expon.cdf)
    assert not bool(drawn.evaluated[lazy.dense[segment]].any())
    assert not bool(lazy.expected_evaluations()[lazy.dense].any())


@pytest.mark.parametrize("index", [nf.ExactIndex(), BAD_INDEX], ids=["exact", "k-means"])
def test_batch_entries_draw_from_their_own_keys(index: Index) -> None:
    rows = random_rows(6, batch=3, count=2, length=120)
    lazy = prepared(rows, index, 20)
    assert_exact_draws(rows, lazy, seed=9, draws=60_000)


def test_batch_entries_with_different_visibility() -> None:
    rows = random_rows(7, batch=2, count=2, length=100)
    visible = torch.tensor([[100, 30], [55, 100]])
    rows = Rows(rows.queries, rows.keys, rows.values, visible)
    assert_exact_draws(rows, prepared(rows, BAD_BLOCKS, 12), seed=10, draws=60_000)


def test_mixed_dense_and_lazy_rows_in_one_call() -> None:
    rows = random_rows(0, length=200, dim=3)
    lazy = prepared(rows, BAD_INDEX, 6)
    assert 0 < int(lazy.dense.sum()) < len(lazy.dense)
    assert_exact_draws(rows, lazy, seed=11, draws=60_000)


@pytest.mark.parametrize(("k", "length"), [(4, 60), (14, 200), (40, 200), (12, 400)])
def test_expected_evaluations_of_a_true_top_k(k: int, length: int) -> None:
    rows = random_rows(k, count=3, length=length)
    lazy = prepared(rows, nf.ExactIndex(), k)
    logits = (rows.queries @ rows.keys.mT)[0]
    near = logits.topk(k).values
    bound, log_near = near[:, -1], near.logsumexp(-1)
    closed_form = (length - k) * torch.sigmoid(bound - log_near)
    lazy = LazyRows(**{**vars(lazy), "dense": torch.zeros_like(lazy.dense)})
    torch.testing.assert_close(lazy.expected_evaluations(), closed_form)
    assert bool((closed_form <= (length - k) / (k + 1)).all())
    drawn, segment = draw_each(lazy, 40_000, k)
    for row in range(3):
        assert_mean(drawn.evaluated[segment == row].double(), closed_form[row])
        assert int(drawn.evaluated[segment == row].max()) <= length - k


@pytest.mark.long
@pytest.mark.parametrize("seed", [3, 4])
def test_expected_evaluations_of_cells(seed: int) -> None:
    rows, lazy, drawn, segment = drawn_with_a_bad_index(seed)
    built = BAD_INDEX.build(rows.keys)
    cutoffs = built.cutoffs(rows.queries, built.search(rows.queries, 25)[1])
    assert cutoffs is not None
    for row in range(4):
        log_near = lazy.near_logits[row].logsumexp(0)
        near = set(lazy.near_ids[row].tolist())
        by_hand = 0.0
        for cell in range(5):
            start = int(cutoffs.starts[0, cell])
            members = cutoffs.order[0, start : start + int(cutoffs.counts[0, row, cell])].tolist()
            far = sum(key not in near for key in members)
            by_hand += far * float(torch.sigmoid(cutoffs.bounds[0, row, cell] - log_near))
        assert by_hand == pytest.approx(float(lazy.expected_evaluations()[row]), rel=1e-6)
        assert_mean(drawn.evaluated[segment == row].double(), by_hand)


def test_expected_evaluations_of_causal_rows() -> None:
    rows = random_rows(2, count=5, length=160, causal=True)
    lazy = prepared(rows, BAD_BLOCKS, 16)
    drawn, segment = draw_each(lazy, 40_000, 12)
    for row, expected in enumerate(lazy.expected_evaluations()):
        assert_mean(drawn.evaluated[segment == row].double(), expected)


@pytest.mark.parametrize("index", [nf.ExactIndex(), BAD_INDEX], ids=["exact", "k-means"])
def test_peaks_are_gumbel_around_the_normaliser(index: Index) -> None:
    rows = random_rows(3)
    drawn, segment = draw_each(prepared(rows, index, 25), 40_000, 13)
    for row, log_total in enumerate(normaliser_of(rows)):
        peak = drawn.peak[segment == row]
        assert_follows((log_total - peak).exp(), stats.expon.cdf)
        # and independent of the key drawn
        heavy = drawn.ids[segment == row] == int(softmax_of(rows)[row].argmax())
        assert_follows((log_total - peak[heavy]).exp(), stats.expon.cdf)


def test_a_single_visible_key() -> None:
    rows = random_rows(8, count=2, length=1)
    lazy = prepared(rows, nf.ExactIndex(), 3)
    drawn, segment = draw_each(lazy, 20_000, 14)
    assert not bool(drawn.ids.any())
    assert not bool(drawn.evaluated.any())
    for row, log_total in enumerate(normaliser_of(rows)):
        assert_follows((log_total - drawn.peak[segment == row]).exp(), stats.expon.cdf)


@pytest.mark.parametrize("index", [nf.ExactIndex(), BAD_INDEX], ids=["exact", "k-means"])
def test_rows_without_keys_do_not_disturb_the_others(index: Index) -> None:
    rows = random_rows(9, count=3, length=80)
    rows = Rows(rows.queries, rows.keys, rows.values, torch.tensor([[0, 80, 40]]))
    lazy = prepared(rows, index, 10)
    segment = torch.tensor([1, 2]).repeat(60_000)
    drawn = lazy.draw(segment, seeded(15))
    for row in (1, 2):
        assert_frequencies(drawn.ids[segment == row].bincount(minlength=80), softmax_of(rows)[row].nan_to_num())


@pytest.mark.parametrize("index", [nf.ExactIndex(), BAD_INDEX], ids=["exact", "k-means"])
@pytest.mark.parametrize("size", [1e4, 1e-8])
def test_extreme_logits(index: Index, size: float) -> None:
    rows = random_rows(10, length=150)
    rows = Rows(rows.queries * (size / 3), rows.keys, rows.values, rows.visible)
    lazy = prepared(rows, index, 12)
    drawn, segment = draw_each(lazy, 5_000, 16)
    assert bool(drawn.peak.isfinite().all())
    assert 0 <= int(drawn.ids.min()) <= int(drawn.ids.max()) < 150
    assert bool(lazy.expected_evaluations().isfinite().all())
    for row, expected in enumerate(softmax_of(rows)):
        assert_frequencies(drawn.ids[segment == row].bincount(minlength=150), expected)


def test_equal_keys() -> None:
    rows = random_rows(11, count=1, length=50)
    rows = Rows(rows.queries, rows.keys[:, :1].expand(-1, 50, -1).contiguous(), rows.values, rows.visible)
    assert_exact_draws(rows, prepared(rows, nf.ExactIndex(), 10), seed=17)


def test_one_heavy_key_that_the_index_missed() -> None:
    """A near set without the key that holds most of the mass: right with a bound that knows of it, wrong with the printed one."""
    generator = seeded(0)
    keys = torch.tensor([1.0, 0.0]) + 0.05 * torch.randn(1, 200, 2, generator=generator)
    keys[0, 150] = torch.tensor([5.0, 0.0])
    keys = keys.double()
    rows = Rows(torch.tensor([[[1.0, 0.0]]], dtype=torch.float64), keys, keys, torch.tensor([[200]]))
    logits, ids = nf.ExactIndex().build(keys[:, :100]).search(rows.queries, 50)
    near_ids, order = ids[0].sort(-1)
    smallest = logits.amin(-1, keepdim=True)
    seen = torch.full((1, 1, 1), 200)
    expected = softmax_of(rows)[0]
    for bound, right in ((torch.full_like(smallest, 5.0), True), (smallest, False)):
        cutoffs = Cutoffs(bound, seen, torch.zeros(1, 1, dtype=torch.long), torch.arange(200)[None])
        lazy = LazyRows(rows, near_ids, logits[0].gather(-1, order), cutoffs, None, torch.zeros(1, dtype=torch.bool))
        drawn = lazy.draw(torch.zeros(20_000, dtype=torch.long), seeded(18)).ids.bincount(minlength=200)
        if right:
            assert_frequencies(drawn, expected)
        else:
            assert total_variation(drawn, expected) > 0.1


def test_same_generator_same_draws() -> None:
    lazy = prepared(random_rows(12), BAD_INDEX, 25)
    segment = torch.tensor([3, 0, 0, 2, 1, 3])
    one, two = lazy.draw(segment, seeded(1)), lazy.draw(segment, seeded(1))
    assert torch.equal(one.ids, two.ids)
    assert torch.equal(one.peak, two.peak)
    assert not torch.equal(one.peak, lazy.draw(segment, seeded(2)).peak)


def test_no_draws() -> None:
    drawn = prepared(random_rows(12), nf.ExactIndex(), 5).draw(torch.empty(0, dtype=torch.long), seeded(0))
    assert drawn.ids.shape == drawn.peak.shape == drawn.evaluated.shape == (0,)
    assert math.isfinite(float(drawn.peak.sum()))
