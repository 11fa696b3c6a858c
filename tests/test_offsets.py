"""Offsets are 64-bit: places beyond 2^31 are named correctly. Plain arithmetic, so no tensor of that size is needed."""

from __future__ import annotations

import pytest
import torch
from laws import seeded

from nearfield.knn.index.base import PADDING, flat_ids
from nearfield.sampling import hashed_uniform, skip, without_replacement


@pytest.mark.parametrize("length", [2**20, 2**30, 2**31 - 1, 2**40])
def test_places_in_keys_laid_end_to_end(length: int) -> None:
    ids = torch.tensor([[[0, 5, PADDING]], [[7, length - 1, 0]], [[PADDING, 1, 2]], [[3, 4, length - 2]]])
    expected = [
        [0, 5, 0],
        [length + 7, 2 * length - 1, length],
        [2 * length, 2 * length + 1, 2 * length + 2],
        [3 * length + 3, 3 * length + 4, 4 * length - 2],
    ]
    assert flat_ids(ids, length).tolist() == expected


def test_tail_ranks_beyond_2_to_the_31() -> None:
    taken = torch.tensor([[1, 2**31, 2**33]])
    ranks = torch.tensor([[0, 1, 2**31 - 2, 2**31 - 1, 2**33 - 3, 2**33 - 2]])
    assert skip(ranks, taken)[0].tolist() == [0, 2, 2**31 - 1, 2**31 + 1, 2**33 - 1, 2**33 + 1]
    drawn = without_replacement(torch.tensor([2**36]), 64, seeded(0))
    assert int(drawn.max()) > 2**35
    assert len(set(drawn[0].tolist())) == 64


def test_rows_and_keys_beyond_2_to_the_32_have_dropout_of_their_own() -> None:
    row = torch.arange(50)
    for shift in (2**31, 2**32, 2**40):
        assert not bool((hashed_uniform(0, row) == hashed_uniform(0, row + shift)).any())
