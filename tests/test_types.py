"""Every argument of the functions that attend, given something of a wrong type: an error that names it, before any work."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
from by_hand import inputs
from torch import Tensor

import nearfield as nf


class Idle(nf.Method):
    """Must not be asked to work."""

    any_mask = any_logits = any_window = gives_lse = True

    def run(self, problem: nf.Problem, call: nf.Call) -> nf.Outcome:
        raise AssertionError("work was done")


Q, K, V = inputs(1, 2, queries=20, keys=20, dim=8)
ROWS, EDGES = torch.randn(20, 2, 8), torch.tensor([0, 8, 20])
PLAIN: dict[str, Any] = {"query": Q, "key": K, "value": V}
PACKED: dict[str, Any] = {"q": ROWS, "k": ROWS, "v": ROWS, "cu_seqlens_q": EDGES, "cu_seqlens_k": EDGES}
CALLS: dict[Any, dict[str, Any]] = {
    nf.attention: PLAIN | {"method": Idle()},
    nf.estimate: PLAIN | {"method": Idle()},
    nf.attention_varlen: PACKED | {"method": Idle()},
    nf.plan: PLAIN,
    nf.explain: PLAIN,
}

WRONG: dict[str, Any] = {
    "text": "no",
    "bytes": b"x",
    "object": object(),
    "list": [1],
    "dictionary": {"a": 1},
    "tensor": torch.ones(2, 3, dtype=torch.complex64),
    "fraction": 1.5,
    "integer": 2,
    "flag": True,
}
NUMBERS, INTEGERS, FLAGS = ("fraction", "integer"), ("integer",), ("flag",)
RIGHT = {
    **dict.fromkeys(("scale", "softmax_scale", "softcap"), NUMBERS),
    **dict.fromkeys(("offset", "audit", "crossover"), INTEGERS),
    **dict.fromkeys(("is_causal", "causal", "enable_gqa", "check_finite", "return_lse", "per_head"), FLAGS),
}
"""What is no wrong type for an argument."""


def told(value: Any, message: str) -> bool:
    """Whether a message says what was received: the value, or of what kind it is."""
    shown = {repr(value), type(value).__name__}
    if isinstance(value, Tensor):
        shown = {str(value.dtype), f"shape {tuple(value.shape)}", "tensor("}
    return any(x in message for x in shown)


CASES = [
    pytest.param(call, name, kind, id=f"{call.__name__}-{name}-{kind}")
    for call in CALLS
    for name in inspect.signature(call).parameters
    for kind in WRONG
    if kind not in RIGHT.get(name, ())
]


@pytest.mark.parametrize(("call", "name", "kind"), CASES)
def test_a_wrong_type_is_named(call: Any, name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("work was done")

    for place in ("nearfield.auto.run_pilot", "nearfield.plans._exact_seconds", "nearfield.packed.Packed.of"):
        monkeypatch.setattr(place, refuse)
    with pytest.raises((TypeError, ValueError)) as caught:
        call(**CALLS[call] | {"generator": generator} | {name: WRONG[kind]})
    message = str(caught.value)
    assert re.search(rf"\b{name}\b", message), message
    assert told(WRONG[kind], message), message
    assert torch.equal(generator.get_state(), before)


def test_every_function_has_an_argument_of_each_kind_here() -> None:
    assert len(CASES) > 500
    assert {name for call in CALLS for name in inspect.signature(call).parameters} >= set(RIGHT)


@pytest.mark.parametrize("call", [nf.attention, nf.estimate])
def test_false_is_no_dropout(call: Any) -> None:
    """As `self.training and 0.1` is."""
    with_flag, without = (call(Q, K, V, None, dropout, method=nf.Exact()) for dropout in (False, 0.0))
    assert torch.equal(*(x.output if isinstance(x, nf.Estimate) else x for x in (with_flag, without)))


@pytest.mark.parametrize("method", [nf.Exact(), nf.Cells(cell_size=4, probes=1, segment=4), nf.LazyGumbel(draws=3)], ids=repr)
@pytest.mark.parametrize("flag", [1, 0, torch.tensor(True), torch.tensor([False])], ids=str)
def test_what_else_says_yes_or_no(flag: Any, method: nf.Method) -> None:
    """For every method alike, and not just where SDPA is called straight away."""
    plain = bool(flag)
    for call in (nf.attention, nf.estimate):
        got, want = (call(Q, K, V, is_causal=x, method=method, generator=torch.Generator().manual_seed(0)) for x in (flag, plain))
        got, want = (x.output if isinstance(x, nf.Estimate) else x for x in (got, want))
        assert torch.equal(got, want)
    packed = (nf.attention_varlen(*PACKED.values(), causal=x, method=nf.Exact()) for x in (flag, plain))
    assert torch.equal(*packed)
