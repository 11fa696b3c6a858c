"""The experiment on gradient descent: its sizes, its times, and that what it says follows the numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib")

import nearfield as nf
from experiments import look
from experiments.experiment import Finding, Rows
from experiments.gradient_descent.descend import point_of, start
from experiments.gradient_descent.draw import draw
from experiments.gradient_descent.estimators import DELTA, EPS, WALKS, Dice, Without, large, small, timed
from experiments.gradient_descent.losses import LOSSES
from experiments.gradient_descent.names import COLORS
from experiments.gradient_descent.plan import QUICK, one_gradient, units
from experiments.gradient_descent.select import gaps, progress
from experiments.gradient_descent.tell import adequate, appendix, convex, cost, errors, longer, non_convex, tell, with_keys, worse
from experiments.gradient_descent.times import in_turn, times
from experiments.printed_law import sizes
from experiments.store import plain
from nearfield.paper.gradients import PrintedWalk
from nearfield.problem import check

INPUTS = ("query", "key", "value")


def run(loss: str, estimator: str, losses: list[Any], seed: int = 0, **other: Any) -> dict[str, Any]:
    about = {"kind": "descent", "N": 100, "loss": loss, "rate": 0.1, "seed": seed, "estimator": estimator}
    return {**about, "losses": losses, "diverged": len(losses) < 3, **other}


def off_by(loss: str, *distances: float, exact: str = "exact-qv", estimator: str = "printed-qv") -> Rows:
    """A seed for each distance: off by so much of the exact fall half-way, and not at all in the end. Infinity: diverges."""
    rows = []
    for seed, distance in enumerate(distances):
        rows.append(run(loss, exact, [2.0, 1.5, 1.0], seed))
        rows.append(run(loss, estimator, [2.0, 1.5 + distance, 1.0] if math.isfinite(distance) else [2.0, 3e3], seed))
    return rows


def test_what_is_called_printed_has_the_printed_size() -> None:
    asked = sizes(100, 3, EPS, DELTA)
    assert asked.walks == math.ceil(2 * math.log2(100) / EPS**2) == 5316
    assert small(100, 3)["printed"].asked == small(100, 3)["printed-qv"].asked == asked  # type: ignore[attr-defined]
    # Medians of means as `PrintedWalk` has them: 3 N d and N (3d + 1) estimates, ln 9000 and ln 10000 times 2.3133, made odd.
    assert (asked.groups, asked.key_groups, asked.group_size) == (23, 23, 3344)
    few = sizes(2, 1, 0.5, 0.9)
    taken = PrintedWalk(0.5, 0.9).sizes(check(*torch.randn(3, 1, 1, 2, 1)).rows)
    assert (few.groups, few.key_groups, few.group_size) == (taken[0].groups, taken[1].groups, taken[0].group_size)
    assert few.groups != few.key_groups
    found = one_gradient(QUICK, 0)
    assert {row["estimator"]: row["draws"] for row in found}["walks"] == WALKS * QUICK.count


def test_exact_gradients_are_exact_and_what_stays_does_not_move() -> None:
    inputs, target = start(40, 0)
    _, point = point_of(inputs, "squared error", target)
    right = nf.gradients.exact(*point)
    for estimator in (timed(40)["sdpa"], timed(40)["exact"], small(40, 3)["exact"], large(40)["exact"]):
        torch.testing.assert_close(estimator(point, Dice.cast(0)), right, atol=1e-5, rtol=1e-4)
    assert "exact-kv" not in timed(40)
    for estimator, name in ((small(40, 3)["exact-qv"], "key"), (large(40)["exact-kv"], "query")):
        assert isinstance(estimator, Without)
        found = estimator(point, Dice.cast(0))
        assert [bool(x.any()) for x in found] == [other != name for other in INPUTS]


def test_distance_is_measured_on_the_way_and_against_the_right_descent() -> None:
    rows = [*off_by("cubic", 0.1, math.inf), *off_by("cubic", 0.3, exact="exact", estimator="walks")]
    assert gaps(rows, "cubic", "printed-qv") == pytest.approx([0.1, math.inf])
    assert progress(rows, "cubic", "printed-qv") == [1.0, -math.inf]
    assert gaps(rows, "cubic", "walks") == pytest.approx([0.3])
    rising = [run("cubic", "exact-qv", [1.0, 1.5, 1.1]), run("cubic", "printed-qv", [1.0, 1.5, 1.1])]
    lost = [run("cubic", "exact-qv", [1.0, 2e3], 1), run("cubic", "printed-qv", [1.0, 0.5, 0.1], 1)]
    not_finite = [run("cubic", "exact-qv", [1.0, 0.9, 0.8], 2), run("cubic", "printed-qv", [1.0, 0.9, None], 2)]
    assert gaps([*rising, *lost, *not_finite], "cubic", "printed-qv") == [math.inf]


@pytest.mark.parametrize(
    ("distances", "verdict"),
    [
        ((0.01, 0.02), "confirmed"),
        ((0.01, 0.02, 0.9), "partly"),
        ((0.2, -0.2), "refuted"),
        ((0.01, math.inf, math.inf), "partly"),
        ((math.inf,), "refuted"),
        ((), "untested"),
    ],
)
def test_every_run_has_to_be_close_and_noise_that_is_right_on_average_is_not(distances: tuple[float, ...], verdict: str) -> None:
    found = convex(off_by("squared error", *distances))
    assert found.verdict == verdict
    assert ("diverges" in found.evidence) == (math.inf in distances)


@pytest.mark.parametrize(
    ("entropy", "squared", "verdict", "words"),
    [
        (0.2, 0.01, "confirmed", "less closely"),
        (0.2, 0.4, "partly", "more closely"),
        (0.01, 0.03, "refuted", "more closely"),
        (0.03, 0.01, "refuted", "less closely"),
        (math.inf, 0.01, "confirmed", "less closely"),
    ],
)
def test_the_verdict_on_cross_entropy_compares(entropy: float, squared: float, verdict: str, words: str) -> None:
    found = non_convex([*off_by("cross-entropy", entropy), *off_by("squared error", squared)])
    assert found.verdict == verdict
    assert f"Cross-entropy follows {words} than squared error" in found.evidence


def test_the_verdict_on_cross_entropy_counts_runs() -> None:
    squared = off_by("squared error", 0.01)
    assert non_convex([*off_by("cross-entropy", 0.2, 0.3), *squared]).verdict == "confirmed"
    assert non_convex([*off_by("cross-entropy", 0.2, 0.01, 0.3), *squared]).verdict == "partly"


def test_the_verdict_on_cross_entropy_needs_both() -> None:
    assert non_convex(off_by("cross-entropy", 0.2)).verdict == "untested"


@pytest.mark.parametrize(
    ("ends", "verdict"),
    [
        ((1.0, 1.4), "confirmed"),
        ((1.0, 1.4, 1.8), "partly"),
        ((1.0, 1.8), "refuted"),
        ((1.0, None, None), "refuted"),
        ((), "untested"),
    ],
)
def test_the_verdict_on_progress_counts_descents(ends: tuple[float | None, ...], verdict: str) -> None:
    """Losses fall from 2, to 1 in the exact descent. None: diverges."""
    rows = []
    for seed, end in enumerate(ends):
        rows.append(run("cubic", "exact-qv", [2.0, 1.5, 1.0], seed))
        rows.append(run("cubic", "printed-qv", [2.0, 1e4] if end is None else [2.0, 1.5, end], seed))
    assert adequate(rows).verdict == verdict


@pytest.mark.parametrize(
    ("distances", "verdict"),
    [((0.01, 0.01, 0.01), "confirmed"), ((0.01, 0.2, 0.01), "partly"), ((0.1, 0.2, math.inf), "refuted"), ((0.1,), "untested")],
)
def test_the_verdict_on_the_losses_of_the_appendix(distances: tuple[float, ...], verdict: str) -> None:
    names = ("quadratic", "cubic", "exponential")
    rows = [row for loss, distance in zip(names, distances, strict=False) for row in off_by(loss, distance)]
    assert appendix(rows).verdict == verdict


def test_descents_that_diverge_are_counted() -> None:
    def found(*exact: list[float]) -> Finding:
        rows: Rows = []
        for loss in LOSSES:
            for name in ("printed", "walks", "topk"):
                rows += [run(loss, name, [2.0, 3e3] if name == "printed" else [2.0, 1.5, 1.0], i) for i in range(len(exact))]
            rows += [run(loss, "exact", losses, i) for i, losses in enumerate(exact)]
        return with_keys(rows)

    right, lost = [2.0, 1.5, 1.0], [2.0, 3e3]
    assert found(right).verdict == "beyond"
    assert "; 0 of 5 reach it, 5 diverge" in found(right).evidence
    assert "; 5 of 5 reach it." in found(right).evidence
    assert "left out" not in found(right).evidence
    assert "left out (5 of 10)" in found(right, lost).evidence


def rows_of_errors(kind: str, values: dict[str, tuple[Any, ...]], **other: Any) -> Rows:
    return [
        {"kind": kind, "N": 100, "seed": 0, "estimator": name, **dict(zip(INPUTS, three, strict=True)), **other}
        for name, three in values.items()
    ]


def test_all_three_errors_are_told() -> None:
    values = {"printed": (0.04, 14.0, 2.1), "walks": (0.9, 0.55, 0.53), "topk": (1.5, 1.02, 0.98)}
    values |= {"shifted": (None, None, 2.0), "signed": (None, None, 0.5)}
    text = errors(rows_of_errors("gradient", values, draws=7)).evidence
    assert "as printed D^{Q} 0.04, D^{K} 14 and D^{V} 2.1 with 7 draws" in text
    assert "D^{Q} 1.5, D^{K} 1.02 and D^{V} 0.98" in text
    assert "4x (2 to 0.5)" in text


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (21.8, "worse than the zero vector, whose error is 1: D^{Q} of shared walks (21.8)."),
        (0.9, "every one is better"),
    ],
)
def test_gradients_worse_than_none_are_named(query: float, words: str) -> None:
    path = {"losses": [1.0, 0.8, 0.5], "diverged": False, "loss": "exponential", "rate": 0.05}
    values = {"exact": (0.0, 0.0, 0.0), "exact-kv": (1.0, 0.0, 0.0), "walks": (query, 0.57, 0.32), "cells": (0.2, 0.5, 0.1)}
    rows = rows_of_errors("large", values, **path)
    assert words in worse(rows)
    assert words in longer(rows).evidence
    assert f"D^{{Q}} {query}, D^{{K}} 0.57 and D^{{V}} 0.32, progress 100%" in longer(rows).evidence


@pytest.mark.parametrize(
    ("sdpa", "exact", "walks", "words"),
    [
        (2.0, 3.0, 1.0, ("exact 2 s (forward and backward of SDPA", "Faster than exact in every round: shared walks.")),
        (3.0, 2.0, 2.5, ("exact 2 s (forward and backward of `Exact`", "Faster than exact in every round: none.")),
        (3.0, 2.0, 1.7, ("exact 2 s", "shared walks 1.7 s", "Faster than exact in every round: none.")),
    ],
)
def test_times_are_compared_with_the_fastest_exact_gradient(
    sdpa: float, exact: float, walks: float, words: tuple[str, ...]
) -> None:
    """Rounds are a tenth faster, or slower, than their median."""
    about = {"kind": "time", "N": 20_000, "rounds": 5, "threads": 2, "load": 0.25}
    rows = [
        {**about, "estimator": name, "seconds": x, "fastest": 0.9 * x, "slowest": 1.1 * x}
        for name, x in (("sdpa", sdpa), ("exact", exact), ("walks", walks))
    ]
    found = cost(rows).evidence
    assert all(word in found for word in words), found


def test_estimators_take_turns_and_the_first_round_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, order = [0.0], list[str]()

    def call(name: str, seconds: float) -> Callable[[], None]:
        def made() -> None:
            clock[0] += seconds if name in order else 100.0
            order.append(name)

        return made

    monkeypatch.setattr("time.perf_counter", lambda: clock[0])
    assert in_turn({"a": call("a", 1.0), "b": call("b", 2.0)}, 3) == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert order == ["a", "b"] * 4


def test_rows_of_times_say_how_they_were_measured() -> None:
    rows = times(64, "exponential", 3, seed=0)
    assert [row["estimator"] for row in rows] == ["sdpa", "exact", "walks", "topk", "cells"]
    for row in rows:
        assert 0 < row["fastest"] <= row["seconds"] <= row["slowest"]
        assert row["rounds"] == 3
        assert row["load"] >= 0


def test_other_sizes_have_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    def digests(**changed: Any) -> dict[str, str]:
        """By the kind of unit."""
        found = {}
        for unit in units(replace(QUICK, **changed), 0):
            kind = next(
                (word for word in ("times", "one gradient", "exponential, rate=0.05, seed=0") if word in unit.key), "descent"
            )
            found["large" if unit.key.startswith("N=256") else kind] = unit.digest
        return found

    def changed(before: dict[str, str], after: dict[str, str]) -> set[str]:
        return {kind for kind in before if before[kind] != after[kind]}

    before = digests()
    descent = {"descent", "exponential, rate=0.05, seed=0"}
    assert before == digests()
    assert changed(before, digests(steps=4)) == descent
    assert changed(before, digests(large_steps=3)) == {"large"}
    assert changed(before, digests(rounds=4)) == {"times"}
    for name, value, what in (
        ("EPS", 0.1, {"one gradient", *descent}),
        ("DELTA", 0.2, {"one gradient", *descent}),
        ("WALKS", 32, {"one gradient", *descent}),
        ("FEW_WALKS", 16, {"times", "large"}),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(import_module("experiments.gradient_descent.estimators"), name, value)
            assert changed(before, digests()) == what, name
    monkeypatch.setattr(import_module("experiments.gradient_descent.plan"), "DIM", 4)
    assert changed(before, digests()) == before.keys()


@pytest.mark.slow
def test_descents_that_diverge_are_told_and_drawn(tmp_path: Path) -> None:
    size = replace(QUICK, count=12, rates=(0.05,), large_count=64)
    rows = plain([row for unit in units(size, 0) for row in unit.measure({})])
    assert {row["estimator"] for row in rows} <= COLORS.keys() | {"shifted"}
    for lost in ("printed", "exact", "walks"):
        broken = []
        for row in rows:
            bad = row["estimator"].startswith(lost) and "losses" in row
            broken.append({**row, "losses": [row["losses"][0], None], "diverged": True} if bad else row)
        section = tell(broken)
        assert ("untested" in {finding.verdict for finding in section.findings}) == (lost == "exact")
        assert "nan" not in "".join(finding.evidence for finding in section.findings)
        look.save(draw(broken), tmp_path)
    assert section.captions.keys() == {path.stem for path in tmp_path.glob("*.png")}
