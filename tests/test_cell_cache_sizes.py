"""The sizes of a store: segments and cells that grow as the square root of the number of keys, unless they are given."""

from __future__ import annotations

import math

import pytest
import torch

import nearfield
from nearfield.cache import CellStore
from nearfield.cache import sizes as module
from nearfield.cache.sizes import StoreSizes, default_probes

DEFAULT = StoreSizes.of(nearfield.Cells())
GIVEN = StoreSizes.of(nearfield.Cells(segment=24, cell_size=5, window=30))


@pytest.mark.parametrize("sizes", [DEFAULT, GIVEN])
def test_segments_follow_each_other(sizes: StoreSizes) -> None:
    assert sizes.start(0) == 0
    for segment in range(300):
        assert sizes.length(segment) > 0
        assert sizes.complete(sizes.start(segment)) == segment
        assert sizes.complete(sizes.start(segment + 1) - 1) == segment
        # The window is not rounded: a query sees a segment through cells as soon as so many keys have come after it.
        assert sizes.closed_before(sizes.start(segment) + sizes.window) == segment
        assert sizes.closed_before(sizes.start(segment + 1) + sizes.window - 1) == segment
        assert sizes.most_open(segment) >= sizes.length(segment) + sizes.window


def test_what_is_given_is_constant() -> None:
    assert [GIVEN.start(segment) for segment in range(4)] == [0, 24, 48, 72]
    assert {GIVEN.cells(segment) for segment in range(1000)} == {5}
    assert GIVEN.cells_before(7) == 35
    assert GIVEN.most_open(3) == 54


def test_growth() -> None:
    assert [DEFAULT.start(segment) for segment in (1, 8, 9, 56, 173)] == [1024, 8192, 9248, 131072, 1048352]
    assert all(DEFAULT.cells(segment) == 64 for segment in range(8))
    for segment in range(8, 400):
        keys = DEFAULT.start(segment)
        assert DEFAULT.cells_before(segment) < 8 * math.sqrt(2 * keys)
        assert DEFAULT.length(segment) < 12 * math.sqrt(keys)
    assert len({DEFAULT.most_open(segment) for segment in range(173)}) <= 4
    only_cells = StoreSizes.of(nearfield.Cells(segment=1024))
    assert [only_cells.cells(segment) for segment in (0, 7, 31, 127, 1023, 10**5)] == [64, 64, 32, 16, 6, 1]


def test_probes() -> None:
    assert default_probes(0, 0) == 20
    assert default_probes(7168, 448) == 20
    assert default_probes(131072, 3456) == round(3.5 * math.sqrt(131072) * 3456 / 131072) == 33


def test_a_store_that_grows_attends_and_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, size in {"SEGMENT": 16, "CONSTANT": 2, "CELL_SIZE": 4}.items():
        monkeypatch.setattr(module, name, size)
    generator = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 500, 8, generator=generator, dtype=torch.float64)
    method = nearfield.Cells(probes=2, sinks=5, window=3)
    store, other = CellStore(method), CellStore(method)
    store.append(key, value)
    store.close()
    sizes = store.settings
    assert [sizes.length(segment) for segment in range(5)] == [16, 16, 18, 22, 26]
    assert store.cells == sizes.cells_before(sizes.closed_before(500)) < 500 / 5
    store.crop(200)
    assert torch.equal(store.keys, key[:, :, :200])  # type: ignore[arg-type]
    other.append(key[:, :, :200], value[:, :, :200])
    outputs = []
    for one in (store, other):
        one.append(key[:, :, 200:], value[:, :, 200:])
        outputs.append(one.attend(query[:, :, 200:]))
    assert torch.allclose(*outputs, rtol=1e-9)
