"""`attention`: with every key near, all methods are exact attention, whatever the shape, dtype, mask or layout."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import QKV, attention64, causal_mask, gradients, inputs, logits64, seeded
from torch import Tensor

import nearfield as nf
from nearfield.problem import check

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

SLACK = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-5, torch.bfloat16: 1e-5}
"""Added to a multiple of torch's own error, which is zero on some tiny inputs. float64 needs no more than its rounding."""


CELLS = nf.Cells(cell_size=2, probes=2, segment=4, sinks=1)
FEW: dict[str, Any] = {"exact": nf.Exact(), "topk": nf.TopK(k=4), "tail": nf.TopK(k=3, tail=3), "cells": CELLS}


def everything_near(keys: int) -> dict[str, Any]:
    """Methods that leave nothing to chance on so many keys."""
    return {
        "exact": nf.Exact(),
        "k": nf.TopK(k=keys),
        "tail": nf.TopK(k=max(1, keys // 2), tail=keys),
        "cells": nf.Cells(cell_size=8, probes=keys // 8 + 1, segment=32, sinks=3),
    }


def sdpa(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=query.dim() > 2, **options)


def assert_as_good_as_torch(tensors: QKV, methods: dict[str, Any], causal: bool) -> None:
    """Output error within 2x, gradient errors within 3x the error of SDPA in the same dtype, against float64 arithmetic."""
    slack = SLACK[tensors[0].dtype]
    upstream = torch.randn(*tensors[0].shape[:-1], tensors[2].shape[-1], generator=seeded(9)).to(tensors[0].dtype)
    wide = (tensors[0].double(), tensors[1].double(), tensors[2].double())
    true, true_grads = gradients(lambda q, k, v: attention64(q, k, v, causal=causal), wide, upstream)
    plain, plain_grads = gradients(lambda q, k, v: sdpa(q, k, v, is_causal=causal), tensors, upstream)

    def error(x: Tensor, exact: Tensor) -> float:
        return float((x.double() - exact).abs().max())

    for name, method in methods.items():
        got, got_grads = gradients(
            lambda q, k, v, method=method: nf.attention(
                q, k, v, is_causal=causal, enable_gqa=True, method=method, generator=seeded(0)
            ),
            tensors,
            upstream,
        )
        assert got.dtype == tensors[0].dtype
        assert got.shape == true.shape
        assert error(got, true) <= 2 * error(plain, true) + slack, name
        for which, x, y, exact in zip("qkv", got_grads, plain_grads, true_grads, strict=True):
            assert error(x, exact) <= 3 * error(y, exact) + slack, f"{name}: gradient of {which}"


GRID = [
    *itertools.product((1, 2, 3, 17, 64), (8, 80), (False, True), (1, 2)),
    *itertools.product((257,), (32, 64, 80, 128), (False, True), (1, 2)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize(("length", "dim", "causal", "group"), GRID)
def test_exact_mode(length: int, dim: int, causal: bool, group: int, dtype: torch.dtype) -> None:
    tensors = inputs(1, group, queries=length, dim=dim, kv_heads=1, dtype=dtype, seed=length)
    assert_as_good_as_torch(tensors, everything_near(length), causal)


SOME_SLOW = [x if x in (torch.float32, torch.bfloat16) else pytest.param(x, marks=pytest.mark.slow) for x in DTYPES]


@pytest.mark.long
@pytest.mark.parametrize("dtype", SOME_SLOW, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize(("dim", "causal", "group"), [(64, True, 2), (80, False, 1)])
def test_exact_mode_of_long_inputs(dim: int, causal: bool, group: int, dtype: torch.dtype) -> None:
    """Many blocks of rows and spans of segments, and sums of thousands of terms in low precision."""
    tensors = inputs(1, group, queries=2049, dim=dim, kv_heads=1, dtype=dtype, seed=2049)
    methods = everything_near(2049)
    if dtype != torch.float32:  # A tail of a thousand keys per row is not what it is for: enough that it is right in one dtype.
        del methods["tail"]
    assert_as_good_as_torch(tensors, methods, causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(5, 12), (12, 5), (1, 9), (9, 1), (130, 40)])
def test_cross_attention(queries: int, keys: int, causal: bool) -> None:
    tensors = inputs(2, 2, queries=queries, keys=keys, dim=8)
    assert_as_good_as_torch(tensors, everything_near(keys), causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 2, 3), (1, 2, 1, 3)])
def test_any_number_of_dimensions(lead: tuple[int, ...], causal: bool) -> None:
    q, k, v = inputs(*lead, queries=7, keys=9, dim=4, value_dim=6)
    expected = attention64(q, k, v, causal=causal)
    for name, method in everything_near(9).items():
        est = nf.estimate(q, k, v, is_causal=causal, method=method, generator=seeded(0))
        assert est.output.shape == (*lead, 7, 6), name
        assert est.lse.shape == (*lead, 7), name
        torch.testing.assert_close(est.output.double(), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(est.lse.double(), logits64(q, k, causal=causal).logsumexp(-1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("value_dim", [1, 3, 20])
def test_values_of_another_width(value_dim: int) -> None:
    assert_as_good_as_torch(inputs(1, 2, queries=20, dim=8, value_dim=value_dim), everything_near(20), causal=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 1.0, 0.05, 3, 0.0, -0.5])
def test_scale(scale: float | None, causal: bool) -> None:
    tensors = inputs(1, 2, queries=20, keys=30, dim=8, dtype=torch.float64)
    upstream = torch.randn(1, 2, 20, 8, generator=seeded(1), dtype=torch.float64)
    true, true_grads = gradients(lambda q, k, v: attention64(q, k, v, causal=causal, scale=scale), tensors, upstream)
    for name, method in everything_near(30).items():
        got, grads = gradients(
            lambda q, k, v, method=method: nf.attention(
                q, k, v, is_causal=causal, scale=scale, method=method, generator=seeded(0)
            ),
            tensors,
            upstream,
        )
        torch.testing.assert_close(got, true, msg=name)
        for x, y in zip(grads, true_grads, strict=True):
            torch.testing.assert_close(x, y, atol=1e-9, rtol=1e-7)


def padding_mask(batch: int, keys: int, seed: int = 0) -> Tensor:
    """Half the keys of each entry, and the first key of the first entry hidden, so that its first causal row sees none."""
    mask = torch.rand(batch, 1, 1, keys, generator=seeded(seed)) < 0.5
    mask[0, ..., 0] = False
    mask[..., -1] = True
    return mask


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))
def test_key_padding(dtype: torch.dtype, causal: bool, group: int) -> None:
    q, k, v = inputs(3, 2 * group, queries=15, keys=23, dim=8, kv_heads=2, dtype=dtype)
    mask = padding_mask(3, 23)
    combined = mask & causal_mask(15, 23) if causal else mask
    expected = attention64(q, k, v, combined)
    plain = F.scaled_dot_product_attention(q, k, v, combined, enable_gqa=True)
    torch_error = float((plain.double() - expected).abs().max())
    for name, method in everything_near(23).items():
        got = nf.attention(q, k, v, mask, is_causal=causal, enable_gqa=True, method=method, generator=seeded(0))
        assert float((got.double() - expected).abs().max()) <= 2 * torch_error + SLACK[dtype], name


@pytest.mark.parametrize("method", list(everything_near(1)))
@pytest.mark.parametrize(
    "shape", [(5,), (1, 5), (1, 1, 5), (4, 1, 5), (2, 1, 1, 5), (1, 4, 1, 5), (2, 4, 1, 5), (1,), (2, 1, 1, 1), ()]
)
def test_key_padding_broadcasts(shape: tuple[int, ...], method: str) -> None:
    q, k, v = inputs(2, 4, queries=6, keys=5, dtype=torch.float64)
    mask = torch.rand(shape, generator=seeded(3)) < 0.6
    got = nf.attention(q, k, v, mask, method=everything_near(5)[method], generator=seeded(0))
    torch.testing.assert_close(got, attention64(q, k, v, mask))


def test_key_padding_of_five_dimensions() -> None:
    q, k, v = inputs(2, 3, 2, queries=4, keys=6, dtype=torch.float64)
    mask = torch.rand(3, 1, 1, 6, generator=seeded(3)) < 0.5
    for method in everything_near(6).values():
        got = nf.attention(q, k, v, mask, method=method, generator=seeded(0))
        torch.testing.assert_close(got, attention64(q, k, v, mask))


@pytest.mark.parametrize("group", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    "method", [nf.Exact(), nf.TopK(k=4), nf.TopK(k=2, tail=20), CELLS], ids=["exact", "topk", "all-near", "cells"]
)
def test_any_group_size(method: Any, group: int) -> None:
    q, k, v = inputs(2, 2 * group, queries=11, dim=4, kv_heads=2, dtype=torch.float64)
    got = nf.attention(q, k, v, is_causal=True, enable_gqa=True, method=method, generator=seeded(0))
    repeated = nf.attention(
        q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), is_causal=True, method=method, generator=seeded(0)
    )
    torch.testing.assert_close(got, repeated)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_queries_repeat_no_key(dtype: torch.dtype) -> None:
    q, k, v = inputs(2, 12, queries=5, keys=7, dim=4, kv_heads=3, dtype=dtype)
    rows = check(q, k, v, enable_gqa=True).rows
    assert rows.keys.shape == (2 * 3, 7, 4)
    assert rows.queries.shape == (2 * 3, 4 * 5, 4)
    for table, source in ((rows.keys, k), (rows.values, v)):
        # The whole storage, so that no expanded or sliced view of repeated keys passes.
        assert table.untyped_storage().nbytes() == source.numel() * table.element_size()
    if dtype in (torch.float32, torch.float64):
        assert rows.keys.data_ptr() == k.data_ptr(), "keys need no copy at all"


@pytest.mark.parametrize(
    ("value_dim", "dropout_p", "calls"),
    [(4, 0.0, [(12, True)]), (6, 0.0, [(3, False)] * 4), (4, 0.5, [(3, False)] * 4)],
    ids=["fused", "wide-values", "dropout"],
)
def test_exact_repeats_no_key_for_grouped_queries(
    value_dim: int, dropout_p: float, calls: list[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU torch's unfused kernel repeats keys where it is told of groups, so only the fused one may be told."""
    q, k, v = inputs(1, 12, queries=5, keys=7, dim=4, value_dim=value_dim, kv_heads=3)
    seen = []
    plain = F.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
        assert (key.data_ptr(), value.data_ptr()) == (k.data_ptr(), v.data_ptr())
        seen.append((query.shape[1], options["enable_gqa"]))
        return plain(query, key, value, *rest, **options)

    monkeypatch.setattr("nearfield.exact.sdpa", spy)
    nf.attention(q, k, v, dropout_p=dropout_p, enable_gqa=True)
    assert seen == calls


def test_torch_fuses_grouped_queries() -> None:
    """What the test above takes for granted."""
    q, k, v = (x.requires_grad_() for x in inputs(1, 12, queries=5, keys=7, dim=4, kv_heads=3))
    for options in ({"is_causal": True}, {"attn_mask": torch.ones(1, 1, 1, 7, dtype=torch.bool)}):
        assert "Flash" in type(F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options).grad_fn).__name__


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same numbers as `x` `[batch, heads, length, dim]` in other memory layouts."""
    padded = torch.full((*x.shape[:-1], 2 * x.shape[-1]), torch.nan, dtype=x.dtype)
    padded[..., ::2] = x
    return {
        "length-before-heads": x.transpose(1, 2).contiguous().transpose(1, 2),
        "dim-before-length": x.mT.contiguous().mT,
        "strided": padded[..., ::2],
        "sliced": torch.cat([x, x], 2)[:, :, : x.shape[2]],
    }


@pytest.mark.parametrize("method", FEW.values(), ids=FEW)
@pytest.mark.parametrize("layout", ["length-before-heads", "dim-before-length", "strided", "sliced"])
def test_layout_does_not_matter(layout: str, method: Any) -> None:
    tensors = inputs(2, 2, queries=12, dim=8, dtype=torch.float64)
    upstream = torch.randn(2, 2, 12, 8, generator=seeded(4), dtype=torch.float64)

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nf.attention(q, k, v, is_causal=True, method=method, generator=seeded(0))

    expected, expected_grads = gradients(run, tensors, upstream)
    leaves = [x.clone().requires_grad_() for x in tensors]
    other = [layouts(x)[layout] for x in leaves]
    assert not any(x.is_contiguous() for x in other)
    output = run(*other)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-14)
    for x, y in zip(torch.autograd.grad(output, leaves, layouts(upstream)[layout]), expected_grads, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=1e-13)


@pytest.mark.parametrize("method", FEW.values(), ids=FEW)
def test_expanded_inputs(method: Any) -> None:
    q, k, v = inputs(1, 1, queries=12, dim=8, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expanded = [x.expand(2, 3, -1, -1) for x in leaves]
    got = nf.attention(*expanded, method=method, generator=seeded(0))
    dense = [x.detach().contiguous().requires_grad_() for x in expanded]
    expected = nf.attention(*dense, method=method, generator=seeded(0))
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-14)
    got_grads = torch.autograd.grad(got.square().sum(), leaves)
    expected_grads = torch.autograd.grad(expected.square().sum(), dense)
    for x, y in zip(got_grads, expected_grads, strict=True):
        torch.testing.assert_close(x, y.sum((0, 1), keepdim=True))


@pytest.mark.parametrize("method", list(everything_near(1)))
def test_autocast(method: str) -> None:
    q, k, v = inputs(1, 2, queries=20, dim=8)
    run = everything_near(20)[method]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        leaf = q.clone().requires_grad_()
        got = nf.attention(leaf, k, v, method=run, generator=seeded(0))
        got.float().sum().backward()
        wide = nf.attention(q.double(), k.double(), v.double(), method=run, generator=seeded(0))
    by_hand = nf.attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), method=run, generator=seeded(0))
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, by_hand)
    assert leaf.grad is not None
    assert leaf.grad.dtype == torch.float32
    assert wide.dtype == torch.float64, "autocast leaves float64 alone, as torch does"


def test_autocast_does_not_reach_into_the_arithmetic() -> None:
    q, k, v = inputs(1, 1, queries=40, dim=8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        est = nf.estimate(q, k, v, method=nf.TopK(k=4, tail=4), generator=seeded(0))
        assert torch.is_autocast_enabled("cpu")
    expected = nf.estimate(q.bfloat16(), k.bfloat16(), v.bfloat16(), method=nf.TopK(k=4, tail=4), generator=seeded(0))
    assert est.lse.dtype == torch.float32
    assert torch.equal(est.lse, expected.lse)


def general_masks(queries: int = 6, keys: int = 9) -> dict[str, Tensor]:
    allowed = torch.rand(2, 1, queries, keys, generator=seeded(5)) < 0.5
    allowed[0, 0, 1] = False
    per_head = torch.rand(1, 4, 1, keys, generator=seeded(6)) < 0.6
    bias = torch.randn(1, 4, queries, keys, generator=seeded(7), dtype=torch.float64)
    return {
        "bool": allowed,
        "bool-2d": allowed[1, 0],
        "bool-per-query-head": per_head,
        "float": bias,
        "float-blocked": bias.masked_fill(~allowed[:1], -torch.inf),
        "float-padding": torch.zeros(2, 1, 1, keys, dtype=torch.float64).masked_fill(~allowed[:, :, :1], -torch.inf),
    }


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("name", list(general_masks()))
def test_exact_honours_any_mask(name: str, kv_heads: int) -> None:
    tensors = inputs(2, 4, queries=6, keys=9, dim=4, kv_heads=kv_heads, dtype=torch.float64)
    mask = general_masks()[name]
    upstream = torch.randn(2, 4, 6, 4, generator=seeded(8), dtype=torch.float64)
    true, true_grads = gradients(lambda q, k, v: attention64(q, k, v, mask), tensors, upstream)
    got, grads = gradients(lambda q, k, v: nf.attention(q, k, v, mask, enable_gqa=True), tensors, upstream)
    torch.testing.assert_close(got, true)
    for x, y in zip(grads, true_grads, strict=True):
        torch.testing.assert_close(x, y)
    est = nf.estimate(*tensors, mask, enable_gqa=True)
    assert est.lse.dtype == torch.float64
    torch.testing.assert_close(est.lse, logits64(tensors[0], tensors[1], mask).logsumexp(-1))


def test_exact_differentiates_a_float_mask() -> None:
    q, k, v = inputs(1, 2, queries=5, keys=6, dtype=torch.float64)
    bias = torch.randn(5, 6, generator=seeded(1), dtype=torch.float64, requires_grad=True)
    (got,) = torch.autograd.grad(nf.attention(q, k, v, bias).square().sum(), bias)
    (expected,) = torch.autograd.grad(attention64(q, k, v, bias).square().sum(), bias)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", ["bool", "float", "float-padding", "bool-per-query-head"])
@pytest.mark.parametrize(
    "method", [nf.TopK(k=3), nf.TopK(k=100), nf.LazyGumbel(), CELLS], ids=["topk", "topk-all", "gumbel", "cells"]
)
def test_other_methods_refuse_general_masks(method: Any, name: str) -> None:
    q, k, v = inputs(2, 4, queries=6, keys=9, kv_heads=2, dtype=torch.float64)
    with pytest.raises(ValueError, match=rf"{type(method).__name__} honours only boolean key-padding masks.*Exact\(\)"):
        nf.attention(q, k, v, general_masks()[name], enable_gqa=True, method=method)


def test_sampled_gradients_refuse_general_masks() -> None:
    q, k, v = inputs(2, 4, queries=6, keys=9)
    with pytest.raises(ValueError, match="honours only boolean key-padding masks"):
        nf.attention(q, k, v, general_masks()["bool"], gradient=nf.gradients.RandomWalk())


def test_causal_refuses_general_masks() -> None:
    q, k, v = inputs(2, 4, queries=6, keys=9, dtype=torch.float64)
    for name in ("bool", "float", "float-padding"):
        with pytest.raises(ValueError, match="is_causal=True can be combined only with a boolean key-padding attn_mask"):
            nf.attention(q, k, v, general_masks()[name], is_causal=True)


@pytest.mark.parametrize(
    "method", [nf.TopK(k=4), nf.TopK(k=3, tail=3), nf.LazyGumbel(draws=9), CELLS], ids=["topk", "tail", "gumbel", "cells"]
)
def test_backends_agree(method: Any) -> None:
    tensors = inputs(1, 2, queries=30, dim=8, dtype=torch.float64)
    upstream = torch.randn(1, 2, 30, 8, generator=seeded(1), dtype=torch.float64)
    results = [
        gradients(
            lambda q, k, v, backend=backend: nf.attention(q, k, v, method=method, backend=backend, generator=seeded(0)),
            tensors,
            upstream,
        )
        for backend in ("auto", "cpu", "reference")
    ]
    for output, grads in results[1:]:
        torch.testing.assert_close(output, results[0][0])
        for x, y in zip(grads, results[0][1], strict=True):
            torch.testing.assert_close(x, y)


def test_unknown_backend() -> None:
    q, k, v = inputs(1, 1, queries=4)
    for method in (None, nf.TopK(k=2)):
        with pytest.raises(ValueError, match=r"backend must be one of 'auto', .*got 'tpu'"):
            nf.attention(q, k, v, method=method, backend="tpu")


def test_default_method_is_sdpa() -> None:
    q, k, v = inputs(1, 2, queries=30, dim=16)
    assert torch.equal(nf.attention(q, k, v, is_causal=True), F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert nf.estimate(q, k, v).info["chosen"] == nf.Exact()


def test_default_k_is_the_square_root_of_the_keys() -> None:
    q, k, v = inputs(1, 1, queries=3, keys=50)
    assert nf.estimate(q, k, v, method=nf.TopK()).info["k"] == 8
    assert torch.equal(nf.attention(q, k, v, method=nf.TopK()), nf.attention(q, k, v, method=nf.TopK(k=8)))


def test_estimate_says_how_it_was_made() -> None:
    q, k, v = inputs(1, 1, queries=10)
    est = nf.estimate(q, k, v, is_causal=True, method=nf.TopK(k=2, tail=3), generator=seeded(0))
    # Rows see 1..10 keys, the index looks at all of them, and at most 5 are used.
    assert est.info["keys_per_query"] == pytest.approx(5.5)
    assert est.info["keys_used"] == pytest.approx((1 + 2 + 3 + 4 + 6 * 5) / 10)
    assert est.info["method"] == "TopK(k=2, tail=3, index=ExactIndex(), eps=None, delta=None, joint=False)"
    assert est.info["backend"] == "cpu"
    assert nf.estimate(q, k, v, backend="reference").info["backend"] == "reference"
    assert torch.equal(est.output, nf.attention(q, k, v, is_causal=True, method=nf.TopK(k=2, tail=3), generator=seeded(0)))
    assert nf.estimate(q, k, v).stderr is not None
    assert bool((nf.estimate(q, k, v).stderr == 0).all())


def test_queries_without_dimensions_weigh_all_keys_alike() -> None:
    q, k, v = inputs(1, 2, queries=3, keys=5, dim=0, value_dim=4, dtype=torch.float64)
    expected = v.mean(2, keepdim=True).expand(-1, -1, 3, -1)
    for method in everything_near(5).values():
        torch.testing.assert_close(nf.attention(q, k, v, method=method, generator=seeded(0)), expected)
