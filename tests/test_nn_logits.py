"""`nearfield.nn.Attention` with soft caps, sinks, windows and an offset: `nearfield.attention` between the projections."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import nearfield as nf
from nearfield.nn import Attention

METHODS = [nf.Exact(), nf.TopK(k=4), nf.Cells(cell_size=4, probes=2, segment=8)]
QUERIES, KEYS, EMBED, HEADS = 9, 24, 16, 4


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def module(**options: Any) -> Attention:
    made = Attention(EMBED, HEADS, num_kv_heads=2, dtype=torch.float64, **options)
    with torch.no_grad():
        for seed, parameter in enumerate(made.parameters()):
            parameter.copy_(normal(*parameter.shape, seed=seed) / 2)
    return made


def by_hand(layer: Attention, x: Tensor, y: Tensor, **options: Any) -> Tensor:
    """Three projections, attention, and a fourth."""
    q, k, v = (
        layer_(z).unflatten(-1, (-1, 4)).transpose(1, 2)
        for layer_, z in ((layer.q_proj, x), (layer.k_proj, y), (layer.v_proj, y))
    )
    output = nf.attention(q, k, v, enable_gqa=True, method=layer.method, **options)
    return layer.out_proj(output.transpose(1, 2).flatten(2))


ASKED: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "softcap": ({"softcap": 0.5}, {}, {"softcap": 0.5}),
    "window": ({"window_size": (3, 2)}, {"offset": 15}, {"window_size": (3, 2), "offset": 15}),
    "causal window": (
        {"window_size": [5, -1]},
        {"is_causal": True, "offset": 15},
        {"window_size": (5, -1), "is_causal": True, "offset": 15},
    ),
    "offset": ({}, {"is_causal": True, "offset": 15}, {"is_causal": True, "offset": 15}),
}


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("asked", ASKED)
def test_attention_is_told(asked: str, method: nf.Method) -> None:
    own, options, told = ASKED[asked]
    layer = module(method=method, sink_logits=True, **own)
    x, y = normal(2, QUERIES, EMBED, seed=20).requires_grad_(), normal(2, KEYS, EMBED, seed=21).requires_grad_()
    got = layer(x, y, **options)[0]
    want = by_hand(layer, x, y, s_aux=layer.s_aux, **told)
    torch.testing.assert_close(got, want)
    leaves, upstream = [x, y, *layer.parameters()], normal(*want.shape, seed=22)
    assert any(leaf is layer.s_aux for leaf in leaves)
    for a, b in zip(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True):
        torch.testing.assert_close(a, b)
    assert (got - module(method=method)(x, y, is_causal=options.get("is_causal", False))[0]).abs().max() > 1e-3


def test_the_sink_is_a_parameter_that_is_learnt_and_kept() -> None:
    layer = Attention(EMBED, HEADS, sink_logits=True)
    assert "s_aux" in dict(layer.named_parameters())
    assert layer.s_aux is not None
    assert layer.s_aux.tolist() == [0.0] * HEADS
    with torch.no_grad():
        layer.s_aux.fill_(3.0)
    other = Attention(EMBED, HEADS, sink_logits=True)
    other.load_state_dict(layer.state_dict())
    x = torch.randn(2, 5, EMBED)
    assert torch.equal(other(x)[0], layer(x)[0])
    layer.reset_parameters()
    assert layer.s_aux.tolist() == [0.0] * HEADS
    assert Attention(EMBED, HEADS).s_aux is None
    with pytest.raises(ValueError, match=r"nn.MultiheadAttention has no sinks; got s_aux \(sink_logits\)"):
        layer.to_torch()


def test_it_says_what_it_is() -> None:
    shown = repr(Attention(EMBED, HEADS, softcap=5.0, sink_logits=True, window_size=(3, 0)))
    assert "softcap=5.0, sink_logits=True, window_size=(3, 0)" in shown
    assert "softcap" not in repr(Attention(EMBED, HEADS))


WALK = nf.gradients.RandomWalk()
REFUSED: list[tuple[type[Exception], str, dict[str, Any]]] = [
    (
        ValueError,
        r"gradient=RandomWalk\(.* got softcap=2; use gradient=None",
        {"softcap": 2, "gradient": WALK},
    ),
    (ValueError, r"gradient=.* got sink_logits=True; use gradient=None", {"sink_logits": True, "gradient": WALK}),
    (ValueError, "LazyGumbel knows plain logits only, got softcap=2", {"softcap": 2.0, "method": nf.LazyGumbel()}),
    (ValueError, "softcap must be a positive number.* got -1", {"softcap": -1}),
    (ValueError, "window_size must be two integers.* got 3", {"window_size": 3}),
    (TypeError, "sink_logits must be True or False, got 4", {"sink_logits": 4}),
    (ValueError, r"dropout must be in \[0, 1\), got 'no'", {"dropout": "no"}),
]


@pytest.mark.parametrize(("error", "message", "options"), REFUSED, ids=[message for _, message, _ in REFUSED])
def test_what_is_refused_when_it_is_made(error: type[Exception], message: str, options: dict[str, Any]) -> None:
    with pytest.raises(error, match=message):
        Attention(EMBED, HEADS, **options)


def test_what_is_refused_when_it_is_called() -> None:
    layer, x = Attention(EMBED, HEADS, window_size=(2, 2)), torch.randn(1, QUERIES, EMBED)
    with pytest.raises(ValueError, match=r"window_size=\(2, 2\) can be combined only with a boolean key-padding attn_mask"):
        layer(x, attn_mask=torch.ones(QUERIES, QUERIES).triu(1).bool())
    with pytest.raises(ValueError, match=r"nn.MultiheadAttention has no softcap and no window_size; this module has window"):
        layer.to_torch()
    layer = Attention(EMBED, HEADS)
    with pytest.raises(ValueError, match=r"offset=3 shifts a causal mask.*pass is_causal=True as well"):
        layer(x, offset=3)
    with pytest.raises(TypeError, match="is_causal must be True or False, got 'no'"):
        layer(x, is_causal="no")
    layer.softcap, layer.gradient = 2.0, WALK
    with pytest.raises(ValueError, match="plain logits only, got softcap=2"):
        layer(x)
