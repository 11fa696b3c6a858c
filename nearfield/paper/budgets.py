"""From a theorem to sizes: how many keys, draws or walks an (eps, delta) promise costs. Pure arithmetic.

Every theorem comes in the form that the paper prints and in a corrected form (`docs/departures.md` gives the reasons). Where the
paper says O(.), this module uses the constant that its proof gives, and names it. Logarithms are natural, except lg (base 2).
Counts are per query unless the promise says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from nearfield.checks import check_fraction, check_positive
from nearfield.knn.tail import TailPromise, smallest_size, tail_sizes

GROUP_FAILURE = 1 / 8.36
"""How often one group of the tight median of means may miss (Chebyshev). This value minimises the total number of draws."""

GROUPS_PER_LOG = 1 / (0.5 * math.log(0.5 / GROUP_FAILURE) + 0.5 * math.log(0.5 / (1 - GROUP_FAILURE)))
"""1 / KL(1/2 || 1/8.36) = 2.3133...: by Chernoff, half of G groups miss with probability at most exp(-G / 2.3133)."""


@dataclass(frozen=True)
class Budget:
    """The sizes that one theorem asks for; None where it does not mention a size."""

    theorem: str
    form: str
    k: int | None = None
    """near keys"""
    ell: int | None = None
    """far keys: sampled (`tail`), or expected to be looked at by one draw (`lazy-gumbel`)"""
    draws: int | None = None
    """draws from the softmax of one row"""
    groups: int | None = None
    group_size: int | None = None
    walks: int | None = None
    buffer: int | None = None
    """far keys that one lazy Gumbel draw must have room for"""
    promise: str = ""
    """what these sizes guarantee"""
    label: str = ""
    """the paper's label"""

    def takes_everything(self, n: int) -> bool:
        """Whether near and far keys together are all n keys: the estimate is then exact, and saves nothing."""
        return self.k is not None and self.k + (self.ell or 0) >= n


@dataclass(frozen=True)
class _Question:
    """Checked arguments of `budget`."""

    n: int
    eps: float
    delta: float
    d: int
    form: str
    k: int | None
    draws: int | None
    spread: float


def budget(
    n: int,
    eps: float,
    delta: float,
    *,
    d: int = 64,
    theorem: str = "tail",
    form: str = "corrected",
    k: int | None = None,
    draws: int | None = None,
    spread: float = 1.0,
) -> Budget:
    """The sizes that `theorem` asks for to promise an error eps with probability 1 - delta.

    | theorem | forms | paper |
    |---|---|---|
    | `tail` | printed, corrected, joint | thm:simpler_expectation |
    | `median-of-means` | printed, corrected, tight | thm:approx-attn |
    | `mean` | corrected | (the paper has only the median) |
    | `lazy-gumbel` | printed, corrected | lemma:large-gumbel-bound |
    | `walks` | printed, corrected, dkw, signed | alg:mcmc_alg |
    | `dq` | printed, tight, corrected | thm:dq_approximation |
    | `dk` | printed, tight, corrected | thm:dk_approximation |

    Args:
        n: keys that a query sees. The promises for gradients (`walks`, `dq`, `dk`) hold for all entries at once: count the rows
            (`dq`), the keys (`walks`) or the more of both (`dk`) of all heads of all batch entries.
        eps, delta: error (its unit is in `Budget.promise`) and failure probability, both in (0, 1).
        d: columns of the values, for the union bounds.
        k: number of near keys to solve the rest for (`tail` and `lazy-gumbel` only).
        draws: how many draws the buffer must serve in all (`lazy-gumbel` only); None: every draw of every row of the tight
            median of means.
        spread: size of one draw in the unit of eps: its standard deviation (`median-of-means`, and printed and tight
            `dq` and `dk`) or its range (`mean`).

    >>> budget(131072, 0.05, 0.01).k
    23123
    """
    check_positive("n", n)
    check_positive("d", d)
    check_fraction("eps", eps)
    check_fraction("delta", delta)
    if theorem not in FORMS:
        hint = "; hashing has another question: nearfield.lsh_budget(n, s1, s2)" if theorem == "lsh" else ""
        raise ValueError(f"theorem must be one of {', '.join(FORMS)}; got {theorem!r}{hint}")
    if form not in FORMS[theorem]:
        raise ValueError(f"form must be one of {', '.join(FORMS[theorem])} for theorem {theorem!r}; got {form!r}")
    if k is not None:
        check_positive("k", k)
        if theorem not in ("tail", "lazy-gumbel"):
            raise ValueError(f"k cannot be given for theorem {theorem!r}, only for 'tail' and 'lazy-gumbel'; got k={k!r}")
        k = min(k, n)
    if draws is not None:
        check_positive("draws", draws)
        if theorem != "lazy-gumbel":
            raise ValueError(f"draws cannot be given for theorem {theorem!r}, only for 'lazy-gumbel'; got draws={draws!r}")
    if isinstance(spread, bool) or not isinstance(spread, int | float) or not 0 < spread < math.inf:
        raise ValueError(f"spread must be a positive finite number, got {spread!r}")
    return _SOLVERS[theorem](_Question(n, eps, delta, d, form, k, draws, spread))


def every_budget(n: int, eps: float, delta: float, d: int = 64) -> list[Budget]:
    """`budget` for every theorem in every form, in the order of the paper."""
    return [budget(n, eps, delta, d=d, theorem=theorem, form=form) for theorem, forms in FORMS.items() for form in forms]


def keys_read(n: int, eps: float, delta: float, *, d: int = 64) -> float:
    """Keys that Algorithm 2 reads for a query, in expectation at most: k = ceil(sqrt(n)) near ones, and E[m] by every draw.

    The draws are those of the tight median of means, E[m] <= (n-k) / (k+1). What the index reads is not counted, and a key
    that several draws look at counts every time, although `LazyGumbel` scores it once.

    >>> round(keys_read(131072, 0.3, 0.1) / 131072, 1)
    11.0
    """
    draws = budget(n, eps, delta, d=d, theorem="median-of-means", form="tight").draws or 0
    k = _sqrt_ceil(n)
    return k + draws * (n - k) / (k + 1)


def sublinear_from(eps: float, delta: float, *, d: int = 64) -> int:
    """The n from which on Algorithm 2 reads fewer than n keys for a query (`keys_read`): about the square of its draws.

    >>> f"{sublinear_from(0.3, 0.1):.1e}, {sublinear_from(0.1, 0.1):.1e}"
    '2.6e+07, 3.1e+09'
    """

    def groups(n: int) -> int:
        return budget(n, eps, delta, d=d, theorem="median-of-means", form="tight").groups or 0

    def reads_fewer(n: int) -> bool:
        return keys_read(n, eps, delta, d=d) < n

    def next_step(n: int) -> int:
        """Where the number of groups grows again."""
        now = groups(n)
        return smallest_size(lambda larger: groups(larger) > now)

    def fewer_beyond(n: int) -> int:
        return smallest_size(lambda larger: larger > n and reads_fewer(larger))

    found = smallest_size(reads_fewer)
    # The number of groups is odd, so the number of draws grows in steps, the first of which may be too much for this n.
    while not reads_fewer(step := next_step(found)):
        found = fewer_beyond(step)
    return found


def _median_of_means(ask: _Question) -> Budget:
    """thm:approx-attn. delta' = delta / (n d). One set of draws serves all d columns: a union bound needs no independence.

    printed: C eps^-2 log(n) ln(2 / delta') with C = 4 * 8: groups that miss with probability 1/4 (Chebyshev), and
    Hoeffding over the groups. The paper's proof bounds Var / O^2 by B / O and writes log n for it, which needs V >= 0 and
    O >= B / log n. At n = 1 this is 0 draws.
    corrected: 8 ln(1 / delta') groups of 4 sigma^2 / eps^2, for an additive error.
    tight: Chernoff instead of Hoeffding, and the best split between the size of a group and the number of groups (an odd one).
    """
    log_union = math.log(ask.n * ask.d / ask.delta)
    if ask.form == "printed":
        groups = _ceil(8 * (log_union + math.log(2)))
        size = _ceil(4 * math.log(ask.n) / ask.eps**2)
        promise = "|O^ - O| <= eps O for all n d entries, if V >= 0 and O >= max V / ln n"
    else:
        groups, size = _groups(log_union, ask.eps / ask.spread, tight=ask.form == "tight")
        promise = "|O^ - O| <= eps (sum_k P_ik V_kj^2)^(1/2) for all n d entries"
    sizes = {"draws": groups * size, "groups": groups, "group_size": size}
    return Budget("median-of-means", ask.form, **sizes, promise=promise, label="thm:approx-attn")


def _mean(ask: _Question) -> Budget:
    """Hoeffding for the plain mean: range^2 ln(2 n d / delta) / (2 eps^2)."""
    draws = _ceil(math.log(2 * ask.n * ask.d / ask.delta) / (2 * (ask.eps / ask.spread) ** 2))
    promise = "|O^ - O| <= eps range(V_:j) for all n d entries"
    return Budget("mean", ask.form, draws=draws, groups=1, group_size=draws, promise=promise, label="thm:approx-attn")


def _lazy_gumbel(ask: _Question) -> Budget:
    """lemma:large-gumbel-bound with k = ceil(sqrt n).

    printed: E[m] <= n / k. corrected: E[m] = (n-k) e^U / (e^U + Z_S) <= (n-k) / (k+1) for a true top k. m is nearly geometric:
    P(m >= t) = prod_{i<t} (n-k-i) / (n-i) at the bound, so (1 + E[m]) ln(draws / delta) slots hold every one of the draws.
    """
    k = ask.k or _sqrt_ceil(ask.n)
    if ask.form == "printed":
        ell, slots = math.ceil(ask.n / k), None
        promise = "a draw is exact and looks at n/k far keys at most, in expectation"
    else:
        expected = (ask.n - k) / (k + 1)
        draws = ask.draws or ask.n * math.prod(_groups(math.log(ask.n * ask.d / ask.delta), ask.eps, tight=True))
        ell = math.ceil(expected)
        # For one or two draws the geometric tail would be too short: m is bounded, and nearly uniform when k is small.
        slots = min(ask.n - k, _ceil((1 + expected) * max(3.0, math.log(draws / ask.delta))))
        promise = f"a draw is exact and looks at (n-k)/(k+1) far keys at most, in expectation; {draws:,} draws all fit the buffer"
    return Budget("lazy-gumbel", ask.form, k=k, ell=ell, buffer=slots, promise=promise, label="lemma:large-gumbel-bound")


def _tail(ask: _Question) -> Budget:
    """thm:simpler_expectation: the smallest k = ell that meets the conditions (n^(2/3) printed, n^(1/2) corrected).

    Sampling is without replacement, so at most the remaining n - k keys can be sampled, and taking them all is exact.
    joint: the corrected condition for all n d entries of n rows at once, with 2 delta / (n (d+1)) for delta (`TailPromise`).
    """
    joint = ask.form == "joint"
    delta = TailPromise(ask.eps, ask.delta, joint).entry_delta(ask.n, ask.d)
    k, ell = tail_sizes(ask.n, ask.eps, delta, ask.k, form=ask.form)
    if k + ell >= ask.n:
        promise = f"exact: it asks for {k:,} near and {ell:,} sampled keys, and there are only {ask.n:,}"
    elif ask.form == "printed":
        promise = "|O^ - O| = O(eps) for each entry, if |V| <= C"
    else:
        promise = f"|O^ - O| <= eps/(1-eps) max_k |V_kj - O_ij| for {'all n d entries' if joint else 'each entry'}"
    k = min(k, ask.n)
    return Budget("tail", ask.form, k=k, ell=min(ell, ask.n - k), promise=promise, label="thm:simpler_expectation")


def _walks(ask: _Question) -> Budget:
    """Algorithm ApproxPosProd, as D^V calls it: d columns lifted to x >= 0 and the row sums s, n entries each.

    printed: 2 lg(n) / eps^2 with lg the logarithm to base 2 (0 walks at n = 1). corrected: Hoeffding for n (d+1) entries,
    ln(2n(d+1)/delta) / (2 eps^2). dkw: the Dvoretzky-Kiefer-Wolfowitz inequality at eps/2, 2 ln(2(d+1)/delta) / eps^2; better
    only for very large n. signed: walks that carry the sign of x need no lift and no s, but their terms lie between -||x||_1
    and ||x||_1, a range twice as wide: 2 ln(2nd/delta) / eps^2.
    """
    if ask.form == "printed":
        count = _printed_walks(ask)
        promise = "|x^ - P^T x| <= eps ||x||_1 for x >= 0, with probability 1 - 1/n"
    elif ask.form == "signed":
        count = _ceil(2 * math.log(2 * ask.n * ask.d / ask.delta) / ask.eps**2)
        promise = "|x^ - P^T x| <= eps ||x||_1 for x of any sign, for all n entries of d columns"
    else:
        if ask.form == "dkw":
            count = _ceil(2 * math.log(2 * (ask.d + 1) / ask.delta) / ask.eps**2)
        else:
            count = _ceil(math.log(2 * ask.n * (ask.d + 1) / ask.delta) / (2 * ask.eps**2))
        promise = "|x^ - P^T x| <= eps ||x||_1 for x >= 0, for all n entries of d columns and of s"
    return Budget("walks", ask.form, walks=count, promise=promise, label="alg:mcmc_alg")


def _dq(ask: _Question) -> Budget:
    """thm:dq_approximation. D^Q_ij = Cov_{D_i}(D^P_i, K_j).

    E1, E2 and E3 each have their own median of means, for every one of n d entries: a union over 3 n d estimates. `draws` counts
    all three, for one entry.
    printed: at (eps, delta/3) with the constant C = 4 * 8. tight: the tight groups; `PrintedWalk` takes these.
    corrected: the sample covariance of one set of draws per row, shared by the columns (`RandomWalk`); sized by `_covariances`.
    """
    k = _sqrt_ceil(ask.n)
    if ask.form == "corrected":
        draws = _covariances(ask)
        sizes = {"draws": draws, "groups": 1, "group_size": draws}
        promise = "|D^Q^ - D^Q| <= eps range(D^P_i) range(K_:j) for all n d entries"
        return Budget("dq", ask.form, k=k, **sizes, promise=promise, label="thm:dq_approximation")
    estimates = 3 * ask.n * ask.d
    if ask.form == "printed":
        groups, size = _groups(math.log(2 * estimates / ask.delta), ask.eps / ask.spread)
        promise = "|D^Q^ - D^Q| <= eps (1 + eps + |E2| + |E3|) for all n d entries, eps in units of sd(D^P K), sd(K), sd(D^P)"
    else:
        groups, size = _groups(math.log(estimates / ask.delta), ask.eps / ask.spread, tight=True)
        promise = "|D^Q^ - D^Q| <= eps (sd(D^P K) + |E2| sd(D^P) + |E3| sd(K) + eps sd(D^P) sd(K)) for all n d entries"
    sizes = {"draws": 3 * groups * size, "groups": groups, "group_size": size}
    return Budget("dq", ask.form, k=k, **sizes, promise=promise, label="thm:dq_approximation")


def _dk(ask: _Question) -> Budget:
    """thm:dk_approximation.

    printed: `walks` = 2 lg(n) / eps^2 for *each* of n d entries of A, as many again for each column of B and for s; `draws` by
    median of means for each entry of X^.
    tight: the same estimator, sized so that all it estimates is right at once: A, B and X^ with n d entries each, and s with n,
    a union over n (3d+1) estimates. Hoeffding for the walks, tight groups for X^; `PrintedWalk` takes these.
    corrected: `walks` from each row k, shared by all columns, and centred at their own mean (`RandomWalk`): a sum over rows of
    Q_kj times a sample covariance of D^P_k with the indicator of key i; sized by `_covariances`.
    """
    k = _sqrt_ceil(ask.n)
    if ask.form == "corrected":
        promise = "|D^K^ - D^K| <= eps (sum_k Q_kj^2 range(D^P_k)^2)^(1/2) for all n d entries; the walks are for each row"
        return Budget("dk", ask.form, k=k, walks=_covariances(ask), promise=promise, label="thm:dk_approximation")
    if ask.form == "printed":
        walks = _printed_walks(ask)
        groups, size = _groups(math.log(2 * ask.n * ask.d / ask.delta), ask.eps / ask.spread)
        promise = "|D^K^ - D^K| = O(eps n (M + M^X)) for all n d entries; the walks are for each entry"
    else:
        estimates = ask.n * (3 * ask.d + 1)
        walks = _ceil(math.log(2 * estimates / ask.delta) / (2 * ask.eps**2))
        groups, size = _groups(math.log(estimates / ask.delta), ask.eps / ask.spread, tight=True)
        promise = (
            "|D^K^ - D^K| <= eps (sum_k (Y_kj + X^_kj + 2 M + 2 M^X_j) + sum_k P_ki |Q_kj| sd(D^P_k)) for all n d entries; the "
            "walks are for each entry"
        )
    sizes = {"draws": groups * size, "groups": groups, "group_size": size, "walks": walks}
    return Budget("dk", ask.form, k=k, **sizes, promise=promise, label="thm:dk_approximation")


def _covariances(ask: _Question) -> int:
    """Draws per row, at least 2, so that n d weighted sums of sample covariances are right: ln(2nd/delta) / (2 eps^2).

    Another draw in place of one of N changes the sample covariance by range range' / N at most (docs/guarantees.md), so
    McDiarmid's inequality bounds sum_k a_k (C^_k - C_k) by eps (sum_k (a_k range_k range'_k)^2)^(1/2).
    """
    return max(2, _ceil(math.log(2 * ask.n * ask.d / ask.delta) / (2 * ask.eps**2)))


FORMS: dict[str, tuple[str, ...]] = {
    "median-of-means": ("printed", "corrected", "tight"),
    "mean": ("corrected",),
    "lazy-gumbel": ("printed", "corrected"),
    "tail": ("printed", "corrected", "joint"),
    "walks": ("printed", "corrected", "dkw", "signed"),
    "dq": ("printed", "tight", "corrected"),
    "dk": ("printed", "tight", "corrected"),
}
"""The forms of each theorem."""

_SOLVERS: dict[str, Callable[[_Question], Budget]] = {
    "median-of-means": _median_of_means,
    "mean": _mean,
    "lazy-gumbel": _lazy_gumbel,
    "tail": _tail,
    "walks": _walks,
    "dq": _dq,
    "dk": _dk,
}


def _groups(log_union: float, eps: float, tight: bool = False) -> tuple[int, int]:
    """Number and size of the groups of a median of means that fails with probability exp(-log_union); eps in units of one sd."""
    if not tight:
        return max(1, _ceil(8 * log_union)), _ceil(4 / eps**2)
    groups = max(1, _ceil(GROUPS_PER_LOG * log_union))
    return groups + 1 - groups % 2, _ceil(1 / (GROUP_FAILURE * eps**2))


def _printed_walks(ask: _Question) -> int:
    return _ceil(2 * math.log2(ask.n) / ask.eps**2)


def _sqrt_ceil(n: int) -> int:
    return math.isqrt(n - 1) + 1


def _ceil(x: float) -> int:
    """The ceiling, except that a quotient which rounding put just above an integer counts as that integer."""
    return math.ceil(x * (1 - 4e-16))
