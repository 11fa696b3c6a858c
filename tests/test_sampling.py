"""Samplers against the laws they promise."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import ALPHA, assert_follows, assert_frequencies, assert_mean, assert_uniform, seeded
from scipy import stats
from torch import Tensor

from nearfield import sampling
from nearfield.sampling import (
    Seeds,
    categorical,
    conditional_gumbel,
    exponential,
    gumbel,
    hashed_uniform,
    median_of_means,
    segmented_categorical,
    skip,
    uniform,
    without_replacement,
)


@pytest.mark.parametrize("seed", range(4))
def test_uniform_and_exponential(seed: int) -> None:
    u = uniform((50_000,), seeded(seed))
    assert u.dtype == torch.float64
    assert float(u.min()) > 0
    assert float(u.max()) <= 1
    assert_uniform(u)
    assert_follows(exponential((50_000,), seeded(seed)), stats.expon.cdf)


@pytest.mark.parametrize("seed", range(6))
def test_gumbel_law(seed: int) -> None:
    g = gumbel((50_000,), seeded(seed))
    assert g.dtype == torch.float64
    assert_follows(g, stats.gumbel_r.cdf)


def test_gumbel_moments() -> None:
    g = gumbel((400_000,), seeded(10))
    assert_mean(g, np.euler_gamma)
    assert_mean((g - np.euler_gamma).square(), math.pi**2 / 6)


@pytest.mark.parametrize("n", [2, 7, 50, 400])
def test_maximum_of_gumbels(n: int) -> None:
    largest = gumbel((10_000, n), seeded(n)).amax(1)
    assert_follows(largest - math.log(n), stats.gumbel_r.cdf)


def fixed_uniform(value: float) -> Callable[[tuple[int, ...], torch.Generator], Tensor]:
    return lambda shape, generator: torch.full(shape, value, dtype=torch.float64)


@pytest.mark.parametrize("value", [1.0, 1.0 - 2.0**-53, 2.0**-53])
def test_gumbels_are_finite_at_the_ends_of_the_uniform(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(sampling, "uniform", fixed_uniform(value))
    assert bool(gumbel((3,), seeded(0)).isfinite().all())
    cutoff = torch.tensor(
        [-700.0, -30.0, -3.0, 0.0, 3.0, 36.0, 300.0, 667.0, 668.0, 690.0, 745.0, 800.0, 1e4], dtype=torch.float64
    )
    drawn = conditional_gumbel(cutoff, seeded(0))
    assert bool(drawn.isfinite().all())
    assert bool((drawn >= cutoff).all())


CUTOFFS = [
    -30.0,
    -10.0,
    -3.0,
    -1.0,
    0.0,
    1.0,
    3.0,
    8.0,
    14.0,
    16.0,
    20.0,
    30.0,
    36.0,
    37.0,
    40.0,
    100.0,
    300.0,
    660.0,
    670.0,
    700.0,
    740.0,
    750.0,
    800.0,
]


@pytest.mark.parametrize("cutoff", CUTOFFS)
def test_conditional_gumbel_law(cutoff: float) -> None:
    drawn = conditional_gumbel(torch.full((30_000,), cutoff, dtype=torch.float64), seeded(int(cutoff) + 1000))
    assert drawn.dtype == torch.float64
    assert bool(drawn.isfinite().all())
    assert float(drawn.min()) >= cutoff
    # P(G > x | G > c) = (1 - exp(-e^-x)) / (1 - exp(-e^-c)), which beyond 36 is exp(c - x) in float64.
    if cutoff < 36:
        above = torch.expm1(-(-drawn).exp()) / math.expm1(-math.exp(-cutoff))
    else:
        above = (cutoff - drawn).exp()
    assert_uniform(above)


def test_conditional_gumbel_takes_mixed_cutoffs_and_float32() -> None:
    cutoff = torch.tensor([-5.0, 0.0, 17.0, 90.0]).repeat(20_000)
    drawn = conditional_gumbel(cutoff, seeded(3)).view(-1, 4)
    assert drawn.dtype == torch.float64
    for column, c in zip(drawn.unbind(1), [-5.0, 0.0, 17.0, 90.0], strict=True):
        assert float(column.min()) >= c
    assert_uniform((90.0 - drawn[:, 3]).exp())
    assert_uniform((17.0 - drawn[:, 2]).exp())


WEIGHTS = {
    "equal": [1.0] * 10,
    "geometric": [2.0**-i for i in range(14)],
    "growing": [float(i) for i in range(1, 25)],
    "zeros first": [0.0, 0.0, 3.0, 1.0],
    "zeros last": [3.0, 1.0, 0.0, 0.0],
    "zeros between": [1.0, 0.0, 2.0, 0.0, 0.0, 0.5, 0.0, 1.0],
    "one": [0.3],
    "one among zeros": [0.0, 0.0, 5.0, 0.0],
    "huge": [1e300, 3e300, 2e300],
    "tiny": [1e-300, 3e-300, 2e-300],
    "steps below rounding": [1.0, 1e-30, 1e-30, 1.0, 1e-30, 2.0],
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_categorical_frequencies(name: str) -> None:
    weights = torch.tensor(WEIGHTS[name], dtype=torch.float64)
    drawn = categorical(weights[None], 100_000, seeded(len(name)))
    assert drawn.shape == (1, 100_000)
    assert_frequencies(drawn[0].bincount(minlength=len(weights)), weights / weights.sum())


@pytest.mark.parametrize("name", WEIGHTS)
def test_segmented_categorical_frequencies(name: str) -> None:
    weights = torch.tensor(WEIGHTS[name], dtype=torch.float64)
    other = torch.arange(1.0, len(weights) + 1, dtype=torch.float64)
    table = torch.stack([other, weights, other.flip(0), torch.zeros_like(weights), weights.flip(0)])
    segment = torch.tensor([1, 4, 0, 2, 1]).repeat(40_000)[torch.randperm(200_000, generator=seeded(1))]
    drawn = segmented_categorical(table, segment, seeded(len(name)))
    for row in (0, 1, 2, 4):
        expected = table[row] / table[row].sum()
        assert_frequencies(drawn[segment == row].bincount(minlength=len(weights)), expected)


def test_categorical_rows_are_independent_of_each_other() -> None:
    weights = torch.tensor([[1.0, 3.0, 0.0], [0.0, 2.0, 2.0], [5.0, 0.0, 1.0]])
    drawn = categorical(weights, 60_000, seeded(2))
    for row in range(3):
        assert_frequencies(drawn[row].bincount(minlength=3), weights[row] / weights[row].sum())
    joint = (drawn[0] * 3 + drawn[1]).bincount(minlength=9)
    expected = (weights[0] / 4)[:, None] * (weights[1] / 4)[None, :]
    assert_frequencies(joint, expected.reshape(-1))


def many_small_behind_a_large_one() -> Tensor:
    """10^6 entries of weight 1 behind one of 2^25: a float32 running sum moves in steps of 4 and passes three of four over."""
    return torch.cat([torch.tensor([2.0**25]), torch.ones(1_000_000)])


def assert_small_entries_are_drawn_alike(drawn: Tensor) -> None:
    assert_frequencies(torch.stack([(drawn == 0).sum(), (drawn > 0).sum()]), torch.tensor([2.0**25, 1e6], dtype=torch.float64))
    small = drawn[drawn > 0]
    assert_frequencies((small % 8).bincount(minlength=8), torch.full((8,), 1 / 8))
    assert_uniform(small / 1_000_001)


def test_a_million_entries() -> None:
    assert_small_entries_are_drawn_alike(categorical(many_small_behind_a_large_one()[None], 600_000, seeded(5))[0])


def test_a_million_entries_segmented() -> None:
    table = many_small_behind_a_large_one().expand(2, -1)
    segment = torch.tensor([0, 1]).repeat(300_000)
    assert_small_entries_are_drawn_alike(segmented_categorical(table, segment, seeded(6)))


def test_the_million_entry_test_would_catch_float32_sums() -> None:
    total = many_small_behind_a_large_one().cumsum(0).float()
    drawn = torch.searchsorted(total.double(), uniform((600_000,), seeded(5)) * float(total[-1]))
    with pytest.raises(AssertionError):
        assert_small_entries_are_drawn_alike(drawn)


def test_segmented_categorical_with_many_rows() -> None:
    weights = torch.tensor([[0.0, 1.0, 0.0, 3.0]]).expand(100_000, -1)
    drawn = segmented_categorical(weights, torch.arange(100_000).flip(0), seeded(7))
    assert_frequencies(drawn.bincount(minlength=4), torch.tensor([0.0, 0.25, 0.0, 0.75]))


@pytest.mark.parametrize("value", [1.0, 2.0**-53])
def test_zero_weights_are_never_drawn_at_the_ends_of_the_uniform(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(sampling, "uniform", fixed_uniform(value))
    weights = torch.tensor([0.0, 0.1, 0.7, 0.1, 0.0])
    assert set(categorical(weights.expand(3, -1), 2, seeded(0)).reshape(-1).tolist()) <= {1, 2, 3}
    segment = torch.arange(1000)
    assert set(segmented_categorical(weights.expand(1000, -1), segment, seeded(0)).tolist()) <= {1, 2, 3}


def test_segmented_categorical_of_nothing() -> None:
    assert segmented_categorical(torch.ones(2, 3), torch.empty(0, dtype=torch.long), seeded(0)).shape == (0,)


CROWDED = [(1, 1), (2, 1), (3, 2), (4, 2), (4, 4), (5, 3), (6, 2), (6, 3), (8, 2), (7, 5)]
OPEN = [(5, 1), (9, 1), (9, 2), (12, 2), (13, 3), (20, 2)]


@pytest.fixture(params=["comparison", "sorting"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways to draw without replacement, whatever the size."""
    monkeypatch.setattr(sampling, "FEW", 1 << 30 if request.param == "comparison" else 0)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("population", "size"), CROWDED + OPEN)
def test_all_subsets_are_equally_likely(population: int, size: int) -> None:
    rows = 60_000
    drawn = without_replacement(torch.full((rows,), population), size, seeded(population * 31 + size)).sort(1).values
    assert drawn.shape == (rows, size)
    subsets = {subset: i for i, subset in enumerate(itertools.combinations(range(population), size))}
    # KeyError if a row is not a set of distinct numbers below the population.
    counts = torch.bincount(torch.tensor([subsets[tuple(row)] for row in drawn.tolist()]), minlength=len(subsets))
    assert_frequencies(counts, torch.full((len(subsets),), 1 / len(subsets)))


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(("population", "size"), [(0, 3), (1, 4), (3, 3), (3, 7), (16, 4), (17, 4), (100, 64), (1000, 16)])
def test_sets_are_distinct_and_padded(population: int, size: int) -> None:
    drawn = without_replacement(torch.full((500,), population), size, seeded(8))
    assert drawn.dtype == torch.long
    for row in drawn.tolist():
        real = [x for x in row if x != -1]
        assert len(real) == len(set(real)) == min(size, population)
        assert all(0 <= x < population for x in real)


@pytest.mark.usefixtures("way")
def test_mixed_populations_have_the_right_marginals() -> None:
    population = torch.tensor([0, 1, 3, 6, 24, 25, 60, 1000])
    size, repeats = 6, 20_000
    drawn = without_replacement(population.repeat(repeats), size, seeded(9)).view(repeats, len(population), size)
    for i, n in enumerate(population.tolist()):
        real = drawn[:, i][drawn[:, i] >= 0]
        assert len(real) == repeats * min(n, size)
        if n == 0:
            continue
        counts = real.bincount(minlength=n).double()
        assert len(counts) == n
        # Inclusion with probability p = min(size, n) / n; the categories are not multinomial, so test each with the union bound.
        p = min(size, n) / n
        limit = float(stats.norm.isf(ALPHA / 2 / n))
        assert float((counts - repeats * p).abs().max()) <= limit * math.sqrt(repeats * p * (1 - p)) + 1e-9


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("population", [10**4, 10**7, 2**40])
def test_large_populations(population: int) -> None:
    drawn = without_replacement(torch.full((400,), population), 50, seeded(11))
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < population
    assert all(len(set(row)) == 50 for row in drawn.tolist())
    assert_uniform((drawn.double() + 0.5) / population)


@pytest.mark.parametrize(("size", "way"), [(sampling.FEW, "_by_comparison"), (sampling.FEW + 1, "_by_sorting")])
def test_few_are_compared_and_many_sorted(size: int, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, way, lambda population, size, generator: (way, size))
    assert without_replacement(torch.tensor([100]), size, seeded(0)) == (way, size)


@pytest.mark.parametrize("value", [1.0, 2.0**-53])
def test_sets_are_distinct_at_the_ends_of_the_uniform(monkeypatch: pytest.MonkeyPatch, value: float) -> None:
    monkeypatch.setattr(sampling, "uniform", fixed_uniform(value))
    drawn = without_replacement(torch.tensor([0, 2, 4, 5, 2**53 - 1]), 4, seeded(0))
    for row, population in zip(drawn.tolist(), (0, 2, 4, 5, 2**53 - 1), strict=True):
        real = [x for x in row if x != -1]
        assert len(real) == len(set(real)) == min(4, population)
        assert all(0 <= x < population for x in real)


@pytest.mark.usefixtures("way")
def test_nothing_to_draw() -> None:
    assert without_replacement(torch.empty(0, dtype=torch.long), 3, seeded(0)).shape == (0, 3)
    assert without_replacement(torch.tensor([5, 6]), 0, seeded(0)).shape == (2, 0)


def test_drawing_with_replacement_would_be_noticed() -> None:
    drawn = (uniform((60_000, 2), seeded(1)) * 4).ceil().long() - 1
    assert bool((drawn[:, 0] == drawn[:, 1]).any())


@given(st.integers(1, 30).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_skip_lists_what_is_not_taken(case: tuple[int, set[int]]) -> None:
    n, taken = case
    free = [x for x in range(n) if x not in taken]
    ranks = torch.tensor([[-1, *range(len(free))]])
    assert skip(ranks, torch.tensor([sorted(taken)]))[0].tolist() == [-1, *free]


@given(st.lists(st.sets(st.integers(0, 19), min_size=4, max_size=4), min_size=1, max_size=5))
def test_skip_takes_each_row_by_itself(rows: list[set[int]]) -> None:
    ranks = torch.arange(16).expand(len(rows), -1).contiguous()
    found = skip(ranks, torch.tensor([sorted(row) for row in rows]))
    for row, taken in zip(found.tolist(), rows, strict=True):
        assert row == [x for x in range(20) if x not in taken]


def test_skip_is_not_moved_by_padding_beyond_the_keys() -> None:
    taken = torch.tensor([[2, 5, 200, 200]])
    assert skip(torch.tensor([[0, 1, 2, 3, 4]]), taken)[0].tolist() == [0, 1, 3, 4, 6]


@pytest.mark.parametrize("seed", [0, 1, -5, 2**62 + 11])
def test_hashed_uniform_law(seed: int) -> None:
    u = hashed_uniform(seed, torch.arange(300)[:, None], torch.arange(300))
    assert u.shape == (300, 300)
    assert float(u.min()) >= 0
    assert float(u.max()) < 1
    assert_uniform(u)
    assert_uniform(u[0])
    assert_uniform(u[:, 0])


@pytest.mark.parametrize("shift", [(0, 1), (1, 0), (1, 1), (1, -1), (0, 2), (64, 0), (0, 64)])
def test_hashed_uniform_is_not_correlated_across_counters(shift: tuple[int, int]) -> None:
    first, second = torch.arange(100, 400)[:, None], torch.arange(100, 400)
    here = hashed_uniform(7, first, second).reshape(-1)
    there = hashed_uniform(7, first + shift[0], second + shift[1]).reshape(-1)
    grid = ((here * 16).long() * 16 + (there * 16).long()).bincount(minlength=256)
    assert_frequencies(grid, torch.full((256,), 1 / 256))
    assert_mean((here - 0.5) * (there - 0.5) * 12, 0.0)


def test_hashed_uniform_depends_on_the_counters_alone() -> None:
    rows, columns = torch.arange(50)[:, None], torch.arange(40)
    whole = hashed_uniform(3, rows, columns)
    shuffled, order = torch.randperm(50, generator=seeded(0)), torch.randperm(40, generator=seeded(1))
    assert torch.equal(hashed_uniform(3, rows[shuffled], columns[order]), whole[shuffled][:, order])
    assert torch.equal(hashed_uniform(3, rows[7:9], columns[:5]), whole[7:9, :5])
    assert torch.equal(hashed_uniform(3, rows.int(), columns.int()), whole)
    # The two counters do not play the same part.
    assert not torch.equal(
        hashed_uniform(3, columns[:40, None], columns[:40]).T, hashed_uniform(3, columns[:40, None], columns[:40])
    )


def test_hashed_uniform_seeds_differ() -> None:
    counter = torch.arange(90_000)
    tables = [hashed_uniform(seed, counter) for seed in (0, 1, 2, 2**40)]
    for one, two in itertools.combinations(tables, 2):
        assert not bool((one == two).any())
        assert_mean((one - 0.5) * (two - 0.5) * 12, 0.0)


def test_median_of_means_by_hand() -> None:
    draws = torch.tensor([[1.0, 3.0], [10.0, 20.0], [-4.0, 6.0]])[..., None]
    assert median_of_means(draws).tolist() == [2.0]
    assert torch.equal(median_of_means(draws.expand(4, 3, 2, 5)), torch.full((4, 5), 2.0))


def test_median_of_means_columns_are_apart() -> None:
    draws = torch.randn(2, 5, 4, 3, generator=seeded(0))
    expected = np.median(draws.mean(2).numpy(), axis=1)
    assert np.allclose(median_of_means(draws).numpy(), expected)


def test_median_of_means_forgives_an_outlier() -> None:
    draws = torch.zeros(7, 10, 1)
    draws[3, 2] = 1e9
    assert float(median_of_means(draws)) == 0.0


def test_seeds_take_one_number_and_only_if_asked() -> None:
    generator, twin = seeded(4), seeded(4)
    seeds = Seeds(generator, torch.device("cpu"))
    assert torch.equal(generator.get_state(), twin.get_state())
    seeds.generator(0)
    seeds.generator(1, 2)
    assert seeds.base == seeds.base
    torch.randint(torch.iinfo(torch.int64).max, (), generator=twin)
    assert torch.equal(generator.get_state(), twin.get_state())


def test_seeds_use_the_default_generator_like_torch_does() -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        first = Seeds(None, torch.device("cpu")).base
        assert Seeds(None, torch.device("cpu")).base != first
        torch.manual_seed(5)
        assert Seeds(None, torch.device("cpu")).base == first


def test_seeds_generators_differ_by_their_counters() -> None:
    seeds = Seeds(seeded(6), torch.device("cpu"))
    names = [(0,), (1,), (2,), (-1,), (-2, 0), (-2, 1), (0, -2), (-3,), (1, 0), (0, 1)]
    streams = {name: torch.rand(2000, generator=seeds.generator(*name), dtype=torch.float64) for name in names}
    for one, two in itertools.combinations(names, 2):
        assert not bool((streams[one] == streams[two]).any()), (one, two)
        assert_mean((streams[one] - 0.5) * (streams[two] - 0.5) * 12, 0.0)
    again = torch.rand(2000, generator=seeds.generator(1, 0), dtype=torch.float64)
    assert torch.equal(again, streams[(1, 0)])


def test_samplers_leave_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    gumbel((3,), seeded(0))
    conditional_gumbel(torch.zeros(3), seeded(0))
    categorical(torch.ones(1, 3), 3, seeded(0))
    segmented_categorical(torch.ones(1, 3), torch.zeros(3, dtype=torch.long), seeded(0))
    without_replacement(torch.tensor([3, 100]), 4, seeded(0))
    hashed_uniform(0, torch.arange(3))
    Seeds(seeded(0), torch.device("cpu")).generator(1)
    assert torch.equal(torch.get_rng_state(), before)
