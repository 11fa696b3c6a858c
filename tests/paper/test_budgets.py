"""Sizes from theorems: hand-computed values, the conditions themselves, growth, and bad arguments."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from nearfield.audit import audit_quantile, audit_rows
from nearfield.knn.tail import tail_condition
from nearfield.paper.budgets import FORMS, GROUP_FAILURE, Budget, budget, every_budget, keys_read, sublinear_from

PAIRS = [(theorem, form) for theorem, forms in FORMS.items() for form in forms]
SIZES = ("k", "ell", "draws", "groups", "group_size", "walks", "buffer")

lengths = st.integers(1, 10**7)
fractions = st.floats(0.005, 0.9)
dims = st.integers(1, 256)


def test_median_of_means_by_hand() -> None:
    # n d / delta = 1000 * 10 / 0.1 = 1e5, ln = 11.513; 2e5: 12.206; ln 1000 = 6.908.
    arguments = {"n": 1000, "eps": 0.1, "delta": 0.1, "d": 10, "theorem": "median-of-means"}
    printed = budget(**arguments, form="printed")
    assert (printed.groups, printed.group_size, printed.draws) == (98, 2764, 98 * 2764)
    corrected = budget(**arguments, form="corrected")
    assert (corrected.groups, corrected.group_size, corrected.draws) == (93, 400, 37200)
    tight = budget(**arguments, form="tight")
    assert (tight.groups, tight.group_size, tight.draws) == (27, 836, 22572)


def test_mean_by_hand() -> None:
    # ln(2e5) / (2 * 0.01) = 610.3
    assert budget(1000, 0.1, 0.1, d=10, theorem="mean").draws == 611
    assert budget(1000, 0.1, 0.1, d=10, theorem="mean", spread=2.0).draws == 2442


def test_lazy_gumbel_by_hand() -> None:
    printed = budget(100, 0.1, 0.1, theorem="lazy-gumbel", form="printed")
    assert (printed.k, printed.ell, printed.buffer) == (10, 10, None)
    corrected = budget(100, 0.1, 0.1, theorem="lazy-gumbel", draws=10)
    # E[m] = 90 / 11 = 8.18; (1 + 8.18) ln(100) = 42.3
    assert (corrected.k, corrected.ell, corrected.buffer) == (10, 9, 43)
    assert budget(101, 0.1, 0.1, theorem="lazy-gumbel").k == 11
    assert budget(100, 0.1, 0.1, theorem="lazy-gumbel", k=50, draws=10).buffer == 10


def test_tail_by_hand() -> None:
    # Printed: the cube root of 8 * 1e12 * 100 * ln 40 (2.9511e15) is 143,437.1.
    printed = budget(10**6, 0.1, 0.1, form="printed")
    assert printed.k == printed.ell == 143438
    # Corrected: k^2 + c k = c n, c = 2 * (1 + 0.2/3) * 100 * ln 40 = 786.96; k = 27,662.1.
    corrected = budget(10**6, 0.1, 0.1)
    assert corrected.k == corrected.ell == 27663


def test_tail_with_a_given_k() -> None:
    # 786.96 * (1e6 - 1e5) / 1e5 = 7082.6
    assert budget(10**6, 0.1, 0.1, k=10**5).ell == 7083
    # The first printed condition asks for more than the second: 8 * 1e12 * 368.888 / 1e10 = 295,110.4.
    assert budget(10**6, 0.1, 0.1, k=10**5, form="printed").ell == 295111
    assert budget(50, 0.1, 0.1, k=80).k == 50
    assert budget(50, 0.1, 0.1, k=80).ell == 0


def test_walks_by_hand() -> None:
    arguments = {"n": 1024, "eps": 0.1, "delta": 0.1, "d": 9, "theorem": "walks"}
    assert budget(**arguments, form="printed").walks == 2000
    # ln(2 * 1024 * 10 / 0.1) = 12.23; ln(2 * 10 / 0.1) = 5.298
    assert budget(**arguments, form="corrected").walks == 612
    assert budget(**arguments, form="dkw").walks == 1060
    # ln(2 * 1024 * 9 / 0.1) = 12.124
    assert budget(**arguments, form="signed").walks == 2425


@given(st.integers(1, 100), st.floats(0.1, 0.5), st.floats(0.01, 0.5))
def test_walks_with_signs_keep_their_promise_where_all_end_in_one_key(n: int, eps: float, delta: float) -> None:
    """With n signs of equal weight, half of them negative, every walk adds 1 or -1 to that key: a binomial law, no worse one."""
    walks = budget(n, eps, delta, d=1, theorem="walks", form="signed").walks
    too_low = math.ceil((1 - eps) / 2 * walks - 1e-9) - 1
    assert 2 * stats.binom.cdf(too_low, walks, 0.5) <= delta / n


def test_walks_for_x_of_one_sign_are_too_few_for_both_signs() -> None:
    walks = budget(64, 0.1, 1e-3, d=1, theorem="walks", form="corrected").walks
    assert 2 * stats.binom.cdf(math.ceil(0.45 * walks) - 1, walks, 0.5) > 10 * 1e-3


def test_dkw_beats_hoeffding_only_for_very_many_keys() -> None:
    def both(n: int) -> list[int | None]:
        return [budget(n, 0.1, 0.1, d=8, theorem="walks", form=form).walks for form in ("corrected", "dkw")]

    few, many = both(10**5), both(10**12)
    assert few[0] < few[1]
    assert many[0] > many[1]


def test_dq_and_dk_by_hand() -> None:
    printed = budget(1000, 0.1, 0.1, d=10, theorem="dq", form="printed")
    # ln(2 * 3 * 1e5) = 13.305
    assert (printed.k, printed.groups, printed.group_size, printed.draws) == (32, 107, 400, 3 * 107 * 400)
    dk_printed = budget(1000, 0.1, 0.1, d=10, theorem="dk", form="printed")
    assert (dk_printed.walks, dk_printed.groups, dk_printed.group_size) == (1994, 98, 400)
    # 3 n d = 30,000 medians, ln 3e5 = 12.612, times 2.3133: 29.2; made odd.
    dq_tight = budget(1000, 0.1, 0.1, d=10, theorem="dq", form="tight")
    assert (dq_tight.k, dq_tight.groups, dq_tight.group_size, dq_tight.draws) == (32, 31, 836, 3 * 31 * 836)
    # A, B, X and s: n (3d + 1) = 31,000 estimates; ln 3.1e5 = 12.644, ln 6.2e5 / 0.02 = 666.9.
    dk_tight = budget(1000, 0.1, 0.1, d=10, theorem="dk", form="tight")
    assert (dk_tight.k, dk_tight.groups, dk_tight.group_size, dk_tight.draws) == (32, 31, 836, 31 * 836)
    assert dk_tight.walks == 667
    # ln(2e5) / 0.02 = 610.3, for both.
    assert budget(1000, 0.1, 0.1, d=10, theorem="dk").walks == 611
    assert budget(1000, 0.1, 0.1, d=10, theorem="dq").draws == 611


def test_a_sample_covariance_needs_two_draws() -> None:
    assert budget(1, 0.9, 0.9, d=1, theorem="dq").draws == 2
    assert budget(1, 0.9, 0.9, d=1, theorem="dk").walks == 2


def of_one_entry(n: int, delta: float, form: str) -> float:
    """The delta of one entry, for n rows of nine columns: Bernstein for 9 n numerators and n denominators, in two directions."""
    return delta * 4 / (2 * 10 * n) if form == "joint" else delta


@given(lengths, fractions, fractions, st.sampled_from(FORMS["tail"]))
def test_tail_conditions_hold_and_fail_one_below(n: int, eps: float, delta: float, form: str) -> None:
    sizes = budget(n, eps, delta, d=9, form=form)
    delta = of_one_entry(n, delta, form)
    assert 1 <= sizes.k <= n
    assert 0 <= sizes.ell <= n - sizes.k
    if sizes.takes_everything(n):
        assert "exact" in sizes.promise
    else:
        assert sizes.k == sizes.ell
        assert tail_condition(n, eps, delta, sizes.k, sizes.ell, form)
    assert sizes.k in (1, n) or not tail_condition(n, eps, delta, sizes.k - 1, sizes.k - 1, form)


@given(lengths, fractions, fractions, st.sampled_from(FORMS["tail"]), st.integers(1, 10**6))
def test_tail_solves_for_ell(n: int, eps: float, delta: float, form: str, k: int) -> None:
    sizes = budget(n, eps, delta, d=9, form=form, k=k)
    delta = of_one_entry(n, delta, form)
    assert sizes.k == min(k, n)
    if not sizes.takes_everything(n):
        assert tail_condition(n, eps, delta, sizes.k, sizes.ell, form)
        assert sizes.ell == 1 or not tail_condition(n, eps, delta, sizes.k, sizes.ell - 1, form)


@given(st.integers(10**4, 10**9), fractions, fractions)
def test_corrected_tail_never_needs_more_than_printed(n: int, eps: float, delta: float) -> None:
    printed, corrected = budget(n, eps, delta, form="printed"), budget(n, eps, delta)
    assert corrected.k <= printed.k
    assert corrected.k + corrected.ell <= printed.k + printed.ell


def test_tail_exponents() -> None:
    def exponent(form: str) -> float:
        small, large = (budget(n, 0.1, 0.1, form=form).k for n in (10**10, 10**13))
        return math.log10(large / small) / 3

    assert exponent("printed") == pytest.approx(2 / 3, abs=1e-3)
    assert exponent("corrected") == pytest.approx(1 / 2, abs=1e-2)


@pytest.mark.parametrize(("n", "eps", "delta", "d"), [(1, 0.3, 0.3, 1), (64, 0.1, 0.05, 8), (10**6, 0.05, 0.01, 64)])
def test_tight_groups_really_fail_that_rarely(n: int, eps: float, delta: float, d: int) -> None:
    sizes = budget(n, eps, delta, d=d, theorem="median-of-means", form="tight")
    assert sizes.groups % 2 == 1
    assert 1 / (sizes.group_size * eps**2) <= GROUP_FAILURE * (1 + 1e-12)
    # The median misses only if more than half of the groups do.
    assert stats.binom.sf(sizes.groups // 2, sizes.groups, GROUP_FAILURE) <= delta / (n * d)


@given(lengths, fractions, fractions, dims)
def test_tight_needs_fewer_draws(n: int, eps: float, delta: float, d: int) -> None:
    corrected, tight = (budget(n, eps, delta, d=d, theorem="median-of-means", form=form) for form in ("corrected", "tight"))
    if math.log(n * d / delta) > 5:
        assert tight.draws < corrected.draws


def far_keys_exceed(count: int, left: int, k: int) -> float:
    """P(m > count) for the worst case of a true top k, k equal logits at the cutoff: m is beta-binomial(left, 1, k).

    A product of (left - i) / (left - i + k) over i <= count; scipy's survival function is a difference, too coarse for 1e-10.
    """
    if count >= left:
        return 0.0
    rest = left - count - 1
    logs = math.lgamma(left + 1) - math.lgamma(rest + 1) + math.lgamma(rest + k + 1) - math.lgamma(left + k + 1)
    return math.exp(logs)


@pytest.mark.parametrize(("left", "k"), [(5, 1), (30, 6), (90, 10)])
def test_distribution_of_far_keys(left: int, k: int) -> None:
    for count in range(left + 1):
        assert far_keys_exceed(count, left, k) == pytest.approx(stats.betabinom.sf(count, left, 1, k), abs=1e-12)


@given(st.integers(1, 10**6), st.floats(0.001, 0.5), st.integers(1, 10**9), st.integers(1, 2000))
def test_lazy_gumbel_buffer_holds_every_draw(n: int, delta: float, draws: int, k: int) -> None:
    sizes = budget(n, 0.1, delta, theorem="lazy-gumbel", draws=draws, k=k)
    left = n - sizes.k
    assert 0 <= sizes.buffer <= left
    assert draws * far_keys_exceed(sizes.buffer, left, sizes.k) <= delta * (1 + 1e-6)


def test_lazy_gumbel_expectation_is_below_the_printed_one() -> None:
    for n in (2, 100, 10**6):
        printed, corrected = (budget(n, 0.1, 0.1, theorem="lazy-gumbel", form=form) for form in ("printed", "corrected"))
        assert corrected.ell <= printed.ell
        assert corrected.ell >= stats.betabinom.mean(n - corrected.k, 1, corrected.k)


@pytest.mark.parametrize(("theorem", "form"), PAIRS)
@settings(max_examples=60)
@given(n=lengths, more=st.integers(0, 10**7), eps=fractions, delta=fractions, d=dims)
def test_monotone(theorem: str, form: str, n: int, more: int, eps: float, delta: float, d: int) -> None:
    """More keys, a smaller error or a smaller failure probability never cost less; nor do more columns."""

    def cost(n: int, eps: float, delta: float, d: int) -> int:
        sizes = budget(n, eps, delta, d=d, theorem=theorem, form=form)
        if theorem == "tail":
            return sizes.k + sizes.ell
        if theorem == "lazy-gumbel":
            return sizes.k
        return (sizes.draws or 0) + (sizes.walks or 0)

    base = cost(n, eps, delta, d)
    # ceil(sqrt) and odd group counts move the total by a step; the theorems themselves are monotone.
    assert cost(n + more, eps, delta, d) >= base
    assert cost(n, eps / 2, delta, d) >= base
    assert cost(n, eps, delta / 2, d) >= base
    assert cost(n, eps, delta, d + 1) >= base


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize(("theorem", "form"), PAIRS)
def test_tiny_inputs(theorem: str, form: str, n: int) -> None:
    sizes = budget(n, 0.1, 0.1, d=1, theorem=theorem, form=form)
    assert sizes.k is None or 1 <= sizes.k <= n
    values = [getattr(sizes, name) for name in SIZES]
    assert any(value is not None for value in values)
    assert all(value >= 0 for value in values if value is not None)
    if theorem == "tail":
        assert sizes.takes_everything(n)


def test_printed_forms_ask_for_nothing_at_one_key() -> None:
    assert budget(1, 0.1, 0.1, theorem="walks", form="printed").walks == 0
    assert budget(1, 0.1, 0.1, theorem="median-of-means", form="printed").draws == 0
    assert budget(1, 0.1, 0.1, theorem="walks").walks > 0
    assert budget(1, 0.1, 0.1, theorem="median-of-means").draws > 0


def test_tail_of_one_key_is_that_key() -> None:
    for form in FORMS["tail"]:
        sizes = budget(1, 0.5, 0.5, form=form)
        assert (sizes.k, sizes.ell) == (1, 0)


def test_every_budget_lists_all() -> None:
    budgets = every_budget(131072, 0.05, 0.01, 64)
    assert [(b.theorem, b.form) for b in budgets] == PAIRS
    for b in budgets:
        assert isinstance(b, Budget)
        assert b.promise
        assert "\n" not in b.promise
        assert b.label.split(":")[0] in ("thm", "lemma", "alg")


def test_groups_multiply_to_draws() -> None:
    for b in every_budget(4096, 0.1, 0.1):
        if b.draws is not None:
            sets = 3 if b.theorem == "dq" and b.form != "corrected" else 1
            assert b.draws == sets * b.groups * b.group_size


def test_audit_rows() -> None:
    assert audit_rows() == 59
    assert audit_rows(0.99, 0.95) == 299
    assert audit_rows(0.5, 0.75) == 2
    assert audit_rows(0.1, 0.9) == 1


@given(st.floats(0.01, 0.9999), st.floats(0.01, 0.9999))
def test_audit_rows_are_the_fewest(quantile: float, confidence: float) -> None:
    rows = audit_rows(quantile, confidence)
    assert quantile**rows <= (1 - confidence) * (1 + 1e-9)
    assert rows == 1 or quantile ** (rows - 1) > (1 - confidence) * (1 - 1e-9)
    assert audit_quantile(rows, confidence) >= quantile * (1 - 1e-9)


@given(st.integers(1, 10**5), st.floats(0.01, 0.9999))
def test_audit_quantile_inverts(rows: int, confidence: float) -> None:
    assert audit_rows(audit_quantile(rows, confidence), confidence) in (rows, rows + 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 0}, r"n must be a positive integer, got 0"),
        ({"n": -3}, r"n must be .* got -3"),
        ({"n": 2.0}, r"n must be .* got 2\.0"),
        ({"n": True}, r"n must be .* got True"),
        ({"d": 0}, r"d must be .* got 0"),
        ({"d": "64"}, r"d must be .* got '64'"),
        ({"eps": 0.0}, r"eps must be a number between 0 and 1, got 0\.0"),
        ({"eps": 1}, r"eps must .* got 1"),
        ({"eps": math.nan}, r"eps must .* got nan"),
        ({"eps": "0.1"}, r"eps must .* got '0\.1'"),
        ({"delta": 1.5}, r"delta must .* got 1\.5"),
        ({"delta": -0.1}, r"delta must .* got -0\.1"),
        ({"theorem": "lsh"}, r"got 'lsh'; hashing has another question: nearfield\.lsh_budget\(n, s1, s2\)"),
        ({"theorem": "nope"}, r"theorem must be one of median-of-means, mean, .* got 'nope'"),
        ({"form": "nope"}, r"form must be one of printed, corrected, joint for theorem 'tail'; got 'nope'"),
        ({"theorem": "mean", "form": "printed"}, r"form must be one of corrected for theorem 'mean'; got 'printed'"),
        ({"k": 0}, r"k must be .* got 0"),
        ({"k": 3, "theorem": "walks"}, r"k cannot be given for theorem 'walks', .* got k=3"),
        ({"draws": 5}, r"draws cannot be given for theorem 'tail', .* got draws=5"),
        ({"spread": 0.0}, r"spread must be a positive finite number, got 0\.0"),
        ({"spread": math.inf}, r"spread must be .* got inf"),
    ],
)
def test_bad_arguments(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        budget(**({"n": 100, "eps": 0.1, "delta": 0.1} | change))


@pytest.mark.parametrize("arguments", [(0.0, 0.5), (1.0, 0.5), (0.5, 1.0), (0.5, 0)])
def test_bad_audit_arguments(arguments: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="must be a number between 0 and 1"):
        audit_rows(*arguments)


@pytest.mark.parametrize("rows", [0, -1, 2.5, True])
def test_bad_audit_row_counts(rows: object) -> None:
    with pytest.raises(ValueError, match="rows must be a positive integer"):
        audit_quantile(rows)


@pytest.mark.parametrize(
    ("eps", "delta", "d"), [(0.3, 0.1, 64), (0.05, 0.01, 32), (0.9, 0.9, 32), (0.25, 0.3, 1), (0.15, 0.1, 1)]
)
def test_from_where_on_lazy_draws_read_fewer_keys(eps: float, delta: float, d: int) -> None:
    """k + draws (n-k)/(k+1) < n if and only if draws < k + 1."""
    found = sublinear_from(eps, delta, d=d)
    sizes = [found - 1, *(round(found * 1.01**power) for power in range(1000))]
    for n in sizes:
        k = math.isqrt(n - 1) + 1
        draws = budget(n, eps, delta, d=d, theorem="median-of-means", form="tight").draws
        assert draws is not None
        assert (draws < k + 1) == (n >= found)
        assert keys_read(n, eps, delta, d=d) == pytest.approx(k + draws * (n - k) / (k + 1))


def test_the_size_from_which_lazy_draws_pay() -> None:
    assert 2e7 < sublinear_from(0.3, 0.1) < 4e7
    assert 3e9 < sublinear_from(0.1, 0.1) < 5e9
    with pytest.raises(ValueError, match="eps"):
        sublinear_from(1.0, 0.1)
