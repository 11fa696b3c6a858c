"""Recorded launches do for other tensors what the call itself would do; what cannot be replayed runs as it is written."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from by_hand import seeded
from hypothesis import given as drawn
from hypothesis import strategies as st
from torch import Tensor

from nearfield import _compat

pytest.importorskip("triton")

import triton.language as tl

from nearfield.kernels import launch, replay
from nearfield.kernels.launch import Kernel
from nearfield.kernels.replay import ALIGNMENT, Buffer, Tape, form, placed, replayed
from nearfield.kernels.tensors import cast_, fill_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = 24

Run = Callable[..., Sequence[Tensor]]


@Kernel
def _sum(x, y, into, count, B: tl.constexpr):
    lane = tl.arange(0, B)
    there = lane < count
    tl.store(into + lane, tl.load(x + lane, mask=there) + 2 * tl.load(y + lane, mask=there), mask=there)


def add(x: Tensor, y: Tensor, into: Tensor | None = None) -> Tensor:
    """x + 2 y."""
    into = torch.empty(x.shape, device=x.device, dtype=x.dtype) if into is None else into
    _sum[(1,)](x=x, y=y, into=into, count=x.numel(), B=64, num_warps=1)
    return into


def pair(seed: int, size: int = SIZE) -> tuple[Tensor, Tensor]:
    """Small integers: sums of them are exact."""
    x, y = torch.randint(-99, 99, (2, size), generator=seeded(seed)).float().to(DEVICE).unbind(0)
    return x.clone(), y.clone()


def call(run: Run, given: Sequence[Tensor], key: Any = "key") -> Sequence[Tensor]:
    return replayed(key, given, lambda: run(*given))


def tape_of(key: Any = "key") -> Tape:
    tape = replay._TAPES[key]
    assert isinstance(tape, Tape), tape
    return tape


def assert_replayed(run: Run, expected: Run, times: int = 5, make: Callable[[int], Sequence[Tensor]] = pair) -> Tape:
    """Called for real twice, and always right."""
    made = []
    for seed in range(times):
        given = make(seed)
        found = call(lambda *x: made.append(1) or run(*x), given)
        for mine, true in zip(found, expected(*given), strict=True):
            assert torch.equal(mine, true)
            assert (mine.dtype, mine.stride()) == (true.dtype, true.stride())
    assert len(made) == 2
    return tape_of()


def test_the_third_call_is_a_list_of_launches() -> None:
    tape = assert_replayed(lambda x, y: [add(x, y)], lambda x, y: [x + 2 * y])
    assert len(tape.launches) == 1
    assert tape.bytes == 0


def test_results_are_new_memory() -> None:
    given = pair(0)
    found = [call(lambda x, y: [add(x, y)], given)[0] for _ in range(5)]
    assert len({x.data_ptr() for x in found}) == 5
    assert len({x.data_ptr() for x in (*given, *found)}) == 7


def test_buffers_share_memory_when_their_time_is_over() -> None:
    """A chain of four: each but the last is read by the next launch only."""

    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        first = add(x, y)
        second = add(first, y)
        third = add(second, first)
        fourth = add(third, x)
        return [add(fourth, y)]

    def expected(x: Tensor, y: Tensor) -> list[Tensor]:
        first = x + 2 * y
        second = first + 2 * y
        return [second + 2 * first + 2 * x + 2 * y]

    tape = assert_replayed(run, expected)
    assert tape.bytes == 2 * ALIGNMENT + 4 * SIZE


def test_views_of_inputs_buffers_and_results() -> None:
    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        both = torch.empty(2, SIZE // 2, device=DEVICE)
        add(x[: SIZE // 2], y.view(2, -1)[1], both[1])
        add(x[SIZE // 2 :], y[: SIZE // 2], both[0])
        result = torch.empty(2, SIZE // 2, device=DEVICE)
        for row in range(2):
            add(both[row], both[1 - row], result[row])
        return [result]

    def expected(x: Tensor, y: Tensor) -> list[Tensor]:
        (x0, x1), (y0, y1) = x.view(2, -1), y.view(2, -1)
        both = torch.stack([x1 + 2 * y0, x0 + 2 * y1])
        return [both + 2 * both.flip(0)]

    assert_replayed(run, expected)


def test_inputs_that_are_parts_of_one_tensor() -> None:
    """Recorded with parts of one tensor, then called with others: each pointer belongs to one of the two."""

    def make(seed: int) -> Sequence[Tensor]:
        if seed == 2:
            return pair(seed, 32)
        together = torch.stack([*pair(seed, 32), pair(seed + 10, 32)[0]])
        return (together[0], together[0].view(32)) if seed == 1 else (together[2], together[1])

    assert_replayed(lambda x, y: [add(x[4:], y[4:])], lambda x, y: [x[4:] + 2 * y[4:]], make=make)


def test_a_tensor_given_twice_may_be_two_the_next_time() -> None:
    for seed in range(4):
        x, y = pair(seed)
        y = y if seed > 1 else x
        assert torch.equal(call(lambda x, y: [add(x, y)], (x, y))[0], x + 2 * y)
    assert "given twice" in str(replay._TAPES["key"])


def test_inputs_begin_anywhere_in_their_memory() -> None:
    def make(seed: int) -> Sequence[Tensor]:
        return [x[4 * seed : 4 * seed + SIZE] for x in pair(seed, 64)]

    assert_replayed(lambda x, y: [add(x, y)], lambda x, y: [x + 2 * y], make=make)


def test_tables_stay_where_they_are() -> None:
    """Two of them at the same address, of different forms."""
    table = torch.arange(float(SIZE), device=DEVICE)

    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        doubled = add(x, table[: SIZE // 2].view(2, -1).expand(2, -1))
        return [add(doubled, table), add(y, table.view(torch.int32).view(torch.float32))]

    def expected(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x + 4 * table, y + 2 * table]

    assert_replayed(run, expected)


def test_memory_in_another_dtype_and_of_odd_sizes() -> None:
    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        odd = torch.empty(7, dtype=torch.int16, device=DEVICE)
        fill_(odd, 3)
        bits = torch.empty(SIZE, dtype=torch.int32, device=DEVICE)
        cast_(bits.view(torch.float32), x)
        again = torch.empty(7, device=DEVICE)
        cast_(again, odd)
        result = torch.empty(SIZE, dtype=torch.int32, device=DEVICE)
        cast_(result, bits)
        bytewise = torch.empty(SIZE, dtype=torch.int32, device=DEVICE)
        cast_(bytewise.view(torch.float32), y)
        return [result, add(again, again), bytewise]

    def expected(x: Tensor, y: Tensor) -> list[Tensor]:
        return [x.view(torch.int32), torch.full((7,), 9.0, device=DEVICE), y.view(torch.int32)]

    assert_replayed(run, expected)


def test_memory_that_no_launch_uses() -> None:
    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        torch.empty(1 << 20, device=DEVICE)
        return [add(x, y), torch.empty(3, 5, device=DEVICE).new_empty((2, 7))]

    for seed in range(4):
        given = pair(seed)
        found = call(run, given)
        assert torch.equal(found[0], given[0] + 2 * given[1])
        assert found[1].shape == (2, 7)
    assert tape_of().bytes == 0


def test_tensors_without_numbers() -> None:
    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        nothing = torch.empty(0, device=DEVICE)
        _sum[(1,)](x=x[SIZE:], y=nothing, into=nothing, count=0, B=64, num_warps=1)
        return [add(x, y)]

    tape = assert_replayed(run, lambda x, y: [x + 2 * y])
    assert all(x.untyped_storage().nbytes() == 0 for x in tape._constants)


outside: list[Tensor] = []

OBSTACLES: dict[str, tuple[str, Run, Run]] = {
    "operation": ("aten.mul.Tensor", lambda x, y: [add(x * 3, y)], lambda x, y: [3 * x + 2 * y]),
    "copy": (
        "clone",
        lambda x, y: [add(x.view(2, -1).T.contiguous().view(-1), y)],
        lambda x, y: [x.view(2, -1).T.flatten() + 2 * y],
    ),
    "zeros": ("aten.zeros.default", lambda x, y: [add(x, y, torch.zeros(SIZE, device=DEVICE))], lambda x, y: [x + 2 * y]),
    "in place": ("aten.add_.Tensor", lambda x, y: [add(x, y).add_(x)], lambda x, y: [2 * x + 2 * y]),
    "question": (
        "_local_scalar_dense",
        lambda x, y: [add(x, y if float(x[0]) > 0 else x)],
        lambda x, y: [x + 2 * (y if x[0] > 0 else x)],
    ),
    "list": ("_foreach_add_", lambda x, y: [plus_one(add(x, y))], lambda x, y: [x + 2 * y + 1]),
    "from host": ("lift_fresh", lambda x, y: [add(x, y), late_table(x)], lambda x, y: [x + 2 * y, x + 4 * torch.ones_like(x)]),
    "result that is a view": ("not memory of its own", lambda x, y: [add(x, y)[1:]], lambda x, y: [(x + 2 * y)[1:]]),
    "result that is an input": ("not memory of its own", lambda x, y: [add(x, y), y], lambda x, y: [x + 2 * y, y]),
    "result in another dtype": (
        "not memory of its own",
        lambda x, y: [add(x, y).view(torch.int32)],
        lambda x, y: [(x + 2 * y).view(torch.int32)],
    ),
    "the same result twice": ("not memory of its own", lambda x, y: 2 * [add(x, y)], lambda x, y: 2 * [x + 2 * y]),
    "memory of an input": ("lies in its memory", lambda x, y: [add(outside[-1], y)], lambda x, y: [x + 2 * y]),
}


def plus_one(x: Tensor) -> Tensor:
    torch._foreach_add_([x], 1.0)
    return x


def late_table(x: Tensor) -> Tensor:
    """Its memory may be where a buffer was."""
    del_me = add(x, x)
    del del_me
    return add(x, torch.tensor([2.0] * SIZE, device=DEVICE))


@pytest.mark.parametrize("name", OBSTACLES)
def test_what_cannot_be_replayed_is_named_and_runs_every_time(name: str) -> None:
    reason, run, expected = OBSTACLES[name]
    made: list[int] = []
    for seed in range(4):
        given = pair(seed)
        outside[:] = [given[0][:]]
        found = call(lambda *x: made.append(1) or run(*x), given)
        for mine, true in zip(found, expected(*given), strict=True):
            assert torch.equal(mine, true)
    assert len(made) == 4
    assert reason in str(replay._TAPES["key"])


@pytest.mark.parametrize("operation", [lambda x: x.T.contiguous().T, lambda x: x.T.reshape(-1), lambda x: x.to(torch.float64)])
@pytest.mark.parametrize("source", ["input", "buffer"])
def test_a_copy_in_inference_mode_is_no_view(source: str, operation: Callable[[Tensor], Tensor]) -> None:
    """Torch shows a mode the operation as it was called, `contiguous`, whose schema is that of a view."""

    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        x = x if source == "input" else add(x, x)
        copy, result = operation(x.view(4, -1)), torch.empty(SIZE, device=DEVICE)
        cast_(result, copy if copy.is_contiguous() else copy.T)
        return [result]

    with torch.inference_mode():
        for seed in range(4):
            x, y = pair(seed)
            true = operation((x if source == "input" else 3 * x).view(4, -1))
            true = (true if true.is_contiguous() else true.T).flatten().float()
            assert torch.equal(call(run, (x, y))[0], true)
    assert isinstance(replay._TAPES["key"], str)


def test_views_in_inference_mode_are_replayed() -> None:
    with torch.inference_mode():
        assert_replayed(
            lambda x, y: [add(x.reshape(2, -1).contiguous().to(torch.float32), y.view(-1))],
            lambda x, y: [(x + 2 * y).view(2, -1)],
        )
    given = pair(9)
    result = call(lambda x, y: [], given)[0]
    assert not result.is_inference()
    assert torch.equal(result, (given[0] + 2 * given[1]).view(2, -1))


def test_no_tape_keeps_inputs_or_results() -> None:
    seen = []
    for seed in range(5):
        given = pair(seed)
        found = call(lambda x, y: [add(add(x[:], y), x)], given)
        seen += [weakref.ref(x) for x in (*given, *found)]
        seen += [weakref.ref(x.untyped_storage()) for x in (*given, *found)]
        del given, found
    gc.collect()
    assert not [x for x in seen if x() is not None]
    assert tape_of()._constants == []


def test_forgetting() -> None:
    made: list[int] = []
    for _ in range(2):
        for seed in range(4):
            call(lambda *x: made.append(1) or [add(*x)], pair(seed))
        replay.forget()
    assert len(made) == 4


def test_the_least_recently_used_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "MOST_TAPES", 2)
    for key in ("first", "second"):
        for seed in range(2):
            call(lambda *x: [add(*x)], pair(seed), key)
    call(lambda *x: [], pair(2), "first")
    call(lambda *x: [add(*x)], pair(3), "third")
    assert list(replay._TAPES) == ["first", "third"]


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError, Interrupted])
@pytest.mark.parametrize("when", [0, 1, 2])
def test_an_interrupted_call_leaves_everything_as_it_was(when: int, error: type[BaseException], monkeypatch: Any) -> None:
    """In the middle of the first call, while it is recorded, and while it is played."""

    def run(x: Tensor, y: Tensor) -> list[Tensor]:
        return [add(add(x, y), y)]

    for seed in range(when):
        call(run, pair(seed))
    before = dict(replay._TAPES)
    jitted, started = _sum.jitted, []

    class Failing:
        def __getitem__(self, grid: Any) -> Any:
            def start(**arguments: Any) -> Any:
                started.append(grid)
                if len(started) == 2:
                    raise error
                return jitted[grid](**arguments)

            return start

    if DEVICE == "cpu":
        with monkeypatch.context() as patched:
            patched.setattr(_sum, "jitted", Failing())
            if when == 2 and error is torch.OutOfMemoryError:
                call(run, pair(7))
            else:
                with pytest.raises(error):
                    call(run, pair(7))
    assert dict(replay._TAPES) == before
    assert launch._NOW.recorder is None
    assert not _compat.in_dispatch_mode()
    for seed in range(4):
        x, y = pair(seed)
        assert torch.equal(call(run, (x, y))[0], x + 4 * y)
    tape_of()


def test_where_one_piece_of_memory_does_not_fit_pieces_may(monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(2):
        call(lambda x, y: [add(x, y)], pair(seed))

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    with monkeypatch.context() as patched:
        patched.setattr(Tape, "play", full)
        x, y = pair(5)
        assert torch.equal(call(lambda x, y: [add(x, y)], (x, y))[0], x + 2 * y)
    tape_of()


class InPython:
    """In place of Triton's interpreter, which runs one kernel at a time."""

    def __getitem__(self, grid: Any) -> Any:
        def start(x: Tensor, y: Tensor, into: Tensor, **_: Any) -> None:
            into.copy_(x + 2 * y)

        return start


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each records its own launches, and plays into memory of its own."""
    if DEVICE == "cpu":
        monkeypatch.setattr(_sum, "jitted", InPython())
    together = threading.Barrier(4)

    def chain(length: int, x: Tensor, y: Tensor) -> list[Tensor]:
        for _ in range(length):
            x = add(x, y)
        return [x]

    def work(number: int) -> None:
        for turn in range(30):
            if turn < 3:
                together.wait()
            x, y = pair(100 * number + turn)
            length = 2 + (number + turn) % 3
            found = call(lambda x, y, length=length: chain(length, x, y), (x, y), length)[0]
            assert torch.equal(found, x + 2 * length * y)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert {key: len(tape_of(key).launches) for key in replay._TAPES} == {2: 2, 3: 3, 4: 4}


def test_forms_differ_where_launches_do() -> None:
    x = torch.zeros(8, 8)
    others = [x.T, x.double(), x.int(), x.view(-1)[1:57], x.to("meta")]
    assert len({form(x), *map(form, others)}) == 6
    assert form(x) == form(torch.ones(8, 8)) == form(x.view(-1)[16:48].view(4, 8))


Lives = list[tuple[int, int, int]]


def buffers_of(lives: Lives) -> list[Buffer]:
    found = []
    for size, first, last in lives:
        buffer = Buffer(torch.empty(0))
        buffer.bytes, buffer.first, buffer.last = size, min(first, last), max(first, last)
        found.append(buffer)
    return found


@drawn(st.lists(st.tuples(st.integers(1, 3000), st.integers(0, 8), st.integers(0, 8)), max_size=12))
def test_buffers_that_live_together_do_not_overlap(lives: Lives) -> None:
    buffers = buffers_of(lives)
    offsets, size = placed(buffers)
    for i, one in enumerate(buffers):
        start = offsets[id(one)]
        assert start % ALIGNMENT == 0
        assert start + one.bytes <= size
        for other in buffers[:i]:
            if one.first <= other.last and other.first <= one.last:
                begin = offsets[id(other)]
                assert start + one.bytes <= begin or begin + other.bytes <= start
    most = sum(-(-x.bytes // ALIGNMENT) * ALIGNMENT for x in buffers)
    assert size <= most
    assert size >= max((sum(x.bytes for x in buffers if x.first <= now <= x.last) for now in range(9)), default=0)


def test_buffers_that_do_not_meet_share_their_place() -> None:
    buffers = buffers_of([(1000, 0, 2), (900, 3, 5), (800, 2, 3), (10, 6, 9)])
    offsets, size = placed(buffers)
    assert [offsets[id(x)] for x in buffers] == [0, 0, 1024, 0]
    assert size == 1824
    assert placed([]) == ({}, 0)
