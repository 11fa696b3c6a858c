"""Collectives among ranks, and what is said where ranks disagree, die or come too late."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from crew import Crew, crew
from torch import Tensor

from nearfield.distributed import Ranks


@pytest.fixture(scope="module")
def ranks() -> Crew:
    return crew()


@pytest.fixture
def impatient() -> Iterator[Crew]:
    made = Crew(3, timeout=3)
    yield made
    made.close()


def gathered(group: Any, dtype: torch.dtype) -> tuple[Tensor, Tensor, dict[str, int]]:
    """What all ranks have, each row a rank, and the sum of what they have for this one."""
    ranks = Ranks(group)
    own = torch.arange(6).view(2, 3).to(dtype) + 10 * ranks.rank
    pending = ranks.start_gather("rows", own.T)  # not contiguous
    sums = ranks.start_sum("sums", torch.stack([own * (rank + 1) for rank in range(ranks.size)]))
    return pending.wait(), sums.wait(), dict(ranks.sent)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_gather_and_sum(ranks: Crew, size: int, dtype: torch.dtype) -> None:
    every = [torch.arange(6).view(2, 3).to(dtype) + 10 * rank for rank in range(size)]
    for rank, (rows, sums, sent) in enumerate(ranks.run(gathered, dtype, ranks=size)):
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


def agreed_late(group: Any) -> list[str]:
    """What ranks are told where nobody waits for a comparison; rank 1 is off in the third call."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ranks, "_is_far", True)
        ranks, told = Ranks(group), []
        for call in range(6):
            try:
                ranks.agree("attention", (), {"length": call + (ranks.rank == 1 and call == 2)}, query=[1, 2])
                told.append("")
            except RuntimeError as error:
                told.append(str(error))
    return told


def test_where_the_host_would_wait_a_call_is_compared_when_the_next_one_is_made(ranks: Crew) -> None:
    for told in ranks.run(agreed_late, ranks=3):
        assert "rank 1 has length 3, but rank 0 2" in told[3]
        assert [*told[:3], *told[4:]] == [""] * 5


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


@pytest.mark.parametrize("how", ["dies", "hangs"])
def test_survivors_name_the_rank_that_has_failed(impatient: Crew, how: str) -> None:
    impatient.start(fails, how)
    for rank in (0, 2):
        found = impatient.outcome(rank)[1]
        assert found.startswith("RankError"), found
        assert "(rows) in vain: rank 1 did not answer" in found
        assert found.endswith("(True)")


def test_bad_groups() -> None:
    with pytest.raises(RuntimeError, match="init_process_group"):
        Ranks(None)
