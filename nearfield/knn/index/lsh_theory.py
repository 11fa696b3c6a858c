"""The sizes that the theory of locality-sensitive hashing asks for: hashes, tables and radii from two similarities."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nearfield.checks import check_fraction, check_positive

WIDTHS = tuple(0.5 * 1.05**step for step in range(80))
"""Widths of a bucket, in units of the near radius, among which the best is chosen: 0.5 to 24."""


@dataclass(frozen=True)
class LSHBudget:
    """What hashing needs to find near keys with a promised probability (paper, thm:LSH_construction, thm:sublinear-lsh-kmips)."""

    n: int
    delta: float
    p1: float
    """probability that one hash agrees on a near key, at least"""
    p2: float
    """and on a far key, at most"""
    rho: float
    """ln p1 / ln p2: a query costs about n^rho"""
    hashes: int
    """per table, so that a bucket holds n p2^hashes <= 1 far key in expectation"""
    tables: int
    """per radius"""
    rungs: int
    """radii of the ladder"""
    far_candidates: float
    """far keys in the buckets of a query on one rung, at most, in expectation"""
    width: float | None = None
    """of a bucket, in units of the near radius; None: p1 and p2 were given"""
    promise: str = ""
    label: str = "thm:LSH_construction, thm:sublinear-lsh-kmips"

    @property
    def projections(self) -> int:
        """Inner products that hashing one query takes; scoring all keys takes n."""
        return self.tables * self.hashes

    @property
    def bytes_per_key(self) -> int:
        """Memory of the tables: a code and a number of 4 bytes each for every table and rung."""
        return 8 * self.tables * self.rungs


def collision_probability(ratio: float) -> float:
    """P(h(x) = h(y)) for h(x) = floor((a.x + b) / w) and w = ratio ||x - y||: E2LSH, a ~ N(0, I), b ~ U[0, w).

    1 - 2 Phi(-s) - sqrt(2/pi)/s (1 - e^{-s^2/2}) with s = ratio.

    >>> round(collision_probability(4.0), 3)
    0.801
    """
    beyond = math.erfc(ratio / math.sqrt(2))  # 2 Phi(-s)
    return 1 - beyond - math.sqrt(2 / math.pi) / ratio * -math.expm1(-ratio * ratio / 2)


def lsh_budget(
    n: int,
    s1: float | None = None,
    s2: float | None = None,
    *,
    p1: float | None = None,
    p2: float | None = None,
    delta: float | None = None,
    every: int = 1,
    width: float | None = None,
) -> LSHBudget:
    """Hashes, tables and radii with which `every` given near keys of a query are all found with probability 1 - delta.

    An (S1, S2, p1, p2) family agrees on a key of similarity S1 or more with probability p1 or more, and on one of similarity S2
    or less with probability p2 or less. A table concatenates m = ceil(ln n / ln(1/p2)) hashes, so its bucket holds n p2^m <= 1
    far keys in expectation, and a near key with probability p1^m. L tables all miss it with probability (1 - p1^m)^L, so
    L = ceil(ln(rungs every / delta) / -ln(1 - p1^m)), which is about n^rho ln(1/delta) / p1 with rho = ln p1 / ln p2. The paper
    asks for delta = 1/n^2. A search may stop on any rung of the ladder, so all of them must keep the promise.

    Args:
        n: keys.
        s1, s2: cosines, -1 < s2 < s1 < 1, of a near and of a far key after the reduction of MIPS to kNN: q.k / (||q|| R) with R
            the largest norm of the keys. On the unit sphere these are the distances r = sqrt(2 - 2s), and E2LSH with buckets of
            width w gives p1 and p2 (`collision_probability`). The ladder has radii r1, r1 c, r1 c^2, ... up to 2, c = r2 / r1.
        p1, p2: of any other family, instead of s1 and s2; there is a single rung then.
        delta: None: 1/n^2, the paper's.
        every: how many near keys must all be found (union bound).
        width: w / r1; None: the one that takes the fewest projections, tables * hashes.

    Example:
        >>> sizes = lsh_budget(8192, 0.9, 0.5)
        >>> sizes.tables, sizes.hashes, sizes.projections, round(sizes.rho, 2)
        (843, 10, 8430, 0.42)
    """
    check_positive("n", n)
    check_positive("every", every)
    delta = 1 / max(2, n) ** 2 if delta is None else delta
    check_fraction("delta", delta)
    if p1 is not None or p2 is not None:
        if s1 is not None or s2 is not None or width is not None:
            raise ValueError("give s1 and s2 (E2LSH), or p1 and p2 (any family), not both; width belongs to s1 and s2")
        check_fraction("p1", p1)
        check_fraction("p2", p2)
        assert p1 is not None
        assert p2 is not None
        if not p2 < p1:
            raise ValueError(f"p2 must be smaller than p1, got p1={p1!r}, p2={p2!r}")
        return _sizes(n, p1, p2, delta, every, 1, None)
    near, far = radius("s1", s1), radius("s2", s2)
    if not near < far:
        raise ValueError(f"s2 must be smaller than s1, got s1={s1!r}, s2={s2!r}")
    if width is not None and (isinstance(width, bool) or not isinstance(width, int | float) or not 0 < width < math.inf):
        raise ValueError(f"width must be a positive number or None, got {width!r}")
    rungs = max(1, math.ceil(math.log(2 / near) / math.log(far / near)))
    tried = []
    for one in WIDTHS if width is None else (width,):
        tried.append(_sizes(n, collision_probability(one), collision_probability(one * near / far), delta, every, rungs, one))
    return min(tried, key=lambda sizes: sizes.projections)


def radius(name: str, cosine: float | None) -> float:
    """The distance on the unit sphere."""
    if cosine is None or isinstance(cosine, bool) or not isinstance(cosine, int | float) or not -1 < cosine < 1:
        raise ValueError(f"{name} must be a cosine between -1 and 1, got {cosine!r}")
    return math.sqrt(2 - 2 * cosine)


def _sizes(n: int, p1: float, p2: float, delta: float, every: int, rungs: int, width: float | None) -> LSHBudget:
    hashes = max(1, math.ceil(math.log(n) / -math.log(p2) * (1 - 4e-16)))
    tables = math.ceil(math.log(rungs * every / delta) / -math.log1p(-(p1**hashes)))
    keys = "a given near key is" if every == 1 else f"{every:,} given near keys are all"
    return LSHBudget(
        n=n,
        delta=delta,
        p1=p1,
        p2=p2,
        rho=math.log(p1) / math.log(p2),
        hashes=hashes,
        tables=max(1, tables),
        rungs=rungs,
        far_candidates=max(1, tables) * n * p2**hashes,
        width=width,
        promise=f"{keys} among the candidates with probability {1 - delta:.10g}",
    )
