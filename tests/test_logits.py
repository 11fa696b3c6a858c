"""Soft-capped logits and sinks, in every method that has them, against attention written out in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import inputs, logits64, softmax64
from torch import Tensor

import nearfield as nf
from nearfield import synthetic

ALL_OPEN = nf.Cells(cell_size=4, probes=200, segment=16, sinks=2)
FEW = nf.Cells(cell_size=4, probes=2, segment=16, sinks=2)
METHODS = [nf.Exact(), nf.Auto(), nf.TopK(k=400), nf.TopK(k=8, tail=400), ALL_OPEN]
LOGITS = {"cap": (1.5, False), "sink": (None, True), "both": (1.5, True)}


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, softcap: float | None, sink: Tensor | None) -> tuple[Tensor, Tensor]:
    """Output and log-normaliser: a sink is one more key, with value zero."""
    logits = logits64(q, k)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    logits = logits.masked_fill(~mask, -torch.inf)
    v = v.double().repeat_interleave(q.shape[1] // v.shape[1], 1)
    if sink is not None:
        logits = torch.cat([logits, sink.double()[:, None, None].expand(*logits.shape[:3], 1)], 3)
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    return softmax64(logits) @ v, logits.logsumexp(-1)


def problem(kind: str, causal: bool, dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], dict[str, Any], Tensor]:
    """Inputs with gradients, the sink last; arguments; and the mask that they mean. With the mask, the first rows see no key."""
    softcap, has_sink = LOGITS[kind]
    q, k, v = inputs(2, 4, queries=40, keys=60, kv_heads=2, value_dim=5, dtype=dtype)
    sink = [torch.randn(4, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)] if has_sink else []
    leaves = [x.requires_grad_() for x in (2 * q, k, v, *sink)]
    arguments: dict[str, Any] = {"softcap": softcap, "s_aux": leaves[3] if has_sink else None, "enable_gqa": True}
    if causal:
        arguments |= {"is_causal": True, "offset": -3}
    mask = torch.arange(60) <= torch.arange(40)[:, None] - 3 if causal else torch.ones(40, 60, dtype=torch.bool)
    return leaves, arguments, mask


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_methods_that_read_all_keys_are_exact(method: nf.Method, kind: str, causal: bool) -> None:
    leaves, arguments, mask = problem(kind, causal)
    want, lse = by_hand(*leaves[:3], mask, arguments["softcap"], arguments["s_aux"])
    got = nf.attention(*leaves[:3], method=method, **arguments)
    torch.testing.assert_close(got, want)
    upstream = torch.randn(want.shape, dtype=want.dtype)
    for a, b in zip(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True):
        torch.testing.assert_close(a, b)
    est = nf.estimate(*leaves[:3], method=method, audit=320, **arguments)
    torch.testing.assert_close(est.lse, lse, check_dtype=False)
    assert est.audit is not None
    assert est.audit.additive < 1e-12


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_the_normaliser_has_a_gradient(method: nf.Method, kind: str, causal: bool) -> None:
    """Alone, and together with the output. That of a sink s is its weight, e^s / Z."""
    leaves, arguments, mask = problem(kind, causal)
    found = nf.attention(*leaves[:3], method=method, return_lse=True, **arguments)
    expected = by_hand(*leaves[:3], mask, arguments["softcap"], arguments["s_aux"])
    torch.testing.assert_close(found, expected)
    grads = [grads_of(*both, leaves) for both in (found, expected)]
    torch.testing.assert_close(grads[0], grads[1])
    alone = [torch.autograd.grad(finite(lse).sin().sum(), leaves, materialize_grads=True) for _, lse in (found, expected)]
    torch.testing.assert_close(alone[0], alone[1])


def finite(lse: Tensor) -> Tensor:
    """Without a sink, rows that see no key have a normaliser of zero."""
    return torch.where(lse > -torch.inf, lse, 0.0)


def grads_of(output: Tensor, lse: Tensor, leaves: list[Tensor]) -> tuple[Tensor, ...]:
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(4), dtype=output.dtype)
    return torch.autograd.grad((output * upstream).sum() + finite(lse).sin().sum(), leaves, retain_graph=True)


@pytest.mark.parametrize("method", [nf.Exact(), nf.TopK(k=400), nf.TopK(k=8, tail=400), ALL_OPEN], ids=repr)
def test_parts_of_the_keys_merge_where_one_has_the_sink(method: nf.Method) -> None:
    leaves, arguments, mask = problem("both", False)
    (q, k, v, _), cut = leaves, 25
    first = nf.attention(q, k[:, :, :cut], v[:, :, :cut], method=method, return_lse=True, **arguments)
    second = nf.attention(q, k[:, :, cut:], v[:, :, cut:], method=method, return_lse=True, **(arguments | {"s_aux": None}))
    merged = nf.merge(*zip(first, second, strict=True))
    expected = by_hand(q, k, v, mask, arguments["softcap"], arguments["s_aux"])
    torch.testing.assert_close(merged, expected)
    torch.testing.assert_close(grads_of(*merged, leaves), grads_of(*expected, leaves))


@pytest.mark.parametrize("kind", LOGITS)
def test_exact_attention_takes_any_mask(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    leaves, arguments, _ = problem(kind, False)
    mask = torch.rand(2, 1, 40, 60, generator=torch.Generator().manual_seed(2)) < 0.3
    want, lse = by_hand(*leaves[:3], mask, arguments["softcap"], arguments["s_aux"])
    monkeypatch.setattr("nearfield.chunks.BLOCK_BYTES", 1 << 16)  # several blocks of rows
    est = nf.estimate(*leaves[:3], mask, method=nf.Exact(), audit=320, **arguments)
    torch.testing.assert_close(est.output, want)
    torch.testing.assert_close(est.lse, lse, check_dtype=False)
    assert est.audit is not None
    assert est.audit.additive < 1e-12
    additive = torch.zeros(mask.shape, dtype=want.dtype).masked_fill(~mask, -torch.inf)
    found = nf.attention(*leaves[:3], additive, method=nf.Exact(), return_lse=True, **arguments)
    torch.testing.assert_close(found, (want, lse))
    torch.testing.assert_close(grads_of(*found, leaves), grads_of(want, lse, leaves))


@pytest.mark.parametrize("kind", LOGITS)
@pytest.mark.parametrize("change", [{}, {"samples": 3}, {"share": 16}, {"dropout_p": 0.3}], ids=str)
def test_the_engine_is_the_specification(kind: str, change: dict[str, Any]) -> None:
    """With few cells opened: closed cells, draws and dropout, forward and backward."""
    for causal in (False, True):
        leaves, arguments, _ = problem(kind, causal)
        options = dict(change)
        arguments |= {"dropout_p": options.pop("dropout_p", 0.0)}
        method = nf.Cells(cell_size=4, probes=2, segment=16, sinks=2, **options)
        found = []
        for backend in ("cpu", "reference"):
            generator = torch.Generator().manual_seed(3)
            options = {"method": method, "backend": backend, "generator": generator, **arguments}
            out = nf.attention(*leaves[:3], **options)
            upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=out.dtype)
            grads = torch.autograd.grad(out, leaves, upstream)
            both = nf.attention(*leaves[:3], **(options | {"generator": generator.manual_seed(3)}), return_lse=True)
            found.append((out, *grads, *both, *grads_of(*both, leaves)))
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_a_wide_cap_is_no_cap_and_a_low_sink_is_no_sink() -> None:
    q, k, v = inputs(1, 2, queries=50, keys=80, dtype=torch.float64)
    for method in (nf.Exact(), nf.TopK(k=5), FEW):
        plain = nf.attention(q, k, v, method=method)
        torch.testing.assert_close(nf.attention(q, k, v, method=method, softcap=1e6), plain)
        torch.testing.assert_close(nf.attention(q, k, v, method=method, s_aux=torch.full((2,), -1e3)), plain)
        assert torch.equal(nf.attention(q, k, v, method=method, softcap=0.0), plain)


@pytest.mark.parametrize(("family", "most"), [("clustered", 0.003), ("gaussian", 0.5), ("heavy_tailed", 0.3)])
def test_the_far_field_under_a_cap_is_about_as_good_as_without(family: str, most: float) -> None:
    """A cap of 50, as in Gemma 2, and one of 10, among logits of 6 to 114."""
    q, k, v = synthetic.make(family, 1, 1, 2048, 64)
    method, errors = nf.Cells(cell_size=16, probes=8), []
    for softcap in (None, 50.0, 10.0):
        want = nf.attention(q, k, v, softcap=softcap, method=nf.Exact())
        got = nf.attention(q, k, v, softcap=softcap, method=method)
        errors.append(float((got - want).norm() / want.norm()))
    assert max(errors) < most
    assert errors[1] < 1.1 * errors[0]
    assert errors[2] < 2.0 * errors[0] + 1e-3


def test_sinks_beside_the_kernels_in_triton() -> None:
    pytest.importorskip("triton")
    q, k, v = inputs(1, 2, queries=24, keys=40, kv_heads=1, dim=16)
    sink = torch.tensor([0.5, -1.0])
    found = []
    for backend in ("triton", "cpu"):
        leaves = [x.clone().requires_grad_() for x in (q, k, v, sink)]
        options: dict[str, Any] = {"is_causal": True, "offset": 16, "enable_gqa": True, "method": ALL_OPEN, "backend": backend}
        out, lse = nf.attention(*leaves[:3], s_aux=leaves[3], return_lse=True, **options)
        found.append((out, lse, *grads_of(out, lse, leaves)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="softcap=3"):
        nf.attention(q, k, v, enable_gqa=True, softcap=3.0, method=ALL_OPEN, backend="triton")


@pytest.mark.long
def test_sinks_can_be_compiled() -> None:
    leaves, arguments, _ = problem("both", True, torch.float32)
    arguments.pop("s_aux")

    for with_lse in (False, True):

        def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, with_lse: bool = with_lse) -> tuple[Tensor, ...]:
            found = nf.attention(q, k, v, s_aux=sink, method=FEW, return_lse=with_lse, **arguments)
            return found if with_lse else (found,)

        want, got = attend(*leaves), torch.compile(attend, backend="aot_eager", fullgraph=True)(*leaves)
        torch.testing.assert_close(got, want)
        upstream = [torch.randn(x.shape) for x in want]
        torch.testing.assert_close(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream))


def test_rows_without_keys() -> None:
    """They are zero, and so are their gradients."""
    q, k, v = inputs(1, 2, queries=3, keys=0)
    sink = torch.randn(2, requires_grad=True)
    est = nf.estimate(q, k, v, s_aux=sink, softcap=2.0)
    assert torch.equal(est.output, torch.zeros(1, 2, 3, 8))
    assert torch.equal(est.lse, sink.detach()[None, :, None].expand(1, 2, 3))
    est.output.sum().backward()
    assert sink.grad is not None
    assert not bool(sink.grad.any())
    _, lse = nf.attention(q, k, v, s_aux=sink, return_lse=True)
    assert torch.equal(torch.autograd.grad(lse.sum(), sink)[0], torch.full((2,), 3.0))


def test_what_is_refused() -> None:
    q, k, v = inputs(1, 2, queries=4)
    for bad in (-1.0, float("nan"), float("inf"), True, "3"):
        with pytest.raises(ValueError, match="softcap must be a positive number, or 0 or None for no cap"):
            nf.attention(q, k, v, softcap=bad)  # type: ignore[arg-type]
    for method in (None, nf.Exact(), nf.TopK(k=2), FEW):
        with pytest.raises(ValueError, match=r"softcap=1e\+39 is infinite in torch.float32, in which.*leave it out"):
            nf.attention(q, k, v, softcap=1e39, method=method)
    assert bool(nf.attention(*(x.double() for x in (q, k, v)), softcap=1e39).isfinite().all())
    with pytest.raises(ValueError, match=r"s_aux must have shape \(2,\), one logit for each query head, got \(3,\)"):
        nf.attention(q, k, v, s_aux=torch.zeros(3))
    with pytest.raises(TypeError, match=r"s_aux must be a dense tensor of floating point numbers.*got float"):
        nf.attention(q, k, v, s_aux=1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"LazyGumbel knows plain logits only, got softcap=3; use Exact\(\)"):
        nf.attention(q, k, v, softcap=3, method=nf.LazyGumbel())
    with pytest.raises(ValueError, match=r"gradient=.*knows plain logits only, got s_aux; use gradient=None"):
        nf.attention(q, k, v, s_aux=torch.zeros(2), method=nf.Exact(), gradient=nf.gradients.RandomWalk())


@pytest.mark.parametrize("method", [nf.Exact(), nf.TopK(k=200), nf.Cells(cell_size=4, probes=200, segment=16)], ids=repr)
def test_a_row_without_keys_and_without_a_sink_is_zero(method: nf.Method) -> None:
    """-inf is a sink that does not count. Neither outputs nor gradients may be NaN where there is nothing else."""
    leaves = [
        x.requires_grad_() for x in (*torch.randn(3, 1, 2, 20, 8, dtype=torch.float64), torch.tensor([-torch.inf, 0.5]).double())
    ]
    *qkv, sink = leaves
    output, lse = nf.attention(*qkv, is_causal=True, offset=-3, s_aux=sink, return_lse=True, method=method)
    assert not bool(output[:, :, :3].any())
    assert bool((lse[:, 0, :3] == -torch.inf).all())
    torch.testing.assert_close(lse[:, 1, :3], sink[1].expand(1, 3))
    loss = output.square().sum() + lse[:, :, 3:].square().sum()
    assert all(bool(x.isfinite().all()) for x in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("method", [nf.Exact(), nf.TopK(k=200), nf.Cells(cell_size=4, probes=200, segment=16)], ids=repr)
def test_a_sink_that_takes_everything(method: nf.Method) -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 8, dtype=torch.float64)
    sink = torch.tensor([torch.inf, 0.5], dtype=torch.float64, requires_grad=True)
    output, lse = nf.attention(q, k, v, s_aux=sink, return_lse=True, method=method)
    assert not bool(output[:, 0].any())
    assert float(torch.autograd.grad(output.sum(), sink, retain_graph=True)[0][0]) == 0.0
    assert float(torch.autograd.grad(lse.sum(), sink)[0][0]) == 20.0, "the normaliser is the sink"


def test_check_finite_looks_at_sinks() -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 8)
    with pytest.raises(ValueError, match="s_aux has NaN"):
        nf.attention(q, k, v, s_aux=torch.tensor([0.0, torch.nan]), check_finite=True)
