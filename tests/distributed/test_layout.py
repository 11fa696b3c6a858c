"""Where the tokens of a sequence are."""

from __future__ import annotations

import pytest
import torch

from nearfield.distributed.layout import ZigZag

LENGTHS = [0, 1, 2, 3, 7, 8, 9, 16, 23, 64]


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("length", LENGTHS)
def test_every_token_is_somewhere_once(length: int, size: int) -> None:
    layout = ZigZag(length, size)
    tokens = torch.arange(length)[None]
    parts = [layout.own(tokens, 1, rank) for rank in range(size)]
    assert [part.shape[1] for part in parts] == [layout.on(rank) for rank in range(size)]
    assert torch.equal(torch.cat(parts, 1).sort(1).values, tokens)
    assert all(torch.equal(part, part.sort(1).values) for part in parts)  # in their order
    assert torch.equal(layout.joined(layout.dealt(tokens, 1), 1), tokens)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_causal_work_is_equal(size: int) -> None:
    layout = ZigZag(size * 20, size)
    work = [int(layout.own(torch.arange(size * 20)[None] + 1, 1, rank).sum()) for rank in range(size)]
    assert len(set(work)) == 1


def test_what_lies_behind_the_tokens_of_a_rank_is_left_out() -> None:
    layout = ZigZag(9, 2)  # pieces of 3, 3, 3 and 0 tokens
    dealt = layout.dealt(torch.arange(9.0)[None, :, None], 1)
    assert dealt.shape == (2, 1, 6, 1)
    dealt[0, :, 3:] = torch.nan
    assert torch.equal(layout.joined(dealt, 1).flatten(), torch.arange(9.0))
