"""Moments of cells that ranks sum up in parts: they are those of one process, and so is what they pass on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from crew import Crew, crew
from torch import Tensor

from nearfield.cells.moments import CellTable, TableGradient, tabulate
from nearfield.distributed import Ranks
from nearfield.distributed.tables import Tables, parts_of

EDGES = [[0, 20, 26, 40], [0, 7], [0]]
LENGTH, DIM, VALUE_DIM = 300, 8, 16
FIELDS = ("centroid", "variance", "value", "cross")


@pytest.fixture(scope="module")
def ranks() -> Crew:
    return crew()


def inputs() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Keys, values and cells of three entries: with two levels of spans, with one, and without cells."""
    generator = torch.Generator().manual_seed(0)
    keys, values = (
        [torch.randn(LENGTH, dim, generator=generator, dtype=torch.float64) for _ in EDGES] for dim in (DIM, VALUE_DIM)
    )
    cells = [torch.full((2, LENGTH), -1) for _ in EDGES]
    cells[0][0, 5:] = torch.randint(0, 26, (LENGTH - 5,), generator=generator)
    cells[0][1, 5:200] = torch.randint(26, 39, (195,), generator=generator)  # the last cell is empty
    cells[1][0] = torch.randint(0, 7, (LENGTH,), generator=generator).pow(2) % 7
    return keys, values, cells


def gradients(tables: list[CellTable], rank: int) -> list[TableGradient]:
    generator = torch.Generator().manual_seed(rank)
    found = [TableGradient.zeros_like(table) for table in tables]
    for grad in found:
        for name in FIELDS:
            getattr(grad, name).normal_(generator=generator)
    return found


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_parts_are_all_of_a_table_and_equally_long(count: int) -> None:
    for table in map(tabulate, *inputs(), EDGES):
        parts = parts_of(table, count)
        assert [cell for part in parts for cell in range(table.cells)[part.cells]] == [*range(table.cells)]
        members = [int(table.starts[part.cells.stop] - table.starts[part.cells.start]) for part in parts]
        assert max(members) <= len(table.order) / count + (float(table.size.max()) if table.cells else 0)
        for part in parts:
            spans = {sum(edge <= cell for edge in table.spans[1:]) for cell in range(table.cells)[part.cells]}
            assert [*range(len(table.spans))[part.spans]] == sorted(spans)


def summed_up(group: Any) -> tuple[float, float, dict[str, int], bool]:
    """How far tables, and what they pass on, are from those of one process; what was sent; whether others' cells are left out."""
    ranks = Ranks(group)
    keys, values, cells = inputs()
    whole = [*map(tabulate, keys, values, cells, EDGES)]
    tables = Tables.made(ranks, keys, values, cells, EDGES)
    pairs = [(getattr(x, name), getattr(y, name)) for x, y in zip(tables.every, whole, strict=True) for name in FIELDS]
    apart = max(float((x - y).abs().max()) for x, y in pairs if x.numel())
    grads = gradients(whole, ranks.rank)
    tables.summed_(grads)
    total = [gradients(whole, rank) for rank in range(ranks.size)]
    off, others = 0.0, False
    for entry, (table, grad, parts) in enumerate(zip(tables.every, grads, tables.parts, strict=True)):
        for mine, name in zip(parts[ranks.rank].of(grad), FIELDS, strict=True):
            every = TableGradient(*(sum(getattr(own[entry], x) for own in total) for x in FIELDS))  # type: ignore[arg-type]
            wanted = parts[ranks.rank].of(every)[FIELDS.index(name)]
            off = max(off, float((mine - wanted).abs().max()) if mine.numel() else 0.0)
        own, one = ([torch.zeros_like(x) for x in (keys[entry], values[entry])] for _ in range(2))
        grad.spread_(table, keys[entry], values[entry], *own, parts[ranks.rank].cells)
        every.spread_(whole[entry], keys[entry], values[entry], *one)
        for x, y in zip(own, one, strict=True):
            if ranks.size > 1 and entry == 0:
                others |= bool((x == 0).all() or torch.equal(x, y))
            torch.distributed.all_reduce(x, group=group)
            off = max(off, float((x - y).abs().max()))
    return apart, off, dict(ranks.sent), others


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_moments_are_those_of_one_process(ranks: Crew, size: int) -> None:
    for apart, off, sent, others in ranks.run(summed_up, ranks=size):
        assert apart < 1e-12
        assert off < 1e-12
        assert not others
        # Each rank sends the moments of its own cells, and the products of the spans that these are in.
        own = 47 * (2 * DIM + VALUE_DIM) // size + (4 + size) * DIM * VALUE_DIM
        assert sent.get("moments", 0) <= 1.5 * own * 8 * (size - 1)
