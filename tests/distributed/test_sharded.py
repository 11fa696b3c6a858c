"""Attention of sequences that are shared out over ranks: output, log-normaliser and gradients are those of one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from crew import Crew, crew
from torch import Tensor

import nearfield as nf
from nearfield.distributed import context_parallel, passes, shard, unshard
from nearfield.distributed.context import ranks_of

CELLS = nf.Cells(cell_size=4, probes=3, segment=16, sinks=2)
ASKS = nf.Cells(cell_size=4, probes=3, segment=16, sinks=2, partition=nf.KMeans(by_queries=True))
METHODS = {
    "exact": nf.Exact(),
    "topk": nf.TopK(8),
    "kmeans": nf.TopK(8, index=nf.KMeansIndex(seed=1)),
    "cells": CELLS,
    "by queries": ASKS,
    "auto": nf.Auto(),
}


@pytest.fixture(scope="module")
def ranks() -> Crew:
    return crew()


@dataclass(frozen=True)
class Case:
    method: nf.Method
    length: int = 90
    keys: int | None = None
    padded: bool = False
    sink: bool = False
    lse: bool = False
    heads: tuple[int, int] = (4, 2)
    dtype: torch.dtype = torch.float64
    options: dict[str, Any] = field(default_factory=dict)


def inputs(case: Case) -> list[Tensor]:
    """Queries, keys, values, a weight for each number of the output, one for each lse, sinks."""
    heads, kv_heads = case.heads
    keys = case.length if case.keys is None else case.keys
    shapes = [(2, heads, case.length, 8), (2, kv_heads, keys, 8), (2, kv_heads, keys, 8), (2, heads, case.length, 8)]
    generator = torch.Generator().manual_seed(3)
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (*shapes, shapes[0][:3], (heads,))]
    return [x.to(case.dtype) for x in made]


def padding(case: Case) -> Tensor | None:
    """`[2, 1, 1, keys]`: the second entry has hidden keys here and there."""
    if not case.padded:
        return None
    mask = torch.ones(2, 1, 1, case.length if case.keys is None else case.keys, dtype=torch.bool)
    mask[1, ..., ::5] = False
    mask[1, ..., -7:] = False
    return mask


def results(case: Case, given: list[Tensor], mask: Tensor | None, mesh: Any = None) -> list[Tensor]:
    """Output, lse if there is one, and gradients of queries, keys, values and sinks."""
    q, k, v, weight, lse_weight, sink = given
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v, sink)]
    options = {"enable_gqa": True, "method": case.method, "s_aux": leaves[3] if case.sink else None, **case.options}
    found = nf.attention(*leaves[:3], mask, return_lse=case.lse, mesh=mesh, **options)
    output, lse = found if case.lse else (found, None)
    loss = (output * weight).sum()
    if lse is not None:
        loss = loss + (lse * lse_weight).sum()
    grads = torch.autograd.grad(loss, leaves[: 3 + case.sink])
    return [output.detach(), *([] if lse is None else [lse.detach()]), *grads]


def compared(group: Any, case: Case, heads_apart: bool) -> dict[str, float]:
    """The largest difference between this rank's results and its share of one process's, by name."""
    passes.GROUP_BYTES = 1 if heads_apart else 64 << 20
    given, mask = inputs(case), padding(case)
    whole = results(case, given, mask)
    own = [*(shard(x, group, 2) for x in given[:5]), given[5]]
    found = results(case, own, None if mask is None else shard(mask, group, 3), group)
    names = ["output", *(["lse"] if case.lse else []), "query", "key", "value", *(["sink"] if case.sink else [])]
    apart = {}
    for name, ours, one in zip(names, found, whole, strict=True):
        if name == "sink":
            torch.distributed.all_reduce(ours, group=group)
        part = one if name == "sink" else shard(one, group, 2)
        assert ours.shape == part.shape
        assert ours.dtype == part.dtype
        apart[name] = float((ours - part).abs().max()) if part.numel() else 0.0
    with torch.no_grad():
        again = nf.attention(
            *own[:3], None if mask is None else shard(mask, group, 3), enable_gqa=True, method=case.method, mesh=group,
            s_aux=own[5] if case.sink else None, **case.options
        )  # fmt: skip
    assert not again.requires_grad
    apart["without gradients"] = float((again - found[0]).abs().max()) if again.numel() else 0.0
    return apart


def check_equal(
    ranks: Crew, case: Case, sizes: tuple[int, ...] = (1, 2, 3, 4), heads_apart: bool = True, most: float = 1e-12
) -> None:
    for size in sizes:
        for rank, apart in enumerate(ranks.run(compared, case, heads_apart, ranks=size)):
            assert max(apart.values()) < most, f"rank {rank} of {size}: {apart}"


@pytest.mark.parametrize("length", [90, 3])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", METHODS)
def test_equal_to_one_process(ranks: Crew, name: str, causal: bool, length: int) -> None:
    sizes = (1, 2, 3, 4) if name in ("exact", "cells") else (3,)
    check_equal(ranks, Case(METHODS[name], length, options={"is_causal": causal}), sizes)


CASES = {
    "no tokens": Case(nf.Exact(), 0),
    "padding, exact": Case(nf.Exact(), padded=True, options={"is_causal": True}),
    "padding, cells": Case(CELLS, padded=True, options={"is_causal": True}),
    "padding, cells, not causal": Case(CELLS, padded=True),
    "padding, topk": Case(nf.TopK(8), padded=True, options={"is_causal": True}),
    "lse, exact": Case(nf.Exact(), lse=True, options={"is_causal": True}),
    "lse, cells": Case(CELLS, lse=True, options={"is_causal": True}),
    "sinks, exact": Case(nf.Exact(), sink=True, lse=True, options={"is_causal": True}),
    "sinks, cells": Case(CELLS, sink=True, lse=True, padded=True, options={"is_causal": True}),
    "caps, exact": Case(nf.Exact(), options={"is_causal": True, "softcap": 2.0}),
    "caps, cells": Case(CELLS, options={"is_causal": True, "softcap": 2.0}),
    "windows": Case(nf.Exact(), options={"is_causal": True, "window_size": (20, 5)}),
    "windows on the left": Case(nf.Exact(), options={"window_size": (20, -1)}),
    "offset": Case(CELLS, 50, keys=90, options={"is_causal": True, "offset": 40}),
    "offset, exact": Case(nf.Exact(), 50, keys=90, options={"is_causal": True, "offset": 40}),
    "few keys": Case(nf.Exact(), 90, keys=5),
    "a negative scale": Case(CELLS, options={"is_causal": True, "scale": -0.3}),
    "odd heads": Case(CELLS, heads=(3, 3), options={"is_causal": True}),
    "default sizes": Case(nf.Cells(), 700, options={"is_causal": True}),
    "windows of cells": Case(nf.Cells(4, 3, segment=16, window=20), options={"is_causal": True}),
    "by queries": Case(ASKS, options={"is_causal": True}),
    "by queries, padding": Case(ASKS, padded=True, options={"is_causal": True}),
    "by queries, not causal": Case(ASKS),
    "by queries, offset": Case(ASKS, 50, keys=90, options={"is_causal": True, "offset": 40}),
    "by queries, few rows": Case(ASKS, 3, keys=90, options={"is_causal": True, "offset": 30}),
    "reference": Case(CELLS, options={"is_causal": True, "backend": "reference"}),
}


@pytest.mark.parametrize("name", CASES)
def test_every_argument(ranks: Crew, name: str) -> None:
    check_equal(ranks, CASES[name], (3,))


def test_heads_may_travel_together(ranks: Crew) -> None:
    check_equal(ranks, Case(CELLS, heads=(6, 3), options={"is_causal": True}), (2,), heads_apart=False)


def test_half_precision(ranks: Crew) -> None:
    for method in (nf.Exact(), CELLS):
        check_equal(ranks, Case(method, dtype=torch.bfloat16, options={"is_causal": True}), (2,), most=0.1)


def in_blocks(group: Any, share: int, length: int, causal: bool) -> float:
    given = inputs(Case(CELLS, length))
    method = nf.Cells(cell_size=4, probes=3, segment=16, sinks=2, share=share)
    whole = nf.attention(*given[:3], enable_gqa=True, method=method, is_causal=causal)
    own = nf.attention(*(shard(x, group, 2) for x in given[:3]), enable_gqa=True, method=method, is_causal=causal, mesh=group)
    return float((own - shard(whole, group, 2)).abs().max())


def test_rows_open_cells_together_as_in_one_process_where_pieces_are_whole_blocks(ranks: Crew) -> None:
    assert max(ranks.run(in_blocks, 16, 16 * 6, True, ranks=3)) < 1e-12
    # Otherwise they are other blocks, and as good.
    assert 1e-6 < max(ranks.run(in_blocks, 16, 100, True, ranks=3)) < 3


def with_nan(group: Any, name: str) -> bool:
    q, k, v, *_ = inputs(Case(METHODS[name]))
    k[0, 0, 40] = torch.nan
    q[1, 2, 30] = torch.nan
    whole = nf.attention(q, k, v, enable_gqa=True, is_causal=True, method=METHODS[name])
    parts = [shard(x, group, 2) for x in (q, k, v)]
    own = nf.attention(*parts, enable_gqa=True, is_causal=True, method=METHODS[name], mesh=group)
    wanted = shard(whole, group, 2)
    return torch.allclose(own, wanted, equal_nan=True) and bool(wanted.isnan().any())


@pytest.mark.parametrize("name", ["exact", "cells", "by queries"])
def test_a_nan_reaches_the_rows_that_see_it_and_no_others(ranks: Crew, name: str) -> None:
    found = ranks.run(with_nan, name, ranks=2)
    assert all(found)


def in_context(group: Any, check: bool) -> tuple[bool, Any, Any]:
    given = inputs(Case(CELLS))
    q, k, v = given[:3]
    whole = nf.attention(q, k, v, enable_gqa=True, is_causal=True, method=CELLS)
    buffers = [q.clone(), k.clone(), v.clone(), torch.arange(90)]
    kept = [x.clone() for x in buffers]
    with context_parallel(group, buffers=buffers, buffer_seq_dims=[2, 2, 2, 0], no_restore_buffers={buffers[3]}, check=check):
        sent = ranks_of(group).sent
        before = sent["checks"]
        output = nf.attention(*buffers[:3], enable_gqa=True, is_causal=True, method=CELLS, mesh=group)
        places, talk = buffers[3].clone(), sent["checks"] - before
    assert torch.equal(places, shard(torch.arange(90), group, 0))
    assert torch.allclose(output, whole[:, :, places], atol=1e-12)
    assert all(torch.equal(x, y) for x, y in zip(buffers[:3], kept[:3], strict=True))
    assert torch.equal(buffers[3], places)
    return True, talk, torch.allclose(unshard(output, group, 2), whole, atol=1e-12)


def test_contexts(ranks: Crew) -> None:
    for check in (True, False):
        for done, talk, is_whole in ranks.run(in_context, check, ranks=3):
            assert done
            assert is_whole
            assert bool(talk) == check


def gathered(group: Any) -> list[Tensor]:
    x = torch.arange(22.0).view(2, 11).requires_grad_()
    whole = unshard(shard(x, group, 1), group, 1)
    (whole * (1 + torch.distributed.get_rank(group)) * torch.arange(11)).sum().backward()
    return [whole.detach(), x.grad]


def test_shard_and_unshard_are_differentiable(ranks: Crew) -> None:
    found = ranks.run(gathered, ranks=3)
    assert all(torch.equal(whole, torch.arange(22.0).view(2, 11)) for whole, _ in found)
    # The weights of the ranks are 1, 2 and 3.
    assert torch.equal(sum(grad for _, grad in found), 6 * torch.arange(11.0).expand(2, -1))


LENGTHS = [11, 1, 40, 0, 26]


def packed(group: Any, name: str, causal: bool) -> float:
    generator = torch.Generator().manual_seed(4)
    q, k, v, weight = (torch.randn(78, heads, 8, generator=generator, dtype=torch.float64) for heads in (4, 2, 2, 4))
    edges = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()])
    options = {"causal": causal, "method": METHODS[name], "return_lse": True}
    apart = []
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    output, lse = nf.attention_varlen(*whole, edges, edges, **options)
    (output * weight).sum().backward()
    own = [shard(x, group, 0).requires_grad_() for x in (q, k, v)]
    part, part_lse = nf.attention_varlen(*own, edges, edges, mesh=group, **options)
    (part * shard(weight, group, 0)).sum().backward()
    pairs = [(part, output), (part_lse, lse), *((a.grad, b.grad) for a, b in zip(own, whole, strict=True))]
    for ours, one in pairs:
        apart.append(float((ours - shard(one, group, 0)).detach().abs().max()))
    return max(apart)


def test_padding_and_packed_sequences_on_any_number_of_ranks(ranks: Crew) -> None:
    check_equal(ranks, CASES["padding, cells"], (1, 2, 4))
    for size in (1, 2, 4):
        assert max(ranks.run(packed, "cells", True, ranks=size)) < 1e-12


@pytest.mark.parametrize("name", ["exact", "topk", "cells"])
def test_packed_sequences_over_ranks(ranks: Crew, name: str) -> None:
    for causal in (True, False):
        assert max(ranks.run(packed, name, causal, ranks=3)) < 1e-12
