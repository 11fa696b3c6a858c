"""No cell is much larger than the others, whatever the keys."""

from __future__ import annotations

import pytest
import torch
from by_hand import seeded
from partitions import normal

import nearfield as nf
from nearfield.cells.partition.kmeans import limit_sizes


@pytest.mark.parametrize(("length", "cells"), [(1000, 50), (100, 100), (600, 16), (17, 9), (64, 4)])
@pytest.mark.parametrize("kind", ["all-in-one", "three-quarters-in-one", "a-few", "even"])
def test_sizes_are_limited(length: int, cells: int, kind: str) -> None:
    keys = normal(2, length, 5)
    assigned = torch.randint(cells, (2, length), generator=seeded(1))
    if kind == "all-in-one":
        assigned[:] = cells - 1
    elif kind == "three-quarters-in-one":
        assigned[0, : length * 3 // 4] = 1
    elif kind == "a-few":
        assigned //= cells // 3 + 1
    found = limit_sizes(keys, assigned, cells)
    for entry in range(2):
        before, after = (torch.bincount(x[entry], minlength=cells) for x in (assigned, found))
        most = 8 * -(-length // cells)
        assert len(after) == cells
        assert int(after.max()) <= most
        if int(before.max()) <= most:
            assert torch.equal(found[entry], assigned[entry])


def test_parts_of_a_large_cell_are_its_own_and_others_are_kept() -> None:
    keys = torch.cat([torch.zeros(900, 2), 10 + torch.arange(100.0)[:, None] // 10 * torch.tensor([1.0, -1.0])])
    assigned = torch.cat([torch.zeros(900, dtype=torch.int64), 1 + torch.arange(100) // 10])
    found = limit_sizes(keys[None], assigned[None], 40)[0]
    assert not set(found[:900].tolist()) & set(found[900:].tolist())
    assert torch.equal(found[900:], assigned[900:])  # 29 empty cells are more than enough room
    assert torch.equal(found[:900].bincount()[found[:900].unique()], torch.tensor([200, 200, 200, 200, 100]))


def test_keys_of_a_cell_that_gives_way_go_to_the_nearest_one() -> None:
    centres = torch.tensor([[0.0, 0.0], [50.0, 0.0], [0.0, 50.0], [1.0, 0.0]])
    sizes = [97, 10, 10, 3]
    label = torch.repeat_interleave(torch.arange(4), torch.tensor(sizes))
    keys = centres[label]
    assigned = torch.where(label == 0, 0, label + 12)  # 16 cells, 12 of them empty: none has to give way
    assert torch.equal(limit_sizes(keys[None], assigned[None], 16)[0][97:], assigned[97:])
    crowded = torch.cat([assigned, torch.arange(1, 13).repeat_interleave(4)])
    keys = torch.cat([keys, torch.full((48, 2), -70.0)])
    found = limit_sizes(keys[None], crowded[None], 16)[0]
    assert int(found.bincount().max()) <= 88
    alone = found[117:120]  # cell 15 with three keys is the smallest: its keys join those at the origin
    assert (found[:97] == alone[0]).any()


def test_equal_keys_do_not_cost_a_row_all_of_them() -> None:
    query, value = normal(1, 1, 2048, 16, dtype=torch.float32), normal(1, 1, 2048, 16, seed=1, dtype=torch.float32)
    key = normal(1, 1, 1, 16, seed=2, dtype=torch.float32).expand(1, 1, 2048, 16)
    method = nf.Cells(cell_size=16, probes=4, sinks=0)
    estimate = nf.estimate(query, key, value, method=method)
    assert estimate.info["keys_per_query"] <= 4 * 8 * 16
    # Equal keys weigh the same: the mean of all values, from parts and cells.
    torch.testing.assert_close(estimate.output, value.mean(2, keepdim=True).expand_as(value), atol=1e-5, rtol=0)
