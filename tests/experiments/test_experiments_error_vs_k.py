"""The experiment on the role of k: equal numbers of keys, and that what it says follows the numbers."""

from __future__ import annotations

import math
from importlib import import_module

import pytest

pytest.importorskip("matplotlib")

import nearfield as nf
from experiments.error_vs_k.draw import _joined
from experiments.error_vs_k.methods import CELL_SIZES, CLOSE, cells, fitted, top, with_tail
from experiments.error_vs_k.plan import SPREADS, counts, inputs, made_with, measure
from experiments.error_vs_k.spreads import AUTHORS, FIGURE, OURS, named
from experiments.error_vs_k.tell import cells as cells_finding
from experiments.error_vs_k.tell import decreasing, matched, minimal, small_spread, tails, tell
from experiments.experiment import Rows


def rows_of(errors: dict[float, tuple[float, float]], method: str = "topk") -> Rows:
    """Errors with n^{1/8} and with n^{1/2} keys, by B."""
    rows: Rows = []
    for spread, both in errors.items():
        for power, k, error in zip(("n^{1/8}", "n^{1/2}"), (3, 23), both, strict=True):
            about = {"n": 512, "B": spread, "seed": 0, "power": power, "k": k, "method": method, "mass": 0.5, "keys": 1.1 * k}
            rows.append({**about, "mean": error, "mean_additive": error, "max_additive": 3 * error})
    return rows


def test_powers_are_rounded_up_and_whole_ones_are_not() -> None:
    assert counts(3_125)["n^{1/5}"] == 5
    assert counts(3_126)["n^{1/5}"] == 6
    assert counts(10_000) == {"3": 3, "n^{1/8}": 4, "n^{1/5}": 7, "log n": 10, "n^{1/4}": 10, "n^{1/2}": 100}


@pytest.mark.parametrize("n", [512, 4096])
def test_methods_look_at_about_as_many_keys(n: int) -> None:
    rows = measure(n, 3.0, seed=0)
    assert {row["method"] for row in rows} == {"topk", "tail", "cells"}
    for row in rows:
        if row["method"] == "cells":
            assert row["keys"] == pytest.approx(row["k"], rel=0.2), row
            assert row["cell_size"] in CELL_SIZES
        else:
            assert row["keys"] == row["k"]
    fit = [row for row in rows if row["method"] == "cells"]
    assert sum(abs(row["keys"] / row["k"] - 1) for row in fit) / len(fit) < 0.08


def test_keys_of_a_row_are_those_of_its_cells() -> None:
    query, key, value = inputs(512, 3.0, 1)
    row = next(row for row in measure(512, 3.0, 1) if (row["method"], row["power"]) == ("cells", "n^{1/2}"))
    found = nf.estimate(query, key, value, method=cells(row["cell_size"], row["probes"]))
    assert found.info["keys_per_query"] == pytest.approx(row["keys"])
    assert row["mean_additive"] > 0


@pytest.mark.parametrize("k", [3, 4, 7, 10, 12, 64, 128])
def test_sizes_of_cells_are_chosen_by_what_they_hold(k: int) -> None:
    """Here opened cells hold half of what others do, and more the more are opened."""
    asked: list[tuple[int, int]] = []

    def keys(size: int, probes: int) -> float:
        asked.append((size, probes))
        return 0.5 * size * probes**1.2

    size, probes = fitted(k, keys)
    assert keys(size, probes) == pytest.approx(k, rel=0.1)
    best = min(abs(keys(*one) / k - 1) for one in set(asked))
    assert abs(keys(size, probes) / k - 1) <= max(CLOSE, best)


def test_a_size_that_is_close_is_taken_at_once() -> None:
    asked: list[tuple[int, int]] = []

    def keys(size: int, probes: int) -> float:
        asked.append((size, probes))
        return float(size * probes)

    assert fitted(16, keys) == (8, 2)
    assert {size for size, _ in asked} == {8}
    assert fitted(7, lambda size, probes: float(size * probes)) == (7, 1)


def test_every_b_has_an_owner() -> None:
    assert set(SPREADS) == set(AUTHORS) | set(OURS)
    assert not set(AUTHORS) & set(OURS)
    assert [named(spread) for spread in (0.5, 2.0, FIGURE)] == ["B = 0.5 (ours)", "B = 2", "B = 10 (paper)"]


def test_other_sizes_have_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    before = made_with(512, 3.0)
    assert before == made_with(512, 3.0)
    assert before != made_with(512, 4.0) != made_with(1024, 4.0)
    for name, value in (("DIM", 32), ("ROWS", 64), ("CELL_SIZES", (8,)), ("CLOSE", 0.1)):
        with monkeypatch.context() as patched:
            patched.setattr(import_module("experiments.error_vs_k.plan"), name, value)
            assert made_with(512, 3.0) != before, name


def test_half_of_the_keys_are_sampled() -> None:
    for k in counts(512).values():
        assert with_tail(k).k + with_tail(k).tail == top(k).k == k


GOOD, BAD = (0.004, 1e-6), (0.4, 0.05)


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        ({10.0: GOOD, 4.0: GOOD}, "confirmed"),
        ({10.0: GOOD, 4.0: BAD}, "partly"),
        ({10.0: GOOD, 2.0: BAD, 2.5: BAD, 3.0: BAD, 3.5: BAD, 4.0: BAD, 0.5: BAD, 1.0: BAD}, "partly"),
        ({10.0: BAD, 4.0: GOOD}, "partly"),
        ({10.0: BAD, 4.0: BAD}, "refuted"),
        ({10.0: BAD, 4.0: BAD, 0.5: GOOD, 1.0: GOOD}, "refuted"),
        ({10.0: GOOD, 0.5: BAD, 1.0: BAD}, "confirmed"),
        ({10.0: (0.0545, 0.05)}, "confirmed"),
        ({10.0: (0.0555, 0.05)}, "refuted"),
        ({0.5: BAD, 1.0: GOOD}, "untested"),
    ],
)
def test_minimal_is_judged_at_the_b_of_the_authors(errors: dict[float, tuple[float, float]], verdict: str) -> None:
    assert minimal(rows_of(errors)).verdict == verdict


def test_what_holds_and_what_does_not_is_said_apart() -> None:
    found = minimal(rows_of({10.0: GOOD, 4.0: BAD, 0.5: BAD}))
    assert "it is minimal for B = 10 (0.4% against 0.0001%), and not for B = 0.5 (ours) and 4" in found.evidence
    assert "the mean error is 0.4% with 3 keys already; the largest error of a row is 1.2%" in found.why
    assert minimal(rows_of({10.0: GOOD})).why == ""


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        ({4.0: (0.4, 0.1), 10.0: (0.1, 0.01)}, "confirmed"),
        ({4.0: (0.4, 0.1), 10.0: (0.01, 0.1)}, "partly"),
        ({4.0: (0.1, 0.2), 10.0: (0.1, 0.4)}, "refuted"),
        ({4.0: (1e-8, 1e-9)}, "untested"),
    ],
)
def test_the_verdict_on_falling_errors_follows_the_numbers(errors: dict[float, tuple[float, float]], verdict: str) -> None:
    rows = rows_of(errors)
    if verdict == "partly":
        rows += [{**row, "B": 3.0} for row in rows if row["B"] == 4.0]
    assert decreasing(rows).verdict == verdict


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        ({2.0: (0.5, 0.009), 10.0: (0.1, 0.001)}, "confirmed"),
        ({2.0: (0.5, 0.09), 10.0: (0.1, 0.001)}, "partly"),
        ({2.0: (0.1, 0.009), 10.0: (0.5, 0.001)}, "refuted"),
        ({0.5: (0.9, 0.5), 2.0: (0.5, 0.009), 10.0: (0.1, 0.001)}, "confirmed"),
        ({0.5: (0.9, 0.5), 10.0: (0.1, 0.001)}, "untested"),
    ],
)
def test_the_verdict_on_small_b_follows_the_numbers(errors: dict[float, tuple[float, float]], verdict: str) -> None:
    found = small_spread(rows_of(errors))
    assert found.verdict == verdict
    if verdict != "untested":
        assert ("is not negligible" in found.evidence) == (verdict == "partly")
        assert ("rising" in found.evidence) == (verdict == "refuted")


@pytest.mark.parametrize(
    ("tail", "words"),
    [(0.1, "smaller at B = 4: 2x."), (0.4, "nowhere smaller, and larger at B = 4: 2x."), (0.2, "nowhere smaller.")],
)
def test_what_a_tail_is_worth_is_told(tail: float, words: str) -> None:
    found = tails([*rows_of({4.0: (0.5, 0.2)}), *rows_of({4.0: (0.5, tail)}, "tail")])
    assert (found.verdict, found.evidence.endswith(words)) == ("beyond", True), found.evidence


@pytest.mark.parametrize(("error", "better"), [(0.1, 1), (0.3, 0)])
def test_what_cells_are_worth_is_told(error: float, better: int) -> None:
    found = cells_finding([*rows_of({4.0: (0.5, 0.2)}), *rows_of({4.0: (0.5, error)}, "cells")])
    assert found.verdict == "beyond"
    assert "With about n^{1/2} keys (25.3 against 23)" in found.evidence
    assert f"than a perfect top-k index for {better} of 1 values of B" in found.evidence


def test_how_near_the_numbers_of_keys_are_is_said() -> None:
    rows = rows_of({4.0: GOOD}, "cells")
    fit = [{**row, "cell_size": size, "probes": 2} for row, size in zip(rows, (4, 8), strict=True)]
    assert "within 10% at worst and 10% on average" in matched(fit)
    fit[0]["keys"] = 1.5 * fit[0]["k"]
    assert "Cells hold 4 to 8 keys on average, and 2 to 2 of them are opened" in matched(fit)
    assert "within 50% at worst and 30% on average" in matched(fit)


def test_the_caption_says_the_verdict() -> None:
    rows = [row for spread in (3.0, 10.0) for row in measure(512, spread, seed=0)]
    section = tell(rows)
    assert section.findings[0].verdict == "partly"
    assert "on holds in part." in section.captions["error-vs-k"]
    assert section.findings[0].evidence in section.captions["error-vs-k"]
    assert "within" in section.captions["error-vs-k-methods"]
    held = {row["B"]: row["mass"] for row in rows if row["power"] == "n^{1/8}"}
    assert 0 < held[3.0] < held[10.0] <= 1 + 1e-6
    assert all(math.isfinite(row["mean_additive"]) for row in rows)


def test_labels_of_lines_that_end_together_are_joined() -> None:
    """But for those that say whose B it is."""
    ends = [(1.0, 1.0, "B = 10 (paper)", "red"), (1.0, 1.1, "B = 2", "blue"), (1.0, 1.2, "B = 0.5", "green")]
    assert [end[2] for end in _joined(ends)] == ["B = 10 (paper)", "B = 0.5, 2"]
