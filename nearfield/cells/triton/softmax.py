"""A softmax over many tiles of logits, to base 2: its base m, its weight l, the sum of 2^(logit - m), and the weighted values.

The base is the largest logit so far, or fixed after the first tiles. Fixed, nothing is searched for a largest logit and no sum is
scaled again. The result is the same as long as no weight leaves the range of its dtype: `is_lost` tells, and what is lost is
computed again with a running base.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def is_lost(l_i, NARROW: tl.constexpr):
    """Whether a row has left the range in which a fixed base is right, which is smaller in float16 (NARROW). NaN is lost.

    At least one term is 1 if all is well.
    """
    most: tl.constexpr = 2.0**15 if NARROW else 2.0**60
    return (l_i < most) & (l_i > 1.0 / most) == 0


@triton.jit
def add_keys(qk, value, scale, m_i, l_i, acc, IP: tl.constexpr):
    """Add keys with logits qk * scale (-inf: not seen) to a running softmax."""
    m_new = tl.maximum(m_i, tl.max(qk, 1) * scale)
    base = tl.where(m_new > -float("inf"), m_new, 0.0)
    p = tl.exp2(qk * scale - base[:, None])
    alpha = tl.exp2(m_i - base)
    acc = acc * alpha[:, None] + tl.dot(p.to(value.dtype), value, input_precision=IP)
    return m_new, l_i * alpha + tl.sum(p, 1), acc


@triton.jit
def add_seen(qk, value, scale, m_i, l_i, acc, FIXED: tl.constexpr, IP: tl.constexpr):
    """The same for keys that all rows see. FIXED: the base stays as it is."""
    if not FIXED:
        m_new = tl.maximum(m_i, tl.max(qk, 1) * scale)
        alpha = tl.exp2(m_i - m_new)
        m_i, l_i, acc = m_new, l_i * alpha, acc * alpha[:, None]
    p = tl.exp2(qk * scale - m_i[:, None])
    acc = tl.dot(p.to(value.dtype), value, acc, input_precision=IP)
    return m_i, l_i + tl.sum(p, 1), acc
