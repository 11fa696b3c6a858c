"""Cells: blocks of rows that open cells together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from by_hand import QKV, inputs, seeded, spans_seen
from cells_cases import method_of, problem
from torch import Tensor

import nearfield as nf
from nearfield import synthetic
from nearfield.cells import far_field
from nearfield.cells import method as cells_method
from nearfield.cells.cache import CellStore
from nearfield.cells.operator import CellsResult, Recipe, cells_attention
from nearfield.cells.partition import to_plain
from nearfield.cells.sizes import CellSizes, default_probes
from nearfield.cells.spans import blocks_of_rows, closed_keys
from nearfield.cells.torch import forward as torch_forward
from nearfield.kernels import backends
from nearfield.problem import check

SHARES = (16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One head with one call of the operator."""

    tensors: QKV
    visible: Tensor
    sizes: CellSizes
    partition: Any = dataclasses.field(default_factory=nf.KMeans)

    def run(self) -> CellsResult:
        recipe = Recipe(self.sizes, 0.6, 0.0, *to_plain(self.partition), "torch")
        return cells_attention(*self.tensors, self.visible, torch.tensor(3), recipe)


def operation(
    length: int = 90,
    keys: int = 90,
    group: int = 1,
    causal: bool = True,
    offset: int = 0,
    hidden: int = 0,
    places: int = 0,
    spread: float = 1.5,
    segment: int = 12,
    dtype: torch.dtype = torch.float64,
    partition: Any = None,
    **sizes: int,
) -> Operation:
    """`offset`: the first query is at this position. `hidden`: how many keys are padding, hence gone: with a mask the first ones.
    `places`: how many different keys there are; 0: all differ."""
    q, k, v = inputs(1, queries=group * length, keys=keys, dim=6, dtype=dtype)
    if places:
        k = k[:, torch.randint(places, (keys,), generator=seeded(1))]
    seen = (torch.arange(1, length + 1) + offset - hidden).clamp(0, keys) if causal else torch.full((length,), keys - hidden)
    segment = segment if causal else 0
    plain = {"window": 0, "sinks": 2, "cell_size": 3, "probes": 3, "samples": 0, "share": 16}
    plain["span_levels"] = (keys // segment).bit_length() if causal else 1
    own = CellSizes(**{"group": group, "segment": segment, **plain, **sizes})
    return Operation((spread * q, k, v), seen.repeat(group)[None], own, partition or nf.KMeans())


OPERATIONS: dict[str, dict[str, Any]] = {
    "plain": {"causal": False},
    "uneven-groups": {"causal": False, "length": 53, "group": 3},
    "plain-padding": {"causal": False, "length": 45, "keys": 120, "hidden": 33, "group": 2},
    "plain-empty-cells": {"causal": False, "places": 12, "cell_size": 2, "probes": 5, "share": 32},
    "plain-steep": {"causal": False, "spread": 6.0, "length": 150, "cell_size": 9},
    "causal": {},
    "blocks-over-several-segments": {"segment": 5, "cell_size": 2, "share": 32},
    "segments-over-several-blocks": {"segment": 40, "group": 2, "length": 87},
    "one-block": {"share": 256, "length": 60, "offset": 30},
    "groups": {"group": 3, "length": 85, "segment": 7},
    "few-queries": {"length": 40, "offset": 50, "group": 2},
    "later-queries": {"length": 45, "keys": 120, "offset": 64, "segment": 16},
    "padding": {"hidden": 21, "group": 2},
    "window": {"window": 2, "segment": 8, "share": 32},
    "many-sinks": {"sinks": 30, "segment": 8},
    "empty-cells": {"places": 4, "cell_size": 2, "probes": 5, "segment": 8},
    "more-probes-than-cells": {"probes": 40},
    "sharp": {"spread": 6.0, "group": 2, "length": 60},
    "blocks": {"partition": nf.Blocks(), "segment": 10},
}


# The rule


def blocks_by_hand(operation: Operation, cell_of: Tensor) -> Iterator[tuple[list[int], int]]:
    """(rows, closed keys) of every block, in the order in which they are numbered. `cell_of`: as the call has found it."""
    sizes, visible = operation.sizes, operation.visible[0].tolist()
    length = len(visible) // sizes.group
    for member in range(sizes.group):
        every = [member * length + place for place in range(length)]
        if not sizes.segment:
            best = best_cells_by_hand(operation, cell_of)
            every.sort(key=lambda row: (best[row], row))
        for start in range(0, length, sizes.share):
            rows = every[start : start + sizes.share]
            fewest = min(visible[row] for row in rows)
            segments = max(0, (fewest - 1) // sizes.segment - sizes.window) if sizes.segment else 0
            yield rows, segments * sizes.segment if sizes.segment else fewest


def scores_by_hand(query: Tensor, keys: Tensor, members: dict[int, list[int]]) -> dict[int, float]:
    """q.mu_c + 3 sqrt(u_c), u_c at most 9"""
    score = {}
    for cell, own in members.items():
        spread = min(9.0, float((query.square() * keys[own].var(0, correction=0)).sum()))
        score[cell] = float(query @ keys[own].mean(0)) + 3 * math.sqrt(spread)
    return score


def best_cells_by_hand(operation: Operation, cell_of: Tensor) -> list[int]:
    """The cell of largest score of every row, without a mask."""
    queries, keys = 0.6 * operation.tensors[0][0], operation.tensors[1][0]
    members = members_seen(cell_of, int(operation.visible[0, 0]), operation.sizes)
    found = []
    for query in queries:
        score = scores_by_hand(query, keys, members)
        found.append(max(score, key=lambda cell: score[cell]))
    return found


def members_seen(cell_of: Tensor, closed: int, sizes: CellSizes) -> dict[int, list[int]]:
    """The keys of each cell that a row sees which sees so many keys closed."""
    size = sizes.segment or max(1, closed)
    found: dict[int, list[int]] = {}
    for level, first in spans_seen(closed // size, sizes.span_levels):
        for key in range(first * size, (first + 2**level) * size):
            cell = int(cell_of[level, key])
            if cell >= 0:
                found.setdefault(cell, []).append(key)
    return found


def votes_by_hand(queries: Tensor, keys: Tensor, members: dict[int, list[int]]) -> dict[int, float]:
    """w_c: every eight rows on average, then each mean's e^{s_c} over the sum of n e^s, then the sum over the means."""
    votes = dict.fromkeys(members, 0.0)
    for start in range(0, len(queries), 8):
        mean = queries[start : start + 8].mean(0)
        score = scores_by_hand(mean, keys, members)
        total = sum(len(own) * math.exp(score[cell]) for cell, own in members.items())
        for cell in members:
            votes[cell] += math.exp(score[cell]) / total
    return votes


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_block_opens_the_cells_with_most_votes(name: str) -> None:
    call = operation(**OPERATIONS[name])
    result = call.run()
    queries, keys = 0.6 * call.tensors[0][0], call.tensors[1][0]
    every, read, some = list(blocks_by_hand(call, result.cell_of[0])), 0, 0
    assert result.opened.shape == (1, len(every), call.sizes.probes)
    for block, (rows, closed) in enumerate(every):
        members = members_seen(result.cell_of[0], closed, call.sizes)
        votes = votes_by_hand(queries[rows], keys, members)
        best = sorted(votes, key=lambda cell: -votes[cell])[: call.sizes.probes]
        slots = result.opened[0, block].tolist()
        found = [cell for cell in slots if cell >= 0]
        assert len(found) == len(set(found)) == len(best)
        # Cells of different spans may hold the same keys, and so have the same votes.
        assert not found or min(votes[cell] for cell in found) >= (1 - 1e-9) * votes[best[-1]]
        assert len(slots) == len(found) + slots.count(-1)
        some += len(found)
        for row in rows:
            seen = int(call.visible[0, row])
            near = {key for cell in found for key in members[cell]} | set(range(min(seen, call.sizes.sinks)))
            read += len(near | set(range(closed, seen)))
    assert some > 0
    per_query = cells_method._keys_per_query(result, call.visible, call.sizes)
    assert per_query == pytest.approx(read / call.visible.shape[1])


def test_votes_by_hand() -> None:
    """Two blocks of two means; the second block has one mean alone. The second cell is empty."""
    size = torch.tensor([2.0, 0.0, 1.0])
    score = torch.tensor([[0.0, -math.inf, 0.0], [0.0, -math.inf, 2.0], [1.0, -math.inf, 0.0], [0.0, -math.inf, 9.0]])
    present = torch.tensor([[True, True], [True, False]])

    def opened(score: Tensor, count: int) -> list[list[int]]:
        return far_field.open_together(score, torch.zeros_like(score), size, present, count).tolist()

    # 1/3 + 1/(2 + e^2) against 1/3 + e^2/(2 + e^2); e/(2e + 1) against 1/(2e + 1).
    assert opened(score, 1) == [[2], [0]]
    assert [sorted(x) for x in opened(score, 3)] == [[-1, 0, 2], [-1, 0, 2]]
    assert opened(score + 1e4, 1) == opened(score - 1e4, 1) == [[2], [0]]
    # A large cell costs as many keys as it has, so it should not be preferred for its size.
    even = torch.tensor([[0.0, -math.inf, 0.01]]).expand(4, 3)
    assert opened(even, 1) == [[2], [2]]
    # A mean whose scores overflow has one vote like all others, and leaves the others theirs.
    huge = score.clone()
    huge[0, 2] = huge[1, 2] = math.inf
    assert opened(huge, 1) == [[2], [0]]
    spread = torch.tensor([[4.0, 0.0, 0.0]]).expand(4, 3)
    first = torch.tensor([[0.0, -math.inf, 5.9]]).expand(4, 3)
    assert far_field.open_together(first, spread, size, present, 1).tolist() == [[0], [0]], "3 standard deviations of 2"


def test_no_cell_has_keys() -> None:
    nothing = torch.full((2, 3), -math.inf)
    found = far_field.open_together(nothing, torch.zeros(2, 3), torch.zeros(3), torch.ones(1, 2, dtype=torch.bool), 2)
    assert found.tolist() == [[-1, -1]]


@pytest.mark.parametrize("length", [1, 7, 8, 9, 16, 31, 32, 33, 80])
@pytest.mark.parametrize("share", [16, 32])
def test_means_of_eight_rows(share: int, length: int) -> None:
    queries = torch.randn(3, length, 5, generator=seeded(0), dtype=torch.float64)
    means, present = far_field.pooled(queries, share)
    assert far_field.POOL == 8
    expected = []
    for run in queries:
        for start in range(0, length, share):
            block = run[start : min(start + share, length)]
            expected.append([part.mean(0) for part in block.split(8)])
    assert means.shape == (len(expected), share // 8, 5)
    for number, parts in enumerate(expected):
        assert present[number].tolist() == [place < len(parts) for place in range(share // 8)]
        torch.testing.assert_close(means[number, : len(parts)], torch.stack(parts))
    assert bool(means.isfinite().all())


@pytest.mark.parametrize("causal", [False, True])
def test_equal_queries_agree_with_each_of_them(causal: bool) -> None:
    """Where all rows of a block are the same, the block opens what each of them would."""
    # Without a mask rows are put in order, which leaves blocks of equals whole where there are sixteen of each.
    for group, length in ((1, 96), (2, 83 if causal else 80)):
        call = operation(length=length, keys=96, group=group, causal=causal, segment=16)
        query = call.tensors[0].view(1, group, length, -1)[:, :, torch.arange(length) // 16].flatten(1, 2)
        call = dataclasses.replace(call, tensors=(query, *call.tensors[1:]))
        alone = dataclasses.replace(call, sizes=call.sizes._replace(share=1)).run()
        found = call.run()
        block = blocks_of_rows(group * length, call.sizes, query.device, found.order[0].long())
        assert torch.equal(found.opened[0, block].sort(1).values, alone.opened[0].sort(1).values)
        torch.testing.assert_close(found.output, alone.output)


# Which rows are a block, and what they see closed


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("group", "length"), [(1, 1), (1, 64), (2, 100), (3, 257), (2, 0)])
def test_blocks_of_rows(group: int, length: int, share: int) -> None:
    sizes = CellSizes(group, 16, 0, 0, 4, 1, 0, 1, share)
    expected = [member * math.ceil(length / share) + place // share for member in range(group) for place in range(length)]
    assert blocks_of_rows(group * length, sizes, torch.device("cpu")).tolist() == expected
    assert sizes.blocks_of(group * length) == len(set(expected))
    assert sizes._replace(share=1).blocks_of(group * length) == group * length


@pytest.mark.parametrize("name", OPERATIONS)
def test_what_the_rows_of_a_block_see_closed(name: str) -> None:
    call = operation(**OPERATIONS[name])
    sizes, group = call.sizes, call.sizes.group
    expected = [closed for rows, closed in blocks_by_hand(call, call.run().cell_of[0]) for _ in rows]
    assert closed_keys(call.visible[0], sizes, group).tolist() == expected
    assert closed_keys(call.visible.expand(2, -1), sizes, group).tolist() == [expected] * 2
    length = call.visible.shape[1] // group
    assert closed_keys(call.visible[0, :length], sizes).tolist() == expected[:length]


def test_a_single_row_is_a_block_of_its_own_by_default() -> None:
    problem = check(*inputs(1, 1, queries=64), None, 0.0, True, None, False)
    assert nf.Cells().sizes(problem).share == nf.Cells(share=1).sizes(problem).share == 1
    assert nf.Cells(share=32).sizes(problem).share == 32


def share_of(method: nf.Cells, needed: bool = False, causal: bool = False, dropout: float = 0.0, queries: int = 64) -> int:
    q, k, v = inputs(1, 1, queries=queries, keys=2048)
    return method.sizes(check(q, k, v.requires_grad_(needed), None, dropout, causal, None, False)).share


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are those of a GPU. Nothing is to be run."""
    monkeypatch.setattr(backends, "runs_triton", lambda device: True)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("needed", [False, True])
def test_on_a_gpu_rows_open_cells_together_where_there_is_no_mask(needed: bool) -> None:
    """From eight blocks on, where kernels serve the call, and no budget was given that is meant for each row."""
    assert [share_of(nf.Cells(), needed, queries=count) for count in (1, 128, 1023, 1024, 5000)] == [1, 1, 1, 128, 128]
    assert {share_of(nf.Cells(), needed, causal=True, queries=count) for count in (1, 1024, 5000)} == {1}
    assert share_of(nf.Cells(share=1), needed, queries=5000) == 1
    assert share_of(nf.Cells(cell_size=16), needed, queries=5000) == 128
    for method in (nf.Cells(probes=4), nf.Cells(samples=2), nf.Cells(partition=nf.Blocks()), nf.Cells(cell_size=1)):
        assert share_of(method, needed, queries=5000) == 1
    assert share_of(nf.Cells(), needed, dropout=0.1, queries=5000) == 1


def test_on_a_cpu_rows_are_by_themselves() -> None:
    assert share_of(nf.Cells(), queries=5000) == 1


@pytest.mark.parametrize(("length", "keys"), [(8192, 1027), (131072, 2055)])
def test_how_many_keys_a_block_opens(length: int, keys: int) -> None:
    """Without a mask 108 length^(1/4), with one 115; a row by itself opens 54 on a CPU, on a GPU 27 and 60."""
    assert default_probes(length, 1, share=128) == default_probes(length, 1, on_gpu=True, share=128) == keys
    assert default_probes(length, 1, causal=True, share=128) == pytest.approx(keys * 115 / 108, abs=1)
    assert default_probes(length, 1) == pytest.approx(keys / 2, abs=1)
    assert default_probes(length, 1, on_gpu=True) == pytest.approx(keys / 4, abs=1)
    assert default_probes(length, 1, causal=True, on_gpu=True) == pytest.approx(keys * 60 / 108, abs=1)
    assert default_probes(length, 512, share=128) == 8
    assert default_probes(length, 512, causal=True, share=128) == 12


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("share", [1, 16, 128, 256])
def test_a_share_that_is_given_is_kept(share: int) -> None:
    method = nf.Cells(share=share)
    assert {share_of(method, needed, causal) for needed in (False, True) for causal in (False, True)} == {share}
    assert share_of(nf.Cells(share=share, samples=2)) == share_of(method, dropout=0.1) == share


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("how", ["compile", "vmap"])
@pytest.mark.parametrize(("length", "expected"), [(64, 1), (1024, 128)])
def test_a_traced_call_has_the_same_blocks(how: str, length: int, expected: int) -> None:
    def shares(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        problem = check(q, k, v)
        return torch.tensor([nf.Cells().sizes(problem).share, nf.Cells(share=32).sizes(problem).share])

    torch.compiler.reset()
    traced = torch.compile(shares, backend="eager", fullgraph=True) if how == "compile" else torch.vmap(shares, out_dims=None)
    assert traced(*inputs(2, 1, queries=length)).tolist() == [expected, 32]
    torch.compiler.reset()


@pytest.mark.parametrize("causal", [False, True])
def test_one_row_at_a_time_is_what_it_was(causal: bool) -> None:
    tensors = inputs(1, 2, queries=100, kv_heads=1)
    one, two, three = (
        nf.estimate(*tensors, is_causal=causal, enable_gqa=True, method=nf.Cells(cell_size=4, probes=2, segment=16, share=share))
        for share in (None, 1, 16)
    )
    assert torch.equal(one.output, two.output)
    assert torch.equal(one.lse, two.lse)
    assert not torch.allclose(one.output, three.output)
    assert [est.info["share"] for est in (one, two, three)] == [1, 1, 16]


# The order of rows without a mask

PLAIN = [name for name, case in OPERATIONS.items() if not case.get("causal", True)]


@pytest.mark.parametrize("name", PLAIN)
def test_rows_are_in_the_order_of_their_best_cells(name: str) -> None:
    """Head by head, and rows with the same cell in their own order."""
    call = operation(**OPERATIONS[name])
    result, group = call.run(), call.sizes.group
    length = call.visible.shape[1] // group
    best = best_cells_by_hand(call, result.cell_of[0])
    assert result.order.dtype == torch.int32
    assert result.order.shape == (1, group * length)
    moved = 0
    for member, order in enumerate(result.order[0].view(group, length).tolist()):
        assert order == sorted(range(length), key=lambda place, member=member: (best[member * length + place], place))
        moved += order != list(range(length))
    assert moved == group


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_stay_in_their_order_where_there_is_a_mask_or_each_is_by_itself(name: str) -> None:
    call = operation(**OPERATIONS[name])
    alone = dataclasses.replace(call, sizes=call.sizes._replace(share=1))
    assert alone.run().order.shape == (1, 0)
    assert call.run().order.shape == (1, 0 if call.sizes.segment else call.visible.shape[1])


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("group", "length"), [(1, 1), (1, 64), (2, 100), (3, 257)])
def test_blocks_of_rows_that_are_in_an_order(group: int, length: int, share: int) -> None:
    sizes = CellSizes(group, 0, 0, 0, 4, 1, 0, 1, share)
    device = torch.device("cpu")
    order = torch.stack([torch.cat([torch.randperm(length, generator=seeded(i)) for _ in range(group)]) for i in range(2)])
    block = blocks_of_rows(group * length, sizes, device, order)
    assert block.shape == order.shape
    for entry in range(2):
        assert torch.equal(blocks_of_rows(group * length, sizes, device, order[entry]), block[entry])
        for member in range(group):
            for place, position in enumerate(order[entry, member * length : (member + 1) * length].tolist()):
                assert int(block[entry, member * length + position]) == member * math.ceil(length / share) + place // share


@pytest.mark.parametrize("name", PLAIN)
def test_other_places_of_the_same_queries_change_nothing(name: str) -> None:
    """Queries may come in any order that leaves those with the same best cell as they are: the blocks are the same."""
    call = operation(**OPERATIONS[name])
    result, group = call.run(), call.sizes.group
    length = call.visible.shape[1] // group
    best = torch.tensor(best_cells_by_hand(call, result.cell_of[0])).view(group, length)
    row = torch.empty(group, length, dtype=torch.int64)
    for member in range(group):
        shuffled = torch.randperm(length, generator=seeded(member))
        for cell in best[member].unique():
            here = (best[member, shuffled] == cell).nonzero()[:, 0]
            row[member, here] = shuffled[here].sort().values
    assert not torch.equal(row[0], torch.arange(length))
    number = (row + torch.arange(group)[:, None] * length).flatten()
    moved = dataclasses.replace(call, tensors=(call.tensors[0][:, number], *call.tensors[1:])).run()
    assert torch.equal(row.gather(1, moved.order.view(group, length).long()), result.order.view(group, length).long())
    assert torch.equal(moved.opened.sort(-1).values, result.opened.sort(-1).values)
    torch.testing.assert_close(moved.output, result.output[:, number])
    torch.testing.assert_close(moved.lse, result.lse[:, number])


@pytest.mark.parametrize("length", [61, 64])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_all_cells_opened_together_are_exact_attention(backend: str, length: int) -> None:
    q, k, v = inputs(2, 4, queries=length, keys=77, kv_heads=2, dtype=torch.float64)
    padding = (torch.arange(77) < torch.tensor([77, 50])[:, None])[:, None, None]
    options: dict[str, Any] = {"enable_gqa": True, "attn_mask": padding}
    method = nf.Cells(cell_size=4, probes=40, share=16)
    found = []
    for way in (method, nf.Exact()):
        x = [y.clone().requires_grad_() for y in (q, k, v)]
        output = nf.attention(*x, method=way, backend=backend if way is method else "auto", **options)
        upstream = torch.randn(output.shape, generator=seeded(3), dtype=torch.float64)
        found.append([output.detach(), *torch.autograd.grad(output, x, upstream)])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


def test_rows_in_order_share_well_where_consecutive_ones_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters that are strewn over all positions: rows that want the same cells are far apart. The mean of two partitions."""
    q, k, v = synthetic.make("clustered", 1, 2, 4096, 32, kv_heads=1)
    rows = torch.arange(0, 4096, 16)
    exact = torch.softmax((q[0, :, rows] @ k[0].mT).double() * 32**-0.5, -1) @ v[0].double()

    def error(share: int) -> float:
        methods = [nf.Cells(cell_size=32, probes=8, share=share, partition=nf.KMeans(seed=seed)) for seed in range(2)]
        outputs = torch.stack([nf.attention(q, k, v, enable_gqa=True, method=method)[0, :, rows] for method in methods])
        return float(((outputs - exact).norm(dim=-1) / exact.norm(dim=-1)).mean())

    alone, ordered = error(1), error(64)
    monkeypatch.setattr(torch_forward, "by_best_cell", lambda head: torch.arange(head.length).repeat(head.sizes.group))
    assert 5 * ordered < error(64)
    assert ordered < 1.5 * alone


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_query_that_is_not_finite_spoils_its_own_row(bad: float) -> None:
    q, k, v = inputs(1, 2, queries=70, keys=90, kv_heads=1)
    q[0, 1, 33, 2] = bad
    output = nf.attention(q, k, v, enable_gqa=True, method=nf.Cells(cell_size=4, probes=3, share=16))
    rows = torch.zeros(1, 2, 70, dtype=torch.bool)
    rows[0, 1, 33] = True
    assert torch.equal(output.isnan().any(-1), rows)


# Causality


@pytest.mark.parametrize("group", [1, 2])
def test_within_a_block_later_queries_matter_for_the_choice_alone(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the choice held fixed, no bit of a row depends on later queries of its block."""
    call = operation(group=group, length=85, dtype=torch.float32)
    chosen: list[Tensor] = []
    plain = torch_forward.open_together

    def note(*arguments: Any) -> Tensor:
        chosen.append(plain(*arguments))
        return chosen[-1]

    monkeypatch.setattr(torch_forward, "open_together", note)
    before = call.run()
    query, key, value = call.tensors
    row = 70  # of the block 64 ... 79
    later = query.clone().unflatten(1, (group, 85))
    later[:, :, row + 1 :] = 30 * torch.randn(later[:, :, row + 1 :].shape, generator=seeded(5))
    changed = dataclasses.replace(call, tensors=(later.flatten(1, 2), key, value))
    free = changed.run()
    monkeypatch.setattr(torch_forward, "open_together", lambda *_: chosen.pop(0))
    chosen = chosen[: len(chosen) // 2]
    fixed = changed.run()
    for name in ("output", "lse"):
        old, new, same = (getattr(x, name).unflatten(1, (group, 85))[:, :, : row + 1] for x in (before, free, fixed))
        assert torch.equal(old, same)
        assert torch.equal(old[:, :, :64], new[:, :, :64])
        assert not torch.equal(old[:, :, 64:], new[:, :, 64:]), "the choice sees them"


def opened_keys(result: CellsResult, call: Operation) -> Tensor:
    """`[rows, keys]`: which keys are in the cells that a row has opened, however these are numbered."""
    block = blocks_of_rows(call.visible.shape[1], call.sizes, call.visible.device)
    opened, cell_of = result.opened[0, block], result.cell_of[0]
    return ((cell_of[None, :, :, None] == opened[:, None, None]) & (opened >= 0)[:, None, None]).any(-1).any(1)


@pytest.mark.parametrize("name", ["causal", "groups", "segments-over-several-blocks", "window", "padding", "later-queries"])
def test_a_call_in_chunks_of_whole_blocks(name: str) -> None:
    """Each chunk opens the same cells as the whole call, and its rows come out the same up to rounding."""
    call = operation(**OPERATIONS[name])
    whole, group = call.run(), call.sizes.group
    length, share = call.visible.shape[1] // group, call.sizes.share
    near = opened_keys(whole, call).unflatten(0, (group, length))
    edges = [0, share, 2 * share, length] if length > 2 * share else [0, share, length]
    for start, stop in pairwise(edges):
        some = slice(start, stop)
        rows = call.tensors[0].unflatten(1, (group, length))[:, :, some].flatten(1, 2)
        visible = call.visible.unflatten(1, (group, length))[:, :, some].flatten(1, 2)
        chunk = dataclasses.replace(call, tensors=(rows, *call.tensors[1:]), visible=visible)
        found = chunk.run()
        assert torch.equal(opened_keys(found, chunk), near[:, some].flatten(0, 1))
        for x, y in zip(found[:2], whole[:2], strict=True):
            torch.testing.assert_close(x, y.unflatten(1, (group, length))[:, :, some].flatten(1, 2))


# Gradients


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_are_those_of_the_rows_with_the_same_cells(causal: bool) -> None:
    """A block of equal queries opens what each would, so the gradients are those of rows by themselves."""
    length = 83 if causal else 80
    case = {"causal": causal, "group": 2, "queries": length, "keys": 96, "segment": 16}
    (q, k, v), _ = problem(case, torch.float64)
    found = []
    for share in (1, 16):
        x = [y.clone().requires_grad_() for y in (q[:, :, torch.arange(length) // 16 * 16], k, v)]
        output = nf.attention(*x, is_causal=causal, enable_gqa=True, method=method_of({**case, "share": share}))
        upstream = torch.randn(output.shape, generator=seeded(3), dtype=torch.float64)
        found.append([output.detach(), *torch.autograd.grad(output, x, upstream)])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two)


# What is refused


@pytest.mark.parametrize("wrong", [0, -16, 2, 8, 24, 100, 512, True, 64.0, "64"])
def test_wrong_shares(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"share must be 1 .* or a power of two from 16 to 256, got .*; use share=64"):
        nf.Cells(share=wrong)


@pytest.mark.parametrize("share", [None, 1, *SHARES])
def test_shares(share: int | None) -> None:
    method = nf.Cells(share=share, cell_size=4, probes=2)
    assert nf.attention(*inputs(1, 1, queries=40), method=method).shape == (1, 1, 40, 8)


def test_a_cache_has_no_blocks() -> None:
    with pytest.raises(ValueError, match=r"opens cells for each query by itself, got .*; leave share out"):
        CellStore(nf.Cells(share=64))
    CellStore(nf.Cells(share=1))
