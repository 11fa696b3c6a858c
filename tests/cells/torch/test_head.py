"""One head of the cells engine in torch."""

from __future__ import annotations

import torch

from nearfield.cells.moments import tabulate
from nearfield.cells.sizes import CellSizes
from nearfield.cells.spans import Spans
from nearfield.cells.torch.head import LEAST_BLOCK_BYTES, Head

SIZES = CellSizes(group=1, segment=1024, window=0, sinks=0, cell_size=64, probes=16, samples=0, span_levels=4)


def head(rows: int, keys: int) -> Head:
    """The last of so many rows, of as many as there are keys."""
    visible = torch.arange(keys - rows, keys) + 1
    cell_of = torch.full((SIZES.span_levels, keys), -1)
    table = tabulate(torch.zeros(0, 64), torch.zeros(0, 64), cell_of[:, :0], Spans(keys // 1024, 4).edges(16))
    inputs = torch.zeros(rows, 64), torch.zeros(keys, 64), torch.zeros(keys, 64)
    return Head(*inputs, visible, cell_of, SIZES, 1.0, known_table=table)


def test_few_rows_of_many_keys_come_in_large_blocks() -> None:
    """Those of one rank meet the keys of all: in small blocks they would fill few tiles."""
    keys = 4 * LEAST_BLOCK_BYTES // 128
    whole, few = ([len(block) for block in head(rows, keys).blocks()] for rows in (keys, keys // 8))
    assert max(few) == min(max(whole), keys // 8) > 4096


def test_there_are_as_many_spans_as_segments() -> None:
    for levels in (1, 2, 3, 8):
        assert [len(Spans(segments, levels).all) for segments in range(40)] == [*range(40)]
