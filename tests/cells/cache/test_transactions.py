"""Stores of keys are transactions: an operation that is broken off anywhere has not happened, or has happened altogether."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from broken_off import ERRORS, Way, at_allocation, at_instruction, at_line, at_line_of_stores, break_off, points
from by_hand import seeded
from torch import Tensor

import nearfield as nf
from nearfield.cells.cache import state
from nearfield.cells.cache.buffers import Buffer
from nearfield.cells.cache.store import CellStore
from nearfield.kernels import replay
from nearfield.knn.store import IndexStore

Store = CellStore | IndexStore
BATCH, HEADS, GROUP, LENGTH, DIM = 2, 1, 2, 60, 4
PLACE = {"device": "cpu"}
CELLS = nf.Cells(segment=12, cell_size=4, probes=2, sinks=3, window=4)
MAKE: dict[str, Callable[[], Store]] = {
    "cells": lambda: CellStore(CELLS),
    "offloaded": lambda: CellStore(CELLS, offload=True),
    "guarded": lambda: CellStore(CELLS, eps=0.05),
    "topk": lambda: IndexStore(nf.TopK(4, index=nf.KMeansIndex())),
}


def data() -> tuple[Tensor, Tensor, Tensor]:
    key, value = torch.randn(2, BATCH, HEADS, LENGTH, DIM, generator=seeded(0)).to(PLACE["device"])
    return key, value, 2 * torch.randn(BATCH, HEADS * GROUP, LENGTH, DIM, generator=seeded(1)).to(PLACE["device"])


def some(entries: Tensor, rows: slice) -> tuple[Tensor, Tensor, Tensor]:
    key, value, query = (x[entries][:, :, rows] for x in data())
    return key, value, query


EVERY = torch.arange(BATCH)
PADDING = torch.ones(BATCH, LENGTH, dtype=torch.bool)
PADDING[0, :7] = False


def begun(kind: str, length: int, padded: bool, closed: bool) -> Store:
    store = MAKE[kind]()
    key, value, _ = some(EVERY, slice(0, length))
    store.append(key, value, PADDING[:, :length].to(PLACE["device"]) if padded else None)
    if closed:
        store.close()
    return store


def append(store: Store) -> None:
    key, value, _ = some(EVERY, slice(store.length, store.length + 9))
    store.append(key, value)


def append_padding(store: Store) -> None:
    key, value, _ = some(EVERY, slice(store.length, store.length + 9))
    counts = torch.ones(BATCH, 9, dtype=torch.bool)
    counts[1, 3:5] = False
    store.append(key, value, counts.to(PLACE["device"]))


def attend(rows: int) -> Callable[[Store], Tensor]:
    return lambda store: store.attend(some(EVERY, slice(store.length - rows, store.length))[2])


OPERATIONS: dict[str, tuple[Callable[[Store], Any], Callable[[str], Store]]] = {
    "append": (append, lambda kind: begun(kind, 30, False, True)),
    "append-first": (append, lambda kind: MAKE[kind]()),
    "append-padding": (append_padding, lambda kind: begun(kind, 30, True, True)),
    "attend": (attend(1), lambda kind: begun(kind, 30, False, False)),
    "attend-rows": (attend(20), lambda kind: begun(kind, 34, False, False)),
    "attend-padding": (attend(1), lambda kind: begun(kind, 30, True, False)),
    "close": (lambda store: store.close(), lambda kind: begun(kind, 45, False, False)),
    "crop": (lambda store: store.crop(21), lambda kind: begun(kind, 45, False, True)),
    "crop-padding": (lambda store: store.crop(31), lambda kind: begun(kind, 45, True, True)),
    "mark": (lambda store: store.mark(PADDING[:, :30].to(PLACE["device"])), lambda kind: begun(kind, 30, False, False)),
    "repeat": (lambda store: store.repeat(2), lambda kind: begun(kind, 40, True, True)),
    "reserve": (lambda store: store.reserve(50), lambda kind: begun(kind, 40, False, True)),
    "select": (lambda store: store.select(torch.tensor([1, 0])), lambda kind: begun(kind, 40, False, True)),
}


def held(store: Store) -> list[Tensor]:
    """What somebody can see of a store."""
    inside: Any = store.state if isinstance(store, CellStore) else store._state
    if inside is None:
        return []
    found = [torch.tensor([store.length, store.closed, inside.settled]), store.keys, store.values]
    return [*found, torch.ones(1) if inside.key_padding is None else inside.key_padding]  # type: ignore[list-item]


def later(store: Store) -> list[Tensor]:
    """What comes out of it later: a row, then rows over several segments, and after a few keys were taken back."""
    entries = torch.arange(len(store.keys)) % BATCH  # type: ignore[arg-type]
    found = []
    for new in (1, 14):
        key, value, query = some(entries, slice(store.length, store.length + new))
        store.append(key, value)
        found.append(store.attend(query))
    store.crop(store.length - 3)
    key, value, query = some(entries, slice(0, 1))
    store.append(key, value)
    return [*found, store.attend(query), *held(store)]


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    """But for rounding: a table that was copied may lie in memory in another way."""
    if [x.shape for x in found] != [x.shape for x in expected]:
        return False
    return all(torch.allclose(x, y, rtol=1e-5, atol=1e-6) for x, y in zip(found, expected, strict=True))


def assert_transaction(kind: str, name: str, way: Way, most: int | None) -> None:
    operation, make = OPERATIONS[name]
    template = make(kind)
    before, whole = held(template), copy.deepcopy(template)
    output = operation(whole)
    after, wanted = held(whole), later(whole)
    fresh = copy.deepcopy(template)
    replay.forget()
    places = points(way, lambda: operation(fresh), most)
    broken = 0
    for at in places:
        store = copy.deepcopy(template)
        replay.forget()  # what was recorded is launched from a list, with fewer points to break off at
        broken += break_off(way, at, lambda: operation(store))  # noqa: B023
        found = held(store)
        happened = same(found, after)
        assert happened or same(found, before), f"{at}: neither before nor after"
        if not happened:
            again = operation(store)
            assert output is None or same([again], [output]), at
        assert same(later(store), wanted), at
    assert broken >= 0.9 * len(places)  # Python itself ignores what is raised in callbacks of weak references


WAYS: dict[str, Way] = {"line": at_line, "allocation": at_allocation, "instruction": at_instruction}


@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", MAKE)
def test_an_operation_that_is_broken_off(kind: str, name: str) -> None:
    assert_transaction(kind, name, at_line_of_stores, most=4)


@pytest.mark.parametrize("name", OPERATIONS)
def test_memory_that_runs_out(name: str) -> None:
    assert_transaction("cells", name, at_allocation, most=3)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", ["cells", "offloaded"])
def test_operations_that_are_broken_off_on_a_gpu(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PLACE, "device", "cuda")
    for way in (at_line_of_stores, at_allocation):
        assert_transaction(kind, name, way, most=8)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("way", WAYS)
def test_an_operation_that_is_broken_off_anywhere(way: str, kind: str, name: str) -> None:
    assert_transaction(kind, name, WAYS[way], most=500 if way == "instruction" else None)


class Fails:
    """A function that fails once, in its call number `at`, before it has done anything or after that."""

    def __init__(self, function: Any, at: int, late: bool = False) -> None:
        self.function, self.left, self.late = function, at, late

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        self.left -= 1
        if self.left == -1 and not self.late:
            raise torch.OutOfMemoryError("out of memory")
        found = self.function(*arguments, **options)
        if self.left == -1:
            raise KeyboardInterrupt
        return found

    def __get__(self, instance: Any, owner: Any) -> Any:
        return lambda *arguments, **options: self(instance, *arguments, **options)


FAILURES: dict[str, tuple[str, Any, str, int]] = {
    "a segment that cannot be grouped": ("attend", state, "close_segment", 0),
    "the second of two segments": ("attend-rows", state, "close_segment", 1),
    "keys sorted, values not": ("attend", torch, "gather", 1),
    "keys sorted back, values not": ("crop", torch, "gather", 1),
    "keys of padding zero, values not": ("mark", Tensor, "masked_fill_", 1),
    "keys appended, values not": ("append", Buffer, "append", 1),
    "keys selected, values not": ("select", Buffer, "select", 1),
    "half of the tables selected": ("select", Buffer, "select", 5),
    "some tables with a new segment": ("close", Buffer, "append", 3),
}
"""An operation, and which call of which function fails in it."""


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("failure", FAILURES)
def test_a_part_that_fails_once(failure: str, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    name, owner, attribute, at = FAILURES[failure]
    operation, make = OPERATIONS[name]
    store = make("cells")
    before, whole = held(store), copy.deepcopy(store)
    output = operation(whole)
    with monkeypatch.context() as patch:
        fails = Fails(getattr(owner, attribute), at, late)
        patch.setattr(owner, attribute, fails)
        with pytest.raises(ERRORS):
            operation(store)
        assert fails.left == -1
    assert same(held(store), before)
    again = operation(store)
    assert output is None or torch.equal(again, output)
    assert same(later(store), later(whole))


def test_a_copy_of_a_store_that_was_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    operation, make = OPERATIONS["attend"]
    store = make("cells")
    before = held(store)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "gather", Fails(torch.gather, 1))
        with pytest.raises(torch.OutOfMemoryError):
            operation(store)
    assert store.length == 30  # looking at the length puts nothing back yet
    assert store._state.undo  # type: ignore[union-attr]
    other = copy.deepcopy(store)
    assert same(held(other), before)
    assert same(held(store), before)


def test_rows_are_put_back_in_spite_of_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    operation, make = OPERATIONS["attend-rows"]
    store = make("cells")
    before = held(store)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "gather", Fails(torch.gather, 3))
        with pytest.raises(torch.OutOfMemoryError):
            operation(store)
    for at in range(4):  # keys and values of two segments
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "copy_", Fails(Tensor.copy_, at))
            with pytest.raises(torch.OutOfMemoryError):
                operation(store)
    assert same(held(store), before)


def test_inference_mode_may_end_between_two_steps() -> None:
    operation, make = OPERATIONS["attend"]
    expected = operation(make("cells"))
    with torch.inference_mode():
        store = make("cells")
    assert torch.equal(operation(store), expected)
    append(store)
    with torch.inference_mode():
        append(store)
    assert store.length == 48
