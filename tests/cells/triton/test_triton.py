"""The kernels of the cells engine in Triton, held to the reference: under Triton's interpreter on a CPU, for real on a GPU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from by_hand import seeded
from torch import Tensor

from nearfield.cells import reference as cells_reference
from nearfield.cells.far_field import ROUTE_SPREADS
from nearfield.cells.partition.kmeans import KMeans
from nearfield.cells.reference import CellPlan
from nearfield.cells.sizes import CellSizes, MemoryPolicy
from nearfield.cells.spans import blocks_of_rows, closed_keys

pytest.importorskip("triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class Case:
    """`length` queries per member of the group; keys that rows see: all, or (with a segment) up to their own position."""

    entries: int = 1
    group: int = 1
    length: int = 40
    keys: int = 40
    dim: int = 16
    value_dim: int = 16
    segment: int = 0
    window: int = 0
    sinks: int = 3
    cell_size: int = 4
    probes: int = 3
    span_levels: int = 1
    padding: int = 0
    """keys at the end that no row sees; with a mask the first rows see nothing"""
    share: int = 1

    @property
    def sizes(self) -> CellSizes:
        numbers = self.group, self.segment, self.window, self.sinks, self.cell_size, self.probes, 0, self.span_levels
        return CellSizes(*numbers, self.share)

    def visible(self) -> Tensor:
        if not self.segment:
            return torch.full((self.entries, self.group * self.length), self.keys - self.padding, device=DEVICE)
        position = torch.arange(self.length, device=DEVICE) + 1 + self.keys - self.length - self.padding
        return position.clamp(min=0).repeat(self.entries, self.group)


CASES = {
    "plain": Case(),
    "no-sinks": Case(sinks=0, cell_size=7),
    "groups-padding-odd-dims": Case(
        entries=2, group=2, length=33, keys=83, dim=24, value_dim=20, cell_size=5, probes=4, padding=7
    ),
    "all-opened": Case(probes=20),
    "large-cells": Case(length=20, keys=260, cell_size=90, probes=2),
    "cells-of-one": Case(cell_size=1, length=20, keys=20),
    "one-key": Case(length=5, keys=1),
    "only-sinks": Case(length=5, keys=9, sinks=50),
    "nothing-visible": Case(length=5, keys=9, padding=9),
    "causal": Case(length=70, keys=70, segment=16, span_levels=3),
    "causal-groups-window-padding": Case(
        entries=2, group=2, length=36, keys=36, value_dim=32, segment=8, window=1, cell_size=2, span_levels=3, padding=5
    ),
    "causal-capped-span_levels": Case(length=30, keys=90, segment=8, span_levels=2),
    "causal-short": Case(length=10, keys=10, segment=16, span_levels=1),
    "shared": Case(length=70, keys=130, share=16),
    "shared-groups-padding-odd-dims": Case(
        entries=2, group=2, length=40, keys=83, dim=24, value_dim=20, cell_size=5, probes=4, padding=7, share=32
    ),
    "shared-groups": Case(group=3, length=50, keys=90, cell_size=3, share=16),
    "shared-large-cells": Case(length=20, keys=260, cell_size=90, probes=2, share=16),
    "shared-all-opened": Case(probes=20, share=64),
    "shared-nothing-visible": Case(length=5, keys=9, padding=9, share=16),
    "shared-causal": Case(length=70, keys=70, segment=16, span_levels=3, share=16),
    "shared-causal-groups-window-padding": Case(
        entries=2,
        group=2,
        length=36,
        keys=36,
        value_dim=32,
        segment=8,
        window=1,
        cell_size=2,
        span_levels=3,
        padding=5,
        share=16,
    ),
    "shared-causal-across-segments": Case(group=2, length=50, keys=90, segment=24, span_levels=3, share=32),
}


@dataclass(frozen=True)
class Run:
    """Inputs, what the kernels made of them, and what the reference does with the same plan."""

    case: Case
    queries: Tensor
    keys: Tensor
    values: Tensor
    upstream: Tensor
    output: Tensor
    lse: Tensor
    cell_of: Tensor
    opened: Tensor
    order: Tensor
    lse_upstream: Tensor | None = None
    """None: nothing depends on the log-normalisers"""

    @property
    def scale(self) -> float:
        return self.case.dim**-0.5

    def gradients(self) -> tuple[Tensor, ...]:
        from nearfield.cells.triton.backward import backward

        inputs = (self.upstream, self.queries, self.keys, self.values, self.case.visible(), self.output, self.lse)
        return backward(*inputs, self.cell_of, self.opened, self.order, self.case.sizes, self.scale, self.lse_upstream)

    def expected(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Output, log-normaliser and gradients by the reference, computed in `dtype`."""
        from nearfield.cells.triton.layout import layout_of

        case, visible = self.case, self.case.visible()
        cells = layout_of(case.keys, case.sizes, DEVICE).cells
        outputs, ends, grads = [], [], []
        for entry in range(case.entries):
            rows = len(visible[entry])
            none = torch.empty(rows, 0, device=DEVICE)
            cell_of, opened = self.cell_of[entry].long(), self.opened[entry].long()
            order = self.order[entry].long()
            blocks = blocks_of_rows(rows, case.sizes, DEVICE, order)
            plan = CellPlan(cell_of, opened, order, none.long(), none.to(dtype)).by_row(blocks)
            inputs = [x[entry].to(dtype).requires_grad_() for x in (self.queries, self.keys, self.values)]
            closed = closed_keys(visible[entry], case.sizes, case.group)
            output, lse = cells_reference.reference_attention(
                inputs[0] * self.scale, *inputs[1:], visible[entry], closed, case.segment, plan, cells
            )
            outputs.append(output.detach())
            ends.append(lse.detach())
            total = (output * self.upstream[entry]).sum()
            if self.lse_upstream is not None:
                total = total + (lse * self.lse_upstream[entry]).sum()
            grads.append(torch.autograd.grad(total, inputs))
        return torch.stack(outputs), torch.stack(ends), tuple(torch.stack(x) for x in zip(*grads, strict=True))


def drawn(case: Case, dtype: torch.dtype = torch.float32, seed: int = 0, stretch: float = 1.5, alike: bool = False) -> Run:
    """Inputs, and poisoned results: a kernel has to write every entry."""
    generator = seeded(seed)
    rows = case.group * case.length

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    queries, keys = stretch * normal(case.entries, rows, case.dim), normal(case.entries, case.keys, case.dim)
    values, upstream = normal(case.entries, case.keys, case.value_dim), normal(case.entries, rows, case.value_dim)
    if alike:
        keys = keys[:, :1].expand_as(keys).contiguous()
    output = torch.full((case.entries, rows, case.value_dim), torch.nan, device=DEVICE, dtype=dtype)
    lse = torch.full((case.entries, rows), torch.nan, device=DEVICE)
    cell_of = torch.full((case.entries, case.span_levels, case.keys), -77, dtype=torch.int32, device=DEVICE)
    opened = torch.full((case.entries, case.sizes.blocks_of(rows), case.probes), -77, dtype=torch.int32, device=DEVICE)
    order = torch.full((case.entries, rows if case.sizes.ordered else 0), -77, dtype=torch.int32, device=DEVICE)
    return Run(case, queries, keys, values, upstream, output, lse, cell_of, opened, order)


def run(case: Case, dtype: torch.dtype = torch.float32, iterations: int = 1, **options: Any) -> Run:
    """The same after a forward pass, whose cells are made in so many iterations of k-means."""
    found = drawn(case, dtype, **options)
    forward_again(found, iterations)
    return found


def forward_again(found: Run, iterations: int = 1) -> None:
    from nearfield.cells.triton.forward import forward

    plan = found.case.sizes, found.scale, KMeans(iterations)
    results = found.output, found.lse, found.cell_of, found.opened, found.order
    forward(found.queries, found.keys, found.values, found.case.visible(), *plan, *results, MemoryPolicy().beyond)


def off(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


LONGEST = ("causal-groups-window-padding", "causal-capped-span_levels", "groups-padding-odd-dims")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.long] * (name in LONGEST), id=name) for name, case in CASES.items()]
)
def test_kernels_compute_what_the_reference_says(case: Case) -> None:
    found = run(case)
    output, lse, grads = found.expected()
    torch.testing.assert_close(found.output.double(), output, atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(found.lse.double(), lse, atol=5e-6, rtol=5e-6)
    for mine, true in zip(found.gradients(), grads, strict=True):
        torch.testing.assert_close(mine.double(), true, atol=2e-5, rtol=2e-5)


def test_gradients_of_the_log_normaliser() -> None:
    found = run(CASES["causal"])
    found = replace(found, lse_upstream=torch.randn(found.lse.shape, generator=seeded(7)).to(DEVICE))
    for mine, true in zip(found.gradients(), found.expected()[2], strict=True):
        torch.testing.assert_close(mine.double(), true, atol=2e-5, rtol=2e-5)


WILD = torch.arange(40, device=DEVICE) % 32 >= 16


def with_far_keys_above(dtype: torch.dtype, share: int, above: float) -> Run:
    """WILD rows have logits `above` for keys of the first segment, and as much below zero for sinks and all others.

    A softmax begins with its own segment: weights of the first one leave the range of its base. Some of its cells stay closed
    or, where rows open cells together, all are opened and others are read before them.
    """
    case = Case(length=40, keys=200, segment=64, cell_size=8, probes=4 if share == 1 else 12, share=share)
    found = drawn(case, dtype)
    found.queries[:, WILD] = 0.0
    found.queries[:, WILD, 0] = 4.0 * above / found.scale
    found.keys[:, :, 0] = 0.25
    found.keys[:, :3, 0] = found.keys[:, 64:, 0] = -0.25
    forward_again(found)
    return found


@pytest.mark.parametrize("share", [1, 32])
def test_far_keys_whose_weights_leave_the_range_of_the_first(share: int) -> None:
    """A fixed base would need weights of 2^288."""
    found = with_far_keys_above(torch.float32, share, 100.0)
    output, lse, _ = found.expected()
    torch.testing.assert_close(found.output.double(), output, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found.lse.double(), lse, atol=1e-4, rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("share", [1, 32])
def test_far_keys_whose_weights_leave_the_range_of_float16(share: int) -> None:
    """It ends at 2^16, where float32 does not notice. Variances and the tilt of values are in bfloat16, good to 1%."""
    found = with_far_keys_above(torch.float16, share, 8.0)
    output, _, _ = found.expected()
    assert off(found.output, output) < 0.01


def test_a_row_beyond_the_range_changes_no_other() -> None:
    """Bit for bit: what a row gets must not depend on a later one of its block."""
    wild = with_far_keys_above(torch.float32, 1, 100.0)
    tame = replace(wild, queries=wild.queries.clone(), output=wild.output.clone(), lse=wild.lse.clone())
    tame.queries[:, WILD] = 0.1
    forward_again(tame)
    assert not torch.equal(wild.output[:, WILD], tame.output[:, WILD])
    assert torch.equal(wild.output[:, ~WILD], tame.output[:, ~WILD])
    assert torch.equal(wild.lse[:, ~WILD], tame.lse[:, ~WILD])


EXTREMES = {
    "causal": Case(length=32, keys=170, segment=40, cell_size=1, probes=3, span_levels=3),
    "shared": Case(length=32, keys=170, segment=40, cell_size=1, probes=3, span_levels=3, share=16),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", [0, 1], ids=["smallest", "largest"])
@pytest.mark.parametrize("name", EXTREMES)
def test_all_block_sizes_that_are_allowed_compute_the_same(name: str, end: int) -> None:
    """The smallest and the largest of every kernel at once, where there are several tiles of cells."""
    from nearfield.cells.triton.candidates import KERNELS, RANGES, UNREAD, is_allowed
    from nearfield.cells.triton.tiles import TileSizes
    from nearfield.cells.triton.tuning import trying_all

    blocks = {}
    for kernel in KERNELS:
        sizes = {**UNREAD, **{field: limits[end] for field, limits in RANGES[kernel].items()}}
        blocks[kernel] = TileSizes(warps=4, stages=1, **sizes)
        assert is_allowed(kernel, blocks[kernel])
    with trying_all(blocks):
        found = run(EXTREMES[name])
        output, lse, grads = found.expected()
        torch.testing.assert_close(found.output.double(), output, atol=5e-6, rtol=5e-6)
        torch.testing.assert_close(found.lse.double(), lse, atol=5e-6, rtol=5e-6)
        for mine, true in zip(found.gradients(), grads, strict=True):
            torch.testing.assert_close(mine.double(), true, atol=2e-5, rtol=2e-5)


class SeenCells:
    """The cells of the first entry, as plain lists of their members."""

    def __init__(self, found: Run) -> None:
        from nearfield.cells.triton.layout import layout_of

        case, visible = found.case, found.case.visible()
        self.layout = layout_of(case.keys, case.sizes, DEVICE)
        cell_of, every = found.cell_of[0].flatten().long(), found.keys[0].double().repeat(case.span_levels, 1)
        self.members = [every[cell_of == cell] for cell in range(self.layout.cells)]
        closed = closed_keys(visible, case.sizes, case.group)[0]
        self.closed = closed // case.segment if case.segment else torch.ones_like(closed)

    def scores(self, row: int, query: Tensor) -> dict[int, float]:
        """q.mu + 3 sd, sd at most 3, of every cell that has members and that this row sees, for a query (times scale)."""
        seen = [span.number for span in self.layout.spans.seen(int(self.closed[row]))]
        found = {}
        for cell, own in enumerate(self.members):
            if len(own) and int(self.layout.span_of_cell[cell]) in seen:
                spread = (query.square() * own.var(0, correction=0)).sum().sqrt().clamp(max=3.0)
                found[cell] = float(query @ own.mean(0) + ROUTE_SPREADS * spread)
        return found


def routing_scores(found: Run) -> list[dict[int, float]]:
    """For each row of the first entry."""
    cells, queries = SeenCells(found), found.queries[0].double() * found.scale
    return [cells.scores(row, queries[row]) for row in range(found.case.length)]


@pytest.mark.parametrize("name", ["plain", pytest.param("causal", marks=pytest.mark.long)])
def test_the_best_cells_are_opened(name: str) -> None:
    """Of what a row sees, by q.mu + 3 sd."""
    found = run(replace(CASES[name], cell_size=2, probes=4))
    for row, scores in enumerate(routing_scores(found)):
        best = sorted(scores, key=lambda cell, scores=scores: -scores[cell])
        opened = [cell for cell in found.opened[0, row].tolist() if cell >= 0]
        assert len(opened) == len(set(opened)) == min(found.case.probes, len(best))
        # A score is told up to its last ten binary digits.
        assert not opened or min(scores[cell] for cell in opened) >= scores[best[len(opened) - 1]] - 1e-2


@pytest.mark.long
@pytest.mark.parametrize("probes", [6, 40])
@pytest.mark.parametrize("segment", [0, 48])
def test_of_many_cells_nearly_all_of_the_best_are_opened(segment: int, probes: int) -> None:
    """Several tiles of cells. One of the best is missed only where two (for many probes four) better ones share its column."""
    length = 24 if probes < 10 else 16
    found = run(Case(length=length, keys=210, segment=segment, cell_size=2, probes=probes, span_levels=3 if segment else 1))
    scores = routing_scores(found)
    wanted = hit = 0
    for row in range(length):
        best = sorted(scores[row], key=lambda cell, row=row: -scores[row][cell])[:probes]
        opened = [cell for cell in found.opened[0, row].tolist() if cell >= 0]
        assert len(opened) == len(set(opened)) == len(best)
        assert set(opened) <= set(scores[row])
        wanted, hit = wanted + len(best), hit + len(set(best) & set(opened))
    assert hit >= 0.97 * wanted


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "causal"])
def test_of_equal_scores_some_are_opened(name: str) -> None:
    """A zero query has equal scores everywhere, and every key weighs the same."""
    found = run(replace(CASES[name], cell_size=2, probes=2), stretch=0.0)
    output, lse, grads = found.expected()
    assert int((found.opened >= 0).sum(-1).max()) == found.case.sizes.probes
    torch.testing.assert_close(found.output.double(), output, atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(found.lse.double(), lse, atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(output[0, -1], found.values[0].double().mean(0), atol=1e-9, rtol=1e-9)
    for mine, true in zip(found.gradients(), grads, strict=True):
        torch.testing.assert_close(mine.double(), true, atol=2e-5, rtol=2e-5)


def block_votes(found: Run, cells: SeenCells) -> list[dict[int, float]]:
    """For each block of the first entry, what every eight rows together give each key of the cells that the first row sees."""
    case, queries = found.case, found.queries[0].double() * found.scale
    votes: list[dict[int, float]] = []
    for member in range(case.group):
        place = torch.arange(case.length, device=DEVICE)
        if not case.segment:
            place = found.order[0, member * case.length : (member + 1) * case.length].long()
        for begin in range(0, case.length, case.share):
            votes.append({})
            for first in range(begin, min(begin + case.share, case.length), 8):
                last = min(first + 8, case.length)
                mean = queries[member * case.length + place[first:last]].mean(0)
                weights = {cell: math.exp(x) for cell, x in cells.scores(member * case.length + begin, mean).items()}
                total = sum(len(cells.members[cell]) * weight for cell, weight in weights.items())
                for cell, weight in weights.items():
                    votes[-1][cell] = votes[-1].get(cell, 0.0) + weight / total
    return votes


VOTES: dict[str, tuple[Case, float]] = {
    "plain": (Case(group=2, length=45, keys=150, probes=6, padding=7, share=16), 1.5),
    # Cells with next to no votes, down to 2^-40 of the most, are opened too: were something added to all, these could not be told
    # apart.
    "steep": (Case(length=41, keys=150, cell_size=3, probes=24, share=16), 30.0),
    "causal": (Case(group=2, length=51, keys=120, segment=24, cell_size=3, probes=5, span_levels=3, padding=5, share=16), 3.0),
}
"""Cases, and how long their queries are."""


@pytest.mark.parametrize("name", list(VOTES))
def test_a_block_opens_the_cells_with_most_votes(name: str) -> None:
    """As many of the best as fit into two limits. Votes are told apart to 1 part in 1,000, down to 2^-40 of the largest."""
    case, stretch = VOTES[name]
    found = run(case, stretch=stretch)
    cells = SeenCells(found)
    most_keys = case.probes * -(-cells.layout.segment // cells.layout.cells_per_segment)
    limited = 0
    for votes, row in zip(block_votes(found, cells), found.opened[0].tolist(), strict=True):
        opened = {cell for cell in row if cell >= 0}
        assert opened <= set(votes)
        assert row == [*(cell for cell in row if cell in opened), *[-1] * (case.probes - len(opened))]
        assert len(opened) == sum(cell >= 0 for cell in row)
        keys = sum(len(cells.members[cell]) for cell in opened)
        assert keys <= most_keys
        closed = sorted(set(votes) - opened, key=lambda cell, votes=votes: -votes[cell])
        assert opened
        best = votes[closed[0]] if closed else 0.0
        if best > 2**-39 * max(votes.values()):
            assert min(votes[cell] for cell in opened) >= 0.999 * best
            # Equals are opened together, or not at all.
            equals = [cell for cell in closed if votes[cell] >= 0.999 * best]
            too_many = len(opened) + len(equals) > case.probes
            too_large = keys + sum(len(cells.members[cell]) for cell in equals) > most_keys
            assert too_many or too_large
            limited += 1
    assert limited > 0


IN_ORDER = {
    "groups-padding": Case(entries=2, group=2, length=75, keys=150, probes=6, padding=7, share=16),
    # Several tiles of cells.
    "many-cells": Case(length=90, keys=300, cell_size=2, share=32),
    "many-rows": Case(group=3, length=200, keys=40, dim=24, share=64),
    "one-cell": Case(length=50, keys=20, cell_size=20, share=16),
    "nothing-visible": Case(length=20, keys=9, padding=9, share=16),
}


CHUNKS = [*((name, 64) for name in IN_ORDER), pytest.param("many-rows", 1024, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("name", "chunk"), CHUNKS)
def test_without_a_mask_rows_are_in_the_order_of_their_best_cells(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each head by itself; of rows with the same best cell in their own order. So many rows are counted at a time."""
    from nearfield.cells.triton import cluster

    monkeypatch.setattr(cluster, "KEYS", chunk)
    found = run(IN_ORDER[name])
    case, cells = found.case, SeenCells(found)
    queries = found.queries[0].double() * found.scale
    order = found.order.view(case.entries, case.group, case.length)
    assert torch.equal(order.sort(-1).values, torch.arange(case.length, device=DEVICE).expand_as(order))
    for member in range(case.group):
        scores = [cells.scores(row, queries[row]) for row in range(member * case.length, (member + 1) * case.length)]
        before, cell = -1, -1
        for position in order[0, member].tolist():
            own = scores[position]
            # A score is told up to its last few binary digits.
            best = [c for c in own if own[c] >= max(own.values()) - 1e-4 * (1 + abs(max(own.values())))]
            same = position > before and (cell in best or not own)
            if not same:
                cell = min((c for c in best if c > cell), default=-1)
                assert cell >= 0
            before = position
    again = run(IN_ORDER[name])
    assert torch.equal(again.order, found.order)
    assert torch.equal(again.output, found.output)


def test_entries_vote_by_their_own_order() -> None:
    """An entry of a batch comes out as it does by itself."""
    case = Case(entries=2, group=2, length=40, keys=90, probes=4, share=16)
    both = run(case)
    assert not torch.equal(both.order[0], both.order[1])
    tensors = {name: x[1:].clone() for name, x in vars(both).items() if isinstance(x, Tensor)}
    alone = replace(both, case=replace(case, entries=1), **tensors)
    forward_again(alone)
    for name in ("order", "opened", "output"):
        assert torch.equal(getattr(alone, name)[0], getattr(both, name)[1])


def test_a_query_that_is_not_finite_has_a_place() -> None:
    """And spoils no row but its own."""
    case = Case(group=2, length=40, keys=90, probes=4, share=16)
    found, spoilt = drawn(case), drawn(case)
    rows = torch.zeros(1, 80, dtype=torch.bool, device=DEVICE)
    for row, bad in ((0, torch.nan), (33, torch.inf), (34, -torch.inf), (79, torch.nan)):
        rows[0, row] = True
        spoilt.queries[0, row, 3] = bad
    # Large, but finite.
    found.queries[0, 50], spoilt.queries[0, 50] = 1e19, 1e19
    for one in (found, spoilt):
        forward_again(one)
        order = one.order.view(2, 40).sort(1).values
        assert torch.equal(order, torch.arange(40, device=DEVICE).expand_as(order))
    assert torch.isfinite(spoilt.output[~rows]).all()
    assert torch.isnan(spoilt.output[rows]).any(-1).sum() >= 2
    clean = ~rows
    clean[0, 50] = False
    assert off(spoilt.output[clean], found.output[clean]) < 0.5


GRID: list[Any] = [
    pytest.param(dtype, dim, segment, share, id=f"{str(dtype)[6:]}-{dim}-{'causal' if segment else 'plain'}-{share}")
    for dtype in (torch.bfloat16, torch.float16, torch.float32)
    for dim in (16, 40, 64, 128, 256)
    for segment in (0, 128)
    for share in (1, 128)
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "dim", "segment", "share"), GRID)
def test_every_dtype_and_dimension(dtype: torch.dtype, dim: int, segment: int, share: int) -> None:
    """Off by no more than twice what plain torch in the same dtype is off by."""
    case = Case(2, 2, 300, 417, dim, dim, segment, 1 if segment else 0, 16, 16, 8, 3 if segment else 1, padding=9, share=share)
    found = run(case, dtype)
    output, _, grads = found.expected()
    plain, _, plain_grads = found.expected(dtype)
    floor = 2e-6 if dtype == torch.float32 else 0.0
    assert off(found.output, output) <= 2 * off(plain, output) + floor
    for mine, eager, true in zip(found.gradients(), plain_grads, grads, strict=True):
        assert off(mine, true) <= 2 * off(eager, true) + floor


@pytest.mark.gpu
def test_deterministic_when_asked() -> None:
    found = run(Case(2, 2, 600, 900, 64, 64, 128, 1, 16, 16, 8, 3, padding=50))
    torch.use_deterministic_algorithms(True)
    try:
        first, second = found.gradients(), found.gradients()
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("tile", [16, 64])
@pytest.mark.parametrize("segment", [0, 64])
def test_cells_are_as_tight_as_on_a_cpu(segment: int, tile: int) -> None:
    """By what k-means makes small: squared deviations from the mean of a cell, over all spans. In tiles of so many cells."""
    from nearfield.cells.triton.layout import layout_of
    from nearfield.cells.triton.tuning import TileSizes, trying

    case = Case(length=8, keys=256, segment=segment, sinks=0, cell_size=8, span_levels=3 if segment else 1)
    with trying("nearest", TileSizes(64, 4, 1, keys=tile)), trying("means", TileSizes(tile, 4, 1)):
        found = run(case, iterations=3)
    layout = layout_of(case.keys, case.sizes, DEVICE)
    edges = layout.spans.edges(layout.cells_per_segment)

    def inside(keys: Tensor, cell_of: Tensor) -> float:
        return sum(float((own - own.mean(0)).square().sum()) for own in (keys[cell_of == cell] for cell in cell_of.unique()))

    mine = reference = 0.0
    for span in layout.spans.all:
        where = slice(span.first * layout.segment, (span.first + span.segments) * layout.segment)
        own = found.keys[0, where]
        mine += inside(own, found.cell_of[0, span.level, where])
        reference += inside(own, KMeans(iterations=3).build(own[None], edges[span.number + 1] - edges[span.number])[0])
    assert mine <= 1.04 * reference


@pytest.mark.parametrize(("length", "cells", "dim"), [(600, 70, 16), (500, 130, 24), (100, 100, 16)])
def test_means_of_many_cells_at_once(length: int, cells: int, dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same cells, whether a program goes through all points or lists those of its own cells first."""
    from nearfield.cells.triton import cluster
    from nearfield.cells.triton.forward import group_keys

    keys = torch.randn(2, length, dim, generator=seeded(0)).to(DEVICE)
    monkeypatch.setattr(cluster, "MANY_CELLS", cells + 1)
    expected = group_keys(keys, cells, 3, 0)
    monkeypatch.setattr(cluster, "MANY_CELLS", cells)
    monkeypatch.setattr(cluster, "LISTED", 128)
    launched = []
    monkeypatch.setattr(cluster, "_means_of_many", Watched(cluster._means_of_many, launched))
    assert torch.equal(group_keys(keys, cells, 3, 0), expected)
    assert len(launched) == 3


class Watched:
    """A kernel whose launches are counted."""

    def __init__(self, kernel: Any, launched: list[Any]) -> None:
        self.kernel, self.launched = kernel, launched

    def __getitem__(self, grid: Any) -> Any:
        self.launched.append(grid)
        return self.kernel[grid]


@pytest.mark.parametrize("many", [1, 1 << 30])
def test_an_empty_cell_starts_again_elsewhere(many: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of cells that start at equal keys all but one are empty at first: turn by turn, more places have a cell of their own."""
    from nearfield.cells.triton import cluster
    from nearfield.cells.triton.cluster import kmeans
    from nearfield.cells.triton.layout import layout_of

    monkeypatch.setattr(cluster, "MANY_CELLS", many)
    case = Case(keys=256, sinks=0, cell_size=8)
    place = torch.randint(24, (case.keys,), generator=seeded(1)).to(DEVICE)
    keys = torch.randn(24, case.dim, generator=seeded(0)).to(DEVICE)[place][None]
    cells = []
    for iterations in (0, 3, 9):
        found = torch.empty(1, 1, case.keys, dtype=torch.int32, device=DEVICE)
        kmeans(keys, layout_of(case.keys, case.sizes, DEVICE), iterations, 0, None, found)
        cells.append(len(found.unique()))
    assert cells[0] < cells[1] < cells[2] == 24


@pytest.mark.long
@pytest.mark.parametrize("name", ["plain", "causal"])
def test_keys_that_are_alike_do_not_share_one_cell(name: str) -> None:
    from nearfield.cells.triton.layout import layout_of

    case = replace(CASES[name], length=30, keys=300, cell_size=4, sinks=0, segment=64 if CASES[name].segment else 0)
    found = run(case, alike=True)
    layout = layout_of(case.keys, case.sizes, DEVICE)
    counts = torch.bincount(found.cell_of[found.cell_of >= 0].flatten().long(), minlength=layout.cells)
    assert int(counts.max()) <= 9 * case.cell_size  # eight times the mean, and what the host had
    output, lse, _ = found.expected()
    torch.testing.assert_close(found.output.double(), output, atol=5e-6, rtol=5e-6)
    torch.testing.assert_close(found.lse.double(), lse, atol=5e-6, rtol=5e-6)


@pytest.mark.parametrize("name", ["plain", "groups-padding-odd-dims", "causal-groups-window-padding", "nothing-visible"])
def test_exact_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What an audit compares with."""
    from nearfield.kernels import exact_rows, reference

    monkeypatch.setattr(exact_rows, "SHARES", 3)
    case = CASES[name]
    found = drawn(case)
    visible = case.visible()
    entry = torch.arange(case.entries, device=DEVICE).repeat_interleave(visible.shape[1])
    row = torch.arange(visible.shape[1], device=DEVICE).repeat(case.entries)
    rows = exact_rows.exact_rows(found.queries, found.keys, found.values, visible, entry, row, -0.7)
    inputs = (x.double() for x in (-0.7 * found.queries, found.keys, found.values))
    expected, _ = reference.exact_attention(*inputs, visible)
    torch.testing.assert_close(rows.double(), expected.flatten(0, 1), atol=5e-6, rtol=5e-6)


@pytest.mark.long
def test_more_heads_than_a_grid_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    from nearfield.cells.triton import backward as triton_backward
    from nearfield.cells.triton import forward as triton_forward
    from nearfield.cells.triton import memory as triton_memory

    case = replace(CASES["causal"], entries=3, length=20, keys=20)
    together = run(case)
    grads = together.gradients()
    for module in (triton_memory, triton_forward, triton_backward):
        monkeypatch.setattr(module, "MOST_ENTRIES", 2)
    apart = run(case)
    assert torch.equal(apart.output, together.output)
    for mine, expected in zip(apart.gradients(), grads, strict=True):
        torch.testing.assert_close(mine, expected)
