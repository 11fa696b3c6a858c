"""Running ahead: what a pilot is likely to choose is begun early, and is dropped where the pilot chooses otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import nearfield as nf
from nearfield import pilot
from nearfield.problem import Call, Problem, check
from nearfield.sampling import Seeds
from nearfield.synthetic import make

METHOD = nf.Auto(eps=0.05, crossover=128)
FINE, FLAT = make("clustered", 1, 2, 1024, 16), make("gaussian", 1, 2, 1024, 16)


@pytest.fixture(autouse=True)
def nothing_is_known() -> Iterator[None]:
    pilot.forget()
    yield
    pilot.forget()


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was run, and when rows were looked at."""
    seen: list[Any] = []
    run, look = pilot.run_choice, pilot.try_budgets

    def runs(choice: pilot.Choice, problem: Problem, call: Call) -> nf.Outcome:
        seen.append(type(choice.method).__name__)
        return run(choice, problem, call)

    def looks(*arguments: Any) -> Any:
        seen.append("look")
        return look(*arguments)

    monkeypatch.setattr(pilot, "run_choice", runs)
    monkeypatch.setattr(pilot, "try_budgets", looks)
    return seen


def attend(inputs: tuple[Tensor, ...], signature: str | None = "one", **more: Any) -> Tensor:
    """As `attention` does for calls that have a signature: plain ones on a GPU."""
    problem = check(*inputs, None, 0.0, False, None, False)
    return METHOD.run(problem, Call(Seeds(None, torch.device("cpu")), signature=signature, **more)).output


@pytest.mark.parametrize(("inputs", "chosen"), [(FINE, "Cells"), (FLAT, "Exact")])
def test_after_a_streak_the_run_comes_first_and_only_once(order: list[Any], inputs: tuple[Tensor, ...], chosen: str) -> None:
    expected = attend(inputs, signature=None)
    order.clear()
    for _ in range(pilot.STREAK):
        assert torch.equal(attend(inputs), expected)
    assert order == ["look", chosen] * pilot.STREAK
    order.clear()
    assert torch.equal(attend(inputs), expected)
    assert order == [chosen, "look"]


@pytest.mark.parametrize(("usual", "now", "begun", "chosen"), [(FINE, FLAT, "Cells", "Exact"), (FLAT, FINE, "Exact", "Cells")])
def test_a_wrong_guess_costs_a_run_and_changes_nothing(
    order: list[Any], usual: tuple[Tensor, ...], now: tuple[Tensor, ...], begun: str, chosen: str
) -> None:
    expected = attend(now, signature=None)
    for _ in range(pilot.STREAK):
        attend(usual)
    order.clear()
    assert torch.equal(attend(now), expected)
    assert order == [begun, "look", chosen]
    order.clear()
    attend(usual)
    assert order == ["look", begun], "the streak has ended"


def test_gradients_reach_what_was_begun_under_a_pilot_without_them(order: list[Any]) -> None:
    def gradients() -> list[Tensor]:
        inputs = tuple(x.clone().requires_grad_() for x in FINE)
        attend(inputs).square().sum().backward()
        return [x.grad for x in inputs if x.grad is not None]

    expected = gradients()
    for _ in range(pilot.STREAK):
        found = gradients()
        assert len(found) == 3
        assert all(map(torch.equal, found, expected))
    assert order[-2:] == ["Cells", "look"]
    with torch.no_grad():
        assert not attend(tuple(x.clone().requires_grad_() for x in FINE)).requires_grad


def test_nothing_is_begun_where_it_would_draw_or_wait(order: list[Any]) -> None:
    for _ in range(pilot.STREAK + 1):
        attend(FINE)
    order.clear()
    attend(FINE, diagnostics=True)
    attend(FINE, signature="another")
    problem = check(*FINE, None, 0.5, False, None, False)
    METHOD.run(problem, Call(Seeds(None, torch.device("cpu")), signature="one"))
    assert order == ["look", "Cells"] * 3


def test_kinds_of_calls_are_forgotten_at_last() -> None:
    choice = pilot.Choice(nf.Exact(), [], None)
    for number in range(pilot.MOST_KNOWN + 1):
        for _ in range(pilot.STREAK):
            pilot.remember(number, choice)
    assert pilot.likely(0) is None
    assert pilot.likely(1) == (nf.Exact(), ())
    pilot.remember(None, choice)
    assert len(pilot._SEEN) == pilot.MOST_KNOWN
