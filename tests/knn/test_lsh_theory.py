"""Concentric LSH by theory: sizes by hand, collisions by their law, and near keys found as promised."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from by_hand import seeded
from hypothesis import given
from hypothesis import strategies as st
from laws import ALPHA, assert_frequencies, assert_mean, total_variation
from scipy import integrate, stats
from torch import Tensor

import nearfield as nf
from nearfield.knn.index.lsh import MOST_TABLES, BuiltConcentricLSH
from nearfield.knn.index.lsh_theory import WIDTHS, collision_probability

DIM = 16


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 2.5, 5.5, 20.0])
def test_collisions_are_the_integral_of_their_definition(ratio: float) -> None:
    """Projections differ by a normal variable x / ratio, in widths; a shift puts no boundary between with probability 1 - |x|."""
    value, _ = integrate.quad(lambda x: 2 * ratio * stats.norm.pdf(ratio * x) * (1 - x), 0, 1)
    assert collision_probability(ratio) == pytest.approx(value, rel=1e-9)


def test_sizes_by_hand() -> None:
    # p2^m <= 1/1000: m = 10 for p2 = 1/2. p1^m = 0.8^10 = 0.10737; ln(1e6) / -ln(0.89263) = 121.6.
    sizes = nf.lsh_budget(1000, p1=0.8, p2=0.5)
    assert (sizes.hashes, sizes.tables, sizes.rungs, sizes.width) == (10, 122, 1, None)
    assert sizes.projections == 1220
    assert sizes.bytes_per_key == 8 * 122
    assert sizes.rho == pytest.approx(math.log(0.8) / math.log(0.5))
    assert sizes.far_candidates == pytest.approx(122 * 1000 / 1024)
    assert "a given near key is among the candidates with probability 0.999999" in sizes.promise
    # ln(10 / 0.01) / 0.11359 = 60.8
    assert nf.lsh_budget(1000, p1=0.8, p2=0.5, delta=0.01, every=10).tables == 61
    # r1 = 0.447, r2 = 1: 2 / r1 = 4.47, c = 2.236, two rungs; ln(2 / delta).
    two = nf.lsh_budget(1000, 0.9, 0.5, width=2.0, delta=0.1)
    p1, p2 = collision_probability(2.0), collision_probability(2.0 * math.sqrt(0.2))
    assert (two.rungs, two.p1, two.p2) == (2, pytest.approx(p1), pytest.approx(p2))
    assert two.hashes == math.ceil(math.log(1000) / -math.log(p2))
    assert two.tables == math.ceil(math.log(20) / -math.log(1 - p1**two.hashes))


@given(st.integers(2, 10**6), st.floats(0.3, 0.95), st.floats(0.1, 0.9), st.floats(1e-9, 0.5), st.integers(1, 100))
def test_sizes_keep_the_promise_and_not_with_a_table_or_a_hash_less(
    n: int, s1: float, gap: float, delta: float, every: int
) -> None:
    sizes = nf.lsh_budget(n, s1, s1 - gap, delta=delta, every=every)
    missed = every * sizes.rungs * (1 - sizes.p1**sizes.hashes) ** sizes.tables
    assert missed <= delta * (1 + 1e-9)
    assert sizes.tables == 1 or every * sizes.rungs * (1 - sizes.p1**sizes.hashes) ** (sizes.tables - 1) > delta * (1 - 1e-9)
    assert n * sizes.p2**sizes.hashes <= 1 + 1e-9
    assert sizes.hashes == 1 or n * sizes.p2 ** (sizes.hashes - 1) > 1 - 1e-9
    assert 0 < sizes.rho < 1
    near, far = (math.sqrt(2 - 2 * s) for s in (s1, s1 - gap))
    last = near * (far / near) ** (sizes.rungs - 1)
    assert last <= 2 * (1 + 1e-9)
    assert last * far / near >= 2 * (1 - 1e-9)


def test_the_width_takes_the_fewest_projections() -> None:
    best = nf.lsh_budget(4096, 0.9, 0.5)
    others = [nf.lsh_budget(4096, 0.9, 0.5, width=width).projections for width in WIDTHS]
    assert best.projections == min(others)
    assert best.projections < max(others) / 4


def test_tables_grow_as_n_to_the_rho() -> None:
    small, large = (nf.lsh_budget(n, p1=0.9, p2=0.6, delta=0.1) for n in (10**6, 10**9))
    assert math.log(large.tables / small.tables) / math.log(1000) == pytest.approx(small.rho, abs=0.02)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"n": 0, "s1": 0.9, "s2": 0.5}, "n must be a positive integer, got 0"),
        ({"n": 9, "s1": 0.5, "s2": 0.9}, r"s2 must be smaller than s1, got s1=0\.5, s2=0\.9"),
        ({"n": 9, "s1": 1.0, "s2": 0.9}, r"s1 must be a cosine between -1 and 1, got 1\.0"),
        ({"n": 9, "s1": 0.9}, "s2 must be a cosine between -1 and 1, got None"),
        ({"n": 9, "p1": 0.9}, "p2 must be a number between 0 and 1, got None"),
        ({"n": 9, "p1": 0.5, "p2": 0.5}, r"p2 must be smaller than p1, got p1=0\.5, p2=0\.5"),
        ({"n": 9, "s1": 0.9, "s2": 0.5, "p1": 0.9, "p2": 0.5}, "not both"),
        ({"n": 9, "p1": 0.9, "p2": 0.5, "width": 1.0}, "width belongs to s1 and s2"),
        ({"n": 9, "s1": 0.9, "s2": 0.5, "width": 0}, "width must be a positive number or None, got 0"),
        ({"n": 9, "s1": 0.9, "s2": 0.5, "delta": 1.0}, r"delta must be .* got 1\.0"),
        ({"n": 9, "s1": 0.9, "s2": 0.5, "every": 0}, "every must be a positive integer, got 0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nf.lsh_budget(**arguments)


def test_more_tables_than_there_can_be() -> None:
    asked = nf.lsh_budget(10**6, 0.5, 0.1).tables
    assert asked > MOST_TABLES
    with pytest.raises(ValueError, match=f"ask for {asked:,} tables.*raise delta"):
        nf.ConcentricLSH.from_theory(10**6, 0.5, 0.1)
    with pytest.raises(ValueError, match="ask for 6,933 radii, and there can be 1,024; raise delta"):
        nf.ConcentricLSH.from_theory(4, 0.5, 0.4999, delta=0.9)
    with pytest.raises(ValueError, match="ask for 36,148,640 hashes in all, and there can be 33,554,432; raise delta"):
        nf.ConcentricLSH.from_theory(1000, 0.3, 0.299, delta=0.1)


@pytest.mark.parametrize(
    ("radii", "message"),
    [
        ({"nearest": 0.1}, "give both radii or neither"),
        ({"nearest": 2.0, "farthest": 1.0}, "0 < nearest <= farthest must hold"),
    ],
)
def test_bad_radii(radii: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nf.ConcentricLSH(**radii)


def keys_and_queries(n: int, cosine: float, seed: int = 0, lengths: bool = False) -> tuple[Tensor, Tensor]:
    """n keys of mean zero and n queries; in the lifted problem query i and key i have this cosine exactly.

    With `lengths`, norms differ (the largest is 1, the smallest 0.96); then q.k / (||q|| R) is the cosine with the key as it
    is, times its norm.
    """
    generator = seeded(seed)
    half = torch.nn.functional.normalize(torch.randn(n // 2, DIM, generator=generator, dtype=torch.float64), dim=-1)
    if lengths:
        half = half * torch.linspace(0.96, 1, n // 2, dtype=torch.float64)[:, None]
    keys = torch.cat([half, -half])
    along = cosine / keys.norm(dim=-1, keepdim=True)
    across = torch.randn(n, DIM, generator=generator, dtype=torch.float64)
    unit = torch.nn.functional.normalize(keys, dim=-1)
    across = torch.nn.functional.normalize(across - (across * unit).sum(-1, keepdim=True) * unit, dim=-1)
    return keys[None], 7 * (along * unit + (1 - along.square()).sqrt() * across)[None]


def in_bucket(built: BuiltConcentricLSH, query: Tensor, key: int, rung: int) -> Tensor:
    """`[tables]`: whether the bucket of one query `[dim]` holds this key."""
    unit = torch.nn.functional.normalize(query, dim=-1)
    projected = torch.einsum("d,dth->th", unit, built.directions[:-1])[None]
    starts, counts = built._buckets(projected, torch.zeros(1, dtype=torch.long), rung)
    order = built.order[rung, 0].reshape(-1)
    pairs = zip(starts[0].tolist(), counts[0].tolist(), strict=True)
    return torch.tensor([bool((order[start : start + count] == key).any()) for start, count in pairs])


@pytest.mark.parametrize(("rung", "cosine", "lengths"), [(0, 0.9, False), (0, 0.5, False), (0, 0.9, True), (1, 0.5, True)])
def test_buckets_hold_a_key_with_the_probability_of_the_theory(rung: int, cosine: float, lengths: bool) -> None:
    """1,500 tables are as many independent trials. Both ways: more collisions than that would be as wrong as fewer."""
    keys, queries = keys_and_queries(40, cosine, lengths=lengths)
    recipe = replace(nf.ConcentricLSH.from_theory(1000, 0.9, 0.5, delta=0.1), tables=1500, hashes=2)
    built = recipe.build(keys)
    distance, radius = math.sqrt(2 - 2 * cosine), [math.sqrt(0.2), 1.0][rung]
    expected = collision_probability(recipe.width * radius / distance) ** 2
    assert 0.05 < expected < 0.95
    assert_mean(in_bucket(built, queries[0, 7], 7, rung).double(), expected)


def test_near_keys_are_found_as_promised() -> None:
    """delta = 5e-10 for each of 1,000 pairs: by the union bound, a miss is a false alarm of 5e-7. A full scan does not count."""
    n, pairs = 200, 0
    index = nf.ConcentricLSH.from_theory(n, 0.9, 0.3, delta=5e-10)
    fewer = replace(index, tables=index.tables // 10)
    lost = 0
    for seed in range(5):
        keys, queries = keys_and_queries(n, 0.9, seed, lengths=True)
        for recipe in (index, fewer):
            # One candidate ends the climb, so that the scan of all keys is never the answer.
            found = replace(recipe, enough=0.01, seed=seed).build(keys).find(queries, 1)
            assert found.scored is not None
            missed = (found.ids[0, :, 0] != torch.arange(n)) | (found.scored[0] >= n)
            if recipe is fewer:
                lost += int(missed.sum())
            else:
                assert int(missed.sum()) == 0
                pairs += n
    assert pairs * 5e-10 <= ALPHA
    assert lost > 0, "a tenth of the tables is not enough"


def test_many_tables_list_a_key_once() -> None:
    """The number of a table takes more than 8 bits here."""
    keys = torch.randn(1, 1000, 8, generator=seeded(0))
    index = nf.ConcentricLSH(rungs=1, tables=300, hashes=6, enough=0.01, flips=0, shells=1, nearest=0.2, farthest=0.2)
    scores, ids, scored = index.build(keys).find(keys[:, :20], 4)
    assert scored is not None
    assert int(scored.max()) < 1000, "nothing is to be learned from a full scan"
    for row in range(20):
        found = ids[0, row].tolist()
        assert len(set(found)) == 4
        torch.testing.assert_close(scores[0, row], keys[0, found] @ keys[0, row])


@pytest.mark.parametrize("scans", [True, False])
def test_draws_over_hashing_follow_the_softmax_only_where_the_top_k_was_found(scans: bool) -> None:
    """Algorithm 5. The smallest near score bounds the others after a full scan; hashing with two tables misses some."""
    n, draws = 200, 20_000
    keys, queries = keys_and_queries(n, 0.9, lengths=True)
    query = 5 * queries[0, :1] / 7
    logits = (query @ keys[0].T / math.sqrt(DIM))[0] * 4
    found = nf.ConcentricLSH.from_theory(n, 0.9, 0.3)
    index = replace(found, enough=100.0) if scans else replace(found, tables=2, hashes=2, enough=0.01)
    method = nf.LazyGumbel(draws=draws, estimator="mean", k=10, index=index, always_lazy=True)
    values = torch.eye(n, dtype=torch.float64)
    scale = 4 / math.sqrt(DIM)
    est = nf.estimate(query, keys[0], values, scale=scale, method=method, generator=seeded(1))
    assert est.info["dense_rows"] == 0
    assert not est.info["certified"], "hashing knows no bounds, even where it looked at everything"
    counts = (est.output[0] * draws).round()
    if scans:
        assert_frequencies(counts, logits.softmax(-1))
    else:
        with pytest.raises(AssertionError, match="chi-square"):
            assert_frequencies(counts, logits.softmax(-1))
        assert total_variation(counts, logits.softmax(-1)) > 0.1
