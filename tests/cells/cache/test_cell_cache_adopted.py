"""Keys are grouped once: the cells of a prompt's own attention become those of its cache, cut in two where they are too large."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
from broken_off import at_allocation, at_line, break_off, points
from by_hand import seeded
from few_keys import few_keys
from torch import Tensor

import nearfield as nf
from nearfield.attention import causal_attention
from nearfield.cells.cache import adopted
from nearfield.cells.cache.adopted import known_segments
from nearfield.cells.cache.segments import close_segment, cross_of
from nearfield.cells.cache.store import CellStore
from nearfield.cells.partition import build_cells
from nearfield.cells.partition.halve import halve
from nearfield.cells.sizes import CacheSizes
from nearfield.cells.trial import Prepared
from nearfield.kernels import backends

BATCH, HEADS, GROUP, DIM, VALUE_DIM = 2, 2, 2, 16, 12
CALL = nf.Cells(segment=16, cell_size=8, sinks=5)
ALL = nf.Cells(probes=10_000, sinks=5)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    few_keys(monkeypatch)
    monkeypatch.setattr(adopted, "LEAST_KEYS", 64)


def inputs(length: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((HEADS * GROUP, DIM), (HEADS, DIM), (HEADS, VALUE_DIM))
    query, key, value = (torch.randn(BATCH, heads, length, dim, generator=seeded(seed + dim)) for heads, dim in shapes)
    return 2 * query, key, value


def prepared_for(query: Tensor, key: Tensor, value: Tensor, method: nf.Method = CALL) -> Prepared:
    found = causal_attention(query, key, value, None, method, keep_cells=True).prepared
    assert found is not None
    return found


def filled(length: int, method: nf.Cells = ALL, call: nf.Method = CALL, **options: Any) -> tuple[CellStore, Prepared]:
    query, key, value = inputs(length + 20)
    own = [x[:, :, :length] for x in (query, key, value)]
    store = CellStore(method, **{"regroup": False} | options)
    store.append(*own[1:])
    return store, prepared_for(*own, method=call)


def exact(query: Tensor, key: Tensor, value: Tensor, rows: slice) -> Tensor:
    return nf.attention(query, key, value, is_causal=True, enable_gqa=True, method=nf.Exact())[:, :, rows]


def scatter(keys: Tensor, cell_of: Tensor) -> float:
    """What k-means makes small."""
    total = 0.0
    for own, cell in zip(keys, cell_of, strict=True):
        for number in cell.unique():
            total += float((own[cell == number] - own[cell == number].mean(0)).square().sum())
    return total


# Cells cut in two.


def blobs(heads: int = 2, cells: int = 6, each: int = 20, dim: int = 16) -> tuple[Tensor, Tensor]:
    """Cells of two blobs each, a little of one and much of the other, far from zero; and to which blob each key belongs."""
    generator = seeded(3)
    middle = 5 * torch.randn(heads, cells, 1, dim, generator=generator) + 30
    apart = torch.randn(heads, cells, 1, dim, generator=generator)
    side = (torch.arange(each) < 6).float()[:, None]
    keys = middle + 2 * apart * side + 0.1 * torch.randn(heads, cells, each, dim, generator=generator)
    blob = 2 * torch.arange(cells)[:, None] + (torch.arange(each) < 6).long()
    order = torch.randperm(cells * each, generator=generator)
    return keys.flatten(1, 2)[:, order], blob.flatten()[order].expand(heads, -1)


def test_a_cell_of_two_blobs_is_cut_between_them() -> None:
    keys, blob = blobs()
    found = halve(keys, blob // 2, 6)
    assert torch.equal(found // 2, blob // 2)
    for own, wanted in zip(found, blob, strict=True):
        same = own[:, None] == own
        assert torch.equal(same, wanted[:, None] == wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_halves_are_nearly_as_tight_as_new_cells(dtype: torch.dtype) -> None:
    keys = torch.randn(2, 600, DIM, generator=seeded(0)) * torch.linspace(0.2, 2.0, DIM)
    coarse = build_cells(nf.KMeans(), keys, 20)
    found = halve(keys.to(dtype), coarse, 20)
    assert torch.equal(found // 2, coarse)
    fine = build_cells(nf.KMeans(), keys, 40)
    assert scatter(keys, found) < 1.08 * scatter(keys, fine) < 0.95 * scatter(keys, coarse)


def test_halves_of_cells_with_keys_far_out() -> None:
    """The direction, and where to cut across it, both matter here."""
    generator = seeded(0)
    keys = torch.randn(2, 600, DIM, generator=generator) * torch.randn(2, 600, 1, generator=generator).square()
    found = halve(keys, build_cells(nf.KMeans(), keys, 20), 20)
    assert scatter(keys, found) < 0.775 * scatter(keys, build_cells(nf.KMeans(), keys, 40))


def test_keys_that_are_alike_or_alone_or_in_no_cell() -> None:
    keys = torch.randn(1, 9, 4, generator=seeded(0))
    keys[:, 3:6] = keys[:, 3:4]
    cell_of = torch.tensor([[0, -1, 2, 3, 3, 3, 5, 5, -1]], dtype=torch.int32)  # 1 and 4 are empty
    found = halve(keys, cell_of, 6)
    assert found.dtype == torch.int32
    assert torch.equal(found == -1, cell_of == -1)
    assert torch.equal(found[cell_of >= 0] // 2, cell_of[cell_of >= 0])
    assert len(found[0, 3:6].unique()) == 1
    assert len(found[0, 6:8].unique()) == 2


@pytest.mark.usefixtures("small")
def test_there_are_never_more_cells_than_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels lay out no more; such segments are closed in torch."""
    prepared = prepared_for(*inputs(150), method=nf.Cells(segment=16, cell_size=3, sinks=5))
    (first, *_) = known_segments(prepared, CacheSizes(None, 1, 4, 5), 150)
    assert first.cells << first.halvings <= first.end < first.cells << (first.halvings + 1)
    keys = torch.randn(2, 16, DIM, generator=seeded(0))
    given = torch.arange(16).expand(2, -1)
    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    outside = torch.zeros(2, 16, dtype=torch.bool)
    found = close_segment(keys, keys, None, outside, 24, nf.KMeans(), given, 0)
    assert torch.equal(found.size, (torch.arange(24) < 16).expand(2, -1).float())


def test_nothing_about_a_half_depends_on_other_cells() -> None:
    keys, blob = blobs()
    whole = halve(keys, blob // 2, 6)
    some = blob[0] // 2 == 4
    alone = halve(keys[:, some], torch.zeros_like(blob[:, some]), 1)
    assert torch.equal(alone, whole[:, some] - 8)


# Which spans are taken over.


def sizes(**changes: Any) -> CacheSizes:
    given = {"segment": None, "cell_size": None, "window": 4, "sinks": 5} | changes
    return CacheSizes(**given)


@pytest.mark.usefixtures("small")
def test_the_longest_spans_are_taken_over() -> None:
    found = known_segments(prepared_for(*inputs(16 * 13 + 3)), sizes(), 16 * 13 + 3)
    # 12 segments are closed by the last row that a cache would have closed: spans of 8 and 4.
    assert [x.end for x in found] == [128, 192]
    assert [x.cells for x in found] == [16, 8]
    for start, segment in zip((0, 128), found, strict=True):
        assert segment.cell_of.shape == (BATCH * HEADS, segment.end - start)
        assert int(segment.cell_of.min()) == (-1 if start == 0 else 0)
        assert int(segment.cell_of.max()) < segment.cells
        own = segment.cell_of[0, 5 if start == 0 else 0 :]
        assert int(own.min()) >= 0
        assert len(own.unique()) > 0.7 * segment.cells


@pytest.mark.usefixtures("small")
def test_short_spans_are_not() -> None:
    # 16 segments, and one by itself.
    found = known_segments(prepared_for(*inputs(16 * 17 + 9)), sizes(), 16 * 17 + 9)
    assert [x.end for x in found] == [256]


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("size", "halvings"), [(4, 1), (8, 0), (2, 2), (16, 0), (5, 1), (6, 0)])
def test_large_cells_are_cut_until_they_are_small_enough(size: int, halvings: int) -> None:
    found = known_segments(prepared_for(*inputs(150)), sizes(cell_size=size), 150)
    assert [x.halvings for x in found] == [halvings] * len(found) != []


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(
    ("cache", "call"),
    [
        ({"segment": 16}, CALL),
        ({"sinks": 4}, CALL),
        ({}, nf.Cells(segment=16, cell_size=8, sinks=5, partition=nf.Blocks())),
        ({}, nf.Cells(segment=256, cell_size=8, sinks=5)),
    ],
    ids=["segments", "sinks", "partition", "no-span"],
)
def test_cells_that_are_not_those_of_a_cache_stay_where_they_are(cache: dict[str, Any], call: nf.Cells) -> None:
    assert known_segments(prepared_for(*inputs(150), method=call), sizes(**cache), 150) == []


def test_other_methods_group_nothing() -> None:
    given = inputs(64)
    for method in (nf.Exact(), nf.TopK(4), nf.Auto()):
        found = causal_attention(*given, None, method, keep_cells=True)
        assert found.prepared is None
        assert torch.equal(found.output, nf.attention(*given, is_causal=True, enable_gqa=True, method=method))


def test_the_output_is_that_of_attention() -> None:
    given = inputs(150)
    found = causal_attention(*given, None, CALL, return_lse=True, keep_cells=True)
    assert causal_attention(*given, None, CALL).prepared is None  # Nobody asks.
    output, lse = nf.attention(*given, is_causal=True, enable_gqa=True, method=CALL, return_lse=True)
    assert torch.equal(found.output, output)
    assert found.lse is not None
    torch.testing.assert_close(found.lse, lse)


def test_a_pilot_hands_its_cells_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where exact attention runs in the end: keys were grouped all the same."""
    query, key, value = nf.synthetic.make("clustered", 1, 2, 2048, 16)
    monkeypatch.setattr(nf.Auto, "prefers_exact", lambda self, problem: False)
    monkeypatch.setattr("nearfield.pilot.faster_budgets", lambda *_: [8, 16])
    for eps in (0.9, 1e-9):
        assert causal_attention(query, key, value, None, nf.Auto(eps=eps), keep_cells=True).prepared is not None


# A store that takes them over.


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("length", [100, 150, 211])
@pytest.mark.parametrize("offload", [False, True])
def test_with_all_cells_opened_it_is_exact_attention(length: int, offload: bool) -> None:
    query, key, value = inputs(length + 20)
    store, prepared = filled(length, offload=offload)
    fresh = copy.deepcopy(store)
    store.close(prepared)
    fresh.close()
    assert store.closed == fresh.closed
    state = store.state
    assert state is not None
    assert len(state.bounds) > 2
    assert state.cell_bounds[-1] == store.cells
    assert torch.equal(store.keys, fresh.keys)  # type: ignore[arg-type]
    for position in range(length, length + 20):
        new = slice(position, position + 1)
        store.append(key[:, :, new], value[:, :, new])
        seen = slice(0, position + 1)
        wanted = exact(*(x[:, :, seen] for x in (query, key, value)), new)
        torch.testing.assert_close(store.attend(query[:, :, new]), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("kept", [3, 60, 130, 145])
def test_it_can_be_cropped_anywhere(kept: int) -> None:
    query, key, value = inputs(170)
    store, prepared = filled(150)
    store.close(prepared)
    store.crop(kept)
    for position in range(kept, kept + 12):
        new, seen = slice(position, position + 1), slice(0, position + 1)
        store.append(key[:, :, new], value[:, :, new])
        wanted = exact(*(x[:, :, seen] for x in (query, key, value)), new)
        torch.testing.assert_close(store.attend(query[:, :, new]), wanted, atol=2e-5, rtol=1e-4)
    state = store.state
    assert state is not None
    assert state.cell_bounds[-1] == store.cells
    assert len(state.cell_bounds) == len(state.bounds)
    # What cells have in common was taken apart and put together.
    tables, cross = state.tables, torch.zeros_like(state.tables.cross).flatten(0, 1)
    for segment, cells in zip(pairwise(state.bounds), pairwise(state.cell_bounds), strict=True):
        rows = [x.read(slice(*segment)).flatten(0, 1) for x in (state.keys, state.values)]
        start = tables.start.flat[:, slice(*cells)].long() - segment[0]
        cross += cross_of(*rows, start, *(x.flat[:, slice(*cells)] for x in (tables.centroid, tables.value)))
    torch.testing.assert_close(tables.cross.flatten(0, 1), cross, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(tables.pooled, tables.size.filled.sum(2))


def test_its_error_is_that_of_keys_grouped_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where keys that are alike come one after the other, as in a text."""
    monkeypatch.setattr(adopted, "LEAST_KEYS", 4096)
    query, key, value = nf.synthetic.make("local", 1, 2, 4200, 32)
    length = 4100
    own = [x[:, :, :length] for x in (query, key, value)]
    prepared = prepared_for(*own, method=nf.Cells(cell_size=32))
    errors = []
    for given in (prepared, None):
        store = CellStore(regroup=False, group_from=0)
        store.append(*own[1:])
        store.close(given)
        error = 0.0
        for position in range(length, 4200):
            new, seen = slice(position, position + 1), slice(0, position + 1)
            store.append(key[:, :, new], value[:, :, new])
            found = store.attend(query[:, :, new])
            wanted = nf.attention(query[:, :, new], key[:, :, seen], value[:, :, seen], method=nf.Exact())
            error += float((found - wanted).norm() / wanted.norm()) / 100
        errors.append(error)
    assert 0.0 < errors[0] < 1.2 * errors[1]
    assert errors[0] != errors[1]


@pytest.mark.usefixtures("small")
def test_who_takes_no_cells_over() -> None:
    store, prepared = filled(150)
    plain = copy.deepcopy(store)
    store.regroup = True
    store.close(prepared)
    plain.close()
    assert store.state is not None
    assert plain.state is not None
    assert store.state.bounds == plain.state.bounds
    by_blocks = CellStore(nf.Cells(partition=nf.Blocks()), regroup=False)
    by_blocks.append(*inputs(150)[1:])
    assert not by_blocks.wants_cells(150)
    padded, prepared = filled(150)
    counts = torch.ones(BATCH, 150, dtype=torch.bool)
    counts[0, :3] = False
    padded.mark(counts)
    padded.close(prepared)
    assert padded.state is not None
    assert padded.state.bounds == plain.state.bounds


@pytest.mark.usefixtures("small")
def test_cells_are_taken_over_on_request() -> None:
    store, _ = filled(150)
    assert store.wants_cells(150)
    assert not store.wants_cells(63)
    assert CellStore().regroup
    assert not filled(150, regroup=True)[0].wants_cells(150)


@pytest.mark.long
@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("way", [at_line, at_allocation])
def test_broken_off_anywhere_it_has_not_happened(way: Any) -> None:
    query, key, value = inputs(170)
    template, prepared = filled(150, nf.Cells(probes=3, sinks=5))
    whole, fresh = copy.deepcopy(template), copy.deepcopy(template)
    whole.close(prepared)
    new = slice(150, 151)

    def later(store: CellStore) -> Tensor:
        store.append(key[:, :, new], value[:, :, new])
        return store.attend(query[:, :, new])

    after = later(copy.deepcopy(whole))
    for at in points(way, lambda: fresh.close(prepared), 60):
        store = copy.deepcopy(template)
        break_off(way, at, lambda: store.close(prepared))  # noqa: B023
        assert torch.equal(store.keys, template.keys)  # type: ignore[arg-type]
        if store.closed == 0:
            store.close(prepared)
        torch.testing.assert_close(later(store), after)


# Kernels in Triton, in its interpreter.


def test_kernels_cut_cells_as_torch_does() -> None:
    pytest.importorskip("triton")
    from nearfield.cells.triton.halve import halve as by_kernels

    keys, blob = blobs()
    cell_of = (blob // 2).int().clone()
    cell_of[:, :7] = -1
    found = by_kernels(keys, cell_of, 6)
    assert torch.equal(found, halve(keys, cell_of, 6))
    # Keys without blobs: what lies on the border may fall either way.
    keys = torch.randn(3, 300, 24, generator=seeded(1)) + 3
    cell_of = build_cells(nf.KMeans(), keys, 7).int()
    found, wanted = by_kernels(keys, cell_of, 7), halve(keys, cell_of, 7)
    assert torch.equal(found // 2, cell_of)
    assert float((found != wanted).float().mean()) < 0.01
    cell_of[:] = 3
    keys[:] = keys[:, :1]
    assert bool((by_kernels(keys, cell_of, 7) == 6).all())


@pytest.mark.usefixtures("small")
def test_few_keys_are_grouped_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    prepared = prepared_for(*inputs(150))
    assert known_segments(prepared, sizes(), 150)
    monkeypatch.setattr(adopted, "LEAST_KEYS", 151)
    assert known_segments(prepared, sizes(), 150) == []
