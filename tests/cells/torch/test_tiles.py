"""Tiles: every row meets every member of every cell that it chose, once, and what fills a tile up never counts."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from by_hand import seeded
from torch import Tensor

from nearfield.cells.torch import tiles as torch_tiles
from nearfield.cells.torch.tiles import GRAIN, Stack, products, rows_of_a_tile, stacks

SIZES: dict[str, list[int]] = {
    "even": [8] * 6,
    "ragged": [1, 7, 8, 9, 16, 17, 3],
    "some-empty": [0, 5, 0, 0, 12, 1, 0],
    "all-empty": [0, 0, 0],
    "one-large": [3, 700, 2],
    "just-a-page": [256, 255, 257, 512, 513],
    "one-cell": [11],
    "no-cell": [],
}


def edges_of(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *sizes]).cumsum(0)


def choices(rows: int, slots: int, cells: int, seed: int = 0, blanks: float = 0.2) -> Tensor:
    """Distinct cells per row in any order, and -1 for some of them, or where there are too few."""
    generator = seeded(seed)
    chosen = torch.full((rows, slots), -1)
    for row in chosen:
        some = torch.randperm(cells, generator=generator)[:slots]
        row[: len(some)] = some
    return chosen.masked_fill(torch.rand(rows, slots, generator=generator) < blanks, -1)


def met(found: list[Stack], rows: int) -> Counter[tuple[int, int]]:
    """How often each (row, member) pair is met by a row that is none and a member that is not missing."""
    count: Counter[tuple[int, int]] = Counter()
    for stack in found:
        missing = torch.zeros_like(stack.members, dtype=torch.bool) if stack.missing is None else stack.missing
        for row, member, gone in zip(stack.rows.tolist(), stack.members.tolist(), missing.tolist(), strict=True):
            here = [m for m, g in zip(member, gone, strict=True) if not g]
            count.update((r, m) for r in row if r < rows for m in here)
    return count


def expected(chosen: Tensor, edges: Tensor) -> Counter[tuple[int, int]]:
    return Counter(
        (row, member)
        for row, cells in enumerate(chosen.tolist())
        for cell in cells
        if cell >= 0
        for member in range(int(edges[cell]), int(edges[cell + 1]))
    )


def assert_well_formed(found: list[Stack], chosen: Tensor, edges: Tensor) -> None:
    """Fillers are the number just beyond the last row, and places that may be looked up."""
    rows = len(chosen)
    for stack in found:
        assert stack.rows.shape[0] == stack.members.shape[0] > 0
        assert stack.members.shape[1] % GRAIN == 0
        assert bool(((stack.rows >= 0) & (stack.rows <= rows)).all())
        assert bool((stack.rows < rows).any(1).all()), "no tile of fillers alone"
        assert bool(((stack.members >= 0) & (stack.members < edges[-1])).all())
        if stack.missing is not None:
            assert stack.missing.shape == stack.members.shape
            assert bool(stack.missing.any())
            assert not bool(stack.missing.all(1).any())


@pytest.mark.parametrize("options", [{}, {"tile_rows": 1}, {"tile_rows": 5}, {"page_size": 8}, {"page_size": 3}], ids=str)
@pytest.mark.parametrize(("rows", "slots"), [(1, 1), (3, 2), (40, 3), (100, 7)])
@pytest.mark.parametrize("name", SIZES)
def test_every_pair_once(name: str, rows: int, slots: int, options: dict[str, Any]) -> None:
    edges = edges_of(SIZES[name])
    chosen = choices(rows, slots, len(edges) - 1, seed=rows)
    found = list(stacks(chosen, edges, 8, **options))
    assert met(found, rows) == expected(chosen, edges)
    assert_well_formed(found, chosen, edges)


def test_sums_over_tiles_are_sums_over_cells() -> None:
    """What the engine does with a stack, fillers included: a row more, which is thrown away, and -inf."""
    edges, rows = edges_of([5, 0, 300, 1, 30]), 70
    chosen = choices(rows, 3, 5)
    queries, keys = (torch.randn(count, 4, generator=seeded(count), dtype=torch.float64) for count in (rows, 336))
    mass = torch.zeros(rows + 1, dtype=torch.float64)
    for stack in stacks(chosen, edges, 4):
        logits = products(torch.cat([queries, queries[:1]])[stack.rows], keys[stack.members])
        if stack.missing is not None:
            logits.masked_fill_(stack.missing[:, None], -torch.inf)
        mass.index_add_(0, stack.rows.view(-1), logits.exp().sum(-1).view(-1))
    for row in range(rows):
        own = [queries[row] @ keys[member] for r, member in expected(chosen[row : row + 1], edges) if r == 0]
        torch.testing.assert_close(mass[row], sum((x.exp() for x in own), start=torch.zeros((), dtype=torch.float64)))


def test_nothing_chosen() -> None:
    edges = edges_of([4, 4])
    for chosen in (torch.full((5, 2), -1), torch.empty(0, 2, dtype=torch.long), torch.empty(5, 0, dtype=torch.long)):
        assert list(stacks(chosen, edges, 8)) == []


@pytest.mark.parametrize("cells", [2**15 - 1, 2**15, 2**15 + 1])
def test_more_cells_than_small_integers(cells: int) -> None:
    edges = torch.arange(cells + 1)
    chosen = torch.tensor([[0, cells - 1], [cells // 2, -1], [cells - 1, 1]])
    assert met(list(stacks(chosen, edges, 8)), 3) == expected(chosen, edges)


@pytest.mark.parametrize("budget", [1, 3000, 1 << 21])
def test_stacks_stay_within_a_budget(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_tiles, "SCALARS_PER_PASS", budget)
    edges, dim = edges_of([3, 30, 300, 12, 8]), 8
    chosen = choices(90, 4, 5)
    found = list(stacks(chosen, edges, dim))
    for stack in found:
        count, tile_rows = stack.rows.shape
        assert count == 1 or count * tile_rows * (stack.members.shape[1] + 2 * dim) <= budget
    assert met(found, 90) == expected(chosen, edges)


def test_a_tile_has_the_same_shape_whoever_else_opens_the_cell() -> None:
    """A matrix product of another shape may round a row differently, and a causal row must not know of later ones."""
    edges = edges_of([3, 30, 300, 12, 8, 0, 9])

    def shapes(chosen: Tensor) -> dict[int, set[tuple[int, int]]]:
        found: dict[int, set[tuple[int, int]]] = {}
        for stack in stacks(chosen, edges, 8):
            for member in stack.members[:, 0].tolist():
                found.setdefault(member, set()).add((stack.rows.shape[1], stack.members.shape[1]))
        return found

    mine = choices(64, 3, 7, blanks=0.0)
    others = mine.clone()
    others[20:] = choices(44, 3, 7, seed=1)
    one, two = shapes(mine), shapes(others)
    assert one.keys() & two.keys() == {0, 3, 33, 289, 333, 345, 353}
    for page in one.keys() & two.keys():
        assert len(one[page]) == 1
        assert one[page] == two[page]


def test_taller_tiles_where_they_fill_up() -> None:
    assert [rows_of_a_tile(x) for x in (0.0, 95.0, 96.0, 383.0, 384.0, 1e9)] == [32, 32, 64, 64, 128, 128]


@pytest.mark.parametrize("scale", [1.0, -0.3])
def test_products(scale: float) -> None:
    left, right = (torch.randn(3, size, 5, generator=seeded(size), dtype=torch.float64) for size in (4, 6))
    true = scale * torch.einsum("tid,tjd->tij", left, right)
    torch.testing.assert_close(products(left, right, scale=scale), true)
    for shape in ((3, 4, 6), (3, 4, 1), (3, 1, 6)):
        plus = torch.randn(shape, generator=seeded(9), dtype=torch.float64)
        torch.testing.assert_close(products(left, right, plus, scale), true + plus)
    left[0, 0, 0] = torch.nan
    assert bool(products(left, right, scale=scale)[1:].isfinite().all()), "what is there without `plus` is not looked at"
