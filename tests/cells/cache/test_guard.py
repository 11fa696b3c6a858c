"""`CellStore(eps=...)`: a step is looked at now and then, and more cells are opened until its error is small enough."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import nearfield as nf
from nearfield.cells.cache.guard import EVERY
from nearfield.cells.cache.store import CellStore

FEW = nf.Cells(segment=64, cell_size=4, probes=2, sinks=4, window=4)
LENGTH = 600


def inputs(steps: int = 80, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Without structure: cells have a large error, unless many are opened."""
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(1, 4, LENGTH + steps, 16, generator=generator)
    key, value = torch.randn(2, 1, 2, LENGTH + steps, 16, generator=generator)
    return query, key, value


def set_guard(store: CellStore, **changes: Any) -> None:
    assert store.state is not None
    assert store.guard is not None
    store.state = store.state.but(guard=store.guard._replace(**changes))


def filled(data: tuple[Tensor, ...], **options: Any) -> CellStore:
    store = CellStore(FEW, **options)
    store.append(data[1][:, :, :LENGTH], data[2][:, :, :LENGTH])
    store.close()
    return store


def step(store: CellStore, data: tuple[Tensor, ...]) -> tuple[Tensor, float]:
    """The output of the next step, and its pooled error."""
    query, key, value = data
    new = slice(store.length, store.length + 1)
    store.append(key[:, :, new], value[:, :, new])
    found = store.attend(query[:, :, new])
    seen = key[:, :, : new.stop], value[:, :, : new.stop]
    exact = F.scaled_dot_product_attention(query[:, :, new], *seen, enable_gqa=True)
    return found, float((found - exact).norm() / exact.norm())


def test_a_step_that_is_looked_at_is_within_eps() -> None:
    data = inputs()
    unguarded, store = filled(data), filled(data, eps=0.05)
    assert step(unguarded, data)[1] > 0.1
    _, error = step(store, data)
    guard = store.guard
    assert guard is not None
    assert guard.error == pytest.approx(error, rel=1e-3)
    assert error <= 0.05
    assert guard.factor > 1
    assert store.probes == min(store.cells, 2 * guard.factor)
    later = [step(store, data)[1] for _ in range(70)]
    assert guard.looks == 1
    assert store.guard is not None
    assert store.guard.looks == 3
    assert later[EVERY - 1] <= 0.05
    assert later[2 * EVERY - 1] <= 0.05
    # In between nothing is promised, but what is opened stays opened.
    assert sum(later) / len(later) < 0.08


def test_no_more_cells_than_it_takes() -> None:
    """Half as many would have been too few."""
    data = inputs()
    store = filled(data, eps=0.05)
    step(store, data)
    assert store.guard is not None
    half = filled(data, eps=0.05)
    set_guard(half, factor=store.guard.factor // 2, next_look=10**9)
    assert step(half, data)[1] > 0.05


def test_where_the_error_is_small_nothing_is_opened_and_what_was_is_closed_again() -> None:
    query, key, value = inputs()
    key[:] = key[:, :, :1]  # all alike: cells say all there is to say
    data = query, key, value
    store = filled(data, eps=0.05)
    step(store, data)
    assert store.guard is not None
    assert store.guard.factor == 1
    set_guard(store, factor=8, next_look=0)
    for factor in (4, 2, 1, 1):
        step(store, data)
        assert store.guard.factor == factor
        set_guard(store, next_look=0)


def test_all_cells_opened_are_exact_however_small_eps_is(caplog: pytest.LogCaptureFixture) -> None:
    data = inputs()
    store = filled(data, eps=1e-9)
    with caplog.at_level(logging.WARNING, "nearfield"):
        _, error = step(store, data)
    assert error < 1e-5
    assert store.probes == store.cells
    assert "reads 100% of its 601 keys because of eps=1e-09, and is off by" in caplog.text
    caplog.clear()
    for _ in range(EVERY + 1):
        step(store, data)
    assert not caplog.text, "said once"


def test_an_error_that_is_no_number_opens_everything() -> None:
    query, key, value = inputs()
    value[:, :, 100] = torch.nan
    store = filled((query, key, value), eps=0.05)
    step(store, (query, key, value))
    assert store.probes == store.cells


def test_the_step_that_closes_the_first_segment_looks() -> None:
    query, key, value = inputs()
    store = CellStore(FEW, eps=0.05)
    store.append(key[:, :, :60], value[:, :, :60])
    for _ in range(15):
        is_due, looks = store.is_due(1), store.guard and store.guard.looks
        step(store, (query, key, value))
        assert store.guard is not None
        assert (store.guard.looks == looks + 1) == is_due  # type: ignore[operator]
    assert store.closed == 64
    assert store.guard.looks == 1
    captured = store.unguarded()
    captured.crop(74)
    assert not store.unguarded().is_due(1)
    assert store.guard.next_look < 200
    store.look_next()
    assert store.is_due(1)


def test_without_cells_nobody_looks() -> None:
    data = inputs()
    store = CellStore(eps=0.05)
    store.append(data[1][:, :, :LENGTH], data[2][:, :, :LENGTH])
    step(store, data)
    assert store.guard is not None
    assert store.guard.looks == 0
    assert not store.is_due(1)


def test_copies_crops_and_audits() -> None:
    data = inputs()
    store = filled(data, eps=0.05, audit=True)
    twin = copy.copy(store)
    step(store, data)
    assert twin.guard is not None
    assert twin.guard.looks == 0
    assert store.errors[-1].pooled <= 0.05, "the audit is of what was served"
    assert store.guard is not None
    assert store.guard.next_look == LENGTH + 1 + EVERY
    assert not store.is_due(1)
    store.crop(590)
    assert store.is_due(1)


def test_a_failed_look_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    data = inputs()
    store = filled(data, eps=0.05)
    query, key, value = data
    store.append(key[:, :, LENGTH : LENGTH + 1], value[:, :, LENGTH : LENGTH + 1])
    before = store.guard
    calls = []

    def fails(*given: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*given, **options)

    real = store._attend_rows
    monkeypatch.setattr(store, "_attend_rows", fails)
    with pytest.raises(KeyboardInterrupt):
        store.attend(query[:, :, LENGTH : LENGTH + 1])
    assert store.guard == before
    monkeypatch.undo()
    found = store.attend(query[:, :, LENGTH : LENGTH + 1])
    expected = filled(data, eps=0.05)
    assert torch.equal(found, step(expected, data)[0])


@pytest.mark.parametrize("eps", [0.0, 1.0, -1, True, "much", float("nan")])
def test_bad_eps(eps: Any) -> None:
    with pytest.raises(ValueError, match="eps must be a number between 0 and 1"):
        CellStore(eps=eps)
