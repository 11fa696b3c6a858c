"""How many near and how many sampled keys a promise costs: thm:simpler_expectation, as printed and as corrected."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

ROUNDING = 1e-4
"""By how much, in logarithms, a row may miss its condition: near scores and bounds come from float32 products."""


def tail_factor(eps: float, delta: float) -> float:
    """2 (1 + 2 eps/3) eps^-2 ln(4/delta): k ell must be this many times the keys that are not near."""
    return 2 * (1 + 2 * eps / 3) * math.log(4 / delta) / eps**2


def tail_condition(n: int, eps: float, delta: float, k: int, ell: int, form: str = "corrected") -> bool:
    """Whether k near keys and ell sampled ones meet the conditions of thm:simpler_expectation.

    printed: k^2 ell >= 8 n^2 eps^-2 ln(4/delta) and k ell >= 2 n eps^-2 ln(2/delta).
    corrected: k ell >= 2 (1 + 2 eps/3) (n-k) eps^-2 ln(4/delta), by Bernstein on w(V - O); the k^2 ell condition is not needed.
    """
    if form == "printed":
        squared = 8 * n * n * math.log(4 / delta) / eps**2
        return k * k * ell >= squared and k * ell >= 2 * n * math.log(2 / delta) / eps**2
    return k * ell >= tail_factor(eps, delta) * max(0, n - k)


def tail_sizes(
    n: int, eps: float, delta: float, k: int | None = None, ell: int | None = None, form: str = "corrected"
) -> tuple[int, int]:
    """The smallest (k, ell) that meet the conditions, k = ell unless one of them is given. Together they may exceed n.

    The conditions only get easier with k and with ell, so bisection finds the smallest sizes.
    """
    if k is not None and ell is not None:
        return k, ell
    if k is not None:
        return k, smallest_size(lambda size: tail_condition(n, eps, delta, k, size, form))
    if ell is not None:
        return smallest_size(lambda size: size >= n or tail_condition(n, eps, delta, size, ell, form)), ell
    both = smallest_size(lambda size: tail_condition(n, eps, delta, size, size, form))
    return both, both


def smallest_size(enough: Callable[[int], bool]) -> int:
    """The smallest positive size that is enough, for a condition that stays true once it is true."""
    high = 1
    while not enough(high):
        high *= 2
    low = high // 2 + 1
    while low < high:
        middle = (low + high) // 2
        if enough(middle):
            high = middle
        else:
            low = middle + 1
    return high


@dataclass(frozen=True)
class TailPromise:
    """|O^ - O| <= eps/(1-eps) max_j |V_jc - O_ic| with probability 1 - delta, for each entry or (`joint`) for all of them.

    Bernstein is used for the numerator of each of d columns and once for the denominator of the row. Each use may fail in two
    directions, so one entry takes 4 e^-x <= delta, and r rows of d columns together take 2 r (d+1) e^-x <= delta.
    """

    eps: float
    delta: float
    joint: bool = False

    def entry_delta(self, rows: int, columns: int) -> float:
        """The delta of one entry with which the theorem gives this promise: 2 delta / (r (d+1)) where it is joint."""
        return 2 * self.delta / max(2, rows * (columns + 1)) if self.joint else self.delta

    def sizes(self, n: int, rows: int, columns: int, k: int | None, tail: int | None) -> tuple[int, int]:
        """Near and sampled keys that keep the promise for rows that see up to n keys; (n, 0) where these would be all keys."""
        delta = self.entry_delta(rows, columns)
        near, drawn = tail_sizes(n, self.eps, delta, k, tail)
        if near + drawn >= n:
            return n, 0
        if not tail_condition(n, self.eps, delta, near, drawn):
            asked = min(tail_sizes(n, self.eps, delta, k=k)[1], n - near)
            raise ValueError(
                f"k={k} and tail={tail} do not promise eps={self.eps:g} and delta={self.delta:g} for {n:,} keys: with this k, "
                f"tail must be {asked:,} or more; leave out k or tail, or leave out eps and delta"
            )
        return near, drawn

    def says(self, share: float) -> str:
        """The promise, for a share of the rows that is known to meet its condition."""
        scope = "all entries at once" if self.joint else "each entry"
        bound = f"|O^ - O| <= {self.eps / (1 - self.eps):.3g} max_j |V_jc - O_ic|"
        known = "" if share == 1 else f"; known to hold for {share:.1%} of the rows, no promise for the others"
        return f"{bound} for {scope}, with probability {1 - self.delta:g}{known}"


class RowsMet:
    """For how many rows the corrected condition is known to hold, by what was found: Z_S e^-U ell >= factor (n - |S|).

    Z_S is the sum of e^score over the near keys, U an upper bound for the scores of all others. For a true top k this is never
    less than the k ell of the theorem, so the condition holds. For an approximate near set nothing else makes the promise.
    """

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.rows = 0
        self.open = True
        """False once the share was read: a backward pass plans the same rows again"""
        self._met: Tensor | None = None

    def add(self, logits: Tensor, bound: Tensor | None, left_out: Tensor, tail: int) -> None:
        """Near scores `[batch, rows, k]`, the bound `[batch, rows]` (None: not known), and how many keys are not near."""
        met = left_out <= tail
        if bound is not None and tail:
            weight = logits.double().logsumexp(-1) - bound.double()
            met = met | (weight + math.log(tail) >= (self.factor * left_out.double()).log() - ROUNDING)
        self.rows += met.numel()
        self._met = met.sum() if self._met is None else self._met + met.sum()

    def share(self) -> float:
        self.open = False
        return 1.0 if self._met is None else int(self._met) / max(1, self.rows)


def needed_sizes(logits: Tensor, visible: Tensor, tail: int, factor: float) -> Tensor:
    """The smallest k whose condition holds in each row, by its own sorted scores.

    Args:
        logits: `[..., n]`, -inf beyond the `visible` keys of a row, which are `[...]`.

    Row r needs the smallest k with Z_k e^{-z_(k+1)} tail >= factor (n_r - k), Z_k the sum of e^z over its k largest scores and
    z_(k+1) the next one; k >= n_r - tail is always enough, because all others are sampled then. The left side grows with k and
    the right side falls, so it is one more than the number of k that fail.
    """
    ordered = logits.double().sort(-1, descending=True).values
    near = ordered.logcumsumexp(-1)
    k = torch.arange(1, logits.shape[-1] + 1, device=logits.device)
    left = visible[..., None] - k
    following = torch.nn.functional.pad(ordered[..., 1:], (0, 1), value=-torch.inf)
    drawn = math.log(tail) if tail else -math.inf
    enough = (near - following + drawn >= (factor * left.clamp(min=1)).log()) | (left <= tail)
    return torch.minimum((~enough).sum(-1) + 1, visible)
