"""Bad input gets a typed error before any work, or a stated result; never silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from by_hand import QKV, attention64, inputs, seeded
from torch import Tensor

import nearfield as nf

METHODS: dict[str, Any] = {
    "exact": nf.Exact(),
    "topk": nf.TopK(k=3),
    "tail": nf.TopK(k=2, tail=2),
    "kmeans": nf.TopK(k=3, tail=1, index=nf.KMeansIndex(cells=3, probes=1)),
    "lsh": nf.TopK(k=3, index=nf.ConcentricLSH(rungs=2, tables=2)),
    "gumbel": nf.LazyGumbel(draws=5),
    "cells": nf.Cells(cell_size=2, probes=1, segment=3, sinks=1),
    "cells-samples": nf.Cells(cell_size=2, probes=1, segment=3, sinks=1, samples=2),
}
every_method = pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
NAN, INF = float("nan"), float("inf")
BOOL = torch.bool


def run(tensors: QKV, method: Any, *args: Any, **options: Any) -> Tensor:
    return nf.attention(*tensors, *args, method=method, generator=seeded(0), **options)


def grads(output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(output, leaves, torch.ones_like(output)))


def leaves_of(tensors: QKV) -> list[Tensor]:
    return [x.clone().requires_grad_() for x in tensors]


Q, K, V = inputs(2, 4, queries=5, keys=6, dim=8)
META = torch.device("meta")

REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "query not a tensor": ({"query": [[1.0]]}, TypeError, "query must be a torch.Tensor, got list"),
    "value not a tensor": ({"value": None}, TypeError, "value must be a torch.Tensor, got NoneType"),
    "integer query": ({"query": Q.long()}, TypeError, "query must be float64, .* got torch.int64"),
    "integer key": ({"key": K.int()}, TypeError, "key must be float64, .* got torch.int32"),
    "boolean value": ({"value": V > 0}, TypeError, "value must be float64, .* got torch.bool"),
    "complex query": ({"query": Q + 0j}, TypeError, "query must be float64, .* got torch.complex64"),
    "key of another dtype": ({"key": K.double()}, TypeError, "query and key .* torch.float32 and torch.float64"),
    "value of another dtype": ({"value": V.half()}, TypeError, "query and value .* torch.float32 and torch.float16"),
    "key on another device": ({"key": K.to(META)}, ValueError, "query and key must be on the same device, got cpu and meta"),
    "value on another device": ({"value": V.to(META)}, ValueError, "query and value .* got cpu and meta"),
    "one dimension": ({"query": Q[0, 0, 0]}, ValueError, r"query must have shape \[..., length, dim\], got \(8,\)"),
    "key of fewer dimensions": ({"key": K[0]}, ValueError, "query and key .* number of dimensions, got 4 and 3"),
    "value of fewer dimensions": ({"value": V[0, 0]}, ValueError, "query and value .* number of dimensions, got 4 and 2"),
    "key of another width": ({"key": K[..., :7]}, ValueError, r"same last dimension, got .*5, 8\) and .*6, 7\)"),
    "fewer values than keys": ({"value": V[:, :, :5]}, ValueError, r"key and value .* got .*6, 8\) and .*5, 8\)"),
    "fewer heads of values": ({"value": V[:, :2]}, ValueError, r"key and value .* got \(2, 4, .* and \(2, 2, "),
    "another batch": ({"key": K[:1], "value": V[:1]}, ValueError, r"same batch dimensions, got \(2, .* and \(1, "),
    "grouped, not enabled": ({"key": K[:, :2], "value": V[:, :2]}, ValueError, "4 heads and key has 2; pass enable_gqa=True"),
    "grouped and short, not enabled": (
        {"query": Q[:, :, :1], "key": K[:, :2, :1], "value": V[:, :2, :1]},
        ValueError,
        "4 heads and key has 2; pass enable_gqa=True",
    ),
    "groups do not divide": (
        {"key": K[:, :3], "value": V[:, :3], "enable_gqa": True},
        ValueError,
        r"query heads \(4\) must be a multiple of key heads \(3\)",
    ),
    "more key heads": ({"query": Q[:, :2], "enable_gqa": True}, ValueError, r"\(2\) must be a multiple of key heads \(4\)"),
    "no key heads": ({"key": K[:, :0], "value": V[:, :0], "enable_gqa": True}, ValueError, r"multiple of key heads \(0\)"),
    "dropout 1": ({"dropout_p": 1.0}, ValueError, r"dropout_p must be in \[0, 1\), got 1.0"),
    "dropout negative": ({"dropout_p": -0.1}, ValueError, "dropout_p must be .* got -0.1"),
    "dropout NaN": ({"dropout_p": NAN}, ValueError, "dropout_p must be .* got nan"),
    "dropout not a number": ({"dropout_p": "0.1"}, ValueError, "dropout_p must be .* got '0.1'"),
    "scale inf": ({"scale": INF}, ValueError, "scale must be a finite number, or None .*, got inf"),
    "scale NaN": ({"scale": NAN}, ValueError, "scale must be a finite number, or None .*, got nan"),
    "scale beyond float32": (
        {"scale": 1e39},
        ValueError,
        r"scale=1e\+39 is infinite in torch.float32, in which .* float64 inputs",
    ),
    "scale beyond float64": ({"scale": 10**400}, ValueError, "is infinite in torch.float32"),
    "scale not a number": ({"scale": "1"}, ValueError, "scale must be a finite number, or None .*, got '1'"),
    "mask not a tensor": ({"attn_mask": [True] * 6}, TypeError, "attn_mask must be a torch.Tensor or None, got list"),
    "integer mask": (
        {"attn_mask": torch.ones(6).long()},
        TypeError,
        r"got torch.int64; .* pass attn_mask.bool\(\)",
    ),
    "integer padding": (
        {"attn_mask": torch.ones(2, 6).long()},
        TypeError,
        r"got torch.int64; if 1 means that a key counts, pass attn_mask\[:, None, None, :\].bool\(\)",
    ),
    "padding in two dimensions": (
        {"attn_mask": torch.ones(2, 6, dtype=BOOL)},
        ValueError,
        r"got \(2, 6\); for a key-padding mask \[batch, key_length\] pass attn_mask\[:, None, None, :\]",
    ),
    "mask of another length": ({"attn_mask": torch.ones(5, 7, dtype=BOOL)}, ValueError, r"to \(2, 4, 5, 6\), got \(5, 7\)"),
    "mask of more dimensions": ({"attn_mask": torch.ones(1, 1, 1, 1, 6, dtype=BOOL)}, ValueError, "must be broadcastable to"),
    "mask on another device": ({"attn_mask": torch.ones(6, dtype=BOOL, device=META)}, ValueError, "attn_mask .* cpu and meta"),
    "sparse query": ({"query": Q.to_sparse()}, TypeError, r"query must be a dense tensor.*pass query.to_dense\(\)"),
    "sparse key": ({"key": K.to_sparse()}, TypeError, r"key must be a dense tensor.*pass key.to_dense\(\)"),
    "sparse mask": ({"attn_mask": torch.ones(5, 6).to_sparse()}, TypeError, "attn_mask must be a dense tensor"),
    "on the device meta": ({"query": Q.to(META), "key": K.to(META), "value": V.to(META)}, ValueError, "meta and hold no numbers"),
    "unknown backend": ({"backend": "fast"}, ValueError, "backend must be one of .* got 'fast'"),
    "method is a class": (
        {"method": nf.TopK},
        TypeError,
        r"got <class .*; write TopK\(\), with parentheses",
    ),
    "nested": (
        {"query": torch.nested.nested_tensor([Q[0], Q[1]])},
        TypeError,
        r"query is a nested tensor; pad it and hide the padding: pass query.to_padded_tensor\(0.0\)",
    ),
    "nested keys": (
        {"key": torch.nested.nested_tensor([K[0], K[1]], layout=torch.jagged)},
        TypeError,
        "key is a nested tensor; pad it",
    ),
    "lengths before heads": (
        {name: x.transpose(1, 2) for name, x in (("query", Q), ("key", K), ("value", V))},
        ValueError,
        r"5 heads and key has 6; inputs are \[batch, heads, length, dim\]: .* there are 4 heads, pass query.transpose\(1, 2\)",
    ),
    "lengths before heads, grouped": (
        {"enable_gqa": True} | {name: x.transpose(1, 2) for name, x in (("query", Q), ("key", K), ("value", V))},
        ValueError,
        r"must be a multiple of key heads \(6\); inputs are \[batch, heads, length, dim\]: .* pass query.transpose\(1, 2\)",
    ),
    "lengths before heads, masked": (
        {"query": K.transpose(1, 2), "key": K.transpose(1, 2), "value": V.transpose(1, 2), "attn_mask": torch.ones(6, 6).bool()},
        ValueError,
        r"got \(6, 6\); inputs are .*: if there are 6 keys and 4 heads, pass query.transpose\(1, 2\)",
    ),
    "method is a string": ({"method": "topk"}, TypeError, "method must be a method such as .* got 'topk'"),
    "generator is a seed": ({"generator": 3}, TypeError, "generator must be a torch.Generator or None, got 3; make one by "),
    "gradient is a class": (
        {"gradient": nf.gradients.RandomWalk},
        TypeError,
        "gradient must be a gradient such as .* got <class",
    ),
}


class Watched:
    """A method that notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        raise AttributeError(name)


@pytest.mark.parametrize("call", [nf.attention, nf.estimate])
@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, call: Any) -> None:
    """Before any work, and before a method is asked anything."""
    change, error, message = REFUSED[name]
    arguments = {"query": Q, "key": K, "value": V} | change
    with pytest.raises(error, match=message):
        call(**arguments)
    method = Watched()
    with pytest.raises(error, match=message):
        call(**{"method": method} | arguments)
    assert method.asked == []


@pytest.mark.parametrize("method", [nf.Cells(), nf.TopK(k=3)], ids=["cells", "topk"])
def test_a_causal_mask_that_was_written_out(method: Any) -> None:
    lower = torch.ones(6, 6, dtype=BOOL).tril()
    with pytest.raises(ValueError, match=r"It looks lower-triangular: pass is_causal=True in place of attn_mask. Exact"):
        nf.attention(K, K, V, lower, method=method)
    window = lower & ~lower.tril(-3)
    for other in (window, lower.flip(0), torch.ones(6, 6, dtype=BOOL), torch.zeros(6, 6), lower[:5]):
        with pytest.raises(ValueError, match="honours only boolean key-padding masks") as caught:
            nf.attention(K[:, :, : len(other)], K, V, other, method=method)
        assert "is_causal" not in str(caught.value)


def test_a_method_is_asked_when_the_inputs_are_right() -> None:
    method = Watched()
    with pytest.raises(TypeError, match="method must be"):
        nf.attention(Q, K, V, method=method)  # type: ignore[arg-type]
    assert method.asked == ["run"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k must be a positive integer or None, got 0"),
        ({"k": -3}, "k must be a positive integer or None, got -3"),
        ({"k": 2.0}, r"k must be a positive integer or None, got 2\.0"),
        ({"k": True}, "k must be a positive integer or None, got True"),
        ({"k": "8"}, "k must be a positive integer or None, got '8'"),
        ({"tail": -1}, "tail must be an integer of at least 0 or None, got -1"),
        ({"tail": 1.5}, r"tail must be an integer of at least 0 or None, got 1\.5"),
        ({"tail": False}, "tail must be an integer of at least 0 or None, got False"),
    ],
)
def test_wrong_sizes(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nf.TopK(**arguments)


def test_wrong_index() -> None:
    with pytest.raises(TypeError, match=r"index must be an index such as .* got 'exact'"):
        nf.TopK(index="exact")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["eps", "delta"])
@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, 2, NAN, "0.1", True])
def test_wrong_fractions(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number between 0 and 1, got {value!r}"):
        nf.LazyGumbel(**{name: value})


def test_misspelt_arguments() -> None:
    with pytest.raises(TypeError, match="unexpected keyword"):
        nf.attention(Q, K, V, causal=True)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword"):
        nf.TopK(topk=3)  # type: ignore[call-arg]


@every_method
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_bad_query_row(bad: float, causal: bool, method: Any) -> None:
    q, k, v = inputs(2, 2, queries=7, dim=4)
    expected = run((q, k, v), method, is_causal=causal)
    spoiled = q.clone()
    spoiled[1, 0, 3, 2] = bad
    got = run((spoiled, k, v), method, is_causal=causal)
    assert bool(got[1, 0, 3].isnan().all())
    if isinstance(method, nf.LazyGumbel):
        # How many numbers a row takes from the stream depends on its logits, so the other rows get another draw of the same law.
        assert got.isnan().sum() == 4
        return
    got[1, 0, 3] = expected[1, 0, 3]
    assert torch.equal(got, expected), "other rows changed"


@every_method
@pytest.mark.parametrize("which", ["key", "value"])
def test_bad_visible_key(which: str, method: Any) -> None:
    q, k, v = inputs(2, 4, queries=7, dim=4, kv_heads=2)
    (k if which == "key" else v)[0, 1, 5, 0] = NAN
    got = run((q, k, v), method, enable_gqa=True)
    assert bool(got[0, 2:].isnan().all()), "both query heads of the group see it, whatever their top k"
    assert bool(got[0, :2].isfinite().all())
    assert bool(got[1].isfinite().all())


@every_method
@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("which", ["key", "value"])
def test_bad_future_key(which: str, bad: float, method: Any) -> None:
    q, k, v = inputs(1, 2, queries=9, dim=4)
    clean_k, clean_v = k.clone(), v.clone()
    for x in (clean_k, clean_v):
        x[:, 1, 6] = 0.0
    (k if which == "key" else v)[:, 1, 6] = bad
    got = run((q, k, v), method, is_causal=True)
    assert bool(got[:, 1, 6:].isnan().all())
    if isinstance(method, nf.LazyGumbel):
        assert bool(got[:, 1, :6].isfinite().all())
        return
    zeroed = (q, clean_k if which == "key" else k, clean_v if which == "value" else v)
    expected = run(zeroed, method, is_causal=True)
    assert torch.equal(got[:, 0], expected[:, 0])
    assert torch.equal(got[:, 1, :6], expected[:, 1, :6]), "rows before it"


@every_method
@pytest.mark.parametrize("causal", [False, True])
def test_bad_masked_key(causal: bool, method: Any) -> None:
    q, k, v = inputs(2, 2, queries=9, dim=4)
    mask = torch.rand(2, 1, 1, 9, generator=seeded(1)) < 0.6
    hidden = ~mask[:, :, 0, :, None].expand(-1, 2, -1, 4)
    expected = run((q, k.masked_fill(hidden, 0), v.masked_fill(hidden, 0)), method, mask, is_causal=causal)
    leaves = leaves_of((q, k.masked_fill(hidden, NAN), v.masked_fill(hidden, INF)))
    got = run((leaves[0], leaves[1], leaves[2]), method, mask, is_causal=causal)
    assert torch.equal(got, expected)
    assert bool(got.isfinite().all())
    for grad in grads(got, leaves):
        assert bool(grad.isfinite().all())
    for grad in grads(run((leaves[0], leaves[1], leaves[2]), method, mask, is_causal=causal), leaves[1:]):
        assert bool((grad[hidden] == 0).all()), "a hidden key has no gradient"


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_bad_key_under_a_general_mask(kind: str) -> None:
    q, k, v = inputs(1, 2, queries=3, keys=4, dim=4, dtype=torch.float64)
    allowed = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1], [0, 1, 0, 1]], dtype=BOOL)
    mask = allowed if kind == "bool" else torch.zeros(3, 4, dtype=torch.float64).masked_fill(~allowed, -INF)
    expected = attention64(q, k, v, mask)
    k[0, 1, 2] = NAN
    got = nf.attention(q, k, v, mask)
    assert bool(got[0, 1, 0].isnan().all())
    torch.testing.assert_close(got[0, 1, 1:], expected[0, 1, 1:])
    torch.testing.assert_close(got[0, 0], expected[0, 0])


@every_method
def test_gradients_of_rows_that_see_nan_are_nan(method: Any) -> None:
    q, k, v = inputs(1, 2, queries=9, dim=4)
    q[0, 1, 4] = NAN
    leaves = leaves_of((q, k, v))
    for grad in grads(run((leaves[0], leaves[1], leaves[2]), method), leaves[1:]):
        assert bool(grad[0, 1].isnan().any()), "never silently dropped"
        assert bool(grad[0, 0].isfinite().all()), "the other head never met it"


def test_estimate_spoils_everything_it_knows_of_a_row() -> None:
    q, k, v = inputs(1, 1, queries=9, dim=4)
    q[0, 0, 4] = NAN
    est = nf.estimate(q, k, v, method=METHODS["tail"], generator=seeded(0))
    for x in (est.lse, est.stderr):
        assert x is not None
        assert x.isnan().flatten().nonzero().flatten().tolist() == [4]


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_check_finite(bad: float, which: str) -> None:
    tensors = dict(zip(("query", "key", "value"), inputs(1, 2, queries=5), strict=True))
    nf.attention(**tensors, check_finite=True)
    tensors[which][0, 1, 2, 3] = bad
    for method in METHODS.values():
        with pytest.raises(ValueError, match=f"check_finite=True: NaN or inf in {which}$"):
            nf.attention(**tensors, method=method, check_finite=True)


def test_check_finite_ignores_masked_keys() -> None:
    q, k, v = inputs(1, 2, queries=5)
    k[0, 0, 2] = NAN
    mask = torch.tensor([True, True, False, True, True])
    assert bool(nf.attention(q, k, v, mask, check_finite=True)[0, 1].isfinite().all())


@every_method
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys", "value_dim"),
    [(2, 3, 0, 5, 4), (2, 3, 5, 0, 4), (2, 3, 5, 5, 0), (0, 3, 5, 5, 4), (2, 0, 5, 5, 4)],
)
def test_empty(batch: int, heads: int, queries: int, keys: int, value_dim: int, causal: bool, method: Any) -> None:
    leaves = leaves_of(
        (torch.randn(batch, heads, queries, 4), torch.randn(batch, heads, keys, 4), torch.randn(batch, heads, keys, value_dim))
    )
    est = nf.estimate(*leaves, is_causal=causal, method=method, generator=seeded(0), audit=3)
    assert est.output.shape == (batch, heads, queries, value_dim)
    assert est.lse.shape == (batch, heads, queries)
    assert bool((est.output == 0).all())
    assert est.audit is not None
    assert est.audit.additive == 0.0
    if keys == 0:
        assert bool((est.lse == -torch.inf).all())
    for grad, x in zip(grads(est.output, leaves), leaves, strict=True):
        assert torch.equal(grad, torch.zeros_like(x))


@every_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_key_masked(dtype: torch.dtype, method: Any) -> None:
    leaves = leaves_of(inputs(2, 2, queries=6, dim=4, dtype=dtype))
    output = run((leaves[0], leaves[1], leaves[2]), method, torch.zeros(6, dtype=BOOL))
    assert bool((output == 0).all())
    for grad in grads(output, leaves):
        assert bool((grad == 0).all())


@every_method
def test_one_entry_masked(method: Any) -> None:
    """The other entry of the batch keeps its keys; the lengths of the two differ."""
    q, k, v = inputs(2, 2, queries=6, dim=4)
    mask = torch.ones(2, 1, 1, 6, dtype=BOOL)
    mask[1] = False
    leaves = leaves_of((q, k, v))
    output = run((leaves[0], leaves[1], leaves[2]), method, mask)
    assert bool((output[1] == 0).all())
    assert bool((output[0] != 0).any(-1).all())
    for grad in grads(output, leaves):
        assert bool((grad[1] == 0).all())
        assert bool(grad.isfinite().all())


@every_method
def test_first_keys_masked_and_causal(method: Any) -> None:
    q, k, v = inputs(1, 2, queries=8, dim=4)
    mask = torch.arange(8) >= 2
    leaves = leaves_of((q, k, v))
    output = run((leaves[0], leaves[1], leaves[2]), method, mask, is_causal=True)
    assert bool((output[:, :, :2] == 0).all())
    assert torch.allclose(output[:, :, 2], v[:, :, 2]), "one key: its value"
    got = grads(output, leaves)
    assert bool((got[0][:, :, :2] == 0).all())
    for grad in got:
        assert bool(grad.isfinite().all())


@pytest.mark.parametrize("more", [{}, {"softcap": 2.0}, {"s_aux": torch.zeros(2)}], ids=["plain", "softcap", "sink"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masked_row_of_a_general_mask(kind: str, more: dict[str, Any]) -> None:
    mask = torch.ones(5, 5, dtype=BOOL)
    mask[2] = False
    variant = mask if kind == "bool" else torch.zeros(5, 5).masked_fill(~mask, -INF)
    leaves = leaves_of(inputs(1, 2, queries=5, dim=4))
    output = nf.attention(*leaves, variant, **more)
    assert bool((output[:, :, 2] == 0).all())
    got = grads(output, leaves)
    assert bool((got[0][:, :, 2] == 0).all())
    for grad in got:
        assert bool(grad.isfinite().all())
    # Whatever its query.
    query = leaves[0].detach().clone()
    query[0, 0, 2, 1] = NAN
    torch.testing.assert_close(nf.attention(query, *leaves[1:], variant, **more), output)


def test_rows_without_keys_are_tensors_of_their_own() -> None:
    q, k, v = inputs(1, 2, queries=5, dim=4)
    output, lse = nf.attention(q, k, v, torch.zeros(1, 1, 1, 5, dtype=BOOL), s_aux=torch.ones(2), return_lse=True)
    output[0, 0, 0, 0] += 1.0
    lse[0, 0, 0] += 1.0
    assert float(output.sum()) == 1.0
    assert float(lse.sum()) == 11.0
    # A sink of -inf is none. The other head has nothing to do with it.
    edges = torch.tensor([0, 2, 5]), torch.tensor([0, 3, 3])
    rows = [x[0].transpose(0, 1) for x in (q, k[:, :, :3], v[:, :, :3])]
    output = nf.attention_varlen(rows[0], rows[1], rows[2], *edges, s_aux=torch.tensor([-INF, 0.0]))
    assert bool((output[2:] == 0).all())
    assert bool((output[:2] != 0).all())


@every_method
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_one_key_is_its_value(dtype: torch.dtype, method: Any) -> None:
    q, k, v = inputs(2, 2, queries=1, dim=4, dtype=dtype)
    assert torch.equal(run((q, k, v), method), v)
    assert torch.equal(run((q, k, v), method, is_causal=True), v)


@pytest.mark.parametrize("k", [9, 10, 10**9, 2**40])
def test_more_near_keys_than_keys_is_exact(k: int) -> None:
    tensors = inputs(1, 2, queries=5, keys=9)
    est = nf.estimate(*tensors, method=nf.TopK(k=k, tail=5), generator=seeded(0))
    assert torch.equal(est.output, nf.attention(*tensors))
    assert est.info["k"] == 9
    assert est.info["tail"] == 0


def test_a_tail_longer_than_the_keys_is_exact() -> None:
    tensors = inputs(1, 2, queries=5, keys=9, dtype=torch.float64)
    for tail in (500, 2**70):
        est = nf.estimate(*tensors, method=nf.TopK(k=2, tail=tail), generator=seeded(0))
        torch.testing.assert_close(est.output, nf.attention(*tensors))
        assert est.info["tail"] == 9, "no room for keys that are not there"


@pytest.mark.parametrize("size", [50, 2**70])
def test_sizes_beyond_all_keys_are_all_keys(size: int) -> None:
    tensors = inputs(1, 2, queries=20, keys=20, dtype=torch.float64)
    exactly = nf.attention(*tensors, is_causal=True, method=nf.Exact())
    for name in ("probes", "sinks", "segment", "window"):
        options = {"cell_size": 4, "segment": 8, name: size}
        torch.testing.assert_close(run(tensors, nf.Cells(**options), is_causal=True), exactly)
    for causal in (False, True):
        one = run(tensors, nf.Cells(cell_size=20, probes=1, segment=8), is_causal=causal)
        assert torch.equal(run(tensors, nf.Cells(cell_size=size, probes=1, segment=8), is_causal=causal), one)
    method = nf.Cells(cell_size=4, probes=1, samples=20)
    drawn = run(tensors, method)
    assert torch.equal(run(tensors, nf.Cells(cell_size=4, probes=1, samples=size)), drawn)
    with pytest.raises(ValueError, match="draws must be at most 16777216, got 1180591620717411303424"):
        nf.LazyGumbel(draws=2**70)


@every_method
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_no_row_sees_a_key(dtype: torch.dtype, method: Any) -> None:
    q, k, v = inputs(1, 2, queries=6, dim=4, dtype=dtype)
    est = nf.estimate(q, k, v, is_causal=True, offset=-6, method=method, audit=3, generator=seeded(0))
    assert not bool(est.output.any())
    assert bool((est.lse == -INF).all())
    none = nf.estimate(q, k[:, :, :0], v[:, :, :0], method=method, audit=3)
    assert est.audit is not None
    assert none.audit is not None
    assert est.audit.additive == none.audit.additive == 0.0


NEAR = {
    "exact": nf.Exact(),
    "k": nf.TopK(k=64),
    "tail": nf.TopK(k=5, tail=64),
    "cells": nf.Cells(cell_size=2, probes=8, segment=4, sinks=1),
}
every_near = pytest.mark.parametrize("method", NEAR.values(), ids=NEAR)


@every_near
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_logits(size: float, causal: bool, method: Any) -> None:
    q, k, v = inputs(1, 1, queries=12, dim=4, dtype=torch.float64)
    q[..., 0], k[..., 0] = 1.0, size
    leaves = leaves_of((q.float(), k.float(), v.float()))
    output = run((leaves[0], leaves[1], leaves[2]), method, is_causal=causal, scale=1.0)
    expected = attention64(*(x.detach() for x in leaves), causal=causal, scale=1.0)
    # A logit of 1e4 in float32 is off by up to 1e4 * 2^-24 = 6e-4 for each of the few roundings of its sum; so are the weights.
    torch.testing.assert_close(output.double(), expected, atol=4e-3 * float(v.abs().max()), rtol=0)
    for grad in grads(output, leaves):
        assert bool(grad.isfinite().all())


@every_near
def test_logits_far_apart(method: Any) -> None:
    """+1e4 and -1e4 in one row: all the weight on one key."""
    q, k, v = inputs(1, 1, queries=9, dim=2)
    q[:], k[:], k[0, 0, 4] = 1.0, -5e3, 5e3
    leaves = leaves_of((q, k, v))
    output = run((leaves[0], leaves[1], leaves[2]), method, scale=1.0)
    torch.testing.assert_close(output, v[:, :, 4:5].expand_as(output))
    for grad in grads(output, leaves):
        assert bool(grad.isfinite().all())


@every_near
def test_half_precision_extremes(method: Any) -> None:
    """The largest float16 numbers: products overflow float16 by far, and the default scale must come before any rounding."""
    q, k, v = inputs(1, 1, queries=12, dim=64, dtype=torch.float16)
    # Each query is its own key, so that no two keys tie: their products differ by multiples of 1e9.
    q = k = q.sign() * 6e4
    leaves = leaves_of((q, k, v))
    output = run((leaves[0], leaves[1], leaves[2]), method)
    assert torch.equal(output, v)
    for grad in grads(output, leaves):
        assert bool(grad.isfinite().all())
    est = nf.estimate(q, k, v, method=method, generator=seeded(0))
    assert est.lse.dtype == torch.float32
    assert bool(est.lse.isfinite().all()), "a log-normaliser of 4e8 does not fit into float16"
    assert bool((est.lse > 1e6).all())


@every_near
def test_subnormal_half_precision(method: Any) -> None:
    q, k, v = inputs(1, 1, queries=12, dim=8, dtype=torch.float16)
    tiny = (q * 1e-4, k * 1e-4, v * 1e-4)
    torch.testing.assert_close(run(tiny, method).double(), attention64(*tiny), atol=2**-24, rtol=0)


DEGENERATE: dict[str, QKV] = {}
for _name in ("identical keys", "duplicate keys", "zero queries", "zero keys", "identical everything"):
    _q, _k, _v = inputs(1, 2, queries=40, dim=4, dtype=torch.float64)
    if _name == "identical keys":
        _k = _k[:, :, :1].expand_as(_k).clone()
    elif _name == "duplicate keys":
        _k = _k[:, :, :5].repeat(1, 1, 8, 1)
    elif _name == "zero queries":
        _q = torch.zeros_like(_q)
    elif _name == "zero keys":
        _k = torch.zeros_like(_k)
    else:
        _q, _k, _v = (x[:, :, :1].expand_as(x).clone() for x in (_q, _k, _v))
    DEGENERATE[_name] = (_q, _k, _v)

INDICES = {
    "exact": nf.ExactIndex(),
    "kmeans": nf.KMeansIndex(cells=12, probes=2),
    "lsh": nf.ConcentricLSH(rungs=2, tables=2),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
@pytest.mark.parametrize("name", DEGENERATE)
def test_ties(name: str, index: Any, causal: bool) -> None:
    """With ties any top k will do: a covering tail must still give exact attention, and gradients must be finite."""
    tensors = DEGENERATE[name]
    got = run(tensors, nf.TopK(k=6, tail=40, index=index), is_causal=causal)
    torch.testing.assert_close(got, attention64(*tensors, causal=causal))
    leaves = leaves_of(tensors)
    sparse = run((leaves[0], leaves[1], leaves[2]), nf.TopK(k=6, tail=5, index=index), is_causal=causal)
    for x in (sparse, *grads(sparse, leaves)):
        assert bool(x.isfinite().all())
    if name == "identical everything":
        torch.testing.assert_close(sparse, tensors[2])


@pytest.mark.parametrize("name", DEGENERATE)
def test_ties_of_the_exact_top_k(name: str) -> None:
    """k keys of equal logit are k different keys, each once."""
    q, k, _ = DEGENERATE[name]
    weights = nf.attention(q, k, torch.eye(40, dtype=q.dtype).expand(1, 2, -1, -1), method=nf.TopK(k=6))
    assert bool(((weights > 0).sum(-1) == 6).all())
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 40, dtype=q.dtype))


@every_method
def test_double_backward_is_refused(method: Any) -> None:
    """NotImplementedError; for `Exact` torch's fused kernel says the same in its own words."""
    leaves = leaves_of(inputs(1, 1, queries=8, dim=4))
    output = run((leaves[0], leaves[1], leaves[2]), method)

    def second() -> None:
        (first,) = torch.autograd.grad(output.square().sum(), leaves[0], create_graph=True)
        first.square().sum().backward()

    error = RuntimeError if isinstance(method, nf.Exact) else NotImplementedError
    with pytest.raises(error, match=r"does not support double backward|is not implemented"):
        second()


def test_double_backward_of_exact_where_torch_has_it() -> None:
    """Values of another width take torch's unfused kernel, which can be differentiated twice."""
    tensors = [x.requires_grad_() for x in inputs(1, 1, queries=3, dim=2, value_dim=3, dtype=torch.float64)]
    assert torch.autograd.gradgradcheck(lambda q, k, v: nf.attention(q, k, v), tensors)
