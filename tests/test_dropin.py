"""`F.scaled_dot_product_attention = nf.attention`, and what of the package is there without being imported."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from by_hand import inputs
from operator_calls import compiled
from test_imports import OPTIONAL, run
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import nearfield as nf

OWN = F.scaled_dot_product_attention
"""torch's, before any test puts something else in its place"""


@pytest.fixture
def dropped_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(F, "scaled_dot_product_attention", nf.attention)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "short": ({}, {"is_causal": True}),
    "few-keys": ({"keys": 9}, {}),
    "grouped": ({"kv_heads": 2}, {"enable_gqa": True, "scale": 0.3}),
    "grouped-unfused": ({"kv_heads": 2, "value_dim": 6}, {"enable_gqa": True}),
    "padding": ({}, {"attn_mask": torch.arange(40).view(1, 1, 1, 40) < 31}),
    "bias": ({}, {"attn_mask": torch.linspace(0, 1, 1600).view(40, 40)}),
}


@pytest.mark.usefixtures("dropped_in")
@pytest.mark.parametrize("case", CASES)
def test_in_the_place_of_torchs_function(case: str) -> None:
    shape, options = CASES[case]
    q, k, v = inputs(1, 4, **{"queries": 40, "keys": 40, "dim": 8, **shape})
    torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, **options), OWN(q, k, v, **options))


@pytest.mark.usefixtures("dropped_in")
@pytest.mark.parametrize("method", [nf.Exact(), nf.Auto(crossover=16), nf.TopK(k=40), nf.Cells(8, 2)], ids=repr)
def test_every_method_runs_while_it_is_there(method: nf.Method) -> None:
    q, k, v = inputs(1, 2, queries=40, keys=40, dim=8)
    assert nf.attention(q, k, v, method=method).isfinite().all()


@pytest.mark.usefixtures("dropped_in")
def test_torchs_own_modules_use_it() -> None:
    x = torch.randn(2, 10, 16, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, batch_first=True)
    calls = []
    F.scaled_dot_product_attention = lambda *args, **options: calls.append(1) or nf.attention(*args, **options)
    found = layer(x, x, x, need_weights=False)[0]
    assert calls
    torch.testing.assert_close(found, layer(x, x, x)[0])


@pytest.mark.usefixtures("dropped_in")
def test_in_its_place_when_compiled() -> None:
    q, k, v = inputs(1, 2, queries=40, keys=40, dim=8)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    program = compiled(call)
    torch.testing.assert_close(program(q, k, v), OWN(q, k, v, is_causal=True))


@pytest.mark.usefixtures("dropped_in")
def test_the_kernel_is_chosen_as_before() -> None:
    q, k, v = (x.float().requires_grad_() for x in inputs(1, 2, queries=40, keys=40, dim=8))
    assert "Flash" in type(F.scaled_dot_product_attention(q, k, v).grad_fn).__name__
    with sdpa_kernel(SDPBackend.MATH):
        output = F.scaled_dot_product_attention(q, k, v)
        torch.testing.assert_close(output, OWN(q, k, v), rtol=0, atol=0)
    assert "Flash" not in type(output.grad_fn).__name__


def test_no_module_asks_for_what_may_have_been_replaced() -> None:
    """In a docstring the name may stand; in code only `_compat` says which function is torch's own."""
    for path in Path(nf.__file__).parent.rglob("*.py"):
        named = [node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
        assert path.name == "_compat.py" or "scaled_dot_product_attention" not in named, f"{path}: use nearfield._compat.sdpa"


# Parts that are imported when they are asked for


def test_transformers_are_served_without_another_import() -> None:
    code = "import sys, nearfield as nf; nf.hf.register; print(*sys.modules)"
    loaded = set(run("-c", code).split())
    assert "nearfield.hf" in loaded
    assert "transformers" not in loaded


def test_importing_the_package_leaves_it_out() -> None:
    loaded = set(run("-c", "import sys, nearfield; print(*sys.modules)").split())
    assert "nearfield.synthetic" in loaded
    assert "nearfield.hf" not in loaded
    assert not loaded & {*OPTIONAL} - {"numba", "scipy", "triton"}


def test_a_name_that_nobody_has() -> None:
    assert "hf" in dir(nf)
    with pytest.raises(AttributeError, match="module 'nearfield' has no attribute 'hff'"):
        nf.hff  # noqa: B018


def test_synthetic_inputs_are_exported() -> None:
    q, _, _ = nf.synthetic.make("clustered", 1, 2, 64, 8)
    assert q.shape == (1, 2, 64, 8)
    assert "synthetic" in nf.__all__
