"""Cells: the formulas of the far field by hand, and what the estimate is worth: unbiased draws, dropout, accuracy."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from by_hand import QKV, attention64, inputs, logits64, seeded, softmax64, spans_seen
from laws import assert_frequencies, assert_mean
from torch import Tensor

import nearfield as nf
from nearfield import synthetic
from nearfield.cells import far_field
from nearfield.cells import method as cells_method
from nearfield.cells.moments import SeenCells
from nearfield.cells.operator import CellsResult, Recipe, cells_attention
from nearfield.cells.partition import to_plain
from nearfield.cells.sizes import CellSizes
from nearfield.cells.spans import closed_keys
from nearfield.cells.torch import head as torch_head
from nearfield.problem import check


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[CellsResult, CellSizes]]:
    """What the operator returned to the calls that a test makes, for the plans in it."""
    seen: list[tuple[CellsResult, CellSizes]] = []
    plain = cells_method.cells_attention

    def spy(*given: Any) -> CellsResult:
        result, recipe = plain(*given), next(x for x in given if isinstance(x, Recipe))
        seen.append((result, recipe.sizes))
        return result

    monkeypatch.setattr(cells_method, "cells_attention", spy)
    return seen


@dataclasses.dataclass(frozen=True)
class Cells:
    """The cells of one head, in float64: written out once more, cell by cell."""

    queries: Tensor
    """times scale"""
    keys: Tensor
    values: Tensor
    visible: Tensor
    closed: Tensor
    home: Tensor
    """`[rows, keys]`: the cell through which a row sees a key; -1: none"""
    opened: Tensor
    members: list[Tensor]
    centroid: Tensor
    variance: Tensor
    mean: Tensor

    @staticmethod
    def of(tensors: QKV, result: CellsResult, sizes: CellSizes, causal: bool, rows: slice = slice(None)) -> Cells:
        query, keys, values = (x[0, 0].double() for x in tensors)
        cell_of = result.cell_of[0].long()
        members = [(cell_of == cell).any(0).nonzero()[:, 0] for cell in range(int(cell_of.max()) + 1)]
        visible = torch.arange(1, len(query) + 1) if causal else torch.full((len(query),), len(keys))
        own = [(keys[m], values[m]) if len(m) else (keys[:1] * 0, values[:1] * 0) for m in members]
        closed = closed_keys(visible, sizes)[rows]
        size = sizes.segment or len(keys)
        home = torch.full((len(closed), len(keys)), -1)
        for row, edge in enumerate(closed.tolist()):
            for level, first in spans_seen(edge // size, sizes.span_levels):
                place = slice(first * size, (first + 2**level) * size)
                home[row, place] = cell_of[level, place]
        return Cells(
            (query / query.shape[1] ** 0.5)[rows], keys, values, visible[rows], closed, home,
            result.opened[0, rows].long(), members, torch.stack([k.mean(0) for k, _ in own]),
            torch.stack([k.var(0, correction=0) for k, _ in own]), torch.stack([v.mean(0) for _, v in own]),
        )  # fmt: skip

    @property
    def size(self) -> Tensor:
        return torch.tensor([len(own) for own in self.members], dtype=torch.float64)

    @property
    def first(self) -> Tensor:
        return self.queries @ self.centroid.T

    @property
    def spread(self) -> Tensor:
        return (self.queries.square() @ self.variance.T).clamp(max=9.0)

    @property
    def seen(self) -> Tensor:
        """`[rows, cells]`: cells through which a row sees some key."""
        found = torch.zeros(len(self.home), len(self.members) + 1, dtype=torch.bool)
        return found.scatter_(1, torch.where(self.home < 0, len(self.members), self.home), True)[:, :-1]

    @property
    def far(self) -> Tensor:
        return self.seen & ~(torch.arange(len(self.members))[:, None] == self.opened[:, None]).any(-1)

    @property
    def near(self) -> Tensor:
        """`[rows, keys]`"""
        hidden = self.far.gather(1, self.home.clamp(min=0)) & (self.home >= 0)
        return (torch.arange(len(self.keys)) < self.visible[:, None]) & ~hidden

    def mass(self, boost: bool = True) -> Tensor:
        """log n_c e^{q.mu_c} (1 + u_c/4)^2, -inf where a cell does not count."""
        logits = self.first + self.size.clamp(min=1).log() + (2 * torch.log1p(self.spread / 4) if boost else 0.0)
        return logits.masked_fill(~self.far, -torch.inf)

    def tilt(self) -> Tensor:
        out = torch.zeros(len(self.queries), self.values.shape[1], dtype=torch.float64)
        for edge in self.closed.unique().tolist():
            rows = self.closed == edge
            pool = [own for own, seen in zip(self.members, self.seen[rows][0].tolist(), strict=True) if seen]
            if pool:
                matrix = sum((self.values[m] - self.values[m].mean(0)).T @ (self.keys[m] - self.keys[m].mean(0)) for m in pool)
                out[rows] = self.queries[rows] @ (matrix / sum(len(own) for own in pool)).T
        return out

    def attend(self, boost: bool = True, tilt: bool = True) -> Tensor:
        logits = (self.queries @ self.keys.T).masked_fill(~self.near, -torch.inf)
        weight = torch.cat([logits, self.mass(boost)], 1).softmax(1)
        of_keys, of_cells = weight.split([len(self.keys), len(self.members)], 1)
        output = of_keys @ self.values + of_cells @ self.mean
        return output + of_cells.sum(1, keepdim=True) * self.tilt() if tilt else output


# Rules


def three_cells() -> SeenCells:
    """Five keys around (1, 0) with variances (4, 0), none, and three around (0, 3) with variances (1, 9)."""

    def row(*numbers: Any) -> Tensor:
        return torch.tensor(numbers, dtype=torch.float64)

    moments = row(5, 0, 3), row(0, -torch.inf, 0), row([1, 0], [0, 0], [0, 3]), row([4, 0], [0, 0], [1, 9]), row([0], [0], [0])
    return SeenCells(*moments, [0], [slice(0, 3)], torch.arange(3), torch.arange(3), 8, row([0, 0]))


def test_scores_by_hand() -> None:
    """q.mu_c + 3 sqrt(u_c), u_c = min(sum_i q_i^2 var_{c,i}, 9); an empty cell is never opened."""
    queries = torch.tensor([[1.0, 0.0], [2.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    first, spread = far_field.moments(queries, three_cells())
    assert first.tolist() == [[1, -math.inf, 0], [2, -math.inf, 3], [1, -math.inf, 3]]
    assert spread.tolist() == [[4, 0, 1], [9, 0, 9], [4, 0, 9]]
    expected = [[7, -math.inf, 3], [11, -math.inf, 12], [7, -math.inf, 12]]
    torch.testing.assert_close(far_field.score(first, spread), torch.tensor(expected, dtype=torch.float64))
    assert far_field.open_best(first, spread, 1).tolist() == [[0], [2], [2]]
    assert far_field.open_best(first, spread, 4).sort(1).values.tolist() == [[-1, 0, 2]] * 3
    assert far_field.largest_first(first[:2], torch.tensor([[2, -1], [0, 2]])).tolist() == [0, 3]
    assert far_field.largest_first(first[:2], torch.tensor([[-1], [-1]])).tolist() == [-math.inf] * 2


@pytest.mark.parametrize(
    ("opened", "masses", "top"),
    [([0], [0, 0, 3 * 3.25**2], 3.0), ([2], [5 * 3.25**2, 0, 0], 2.0), ([0, 2, -1], [0, 0, 0], -math.inf)],
    ids=["the-first", "the-last", "all"],
)
def test_masses_by_hand(opened: list[int], masses: list[float], top: float) -> None:
    """n_c e^{q.mu_c} (1 + u_c/4)^2 of the cells that are not opened, around the largest q.mu_c of them."""
    cells = three_cells()
    first, spread = far_field.moments(torch.tensor([[2.0, 1.0]], dtype=torch.float64), cells)
    found = far_field.masses(first, spread, torch.tensor([opened]), cells.size)
    torch.testing.assert_close(found, tuple(torch.tensor(x, dtype=torch.float64) for x in ([masses], [top])))


def test_boost() -> None:
    spread = torch.cat([torch.zeros(1), torch.logspace(-6, 8, 200)]).double()
    torch.testing.assert_close(far_field.boost(spread), (1 + spread / 4) ** 2)
    torch.testing.assert_close(far_field.boost(spread).log(), far_field.log_boost(spread), atol=1e-14, rtol=1e-12)
    # As e^{u/2} to second order.
    few = spread[spread < 1e-2]
    assert bool(((far_field.log_boost(few) - few / 2).abs() <= few.square() / 16).all())


def test_gradient_of_the_boost() -> None:
    """That of log b, times what comes in; none where u was cut off."""
    spread = torch.cat([torch.zeros(1), torch.logspace(-6, 0.95, 200)]).double().requires_grad_()
    upstream = torch.randn(201, generator=seeded(0), dtype=torch.float64)
    (expected,) = torch.autograd.grad(far_field.log_boost(spread), spread, upstream)
    torch.testing.assert_close(far_field.boost_backward(upstream.clone(), spread.detach()), expected)
    cut = torch.tensor([[1.0, far_field.MOST_SPREAD, 3.0, 2 * far_field.MOST_SPREAD]])
    found = far_field.boost_backward(torch.ones(1, 4), cut)
    torch.testing.assert_close(found, torch.tensor([[1 / 2.5, 0.0, 1 / 3.5, 0.0]]))


def test_spreads_and_squares_are_cut_off() -> None:
    """So that nothing overflows, and no score is NaN."""
    cells = three_cells()
    first, spread = far_field.moments(torch.tensor([[1e5, 0.0], [1e200, 1e200]], dtype=torch.float64), cells)
    assert float(spread.max()) == far_field.MOST_SPREAD
    assert spread[:, 1].tolist() == [0, 0]
    assert not bool(far_field.score(first, spread).isnan().any())
    assert float(far_field.squares(torch.tensor([1e30])).max()) == pytest.approx(far_field.MOST_SQUARE)
    assert math.isfinite(float(far_field.boost(spread.float()).max()))


@pytest.mark.parametrize("partition", [nf.KMeans(), nf.Blocks(), nf.HashBuckets()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("causal", [False, True])
def test_cells_by_hand(causal: bool, partition: Any, calls: list[Any]) -> None:
    """Routing by q.mu_c + 3 sqrt(u_c), mass n_c e^{q.mu_c} (1 + u_c/4)^2, value v_c + X q; u_c is cut off at 9."""
    q, k, v = inputs(1, 1, queries=200, dim=6, dtype=torch.float64)
    tensors = (2 * q, k, v)
    window = {"window": 10} if causal else {}
    method = nf.Cells(cell_size=5, probes=3, segment=32, sinks=4, partition=partition, **window)
    est = nf.estimate(*tensors, is_causal=causal, method=method)
    ((result, sizes),) = calls
    by_hand = Cells.of(tensors, result, sizes, causal)
    score = (by_hand.first + 3 * by_hand.spread.sqrt()).masked_fill(~by_hand.seen, -torch.inf)
    best = score.topk(3, dim=1)
    wanted = best.indices.masked_fill(best.values == -torch.inf, -1).sort(1).values
    assert torch.equal(by_hand.opened.sort(1).values, wanted)
    torch.testing.assert_close(est.output[0, 0], by_hand.attend())
    assert est.info["keys_per_query"] == pytest.approx(float(by_hand.near.double().sum(1).mean()))
    assert est.stderr is None


# Accuracy


def top_k_error(tensors: QKV, k: int, causal: bool, rows: slice) -> tuple[Tensor, Tensor]:
    """Exact outputs of some rows, and the error of softmax over the true top k of each."""
    logits = logits64(tensors[0][:, :, rows], tensors[1])
    if causal:
        seen = torch.arange(tensors[0].shape[2])[rows, None]
        logits = logits.masked_fill(torch.arange(tensors[1].shape[2]) > seen, -torch.inf)
    values = tensors[2].double()
    exact = softmax64(logits) @ values
    kept = logits.masked_fill(logits < logits.topk(k).values[..., -1:], -torch.inf)
    return exact[0, 0], (softmax64(kept) @ values - exact)[0, 0].norm(dim=-1)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("family", "dim", "size", "probes"), [("clustered", 32, 32, 4), ("mixture_of_scales", 8, 8, 64), ("gaussian", 32, 16, 32)]
)
def test_the_far_field_earns_its_keep(family: str, dim: int, size: int, probes: int, causal: bool, calls: list[Any]) -> None:
    """Better than the true top k with as many keys, which no index can beat, and better than centroids alone.

    Queries as sharp as those of `mixture_of_scales` need their largest keys one by one. Where keys have no clusters at all, as
    there, cells find them in few dimensions only: with 32 it is most rows, not the mean square, that are better than top k.
    Where nearly all that counts is opened, as with many probes on `clustered`, what is left of cells matters little either way.
    """
    tensors = synthetic.make(family, 1, 1, 4096, dim, seed=2)
    est = nf.estimate(*tensors, is_causal=causal, method=nf.Cells(cell_size=size, probes=probes, segment=512, sinks=0))
    rows = slice(1024, None, 16)
    ((result, sizes),) = calls
    by_hand = Cells.of(tensors, result, sizes, causal, rows)
    exact, of_top_k = top_k_error(tensors, round(float(by_hand.near.double().sum(1).mean())), causal, rows)

    def error(output: Tensor) -> float:
        return float((output - exact).square().sum(-1).mean().sqrt())

    whole = error(est.output[0, 0, rows].double())
    torch.testing.assert_close(est.output[0, 0, rows].double(), by_hand.attend(), atol=1e-4, rtol=0)
    plain, no_boost, no_tilt = (error(by_hand.attend(*which)) for which in ((False, False), (False, True), (True, False)))
    assert whole < 0.8 * float(of_top_k.square().mean().sqrt())
    assert whole < 0.95 * min(plain, no_boost, no_tilt)


@pytest.mark.long
def test_joined_segments_pay() -> None:
    """Cells that have members from all of the past are tighter than those of each segment by itself, for as many keys read."""
    tensors = synthetic.make("clustered", 1, 1, 4096, 32)
    problem = check(*tensors, None, 0.0, True, None, False)
    sizes = nf.Cells(segment=128, cell_size=16).sizes(problem)
    assert sizes.span_levels == 6
    rows = problem.grouped
    exact = attention64(*tensors, causal=True)[0, 0]
    errors = []
    for levels in (1, 3, sizes.span_levels):
        recipe = Recipe(sizes._replace(span_levels=levels), problem.scale, 0.0, *to_plain(nf.KMeans()), "torch")
        output = cells_attention(rows.queries, rows.keys, rows.values, rows.visible, torch.tensor(0), recipe).output[0]
        errors.append(float((output.double() - exact)[1024:].norm(dim=-1).mean()))
    assert errors[1] < 0.4 * errors[0]
    assert errors[2] < 0.7 * errors[1]


def test_most_rows_are_better_than_top_k_even_without_clusters() -> None:
    tensors = synthetic.make("mixture_of_scales", 1, 1, 4096, 32, seed=2)
    est = nf.estimate(*tensors, method=nf.Cells(cell_size=16, probes=32, sinks=0))
    exact, of_top_k = top_k_error(tensors, round(est.info["keys_per_query"]), False, slice(None, None, 16))
    error = (est.output[0, 0, ::16].double() - exact).norm(dim=-1)
    assert float((error < of_top_k).double().mean()) > 0.5
    assert float(error.median()) < 0.6 * float(of_top_k.median())


# Draws

SAMPLING: dict[str, dict[str, Any]] = {
    "few": {"samples": 3},
    "many": {"samples": 12},
}


def sampled(name: str, **options: Any) -> nf.Cells:
    return nf.Cells(**({"cell_size": 4, "probes": 1, "segment": 8, "sinks": 2} | SAMPLING[name] | options))


def repeated(tensors: QKV, count: int) -> QKV:
    """One query head so many times, all over the same keys: so many independent draws."""
    return tensors[0].expand(1, count, -1, -1), tensors[1], tensors[2]


@pytest.mark.parametrize("dropout_p", [0.0, 0.3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SAMPLING)
def test_both_sums_are_unbiased(name: str, causal: bool, dropout_p: float) -> None:
    problem = inputs(1, 1, queries=30, dim=4, dtype=torch.float64, seed=3)
    est = nf.estimate(
        *repeated(problem, 1000), None, dropout_p, causal, enable_gqa=True, method=sampled(name), generator=seeded(5)
    )
    logits = logits64(problem[0], problem[1], causal=causal)[0, 0]
    assert_mean(est.lse[0].exp(), logits.exp().sum(-1))
    assert_mean(est.output[0] * est.lse[0].exp()[..., None], logits.exp() @ problem[2][0, 0])


def test_keys_are_drawn_by_the_mass_of_their_cells(calls: list[Any]) -> None:
    """Probability g_c / F, factor F / (l g_c): by hand."""
    problem = inputs(1, 1, queries=3, keys=60, dim=4, dtype=torch.float64, seed=3)
    method = nf.Cells(cell_size=5, probes=2, sinks=3, samples=4)
    nf.attention(*repeated(problem, 4000), enable_gqa=True, method=method, generator=seeded(1))
    ((result, sizes),) = calls
    drawn = result.drawn[0].unflatten(0, (4000, 3)).long()
    factor = result.log_factor[0].unflatten(0, (4000, 3))
    by_hand = Cells.of(problem, result, sizes, causal=False, rows=slice(0, 3))
    log_g = (by_hand.mass() - by_hand.size.log()).gather(1, by_hand.home.clamp(min=0)).masked_fill(by_hand.home < 0, -torch.inf)
    for row in range(3):
        assert_frequencies(torch.bincount(drawn[:, row].reshape(-1), minlength=60), log_g[row].exp())
        expected = log_g[row].logsumexp(0) - log_g[row, drawn[:, row]] - torch.tensor(4.0).log()
        torch.testing.assert_close(factor[:, row], expected)


@pytest.mark.parametrize("causal", [False, True])
def test_standard_error_is_calibrated(causal: bool) -> None:
    """Root mean square error over root mean square standard error: about 1, up to the bias of a ratio, O(1/samples)."""
    problem = synthetic.make("gaussian", 1, 1, 200, 8, dtype=torch.float64)
    method = sampled("many", samples=48, segment=25, cell_size=8)
    est = nf.estimate(*repeated(problem, 40), is_causal=causal, enable_gqa=True, method=method, generator=seeded(6))
    assert est.stderr is not None
    error = (est.output - attention64(*problem, causal=causal))[:, :, 60:]
    ratio = error.square().sum(-1).mean().sqrt() / est.stderr[:, :, 60:].square().mean().sqrt()
    assert 0.9 < float(ratio) < 1.15, float(ratio)
    if causal:
        assert bool((est.stderr[:, :, :25] == 0).all()), "rows that see every key"
    assert bool((est.stderr[:, :, 60:] > 0).all())


@pytest.mark.long
def test_draws_belong_to_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads, entries and calls draw apart; blocks of rows change nothing; the same generator state draws the same."""
    problem = inputs(1, 1, queries=100, dim=4, dtype=torch.float64)
    q, k, v = (x.expand(2, heads, -1, -1) for x, heads in zip(problem, (6, 3, 3), strict=True))
    generator = seeded(1)

    def run(generator: torch.Generator, dropout_p: float = 0.0) -> Tensor:
        return nf.attention(q, k, v, None, dropout_p, True, enable_gqa=True, method=sampled("few"), generator=generator)

    first, second = run(generator), run(generator)
    assert not torch.equal(first, second)
    assert torch.equal(run(seeded(1)), first)
    flat = first.flatten(0, 1)
    assert all(not torch.equal(flat[i], flat[j]) for i in range(12) for j in range(i))
    dropped = run(seeded(1), 0.3)
    monkeypatch.setattr(torch_head, "LEAST_BLOCK_BYTES", 1)
    monkeypatch.setattr(torch_head, "MOST_BLOCK_BYTES", 1)
    torch.testing.assert_close(run(seeded(1)), first)
    torch.testing.assert_close(run(seeded(1), 0.3), dropped)


# Dropout


def flat_cells(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Eight places with eight keys each, and values that show the weights: a cell's mean is its keys' common weight."""
    q, places, _ = inputs(1, 1, queries=rows, keys=8, dim=4, dtype=torch.float64)
    return q, places.repeat_interleave(8, 2), torch.eye(64, dtype=torch.float64)[None, None]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_takes_near_keys_and_far_cells(p: float) -> None:
    """After normalisation, times 1 / (1 - p): each near weight by itself, each far cell as a whole (E29)."""
    q, k, v = flat_cells(300)
    method = nf.Cells(cell_size=8, probes=2, sinks=0, partition=nf.Blocks())
    weights = attention64(q, k, v)[0, 0]
    dropped = nf.estimate(q, k, v, dropout_p=p, method=method, generator=seeded(3))
    torch.testing.assert_close(dropped.lse, logits64(q, k).logsumexp(-1))
    kept = dropped.output[0, 0] > 0
    torch.testing.assert_close(dropped.output[0, 0][kept], weights[kept] / (1 - p))
    assert bool((dropped.output[0, 0][~kept] == 0).all())
    near = torch.zeros(300, 8, dtype=torch.bool)
    near.scatter_(1, (q @ k[:, :, ::8].mT)[0, 0].topk(2).indices, True)
    by_cell = kept.unflatten(1, (8, 8))
    far = by_cell[~near]
    assert bool((far == far[:, :1]).all()), "a far cell as a whole"
    for some in (by_cell[near], far[:, 0]):
        assert_frequencies(torch.stack([some.sum(), (~some).sum()]), torch.tensor([1 - p, p]))
    assert bool((by_cell[near].any(1) & ~by_cell[near].all(1)).any()), "near keys one by one"


@pytest.mark.parametrize("probes", [99, 1], ids=["near", "far"])
def test_dropout_does_not_change_the_mean(probes: int) -> None:
    method = nf.Cells(cell_size=4, probes=probes, segment=8, sinks=0)
    problem = inputs(1, 1, queries=20, dim=4, dtype=torch.float64)
    tensors = repeated(problem, 3000)
    for causal in (False, True):
        dropped = nf.attention(*tensors, None, 0.3, causal, enable_gqa=True, method=method, generator=seeded(8))
        assert_mean(dropped[0], nf.attention(*problem, is_causal=causal, method=method)[0, 0])


def test_dropout_leaves_the_denominator() -> None:
    q, k, _ = inputs(2, 2, queries=60, dim=4, dtype=torch.float64)
    ones = torch.ones(2, 2, 60, 1, dtype=torch.float64)
    plain, dropped = (nf.estimate(q, k, ones, None, p, True, method=sampled("few"), generator=seeded(9)) for p in (0.0, 0.5))
    torch.testing.assert_close(dropped.lse, plain.lse)
    torch.testing.assert_close(plain.output, ones)
    assert float(((dropped.output - 1).abs() > 1e-6).double().mean()) > 0.95
    assert_mean(dropped.output.reshape(-1, 1), torch.ones(1))


def test_dropout_belongs_to_rows() -> None:
    problem = inputs(1, 1, queries=40, dim=4)
    q, k, v = (x.expand(2, heads, -1, -1) for x, heads in zip(problem, (4, 2, 2), strict=True))
    generator = seeded(0)
    first, second = (
        nf.attention(q, k, v, None, 0.5, True, enable_gqa=True, method=sampled("few", samples=0), generator=generator)
        for _ in range(2)
    )
    flat = torch.cat([first.flatten(0, 1), second.flatten(0, 1)])
    assert all(not torch.equal(flat[i], flat[j]) for i in range(16) for j in range(i))


def test_what_is_deterministic_draws_nothing() -> None:
    tensors = inputs(1, 2, queries=40, dim=4)
    generator = seeded(0)
    before = generator.get_state(), torch.get_rng_state()
    nf.attention(*tensors, is_causal=True, method=sampled("few", samples=0), generator=generator)
    assert torch.equal(generator.get_state(), before[0])
    expected = seeded(0)
    torch.randint(torch.iinfo(torch.int64).max, (), generator=expected)
    nf.attention(*tensors, None, 0.2, True, method=sampled("many"), generator=generator)
    assert torch.equal(generator.get_state(), expected.get_state()), "one number, whatever is random"
    assert torch.equal(torch.get_rng_state(), before[1])


# Arguments


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "3"])
@pytest.mark.parametrize("argument", ["cell_size", "probes", "samples", "window", "sinks", "segment"])
def test_wrong_sizes(argument: str, wrong: Any) -> None:
    with pytest.raises(ValueError, match=rf"{argument} must be .*{wrong!r}"):
        nf.Cells(**{argument: wrong})


@pytest.mark.parametrize("argument", ["cell_size", "probes", "segment"])
def test_sizes_that_must_not_be_zero(argument: str) -> None:
    with pytest.raises(ValueError, match=f"{argument} must be a positive integer"):
        nf.Cells(**{argument: 0})


@pytest.mark.parametrize("argument", ["branching", "unfold"])
@pytest.mark.parametrize("value", [0, 4])
def test_there_is_one_level_of_cells(argument: str, value: int) -> None:
    with pytest.raises(TypeError, match=f"no {argument} since version 0.2: there is one level .* leave out {argument}={value}"):
        nf.Cells(**{argument: value})
    assert argument not in repr(nf.Cells())


@pytest.mark.parametrize("wrong", [nf.KMeans, "KMeans", None, 3, object()])
def test_wrong_partitions(wrong: Any) -> None:
    with pytest.raises(TypeError, match="partition must be"):
        nf.Cells(partition=wrong)


def test_one_sample_has_no_spread() -> None:
    with pytest.raises(ValueError, match="samples must be 0 or at least 2"):
        nf.Cells(samples=1)


def test_a_window_needs_a_causal_mask() -> None:
    with pytest.raises(ValueError, match="window=4 needs is_causal=True"):
        nf.attention(*inputs(1, 1, queries=8), method=nf.Cells(window=4))


@pytest.mark.parametrize(("window", "segments"), [(None, 0), (0, 0), (1, 1), (16, 1), (17, 2), (33, 3)])
def test_windows_are_whole_segments(window: int | None, segments: int) -> None:
    problem = check(*inputs(1, 1, queries=100), None, 0.0, True, None, False)
    sizes = nf.Cells(window=window, segment=16).sizes(problem)
    assert sizes.window == segments
    visible = torch.arange(1, 101)
    near = visible - closed_keys(visible, sizes)
    assert bool((near >= visible.clamp(max=(window or 0) + 1)).all()), "its own key and as many before it as asked for"


def test_sizes_are_held_to_what_there_is() -> None:
    """Tables have as many columns as there are cells, however many a caller would open."""
    problem = check(*inputs(1, 1, queries=100), None, 0.0, False, None, False)
    assert nf.Cells(cell_size=10, probes=10**12).sizes(problem).probes == 10
    causal = check(*inputs(1, 1, queries=100), None, 0.0, True, None, False)
    assert nf.Cells(cell_size=10, probes=10**12, segment=30).sizes(causal).probes == 9


def test_info() -> None:
    est = nf.estimate(*inputs(1, 2, queries=64), is_causal=True, method=nf.Cells(cell_size=4, probes=2, segment=16, sinks=0))
    # Its own segment up to itself; from the second one on, two cells of whatever size.
    assert 8.5 < est.info["keys_per_query"] < 8.5 + 12
    assert (est.info["segment"], est.info["cell_size"], est.info["probes"]) == (16, 4, 2)
    drawn = nf.estimate(*inputs(1, 2, queries=64), method=nf.Cells(cell_size=4, probes=2, sinks=0, samples=5))
    plain = nf.estimate(*inputs(1, 2, queries=64), method=nf.Cells(cell_size=4, probes=2, sinks=0))
    assert drawn.info["keys_per_query"] == pytest.approx(plain.info["keys_per_query"] + 5)
