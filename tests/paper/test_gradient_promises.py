"""What is promised of estimated gradients: the sizes taken are those of the theorems, and the errors are within them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import ALPHA, assert_mean, seeded
from scipy import stats
from torch import Tensor

import nearfield as nf
from nearfield.paper import walks as module
from nearfield.paper.gradients import PrintedWalk, RandomWalk
from nearfield.problem import Rows, check
from nearfield.results import Gradients

BATCH, HEADS, GROUP, QUERIES, KEYS, DIM, VALUE_DIM = 2, 3, 2, 8, 5, 2, 4
EPS, DELTA = 0.05, 0.1


def normal(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = seeded(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def several_heads(keys: int = KEYS) -> Rows:
    """More rows than keys in every head, and other columns in the values than in the keys."""
    shapes = (BATCH, GROUP * HEADS, QUERIES, DIM), (BATCH, HEADS, keys, DIM), (BATCH, HEADS, keys, VALUE_DIM)
    return check(*normal(0, *shapes), enable_gqa=True).rows


def odd_groups(estimates: int) -> int:
    """By Chernoff for groups that miss once in 8.36 times, made odd."""
    miss = 1 / 8.36
    divergence = 0.5 * math.log(0.5 / miss) + 0.5 * math.log(0.5 / (1 - miss))
    groups = math.ceil(math.log(estimates / DELTA) / divergence)
    return groups + 1 - groups % 2


def hoeffding(estimates: int) -> int:
    return math.ceil(math.log(2 * estimates / DELTA) / (2 * EPS**2))


def sizes_taken(walk: PrintedWalk, rows: Rows, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What `PrintedWalk` hands to its estimators, which do nothing here."""
    taken: dict[str, Any] = {}

    def dq(walker: Any, upstream: Tensor, groups: int, size: int, generator: Any, dropout: None) -> Tensor:
        taken["dq"] = (groups, size)
        return torch.zeros_like(rows.queries)

    def dk(walker: Any, upstream: Tensor, walks: int, groups: int, size: int, *_: Any) -> Tensor:
        taken["dk"] = (walks, groups, size)
        return torch.zeros_like(rows.keys)

    def dv(walker: Any, x: Tensor, walks: int, *_: Any) -> Tensor:
        taken["dv"] = walks
        return torch.zeros_like(rows.values)

    def sums(walker: Any, x: Tensor, walks: int, generator: Any) -> Tensor:
        taken["s"] = walks
        return torch.zeros_like(rows.keys[..., :1])

    for name, stub in (("printed_dq", dq), ("printed_dk", dk), ("shifted_product", dv), ("positive_product", sums)):
        monkeypatch.setattr(module, name, stub)
    walk.estimate(rows, torch.ones(*rows.visible.shape, VALUE_DIM, dtype=torch.float64), module.Seeds(None, torch.device("cpu")))
    return taken


@pytest.mark.parametrize("keys", [KEYS, 40])
def test_printed_walks_take_what_their_theorems_ask_for(keys: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = several_heads(keys)
    taken = sizes_taken(PrintedWalk(EPS, DELTA), rows, monkeypatch)
    all_rows, all_keys = BATCH * HEADS * GROUP * QUERIES, BATCH * HEADS * keys
    size = math.ceil(8.36 / EPS**2)
    # E1, E2 and E3 for every entry of D^Q.
    assert taken["dq"] == (odd_groups(3 * all_rows * DIM), size)
    # A, B and X for every entry of D^K, and s.
    estimates = max(all_rows, all_keys) * (3 * DIM + 1)
    assert taken["dk"] == (hoeffding(estimates), odd_groups(estimates), size)
    # D^V, and s, which serves both.
    assert taken["dv"] == hoeffding(all_keys * (VALUE_DIM + 1))
    assert taken["s"] == max(taken["dk"][0], taken["dv"])


def test_fewer_estimates_in_the_union_would_be_noticed() -> None:
    """The sizes of the test above differ from those for one estimate per entry, without A or B, and for one head."""
    n, heads = BATCH * HEADS * GROUP * QUERIES, BATCH * HEADS
    assert odd_groups(3 * n * DIM) > odd_groups(n * DIM)
    assert odd_groups(3 * n * DIM) > odd_groups(3 * n // heads * DIM)
    assert hoeffding(n * (3 * DIM + 1)) > hoeffding(n * (2 * DIM + 1))
    assert hoeffding(n * (3 * DIM + 1)) > hoeffding(n // heads * (3 * DIM + 1))


def test_given_walks_replace_those_of_the_theorems(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = sizes_taken(PrintedWalk(EPS, DELTA, walks=7), several_heads(), monkeypatch)
    assert (taken["dk"][0], taken["dv"], taken["s"]) == (7, 7, 7)


class Inputs:
    """Queries that are multiplied by the scale, keys, values and upstream gradient `[batch, length, dim]`; what promises need."""

    def __init__(self, query: Tensor, key: Tensor, value: Tensor, upstream: Tensor, causal: bool) -> None:
        self.query, self.key, self.value, self.upstream, self.causal = query, key, value, upstream, causal
        logits = query @ key.mT
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool)
        self.seen = seen.tril() if causal else seen
        self.weights = logits.masked_fill(~self.seen, -torch.inf).softmax(-1)
        self.scores = upstream @ value.mT

    def mean(self, terms: Tensor) -> Tensor:
        """Under the softmax of every row, of terms `[batch, rows, keys, columns]`."""
        return (self.weights[..., None] * terms).sum(-2)

    def spread(self, terms: Tensor) -> Tensor:
        return (self.mean(terms.square()) - self.mean(terms).square()).clamp(min=0).sqrt()

    def of_medians(self, eps: float) -> Gradients:
        """The errors that `PrintedWalk` may make, entry by entry."""
        with_keys, scores = self.scores[..., None] * self.key[:, None], self.scores[..., None]
        keys = self.key[:, None].expand_as(with_keys)
        e2, e3, sd2, sd3 = self.mean(keys), self.mean(scores), self.spread(keys), self.spread(scores)
        query = eps * (self.spread(with_keys) + e2.abs() * sd3 + e3.abs() * sd2 + eps * sd2 * sd3)

        off = eps * self.query.abs() * sd3  # how far X^ may be from X
        largest = (self.query.abs().amax(-1) * self.upstream.norm(dim=-1)).amax(-1)
        lift = (largest * self.value.norm(dim=-1).amax(-1))[:, None, None]
        seen, count = self.seen.to(self.query), self.query.shape[1]
        lifted = torch.einsum("rk,brk,brd->bkd", seen, self.scores, self.query) + lift * seen.sum(0)[:, None]
        a = lifted + lift * count
        x = self.query * e3
        below = (off - x).clamp(min=0).amax(1, keepdim=True)
        b = (x + off).sum(1, keepdim=True) + 2 * count * below
        key = eps * (a + b) + self.weights.mT @ off

        down = (-self.upstream).clamp(min=0).amax(1, keepdim=True)
        value = eps * (self.upstream.sum(1, keepdim=True) + 2 * count * down)
        return Gradients(query, key, value.expand_as(self.value))

    def of_covariances(self, eps: float) -> Gradients:
        """Those that `RandomWalk` may make."""
        width = _range(self.scores, self.seen)
        keys = _range(self.key.mT[:, None].expand(-1, self.query.shape[1], -1, -1), self.seen[:, None])
        seen = self.seen.to(self.query)
        key, value = (seen.mT @ x.square() for x in (self.query * width[..., None], self.upstream))
        return Gradients(eps * width[..., None] * keys, eps * key.sqrt(), eps * value.sqrt())

    def errors(self, walk: Any, seed: int) -> Gradients:
        inputs = (self.query, self.key, self.value, self.upstream)
        found = nf.gradients.estimate(*inputs, walk, is_causal=self.causal, scale=1.0, generator=seeded(seed))
        right = nf.gradients.exact(*inputs, is_causal=self.causal, scale=1.0)
        return Gradients(*((a - b).abs() for a, b in zip(found, right, strict=True)))


def _range(terms: Tensor, seen: Tensor) -> Tensor:
    return terms.masked_fill(~seen, -torch.inf).amax(-1) - terms.masked_fill(~seen, torch.inf).amin(-1)


def worst(errors: Gradients, allowed: Gradients) -> list[float]:
    """The largest error of each gradient in parts of what is allowed; a row that sees one key has none, and none allowed."""
    return [float((a / (b + 1e-12)).amax()) for a, b in zip(errors, allowed, strict=True)]


@pytest.mark.parametrize("causal", [False, True])
def test_printed_walks_as_they_run_are_within_the_promise(causal: bool) -> None:
    """Medians and all, in 20 heads at once: with delta = 1e-6 a single broken promise is a false alarm that rare."""
    inputs = Inputs(*normal(1, (20, 6, 2), (20, 6, 2), (20, 6, 2), (20, 6, 2)), causal)
    allowed = inputs.of_medians(0.3)
    found = worst(inputs.errors(PrintedWalk(0.3, ALPHA), 1), allowed)
    assert max(found) <= 1, found
    # It can break: with the sizes for nine times the error, every one of the three does.
    assert min(worst(inputs.errors(PrintedWalk(0.9, 0.9), 1), inputs.of_medians(0.1))) > 1


def test_medians_of_means_are_biased() -> None:
    """One key of weight 0.01 with a large value: nearly all groups miss it, and so does their median; the mean does not."""
    key = torch.zeros(2, 1, dtype=torch.float64)
    key[0] = math.log(1 / 99)
    one = torch.ones(1, 1, dtype=torch.float64)
    value = torch.tensor([[100.0], [0.0]], dtype=torch.float64)
    copies = (x.expand(2000, 1, -1, -1) for x in (one, key, value))
    walker = module.Walker(check(*copies, scale=1.0).rows, nf.ExactIndex(), 1, 1)
    upstream = one.expand(2000, -1, -1)
    medians = module._mean_scores(walker, upstream, 9, 10, seeded(3))
    assert float(medians.mean()) < 0.1  # and E[D^P] is 1
    assert_mean(module._mean_scores(walker, upstream, 1, 90, seeded(3)), 1.0)


def heavy_key(rows: int, replicates: int) -> Inputs:
    """A large variance of sample covariances: a key of weight 0.146, which alone has a value, in all rows."""
    share = (1 - math.sqrt(0.5)) / 2
    key, value = torch.zeros(2, 2, 1, dtype=torch.float64)
    key[0], value[0] = math.log(share / (1 - share)), 1.0
    ones = torch.ones(replicates, rows, 1, dtype=torch.float64)
    return Inputs(ones, key.expand(replicates, -1, -1), value.expand(replicates, -1, -1), ones, causal=False)


TRIALS = 1500


def broken(inputs: Inputs, which: int, walks: int, eps: float) -> tuple[int, Tensor]:
    """In how many of the replicates an entry is further off than promised, and the worst of every replicate."""
    error = inputs.errors(RandomWalk(walks=walks), 4)[which] / inputs.of_covariances(eps)[which]
    return int((error.amax((1, 2)) > 1).sum()), error.amax((1, 2))


@pytest.mark.parametrize(("theorem", "which", "rows", "entries"), [("dq", 0, 1, 1), ("dk", 1, 4, 2)])
def test_shared_walks_keep_their_promise_and_it_says_something(theorem: str, which: int, rows: int, entries: int) -> None:
    eps, delta = 0.1, 0.01
    inputs = heavy_key(rows, TRIALS)
    asked = nf.budget(entries, eps, delta, d=1, theorem=theorem)
    failures, error = broken(inputs, which, asked.walks or asked.draws, eps)
    assert stats.binom.sf(failures - 1, TRIALS, delta) > ALPHA
    # Loose by a factor of 2 to 4, and zero would break it.
    assert 1 / 4 < float(error.quantile(1 - delta)) < 1 / 2
    zero = nf.gradients.exact(inputs.query[:1], inputs.key[:1], inputs.value[:1], inputs.upstream[:1], scale=1.0)[which]
    assert float((zero.abs() / inputs.of_covariances(eps)[which][:1]).amin()) > 1
    # A sixteenth of the walks is too few.
    failures, _ = broken(inputs, which, (asked.walks or asked.draws) // 16, eps)
    assert stats.binom.sf(failures - 1, TRIALS, delta) < ALPHA


@pytest.mark.parametrize("causal", [False, True])
def test_shared_walks_keep_their_promise_in_all_heads(causal: bool) -> None:
    """With delta = 1e-6, so that one broken promise is a false alarm that rare."""
    inputs = Inputs(*normal(5, (12, 9, 3), (12, 9, 3), (12, 9, 2), (12, 9, 2)), causal)
    asked = nf.budget(12 * 9, 0.3, ALPHA, d=3, theorem="dk").walks
    assert asked == nf.budget(12 * 9, 0.3, ALPHA, d=3, theorem="dq").draws
    allowed = inputs.of_covariances(0.3)
    assert max(worst(inputs.errors(RandomWalk(walks=asked), 5), allowed)) <= 1
    # Two walks are too few, for each of the three: in one of a few runs at least.
    tried = [worst(inputs.errors(RandomWalk(walks=2), seed), allowed) for seed in range(5)]
    assert min(map(max, zip(*tried, strict=True))) > 1


units = st.floats(0, 1)


@given(st.lists(st.tuples(units, units), min_size=2, max_size=8), st.tuples(units, units))
def test_one_draw_moves_a_sample_covariance_by_one_over_their_number(
    draws: list[tuple[float, float]], other: tuple[float, float]
) -> None:
    """The lemma behind `budget(theorem="dq")` and `"dk"`, for ranges of 1."""
    one, two = (torch.tensor(x, dtype=torch.float64).T.cov()[0, 1] for x in (draws, [other, *draws[1:]]))
    assert float((one - two).abs()) <= 1 / len(draws) + 1e-12


def test_no_smaller_constant_would_do() -> None:
    """A draw of (1, 1) next to zeros: from 0 to 1/N."""
    draws = torch.zeros(2, 5, dtype=torch.float64)
    before, draws[:, 0] = draws.cov()[0, 1].clone(), 1.0
    assert float(draws.cov()[0, 1] - before) == pytest.approx(1 / 5)
