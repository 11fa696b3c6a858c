"""Partitions, own ones too, group keys as they promise; tables hold the moments of cells; gradients of moments reach the keys."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from by_hand import seeded
from operator_calls import LENGTH, assert_all_equal, attend, compiled, grads, tensors
from partitions import PARTITIONS, normal
from torch import Tensor

import nearfield as nf
from nearfield.cells import moments as cells_moments
from nearfield.cells.moments import TableGradient, tabulate
from nearfield.cells.partition import from_plain, kmeans, to_plain

BALANCED = ("blocks", "hash", "hash-one-bit")
SHAPES = {  # batch, length, dim, cells
    "one-key": (1, 1, 1, 1),
    "one-key-many-cells": (2, 1, 4, 5),
    "ordinary": (3, 40, 8, 7),
    "one-cell": (2, 30, 4, 1),
    "more-cells-than-keys": (2, 17, 3, 40),
    "as-many-cells-as-keys": (2, 64, 5, 64),
    "in-two-steps": (2, 600, 6, 150),
    "in-two-steps-crowded": (1, 160, 3, 500),
    "no-key": (2, 0, 3, 2),
    "no-entry": (0, 5, 3, 2),
}

partitions = pytest.mark.parametrize("name", PARTITIONS)
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


def sizes_of(assigned: Tensor, count: int) -> list[Tensor]:
    return [torch.bincount(entry, minlength=count) for entry in assigned]


@dtypes
@pytest.mark.parametrize("shape", SHAPES)
@partitions
def test_contract(name: str, shape: str, dtype: torch.dtype) -> None:
    batch, length, dim, count = SHAPES[shape]
    keys = normal(batch, length, dim, dtype=dtype)
    before = torch.get_rng_state()
    found = PARTITIONS[name].build(keys, count)
    assert found.shape == (batch, length)
    assert found.dtype == torch.int64
    assert bool(((found >= 0) & (found < count)).all())
    assert torch.equal(PARTITIONS[name].build(keys.clone(), count), found), "the same keys, the same cells"
    assert torch.equal(torch.get_rng_state(), before), "the global generator is nobody's business"
    for entry in range(batch):
        assert torch.equal(PARTITIONS[name].build(keys[entry : entry + 1], count)[0], found[entry]), "an entry by itself"
        others = keys * (torch.arange(batch) == entry)[:, None, None] - 7.0 * (torch.arange(batch) != entry)[:, None, None]
        assert torch.equal(PARTITIONS[name].build(others.to(dtype), count)[entry], found[entry]), "whatever the other entries are"
    if name in BALANCED and length:
        assert all(int(sizes.max() - sizes.min()) <= 1 for sizes in sizes_of(found, count)), "equal sizes, up to one key"


@pytest.mark.parametrize("count", [1, 3, 50, 200])
@partitions
def test_equal_keys(name: str, count: int) -> None:
    keys = normal(2, 1, 4).expand(2, 50, 4)
    found = PARTITIONS[name].build(keys, count)
    assert bool(((found >= 0) & (found < count)).all())
    if name in BALANCED:
        assert all(int(sizes.max() - sizes.min()) <= 1 for sizes in sizes_of(found, count))


def test_every_partition_travels_by_name() -> None:
    """An operator is told the name and the fields of a partition: both must lead back to it."""
    for partition in PARTITIONS.values():
        name, options = to_plain(partition)
        assert from_plain(name, options) == partition
        assert all(isinstance(value, int) for value in options)


def within(keys: Tensor, assigned: Tensor, weight: Tensor | None = None) -> float:
    """Mean squared distance from the centroids, coordinates times `weight`."""
    keys = keys if weight is None else keys * weight
    total = 0.0
    for entry, own in zip(keys, assigned, strict=True):
        for cell in own.unique():
            member = entry[own == cell]
            total += float((member - member.mean(0)).square().sum())
    return total / keys.shape[:2].numel()


@pytest.mark.parametrize("count", [10, 150], ids=["direct", "in-two-steps"])
def test_kmeans_cells_are_tight(count: int) -> None:
    keys = normal(1, 1000, 4)
    spread = {name: within(keys, PARTITIONS[name].build(keys, count)) for name in PARTITIONS}
    assert spread["kmeans"] < 0.95 * spread["kmeans-first-guess"]
    assert spread["kmeans"] < 0.8 * spread["hash"]
    assert spread["hash"] < 0.8 * spread["blocks"]


def test_a_hash_keeps_opposite_keys_apart() -> None:
    near, far = normal(8) + 0.01 * normal(50, 8, seed=1), -normal(8) + 0.01 * normal(50, 8, seed=2)
    found = nf.HashBuckets().build(torch.cat([near, far])[None] + 100.0, 2)[0]
    assert len(found[:50].unique()) == len(found[50:].unique()) == 1, "whatever all keys have in common"
    assert found[0] != found[50]


def test_kmeans_weighs_coordinates_by_their_root_mean_square() -> None:
    keys = normal(2, 300, 3) * torch.tensor([4.0, 1.0, 0.3], dtype=torch.float64) + torch.tensor([0.0, 3.0, 0.0])
    weight = keys.square().mean(1, keepdim=True).sqrt()
    found = nf.KMeans(iterations=4, seed=1).build(keys, 12)
    assert torch.equal(found, kmeans.lloyd(keys * weight, 12, 4, 32 * 12, 1))
    assert not torch.equal(found, kmeans.lloyd(keys, 12, 4, 32 * 12, 1))
    assert torch.equal(found, nf.KMeans(iterations=4, seed=1).build(1000.0 * keys, 12)), "the unit does not matter"


def test_kmeans_iterates_five_times_in_torch() -> None:
    keys = normal(2, 300, 4)
    found = nf.KMeans(seed=1).build(keys, 12)
    assert torch.equal(found, nf.KMeans(iterations=5, seed=1).build(keys, 12))
    assert not any(torch.equal(found, nf.KMeans(iterations=other, seed=1).build(keys, 12)) for other in (2, 4, 6))


def test_iterations_that_are_given_are_kept() -> None:
    assert repr(nf.KMeans()) == "KMeans(iterations=None, seed=0, by_queries=False)"
    assert len({nf.KMeans(), nf.KMeans(None), nf.KMeans(5), nf.KMeans(0)}) == 3
    for partition in (nf.KMeans(), nf.KMeans(5), nf.KMeans(0, seed=2)):
        assert pickle.loads(pickle.dumps(partition)) == partition
    assert to_plain(nf.KMeans(seed=3)) == ("KMeans", (-1, 3, 0))
    assert to_plain(nf.KMeans(0)) == ("KMeans", (0, 0, 0))


@pytest.mark.parametrize("name", ["kmeans", "hash"])
def test_a_common_offset_is_taken_out_before_distances(name: str) -> None:
    """float32 around 10^4 has steps of 10^-3: differences of squares would have lost all of it."""
    keys = normal(1, 400, 3, dtype=torch.float32)
    shifted = keys + 1e4
    found = PARTITIONS[name].build(shifted, 8)
    assert within(keys, found) < 1.1 * within(keys, PARTITIONS[name].build(keys, 8))


def test_never_more_cells_than_asked_for_in_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kmeans, "DIRECT_CELLS", 3)
    for seed, length, count in ((0, 50, 4), (1, 50, 49), (2, 7, 60), (3, 300, 17)):
        keys = normal(2, length, 2, seed=seed)
        keys[:, : length // 2] = keys[:, :1]  # one crowded place
        found = nf.KMeans().build(keys, count)
        assert int(found.max()) < count
        assert within(keys, found) < within(keys, torch.zeros_like(found))


@pytest.mark.parametrize(("length", "cells", "size"), [(1000, 30, 480), (64, 64, 64), (7, 3, 100), (5, 1, 2), (997, 996, 997)])
def test_a_sample_starts_all_over_the_keys(length: int, cells: int, size: int) -> None:
    picked = kmeans.sample_of(length, cells, size, seeded(4))
    assert len(picked) == len(picked.unique()) == min(size, length)
    assert 0 <= int(picked.min()) <= int(picked.max()) < length
    # One from each stretch, in no order.
    starts = picked[:cells]
    edges = torch.arange(cells + 1) * length // cells
    assert torch.equal(torch.bucketize(starts.sort().values, edges, right=True) - 1, torch.arange(cells))
    assert cells < 10 or not torch.equal(starts, starts.sort().values)
    others = picked[cells:]
    if len(others) > 400:
        assert abs(float(others.double().mean()) / length - 0.5) < 5 * 12**-0.5 / 21, "these are from everywhere"


def test_neighbours_that_are_alike_share_a_cell() -> None:
    """Runs of keys of one kind, as many as there are cells: none is left without a centroid."""
    keys = normal(1, 32, 8).repeat_interleave(16, 1) + 1e-3 * normal(1, 512, 8, seed=1)
    found = nf.KMeans().build(keys, 32)[0]
    assert torch.equal(found, found[::16].repeat_interleave(16))
    assert len(found.unique()) == 32


def test_lloyd_by_hand() -> None:
    """One iteration: nearest of the first centroids, their means, nearest again."""
    keys, count = normal(1, 30, 2), 4
    weight = torch.tensor([[[2.0, 0.5]]], dtype=torch.float64)
    picked = kmeans.sample_of(30, count, 20, seeded(9))
    scaled = (keys[0] - keys[0].mean(0)) * weight[0]
    centroids = scaled[picked[:count]]
    first = torch.cdist(scaled[picked], centroids).argmin(1)
    middles = torch.stack([scaled[picked][first == cell].mean(0) for cell in range(count)])
    expected = torch.cdist(scaled, middles).argmin(1)
    assert torch.equal(kmeans.lloyd(keys, count, 1, 20, 9, weight)[0], expected)


def test_an_empty_cell_starts_again() -> None:
    """Four places, fifty keys each: first centroids coincide, and still every place gets a cell of its own."""
    places = 10.0 * normal(4, 3)
    keys = places.repeat_interleave(50, 0)[torch.randperm(200, generator=seeded(1))][None]
    for seed in range(5):
        assert len(kmeans.lloyd(keys, 4, 6, seed=seed).unique()) == 4


def test_nearest_and_means_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    points, centroids = normal(3, 40, 5), normal(3, 6, 5, seed=1)
    distance = torch.cdist(points, centroids).square()
    for budget in (1 << 21, 6 * 40, 6 * 7, 1):
        monkeypatch.setattr(kmeans, "SCORES_PER_PASS", budget)
        assigned, far = kmeans.nearest(points, centroids)
        assert torch.equal(assigned, distance.argmin(2))
        torch.testing.assert_close(far, distance.amin(2))
    assigned = assigned.masked_fill(assigned == 2, 3)
    middles, sizes = kmeans.means(points, assigned, centroids)
    for entry in range(3):
        for cell in range(6):
            own = points[entry, assigned[entry] == cell]
            assert int(sizes[entry, cell]) == len(own)
            torch.testing.assert_close(middles[entry, cell], own.mean(0) if len(own) else centroids[entry, cell])


@pytest.mark.parametrize("wrong", [-1, 1.5, True, "3"])
def test_wrong_arguments(wrong: Any) -> None:
    for recipe, argument in ((nf.KMeans, "iterations"), (nf.KMeans, "seed"), (nf.HashBuckets, "bits"), (nf.HashBuckets, "seed")):
        with pytest.raises(ValueError, match=f"{argument} must be"):
            recipe(**{argument: wrong})
    with pytest.raises(ValueError, match="bits must be at most 30"):
        nf.HashBuckets(bits=31)


# Partitions of users


class Consecutive:
    """What `nf.Blocks` does, by a class of no particular kind."""

    def build(self, keys: Tensor, cells: int) -> Tensor:
        place = torch.arange(keys.shape[1], device=keys.device, dtype=torch.int32)
        return (place * cells // max(1, keys.shape[1])).expand(keys.shape[:2])


@dataclass(frozen=True)
class Hashed:
    """What `nf.HashBuckets` does."""

    seed: int

    def build(self, keys: Tensor, cells: int) -> Tensor:
        return nf.HashBuckets(seed=self.seed).build(keys, cells)


class Slotted:
    """The same, by an object without weak references."""

    __slots__ = ("seed",)

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def build(self, keys: Tensor, cells: int) -> Tensor:
        return nf.HashBuckets(seed=self.seed).build(keys, cells)


OWN = {
    "class": (Consecutive(), nf.Blocks()),
    "dataclass": (Hashed(3), nf.HashBuckets(seed=3)),
    "slots": (Slotted(5), nf.HashBuckets(seed=5)),
}
own = pytest.mark.parametrize("name", OWN)


def both(name: str, **options: Any) -> list[nf.Cells]:
    """A method with a user's partition, and one with the built-in partition that makes the same cells."""
    return [nf.Cells(cell_size=4, probes=2, segment=16, sinks=2, partition=one, **options) for one in OWN[name]]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "dropout_p": 0.2}], ids=str)
@own
def test_own_partitions_make_cells(name: str, options: dict[str, Any], backend: str) -> None:
    def run(method: nf.Cells) -> tuple[Tensor, ...]:
        return grads(partial(attend, method=method, backend=backend, generator=seeded(0), **options), *tensors())

    assert_all_equal(*map(run, both(name)))


@own
def test_own_partitions_in_estimates(name: str) -> None:
    def run(method: nf.Cells) -> nf.Estimate:
        return nf.estimate(*tensors(), is_causal=True, method=method, audit=20, generator=seeded(1))

    mine, built_in = map(run, both(name, samples=3))
    for attribute in ("output", "lse", "stderr"):
        assert torch.equal(getattr(mine, attribute), getattr(built_in, attribute))
    assert mine.audit is not None
    assert built_in.audit is not None
    assert mine.audit.additive == built_in.audit.additive
    assert mine.info["keys_per_query"] == built_in.info["keys_per_query"]
    assert type(OWN[name][0]).__name__ in mine.info["method"]


@pytest.mark.parametrize("is_causal", [False, True])
@own
def test_own_partitions_are_compiled(name: str, is_causal: bool) -> None:
    mine, built_in = (partial(attend, method=one, is_causal=is_causal) for one in both(name))
    assert_all_equal(grads(compiled(mine), *tensors()), grads(built_in, *tensors()))


@own
def test_own_partitions_are_mapped(name: str) -> None:
    mine, built_in = (partial(attend, method=one, is_causal=True) for one in both(name))
    assert_all_equal(torch.vmap(mine)(*tensors()), built_in(*tensors()))
    gradient = torch.func.grad(lambda *x: mine(*x).square().sum(), (0, 1, 2))
    _, *expected = grads(lambda *x: built_in(*x).square().sum(), *tensors())
    weight = torch.randn((), generator=seeded(3))  # what `grads` multiplies with
    torch.testing.assert_close([weight * x for x in gradient(*tensors())], expected)


@pytest.mark.parametrize("clone", [copy.copy, copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
@own
def test_copies_with_own_partitions(name: str, clone: Any) -> None:
    """A copy may have a partition that no call has seen yet."""
    mine, built_in = both(name)
    assert_all_equal(compiled(partial(attend, method=clone(mine)))(*tensors()), attend(*tensors(), method=built_in))


def test_own_partitions_of_one_class_are_told_apart() -> None:
    inputs = tensors()
    methods = [nf.Cells(cell_size=4, probes=2, partition=Hashed(seed)) for seed in (3, 4)]
    first, second = (attend(*inputs, method=method) for method in methods)
    assert not torch.equal(first, second)


def test_own_partitions_are_freed() -> None:
    """Each step of a training may make its own method. An operator that asks for what is gone is told so."""
    partition = Hashed(7)
    name, options = to_plain(partition)
    attend(*tensors(), method=nf.Cells(partition=partition))
    assert from_plain(name, options) is partition
    seen = weakref.ref(partition)
    del partition
    gc.collect()
    assert seen() is None
    with pytest.raises(RuntimeError, match="this partition is unknown or gone"):
        from_plain(name, options)


WRONG: dict[str, tuple[Any, str]] = {
    "a list": ([0, 1], r"must return a tensor of integers of shape \(1, 48\), got list"),
    "floats": (torch.zeros(1, LENGTH), r"must return integers of shape \(1, 48\), got torch.float32 of shape \(1, 48\)"),
    "truth values": (torch.zeros(1, LENGTH, dtype=torch.bool), "must return integers .* got torch.bool"),
    "no batch": (torch.zeros(LENGTH, dtype=torch.long), r"must return integers .* got torch.int64 of shape \(48,\)"),
    "too few": (torch.zeros(1, LENGTH - 1, dtype=torch.long), r"must return integers .* got torch.int64 of shape \(1, 47\)"),
    "too large": (torch.full((1, LENGTH), 12), "must return cells from 0 to 11, got 12 to 12"),
    "negative": (torch.arange(LENGTH)[None] % 12 - 1, "must return cells from 0 to 11, got -1 to 10"),
}


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", WRONG)
def test_wrong_answers_of_own_partitions(name: str, backend: str) -> None:
    answer, message = WRONG[name]

    class Wrong:
        def __repr__(self) -> str:
            return "Wrong()"

        def build(self, keys: Tensor, cells: int) -> Any:
            return answer

    method = nf.Cells(cell_size=4, probes=2, partition=Wrong())
    with pytest.raises(ValueError, match=rf"Wrong\(\).build {message}"):
        attend(*tensors(1, 1, LENGTH, 8), method=method, backend=backend)


# Tables

KEYS = 60
SPANS = [0, 4, 8, 16]
"""Three segments of 20 keys in spans: the first, the third, and the first two together."""


def ragged() -> Tensor:
    """Cells of 60 keys at two levels: some keys in none, cells 2, 5 and 9 and all of the second span but one empty."""
    cell_of = torch.full((2, KEYS), -1)
    cell_of[0, :20] = torch.randint(4, (20,), generator=seeded(3))
    cell_of[0, 40:] = 6
    cell_of[1, :40] = torch.randint(8, 16, (40,), generator=seeded(4))
    cell_of[torch.isin(cell_of, torch.tensor([2, 9]))] += 1
    cell_of[:, ::7] = -1
    return cell_of


def moments(keys: Tensor, values: Tensor, cell_of: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Centroids, variances, mean values, cell by cell, and products of deviations, summed over each span; differentiable."""
    centroid, variance, value, cross = [], [], [], []
    for first, last in pairwise(SPANS):
        total = torch.zeros(values.shape[1], keys.shape[1], dtype=keys.dtype)
        for cell in range(first, last):
            own = (cell_of == cell).any(0)
            k, v = keys[own], values[own]
            one = k.mean(0) if len(k) else torch.zeros_like(keys[0])
            mean = v.mean(0) if len(k) else torch.zeros_like(values[0])
            centroid.append(one)
            value.append(mean)
            variance.append((k - one).square().mean(0) if len(k) else torch.zeros_like(one))
            total = total + (v - mean).T @ (k - one)
        cross.append(total)
    return torch.stack(centroid), torch.stack(variance), torch.stack(value), torch.stack(cross)


@pytest.fixture(params=[1 << 12, 7], ids=["whole", "in-passes"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells_moments, "KEYS_PER_PASS", request.param)


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_moments(dtype: torch.dtype) -> None:
    keys, values, cell_of = normal(KEYS, 5, dtype=dtype), normal(KEYS, 3, seed=1, dtype=dtype), ragged()
    table = tabulate(keys, values, cell_of, SPANS)
    expected = moments(keys.double(), values.double(), cell_of)
    tolerance = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 1e-6, "rtol": 1e-5}
    per_key = table.members[:, None, None]
    found_moments = (table.centroid, table.variance, table.value, table.cross / per_key)
    for found, true in zip(found_moments, (*expected[:3], expected[3] / per_key), strict=True):
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(found.double(), true, **tolerance)
    assert table.cells == 16
    assert table.members.tolist() == [int(((cell_of >= a) & (cell_of < b)).sum()) for a, b in pairwise(SPANS)]
    for cell in range(table.cells):
        own = table.order[table.starts[cell] : table.starts[cell + 1]]
        assert own.tolist() == (cell_of == cell).any(0).nonzero()[:, 0].tolist()
        assert bool((table.cell[table.starts[cell] : table.starts[cell + 1]] == cell).all())
        assert float(table.size[cell]) == len(own)
        assert float(table.log_exists[cell]) == (0.0 if len(own) else -torch.inf)
    covered = torch.cat([torch.arange(part.start, part.stop) for _, part in table.passes()])
    assert covered.tolist() == list(range(len(table.order)))
    for span, part in table.passes():
        assert bool(((table.cell[part] >= SPANS[span]) & (table.cell[part] < SPANS[span + 1])).all())


@pytest.mark.parametrize(("known", "spans"), [(20, [0]), (40, [0, 2])], ids=["first-segment", "first-two"])
def test_moments_know_nothing_of_later_segments(known: int, spans: list[int]) -> None:
    keys, values, cell_of = normal(KEYS, 8), normal(KEYS, 8, seed=1), ragged()
    early = tabulate(keys, values, cell_of, SPANS)
    keys[known:], values[known:] = 1e6 * normal(KEYS - known, 8, seed=2), 1e6 * normal(KEYS - known, 8, seed=3)
    later = tabulate(keys, values, cell_of, SPANS)
    for span in spans:
        own = slice(SPANS[span], SPANS[span + 1])
        for name in ("centroid", "variance", "value"):
            assert torch.equal(getattr(early, name)[own], getattr(later, name)[own]), name
        assert torch.equal(early.cross[span], later.cross[span])


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("which", ["centroid", "variance", "value", "cross", "all"])
def test_gradients_of_moments_reach_the_keys(which: str) -> None:
    keys, values, cell_of = normal(KEYS, 5), normal(KEYS, 3, seed=1), ragged()
    leaves = keys.clone().requires_grad_(), values.clone().requires_grad_()
    wanted = moments(*leaves, cell_of)
    table = tabulate(keys, values, cell_of, SPANS)
    gradient = TableGradient.zeros_like(table)
    into = (gradient.centroid, gradient.variance, gradient.value, gradient.cross)
    for number, (name, place) in enumerate(zip(("centroid", "variance", "value", "cross"), into, strict=True)):
        if which in (name, "all"):
            place.copy_(normal(*place.shape, seed=10 + number))
    expected = torch.autograd.grad(wanted, leaves, into)
    found = normal(KEYS, 5, seed=20), normal(KEYS, 3, seed=21)
    before = [x.clone() for x in found]
    gradient.spread_(table, keys, values, *found)
    for x, start, true in zip(found, before, expected, strict=True):
        torch.testing.assert_close(x - start, true)


# What some rows see of a table

SEEN = ([0], [2], [2, 1], [0, 1, 2])


def columns_of(spans: list[int]) -> list[int]:
    return [cell for span in spans for cell in range(SPANS[span], SPANS[span + 1])]


def seen_moments(keys: Tensor, values: Tensor, cell_of: Tensor, spans: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The moments of the cells of some spans, with their covariance per key."""
    centroid, variance, value, cross = moments(keys, values, cell_of)
    columns = columns_of(spans)
    members = sum(int((cell_of == cell).sum()) for cell in columns)
    return centroid[columns], variance[columns], value[columns], sum(cross[span] for span in spans) / members


@pytest.mark.parametrize("spans", SEEN, ids=str)
def test_what_some_rows_see(spans: list[int]) -> None:
    keys, values, cell_of = normal(KEYS, 5), normal(KEYS, 3, seed=1), ragged()
    table = tabulate(keys, values, cell_of, SPANS)
    seen = table.seen(spans)
    columns = columns_of(spans)
    for found, true in zip(
        (seen.centroid, seen.variance, seen.value, seen.cross), seen_moments(keys, values, cell_of, spans), strict=True
    ):
        torch.testing.assert_close(found, true)
    assert len(seen) == len(columns)
    assert seen.ids.tolist() == columns
    assert seen.size.tolist() == [int((cell_of == cell).sum()) for cell in columns]
    assert torch.equal(seen.log_exists, torch.where(seen.size == 0, -torch.inf, 0.0).double())
    assert seen.pooled == int(seen.size.sum())
    assert seen.columns(torch.arange(-1, 16)).tolist() == [columns.index(x) if x in columns else -1 for x in range(-1, 16)]


@pytest.mark.usefixtures("passes")
def test_gradients_of_what_rows_see_reach_the_keys() -> None:
    """Rows that see different spans, one after the other, into the gradient of one table."""
    keys, values, cell_of = normal(KEYS, 5), normal(KEYS, 3, seed=1), ragged()
    leaves = keys.clone().requires_grad_(), values.clone().requires_grad_()
    table = tabulate(keys, values, cell_of, SPANS)
    gradient = TableGradient.zeros_like(table)
    expected = [torch.zeros_like(x) for x in leaves]
    for number, spans in enumerate(SEEN):
        seen = table.seen(spans)
        own = TableGradient.zeros_like(seen)
        into = (own.centroid, own.variance, own.value, own.cross)
        for moment, place in enumerate(into):
            place.copy_(normal(*place.shape, seed=10 * number + moment))
        for total, grad in zip(expected, torch.autograd.grad(seen_moments(*leaves, cell_of, spans), leaves, into), strict=True):
            total += grad
        gradient.add_(seen, own)
    found = torch.zeros_like(keys), torch.zeros_like(values)
    gradient.spread_(table, keys, values, *found)
    torch.testing.assert_close(found, tuple(expected))


def test_spans_without_members_have_no_covariance() -> None:
    """Where all keys of a span are sinks."""
    keys, values, cell_of = normal(KEYS, 5), normal(KEYS, 3, seed=1), ragged()
    cell_of[0, :20] = -1
    table = tabulate(keys, values, cell_of, SPANS)
    seen = table.seen([0])
    assert seen.pooled == 0
    assert not bool(seen.cross.any())
    gradient = TableGradient.zeros_like(table)
    own = TableGradient.zeros_like(seen)
    own.cross.fill_(1.0)
    gradient.add_(seen, own)
    assert bool(gradient.cross.isfinite().all())
