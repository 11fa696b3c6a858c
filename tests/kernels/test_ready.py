"""Calls that need no preparation: which are alike, which are not remembered at all, and how they are forgotten."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from by_hand import seeded
from torch import Tensor
from torch.autograd import forward_ad

import nearfield as nf
from nearfield import _compat, crossover
from nearfield.kernels import ready
from nearfield.kernels.ready import signature

METHOD = nf.Cells(cell_size=8, probes=2)
ARGUMENTS = (False, None, False, METHOD, 0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=seeded(seed))


def plain() -> list[Tensor]:
    return [normal(1, 2, 32, 16, seed=i) for i in range(3)]


def of(tensors: Any, *changed: Any, backend: str = "triton") -> Any:
    return signature(*tensors, backend, *(changed or ARGUMENTS))


def test_calls_with_other_numbers_are_alike() -> None:
    expected = of(plain())
    assert expected is not None
    assert of([x + 1 for x in plain()]) == expected
    assert of(3 * [normal(1, 2, 32, 16)]) == expected
    assert of(normal(3, 1, 2, 32, 16).unbind(0)) == expected
    assert of(plain(), False, None, False, nf.Cells(cell_size=8, probes=2), 0) == expected


DIFFERENT: dict[str, Callable[[], Any]] = {
    "length": lambda: of([normal(1, 2, 31, 16), *plain()[1:]]),
    "heads in another dimension": lambda: of([x.view(2, 1, 32, 16) for x in plain()]),
    "dimensions": lambda: of([x[0] for x in plain()]),
    "strides": lambda: of([plain()[0].transpose(1, 2).contiguous().transpose(1, 2), *plain()[1:]]),
    "strides of values": lambda: of([*plain()[:2], normal(1, 2, 16, 32).mT]),
    "dtype": lambda: of([x.bfloat16() for x in plain()]),
    "gradient of queries": lambda: of([plain()[0].requires_grad_(), *plain()[1:]]),
    "gradient of values": lambda: of([*plain()[:2], plain()[2].requires_grad_()]),
    "causal": lambda: of(plain(), True, *ARGUMENTS[1:]),
    "scale": lambda: of(plain(), False, 0.25, *ARGUMENTS[2:]),
    "another scale": lambda: of(plain(), False, -0.25, *ARGUMENTS[2:]),
    "grouped": lambda: of(plain(), False, None, True, METHOD, 0),
    "method": lambda: of(plain(), False, None, False, replace(METHOD, share=16), 0),
    "partition": lambda: of(plain(), False, None, False, replace(METHOD, partition=nf.KMeans(seed=1)), 0),
    "automatic": lambda: of(plain(), False, None, False, nf.Auto(), 0),
    "edition": lambda: of(plain(), False, None, False, METHOD, 1),
}


def test_calls_that_differ() -> None:
    found = [of(plain()), *(make() for make in DIFFERENT.values())]
    with torch.no_grad():
        found.append(of([x.requires_grad_() for x in plain()]))
    assert None not in found
    assert len(set(found)) == len(found)


def test_an_imposed_class_of_cards_is_another_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NEARFIELD_TILES", raising=False)
    before = of(plain())
    monkeypatch.setenv("NEARFIELD_TILES", "8.6")
    assert before != of(plain()) is not None


class Own(Tensor):
    pass


class Seen(_compat.DispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@dataclass
class Unhashable:
    number: int = 0


NOT_REMEMBERED: dict[str, Callable[[], Any]] = {
    "a parameter": lambda: of([torch.nn.Parameter(plain()[0]), *plain()[1:]]),
    "a subclass": lambda: of([*plain()[:2], plain()[2].as_subclass(Own)]),
    "no tensor": lambda: of([None, *plain()[1:]]),
    "an odd place": lambda: of([plain()[0], normal(1025)[1:].view(1, 2, 32, 16), plain()[2]]),
    "another backend": lambda: of(plain(), backend="auto"),
    "something without a hash": lambda: of(plain(), False, None, False, Unhashable(), 0),
}


@pytest.mark.parametrize("name", NOT_REMEMBERED)
def test_calls_that_are_not_remembered(name: str) -> None:
    assert NOT_REMEMBERED[name]() is None


def test_nothing_is_remembered_where_others_look_on() -> None:
    """Modes, transforms, tangents, determinism, and a dtype that is not that of the inputs."""
    found = []
    with Seen():
        found.append(of(plain()))
    inputs = plain()
    torch.func.vmap(lambda x: found.append(of(inputs)) or x)(torch.zeros(2))
    with forward_ad.dual_level():
        found.append(of(plain()))
    torch.use_deterministic_algorithms(True)
    try:
        found.append(of(plain()))
    finally:
        torch.use_deterministic_algorithms(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found.append(of(plain()))
        same = of([x.bfloat16() for x in plain()])
    assert found == 5 * [None]
    assert same == of([x.bfloat16() for x in plain()])
    assert of(plain()) is not None


def test_a_signature_holds_no_tensor() -> None:
    def leaves(x: Any) -> list[Any]:
        return [leaf for item in x for leaf in leaves(item)] if isinstance(x, tuple) else [x]

    assert not any(isinstance(x, Tensor) for x in leaves(of(plain())))


def test_the_least_recently_used_call_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ready, "MOST_KNOWN", 2)
    makers = {name: lambda *_, name=name: name for name in ("first", "second", "third")}
    for name in ("first", "second"):
        ready.remember(name, makers[name])
    assert ready.known("first") is makers["first"]
    ready.remember("third", makers["third"])
    assert ready.known("second") is None
    assert ready.known("first") is makers["first"]
    assert ready.known("third") is makers["third"]
    ready.forget()
    assert ready.known("first") is None


# What `attention` does with it


@pytest.fixture
def remembered(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Everything that is remembered; a call that was made before gives zeros."""
    found: list[Any] = []

    def known(call: Any) -> Any:
        return (lambda query, key, value: torch.zeros_like(query)) if call in found else None

    monkeypatch.setattr(ready, "known", known)
    monkeypatch.setattr(ready, "remember", lambda call, make: found.append(call))
    pytest.importorskip("triton")
    from nearfield.cells import method

    monkeypatch.setattr(method, "remember", ready.remember)
    monkeypatch.setattr("nearfield.cells.ready.ReadyCells.__call__", lambda self, q, k, v: torch.ones_like(q))
    return found


OPTIONS: dict[str, dict[str, Any]] = {
    "a mask": {"attn_mask": torch.ones(1, 1, 1, 32, dtype=torch.bool)},
    "dropout": {"dropout_p": 0.1},
    "a generator": {"generator": seeded(0)},
    "a check": {"check_finite": True},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_only_plain_calls_are_looked_up(name: str, remembered: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"method": METHOD, "backend": "triton"}
    assert bool(nf.attention(*plain(), **options).all())
    assert len(remembered) == 1
    assert not bool(nf.attention(*plain(), **options).any())

    class Run(Exception):
        """It took the long way."""

    def run(*_: Any) -> Any:
        raise Run

    monkeypatch.setattr(sys.modules["nearfield.attention"], "_run", run)
    with pytest.raises(Run):
        nf.attention(*plain(), **options, **OPTIONS[name])
    assert len(remembered) == 1


def test_a_method_of_ones_own_may_do_more_than_its_cells(remembered: list[Any]) -> None:
    class Doubled(nf.Method):
        def run(self, problem: Any, call: Any) -> nf.Outcome:
            outcome = METHOD.run(problem, call)
            return replace(outcome, output=outcome.output * 2 + 1)

    class More(nf.Cells):
        def run(self, problem: Any, call: Any) -> nf.Outcome:
            outcome = super().run(problem, call)
            return replace(outcome, output=outcome.output * 2 + 1)

    from nearfield.cells import operator

    def stub(queries: Tensor, keys: Tensor, values: Tensor, *_: Any) -> Any:
        return operator.CellsResult(torch.ones_like(queries), *(len(operator.CellsResult._fields) - 1) * [torch.zeros(())])

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("nearfield.cells.method.cells_attention", stub)
        for method in (Doubled(), More(cell_size=8, probes=2)):
            for _ in range(3):
                assert torch.equal(nf.attention(*plain(), method=method, backend="triton"), torch.full((1, 2, 32, 16), 3.0))
    assert remembered == []


def test_a_crossover_that_was_measured_again_counts(
    remembered: list[Any], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NEARFIELD_CACHE", str(tmp_path))
    cpu, inputs = torch.device("cpu"), plain()
    exact = torch.nn.functional.scaled_dot_product_attention(*inputs)
    try:
        for crossing, cells in ((16.0, True), (5000.0, False), (16.0, True)):
            crossover.keep(cpu, torch.float32, {"forward": crossing, "training": crossing})
            for turn in range(2):
                found = nf.attention(*inputs, method=nf.Auto(check=False), backend="triton")
                expected = (torch.zeros_like(exact) if turn else torch.ones_like(exact)) if cells else exact
                torch.testing.assert_close(found, expected)
    finally:
        crossover.forget()


def test_a_tolerance_is_checked_in_every_call(remembered: list[Any]) -> None:
    method = nf.Auto(eps=0.5, crossover=16)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            "nearfield.pilot.run_choice", lambda choice, problem, call: nf.Outcome(problem.value * call_is_bare(call))
        )
        for _ in range(3):
            inputs = plain()
            assert torch.equal(nf.attention(*inputs, method=method, backend="triton"), inputs[2])
    assert remembered == []


def call_is_bare(call: Any) -> int:
    return int(call.signature is None)
