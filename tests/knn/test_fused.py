"""Top-k attention over cells in one go: its kernels against their specification, and the whole of it against what it found."""

from __future__ import annotations

import math
import os
from typing import Any

import pytest
import torch
from by_hand import seeded
from torch import Tensor

import nearfield as nf
from nearfield.kernels import backends
from nearfield.kernels.reference import weighted_softmax
from nearfield.knn import fused
from nearfield.knn.index.cells import CellIndex
from nearfield.problem import Call, check
from nearfield.sampling import Seeds, skip, without_replacement
from nearfield.synthetic import make

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INDEX = CellIndex(cell_size=8, probes=3, segment=32)

interpreted = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="needs a GPU or Triton's interpreter"
)


def seeds(seed: int = 0) -> Seeds:
    return Seeds(seeded(seed), DEVICE)


@interpreted
@pytest.mark.parametrize(("k", "tail"), [(1, 1), (13, 10), (40, 3)])
def test_drawn_keys_are_those_that_are_not_near(k: int, tail: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As by `skip`, near keys in any order, some rows with fewer of them, and compared in several parts."""
    pytest.importorskip("triton")
    from nearfield.knn import attend_triton

    monkeypatch.setattr(attend_triton, "COMPARED", 64)
    ids = torch.stack([torch.randperm(50, generator=seeded(row))[:k] for row in range(5)])
    ids[2, k // 2 :] = -1
    free = 50 - (ids >= 0).sum(1)
    free[3] = 1
    ranks = without_replacement(free, tail, seeded(9))
    expected = skip(ranks, ids.masked_fill(ids < 0, 1000).sort(-1).values)
    found = attend_triton.tail_ids(ranks.to(DEVICE), ids.int().to(DEVICE))
    assert torch.equal(found.long().cpu(), expected)


def over_found(query: Tensor, key: Tensor, value: Tensor, ids: Tensor, drawn: Tensor, left: Tensor, scale: float) -> Tensor:
    """The attention of rows `[rows, dim]` over near and drawn keys, number by number in float64."""
    chosen = torch.cat([ids, drawn], 1)
    logits = torch.einsum("rd,rtd->rt", query, key[chosen.clamp(min=0)]) * scale
    logits = logits.masked_fill(chosen < 0, -math.inf)
    weight = (left / (drawn >= 0).sum(1).clamp(min=1)).clamp(min=1).log()[:, None]
    logits = torch.cat([logits[:, : ids.shape[1]], logits[:, ids.shape[1] :] + weight], 1)
    return torch.einsum("rt,rtd->rd", weighted_softmax(logits, None)[0], value[chosen.clamp(min=0)])


@interpreted
@pytest.mark.parametrize("tail", [0, 1, 37])
@pytest.mark.parametrize("size", [1.0, 30.0])
@pytest.mark.parametrize(("dim", "value_dim"), [(16, 16), (24, 40)])
def test_rows_attend_to_what_was_found_and_drawn(dim: int, value_dim: int, size: float, tail: int) -> None:
    """Also where drawn keys have much the larger logits, and where a row has fewer keys or none."""
    pytest.importorskip("triton")
    from nearfield.knn.attend_triton import attend_rows

    generator = seeded(3)
    query, key = torch.randn(6, dim, generator=generator) * size, torch.randn(90, dim, generator=generator)
    value = torch.randn(90, value_dim, generator=generator)
    chosen = torch.stack([torch.randperm(90, generator=generator)[: 35 + tail] for _ in range(6)])
    ids, drawn = chosen[:, :35].clone(), chosen[:, 35:].clone()
    ids[1, 3:], drawn[1, 1:] = -1, -1
    ids[2], drawn[2] = -1, -1
    left = torch.tensor([90, 1, 0, 5000, 64, 40])
    best = torch.einsum("rd,rtd->rt", query, key[ids.clamp(min=0)]).masked_fill(ids < 0, -math.inf)
    expected = over_found(*(x.double() for x in (query, key, value)), ids, drawn, left, 0.3)
    output = torch.full((6, value_dim), 7.0, device=DEVICE)
    query, key, value, best, left = (x.to(DEVICE) for x in (query, key, value, best, left))
    far = drawn.int().to(DEVICE).contiguous() if tail else None
    attend_rows(query, key, value, best, ids.int().to(DEVICE), far, left, 0.3, output)
    torch.testing.assert_close(output.double().cpu(), expected, rtol=1e-4, atol=1e-4)
    assert bool((output[2] == 0).all()), "a row without keys"


@interpreted
@pytest.mark.parametrize("causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_it_attends_to_what_the_index_finds(causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In several parts: of the heads, of their rows, and of what their scores take."""
    pytest.importorskip("triton")
    from nearfield.knn.index import cells_triton
    from nearfield.knn.index.cells_triton import KernelCells

    monkeypatch.setattr(fused, "ROWS_TOGETHER", 40)
    monkeypatch.setattr(cells_triton, "SCORES_BYTES", 8 * 64 * 16)
    query, key, value = (x.to(DEVICE) for x in make("clustered", 1, 2, 70, 16))
    problem = check(query, key, value, is_causal=causal)
    rows = problem.grouped
    sizes = INDEX.sizes(70, 12, causal, True)
    output = fused.attend_by_cells(rows, problem.scale, INDEX, sizes, 12, 0, seeds())
    nothing = torch.empty(70, 0, dtype=torch.int64, device=DEVICE)
    for head in range(2):
        cells = KernelCells(rows.keys[head : head + 1], sizes, None, 0)
        ids = cells.find(rows.queries[head : head + 1], 12, rows.visible[head : head + 1], sizes).ids[0]
        one = (x[head].double() for x in (rows.queries, rows.keys, rows.values))
        expected = over_found(*one, ids, nothing, torch.zeros(70, device=DEVICE), problem.scale)
        torch.testing.assert_close(output[head].double(), expected, rtol=2e-3, atol=2e-3)


@interpreted
@pytest.mark.parametrize("causal", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_with_all_other_keys_drawn_it_is_exact_attention(causal: bool) -> None:
    """No key twice and none left out: near and drawn ones are all there are."""
    pytest.importorskip("triton")
    query, key, value = (x.to(DEVICE) for x in torch.randn(3, 1, 2, 50, 8, generator=seeded(0)).unbind(0))
    problem = check(query, key, value, is_causal=causal)
    output = fused.attend_by_cells(problem.grouped, problem.scale, INDEX, INDEX.sizes(50, 9, causal, True), 9, 50, seeds())
    expected = nf.attention(query, key, value, is_causal=causal, method=nf.Exact())
    torch.testing.assert_close(problem.by_head(output), expected, rtol=2e-3, atol=2e-3)


@interpreted
@pytest.mark.slow
@pytest.mark.parametrize("offset", [-7, 20])
def test_with_an_offset_too(offset: int) -> None:
    """With fewer queries than keys, and with rows that see nothing."""
    pytest.importorskip("triton")
    query, key, value = (x.to(DEVICE) for x in torch.randn(3, 1, 2, 50, 8, generator=seeded(0)).unbind(0))
    query = query[:, :, :30]
    problem = check(query, key, value, is_causal=True, offset=offset)
    output = fused.attend_by_cells(problem.grouped, problem.scale, INDEX, INDEX.sizes(50, 9, True, True), 9, 50, seeds())
    expected = nf.attention(query, key, value, is_causal=True, offset=offset, method=nf.Exact())
    torch.testing.assert_close(problem.by_head(output), expected, rtol=2e-3, atol=2e-3)


@interpreted
def test_draws_follow_the_seed() -> None:
    pytest.importorskip("triton")
    query, key, value = (x.to(DEVICE) for x in torch.randn(3, 1, 1, 40, 8, generator=seeded(0)).unbind(0))
    problem = check(query, key, value)
    sizes = INDEX.sizes(40, 4, False, True)
    first, same, other = (fused.attend_by_cells(problem.grouped, problem.scale, INDEX, sizes, 4, 3, seeds(x)) for x in (0, 0, 1))
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("change", "served"),
    [
        ({}, True),
        ({"diagnostics": True}, False),
        ({"backend": "reference"}, False),
        ({"dropout_p": 0.1}, False),
        ({"scale": -1.0}, False),
        ({"requires_grad": True}, False),
        ({"softcap": 3.0}, False),
        ({"s_aux": torch.zeros(1)}, False),
        ({"index": nf.ExactIndex()}, False),
        ({"index": CellIndex(cell_size=64, probes=10**6)}, False),
        ({"dtype": torch.float64}, False),
        ({"k": fused.MOST_SORTED + 1}, False),
        ({"k": fused.MOST_SORTED + 1, "tail": 0}, True),
    ],
)
def test_which_calls_it_serves(change: dict[str, Any], served: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "runs_triton", lambda device: True)
    how = {
        "dtype": torch.float32,
        "requires_grad": False,
        "index": CellIndex(cell_size=64, probes=8),
        "k": 5,
        "tail": 2,
        **change,
    }
    query, key, value = torch.zeros(3, 1, 1, 6000, 8, dtype=how["dtype"]).unbind(0)
    query.requires_grad_(how["requires_grad"])
    logits = {name: how.get(name) for name in ("scale", "softcap", "s_aux")}
    problem = check(query, key, value, None, how.get("dropout_p", 0.0), **logits)
    call = Call(seeds(), how.get("backend", "auto"), diagnostics=how.get("diagnostics", False))
    sizes = fused.served_sizes(how["index"], problem, call, problem.grouped, how["k"], how["tail"])
    assert (sizes is not None) == served


def test_top_k_hands_calls_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the layout of rows, the dtype of the inputs, and with the sizes of the method."""
    seen: list[tuple[Any, ...]] = []

    def attend(rows: Any, scale: float, index: CellIndex, sizes: Any, k: int, tail: int, _: Seeds) -> Tensor:
        seen.append((rows.queries.dtype, scale, index, sizes, k, tail))
        return rows.queries

    monkeypatch.setattr(fused, "served_sizes", lambda *_: "sizes")
    monkeypatch.setattr(fused, "attend_by_cells", attend)
    query, key, value = torch.randn(3, 2, 3, 20, 4, generator=seeded(0)).bfloat16().unbind(0)
    output = nf.attention(query, key, value, method=nf.TopK(5, 2, index=INDEX))
    assert torch.equal(output, query)
    assert seen == [(torch.bfloat16, 0.5, INDEX, "sizes", 5, 2)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_card_it_is_what_the_general_way_computes(dtype: torch.dtype, causal: bool) -> None:
    """`estimate` goes the general way. Without a tail both attend to the same keys, but for ties of rounded products."""
    query, key, value = (x.to("cuda", dtype) for x in make("clustered", 1, 2, 5000, 64))
    method = nf.TopK(index=CellIndex())
    fast = nf.attention(query, key, value, is_causal=causal, method=method).float()
    other = nf.estimate(query, key, value, is_causal=causal, method=method).output.float()
    off = (fast - other).norm(dim=-1) / other.norm(dim=-1)
    assert float(off.median()) < (0.01 if dtype == torch.bfloat16 else 1e-3)
    assert float((off > 0.1).double().mean()) < 0.01
    drawn = nf.TopK(index=CellIndex(), tail=5000)
    exact = nf.attention(query[:, :, :100], key, value, method=nf.Exact()).float()
    all_keys = nf.attention(query[:, :, :100], key, value, method=drawn).float()
    torch.testing.assert_close(all_keys, exact, rtol=2e-2, atol=2e-2)
