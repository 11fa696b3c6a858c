"""The experiment on the theory: its trials can fail, and what it says follows the numbers."""

from __future__ import annotations

import math
from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

pytest.importorskip("matplotlib")

from experiments.chance import at_least
from experiments.experiment import Row, Rows
from experiments.settings import Settings
from experiments.theory import gradients as bounds
from experiments.theory import indices, lazy, walks
from experiments.theory.coverage import DELTA, PROMISES, failures
from experiments.theory.plan import SHARES, plan
from experiments.theory.sizes import tail_sizes
from experiments.theory.tell import (
    as_printed,
    conditions,
    expected,
    gradients,
    inverted_lists,
    kept,
    one_missed,
    promises,
    query_or_key,
    size_table,
    teeth,
)


def covered(few: int = 100, **broken: int) -> Rows:
    """Failures of 100 trials with all draws, none where nothing is said; `few` of them with a part of the draws."""
    broken = {name.replace("_", "-"): count for name, count in broken.items()}
    rows: Rows = []
    for name, promise in PROMISES.items():
        about = {"kind": "coverage", "promise": name, "seeds": 100, "allowed": promise.allowed}
        rows += [{**about, "share": 1.0, "broken": broken.get(name, 0)}, {**about, "share": 1 / 64, "broken": few}]
    return rows


def lazy_row(measured: float, closed: float = 2.0, spread: float = 0.0) -> Row:
    return {"kind": "lazy", "n": 100, "k": 20, "spread": spread, "measured": measured, "closed": closed, "printed": 5.0}


@pytest.mark.parametrize(("measured", "verdict"), [(2.1, "confirmed"), (5.0, "confirmed"), (5.01, "refuted")])
def test_the_bound_on_far_keys_has_no_slack(measured: float, verdict: str) -> None:
    found = expected([lazy_row(2.0, spread=3.0), lazy_row(measured)])
    assert found.verdict == verdict
    assert f"in {2 if verdict == 'confirmed' else 1} of 2 runs" in found.evidence
    assert bool(found.why) == (verdict == "confirmed")


@pytest.mark.parametrize(
    ("signed", "positive", "verdict"),
    [(0, 0, "confirmed"), (20, 20, "confirmed"), (21, 0, "partly"), (0, 21, "partly"), (90, 21, "refuted")],
)
def test_the_printed_promise_is_judged_by_its_own_trials(signed: int, positive: int, verdict: str) -> None:
    found = as_printed(covered(printed_signed=signed, printed_positive=positive, median=100, mean=100, tail=100))
    assert found.verdict == verdict
    assert f"it broke {signed} of 100 times" in found.evidence
    assert bool(found.why) == (signed > 20)


@pytest.mark.parametrize(
    ("broken", "verdict"),
    [
        ({}, "confirmed"),
        ({"median": 20, "audit": 13}, "confirmed"),
        ({"printed_signed": 100, "walks": 100}, "confirmed"),
        ({"audit": 14}, "partly"),
        ({"median": 21}, "partly"),
        ({"median": 21, "mean": 21, "tail": 21, "audit": 14}, "refuted"),
    ],
)
def test_the_additive_promises_are_told_apart(broken: dict[str, int], verdict: str) -> None:
    assert promises(covered(**broken)).verdict == verdict


def test_promises_that_no_trial_breaks_are_named() -> None:
    assert (
        teeth(covered(few=100))
        == f"With 1/64 of the draws, but one at least, {len(PROMISES)} of {len(PROMISES)} promises break more often than allowed."
    )
    assert teeth(covered(few=0)).startswith("With 1/64 of the draws, but one at least, 0 of")
    rows = covered(few=100)
    next(row for row in rows if row["promise"] == "tail" and row["share"] < 1)["broken"] = 20
    assert teeth(rows).endswith("; not so top k and sampled tail.")


@pytest.mark.parametrize(
    ("printed", "corrected", "verdict"), [(0, 0, "confirmed"), (0, 21, "confirmed"), (21, 0, "refuted"), (21, 21, "refuted")]
)
def test_the_verdict_on_sizes_follows_the_trials(printed: int, corrected: int, verdict: str) -> None:
    found = conditions(tail_sizes(), covered(tail_printed=printed, tail=corrected))
    assert found.verdict == verdict
    assert f"broke {printed} of 100 times with the printed sizes, {corrected} of 100 times" in found.evidence
    assert bool(found.why) == (printed == corrected == 0)


def walked(broken: int = 0, zero_broken: int = 0) -> Rows:
    about = {"kind": "walks", "n": 50, "eps": 0.05, "walks": 9, "seeds": 100, "error": 0.1, "zero": 0.01, "relative": 7.0}
    return [
        {**about, "form": form, "broken": broken if form == "printed" else 0, "zero_broken": zero_broken, "allowed": 0.02}
        for form in walks.FORMS
    ]


@pytest.mark.parametrize(
    ("usual", "hard", "verdict"),
    [(0, 0, "confirmed"), (7, 7, "confirmed"), (8, 0, "partly"), (0, 8, "partly"), (8, 8, "refuted")],
)
def test_the_verdict_on_walks_follows_the_trials(usual: int, hard: int, verdict: str) -> None:
    assert gradients(walked(usual), covered(walks_printed=hard)).verdict == verdict


@pytest.mark.parametrize(("zero_broken", "met"), [(0, 100), (40, 60), (60, 40)])
def test_whether_zero_meets_the_bound_is_told(zero_broken: int, met: int) -> None:
    found = gradients(walked(zero_broken=zero_broken), covered())
    assert f"the zero vector meets the printed bound {met} of 100 times" in found.evidence
    assert found.why.startswith("A bound that zero meets") == (met > 50)


def graded(broken: int = 0, zero: int = 0, zero_corrected: int = 0) -> Rows:
    about = {"kind": "gradients", "n": 50, "eps": 0.1, "draws": 9, "seeds": 100, "error": 0.1, "zero": 0.01, "relative": 7.0}
    return [
        {
            **about,
            "gradient": which,
            "form": form,
            "broken": broken if form == "printed" else 0,
            "zero_broken": zero if form == "printed" else zero_corrected,
            "allowed": 0.1,
        }
        for which in bounds.SYMBOLS
        for form in bounds.FORMS
    ]


@pytest.mark.parametrize("which", bounds.SYMBOLS)
@pytest.mark.parametrize(
    ("usual", "hard", "verdict"),
    [(0, 0, "confirmed"), (20, 20, "confirmed"), (21, 0, "partly"), (0, 21, "partly"), (21, 21, "refuted")],
)
def test_the_verdict_on_dq_and_dk_follows_the_trials(which: str, usual: int, hard: int, verdict: str) -> None:
    found = query_or_key(graded(usual), covered(**{f"{which}_printed": hard, which: 100}), which)
    assert found.verdict == verdict
    assert f"{hard} of 100 times and 100 of 100 times" in found.evidence
    assert "10x (printed)" in found.evidence
    assert bounds.SYMBOLS[which] in found.claim


@pytest.mark.parametrize(
    ("zero", "zero_corrected", "words"),
    [(0, 100, "2 eps n M"), (0, 0, "zero meets that one too"), (100, 0, "1x the draws"), (100, 100, "")],
)
def test_what_zero_meets_of_the_bounds_on_dk_is_told(zero: int, zero_corrected: int, words: str) -> None:
    found = query_or_key(graded(0, zero, zero_corrected), covered(), "dk")
    assert f"meets them {100 - zero} and {100 - zero_corrected} of 100 times" in found.evidence
    assert words in found.why
    assert bool(found.why) == bool(words)


@pytest.mark.parametrize(("far", "verdict"), [(0.02, "confirmed"), (0.03, "confirmed"), (0.031, "partly"), (0.8, "partly")])
def test_the_verdict_on_a_missed_key_follows_the_distance(far: float, verdict: str) -> None:
    rows = [
        {"gap": gap, "certified": certified, "tv": 0.01 if certified else distance}
        for gap, distance in ((0.0, 0.01), (1.0, 0.015), (2.0, far))
        for certified in (True, False)
    ]
    found = one_missed(rows)
    assert found.verdict == verdict
    assert bool(found.why) == (verdict == "partly")


def test_what_a_real_index_costs_is_told() -> None:
    rows = [{"probes": p, "certified": c, "tv": 0.1 * p, "recall": 0.5, "dense": 0.75 / p} for p in (1, 2) for c in (True, False)]
    found = inverted_lists(rows)
    assert found.verdict == "beyond"
    assert "75% of the rows are not worth being lazy at 1 cell, 38% at 2" in found.evidence


def test_dense_rows_look_at_all_keys() -> None:
    info = {"evaluated_per_draw": 1.5, "dense_rows": 3}
    assert lazy.looked_at_by_a_draw(info, rows=4, n=100, k=20) == (1.5 + 0.75 * 80, 0.75)
    few, many = (indices.kmeans(probes, True, draws=50, seed=0) for probes in (1, 16))
    n, k = indices.LISTS
    assert few["looked"] >= few["dense"] * (n - k) > many["looked"]
    assert lazy.looked_at(256, 16, 0.0, 50, 0)["dense"] == 0


def rate(name: str, share: float = 1.0, seeds: int = 40) -> float:
    row = failures(name, share, seeds, 0)
    assert row["allowed"] == PROMISES[name].allowed
    return row["broken"] / seeds


def test_the_printed_promise_breaks_where_values_cancel_and_not_where_its_proof_holds() -> None:
    assert rate("printed-signed") > 0.5
    assert rate("printed-positive") <= DELTA
    assert rate("printed-positive", share=1 / 64) > DELTA


@pytest.mark.parametrize("name", ["tail", "tail-printed", "walks", "walks-printed", "dq", "dq-printed", "dk", "dk-printed"])
def test_promises_are_kept_with_all_draws(name: str) -> None:
    assert rate(name) <= PROMISES[name].allowed


@pytest.mark.parametrize("name", PROMISES)
def test_promises_break_with_few_draws(name: str) -> None:
    assert not kept(failures(name, min(SHARES), 60, 0))


@given(st.integers(1, 3000), st.floats(0.001, 0.5), st.data())
def test_the_chance_of_so_many_failures_is_binomial(trials: int, share: float, data: st.DataObject) -> None:
    count = data.draw(st.integers(0, trials))
    assert at_least(count, trials, share) == pytest.approx(stats.binom.sf(count - 1, trials, share), rel=1e-8, abs=1e-300)


def test_bounds_on_walks_are_those_of_the_paper_and_of_hoeffding() -> None:
    x = torch.tensor([[3.0], [-2.0], [1.0]])
    assert walks.bound(x, 0.1, "printed") == pytest.approx(0.1 * 2 + 2 * 3 * 0.1 * 2)
    assert walks.bound(x.abs(), 0.1, "printed") == pytest.approx(0.1 * 6)
    assert walks.bound(x, 0.1, "corrected") == pytest.approx(0.1 * 6)
    assert walks.count(64, 0.3, 0.1, "printed") == math.ceil(2 * 6 / 0.09)
    assert walks.count(64, 0.3, 0.1, "corrected") == math.ceil(2 * math.log(2 * 64 / 0.1) / 0.09)


def test_bounds_on_dq_and_dk_by_hand() -> None:
    """Two rows and two keys of equal weight, D^P = (1, 0) in both rows, K = (2, 0)."""
    query = torch.tensor([[0.0], [0.0]], dtype=torch.float64)
    inputs = bounds.Inputs(query, torch.tensor([[2.0], [0.0]]).double(), torch.tensor([[1.0], [0.0]]).double(), query + 1)
    eps = bounds.EPS
    # sd(D^P K) = 1, sd(K) = 1, sd(D^P) = 1/2, E2 = 1, E3 = 1/2
    printed = eps * (1 + 1 * 0.5 + 0.5 * 1 + eps * 0.5)
    torch.testing.assert_close(bounds.bound(inputs, "dq", "printed"), torch.full((2, 1), printed).double())
    torch.testing.assert_close(bounds.bound(inputs, "dq", "corrected"), torch.full((2, 1), eps * 2).double())
    # Q = 1 in both rows would change the weights; the bounds on D^K are checked with equal keys.
    inputs = bounds.Inputs(query + 1, query, inputs.value, query + 1)
    torch.testing.assert_close(bounds.bound(inputs, "dk", "corrected"), torch.full((1, 1), eps * math.sqrt(2)).double())
    # X = 1/2 and up to eps/2 off, Y = (1, 0) by key, M = 1, M^X = 0.
    off = eps / 2
    found = [eps * (y + 2 * 2 * 1 + 2 * (0.5 + off)) + off for y in (2, 0)]
    torch.testing.assert_close(bounds.bound(inputs, "dk", "printed"), torch.tensor(found)[:, None].double())


@pytest.mark.parametrize("form", walks.FORMS)
def test_zero_meets_the_bound_on_gaussian_inputs(form: str) -> None:
    row = walks.usual(64, form, trials=3, seed=0)
    assert (row["broken"], row["zero_broken"]) == (0, 0)
    assert 0 < row["zero"] < 1
    assert row["relative"] > 0.3
    assert kept(row)


def test_the_table_of_sizes_is_narrow() -> None:
    head = size_table(tail_sizes()).head
    assert head[1:3] == ["10^{4}, printed", "10^{4}, corrected"]
    assert head[-1] == "10^{6}, corrected"
    assert sum(len(cell) for cell in head) < 120


def test_keys_are_unique_and_other_sizes_have_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    def digests() -> dict[str, str]:
        units = plan(Settings(quick=True))
        found = {unit.key: unit.digest for unit in units}
        assert len(found) == len(units)
        return found

    before = digests()
    assert all(before.values())
    assert before == digests()
    changes: list[tuple[str, str, Any, str]] = [
        ("coverage", "SIZES", (), "median"),
        ("walks", "DIM", 8, "walks, n="),
        ("gradients", "DIM", 8, "D^Q and D^K"),
        ("gradients", "SIZES", (), "dk-printed"),
        ("lazy", "DIM", 8, "lazy draws"),
        ("indices", "SIZES", (), "k-means"),
        ("indices", "SIZES", (), "missed key"),
        ("sizes", "DELTA", 0.2, "sizes"),
    ]
    for module, name, value, of in changes:
        with monkeypatch.context() as patched:
            patched.setattr(import_module(f"experiments.theory.{module}"), name, value)
            after = digests()
        assert {key for key in before if key.startswith(of)} <= {key for key in before if after[key] != before[key]}, of


def test_trials_are_the_same_again() -> None:
    assert failures("printed-signed", 1 / 16, 10, 1) == failures("printed-signed", 1 / 16, 10, 1)
    assert walks.usual(64, "printed", 2, 1) == walks.usual(64, "printed", 2, 1)
    for form in bounds.FORMS:
        assert bounds.usual(16, "dk", form, 1, 1) == bounds.usual(16, "dk", form, 1, 1)
