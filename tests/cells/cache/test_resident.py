"""`CellStore(offload=True, resident=...)`: cells used lately are read on the card, and nothing else changes."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from broken_off import Way, at_allocation, at_line, break_off, points
from by_hand import seeded
from torch import Tensor

import nearfield as nf
from nearfield.cells.cache.graph import StepGraph, captured_reads
from nearfield.cells.cache.resident import MOST_SLOTS, PIECE, Pool, Resident
from nearfield.cells.cache.state import CacheState
from nearfield.cells.cache.store import CellStore
from nearfield.kernels import replay

pytest.importorskip("triton")

from nearfield.cells.cache import decode as decode_module
from nearfield.cells.cache.decode import AGE_STEPS, MOST_AGE
from nearfield.cells.triton.resident import find_slots

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCH, HEADS, GROUP, DIM, VALUE_DIM = 2, 2, 3, 16, 24
METHOD = nf.Cells(probes=3, segment=120, cell_size=20, sinks=5, window=8)
LENGTH, LARGE = 280, 10**6
"""keys, in two closed segments and an open end; and more than there are"""


closes = pytest.mark.skipif(DEVICE.type == "cuda", reason="stores that close segments by themselves have other cells on a card")


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of one row are served by the kernels, also where they are interpreted."""
    monkeypatch.setattr("nearfield.kernels.backends.runs_triton", lambda device: True)


def data(length: int, batch: int = 1) -> tuple[Tensor, Tensor]:
    key, value = (torch.randn(batch, HEADS, length, dim, generator=seeded(dim)) for dim in (DIM, VALUE_DIM))
    return key.to(DEVICE), value.to(DEVICE)


def drifting(steps: int, batch: int = 1) -> Iterator[Tensor]:
    """Queries each of which is a little like the one before."""
    generator = seeded(7)
    query = torch.randn(batch, HEADS * GROUP, 1, DIM, generator=generator)
    for _ in range(steps):
        query = 0.9 * query + 0.4 * torch.randn(query.shape, generator=generator)
        yield 2.0 * query.to(DEVICE)


@functools.cache
def template(length: int, method: nf.Cells, batch: int) -> CellStore:
    store = CellStore(method, offload=True, resident=0)
    store.append(*data(length, batch))
    store.close()
    return store


def begun(resident: int | None, length: int = LENGTH, method: nf.Cells = METHOD, batch: int = 1) -> CellStore:
    """All of them have the same cells, which on a card two stores with the same keys may not have."""
    store = copy.deepcopy(template(length, method, batch))
    store.resident = resident
    store.state = the(store).but(resident=None if resident == 0 else Resident(resident))
    return store


def the(store: CellStore) -> CacheState:
    assert store.state is not None
    return store.state


def pool_of(store: CellStore) -> Pool:
    resident = the(store).resident
    assert resident is not None
    assert resident.pool is not None
    return resident.pool


def assert_consistent(store: CellStore) -> None:
    """Whatever the tables claim is true, and nothing is claimed twice."""
    pool, state = pool_of(store), the(store)
    start, size = (x.flat.cpu() for x in (state.tables.start, state.tables.size))
    bases = [x.base.flatten(0, 1) for x in (state.keys, state.values)]  # type: ignore[union-attr]
    slot_of, piece_of, filled = (x.cpu() for x in (pool.slot_of, pool.piece_of, pool.is_filled))
    for entry in range(len(slot_of)):
        rows = {}
        for cell in range(start.shape[1]):
            first, count = int(start[entry, cell]), int(size[entry, cell])
            for i in range(0, count if first < state.keys.offset else 0, PIECE):
                number = first // PIECE + cell + i // PIECE
                assert number not in rows
                rows[number] = slice(first + i, first + min(i + PIECE, count))
        assert max(rows) < slot_of.shape[1]
        taken = []
        for number, said in enumerate(slot_of[entry].tolist()):
            if said == -1:
                continue
            slot = said if said >= 0 else -2 - said
            taken.append(slot)
            assert int(piece_of[entry, slot]) == number
            assert said < 0 or int(filled[entry, slot]) == 1
            if int(filled[entry, slot]):
                own = rows[number]
                for found, base in zip((pool.keys, pool.values), bases, strict=True):
                    begin = slot * PIECE
                    kept = found[entry, begin : begin + own.stop - own.start]
                    assert torch.equal(kept.cpu(), base[entry, own].cpu())
        assert len(set(taken)) == len(taken)
        assert set(taken) == set((piece_of[entry] >= 0).nonzero()[:, 0].tolist())


def steps(stores: list[CellStore], count: int, append: bool = True, batch: int | None = None) -> list[Tensor]:
    """The same steps of all stores: their outputs are those of the first one, bit for bit."""
    batch = stores[0].entries if batch is None else batch
    found = []
    for number, query in enumerate(drifting(count, batch)):
        new = [torch.randn(batch, HEADS, 1, dim, generator=seeded(number)).to(DEVICE) for dim in (DIM, VALUE_DIM)]
        outputs = []
        for store in stores:
            if append:
                store.append(*new)
            outputs.append(store.attend(query))
        assert all(torch.equal(outputs[0], other) for other in outputs[1:])
        found.append(outputs[0])
    return found


@pytest.mark.long
@pytest.mark.parametrize("batch", [1, pytest.param(BATCH, marks=pytest.mark.slow)])
def test_results_are_the_same_bit_for_bit(batch: int) -> None:
    """Budgets smaller than what a step opens, about that, a few steps, and everything."""
    stores = [begun(budget, batch=batch) for budget in (0, 16, 80, LARGE)]
    steps(stores, 7)
    for store in stores[1:]:
        assert_consistent(store)
    shares = [store.found_resident for store in stores]
    assert shares[0] is None
    found = [share for share in shares if share is not None]
    assert found == sorted(found)
    assert found[0] < found[-1] > 0.4


@closes
def test_the_same_as_without_offload() -> None:
    store, plain = begun(100), CellStore(METHOD)
    plain.append(*data(LENGTH))
    plain.close()
    steps([store, plain], 6)
    assert store.found_resident is not None
    assert plain.found_resident is None


@pytest.mark.long
@pytest.mark.parametrize("probes", [1, 6, 40])
def test_few_cells_and_all_of_them(probes: int) -> None:
    method = nf.Cells(probes=probes, segment=120, cell_size=40, sinks=5, window=8)
    stores = [begun(budget, method=method) for budget in (0, 48, LARGE)]
    steps(stores, 5)
    for store in stores[1:]:
        assert_consistent(store)


@pytest.mark.long
def test_cells_that_are_larger_than_what_is_looked_at_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode_module, "PIECES_AT_A_TIME", 1)
    stores = [begun(budget) for budget in (0, 32, LARGE)]
    steps(stores, 5)
    for store in stores[1:]:
        assert_consistent(store)


@pytest.mark.long
def test_narrow_cells() -> None:
    """Many pieces that are not full, and cells without keys."""
    method = nf.Cells(probes=6, segment=64, cell_size=3, sinks=5, window=8)
    stores = [begun(budget, 200, method) for budget in (0, 64, LARGE)]
    steps(stores, 4)
    for store in stores[1:]:
        assert_consistent(store)


@closes
@pytest.mark.long
def test_padding() -> None:
    key, value = data(LENGTH, BATCH)
    counts = torch.ones(BATCH, LENGTH, dtype=torch.bool)
    counts[0, :100] = False
    stores = []
    for budget in (0, 64, LARGE):
        stores.append(CellStore(METHOD, offload=True, resident=budget))
        stores[-1].append(key, value, counts)
        stores[-1].close()
    steps(stores, 5)
    assert_consistent(stores[1])
    assert (stores[2].found_resident or 0.0) > 0.3


def spoilt(store: CellStore) -> None:
    """What the base says of pieces that are on the card is no longer a number."""
    pool, state = pool_of(store), the(store)
    start, size = (x.flat.cpu() for x in (state.tables.start, state.tables.size))
    for entry, row in enumerate(pool.slot_of.cpu()):
        for cell in range(start.shape[1]):
            first, count = int(start[entry, cell]), int(size[entry, cell])
            for i in range(0, count, PIECE):
                said = int(row[first // PIECE + cell + i // PIECE])
                slot = said if said >= 0 else -2 - said
                if said != -1 and int(pool.is_filled[entry, slot]):
                    for buffer in (state.keys, state.values):
                        assert buffer.base is not None
                        buffer.base.flatten(0, 1)[entry, first + i : first + min(i + PIECE, count)] = torch.nan


def test_what_is_on_the_card_is_read_there() -> None:
    """The base may be spoilt where it is not read any more."""
    store = begun(LARGE)
    expected = steps([store], 5, append=False)
    spoilt(store)
    again = steps([store], 5, append=False)
    assert all(map(torch.equal, again, expected))


@pytest.mark.long
def test_what_is_not_on_the_card_is_read_from_the_base() -> None:
    """A pool may hold anything where it says nothing."""
    store = begun(64)
    for at, query in enumerate(drifting(5)):
        expected = store.attend(query)
        if at:
            pool = pool_of(store)
            own = torch.zeros_like(pool.is_filled, dtype=torch.bool)
            for entry, row in enumerate(pool.slot_of.cpu()):
                own[entry, row[row >= 0]] = True
                own[entry, -2 - row[row < -1]] = True
            free = ~(own & (pool.is_filled > 0))
            for x in (pool.keys, pool.values):
                x.view(len(x), -1, PIECE, x.shape[2])[free] = torch.nan
            assert torch.equal(store.attend(query), expected)
    store = begun(LARGE)
    query = next(drifting(1))
    expected = store.attend(query)
    for x in (pool_of(store).keys, pool_of(store).values):
        x.fill_(9.0)
    assert not torch.equal(store.attend(query), expected)  # which shows that it is read
    pool_of(store).slot_of.fill_(-1)
    pool_of(store).piece_of.fill_(-1)
    assert torch.equal(store.attend(query), expected)
    assert torch.equal(store.attend(query), expected)


@pytest.mark.usefixtures("poisoned")
def test_memory_that_nobody_has_written_to() -> None:
    store = begun(64)
    assert all(bool(found.isfinite().all()) for found in steps([store], 4))
    assert_consistent(store)


class Expected:
    """Pieces of one entry by hand: the ones used last, in order."""

    def __init__(self, slots: int) -> None:
        self.slots, self.there = slots, OrderedDict[int, int]()

    def step(self, pieces: list[int], now: int) -> int:
        """How many of these were there."""
        known = [piece for piece in pieces if piece in self.there]
        for piece in known:
            self.there[piece] = now
        free = [piece for piece, used in self.there.items() if used < now]
        free.sort(key=lambda piece: self.there[piece])
        room = self.slots - len(self.there) + len(free)
        new = [piece for piece in pieces if piece not in self.there][:room]
        for piece in free[: max(0, len(self.there) + len(new) - self.slots)]:
            del self.there[piece]
        self.there.update(dict.fromkeys(new, now))
        return len(known)


def seek(pool: dict[str, Tensor], opened: Tensor, start: Tensor, size: Tensor, offset: int, at_a_time: int = 2) -> None:
    """One launch of `find_slots`, after which all pieces that have a slot are there."""
    entries, probes = opened.shape
    slots = pool["piece_of"].shape[1]
    find_slots[(entries,)](
        opened=opened,
        start=start,
        size=size,
        **pool,
        missing=torch.full_like(pool["piece_of"], -99),
        cell_entry=start.stride(0),
        offset=offset,
        probes=probes,
        pieces=pool["slot_of"].shape[1],
        slots=slots,
        PIECE=PIECE,
        MOST_AGE=MOST_AGE,
        STEPS=AGE_STEPS,
        BP=1 << (probes - 1).bit_length(),
        BJ=at_a_time,
        BS=1 << (slots - 1).bit_length(),
        PDL=False,
        num_warps=4,
    )
    pool["is_filled"].fill_(1)


@pytest.mark.parametrize("slots", [1, 5, 12, 40])
def test_the_pieces_used_longest_ago_make_way(slots: int) -> None:
    """Against lists: which pieces are on the card, step by step, where ages differ by one or by thousands of steps."""
    generator, entries, cells, offset = seeded(3), 2, 20, 300
    size = torch.randint(0, 60, (entries, cells), generator=generator)
    start = 3 + size.cumsum(1) - size
    like = torch.empty(0, dtype=torch.int32, device=DEVICE)
    pool = {
        "slot_of": like.new_full((entries, 2 * offset // PIECE + cells + 1), -1),
        "piece_of": like.new_full((entries, slots), -1),
        "used": like.new_zeros((entries, slots)),
        "is_filled": like.new_zeros((entries, slots)),
        "clock": like.new_zeros(entries),
        "counts": like.new_zeros((entries, 2), dtype=torch.int64),
    }
    lists = [Expected(slots) for _ in range(entries)]
    looked, found = [0] * entries, [0] * entries
    for step in range(25):
        opened = torch.stack([torch.randperm(8 + step % 3 * 6, generator=generator)[:3] for _ in range(entries)])
        opened[0, 2] = -1 if step % 4 == 0 else opened[0, 2]
        seek(pool, opened.int().to(DEVICE), start.int().to(DEVICE), size.float().to(DEVICE), offset)
        for entry, own in enumerate(lists):
            pieces = []
            for cell in opened[entry].tolist():
                first, count = int(start[entry, cell]), int(size[entry, cell])
                if cell >= 0 and first < offset:
                    pieces += [first // PIECE + cell + i for i in range(-(-count // PIECE))]
            now = int(pool["clock"][entry])
            before = set(own.there)
            hits = own.step(pieces, now)
            looked[entry], found[entry] = looked[entry] + len(pieces), found[entry] + hits
            there = set((pool["slot_of"][entry] != -1).nonzero()[:, 0].tolist())
            assert set(pool["piece_of"][entry].tolist()) - {-1} == there
            assert len(there) == len(own.there)
            # Which of several as old, or as new, is any of them.
            assert before & set(pieces) <= there
            assert there <= before | set(pieces)
            ages = {piece: int(pool["used"][entry, slot]) for slot, piece in enumerate(pool["piece_of"][entry]) if piece >= 0}
            assert sorted(ages.values()) == sorted(own.there.values())
            own.there = OrderedDict((int(piece), used) for piece, used in ages.items())
        assert pool["counts"].tolist() == [list(both) for both in zip(looked, found, strict=True)]
        if step == 12:
            pool["clock"] += 2000
    assert sum(found) > 0


@pytest.mark.long
def test_kernels_are_launched_from_a_list() -> None:
    replay.forget()
    stores = [begun(budget) for budget in (0, 64, 64)]
    steps(stores, 6)
    tapes = [tape for tape in replay._TAPES.values() if isinstance(tape, replay.Tape)]
    names = {tuple(one.kernel.__name__ for one in tape.launches) for tape in tapes}
    assert names == {
        ("score_cells", "choose_and_read_open_end", *more, "read_cells", "merge_parts") for more in ((), ("find_slots",))
    }
    for store in stores[1:]:
        assert_consistent(store)


# What else is done to a store.
@closes
@pytest.mark.long
def test_a_segment_that_is_closed() -> None:
    """Its keys are on the card for one step more, in which they are not offloaded yet."""
    stores = [begun(budget, 365) for budget in (0, 48, LARGE)]
    assert stores[0].closed == 240
    steps(stores, 7)
    assert stores[0].closed == 360
    for store in stores[1:]:
        assert_consistent(store)
        assert (store.found_resident or 0.0) > 0.0


@closes
@pytest.mark.long
def test_other_keys_in_the_same_places() -> None:
    """After a crop into a closed segment, the same memory and the same segments have other keys."""
    stores = [begun(budget) for budget in (0, LARGE)]
    steps(stores, 3, append=False)
    bounds, base = the(stores[1]).bounds, the(stores[1]).keys.base
    pool = pool_of(stores[1])
    for store in stores:
        store.crop(150)
        store.append(*(-x[:, :, 150:] for x in data(LENGTH)))
        store.close()
    assert the(stores[1]).bounds == bounds
    assert the(stores[1]).keys.base is base
    steps(stores, 3, append=False)
    assert pool_of(stores[1]) is not pool
    assert_consistent(stores[1])


def test_keys_of_the_open_end_taken_back() -> None:
    """What is on the card stays there."""
    stores = [begun(budget) for budget in (0, 100)]
    steps(stores, 3)
    pool = pool_of(stores[1])
    for store in stores:
        store.crop(store.length - 2)
    steps(stores, 3)
    assert pool_of(stores[1]) is pool
    assert_consistent(stores[1])


@closes
@pytest.mark.long
@pytest.mark.parametrize("way", ["select", "repeat", "crop all"])
def test_other_rows_start_anew(way: str) -> None:
    stores = [begun(budget, 200, batch=BATCH) for budget in (0, LARGE)]
    steps(stores, 2)
    pool = pool_of(stores[1])
    for store in stores:
        if way == "select":
            store.select(torch.tensor([1, 0, 1]))
        elif way == "repeat":
            store.repeat(2)
        else:
            store.crop(0)
            store.append(*(-x for x in data(200, BATCH)))
            store.close()
    steps(stores, 3, append=False)
    assert pool_of(stores[1]) is not pool
    assert_consistent(stores[1])


@pytest.mark.parametrize("way", ["copy", "deepcopy", "pickle"])
def test_copies(way: str) -> None:
    """Those that share memory share what is on the card, and those that do not start anew."""
    stores = [begun(budget, 200) for budget in (0, 48)]
    steps(stores, 2)
    make: Any = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda x: pickle.loads(pickle.dumps(x))}[way]
    other = make(stores[1])
    assert (the(other).resident is the(stores[1]).resident) == (way == "copy")
    steps([stores[0], other], 2, append=False)
    steps([*stores, other], 2, append=False)
    assert (pool_of(other) is pool_of(stores[1])) == (way == "copy")
    for store in (stores[1], other):
        assert_consistent(store)


def test_copies_know_nothing_of_what_is_on_the_card() -> None:
    store = begun(48, 200)
    store.attend(next(drifting(1)))
    assert store.nbytes["resident"] > 0
    assert copy.deepcopy(store).nbytes["resident"] == 0


@pytest.mark.long
@pytest.mark.parametrize("way", ["line", "allocation"])
def test_steps_that_are_broken_off(way: str) -> None:
    """Anywhere, twice in a row: what the tables claim is true, and the next steps are right."""
    plain, first = begun(0, 200), begun(48, 200)
    queries = list(drifting(5, 1))
    expected = [plain.attend(query) for query in queries]

    def lines(at: int | None) -> Any:
        return at_line(at, within=("kernels", "cells/cache/decode", "cells/cache/resident"))

    ways: dict[str, Way] = {"line": lines, "allocation": at_allocation}

    def ready(steps: int) -> CellStore:
        replay.forget()
        store = copy.deepcopy(first)
        for query in queries[:steps]:
            store.attend(query)
        return store

    for before in (0, 3):  # No pool yet; and all kernels from a list.
        store = ready(before)
        broken, places = 0, points(ways[way], lambda: store.attend(queries[3]), 4)  # noqa: B023
        for at in places:
            store = ready(before)
            for _ in range(2):
                broken += break_off(ways[way], at, lambda: store.attend(queries[3]))  # noqa: B023
                if the(store).resident.pool is not None:  # type: ignore[union-attr]
                    assert_consistent(store)
            for query, wanted in zip(queries[3:], expected[3:], strict=True):
                assert torch.equal(store.attend(query), wanted)
            assert_consistent(store)
        assert broken >= len(places) // 2


@pytest.mark.skipif(DEVICE.type == "cuda", reason="only the interpreter can be stopped between two kernels")
@pytest.mark.parametrize("listed", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("last", ["score_cells", "choose_and_read_open_end", "find_slots", "read_cells", "merge_parts"])
def test_a_step_that_ends_after_a_kernel(last: str, listed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """None of those after it has run."""
    plain, store = begun(0), begun(64)
    steps([plain, store], 4 if listed else 1, append=False)
    if not listed:
        replay.forget()
    from triton.runtime import interpreter

    grid, run = interpreter.GridExecutor, interpreter.GridExecutor.__call__
    done = []

    def ends(executor: Any, *arguments: Any, **options: Any) -> Any:
        if last in done:
            raise KeyboardInterrupt
        found = run(executor, *arguments, **options)
        done.append(executor.fn.__name__)
        return found

    other = 3 * torch.randn(1, HEADS * GROUP, 1, DIM, generator=seeded(99))
    with monkeypatch.context() as patch:
        patch.setattr(grid, "__call__", ends)
        if last == "merge_parts":
            store.attend(other)
        else:
            with pytest.raises(KeyboardInterrupt):
                store.attend(other)
    assert done[-1] == last
    assert_consistent(store)
    if last == "find_slots":
        pool = pool_of(store)
        assert bool((pool.slot_of < -1).any())
        for x in (pool.keys, pool.values):  # nobody has written there yet
            x.view(len(x), -1, PIECE, x.shape[2])[pool.is_filled == 0] = torch.nan
    assert torch.equal(store.attend(other), plain.attend(other))
    steps([plain, store], 5, append=False)
    assert_consistent(store)


@closes
@pytest.mark.long
def test_a_failed_close_keeps_what_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = [begun(budget) for budget in (0, LARGE)]
    steps(stores, 3)
    pool = pool_of(stores[1])
    new = [torch.randn(1, HEADS, 130, dim, generator=seeded(5)).to(DEVICE) for dim in (DIM, VALUE_DIM)]
    for store in stores:
        store.append(*new)
    assert stores[1].closed == 240

    def fails(*_: Any) -> None:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patch:
        patch.setattr("nearfield.cells.cache.buffers.Buffer.split", fails)
        with pytest.raises(torch.OutOfMemoryError):
            stores[1].close()
    assert pool_of(stores[1]) is pool
    assert_consistent(stores[1])
    steps(stores, 3)
    assert_consistent(stores[1])


# Sizes, and what is said.


def test_how_much_stays() -> None:
    resident = the(begun(None)).resident
    assert resident is not None
    assert resident.slots(262_144, 2_900, 20) == -(-8 * -(-20 * 262_144 // 2_900) // PIECE)
    assert resident.slots(131_072, 2_048, 256) == 131_072 // 8 // PIECE  # no more than an eighth
    resident.keys = 100
    assert resident.slots(262_144, 2_900, 20) == 7
    resident.keys = LARGE
    assert resident.slots(10**7, 2_900, 20) == MOST_SLOTS
    assert resident.slots(100, 5, 2) == 7  # no more than there are keys


def test_what_is_said_about_it() -> None:
    store = begun(64)
    assert store.nbytes["resident"] == 0
    assert store.found_resident is None
    query = next(drifting(1))
    store.attend(query)
    assert store.found_resident == 0.0
    pool = pool_of(store)
    assert pool.keys.shape == (HEADS, 64, DIM)
    assert store.nbytes["resident"] == sum(x.nbytes for x in pool)
    store = begun(LARGE)
    store.attend(query)
    store.attend(query)
    assert store.found_resident == 0.5
    assert "resident" not in CellStore(METHOD).nbytes
    assert begun(0).nbytes["resident"] == 0


def test_what_cannot_be() -> None:
    for wrong in (-1, 1.5, True):
        with pytest.raises(ValueError, match="resident must be an integer of at least 0 or None"):
            CellStore(METHOD, offload=True, resident=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="resident=16 is for offload=True"):
        CellStore(METHOD, resident=16)


def test_without_kernels_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nearfield.kernels.backends.runs_triton", lambda device: False)
    store = begun(64)
    store.reserve(10)
    steps([store, begun(0)], 2)
    assert store.nbytes["resident"] == 0
    assert store.found_resident is None


def test_a_graph_knows_its_pool() -> None:
    """It is made before a graph is captured, and a graph for another one is not valid."""
    store = begun(64)
    without = captured_reads(the(store))
    store.reserve(10)
    known = captured_reads(the(store))
    pool = pool_of(store)
    assert known != without
    steps([store], 2, append=False)
    assert pool_of(store) is pool
    assert captured_reads(the(store)) == known
    store.state = the(store).but(resident=the(store)._none_resident())
    store.reserve(10)
    assert captured_reads(the(store)) != known


def test_caches_of_models() -> None:
    pytest.importorskip("transformers")
    from nearfield import hf

    cache = hf.CellCache(METHOD, offload=True, resident=48)
    layer = cache._next_layer()
    assert layer.store.resident == 48  # type: ignore[union-attr]
    layer.reset()
    assert layer.store.resident == 48  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="is for offload=True"):
        hf.CellCache(METHOD, resident=48)
    with pytest.raises(ValueError, match="is for offload=True"):
        hf.CellCache(nf.TopK(4), resident=48)


# On a card.


def on_a_card(resident: int | None) -> tuple[CellStore, tuple[Tensor, Tensor, Tensor]]:
    generator = seeded(0)
    key, value = torch.randn(2, 2, 2, 3000, 64, generator=generator).cuda().bfloat16()
    query = 2 * torch.randn(2, 8, 3000, 64, generator=generator).cuda().bfloat16()
    store = CellStore(nf.Cells(segment=512, cell_size=40, probes=6), offload=True, resident=resident)
    store.append(key[:, :, :2000], value[:, :, :2000])
    store.close()
    return store, (key, value, query)


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [64, None, LARGE])
def test_steps_on_a_card(resident: int | None) -> None:
    """The same store with and without: cells of two stores may differ, since sums are taken in any order."""
    store, (key, value, query) = on_a_card(resident)
    for at in range(2000, 2700):
        store.append(key[:, :, at : at + 1], value[:, :, at : at + 1])
        row = query[:, :, at - at % 3 : at - at % 3 + 1]  # each three times
        found = store.attend(row)
        plain = copy.copy(store)
        plain.state = the(plain).but(resident=None)
        assert torch.equal(found, plain.attend(row))
        if at % 100 == 0:
            assert_consistent(store)
    assert (store.found_resident or 0.0) > (0.0 if resident == 64 else 0.4)


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [64, None, LARGE])
def test_graphs_on_a_card(resident: int | None) -> None:
    store, data = on_a_card(resident)
    store.attend(data[2][:, :, 1999:2000])
    graph = StepGraph(store, *(x[:, :, 2000:2001].clone() for x in data))
    while store.length < 2700:
        at = store.length
        for place, x in zip(graph.inputs[:2], data[:2], strict=True):
            place.copy_(x[:, :, at : at + 1])
        graph.inputs[2].copy_(data[2][:, :, at - at % 3 : at - at % 3 + 1])
        found = graph().clone()
        plain = copy.copy(store)
        plain.state = the(plain).but(resident=None)
        # A graph has programs for more keys, so it adds up other parts.
        torch.testing.assert_close(found, plain.attend(graph.inputs[2]), rtol=2**-7, atol=1e-4)
        if at % 100 == 0:
            assert_consistent(store)
            store.crop(store.length - 3)
            store.attend(data[2][:, :, store.length - 1 : store.length])
            for now in range(store.length, at + 1):  # so that it ends
                store.append(*(x[:, :, now : now + 1] for x in data[:2]))
    assert (store.found_resident or 0.0) > (0.0 if resident == 64 else 0.4)
