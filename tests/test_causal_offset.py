"""Causal attention with fewer, or more, queries than keys: offsets, and the biases of torch."""

from __future__ import annotations

import warnings

import pytest
import torch
from by_hand import inputs, logits64, softmax64
from torch import Tensor
from torch.nn.attention.bias import CausalBias, causal_lower_right, causal_upper_left

import nearfield as nf
from nearfield.exact import flash_keys
from nearfield.problem import check as problem_of

SHAPES = [(30, 70), (70, 30), (1, 40)]
FEW = nf.Cells(cell_size=4, probes=2, segment=16)
ALL_OPEN = nf.Cells(cell_size=4, probes=200, segment=16)
METHODS = [nf.Exact(), nf.Auto(), nf.Auto(crossover=1), nf.TopK(k=400), nf.TopK(k=30, tail=400), ALL_OPEN]


def seen(queries: int, keys: int, offset: int) -> Tensor:
    return torch.arange(keys) <= torch.arange(queries)[:, None] + offset


def lower_right(queries: int, keys: int) -> CausalBias:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own result has NaN where rows see nothing
        return causal_lower_right(queries, keys)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("offset", [None, -5, "lower-right", 1000])
def test_methods_that_read_all_keys_are_exact(shape: tuple[int, int], method: nf.Method, offset: int | str | None) -> None:
    queries, keys = shape
    shift = keys - queries if offset == "lower-right" else int(offset or 0)
    q, k, v = inputs(2, 4, queries=queries, keys=keys, kv_heads=2, value_dim=5, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    want = softmax64(logits64(q, k, seen(queries, keys, shift))) @ v.repeat_interleave(2, 1)
    given = None if offset is None else shift
    got = nf.attention(q, k, v, is_causal=True, offset=given, enable_gqa=True, method=method)
    torch.testing.assert_close(got, want)
    upstream = torch.randn(want.shape, dtype=want.dtype)
    for a, b in zip(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("method", [nf.Exact(), nf.TopK(k=3, tail=0), FEW], ids=repr)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_biases_of_torch_are_offsets(shape: tuple[int, int], method: nf.Method) -> None:
    q, k, v = inputs(1, 2, queries=shape[0], keys=shape[1])
    for bias, offset in ((causal_upper_left(*shape), 0), (lower_right(*shape), shape[1] - shape[0])):
        want = nf.attention(q, k, v, is_causal=True, offset=offset, method=method)
        assert torch.equal(nf.attention(q, k, v, bias, method=method), want)
        assert torch.equal(nf.estimate(q, k, v, bias, method=method).output, want)


@pytest.mark.parametrize("backend", ["reference", "cpu", "triton"])
@pytest.mark.parametrize("share", [1, 16])
def test_the_last_rows_are_those_of_the_whole_sequence(backend: str, share: int) -> None:
    """No query that is not there is computed, and the others do not notice. Blocks of rows are counted from the first query."""
    if backend == "triton":
        pytest.importorskip("triton")
    before, keys = 16, 40
    q, k, v = inputs(1, 2, queries=keys, kv_heads=1, dim=16)
    method = nf.Cells(cell_size=2, probes=2, segment=8, sinks=2, share=share)
    whole = [x.clone().requires_grad_() for x in (q, k, v)]
    part = [x.clone().requires_grad_() for x in (q[:, :, before:], k, v)]
    want = nf.attention(*whole, is_causal=True, enable_gqa=True, method=method, backend=backend)[:, :, before:]
    got = nf.attention(*part, is_causal=True, offset=before, enable_gqa=True, method=method, backend=backend)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    if backend == "triton" and share > 1:
        return  # Gradients take long in the interpreter; those of tests/cells/triton have more keys than queries, too.
    upstream = torch.randn(want.shape)
    want_grads = torch.autograd.grad(want, whole, upstream)
    got_grads = torch.autograd.grad(got, part, upstream)
    for a, b in zip(got_grads, (want_grads[0][:, :, before:], *want_grads[1:]), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("offset", [-7, 60])
def test_kernels_in_triton(offset: int) -> None:
    """One after the other, with the same shapes: a remembered call must not serve another offset."""
    pytest.importorskip("triton")
    q, k, v = inputs(1, 1, queries=20, keys=60, dim=16)
    for shift in (offset, offset - 20):
        want = nf.attention(q, k, v, is_causal=True, offset=shift, method=nf.Exact())
        got = nf.attention(q, k, v, is_causal=True, offset=shift, method=ALL_OPEN, backend="triton")
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_key_padding_counts_as_before() -> None:
    """Positions are those of all keys, padding among them."""
    q, k, v = inputs(2, 2, queries=30, keys=90, dtype=torch.float64)
    padding = torch.rand(2, 1, 1, 90, generator=torch.Generator().manual_seed(1)) < 0.5
    mask = padding & seen(30, 90, 60)
    want = softmax64(logits64(q, k, mask)) @ v
    for method in METHODS:
        torch.testing.assert_close(nf.attention(q, k, v, padding, is_causal=True, offset=60, method=method), want)


def test_draws_come_from_the_keys_that_a_row_sees() -> None:
    q, k, v = inputs(1, 1, queries=20, keys=60, dim=4)
    est = nf.estimate(q, k, v, is_causal=True, offset=25, method=nf.LazyGumbel(eps=0.2, delta=1e-6, estimator="mean"))
    want = nf.attention(q, k, v, seen(20, 60, 25), method=nf.Exact())
    width = v[..., :45, :].amax(2) - v[..., :45, :].amin(2)
    assert bool(((est.output - want).abs() <= 0.2 * width[:, :, None]).all())
    leaves = [x.requires_grad_() for x in (q, k, v)]
    _, dk, dv = torch.autograd.grad(nf.attention(*leaves, is_causal=True, offset=25, method=nf.LazyGumbel()).sum(), leaves)
    assert bool((dk[:, :, 45:] == 0).all() and (dv[:, :, 45:] == 0).all())
    assert bool((dv[:, :, :45] != 0).any())


def test_audits_and_normalisers_know_the_offset() -> None:
    q, k, v = inputs(1, 2, queries=30, keys=90)
    est = nf.estimate(q, k, v, is_causal=True, offset=60, method=nf.Exact(), audit=60)
    assert est.audit is not None
    assert est.audit.additive < 1e-5
    want = logits64(q, k, seen(30, 90, 60)).logsumexp(-1).float()
    torch.testing.assert_close(est.lse, want)
    torch.testing.assert_close(nf.estimate(q, k, v, is_causal=True, offset=60, method=ALL_OPEN).lse, want)


@pytest.mark.parametrize("method", [nf.Exact(), nf.TopK(k=400), ALL_OPEN], ids=repr)
@pytest.mark.parametrize("offset", [-3, 0, 4, 20])
def test_a_nan_reaches_the_rows_that_see_it(method: nf.Method, offset: int) -> None:
    q, k, v = inputs(1, 1, queries=12, keys=20)
    k[0, 0, 7, 3] = torch.nan
    got = nf.attention(q, k, v, is_causal=True, offset=offset, method=method)
    assert got.isnan().all(-1)[0, 0].tolist() == [i + offset >= 7 for i in range(12)]
    assert bool(got[got.isnan().logical_not()].isfinite().all())


@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_any_integer_is_an_offset(method: nf.Method) -> None:
    q, k, v = inputs(1, 2, queries=12, keys=20)
    for large in (2**40, 2**63 - 1, 2**63, 2**70):
        found = nf.attention(q, k, v, is_causal=True, offset=large, method=method)
        torch.testing.assert_close(found, nf.attention(q, k, v, method=nf.Exact()))
        assert not bool(nf.attention(q, k, v, is_causal=True, offset=-large, method=method).any())
        # Row i sees the keys from i + 1 on: bounds may be as far away as the rows.
        found = nf.attention(q, k, v, offset=large, window_size=(large - 1, 1), method=method)
        torch.testing.assert_close(found, nf.attention(q, k, v, offset=2, window_size=(1, -1), method=nf.Exact()))
        assert not bool(nf.attention(q, k, v, offset=large, window_size=(5, 1), method=method).any())


def test_what_is_refused() -> None:
    q, k, v = inputs(1, 1, queries=4, keys=6)
    with pytest.raises(ValueError, match=r"offset=2 shifts a causal mask.*pass is_causal=True"):
        nf.attention(q, k, v, offset=2)
    with pytest.raises(ValueError, match=r"offset must be an integer or None, got 1\.5"):
        nf.attention(q, k, v, is_causal=True, offset=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"causal bias for 3 queries and 6 keys, got 4 and 6.*causal_lower_right\("):
        nf.attention(q, k, v, causal_lower_right(3, 6))
    with pytest.raises(ValueError, match="leave out is_causal=True"):
        nf.attention(q, k, v, causal_lower_right(4, 6), is_causal=True)
    with pytest.raises(ValueError, match="leave out offset=2"):
        nf.attention(q, k, v, causal_lower_right(4, 6), offset=2)


@pytest.mark.parametrize(
    ("rows", "keys", "offset", "wanted"),
    [(8, 8, 0, 8), (8, 20, 12, 20), (8, 20, 5, 13), (8, 20, 19, 20), (8, 20, 15, None), (8, 20, -1, None), (20, 8, 0, None)],
)
def test_the_keys_that_flash_attention_gets(rows: int, keys: int, offset: int, wanted: int | None) -> None:
    """Its last row sees the last key."""
    q, k, v = (torch.zeros(1, 2, length, 16, dtype=torch.bfloat16) for length in (rows, keys, keys))
    assert flash_keys(problem_of(q, k, v, is_causal=True, offset=offset)) == wanted
    assert flash_keys(problem_of(q, k, v)) == keys
    for changes in ({"attn_mask": torch.ones(1, keys, dtype=torch.bool)}, {"dropout_p": 0.1}, {"softcap": 3.0}, {"scale": -1.0}):
        assert flash_keys(problem_of(q, k, v, **changes)) is None
    assert flash_keys(problem_of(*(x.float() for x in (q, k, v)))) is None
    assert flash_keys(problem_of(q.clone().requires_grad_(), k, v)) is None


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "keys", "offset"), [(300, 300, 0), (200, 500, 300), (200, 500, 130), (200, 500, 499), (1, 90, 0)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_log_normalisers_by_flash_attention_on_a_gpu(rows: int, keys: int, offset: int, dtype: torch.dtype) -> None:
    q, k, v = (x.to("cuda", dtype) for x in inputs(2, 4, queries=rows, keys=keys, kv_heads=2, dim=64, value_dim=64))
    exactly = {"is_causal": True, "offset": offset, "enable_gqa": True, "method": nf.Exact()}
    found, lse = nf.attention(q, k, v, return_lse=True, **exactly)
    logits = logits64(*(x.double().cpu() for x in (q, k)), seen(rows, keys, offset))
    torch.testing.assert_close(lse.double().cpu(), logits.logsumexp(-1), atol=1e-3, rtol=1e-3)
    want = softmax64(logits) @ v.double().cpu().repeat_interleave(2, 1)
    plain = nf.attention(q, k, v, **exactly)
    error, least = ((x.double().cpu() - want).norm() for x in (found, plain))
    assert error <= 2 * least + 1e-5
