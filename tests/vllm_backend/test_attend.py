"""Attention over pages: exact where all is opened, as the formula has it where not, and alike however rows are put together."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from storage_bytes import fill_bytes
from torch import Tensor

from nearfield.vllm import attend as module
from nearfield.vllm.attend import Reach, attend
from nearfield.vllm.blocks import full_blocks, write_cells, write_keys
from nearfield.vllm.pages import PageLayout

LAYOUT = PageLayout(heads=2, size=32, dim=16, value_dim=16)
COLUMNS = replace(LAYOUT, by_columns=True)
LENGTH, HEADS, SCALE = 333, 6, 0.3
ALL = 1 << 40


class Request:
    """One request in pages that lie anywhere, with NaN wherever nothing was written."""

    def __init__(
        self, dtype: torch.dtype = torch.float64, length: int = LENGTH, seed: int = 0, layout: PageLayout = LAYOUT
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.layout = layout
        self.pages = layout.empty(40, dtype)
        fill_bytes(self.pages, 255)
        self.blocks = torch.randperm(40, generator=generator)[: -(-length // 32)]
        shapes = (length, HEADS, 16), (length, 2, 16), (length, 2, 16)
        self.query, self.key, self.value = (torch.randn(s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes)
        place = torch.arange(length)
        slots = self.blocks[place // 32] * 32 + place % 32
        write_keys(self.pages, layout, self.key, self.value, slots)
        write_cells(self.pages, layout, full_blocks(slots, 32))

    def attend(self, reach: Reach, first: int = 0, stop: int = LENGTH) -> Tensor:
        return attend(self.query[first:stop], self.pages, self.layout, self.blocks, stop, reach, SCALE)

    def exact(self) -> Tensor:
        inputs = (x.double().transpose(0, 1)[None] for x in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(*inputs, is_causal=True, scale=SCALE, enable_gqa=True)[0].transpose(0, 1)

    def by_formula(self, position: int, reach: Reach) -> Tensor:
        """A row, `[heads, dim]`, by the formula, cell by cell."""
        near = reach.first_near(position, 32)
        read = [key for key in range(position + 1) if key < 32 or key >= near * 32]
        summary = LAYOUT.summaries(self.pages)
        outputs = []
        for head in range(2):
            cells = []
            for block in range(1, near):
                page = int(self.blocks[block])
                stop = summary.stop[page, head].tolist()
                for cell, (begin, end) in enumerate(zip([0, *stop], stop, strict=False)):
                    members = [block * 32 + int(x) for x in summary.order[page, head, begin:end]]
                    moments = (x[page, head, cell].double() for x in summary[:3])
                    if members:
                        cells.append((members, *moments))
            own = [head * 3 + member for member in range(3)]
            queries = self.query[position, own].double() * SCALE
            keys, values = self.key[:, head].double(), self.value[:, head].double()
            shares = torch.zeros(3, len(cells), dtype=torch.float64)
            masses = torch.zeros_like(shares)
            for i, query in enumerate(queries):
                for c, (members, centroid, variance, _) in enumerate(cells):
                    spread = float((query.square() * variance).sum())
                    first = float(query @ centroid)
                    shares[i, c] = first + 3 * math.sqrt(min(spread, 64.0))
                    masses[i, c] = first + 2 * math.log1p(min(spread, 9.0) / 4) + math.log(len(members))
                seen = [key for key in read if key < 32 or key > position - 64]
                normaliser = torch.cat([masses[i], keys[seen] @ query]).logsumexp(0)
                shares[i] -= normaliser
            chosen = shares.amax(0).topk(reach.opened(2 * (near - 1), 32 * (near - 1))).indices.tolist()
            keys_read = [*read, *(key for c in chosen for key in cells[c][0])]
            closed = [c for c in range(len(cells)) if c not in chosen]
            for i, query in enumerate(queries):
                weight = torch.cat([keys[keys_read] @ query, masses[i, closed]]).softmax(0)
                means = torch.stack([cells[c][3] for c in closed]) if closed else keys.new_zeros(0, 16)
                outputs.append(weight @ torch.cat([values[keys_read], means]))
        return torch.stack(outputs)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("reach", [Reach(16, ALL, None), Reach(16, 0, ALL), Reach(50, 100, ALL)], ids=["exact", "cells", "both"])
@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("layout", [LAYOUT, COLUMNS], ids=["rows", "columns"])
def test_everything_opened_is_exact(
    dtype: torch.dtype, tolerance: float, reach: Reach, once: bool, layout: PageLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "READ_ONCE", 0 if once else ALL)
    request = Request(dtype, layout=layout)
    torch.testing.assert_close(request.attend(reach).double(), request.exact(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("layout", [LAYOUT, COLUMNS], ids=["rows", "columns"])
@pytest.mark.parametrize("blocks", [None, [8, 3, 4, 5, 9, 2, 1, 0, 20, 21, 22]], ids=["anywhere", "in runs"])
def test_a_row_that_sees_all_keys_reads_pages_as_they_lie(layout: PageLayout, blocks: list[int] | None) -> None:
    request = Request(layout=layout)
    if blocks is not None:
        before, request.blocks = request.blocks, torch.tensor(blocks)
        held = request.pages[before].clone()
        request.pages[:] = torch.nan
        request.pages[request.blocks] = held
    for position in (0, 1, 31, 32, 63, 64, 200, 332):
        found = request.attend(Reach(16, ALL, None), position, position + 1)
        torch.testing.assert_close(found[0], request.exact()[position], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("once", [True, False])
@pytest.mark.parametrize("layout", [LAYOUT, COLUMNS], ids=["rows", "columns"])
def test_rows_are_as_the_formula_has_them(once: bool, layout: PageLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "READ_ONCE", 0 if once else ALL)
    request, reach = Request(layout=layout), Reach(40, 90, 5)
    found = request.attend(reach)
    assert not torch.allclose(found, request.exact(), atol=1e-2)  # there are cells that nobody opens
    for position in (0, 31, 89, 90, 102, 103, 104, 135, 136, 200, 298, 332):
        torch.testing.assert_close(found[position], request.by_formula(position, reach), rtol=1e-9, atol=1e-9)


def test_large_spreads_are_told_apart() -> None:
    """Scores cut them off at 64, masses at 9."""
    request, reach = Request(), Reach(40, 0, 5)
    request.query *= 7.0
    found = request.attend(reach)
    for position in (150, 200, 250, 298, 332):
        torch.testing.assert_close(found[position], request.by_formula(position, reach), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("probes", [3, None])
def test_chunks_and_single_rows_give_the_same(probes: int | None) -> None:
    request, reach = Request(), Reach(24, 70, probes)
    whole = request.attend(reach)
    for edges in ([0, 100, 101, 102, 230, 333], [300, *range(310, 334)]):
        parts = [request.attend(reach, first, stop) for first, stop in pairwise(edges)]
        torch.testing.assert_close(torch.cat(parts), whole[edges[0] :], rtol=1e-10, atol=1e-10)


def test_later_keys_change_nothing() -> None:
    request, other = Request(), Request()
    other.key[200:], other.value[200:] = 9.0, -9.0
    place = torch.arange(200, LENGTH)
    slots = other.blocks[place // 32] * 32 + place % 32
    write_keys(other.pages, LAYOUT, other.key[200:], other.value[200:], slots)
    write_cells(other.pages, LAYOUT, full_blocks(slots, 32))
    reach = Reach(24, 0, 3)
    assert torch.equal(request.attend(reach, 0, 200), other.attend(reach, 0, 200))
    torch.testing.assert_close(request.attend(reach)[:200], other.attend(reach)[:200], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(request.attend(reach)[200:], other.attend(reach)[200:])


def test_stale_cells_are_seen() -> None:
    """A control: with the cells of other keys the same rows are far off, so the tests above would notice."""
    request, reach = Request(), Reach(24, 0, 3)
    before = request.attend(reach)
    page = int(request.blocks[3])
    for part in LAYOUT.summaries(request.pages)[:3]:
        part[page] += 1.0
    after = request.attend(reach)
    assert float((after - before)[200:].abs().max()) > 0.1
    assert torch.equal(after[:119], before[:119])  # row 119 is the first to see block 2 through cells, and 151 block 3


def test_what_a_row_reads_depends_on_its_position_alone() -> None:
    for reach in (Reach(64, 0, None), Reach(17, 500, None), Reach(1, 33, None), Reach(300, 64, None)):
        nears = [reach.first_near(position, 32) for position in range(2000)]
        for position in range(1500):
            last = reach.last_alike(position, 32)
            assert nears[position] == nears[last]
            assert nears[last] != nears[last + 1]
        for position, near in enumerate(nears):
            assert near == 1 or (near * 32 + reach.window <= position + 1 and position + 1 >= reach.exact_below)
            assert near == 1 or position + 1 - near * 32 < reach.window + 32


def test_tables_are_cut_where_they_grow_large(monkeypatch: pytest.MonkeyPatch) -> None:
    request, reach = Request(), Reach(24, 0, 3)
    whole = request.attend(reach)
    monkeypatch.setattr(module, "BLOCK_BYTES", 1)
    torch.testing.assert_close(request.attend(reach), whole, rtol=1e-10, atol=1e-10)


def test_no_rows() -> None:
    request = Request()
    assert request.attend(Reach(24, 0, 3), 100, 100).shape == (0, HEADS, 16)
    assert Reach(1, 2, None).opened(4096, 65_536) == 9 * 256 // 16
