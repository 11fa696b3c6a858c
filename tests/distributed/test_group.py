"""Collectives among ranks, and what is said where ranks disagree, die or come too late."""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from crew import Crew, crew
from torch import Tensor

from nearfield.distributed import Ranks
from nearfield.distributed import group as group_module
from nearfield.distributed.context import ranks_of

SOON = timedelta(seconds=2)
"""until ranks of a group that will not go on are told so"""


@pytest.fixture(scope="module")
def ranks() -> Crew:
    return crew()


@pytest.fixture
def impatient() -> Iterator[Crew]:
    made = Crew(3, timeout=3)
    yield made
    made.close()


def fresh() -> Any:
    """A group of all four ranks that has exchanged nothing yet, and may be spoiled."""
    return dist.new_group(range(4), timeout=SOON)


def gathered(group: Any, dtype: torch.dtype, is_small: bool = True) -> tuple[Tensor, Tensor, dict[str, int]]:
    """What all ranks have, each row a rank, and the sum of what they have for this one."""
    ranks = Ranks(group)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group_module, "SMALL", group_module.SMALL if is_small else 0)
        return gathered_and_summed(ranks, dtype)


def gathered_and_summed(ranks: Ranks, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, int]]:
    own = torch.arange(6).view(2, 3).to(dtype) + 10 * ranks.rank
    pending = ranks.start_gather("rows", own.T)  # not contiguous
    sums = ranks.start_sum("sums", torch.stack([own * (rank + 1) for rank in range(ranks.size)]))
    return pending.wait(), sums.wait(), dict(ranks.sent)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gather_and_sum(ranks: Crew, size: int, dtype: torch.dtype) -> None:
    every = [torch.arange(6).view(2, 3).to(dtype) + 10 * rank for rank in range(size)]
    for is_small in (True, False):
        for rank, (rows, sums, sent) in enumerate(ranks.run(gathered, dtype, is_small, ranks=size)):
            assert torch.equal(rows, torch.stack([x.T for x in every]))
            assert torch.equal(sums, (rank + 1) * sum(every))
            assert sent == {"rows": 6 * dtype.itemsize * (size - 1), "sums": 6 * dtype.itemsize * (size - 1)}


def agreed(group: Any, shape: dict[int, list[int]], check: bool = True) -> Any:
    ranks = Ranks(group, check=check)
    try:
        return [ranks.agree("attention", [5, ranks.rank], query=shape.get(ranks.rank, [1, 2, 8])) for _ in range(2)]
    except RuntimeError as error:
        return str(error)


def test_ranks_that_agree_learn_the_numbers_of_all(ranks: Crew) -> None:
    for check in (True, False):
        assert ranks.run(agreed, {}, check, ranks=3) == [[[[5, 0], [5, 1], [5, 2]]] * 2] * 3


def test_all_ranks_are_told_who_differs_and_in_what(ranks: Crew) -> None:
    for found in ranks.run(agreed, {1: [1, 2, 9]}, ranks=3):
        assert "rank 1 has query [1, 2, 9], but rank 0 [1, 2, 8]" in found


def test_without_a_check_nothing_is_compared(ranks: Crew) -> None:
    assert ranks.run(agreed, {1: [1, 2, 9]}, False, ranks=3) == [[[[5, 0], [5, 1], [5, 2]]] * 2] * 3


def test_most_ranks_are_right(ranks: Crew) -> None:
    for found in ranks.run(agreed, {0: [1, 2, 9]}, ranks=3):
        assert "rank 0 has query [1, 2, 9], but rank 1 [1, 2, 8]" in found
    for found in ranks.run(agreed, {2: [1, 2, 9], 1: [1, 2, 9]}, ranks=4):
        assert "rank 1 has query [1, 2, 9], but rank 0 [1, 2, 8]" in found


def refuses_own(group: Any, wrong: list[str | None]) -> str:
    """What is said where ranks find such errors in their own arguments, and whether they go on."""
    ranks, own = Ranks(group), wrong[dist.get_rank(group)]
    try:
        with ranks.together("attention"):
            ranks.agree("attention", error=own)
            if own is not None:
                raise ValueError(own)
        said = "nothing"
    except (RuntimeError, ValueError) as error:
        said = str(error)
    return f"{said} {ranks.agree('attention', [7])}"


def test_each_rank_says_what_is_wrong_if_something_is_on_all(ranks: Crew) -> None:
    assert ranks.run(refuses_own, ["20 rows", "21 rows"], ranks=2) == ["20 rows [[7], [7]]", "21 rows [[7], [7]]"]
    for said in ranks.run(refuses_own, [None, "rows", "rows"], ranks=3):
        assert said.startswith("rank 1 has error 'rows', but rank 0 None")
        assert said.endswith("[[7], [7], [7]]")


def agreed_again(group: Any) -> list[str]:
    """What ranks are told in call after call; rank 1 is off in the third one."""
    ranks, told = Ranks(group), []
    for call in range(4):
        try:
            ranks.agree("attention", (), {"length": call + (ranks.rank == 1 and call == 2)}, query=[1, 2])
            told.append("")
        except RuntimeError as error:
            told.append(str(error))
    return told


def test_ranks_go_on_after_a_call_in_which_one_was_off(ranks: Crew) -> None:
    for told in ranks.run(agreed_again, ranks=3):
        assert "rank 1 has length 3, but rank 0 2" in told[2]
        assert [*told[:2], told[3]] == [""] * 3


def answers_later(group: Any, differs: bool, held: bool) -> list[str]:
    """What happens to a call whose answer nobody waits for, before it exchanges something, and to the next one."""
    ranks, said = Ranks(group), []
    try:
        with ranks.together("attention"):
            ranks.start_agree("attention", held=held, query=[1, 2, 8 + (differs and ranks.rank == 1)])
            # Of other sizes on each rank, if it came to that.
            ranks.gather("rows", torch.zeros(1 + differs * ranks.rank))
        said.append("nothing")
    except RuntimeError as error:
        said.append(str(error))
    return [*said, str(ranks.agree("attention", [7]))]


@pytest.mark.parametrize("held", [False, True])
def test_nothing_is_exchanged_before_ranks_are_known_to_agree(ranks: Crew, held: bool) -> None:
    """Or together with what they say of the call: nobody gets to see it unless they agree."""
    assert ranks.run(answers_later, False, held, ranks=2) == [["nothing", "[[7], [7]]"]] * 2
    for said, after in ranks.run(answers_later, True, held, ranks=2):
        assert "rank 1 has query [1, 2, 9], but rank 0 [1, 2, 8]" in said
        assert after == "[[7], [7]]"


def leaves_between(group: Any) -> list[str]:
    """Rank 1 finds an error of its own after a tensor that went together with what ranks say of the call, and calls again."""
    ranks, said = Ranks(group), []
    for _ in range(2):
        try:
            with ranks.together("attention"):
                ranks.start_agree("attention", held=True)
                ranks.gather("rows", torch.zeros(1))
                if ranks.rank == 1:
                    raise ValueError("on one rank alone")
            said.append("nothing")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
        if ranks.rank == 0:
            break
    return said


def test_a_rank_that_leaves_after_the_first_tensor_sends_nothing_more(impatient: Crew) -> None:
    found = impatient.run(leaves_between, ranks=2)
    assert found[0] == ["nothing"]
    assert found[1][0] == "on one rank alone"
    assert "rank 1 has left attention (ValueError) half-way" in found[1][1]


def policies(group: Any) -> list[int]:
    """Of the threads in which gloo receives."""
    Ranks(group)
    tasks = [task for task in Path("/proc/self/task").glob("*") if (task / "comm").read_text() == "gloo_tcp_loop\n"]
    return [os.sched_getscheduler(int(task.name)) for task in tasks]


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux has this")
def test_threads_that_receive_give_way_to_the_one_that_sends(impatient: Crew) -> None:
    for found in impatient.run(policies, ranks=2):
        assert set(found) <= {os.SCHED_BATCH}


def calls_by_turns(group: Any) -> list[tuple[bool, list[list[int]]]]:
    """Calls of one group, with and without gradients, and with another default device."""
    found, ranks = [], Ranks(fresh())
    own = torch.full((3,), float(ranks.rank))
    for is_inference, device in ((True, "cpu"), (False, "cpu"), (False, "meta")):
        with torch.inference_mode(is_inference), torch.device(device), ranks.together("attention"):
            agreement = ranks.start_agree("attention", [ranks.rank], held=True)
            rows = ranks.gather("rows", own)
            found.append((rows[:, 0].tolist() == [0.0, 1.0, 2.0, 3.0], agreement.wait()))
            ranks.agree("attention")
    dist.destroy_process_group(ranks.group)
    return found


def test_calls_in_inference_mode_and_with_a_default_device_go_with_others(ranks: Crew) -> None:
    assert ranks.run(calls_by_turns) == [[(True, [[0], [1], [2], [3]])] * 3] * 4


def compares_alone(group: Any, how: str) -> list[str]:
    """Rank 1 alone does not compare what it is called with, or sends something else than a text; two calls of each rank."""
    said = []
    spoiled = Ranks(fresh(), check=how == "text" or dist.get_rank(group) != 1)
    for _ in range(2):
        try:
            if how == "text" and spoiled.rank == 1:
                spoiled.gather("rows", torch.rand(1, dtype=torch.float64))
                return []
            with spoiled.together("attention"):
                if how == "text":
                    spoiled.texts("names", "a name")
                spoiled.start_agree("attention", [7] if how == "numbers" else [], held=how == "held")
                if how == "later":
                    spoiled.start_exchange("keys", [torch.zeros(3)] * 4, [[3]] * 4)[0].wait()
                spoiled.gather("rows", torch.rand(5))
            said.append("nothing")
        except RuntimeError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("held", "rank 1 sent something else: it makes another call, or one has check=False"),
        ("at once", "rank 1 sent something else: it makes another call, or one has check=False"),
        ("numbers", "rank 1 has check=False, unlike the others"),
        ("later", "all ranks still answer, but rank 0 waited for checks, rank 1 for keys (check=False), rank 2 for checks"),
        ("text", "rank 1 sent something else than a text (names)"),
    ],
)
def test_a_rank_that_compares_nothing_is_told_from_others(ranks: Crew, how: str, told: str) -> None:
    """And on all ranks."""
    found = ranks.run(compares_alone, how)
    assert [len(said) for said in found] == [2, 0 if how == "text" else 2, 2, 2]
    for first, second in filter(None, found):
        assert told in first
        assert "nothing" not in second


def refuses(group: Any) -> list[list[int]]:
    """Ranks that have agreed raise the same, and call again."""
    ranks = Ranks(group)
    with pytest.raises(ValueError, match="alike"), ranks.together("attention"):  # noqa: PT012
        ranks.agree("attention")
        raise ValueError("alike")
    return ranks.agree("attention")


def test_what_all_refuse_alike_is_not_left_half_way(ranks: Crew) -> None:
    assert ranks.run(refuses, ranks=2) == [[[], []]] * 2


def forgotten(group: Any) -> bool:
    """Whether ranks let go of a group that torch has destroyed."""
    made = dist.new_group(list(range(dist.get_world_size(group))))
    seen = weakref.ref(made)
    ranks = ranks_of(made)
    dist.destroy_process_group(made)
    del made
    gc.collect()
    with pytest.raises(RuntimeError, match="destroyed"):
        ranks.gather("rows", torch.zeros(1))
    return seen() is None


def test_a_group_that_was_destroyed_is_not_kept(ranks: Crew) -> None:
    assert all(ranks.run(forgotten))


def test_without_the_collectives_of_torch_the_module_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("all_gather_single", "all_gather_into_tensor", "reduce_scatter_single", "reduce_scatter_tensor"):
        monkeypatch.delattr(dist, name, raising=False)
    assert runpy.run_module("nearfield.distributed.group")["Ranks"] is not Ranks


def fails(group: Any, how: str) -> str:
    """Rank 1 dies, or does not come; the others say what they were told, and after how many seconds."""
    ranks = Ranks(group)
    ranks.gather("first", torch.zeros(4))
    if ranks.rank == 1:
        if how == "dies":
            os._exit(1)
        time.sleep(8)
        return "late"
    started = time.monotonic()
    try:
        ranks.gather("rows", torch.zeros(4))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error} ({time.monotonic() - started < 15})"
    return "nothing was raised"


@pytest.mark.parametrize("how", [pytest.param("dies", marks=pytest.mark.slow), "hangs"])
def test_survivors_name_the_rank_that_has_failed(impatient: Crew, how: str) -> None:
    impatient.start(fails, how)
    for rank in (0, 2):
        found = impatient.outcome(rank)[1]
        assert found.startswith("RankError"), found
        assert "(rows) in vain: rank 1 did not answer" in found
        assert found.endswith("(True)")


def loses_the_store(group: Any) -> list[str]:
    """Rank 0 keeps two stores, by one of which ranks are asked. It is stopped, and then killed; what the others are told, and
    after how many seconds."""
    group_module.PATIENCE = timedelta(seconds=0.5)
    ranks, said = Ranks(group), []
    kept = [dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) for _ in range(0 if ranks.rank else 2)]
    process, *ports = json.loads(ranks.texts("stores", json.dumps([os.getpid(), *(store.port for store in kept)]))[0])
    stores = kept or [dist.TCPStore("127.0.0.1", port) for port in ports]
    ranks.gather("first", torch.zeros(4))
    if ranks.rank == 0:
        time.sleep(60)
    for store, ends in zip(stores, (signal.SIGSTOP, signal.SIGKILL), strict=True):
        group_module.meeting_store = lambda store=store: store
        if ranks.rank == 1:
            os.kill(process, ends)
        started = time.monotonic()
        try:
            ranks.gather("rows", torch.zeros(4))
        except RuntimeError as error:
            said.append(f"{type(error).__name__}: {error} ({time.monotonic() - started < 15})")
    return said


@pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="only some systems stop processes")
def test_survivors_are_told_that_nobody_keeps_the_store(impatient: Crew) -> None:
    impatient.start(loses_the_store)
    for rank in (1, 2):
        found = impatient.outcome(rank)[1]
        assert len(found) == 2, found
        for told in found:
            assert told.startswith("RankError")
            assert "the store by which the ranks found each other did not answer" in told
            assert "which is rank 0 unless" in told
            assert told.endswith("(True)")


def test_bad_groups() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        Ranks(None)
