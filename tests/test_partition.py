"""Partitions group keys as they promise, tables hold the moments of the groups, and gradients of moments reach the keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import seeded
from torch import Tensor

import nearfield as nf
from nearfield.kernels.cells_assign import assign
from nearfield.kernels.cells_plan import CellSettings, closed_keys, pieces, row_blocks_of
from nearfield.partition import BY_NAME, cells, kmeans, lloyd
from nearfield.partition.cells import CellTable, TableGradient, tabulate

PARTITIONS: dict[str, Any] = {
    "kmeans": nf.KMeans(),
    "kmeans-first-guess": nf.KMeans(iterations=0, seed=3),
    "blocks": nf.Blocks(),
    "hash": nf.HashBuckets(),
    "hash-one-bit": nf.HashBuckets(bits=1, seed=5),
}
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


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=seeded(seed), dtype=torch.float64).to(dtype)


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
        assert BY_NAME[type(partition).__name__](*vars(partition).values()) == partition
        assert all(isinstance(value, int) for value in vars(partition).values())


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
    assert torch.equal(found, lloyd.lloyd(keys * weight, 12, 4, 32 * 12, 1))
    assert not torch.equal(found, lloyd.lloyd(keys, 12, 4, 32 * 12, 1))
    assert torch.equal(found, nf.KMeans(iterations=4, seed=1).build(1000.0 * keys, 12)), "the unit does not matter"


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


def test_lloyd_by_hand() -> None:
    """One iteration: nearest of the first centroids, their means, nearest again."""
    keys, count = normal(1, 30, 2), 4
    weight = torch.tensor([[[2.0, 0.5]]], dtype=torch.float64)
    picked = torch.randperm(30, generator=seeded(9))
    scaled = (keys[0] - keys[0].mean(0)) * weight[0]
    centroids = scaled[picked[:count]]
    first = torch.cdist(scaled[picked[:20]], centroids).argmin(1)
    middles = torch.stack([scaled[picked[:20]][first == cell].mean(0) for cell in range(count)])
    expected = torch.cdist(scaled, middles).argmin(1)
    assert torch.equal(lloyd.lloyd(keys, count, 1, 20, 9, weight)[0], expected)


def test_an_empty_cell_starts_again() -> None:
    """Four places, fifty keys each: first centroids coincide, and still every place gets a cell of its own."""
    places = 10.0 * normal(4, 3)
    keys = places.repeat_interleave(50, 0)[torch.randperm(200, generator=seeded(1))][None]
    for seed in range(5):
        assert len(lloyd.lloyd(keys, 4, 6, seed=seed).unique()) == 4


def test_nearest_and_means_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    points, centroids = normal(3, 40, 5), normal(3, 6, 5, seed=1)
    distance = torch.cdist(points, centroids).square()
    for budget in (1 << 21, 6 * 40, 6 * 7, 1):
        monkeypatch.setattr(lloyd, "SCORES_PER_PASS", budget)
        assigned, far = lloyd.nearest(points, centroids)
        assert torch.equal(assigned, distance.argmin(2))
        torch.testing.assert_close(far, distance.amin(2))
    assigned = assigned.masked_fill(assigned == 2, 3)
    middles, sizes = lloyd.means(points, assigned, centroids)
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


# Tables

PER_SEGMENT, SEGMENTS, LENGTH = 4, 3, 60


def ragged() -> Tensor:
    """Cells of 60 keys in three segments of 20: some keys in none, cells 2 and 5 and all of the third segment but one empty."""
    cell_of = torch.randint(PER_SEGMENT, (LENGTH,), generator=seeded(3)) + torch.arange(LENGTH) // 20 * PER_SEGMENT
    cell_of[torch.isin(cell_of, torch.tensor([2, 5]))] += 1
    cell_of[40:] = 9
    cell_of[::7] = -1
    return cell_of


def moments(keys: Tensor, values: Tensor, cell_of: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Centroids, variances, mean values and pooled covariances, cell by cell; differentiable."""
    centroid, variance, value, cross = [], [], [], [torch.zeros(values.shape[1], keys.shape[1], dtype=keys.dtype)]
    pool, pooled = torch.zeros_like(cross[0]), 0
    for cell in range(SEGMENTS * PER_SEGMENT):
        k, v = keys[cell_of == cell], values[cell_of == cell]
        one = k.mean(0) if len(k) else torch.zeros_like(keys[0])
        mean = v.mean(0) if len(k) else torch.zeros_like(values[0])
        centroid.append(one)
        value.append(mean)
        variance.append((k - one).square().mean(0) if len(k) else torch.zeros_like(one))
        pool, pooled = pool + (v - mean).T @ (k - one), pooled + len(k)
        if (cell + 1) % PER_SEGMENT == 0:
            cross.append(pool / max(1, pooled))
    return torch.stack(centroid), torch.stack(variance), torch.stack(value), torch.stack(cross)


def table_of(keys: Tensor, values: Tensor, cell_of: Tensor) -> CellTable:
    return tabulate(keys, values, cell_of, SEGMENTS * PER_SEGMENT, PER_SEGMENT)


@pytest.fixture(params=[1 << 14, 7], ids=["whole", "in-passes"])
def passes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "KEYS_PER_PASS", request.param)


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_moments(dtype: torch.dtype) -> None:
    keys, values, cell_of = normal(LENGTH, 5, dtype=dtype), normal(LENGTH, 3, seed=1, dtype=dtype), ragged()
    table = table_of(keys, values, cell_of)
    expected = moments(keys.double(), values.double(), cell_of)
    tolerance = {"atol": 1e-12, "rtol": 1e-12} if dtype == torch.float64 else {"atol": 1e-6, "rtol": 1e-5}
    for found, true in zip((table.centroid, table.variance, table.value, table.cross), expected, strict=True):
        assert found.dtype == torch.promote_types(dtype, torch.float32)
        torch.testing.assert_close(found.double(), true, **tolerance)
    assert table.cells == SEGMENTS * PER_SEGMENT
    assert table.members_before.tolist() == [int((cell_of[cell_of >= 0] < PER_SEGMENT * s).sum()) for s in range(SEGMENTS + 1)]
    for cell in range(table.cells):
        own = table.order[table.starts[cell] : table.starts[cell + 1]]
        assert own.tolist() == (cell_of == cell).nonzero()[:, 0].tolist()
        assert bool((table.cell[table.starts[cell] : table.starts[cell + 1]] == cell).all())
        assert float(table.size[cell]) == len(own)
        assert float(table.void[cell]) == (0.0 if len(own) else -torch.inf)
    covered = torch.cat([torch.arange(part.start, part.stop) for _, part in table.passes()])
    assert covered.tolist() == list(range(len(table.order)))
    assert all(bool((table.cell[part] // PER_SEGMENT == segment).all()) for segment, part in table.passes())


def test_moments_know_nothing_of_later_segments() -> None:
    keys, values, cell_of = normal(LENGTH, 8), normal(LENGTH, 8, seed=1), ragged()
    early = table_of(keys, values, cell_of)
    keys[20:], values[20:] = 1e6 * normal(40, 8, seed=2), 1e6 * normal(40, 8, seed=3)
    later = table_of(keys, values, cell_of)
    for name, stop in (("centroid", PER_SEGMENT), ("variance", PER_SEGMENT), ("value", PER_SEGMENT), ("cross", 2)):
        assert torch.equal(getattr(early, name)[:stop], getattr(later, name)[:stop]), name


@pytest.mark.usefixtures("passes")
@pytest.mark.parametrize("which", ["centroid", "variance", "value", "cross", "all"])
def test_gradients_of_moments_reach_the_keys(which: str) -> None:
    keys, values, cell_of = normal(LENGTH, 5), normal(LENGTH, 3, seed=1), ragged()
    leaves = keys.clone().requires_grad_(), values.clone().requires_grad_()
    wanted = moments(*leaves, cell_of)
    table = table_of(keys, values, cell_of)
    gradient = TableGradient.zeros_like(table)
    into = (gradient.centroid, gradient.variance, gradient.value, gradient.cross)
    for number, (name, place) in enumerate(zip(("centroid", "variance", "value", "cross"), into, strict=True)):
        if which in (name, "all"):
            place.copy_(normal(*place.shape, seed=10 + number))
    expected = torch.autograd.grad(wanted, leaves, into)
    found = normal(LENGTH, 5, seed=20), normal(LENGTH, 3, seed=21)
    before = [x.clone() for x in found]
    gradient.spread_(table, keys, values, *found)
    for x, start, true in zip(found, before, expected, strict=True):
        torch.testing.assert_close(x - start, true)


# Which key lives in which cell


@pytest.mark.parametrize("branching", [0, 1, 3])
@pytest.mark.parametrize("sinks", [0, 3, 20])
@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("segment", [0, 16])
@partitions
def test_cells_of_keys(name: str, segment: int, window: int, sinks: int, branching: int) -> None:
    length = 70
    settings = CellSettings(1, segment, window if segment else 0, sinks, 3, branching, 1, 1, 0)
    keys = normal(length, 4)
    visible = torch.arange(1, length + 1) if segment else torch.full((length,), length)
    fine, coarse = assign(keys, visible, settings, PARTITIONS[name])
    closed = (length - 1) // segment * segment - settings.window * segment if segment else length
    assert fine.tolist()[:sinks] == [-1] * sinks
    assert bool((fine[closed:] == -1).all()), "keys that no row sees closed"
    assert bool((fine[sinks:closed] >= 0).all())
    own = torch.arange(closed) // segment if segment else torch.zeros(closed, dtype=torch.long)
    per_fine, per_coarse = settings.per_segment(segment or length)
    assert torch.equal((fine[:closed] // per_fine)[sinks:], own[sinks:]), "numbered segment by segment"
    if not branching:
        assert len(coarse) == 0
        return
    assert torch.equal((coarse[:closed] // per_coarse)[sinks:], own[sinks:])
    assert torch.equal(coarse < 0, fine < 0)
    order = fine.argsort(stable=True)[int((fine < 0).sum()) :]
    assert bool((coarse[order].diff() >= 0).all()), "a coarse cell is a run of fine ones"
    for cell in fine[fine >= 0].unique():
        assert len(coarse[fine == cell].unique()) == 1, "a fine cell has one parent"
    for cell in coarse[coarse >= 0].unique():
        assert len(fine[coarse == cell].unique()) <= 2 * branching


@pytest.mark.parametrize("branching", [0, 2])
@partitions
def test_cells_know_nothing_of_later_segments(name: str, branching: int) -> None:
    settings = CellSettings(1, 16, 0, 2, 2, branching, 1, 1, 0)
    keys, visible = normal(100, 8, dtype=torch.float32), torch.arange(1, 101)
    early = assign(keys, visible, settings, PARTITIONS[name])
    for size in (1.0, 1e6, 1e18):
        keys[48:] = size * normal(52, 8, seed=1, dtype=torch.float32)
        for x, y in zip(early, assign(keys, visible, settings, PARTITIONS[name]), strict=True):
            assert torch.equal(x[:48], y[:48])


def closed_by_hand(seen: int, settings: CellSettings) -> int:
    """Whole segments among the first `seen` keys that do not hold the last of them, less the window."""
    if not settings.segment:
        return seen
    return max(0, max(0, seen - 1) // settings.segment - settings.window) * settings.segment


@pytest.mark.parametrize(("segment", "window"), [(0, 0), (4, 0), (4, 1), (5, 2), (1, 0), (100, 0)])
@pytest.mark.parametrize("kind", ["causal", "padded", "short", "all", "none"])
def test_pieces_and_blocks_of_rows(kind: str, segment: int, window: int) -> None:
    """Every position once and in order, with the segments that it sees closed."""
    settings = CellSettings(1, segment, window, 0, 2, 0, 1, 0, 0)
    every = torch.arange(1, 24)
    kinds = {"padded": (every - 5).clamp(min=0), "short": every.clamp(max=9), "all": every * 0 + 23, "none": every * 0}
    visible = kinds.get(kind, every)
    found = pieces(visible, settings)
    assert [row for piece in found for row in range(piece.start, piece.stop)] == list(range(23))
    for piece in found:
        for row in range(piece.start, piece.stop):
            assert piece.closed == closed_by_hand(int(visible[row]), settings) == int(closed_keys(visible[row], settings))
        assert piece.segments == (piece.closed // segment if segment else int(piece.closed > 0))
    for rows in (1, 3, 7, 100):
        blocks = list(row_blocks_of(found, rows))
        assert [row for block in blocks for piece in block for row in range(piece.start, piece.stop)] == list(range(23))
        assert all(sum(piece.length for piece in block) == rows for block in blocks[:-1])
        assert 0 < sum(piece.length for piece in blocks[-1]) <= rows
    assert pieces(visible[:0], settings) == list(row_blocks_of([], 3)) == []
