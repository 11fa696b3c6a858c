"""Packed sequences and jagged nested tensors: every sequence as if it were alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import inputs
from torch import Tensor

import nearfield as nf

LENGTHS = [(30, 30), (12, 40), (30, 30), (0, 5), (40, 12), (7, 0), (12, 40)]
"""Queries and keys of each sequence: some alike, one without queries, one without keys."""
METHODS = [nf.Exact(), nf.Auto(), nf.TopK(k=3), nf.Cells(cell_size=4, probes=2, segment=8), nf.LazyGumbel(draws=5)]


def edges(lengths: list[int]) -> Tensor:
    return torch.nn.functional.pad(torch.tensor(lengths).cumsum(0), (1, 0)).int()


def packed() -> tuple[list[Tensor], Tensor, Tensor]:
    rows, keys = ([pair[i] for pair in LENGTHS] for i in (0, 1))
    q, k, v = inputs(4, queries=sum(rows), keys=sum(keys), kv_heads=2, value_dim=5, dtype=torch.float64)
    return [x.transpose(0, 1).contiguous().requires_grad_() for x in (q, k, v)], edges(rows), edges(keys)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS[:-1], ids=repr)
@pytest.mark.parametrize("more", [{}, {"softcap": 2.0, "s_aux": torch.tensor([0.0, 1.0, -1.0, 2.0])}], ids=["plain", "logits"])
def test_each_sequence_is_as_if_it_were_alone(method: nf.Method, causal: bool, more: dict[str, Any]) -> None:
    leaves, cu_q, cu_k = packed()
    got = nf.attention_varlen(*leaves, cu_q, cu_k, 40, 40, causal=causal, softmax_scale=0.4, method=method, **more)
    assert got.shape == (len(leaves[0]), 4, 5)
    parts = []
    for i in range(len(LENGTHS)):
        own = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        q, k, v = (x[rows].transpose(0, 1)[None] for x, rows in zip(leaves, (own[0], own[1], own[1]), strict=True))
        offset = k.shape[2] - q.shape[2] if causal else None
        out = nf.attention(q, k, v, is_causal=causal, offset=offset, scale=0.4, enable_gqa=True, method=method, **more)
        parts.append(out[0].transpose(0, 1))
    want = torch.cat(parts)
    torch.testing.assert_close(got, want)
    upstream = torch.randn(want.shape, dtype=want.dtype)
    for a, b in zip(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True):
        torch.testing.assert_close(a, b)


def test_draws_stay_in_their_sequence() -> None:
    """Values of sequence i are i, so every row of it is i, up to rounding."""
    leaves, cu_q, cu_k = packed()
    number = torch.arange(len(LENGTHS)).repeat_interleave(cu_k.diff()).double()
    value = number[:, None, None].expand(-1, 2, 5)
    out = nf.attention_varlen(leaves[0], leaves[1], value, cu_q, cu_k, method=METHODS[-1])
    want = torch.arange(len(LENGTHS)).repeat_interleave(cu_q.diff()).double()
    want[want == 5] = 0  # no keys
    torch.testing.assert_close(out.detach(), want[:, None, None].expand_as(out))


def test_sequences_of_equal_lengths_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []

    class Noted(nf.Method):
        def run(self, problem: nf.Problem, call: nf.Call) -> nf.Outcome:
            calls.append(tuple(problem.query.shape[:3]))
            return nf.Exact().run(problem, call)

    leaves, cu_q, cu_k = packed()
    nf.attention_varlen(*leaves, cu_q, cu_k, method=Noted())
    assert sorted(calls) == [(1, 4, 40), (2, 4, 12), (2, 4, 30)]


def nested_of(leaves: list[Tensor], cu_q: Tensor, cu_k: Tensor) -> list[Tensor]:
    pairs = zip(leaves, (cu_q, cu_k, cu_k), strict=True)
    return [torch.nested.nested_tensor_from_jagged(x, cu.long()).transpose(1, 2) for x, cu in pairs]


@pytest.mark.parametrize("method", [nf.Exact(), nf.TopK(k=3), nf.Cells(cell_size=4, probes=2, segment=8)], ids=repr)
def test_the_normaliser_is_that_of_each_sequence_and_has_a_gradient(method: nf.Method) -> None:
    leaves, cu_q, cu_k = packed()
    sink = torch.tensor([0.0, 1.0, -1.0, 2.0], dtype=torch.float64, requires_grad=True)
    more: dict[str, Any] = {"s_aux": sink, "method": method, "return_lse": True}
    found = nf.attention_varlen(*leaves, cu_q, cu_k, causal=True, **more)
    parts = []
    for i in range(len(LENGTHS)):
        own = slice(int(cu_q[i]), int(cu_q[i + 1])), slice(int(cu_k[i]), int(cu_k[i + 1]))
        q, k, v = (x[rows].transpose(0, 1)[None] for x, rows in zip(leaves, (own[0], own[1], own[1]), strict=True))
        out, lse = nf.attention(q, k, v, is_causal=True, offset=k.shape[2] - q.shape[2], enable_gqa=True, **more)
        parts.append((out[0].transpose(0, 1), lse[0].transpose(0, 1)))
    want = [torch.cat(x) for x in zip(*parts, strict=True)]
    upstream = [torch.randn(x.shape, dtype=x.dtype) for x in want]
    assert found[1].shape == (len(leaves[0]), 4)
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)
    grads = (torch.autograd.grad(x, [*leaves, sink], upstream) for x in (found, want))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b)


def test_parts_of_the_keys_of_packed_sequences_can_be_merged() -> None:
    leaves, cu_q, cu_k = packed()
    own = torch.arange(len(LENGTHS)).repeat_interleave(cu_k.diff())
    is_first = torch.arange(len(own)) % 3 == 0
    parts = []
    for some in (is_first, ~is_first):
        cu_some = edges(torch.bincount(own[some], minlength=len(LENGTHS)).tolist())
        parts.append(nf.attention_varlen(leaves[0], leaves[1][some], leaves[2][some], cu_q, cu_some, return_lse=True))
    output, lse = nf.merge(*map(list, zip(*parts, strict=True)))
    want = nf.attention_varlen(*leaves, cu_q, cu_k, return_lse=True)
    torch.testing.assert_close((output, lse), want)


@pytest.mark.parametrize("method", [nf.TopK(k=3), nf.LazyGumbel(draws=5)], ids=repr)
def test_estimates_of_jagged_tensors(method: nf.Method) -> None:
    """What `attention` returns, with the normalisers of all sequences and one audit of their rows together."""
    leaves, cu_q, cu_k = packed()
    q, k, v = nested_of(leaves, cu_q, cu_k)
    more: dict[str, Any] = {"method": method, "enable_gqa": True}
    found = nf.estimate(q, k, v, audit=10**6, per_head=True, generator=torch.Generator().manual_seed(0), **more)
    output = nf.attention(q, k, v, generator=torch.Generator().manual_seed(0), **more)
    assert torch.equal(found.output.values(), output.values())
    exact, lse = nf.attention_varlen(*leaves, cu_q, cu_k, method=nf.Exact(), return_lse=True)
    got, exact = output.transpose(1, 2).values().detach(), exact.detach()
    assert found.lse.transpose(1, 2).values().shape == lse.shape
    if isinstance(method, nf.TopK):
        want = nf.attention_varlen(*leaves, cu_q, cu_k, method=method, return_lse=True)[1]
        torch.testing.assert_close(found.lse.transpose(1, 2).values(), want.detach())
    error, whole = (got - exact).norm(dim=-1), exact.norm(dim=-1)
    assert found.audit is not None
    assert found.audit.rows == error.numel()
    assert found.audit.quantile == 1.0
    assert found.audit.pooled == pytest.approx(float((error.square().sum() / whole.square().sum()).sqrt()))
    assert found.audit.heads is not None
    seen = whole > 0
    for head, audit in enumerate(found.audit.heads):
        assert audit.rows == len(error)
        assert audit.relative == pytest.approx(float((error / whole)[:, head][seen[:, head]].max()))
    parts = found.info["parts"]
    assert [part["shape"] for part in parts] == [(2, 4, 30), (2, 4, 12), (1, 4, 0), (1, 4, 40), (1, 4, 7)]
    rows = torch.tensor([part["rows"] for part in parts])
    looked = torch.tensor([part["keys_per_query"] for part in parts])
    assert found.info["keys_per_query"] == pytest.approx(float((rows * looked).sum() / rows.sum()))
    assert f"lse      {float(found.lse.values().min()):.4g} to" in str(found)
    found.plot()


def test_audited_rows_are_drawn_from_all_sequences() -> None:
    """Uniformly: the error of a row is the number of its sequence, so the audited errors tell how often each was drawn."""

    class Wrong(nf.Method):
        def run(self, problem: nf.Problem, call: nf.Call) -> nf.Outcome:
            outcome = nf.Exact().run(problem, call)
            return nf.Outcome(outcome.output + problem.query.shape[2], outcome.lse, None, outcome.info)

    rows = torch.randn(100, 1, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value = torch.ones_like(rows)
    x, v = (torch.nested.nested_tensor_from_jagged(y, torch.tensor([0, 20, 30, 100])).transpose(1, 2) for y in (rows, value))
    drawn = torch.zeros(71, dtype=torch.long)
    for seed in range(300):
        audit = nf.estimate(x, x, v, method=Wrong(), audit=10, generator=torch.Generator().manual_seed(seed)).audit
        assert audit is not None
        drawn += torch.bincount(audit.additive_errors.round().long(), minlength=71)
    counts = drawn[[20, 10, 70]].double()
    assert drawn.sum() == counts.sum() == 3000
    # Without replacement, so a little less varied than a multinomial law: chi square with 2 degrees of freedom, alpha 1e-6.
    expected = torch.tensor([600.0, 300.0, 2100.0], dtype=torch.float64)
    assert float(((counts - expected).square() / expected).sum()) < 27.7


@pytest.mark.parametrize("method", METHODS[:-1], ids=repr)
def test_jagged_nested_tensors(method: nf.Method) -> None:
    (q, k, v), cu_q, cu_k = packed()
    k, v = (x.repeat_interleave(2, 1) for x in (k, v))
    out, lse = nf.attention(*nested_of([q, k, v], cu_q, cu_k), method=method, return_lse=True)
    assert out.is_nested
    want, want_lse = nf.attention_varlen(q, k, v, cu_q, cu_k, method=method, return_lse=True)
    torch.testing.assert_close(lse.transpose(1, 2).values(), want_lse)
    got = out.transpose(1, 2).values()
    torch.testing.assert_close(got, want)
    upstream = torch.randn(want.shape, dtype=want.dtype)
    for a, b in zip(torch.autograd.grad(got, (q, k, v), upstream), torch.autograd.grad(want, (q, k, v), upstream), strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_refused() -> None:
    (q, k, v), cu_q, cu_k = packed()
    with pytest.raises(ValueError, match=r"q must be a tensor \[total, heads, dim\], got shape"):
        nf.attention_varlen(q[None], k, v, cu_q, cu_k)
    with pytest.raises(ValueError, match=r"cu_seqlens_q must be an int32 or int64 tensor.*got torch.float32"):
        nf.attention_varlen(q, k, v, cu_q.float(), cu_k)
    with pytest.raises(ValueError, match=r"cu_seqlens_k must begin with 0, never decrease and end with the number of rows, 157"):
        nf.attention_varlen(q, k, v, cu_q, cu_k + 1)
    with pytest.raises(ValueError, match="as many sequences, got 1 and 7"):
        nf.attention_varlen(q, k, v, torch.tensor([0, len(q)]), cu_k)
    with pytest.raises(ValueError, match="max_seqlen_q=30, but a sequence has 40 rows; pass 40"):
        nf.attention_varlen(q, k, v, cu_q, cu_k, 30, 40)
    nested = torch.nested.nested_tensor_from_jagged(q, cu_q.long())
    with pytest.raises(
        ValueError, match=r"query must be a jagged nested tensor \[batch, heads, length, dim\].*transpose\(1, 2\)"
    ):
        nf.attention(nested, nested, nested)
    nested = nested.transpose(1, 2)
    with pytest.raises(ValueError, match="nested tensors have no padding to mask"):
        nf.attention(nested, nested, nested, torch.ones(1, dtype=torch.bool))
    for call in (nf.plan, nf.explain):
        with pytest.raises(ValueError, match=r"pass sequences of one length.*query.unbind\(\)\[0\]\[None\]"):
            call(nested, nested, nested)
        call(*[nested.unbind()[0][None]] * 3)
    with pytest.raises(TypeError, match=r"query is a nested tensor; pad it(?!.*jagged)"):
        nf.sample(nested, nested, 1)
    with pytest.raises(TypeError, match=r"key is a nested tensor; pad it.*or pass all three to `attention` as jagged ones"):
        nf.attention(q[None], nested, nested)


def test_rows_between_sequences_are_not_seen() -> None:
    rows, lengths = torch.randn(12, 2, 8), [2, 3, 4]
    offsets = torch.tensor([0, 4, 8, 12])
    nested = torch.nested.nested_tensor_from_jagged(rows, offsets=offsets, lengths=torch.tensor(lengths)).transpose(1, 2)
    output = nf.attention(nested, nested, nested, is_causal=True)
    assert [len(x) for x in output.transpose(1, 2).unbind()] == lengths
    for first, length, found in zip((0, 4, 8), lengths, output.transpose(1, 2).unbind(), strict=True):
        own = rows[first : first + length].transpose(0, 1)[None]
        torch.testing.assert_close(found.transpose(0, 1)[None], F.scaled_dot_product_attention(own, own, own, is_causal=True))


def test_no_sequences_at_all() -> None:
    """They are checked, and have a dtype and gradients, as if there were some."""
    q, k, v = (x.requires_grad_() for x in torch.randn(3, 0, 2, 8).unbind(0))
    sink, none = torch.zeros(2, requires_grad=True), torch.tensor([0])
    for method in METHODS[:-1]:
        output = nf.attention_varlen(q, k, v, none, none, causal=True, s_aux=sink, method=method)
        assert output.shape == (0, 2, 8)
        for grad in torch.autograd.grad(output.sum(), (q, k, v, sink)):
            assert not bool(grad.any())
    with torch.autocast("cpu", torch.bfloat16):
        assert nf.attention_varlen(q, k, v, none, none).dtype == torch.bfloat16
    bad: dict[str, Any] = {"softcap": -3.0, "dropout_p": 7.0, "method": "foo", "window_size": 3}
    for name, value in bad.items():
        with pytest.raises((TypeError, ValueError), match=name):
            nf.attention_varlen(q, k, v, none, none, **{name: value})
    with pytest.raises(ValueError, match="multiple of key heads"):
        nf.attention_varlen(torch.randn(0, 3, 8), k, v, none, none)


def test_autocast_decides_the_dtype() -> None:
    q, k, v = torch.randn(3, 12, 2, 8).unbind(0)
    edges = torch.tensor([0, 5, 12])
    with torch.autocast("cpu", torch.bfloat16):
        assert nf.attention_varlen(q, k, v, edges, edges).dtype == torch.bfloat16
